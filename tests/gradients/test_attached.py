"""Attached mode against DDP with the unsharded class, on other data on every rank."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from attached import EVERY_CLASS, EVERY_FEED, AttachedTwins
from harness import World, distributed
from inside import plan_of, reducer_of, staged_bytes, traffic_of
from models import (
    SMALL_BUCKETS,
    BranchNet,
    ConvNet,
    MixedNet,
    Mlp,
    TiedNet,
    assert_same_on_all_ranks,
    generator,
)
from test_bit_equality import CASES, weights_and_biases
from test_lazy_gather import Delays
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, AdamW
from torch.utils.checkpoint import checkpoint

from onecopy import RanksDisagree, ZeroRedundancyOptimizer
from onecopy.planning.sizes import SHARED_BUFFERS

pytestmark = pytest.mark.also_c10d


@distributed(1, 2, 3, 4)
@EVERY_FEED
@EVERY_CLASS
def test_every_elementwise_class(world: World, hooks: str, case: str) -> None:
    torch.manual_seed(0)
    cls, options = CASES[case]
    twins = AttachedTwins(world, Mlp(), cls, hooks, groups=weights_and_biases, **options)
    assert len(plan_of(twins.optimizer).buckets) > 1 or world.size == 1
    twins.train(4)


@distributed(1, 2, 3, 4)
@EVERY_FEED
@pytest.mark.parametrize("model", [ConvNet, MixedNet, TiedNet])
def test_models(world: World, hooks: str, model: Any) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, model(), AdamW, hooks, lr=0.01)
    # In bfloat16 one rounding of a gradient shows in all that follows from it.
    twins.train(1 if model is MixedNet and world.size > 2 else 4)


@distributed(2, 3)
@EVERY_FEED
@pytest.mark.parametrize("bucket_mb", [1e-5, 25])
@pytest.mark.parametrize("flat", [False, True])
def test_any_size_of_bucket(world: World, hooks: str, bucket_mb: float, flat: bool) -> None:
    torch.manual_seed(0)
    zero = {"bucket_mb": bucket_mb, "parameters_as_bucket_view": flat}
    AttachedTwins(world, Mlp(), AdamW, hooks, zero=zero, lr=0.01).train(3)


@distributed(1, 2, 3)
@EVERY_FEED
def test_classes_that_need_whole_tensors(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, ConvNet(), torch.optim.Adafactor, hooks, lr=0.01)
    twins.train(3)
    if hasattr(torch.optim, "Muon"):
        model = nn.Sequential(nn.Linear(7, 9, bias=False), nn.Linear(9, 5, bias=False))
        model.batch = lambda seed: torch.randn(4, 7, generator=generator(*seed))
        muon = AttachedTwins(world, Loss(model), torch.optim.Muon, hooks, lr=0.01)
        muon.train(3, rtol=1e-2, atol=1e-2) if world.size > 2 else muon.train(3)


class Loss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.batch = inner.batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


@pytest.mark.of_messages
@distributed(2, timeout=60, pg_timeout=10)
@EVERY_FEED
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_gathers_lend_the_memory_that_gradients_have_left(
    world: World, hooks: str, reduce_dtype: torch.dtype | None
) -> None:
    """If they are of the same dtype, and while the optimizer is attached. Nobody looks at gradients
    before the step, so that it begins while the last buckets are under way."""
    torch.manual_seed(0)
    zero = {"parameters_as_bucket_view": True, "bucket_mb": SMALL_BUCKETS / 4}
    attach = {"reduce_dtype": reduce_dtype}
    twins = AttachedTwins(world, Mlp(), SGD, hooks, zero=zero, attach=attach, lr=0.1)
    optimizer = twins.optimizer
    assert len(plan_of(optimizer).buckets) > 2 * SHARED_BUFFERS
    for _ in range(3):
        twins.backward()
        twins.step()
        twins.assert_same(**({} if reduce_dtype is None else {"rtol": 1e-2, "atol": 1e-2}))
    assert (staged_bytes(optimizer) == 0) == (reduce_dtype is None)
    optimizer.detach()
    for param in twins.model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert staged_bytes(optimizer) > 0
    optimizer.assert_replicas_equal()


@pytest.mark.of_messages
@distributed(2, timeout=60, pg_timeout=10)
def test_a_rank_without_a_part_of_a_bucket_reads_the_gradients_in_its_memory(world: World) -> None:
    """The step begins while the last buckets are under way, in memory that the first all-gathers
    use. Their owners wait until the owners of the last ones have read the gradients there."""
    torch.manual_seed(0)
    narrow = [nn.Linear(4, 4, bias=False) for _ in range(8)]
    model = nn.Sequential(nn.Linear(16, 4, bias=False), *narrow)
    model.batch = lambda seed: torch.randn(3, 16, generator=generator(*seed))
    zero = {"partition": "whole", "bucket_mb": 1e-5}
    twins = AttachedTwins(world, Loss(model), SGD, "module", zero=zero, lr=0.1)
    plan = plan_of(twins.optimizer)
    first, last = ([bool([*plan.shards_in(b, rank)]) for rank in range(2)] for b in (0, 8))
    assert (len(plan.buckets), SHARED_BUFFERS) == (9, 4)  # so bucket 8 left from bucket 0's memory
    assert first != last
    for _ in range(2):
        twins.backward()
        twins.step()
        twins.assert_same()


# ---------------------------------------- unused parameters -------------------------------------


def alternating(seed: Any) -> tuple[bool, bool]:
    rank, step = seed
    return (rank + step) % 2 == 0, step % 3 == 0


@distributed(1, 2, 3, 4)
@EVERY_FEED
def test_branches_that_only_some_ranks_take(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(
        *(world, BranchNet(alternating), AdamW, hooks),
        ddp={"find_unused_parameters": True},
        lr=0.01,
        weight_decay=0.1,  # moves a parameter whose gradient is zero, but not one that has none
    )
    twins.train(6)


@distributed(2, 3)
@pytest.mark.parametrize(
    "ddp",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "find_unused_parameters": True},
        {"bucket_cap_mb": 0.0001},
    ],
    ids="-".join,
)
def test_kinds_of_ddp(world: World, ddp: dict[str, Any]) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, TiedNet(), AdamW, "ddp", ddp=ddp, lr=0.01)
    twins.train(5)


# ---------------------------------------- accumulation ----------------------------------------


@distributed(1, 2, 3)
@EVERY_FEED
def test_no_sync_accumulates_on_this_rank(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1, momentum=0.9)
    for _ in range(3):
        twins.backward(synced=False)
        twins.backward(synced=False)
        twins.backward()
        twins.assert_same_gradients()
        twins.step()
        twins.assert_same()


@pytest.mark.smoke
@distributed(1, 2, 3)
@EVERY_FEED
def test_several_backwards_accumulate_on_the_shard(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1, momentum=0.9)
    for _ in range(3):
        twins.backward()
        twins.backward()
        twins.step()
        twins.assert_same(rtol=1e-5, atol=1e-6)


@distributed(1, 2)
@EVERY_FEED
def test_no_sync_restores_what_was_before_in_every_case(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    with twins.no_sync():
        with pytest.raises(ZeroDivisionError), twins.no_sync():
            raise ZeroDivisionError
        twins.backward()
        assert all(param.grad is not None for param in twins.model.parameters())
    twins.backward()
    twins.assert_same_gradients()
    twins.step()
    twins.assert_same()


@distributed(1, 2)
@EVERY_FEED
def test_a_parameter_used_inside_no_sync_only(world: World, hooks: str) -> None:
    """Its gradient is on this rank when the bucket leaves that it is in."""
    torch.manual_seed(0)
    takes = iter([(True, False)] * 2 + [(False, True)] * 2)
    twins = AttachedTwins(
        *(world, BranchNet(lambda _: next(takes)), SGD, hooks),
        ddp={"find_unused_parameters": True},
        lr=0.1,
    )
    # DDP leaves such a gradient unaveraged if nobody uses the parameter in the last backward, so
    # the reference is made by hand.
    losses = []
    for synced in (False, True):
        batch = twins.batch()
        with contextlib.nullcontext() if synced else twins.optimizer.no_sync():
            models.hooks(twins.ddp, batch).backward()
        losses.append(batch)
    for batch in losses:
        models.hooks(twins.plain_model, batch).backward()
    models.average_gradients(twins.plain_model.parameters())
    twins.assert_same_gradients()


# ---------------------------------------- zero_grad, detach ------------------------------------


@distributed(1, 2)
@EVERY_FEED
@pytest.mark.parametrize("who", ["optimizer", "ddp", "module"])
def test_whoever_clears_the_gradients_clears_the_shards(world: World, hooks: str, who: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1, momentum=0.9)
    twins.backward()
    {"optimizer": twins.optimizer, "ddp": twins.ddp, "module": twins.model}[who].zero_grad()
    twins.plain.zero_grad()
    assert twins.optimizer.grad_norm() == 0
    twins.train(2)


@distributed(1, 2, 3)
@EVERY_FEED
def test_a_step_uses_up_the_gradients(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    for _ in range(3):
        twins.plain.zero_grad()
        twins.backward()  # without zero_grad of ours
        twins.plain.step()
        twins.optimizer.step()
        twins.assert_same()


@distributed(1, 2, 3)
def test_detach_and_attach_again(world: World) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), AdamW, "ddp", lr=0.01)
    twins.train(2)
    twins.optimizer.detach()
    for _ in range(2):  # as drop-in, and DDP averages again
        twins.backward()
        assert all(param.grad is not None for param in twins.model.parameters())
        twins.step()
        twins.assert_same()
    twins.optimizer.attach(twins.ddp)
    twins.train(2)


@distributed(1, 2)
def test_a_bare_module_is_as_before_after_detach(world: World) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), AdamW, "module", lr=0.01)
    twins.train(1)
    twins.optimizer.detach()
    assert "zero_grad" not in twins.model.__dict__
    twins.model(twins.batch()).backward()
    assert all(param.grad is not None for param in twins.model.parameters())
    copy.deepcopy(twins.optimizer)


@distributed(2, 3)
def test_a_bare_module_starts_with_what_rank_0_has(world: World) -> None:
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(world.rank)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    models.assert_same_on_all_ranks(model)
    assert (model[1].running_mean == 0).all()


# ---------------------------------------- graphs of every form ----------------------------------


class Checkpointed(TiedNet):
    """Two checkpointed parts that share a weight."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = checkpoint(self._mix, x, use_reentrant=self.reentrant)
        logits = self.head(x[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.project(torch.tanh(self.mix(x)).chunk(3, dim=-1)[0])


@distributed(1, 2, 3)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("hooks", ["module", "ddp"])
def test_activation_checkpointing(world: World, hooks: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    ddp = {"static_graph": True}  # without it DDP itself refuses a weight that is used twice
    twins = AttachedTwins(world, Checkpointed(reentrant), AdamW, hooks, ddp=ddp, lr=0.01)
    # Two parts of one gradient, averaged one by one, round differently.
    twins.train(4, **({"rtol": 1e-4, "atol": 1e-5} if reentrant else {}))


@distributed(1, 2)
def test_a_loss_that_is_not_made_of_the_modules_output(world: World) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, "module", lr=0.1)
    batch = twins.batch()
    twins.plain_ddp(batch).backward()
    inner = twins.model
    inner.second(torch.tanh(inner.norm(inner.first(batch)))).square().mean().backward()
    twins.assert_same_gradients()
    twins.step()
    twins.train(2)


@distributed(1, 2)
@EVERY_FEED
def test_a_gradient_penalty_is_no_backward_of_ours(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    for _ in range(2):
        batch = twins.batch().requires_grad_()
        for module in (twins.plain_ddp, twins.ddp):
            loss = module(batch)
            (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
            (loss + slope.square().sum()).backward()
        twins.assert_same_gradients()
        twins.step()
        twins.assert_same()


Trained = tuple[Any, torch.optim.Optimizer]  # a model and its optimizer


def train_by_hand(world: World, step: int, attached: Trained, plain: Trained) -> None:
    """One step of both, and compare. For what DDP cannot follow."""
    for model, _ in (attached, plain):
        model(attached[0].batch(models.seed_of(world, step))).backward()
    models.average_gradients(plain[0].parameters())
    for _, optimizer in (attached, plain):
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(attached[0].parameters(), plain[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@distributed(1, 2)
def test_a_backward_inside_forward(world: World) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()
            self.outer = nn.Linear(5, 3)
            self.batch = self.inner.batch

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner(x).backward()
            return self.outer(x[:, :5]).square().mean()

    torch.manual_seed(0)
    model = Inner()
    plain = copy.deepcopy(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    reference = SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        train_by_hand(world, step, (model, optimizer), (plain, reference))


# ---------------------------------------- parameters that change -------------------------------


@distributed(1, 2, 3)
def test_freezing_and_unfreezing(world: World) -> None:
    torch.manual_seed(0)
    model = Mlp()
    model.second.requires_grad_(False)
    plain = copy.deepcopy(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.9)
    optimizer.attach(model)
    reference = SGD(plain.parameters(), lr=0.1, momentum=0.9)

    for step, second, first in (
        (0, False, True),
        (1, True, True),
        (2, True, False),
        (3, True, True),
    ):
        for each in (model, plain):
            each.second.requires_grad_(second)
            each.first.requires_grad_(first)
        train_by_hand(world, step, (model, optimizer), (plain, reference))
        train_by_hand(world, step + 10, (model, optimizer), (plain, reference))


@distributed(1, 2, 3)
def test_a_group_that_is_added_while_attached(world: World) -> None:
    torch.manual_seed(0)
    model = Mlp()
    plain = copy.deepcopy(model)
    model.second.requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer(
        [*model.first.parameters(), *model.norm.parameters()], SGD, lr=0.1
    )
    optimizer.attach(model)
    model.second.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.2})
    reference = SGD(
        [
            {"params": [*plain.first.parameters(), *plain.norm.parameters()]},
            {"params": list(plain.second.parameters()), "lr": 0.2},
        ],
        lr=0.1,
    )
    for step in range(3):
        train_by_hand(world, step, (model, optimizer), (plain, reference))


# ---------------------------------------- subgroups, dtypes, memory ----------------------------


@distributed(4)
@EVERY_FEED
def test_a_subgroup_whose_ranks_are_others(world: World, hooks: str) -> None:
    group = dist.new_group([1, 3])
    if world.rank in (1, 3):
        torch.manual_seed(0)
        twins = AttachedTwins(
            *(world, Mlp(), AdamW, hooks),
            ddp={"process_group": group},
            zero={"process_group": group},
            lr=0.01,
        )
        for _ in range(3):
            twins.backward()
            twins.step()
            models.assert_same_parameters(twins.model, twins.plain_model)


@distributed(1, 2, 4)
@EVERY_FEED
def test_bfloat16_gradients_are_summed_in_float32(world: World, hooks: str) -> None:
    model = nn.Linear(5, 4, bias=False, dtype=torch.bfloat16)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
    module = DistributedDataParallel(model) if hooks == "ddp" else model
    optimizer.attach(module, reduce_dtype=torch.float32)
    # 256 + 1 + 1 + 1 is 256 in bfloat16, step by step, and 259, rounded 260, in float32.
    value = 256.0 if world.rank == 0 else 1.0
    module(torch.full((1, 5), value, dtype=torch.bfloat16)).sum().backward()
    expected = torch.tensor((256.0 + world.size - 1) / world.size).bfloat16()
    assert (optimizer.full_grad(model.weight) == expected).all()


@distributed(2, 3)
@EVERY_FEED
def test_a_narrow_wire_halves_the_bytes(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    sent = {}
    for dtype in (None, torch.bfloat16):
        twins = AttachedTwins(
            world, Mlp(), SGD, hooks, zero={"bucket_mb": 25}, attach={"reduce_dtype": dtype}, lr=0.1
        )
        before = traffic_of(twins.optimizer).bytes
        twins.backward()
        twins.optimizer.grad_norm()
        sent[dtype] = traffic_of(twins.optimizer).bytes - before
        for mine, theirs in zip(
            twins.model.parameters(), twins.plain_model.parameters(), strict=True
        ):
            full = twins.optimizer.full_grad(mine)
            assert full.dtype == torch.float32
            torch.testing.assert_close(full, theirs.grad, rtol=1e-2, atol=1e-3)
    gradients = 4 * sum(p.numel() for p in Mlp().parameters())
    assert sent[None] - sent[torch.bfloat16] == pytest.approx(
        gradients / 2 * (world.size - 1) / world.size, abs=2 * world.size
    )


@distributed(2, 4)
def test_a_bare_modules_gradients_take_their_share_of_memory(world: World) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, bucket_mb=0.016, lr=0.1)
    optimizer.attach(model)
    model(torch.randn(2, 64)).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    full = 16 * 64 * 64 * 4
    bucket = 64 * 64 * 4
    report = optimizer.memory_report()
    assert full / world.size <= report.gradients <= full / world.size + 1024
    assert report.staging <= 3 * 3 * bucket + 1024
    assert report.ddp_buckets == 0


# ---------------------------------------- errors ----------------------------------------


@distributed(1, 2)
def test_what_cannot_be_attached_says_why(world: World) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with pytest.raises(TypeError, match="takes a module, got str"):
        optimizer.attach("model")
    for dtype in (torch.int32, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="reduce_dtype must be a floating point dtype of 16"):
            optimizer.attach(model, reduce_dtype=dtype)
    with pytest.raises(ValueError, match=r"does not have: 1\.weight"):
        optimizer.attach(nn.Sequential(model, nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"not in the module: parameter 2"):
        optimizer.attach(model.first)
    hooked = DistributedDataParallel(model)
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="communication hook already"):
        optimizer.attach(hooked)
    with pytest.raises(RuntimeError, match="not attached"):
        optimizer.detach()
    with pytest.raises(RuntimeError, match="attach"):
        optimizer.no_sync()
    optimizer.attach(model)
    with pytest.raises(RuntimeError, match="attached already"):
        optimizer.attach(model)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="not a parameter"):
        optimizer.full_grad(torch.zeros(1))


@distributed(4)
def test_a_ddp_of_another_process_group_is_refused(world: World) -> None:
    pair = dist.new_group([0, 1] if world.rank < 2 else [2, 3], use_local_synchronization=True)
    model = Mlp()
    ddp = DistributedDataParallel(model, process_group=pair)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with pytest.raises(ValueError, match="same process_group"):
        optimizer.attach(ddp)


@distributed(2)
def test_ranks_that_attach_differently_are_told(world: World) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with pytest.raises(RanksDisagree, match="reduce_dtype"):
        optimizer.attach(model, reduce_dtype=torch.bfloat16 if world.rank else None)
    optimizer.attach(model)


# ---------------------------------------- a review ----------------------------------------


def fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError


@distributed(1, 2)
@pytest.mark.parametrize("clears", [False, True])
def test_an_exception_in_backward_is_not_the_end(world: World, clears: bool) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, "module", zero={"bucket_mb": 25}, lr=0.1)
    twins.train(1)
    handle = twins.model.first.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        twins.model(twins.batch()).backward()
    handle.remove()
    with pytest.raises(RuntimeError, match=r"has not come to its end.*zero_grad"):
        twins.optimizer.step()
    if clears:
        twins.optimizer.zero_grad()
    for param in twins.model.parameters():
        param.grad = None
    twins.train(2)


@distributed(1, 2, 3)
@EVERY_FEED
@pytest.mark.parametrize("where", ["everywhere", "on one rank"])
def test_a_gradient_that_a_hook_takes_away_is_none(world: World, hooks: str, where: str) -> None:
    twins = AttachedTwins(
        world, Mlp(), AdamW, hooks, ddp={"find_unused_parameters": True}, lr=0.1, weight_decay=0.5
    )
    twins.optimizer.detach()

    def take_away(param: torch.Tensor) -> None:
        if where == "everywhere" or world.rank == 0:
            param.grad = None

    for model in (twins.plain_model, twins.model):
        model.first.weight.register_post_accumulate_grad_hook(take_away)
    twins.optimizer.attach(twins.ddp)
    before = twins.model.first.weight.detach().clone()
    twins.train(2)
    is_none = where == "everywhere" or world.size == 1
    assert torch.equal(twins.model.first.weight, before) is is_none


@distributed(1, 2, 3)
@EVERY_FEED
@pytest.mark.parametrize("pending", [False, True], ids=["before backward", "after backward"])
def test_a_group_is_added_and_trained(world: World, hooks: str, pending: bool) -> None:
    torch.manual_seed(0)
    model, late = Mlp(), nn.Linear(5, 4)
    model.late = late
    plain = copy.deepcopy(model)
    for parameter in late.parameters():
        parameter.requires_grad_(False)
    module = DistributedDataParallel(model) if hooks == "ddp" else model
    optimizer = ZeroRedundancyOptimizer(
        [p for p in model.parameters() if p.requires_grad], SGD, bucket_mb=1e-4, lr=0.1
    )
    optimizer.attach(module)
    reference = SGD(plain.parameters(), lr=0.1)

    def backward(step: int) -> None:
        batch = model.batch(models.seed_of(world, step))
        for each, whole in ((module, model), (plain, plain)):
            (each(batch) + whole.late(batch[:, :5]).square().mean()).backward()
        models.average_gradients(plain.parameters())

    added = {"params": list(late.parameters())}
    for step in range(4):
        if step == 1 and not pending:
            optimizer.add_param_group(added)
        if step == 1:
            late.requires_grad_(True)
        backward(step)
        if step == 1 and pending:
            optimizer.add_param_group(added)
        for param in plain.late.parameters():
            param.grad = None if step == 0 else param.grad
        optimizer.step()
        reference.step()
        reference.zero_grad()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


@distributed(1, 2)
@EVERY_FEED
def test_what_was_unfrozen_is_clipped_with_the_rest(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    model = Mlp()
    model.second.requires_grad_(False)
    module = DistributedDataParallel(model) if hooks == "ddp" else model
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(module)
    module(model.batch((1, 1))).backward()
    optimizer.step()
    model.second.requires_grad_(True)
    plain = copy.deepcopy(model)
    module(model.batch(models.seed_of(world, 1))).backward()
    plain(model.batch(models.seed_of(world, 1))).backward()
    models.average_gradients(plain.parameters())
    expected = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    torch.testing.assert_close(optimizer.grad_norm(), expected)
    assert optimizer.full_grad(model.second.weight) is not None
    optimizer.step()
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs - 0.1 * theirs.grad)


@distributed(1, 2)
@EVERY_FEED
def test_a_step_after_no_sync_alone_is_refused(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    twins.backward(synced=False)
    with pytest.raises(RuntimeError, match=r"not averaged.*inside no_sync\(\)"):
        twins.optimizer.step()
    twins.backward()
    twins.assert_same_gradients()


@distributed(1, 2)
@EVERY_FEED
def test_a_second_optimizer_on_the_same_module_is_refused(world: World, hooks: str) -> None:
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    second = ZeroRedundancyOptimizer(twins.model.parameters(), SGD, lr=0.1)
    with pytest.raises(ValueError, match="another optimizer is attached"):
        second.attach(twins.ddp)
    twins.optimizer.detach()
    second.attach(twins.ddp)


@distributed(1, 2)
def test_complex_parameters_need_a_bare_module(world: World) -> None:
    model = nn.Linear(3, 2, dtype=torch.complex64)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    try:
        ddp = DistributedDataParallel(model)
    except RuntimeError as error:
        pytest.skip(f"DDP of this torch takes no complex parameters: {error}")
    with pytest.raises(ValueError, match=r"complex parameters \(weight"):
        optimizer.attach(ddp)
    optimizer.attach(model)


@distributed(1, 2)
@pytest.mark.parametrize("lazy", [False, True])
def test_an_attached_module_can_be_copied_and_pickled(world: World, lazy: bool) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, "module", attach={"lazy_gather": lazy}, lr=0.1)
    for _ in range(2):
        twins.backward()
        twins.step()
    file = io.BytesIO()
    torch.save(twins.model, file)
    file.seek(0)
    average = torch.optim.swa_utils.AveragedModel(twins.model)
    for other in (
        copy.deepcopy(twins.model),
        torch.load(file, weights_only=False),
        average.module,
    ):
        models.assert_same_parameters(other, twins.model)
        other.zero_grad()
        other(twins.batch()).backward()
        assert all(param.grad is not None for param in other.parameters())
        other.state_dict()
    twins.train(1)


@distributed(1, 2)
@EVERY_FEED
def test_an_optimizer_that_is_gone_leaves_gradients_alone(world: World, hooks: str) -> None:
    model = Mlp()
    module = DistributedDataParallel(model) if hooks == "ddp" else model
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(module)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    module(model.batch((1, 1))).backward()
    assert all(param.grad is not None for param in model.parameters())


@distributed(1, 2)
@EVERY_FEED
def test_detach_lets_go_of_the_gradients_memory(world: World, hooks: str) -> None:
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    for _ in range(2):
        twins.backward()
        reducer = weakref.ref(reducer_of(twins.optimizer))
        twins.optimizer.detach()
        gc.collect()
        assert reducer() is None
        twins.optimizer.attach(twins.ddp)


@distributed(1, 2)
def test_a_module_that_returns_a_parameter_gains_no_hooks(world: World) -> None:
    class Returns(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.first.weight

    model = Returns()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    for _ in range(3):
        model(model.batch((1, 1)))[0].backward()
    assert not model.first.weight._backward_hooks


# ---------------------------------------- classes ----------------------------------------


def matrices_and_rest(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    muon = {"optimizer_class": torch.optim.Muon, "lr": 0.02, "momentum": 0.8}
    return [{"params": rest, "weight_decay": 0.2}, {"params": matrices, **muon}]


class TwoPlain:
    """What the groups above make of the plain classes."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        rest, matrices = matrices_and_rest(model)
        muon = matrices.pop("optimizer_class")
        self.each = [AdamW([rest], **options), muon([matrices])]

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad()


@distributed(1, 2, 3, 4)
@EVERY_FEED
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_muon_and_adamw_in_one_object(world: World, hooks: str, lazy: bool) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    torch.manual_seed(0)
    attach = {"lazy_gather": lazy}
    twins = AttachedTwins(
        *(world, Mlp(width=24), AdamW, hooks), groups=matrices_and_rest, attach=attach, lr=0.01
    )
    twins.plain = TwoPlain(twins.plain_model, lr=0.01)
    before = [param.detach().clone() for param in twins.model.parameters()]
    # Muon computes in bfloat16: one rounding of a gradient may show in the third digit.
    twins.train(4, **({"rtol": 1e-2, "atol": 2e-3} if world.size > 2 else {}))
    for param, start in zip(twins.model.parameters(), before, strict=True):
        assert not torch.equal(param, start)


@distributed(1, 2, 3, 4)
@EVERY_FEED
@pytest.mark.parametrize("model", [Mlp, TiedNet])
def test_adafactor(world: World, hooks: str, model: Any) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, model(), Adafactor, hooks, lr=0.05)
    # It divides by the square root of what may be as small as a rounding error.
    twins.train(4, **({"rtol": 1e-4, "atol": 1e-5} if world.size > 2 else {}))


# ---------------------------------------- torch.compile ----------------------------------------


@distributed(2)
@EVERY_FEED
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("first", ["attached", "compiled"])
def test_a_compiled_module(world: World, hooks: str, lazy: bool, first: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    attach = {"lazy_gather": lazy}
    twins = AttachedTwins(world, Mlp(), AdamW, hooks, attach=attach, lr=0.01)
    module = twins.ddp
    if first == "compiled":
        twins.optimizer.detach()
    twins.ddp = torch.compile(module, backend="aot_eager")
    if first == "compiled":
        twins.ddp(twins.batch())  # is compiled here
        twins.optimizer.attach(module, **attach)
    with Delays(world):
        for _ in range(4):
            twins.backward()
            twins.step()
    twins.assert_same(rtol=1e-5, atol=1e-6)
    assert_same_on_all_ranks(twins.model)
