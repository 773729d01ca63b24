"""Traps that other sharded optimizers have fallen into, each a test with the trap as its name.

Attached mode is where most of them lie, and every rank has data of its own. These are tested
exactly where their subject is, and not again here:

    reentrant checkpointing fires hooks in parts -> test_attached::test_activation_checkpointing
    group rank is not global rank -> test_attached::test_a_subgroup_whose_ranks_are_others,
        test_parity::test_subgroups_with_ranks_of_their_own_are_bit_equal
    options of groups flow both ways (drop-in) -> test_manners::test_options_travel_both_ways
    the caller's state dict is changed -> test_state::
        test_w16_loading_neither_changes_nor_keeps_the_callers_dict
    methods with other argument names -> test_contract::test_a_method_takes_torchs_arguments
    empty tensors, more ranks than elements (drop-in) -> test_parity::
        test_odd_shapes_are_bit_equal, test_ranks_that_own_nothing_take_part
    state that does not exist yet (drop-in) -> test_checkpoint::
        test_what_is_saved_before_the_first_step_gives_the_same_first_step,
        test_a_parameter_without_gradients_until_now_begins_after_the_load
    tied weights, channels_last -> test_attached::test_models, test_lazy::test_training_is_the_same,
        test_checkpoint::test_a_tied_weight_is_saved_once_under_its_first_name
    a contiguous gradient of a channels_last weight -> test_parity::
        test_gradients_in_another_memory_format_are_paired_with_the_right_elements
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attached import EVERY_FEED, AttachedTwins
from contract import Halving
from harness import World, distributed
from inside import local_of, plan_of
from models import BranchNet, Mlp, noise, seed_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from onecopy import GradScaler, ZeroRedundancyOptimizer


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


# ---------------------------------------- memory in flight ------------------------------------


def overwrite_what_is_free(model: nn.Module) -> None:
    """Take the memory that was just given back, and fill it with NaN."""
    gc.collect()
    taken = [torch.full_like(param, math.nan) for param in model.parameters() for _ in range(8)]
    assert all(tensor.isnan().all() for tensor in taken)


@distributed(1, 2, 3, 4)
@EVERY_FEED
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_memory_is_reused_while_a_collective_still_reads_it(
    world: World, feed: str, lazy: bool
) -> None:
    torch.manual_seed(0)
    zero = {"bucket_mb": 1e-4}  # more buckets than there are buffers for
    twins = AttachedTwins(
        *(world, Mlp(), AdamW, feed), zero=zero, attach={"lazy_gather": lazy}, lr=0.01
    )
    # What a fast rank sends is in flight until the slowest has come to receive it.
    twins.model.norm.weight.register_hook(lambda _: time.sleep(0.004 * world.rank))
    for _ in range(4):
        twins.backward()
        overwrite_what_is_free(twins.model)
        twins.optimizer.step()
        overwrite_what_is_free(twins.model)
        twins.plain.step()
        twins.plain.zero_grad()
    twins.assert_same()


# ---------------------------------------- backward in phases ------------------------------------


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
def test_a_backward_inside_forward_fires_the_hooks_in_phases(world: World, feed: str) -> None:
    torch.manual_seed(0)
    model = TwoLosses()
    plain = copy.deepcopy(model)
    module = DistributedDataParallel(model, find_unused_parameters=True) if feed == "ddp" else model
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
def test_no_sync_ends_with_an_exception_or_inside_another(world: World, feed: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, feed, lr=0.1)
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


# ---------------------------------------- odd sizes and forms ------------------------------------


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
    world: World, feed: str, partition: str, shapes: list[tuple[int, ...]]
) -> None:
    shelf = Shelf(functools.partial(parameters, *shapes))
    zero = {"partition": partition}
    twins = AttachedTwins(world, shelf, AdamW, feed, zero=zero, lr=0.1)
    owned = sum(owned.piece.numel for owned in local_of(twins.optimizer).pieces)
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
    world: World, feed: str, make: Callable[[], list[torch.Tensor]], flat: bool
) -> None:
    strides = [param.stride() for param in make()]
    zero = {"parameters_as_bucket_view": flat}
    twins = AttachedTwins(world, Shelf(make), AdamW, feed, zero=zero, lr=0.1)
    for _ in range(3):
        twins.backward()
        twins.step()
        twins.assert_same()
    assert [param.stride() for param in twins.model.shelf] == strides
    assert any(not param.is_contiguous() for param in twins.model.shelf)


# ---------------------------------------- numbers ----------------------------------------


@distributed(1, 2, 3, 4)
@EVERY_FEED
def test_what_lies_in_the_padding_does_not_count(world: World, feed: str) -> None:
    """16-bit parameters begin at multiples of 64 elements. What is between them travels with them,
    and after a NaN in some gradient it may be one."""
    shapes = [(65,), (3, 50), (1,), (130,)] * 3
    make = functools.partial(parameters, *shapes, dtype=torch.bfloat16)
    # Smaller buckets than those, so that they take turns in the same staging.
    twins = AttachedTwins(world, Shelf(make), SGD, feed, zero={"bucket_mb": 1e-4}, lr=1e-3)
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
def test_a_sum_of_float16_gradients_overflows(world: World, feed: str, reduce_dtype: Any) -> None:
    model = nn.Linear(5, 7, bias=False, dtype=torch.float16)
    module = DistributedDataParallel(model) if feed == "ddp" else model
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


# ---------------------------------------- options ----------------------------------------


@distributed(1, 2, 3)
@EVERY_FEED
def test_options_of_groups_flow_both_ways_in_every_step(world: World, feed: str) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        weights = [p for p in model.parameters() if p.ndim > 1]
        biases = [p for p in model.parameters() if p.ndim == 1]
        return [{"params": weights}, {"params": biases, "lr": 0.25}]

    torch.manual_seed(0)
    zero = {"partition": "elementwise"}
    twins = AttachedTwins(world, Mlp(), Halving, feed, groups=groups, zero=zero, lr=0.5)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for optimizer in (twins.plain, twins.optimizer)
    ]
    for step in range(1, 5):
        for optimizer in (twins.plain, twins.optimizer):
            optimizer.param_groups[0]["mine"] = step
            if step == 3:
                optimizer.param_groups[1]["lr"] = 0.125
                optimizer.param_groups[1]["steps_seen"] = 10
        twins.train(1)
        pairs = zip(twins.optimizer.param_groups, twins.plain.param_groups, strict=True)
        for group, plain in pairs:
            options = {key: value for key, value in plain.items() if key != "params"}
            assert {key: group[key] for key in options} == options  # "steps_seen" came from inside
        assert twins.optimizer.optim.param_groups[0]["mine"] == step
        for scheduler in schedulers:
            scheduler.step()


# ---------------------------------------- checkpoints ----------------------------------------


def rank_0_goes_left(seed: Any) -> tuple[bool, bool]:
    rank, step = seed
    return rank == 1, step > 3  # seeds begin with one


@distributed(1, 2, 3, timeout=30)
@EVERY_FEED
def test_state_made_lazily_gives_ranks_other_keys_and_a_save_hangs(
    world: World, feed: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(
        *(world, BranchNet(rank_0_goes_left), AdamW, feed),
        ddp={"find_unused_parameters": True},
        lr=0.01,
    )
    for step in range(3):  # before any; with `left` on rank 0 alone; with `right` too
        if step:
            twins.backward()
            twins.step()
        path = tmp_path / str(step)
        sharded = twins.optimizer.sharded(twins.model)
        keys = everyones(sorted(sharded.state_dict()))
        assert keys.count(keys[0]) == world.size
        dcp.save({"optim": sharded}, checkpoint_id=path)
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        for name, param in twins.model.named_parameters():
            assert saved[f"optim.state.{name}.exp_avg"].size == param.shape
            assert saved[f"optim.state.{name}.step"].size == ()  # and is not cut
    other = ZeroRedundancyOptimizer(twins.model.parameters(), AdamW, lr=0.5)
    dcp.load({"optim": other.sharded(twins.model)}, checkpoint_id=path)
    for optimizer in (twins.optimizer, other):
        optimizer.consolidate_state_dict(to=0)
    if world.rank == 0:
        loaded, expected = other.state_dict()["state"], twins.plain.state_dict()["state"]
        for number, state in expected.items():
            assert loaded[number]["step"].shape == ()
            assert loaded[number]["step"] == state["step"]
        assert loaded.keys() == twins.optimizer.state_dict()["state"].keys()


# ---------------------------------------- groups of ranks ----------------------------------------


@distributed(4)
@EVERY_FEED
def test_a_layout_for_more_ranks_than_the_group_has_leaves_the_tail_unchanged(
    world: World, feed: str
) -> None:
    members = [0, 2, 3]
    group = dist.new_group(members)
    if world.rank not in members:
        return
    torch.manual_seed(0)
    twins = AttachedTwins(
        *(world, Mlp(), SGD, feed),
        ddp={"process_group": group},
        zero={"process_group": group, "bucket_mb": 25},
        lr=0.1,
    )
    assert plan_of(twins.optimizer).world_size == len(members)
    owned = torch.tensor(sum(owned.piece.numel for owned in local_of(twins.optimizer).pieces))
    dist.all_reduce(owned, group=group)
    assert owned == sum(param.numel() for param in twins.model.parameters())
    before = [param.detach().clone() for param in twins.model.parameters()]
    twins.backward()
    twins.step()
    twins.assert_same()
    for param, start in zip(twins.model.parameters(), before, strict=True):
        assert (param != start).all()
    models.assert_same_on_all_ranks(twins.model, group)
