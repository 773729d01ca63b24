"""Counts without lists: the elements that each rank owns, and the staging memory that it needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from onecopy.planning.plan import Plan, Segment
from onecopy.planning.text import plural
from onecopy.planning.traits import Kind, tensors_in

_MB = 10**6


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes on this rank. ``print(report)`` shows a table, ``as_dict()`` is for loggers."""

    parameters: int
    # In `param.grad`; if attached, also of this rank's shards, and accumulated inside no_sync().
    gradients: int
    state: Mapping[str, int]  # of this rank's shards, by key
    master_copies: int
    staging: int  # buffers that buckets pass through, kept between the steps
    # DDP's own copy of all gradients, which it keeps when we are attached to it. With its option
    # lazy_bucket_allocation it has one during backward only.
    ddp_buckets: int

    @property
    def total(self) -> int:
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, int]:
        """Flat, for TensorBoard and the like: ``{"parameters": ..., "state/exp_avg": ...}``."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            **{f"state/{key}": count for key, count in self.state.items()},
            "master_copies": self.master_copies,
            "staging": self.staging,
            "ddp_buckets": self.ddp_buckets,
        }

    @classmethod
    def from_dict(cls, counts: Mapping[str, int]) -> MemoryReport:
        """The inverse of ``as_dict``."""
        state = {k.removeprefix("state/"): n for k, n in counts.items() if k.startswith("state/")}
        return cls(
            parameters=counts["parameters"],
            gradients=counts["gradients"],
            state=state,
            master_copies=counts["master_copies"],
            staging=counts["staging"],
            ddp_buckets=counts["ddp_buckets"],
        )

    def __str__(self) -> str:
        rows = [*self.as_dict().items(), ("total", self.total)]
        return "\n".join(f"{name:20}{count / _MB:12.3f} MB" for name, count in rows)


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors, of sparse ones as if they were dense."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_bytes(states: Iterable[Any]) -> dict[str, int]:
    """The bytes of optimizer state, one ``state`` per parameter, by key."""
    found: dict[str, int] = {}
    for state in states:
        for key, value in (state if isinstance(state, Mapping) else {"other": state}).items():
            found[str(key)] = found.get(str(key), 0) + nbytes_of(tensors_in(value))
    return {key: count for key, count in sorted(found.items()) if count}


# In bytes: all that is not empty, since a letter costs less than a message through gloo, however
# short. Tests send a part of what they could lend.
MIN_SHARED_BYTES = 1


def is_worth_sharing(numbytes: int) -> bool:
    return numbytes >= MIN_SHARED_BYTES


# Below this, a message of its own costs more than a copy.
MIN_MESSAGE_BYTES = 64 * 1024

IN_FLIGHT = 3
# At most, if the waiting is left to others. Each is a file that neighbours read, of which often no
# more than 1024 may be open, and up to two letters to each of them, of which a box holds 1024.
LAZY_IN_FLIGHT = 256
# Buffers that neighbours read in place: one more than there are gathers in flight, so that a rank
# that is ahead of them can go on. Gradients have as many.
SHARED_BUFFERS = IN_FLIGHT + 1


def in_flight_limit(buckets: int, lazy: bool) -> int:
    """How many gathers may be under way when a step is over."""
    return min(buckets, LAZY_IN_FLIGHT) if lazy else 0


Label = Hashable


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements and shards by label and rank; padding is not counted."""

    elements: Mapping[Label, list[int]]
    shards: Mapping[Label, list[int]]

    def loads(self, world_size: int) -> list[int]:
        """Elements of every rank, under all labels."""
        return [sum(of[rank] for of in self.elements.values()) for rank in range(world_size)]


def count_elements(plan: Plan, label_of: Callable[[int], Label] = lambda _: None) -> Counts:
    """Count what every rank owns, under the label of its parameter."""
    elements: dict[Label, _Count] = {}
    shards: dict[Label, _Count] = {}

    def counts(param: int) -> tuple[_Count, _Count]:
        label = label_of(param)
        if label not in elements:
            elements[label], shards[label] = _Count(plan.world_size), _Count(plan.world_size)
        return elements[label], shards[label]

    for stream in plan.streams:
        for param, numel, owner in zip(stream.params, stream.numels, stream.owners, strict=False):
            of_elements, of_shards = counts(param)
            of_elements.add(owner, numel)
            of_shards.add(owner, 1)
    for number, bucket in enumerate(plan.buckets):
        if plan.streams[bucket.stream].kind is Kind.ELEMENTWISE:
            for segment in plan.segments(number):
                _add_segment(plan, number, segment, *counts(segment.param))
    return Counts(
        {label: count.by_rank() for label, count in elements.items()},
        {label: count.by_rank() for label, count in shards.items()},
    )


