"""Counts without lists: the elements that each rank owns, and the staging memory that it needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

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


# Bytes from which a part is shared: all that is not empty, since telling where it is costs less
# than a message through gloo, however short. Tests share a part of what they could.
MIN_SHARED_BYTES = 1

# Below this, a message of its own costs more than a copy.
MIN_MESSAGE_BYTES = 64 * 1024

IN_FLIGHT = 3
# At most, if the waiting is left to the forward. Each is a file that local ranks map, of which
# often no more than 1024 may be open, and up to two messages to each: a mailbox holds 1024.
LAZY_IN_FLIGHT = 256
# Buffers that local ranks read in place: one more than there are collectives in flight, so that a
# rank that is ahead of its readers goes on.
SHARED_BUFFERS = IN_FLIGHT + 1


def in_flight_limit(buckets: int, lazy: bool) -> int:
    """How many all-gathers may be in flight together."""
    return max(IN_FLIGHT, min(buckets, LAZY_IN_FLIGHT) if lazy else 0)


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


# -------------------------------------------------------------------------- staging


@dataclass(frozen=True, slots=True)
class Links:
    """How a rank exchanges buckets with the others."""

    native: bool  # equal slots travel in the backend's collectives
    messages: bool = False  # ranks send to one another, each when it likes: gloo, on the CPU
    local_ranks: int = 1  # this one and those that read one another's memory
    relayed: tuple[int, ...] = ()  # owners on other hosts whose parts this rank passes on
    other_hosts: int = 0  # each sends a part that is shared on it once
    summing_hosts: int = 0  # those of them that have several ranks: they send sums


def is_shared(numbytes: int, links: Links) -> bool:
    """Whether ranks of one host read a part of so many bytes in one another's memory."""
    return links.messages and numbytes >= MIN_SHARED_BYTES


class AllGatherStaging(NamedTuple):
    """Elements on one rank."""

    packed: int  # what is copied to travel
    shared: int  # what local ranks read: this rank's own part, and what it passes on


def all_gather_staging(
    plan: Plan,
    bucket: int,
    rank: int,
    links: Links,
    flat: bool,
    is_dense: Callable[[int], bool],
) -> AllGatherStaging:
    """What the all-gather of a bucket needs; ``flat``: its parameters live in flat storage."""
    itemsize = plan.streams[plan.buckets[bucket].stream].itemsize
    shared = 0
    if links.local_ranks > 1:
        for owner in (rank, *links.relayed):
            start, stop = plan.range_of(bucket, owner)
            shared += stop - start if is_shared((stop - start) * itemsize, links) else 0
    return AllGatherStaging(packed_elements(plan, bucket, links, flat, is_dense), shared)


def packed_elements(
    plan: Plan, bucket: int, links: Links, flat: bool, is_dense: Callable[[int], bool]
) -> int:
    """Elements of a bucket that are copied when it is gathered: the same on all ranks of a host."""
    b = plan.buckets[bucket]
    if plan.streams[b.stream].kind is Kind.ELEMENTWISE and links.native:
        if b.extra:  # slots are padded to the longest
            unit = plan.streams[b.stream].unit
            return (equal_part(plan, bucket) + unit) * plan.world_size
        segments = list(plan.segments(bucket))
        alone = len(segments) == 1 and segments[0].stop - segments[0].start == b.numel
        return 0 if alone or flat else b.numel
    return 0 if flat else _packed_in_messages(plan, bucket, links, is_dense)


def _packed_in_messages(
    plan: Plan, bucket: int, links: Links, is_dense: Callable[[int], bool]
) -> int:
    """Elements in shards too small for a message of their own."""
    itemsize = plan.streams[plan.buckets[bucket].stream].itemsize
    packed = 0
    for rank in _owners_of_several(plan, bucket, is_dense):
        start, stop = plan.range_of(bucket, rank)
        if links.local_ranks > 1 and is_shared((stop - start) * itemsize, links):
            continue
        shards = [shard for shard in plan.shards_in(bucket, rank) if shard.numel]
        small = []
        for shard in shards:
            large = len(shards) == 1 or shard.numel * itemsize >= MIN_MESSAGE_BYTES
            if not (large and is_dense(shard.param)):
                small.append(shard)
        if not (len(small) == 1 and is_dense(small[0].param)):  # alone it needs no packing
            packed += sum(shard.numel for shard in small)
    return packed


