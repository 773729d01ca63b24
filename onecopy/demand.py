"""How much staging a plan demands, before there is any memory.

The rules are those by which the gatherer and the reducer take it: a few buffers in turn, each as
large as the largest bucket that passes through it. What a rank receives of gradients depends on
what it owns; all else is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from onecopy.gatherer import IN_FLIGHT, LENT, left_in_flight
from onecopy.kinds import Kind
from onecopy.neighbours import worth_lending
from onecopy.plan import Plan
from onecopy.tally import equal_part, owned_ranges
from onecopy.transfers import WORTH_ITS_OWN_MESSAGE


@dataclass(frozen=True, slots=True)
class Ways:
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

    def __init__(self, plan: Plan, ways: Ways) -> None:
        self._copied: dict[_Key, int] = {}  # in bytes, on every rank
        self._lent: dict[_Key, _Buffer] = {}
        if plan.world_size == 1:
            return
        together = left_in_flight(len(plan.buckets), ways.lazily)
        for turn, bucket in enumerate(plan.buckets):
            stream = plan.streams[bucket.stream]
            key = (turn % max(IN_FLIGHT, together), stream.device, stream.dtype)
            copied = staged_elements(plan, turn, ways) * stream.itemsize
            self._copied[key] = max(self._copied.get(key, 0), copied)
            key = (turn % max(LENT, together), stream.device, stream.dtype)
            if ways.one_host and not ways.lends_anew(bucket.stream):
                lent = self._lent.setdefault(key, _Buffer())
                lent.demand_slots(plan, turn, _lent(stream.itemsize))

    def on(self, rank: int) -> int:
        return sum(self._copied.values()) + sum(b.on_rank(rank) for b in self._lent.values())


def _lent(itemsize: int) -> Callable[[int], int]:
    """Bytes of a slot of so many elements, if neighbours are to read it."""
    return lambda numel: numel * itemsize if worth_lending(numel * itemsize) else 0


def staged_elements(plan: Plan, bucket: int, ways: Ways) -> int:
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


def _packed_elements(plan: Plan, bucket: int, ways: Ways) -> int:
    """Elements in pieces too small for a message of their own."""
    itemsize = plan.streams[plan.buckets[bucket].stream].itemsize
    packed = 0
    for rank in _owners_of_several(plan, bucket, ways):
        start, stop = plan.range_of(bucket, rank)
        if ways.one_host and worth_lending((stop - start) * itemsize):
            continue
        pieces = [piece for piece in plan.pieces_in(bucket, rank) if piece.numel]
        small = []
        for piece in pieces:
            large = len(pieces) == 1 or piece.numel * itemsize >= WORTH_ITS_OWN_MESSAGE
            if not (large and ways.is_dense(piece.param)):
                small.append(piece)
        if not (len(small) == 1 and ways.is_dense(small[0].param)):  # alone it needs no packing
            packed += sum(piece.numel for piece in small)
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


class ReduceStaging:
    """Bytes that gradients pass through on their way to their owners, by rank."""

    def __init__(
        self,
        plan: Plan,
        ways: Ways,
        wire_of: Callable[[int], torch.dtype],
        held_in: Callable[[int], torch.dtype],
    ) -> None:
        """The dtypes in which the gradients of a stream travel, and in which they are summed."""
        self._outgoing: dict[_Key, int] = {}  # in bytes, on every rank
        self._incoming: dict[_Key, _Buffer] = {}
        lends = ways.one_host and plan.world_size > 1
        depth = LENT if lends else IN_FLIGHT
        for number, bucket in enumerate(plan.buckets):
            device, wire = plan.streams[bucket.stream].device, wire_of(bucket.stream)
            key = (number % depth, device, str(wire))
            numbytes = bucket.numel * wire.itemsize
            self._outgoing[key] = max(self._outgoing.get(key, 0), numbytes)
            key = (number % IN_FLIGHT, device, str(wire))
            incoming = self._incoming.setdefault(key, _Buffer())
            is_summed_on_the_way = wire.itemsize >= held_in(bucket.stream).itemsize
            received = _received(plan, number, ways, wire.itemsize, is_summed_on_the_way)
            incoming.demand_slots(plan, number, received)

    def on(self, rank: int) -> int:
        return sum(self._outgoing.values()) + sum(b.on_rank(rank) for b in self._incoming.values())


def _received(
    plan: Plan, bucket: int, ways: Ways, itemsize: int, is_summed_on_the_way: bool
) -> Callable[[int], int]:
    """Bytes that come in for a slot of so many elements. ``is_summed_on_the_way``: a backend that
    can sum may do so."""
    parts = plan.world_size - 1
    if parts and (ways.native or not ways.on_cpu):
        is_one_sum = ways.native and is_summed_on_the_way and plan.has_equal_slots(bucket)
        parts = 1 if is_one_sum else plan.world_size  # all_to_all copies this rank's own part, too

    def received(numel: int) -> int:
        if ways.one_host and worth_lending(numel * itemsize):
            return 0
        return numel * itemsize * parts

    return received


@dataclass(slots=True)
class _Buffer:
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
