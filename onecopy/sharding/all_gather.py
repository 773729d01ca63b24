"""The all-gather of updated parameters, bucket by bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from onecopy.comm.gloo.local_ranks import SharedRead
from onecopy.comm.gloo.shared_memory import SharedMemory
from onecopy.comm.group import Handle, Part, RankGroup
from onecopy.comm.stats import Phase
from onecopy.planning.layout import flat_range, part_of
from onecopy.planning.plan import Plan, Shard
from onecopy.planning.sizes import IN_FLIGHT, MIN_MESSAGE_BYTES, SHARED_BUFFERS, in_flight_limit
from onecopy.planning.traits import Kind
from onecopy.sharding.buffers import CopyList, FlatStorage, StagingPool
from onecopy.torch_private import disable_dynamo


@dataclass(slots=True)
class Transfer:
    """How one bucket travels: its parts, or its W equal slots in one buffer."""

    copy_in: CopyList = field(default_factory=CopyList)
    parts: list[Part] = field(default_factory=list)
    slots: torch.Tensor | None = None
    copy_out: CopyList = field(default_factory=CopyList)
    lending: Lending | None = None  # to neighbours
    borrowings: list[Borrowing] = field(default_factory=list)  # from them

    def start(self, rank_group: RankGroup) -> Journey:
        self.copy_in.run()
        if self.slots is not None:
            return Journey(rank_group.all_gather_slots(self.slots))
        if self.lending is not None:
            self.lending.fill(rank_group)  # may fail: nothing is under way yet
        shared_reads, pending = [], []
        for carried in (False, True):
            lenders = [each.lender for each in self.borrowings if each.is_carried is carried]
            tag = rank_group.carried_tag if carried else rank_group.tag
            found, borrowing = rank_group.borrow(lenders, tag)
            shared_reads += found
            pending.append(borrowing)
        if self.lending is not None:
            pending += self.lending.tell(rank_group)
        pending.append(rank_group.share(self.parts))
        return Journey(Handle.together(pending), shared_reads)

    def arrive(self, journey: Journey) -> None:
        """Wait, and bring everything to its place. If it is interrupted, it can be called again."""
        journey.pending.wait()
        self.copy_out.run()
        for borrowing, shared_read in zip(self.borrowings, journey.shared_reads, strict=True):
            if not shared_read.is_given_back:
                borrowing.read(shared_read)
                shared_read.give_back()


@dataclass(frozen=True, slots=True)
class Journey:
    """A bucket under way."""

    pending: Handle
    shared_reads: Sequence[SharedRead] = ()


@dataclass(frozen=True, slots=True)
class Lending:
    """What neighbours read of a bucket in this rank's memory: its own part, and what it receives
    from other hosts for all of them."""

    memory: SharedMemory
    part: torch.Tensor
    copies: CopyList  # its own pieces, one after the other
    carried: torch.Tensor  # a run behind it ...
    parts: Sequence[Part] = ()  # ... and in it what is received

    def fill(self, rank_group: RankGroup) -> None:
        rank_group.wait_until_read(self.memory)
        self.copies.run()

    def tell(self, rank_group: RankGroup) -> list[Handle]:
        """The readers may read this rank's part, and the rest once it is here."""
        if self.part.numel():
            readers = rank_group.hosts.others_on_host_of(rank_group.rank)
            rank_group.lend(self.memory, dict.fromkeys(readers, self.part), rank_group.tag)
        if not self.parts:
            return []
        return [rank_group.carry(self.parts, self.memory, self.carried)]


@dataclass(slots=True)
class Borrowing:
    """A part of a bucket, read from a neighbour's memory: its own, or what it has received from
    other hosts."""

    lender: int
    shards: Sequence[torch.Tensor]  # where they belong
    is_carried: bool = False
    _from: tuple[int, ...] = ()  # the address of ...
    _copies: CopyList = field(
        default_factory=CopyList
    )  # ... what is copied: mostly that of last time

    def read(self, shared_read: SharedRead) -> None:
        at = shared_read.address
        place = at.fd, at.generation, at.start
        if place != self._from:
            lent = shared_read.tensor(self.shards[0].dtype)
            self._from, self._copies = place, packed(self.shards, lent).reversed()
        self._copies.run()