def _owners_of_several(plan: Plan, bucket: int, is_dense: Callable[[int], bool]) -> set[int]:
    """The ranks that own more than one shard of a bucket, or one with gaps in its memory."""
    b = plan.buckets[bucket]
    stream = plan.streams[b.stream]
    if stream.kind is Kind.WHOLE:
        owners: dict[int, int] = {}
        for i, first, last in stream.between(b.start, b.stop):
            if last > first:
                gaps = not is_dense(stream.params[i])
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


def is_one_sum(plan: Plan, bucket: int, links: Links, wire: int, held: int) -> bool:
    """Whether the backend sums a bucket itself. It does so in the dtype of the wire: if that has
    fewer bytes (``wire``) than the gradient that is held, the owner adds up what the others send.
    """
    return links.native and plan.has_equal_slots(bucket) and wire >= held


class ReduceScatterStaging(NamedTuple):
    """Elements on one rank, besides its gradients of the whole bucket."""

    received: int  # contributions of other ranks, in the dtype of the wire
    sums: int  # sums of hosts in a wider dtype: received, and sent for this host


def reduce_scatter_staging(
    plan: Plan, bucket: int, rank: int, links: Links, wire: int, held: int, sums_are_wide: bool
) -> ReduceScatterStaging:
    """What the reduce-scatter of a bucket needs. Bytes of an element: ``wire`` as it travels,
    ``held`` in the sum; ``sums_are_wide``: sums of hosts have more than ``wire``."""

    def numel_of(owner: int) -> int:
        start, stop = plan.range_of(bucket, owner)
        return stop - start

    own = numel_of(rank)
    received, sums = _contributions(plan, bucket, own, links, wire, held), 0
    if sums_are_wide:
        if is_shared(own * wire, links):
            received -= own * links.summing_hosts
            sums = own * links.summing_hosts
        if links.local_ranks > 1:
            of_others = map(numel_of, links.relayed)
            sums += sum(numel for numel in of_others if is_shared(numel * wire, links))
    return ReduceScatterStaging(received, sums)


def _contributions(plan: Plan, bucket: int, own: int, links: Links, wire: int, held: int) -> int:
    """Elements that a rank receives, of whose range there are ``own``."""
    if plan.world_size == 1:
        return 0
    if not links.messages:  # an all-to-all copies this rank's own part, too
        return own if is_one_sum(plan, bucket, links, wire, held) else own * plan.world_size
    return own * (links.other_hosts if is_shared(own * wire, links) else plan.world_size - 1)


def sum_dtype(wire: torch.dtype, slot: torch.dtype) -> torch.dtype:
    """The dtype in which the sum of the contributions of a host travels: that of the slot, so that
    the sum is not rounded on its way; but never wider than two contributions together.

    >>> sum_dtype(torch.bfloat16, torch.float32), sum_dtype(torch.bfloat16, torch.bfloat16)
    (torch.float32, torch.bfloat16)
    >>> sum_dtype(torch.bfloat16, torch.float64)
    torch.float32
    """
    if slot.itemsize <= wire.itemsize:
        return wire
    widest = 2 * wire.itemsize
    if slot.itemsize <= widest:
        return slot
    return torch.float32 if widest == torch.float32.itemsize else wire


