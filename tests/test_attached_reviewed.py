"""Faults that a review of attached mode has found, each as a test."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed
from inside import in_flight, local_of, plan_of, reducer_of, shards_of
from models import Mlp, noise
from test_join import batch_of, build, compare, reference, sharded, uneven
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from onecopy import GradScaler, ZeroRedundancyOptimizer
from onecopy.buffers import Staging
from onecopy.gatherer import LENT


class UsedTwice(nn.Module):
    """With reentrant checkpointing, the second gradient of the weight comes late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True).square().sum()


@distributed(1, 2, 3)
def test_a_rank_that_owns_nothing_takes_part_in_a_second_round(world: World) -> None:
    model, plain_model = UsedTwice(), UsedTwice()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, partition="whole", lr=0.01)
    optimizer.attach(model)
    plain = SGD(plain_model.parameters(), lr=0.01)
    for step in range(2):
        x = noise(2, 4, seed=(world.rank + 1, step + 1)).requires_grad_()
        model(x).backward()
        optimizer.step()
        plain_model(x).backward()
        dist.all_reduce(plain_model.layer.weight.grad)
        plain_model.layer.weight.grad /= world.size
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(model.layer.weight, plain_model.layer.weight)


@distributed(1, 2, 3, timeout=20, pg_timeout=5)
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_group_that_is_added_before_a_second_round(world: World, is_trained: bool) -> None:
    model, plain_model = UsedTwice(), UsedTwice()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.01)
    model.register_parameter("more", nn.Parameter(torch.ones(3), requires_grad=False))
    optimizer.attach(model)
    x = noise(2, 4, seed=(world.rank + 1, 1)).requires_grad_()
    model(x).backward()
    model.more.requires_grad_(is_trained)
    optimizer.add_param_group({"params": [model.more]})
    plain_model(x).backward()
    dist.all_reduce(plain_model.layer.weight.grad)
    found = optimizer.full_grad(model.layer.weight)
    torch.testing.assert_close(found, plain_model.layer.weight.grad / world.size)
    assert optimizer.full_grad(model.more) is None


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, use_p: bool, factor: float) -> torch.Tensor:
        return ((self.p if use_p else self.q) * factor).sum()


@distributed(2, 3, 4)
def test_a_rank_that_owns_nothing_forgets_the_last_backward_too(world: World) -> None:
    model = OneOfTwo()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    model(True, world.rank).backward()
    optimizer.step()
    model(False, world.rank).backward()
    assert optimizer.full_grad(model.p) is None
    average = (world.size - 1) / 2
    assert float(optimizer.full_grad(model.q)) == pytest.approx(average)
    assert float(model.p.detach()) == pytest.approx(1 - 0.1 * average)


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


def to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