def packed(shards: Sequence[torch.Tensor], run: torch.Tensor) -> CopyList:
    """Copies of the pieces, one after the other, into a run of memory."""
    copies, start = CopyList(), 0
    for shard in shards:
        copies.add(run[start : start + shard.numel()].view(shard.shape), shard)
        start += shard.numel()
    return copies


# -------------------------------------------------------------------------- choosing the way


@dataclass(frozen=True, slots=True)
class Site:
    """A bucket and where its memory is."""

    rank_group: RankGroup
    homes: FlatStorage | None
    plan: Plan
    memory: Sequence[torch.Tensor]
    bucket: int

    def shards(self, owner: int) -> list[Shard]:
        return [shard for shard in self.plan.shards_in(self.bucket, owner) if shard.numel]

    def view(self, shard: Shard) -> torch.Tensor:
        """A piece where it is: a run of memory, or a tensor with gaps."""
        return part_of(self.memory[shard.param], shard.start, shard.stop)

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
    if kind is Kind.ELEMENTWISE and site.rank_group.is_native(device):
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
        for shard in site.shards(site.rank_group.rank):
            source = flat_range(site.memory[shard.param], shard.start, shard.stop)
            transfer.copy_in.add(buffer.narrow(0, shard.offset, shard.numel), source)
        for segment, view in zip(self._segments, self._views, strict=True):
            transfer.copy_out.add(view, buffer.narrow(0, segment.offset, view.numel()))
        return transfer


class _PaddedRoute(Route):
    """The same for a bucket with a remainder: slots are padded to the longest, in staging."""

    def __init__(self, site: Site) -> None:
        self._site = site
        slots = [site.plan.slot(site.bucket, rank) for rank in range(site.rank_group.world_size)]
        self._starts = [start for start, _ in slots]
        self._longest = max(stop - start for start, stop in slots)
        self.staged = self._longest * len(slots)
        self.like = site.memory[next(site.plan.segments(site.bucket)).param]

    def transfer(self, buffer: torch.Tensor | None, _: Lendable | None) -> Transfer:
        site = self._site
        transfer = Transfer(slots=buffer)
        assert buffer is not None
        for owner, start in enumerate(self._starts):
            for shard in site.shards(owner):
                offset = owner * self._longest + shard.offset - start
                staged = buffer.narrow(0, offset, shard.numel)
                view = flat_range(site.memory[shard.param], shard.start, shard.stop)
                if owner == site.rank_group.rank:
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
        shards = site.shards(owner)
        if not shards:
            return None
        home = site.at_home(shards[0].offset, shards[-1].offset + shards[-1].numel)
        views = [site.view(shard) for shard in shards] if home is None else [home]
        large: list[torch.Tensor] = []
        small: list[torch.Tensor] = []
        for view in views:
            is_large = len(views) == 1 or view.nbytes >= MIN_MESSAGE_BYTES
            (large if is_large and view.is_contiguous() else small).append(view)
        start, stop = site.plan.range_of(site.bucket, owner)
        return cls(owner, stop - start, [*([view] for view in large), *([small] if small else [])])

    @property
    def views(self) -> list[torch.Tensor]:
        return [view for message in self.messages for view in message]

    def is_lent(self, rank_group: RankGroup) -> bool:
        """Whether ranks on one host read it in one another's memory."""
        like = self.messages[0][0]
        return rank_group.lends(self.room * like.element_size(), like.device)


