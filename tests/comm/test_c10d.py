"""ONECOPY_COMM=c10d: the collectives of the backend instead of messages and shared memory.

The tests of attached mode, parity, hosts and the contract run this way, too (`conftest.py`). Here
is what they do not look at: which collectives run, what the switch may be, what memory it takes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed
from inside import (
    ALL_GATHER_SINGLE,
    FIND_LOCAL_RANKS,
    REDUCE_SCATTER_SINGLE,
    SHARED_MEMORY,
    held_gradients,
    lanes_of,
    plan_of,
    share_no_memory,
)
from models import Mlp, assert_same_on_all_ranks, hooks, seed_of
from torch import nn
from torch.optim import SGD, AdamW

from onecopy import RanksDisagree, ZeroRedundancyOptimizer, estimate
from onecopy.comm.c10d import C10dComm
from onecopy.comm.group import RankGroup
from onecopy.comm.interface import make_comm

COLLECTIVES = (
    ALL_GATHER_SINGLE,
    REDUCE_SCATTER_SINGLE,
    *((dist, name) for name in ("all_to_all_single", "broadcast", "isend", "irecv")),
)


def counting(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what is launched from now on."""
    calls: Counter[str] = Counter()

    def count(place: Any, name: str) -> None:
        function = getattr(place, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        patch.setattr(place, name, call)

    for place, name in COLLECTIVES:
        count(place, name)
    return calls


def train(world: World, model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        hooks(model, model.batch(seed_of(world, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()


def slots(optimizer: Any) -> list[torch.Tensor]:
    return [lane.slot.tensor.clone() for lane in lanes_of(optimizer)]


@distributed(2, 3, 4)
@pytest.mark.parametrize("partition", ["auto", "whole"])
def test_only_collectives_are_launched_and_no_memory_is_shared(
    world: World, partition: str
) -> None:
    torch.manual_seed(0)
    model = Mlp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONECOPY_COMM", "c10d")
        patch.setattr(*FIND_LOCAL_RANKS, lambda *_: pytest.fail("local_ranks"))
        patch.setattr(*SHARED_MEMORY, lambda *_: pytest.fail("shared memory"))
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), SGD, partition=partition, bucket_mb=0.0005, lr=0.1
        )
        optimizer.attach(model)
        calls = counting(patch)
        train(world, model, optimizer)
    plan, steps = plan_of(optimizer), 2
    equal = sum(plan.has_equal_slots(bucket) for bucket in range(len(plan.buckets)))
    uneven = len(plan.buckets) - equal
    gathered = len(plan.buckets) if partition == "auto" else 0
    assert calls[REDUCE_SCATTER_SINGLE[1]] == steps * equal
    assert calls["all_to_all_single"] == steps * uneven
    assert calls[ALL_GATHER_SINGLE[1]] == steps * gathered
    assert bool(calls["broadcast"]) == (partition == "whole")
    assert not calls["isend"]
    assert not calls["irecv"]
    assert_same_on_all_ranks(model)


@distributed(2, 3, 4)
@pytest.mark.parametrize("partition", ["auto", "whole"])
def test_parts_of_any_size_are_exchanged_at_once(world: World, partition: str) -> None:
    """Also no part at all, and parameters without elements between them. A remainder or a whole
    tensor is summed in the order of the ranks, as with messages when each is on its own host."""
    shapes = [(3,), (0,), (5, 2), (1,), (0, 4), (2,)]
    share_no_memory()
    found = []
    for comm in ("auto", "c10d"):
        torch.manual_seed(world.rank)
        params = nn.ParameterList(torch.randn(shape) for shape in shapes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ONECOPY_COMM", comm)
            optimizer = ZeroRedundancyOptimizer(
                params.parameters(), SGD, partition=partition, bucket_mb=1, lr=0.1
            )
            optimizer.attach(params)
            sum((p * torch.randn_like(p)).sum() for p in params).backward()
            held_gradients(optimizer)
        found.append(slots(optimizer))
    uneven = [b for b in range(len(found[0])) if not plan_of(optimizer).has_equal_slots(b)]
    assert uneven
    for bucket in uneven:
        assert torch.equal(found[0][bucket], found[1][bucket])


@distributed(2, 3, 4)
@pytest.mark.parametrize("held", ["wire", "master"])
def test_narrow_gradients_are_summed_in_the_dtype_they_are_held_in(world: World, held: str) -> None:
    """A backend would sum them in that of the wire: equal slots of narrow numbers are exchanged,
    and added up here. The terms are chosen so that a sum in bfloat16 is far off."""
    numel = 64 * world.size
    param = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16 if held == "master" else None))
    module = nn.ParameterList([param])
    options: Any = {"master_dtype": torch.float32} if held == "master" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONECOPY_COMM", "c10d")
        optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=1.0, **options)
        optimizer.attach(module, reduce_dtype=torch.bfloat16)
        assert all(map(plan_of(optimizer).has_equal_slots, range(len(plan_of(optimizer).buckets))))
        # 1 + 1/256 is rounded to 1 in bfloat16.
        share = world.size * (1.0 if world.rank == 0 else 2**-8)
        (param * share).sum().backward()
        held_gradients(optimizer)
    [slot] = slots(optimizer)
    assert torch.equal(slot, torch.full_like(slot, 1 + (world.size - 1) * 2**-8))


@distributed(2, 3, 4)
def test_complex_parameters_are_native_too(world: World) -> None:
    found = []
    for comm in ("auto", "c10d"):
        torch.manual_seed(0)
        module = nn.ParameterList([torch.randn(7, dtype=torch.complex64), torch.randn(8)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ONECOPY_COMM", comm)
            optimizer = ZeroRedundancyOptimizer(
                module.parameters(), AdamW, partition="whole", lr=0.1
            )
            optimizer.attach(module)
            for _ in range(2):
                sum(p.abs().square().sum() * (world.rank + 1) for p in module).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([p.detach().clone() for p in module])
    torch.testing.assert_close(found[0], found[1])


# ------------------------------------------------------------------ the switch


@distributed(2, 3, 4)
def test_ranks_that_choose_differently_disagree_at_once(world: World) -> None:
    params = list(Mlp().parameters())
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setenv("ONECOPY_COMM", "c10d")
        with pytest.raises(RanksDisagree, match=r"ONECOPY_COMM=auto\n.*ONECOPY_COMM=c10d"):
            ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    for asked in ("auto", "c10d", ""):  # and nothing is broken
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ONECOPY_COMM", asked)
            rank_group = RankGroup()
        assert rank_group.is_native(torch.device("cpu")) == (asked == "c10d")
        assert isinstance(make_comm(rank_group, torch.device("cpu")), C10dComm) == (asked == "c10d")


@distributed(1, 3)
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_switch_without_meaning_is_refused_on_all_ranks(world: World, everywhere: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if everywhere or world.rank == 0:
            patch.setenv("ONECOPY_COMM", "nccl")
        with pytest.raises(ValueError, match="ONECOPY_COMM=nccl"):
            ZeroRedundancyOptimizer(Mlp().parameters(), SGD, lr=0.1)


# ------------------------------------------------------------------ memory


@distributed(2, 3)
@pytest.mark.parametrize("partition", ["auto", "whole"])
@pytest.mark.parametrize("mode", ["drop-in", "attached", "lazy", "narrow"])
def test_memory_is_what_was_estimated(world: World, mode: str, partition: str) -> None:
    attached = mode != "drop-in"
    attach: Any = {"lazy_gather": True} if mode == "lazy" else {}
    attach |= {"reduce_dtype": torch.bfloat16} if mode == "narrow" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONECOPY_COMM", "c10d")
        torch.manual_seed(0)
        model = Mlp()
        options: Any = {"partition": partition, "bucket_mb": 0.001, "lr": 0.1}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, **options)
        if attached:
            optimizer.attach(model, **attach)
        train(world, model, optimizer)
        expected = estimate(
            model, AdamW, world.size, attached=attached, backend="gloo", **attach, **options
        )
        found = optimizer.memory_report()
        assert found.staging == expected.on(world.rank).staging > 0
        assert found.state == expected.on(world.rank).state
