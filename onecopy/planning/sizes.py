"""Counts without lists: the elements that each rank owns, and the staging memory that it needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from onecopy.planning.plan import Plan
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
    # lazy_bucket_allocation it has one during backward only, and then this is the most of it.
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
        others = {key: n for key, n in counts.items() if not key.startswith("state/")}
        return cls(state=state, **others)

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


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements and shards by label and rank; padding is not counted."""

    elements: Mapping[Hashable, list[int]]
    shards: Mapping[Hashable, list[int]]

    def loads(self, world_size: int) -> list[int]:
        """Elements of every rank, under all labels."""
        return [sum(of[rank] for of in self.elements.values()) for rank in range(world_size)]


def count_elements(plan: Plan, label_of: Callable[[int], Hashable] = lambda _: None) -> Counts:
    """Count what every rank owns, under the label of its parameter."""
    # Elements and shards; in each list, how many a rank has more than the rank before it: then
    # adding to a run of ranks takes constant time.
    found: dict[Hashable, tuple[list[int], list[int]]] = {}

    def add(label: Hashable, first: int, last: int, *counts: int) -> None:
        for steps, count in zip(found[label], counts, strict=False):
            steps[first] += count
            steps[last + 1] -= count

    for number, bucket in enumerate(plan.buckets):
        stream, each = plan.streams[bucket.stream], owned_elements(plan, number)[None]
        for segment in plan.segments(number):
            label, start = label_of(segment.param), segment.offset
            if label not in found:
                found[label] = [0] * (plan.world_size + 1), [0] * (plan.world_size + 1)
            first, last = plan.owners(number, segment)
            if first == last:
                add(label, first, first, segment.numel, 1)
                continue
            add(label, first, last, each, 1 if each else 0)
            for rank in bucket.extra:
                if first <= rank <= last:
                    add(label, rank, rank, stream.unit, 0 if each else 1)
            # The first and the last own elements of other parameters, too.
            add(label, first, first, plan.slot(number, first)[0] - start)
            add(label, last, last, start + segment.numel - plan.slot(number, last)[1])
    totals = ({label: list(accumulate(of[i][:-1])) for label, of in found.items()} for i in (0, 1))
    return Counts(*totals)


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


def owned_elements(plan: Plan, bucket: int) -> dict[int | None, int]:
    """The length of the range of each rank in a bucket; under None, of all that are not listed."""
    b = plan.buckets[bucket]
    stream = plan.streams[b.stream]
    if stream.kind is Kind.WHOLE:
        ranges = plan.owned_ranges(bucket).items()
        return {None: 0, **{rank: stop - start for rank, (start, stop) in ranges}}
    each = b.numel // stream.unit // plan.world_size * stream.unit
    return {None: each, **dict.fromkeys(b.extra, each + stream.unit)}


def slot_elements(plan: Plan) -> list[list[int]]:
    """Elements in the slots of each stream, by rank: with the padding, as gradients are held."""
    everywhere = [0] * len(plan.streams)
    more = [[0] * plan.world_size for _ in plan.streams]
    for number, bucket in enumerate(plan.buckets):
        owned = owned_elements(plan, number)
        everywhere[bucket.stream] += owned[None]
        for rank, numel in owned.items():
            if rank is not None:
                more[bucket.stream][rank] += numel - owned[None]
    return [[each + n for n in of_stream] for each, of_stream in zip(everywhere, more, strict=True)]


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


def shared_elements(
    plan: Plan, bucket: int, owners: Iterable[int], links: Links, itemsize: int
) -> int:
    """Elements of these owners in a bucket that local ranks read in memory."""
    ranges = (plan.range_of(bucket, owner) for owner in owners)
    return sum(_shared(stop - start, links, itemsize) for start, stop in ranges)


def _shared(own: int, links: Links, itemsize: int) -> int:
    return own if links.local_ranks > 1 and is_shared(own * itemsize, links) else 0


