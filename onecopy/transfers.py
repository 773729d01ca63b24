"""How a bucket of updated parameters travels to everybody.

That is decided once, when the plan or the memory changes: there are several ways, and each becomes
a :class:`Transfer`: what to copy into staging, what to send, what to copy out. Memory that lies in
one run (a large piece, or everything, with flat homes) is sent from and received in place; only
small pieces are packed. Neighbours read in one another's memory instead (``neighbours.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

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
    lending: Lending | None = None  # to neighbours
    borrowings: list[Borrowing] = field(default_factory=list)  # from them

    def start(self, transport: Transport) -> Journey:
        self.copy_in.run()
        if self.slots is not None:
            return Journey(transport.all_gather_slots(self.slots))
        if self.lending is not None:
            self.lending.fill(transport)  # may fail: nothing is under way yet
        loans, pending = [], []
        for carried in (False, True):
            lenders = [each.lender for each in self.borrowings if each.is_carried is carried]
            tag = transport.carried_tag if carried else transport.tag
            found, borrowing = transport.borrow(lenders, tag)
            loans += found
            pending.append(borrowing)
        if self.lending is not None:
            pending += self.lending.tell(transport)
        pending.append(transport.share(self.parts))
        return Journey(Pending.together(pending), loans)

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
    """What neighbours read of a bucket in this rank's memory: its own part, and what it receives
    from other hosts for all of them."""

    memory: SharedMemory
    part: torch.Tensor
    copies: Copies  # its own pieces, one after the other
    carried: torch.Tensor  # a run behind it ...
    parts: Sequence[Part] = ()  # ... and in it what is received

    def fill(self, transport: Transport) -> None:
        transport.wait_until_read(self.memory)
        self.copies.run()

    def tell(self, transport: Transport) -> list[Pending]:
        """The readers may read this rank's part, and the rest once it is here."""
        if self.part.numel():
            readers = transport.hosts.others_on_host_of(transport.rank)
            transport.lend(self.memory, dict.fromkeys(readers, self.part), transport.tag)
        if not self.parts:
            return []
        return [transport.carry(self.parts, self.memory, self.carried)]


@dataclass(slots=True)
class Borrowing:
    """A part of a bucket, read from a neighbour's memory: its own, or what it has received from
    other hosts."""

    lender: int
    pieces: Sequence[torch.Tensor]  # where they belong
    is_carried: bool = False
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
    """A way for a bucket to travel, before it has memory to pass through."""

    staged: int  # elements of staging that it needs
    like: torch.Tensor  # of the staging's dtype and device
    lent: int = 0  # elements in which neighbours read

    @abstractmethod
    def transfer(self, buffer: torch.Tensor | None, lendable: Lendable | None) -> Transfer: ...


class Lendable(NamedTuple):
    """Memory that neighbours can read, and all of it as a tensor."""

    memory: SharedMemory
    buffer: torch.Tensor


def route_of(site: Site) -> Route:
    device = site.memory[next(site.plan.segments(site.bucket)).param].device
    kind = site.plan.streams[site.plan.buckets[site.bucket].stream].kind
    if kind is Kind.ELEMENTWISE and site.transport.is_native(device):
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

    def transfer(self, buffer: torch.Tensor | None, _: Lendable | None) -> Transfer:
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

    def transfer(self, buffer: torch.Tensor | None, _: Lendable | None) -> Transfer:
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


class _Load(NamedTuple):
    """What an owner has of a bucket, message by message: each is one large piece, or all the small
    ones, one after the other."""

    owner: int
    room: int  # elements, which the pieces fill at most
    messages: Sequence[Sequence[torch.Tensor]]

    @classmethod
    def of(cls, site: Site, owner: int) -> _Load | None:
        pieces = site.pieces(owner)
        if not pieces:
            return None
        home = site.at_home(pieces[0].offset, pieces[-1].offset + pieces[-1].numel)
        views = [site.view(piece) for piece in pieces] if home is None else [home]
        large: list[torch.Tensor] = []
        small: list[torch.Tensor] = []
        for view in views:
            is_large = len(views) == 1 or view.nbytes >= WORTH_ITS_OWN_MESSAGE
            (large if is_large and view.is_contiguous() else small).append(view)
        start, stop = site.plan.range_of(site.bucket, owner)
        return cls(owner, stop - start, [*([view] for view in large), *([small] if small else [])])

    @property
    def views(self) -> list[torch.Tensor]:
        return [view for message in self.messages for view in message]

    def is_lent(self, transport: Transport) -> bool:
        """Whether ranks on one host read it in one another's memory."""
        like = self.messages[0][0]
        return transport.lends(self.room * like.element_size(), like.device)


