"""Updated slots to everybody: one gather per bucket, a few in flight.

How a bucket travels is decided once, when the plan or the memory changes, and kept as a
:class:`Transfer`: what to copy into staging, what to send, what to copy out. Memory that lies in
one run (a large piece, or everything, with flat homes) is sent from and received in place; only
small pieces are packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from onecopy.buffers import Copies, FlatHomes, Staging, flat_range, is_dense
from onecopy.kinds import Kind
from onecopy.ledger import Phase
from onecopy.plan import Piece, Plan
from onecopy.transport import Part, Pending, Transport

IN_FLIGHT = 3
# Below this, a message of its own costs more than a copy.
WORTH_ITS_OWN_MESSAGE = 64 * 1024


@dataclass(slots=True)
class Transfer:
    """How one bucket travels: its parts, or its W equal slots in one buffer."""

    copy_in: Copies = field(default_factory=Copies)
    parts: list[Part] = field(default_factory=list)
    slots: torch.Tensor | None = None
    copy_out: Copies = field(default_factory=Copies)

    def start(self, transport: Transport) -> Pending:
        self.copy_in.run()
        if self.slots is not None:
            return transport.all_gather_slots(self.slots)
        return transport.share(self.parts)


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
        self._transfers: list[Transfer] = []
        self._launched: dict[int, Pending] = {}  # by bucket, those nobody has waited for
        self._staging = Staging(IN_FLIGHT)
        self._is_lazy = False
        self.order: Sequence[int] = ()  # in which the buckets are to be started

    def prepare(
        self, plan: Plan, params: Sequence[torch.Tensor], homes: FlatHomes | None, lazy: bool
    ) -> None:
        """Decide how each bucket travels. To be repeated when the plan or a storage changes.

        ``lazy``: leave the waiting to who uses the parameters. Then all buckets may be under way
        together, so none shares its staging; and they leave in the order in which the next forward
        wants them, which is the reverse of that in which backward completes them.
        """
        self.wait()
        self._is_lazy = lazy
        buckets = range(len(plan.buckets))
        self.order = buckets[::-1] if lazy else buckets
        self._params = [params[index] for index in sorted(plan.params)]
        self._transfers = []
        if self._transport.world_size == 1:
            return
        # Not seen by autograd, which is told once for all.
        memory = [param.data for param in params]
        staging = self._staging = Staging(max(IN_FLIGHT, len(buckets)) if lazy else IN_FLIGHT)
        routes = [_route(_Site(self._transport, homes, plan, memory, b)) for b in buckets]
        for turn, route in enumerate(routes):
            if route.staged:
                staging.demand(turn, route.staged, route.like)
        for turn, route in enumerate(routes):
            buffer = staging.reserve(turn, route.staged, route.like) if route.staged else None
            self._transfers.append(route.transfer(buffer))

    def start(self, bucket: int) -> None:
        """Send this rank's part of a bucket, and receive the others', in the background."""
        if not self._transfers:
            return
        if not self._is_lazy and len(self._launched) == IN_FLIGHT:
            self.wait([next(iter(self._launched))])
        with torch.no_grad(), self._transport.ledger.launching(Phase.GATHER, bucket):
            self._launched[bucket] = self._transfers[bucket].start(self._transport)

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
            pending = self._launched.get(bucket)
            if pending is not None:
                with torch.no_grad(), self._transport.ledger.waiting(Phase.GATHER, bucket):
                    pending.wait()
                    self._transfers[bucket].copy_out.run()
                del self._launched[bucket]  # not before: a forward must not pass for lack of it

    def forget(self) -> None:
        """What is under way will never arrive."""
        self._launched.clear()

    @property
    def staged_bytes(self) -> int:
        """Memory that buckets pass through; it is kept between the steps."""
        return self._staging.nbytes()

    def _tell_autograd(self) -> None:
        """What arrives in place does not pass through autograd: without this, a backward through
        a graph built before the step would silently use the new values."""
        if self._transfers:
            torch.autograd.graph.increment_version(self._params)


# -------------------------------------------------------------------------- choosing the way


@dataclass(frozen=True, slots=True)
class _Site:
    """A bucket and where its memory is."""

    transport: Transport
    homes: FlatHomes | None
    plan: Plan
    memory: Sequence[torch.Tensor]
    bucket: int

    def pieces(self, owner: int) -> list[Piece]:
        return [piece for piece in self.plan.pieces_in(self.bucket, owner) if piece.numel]

    def at_home(self, start: int, stop: int) -> torch.Tensor | None:
        """[start, stop) of the bucket, if its parameters live in one flat storage."""
        if self.homes is None:
            return None
        bucket = self.plan.buckets[self.bucket]
        return self.homes.range(bucket.stream, bucket.start + start, bucket.start + stop)


class _Route(Protocol):
    """A way for a bucket to travel, before it has a staging buffer."""

    @property
    def staged(self) -> int:
        """Elements of staging that it needs."""

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the staging's dtype and device."""

    def transfer(self, buffer: torch.Tensor | None) -> Transfer: ...