def imbalance(loads: list[int]) -> float:
    """The load of the fullest rank, relative to an even share.

    >>> imbalance([2, 4])
    1.3333333333333333
    """
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def plan_summary(plan: Plan, classes: Iterable[type]) -> str:
    """What was planned, for the log."""
    loads = count_elements(plan).loads(plan.world_size)
    whole = sum(len(stream.params) for stream in plan.streams if stream.kind is Kind.WHOLE)
    kept = f", {whole} of them kept whole" if whole else ""
    names = " and ".join(dict.fromkeys(cls.__name__ for cls in classes))
    return (
        f"planned {plural(len(plan.params), 'parameter')}{kept}, {sum(loads):,} elements, for "
        f"{names} on {plural(plan.world_size, 'rank')} in {plural(len(plan.buckets), 'bucket')}: "
        f"at most {max(loads):,} elements on a rank, {imbalance(loads):.3f} times an even share"
    )


def slot_elements(plan: Plan) -> list[list[int]]:
    """Elements in the slots of each stream, by rank: with the padding, as gradients are held."""
    found = [[0] * plan.world_size for _ in plan.streams]
    for number, bucket in enumerate(plan.buckets):
        stream, slots = plan.streams[bucket.stream], found[bucket.stream]
        if stream.kind is Kind.WHOLE:
            for rank, (start, stop) in owned_ranges(plan, number).items():
                slots[rank] += stop - start
        else:
            for rank in bucket.extra:
                slots[rank] += stream.unit
    for at, stream in enumerate(plan.streams):
        if stream.kind is Kind.ELEMENTWISE:
            each = sum(equal_part(plan, n) for n, b in enumerate(plan.buckets) if b.stream == at)
            found[at] = [extra + each for extra in found[at]]
    return found


def equal_part(plan: Plan, bucket: int) -> int:
    """Elements of an elementwise bucket on every rank; those in ``extra`` have a unit more."""
    b = plan.buckets[bucket]
    unit = plan.streams[b.stream].unit
    return b.numel // unit // plan.world_size * unit


def owned_ranges(plan: Plan, bucket: int) -> dict[int, tuple[int, int]]:
    """What the owners have in a bucket of whole tensors: one run each."""
    b = plan.buckets[bucket]
    stream = plan.streams[b.stream]
    found: dict[int, tuple[int, int]] = {}
    for i, first, last in stream.between(b.start, b.stop):
        if last > first:
            start = stream.starts[i] - b.start
            owner = stream.owners[i]
            found[owner] = found.get(owner, (start, start))[0], start + last
    return found


class _Count:
    """A number for each rank. Adding to a run of ranks takes constant time."""

    def __init__(self, world_size: int) -> None:
        self._points = [0] * world_size
        self._steps = [0] * (world_size + 1)  # what a rank has more than the rank before it

    def add(self, rank: int, count: int) -> None:
        self._points[rank] += count

    def add_between(self, first: int, last: int, count: int) -> None:
        """To the ranks after ``first`` and before ``last``."""
        if last > first + 1:
            self._steps[first + 1] += count
            self._steps[last] -= count

    def by_rank(self) -> list[int]:
        return [a + b for a, b in zip(self._points, accumulate(self._steps), strict=False)]


def _add_segment(
    plan: Plan, bucket: int, segment: Segment, elements: _Count, shards: _Count
) -> None:
    start, stop = segment.offset, segment.offset + segment.stop - segment.start
    first, last = plan.rank_at(bucket, start), plan.rank_at(bucket, stop - 1)
    if first == last:
        elements.add(first, stop - start)
        shards.add(first, 1)
        return
    elements.add(first, plan.slot(bucket, first)[1] - start)
    elements.add(last, stop - plan.slot(bucket, last)[0])
    shards.add(first, 1)
    shards.add(last, 1)
    each = equal_part(plan, bucket)
    elements.add_between(first, last, each)
    shards.add_between(first, last, 1 if each else 0)
    unit = plan.streams[plan.buckets[bucket].stream].unit
    for rank in plan.buckets[bucket].extra:
        if first < rank < last:
            elements.add(rank, unit)
            shards.add(rank, 0 if each else 1)


