"""Ranks on the same host, which read data in one another's memory.

gloo carries everything through TCP, also between two processes of one machine: the kernel then
copies each byte twice and does the work of a network besides. Local ranks post *where* the data is,
in a mailbox, instead of sending it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import select
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from onecopy.comm.gloo.shared_memory import (
    MAILBOX_BYTES,
    NOT_COMING,
    Address,
    Mailbox,
    MappedMemory,
    SharedMemory,
    is_available,
)
from onecopy.comm.gloo.topology import Topology
from onecopy.comm.group import RankGroup
from onecopy.comm.waiting import marking_interruptions

_AT_FIRST, _LATER = 0.05, 0.2  # seconds to wait before looking for what may have gone wrong
_LINGERING = 5.0  # seconds, at most, that an ending process waits for its readers
_ENDING = 0.5  # seconds that a process may take from losing its memory to being gone

# Tells how many seconds to wait for another rank. Asked for only if that takes long.
Patience = Callable[[], float]


@dataclass(slots=True, eq=False)
class SharedRead:
    """Data in the memory of another rank: a message says where it is, and then it can be read."""

    local_ranks: LocalRanks
    source: int
    message: tuple[int, int]  # its key in the mailbox
    address: Address = NOT_COMING  # until it has arrived
    memory: MappedMemory | None = None
    is_released: bool = False

    def arrive(self, patience: Patience) -> None:
        """Wait until the data can be read."""
        if self.memory is not None:
            return
        local, source = self.local_ranks, self.source
        inbox = local.inboxes[source]
        if not local.wait(functools.partial(inbox.has, self.message), [source], patience):
            raise RuntimeError(f"rank {source} has not shared what it should")
        self.address = inbox.take(self.message)
        if self.address == NOT_COMING:
            raise RuntimeError(f"rank {source} has not received what it was to pass on")
        self.memory = local.map(source, self.address)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The data, in the memory of the other rank: not to be written to."""
        assert self.memory is not None
        start, stop = self.address.start, self.address.stop
        if not 0 <= start <= stop <= len(self.memory.data):
            raise RuntimeError(f"rank {self.source} has shared memory that it does not have")
        return self.memory.data[start:stop].view(dtype)

    def release(self) -> None:
        """It was read: its owner may write there again. Once, however often this is called."""
        if not self.is_released:
            assert self.memory is not None
            self.memory.mark_read(self.local_ranks.rank, self.address.sequence)
            self.is_released = True


