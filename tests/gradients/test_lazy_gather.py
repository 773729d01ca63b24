"""``lazy_gather=True``: nobody sees a parameter before its update has arrived."""

from __future__ import annotations

import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
from attached import EVERY_FEED, AttachedTwins
from harness import World, distributed
from inside import AFTER_GATHER, gatherer_of, in_flight, params_of, plan_of
from models import ConvNet, Mlp, TiedNet, noise
from torch import nn
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer
from onecopy.planning.sizes import LAZY_IN_FLIGHT

LAZY = {"lazy_gather": True}


class Attention(nn.Module):
    """MultiheadAttention never calls the forward of its out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.attention(x, x, x)[0] * self.scale
        return self.last(x).square().mean()

    def batch(self, seed: Any) -> torch.Tensor:
        return noise(2, 4, 6, seed=seed)


class Delays:
    """What is sent leaves late, by another time on every rank."""

    def __init__(self, world: World) -> None:
        random_ = random.Random(world.rank)
        start = AFTER_GATHER[0].start

        def late(op: Any) -> None:
            time.sleep(random_.random() * 0.01)
            start(op)

        self._patch = mock.patch.object(AFTER_GATHER[0], "start", late)

    def __enter__(self) -> None:
        self._patch.start()

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()


@pytest.mark.also_c10d
@distributed(1, 2, 4)
@EVERY_FEED
@pytest.mark.parametrize("model", [Mlp, ConvNet, TiedNet, Attention])
def test_training_is_the_same(world: World, hooks: str, model: Any) -> None:
    torch.manual_seed(0)
    zero = {"parameters_as_bucket_view": model in (Mlp, Attention)}
    # SGD for attention: the gradient of a key's bias is rounding errors, which Adam would enlarge.
    cls = SGD if model is Attention else AdamW
    twins = AttachedTwins(world, model(), cls, hooks, zero=zero, attach=LAZY, lr=0.01)
    with Delays(world):
        for _ in range(5):
            twins.backward()
            twins.step()
            if twins.steps % 2:
                twins.optimizer.wait()
                twins.assert_same()
    twins.optimizer.wait()
    twins.assert_same()


def forbid_reading_ahead(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    """Fail if a module's forward begins while parameters of its own are on their way."""

    def look(module: nn.Module, _: Any) -> None:
        plan, params = plan_of(optimizer), params_of(optimizer)
        own = set(module.parameters(recurse=False))
        for bucket in in_flight(optimizer):
            assert not own & {params[segment.param] for segment in plan.segments(bucket)}

    for module in model.modules():
        module.register_forward_pre_hook(look)


def stepped(world: World, model: nn.Module) -> tuple[Any, ZeroRedundancyOptimizer]:
    """After a step whose gathers nobody has waited for."""
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, bucket_mb=1e-4, lr=0.1)
    optimizer.attach(model, lazy_gather=True)
    for step in range(2):
        model(model.batch((world.rank + 1, step + 1))).backward()
        optimizer.step()
    if world.size > 1:
        assert in_flight(optimizer)
    return model, optimizer


def waits(model: Any, what: str, optimizer: ZeroRedundancyOptimizer) -> None:
    if what == "forward":
        model(model.batch((1, 2)))
    elif what == "eval":
        with torch.no_grad():
            model.eval()(model.batch((1, 2)))
    elif what == "state_dict":
        model.state_dict()
    elif what == "part's state_dict":
        for part in model.children():
            part.state_dict()
    elif what == "assert_replicas_equal":
        optimizer.assert_replicas_equal()
    elif what == "consolidate_state_dict":
        optimizer.consolidate_state_dict()
    elif what == "sharded":
        optimizer.sharded().state_dict()
    elif what == "detach":
        optimizer.detach()
    else:
        optimizer.wait()


@distributed(2)
@pytest.mark.parametrize(
    "what",
    [
        *("forward", "eval", "state_dict", "part's state_dict"),
        *("assert_replicas_equal", "consolidate_state_dict", "sharded", "detach", ""),
    ],
)
def test_who_looks_waits(world: World, what: str) -> None:
    torch.manual_seed(0)
    model, optimizer = stepped(world, Mlp())
    waits(model, what, optimizer)
    assert not in_flight(optimizer)
    optimizer.assert_replicas_equal()


@distributed(2)
def test_a_part_waits_for_what_it_uses_only(world: World) -> None:
    torch.manual_seed(0)
    model, optimizer = stepped(world, Mlp())
    before = len(in_flight(optimizer))
    model.norm(torch.zeros(2, 17))
    left = len(in_flight(optimizer))
    assert 0 < left < before