def packed_elements(
    plan: Plan, bucket: int, links: Links, flat: bool, is_dense: Callable[[int], bool]
) -> int:
    """Elements of a bucket that are copied when it is gathered: the same on all ranks of a host.

    ``flat``: its parameters live in flat storage.
    """
    b = plan.buckets[bucket]
    stream, segments = plan.streams[b.stream], list(plan.segments(bucket))
    if stream.kind is Kind.ELEMENTWISE and links.native:
        if b.extra:  # slots are padded to the longest
            return max(owned_elements(plan, bucket).values()) * plan.world_size
        return 0 if flat or (len(segments) == 1 and segments[0].numel == b.numel) else b.numel
    # In messages: what is too small for one of its own. A rank that owns a single shard, without
    # gaps, needs no packing.
    several, last = set(), -1
    for segment in segments if not flat else ():
        before, (first, last) = last, plan.owners(bucket, segment)
        if first == before or not is_dense(segment.param):
            several.add(first)
    packed, owned = 0, owned_elements(plan, bucket) if several else {}
    for rank in several:
        if _shared(owned.get(rank, owned[None]), links, stream.itemsize):
            continue
        shards = [shard for shard in plan.shards_in(bucket, rank) if shard.numel]
        small = []
        for shard in shards:
            large = len(shards) == 1 or shard.numel * stream.itemsize >= MIN_MESSAGE_BYTES
            if not (large and is_dense(shard.param)):
                small.append(shard)
        if not (len(small) == 1 and is_dense(small[0].param)):  # alone it needs no packing
            packed += sum(shard.numel for shard in small)
    return packed


def is_one_sum(plan: Plan, bucket: int, links: Links, wire: int, held: int) -> bool:
    """Whether the backend sums a bucket itself. It does so in the dtype of the wire: if that has
    fewer bytes (``wire``) than the gradient that is held, the owner adds up what the others send.
    """
    return links.native and plan.has_equal_slots(bucket) and wire >= held


def reduce_scatter_elements(
    plan: Plan, bucket: int, own: int, links: Links, wire: int, held: int, sums_are_wide: bool
) -> tuple[int, int]:
    """What a rank that owns so many elements of a bucket needs besides its gradients of it:
    elements received in the dtype of the wire, and sums of hosts in a wider one.

    Bytes of an element: ``wire`` as it travels, ``held`` in the sum.
    """
    if plan.world_size == 1:
        return 0, 0
    if not links.messages:  # an all-to-all copies this rank's own part, too
        one_sum = is_one_sum(plan, bucket, links, wire, held)
        return own if one_sum else own * plan.world_size, 0
    if not is_shared(own * wire, links):
        received, summed = own * (plan.world_size - 1), 0
    else:
        received, summed = own * links.other_hosts, own * links.summing_hosts * sums_are_wide
    relayed = shared_elements(plan, bucket, links.relayed, links, wire) * sums_are_wide
    return received - summed, summed + relayed


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
    if slot.itemsize <= 2 * wire.itemsize:
        return slot
    return torch.float32 if wire.itemsize == 2 else wire


class StagingSizes:
    """Bytes of the buffers of all buckets, by rank: of any rank without listing all."""

    def __init__(self, plan: Plan, links: Links) -> None:
        self._plan, self._links = plan, links
        # By use, turn, device and dtype: what each rank needs, and under None what every rank does.
        self._buffers: dict[tuple[str, int, str, str], dict[int | None, int]] = {}

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
            place, size = (stream.device, stream.dtype), stream.itemsize
            packed = packed_elements(plan, number, links, flat, is_dense)
            self._add(("packed", number % depth, *place), None, packed * size)
            if links.local_ranks > 1 and not reuses_gradients(bucket.stream):
                turn = number % max(SHARED_BUFFERS, depth)
                for rank, own in owned_elements(plan, number).items():
                    self._add(("shared", turn, *place), rank, _shared(own, links, size) * size)
        return self

    def add_reduce_scatters(
        self, wire_of: Callable[[int], torch.dtype], held_in: Callable[[int], torch.dtype]
    ) -> StagingSizes:
        """The dtypes in which the gradients of a stream travel, and in which they are summed."""
        plan, links = self._plan, self._links
        depth = SHARED_BUFFERS if links.local_ranks > 1 else IN_FLIGHT
        for number, bucket in enumerate(plan.buckets):
            wire, held = wire_of(bucket.stream), held_in(bucket.stream).itemsize
            place, size = (plan.streams[bucket.stream].device, str(wire)), wire.itemsize
            self._add(("send", number % depth, *place), None, bucket.numel * size)
            for rank, own in owned_elements(plan, number).items():
                needed = reduce_scatter_elements(plan, number, own, links, size, held, False)
                self._add(("receive", number % IN_FLIGHT, *place), rank, needed[0] * size)
        return self

    def _add(self, key: tuple[str, int, str, str], rank: int | None, numbytes: int) -> None:
        needed = self._buffers.setdefault(key, {})
        needed[rank] = max(needed.get(rank, 0), numbytes)

    def on(self, rank: int) -> int:
        return sum(max(of.get(None, 0), of.get(rank, 0)) for of in self._buffers.values())
