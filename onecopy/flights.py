"""Buckets of gradients on their way to their owners: launched, and landed in the same order.

::

    gradients --launch--> staging, times their share --> owners --land--> added to my slot

At most ``IN_FLIGHT`` are under way, and never two in the same staging: the launch of one more lands
the first. What neighbours have lent is given back as soon as it was added up.

Where ranks share a host, and there are others, some of what a rank lends is not for its neighbours
but for owners elsewhere (``hosts.py``): its neighbour adds that up, and sends one sum. A thread
does so as soon as everything is there, whatever the rank is waiting for. There is one for each
attachment: else ranks on which one backward reaches two attached modules in different orders would
wait in a circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from onecopy.gatherer import IN_FLIGHT
from onecopy.lanes import Lane
from onecopy.ledger import Phase
from onecopy.neighbours import Loan
from onecopy.pending import Pending
from onecopy.transport import GATHER_TAGS, Transport
from onecopy.waiting import Waiter

# Tags are apart from those of the gathers and of other attachments: ranks on which one backward
# reaches several attached modules may launch their buckets in different orders.
_TAGS_EACH, _ATTACHMENTS = GATHER_TAGS, 4000


@dataclass(slots=True)
class Flight:
    """A bucket on its way."""

    lane: Lane
    # Of all ranks, or of whole hosts, in the order in which they are added up; or the sum alone.
    contributions: Sequence[torch.Tensor | Loan]
    pending: Pending
    loans: Sequence[Loan] = ()  # what neighbours lend

    def read(self) -> list[torch.Tensor]:
        """The contributions, once they are here."""
        return [self._mine(c) if isinstance(c, Loan) else c for c in self.contributions]

    def _mine(self, loan: Loan) -> torch.Tensor:
        return self.lane.part_for(loan.neighbourhood.rank, loan.tensor(self.lane.wire.dtype))

    def give_back(self) -> None:
        """What neighbours have lent is no longer needed."""
        for loan in self.loans:
            loan.give_back()


class Flights:
    """Those that are under way, the first first."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._tags_from = _TAGS_EACH * (1 + transport.company.attachments % _ATTACHMENTS)
        self._under_way: deque[Flight] = deque()
        self.left = 0  # buckets, since construction
        self._carrier: Waiter | None = None  # as long as there is nothing to carry

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
                self.left += 1

    def _send(self, lane: Lane) -> Flight:
        transport, passage = self._transport, lane.passage
        rank = transport.rank
        if transport.world_size == 1:
            return Flight(lane, [lane.outgoing], transport.nothing())
        if lane.has_equal_slots:
            pending = transport.reduce_slots(lane.outgoing, lane.incoming)
            return Flight(lane, [lane.incoming], pending)
        received = lane.arriving()
        loans: Sequence[Loan] = ()
        if lane.at_once:
            outgoing, sizes = lane.parts_in_order()
            pending = transport.exchange_parts(outgoing, sizes, lane.incoming)
        else:
            loans, pending = self._send_one_by_one(lane, received)
        # Of a neighbour that sends its part, what it lends is carried elsewhere.
        of_rank: dict[int, torch.Tensor | Loan] = {loan.lender: loan for loan in loans}
        of_rank |= {**received, rank: lane.part_for(rank, lane.outgoing)}
        contributions = [of_rank[contributor] for contributor in passage.contributors]
        return Flight(lane, contributions, pending, loans)

    def _send_one_by_one(
        self, lane: Lane, received: Mapping[int, torch.Tensor]
    ) -> tuple[list[Loan], Pending]:
        transport, passage, tag = self._transport, lane.passage, self._tag(lane)
        loans, borrowing = transport.borrow(passage.lenders, tag)
        if passage.readers:
            assert lane.memory is not None
            read = [
                lane.part_for(owner, lane.outgoing)
                for owners in passage.read_by.values()
                for owner in owners
            ]
            transport.lend(lane.memory, dict.fromkeys(passage.readers, lane.outgoing), tag, read)
        works = [borrowing]
        works += [transport.receive(part, sender, tag) for sender, part in received.items()]
        for owner in passage.direct:
            works.append(transport.send(lane.part_for(owner, lane.outgoing), owner, tag))
        if passage.carried:
            works.append(self._carry(lane, loans))
        return loans, Pending.together(works)

    def _tag(self, lane: Lane) -> int:
        return self._tags_from + lane.bucket

    def _carry(self, lane: Lane, loans: Sequence[Loan]) -> Pending:
        """Add up what neighbours contribute for other hosts, and send it there, once it is here."""
        rank, dtype = self._transport.rank, lane.wire.dtype

        def sums() -> Iterator[torch.Tensor]:
            staging = {loan.lender: loan.tensor(dtype) for loan in loans}
            staging[rank] = lane.outgoing
            in_order = [staging[each] for each in sorted(staging)]
            return (lane.add_up_for(owner, in_order) for owner in lane.passage.carried)

        if self._carrier is None:
            self._carrier = Waiter.of(self)
        parts = {owner: lane.relayed_for(owner) for owner in lane.passage.carried}
        return self._transport.send_later(parts, sums, loans, self._tag(lane), self._carrier)

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
