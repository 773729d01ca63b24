"""How a workload is trained: DDP, torch's class, FSDP2, DeepSpeed, fairscale, and ours.

A :class:`Method` is a name and a function that builds a :class:`Training`. It runs in processes of
its own, so peers are imported there alone, and what they do to a process harms nobody else. Each is
set up as its documentation says, with the same fused AdamW.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from workloads import ADAMW, MUON, Batch, Workload

DDP, TORCHS = "DDP", "torch, bucket views"  # what the others are compared with


@dataclass(slots=True)
class Training:
    """A model under training, as the benchmark drives it."""

    forward: Callable[[Batch], Tensor]
    backward: Callable[[Tensor], None]
    step: Callable[[], None]  # and clear the gradients
    state_bytes: Callable[[], int]  # of the optimizer, on this rank
    gradient_bytes: Callable[[], int]  # between backward and step, on this rank
    finish: Callable[[], None] = lambda: None  # what `step` leaves under way


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    project: str
    build: Callable[[Workload], Training]
    keeps_whole_parameters: bool = True

    @property
    def modules(self) -> Sequence[str]:
        """What it imports: not a part of what building takes."""
        return {
            "torch": ("torch.distributed.optim", "torch.distributed.fsdp"),
            "fairscale": ("fairscale.nn.data_parallel", "fairscale.optim.oss"),
        }.get(self.project, (self.project,))


def bytes_behind(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind these tensors, views of the same memory counted once."""
    storages = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


# ---------------------------------------------------------------------- common parts


def tensors_of(*optimizers: Optimizer) -> Iterable[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def gradients_of(module: nn.Module) -> Iterable[Tensor]:
    return (param.grad for param in module.parameters() if param.grad is not None)


def plain_training(
    module: nn.Module,
    optimizers: Sequence[Any],
    holders: Sequence[Any] | None = None,
    clears_by_module: bool = False,
) -> Training:
    """A module and its optimizers, driven as usual. ``holders`` have the state, if not they do."""
    buckets = bucket_bytes(module)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
        for cleared in [module] if clears_by_module else optimizers:
            cleared.zero_grad()

    return Training(
        forward=lambda batch: module(*batch),
        backward=lambda loss: loss.backward(),
        step=step,
        state_bytes=lambda: bytes_behind(tensors_of(*(holders or optimizers))),
        gradient_bytes=lambda: bytes_behind(gradients_of(module)) + buckets,
    )


def one_per_class(
    workload: Workload, module: nn.Module, build: Callable[..., Any], **adamw: Any
) -> list[Any]:
    """``build(parameters, class, **options)`` for Muon's parameters, if any, and for AdamW's."""
    matrices, rest = workload.split(module)
    made = [build(matrices, torch.optim.Muon, **MUON)] if matrices else []
    return [*made, build(rest, AdamW, **(adamw or ADAMW))]


def unsharded(params: list[nn.Parameter], cls: Any, **options: Any) -> Optimizer:
    made: Optimizer = cls(params, **options)
    return made


def under_ddp(workload: Workload, views: bool = False) -> DistributedDataParallel:
    """No method sends buffers around in every forward, so DDP does not, either."""
    return DistributedDataParallel(
        workload.model(), gradient_as_bucket_view=views, broadcast_buffers=False
    )


def bucket_bytes(module: nn.Module) -> int:
    """Of DDP's buckets, if they are memory beside the gradients."""
    if not isinstance(module, DistributedDataParallel) or module.gradient_as_bucket_view:
        return 0
    return parameter_bytes(module)


def parameter_bytes(module: nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in module.parameters())


# ---------------------------------------------------------------------- torch


def ddp(workload: Workload, views: bool = False, **adamw: Any) -> Training:
    module = under_ddp(workload, views)
    return plain_training(module, one_per_class(workload, module.module, unsharded, **adamw))


def torchs_class(workload: Workload, views: bool, gradient_views: bool = False) -> Training:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def build(params: list[nn.Parameter], cls: Any, **options: Any) -> Any:
        return ZeroRedundancyOptimizer(params, cls, parameters_as_bucket_view=views, **options)

    module = under_ddp(workload, gradient_views)
    made = one_per_class(workload, module.module, build)
    return plain_training(module, made, [optimizer.optim for optimizer in made])


def fsdp2(workload: Workload, reshard: bool) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = workload.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in workload.units(module):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    # None: as its documentation advises, the root stays gathered, for backward begins with it.
    fully_shard(module, mesh=mesh, reshard_after_forward=None if reshard else False)
    return plain_training(module, one_per_class(workload, module, unsharded))


# ---------------------------------------------------------------------- peers


# By default half a billion elements, so that a model of this size would be reduced when backward is
# over. As large as DDP's.
DEEPSPEED_BUCKET = 25 * 2**20 // 4


def deepspeed(workload: Workload, stage: int) -> Training:
    import deepspeed

    module = workload.model()
    matrices, rest = workload.split(module)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": DEEPSPEED_BUCKET,
            "allgather_bucket_size": DEEPSPEED_BUCKET,
        },
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # the others do not clip, either
    }
    optimizer = AdamW(rest, **ADAMW)
    if matrices:  # torch's Muon would get flat parts, so its own: another implementation
        for param in module.parameters():
            param.use_muon = any(param is matrix for matrix in matrices)  # type: ignore[attr-defined]
        rates = {"lr": MUON["lr"], "muon_lr": MUON["lr"], "adam_lr": ADAMW["lr"]}
        config["optimizer"] = {"type": "Muon", "params": rates}
        optimizer = None
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        model_parameters=module.parameters() if optimizer is None else None,
        config=config,
    )
    zero = engine.optimizer

    def held_gradients() -> Iterable[Tensor]:
        yield from gradients_of(module)
        for kept in getattr(zero, "averaged_gradients", {}).values():
            yield from (tensor for tensor in kept or () if tensor is not None)

    def state() -> Iterable[Tensor]:
        yield from tensors_of(zero.optimizer)
        yield from zero.single_partition_of_fp32_groups  # a copy of this rank's parameters

    return Training(
        forward=lambda batch: engine(*batch),
        backward=engine.backward,
        step=engine.step,
        state_bytes=lambda: bytes_behind(state()),
        gradient_bytes=lambda: bytes_behind(held_gradients()),
    )


