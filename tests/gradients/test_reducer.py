"""Buckets of gradients in attached mode: phases, second rounds, odd sizes and forms, numbers."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import resource
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from attached import EVERY_FEED, AttachedTwins
from harness import World, distributed
from inside import (
    local_of,
    plan_of,
)
from models import Mlp, noise, seed_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from onecopy import GradScaler, RanksDisagree, ZeroRedundancyOptimizer
from onecopy.planning.sizes import SHARED_BUFFERS

# ------------------------------------------------------------------ backward in phases


class Shelf(nn.Module):
    """The parameters that `make` returns, whatever their form. A copy of it makes them again,
    because a copy of a tensor with gaps in its memory has none."""

    def __init__(self, make: Callable[[], Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self.make = make
        self.shelf = nn.ParameterList(make())

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.shelf, batch, strict=True)
        return torch.stack([(param * x).square().sum().float() for param, x in pairs]).sum()

    def batch(self, seed: Iterable[int]) -> tuple[torch.Tensor, ...]:
        return tuple(
            noise(*param.shape, seed=(*seed, number), dtype=param.dtype)
            for number, param in enumerate(self.shelf)
        )

    def __deepcopy__(self, _: Any) -> Shelf:
        return Shelf(self.make)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [noise(*shape, seed=(7, n), dtype=dtype) for n, shape in enumerate(shapes)]


def everyones(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class TwoLosses(nn.Module):
    """The first is differentiated inside forward. Both use the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 9)
        self.inner = nn.Linear(9, 7)
        self.outer = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner(torch.tanh(self.trunk(x))).square().mean().backward()
        return self.outer(torch.tanh(self.trunk(x))).square().mean()

    def batch(self, seed: Iterable[int]) -> torch.Tensor:
        return noise(4, 5, seed=seed)


@distributed(1, 2, 3)
@EVERY_FEED
def test_a_backward_inside_forward_fires_the_hooks_in_phases(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    model = TwoLosses()
    plain = copy.deepcopy(model)
    module = (
        DistributedDataParallel(model, find_unused_parameters=True) if hooks == "ddp" else model
    )
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, bucket_mb=1e-4, lr=0.1)
    optimizer.attach(module)
    reference = SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        batch = model.batch(seed_of(world, step))
        module(batch).backward()
        plain(batch).backward()
        models.average_gradients(plain.parameters())  # DDP would leave those of `inner` alone
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(optimizer.full_grad(mine), theirs.grad)
        optimizer.step()
        reference.step()
        reference.zero_grad()
    models.assert_same_on_all_ranks(model)


@distributed(1, 2)
@EVERY_FEED
def test_no_sync_ends_with_an_exception_or_inside_another(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    with pytest.raises(ZeroDivisionError), twins.no_sync():
        raise ZeroDivisionError
    twins.backward()  # is averaged
    twins.assert_same_gradients()
    twins.step()
    with twins.no_sync():
        with twins.no_sync():
            twins.backward()
        twins.backward()  # is not yet
        assert all(param.grad is not None for param in twins.model.parameters())
    twins.backward()
    twins.assert_same_gradients()
    twins.step()
    twins.assert_same()


# ------------------------------------------------------------------ second rounds


class UsedTwice(nn.Module):
    """With reentrant checkpointing, the second gradient of the weight comes late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True).square().sum()


@pytest.mark.also_c10d
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


@pytest.mark.also_c10d
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


@pytest.mark.also_c10d
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


# ------------------------------------------------------------------ attached beside others


class Products(nn.Module):
    """A sum of products: the gradient of each parameter is its factor."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.slow: int | None = None  # the parameter before whose gradient backward sleeps

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for index, (weight, factor) in enumerate(zip(self.weights, factors, strict=False)):
            product = weight * factor
            if index == self.slow:
                product.register_hook(lambda _: time.sleep(0.3))
            total = total + product.sum()
        return total

    def factors(self, rank: int) -> list[torch.Tensor]:
        source = torch.Generator().manual_seed(rank)
        return [torch.randn(weight.shape, generator=source) for weight in self.weights]


@contextlib.contextmanager
def without_file_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@distributed(2)
@pytest.mark.parametrize("lazy", [False, True])
def test_attaching_without_memory_on_one_rank_is_refused_on_all_and_undone(
    world: World, lazy: bool
) -> None:
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Linear(10, 2))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=1.0)
    starved = without_file_descriptors() if world.rank == 0 else contextlib.nullcontext()
    with pytest.raises((OSError, RuntimeError), match="Too many open files"), starved:
        optimizer.attach(module, lazy_gather=lazy)
    module(torch.full((1, 10), float(world.rank))).sum().backward()
    weight = module.module.weight
    assert weight.grad.unique().tolist() == [0.5]
    before = weight.detach().clone()
    if world.rank == 0:
        with pytest.raises((OSError, RuntimeError), match="Too many"), without_file_descriptors():
            optimizer.step()
    assert torch.equal(weight, before)
    optimizer.step()
    torch.testing.assert_close(weight, before - 0.5)
    optimizer.assert_replicas_equal()


