"""Every private name of torch that the package uses.

Other modules use torch's private names only through this one, and ``CHECKED`` lists each of them
with the releases in which it was checked and with what happens on a release that lacks it
(``tests/project/test_torch_releases.py`` enforces both).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.torch_version import TorchVersion

RELEASES = ("2.6.0", "2.13.0", "2.14.1", "2.15.0")  # each name below was looked up on these
# The name, as torch has it, and what happens on a release that lacks it.
CHECKED = {
    "torch.distributed.distributed_c10d._new_process_group_helper": (
        "a private group of all ranks is made by new_group; a subgroup is refused"
    ),
    "torch.distributed.distributed_c10d._world": "building an optimizer raises",
    "torch.distributed.distributed_c10d._world.pg_map": "the first step raises",
    "torch.distributed.distributed_c10d._world.pg_names": "a subgroup raises before torch 2.14",
    "torch.distributed.distributed_c10d._world.pg_group_ranks": "building an optimizer raises",
    "torch.distributed.distributed_c10d._set_pg_timeout": (
        "torch.distributed.set_timeout; without both, a timeout that is set later raises"
    ),
    "ProcessGroup.bound_device_id": "building an optimizer raises",
    "ProcessGroup.get_group_store": "before 2.7: the store is looked up in _world.pg_map",
    "ProcessGroup.shutdown": "before 2.7: torch shuts the group down itself",
    "ProcessGroup._get_backend": (
        "the private group has torch's default timeout and not that of the user's group"
    ),
    "Backend.options._timeout": "as ProcessGroup._get_backend",
    "torch.Tensor._version": "an optimizer with master_dtype raises",
    "torch._foreach_copy_": "import raises",
    "torch._foreach_mul_": "import raises",
    "torch._foreach_norm": "import raises",
    "torch._amp_foreach_non_finite_check_and_unscale_": "import raises",
    "torch._utils._flatten_dense_tensors": "import raises",
    "torch.autograd.Variable._execution_engine": "an attached backward raises",
    "torch._C._current_graph_task_id": "an attached forward raises",
    "torch._compile": "as torch._compile._disable_dynamo",
    "torch._compile._disable_dynamo": "torch.compiler.disable, which imports dynamo",
    "torch.autograd.profiler._is_profiler_enabled": "tracing starts in any case",
    "nn.Module._parameters": "a replaced parameter is not noticed",
    "nn.Module._compiled_call_impl": "lazy_gather of a compiled module is accepted",
    "OptimizedModule._orig_mod": "as _compiled_call_impl; stays in the names of parameters",
    "CheckpointWrapper._checkpoint_wrapped_module": "stays in the names of parameters",
    "FullyShardedDataParallel._fsdp_wrapped_module": "stays in the names of parameters",
    "DistributedDataParallel._active_ddp_module": "the message for p.grad is less exact",
    "DistributedDataParallel._comm_hooks": "a foreign communication hook is not noticed",
    "DistributedDataParallel._check_reducer_finalized": (
        "the first step raises; on one rank the first zero_grad"
    ),
    "DistributedDataParallel._has_rebuilt_buckets": "none; it is only written",
    "DistributedDataParallel.reducer._get_zeros_like_grad_buckets": (
        "the message for p.grad is less exact"
    ),
    "DistributedDataParallel.reducer._reset_state": "after a failed backward: raises",
    "DistributedDataParallel._divide_by_initial_world_size": "Join over DDP raises",
    "Joinable._join_config": "the first step or attached backward raises",
    "Optimizer._optimizer_step_pre_hooks": "the first step raises",
    "Optimizer._optimizer_step_post_hooks": "the first step raises",
    "Optimizer.step.hooked": "the user's global step hooks run once for each bucket",
    "Optimizer.step.__wrapped__": "the first step raises",
    "Optimizer._optimizer_state_dict_pre_hooks": "state_dict raises",
    "Optimizer._optimizer_state_dict_post_hooks": "state_dict raises",
    "Optimizer._optimizer_load_state_dict_pre_hooks": "load_state_dict raises",
    "Optimizer._optimizer_load_state_dict_post_hooks": "load_state_dict raises",
    "torch.amp.GradScaler._unscale_grads_": "torch's scaler raises in attached mode",
    "Optimizer._step_supports_amp_scaling": (
        "a scaler that cannot work with this optimizer is not noticed"
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo": "save raises",
    "torch._utils._rebuild_tensor_v2": "save raises",
    "torch._utils._rebuild_tensor_v3": "none; only its name is read",
    "torch.serialization._get_layout": "none; only its name is read",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": "none; only its name is read",
}

# ------------------------------------------------------------------ process groups


def make_process_group(
    name: str, ranks: Sequence[int], backend: str, timeout: timedelta | None
) -> Any:
    """A process group of these global ranks. Only they call this, each with the same name.

    Why not ``new_group``: it takes no name and derives one from counters of the process. With
    ``use_local_synchronization=True`` releases before 2.14 use the number of groups that the
    process has, and later ones a count of the groups that it has made. Both differ between ranks
    of which one is in more groups than another. Since 2.14 such a call also advances the count
    on its members only, so the next ``new_group`` of the whole job would have different names.

    Without the helper a subgroup is refused: it could wait for its members until the timeout.
    """
    world: Any = dist.group.WORLD
    ranks = list(ranks)
    helper = getattr(dist.distributed_c10d, "_new_process_group_helper", None)
    has_everyone = len(ranks) == dist.get_world_size()
    # A default group written in Python makes its own groups (torch 2.13 and later).
    if helper is None or callable(getattr(world, "new_group", None)):
        if not has_everyone:
            raise ValueError(
                f"onecopy cannot make a process group for the global ranks {ranks} with torch "
                f"{torch.__version__}: torch.distributed.distributed_c10d has no "
                "_new_process_group_helper, or the default process group makes its own groups. "
                "Pass process_group=None, or use a torch release from 2.6 to 2.15"
            )
        options: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        return dist.new_group(
            ranks, timeout=timeout, backend=backend, group_desc=_DESCRIPTION, **options
        )
    if timeout is None:
        timeout = dist.constants.default_pg_timeout
    device = world.bound_device_id
    with contextlib.nullcontext() if has_everyone else _without_split(world):
        group, _ = helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(backend),
            store_of(world),
            name,
            timeout=timeout,
            device_id=device,
            group_desc=_DESCRIPTION,
        )
    _world().pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    if not has_everyone and _NAMES_DEPEND_ON_KNOWN_GROUPS:
        del _world().pg_names[group]
        _unlisted.add(group)
    return group


_DESCRIPTION = "onecopy"

# Before 2.14 the name of a group made with use_local_synchronization=True depends on the number of
# groups in _world.pg_names. Only its members know a group of ours. If it were listed there, two
# ranks of which one is a member would give the user's next such group different names, and hang.
_NAMES_DEPEND_ON_KNOWN_GROUPS = TorchVersion(torch.__version__) < "2.14"
_unlisted: weakref.WeakSet[Any] = weakref.WeakSet()


def destroy_process_group(group: Any) -> None:
    """Destroy a group of :func:`make_process_group`, unless torch has destroyed it."""
    if is_process_group_alive(group):
        if group in _unlisted:
            _world().pg_names[group] = group.group_name
        dist.destroy_process_group(group)
    elif group in _unlisted and hasattr(group, "shutdown"):  # since 2.7
        # The default group was destroyed, which shuts down the groups in _world.pg_names.
        group.shutdown()


def is_process_group_alive(group: Any) -> bool:
    """Whether torch knows this group: ``_world.pg_map`` lists all until they are destroyed."""
    return group in _world().pg_map


@contextlib.contextmanager
def _without_split(world: Any) -> Iterator[None]:
    """In this context NCCL does not split the communicator of the default group.

    Why: torch splits it if the default group is bound to a device. A split is a collective of all
    ranks of the default group, and only the members of the new group are here.
    """
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def store_of(group: Any) -> Any:
    """The store of a group, or None. ``get_group_store`` is there since 2.7; before that
    ``_world.pg_map`` has the store of each group."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return _world().pg_map.get(group, (None, None))[1]