class StagingSizes:
    """Bytes of the buffers of all buckets, by rank: of any rank without listing all."""

    def __init__(self, plan: Plan, links: Links) -> None:
        self._plan, self._links = plan, links
        self._everywhere: dict[_Key, int] = {}
        self._by_rank: dict[_Key, _RankBytes] = {}

    def add_all_gathers(
        self,
        lazy: bool,
        flat: bool = False,
        is_dense: Callable[[int], bool] = lambda _: True,
        reuses_gradients: Callable[[int], bool] = lambda _: False,
    ) -> StagingSizes:
        """``reuses_gradients``: whether the all-gathers of a stream share the memory that its
        gradients have left."""
        plan, links = self._plan, self._links
        depth = in_flight_limit(len(plan.buckets), lazy)
        for number, bucket in enumerate(plan.buckets if plan.world_size > 1 else ()):
            stream = plan.streams[bucket.stream]
            packed = packed_elements(plan, number, links, flat, is_dense) * stream.itemsize
            self._add(("packed", number % depth, stream.device, stream.dtype), packed)
            if links.local_ranks > 1 and not reuses_gradients(bucket.stream):
                turn = number % max(SHARED_BUFFERS, depth)
                shared = functools.partial(_bytes_shared, links, stream.itemsize)
                self._add_slots(("shared", turn, stream.device, stream.dtype), number, shared)
        return self

    def add_reduce_scatters(
        self, wire_of: Callable[[int], torch.dtype], held_in: Callable[[int], torch.dtype]
    ) -> StagingSizes:
        """The dtypes in which the gradients of a stream travel, and in which they are summed."""
        plan, links = self._plan, self._links
        depth = SHARED_BUFFERS if links.local_ranks > 1 else IN_FLIGHT
        for number, bucket in enumerate(plan.buckets):
            device, wire = plan.streams[bucket.stream].device, wire_of(bucket.stream)
            self._add(("send", number % depth, device, str(wire)), bucket.numel * wire.itemsize)
            sizes = wire.itemsize, held_in(bucket.stream).itemsize
            received = functools.partial(_bytes_received, plan, number, links, *sizes)
            self._add_slots(("receive", number % IN_FLIGHT, device, str(wire)), number, received)
        return self

    def _add(self, key: _Key, numbytes: int) -> None:
        self._everywhere[key] = max(self._everywhere.get(key, 0), numbytes)

    def _add_slots(self, key: _Key, bucket: int, needed: Callable[[int], int]) -> None:
        self._by_rank.setdefault(key, _RankBytes()).add_slots(self._plan, bucket, needed)

    def on(self, rank: int) -> int:
        return sum(self._everywhere.values()) + sum(b.on_rank(rank) for b in self._by_rank.values())


def _bytes_shared(links: Links, itemsize: int, own: int) -> int:
    return own * itemsize if is_shared(own * itemsize, links) else 0


def _bytes_received(plan: Plan, bucket: int, links: Links, wire: int, held: int, own: int) -> int:
    return _contributions(plan, bucket, own, links, wire, held) * wire


@dataclass(slots=True)
class _RankBytes:
    """Bytes that a buffer needs: on every rank, and on some more."""

    everywhere: int = 0
    more: dict[int, int] = field(default_factory=dict)

    def on_rank(self, rank: int) -> int:
        return max(self.everywhere, self.more.get(rank, 0))

    def add_slots(self, plan: Plan, bucket: int, needed: Callable[[int], int]) -> None:
        """Room for each rank's slot in a bucket; ``needed``: bytes for so many elements."""
        if plan.streams[plan.buckets[bucket].stream].kind is Kind.WHOLE:
            for rank, (start, stop) in owned_ranges(plan, bucket).items():
                self._add_on(rank, needed(stop - start))
            return
        each, unit = equal_part(plan, bucket), plan.streams[plan.buckets[bucket].stream].unit
        self.everywhere = max(self.everywhere, needed(each))
        for rank in plan.buckets[bucket].extra:
            self._add_on(rank, needed(each + unit))

    def _add_on(self, rank: int, numbytes: int) -> None:
        self.more[rank] = max(self.more.get(rank, 0), numbytes)


_Key = tuple[str, int, str, str]  # use, turn, device, dtype
