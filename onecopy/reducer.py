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

Every backward that has begun is finished on every rank. One that raised is finished with zeros when
the rank gives it up, and marked as given up: then all ranks drop the gradients, and are level.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch

from onecopy.agreement import RanksDisagree, name_ranks, require_agreement
from onecopy.buffers import Staging, in_layout_of, is_dense
from onecopy.gatherer import IN_FLIGHT, LENT, Lendable
from onecopy.lanes import Lane
from onecopy.ledger import Phase
from onecopy.neighbours import Loan
from onecopy.pending import Pending
from onecopy.plan import Plan
from onecopy.transport import GATHER_TAGS, Transport, do_nothing
from onecopy.verdict import Verdict
from onecopy.words import plural

# Tags are apart from those of the gathers and of other attachments: ranks on which one backward
# reaches several attached modules may launch their buckets in different orders.
_TAGS_EACH, _ATTACHMENTS = GATHER_TAGS, 4000


@dataclass(frozen=True, slots=True)
class _Flight:
    """A bucket on its way."""

    lane: Lane
    contributions: Sequence[torch.Tensor | Loan]  # of all ranks, in their order, or their sum alone
    pending: Pending

    def read(self) -> list[torch.Tensor]:
        """The contributions, once they are here."""
        dtype = self.lane.wire.dtype
        return [c.tensor(dtype) if isinstance(c, Loan) else c for c in self.contributions]

    def give_back(self) -> None:
        """What neighbours have lent is no longer needed."""
        for each in self.contributions:
            if isinstance(each, Loan):
                each.give_back()


class GradientsDropped(RuntimeError):
    """A backward that raised on some rank was given up, on all ranks."""