@distributed(2, 3)
def test_two_attached_optimizers_in_one_backward_do_not_mix_their_gradients(world: World) -> None:
    """Rank 0 does not use a parameter of the first, so its buckets leave in another order."""
    first, second = Products(50, 50), Products(50, 50)
    optimizers = []
    for model in (first, second):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
        optimizer.attach(model)
        optimizers.append(optimizer)
    ones, tens = torch.ones(50), torch.full((50,), 10.0)
    of_second = second([tens, tens])
    (first([ones] if world.rank == 0 else [ones, ones]) + of_second).backward()
    found = [
        [float(optimizer.full_grad(weight).mean()) for weight in model.weights]
        for optimizer, model in zip(optimizers, (first, second), strict=True)
    ]
    partly = (world.size - 1) / world.size
    torch.testing.assert_close(found, [[1.0, partly], [10.0, 10.0]])


@distributed(2, 3)
def test_gradients_about_which_the_ranks_disagree_are_dropped_on_all(world: World) -> None:
    model = Products(100)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
    optimizer.attach(model)
    model([torch.ones(100)]).backward()
    if world.rank == 1:
        optimizer.zero_grad()
    model([torch.ones(100)]).backward()
    with pytest.raises(RanksDisagree, match="backward"):
        optimizer.step()
    optimizer.step()
    assert not model.weights[0].any()
    model([torch.ones(100)]).backward()
    optimizer.step()
    assert (model.weights[0] == -1).all()


@distributed(2)
def test_a_frozen_parameter_may_be_ddps_and_not_the_optimizers(world: World) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module = DistributedDataParallel(net, find_unused_parameters=True)
    net[0].requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer(net[1].parameters(), SGD, lr=0.1)
    optimizer.attach(module)
    before = net[1].weight.detach().clone()
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(net[1].weight, before)


# ------------------------------------------------------------------ odd sizes and forms


@distributed(1, 3)
@EVERY_FEED
@pytest.mark.parametrize("partition", ["elementwise", "whole"])
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(3,), (0,), (4, 0, 2), ()], id="no elements"),
        pytest.param([(2,)], id="more ranks than elements"),
        pytest.param([(70, 3), (5,)], id="more ranks than parameters"),
    ],
)
def test_empty_parameters_and_empty_shards(
    world: World, hooks: str, partition: str, shapes: list[tuple[int, ...]]
) -> None:
    shelf = Shelf(functools.partial(parameters, *shapes))
    zero = {"partition": partition}
    twins = AttachedTwins(world, shelf, AdamW, hooks, zero=zero, lr=0.1)
    owned = sum(owned.shard.numel for owned in local_of(twins.optimizer).shards)
    assert sum(everyones(owned)) == sum(map(math.prod, shapes))
    twins.train(3)
    twins.backward()
    expected = torch.stack([p.grad.norm() for p in twins.plain_model.parameters()]).norm()
    torch.testing.assert_close(twins.optimizer.grad_norm(), expected)


def with_gaps() -> list[torch.Tensor]:
    return [
        noise(13, 10, seed=(1,))[:, ::2],
        noise(9, seed=(3,)),
        noise(4, 6, 5, seed=(2,))[:, 1:4].transpose(0, 2),
    ]


def permuted() -> list[torch.Tensor]:
    conv = noise(4, 3, 3, 3, seed=(1,)).to(memory_format=torch.channels_last)
    return [conv, noise(11, 7, seed=(2,)).t(), noise(3, 5, 4, seed=(3,)).permute(2, 0, 1)]


@distributed(1, 2, 3, 4)
@EVERY_FEED
@pytest.mark.parametrize("make", [with_gaps, permuted])
@pytest.mark.parametrize("flat", [False, True], ids=["own storage", "bucket view"])
def test_parameters_that_are_not_contiguous(
    world: World, hooks: str, make: Callable[[], list[torch.Tensor]], flat: bool
) -> None:
    strides = [param.stride() for param in make()]
    zero = {"parameters_as_bucket_view": flat}
    twins = AttachedTwins(world, Shelf(make), AdamW, hooks, zero=zero, lr=0.1)
    for _ in range(3):
        twins.backward()
        twins.step()
        twins.assert_same()
    assert [param.stride() for param in twins.model.shelf] == strides
    assert any(not param.is_contiguous() for param in twins.model.shelf)