def fairscale(workload: Workload) -> Training:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

    module = workload.model()
    made = one_per_class(workload, module, OSS)
    wrapped = ShardedDataParallel(module, made, broadcast_buffers=False)
    holders = [optimizer.optim for optimizer in made]
    # Its buckets are not cleared by the optimizers' own zero_grad: old gradients would be added.
    return plain_training(wrapped, made, holders, clears_by_module=True)


# ---------------------------------------------------------------------- ours


def ours(workload: Workload, module: nn.Module, views: bool = True, **attach: Any) -> Training:
    """Drop-in; or attached, if there are options for that."""
    from onecopy import ZeroRedundancyOptimizer

    matrices, rest = workload.split(module)
    groups: list[dict[str, Any]] = [{"params": rest}]
    if matrices:
        groups.insert(0, {"params": matrices, "optimizer_class": torch.optim.Muon, **MUON})
    optimizer = ZeroRedundancyOptimizer(groups, AdamW, parameters_as_bucket_view=views, **ADAMW)
    training = plain_training(module, [optimizer])
    if attach:
        optimizer.attach(module, **attach)
        # DDP keeps its buckets, whether or not gradients are views of them.
        is_under_ddp = isinstance(module, DistributedDataParallel)
        buckets = parameter_bytes(module) if is_under_ddp else 0
        training.gradient_bytes = lambda: optimizer.memory_report().gradients + buckets
        training.finish = optimizer.wait
    return training


def ours_through_tcp(workload: Workload) -> Training:
    """As between hosts: else ranks on one host read each other's memory."""
    os.environ["ONECOPY_SHARED_MEMORY"] = "0"
    return ours(workload, workload.model(), **EAGER)


# ---------------------------------------------------------------------- all of them

EAGER: dict[str, Any] = {"lazy_gather": False}
LAZY: dict[str, Any] = {"lazy_gather": True}
NARROW: dict[str, Any] = {"reduce_dtype": torch.bfloat16}

OURS = (
    Method("onecopy", "onecopy", lambda w: ours(w, under_ddp(w))),
    Method("onecopy, no bucket views", "onecopy", lambda w: ours(w, under_ddp(w), views=False)),
    Method("onecopy, both kinds of views", "onecopy", lambda w: ours(w, under_ddp(w, views=True))),
    Method("onecopy attached to DDP", "onecopy", lambda w: ours(w, under_ddp(w), **EAGER)),
    Method(
        "onecopy attached to DDP, bucket views",
        "onecopy",
        lambda w: ours(w, under_ddp(w, views=True), **EAGER),
    ),
    Method("onecopy attached", "onecopy", lambda w: ours(w, w.model(), **EAGER)),
    Method("onecopy attached, all through TCP", "onecopy", ours_through_tcp),
    Method("onecopy attached, lazy gather", "onecopy", lambda w: ours(w, w.model(), **LAZY)),
    Method("onecopy attached, bf16 wire", "onecopy", lambda w: ours(w, w.model(), **NARROW)),
)

METHODS = {
    method.name: method
    for method in (
        Method(DDP, "torch", ddp),
        Method("DDP, bucket views", "torch", lambda w: ddp(w, views=True)),
        Method("DDP, foreach AdamW", "torch", lambda w: ddp(w, lr=ADAMW["lr"], foreach=True)),
        Method("torch", "torch", lambda w: torchs_class(w, views=False)),
        Method(TORCHS, "torch", lambda w: torchs_class(w, views=True)),
        Method("torch, both kinds of views", "torch", lambda w: torchs_class(w, True, True)),
        Method("FSDP2", "torch", lambda w: fsdp2(w, reshard=True), keeps_whole_parameters=False),
        Method(
            "FSDP2, no resharding",
            "torch",
            lambda w: fsdp2(w, reshard=False),
            keeps_whole_parameters=False,
        ),
        Method("DeepSpeed ZeRO-1", "deepspeed", lambda w: deepspeed(w, stage=1)),
        Method("DeepSpeed ZeRO-2", "deepspeed", lambda w: deepspeed(w, stage=2)),
        Method("fairscale OSS", "fairscale", fairscale),
        *OURS,
    )
}
