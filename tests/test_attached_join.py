"""Uneven inputs in attached mode, with DDP and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from attached import EVERY_FEED
from harness import World, distributed
from inside import plan_of, transport_of
from models import Mlp, feed, noise
from test_join import CLASSES, batch_of, build, compare, reference, sharded, uneven
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from onecopy import GradScaler
from onecopy.agreement import RanksDisagree
from onecopy.join import Party, Turn, find_party


@distributed(2, 3)
@EVERY_FEED
@pytest.mark.parametrize("divide", [True, False], ids=["by all", "by those that go on"])
@pytest.mark.parametrize("name", CLASSES)
def test_uneven_inputs(world: World, feed: str, divide: bool, name: str) -> None:
    cls, options = CLASSES[name]
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    reference(
        *(world, expected, lambda params: cls(params, **options), inputs),
        divide_by_initial_world_size=divide,
    )
    train(world, model, sharded(model.parameters(), cls, **options), feed, inputs, divide)
    compare(world, model, expected, exact=world.size <= 2 and divide)


@distributed(2, 3)
@EVERY_FEED
def test_a_joined_rank_follows_the_schedulers_of_the_others(world: World, feed: str) -> None:
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    reference(world, expected, lambda p: SGD(p, lr=0.1), inputs, gamma=0.5)
    train(world, model, sharded(model.parameters(), SGD, lr=0.1), feed, inputs, gamma=0.5)
    compare(world, model, expected)


@distributed(2, 3)
def test_several_backwards_in_a_step_of_a_bare_module(world: World) -> None:
    """A joined rank takes part in each of them."""
    model = build(Mlp)
    opt = sharded(model.parameters(), SGD, lr=0.1)
    opt.attach(model)
    expected = build(Mlp)
    inputs = uneven(world)
    with Join([opt]):
        for step in range(inputs[world.rank]):
            for half in (0, 1):
                (model(batch_of(model, world.rank, 2 * step + half)) / 2).backward()
            opt.step()
    plain = SGD(expected.parameters(), lr=0.1)
    for step in range(max(inputs)):
        for rank in range(world.size):
            for half in (0, 1):
                if step < inputs[rank]:
                    loss = expected(batch_of(model, rank, 2 * step + half))
                    (loss / 2 / world.size).backward()
        plain.step()
        plain.zero_grad()
    compare(world, model, expected, exact=False)


@distributed(2, 3)
@EVERY_FEED
def test_ranks_that_have_joined_take_part_in_clipping(world: World, feed: str) -> None:
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    norms: list[float] = []

    def by_hand(_: Any, step: int) -> None:
        norms.append(float(torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1 / (step + 1))))

    reference(world, expected, lambda p: SGD(p, lr=0.1), inputs, look=by_hand)
    opt, found = sharded(model.parameters(), SGD, lr=0.1), []

    def ours(step: int) -> None:
        full = opt.full_grad(model.first.weight)
        assert full is not None
        found.append(float(opt.clip_grad_norm_(0.1 / (step + 1))))
        assert torch.equal(opt.grad_norm(), opt.grad_norm())

    train(world, model, opt, feed, inputs, look=ours)
    assert found == pytest.approx(norms[: inputs[world.rank]])
    compare(world, model, expected, exact=False)


@distributed(2, 3)
@EVERY_FEED
def test_a_step_that_the_scaler_skips_is_skipped_by_ranks_that_have_joined(
    world: World, feed: str
) -> None:
    """The last rank, alone by then, meets an infinity in its second last step."""
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    bad = max(inputs) - 2
    reference(
        *(world, expected, lambda p: SGD(p, lr=0.1), inputs),
        look=lambda _, step: "skip" if step == bad else None,
    )
    opt = sharded(model.parameters(), SGD, lr=0.1)
    module = DistributedDataParallel(model) if feed == "ddp" else model
    opt.attach(module)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=100)
    with Join([module, opt] if feed == "ddp" else [opt]):
        for step in range(inputs[world.rank]):
            loss = module(batch_of(model, world.rank, step))
            scaler.scale(loss * (torch.inf if step == bad else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
            assert scaler.get_scale() == (2.0 if step >= bad else 4.0)
    compare(world, model, expected, exact=False)


class Deep(nn.Module):
    """About a bucket for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(12, 12) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()

    def batch(self, seed: Iterable[int]) -> torch.Tensor:
        return noise(2, 12, seed=seed)