@dataclass(frozen=True, slots=True)
class Links:
    """How buckets travel: by what the backend does best, and what the user asked for."""

    native: bool  # collectives of the backend, instead of messages between CPUs as on gloo
    one_host: bool = False  # gloo: ranks read in one another's memory
    on_cpu: bool = True  # gloo sends messages only from there: all else it exchanges at once
    in_place: bool = False  # parameters_as_bucket_view
    lazily: bool = False  # all gathers may be under way together
    # Whether the gathers of a stream lend the memory that its gradients have left.
    lends_anew: Callable[[int], bool] = lambda _: False
    is_dense: Callable[[int], bool] = lambda _: True  # a parameter, in memory


class GatherStaging:
    """Bytes that gathers pass through, by rank."""

    def __init__(self, plan: Plan, ways: Links) -> None:
        self._copied: dict[_Key, int] = {}  # in bytes, on every rank
        self._lent: dict[_Key, _RankBytes] = {}
        if plan.world_size == 1:
            return
        together = in_flight_limit(len(plan.buckets), ways.lazily)
        for turn, bucket in enumerate(plan.buckets):
            stream = plan.streams[bucket.stream]
            key = (turn % max(IN_FLIGHT, together), stream.device, stream.dtype)
            copied = staged_elements(plan, turn, ways) * stream.itemsize
            self._copied[key] = max(self._copied.get(key, 0), copied)
            key = (turn % max(SHARED_BUFFERS, together), stream.device, stream.dtype)
            if ways.one_host and not ways.lends_anew(bucket.stream):
                lent = self._lent.setdefault(key, _RankBytes())
                lent.demand_slots(plan, turn, _lent(stream.itemsize))

    def on(self, rank: int) -> int:
        return sum(self._copied.values()) + sum(b.on_rank(rank) for b in self._lent.values())


def _lent(itemsize: int) -> Callable[[int], int]:
    """Bytes of a slot of so many elements, if neighbours are to read it."""
    return lambda numel: numel * itemsize if is_worth_sharing(numel * itemsize) else 0


def staged_elements(plan: Plan, bucket: int, ways: Links) -> int:
    """Elements of a bucket that pass through staging when it is gathered."""
    b = plan.buckets[bucket]
    if plan.streams[b.stream].kind is Kind.ELEMENTWISE and ways.native:
        if b.extra:  # slots are padded to the longest
            unit = plan.streams[b.stream].unit
            return (equal_part(plan, bucket) + unit) * plan.world_size
        segments = list(plan.segments(bucket))
        alone = len(segments) == 1 and segments[0].stop - segments[0].start == b.numel
        return 0 if alone or ways.in_place else b.numel
    return 0 if ways.in_place else _packed_elements(plan, bucket, ways)


def _packed_elements(plan: Plan, bucket: int, ways: Links) -> int:
    """Elements in pieces too small for a message of their own."""
    itemsize = plan.streams[plan.buckets[bucket].stream].itemsize
    packed = 0
    for rank in _owners_of_several(plan, bucket, ways):
        start, stop = plan.range_of(bucket, rank)
        if ways.one_host and is_worth_sharing((stop - start) * itemsize):
            continue
        shards = [shard for shard in plan.shards_in(bucket, rank) if shard.numel]
        small = []
        for shard in shards:
            large = len(shards) == 1 or shard.numel * itemsize >= MIN_MESSAGE_BYTES
            if not (large and ways.is_dense(shard.param)):
                small.append(shard)
        if not (len(small) == 1 and ways.is_dense(small[0].param)):  # alone it needs no packing
            packed += sum(shard.numel for shard in small)
    return packed