@distributed(2)
def test_parameters_of_a_module_that_is_never_called_are_awaited_first(world: World) -> None:
    torch.manual_seed(0)
    model, optimizer = stepped(world, Attention())
    waited: list[int] = []
    all_gathers = gatherer_of(optimizer).queue
    wait = all_gathers.wait

    def spy(buckets: Any = None) -> None:
        waited.extend(in_flight(optimizer) if buckets is None else buckets)
        wait(buckets)

    with mock.patch.object(all_gathers, "wait", spy):
        model.first.register_forward_pre_hook(lambda *_: waited.append(-1))
        model(model.batch((1, 2)))
    at_root = set(waited[: waited.index(-1)])
    plan, params = plan_of(optimizer), params_of(optimizer)
    needed = {
        bucket
        for bucket in range(len(plan.buckets))
        for segment in plan.segments(bucket)
        if params[segment.param] is model.attention.out_proj.weight
    }
    assert needed <= at_root


@distributed(1, 2)
def test_a_compiled_module_is_refused(world: World) -> None:
    model = Mlp()
    model.first.compile(backend="eager")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with pytest.raises(ValueError, match="compiled modules may ignore"):
        optimizer.attach(model, lazy_gather=True)
    optimizer.attach(model)


@distributed(2)
@pytest.mark.parametrize("how", ["part", "eval", "load_state_dict"])
def test_parts_evaluation_and_loading_see_what_they_need(world: World, how: str) -> None:
    torch.manual_seed(0)
    model, optimizer = stepped(world, Attention())
    if how == "part":
        x = torch.zeros(2, 4, 8)
        model.attention(x, x, x)
        plan, params = plan_of(optimizer), params_of(optimizer)
        used = set(model.attention.parameters())
        for bucket in in_flight(optimizer):
            assert not used & {params[segment.param] for segment in plan.segments(bucket)}
        assert in_flight(optimizer)
    elif how == "eval":
        model.eval()
        model.attention.eval()
        model.first(torch.zeros(1, 6))
        assert not in_flight(optimizer)
    else:
        model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
        optimizer.wait()
        assert all((param == 1).all() for param in model.parameters())


@distributed(2, 3)
@EVERY_FEED
def test_a_load_that_makes_another_plan_is_followed(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), AdamW, hooks, attach=LAZY, lr=0.01)
    other = AdamW(Mlp().parameters(), lr=0.02, fused=True)
    for _ in range(2):
        twins.backward()
        twins.step()
    forbid_reading_ahead(twins.model, twins.optimizer)
    for optimizer in (twins.plain, twins.optimizer):
        optimizer.load_state_dict(other.state_dict())
    for _ in range(3):
        with Delays(world):
            twins.backward()
            twins.step()
    twins.assert_same()
    assert twins.optimizer.param_groups[0]["fused"]


@pytest.mark.also_c10d
@distributed(2, 3)
def test_groups_that_are_added_are_awaited_too(world: World) -> None:
    torch.manual_seed(0)
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(
        [*model.first.parameters(), *model.norm.parameters()], SGD, bucket_mb=1e-4, lr=0.1
    )
    model.second.requires_grad_(False)
    optimizer.attach(model, lazy_gather=True)
    forbid_reading_ahead(model, optimizer)
    for step in range(4):
        if step == 2:
            model.second.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.second.parameters())})
        with Delays(world):
            model(model.batch((world.rank + 1, step + 1))).backward()
            optimizer.step()
    model(model.batch((1, 1)))
    assert not in_flight(optimizer)
    optimizer.assert_replicas_equal()


@distributed(2, pg_timeout=30)
def test_more_buckets_than_can_be_under_way_are_no_hindrance(world: World) -> None:
    """Nor is a rank that has finished its step and waits elsewhere, when another has just begun."""
    count = 4 * LAZY_IN_FLIGHT + 100
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(count)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0, bucket_mb=16 / 2**20)
    optimizer.attach(model, lazy_gather=True)
    assert len(plan_of(optimizer).buckets) >= count
    before = [param.detach().clone() for param in model.parameters()]
    loss = torch.stack([layer(torch.full((1, 2), world.rank + 1.0)).sum() for layer in model]).sum()
    loss.backward()
    time.sleep(world.rank)
    optimizer.step()
    torch.distributed.barrier()
    optimizer.wait()
    for old, param in zip(before, model.parameters(), strict=True):
        assert torch.equal(param.detach(), old - 1.5)