@distributed(4)
@EVERY_FEED
def test_a_layout_for_more_ranks_than_the_group_has_leaves_the_tail_unchanged(
    world: World, hooks: str
) -> None:
    members = [0, 2, 3]
    group = dist.new_group(members)
    if world.rank not in members:
        return
    torch.manual_seed(0)
    twins = AttachedTwins(
        *(world, Mlp(), SGD, hooks),
        ddp={"process_group": group},
        zero={"process_group": group, "bucket_mb": 25},
        lr=0.1,
    )
    assert plan_of(twins.optimizer).world_size == len(members)
    owned = torch.tensor(sum(owned.shard.numel for owned in local_of(twins.optimizer).shards))
    dist.all_reduce(owned, group=group)
    assert owned == sum(param.numel() for param in twins.model.parameters())
    before = [param.detach().clone() for param in twins.model.parameters()]
    twins.backward()
    twins.step()
    twins.assert_same()
    for param, start in zip(twins.model.parameters(), before, strict=True):
        assert (param != start).all()
    models.assert_same_on_all_ranks(twins.model, group)


@pytest.mark.also_c10d
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
    assert len(everywhere) == len(local_of(optimizer).shards)


@pytest.mark.also_c10d
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


@pytest.mark.also_c10d
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
    model = ScalesEach([length if is_even else 3, *[length] * (2 * SHARED_BUFFERS)], wide)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), SGD, lr=1.0, bucket_mb=length * 2 / 2**20
    )
    optimizer.attach(model)
    assert len(plan_of(optimizer).buckets) == 2 * SHARED_BUFFERS + 1
    for step in range(3):
        model(2.0 * world.rank).backward()
        optimizer.step()
        for i, weight in enumerate(model.weights):
            expected = torch.full_like(weight, -(step + 1.0) * (world.size - 1) * (i + 1))
            torch.testing.assert_close(weight.detach(), expected)


# ------------------------------------------------------------------ numbers


@distributed(1, 2, 3, 4)
@EVERY_FEED
def test_what_lies_in_the_padding_does_not_count(world: World, hooks: str) -> None:
    """16-bit parameters begin at multiples of 64 elements. What is between them travels with them,
    and after a NaN in some gradient it may be one."""
    shapes = [(65,), (3, 50), (1,), (130,)] * 3
    make = functools.partial(parameters, *shapes, dtype=torch.bfloat16)
    # Smaller buckets than those, so that they take turns in the same staging.
    twins = AttachedTwins(world, Shelf(make), SGD, hooks, zero={"bucket_mb": 1e-4}, lr=1e-3)
    buckets = plan_of(twins.optimizer).buckets
    assert len(buckets) > 3 or world.size == 1
    assert sum(bucket.numel for bucket in buckets) > sum(map(math.prod, shapes)) + 64
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for poison in (math.nan, 1.0, math.inf, 1.0):
        before = [param.detach().clone() for param in twins.model.shelf]
        scaler.scale(twins.ddp(*(x * poison for x in twins.batch()))).backward()
        scaler.unscale_(twins.optimizer)
        full = [twins.optimizer.full_grad(param).float() for param in twins.model.shelf]
        for norm_type in (2.0, 1.0, math.inf, -math.inf, 0.0) if poison == 1.0 else ():
            expected = torch.nn.utils.get_total_norm(full, norm_type)
            found = twins.optimizer.grad_norm(norm_type)
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)
        scale = scaler.get_scale()
        scaler.step(twins.optimizer)
        scaler.update()
        assert scaler.get_scale() == (2 if poison == 1.0 else 0.5) * scale
        stood_still = all(map(torch.equal, twins.model.shelf, before))
        assert stood_still == (poison != 1.0)


@distributed(1, 2, 3, 4)
@EVERY_FEED
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_a_sum_of_float16_gradients_overflows(world: World, hooks: str, reduce_dtype: Any) -> None:
    model = nn.Linear(5, 7, bias=False, dtype=torch.float16)
    module = DistributedDataParallel(model) if hooks == "ddp" else model
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-4)
    optimizer.attach(module, reduce_dtype=reduce_dtype)
    values = [60000.0 - 320 * rank for rank in range(world.size)]  # the greatest is 65504
    module(torch.full((1, 5), values[world.rank], dtype=torch.float16)).sum().backward()
    average = sum(values) / world.size
    found = optimizer.full_grad(model.weight).float()
    torch.testing.assert_close(found, torch.full((7, 5), average), rtol=2e-3, atol=0)
    before = model.weight.float()
    optimizer.step()
    torch.testing.assert_close(model.weight.float(), before - 1e-4 * average, rtol=1e-2, atol=0.02)


@distributed(2, 4)
def test_a_share_that_fits_a_narrow_wire_is_not_rounded_to_infinity_before(world: World) -> None:
    model = nn.Linear(5, 7, bias=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
    optimizer.attach(model, reduce_dtype=torch.float16)
    values = [100000.0 - 4000 * rank for rank in range(world.size)]  # half is less than 65504
    model(torch.full((1, 5), values[world.rank])).sum().backward()
    found = optimizer.full_grad(model.weight)
    average = sum(values) / world.size
    torch.testing.assert_close(found, torch.full((7, 5), average), rtol=1e-3, atol=0)
