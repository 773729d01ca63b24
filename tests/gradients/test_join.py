"""Uneven inputs: a rank that has run out of them still owns pieces, and they must follow.

The reference is computed by hand on every rank: in each iteration the gradients of the ranks that
still have inputs, zeros for those that have none, summed and divided as DDP does, and a plain
optimizer on the result. DDP multiplies by 1/W before it sums, and gloo's sum of more than two
numbers depends on the order, so the comparison is exact on two ranks and to a few bits on more;
replicas are compared bit for bit always.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from attached import EVERY_FEED
from harness import World, distributed
from inside import (
    in_flight,
    plan_of,
    reducer_of,
    transport_of,
    watch_joined,
)
from models import (
    SMALL_BUCKETS,
    BranchNet,
    ConvNet,
    Mlp,
    assert_same_on_all_ranks,
    hooks,
    noise,
    random_parameter,
)
from test_reducer import Products
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

from onecopy import GradScaler, RanksDisagree, ZeroRedundancyOptimizer
from onecopy.gradients.join import JoinRound, Turn, find_round

ROUNDS = 5  # of the rank with most inputs


def uneven(world: World) -> list[int]:
    """Inputs of each rank: rank 0 runs out first, others later, the last rank has most."""
    return [*[2, 3, 3][: world.size - 1], ROUNDS]


def batch_of(model: Any, rank: int, step: int) -> Any:
    return model.batch((rank + 1, step + 1))


def reference(
    world: World,
    model: Any,
    make: Callable[[Any], torch.optim.Optimizer],
    inputs: Sequence[int],
    *,
    divide_by_initial_world_size: bool = True,
    gamma: float | None = None,
    look: Callable[[Any, int], object] = lambda *_: None,
) -> None:
    """Train `model` by hand as the ranks together should. `look(opt, step)` sees the gradients."""
    opt = make(model.parameters())
    scheduler = None if gamma is None else ExponentialLR(opt, gamma)
    for step in range(max(inputs)):
        active = [rank for rank, count in enumerate(inputs) if step < count]
        divisor = world.size if divide_by_initial_world_size else len(active)
        total: list[torch.Tensor | None] = [None for _ in model.parameters()]
        for rank in active:
            opt.zero_grad()
            hooks(model, batch_of(model, rank, step)).backward()
            for number, param in enumerate(model.parameters()):
                if param.grad is not None:
                    part = param.grad * (1 / divisor)
                    total[number] = part if total[number] is None else total[number] + part
        for param, grad in zip(model.parameters(), total, strict=True):
            param.grad = grad
        if look(opt, step) != "skip":
            opt.step()
        if scheduler is not None:
            scheduler.step()


def build(make: Callable[..., nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def train(
    world: World,
    model: Any,
    opt: ZeroRedundancyOptimizer,
    inputs: Sequence[int],
    *,
    ddp: dict[str, Any] | None = None,
    join: dict[str, Any] | None = None,
    gamma: float | None = None,
) -> None:
    """The loop of a user, with `Join` around it."""
    wrapped = DistributedDataParallel(model, **(ddp or {}))
    scheduler = None if gamma is None else ExponentialLR(opt, gamma)
    with Join([wrapped, opt], **(join or {})):
        for step in range(inputs[world.rank]):
            opt.zero_grad()
            hooks(wrapped, batch_of(model, world.rank, step)).backward()
            opt.step()
            if scheduler is not None:
                scheduler.step()


def compare(world: World, model: nn.Module, expected: nn.Module, exact: bool | None = None) -> None:
    assert_same_on_all_ranks(model)
    exact = world.size <= 2 if exact is None else exact
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        if exact:
            assert torch.equal(a, b), name
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")


def sharded(params: Iterable[Any], cls: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, cls, **{"bucket_mb": SMALL_BUCKETS, **options})


# ------------------------------------------------------------------ with DDP


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (Adam, {"lr": 0.01}),
}


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("name", CLASSES)
def test_uneven_inputs_train_as_the_unsharded_optimizer_would(world: World, name: str) -> None:
    cls, options = CLASSES[name]
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    reference(world, expected, lambda params: cls(params, **options), inputs)
    opt = sharded(model.parameters(), cls, **options)
    train(world, model, opt, inputs)
    compare(world, model, expected)


def test_the_reference_notices_a_missing_update() -> None:
    """Training without the inputs of the joined rounds ends elsewhere."""
    world = World(0, 3, torch.device("cpu"))
    ends = []
    for inputs in ([2, 3, 5], [2, 3, 4], [2, 2, 5]):
        model = build(Mlp)
        reference(world, model, lambda p: SGD(p, lr=0.1, momentum=0.9), inputs)
        ends.append(model.first.weight.detach())
    assert not torch.allclose(ends[0], ends[1], rtol=1e-4)
    assert not torch.allclose(ends[0], ends[2], rtol=1e-4)


@distributed(2, 3)
@pytest.mark.parametrize("initial", [True, False])
def test_both_ways_of_dividing_work(world: World, initial: bool) -> None:
    inputs = uneven(world)
    keywords = {"divide_by_initial_world_size": initial}
    model, expected = build(Mlp), build(Mlp)
    reference(world, expected, lambda p: SGD(p, lr=0.1, momentum=0.9), inputs, **keywords)
    opt = sharded(model.parameters(), SGD, lr=0.1, momentum=0.9)
    train(world, model, opt, inputs, join=keywords)
    compare(world, model, expected)


@distributed(2, 3)
def test_a_scheduler_that_stands_still_on_joined_ranks_is_followed(world: World) -> None:
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    reference(world, expected, lambda p: SGD(p, lr=0.1, momentum=0.9), inputs, gamma=0.5)
    opt = sharded(model.parameters(), SGD, lr=0.1, momentum=0.9)
    train(world, model, opt, inputs, gamma=0.5)
    compare(world, model, expected)
    # The rate of the last step, which the active ranks have decayed once more since.
    decayed = 0.1 * 0.5 ** (ROUNDS if inputs[world.rank] == ROUNDS else ROUNDS - 1)
    assert opt.param_groups[0]["lr"] == pytest.approx(decayed)


@distributed(2, 3)
def test_a_tensor_as_learning_rate_is_followed(world: World) -> None:
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)

    def adam(params: Any, make: Any = Adam, **more: Any) -> Any:
        return make(params, lr=torch.tensor(0.1), foreach=False, **more)

    reference(world, expected, adam, inputs, gamma=0.5)
    opt = ZeroRedundancyOptimizer(
        model.parameters(), Adam, bucket_mb=SMALL_BUCKETS, lr=torch.tensor(0.1), foreach=False
    )
    train(world, model, opt, inputs, gamma=0.5)
    compare(world, model, expected)


@distributed(2, 3)
@pytest.mark.parametrize("partition", ["elementwise", "whole"])
@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
def test_cut_and_whole_pieces_of_any_strides_follow(
    world: World, partition: str, view: bool
) -> None:
    inputs = uneven(world)
    model, expected = build(ConvNet), build(ConvNet)
    reference(world, expected, lambda p: SGD(p, lr=0.1, momentum=0.9), inputs)
    keywords = {"partition": partition, "parameters_as_bucket_view": view}
    opt = sharded(model.parameters(), SGD, lr=0.1, momentum=0.9, **keywords)
    train(world, model, opt, inputs, ddp={"gradient_as_bucket_view": True})
    compare(world, model, expected)


@distributed(2, 3)
def test_muon_on_whole_matrices_follows(world: World) -> None:
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        pytest.skip("this torch has no Muon")

    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

        def batch(self, seed: Iterable[int]) -> torch.Tensor:
            return Mlp.batch(Mlp(), seed)[:, :6].contiguous()

    inputs = uneven(world)
    model, expected = build(Matrices), build(Matrices)
    reference(world, expected, lambda p: muon(p, lr=0.01), inputs)
    train(world, model, sharded(model.parameters(), muon, lr=0.01), inputs)
    compare(world, model, expected)


def takes_left_only(seed: Iterable[int]) -> tuple[bool, bool]:
    return True, False


@distributed(2, 3)
def test_parameters_without_gradients_stay_and_keep_no_state(world: World) -> None:
    inputs = uneven(world)
    model, expected = (
        build(lambda: BranchNet(takes_left_only)),
        build(lambda: BranchNet(takes_left_only)),
    )
    start = [p.detach().clone() for p in (*model.right.parameters(), *model.idle.parameters())]
    for net in (model, expected):
        net.idle.requires_grad_(False)
    reference(world, expected, lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), inputs)
    opt = sharded(model.parameters(), SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    train(world, model, opt, inputs, ddp={"find_unused_parameters": True})
    compare(world, model, expected)
    unused = [*model.right.parameters(), *model.idle.parameters()]
    assert all(map(torch.equal, unused, start))
    opt.consolidate_state_dict(to=0)
    if world.rank == 0:
        assert sorted(opt.state_dict()["state"]) == [0, 1, 2, 3]


@distributed(2, 3)
def test_a_joined_ranks_gradients_are_left_as_they_were(world: World) -> None:
    """Looked at from inside: after each step of the others."""
    for partition in ("elementwise", "whole"):
        model = build(Mlp)
        opt = sharded(model.parameters(), SGD, lr=0.1, partition=partition)
        seen: list[bool] = []

        def watched(take_part: Callable[[], None]) -> None:
            before = [(id(p.grad), p.grad.clone()) for p in model.parameters()]
            take_part()
            after = [(id(p.grad), p.grad) for p in model.parameters()]
            seen.append(
                all(
                    i == j and torch.equal(a, b)
                    for (i, a), (j, b) in zip(before, after, strict=True)
                )
            )

        watch_joined(opt, watched)
        inputs = uneven(world)
        train(world, model, opt, inputs)
        assert seen == [True] * (ROUNDS - inputs[world.rank])


@distributed(2, 3)
def test_training_goes_on_after_the_context_and_in_a_second_one(world: World) -> None:
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    opt = sharded(model.parameters(), SGD, lr=0.1, momentum=0.9)
    ddp = DistributedDataParallel(model)
    twin = SGD(expected.parameters(), lr=0.1, momentum=0.9)
    plan = [inputs, [2] * world.size, inputs[::-1], [1] * world.size]
    for number, counts in enumerate(plan):
        reference(world, expected, lambda _, twin=twin: twin, counts)
        if number % 2 == 0:
            with Join([ddp, opt]):
                for step in range(counts[world.rank]):
                    opt.zero_grad()
                    ddp(batch_of(model, world.rank, step)).backward()
                    opt.step()
        else:
            for step in range(counts[world.rank]):
                opt.zero_grad()
                ddp(batch_of(model, world.rank, step)).backward()
                opt.step()
        compare(world, model, expected)


@distributed(2, 3)
def test_a_disabled_join_does_nothing(world: World) -> None:
    inputs = [3] * world.size
    model, expected = build(Mlp), build(Mlp)
    reference(world, expected, lambda p: SGD(p, lr=0.1), inputs)
    train(world, model, sharded(model.parameters(), SGD, lr=0.1), inputs, join={"enable": False})
    compare(world, model, expected)


@distributed(2, 3)
def test_throwing_on_early_termination_throws_on_all_ranks(world: World) -> None:
    model = build(Mlp)
    opt = sharded(model.parameters(), SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="exhausted"):
        train(world, model, opt, uneven(world), join={"throw_on_early_termination": True})


# ------------------------------------------------------------------ without DDP


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("name", CLASSES)
def test_the_optimizer_alone_may_be_joined(world: World, name: str) -> None:
    """Whoever still has inputs holds the gradient; here it is the same on all of them."""
    cls, options = CLASSES[name]
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    opt = sharded(model.parameters(), cls, **options)
    twin = cls(expected.parameters(), **options)

    def gradient(net: Any, step: int) -> None:
        """Of all ranks' data, known to each."""
        net.zero_grad()
        sum(hooks(net, batch_of(net, rank, step)) for rank in range(world.size)).backward()

    with Join([opt]):
        for step in range(inputs[world.rank]):
            gradient(model, step)
            opt.step()
    for step in range(ROUNDS, ROUNDS + 2):  # and on, outside of the context
        gradient(model, step)
        opt.step()
    for step in range(ROUNDS + 2):
        gradient(expected, step)
        twin.step()
    compare(world, model, expected, exact=False)


