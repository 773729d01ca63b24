"""Uneven inputs: a rank that has run out of them still owns pieces, and they must follow.

The reference is computed by hand on every rank: in each iteration the gradients of the ranks that
still have inputs, zeros for those that have none, summed and divided as DDP does, and a plain
optimizer on the result. DDP multiplies by 1/W before it sums, and gloo's sum of more than two
numbers depends on the order, so the comparison is exact on two ranks and to a few bits on more;
replicas are compared bit for bit always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed
from inside import watch_joined
from models import SMALL_BUCKETS, BranchNet, ConvNet, Mlp, assert_same_on_all_ranks, feed
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR

from onecopy import ZeroRedundancyOptimizer

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
            feed(model, batch_of(model, rank, step)).backward()
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
            feed(wrapped, batch_of(model, world.rank, step)).backward()
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
        sum(feed(net, batch_of(net, rank, step)) for rank in range(world.size)).backward()

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
