"""Bucket collectives of CPU ranks on gloo: shared memory, messages, relay ranks.

A part that is large enough is *shared*: ranks of its owner's host read it in memory, and between
hosts it passes once, through a relay rank. All other parts are *sent* by everybody to everybody.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from onecopy.comm.gloo.local_ranks import LocalRanks, Messages, SharedRead, find_local_ranks
from onecopy.comm.gloo.shared_memory import SharedMemory
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
from onecopy.comm.monitor import GroupMonitor
from onecopy.comm.waiting import BackgroundThread, Task, wait_here
from onecopy.planning.sizes import Links, is_shared

_WIDE = 4  # bytes of an element that is added up as it is

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
            found = find_local_ranks(group.rank, group.all_gather_bytes, group.world_size)
            _local_ranks[group.user_group] = found
        self.local_ranks, self.topology = found, found.topology
        self.peers = self.topology.local_peers(group.rank)
        self.spare_buffers = 1 if self.peers else 0
        self._relay_thread: BackgroundThread | None = None  # as long as there is nothing to relay
        group.monitor.ended_local_ranks = found.ended
        group.monitor.abandon_shared_memory = found.abandon
        weakref.finalize(self, found.release_unused)

    @property
    def links(self) -> Links:
        hosts = self.topology.hosts
        relayed = self.topology.relayed_by(self.group.rank) if self.peers else ()
        summing = sum(len(host) > 1 for host in hosts) - bool(self.peers)
        return Links(False, True, 1 + len(self.peers), relayed, len(hosts) - 1, summing)

    def allocate(self, numel: int, like: torch.Tensor) -> Buffer:
        if not self.peers or not numel:
            return Buffer.allocate(numel, like)
        return SharedBuffer(self, numel, like)

    def all_gather(self, params: BucketParams, staging: GatherBuffers) -> Collective:
        return _AllGather(self, params, staging)

    def reduce_scatter(
        self,
        layout: BucketLayout,
        staging: ReduceBuffers,
        slot: GradientSlot,
        tag: int,
    ) -> Collective:
        return _ReduceScatter(self, layout, staging, slot, tag)

    def release_unused(self) -> None:
        self.local_ranks.release_unused()

    def share(
        self,
        buffer: Buffer,
        parts: Mapping[int, torch.Tensor],
        tag: int,
        read: Iterable[torch.Tensor] | None = None,
    ) -> None:
        """Tell the readers, by rank, which part of a buffer is for them. ``read``: what they will
        read of that, if not all."""
        for part in parts.values() if read is None else read:
            self.group.traffic.add(part)
        messages = self.local_ranks.share(_memory_of(buffer), parts, tag)
        self.local_ranks.post(messages, self.group.monitor.patience)

    def receive_for_peers(
        self, received: Sequence[tuple[int, torch.Tensor]], buffer: Buffer, run: torch.Tensor
    ) -> Task:
        """Receive tensors from their owners, in a run of the buffer, and tell the local ranks.

        By the relay thread, in the order of the calls: a local rank may want them when this one is
        busy with anything else. If they do not come, the local ranks are told that. The memory
        counts as shared from now on, so that it is not filled again before.
        """
        group, local, monitor = self.group, self.local_ranks, self.group.monitor
        works = [
            work for owner, tensor in received for work in group.launch_messages(owner, tensor, ())
        ]
        group.traffic.add(run, len(self.peers))
        # Under a tag of its own; gradients have none that is negative.
        to_peers = dict.fromkeys(self.peers, run)
        messages = local.share(_memory_of(buffer), to_peers, self.relayed_tag)
        return self.relay(lambda: _pass_on(works, local, messages, monitor))

    @property
    def relayed_tag(self) -> int:
        """Of parameters that a relay rank has received."""
        return -1 - self.group.tag

    def relay(self, task: Callable[[], Any]) -> Task:
        """Let the relay thread do something, after all that it was told before."""
        if self._relay_thread is None:
            self._relay_thread = BackgroundThread.of(self)
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


def _memory_of(buffer: Buffer) -> SharedMemory:
    assert isinstance(buffer, SharedBuffer)
    return buffer.memory


class _Pending:
    """What a collective waits for."""

    def __init__(self, monitor: GroupMonitor) -> None:
        self._monitor = monitor
        self.works: list[Any] = []
        self.tasks: list[Task] = []  # of the relay thread: each may launch more works
        self.reads: list[SharedRead] = []

    def wait(self) -> None:
        """Can be called again if it is interrupted."""
        self._monitor.wait_for(self.works)  # all together: the waiting thread wakes up once
        if self.tasks or self.reads:
            with self._monitor.naming_absentees():
                for task in self.tasks:
                    self._monitor.wait_for(task.wait() or ())
                for read in self.reads:
                    read.arrive(self._monitor.patience)
        self.works, self.tasks = [], []


# -------------------------------------------------------------------------- parameters


class _Source:
    """Parameters that this rank reads in the memory of another: what that one owns, or what it has
    received from other hosts."""

    def __init__(self, rank: int, tag: int) -> None:
        self.rank, self.tag = rank, tag
        self.views: list[torch.Tensor] = []  # where they belong
        self._read_before: tuple[int, ...] = ()  # the address from which ...
        self._copies = CopyList()  # ... these copy: mostly that of the last step

    def copy(self, read: SharedRead) -> None:
        at = read.address
        place = at.fd, at.generation, at.start
        if place != self._read_before:
            self._read_before, self._copies = place, CopyList()
            self._copies.unpack(read.tensor(self.views[0].dtype), self.views)
        self._copies.run()


class _AllGather(Collective):
    """Parts of any size from their owners: large views in place, small ones packed by owner."""

    def __init__(
        self,
        comm: GlooComm,
        params: BucketParams,
        staging: GatherBuffers,
    ) -> None:
        self._comm = comm
        self.buffers = [buffer for buffer in staging if buffer is not None]
        self._shared = staging.shared
        self._copy_in, self._copy_out = CopyList(), CopyList()
        # (owner, tensor, receivers): sent or received, in this order from each owner.
        self._messages: list[tuple[int, torch.Tensor, Sequence[int]]] = []
        self._own: torch.Tensor | None = None  # what local ranks read of this rank's parameters ...
        self._relayed: torch.Tensor | None = None  # ... and of those that it receives for them
        self._received: list[tuple[int, torch.Tensor]] = []  # by owner, the messages in that
        self._sources: list[_Source] = []
        self._pending = _Pending(comm.group.monitor)
        self._prepare(params, staging.packed)

    def _prepare(self, params: BucketParams, packed: Buffer | None) -> None:
        comm, topology, rank = self._comm, self._comm.topology, self._comm.group.rank
        host, tag = topology.host_of(rank), comm.group.tag
        everybody = ranks_after(rank, comm.group.world_size)
        itemsize = params.like.element_size()
        own: list[list[torch.Tensor]] = []
        relayed: list[tuple[int, list[torch.Tensor]]] = []
        by_relay: dict[int, _Source] = {}
        used = 0
        for owner in range(comm.group.world_size):
            messages = params.messages(owner)
            start, stop = params.layout.range(owner)
            shared = is_shared((stop - start) * itemsize, comm.links)
            if not messages:
                continue
            if not shared or len(host) == 1:
                receivers = topology.relays_of(owner) if shared else everybody
                for message in messages:
                    used += self._send_or_receive(owner, message, receivers, packed, used)
            elif owner == rank:
                own = messages
            elif owner in host:
                self._sources.append(_Source(owner, tag))
                self._sources[-1].views = [view for message in messages for view in message]
            elif topology.relay(owner, host) == rank:
                relayed += [(owner, message) for message in messages]
            else:
                relay = topology.relay(owner, host)
                source = by_relay.setdefault(relay, _Source(relay, comm.relayed_tag))
                source.views += [view for message in messages for view in message]
        self._sources += by_relay.values()
        if own or relayed:
            self._share(own, relayed)

    def _send_or_receive(
        self,
        owner: int,
        message: list[torch.Tensor],
        receivers: Sequence[int],
        packed: Buffer | None,
        used: int,
    ) -> int:
        """Returns the elements of staging that it takes, behind the ``used`` ones."""
        if is_in_place(message):
            self._messages.append((owner, message[0], receivers))
            return 0
        assert packed is not None
        run = packed.tensor[used : used + total_numel(message)]
        if owner == self._comm.group.rank:
            self._copy_in.pack(message, run)
        else:
            self._copy_out.unpack(run, message)
        self._messages.append((owner, run, receivers))
        return run.numel()

    def _share(
        self, own: list[list[torch.Tensor]], relayed: list[tuple[int, list[torch.Tensor]]]
    ) -> None:
        """Local ranks read this rank's part, which leaves for other hosts from there, and behind it
        what comes from those."""
        assert self._shared is not None
        rank, start = self._comm.group.rank, 0
        memory = self._shared.tensor
        relays = self._comm.topology.relays_of(rank)
        for message in own:
            run = memory[start : start + total_numel(message)]
            start += run.numel()
            self._copy_in.pack(message, run)
            if relays:
                self._messages.append((rank, run, relays))
        if own:
            self._own = memory[:start]
        first = start
        for owner, message in relayed:
            run = memory[start : start + total_numel(message)]
            start += run.numel()
            self._copy_out.unpack(run, message)
            self._received.append((owner, run))
        if relayed:
            self._relayed = memory[first:start]

    def start(self) -> None:
        comm, pending = self._comm, self._pending
        group, local = comm.group, comm.local_ranks
        self._copy_in.run()
        with group.monitor.naming_absentees():
            pending.reads = [local.read_from(source.rank, source.tag) for source in self._sources]
            if self._own is not None and self._shared is not None:
                comm.share(self._shared, dict.fromkeys(comm.peers, self._own), group.tag)
            if self._relayed is not None and self._shared is not None:
                pending.tasks.append(
                    comm.receive_for_peers(self._received, self._shared, self._relayed)
                )
            for owner, tensor, receivers in self._messages:
                if owner == group.rank:
                    group.traffic.add(tensor, len(receivers))
                pending.works += group.launch_messages(owner, tensor, receivers)

    def wait(self) -> None:
        self._pending.wait()

    def complete(self) -> None:
        self._copy_out.run()
        for source, read in zip(self._sources, self._pending.reads, strict=True):
            if not read.is_released:
                source.copy(read)
                read.release()

    def discard(self) -> None:
        for read in self._pending.reads:
            read.release()


def _pass_on(
    works: list[Any], local_ranks: LocalRanks, messages: Messages, monitor: GroupMonitor
) -> None:
    try:
        wait_here(works)
    except BaseException:
        local_ranks.post(messages.of_failure(), monitor.patience)
        raise
    works.clear()  # as in waiting.py: they end before anybody knows that they are done
    local_ranks.post(messages, monitor.patience)


# -------------------------------------------------------------------------- gradients


class _ReduceScatter(Collective):
    """Every rank contributes to every owner: in memory, by a message, or in the sum of its host."""

    def __init__(
        self,
        comm: GlooComm,
        layout: BucketLayout,
        staging: ReduceBuffers,
        slot: GradientSlot,
        tag: int,
    ) -> None:
        self._comm, self._layout, self._slot, self._tag = comm, layout, slot, tag
        self.buffers = send, receive, sums = staging
        self._send, self._whole = send, send.tensor[: layout.numel]
        self._pending = _Pending(comm.group.monitor)
        self.routes = routes = self._routes()
        mine, rank = slot.tensor.numel(), comm.group.rank
        sums_are_wide = sums.tensor.dtype != send.tensor.dtype
        self._received: dict[int, torch.Tensor] = {}
        used, used_of_sums = 0, 0
        for sender in routes.senders:
            if sums_are_wide and sender in routes.summed:
                self._received[sender] = sums.tensor[used_of_sums : used_of_sums + mine]
                used_of_sums += mine
            else:
                self._received[sender] = receive.tensor[used : used + mine]
                used += mine
        # Where the sums of this host are made: in place of what this rank contributes, or beside it
        # if they are wider.
        self._relayed: dict[int, torch.Tensor] = {}
        for owner in routes.relayed:
            part = layout.part(self._whole, owner)
            if sums_are_wide:
                part = sums.tensor[used_of_sums : used_of_sums + part.numel()]
                used_of_sums += part.numel()
            self._relayed[owner] = part
        self._own_range = layout.range(rank)
        self._direct = [(owner, layout.part(self._whole, owner)) for owner in routes.direct]
        self._contributions: dict[int, torch.Tensor] = {
            **self._received,
            rank: layout.part(self._whole, rank),
        }
        # What local ranks read of this rank's gradients, for the count of bytes.
        self._read = [
            layout.part(self._whole, owner)
            for owners in routes.read_by.values()
            for owner in owners
        ]

    def _routes(self) -> ReduceRoutes:
        comm, layout, itemsize = self._comm, self._layout, self._whole.element_size()
        links = comm.links
        ranges = map(layout.range, range(comm.group.world_size))
        sizes = {owner: (stop - start) * itemsize for owner, (start, stop) in enumerate(ranges)}
        shared = {owner for owner, size in sizes.items() if is_shared(size, links)}
        sent = {owner for owner, size in sizes.items() if size} - shared
        return ReduceRoutes.of(comm.group.rank, comm.topology, shared, sent)

    def start(self) -> None:
        comm, routes, pending = self._comm, self.routes, self._pending
        group, local, tag = comm.group, comm.local_ranks, self._tag
        own_group, ranks = group.process_group, group.global_ranks
        with group.monitor.naming_absentees():
            pending.reads = [local.read_from(source, tag) for source in routes.sources]
            if routes.read_by:
                to_readers = dict.fromkeys(routes.read_by, self._whole)
                comm.share(self._send, to_readers, tag, self._read)
            for sender, room in self._received.items():
                pending.works.append(dist.irecv(room, ranks[sender], group=own_group, tag=tag))
            for owner, part in self._direct:
                group.traffic.add(part)
                pending.works.append(dist.isend(part, ranks[owner], group=own_group, tag=tag))
        if self._relayed:
            for part in self._relayed.values():
                group.traffic.add(part)
            reads = list(pending.reads)
            pending.tasks.append(comm.relay(lambda: self._relay(reads)))

    @torch.no_grad()
    def _relay(self, reads: Sequence[SharedRead]) -> list[Any]:
        """Add up what this host contributes to owners on others, once it is here, and send it.

        By the relay thread, in the order of the collectives. Messages are told apart by their tags,
        so other than collectives they may be launched by any thread.
        """
        group, dtype = self._comm.group, self._whole.dtype
        for read in reads:
            read.arrive(group.monitor.patience)
        by_rank = {read.source: read.tensor(dtype) for read in reads}
        by_rank[group.rank] = self._whole
        works = []
        for owner, total in self._relayed.items():
            start, stop = self._layout.range(owner)
            add_up([by_rank[rank][start:stop] for rank in sorted(by_rank)], total)
            peer = group.global_ranks[owner]
            works.append(dist.isend(total, peer, group=group.process_group, tag=self._tag))
        return works

    def wait(self) -> None:
        self._pending.wait()

    def complete(self) -> None:
        # Of a local rank that sends its part, the memory is read for owners elsewhere only.
        of_rank = dict(self._contributions)
        dtype, (start, stop) = self._whole.dtype, self._own_range
        for read in self._pending.reads:
            if read.source not in of_rank:
                of_rank[read.source] = read.tensor(dtype)[start:stop]
        self._slot.add([of_rank[rank] for rank in self.routes.contributors])
        self.discard()

    def discard(self) -> None:
        for read in self._pending.reads:
            read.release()


def add_up(contributions: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """The sum, in this order, of what the ranks of a host contribute; ``total`` may be one of them.

    Narrow elements are rounded once.
    """
    for start in range(0, total.numel(), CACHED_ELEMENTS):
        parts = [each[start : start + CACHED_ELEMENTS] for each in contributions]
        target = total[start : start + CACHED_ELEMENTS]
        if target.dtype != parts[0].dtype:
            target.copy_(parts[0])
            for part in parts[1:]:
                target.add_(part)
        elif len(parts) == 2 and target.dtype.itemsize >= _WIDE:
            torch.add(*parts, out=target)
        else:
            dtype = target.dtype
            if dtype.itemsize < _WIDE:
                dtype = torch.promote_types(dtype, torch.float32)
            wide = parts[0].to(dtype, copy=True)
            for part in parts[1:]:
                wide.add_(part)
            target.copy_(wide)