@distributed(2, 4)
def test_a_subgroup_may_be_joined(world: World) -> None:
    members = [1] if world.size == 2 else [1, 3]
    group = dist.new_group(members)
    if world.rank not in members:
        return
    model = build(Mlp)
    opt = sharded(model.parameters(), SGD, process_group=group, lr=0.1)
    ddp = DistributedDataParallel(model, process_group=group)
    with Join([ddp, opt]):
        for step in range(2 + opt.rank):
            opt.zero_grad()
            ddp(batch_of(model, opt.rank, step)).backward()
            opt.step()
    expected = build(Mlp)
    small = World(opt.rank, len(members), world.device)
    reference(small, expected, lambda p: SGD(p, lr=0.1), [2 + r for r in range(len(members))])
    assert_same_on_all_ranks(model, group)
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


@distributed(2, 3)
def test_two_optimizers_may_be_joined(world: World) -> None:
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    first = sharded(model.first.parameters(), SGD, lr=0.1, momentum=0.9)
    rest = sharded([*model.norm.parameters(), *model.second.parameters()], Adam, lr=0.01)
    ddp = DistributedDataParallel(model)
    with Join([ddp, first, rest]):
        for step in range(inputs[world.rank]):
            model.zero_grad()
            ddp(batch_of(model, world.rank, step)).backward()
            first.step()
            rest.step()

    class Both:
        """Two plain optimizers as one."""

        def __init__(self, net: Any) -> None:
            self.optimizers = [
                SGD(net.first.parameters(), lr=0.1, momentum=0.9),
                Adam([*net.norm.parameters(), *net.second.parameters()], lr=0.01),
            ]

        def zero_grad(self) -> None:
            for opt in self.optimizers:
                opt.zero_grad()

        def step(self) -> None:
            for opt in self.optimizers:
                opt.step()

    reference(world, expected, lambda _: Both(expected), inputs)  # type: ignore[arg-type]
    compare(world, model, expected)