def _owners_of_several(plan: Plan, bucket: int, ways: Links) -> set[int]:
    """The ranks that own more than one piece of a bucket, or one with gaps in its memory."""
    stream = plan.streams[plan.buckets[bucket].stream]
    if stream.kind is Kind.WHOLE:
        owners: dict[int, int] = {}
        for i, first, last in stream.between(*_ends(plan, bucket)):
            if last > first:
                gaps = not ways.is_dense(stream.params[i])
                owners[stream.owners[i]] = owners.get(stream.owners[i], 0) + 1 + gaps
        return {rank for rank, count in owners.items() if count > 1}
    found = set()
    end = -1  # the rank in whose slot the parameter before ends
    for segment in plan.segments(bucket):
        begin = plan.rank_at(bucket, segment.offset)
        if begin == end:
            found.add(begin)
        end = plan.rank_at(bucket, segment.offset + segment.stop - segment.start - 1)
    return found


def _ends(plan: Plan, bucket: int) -> tuple[int, int]:
    return plan.buckets[bucket].start, plan.buckets[bucket].stop


class ReduceStaging:
    """Bytes that gradients pass through on their way to their owners, by rank."""

    def __init__(
        self,
        plan: Plan,
        ways: Links,
        wire_of: Callable[[int], torch.dtype],
        held_in: Callable[[int], torch.dtype],
    ) -> None:
        """The dtypes in which the gradients of a stream travel, and in which they are summed."""
        self._outgoing: dict[_Key, int] = {}  # in bytes, on every rank
        self._incoming: dict[_Key, _RankBytes] = {}
        lends = ways.one_host and plan.world_size > 1
        depth = SHARED_BUFFERS if lends else IN_FLIGHT
        for number, bucket in enumerate(plan.buckets):
            device, wire = plan.streams[bucket.stream].device, wire_of(bucket.stream)
            key = (number % depth, device, str(wire))
            numbytes = bucket.numel * wire.itemsize
            self._outgoing[key] = max(self._outgoing.get(key, 0), numbytes)
            key = (number % IN_FLIGHT, device, str(wire))
            incoming = self._incoming.setdefault(key, _RankBytes())
            is_summed_on_the_way = wire.itemsize >= held_in(bucket.stream).itemsize
            received = _received(plan, number, ways, wire.itemsize, is_summed_on_the_way)
            incoming.demand_slots(plan, number, received)

    def on(self, rank: int) -> int:
        return sum(self._outgoing.values()) + sum(b.on_rank(rank) for b in self._incoming.values())


def _received(
    plan: Plan, bucket: int, ways: Links, itemsize: int, is_summed_on_the_way: bool
) -> Callable[[int], int]:
    """Bytes that come in for a slot of so many elements. ``is_summed_on_the_way``: a backend that
    can sum may do so."""
    parts = plan.world_size - 1
    if parts and (ways.native or not ways.on_cpu):
        is_one_sum = ways.native and is_summed_on_the_way and plan.has_equal_slots(bucket)
        parts = 1 if is_one_sum else plan.world_size  # all_to_all copies this rank's own part, too

    def received(numel: int) -> int:
        if ways.one_host and is_worth_sharing(numel * itemsize):
            return 0
        return numel * itemsize * parts

    return received


@dataclass(slots=True)
class _RankBytes:
    """Bytes that a buffer needs: on every rank, and on some more."""

    everywhere: int = 0
    more: dict[int, int] = field(default_factory=dict)

    def on_rank(self, rank: int) -> int:
        return max(self.everywhere, self.more.get(rank, 0))

    def demand_slots(self, plan: Plan, bucket: int, needed: Callable[[int], int]) -> None:
        """Room for each rank's slot in a bucket; ``needed``: bytes for so many elements."""
        if plan.streams[plan.buckets[bucket].stream].kind is Kind.WHOLE:
            for rank, (start, stop) in owned_ranges(plan, bucket).items():
                self._demand_on(rank, needed(stop - start))
            return
        each, unit = equal_part(plan, bucket), plan.streams[plan.buckets[bucket].stream].unit
        self.everywhere = max(self.everywhere, needed(each))
        for rank in plan.buckets[bucket].extra:
            self._demand_on(rank, needed(each + unit))

    def _demand_on(self, rank: int, numbytes: int) -> None:
        self.more[rank] = max(self.more.get(rank, 0), numbytes)


_Key = tuple[int, str, str]  # turn, device, dtype
