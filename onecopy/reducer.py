"""Gradients to their owners while backward runs: one engine, whatever feeds it.

::

    grad of p --arrived--> (all of a bucket there) --> staging, times 1/W --> owners --> my slot

A bucket leaves as soon as the gradients of all its parameters are there, in the background and in
the order of the plan, which is that in which backward produces them; at most ``IN_FLIGHT`` are on
their way. What leaves depends on the plan only: a parameter without gradient counts as zeros. Which
parameters had one anywhere is compared when backward ends, by one small all-reduce, and looked at
when the gradients are wanted; a parameter that had none on any rank has none, as unsharded.

A gradient that comes after its bucket has left (a weight that is used in two parts of a
checkpointed model) goes into a second round, which all ranks take if one needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_

import torch

from onecopy.buffers import Copies, Staging, flat_range, in_layout_of, is_dense
from onecopy.pieces import grad_dtype, updated_in
from onecopy.plan import Piece, Plan, Segment
from onecopy.transport import Pending, Transport

IN_FLIGHT = 3
_WORTH_ITS_OWN_CALL = 1 << 14  # elements: below, one call for many tensors is cheaper
_TAGS_FROM = 1 << 16  # apart from those of the gathers


@dataclass(slots=True, eq=False)
class Lane:
    """A bucket of the plan as it is reduced, and the gradient of what this rank owns in it."""

    bucket: int
    segments: tuple[Segment, ...]
    params: frozenset[int]  # that have a segment in it
    ranges: tuple[tuple[int, int], ...]  # what each rank owns in it
    wire: torch.Tensor  # an empty tensor of the dtype and device in which it travels
    slot: torch.Tensor
    numel: int  # of the bucket
    has_equal_slots: bool  # and the backend sums them itself
    holds: bool = False  # whether the slot holds a gradient


@dataclass(frozen=True, slots=True)
class _Flight:
    """A bucket on its way."""

    lane: Lane
    contributions: Sequence[torch.Tensor]  # of all ranks, in their order, or their sum alone
    pending: Pending


@dataclass(slots=True)
class _Phase:
    """One backward: what has arrived, and how far the buckets have come."""

    missing: list[int]  # parameters whose gradients each bucket waits for
    arrived: set[int] = field(default_factory=set)
    held: dict[int, torch.Tensor] = field(default_factory=dict)
    next: int = 0  # the first bucket that has not left


class Reducer:
    """Sums the gradients of the planned parameters over the ranks, each rank its own slots."""

    def __init__(
        self,
        transport: Transport,
        reduce_dtype: torch.dtype | None,
        master_dtype: torch.dtype | None,
    ) -> None:
        """Gradients travel in ``reduce_dtype``, and are summed for a master of ``master_dtype``."""
        self._transport = transport
        self._reduce_dtype = reduce_dtype
        self._master_dtype = master_dtype
        self._params: Sequence[torch.Tensor] = ()
        self._plan = Plan(transport.world_size, 1)
        self._lanes: list[Lane] = []
        self._lanes_of: dict[int, list[int]] = {}
        # For each piece in a bucket: its parameter, and where its gradient is.
        self._views: list[list[tuple[int, torch.Tensor]]] = []
        self._phase: _Phase | None = None
        self._flights: deque[_Flight] = deque()
        self._verdict: tuple[torch.Tensor, Pending] | None = None
        self._late: dict[int, torch.Tensor] = {}
        self._outgoing, self._incoming = Staging(IN_FLIGHT), Staging(IN_FLIGHT)
        self._present: set[int] = set()
        self.share = 1 / transport.world_size  # what a rank's gradient counts in the average

    def prepare(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        """Follow a plan. What is held stays, if the plan only grew."""
        if plan is self._plan:  # only the memory of parameters is another
            self._views = self._all_views()
            return
        if plan.buckets[: len(self._lanes)] != self._plan.buckets:
            self.drop()
            self._lanes = []
        self._plan, self._params = plan, params
        self._lanes += [self._lane(n) for n in range(len(self._lanes), len(plan.buckets))]
        self._lanes_of = {}
        for number, lane in enumerate(self._lanes):
            for index in lane.params:
                self._lanes_of.setdefault(index, []).append(number)
        self._outgoing, self._incoming = Staging(IN_FLIGHT), Staging(IN_FLIGHT)
        for lane in self._lanes:
            self._outgoing.demand(lane.bucket, lane.numel, lane.wire)
            self._incoming.demand(lane.bucket, self._room(lane), lane.wire)
        self._views = self._all_views()

    def _all_views(self) -> list[list[tuple[int, torch.Tensor]]]:
        rank = self._transport.rank
        return [
            [(piece.param, self._view(piece)) for piece in self._plan.pieces_in(lane.bucket, rank)]
            for lane in self._lanes
        ]

    def _lane(self, number: int) -> Lane:
        plan, rank = self._plan, self._transport.rank
        segments = tuple(plan.segments(number))
        param = self._params[segments[0].param]
        ranges = tuple(plan.range_of(number, owner) for owner in range(plan.world_size))
        dtype = self._reduce_dtype if param.is_floating_point() else None  # complex stay so
        start, stop = ranges[rank]
        summed = updated_in(param.dtype, self._master_dtype)
        summed = grad_dtype(param) if summed == param.dtype else summed
        return Lane(
            number,
            segments,
            frozenset(segment.param for segment in segments),
            ranges,
            wire=torch.empty(0, dtype=dtype or grad_dtype(param), device=param.device),
            slot=torch.zeros(stop - start, dtype=summed, device=param.device),
            numel=plan.buckets[number].numel,
            has_equal_slots=plan.has_equal_slots(number)
            and self._transport.reduces_equal_slots(param.device),
        )

    def _room(self, lane: Lane) -> int:
        """Elements of staging for what comes from the other ranks."""
        mine = lane.slot.numel()
        return mine if lane.has_equal_slots else mine * (self._transport.world_size - 1)

    def _view(self, piece: Piece) -> torch.Tensor:
        """The gradient of a piece, in the form of the inner optimizer's tensor."""
        lane, param = self._lanes[piece.bucket], self._params[piece.param]
        if not piece.numel:
            return torch.zeros(param.shape, dtype=lane.slot.dtype, device=param.device)
        offset = piece.offset - lane.ranges[self._transport.rank][0]
        flat = lane.slot.narrow(0, offset, piece.numel)
        if piece.param in self._plan.cut_params:
            return flat
        if not is_dense(param):
            return flat.view(param.shape)
        return flat.as_strided(param.shape, param.stride(), flat.storage_offset())

    # ------------------------------------------------------------------ backward

    @property
    def is_active(self) -> bool:
        """Whether a backward is under way."""
        return self._phase is not None

    @property
    def planned(self) -> Collection[int]:
        """The parameters that have a place here."""
        return self._lanes_of.keys()

    def catch_up(self, first: int) -> None:
        """Reduce the buckets from ``first`` on, which are new, from ``param.grad``."""
        self.begin()
        assert self._phase is not None
        self._phase.next = first
        self.end()

    def begin(self) -> None:
        """A backward has begun, on all ranks."""
        self._judge()
        trainable = list(map(attrgetter("requires_grad"), self._params))
        frozen = {index for index in self._lanes_of if not trainable[index]}
        self._phase = _Phase([len(lane.params - frozen) for lane in self._lanes])

    @torch.no_grad()
    def arrived(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        """The gradients of these parameters are there: given, or in ``param.grad``."""
        if self._phase is None:
            self.begin()
        phase = self._phase
        assert phase is not None
        for index, grad in gradients.items():
            if index in phase.arrived:
                continue
            phase.arrived.add(index)
            if grad is not None:
                phase.held[index] = self._laid_out(index, grad)
            for number in self._lanes_of[index]:
                phase.missing[number] -= 1
        while phase.next < len(self._lanes) and phase.missing[phase.next] <= 0:
            self._depart(phase)

    @torch.no_grad()
    def end(self, present: set[int] | None = None) -> None:
        """Backward has ended, on all ranks. ``present``: the parameters that had a gradient, if
        the feed knows better than we do."""
        if self._phase is None:
            self.begin()
        phase = self._phase
        assert phase is not None
        while phase.next < len(self._lanes):
            self._depart(phase)
        if present is None:
            present = phase.arrived
            self._late = self._leftovers()
            present |= self._late.keys()
        self._phase = None
        marks = torch.zeros(
            len(self._params) + len(self._lanes),
            dtype=torch.uint8,
            device=self._transport.control_device,
        )
        late = {n + len(self._params) for index in self._late for n in self._lanes_of[index]}
        if present or late:
            marks[torch.tensor(sorted({*present, *late}), device=marks.device)] = 1
        self._verdict = marks, self._transport.maximum(marks)

    def _leftovers(self) -> dict[int, torch.Tensor]:
        """Gradients that came when their bucket had left."""
        found: dict[int, torch.Tensor] = {}
        for index in self.not_reduced():
            param = self._params[index]
            assert param.grad is not None
            found[index] = self._laid_out(index, param.grad)
            param.grad = None
        return found

    def not_reduced(self) -> list[int]:
        """The planned parameters that have a gradient of this rank alone."""
        gradients = list(map(attrgetter("grad"), self._params))
        if all(map(is_, gradients, repeat(None))):  # nearly always, and there may be thousands
            return []
        return [index for index in self._lanes_of if gradients[index] is not None]

    def _laid_out(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {index} has a sparse gradient, which cannot be reduced in attached "
                "mode: use sparse=False, or leave out attach(...)"
            )
        param, grad = self._params[index], grad.detach()
        return in_layout_of(param, grad) if is_dense(param) else grad.contiguous()

    def _depart(self, phase: _Phase) -> None:
        """Let the next bucket leave."""
        lane = self._lanes[phase.next]
        phase.next += 1
        found = {}
        for segment in lane.segments:
            grad = phase.held.get(segment.param)
            param = self._params[segment.param]
            if grad is None and param.grad is not None:
                grad = phase.held[segment.param] = self._laid_out(segment.param, param.grad)
                param.grad = None
                phase.arrived.add(segment.param)
            if grad is not None:
                found[segment.param] = grad
        self._launch(lane, found)
        for index in found:
            if self._lanes_of[index][-1] <= lane.bucket:
                del phase.held[index]  # the last bucket that needs it has it

    def _launch(self, lane: Lane, gradients: Mapping[int, torch.Tensor]) -> None:
        while len(self._flights) >= IN_FLIGHT or any(
            flight.lane.bucket % IN_FLIGHT == lane.bucket % IN_FLIGHT for flight in self._flights
        ):
            self._land()
        buffer = self._outgoing.reserve(lane.bucket, lane.numel, lane.wire)
        with torch.profiler.record_function(f"onecopy::reduce {lane.bucket}"):
            self._fill(lane, buffer, gradients)
            self._flights.append(self._send(lane, buffer))

    def _fill(
        self, lane: Lane, buffer: torch.Tensor, gradients: Mapping[int, torch.Tensor]
    ) -> None:
        """Every gradient to its place, times the share of this rank."""
        copies = Copies()
        for segment in lane.segments:
            numel = segment.stop - segment.start
            target = buffer.narrow(0, segment.offset, numel)
            grad = gradients.get(segment.param)
            if grad is None:
                target.zero_()
                continue
            source = flat_range(grad, segment.start, segment.stop)
            narrows = source.dtype.itemsize > target.dtype.itemsize
            widens = source.dtype.itemsize < target.dtype.itemsize
            if numel and (narrows or (numel >= _WORTH_ITS_OWN_CALL and not widens)):
                # Before it is rounded for the wire, where a sum could overflow; and the memory is
                # touched once.
                torch.mul(source, self.share, out=target)
            elif numel:
                copies.add(target, source)
        copies.run()
        if copies.targets and self.share != 1:
            # A number would be rounded to 16-bit gradients' own dtype first; a tensor is not.
            share = torch.tensor(self.share, dtype=torch.float64, device=buffer.device)
            torch._foreach_mul_(copies.targets, share)

    def _send(self, lane: Lane, buffer: torch.Tensor) -> _Flight:
        rank, world = self._transport.rank, self._transport.world_size
        outgoing = [buffer[start:stop] for start, stop in lane.ranges]
        if world == 1:
            return _Flight(lane, outgoing, self._transport.nothing())
        room = self._incoming.reserve(lane.bucket, self._room(lane), lane.wire)
        if lane.has_equal_slots:
            return _Flight(lane, [room], self._transport.reduce_slots(buffer, room))
        each = lane.slot.numel()
        incoming = [room[i * each : (i + 1) * each] for i in range(world - 1)]
        incoming.insert(rank, outgoing[rank])
        pending = self._transport.exchange_parts(outgoing, incoming, _TAGS_FROM + lane.bucket)
        return _Flight(lane, incoming, pending)

    def _land(self) -> None:
        """Wait for the bucket that left first, and add it to what this rank holds."""
        flight = self._flights.popleft()
        flight.pending.wait()
        lane, (total, *others) = flight.lane, flight.contributions
        if others and not lane.holds and total.dtype == lane.slot.dtype:
            torch.add(total, others[0], out=lane.slot)
            for other in others[1:]:
                lane.slot.add_(other)
        else:
            # Narrow numbers on the wire are summed in the wider ones of the gradient.
            total = total.to(torch.promote_types(total.dtype, lane.slot.dtype))
            for other in others:
                total.add_(other)
            lane.slot.add_(total) if lane.holds else lane.slot.copy_(total)
        lane.holds = True

    # ------------------------------------------------------------------ afterwards

    @torch.no_grad()
    def settle(self) -> None:
        """Wait until everything that has left is here."""
        while self._flights:
            self._land()
        self._judge()

    def _judge(self) -> None:
        """Learn what the ranks have said at the end of the last backward, and do what follows."""
        if self._verdict is None:
            return
        (marks, pending), self._verdict = self._verdict, None
        pending.wait()
        said = torch.nonzero(marks.cpu()).flatten().tolist()
        count = len(self._params)
        self._present |= {index for index in said if index < count}
        again = [index - count for index in said if index >= count]
        late, self._late = self._late, {}
        for number in again:
            self._launch(self._lanes[number], late)
        while again and self._flights:
            self._land()

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients of this rank's pieces, in the order of the plan."""
        self.settle()
        return [grad for lane in self._lanes for grad in self.gradients_in(lane.bucket)]

    @torch.no_grad()
    def gradients_in(self, bucket: int) -> list[torch.Tensor | None]:
        """The same for one bucket: the others may still be on their way."""
        self._judge()
        while any(flight.lane.bucket == bucket for flight in self._flights):
            self._land()
        present = self._present
        return [view if index in present else None for index, view in self._views[bucket]]

    def present(self) -> set[int]:
        """The parameters that have a gradient."""
        self.settle()
        return self._present

    def drop(self) -> None:
        """Forget all gradients, also those of a backward that was never finished."""
        while self._flights:
            self._flights.popleft().pending.wait()
        if self._verdict is not None:
            self._verdict[1].wait()
        self._phase, self._verdict, self._late = None, None, {}
        self.clear()

    def clear(self) -> None:
        """The gradients are used up."""
        self._present = set()
        for lane in self._lanes:
            lane.holds = False

    @property
    def slot_bytes(self) -> int:
        """Memory of this rank's gradients."""
        return sum(lane.slot.nbytes for lane in self._lanes)

    @property
    def staged_bytes(self) -> int:
        """Memory that buckets pass through; it is kept between the steps."""
        return self._outgoing.nbytes() + self._incoming.nbytes()