def _route(site: _Site) -> _Route:
    device = site.memory[next(site.plan.segments(site.bucket)).param].device
    kind = site.plan.streams[site.plan.buckets[site.bucket].stream].kind
    if kind is Kind.ELEMENTWISE and site.transport.gathers_equal_slots(device):
        return _SlotsRoute(site) if site.plan.has_equal_slots(site.bucket) else _PaddedRoute(site)
    return _PartsRoute(site)


class _SlotsRoute:
    """The backend's all_gather on W equal slots: in place, or through one staged copy."""

    def __init__(self, site: _Site) -> None:
        numel = site.plan.buckets[site.bucket].numel
        self._site = site
        self._segments = list(site.plan.segments(site.bucket))
        self._views = [flat_range(site.memory[s.param], s.start, s.stop) for s in self._segments]
        alone = self._views[0] if len(self._views) == 1 else None
        home = site.at_home(0, numel)
        self._in_place = alone if alone is not None and alone.numel() == numel else home
        self.staged = 0 if self._in_place is not None else numel
        self.like = self._views[0]

    def transfer(self, buffer: torch.Tensor | None) -> Transfer:
        if buffer is None:
            return Transfer(slots=self._in_place)
        transfer = Transfer(slots=buffer)
        site = self._site
        for piece in site.pieces(site.transport.rank):
            source = flat_range(site.memory[piece.param], piece.start, piece.stop)
            transfer.copy_in.add(buffer.narrow(0, piece.offset, piece.numel), source)
        for segment, view in zip(self._segments, self._views, strict=True):
            transfer.copy_out.add(view, buffer.narrow(0, segment.offset, view.numel()))
        return transfer


class _PaddedRoute:
    """The same for a bucket with a remainder: slots are padded to the longest, in staging."""

    def __init__(self, site: _Site) -> None:
        self._site = site
        slots = [site.plan.slot(site.bucket, rank) for rank in range(site.transport.world_size)]
        self._starts = [start for start, _ in slots]
        self._longest = max(stop - start for start, stop in slots)
        self.staged = self._longest * len(slots)
        self.like = site.memory[next(site.plan.segments(site.bucket)).param]

    def transfer(self, buffer: torch.Tensor | None) -> Transfer:
        site = self._site
        transfer = Transfer(slots=buffer)
        assert buffer is not None
        for owner, start in enumerate(self._starts):
            for piece in site.pieces(owner):
                offset = owner * self._longest + piece.offset - start
                staged = buffer.narrow(0, offset, piece.numel)
                view = flat_range(site.memory[piece.param], piece.start, piece.stop)
                if owner == site.transport.rank:
                    transfer.copy_in.add(staged, view)
                else:
                    transfer.copy_out.add(view, staged)
        return transfer


class _PartsRoute:
    """Parts of any size from their owners: large ones in place, small ones packed by owner."""

    def __init__(self, site: _Site) -> None:
        self._rank = site.transport.rank
        self._direct: list[Part] = []
        self._packed: list[tuple[int, list[torch.Tensor]]] = []
        for owner in range(site.transport.world_size):
            self._place(site, owner)
        self.staged = sum(view.numel() for _, views in self._packed for view in views)
        self.like = site.memory[next(site.plan.segments(site.bucket)).param]

    def _place(self, site: _Site, owner: int) -> None:
        pieces = site.pieces(owner)
        if not pieces:
            return
        home = site.at_home(pieces[0].offset, pieces[-1].offset + pieces[-1].numel)
        if home is not None:
            self._direct.append(Part(owner, home))
            return
        small = []
        for piece in pieces:
            memory = site.memory[piece.param]
            if is_dense(memory):
                memory = flat_range(memory, piece.start, piece.stop)
            numbytes = memory.numel() * memory.element_size()
            alone = len(pieces) == 1 or numbytes >= WORTH_ITS_OWN_MESSAGE
            if alone and memory.is_contiguous():
                self._direct.append(Part(owner, memory))
            else:
                small.append(memory)
        if small:
            self._packed.append((owner, small))

    def transfer(self, buffer: torch.Tensor | None) -> Transfer:
        transfer = Transfer(parts=list(self._direct))
        if buffer is None:
            return transfer
        start = 0
        for owner, views in self._packed:
            stop = start
            for view in views:
                staged = buffer.narrow(0, stop, view.numel()).view(view.shape)
                if owner == self._rank:
                    transfer.copy_in.add(staged, view)
                else:
                    transfer.copy_out.add(view, staged)
                stop += view.numel()
            transfer.parts.append(Part(owner, buffer[start:stop]))
            start = stop
        return transfer