@distributed(1)
@pytest.mark.parametrize("change", [to_channels_last, nn.Module.double])
def test_one_rank_follows_a_module_that_changes_its_form(world: World, change: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 2))
    plain_model = copy.deepcopy(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    plain = SGD(plain_model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1:
            change(model)
            change(plain_model)
        x = torch.randn(2, 3, 6, 6).to(next(model.parameters()).dtype)
        for net, opt in ((model, optimizer), (plain_model, plain)):
            net(x).square().sum().backward()
            opt.step()
            opt.zero_grad()
        for mine, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


class Replacing(torch.optim.Optimizer):
    """Gives its parameters other memory in every step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


@distributed(1, 2, 3)
@pytest.mark.parametrize("master_dtype", [None, torch.float32])
def test_a_class_that_gives_parameters_other_memory(world: World, master_dtype: Any) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if master_dtype is None else torch.bfloat16
    model = Mlp().to(dtype)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), Replacing, bucket_mb=0.0005, master_dtype=master_dtype, lr=0.5
    )
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer.assert_replicas_equal()
    for param, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.float(), (old.float() - 1.0), rtol=0.01, atol=0.01)


class Lost(RuntimeError):
    """What a failed collective raises."""


def lost(*_: Any) -> Any:
    raise Lost


@distributed(2, 3)
def test_a_step_that_cannot_get_its_gradients_leaves_none_behind(world: World) -> None:
    """A class of another package has the gradients of all buckets at once."""
    model = Mlp()
    optimizer = sharded(model.parameters(), Replacing)
    optimizer.attach(model)
    model(model.batch((world.rank + 1, 1))).backward()
    reducer = reducer_of(optimizer)
    found, last = reducer.gradients_in, len(plan_of(optimizer).buckets) - 1
    assert last > 0
    failing = mock.patch.object(
        reducer, "gradients_in", lambda bucket: lost() if bucket == last else found(bucket)
    )
    with failing, pytest.raises(Lost):
        optimizer.step()
    assert all(owned.tensor.grad is None for owned in local_of(optimizer).pieces)


@distributed(1, 2)
@pytest.mark.parametrize("where", ["reducer", "gatherer"])
def test_detach_undoes_all_after_a_collective_has_failed(world: World, where: str) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    optimizer.attach(model, lazy_gather=True)
    shards = shards_of(optimizer)
    target, method = (
        (reducer_of(optimizer), "drop") if where == "reducer" else (shards.gatherer, "wait")
    )
    with mock.patch.object(target, method, lost), pytest.raises(Lost):
        optimizer.detach()
    assert "zero_grad" not in model.__dict__
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]
    assert shards.follower is None
    assert not shards.gathers_lazily
    model(model.batch((world.rank + 1, 1))).backward()
    assert all(param.grad is not None for param in model.parameters())
    with pytest.raises(RuntimeError, match="is not attached"):
        optimizer.detach()
    optimizer.attach(model)


@distributed(1)
def test_a_conversion_for_which_memory_is_lacking_can_be_taken_back(world: World) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    batch = model.batch((world.rank + 1, 1))
    model.double()
    with mock.patch.object(Staging, "reserve", lost), pytest.raises(Lost):
        model(batch.double()).backward()
    model.float()
    optimizer.zero_grad()
    before = [param.detach().clone() for param in model.parameters()]
    model(batch).backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(*_: Any) -> Any:
        raise Lost


@distributed(1, 2)
def test_the_gradients_of_a_backward_that_raised_are_not_shown(world: World) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].register_forward_hook(lambda _, __, output: Fails.apply(output))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    with pytest.raises(Lost):
        model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="has not come to its end"):
        optimizer.full_grad(model[1].weight)


@distributed(2)
def test_many_groups_are_stepped_by_buckets_and_come_back(world: World) -> None:
    params = [nn.Parameter(torch.full((9,), float(i))) for i in range(12)]
    optimizer = ZeroRedundancyOptimizer(
        [{"params": [param], "lr": 0.1 * i} for i, param in enumerate(params)], SGD, bucket_mb=1e-4
    )
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for i, param in enumerate(params):
        torch.testing.assert_close(param.detach(), torch.full((9,), i - 0.1 * i))
    assert len(optimizer.optim.param_groups) == 12
    everywhere = [t for group in optimizer.optim.param_groups for t in group["params"]]
    assert len(everywhere) == len(local_of(optimizer).pieces)


@distributed(1, 2)
def test_the_memory_report_knows_gradients_that_wait_for_the_next_backward(world: World) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    before = optimizer.memory_report().gradients
    with optimizer.no_sync():
        model(model.batch((world.rank + 1, 1))).backward()
    assert optimizer.memory_report().gradients - before == 328 * 4


class ScalesEach(nn.Module):
    """The gradient of parameter i is the input times i + 1; a bucket for each."""

    def __init__(self, lengths: Sequence[int], wide: Collection[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(n, dtype=torch.bfloat16) for n in lengths)
        for number in wide:
            self.weights[number].grad_dtype = torch.float32

    def forward(self, x: float) -> torch.Tensor:
        terms = ((weight.float() * x).sum() * (i + 1) for i, weight in enumerate(self.weights))
        return torch.stack(list(terms)).sum()


@distributed(2, 3, timeout=40, pg_timeout=8)
@pytest.mark.parametrize("is_even", [True, False], ids=["even", "a small last bucket"])
@pytest.mark.parametrize("wide", [(8,), (7,), (1, 4), (0, 2, 4, 6, 8), (0,)], ids=str)
def test_gradients_of_another_dtype_in_some_buckets(
    world: World, wide: tuple[int, ...], is_even: bool
) -> None:
    """The first parameter is in the last bucket."""
    if not hasattr(torch.ones(1), "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    length = 64 * world.size
    model = ScalesEach([length if is_even else 3, *[length] * (2 * LENT)], wide)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), SGD, lr=1.0, bucket_mb=length * 2 / 2**20
    )
    optimizer.attach(model)
    assert len(plan_of(optimizer).buckets) == 2 * LENT + 1
    for step in range(3):
        model(2.0 * world.rank).backward()
        optimizer.step()
        for i, weight in enumerate(model.weights):
            expected = torch.full_like(weight, -(step + 1.0) * (world.size - 1) * (i + 1))
            torch.testing.assert_close(weight.detach(), expected)


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