@dataclass(slots=True)
class _Phase:
    """One backward: what has arrived, and how far the buckets have come."""

    missing: list[int]  # how many gradients each bucket waits for
    frozen: set[int]  # parameters, when it began: no bucket waits for them
    keeps_back: bool = False  # no bucket leaves before backward has ended
    taken: set[int] = field(default_factory=set)  # whose gradients came from ``param.grad``
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
        self._tags_from = _TAGS_EACH * (1 + transport.company.attachments % _ATTACHMENTS)
        self._reduce_dtype = reduce_dtype
        self._master_dtype = master_dtype
        self._params: Sequence[torch.Tensor] = ()
        self._plan = Plan(transport.world_size, 1)
        self._lanes: list[Lane] = []
        self._lanes_of: dict[int, list[int]] = {}
        self._forms: list[Any] = []  # of the parameters
        self._is_dense: list[bool] = []  # by parameter
        # For each piece in a bucket: its parameter, and where its gradient is.
        self._views: list[list[tuple[int, torch.Tensor]]] = []
        self._phase: _Phase | None = None
        self._flights: deque[_Flight] = deque()
        self._verdict: Verdict | None = None
        self._late: dict[int, torch.Tensor] = {}
        self._outgoing, self._incoming = self._outgoing_staging(), Staging(IN_FLIGHT)
        self._present: set[int] = set()
        self.when_dropped: Callable[[], None] = do_nothing  # because a backward was given up
        self.backwards = 0  # since the gradients were used up or dropped
        self.share = 1 / transport.world_size  # what a rank's gradient counts in the average

    def prepare(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        """Follow a plan. What is held stays, if the plan only grew. If there is too little memory,
        the one before goes on."""
        forms = [(param.shape, param.stride(), param.dtype, param.device) for param in params]
        if plan is self._plan and forms == self._forms:  # no more than addresses have changed
            return
        are_others = forms[: len(self._forms)] != self._forms
        if are_others and self.holds_anything:
            raise RuntimeError(
                "the parameters have been converted since the last backward: call zero_grad() and "
                "compute the gradients again"
            )
        if are_others or plan.buckets[: len(self._lanes)] != self._plan.buckets:
            self.drop()
            self._lanes = []
        dtypes = self._reduce_dtype, self._master_dtype
        new = range(len(self._lanes), len(plan.buckets))
        lanes = [
            *self._lanes,
            *(Lane.of(plan, bucket, params, self._transport, *dtypes) for bucket in new),
        ]
        self._transport.neighbours.forget()
        outgoing, incoming = self._outgoing_staging(), Staging(IN_FLIGHT)
        for lane in lanes:
            outgoing.demand(lane.bucket, lane.numel, lane.wire)
            incoming.demand(lane.bucket, lane.room, lane.wire)
        for lane in lanes:  # may fail: nothing has been changed yet
            outgoing.reserve(lane.bucket, lane.numel, lane.wire)
            incoming.reserve(lane.bucket, lane.room, lane.wire)
        self._plan, self._params, self._forms = plan, params, forms
        self._lanes, self._outgoing, self._incoming = lanes, outgoing, incoming
        self._is_dense = list(map(is_dense, params))
        self._lanes_of = {}
        for number, lane in enumerate(lanes):
            lane.settle(plan, params, outgoing, incoming)
            for index in lane.params:
                self._lanes_of.setdefault(index, []).append(number)
        self._views = self._all_views()

    def lendable(self, bucket: int, dtype: torch.dtype) -> Lendable | None:
        """The memory through which the gradients of a bucket leave, for the gatherer."""
        lane = self._lanes[bucket]
        if lane.memory is None or lane.wire.dtype != dtype:
            return None
        return Lendable(lane.memory, lane.outgoing)

    @torch.no_grad()
    def make_free(self, bucket: int) -> None:
        """Add up whatever leaves through the memory of this bucket: what this rank itself
        contributes is in it until then."""
        lane = self._lanes[bucket]
        while any(flight.lane.leaves_through_memory_of(lane) for flight in self._flights):
            self._land()

    def _outgoing_staging(self) -> Staging:
        if not self._transport.neighbours:
            return Staging(IN_FLIGHT)
        return Staging(LENT, self._transport.memory_to_lend)

    def _all_views(self) -> list[list[tuple[int, torch.Tensor]]]:
        plan, rank, params = self._plan, self._transport.rank, self._params
        return [
            [
                (p.param, lane.view(p, rank, params[p.param], p.param in plan.cut_params))
                for p in plan.pieces_in(lane.bucket, rank)
            ]
            for lane in self._lanes
        ]

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
    def planned(self) -> Collection[int]:
        """The parameters that have a place here."""
        return self._lanes_of.keys()

    def catch_up(self, first: int) -> None:
        """Reduce the buckets from ``first`` on, which are new, from ``param.grad``."""
        self.begin()
        assert self._phase is not None
        self._phase.next = first
        self.backwards -= 1  # no backward of the user's
        self.end()

    def begin(self, keeps_back: bool = False) -> None:
        """A backward has begun, on all ranks; ``keeps_back``: no bucket leaves before its end."""
        self.judge()
        self.backwards += 1
        trainable = list(map(attrgetter("requires_grad"), self._params))
        frozen = {index for index in self._lanes_of if not trainable[index]}
        missing = [len(lane.params - frozen) for lane in self._lanes]
        self._phase = _Phase(missing, frozen, keeps_back)

    def arrived(self, index: int, grad: torch.Tensor | None = None) -> None:
        """The gradient of a parameter is there: given, or in ``param.grad``.

        To be called for thousands of parameters in every backward.
        """
        phase = self._phase
        assert phase is not None
        # What was unfrozen and is not planned yet stays in ``param.grad``: see ``catch_up``.
        if index in phase.arrived or index not in self._lanes_of:
            return
        phase.arrived.add(index)
        if grad is not None:
            phase.held[index] = self._laid_out(index, grad)
        if index in phase.frozen:
            return  # a DDP that was made when it was trained still delivers it; nothing waited
        missing = phase.missing
        for number in self._lanes_of[index]:
            missing[number] -= 1
        while not phase.keeps_back and phase.next < len(missing) and missing[phase.next] <= 0:
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
        present = present | phase.taken
        self._phase = None
        self._say(present, {number for index in self._late for number in self._lanes_of[index]})

    def _say(self, present: Collection[int], late: Collection[int], gives_up: bool = False) -> None:
        """Tell the ranks how backward has ended on this one."""
        self._verdict = Verdict.ask(
            self._transport,
            params=len(self._params),
            buckets=len(self._lanes),
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
        phase.held.clear()
        while phase.next < len(self._lanes):
            self._launch(self._lanes[phase.next], {})
            phase.next += 1
        self._phase, self._late = None, {}
        self._say((), (), gives_up=True)
        for index in self.not_reduced():
            self._params[index].grad = None

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
        return in_layout_of(param, grad) if self._is_dense[index] else grad.contiguous()

    @torch.no_grad()
    def _depart(self, phase: _Phase) -> None:
        """Let the next bucket leave."""
        lane = self._lanes[phase.next]
        found = {}
        for index in lane.params:
            grad = phase.held.get(index)
            param = self._params[index]
            if grad is None and param.grad is not None:
                grad = phase.held[index] = self._laid_out(index, param.grad)
                param.grad = None
                phase.arrived.add(index)
                phase.taken.add(index)
            if grad is not None:
                found[index] = grad
        self._launch(lane, found)
        phase.next += 1
        for index in found:
            if self._lanes_of[index][-1] <= lane.bucket:
                del phase.held[index]  # the last bucket that needs it has it

    def _launch(self, lane: Lane, gradients: Mapping[int, torch.Tensor]) -> None:
        while len(self._flights) >= IN_FLIGHT or any(
            flight.lane.shares_staging_with(lane) for flight in self._flights
        ):
            self._land()
        with self._transport.ledger.launching(Phase.REDUCE, lane.bucket):
            if lane.memory is not None:  # maybe lent by another lane, also if this one only sends
                self._transport.wait_until_read(lane.memory)
            lane.fill(gradients, self.share)
            self._flights.append(self._send(lane))

    def _send(self, lane: Lane) -> _Flight:
        rank, world = self._transport.rank, self._transport.world_size
        outgoing = [lane.outgoing[start:stop] for start, stop in lane.ranges]
        if world == 1:
            return _Flight(lane, outgoing, self._transport.nothing())
        if lane.has_equal_slots:
            pending = self._transport.reduce_slots(lane.outgoing, lane.incoming)
            return _Flight(lane, [lane.incoming], pending)
        tag = self._tags_from + lane.bucket
        borrowed, borrowing = self._transport.borrow(lane.lenders, tag)
        loans = {loan.lender: loan for loan in borrowed}
        if lane.memory is not None and lane.readers:
            parts = {reader: outgoing[reader] for reader in lane.readers}
            self._transport.lend(lane.memory, parts, tag)
        each, empty = lane.slot.numel(), lane.incoming[:0]
        slots = (lane.incoming[i * each : (i + 1) * each] for i in range(world))
        incoming = [empty if r in (rank, *lane.lenders) else next(slots) for r in range(world)]
        sent = [empty if r in lane.readers else part for r, part in enumerate(outgoing)]
        exchange = self._transport.exchange_parts(sent, incoming, tag)
        incoming[rank] = outgoing[rank]
        contributions = [loans.get(r, part) for r, part in enumerate(incoming)]
        return _Flight(lane, contributions, Pending.together([borrowing, exchange]))

    def _land(self) -> None:
        """Wait for the bucket that left first, and add it to what this rank holds."""
        flight = self._flights.popleft()
        with self._transport.ledger.waiting(Phase.REDUCE, flight.lane.bucket):
            flight.pending.wait()
            flight.lane.add(flight.read())
            flight.give_back()

    # ------------------------------------------------------------------ afterwards

    @torch.no_grad()
    def settle(self) -> None:
        """Wait until everything that has left is here."""
        while self._flights:
            self._land()
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
                require_agreement(self._transport, "reducing gradients", [held])
            except RanksDisagree:
                self.drop()  # on all ranks: nobody may step with a part of them
                raise
        self._present |= said.present
        again = said.again
        late, self._late = self._late, {}
        for number in again:
            self._launch(self._lanes[number], late)
        while again and self._flights:
            self._land()

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients of this rank's pieces, in the order of the plan, after ``settle``."""
        return [grad for lane in self._lanes for grad in self.gradients_in(lane.bucket)]

    @torch.no_grad()
    def gradients_in(self, bucket: int) -> list[torch.Tensor | None]:
        """The same for one bucket, after ``judge``: the others may still be on their way."""
        while any(flight.lane.bucket == bucket for flight in self._flights):
            self._land()
        present = self._present
        return [view if index in present else None for index, view in self._views[bucket]]

    @property
    def present(self) -> Collection[int]:
        """The parameters that have a gradient, after ``settle``. The same on all ranks."""
        return self._present

    @property
    def holds_anything(self) -> bool:
        """Whether there are gradients that no step has used. The same on all ranks."""
        held = any(lane.holds for lane in self._lanes)
        return held or bool(self._phase or self._flights or self._verdict or self._present)

    @torch.no_grad()
    def drop(self) -> None:
        """Forget all gradients, also those of a backward that was never finished."""
        gave_up: list[int] = []
        if self._transport.company.refusal is None:
            if self._phase is not None:
                self.give_up()
            while self._flights:
                self._flights[0].pending.wait()
                self._flights.popleft().give_back()
            if self._verdict is not None:
                gave_up = self._verdict.read().gave_up
        self._flights.clear()  # without a group nothing will arrive
        self._phase, self._verdict, self._late = None, None, {}
        self.clear()
        if gave_up:
            self.when_dropped()

    @torch.no_grad()
    def clear(self) -> None:
        """The gradients are used up."""
        assert self._verdict is None
        # A step waits for what it uses only: buckets in which this rank owns nothing are left.
        while self._flights:
            self._land()
        self._present = set()
        self.backwards = 0
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