@dataclass(eq=False)
class LocalRanks:
    """The other ranks on this host."""

    rank: int
    topology: Topology  # of all ranks
    pids: Mapping[int, int] = field(default_factory=dict)
    outboxes: Mapping[int, Mailbox] = field(default_factory=dict)
    inboxes: Mapping[int, Mailbox] = field(default_factory=dict)
    # What was shared is kept until it was read, also if its owner has let go of it.
    shared: set[SharedMemory] = field(default_factory=set)
    _mapped: dict[tuple[int, int], MappedMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pids:
            weakref.finalize(self, _linger, self.shared, self.pids)

    def share(self, memory: SharedMemory, part: torch.Tensor, readers: Sequence[int]) -> Address:
        """Where the readers will find a part of the memory, which ``post`` tells them. The memory
        counts as shared from now on."""
        address = memory.share(part, readers)
        self.shared.add(memory)
        return address

    def post(self, readers: Iterable[int], tag: int, address: Address, patience: Patience) -> None:
        """Send a message to each reader. Any thread may."""
        for reader in readers:
            post = functools.partial(self._post, reader, tag, address)
            if not self.wait(post, [reader], patience):
                raise RuntimeError(f"rank {reader} takes no more messages")

    def _post(self, reader: int, tag: int, address: Address, seconds: float) -> bool:
        if seconds:  # there was no room: the reader may itself wait for room at this rank
            for inbox in self.inboxes.values():
                inbox.make_room()
        return self.outboxes[reader].post(tag, address, seconds)

    def read_from(self, source: int, tag: int) -> SharedRead:
        """What the next message of that rank with this tag is about."""
        return SharedRead(self, source, self.inboxes[source].expect(tag))

    def map(self, source: int, at: Address) -> MappedMemory:
        """The memory of another rank, mapped when it is met for the first time."""
        known = self._mapped.get((source, at.fd))
        if known is None or known.generation != at.generation:
            try:
                known = MappedMemory(
                    self.pids[source], at.fd, self.topology.world_size, at.generation
                )
            except OSError as error:
                raise RuntimeError(f"the memory of rank {source} is gone") from error
            self._mapped[source, at.fd] = known
        return known

    def wait_until_read(self, memory: SharedMemory, patience: Patience) -> None:
        """Until all readers have read what was shared before; at once, nearly always."""
        if not memory.wait_until_read(0):
            unread = list(memory.unread())
            if not self.wait(memory.wait_until_read, unread, patience):
                raise RuntimeError(f"ranks {unread} have not read what was shared with them")

    def wait(
        self, is_done: Callable[[float], bool], ranks: Sequence[int], patience: Patience
    ) -> bool:
        """Until it is done, or one of the ranks has ended, or the time is over. ``is_done`` waits
        so many seconds itself."""
        if is_done(0):
            return True
        with marking_interruptions(), contextlib.ExitStack() as stack:
            if is_done(_AT_FIRST):
                return True
            deadline = time.monotonic() + patience()
            have_ended = _ends_of([self.pids[rank] for rank in ranks], stack)
            while not is_done(_LATER):
                if have_ended() or time.monotonic() > deadline:
                    return is_done(0)  # what they did before they ended counts
        return True

    def ended(self) -> list[int]:
        """The ranks of this host whose processes are gone. To be asked when something has failed:
        what a process had is gone a moment before the process itself, so it is waited for."""
        until = time.monotonic() + _ENDING
        with contextlib.ExitStack() as stack:
            ends = {rank: _ends_of([pid], stack) for rank, pid in self.pids.items()}
            while True:
                found = [rank for rank, has_ended in ends.items() if has_ended()]
                if found and until:
                    until = 0.0  # those that ended with it are given another moment
                elif found or not ends or time.monotonic() > until:
                    return found
                time.sleep(0.05)

    def release_unused(self) -> None:
        """Let go of what is no longer used; what is met again will be mapped again."""
        self._mapped.clear()
        # A copy: an optimizer that is collected in the meantime does the same, in any thread.
        self.shared.difference_update([each for each in list(self.shared) if not each.unread()])


def _linger(shared: Iterable[SharedMemory], pids: Mapping[int, int]) -> None:
    """Memory that a reader has not mapped yet vanishes with the process, or with its group: give
    the reader a moment."""
    until = time.monotonic() + _LINGERING
    with contextlib.ExitStack() as stack:
        have_ended = None
        for memory in list(shared):
            while 0 in memory.unread().values() and time.monotonic() < until:
                have_ended = have_ended or _ends_of(pids.values(), stack)
                if have_ended():
                    return
                time.sleep(0.001)


def _ends_of(pids: Iterable[int], stack: contextlib.ExitStack) -> Callable[[], bool]:
    """Whether one of these processes has ended; also if nobody has taken note of it yet."""
    watch = select.poll()
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno == errno.ESRCH:
                return lambda: True
            raise
        stack.callback(os.close, fd)
        watch.register(fd, select.POLLIN)
    return lambda: bool(watch.poll(0))


# -------------------------------------------------------------------------- discovery

_PROCESS = struct.Struct("3q")  # of a rank; the descriptor and the generation of its mailboxes


def find_local_ranks(group: RankGroup) -> LocalRanks:
    """The ranks on this host. Collective.

    All ranks of a host are local ranks, or none: if one of them cannot read another's memory.
    """
    rank, world_size, all_gather = group.rank, group.world_size, group.all_gather_bytes
    host = os.urandom(16)  # of this rank alone
    if os.environ.get("ONECOPY_SHARED_MEMORY") != "0" and is_available():
        with contextlib.suppress(OSError):  # a sandbox hides where we are
            host = _host_id()
    hosts = all_gather(host)
    local = [other for other in range(world_size) if hosts[other] == host]
    shared, mine, outboxes = None, (-1, 0), {}
    if len(local) > 1:
        with contextlib.suppress(OSError, RuntimeError):  # no such memory here
            shared = SharedMemory(len(local) * MAILBOX_BYTES, world_size)
            outboxes = {r: Mailbox(shared.data, local.index(r), posts=True) for r in local}
            mine = shared.fd, shared.generation
    processes = list(map(_PROCESS.unpack, all_gather(_PROCESS.pack(os.getpid(), *mine))))
    others = {other: processes[other] for other in local if other != rank}
    inboxes = _inboxes(local.index(rank), others, world_size) if outboxes else None
    # Collective also in that the memory stays open until all have looked.
    have_all = all_gather(bytes([bool(inboxes)]))
    lacking = {hosts[other] for other in range(world_size) if have_all[other] == b"\0"}
    topology = Topology.by_name(
        [(each, other if each in lacking else -1) for other, each in enumerate(hosts)]
    )
    if not inboxes or host in lacking:
        return LocalRanks(rank, topology)
    pids = {other: pid for other, (pid, *_) in others.items()}
    return LocalRanks(rank, topology, pids, outboxes, inboxes)


def _inboxes(
    mine: int, processes: Mapping[int, tuple[int, int, int]], world_size: int
) -> dict[int, Mailbox] | None:
    """The mailboxes of the others to this rank, if all are there."""
    try:
        found = {}
        for rank, (pid, fd, generation) in processes.items():
            os.close(os.pidfd_open(pid))
            memory = MappedMemory(pid, fd, world_size, generation)
            found[rank] = Mailbox(memory.data, mine, posts=False)
        return found
    except (OSError, RuntimeError):
        return None


def _host_id() -> bytes:
    """The same for processes that share a kernel and see each other's processes and network."""
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(repr((boot, *spaces)).encode()).digest()[:16]