class _PartsRoute(Route):
    """Parts of any size from their owners: large ones in place, small ones packed by owner. What is
    lent passes once from host to host (``hosts.py``), and among the ranks of one through memory.
    """

    def __init__(self, site: Site) -> None:
        rank_group = self._rank_group = site.rank_group
        self._sent: list[tuple[_Load, Sequence[int] | None]] = []  # and to whom
        self._own: _Load | None = None  # what neighbours read of this rank's
        self._carried: list[_Load] = []  # and of other hosts'
        self._borrowed: list[tuple[int, list[torch.Tensor]]] = []  # by whose memory it is in
        self._brought_by: dict[int, list[torch.Tensor]] = {}  # the same, of other hosts'
        for owner in range(rank_group.world_size):
            load = _Load.of(site, owner)
            if load is not None and load.is_lent(rank_group):
                self._pass_by_host(load)
            elif load is not None:
                self._sent.append((load, None))
        packs = (m for load, _ in self._sent for m in load.messages if not _is_in_place(m))
        self.staged = sum(map(_numel, packs))
        self.like = site.memory[next(site.plan.segments(site.bucket)).param]
        self.lent = sum(load.room for load in self._carried)
        self.lent += 0 if self._own is None else self._own.room

    def _pass_by_host(self, load: _Load) -> None:
        rank, hosts, owner = self._rank_group.rank, self._rank_group.hosts, load.owner
        mine = hosts.host_of(rank)
        if owner == rank and len(mine) > 1:
            self._own = load
        elif owner in mine and owner != rank:
            self._borrowed.append((owner, load.views))
        elif owner != rank and hosts.relay(owner, mine) != rank:
            self._brought_by.setdefault(hosts.relay(owner, mine), []).extend(load.views)
        elif len(mine) > 1:
            self._carried.append(load)
        else:
            self._sent.append((load, hosts.relays_of(owner)))

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
                    if load.owner == self._rank_group.rank:
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
        rank, relays = (
            self._rank_group.rank,
            self._rank_group.hosts.relays_of(self._rank_group.rank),
        )
        mine = [] if self._own is None else self._own.views
        own = lendable.buffer[: _numel(mine)]
        if self._own is not None and relays:
            places = _one_after_the_other(self._own.messages, own)
            transfer.parts += [Part(rank, place, relays) for place in places]
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


class StagingLender(Protocol):
    """Whoever has memory that neighbours can read and that is hardly needed during a step."""

    def lendable(self, bucket: int, dtype: torch.dtype) -> Lendable | None:
        """Room for a bucket of that dtype, if there is any."""

    def make_free(self, bucket: int) -> None:
        """Nobody of this rank needs any more what is in there; neighbours may."""


class AllGatherQueue:
    """Sends what the owners have updated, bucket by bucket::

    for bucket in gatherer.order:
        ...  # this rank's part of the bucket is updated
        gatherer.start(bucket)
    gatherer.finish()
    """

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._params: Sequence[torch.Tensor] = ()
        self._transfers: list[Transfer] | None = []  # None: preparing them has failed
        self._launched: dict[int, Journey] = {}  # by bucket, those nobody has waited for
        self._staging = StagingPool(IN_FLIGHT)
        self._lent = StagingPool(SHARED_BUFFERS)
        self._lender: StagingLender | None = None
        self._is_lazy = False
        self._most = IN_FLIGHT
        self.order: Sequence[int] = ()  # in which the buckets are to be started

    def give_up_staging(self) -> None:
        """It is about to change: no bucket can travel before ``prepare``."""
        self.wait()
        self._transfers, self._lender = None, None
        self._staging, self._lent = StagingPool(IN_FLIGHT), StagingPool(SHARED_BUFFERS)

    def prepare(
        self,
        plan: Plan,
        params: Sequence[torch.Tensor],
        homes: FlatStorage | None,
        lazy: bool,
        lender: StagingLender | None = None,
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
        if self._rank_group.world_size == 1:
            self._transfers = []
            return
        # Not seen by autograd, which is told once for all.
        memory = [param.data for param in params]
        self._rank_group.local_ranks.forget()
        together = in_flight_limit(len(buckets), lazy)
        self._most = max(IN_FLIGHT, together)
        staging = self._staging = StagingPool(self._most)
        self._lent = StagingPool(max(SHARED_BUFFERS, together), self._rank_group.memory_to_lend)
        # What is under way when a step is over would still be read in the next backward.
        self._lender = None if lazy else lender
        routes = [route_of(Site(self._rank_group, homes, plan, memory, b)) for b in buckets]
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
        if self._rank_group.world_size == 1:
            return
        transfer = self._prepared()[bucket]
        turn = bucket % self._most
        # Those that pass through the same memory; if none was waited for before its turn, the
        # first of as many as may be under way.
        self.wait([other for other in self._launched if other % self._most == turn])
        if self._lender is not None:
            self._lender.make_free(bucket)
        with torch.no_grad(), self._rank_group.counters.launching(Phase.ALL_GATHER, bucket):
            self._launched[bucket] = transfer.start(self._rank_group)

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
        with torch.no_grad(), self._rank_group.counters.waiting(Phase.ALL_GATHER, bucket):
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
