"""Bucket collectives of CPU ranks on gloo: shared memory, messages, relay ranks.

A part that is large enough is *shared*: ranks of its owner's host read it in memory, and between
hosts it passes once, through a relay rank. All other parts are *sent* by everybody to everybody.
"""

from __future__ import annotations

import functools
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from onecopy.comm.gloo.local_ranks import LocalRanks, SharedRead, find_local_ranks
from onecopy.comm.gloo.shared_memory import NOT_COMING, SharedMemory
from onecopy.comm.gloo.topology import ReduceRoutes
from onecopy.comm.group import RankGroup, ranks_after
from onecopy.comm.interface import (
    CACHED_ELEMENTS,
    BucketLayout,
    BucketParams,
    Buffer,
    Collective,
    Comm,
    CopyList,
    GatherBuffers,
    GradientSlot,
    ReduceBuffers,
    is_in_place,
    total_numel,
)
from onecopy.comm.waiting import BackgroundThread, Task, wait_here
from onecopy.planning.sizes import Links, is_shared

# By process group: found once, by all ranks together.
_local_ranks: weakref.WeakKeyDictionary[Any, LocalRanks] = weakref.WeakKeyDictionary()


class GlooComm(Comm):
    """It has a relay thread of its own. Why not one for all: ranks on which one backward reaches
    two attached modules in different orders would wait for one another in a circle."""

    def __init__(self, group: RankGroup) -> None:
        """Collective, for the first of a process group."""
        self.group = group
        found = _local_ranks.get(group.user_group)
        if found is None:
            found = find_local_ranks(group)
            _local_ranks[group.user_group] = found
        self.local_ranks, self.topology = found, found.topology
        self.peers = self.topology.local_peers(group.rank)
        # Of parameters that a relay rank has received; gradients have no tag that is negative.
        self.relayed_tag = -1 - group.tag
        self._relay_thread: BackgroundThread | None = None  # as long as there is nothing to relay
        hosts = self.topology.hosts
        relayed = self.topology.relayed_by(group.rank) if self.peers else ()
        summing = sum(len(host) > 1 for host in hosts) - bool(self.peers)
        self.links = Links(False, True, 1 + len(self.peers), relayed, len(hosts) - 1, summing)
        group.monitor.ended_local_ranks = found.ended
        group.monitor.abandon_shared_memory = found.shared.clear
        weakref.finalize(self, found.release_unused)

    def allocate(self, numel: int, like: torch.Tensor) -> Buffer:
        if not self.peers or not numel:
            return Buffer.allocate(numel, like)
        return SharedBuffer(self, numel, like)

    def all_gather(self, params: BucketParams, staging: GatherBuffers) -> Collective:
        return _AllGather(self, params, staging)

    def reduce_scatter(
        self, layout: BucketLayout, staging: ReduceBuffers, slot: GradientSlot, tag: int
    ) -> Collective:
        return _ReduceScatter(self, layout, staging, slot, tag)

    def release_unused(self) -> None:
        self.local_ranks.release_unused()

    def message(self, start: Callable[..., Any], tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """``start`` is ``isend`` or ``irecv``."""
        group = self.group
        return start(tensor, group.global_ranks[rank], group=group.process_group, tag=tag)

    def share(self, buffer: Buffer, part: torch.Tensor, readers: Sequence[int], tag: int) -> None:
        """Tell the readers where a part of a buffer is."""
        assert isinstance(buffer, SharedBuffer)
        address = self.local_ranks.share(buffer.memory, part, readers)
        self.local_ranks.post(readers, tag, address, self.group.monitor.patience)

    def receive_for_peers(
        self, received: Sequence[tuple[int, torch.Tensor]], buffer: Buffer, run: torch.Tensor
    ) -> Task:
        """Receive tensors from their owners, in a run of the buffer, and tell the local ranks.

        By the relay thread, in the order of the calls: a local rank may want them when this one is
        busy with anything else. If they do not come, the local ranks are told that. The memory
        counts as shared from now on, so that it is not filled again before.
        """
        assert isinstance(buffer, SharedBuffer)
        works = [
            self.message(dist.irecv, tensor, rank, self.group.tag) for rank, tensor in received
        ]
        self.group.traffic.add(run, len(self.peers))
        address = self.local_ranks.share(buffer.memory, run, self.peers)
        patience = self.group.monitor.patience
        post = functools.partial(self.local_ranks.post, self.peers, self.relayed_tag)

        def pass_on() -> None:
            try:
                wait_here(works)
            except BaseException:
                post(NOT_COMING, patience)
                raise
            works.clear()  # as in waiting.py: they end before anybody knows that they are done
            post(address, patience)

        return self.relay(pass_on)

    def relay(self, task: Callable[[], Any]) -> Task:
        """Let the relay thread do something, after all that it was told before."""
        if self._relay_thread is None:
            self._relay_thread = BackgroundThread(owner=self)
        return self._relay_thread.send(task)


class SharedBuffer(Buffer):
    """Staging that local ranks can read."""

    def __init__(self, comm: GlooComm, numel: int, like: torch.Tensor) -> None:
        group = comm.group
        self.memory = SharedMemory(numel * like.element_size(), group.world_size)
        super().__init__(self.memory.data.view(like.dtype))
        self._monitor, self._local_ranks = group.monitor, comm.local_ranks

    def wait_until_read(self) -> None:
        with self._monitor.naming_absentees():
            self._local_ranks.wait_until_read(self.memory, self._monitor.patience)


class _Operation(Collective):
    """What is shared, sent and received for a bucket. A subclass prepares, relays and completes."""

    def __init__(self, comm: GlooComm, tag: int, buffers: Sequence[Buffer]) -> None:
        self._comm, self._tag, self.buffers = comm, tag, buffers
        self._used: Counter[Buffer] = Counter()  # elements
        # Prepared: ranks and what they read or send, here and there.
        self.copy_in = CopyList()
        self.shared: tuple[Buffer, torch.Tensor, Sequence[int]] | None = None  # for these readers
        self.read: Sequence[torch.Tensor] = ()  # what they read of that
        # Whose memory this rank reads, by rank and tag; in an all-gather, where that belongs.
        self.sources: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.sent: list[tuple[int, torch.Tensor]] = []
        self.received: list[tuple[int, torch.Tensor]] = []
        # In flight.
        self.works: list[Any] = []
        self.tasks: list[Task] = []  # of the relay thread: each may launch more works
        self.reads: list[SharedRead] = []

    def _room(self, buffer: Buffer, numel: int) -> torch.Tensor:
        """The next elements of a buffer."""
        start = self._used[buffer]
        self._used[buffer] += numel
        return buffer.tensor[start : start + numel]

    def start(self) -> None:
        comm, traffic = self._comm, self._comm.group.traffic
        self.copy_in.run()
        with comm.group.monitor.naming_absentees():
            self.reads = [comm.local_ranks.read_from(*source) for source in self.sources]
            if self.shared is not None:
                for part in self.read:
                    traffic.add(part)
                comm.share(*self.shared, self._tag)
            for rank, tensor in self.received:
                self.works.append(comm.message(dist.irecv, tensor, rank, self._tag))
            for rank, tensor in self.sent:
                traffic.add(tensor)
                self.works.append(comm.message(dist.isend, tensor, rank, self._tag))
            self._relay()

    @abstractmethod
    def _relay(self) -> None:
        """Let the relay thread begin, if this rank relays anything."""

    def wait(self) -> None:
        monitor = self._comm.group.monitor
        monitor.wait_for(self.works)  # all together: the waiting thread wakes up once
        if self.tasks or self.reads:
            with monitor.naming_absentees():
                for task in self.tasks:
                    monitor.wait_for(task.wait() or ())
                for read in self.reads:
                    read.arrive(monitor.patience)
        self.works, self.tasks = [], []

    def discard(self) -> None:
        for read in self.reads:
            read.release()


# -------------------------------------------------------------------------- parameters


class _AllGather(_Operation):
    """Parts of any size from their owners: large views in place, small ones packed by owner."""

    def __init__(self, comm: GlooComm, params: BucketParams, staging: GatherBuffers) -> None:
        tag, rank, topology = comm.group.tag, comm.group.rank, comm.topology
        super().__init__(comm, tag, [buffer for buffer in staging if buffer is not None])
        self.copy_out = CopyList()
        # By source: the address that was read last, which mostly stays, and the copies from there.
        self._copies: dict[tuple[int, int], tuple[tuple[int, ...], CopyList]] = {}
        self._relayed: list[tuple[int, torch.Tensor]] = []  # by owner: received for local ranks
        host, everybody = topology.host_of(rank), ranks_after(rank, comm.group.world_size)
        itemsize = params.like.element_size()
        # What is relayed comes last: it is shared last, and so it has to be marked last as read.
        for owner in (rank, *comm.peers, *sorted({*everybody}.difference(comm.peers))):
            start, stop = params.layout.range(owner)
            shared = is_shared((stop - start) * itemsize, comm.links)
            in_memory = shared and bool(comm.peers)
            source = topology.relay(owner, host)  # the owner itself, if it is a local rank
            if in_memory and source != rank:
                key = source, tag if owner == source else comm.relayed_tag
                views = self.sources.setdefault(key, [])
                views += [view for message in params.messages(owner) for view in message]
                continue
            buffer = staging.shared if in_memory else staging.packed
            for message in params.messages(owner):
                tensor = message[0]
                if in_memory or not is_in_place(message):
                    assert buffer is not None
                    tensor = self._room(buffer, total_numel(message))
                    if owner == rank:
                        self.copy_in.pack(message, tensor)
                    else:
                        self.copy_out.unpack(tensor, message)
                if owner == rank:
                    receivers = topology.relays_of(rank) if shared else everybody
                    self.sent += [(receiver, tensor) for receiver in receivers]
                else:
                    (self._relayed if in_memory else self.received).append((owner, tensor))
        if staging.shared is not None:
            relayed = total_numel(tensor for _, tensor in self._relayed)
            own = self._used[staging.shared] - relayed
            # What is relayed stands behind what this rank owns.
            self._run = staging.shared, staging.shared.tensor[own : own + relayed]
            if own:
                self.shared = staging.shared, staging.shared.tensor[:own], comm.peers
                self.read = [self.shared[1]] * len(comm.peers)

    def _relay(self) -> None:
        if self._relayed:
            self.tasks.append(self._comm.receive_for_peers(self._relayed, *self._run))

    def complete(self) -> None:
        self.copy_out.run()
        for (source, views), read in zip(self.sources.items(), self.reads, strict=True):
            if not read.is_released:
                place = read.address[:-1]
                if self._copies.get(source, ((), None))[0] != place:
                    self._copies[source] = place, CopyList()
                    self._copies[source][1].unpack(read.tensor(views[0].dtype), views)
                self._copies[source][1].run()
                read.release()


# -------------------------------------------------------------------------- gradients


class _ReduceScatter(_Operation):
    """Every rank contributes to every owner: in memory, by a message, or in the sum of its host."""

    def __init__(
        self,
        comm: GlooComm,
        layout: BucketLayout,
        staging: ReduceBuffers,
        slot: GradientSlot,
        tag: int,
    ) -> None:
        super().__init__(comm, tag, staging)
        self._layout, self._slot, rank = layout, slot, comm.group.rank
        self._own_range = layout.range(rank)
        send, receive, sums = staging
        self._whole = whole = send.tensor[: layout.numel]
        ranges = map(layout.range, range(comm.group.world_size))
        sizes = [(stop - start) * whole.element_size() for start, stop in ranges]
        shared = {owner for owner, size in enumerate(sizes) if is_shared(size, comm.links)}
        sent = {owner for owner, size in enumerate(sizes) if size} - shared
        self.routes = routes = ReduceRoutes.of(rank, comm.topology, shared, sent)
        self.sources = {(source, tag): [] for source in routes.sources}
        if routes.read_by:
            self.shared = send, whole, list(routes.read_by)
            read = [owner for owners in routes.read_by.values() for owner in owners]
            self.read = [layout.part(whole, owner) for owner in read]
        self.sent = [(owner, layout.part(whole, owner)) for owner in routes.direct]
        sums_are_wide = sums.tensor.dtype != send.tensor.dtype
        for sender in routes.senders:
            is_sum = rank in shared and comm.topology.local_peers(sender)
            buffer = sums if is_sum and sums_are_wide else receive
            self.received.append((sender, self._room(buffer, slot.tensor.numel())))
        # Where the sums of this host are made: in place of what this rank contributes, or beside it
        # if they are wider.
        self._relayed = {owner: layout.part(whole, owner) for owner in routes.relayed}
        if sums_are_wide:
            self._relayed = {o: self._room(sums, p.numel()) for o, p in self._relayed.items()}

    def _relay(self) -> None:
        for part in self._relayed.values():
            self._comm.group.traffic.add(part)
        if self._relayed:
            self.tasks.append(self._comm.relay(functools.partial(self._send_sums, self.reads)))

    @torch.no_grad()
    def _send_sums(self, reads: Sequence[SharedRead]) -> list[Any]:
        """Add up what this host contributes to owners on others, once it is here, and send it.

        By the relay thread, in the order of the collectives. Messages are told apart by their tags,
        so other than collectives they may be launched by any thread.
        """
        comm = self._comm
        for read in reads:
            read.arrive(comm.group.monitor.patience)
        by_rank = {read.source: read.tensor(self._whole.dtype) for read in reads}
        by_rank[comm.group.rank] = self._whole
        works = []
        for owner, total in self._relayed.items():
            start, stop = self._layout.range(owner)
            add_up([by_rank[rank][start:stop] for rank in sorted(by_rank)], total)
            works.append(comm.message(dist.isend, total, owner, self._tag))
        return works

    def complete(self) -> None:
        rank, dtype = self._comm.group.rank, self._whole.dtype
        start, stop = self._own_range
        of_rank = {**dict(self.received), rank: self._whole[start:stop]}
        for read in self.reads:
            # Of a local rank that sends its part, the memory is read for owners elsewhere only.
            if read.source not in of_rank:
                of_rank[read.source] = read.tensor(dtype)[start:stop]
        self._slot.add([of_rank[rank] for rank in sorted(of_rank)])
        self.discard()


def add_up(contributions: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """The sum, in this order, of what the ranks of a host contribute; ``total`` may be one of them.

    Narrow elements are rounded once.
    """
    dtype = torch.promote_types(total.dtype, torch.float32)
    for start in range(0, total.numel(), CACHED_ELEMENTS):
        first, second, *others = (each[start : start + CACHED_ELEMENTS] for each in contributions)
        target = total[start : start + CACHED_ELEMENTS]
        if not others and target.dtype == dtype:
            torch.add(first.to(dtype), second, out=target)
            continue
        wide = first.to(dtype) + second
        for other in others:
            wide.add_(other)
        target.copy_(wide)
