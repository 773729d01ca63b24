"""How a bucket of updated parameters travels to everybody.

That is decided once, when the plan or the memory changes: there are several ways, and each becomes
a :class:`Transfer`: what to copy into staging, what to send, what to copy out. Memory that lies in
one run (a large piece, or everything, with flat homes) is sent from and received in place; only
small pieces are packed. Neighbours read in one another's memory instead (``neighbours.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from onecopy.buffers import Copies, FlatHomes, flat_range, part_of
from onecopy.kinds import Kind
from onecopy.lending import SharedMemory
from onecopy.neighbours import Loan
from onecopy.pending import Pending
from onecopy.plan import Piece, Plan
from onecopy.transport import Part, Transport

# Below this, a message of its own costs more than a copy.
WORTH_ITS_OWN_MESSAGE = 64 * 1024


@dataclass(slots=True)
class Transfer:
    """How one bucket travels: its parts, or its W equal slots in one buffer."""

    copy_in: Copies = field(default_factory=Copies)
    parts: list[Part] = field(default_factory=list)
    slots: torch.Tensor | None = None
    copy_out: Copies = field(default_factory=Copies)
    lending: Lending | None = None  # this rank's part, to neighbours
    borrowings: list[Borrowing] = field(default_factory=list)  # theirs

    def start(self, transport: Transport) -> Journey:
        self.copy_in.run()
        if self.slots is not None:
            return Journey(transport.all_gather_slots(self.slots))
        if self.lending is not None:
            self.lending.fill(transport)  # may fail: nothing is under way yet
        lenders = [each.lender for each in self.borrowings]
        loans, borrowing = transport.borrow(lenders, transport.tag)
        if self.lending is not None:
            self.lending.tell(transport)
        return Journey(Pending.together([borrowing, transport.share(self.parts)]), loans)

    def arrive(self, journey: Journey) -> None:
        """Wait, and bring everything to its place. If it is interrupted, it can be called again."""
        journey.pending.wait()
        self.copy_out.run()
        for borrowing, loan in zip(self.borrowings, journey.loans, strict=True):
            if not loan.is_given_back:
                borrowing.read(loan)
                loan.give_back()


@dataclass(frozen=True, slots=True)
class Journey:
    """A bucket under way."""

    pending: Pending
    loans: Sequence[Loan] = ()


@dataclass(frozen=True, slots=True)
class Lending:
    """This rank's part of a bucket in memory that neighbours read."""

    memory: SharedMemory
    part: torch.Tensor
    copies: Copies  # the pieces, one after the other

    def fill(self, transport: Transport) -> None:
        transport.wait_until_read(self.memory)
        self.copies.run()

    def tell(self, transport: Transport) -> None:
        """The readers may read it."""
        readers = [rank for rank in transport.others if rank in transport.neighbours]
        transport.lend(self.memory, dict.fromkeys(readers, self.part), transport.tag)


@dataclass(slots=True)
class Borrowing:
    """A neighbour's part of a bucket, read from its memory."""

    lender: int
    pieces: Sequence[torch.Tensor]  # where they belong
    _from: tuple[int, ...] = ()  # the address of ...
    _copies: Copies = field(default_factory=Copies)  # ... what is copied: mostly that of last time

    def read(self, loan: Loan) -> None:
        at = loan.address
        place = at.fd, at.generation, at.start
        if place != self._from:
            lent = loan.tensor(self.pieces[0].dtype)
            self._from, self._copies = place, packed(self.pieces, lent).reversed()
        self._copies.run()


def packed(pieces: Sequence[torch.Tensor], run: torch.Tensor) -> Copies:
    """Copies of the pieces, one after the other, into a run of memory."""
    copies, start = Copies(), 0
    for piece in pieces:
        copies.add(run[start : start + piece.numel()].view(piece.shape), piece)
        start += piece.numel()
    return copies


# -------------------------------------------------------------------------- choosing the way


