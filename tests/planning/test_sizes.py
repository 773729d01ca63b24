"""What ranks own and what staging takes, counted by arithmetic: as by listing and by allocating."""

from __future__ import annotations

import doctest
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_plan import History, anything, histories

import onecopy.tally
from onecopy.buffers import FlatHomes
from onecopy.demand import GatherStaging, ReduceStaging, Ways
from onecopy.gatherer import Gatherer
from onecopy.hosts import Hosts
from onecopy.kinds import Kind
from onecopy.lending import SharedMemory
from onecopy.neighbours import Neighbourhood
from onecopy.pieces import grad_dtype, gradient_held_in
from onecopy.plan import ParamSpec, Plan, make_plan
from onecopy.reducer import Reducer
from onecopy.tally import imbalance, slot_elements, tally
from onecopy.transfers import WORTH_ITS_OWN_MESSAGE
from onecopy.transport import Transport


@given(histories())
@anything
def test_a_tally_counts_what_listing_all_pieces_counts(history: History) -> None:
    plan = history.plan()
    counted = tally(plan, lambda param: param % 3)
    elements: Counter[Any] = Counter()
    pieces: Counter[Any] = Counter()
    for rank in range(plan.world_size):
        for piece in plan.pieces(rank):
            elements[piece.param % 3, rank] += piece.numel
            pieces[piece.param % 3, rank] += 1
    for label in {param % 3 for param in plan.params}:
        for rank in range(plan.world_size):
            assert counted.elements[label][rank] == elements[label, rank]
            assert counted.pieces[label][rank] == pieces[label, rank]
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
    assert doctest.testmod(onecopy.tally).failed == 0
    assert imbalance([5, 5, 5]) == imbalance([0, 0]) == 1.0


# ------------------------------------------------------------------ staging


@dataclass(frozen=True, slots=True)
class PretendedTransport:
    """As much of a transport as deciding on the ways of buckets needs."""

    rank: int
    world_size: int
    native: bool
    one_host: bool = False
    company: ClassVar[Any] = SimpleNamespace(attachments=0)

    def is_native(self, _: torch.device) -> bool:
        return self.native

    sends_one_by_one = Transport.sends_one_by_one
    lends, others = Transport.lends, Transport.others

    @property
    def hosts(self) -> Hosts:
        make = Hosts.together if self.one_host else Hosts.apart
        return make(self.world_size)

    @property
    def neighbours(self) -> Neighbourhood:
        pids = dict.fromkeys(self.others, 0) if self.one_host else {}
        return Neighbourhood(self.rank, self.hosts, pids)

    def memory_to_lend(self, numbytes: int) -> SharedMemory:
        return SharedMemory(numbytes, self.world_size)


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
SIZES = st.integers(0, 300) | st.sampled_from([64, 3000, WORTH_ITS_OWN_MESSAGE // 4, 40_000])


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
    homes = FlatHomes() if in_place and on_cpu else None
    in_place = homes is not None
    if homes is not None:
        homes.adopt(plan, params)
    equal_slots, one_host = way == "slots", way == "memory"
    rank = data.draw(st.integers(0, plan.world_size - 1))
    transport: Any = PretendedTransport(rank, plan.world_size, equal_slots, one_host)
    gatherer = Gatherer(transport)
    gatherer.prepare(plan, params, homes, lazily)
    foreseen = GatherStaging(plan, Ways(equal_slots, one_host, on_cpu, in_place, lazily))
    assert gatherer.staged_bytes == foreseen.on(rank)


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
    equal_slots, one_host = way == "slots", way == "memory"
    transport: Any = PretendedTransport(rank, plan.world_size, equal_slots, one_host)
    reducer = Reducer(transport, wire, master)
    reducer.prepare(plan, params)

    def first(stream: int) -> torch.Tensor:
        return params[plan.streams[stream].params[0]]

    foreseen = ReduceStaging(
        plan,
        Ways(equal_slots, one_host, on_cpu=way != "accelerator"),
        lambda stream: wire or grad_dtype(first(stream)),
        lambda stream: gradient_held_in(first(stream), master),
    )
    assert reducer.roadway.staged_bytes == foreseen.on(rank)


def test_a_tensor_with_gaps_in_its_memory_is_packed() -> None:
    gaps = torch.zeros(40_000, 2)[:, 0]
    plan = make_plan([ParamSpec(0, gaps.numel(), "float32", 4, kind=Kind.WHOLE)], 2)
    transport: Any = PretendedTransport(0, 2, False)
    gatherer = Gatherer(transport)
    gatherer.prepare(plan, [gaps], None, False)
    ways = Ways(False, is_dense=lambda _: False)
    assert gatherer.staged_bytes == GatherStaging(plan, ways).on(0) == gaps.numel() * 4


def test_one_small_tensor_beside_a_large_one_is_not_packed() -> None:
    params = [torch.zeros(1), torch.zeros(40_000)]
    plan = make_plan([ParamSpec(i, p.numel(), "float32", 4) for i, p in enumerate(params)], 2)
    transport: Any = PretendedTransport(0, 2, False)
    gatherer = Gatherer(transport)
    gatherer.prepare(plan, params, None, False)
    assert gatherer.staged_bytes == GatherStaging(plan, Ways(False)).on(0) == 0


@pytest.mark.parametrize("world", [1, 3])
def test_a_plan_of_nothing(world: int) -> None:
    plan = Plan(world, 1)
    assert tally(plan).loads(world) == [0] * world
    assert GatherStaging(plan, Ways(True)).on(0) == 0
    dtype = lambda _: torch.float32  # noqa: E731
    assert ReduceStaging(plan, Ways(True), dtype, dtype).on(0) == 0