@distributed(2)
def test_sparse_gradients_are_refused_on_all_ranks(world: World) -> None:
    table = nn.Embedding(10, 4, sparse=True)
    opt = ZeroRedundancyOptimizer(table.parameters(), SGD, partition="whole", lr=0.1)

    def run() -> None:
        with Join([opt]):
            for _ in range(1 + world.rank):
                opt.zero_grad()
                table(torch.tensor([1, 2])).sum().backward()
                opt.step()

    with pytest.raises(ValueError, match="sparse"):
        run()


# ------------------------------------------------------------------ attached


@pytest.mark.also_c10d
@distributed(2, 3)
@EVERY_FEED
@pytest.mark.parametrize("divide", [True, False], ids=["by all", "by those that go on"])
@pytest.mark.parametrize("name", CLASSES)
def test_uneven_inputs(world: World, hooks: str, divide: bool, name: str) -> None:
    cls, options = CLASSES[name]
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    reference(
        *(world, expected, lambda params: cls(params, **options), inputs),
        divide_by_initial_world_size=divide,
    )
    train_attached(world, model, sharded(model.parameters(), cls, **options), hooks, inputs, divide)
    compare(world, model, expected, exact=world.size <= 2 and divide)


@pytest.mark.also_c10d
@distributed(2, 3)
@EVERY_FEED
def test_a_joined_rank_follows_the_schedulers_of_the_others(world: World, hooks: str) -> None:
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    reference(world, expected, lambda p: SGD(p, lr=0.1), inputs, gamma=0.5)
    train_attached(world, model, sharded(model.parameters(), SGD, lr=0.1), hooks, inputs, gamma=0.5)
    compare(world, model, expected)


