"""Buckets of a plan as they are reduced: where gradients come together, and where they add up."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

import torch

from onecopy.buffers import Staging, flat_range, is_dense
from onecopy.hosts import Passage
from onecopy.lending import SharedMemory
from onecopy.pieces import grad_dtype, gradient_held_in
from onecopy.plan import Piece, Plan, Segment
from onecopy.torch_private import flatten_dense_tensors
from onecopy.transport import Transport

_WORTH_ITS_OWN_CALL = 1 << 14  # elements: below, one call for many tensors is cheaper
_STRETCH = 1 << 15  # elements: so many of small tensors are copied at once, which takes memory
_FITS_THE_CACHE = 1 << 17  # elements: what is added up stays in it between the ranks
_WIDE = 4  # bytes of a number that can be added up as it is
_EMPTY = torch.empty(0)


class Place(NamedTuple):
    """Where the gradient of a parameter, or of a part of it, goes in a bucket."""

    param: int
    start: int  # elements of the parameter
    stop: int
    is_whole: bool  # all of it: the target has the form of the gradient
    target: torch.Tensor  # in the outgoing staging

    def fill(self, gradients: Mapping[int, torch.Tensor], share: float) -> None:
        grad = gradients.get(self.param)
        if grad is None:
            self.target.zero_()
        else:
            part = grad if self.is_whole else flat_range(grad, self.start, self.stop)
            _put(part, share, self.target)


class Stretch(NamedTuple):
    """Small tensors, each of them whole, side by side in a bucket: filled together.

    One target for all of them, and no views: there may be thousands.
    """

    params: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    target: torch.Tensor  # flat

    def fill(self, gradients: Mapping[int, torch.Tensor], share: float) -> None:
        if gradients.keys().isdisjoint(self.params):
            self.target.zero_()
            return
        found = [
            gradients[param] if param in gradients else self.target.new_zeros(shape)
            for param, shape in zip(self.params, self.shapes, strict=True)
        ]
        flat: torch.Tensor = flatten_dense_tensors(found)
        _put(flat.view_as(self.target), share, self.target)  # else it would change its length


def _put(source: torch.Tensor, share: float, target: torch.Tensor) -> None:
    """A gradient times its share."""
    if source.dtype.itemsize < target.dtype.itemsize:
        target.copy_(source).mul_(share)
    else:
        # Before it is rounded for the wire, where it could overflow; and the memory is touched
        # once.
        torch.mul(source, share, out=target)


@dataclass(frozen=True, slots=True)
class LaneStaging:
    """The memory that buckets pass through."""

    outgoing: Staging
    incoming: Staging
    # Sums of other hosts, and of this one for others, where they are wider than the wire.
    incoming_sums: Staging
    relayed: Staging

    @classmethod
    def of_depth(cls, depth: int, outgoing: Staging | None = None) -> LaneStaging:
        return cls(outgoing or Staging(depth), *(Staging(depth) for _ in range(3)))

    def nbytes(self) -> int:
        kinds = (self.outgoing, self.incoming, self.incoming_sums, self.relayed)
        return sum(staging.nbytes() for staging in kinds)


class Reserved(NamedTuple):
    """Buffers of one bucket, in the order of :meth:`Lane.reserve`."""

    outgoing: torch.Tensor
    incoming: torch.Tensor
    incoming_sums: torch.Tensor
    relayed: torch.Tensor


@dataclass(slots=True, eq=False)
class Lane:
    """A bucket as it is reduced, and the gradient of what this rank owns in it."""

    bucket: int
    numel: int
    params: frozenset[int]  # that have a part in it
    ranges: tuple[tuple[int, int], ...]  # of the staging: what each rank owns
    first: int  # where in the bucket begins what this rank owns
    # Where the staging has no gaps: (place in the bucket, how much lower it is in the staging).
    shifts: tuple[tuple[int, int], ...]
    wire: torch.Tensor  # an empty tensor of the dtype and device in which it travels
    slot: torch.Tensor  # the sum over the ranks, of what this one owns
    has_equal_slots: bool  # and the backend sums them itself
    at_once: bool = False  # parts are exchanged in one collective, instead of messages
    holds: bool = False  # whether the slot holds a gradient
    outgoing: torch.Tensor = field(default=_EMPTY)  # staging of the whole bucket ...
    incoming: torch.Tensor = field(default=_EMPTY)  # ... and of what comes from the others
    incoming_sums: torch.Tensor = field(default=_EMPTY)  # of other hosts, if wider than the wire
    relayed: torch.Tensor = field(default=_EMPTY)  # sums of this host for others, if wider
    passage: Passage = field(default_factory=Passage)
    memory: SharedMemory | None = None  # of the outgoing staging, if neighbours can read it
    places: tuple[Place | Stretch, ...] = ()

    @classmethod
    def of(
        cls,
        plan: Plan,
        bucket: int,
        params: Sequence[torch.Tensor],
        transport: Transport,
        reduce_dtype: torch.dtype | None,
        master_dtype: torch.dtype | None,
    ) -> Lane:
        indices = [segment.param for segment in plan.segments(bucket)]
        param = params[indices[0]]
        planned = [plan.range_of(bucket, owner) for owner in range(plan.world_size)]
        start, stop = planned[transport.rank]
        at_once = not transport.sends_one_by_one(param.device)
        ranges = _without_gaps(planned) if at_once else planned
        sent_in = reduce_dtype if param.is_floating_point() else None  # complex stay so
        summed_in = gradient_held_in(param, master_dtype)
        wire = torch.empty(0, dtype=sent_in or grad_dtype(param), device=param.device)
        sizes = [(last - first) * wire.element_size() for first, last in ranges]
        lent = {owner for owner, size in enumerate(sizes) if transport.lends(size, wire.device)}
        sent = {owner for owner, size in enumerate(sizes) if size} - lent
        return cls(
            bucket,
            plan.buckets[bucket].numel,
            frozenset(indices),
            tuple(ranges),
            first=start,
            shifts=tuple(
                (place[0], place[0] - new[0])
                for place, new in zip(planned, ranges, strict=True)
                if place[0] < place[1]
            ),
            wire=wire,
            slot=torch.zeros(stop - start, dtype=summed_in, device=param.device),
            # A backend sums in the dtype of the wire. If that is narrower than the slot's, this
            # rank adds up what the others send, as the documentation promises.
            has_equal_slots=plan.has_equal_slots(bucket)
            and transport.is_native(param.device)
            and wire.itemsize >= summed_in.itemsize,
            at_once=at_once,
            passage=Passage.of(transport.rank, transport.hosts, lent, sent),
        )

    @property
    def sums(self) -> torch.Tensor:
        """An empty tensor of the dtype in which the sum of a host travels."""
        return self.wire.to(sum_dtype(self.wire.dtype, self.slot.dtype))

    @property
    def _wide_sums(self) -> frozenset[int]:
        """The senders whose messages have another dtype than the wire."""
        return self.passage.summed if self.sums.dtype != self.wire.dtype else frozenset()

    @property
    def room(self) -> int:
        """Elements of staging for what comes from the other ranks in the dtype of the wire."""
        mine, world = self.slot.numel(), len(self.ranges)
        if self.at_once and world > 1:
            return mine if self.has_equal_slots else mine * world
        return mine * (len(self.passage.senders) - len(self._wide_sums))

    @property
    def room_for_sums(self) -> int:
        """The same for sums of other hosts that are wider than the wire."""
        return self.slot.numel() * len(self._wide_sums)

    @property
    def relayed_numel(self) -> int:
        """Elements of staging for sums of this host that are wider than the wire."""
        if self.sums.dtype == self.wire.dtype:
            return 0
        ranges = [self.ranges[owner] for owner in self.passage.carried]
        return sum(stop - start for start, stop in ranges)

    def demand(self, staging: LaneStaging) -> None:
        """Announce what ``reserve`` will take."""
        staging.outgoing.demand(self.bucket, self.numel, self.wire)
        staging.incoming.demand(self.bucket, self.room, self.wire)
        staging.incoming_sums.demand(self.bucket, self.room_for_sums, self.sums)
        staging.relayed.demand(self.bucket, self.relayed_numel, self.sums)

    def reserve(self, staging: LaneStaging) -> Reserved:
        """Allocate staging, for which demands were made before. May fail, and changes nothing."""
        return Reserved(
            staging.outgoing.reserve(self.bucket, self.numel, self.wire),
            staging.incoming.reserve(self.bucket, self.room, self.wire),
            staging.incoming_sums.reserve(self.bucket, self.room_for_sums, self.sums),
            staging.relayed.reserve(self.bucket, self.relayed_numel, self.sums),
        )

    def settle(self, plan: Plan, params: Sequence[torch.Tensor], staging: LaneStaging) -> None:
        """Take staging, for which demands were made before."""
        self.outgoing, self.incoming, self.incoming_sums, self.relayed = self.reserve(staging)
        self.memory = staging.outgoing.lender(self.bucket, self.wire)
        segments = map(self._in_staging, plan.segments(self.bucket))
        self.places = tuple(_places(segments, params, self.outgoing))

    def _in_staging(self, segment: Segment) -> Segment:
        """The segment at its place in the staging."""
        at = bisect.bisect_right(self.shifts, segment.offset, key=itemgetter(0)) - 1
        shift = self.shifts[max(at, 0)][1] if self.shifts else 0
        # A parameter without elements may lie before the first part.
        return replace(segment, offset=max(segment.offset - shift, 0)) if shift else segment

    def leaves_through_memory_of(self, other: Lane) -> bool:
        return _are_in_one_place(self.outgoing, other.outgoing)

    def shares_staging_with(self, other: Lane) -> bool:
        """Whether they cannot be under way together."""
        return self.leaves_through_memory_of(other) or any(
            _are_in_one_place(mine, theirs)
            for mine, theirs in (
                (self.incoming, other.incoming),
                (self.incoming_sums, other.incoming_sums),
                (self.relayed, other.relayed),
            )
        )

    def arriving(self) -> dict[int, torch.Tensor]:
        """Where the message of each sender is received."""
        each, wide = self.slot.numel(), self._wide_sums
        found, used, used_by_sums = {}, 0, 0
        # An exchange at once has a place for every rank, this one included.
        senders = range(len(self.ranges)) if self.at_once else self.passage.senders
        for sender in senders:
            if sender in wide:
                found[sender] = self.incoming_sums[used_by_sums : used_by_sums + each]
                used_by_sums += each
            else:
                found[sender] = self.incoming[used : used + each]
                used += each
        return found

    def view(self, piece: Piece, param: torch.Tensor, is_cut: bool) -> torch.Tensor:
        """The gradient of a piece of this rank, in the form of the inner optimizer's tensor."""
        if not piece.numel:
            return torch.zeros(param.shape, dtype=self.slot.dtype, device=param.device)
        flat = self.slot.narrow(0, piece.offset - self.first, piece.numel)
        return flat if is_cut else _in_form_of(param, flat)

    def fill(self, gradients: Mapping[int, torch.Tensor], share: float) -> None:
        """Every gradient to its place, times ``share``; zeros where there is none."""
        for place in self.places:
            place.fill(gradients, share)

    def parts_in_order(self) -> tuple[torch.Tensor, list[int]]:
        """The outgoing parts in the order of their owners as one run, and how long each is. For an
        exchange at once."""
        sizes = [stop - start for start, stop in self.ranges]
        return self.outgoing[: sum(sizes)], sizes

    def part_for(self, owner: int, bucket: torch.Tensor) -> torch.Tensor:
        """What belongs to an owner in anybody's staging of the bucket."""
        start, stop = self.ranges[owner]
        return bucket[start:stop]

    def relayed_for(self, owner: int) -> torch.Tensor:
        """Where the sum of this host for an owner on another one is made: in place of what this
        rank contributes, or beside it if the sum is wider."""
        if self.sums.dtype == self.wire.dtype:
            return self.part_for(owner, self.outgoing)
        at = 0
        for each in self.passage.carried:
            start, stop = self.ranges[each]
            if each == owner:
                return self.relayed[at : at + stop - start]
            at += stop - start
        raise AssertionError(f"nothing is relayed to rank {owner}")

    def add_up_for(self, owner: int, buckets: Sequence[torch.Tensor]) -> torch.Tensor:
        """What this host contributes to what an owner on another one owns: the sum over its ranks,
        in ``relayed_for(owner)``. ``buckets``: their staging, in their order."""
        total = self.relayed_for(owner)
        contributions = [self.part_for(owner, bucket) for bucket in buckets]
        for start in range(0, total.numel(), _FITS_THE_CACHE):
            parts = [each[start : start + _FITS_THE_CACHE] for each in contributions]
            target = total[start : start + _FITS_THE_CACHE]
            if target.dtype != self.wire.dtype:
                target.copy_(parts[0])
                for part in parts[1:]:
                    target.add_(part)
            elif len(parts) == 2 and target.dtype.itemsize >= _WIDE:
                torch.add(*parts, out=target)
            else:  # this rank's own is one of them, and narrow ones are rounded once
                wide = parts[0].to(_summed_in(target.dtype), copy=True)
                for part in parts[1:]:
                    wide.add_(part)
                target.copy_(wide)
        return total

    def add(self, contributions: Sequence[torch.Tensor]) -> None:
        """Add what was contributed, in this order, to what is held."""
        numel = self.slot.numel()
        in_runs = len(contributions) > 2 and self.slot.device.type == "cpu"
        run = _FITS_THE_CACHE if in_runs else max(numel, 1)
        for start in range(0, numel, run):
            parts = [each[start : start + run] for each in contributions]
            _add(self.slot[start : start + run], self.holds, *parts)
        self.holds = True