def timeout_of(group: Any) -> timedelta | None:
    """The timeout of a group: ``ProcessGroup._get_backend(device).options._timeout``. None, which
    stands for torch's default, if any of these is missing or a backend has no options."""
    device = torch.device(dist.get_backend_config(group).partition(":")[0])
    get_backend = getattr(group, "_get_backend", None)
    options = None if get_backend is None else getattr(get_backend(device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of a group; ``torch.distributed.set_timeout`` is there since 2.14."""
    set_it: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_it(timeout, group)


def _world() -> Any:
    """``distributed_c10d._world``, the tables of all groups of the process. Without it no
    optimizer can be built: AttributeError."""
    return dist.distributed_c10d._world


# ------------------------------------------------------------------ tensors

foreach_copy_: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_
foreach_mul_: Callable[[list[torch.Tensor], torch.Tensor], Any] = torch._foreach_mul_
foreach_norm: Callable[..., Sequence[torch.Tensor]] = torch._foreach_norm
flatten_dense_tensors: Callable[[Sequence[torch.Tensor]], torch.Tensor]
flatten_dense_tensors = torch._utils._flatten_dense_tensors

foreach_unscale_: Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], Any]
foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


def version_of(tensor: torch.Tensor) -> int:
    """How many times autograd has seen the tensor being written to."""
    return tensor._version


# ------------------------------------------------------------------ autograd, dynamo, profiler


def queue_callback(callback: Callable[[], None]) -> None:
    """Run this when the backward of this thread has ended. RuntimeError if there is none."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return bool(torch._C._current_graph_task_id() != _NO_BACKWARD)


_NO_BACKWARD = -1  # the id of autograd's current task

# Why not torch.compiler.disable: it imports all of dynamo.
disable_dynamo: Callable[[Any], Any] = (
    getattr(getattr(torch, "_compile", None), "_disable_dynamo", None) or torch.compiler.disable
)


def is_profiling() -> bool:
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", False))


# ------------------------------------------------------------------ modules

# Children of modules that wrap another one.
WRAPPED_MODULES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def own_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor | None] | None:
    """The table of the module's own parameters, or None: that of a TorchScript module is in
    C++."""
    parameters = module.__dict__.get("_parameters")
    return parameters if isinstance(parameters, dict) else None


def is_compiled(module: torch.nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


# ------------------------------------------------------------------ DistributedDataParallel, Join


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    return bool(getattr(ddp, "_comm_hooks", ()))


def is_in_forward_of_ddp() -> bool:
    """Whether a ``DistributedDataParallel`` is calling its module."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


def is_unfinished(ddp: DistributedDataParallel) -> bool:
    """Whether gradients have come to DDP whose backward has not come to its end."""
    check: Any = ddp._check_reducer_finalized
    try:
        check()
    except RuntimeError:
        return True
    return False


def reduced_parameters(ddp: Any) -> list[torch.Tensor]:
    """Those that were trained when DDP was built. For errors only: DDP makes zeros of the size of
    all gradients to tell."""
    try:
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
    except (AttributeError, RuntimeError):  # not in this release, or too little memory
        return []
    return [param for bucket in buckets for param in bucket.parameters()]


def restart_reducer(ddp: Any) -> None:
    """Let DDP go on after a backward that raised. To be called on all ranks: it orders its buckets
    anew."""
    ddp._has_rebuilt_buckets = False
    ddp.reducer._reset_state()


def divides_by_all_ranks(ddp: Any) -> bool:
    """Whether DDP averages over all ranks, also inside of Join."""
    return bool(not join_config(ddp).enable or ddp._divide_by_initial_world_size)


def join_config(joinable: Joinable) -> Any:
    """``enable``, ``is_first_joinable`` and more: what ``Join`` tells those that take part."""
    return joinable._join_config


def leave_join(joinable: Joinable) -> None:
    """``Join`` leaves its context switched on when it ends."""
    joinable._join_config = joinable._join_config._replace(enable=False)


# ------------------------------------------------------------------ optimizers

Hooks = Mapping[int, Callable[..., Any]]


def step_hooks(optimizer: Optimizer) -> tuple[Hooks, Hooks]:
    """The hooks of one optimizer before and after a step."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def step_without_hooks(optimizer: Optimizer) -> Callable[..., Any]:
    """``optimizer.step`` without the wrapper that torch puts around it for hooks and profiling.

    Why: the wrapper runs the *global* step hooks, which belong to the user's one step and not to
    the steps that we take inside it. Hooks of the instance itself are kept.
    """
    function: Any = type(optimizer).step
    if getattr(function, "hooked", False):
        function = function.__wrapped__

    def step(*args: Any, **kwargs: Any) -> Any:
        before, after = step_hooks(optimizer)
        for pre_hook in before.values():
            changed = pre_hook(optimizer, (optimizer, *args), kwargs)
            if changed is not None:
                (_, *args), kwargs = changed
        result = function(optimizer, *args, **kwargs)
        for post_hook in after.values():
            post_hook(optimizer, (optimizer, *args), kwargs)
        return result

    return step


def state_dict_hooks(optimizer: Optimizer) -> tuple[Hooks, Hooks]:
    return optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks


def load_state_dict_hooks(optimizer: Optimizer) -> tuple[Hooks, Hooks]:
    return (
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    )


def is_table_of_hooks(name: str) -> bool:
    """Whether an attribute of an optimizer has this name because it is a table of hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


# The attribute that every GradScaler asks for before a step.
ASKED_BY_GRAD_SCALER = "_step_supports_amp_scaling"


class GradScalerBase(torch.amp.GradScaler):
    """torch's scaler, for subclasses that unscale the gradients of some optimizers themselves."""

    # Unscales the gradients of an optimizer, given the inverse scale and whether they may be of
    # float16. 1.0 if one is not finite, else 0.0; None to leave it to torch.
    unscaled: Callable[[Optimizer, torch.Tensor, bool], torch.Tensor | None]

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        result = self.unscaled(optimizer, inv_scale, allow_fp16)
        if result is None:
            return dict(super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16))
        return {found_inf.device: torch.maximum(found_inf, result.to(found_inf))}


# ------------------------------------------------------------------ checkpoints

# Names that a checkpoint of torch's may hold. The safe readers know them and look nothing up.
STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
GET_LAYOUT = ("torch.serialization", "_get_layout")
MEMORY_FORMAT = ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
REBUILD_TENSOR = (
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
)


def rebuild_tensor() -> Any:
    """The function by which a pickle of ``torch.save`` makes a tensor."""
    return torch._utils._rebuild_tensor_v2


def storage_info(file: str, offset: int, length: int) -> Any:
    """Where DCP finds an entry."""
    # Here, because it imports half of torch.distributed, which training does not need.
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)