@pytest.mark.also_c10d
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


@pytest.mark.also_c10d
@distributed(2, 3)
@EVERY_FEED
def test_ranks_that_have_joined_take_part_in_clipping(world: World, hooks: str) -> None:
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

    train_attached(world, model, opt, hooks, inputs, look=ours)
    assert found == pytest.approx(norms[: inputs[world.rank]])
    compare(world, model, expected, exact=False)


@pytest.mark.also_c10d
@distributed(2, 3)
@EVERY_FEED
def test_a_step_that_the_scaler_skips_is_skipped_by_ranks_that_have_joined(
    world: World, hooks: str
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
    module = DistributedDataParallel(model) if hooks == "ddp" else model
    opt.attach(module)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=100)
    with Join([module, opt] if hooks == "ddp" else [opt]):
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


@pytest.mark.also_c10d
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


@pytest.mark.also_c10d
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
                hooks(ddp, batch_of(model, world.rank, step)).backward()
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


@pytest.mark.also_c10d
@distributed(2, 3, timeout=20, pg_timeout=5)
def test_zero_grad_after_a_step_is_nothing_to_tell_for_ranks_that_own_nothing(world: World) -> None:
    inputs = uneven(world)
    model, expected = build(OneLayer), build(OneLayer)
    reference(world, expected, lambda p: SGD(p, lr=0.01), inputs)
    opt = sharded(model.parameters(), SGD, lr=0.01, partition="whole")
    train_attached(world, model, opt, "module", inputs)
    compare(world, model, expected, exact=False)


