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
from typing import NamedTuple

import torch

from onecopy.comm.gloo.shared_memory import (
    NOT_COMING,
    Address,
    Inbox,
    MappedMemory,
    Outbox,
    SharedMemory,
    inbox_in,
    is_available,
    make_outboxes,
    memory_of,
)
from onecopy.comm.gloo.topology import Topology
from onecopy.comm.waiting import marking_interruptions

_AT_FIRST, _LATER = 0.05, 0.2  # seconds to wait before looking for what may have gone wrong
_LINGERING = 5.0  # seconds, at most, that an ending process waits for its readers
_ENDING = 0.5  # seconds that a process may take from losing its memory to being gone


@dataclass(slots=True, eq=False)
class SharedRead:
    """Data in the memory of another rank: a message says where it is, and then it can be read."""

    local_ranks: LocalRanks
    source: int
    message: tuple[int, int]  # its key in the mailbox
    address: Address = field(init=False)  # once it has arrived
    memory: MappedMemory = field(init=False)
    has_arrived: bool = False
    is_released: bool = False

    def arrive(self, patience: Callable[[], float]) -> None:
        """Wait until the data can be read."""
        if self.has_arrived:
            return
        self.address = self.local_ranks.find(self, patience)
        if self.address == NOT_COMING:
            raise RuntimeError(f"rank {self.source} has not received what it was to pass on")
        self.memory = self.local_ranks.map(self.source, self.address)
        self.has_arrived = True

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The data, in the memory of the other rank: not to be written to."""
        if not 0 <= self.address.start <= self.address.stop <= len(self.memory.data):
            raise RuntimeError(f"rank {self.source} has shared memory that it does not have")
        return self.memory.data[self.address.start : self.address.stop].view(dtype)

    def release(self) -> None:
        """It was read: its owner may write there again. Once, however often this is called."""
        if not self.is_released:
            self.memory.mark_read(self.local_ranks.rank, self.address.sequence)
            self.is_released = True


class Messages(NamedTuple):
    """Where the data is, for each of its readers."""

    tag: int
    addresses: Mapping[int, Address]  # by reader

    def of_failure(self) -> Messages:
        """To the same readers: the data will never come."""
        return Messages(self.tag, dict.fromkeys(self.addresses, NOT_COMING))


@dataclass(eq=False)
class LocalRanks:
    """The other ranks on this host, by their process."""

    rank: int
    topology: Topology  # of all ranks
    pids: Mapping[int, int] = field(default_factory=dict)
    _outboxes: Mapping[int, Outbox] = field(default_factory=dict)
    _inboxes: Mapping[int, Inbox] = field(default_factory=dict)
    _mapped: dict[tuple[int, int], MappedMemory] = field(default_factory=dict)
    # What was shared is kept until it was read, also if its owner has let go of it.
    _shared: set[SharedMemory] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.pids:
            weakref.finalize(self, _linger, self._shared, self.pids)

    def share(self, memory: SharedMemory, parts: Mapping[int, torch.Tensor], tag: int) -> Messages:
        """Messages to the readers, by rank, about which part of the memory is for them. ``post``
        sends them; the memory counts as shared from now on."""
        memory.share(list(parts))
        self._shared.add(memory)
        return Messages(tag, {reader: memory.address(part) for reader, part in parts.items()})

    def post(self, messages: Messages, patience: Callable[[], float]) -> None:
        """Send messages. Any thread may."""
        for reader, address in messages.addresses.items():
            post = functools.partial(self._outboxes[reader].post, messages.tag, address)
            if not post(0) and not self._wait(self._making_room(post), [reader], patience):
                raise RuntimeError(f"rank {reader} takes no more messages")

    def _making_room(self, post: Callable[[float], bool]) -> Callable[[float], bool]:
        """The reader may itself wait for room at this rank."""

        def posted(seconds: float) -> bool:
            for inbox in self._inboxes.values():
                inbox.make_room()
            return post(seconds)

        return posted

    def read_from(self, source: int, tag: int) -> SharedRead:
        """What the next ``share`` of that rank with this tag is about."""
        return SharedRead(self, source, self._inboxes[source].expect(tag))

    def find(self, read: SharedRead, patience: Callable[[], float]) -> Address:
        """Where the data is; waits for the message."""
        inbox = self._inboxes[read.source]
        has_come = functools.partial(inbox.has, read.message)
        if not has_come(0) and not self._wait(has_come, [read.source], patience):
            raise RuntimeError(f"rank {read.source} has not shared what it should")
        return inbox.take(read.message)

    def map(self, source: int, at: Address) -> MappedMemory:
        """The memory of another rank, mapped when it is met for the first time."""
        known = self._mapped.get((source, at.fd))
        if known is None or known.generation != at.generation:
            try:
                known = MappedMemory(memory_of(self.pids[source], at.fd), self.topology.world_size)
                if known.generation != at.generation:
                    raise OSError("other memory has its descriptor")
            except OSError as error:
                raise RuntimeError(f"the memory of rank {source} is gone") from error
            self._mapped[source, at.fd] = known
        return known

    def wait_until_read(self, memory: SharedMemory, patience: Callable[[], float]) -> None:
        """Until all readers have read what was shared before; at once, nearly always."""
        if not memory.wait_until_read(0):
            unread = memory.unread()
            if not self._wait(memory.wait_until_read, unread, patience):
                raise RuntimeError(f"ranks {unread} have not read what was shared with them")

    def _wait(
        self,
        is_done: Callable[[float], bool],
        ranks: Sequence[int],
        patience: Callable[[], float],
    ) -> bool:
        """Until it is done, or one of the ranks has ended, or the time is over. ``is_done`` waits
        so many seconds itself; ``patience``, in seconds, is asked for only if that takes long."""
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
        self._shared.difference_update([each for each in list(self._shared) if not each.unread()])

    def abandon(self) -> None:
        """Nobody will read what was shared."""
        self._shared.clear()


def _linger(shared: Iterable[SharedMemory], pids: Mapping[int, int]) -> None:
    """Memory that a reader has not mapped yet vanishes with the process, or with its group: give
    the reader a moment."""
    until = time.monotonic() + _LINGERING
    with contextlib.ExitStack() as stack:
        have_ended = None
        for memory in list(shared):
            while memory.unmapped() and time.monotonic() < until:
                have_ended = have_ended or _ends_of(pids.values(), stack)
                if have_ended():
                    return
                time.sleep(0.001)


# -------------------------------------------------------------------------- discovery


def find_local_ranks(
    rank: int, all_gather: Callable[[bytes], list[bytes]], world_size: int
) -> LocalRanks:
    """The ranks on this host. Collective: ``all_gather`` takes equally long payloads of all ranks.

    All ranks of a host are local ranks, or none: if one of them cannot read another's memory.
    """
    probe = _probe(world_size)
    host, fd = (os.urandom(16), -1) if probe is None else (probe.host, probe.memory.fd)
    found = all_gather(struct.pack(_PROCESS, host, os.getpid(), fd))
    hosts, pids, fds = zip(*(struct.unpack(_PROCESS, each) for each in found), strict=True)
    same = [other for other in range(world_size) if hosts[other] == host]
    with contextlib.ExitStack() as closing:
        outboxes, mailbox_fd = None, -1
        if probe is not None:
            with contextlib.suppress(OSError, RuntimeError):  # no such memory here
                mailbox_fd, outboxes = make_outboxes(len(same))
                closing.callback(os.close, mailbox_fd)
        reads_all = all(_can_read(pids[other], fds[other], world_size) for other in same)
        mailboxes = all_gather(struct.pack(_MAILBOX_FD, mailbox_fd if reads_all else -1))
        inboxes = _inboxes(
            same.index(rank), {r: (pids[r], mailboxes[r]) for r in same if r != rank}
        )
        # Collective also in that the descriptors stay open until all have looked.
        have_all = all_gather(bytes([outboxes is not None and inboxes is not None]))
    lacking = {hosts[other] for other in range(world_size) if have_all[other] == b"\0"}
    topology = Topology.by_name(
        [(each, other if each in lacking else -1) for other, each in enumerate(hosts)]
    )
    if outboxes is None or inboxes is None or host in lacking:
        return LocalRanks(rank, topology)
    by_rank = {other: outboxes[same.index(other)] for other in inboxes}
    return LocalRanks(rank, topology, {r: pids[r] for r in inboxes}, by_rank, inboxes)


def _inboxes(mine: int, mailboxes: Mapping[int, tuple[int, bytes]]) -> dict[int, Inbox] | None:
    """The mailboxes of the others to this rank, if all are there."""
    try:
        return {
            rank: inbox_in(memory_of(pid, *struct.unpack(_MAILBOX_FD, fd)), mine)
            for rank, (pid, fd) in mailboxes.items()
        }
    except (OSError, RuntimeError):
        return None


_PROCESS = "16sqq"  # of a rank: its host, its process, the file descriptor of its probe
_MAILBOX_FD = "q"  # the file descriptor of its mailboxes; -1 if it cannot read the others' memory
_SECRET = b"onecopy memory\0\0"


class _Probe(NamedTuple):
    """Memory by which others find out whether they can read it, and where this process is."""

    memory: SharedMemory
    host: bytes


def _probe(world_size: int) -> _Probe | None:
    if os.environ.get("ONECOPY_SHARED_MEMORY") == "0" or not is_available():
        return None
    try:
        memory = SharedMemory(len(_SECRET), world_size)
        memory.data.copy_(torch.frombuffer(bytearray(_SECRET), dtype=torch.uint8))
        return _Probe(memory, _host_id())
    except (OSError, RuntimeError):  # no such memory here, or a sandbox that hides where we are
        return None


def _can_read(pid: int, fd: int, world_size: int) -> bool:
    try:
        found = MappedMemory(memory_of(pid, fd), world_size).data
        os.close(os.pidfd_open(pid))
    except (OSError, RuntimeError):
        return False
    return bytes(found.tolist()) == _SECRET


def _host_id() -> bytes:
    """The same for processes that share a kernel and see each other's processes and network."""
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(repr((boot, *spaces)).encode()).digest()[:16]


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
