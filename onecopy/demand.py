"""How much staging a plan demands, before there is any memory.

The rules are those by which the gatherer and the reducer take it: a few buffers in turn, each as
large as the largest bucket that passes through it. What a rank receives of gradients depends on
what it owns; all else is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from onecopy.gatherer import IN_FLIGHT as GATHERS_IN_FLIGHT
from onecopy.gatherer import WORTH_ITS_OWN_MESSAGE
from onecopy.kinds import Kind
from onecopy.plan import Plan
from onecopy.reducer import IN_FLIGHT as REDUCTIONS_IN_FLIGHT
from onecopy.tally import equal_part, owned_ranges


@dataclass(frozen=True, slots=True)
class Ways:
    """How buckets travel: by what the backend does best, and what the user asked for."""

    equal_slots: bool  # the backend has a good all_gather and reduce_scatter; gloo has not
    in_place: bool = False  # parameters_as_bucket_view
    lazily: bool = False  # all gathers may be under way together
    is_dense: Callable[[int], bool] = lambda _: True  # a parameter, in memory


def gather_staging(plan: Plan, ways: Ways) -> int:
    """Bytes, on every rank, that gathers pass through."""
    if plan.world_size == 1:
        return 0
    depth = max(GATHERS_IN_FLIGHT, len(plan.buckets)) if ways.lazily else GATHERS_IN_FLIGHT
    buffers: dict[tuple[int, str, str], int] = {}
    for turn, bucket in enumerate(plan.buckets):
        stream = plan.streams[bucket.stream]
        key = (turn % depth, stream.dtype, stream.device)
        numbytes = staged_elements(plan, turn, ways) * stream.itemsize
        buffers[key] = max(buffers.get(key, 0), numbytes)
    return sum(buffers.values())


def staged_elements(plan: Plan, bucket: int, ways: Ways) -> int:
    """Elements of a bucket that pass through staging when it is gathered."""
    b = plan.buckets[bucket]
    if plan.streams[b.stream].kind is Kind.ELEMENTWISE and ways.equal_slots:
        if b.extra:  # slots are padded to the longest
            unit = plan.streams[b.stream].unit
            return (equal_part(plan, bucket) + unit) * plan.world_size
        segments = list(plan.segments(bucket))
        alone = len(segments) == 1 and segments[0].stop - segments[0].start == b.numel
        return 0 if alone or ways.in_place else b.numel
    return 0 if ways.in_place else _packed_elements(plan, bucket, ways)


def _packed_elements(plan: Plan, bucket: int, ways: Ways) -> int:
    """Elements in pieces too small for a message of their own."""
    itemsize = plan.streams[plan.buckets[bucket].stream].itemsize
    packed = 0
    for rank in _owners_of_several(plan, bucket, ways):
        pieces = [piece for piece in plan.pieces_in(bucket, rank) if piece.numel]
        for piece in pieces:
            large = len(pieces) == 1 or piece.numel * itemsize >= WORTH_ITS_OWN_MESSAGE
            if not (large and ways.is_dense(piece.param)):
                packed += piece.numel
    return packed


def _owners_of_several(plan: Plan, bucket: int, ways: Ways) -> set[int]:
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


@dataclass(slots=True)
class _Buffer:
    """Elements that a buffer needs: on every rank, and on some more."""

    everywhere: int = 0
    on: dict[int, int] = field(default_factory=dict)

    def demand(self, everywhere: int) -> None:
        self.everywhere = max(self.everywhere, everywhere)

    def demand_on(self, rank: int, numel: int) -> None:
        self.on[rank] = max(self.on.get(rank, 0), numel)


class ReduceStaging:
    """Bytes that gradients pass through on their way to their owners, by rank."""

    def __init__(self, plan: Plan, ways: Ways, wire_of: Callable[[int], torch.dtype]) -> None:
        """``wire_of`` a stream says in what dtype its gradients travel."""
        self._outgoing: dict[tuple[int, str, torch.dtype], int] = {}
        self._incoming: dict[tuple[int, str, torch.dtype], _Buffer] = {}
        for number, bucket in enumerate(plan.buckets):
            stream = plan.streams[bucket.stream]
            key = (number % REDUCTIONS_IN_FLIGHT, stream.device, wire_of(bucket.stream))
            self._outgoing[key] = max(self._outgoing.get(key, 0), bucket.numel)
            _demand(self._incoming.setdefault(key, _Buffer()), plan, number, ways)

    def on(self, rank: int) -> int:
        outgoing = sum(numel * key[2].itemsize for key, numel in self._outgoing.items())
        incoming = sum(
            max(buffer.everywhere, buffer.on.get(rank, 0)) * key[2].itemsize
            for key, buffer in self._incoming.items()
        )
        return outgoing + incoming


def _demand(buffer: _Buffer, plan: Plan, bucket: int, ways: Ways) -> None:
    """Room for what the other ranks send of a bucket."""
    others = plan.world_size - 1
    if plan.streams[plan.buckets[bucket].stream].kind is Kind.WHOLE:
        for rank, (start, stop) in owned_ranges(plan, bucket).items():
            buffer.demand_on(rank, (stop - start) * others)
        return
    summed_by_backend = ways.equal_slots and plan.has_equal_slots(bucket) and others > 0
    each = equal_part(plan, bucket)
    buffer.demand(each if summed_by_backend else each * others)
    unit = plan.streams[plan.buckets[bucket].stream].unit
    for rank in plan.buckets[bucket].extra:
        buffer.demand_on(rank, (each + unit) * others)