def sum_dtype(wire: torch.dtype, slot: torch.dtype) -> torch.dtype:
    """The dtype in which the sum of the contributions of a host travels. That of the slot, so that
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


def _without_gaps(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of the same lengths, each from where the one before ends: between the parts of two
    ranks, parameters without elements take a place in the plan.

    >>> _without_gaps([(1, 4), (0, 0), (6, 8)])
    [(0, 3), (3, 3), (3, 5)]
    """
    edges = accumulate((stop - start for start, stop in ranges), initial=0)
    return list(pairwise(edges))


def _summed_in(wire: torch.dtype) -> torch.dtype:
    return wire if wire.itemsize >= _WIDE else torch.promote_types(wire, torch.float32)


def _places(
    segments: Iterable[Segment], params: Sequence[torch.Tensor], staging: torch.Tensor
) -> Iterator[Place | Stretch]:
    """Where the gradients of a bucket go in its staging, in their order."""
    together: list[Segment] = []

    def stretch() -> Iterator[Stretch]:
        if together:
            indices = tuple(segment.param for segment in together)
            shapes = tuple(params[index].shape for index in indices)
            start, stop = together[0].offset, _end(together[-1])
            together.clear()
            yield Stretch(indices, shapes, staging[start:stop])

    for segment in segments:
        param, numel = params[segment.param], segment.stop - segment.start
        is_whole = numel == param.numel()
        if is_whole and numel < _WORTH_ITS_OWN_CALL and _is_stored_as_it_is_read(param):
            if together and (
                _end(together[-1]) != segment.offset
                or _end(segment) - together[0].offset > _STRETCH
            ):
                yield from stretch()
            together.append(segment)
            continue
        yield from stretch()
        target = staging.narrow(0, segment.offset, numel)
        if is_whole:
            target = _in_form_of(param, target)
        yield Place(segment.param, segment.start, segment.stop, is_whole, target)
    yield from stretch()


def _end(segment: Segment) -> int:
    """Where it ends in its bucket."""
    return segment.offset + segment.stop - segment.start


def _is_stored_as_it_is_read(param: torch.Tensor) -> bool:
    """Whether the gradient of a parameter is contiguous in its bucket."""
    return param.is_contiguous() or not is_dense(param)


def _are_in_one_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.numel()) and a.data_ptr() == b.data_ptr()


def _add(slot: torch.Tensor, holds: bool, first: torch.Tensor, *others: torch.Tensor) -> None:
    if others and not holds and first.dtype == slot.dtype:
        torch.add(first, others[0], out=slot)
        for other in others[1:]:
            slot.add_(other)
        return
    # Narrow numbers on the wire are summed in the wider ones of the gradient.
    total = first.to(torch.promote_types(first.dtype, slot.dtype))
    for other in others:
        total.add_(other)
    slot.add_(total) if holds else slot.copy_(total)


def _in_form_of(param: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A run of as many elements, in the shape and the storage order of a parameter."""
    if not is_dense(param):
        return flat.view(param.shape)
    return flat.as_strided(param.shape, param.stride(), flat.storage_offset())
