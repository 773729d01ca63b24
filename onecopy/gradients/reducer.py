"""Gradients on their way to their owners while backward runs."""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress, count, pairwise, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch

from onecopy.comm.agreement import RanksDisagree, same_outcome
from onecopy.comm.gloo.local_ranks import SharedRead
from onecopy.comm.gloo.shared_memory import SharedMemory
from onecopy.comm.gloo.topology import ReduceRoutes
from onecopy.comm.group import GATHER_TAGS, Handle, RankGroup, do_nothing
from onecopy.comm.stats import Phase
from onecopy.comm.waiting import BackgroundThread
from onecopy.planning.layout import flat_range, in_layout_of, is_dense, one_of_each
from onecopy.planning.param_groups import grad_dtype, gradient_dtype
from onecopy.planning.plan import Plan, Segment, Shard
from onecopy.planning.sizes import IN_FLIGHT, SHARED_BUFFERS
from onecopy.planning.text import name_ranks, plural
from onecopy.sharding.all_gather import Lendable
from onecopy.sharding.buffers import StagingPool
from onecopy.torch_private import flatten_dense_tensors

_WORTH_ITS_OWN_CALL = 1 << 14  # elements: below, one call for many tensors is cheaper
_STRETCH = 1 << 15  # elements: so many of small tensors are copied at once, which takes memory
_FITS_THE_CACHE = 1 << 17  # elements: what is added up stays in it between the ranks
_WIDE = 4  # bytes of a number that can be added up as it is
_EMPTY = torch.empty(0)


class GradientFill(NamedTuple):
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


class SmallGradients(NamedTuple):
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

    outgoing: StagingPool
    incoming: StagingPool
    # Sums of other hosts, and of this one for others, where they are wider than the wire.
    incoming_sums: StagingPool
    relayed: StagingPool

    @classmethod
    def of_depth(cls, depth: int, outgoing: StagingPool | None = None) -> LaneStaging:
        return cls(outgoing or StagingPool(depth), *(StagingPool(depth) for _ in range(3)))

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
class GradBucket:
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
    passage: ReduceRoutes = field(default_factory=ReduceRoutes)
    memory: SharedMemory | None = None  # of the outgoing staging, if neighbours can read it
    places: tuple[GradientFill | SmallGradients, ...] = ()

    @classmethod
    def of(
        cls,
        plan: Plan,
        bucket: int,
        params: Sequence[torch.Tensor],
        rank_group: RankGroup,
        reduce_dtype: torch.dtype | None,
        master_dtype: torch.dtype | None,
    ) -> GradBucket:
        indices = [segment.param for segment in plan.segments(bucket)]
        param = params[indices[0]]
        planned = [plan.range_of(bucket, owner) for owner in range(plan.world_size)]
        start, stop = planned[rank_group.rank]
        at_once = not rank_group.sends_one_by_one(param.device)
        ranges = _without_gaps(planned) if at_once else planned
        sent_in = reduce_dtype if param.is_floating_point() else None  # complex stay so
        summed_in = gradient_dtype(param, master_dtype)
        wire = torch.empty(0, dtype=sent_in or grad_dtype(param), device=param.device)
        sizes = [(last - first) * wire.element_size() for first, last in ranges]
        lent = {owner for owner, size in enumerate(sizes) if rank_group.lends(size, wire.device)}
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
            and rank_group.is_native(param.device)
            and wire.itemsize >= summed_in.itemsize,
            at_once=at_once,
            passage=ReduceRoutes.of(rank_group.rank, rank_group.hosts, lent, sent),
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

    def leaves_through_memory_of(self, other: GradBucket) -> bool:
        return _are_in_one_place(self.outgoing, other.outgoing)

    def shares_staging_with(self, other: GradBucket) -> bool:
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

    def view(self, shard: Shard, param: torch.Tensor, is_cut: bool) -> torch.Tensor:
        """The gradient of a piece of this rank, in the form of the inner optimizer's tensor."""
        if not shard.numel:
            return torch.zeros(param.shape, dtype=self.slot.dtype, device=param.device)
        flat = self.slot.narrow(0, shard.offset - self.first, shard.numel)
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
            _add_run(self.slot[start : start + run], self.holds, *parts)
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
) -> Iterator[GradientFill | SmallGradients]:
    """Where the gradients of a bucket go in its staging, in their order."""
    together: list[Segment] = []

    def stretch() -> Iterator[SmallGradients]:
        if together:
            indices = tuple(segment.param for segment in together)
            shapes = tuple(params[index].shape for index in indices)
            start, stop = together[0].offset, _end(together[-1])
            together.clear()
            yield SmallGradients(indices, shapes, staging[start:stop])

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
        yield GradientFill(segment.param, segment.start, segment.stop, is_whole, target)
    yield from stretch()