@distributed(2, 3, timeout=40, pg_timeout=10)
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "find_unused_parameters"])
@pytest.mark.parametrize("divide", [True, False], ids=["by all", "by those that go on"])
def test_what_was_unfrozen_after_ddp_was_built_holds_nobody_up(
    world: World, unused: bool, divide: bool
) -> None:
    """DDP does not deliver it, so its bucket and all after it leave when DDP is through; and DDP
    is through, if it looks for unused parameters, when ranks that have joined have answered."""
    inputs = uneven(world)
    model, expected = build(Deep), build(Deep)
    reference(
        *(world, expected, lambda p: SGD(p, lr=0.1), inputs),
        divide_by_initial_world_size=divide,
    )
    opt = sharded(model.parameters(), SGD, lr=0.1)
    late = model.layers[-1].weight
    late.requires_grad_(False)
    ddp = DistributedDataParallel(model, find_unused_parameters=unused)
    opt.attach(ddp)
    late.requires_grad_(True)
    assert len(plan_of(opt).buckets) > 6
    with Join([ddp, opt], divide_by_initial_world_size=divide):
        for step in range(inputs[world.rank]):
            ddp(batch_of(model, world.rank, step)).backward()
            opt.step()
    compare(world, model, expected, exact=False)


@distributed(2, 3, timeout=40, pg_timeout=8)
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "find_unused_parameters"])
def test_two_models_in_one_context(world: World, unused: bool) -> None:
    """Joined ranks take part in the backwards of both before any step, as the others do."""
    inputs = uneven(world)
    models, expected = [build(Deep), build(Mlp)], [build(Deep), build(Mlp)]
    for each in expected:
        reference(world, each, lambda params: SGD(params, lr=0.1), inputs)
    ddps = [DistributedDataParallel(model, find_unused_parameters=unused) for model in models]
    opts = [sharded(model.parameters(), SGD, lr=0.1) for model in models]
    for ddp, opt in zip(ddps, opts, strict=True):
        opt.attach(ddp)
    with Join([*ddps, *opts]):
        for step in range(inputs[world.rank]):
            for ddp, model in zip(ddps, models, strict=True):
                feed(ddp, batch_of(model, world.rank, step)).backward()
            for opt in opts:
                opt.step()
    for model, each in zip(models, expected, strict=True):
        compare(world, model, each, exact=False)


class OneLayer(nn.Linear):
    """A single tensor, which one rank owns."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().sum()

    def batch(self, seed: Iterable[int]) -> torch.Tensor:
        return noise(2, 4, seed=seed)


@distributed(2, 3, timeout=20, pg_timeout=5)
def test_zero_grad_after_a_step_is_nothing_to_tell_for_ranks_that_own_nothing(world: World) -> None:
    inputs = uneven(world)
    model, expected = build(OneLayer), build(OneLayer)
    reference(world, expected, lambda p: SGD(p, lr=0.01), inputs)
    opt = sharded(model.parameters(), SGD, lr=0.01, partition="whole")
    train(world, model, opt, "module", inputs)
    compare(world, model, expected, exact=False)


@distributed(2, 3, timeout=20, pg_timeout=5)
@pytest.mark.parametrize("first_to_join", [None, 0], ids=["nobody has joined", "one has joined"])
def test_ranks_that_do_different_things_are_all_told(
    world: World, first_to_join: int | None
) -> None:
    """By the lowest of them that goes on, the last rank differs; with two ranks, it is alone."""
    opt = sharded(build(OneLayer).parameters(), SGD, lr=0.01)
    turn = Turn.STEP if world.rank < world.size - 1 else Turn.SKIP
    if world.rank == first_to_join:
        turn = Turn.JOINED
    if first_to_join is not None and world.size == 2:
        assert find_party(transport_of(opt), turn) == Party(Turn.SKIP, 1, (0,))
        return
    with pytest.raises(RanksDisagree, match=rf"STEP\n  rank {world.size - 1}: SKIP"):
        find_party(transport_of(opt), turn)


def train(
    world: World,
    model: Any,
    opt: Any,
    kind: str,
    inputs: list[int],
    divide: bool = True,
    gamma: float | None = None,
    look: Callable[[int], object] = lambda _: None,
) -> None:
    module = DistributedDataParallel(model) if kind == "ddp" else model
    opt.attach(module)
    scheduler = None if gamma is None else ExponentialLR(opt, gamma)
    joinables = [module, opt] if kind == "ddp" else [opt]
    with Join(joinables, divide_by_initial_world_size=divide):
        for step in range(inputs[world.rank]):
            opt.zero_grad()
            feed(module, batch_of(model, world.rank, step)).backward()
            look(step)
            opt.step()
            if scheduler is not None:
                scheduler.step()
    assert all(torch.isfinite(param).all() for param in model.parameters())