@dataclass(frozen=True, slots=True)
class Site:
    """A bucket and where its memory is."""

    transport: Transport
    homes: FlatHomes | None
    plan: Plan
    memory: Sequence[torch.Tensor]
    bucket: int

    def pieces(self, owner: int) -> list[Piece]:
        return [piece for piece in self.plan.pieces_in(self.bucket, owner) if piece.numel]

    def view(self, piece: Piece) -> torch.Tensor:
        """A piece where it is: a run of memory, or a tensor with gaps."""
        return part_of(self.memory[piece.param], piece.start, piece.stop)

    def at_home(self, start: int, stop: int) -> torch.Tensor | None:
        """[start, stop) of the bucket, if its parameters live in one flat storage."""
        if self.homes is None:
            return None
        bucket = self.plan.buckets[self.bucket]
        return self.homes.range(bucket.stream, bucket.start + start, bucket.start + stop)


class Route(ABC):
    """A way for a bucket to travel, before it has a staging buffer."""

    staged: int  # elements of staging that it needs
    like: torch.Tensor  # of the staging's dtype and device
    lent: Sequence[torch.Tensor] = ()  # this rank's pieces, if neighbours read copies of them
    lent_slot: int = 0  # elements in which they find room

    @abstractmethod
    def transfer(self, buffer: torch.Tensor | None) -> Transfer: ...


def route_of(site: Site) -> Route:
    device = site.memory[next(site.plan.segments(site.bucket)).param].device
    kind = site.plan.streams[site.plan.buckets[site.bucket].stream].kind
    if kind is Kind.ELEMENTWISE and site.transport.gathers_equal_slots(device):
        return _SlotsRoute(site) if site.plan.has_equal_slots(site.bucket) else _PaddedRoute(site)
    return _PartsRoute(site)


class _SlotsRoute(Route):
    """The backend's all_gather on W equal slots: in place, or through one staged copy."""

    def __init__(self, site: Site) -> None:
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


class _PaddedRoute(Route):
    """The same for a bucket with a remainder: slots are padded to the longest, in staging."""

    def __init__(self, site: Site) -> None:
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


class _PartsRoute(Route):
    """Parts of any size from their owners: large ones in place, small ones packed by owner; those
    of neighbours through memory, if that is worth it."""

    def __init__(self, site: Site) -> None:
        self._rank = site.transport.rank
        self._direct: list[Part] = []
        self._packed: list[tuple[int, list[torch.Tensor]]] = []
        self._borrowed: list[tuple[int, list[torch.Tensor]]] = []
        for owner in range(site.transport.world_size):
            self._place(site, owner)
        self.staged = sum(view.numel() for _, views in self._packed for view in views)
        self.like = site.memory[next(site.plan.segments(site.bucket)).param]

    def _place(self, site: Site, owner: int) -> None:
        pieces = site.pieces(owner)
        if not pieces:
            return
        home = site.at_home(pieces[0].offset, pieces[-1].offset + pieces[-1].numel)
        views = [site.view(piece) for piece in pieces] if home is None else [home]
        transport = site.transport
        start, stop = site.plan.range_of(site.bucket, owner)
        if transport.lends((stop - start) * views[0].element_size(), views[0].device):
            if owner in transport.neighbours:
                self._borrowed.append((owner, views))
                return
            if owner == transport.rank and transport.neighbours:
                self.lent, self.lent_slot = views, stop - start
                if len(transport.neighbours) == transport.world_size - 1:
                    return
        self._send(owner, views)

    def _send(self, owner: int, views: Sequence[torch.Tensor]) -> None:
        """Through gloo; a part of this rank that is lent goes so to other hosts only."""
        small = []
        for view in views:
            alone = len(views) == 1 or view.nbytes >= WORTH_ITS_OWN_MESSAGE
            if alone and view.is_contiguous():
                self._direct.append(self._part(owner, view))
            else:
                small.append(view)
        if small:
            self._packed.append((owner, small))

    def _part(self, owner: int, tensor: torch.Tensor) -> Part:
        is_lent = owner == self._rank and bool(self.lent)
        return Part(owner, tensor, apart_from_neighbours=is_lent)

    def transfer(self, buffer: torch.Tensor | None) -> Transfer:
        transfer = Transfer(parts=list(self._direct))
        transfer.borrowings = [Borrowing(*each) for each in self._borrowed]
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
            transfer.parts.append(self._part(owner, buffer[start:stop]))
            start = stop
        return transfer
