"""Buckets of gradients on their way to their owners: launched, and landed in the same order.

::

    gradients --launch--> staging, times their share --> owners --land--> added to my slot

At most ``IN_FLIGHT`` are under way, and never two in the same staging: the launch of one more lands
the first. What neighbours have lent is given back as soon as it was added up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from onecopy.gatherer import IN_FLIGHT
from onecopy.lanes import Lane
from onecopy.ledger import Phase
from onecopy.neighbours import Loan
from onecopy.pending import Pending
from onecopy.transport import GATHER_TAGS, Transport

# Tags are apart from those of the gathers and of other attachments: ranks on which one backward
# reaches several attached modules may launch their buckets in different orders.
_TAGS_EACH, _ATTACHMENTS = GATHER_TAGS, 4000


@dataclass(frozen=True, slots=True)
class Flight:
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


class Flights:
    """Those that are under way, the first first."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._tags_from = _TAGS_EACH * (1 + transport.company.attachments % _ATTACHMENTS)
        self._under_way: deque[Flight] = deque()

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def launch(self, lane: Lane, gradients: Mapping[int, torch.Tensor], share: float) -> None:
        """Let a bucket leave, with gradients by parameter and zeros for those that are missing."""
        while len(self._under_way) >= IN_FLIGHT or any(
            flight.lane.shares_staging_with(lane) for flight in self._under_way
        ):
            self.land()
        with self._transport.ledger.launching(Phase.REDUCE, lane.bucket):
            if lane.memory is not None:  # maybe lent by another lane, also if this one only sends
                self._transport.wait_until_read(lane.memory)
            lane.fill(gradients, share)
            with self._transport.company.or_give_up("sending gradients"):
                self._under_way.append(self._send(lane))

    def _send(self, lane: Lane) -> Flight:
        rank, world = self._transport.rank, self._transport.world_size
        outgoing = [lane.outgoing[start:stop] for start, stop in lane.ranges]
        if world == 1:
            return Flight(lane, outgoing, self._transport.nothing())
        if lane.has_equal_slots:
            pending = self._transport.reduce_slots(lane.outgoing, lane.incoming)
            return Flight(lane, [lane.incoming], pending)
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
        return Flight(lane, contributions, Pending.together([borrowing, exchange]))

    def land(self) -> None:
        """Wait for the bucket that left first, and add it to what this rank holds."""
        flight = self._under_way[0]
        with self._transport.ledger.waiting(Phase.REDUCE, flight.lane.bucket):
            flight.pending.wait()
            # Added up in part, or without being crossed off, it could not be added up again.
            with self._transport.company.or_give_up("adding up gradients"):
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

    def make_free(self, lane: Lane) -> None:
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