class _PartsRoute(Route):
    """Parts of any size from their owners: large ones in place, small ones packed by owner. What is
    lent passes once from host to host (``hosts.py``), and among the ranks of one through memory.
    """

    def __init__(self, site: Site) -> None:
        transport = self._transport = site.transport
        self._sent: list[tuple[_Load, Sequence[int] | None]] = []  # and to whom
        self._own: _Load | None = None  # what neighbours read of this rank's
        self._carried: list[_Load] = []  # and of other hosts'
        self._borrowed: list[tuple[int, list[torch.Tensor]]] = []  # by whose memory it is in
        self._brought_by: dict[int, list[torch.Tensor]] = {}  # the same, of other hosts'
        for owner in range(transport.world_size):
            load = _Load.of(site, owner)
            if load is not None and load.is_lent(transport):
                self._pass_by_host(load)
            elif load is not None:
                self._sent.append((load, None))
        packs = (m for load, _ in self._sent for m in load.messages if not _is_in_place(m))
        self.staged = sum(map(_numel, packs))
        self.like = site.memory[next(site.plan.segments(site.bucket)).param]
        self.lent = sum(load.room for load in self._carried)
        self.lent += 0 if self._own is None else self._own.room

    def _pass_by_host(self, load: _Load) -> None:
        rank, hosts, owner = self._transport.rank, self._transport.hosts, load.owner
        mine = hosts.host_of(rank)
        if owner == rank and len(mine) > 1:
            self._own = load
        elif owner in mine and owner != rank:
            self._borrowed.append((owner, load.views))
        elif owner != rank and hosts.porter(owner, mine) != rank:
            self._brought_by.setdefault(hosts.porter(owner, mine), []).extend(load.views)
        elif len(mine) > 1:
            self._carried.append(load)
        else:
            self._sent.append((load, hosts.porters_of(owner)))

    def transfer(self, buffer: torch.Tensor | None, lendable: Lendable | None) -> Transfer:
        transfer = Transfer()
        transfer.borrowings = [Borrowing(*each) for each in self._borrowed]
        transfer.borrowings += [
            Borrowing(*each, is_carried=True) for each in self._brought_by.items()
        ]
        start = 0
        for load, receivers in self._sent:
            for message in load.messages:
                tensor = message[0]
                if not _is_in_place(message):
                    assert buffer is not None
                    tensor = buffer[start : start + _numel(message)]
                    start += tensor.numel()
                    if load.owner == self._transport.rank:
                        transfer.copy_in.extend(packed(message, tensor))
                    else:
                        transfer.copy_out.extend(packed(message, tensor).reversed())
                transfer.parts.append(Part(load.owner, tensor, receivers))
        if lendable is not None:
            self._lend(lendable, transfer)
        return transfer

    def _lend(self, lendable: Lendable, transfer: Transfer) -> None:
        """Neighbours read this rank's part, which leaves for other hosts from there, and behind it
        what comes from those."""
        rank, porters = self._transport.rank, self._transport.hosts.porters_of(self._transport.rank)
        mine = [] if self._own is None else self._own.views
        own = lendable.buffer[: _numel(mine)]
        if self._own is not None and porters:
            places = _one_after_the_other(self._own.messages, own)
            transfer.parts += [Part(rank, place, porters) for place in places]
        theirs = [(load.owner, message) for load in self._carried for message in load.messages]
        carried = lendable.buffer[own.numel() :]
        received = []
        places = _one_after_the_other([message for _, message in theirs], carried)
        for (owner, message), place in zip(theirs, places, strict=True):
            received.append(Part(owner, place))
            transfer.copy_out.extend(packed(message, place).reversed())
        carried = carried[: sum(place.numel() for place in places)]
        transfer.lending = Lending(lendable.memory, own, packed(mine, own), carried, received)


def _is_in_place(message: Sequence[torch.Tensor]) -> bool:
    return len(message) == 1 and message[0].is_contiguous()


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _one_after_the_other(
    messages: Sequence[Sequence[torch.Tensor]], run: torch.Tensor
) -> list[torch.Tensor]:
    """A place for each of them in a run of memory."""
    ends = list(accumulate(map(_numel, messages)))
    return [run[stop - _numel(each) : stop] for each, stop in zip(messages, ends, strict=True)]