@pytest.mark.also_c10d
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
        rank_group = transport_of(opt)
        assert find_round(rank_group, turn) == JoinRound(rank_group, Turn.SKIP, 1, (0,))
        return
    with pytest.raises(RanksDisagree, match=rf"STEP\n  rank {world.size - 1}: SKIP"):
        find_round(transport_of(opt), turn)


def train_attached(
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
            hooks(module, batch_of(model, world.rank, step)).backward()
            look(step)
            opt.step()
            if scheduler is not None:
                scheduler.step()
    assert all(torch.isfinite(param).all() for param in model.parameters())


# ---------------------------------------- attached, what joined ranks have to follow


@pytest.mark.also_c10d
@distributed(2, 3)
def test_lazy_gathers_end_with_each_step_inside_join(world: World) -> None:
    """DDP sends its parameters around when the context ends."""
    inputs = uneven(world)
    model, expected = build(Mlp), build(Mlp)
    reference(world, expected, lambda p: SGD(p, lr=0.1), inputs)
    optimizer = sharded(model.parameters(), SGD, lr=0.1)
    ddp = DistributedDataParallel(model)
    optimizer.attach(ddp, lazy_gather=True)
    with Join([ddp, optimizer]):
        for step in range(inputs[world.rank]):
            ddp(batch_of(model, world.rank, step)).backward()
            optimizer.step()
            assert not in_flight(optimizer)
    optimizer.assert_replicas_equal()
    compare(world, model, expected, exact=False)


@pytest.mark.also_c10d
@distributed(2, 3)
@pytest.mark.parametrize("whose", ["optimizer", "module"])
def test_gradients_dropped_inside_join_are_dropped_by_joined_ranks(
    world: World, whose: str
) -> None:
    inputs, dropped = uneven(world), 3  # when some ranks have joined
    model, expected = build(Mlp), build(Mlp)
    reference(
        *(world, expected, lambda p: SGD(p, lr=0.1), inputs),
        look=lambda _, step: "skip" if step == dropped else None,
    )
    optimizer = sharded(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    with Join([optimizer]):
        for step in range(inputs[world.rank]):
            model(batch_of(model, world.rank, step)).backward()
            if step == dropped:
                (optimizer if whose == "optimizer" else model).zero_grad()
            else:
                optimizer.step()
    compare(world, model, expected, exact=False)


@pytest.mark.also_c10d
@distributed(2, 3)
def test_a_step_that_our_scaler_skips_as_drop_in_is_skipped_by_joined_ranks(world: World) -> None:
    inputs, bad = uneven(world), 3
    model, expected = build(Mlp), build(Mlp)
    reference(
        *(world, expected, lambda p: SGD(p, lr=0.1), inputs),
        look=lambda _, step: "skip" if step == bad else None,
    )
    optimizer = sharded(model.parameters(), SGD, lr=0.1)
    ddp, scaler = DistributedDataParallel(model), GradScaler("cpu", init_scale=4.0)
    with Join([ddp, optimizer]):
        for step in range(inputs[world.rank]):
            loss = ddp(batch_of(model, world.rank, step))
            scaler.scale(loss * (torch.inf if step == bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    compare(world, model, expected, exact=False)


@pytest.mark.also_c10d
@distributed(2, 3, timeout=40, pg_timeout=8)
def test_buckets_leave_during_backward_again_after_join(world: World) -> None:
    """Inside it they wait for DDP, which asks ranks that have joined for unused parameters."""
    inputs = uneven(world)
    model = build(Mlp)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = sharded(model.parameters(), SGD, lr=0.1)
    optimizer.attach(ddp)
    reducer = reducer_of(optimizer)
    begin, kept = reducer.begin, []

    def watched(keeps_back: bool = False) -> None:
        kept.append(keeps_back)
        begin(keeps_back)

    def step(number: int) -> None:
        ddp(batch_of(model, world.rank, number)).backward()
        optimizer.step()

    with mock.patch.object(reducer, "begin", watched):
        step(0)
        with Join([ddp, optimizer]):
            for number in range(inputs[world.rank]):
                step(number)
        step(0)
    assert kept == [False, *[True] * max(inputs), False]
    optimizer.assert_replicas_equal()


class Broken(Exception):
    pass


def breaks(_: torch.Tensor) -> None:
    raise Broken


@distributed(2, 3)
def test_a_backward_that_raised_ends_a_look_at_gradients_on_joined_ranks_too(
    world: World,
) -> None:
    model = Products(10, 10)
    ones = [torch.ones(10), torch.ones(10)]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
    optimizer.attach(model)
    dropped = 0
    with Join([optimizer]):
        for batch in range(3 if world.rank == 0 else 1):
            early = model.weights[0] * 1.0  # so that backward comes there last
            loss = model(ones) + early.sum()
            if batch == 1:
                early.register_hook(breaks)
            with contextlib.suppress(Broken):
                loss.backward()
            try:
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
            except RuntimeError:
                dropped += 1
            optimizer.zero_grad()
    assert dropped == (world.rank == 0)


class Shared(nn.Module):
    """A weight that is used in two checkpointed parts: its gradient comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(lambda h: h * self.weight, x, use_reentrant=True)
        return x.sum()


@distributed(2, 3)
def test_a_second_round_between_two_backwards_waits_for_nobody_who_has_joined(
    world: World,
) -> None:
    model = Shared()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    with Join([optimizer]):
        for _ in range(2 if world.rank == 0 else 1):
            for _ in range(2):
                model(torch.ones(10, requires_grad=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.assert_replicas_equal()
    assert (model.weight < 1).all()


@distributed(2, fresh=True, pg_timeout=30)
def test_a_wait_inside_join_ends_with_a_signal(world: World) -> None:
    param = nn.Parameter(torch.zeros(10))
    optimizer = ZeroRedundancyOptimizer([param], SGD, lr=1.0)
    if world.rank == 1:
        time.sleep(4)
        os._exit(0)
    param.grad = torch.ones(10)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt), Join([optimizer]):
        optimizer.step()
    assert time.monotonic() - start < 3


# ---------------------------------------- options and parameters that change


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


@distributed(2, 3)
def test_a_scheduler_under_join_is_no_disagreement(world: World) -> None:
    os.environ["ONECOPY_CHECK"] = "step"
    model = DistributedDataParallel(TwoLayers())
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    with Join([model, opt]):
        for i in range(1 + world.rank):
            opt.zero_grad()
            model(torch.full((2, 4), float(i + world.rank))).backward()
            opt.step()
            scheduler.step()
    opt.assert_replicas_equal()


@distributed(2, 3)
def test_parameters_may_be_unfrozen_after_a_rank_has_joined(world: World) -> None:
    params = [random_parameter(9), random_parameter(5, 4)]
    params[1].requires_grad_(False)
    start = params[1].detach().clone()
    opt = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    with Join([opt]):
        for i in range(1 + 2 * world.rank):
            if i == 1:
                params[1].requires_grad_(True)
            for param in params:
                param.grad = torch.ones_like(param) if param.requires_grad else None
            opt.step()
    opt.assert_replicas_equal()
    last = 2 * (world.size - 1)  # how often the rank with the most inputs stepped it
    expected = start
    for _ in range(last):
        expected = expected - 0.1
    assert torch.equal(params[1], expected)


@distributed(2, 3)
@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_join_works_with_tensors_for_betas(world: World, cls: Any) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(5, 5))
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    lr = torch.tensor(1e-3)
    opt = ZeroRedundancyOptimizer(model.parameters(), cls, lr=lr, betas=betas, foreach=False)
    before = model.module.weight.detach().clone()
    with Join([model, opt]):
        for _ in range(1 + world.rank):
            model(torch.ones(2, 5)).sum().backward()
            opt.step()
            opt.zero_grad()
    opt.assert_replicas_equal()
    assert not torch.equal(model.module.weight, before)
    assert all(isinstance(beta, torch.Tensor) for beta in opt.param_groups[0]["betas"])
