"""What ranks own and what staging takes, counted by arithmetic: as by listing and by allocating."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inside import pretend_local_ranks, staging_used
from test_plan import History, anything, histories

from onecopy.comm.gloo.topology import Topology
from onecopy.gradients.reducer import GradientReducer
from onecopy.planning.param_groups import grad_dtype, gradient_dtype
from onecopy.planning.plan import ParamSpec, Plan, make_plan
from onecopy.planning.sizes import (
    MIN_MESSAGE_BYTES,
    Links,
    StagingSizes,
    count_elements,
    imbalance,
    packed_elements,
    slot_elements,
)
from onecopy.planning.traits import Kind
from onecopy.sharding.engine import AllGathers, FlatStorage


@given(histories())
@anything
def test_elements_are_counted_as_a_list_of_all_shards_would_be(history: History) -> None:
    plan = history.plan()
    counted = count_elements(plan, lambda param: param % 3)
    elements: Counter[Any] = Counter()
    shards: Counter[Any] = Counter()
    for rank in range(plan.world_size):
        for shard in plan.shards(rank):
            elements[shard.param % 3, rank] += shard.numel
            shards[shard.param % 3, rank] += 1
    for label in {param % 3 for param in plan.params}:
        for rank in range(plan.world_size):
            assert counted.elements[label][rank] == elements[label, rank]
            assert counted.shards[label][rank] == shards[label, rank]
    assert counted.loads(plan.world_size) == [plan.load(r) for r in range(plan.world_size)]


@given(histories())
@anything
def test_slots_are_counted_with_their_padding(history: History) -> None:
    plan = history.plan()
    for rank in range(plan.world_size):
        expected = [0] * len(plan.streams)
        for number, bucket in enumerate(plan.buckets):
            start, stop = plan.range_of(number, rank)
            expected[bucket.stream] += stop - start
        assert [slots[rank] for slots in slot_elements(plan)] == expected


def test_imbalance() -> None:
    assert imbalance([5, 5, 5]) == imbalance([0, 0]) == 1.0


# ------------------------------------------------------------------ staging


class PretendedGroup:
    """As much of a group as preparing collectives needs."""

    tag = 0

    def __init__(self, rank: int, topology: Topology, native: bool) -> None:
        self.rank, self.world_size, self.user_group = rank, topology.world_size, self
        self._native = native
        status = SimpleNamespace(attachments=0)
        self.monitor = SimpleNamespace(status=status, patience=None, or_give_up=None)
        pretend_local_ranks(self, topology)

    def is_native(self, _: torch.device) -> bool:
        return self._native

    nothing = None


def pretended_group(rank: int, world_size: int, way: str) -> Any:
    make = {"memory": together, "hosts": two_hosts}.get(way, apart)
    return PretendedGroup(rank, make(world_size), native=way == "slots")


def together(world_size: int) -> Topology:
    return Topology.by_name([0] * world_size)


def apart(world_size: int) -> Topology:
    return Topology.by_name(range(world_size))


def two_hosts(world_size: int) -> Topology:
    """The second half of the ranks on another one."""
    return Topology.by_name([2 * rank >= world_size for rank in range(world_size)])


def links_for(world_size: int, way: str) -> Links:
    """Of all ranks: what ``estimate`` makes."""
    messages = way in ("parts", "memory")
    together = way == "memory"
    other_hosts = world_size - 1 if way == "parts" else 0
    return Links(way == "slots", messages, world_size if together else 1, (), other_hosts)


def tensors_for(history: History, way: str) -> list[torch.Tensor]:
    """A tensor for every spec; the numbers between them are frozen parameters."""
    specs, device = history.specs, "meta" if way == "accelerator" else "cpu"
    return [
        torch.zeros(specs[i].numel, dtype=getattr(torch, specs[i].dtype), device=device)
        if i in specs
        else torch.zeros(0)
        for i in range(max(specs, default=-1) + 1)
    ]


def on_one_device(history: History, most_buckets: int) -> History:
    """All tensors of this test are on the CPU, whatever the plan calls it. Of each stream there are
    at most so many buckets."""
    batches = [[_on_cpu(spec) for spec in batch] for batch in history.batches]
    total = sum(spec.numel * spec.itemsize for spec in history.specs.values())
    return History(history.world, max(history.bucket_bytes, -(-total // most_buckets)), batches)


def _on_cpu(spec: ParamSpec) -> ParamSpec:
    return ParamSpec(spec.index, spec.numel, spec.dtype, spec.itemsize, "cpu", spec.kind, spec.cost)


# Some large enough for a message of their own.
SIZES = st.integers(0, 300) | st.sampled_from([64, 3000, MIN_MESSAGE_BYTES // 4, 40_000])


# all_gather, gloo, gloo on one host, and gloo with tensors that are not on the CPU
WAYS = st.sampled_from(["slots", "parts", "memory", "accelerator"])


# Thousands of buckets take seconds to prepare. 300 are more than can be in flight.
buckets_at_most = pytest.mark.parametrize(
    "most_buckets", [300, pytest.param(10**6, marks=pytest.mark.slow)]
)


@buckets_at_most
@given(histories(numels=SIZES), WAYS, st.booleans(), st.booleans(), st.data())
@anything
def test_gathers_take_the_staging_that_was_foreseen(
    most_buckets: int,
    history: History,
    way: str,
    lazily: bool,
    in_place: bool,
    data: st.DataObject,
) -> None:
    history = on_one_device(history, most_buckets)
    plan, params = history.plan(), tensors_for(history, way)
    on_cpu = way != "accelerator"
    homes = FlatStorage() if in_place and on_cpu else None
    in_place = homes is not None
    if homes is not None:
        homes.adopt(plan, params)
    rank = data.draw(st.integers(0, plan.world_size - 1))
    all_gathers = AllGathers(pretended_group(rank, plan.world_size, way))
    all_gathers.prepare(plan, params, homes, lazily)
    foreseen = StagingSizes(plan, links_for(plan.world_size, way))
    foreseen.add_all_gathers(lazily, in_place)
    assert all_gathers.staged_bytes == foreseen.on(rank)


DTYPES = st.sampled_from([None, torch.bfloat16, torch.float32])


@buckets_at_most
@given(histories(numels=SIZES), WAYS, DTYPES, st.sampled_from([None, torch.float32]), st.data())
@anything
def test_reductions_take_the_staging_that_was_foreseen(
    most_buckets: int,
    history: History,
    way: str,
    wire: torch.dtype | None,
    master: torch.dtype | None,
    data: st.DataObject,
) -> None:
    history = on_one_device(history, most_buckets)
    plan, params = history.plan(), tensors_for(history, way)
    rank = data.draw(st.integers(0, plan.world_size - 1))
    reducer = GradientReducer(pretended_group(rank, plan.world_size, way), wire, master)
    reducer.prepare(plan, params)

    def first(stream: int) -> torch.Tensor:
        return params[plan.streams[stream].params[0]]

    foreseen = StagingSizes(plan, links_for(plan.world_size, way)).add_reduce_scatters(
        lambda stream: wire or grad_dtype(first(stream)),
        lambda stream: gradient_dtype(first(stream), master),
    )
    assert reducer.staged_bytes == foreseen.on(rank)


@given(histories(numels=SIZES), DTYPES, st.sampled_from([None, torch.float32]), st.data())
@anything
def test_staging_between_hosts_is_filled_and_no_larger(
    history: History, wire: torch.dtype | None, master: torch.dtype | None, data: st.DataObject
) -> None:
    """Each buffer is as large as its largest user needs; nothing is written outside of one."""
    history = on_one_device(history, 300)
    plan, params = history.plan(), tensors_for(history, "hosts")
    rank = data.draw(st.integers(0, plan.world_size - 1))
    group = pretended_group(rank, plan.world_size, "hosts")
    reducer = GradientReducer(group, wire, master)
    reducer.prepare(plan, params)
    if plan.world_size == 1:
        return
    largest: dict[int, int] = {}
    for tensor, used in staging_used(reducer):
        largest[tensor.data_ptr()] = max(largest.get(tensor.data_ptr(), 0), used)
    largest.pop(0, None)  # what is empty
    assert sum(largest.values()) == reducer.staged_bytes


def test_a_tensor_with_gaps_in_its_memory_is_packed() -> None:
    gaps = torch.zeros(40_000, 2)[:, 0]
    plan = make_plan([ParamSpec(0, gaps.numel(), "float32", 4, kind=Kind.WHOLE)], 2)
    all_gathers = AllGathers(pretended_group(0, 2, "parts"))
    all_gathers.prepare(plan, [gaps], None, False)
    sizes = StagingSizes(plan, links_for(2, "parts"))
    sizes.add_all_gathers(False, is_dense=lambda _: False)
    assert all_gathers.staged_bytes == sizes.on(0) == gaps.numel() * 4


def test_one_small_tensor_beside_a_large_one_is_not_packed() -> None:
    params = [torch.zeros(1), torch.zeros(40_000)]
    plan = make_plan([ParamSpec(i, p.numel(), "float32", 4) for i, p in enumerate(params)], 2)
    all_gathers = AllGathers(pretended_group(0, 2, "parts"))
    all_gathers.prepare(plan, params, None, False)
    sizes = StagingSizes(plan, links_for(2, "parts")).add_all_gathers(False)
    assert all_gathers.staged_bytes == sizes.on(0) == 0


@pytest.mark.parametrize("topology", ["together", "apart"])
def test_staging_of_many_whole_tensors_takes_one_look_at_all_owners(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [ParamSpec(i, 64, "float32", 4, kind=Kind.WHOLE) for i in range(300)]
    plan = make_plan(specs, 64)
    local, apart = (64, 0) if topology == "together" else (1, 63)
    looks: list[int] = []
    found = Plan.owned_ranges
    monkeypatch.setattr(Plan, "owned_ranges", lambda p, n: looks.append(n) or found(p, n))
    packed = packed_elements(plan, 0, Links(False, True, local, (), apart), False, lambda _: True)
    assert packed == (0 if topology == "together" else 300 * 64)
    assert looks == [0]


@pytest.mark.parametrize("world", [1, 3])
def test_a_plan_of_nothing(world: int) -> None:
    plan = Plan(world, 1)
    assert count_elements(plan).loads(world) == [0] * world
    dtype = lambda _: torch.float32  # noqa: E731
    sizes = StagingSizes(plan, Links(True)).add_all_gathers(False)
    assert sizes.add_reduce_scatters(dtype, dtype).on(0) == 0
