"""Updated slots to everybody: one gather per bucket (``transfers.py``), a few in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from onecopy.buffers import FlatHomes, Staging
from onecopy.ledger import Phase
from onecopy.plan import Plan
from onecopy.torch_private import disable_dynamo
from onecopy.transfers import Journey, Lendable, Route, Site, Transfer, route_of
from onecopy.transport import Transport

IN_FLIGHT = 3
# At most, if the waiting is left to others. Each is a file that neighbours read, of which often no
# more than 1024 may be open, and up to two letters to each of them, of which a box holds 1024.
LEFT_IN_FLIGHT = 256
# Buffers that neighbours read in place: one more than there are gathers in flight, so that a rank
# that is ahead of them can go on. Gradients have as many.
LENT = IN_FLIGHT + 1


class Lender(Protocol):
    """Whoever has memory that neighbours can read and that is hardly needed during a step."""

    def lendable(self, bucket: int, dtype: torch.dtype) -> Lendable | None:
        """Room for a bucket of that dtype, if there is any."""

    def make_free(self, bucket: int) -> None:
        """Nobody of this rank needs any more what is in there; neighbours may."""


def left_in_flight(buckets: int, lazy: bool) -> int:
    """How many gathers may be under way when a step is over."""
    return min(buckets, LEFT_IN_FLIGHT) if lazy else 0


class Gatherer:
    """Sends what the owners have updated, bucket by bucket::

    for bucket in gatherer.order:
        ...  # this rank's part of the bucket is updated
        gatherer.start(bucket)
    gatherer.finish()
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._params: Sequence[torch.Tensor] = ()
        self._transfers: list[Transfer] | None = []  # None: preparing them has failed
        self._launched: dict[int, Journey] = {}  # by bucket, those nobody has waited for
        self._staging = Staging(IN_FLIGHT)
        self._lent = Staging(LENT)
        self._lender: Lender | None = None
        self._is_lazy = False
        self._most = IN_FLIGHT
        self.order: Sequence[int] = ()  # in which the buckets are to be started

    def give_up_staging(self) -> None:
        """It is about to change: no bucket can travel before ``prepare``."""
        self.wait()
        self._transfers, self._lender = None, None
        self._staging, self._lent = Staging(IN_FLIGHT), Staging(LENT)

    def prepare(
        self,
        plan: Plan,
        params: Sequence[torch.Tensor],
        homes: FlatHomes | None,
        lazy: bool,
        lender: Lender | None = None,
    ) -> None:
        """Decide how each bucket travels. To be repeated when the plan or a storage changes.

        ``lazy``: leave the waiting to who uses the parameters. Then all buckets may be under way
        together, so none shares its staging, unless there are very many; and they leave in the
        order in which the next forward wants them, the reverse of that in which backward completes
        them.
        """
        self.give_up_staging()
        self._is_lazy = lazy
        buckets = range(len(plan.buckets))
        self.order = buckets[::-1] if lazy else buckets
        self._params = [params[index] for index in sorted(plan.params)]
        if self._transport.world_size == 1:
            self._transfers = []
            return
        # Not seen by autograd, which is told once for all.
        memory = [param.data for param in params]
        self._transport.neighbours.forget()
        together = left_in_flight(len(buckets), lazy)
        self._most = max(IN_FLIGHT, together)
        staging = self._staging = Staging(self._most)
        self._lent = Staging(max(LENT, together), self._transport.memory_to_lend)
        # What is under way when a step is over would still be read in the next backward.
        self._lender = None if lazy else lender
        routes = [route_of(Site(self._transport, homes, plan, memory, b)) for b in buckets]
        for turn, route in enumerate(routes):
            if route.staged:
                staging.demand(turn, route.staged, route.like)
            if route.lent and self._lendable(turn, route) is None:
                self._lent.demand(turn, route.lent, route.like)
        transfers = []
        for turn, route in enumerate(routes):
            buffer = staging.reserve(turn, route.staged, route.like) if route.staged else None
            room = None
            if route.lent:
                room = self._lendable(turn, route) or self._lendable_of_its_own(turn, route)
            transfers.append(route.transfer(buffer, room))
        self._transfers = transfers

    def _lendable(self, bucket: int, route: Route) -> Lendable | None:
        """Memory of the lender's for what neighbours read of a bucket."""
        return None if self._lender is None else self._lender.lendable(bucket, route.like.dtype)

    def _lendable_of_its_own(self, bucket: int, route: Route) -> Lendable:
        buffer = self._lent.reserve(bucket, route.lent, route.like)
        memory = self._lent.lender(bucket, route.like)
        assert memory is not None
        return Lendable(memory, buffer)

    def start(self, bucket: int) -> None:
        """Send this rank's part of a bucket, and receive the others', in the background."""
        if self._transport.world_size == 1:
            return
        transfer = self._prepared()[bucket]
        turn = bucket % self._most
        # Those that pass through the same memory; if none was waited for before its turn, the
        # first of as many as may be under way.
        self.wait([other for other in self._launched if other % self._most == turn])
        if self._lender is not None:
            self._lender.make_free(bucket)
        with torch.no_grad(), self._transport.ledger.launching(Phase.GATHER, bucket):
            self._launched[bucket] = transfer.start(self._transport)

    def finish(self) -> None:
        """All buckets have been started: wait for them, unless that is left to others."""
        if not self._is_lazy:
            self.wait()
        self._tell_autograd()

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """Until these buckets, or all, have arrived."""
        if not self._launched:
            return
        for bucket in list(self._launched) if buckets is None else buckets:
            journey = self._launched.get(bucket)
            if journey is not None:
                self._arrive(bucket, journey)
                del self._launched[bucket]  # not before: a forward must not pass for lack of it

    @disable_dynamo
    def _arrive(self, bucket: int, journey: Journey) -> None:
        """Called by hooks on modules, which may be compiled: this is nothing to be traced."""
        with torch.no_grad(), self._transport.ledger.waiting(Phase.GATHER, bucket):
            self._prepared()[bucket].arrive(journey)

    @property
    def is_prepared(self) -> bool:
        """Not if there was too little memory or too few files, nor after ``give_up_staging``."""
        return self._transfers is not None

    def _prepared(self) -> list[Transfer]:
        assert self._transfers is not None  # whoever steps has seen to that
        return self._transfers

    def forget(self) -> None:
        """What is under way will never arrive."""
        self._launched.clear()

    @property
    def staged_bytes(self) -> int:
        """Memory of its own that buckets pass through; it is kept between the steps."""
        return self._staging.nbytes() + self._lent.nbytes()

    def _tell_autograd(self) -> None:
        """What arrives in place does not pass through autograd: without this, a backward through
        a graph built before the step would silently use the new values."""
        if self._transfers:
            torch.autograd.graph.increment_version(self._params)