def _end(segment: Segment) -> int:
    """Where it ends in its bucket."""
    return segment.offset + segment.stop - segment.start


def _is_stored_as_it_is_read(param: torch.Tensor) -> bool:
    """Whether the gradient of a parameter is contiguous in its bucket."""
    return param.is_contiguous() or not is_dense(param)


def _are_in_one_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.numel()) and a.data_ptr() == b.data_ptr()


def _add_run(slot: torch.Tensor, holds: bool, first: torch.Tensor, *others: torch.Tensor) -> None:
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


_grad, _layout, _stride = attrgetter("grad"), attrgetter("layout"), torch.Tensor.stride


def forms_of(params: Sequence[torch.Tensor]) -> list[Any]:
    """All of the parameters that a roadway depends on."""
    return one_of_each((param.shape, param.stride(), param.dtype, param.device) for param in params)


@dataclass(frozen=True, slots=True, eq=False)
class GradBuckets:
    """A lane for each bucket; without any, as long as there is no plan to follow."""

    plan: Plan
    params: Sequence[torch.Tensor] = ()
    forms: list[Any] = field(default_factory=list)  # of the parameters
    lanes: Sequence[GradBucket] = ()
    lanes_of: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # of what is planned
    are_dense: Sequence[bool] = ()  # by parameter
    # For each piece of this rank in a bucket: its parameter, and where its gradient is.
    views: Sequence[Sequence[tuple[int, torch.Tensor]]] = ()
    staging: LaneStaging = field(default_factory=lambda: LaneStaging.of_depth(IN_FLIGHT))

    @classmethod
    def build(
        cls,
        plan: Plan,
        params: Sequence[torch.Tensor],
        rank_group: RankGroup,
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
        kept: Sequence[GradBucket] = (),
    ) -> GradBuckets:
        """``kept``: lanes of the first buckets, which go on, as before if memory is lacking.
        ``dtypes``: in which gradients travel, and of the master."""
        new = range(len(kept), len(plan.buckets))
        lanes = [
            *kept,
            *(GradBucket.of(plan, bucket, params, rank_group, *dtypes) for bucket in new),
        ]
        rank_group.local_ranks.forget()
        staging = LaneStaging.of_depth(IN_FLIGHT, _outgoing_staging(rank_group))
        for lane in lanes:
            lane.demand(staging)
        for lane in lanes:  # may fail: nothing has been changed yet
            lane.reserve(staging)
        lanes_of: dict[int, tuple[int, ...]] = {}
        for number, lane in enumerate(lanes):
            lane.settle(plan, params, staging)
            alone = (number,)  # the same for nearly all
            for index in lane.params:
                lanes_of[index] = (*lanes_of[index], number) if index in lanes_of else alone
        return cls(
            plan,
            params,
            forms_of(params),
            lanes,
            lanes_of,
            are_dense=list(map(is_dense, params)),
            views=[_views_in(lane, plan, params, rank_group.rank) for lane in lanes],
            staging=staging,
        )

    def laid_out(self, gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients by parameter, each in the order in which the parameter is stored."""
        found, forms = gradients.values(), self.forms
        if (  # nearly always, and there may be thousands
            all(map(is_, map(_layout, found), repeat(torch.strided)))
            and list(map(_stride, found)) == [forms[index][1] for index in gradients]
            and all(map(self.are_dense.__getitem__, gradients))
        ):
            return gradients
        return {index: self._laid_out(index, grad) for index, grad in gradients.items()}

    def _laid_out(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {index} has a sparse gradient, which cannot be reduced in attached "
                "mode: use sparse=False, or leave out attach(...)"
            )
        param, grad = self.params[index], grad.detach()
        return in_layout_of(param, grad) if self.are_dense[index] else grad.contiguous()

    def not_reduced(self) -> list[int]:
        """The planned parameters that have a gradient of this rank alone."""
        gradients = list(map(_grad, self.params))
        if all(map(is_, gradients, repeat(None))):  # nearly always, and there may be thousands
            return []
        return [index for index in self.lanes_of if gradients[index] is not None]

    def lendable(self, bucket: int, dtype: torch.dtype) -> Lendable | None:
        """The memory through which the gradients of a bucket leave, for the gatherer."""
        lane = self.lanes[bucket]
        if lane.memory is None or lane.wire.dtype != dtype:
            return None
        return Lendable(lane.memory, lane.outgoing)

    @property
    def slot_bytes(self) -> int:
        """Memory of this rank's gradients."""
        return sum(lane.slot.nbytes for lane in self.lanes)

    @property
    def staged_bytes(self) -> int:
        """Memory that buckets pass through; it is kept between the steps."""
        return self.staging.nbytes()


def _outgoing_staging(rank_group: RankGroup) -> StagingPool:
    if not rank_group.local_ranks:
        return StagingPool(IN_FLIGHT)
    return StagingPool(SHARED_BUFFERS, rank_group.memory_to_lend)


def _views_in(
    lane: GradBucket, plan: Plan, params: Sequence[torch.Tensor], rank: int
) -> list[tuple[int, torch.Tensor]]:
    return [
        (p.param, lane.view(p, params[p.param], p.param in plan.cut_params))
        for p in plan.shards_in(lane.bucket, rank)
    ]


# Tags are apart from those of the gathers and of other attachments: ranks on which one backward
# reaches several attached modules may launch their buckets in different orders.
_TAGS_EACH, _ATTACHMENTS = GATHER_TAGS, 4000


@dataclass(slots=True)
class ReduceInFlight:
    """A bucket on its way."""

    lane: GradBucket
    # Of all ranks, or of whole hosts, in the order in which they are added up; or the sum alone.
    contributions: Sequence[torch.Tensor | SharedRead]
    pending: Handle
    shared_reads: Sequence[SharedRead] = ()  # what neighbours lend

    def read(self) -> list[torch.Tensor]:
        """The contributions, once they are here."""
        return [self._mine(c) if isinstance(c, SharedRead) else c for c in self.contributions]

    def _mine(self, shared_read: SharedRead) -> torch.Tensor:
        return self.lane.part_for(
            shared_read.local_ranks.rank, shared_read.tensor(self.lane.wire.dtype)
        )

    def give_back(self) -> None:
        """What neighbours have lent is no longer needed."""
        for shared_read in self.shared_reads:
            shared_read.give_back()


class ReduceScatterQueue:
    """Those that are under way, the first first."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._tags_from = _TAGS_EACH * (1 + rank_group.monitor.attachments % _ATTACHMENTS)
        self._under_way: deque[ReduceInFlight] = deque()
        self.left = 0  # buckets, since construction
        self._carrier: BackgroundThread | None = None  # as long as there is nothing to carry

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def launch(self, lane: GradBucket, gradients: Mapping[int, torch.Tensor], share: float) -> None:
        """Let a bucket leave, with gradients by parameter and zeros for those that are missing."""
        while len(self._under_way) >= IN_FLIGHT or any(
            flight.lane.shares_staging_with(lane) for flight in self._under_way
        ):
            self.land()
        with self._rank_group.counters.launching(Phase.REDUCE_SCATTER, lane.bucket):
            if lane.memory is not None:  # maybe lent by another lane, also if this one only sends
                self._rank_group.wait_until_read(lane.memory)
            lane.fill(gradients, share)
            with self._rank_group.monitor.or_give_up("sending gradients"):
                self._under_way.append(self._send(lane))
                self.left += 1

    def _send(self, lane: GradBucket) -> ReduceInFlight:
        rank_group, passage = self._rank_group, lane.passage
        rank = rank_group.rank
        if rank_group.world_size == 1:
            return ReduceInFlight(lane, [lane.outgoing], rank_group.nothing())
        if lane.has_equal_slots:
            pending = rank_group.reduce_slots(lane.outgoing, lane.incoming)
            return ReduceInFlight(lane, [lane.incoming], pending)
        received = lane.arriving()
        shared_reads: Sequence[SharedRead] = ()
        if lane.at_once:
            outgoing, sizes = lane.parts_in_order()
            pending = rank_group.exchange_parts(outgoing, sizes, lane.incoming)
        else:
            shared_reads, pending = self._send_one_by_one(lane, received)
        # Of a neighbour that sends its part, what it lends is carried elsewhere.
        of_rank: dict[int, torch.Tensor | SharedRead] = {
            shared_read.lender: shared_read for shared_read in shared_reads
        }
        of_rank |= {**received, rank: lane.part_for(rank, lane.outgoing)}
        contributions = [of_rank[contributor] for contributor in passage.contributors]
        return ReduceInFlight(lane, contributions, pending, shared_reads)

    def _send_one_by_one(
        self, lane: GradBucket, received: Mapping[int, torch.Tensor]
    ) -> tuple[list[SharedRead], Handle]:
        rank_group, passage, tag = self._rank_group, lane.passage, self._tag(lane)
        shared_reads, borrowing = rank_group.borrow(passage.lenders, tag)
        if passage.readers:
            assert lane.memory is not None
            read = [
                lane.part_for(owner, lane.outgoing)
                for owners in passage.read_by.values()
                for owner in owners
            ]
            rank_group.lend(lane.memory, dict.fromkeys(passage.readers, lane.outgoing), tag, read)
        works = [borrowing]
        works += [rank_group.receive(part, sender, tag) for sender, part in received.items()]
        for owner in passage.direct:
            works.append(rank_group.send(lane.part_for(owner, lane.outgoing), owner, tag))
        if passage.carried:
            works.append(self._carry(lane, shared_reads))
        return shared_reads, Handle.together(works)

    def _tag(self, lane: GradBucket) -> int:
        return self._tags_from + lane.bucket

    def _carry(self, lane: GradBucket, shared_reads: Sequence[SharedRead]) -> Handle:
        """Add up what neighbours contribute for other hosts, and send it there, once it is here."""
        rank, dtype = self._rank_group.rank, lane.wire.dtype

        def sums() -> Iterator[torch.Tensor]:
            staging = {
                shared_read.lender: shared_read.tensor(dtype) for shared_read in shared_reads
            }
            staging[rank] = lane.outgoing
            in_order = [staging[each] for each in sorted(staging)]
            return (lane.add_up_for(owner, in_order) for owner in lane.passage.carried)

        if self._carrier is None:
            self._carrier = BackgroundThread.of(self)
        parts = {owner: lane.relayed_for(owner) for owner in lane.passage.carried}
        return self._rank_group.send_later(
            parts, sums, shared_reads, self._tag(lane), self._carrier
        )

    def land(self) -> None:
        """Wait for the bucket that left first, and add it to what this rank holds."""
        flight = self._under_way[0]
        with self._rank_group.counters.waiting(Phase.REDUCE_SCATTER, flight.lane.bucket):
            flight.pending.wait()
            # Added up in part, or without being crossed off, it could not be added up again.
            with self._rank_group.monitor.or_give_up("adding up gradients"):
                flight.lane.add(flight.read())
                flight.give_back()
                self._under_way.popleft()

    def land_all(self) -> None:
        while self._under_way:
            self.land()

    def land_bucket(self, bucket: int) -> None:
        """Until this one is here; those that left after it may still be on their way."""
        while any(flight.lane.bucket == bucket for flight in self._under_way):
            self.land()

    def make_free(self, lane: GradBucket) -> None:
        """Until nothing is under way that leaves through the memory of this lane: what this rank
        itself contributes is in it until it is added up."""
        while any(flight.lane.leaves_through_memory_of(lane) for flight in self._under_way):
            self.land()

    def turn_away(self) -> None:
        """Wait for all, and add up none: what was lent is given back."""
        while self._under_way:
            self._under_way[0].pending.wait()
            self._under_way[0].give_back()
            self._under_way.popleft()

    def forget(self) -> None:
        """Without waiting: when there is no group any more, nothing will arrive."""
        self._under_way.clear()


# Backwards are counted modulo this, so that a byte will do: no rank is that far behind another.
_CYCLE = 101


class BackwardOutcome(NamedTuple):
    """What the ranks have said, all together."""

    present: set[int]  # parameters that had a gradient
    again: list[int]  # buckets that need a second round
    gave_up: list[int]  # ranks
    equally_often: bool  # all have had the same number of backwards


@dataclass(frozen=True, slots=True)
class UsedParameters:
    """What all ranks say, on its way."""

    # One for each parameter, for each bucket, for each rank, and two for the number of backwards.
    marks: torch.Tensor
    params: int  # how many there were: more may have come since
    buckets: int
    pending: Handle

    @classmethod
    def ask(
        cls,
        rank_group: RankGroup,
        *,
        params: int,
        buckets: int,
        backwards: int,
        present: Collection[int],
        late: Collection[int],
        gives_up: bool,
    ) -> UsedParameters:
        """Say which of the parameters had a gradient on this rank, for which of the buckets one
        came too late, and whether it gives up."""
        said = bytearray(params + buckets + rank_group.world_size)
        for index in present:
            said[index] = 1
        for bucket in late:
            said[params + bucket] = 1
        if gives_up:
            said[params + buckets + rank_group.rank] = 1
        # The greatest of both over all ranks add up so only if the ranks have the same.
        number = backwards % _CYCLE
        said += bytes([number, _CYCLE - number])
        marks = torch.frombuffer(said, dtype=torch.uint8).to(rank_group.control_device)
        return cls(marks, params, buckets, rank_group.maximum(marks))

    def read(self) -> BackwardOutcome:
        self.pending.wait()
        *marks, most, least = self.marks.tolist()
        first_bucket, first_rank = self.params, self.params + self.buckets
        said = list(compress(count(), marks))
        return BackwardOutcome(
            present={mark for mark in said if mark < first_bucket},
            again=[mark - first_bucket for mark in said if first_bucket <= mark < first_rank],
            gave_up=[mark - first_rank for mark in said if mark >= first_rank],
            equally_often=most + least == _CYCLE,
        )


class GradientsDropped(RuntimeError):
    """A backward that raised on some rank was given up, on all ranks."""


@dataclass(slots=True)
class _Backward:
    """One backward: what has arrived, and how far the buckets have come."""

    missing: list[int]  # how many gradients each bucket waits for
    expected: dict[int, tuple[int, ...]]  # the buckets that wait for each that has not arrived
    keeps_back: bool = False  # no bucket leaves before backward has ended
    taken: set[int] = field(default_factory=set)  # whose gradients came from ``param.grad``
    held: dict[int, torch.Tensor] = field(default_factory=dict)
    origin: int = 0  # ``ReduceScatterQueue.left`` when the first bucket had not left: see ``_next``
    launcher: int | None = None  # the thread that launches the next bucket
    is_closed: bool = False  # no thread may launch a bucket any more: it is given up


class GradientReducer:
    """Sums the gradients of the planned parameters over the ranks, each rank its own slots."""

    def __init__(
        self,
        rank_group: RankGroup,
        reduce_dtype: torch.dtype | None,
        master_dtype: torch.dtype | None,
    ) -> None:
        """Gradients travel in ``reduce_dtype``, and are summed for a master of ``master_dtype``."""
        self._rank_group = rank_group
        self._dtypes = reduce_dtype, master_dtype
        # Gradients of backwards inside no_sync(), by parameter, in the dtype of the master copy.
        self._accumulated: dict[int, torch.Tensor] = {}
        self.roadway = GradBuckets(Plan(rank_group.world_size, 1))  # which nothing takes yet
        self._flights = ReduceScatterQueue(rank_group)
        self._phase: _Backward | None = None
        self._lock = threading.Lock()  # of the phase
        self._launched = threading.Condition(self._lock)  # a launch is over
        self._verdict: UsedParameters | None = None
        self._late: dict[int, torch.Tensor] = {}
        self._present: set[int] = set()
        self.when_dropped: Callable[[], None] = do_nothing  # because a backward was given up
        self.backwards = 0  # since the gradients were used up or dropped
        self.share = 1 / rank_group.world_size  # what a rank's gradient counts in the average

    def prepare(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        """Follow a plan. What is held stays, if the plan only grew. If there is too little memory,
        the one before goes on."""
        before, forms = self.roadway, forms_of(params)
        if plan is before.plan and forms == before.forms:  # no more than addresses have changed
            return
        are_others = forms[: len(before.forms)] != before.forms
        if are_others and self.holds_anything:
            raise RuntimeError(
                "the parameters have been converted since the last backward: call zero_grad() and "
                "compute the gradients again"
            )
        kept = before.lanes
        if are_others or plan.buckets[: len(kept)] != before.plan.buckets:
            self._drop_averaged()  # what is accumulated depends on no plan
            kept = ()
        self.roadway = GradBuckets.build(plan, params, self._rank_group, self._dtypes, kept)

    def lendable(self, bucket: int, dtype: torch.dtype) -> Lendable | None:
        """The memory through which the gradients of a bucket leave, for the gatherer."""
        return self.roadway.lendable(bucket, dtype)

    @torch.no_grad()
    def make_free(self, bucket: int) -> None:
        """Add up whatever leaves through the memory of this bucket: what this rank itself
        contributes is in it until then."""
        self._flights.make_free(self.roadway.lanes[bucket])

    # ------------------------------------------------------------------ backward

    @property
    def is_active(self) -> bool:
        """Whether a backward is under way."""
        return self._phase is not None

    @property
    def keeps_back(self) -> bool:
        """Whether in the backward that is under way no bucket leaves before its end."""
        return self._phase is not None and self._phase.keeps_back

    @property
    def accumulates(self) -> bool:
        """Whether there may be parameters for which ``accumulate`` does something."""
        return self._dtypes[1] is not None

    @torch.no_grad()
    def accumulate(self, index: int, param: torch.Tensor) -> None:
        """The gradient of a backward inside ``no_sync()`` is in ``param.grad``. If the parameter
        has a master copy, add it to what is accumulated in the dtype of that copy."""
        grad, dtype = param.grad, gradient_dtype(param, self._dtypes[1])
        if grad is None or grad.dtype.itemsize >= dtype.itemsize:
            return
        if grad.layout is not torch.strided:
            return  # the next averaged backward refuses it
        before = self._accumulated.get(index)
        if before is None:
            self._accumulated[index] = grad.to(dtype)
        else:
            self._accumulated[index] = before.to(grad.device).add_(grad)
        param.grad = None

    @property
    def accumulated_bytes(self) -> int:
        """Memory of what was accumulated inside ``no_sync()``, beside ``param.grad``."""
        return sum(grad.nbytes for grad in self._accumulated.values())

    def not_reduced(self) -> list[int]:
        """The planned parameters that have a gradient of this rank alone."""
        found = self.roadway.not_reduced()
        if not self._accumulated:  # nearly always
            return found
        accumulated = self._accumulated.keys() & self.roadway.lanes_of.keys()
        return sorted(accumulated.union(found))

    def catch_up(self, first: int) -> None:
        """Reduce the buckets from ``first`` on, which are new, from ``param.grad``."""
        self.begin()
        assert self._phase is not None
        self._phase.origin -= first
        self.backwards -= 1  # no backward of the user's
        self.end()

    def begin(self, keeps_back: bool = False) -> None:
        """A backward has begun, on all ranks; ``keeps_back``: no bucket leaves before its end."""
        self.judge()
        self.backwards += 1
        lanes, lanes_of = self.roadway.lanes, self.roadway.lanes_of
        missing, expected = [len(lane.params) for lane in lanes], dict(lanes_of)
        trainable = list(map(attrgetter("requires_grad"), self.roadway.params))
        if not all(trainable):
            for index in [index for index in lanes_of if not trainable[index]]:
                for number in lanes_of[index]:
                    missing[number] -= 1
                # No bucket waits for it; a DDP that was made when it was trained still delivers it.
                expected[index] = ()
        self._phase = _Backward(missing, expected, keeps_back, origin=self._flights.left)

    def arrived(self, index: int, grad: torch.Tensor | None = None) -> None:
        """The gradient of a parameter is there: given, or in ``param.grad``.

        To be called for thousands of parameters in every backward.
        """
        phase = self._phase
        assert phase is not None
        # Nobody expects what comes a second time, nor what was unfrozen and is not planned yet,
        # which stays in ``param.grad``: see ``catch_up``.
        completes = False
        with self._lock:
            numbers = phase.expected.pop(index, None)
            if numbers is None:
                return
            if grad is not None:
                phase.held[index] = grad
            missing = phase.missing
            for number in numbers:
                left = missing[number] = missing[number] - 1
                if not left:
                    completes = True
        if completes and not phase.keeps_back:
            self._depart_all(phase, self.roadway.params[index].device)

    def _next(self, phase: _Backward) -> int:
        """The first bucket that has not left. Why counted by ``ReduceScatterQueue``, in the same
        step in which a bucket leaves: an interrupt before or after a launch must not change what
        is next."""
        return self._flights.left - phase.origin

    def _depart_all(self, phase: _Backward, device: torch.device | None = None) -> None:
        """Let the next buckets leave; ``device``: as long as they are complete and of this device.

        Returns if another thread launches a bucket: that one goes on with the next.
        """
        while True:
            try:
                number = self._claim(phase, device)
                if number is None:
                    return
                self._depart(phase, number)
            finally:
                self._release(phase)

    def _claim(self, phase: _Backward, device: torch.device | None) -> int | None:
        """The next bucket, for this thread to launch, if there is one and nobody else launches."""
        with self._lock:
            number = self._next(phase)
            if phase.is_closed or phase.launcher is not None or number == len(phase.missing):
                return None
            if device is not None and (
                phase.missing[number] or self.roadway.lanes[number].wire.device != device
            ):
                return None
            phase.launcher = threading.get_ident()
            return number

    def _release(self, phase: _Backward) -> None:
        """This thread launches nothing now."""
        with self._launched:
            if phase.launcher == threading.get_ident():
                phase.launcher = None
                self._launched.notify_all()

    def _close(self, phase: _Backward) -> None:
        """Let no thread launch a bucket any more, and wait until no other one does."""
        me, monitor = threading.get_ident(), self._rank_group.monitor
        patience = monitor.patience()
        with self._launched:
            phase.is_closed = True
            # Its own claim is of a launch that was interrupted.
            is_over = self._launched.wait_for(lambda: phase.launcher in (None, me), patience)
        if not is_over:
            with monitor.or_give_up("waiting for a thread that sends gradients"):
                raise RuntimeError(
                    "the last backward raised, and one of its threads has not finished sending a "
                    f"bucket of gradients after {patience:g} s, the timeout of the process group. "
                    "The other ranks wait for this one: start the job again from a checkpoint"
                )

    @torch.no_grad()
    def end(self, present: set[int] | None = None) -> None:
        """Backward has ended, on all ranks. ``present``: the parameters that had a gradient, if
        the feed knows better than we do."""
        if self._phase is None:
            self.begin()
        phase = self._phase
        assert phase is not None
        self._depart_all(phase)
        if self._next(phase) != len(phase.missing):  # autograd has ended its other threads
            raise RuntimeError(f"at the end of backward, bucket {self._next(phase)} has not left")
        lanes_of = self.roadway.lanes_of
        if present is None:
            self._late = self._leftovers()
            present = lanes_of.keys() - phase.expected.keys() | self._late.keys()
        present = present | phase.taken
        self._phase = None
        self._say(present, {number for index in self._late for number in lanes_of[index]})

    def _say(self, present: Collection[int], late: Collection[int], gives_up: bool = False) -> None:
        """Tell the ranks how backward has ended on this one."""
        self._verdict = UsedParameters.ask(
            self._rank_group,
            params=len(self.roadway.params),
            buckets=len(self.roadway.lanes),
            backwards=self.backwards,
            present=present,
            late=late,
            gives_up=gives_up,
        )

    @torch.no_grad()
    def give_up(self) -> None:
        """Finish a backward that has raised, with zeros: the other ranks wait for the buckets."""
        phase = self._phase
        assert phase is not None
        self._close(phase)
        phase.held.clear()
        for lane in self.roadway.lanes[self._next(phase) :]:
            self._flights.launch(lane, {}, self.share)
        self._phase, self._late = None, {}
        self._say((), (), gives_up=True)
        for index in self.roadway.not_reduced():
            self.roadway.params[index].grad = None
        self._accumulated.clear()

    def _leftovers(self) -> dict[int, torch.Tensor]:
        """Gradients that came when their bucket had left."""
        return self._take(self.not_reduced())

    def _take(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        """What is in ``param.grad`` of these parameters or was accumulated, and no longer there."""
        params = self.roadway.params
        if self._accumulated:
            indices = list(indices)
        found = {i: grad for i in indices if (grad := params[i].grad) is not None}
        found = self.roadway.laid_out(found)
        for index in found:
            params[index].grad = None
        if self._accumulated:
            found.update(self._with_accumulated(indices, found))
        return found

    def _with_accumulated(
        self, indices: Iterable[int], gradients: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """What was accumulated for these parameters, and the gradients of this backward."""
        found = {}
        for index in [index for index in indices if index in self._accumulated]:
            total, grad = self._accumulated.pop(index), gradients.get(index)
            if grad is not None:
                total = total.to(grad.device).add_(grad)
            found[index] = total
        return self.roadway.laid_out(found)

    @torch.no_grad()
    def _depart(self, phase: _Backward, number: int) -> None:
        """Let a bucket leave. Other threads may add to the phase meanwhile, but not what this
        bucket needs: each operation on a dict or a set is one step of the interpreter."""
        held, lanes_of = phase.held, self.roadway.lanes_of
        lane = self.roadway.lanes[number]
        taken = self._take(index for index in lane.params if index not in held)
        if self._accumulated:
            taken.update(self._with_accumulated(lane.params, held))
        held.update(taken)
        phase.taken.update(taken)
        for index in taken:
            phase.expected.pop(index, None)
        self._flights.launch(lane, held, self.share)
        for index in lane.params:
            if lanes_of[index][-1] <= lane.bucket:
                held.pop(index, None)  # the last bucket that needs it has it

    # ------------------------------------------------------------------ afterwards

    @torch.no_grad()
    def settle(self) -> None:
        """Wait until everything that has left is here."""
        self._flights.land_all()
        self.judge()

    @torch.no_grad()
    def judge(self) -> None:
        """Learn what the ranks have said at the end of the last backward, and do what follows. That
        may be a second round: to be called on all ranks."""
        if self._verdict is None:
            return
        said = self._verdict.read()
        if said.gave_up:
            self.drop()
            raise GradientsDropped(
                f"the last backward has not come to its end, because it raised on "
                f"{name_ranks(said.gave_up)}, and its gradients were dropped on all ranks: call "
                "zero_grad() and go on with the next batch"
            )
        self._verdict = None
        if not said.equally_often:
            held = f"with {plural(self.backwards, 'backward')} since the last step or zero_grad()"
            try:
                same_outcome(self._rank_group, "reducing gradients", lambda: [held])
            except RanksDisagree:
                self.drop()  # on all ranks: nobody may step with a part of them
                raise
        self._present |= said.present
        again = said.again
        late, self._late = self._late, {}
        for number in again:
            self._flights.launch(self.roadway.lanes[number], late, self.share)
        if again:
            self._flights.land_all()

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients of this rank's pieces, in the order of the plan, after ``settle``."""
        return [grad for lane in self.roadway.lanes for grad in self.gradients_in(lane.bucket)]

    @torch.no_grad()
    def gradients_in(self, bucket: int) -> list[torch.Tensor | None]:
        """The same for one bucket, after ``judge``: the others may still be on their way."""
        self._flights.land_bucket(bucket)
        present = self._present
        return [view if index in present else None for index, view in self.roadway.views[bucket]]

    @property
    def present(self) -> Collection[int]:
        """The parameters that have a gradient, after ``settle``. The same on all ranks."""
        return self._present

    @property
    def holds_anything(self) -> bool:
        """Whether there are gradients that no step has used. The same on all ranks."""
        held = any(lane.holds for lane in self.roadway.lanes)
        return held or bool(self._phase or self._flights or self._verdict or self._present)

    @torch.no_grad()
    def drop(self) -> None:
        """Forget all gradients, also those of a backward that was never finished."""
        self._drop_averaged()
        self._accumulated.clear()

    def _drop_averaged(self) -> None:
        gave_up: list[int] = []
        if self._rank_group.monitor.refusal is None:
            if self._phase is not None:
                self.give_up()
            self._flights.turn_away()
            if self._verdict is not None:
                gave_up = self._verdict.read().gave_up
        self._flights.forget()  # without a group nothing will arrive
        self._phase, self._verdict, self._late = None, None, {}
        self.clear()
        if gave_up:
            self.when_dropped()

    @torch.no_grad()
    def clear(self) -> None:
        """The gradients are used up."""
        assert self._verdict is None
        # A step waits for what it uses only: buckets in which this rank owns nothing are left.
        self._flights.land_all()
        self._present = set()
        self.backwards = 0
        for lane in self.roadway.lanes:
            lane.holds = False
