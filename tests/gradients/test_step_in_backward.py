"""``overlap_with_ddp=True``: the step is taken inside backward, from a DDP communication hook."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import EVERY_CLASS
from harness import World, distributed
from models import SMALL_BUCKETS, Mlp, TiedNet, assert_same_on_all_ranks, seed_of
from test_bit_equality import CASES, weights_and_biases
from test_join import batch_of, build, compare, reference, uneven
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from onecopy import (
    GradScaler,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

HOOKS = {"plain": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
# They share their code; the quick tests try the second in one place.
EVERY_HOOK = pytest.mark.parametrize(
    "hook", ["plain", pytest.param("interleaved", marks=pytest.mark.slow)]
)


class Pair:
    """A model under DDP with the plain class, and the same with ours in its hook."""

    def __init__(
        self,
        world: World,
        hook: str,
        cls: Any,
        model: nn.Module | None = None,
        *,
        groups: Any = nn.Module.parameters,
        ddp: dict[str, Any] | None = None,
        zero: dict[str, Any] | None = None,
        shard_buckets: bool = False,
        base: Any = allreduce_hook,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.world = world
        self.plain_model = model or Mlp()
        self.model = copy.deepcopy(self.plain_model)
        self.plain_ddp, self.ddp = (
            DistributedDataParallel(m, **(ddp or {})) for m in (self.plain_model, self.model)
        )
        state = (ddp or {}).get("process_group")
        self.plain_ddp.register_comm_hook(state, base)
        self.plain = cls(groups(self.plain_model), **copy.deepcopy(options))
        zero = {"bucket_mb": SMALL_BUCKETS, **(zero or {})}
        self.optimizer = ZeroRedundancyOptimizer(
            groups(self.model), cls, overlap_with_ddp=True, **zero, **options
        )
        self.ddp.register_comm_hook(
            state, HOOKS[hook](base, self.ddp, self.optimizer, shard_buckets)
        )
        self.steps = 0

    def backward(self) -> None:
        batch = self.model.batch(seed_of(self.world, self.steps))
        self.steps += 1
        self.ddp(batch).backward()
        self.plain_ddp(batch).backward()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.plain.step()
            assert self.optimizer.step() is None
            self.assert_same()
            self.plain.zero_grad()
            self.optimizer.zero_grad()

    def assert_same(self) -> None:
        for mine, theirs in zip(
            self.model.parameters(), self.plain_model.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs)
            assert torch.equal(mine.grad, theirs.grad)


@distributed(1, 2, 3)
@EVERY_HOOK
@EVERY_CLASS
def test_every_class_steps_from_the_first_backward_on(world: World, hook: str, case: str) -> None:
    cls, options = CASES[case]
    pair = Pair(world, hook, cls, groups=weights_and_biases, **options)
    before = [param.clone() for param in pair.model.parameters()]
    pair.backward()
    assert not all(torch.equal(a, b) for a, b in zip(before, pair.model.parameters(), strict=True))
    pair.plain.step()
    pair.assert_same()
    pair.plain.zero_grad()
    pair.optimizer.zero_grad()
    pair.train(4)
    assert_same_on_all_ranks(pair.model)


@distributed(2, 4)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    "ddp",
    [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}],
    ids="-".join,
)
def test_kinds_of_ddp(world: World, hook: str, ddp: dict[str, Any]) -> None:
    shard_buckets = hook == "interleaved"  # nothing depends on it
    Pair(world, hook, AdamW, TiedNet(), ddp=ddp, shard_buckets=shard_buckets, lr=0.01).train(5)


@distributed(1, 2)
@EVERY_HOOK
def test_another_hook_averages(world: World, hook: str) -> None:
    Pair(world, hook, SGD, base=fp16_compress_hook, lr=0.1).train(3)


@distributed(1, 2, 3)
@EVERY_HOOK
def test_schedulers_and_no_sync(world: World, hook: str) -> None:
    pair = Pair(world, hook, SGD, lr=0.1, momentum=0.9)
    schedulers = [ExponentialLR(o, 0.5) for o in (pair.plain, pair.optimizer)]
    for _ in range(3):
        with pair.ddp.no_sync(), pair.plain_ddp.no_sync():
            pair.backward()
        pair.train(1)
        for scheduler in schedulers:
            scheduler.step()
    assert pair.optimizer.optim.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)


@distributed(4)
@EVERY_HOOK
def test_a_subgroup_whose_ranks_are_others(world: World, hook: str) -> None:
    group = dist.new_group([1, 3])
    if world.rank in (1, 3):
        ddp, zero = {"process_group": group}, {"process_group": group}
        Pair(world, hook, AdamW, ddp=ddp, zero=zero, lr=0.01).train(3)


@distributed(1, 2)
@EVERY_HOOK
def test_checkpoints(world: World, hook: str, tmp_path: Path) -> None:
    pair = Pair(world, hook, AdamW, lr=0.01)
    pair.train(2)
    pair.optimizer.save(tmp_path, pair.model)
    pair.optimizer.consolidate_state_dict()
    other = Pair(world, hook, AdamW, lr=0.5)
    other.optimizer.load(tmp_path, other.model)
    for model in (other.model, other.plain_model):
        model.load_state_dict(pair.model.state_dict())
    other.plain.load_state_dict(pair.plain.state_dict())
    other.train(2)


@distributed(1, 2, 3, timeout=40, pg_timeout=10)
@EVERY_HOOK
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "find_unused_parameters"])
def test_uneven_inputs(world: World, hook: str, unused: bool) -> None:
    """To find unused parameters, DDP asks all ranks, also those that have joined."""
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    options = {"lr": 0.1, "momentum": 0.9}
    reference(world, expected, lambda params: SGD(params, **options), inputs)
    ddp = DistributedDataParallel(model, find_unused_parameters=unused)
    opt = ZeroRedundancyOptimizer(model.parameters(), SGD, overlap_with_ddp=True, **options)
    ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, opt))
    with Join([ddp, opt]):
        for step in range(inputs[world.rank]):
            opt.zero_grad()
            ddp(batch_of(model, world.rank, step)).backward()
    compare(world, model, expected, exact=False)


@distributed(2, 3, timeout=40, pg_timeout=8)
@EVERY_HOOK
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "find_unused_parameters"])
def test_two_models_in_one_join_context(world: World, hook: str, unused: bool) -> None:
    inputs = uneven(world)
    models, expected = [build(TiedNet), build(Mlp)], [build(TiedNet), build(Mlp)]
    for each in expected:
        reference(world, each, lambda params: SGD(params, lr=0.1), inputs)
    ddps = [DistributedDataParallel(model, find_unused_parameters=unused) for model in models]
    options = {"lr": 0.1, "overlap_with_ddp": True, "bucket_mb": SMALL_BUCKETS}
    opts = [ZeroRedundancyOptimizer(model.parameters(), SGD, **options) for model in models]
    for ddp, opt in zip(ddps, opts, strict=True):
        ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, opt))
    with Join([*ddps, *opts]):
        for step in range(inputs[world.rank]):
            for ddp, opt, model in zip(ddps, opts, models, strict=True):
                opt.zero_grad()
                ddp(batch_of(model, world.rank, step)).backward()
    for model, each in zip(models, expected, strict=True):
        compare(world, model, each, exact=False)


@distributed(2, 3, timeout=20, pg_timeout=5)
def test_a_scaler_that_is_switched_off_announces_nothing(world: World) -> None:
    """``step()`` does nothing, and that is no step that was skipped."""
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    reference(world, expected, lambda params: SGD(params, lr=0.1), inputs)
    ddp = DistributedDataParallel(model)
    opt = ZeroRedundancyOptimizer(model.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, opt))
    scaler = GradScaler("cpu", enabled=False)
    with Join([ddp, opt]):
        for step in range(inputs[world.rank]):
            opt.zero_grad()
            scaler.scale(ddp(batch_of(model, world.rank, step))).backward()
            scaler.step(opt)
            scaler.update()
    compare(world, model, expected, exact=False)


@distributed(1, 2)
@EVERY_HOOK
def test_what_cannot_work_says_why(world: World, hook: str) -> None:
    pair = Pair(world, hook, SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="too late to clip"):
        pair.optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="exclude each other"):
        pair.optimizer.attach(pair.model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="GradScaler cannot work"):
        scaler.step(pair.optimizer)
    plain = ZeroRedundancyOptimizer(pair.model.parameters(), SGD, lr=0.1)
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        HOOKS[hook](allreduce_hook, pair.ddp, plain)
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        HOOKS[hook](allreduce_hook, pair.model, pair.optimizer)
    with pytest.raises(TypeError, match="onecopy's optimizer"):
        HOOKS[hook](allreduce_hook, pair.ddp, pair.plain)
