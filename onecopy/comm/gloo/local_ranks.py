"""Ranks on the same host, which read data in one another's memory.

gloo carries everything through TCP, also between two processes of one machine, where the kernel
then copies each byte twice and does the work of a network besides. Neighbours say *where* the data
is instead of sending it (``lending.py``).
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
    Desk,
    Inbox,
    MappedMemory,
    Outbox,
    SharedMemory,
    is_available,
    memory_of,
)
from onecopy.comm.gloo.topology import Topology
from onecopy.comm.waiting import marking_interruptions

_AT_FIRST, _LATER = 0.05, 0.2  # seconds to wait before looking for what may have gone wrong
_LINGERING = 5.0  # seconds, at most, that an ending process waits for its readers
_ENDING = 0.5  # seconds that a process may take from losing its memory to being gone


@dataclass(slots=True, eq=False)
class SharedRead:
    """Data that a neighbour lends: a letter says where it is, and then it can be read."""

    local_ranks: LocalRanks
    lender: int
    letter: tuple[int, int]  # by which it is found
    address: Address = field(init=False)  # once it has arrived
    memory: MappedMemory = field(init=False)
    has_arrived: bool = False
    is_given_back: bool = False

    def arrive(self, patience: Callable[[], float]) -> None:
        """Wait until the data can be read."""
        if self.has_arrived:
            return
        self.address = self.local_ranks.find(self, patience)
        if self.address == NOT_COMING:
            raise RuntimeError(f"rank {self.lender} has not received what it was to pass on")
        self.memory = self.local_ranks.map(self.lender, self.address)
        self.has_arrived = True

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The data, in the lender's memory: not to be written to."""
        if not 0 <= self.address.start <= self.address.stop <= len(self.memory.data):
            raise RuntimeError(f"rank {self.lender} has lent memory that it does not have")
        return self.memory.data[self.address.start : self.address.stop].view(dtype)

    def give_back(self) -> None:
        """It was read: the lender may write there again. Once, however often this is called."""
        if not self.is_given_back:
            self.memory.give_back(self.local_ranks.rank, self.address.ticket)
            self.is_given_back = True


class Messages(NamedTuple):
    """What lent memory is to be told of, to each of its readers."""

    tag: int
    addresses: Mapping[int, Address]  # by reader

    def of_failure(self) -> Messages:
        """To the same readers: it is not there, and never will be."""
        return Messages(self.tag, dict.fromkeys(self.addresses, NOT_COMING))


@dataclass(eq=False)
class LocalRanks:
    """The ranks on this host, by their process; this one is not among them."""

    rank: int
    hosts: Topology  # of all ranks
    pids: Mapping[int, int] = field(default_factory=dict)
    _outboxes: Mapping[int, Outbox] = field(default_factory=dict)
    _inboxes: Mapping[int, Inbox] = field(default_factory=dict)
    _borrowed: dict[tuple[int, int], MappedMemory] = field(default_factory=dict)
    # What was lent is kept until it was read, also if its owner has let go of it.
    _lent: set[SharedMemory] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.pids:
            weakref.finalize(self, _linger, self._lent, self.pids)

    def __contains__(self, rank: int) -> bool:
        return rank in self.pids

    def __len__(self) -> int:
        return len(self.pids)

    def lend(self, memory: SharedMemory, parts: Mapping[int, torch.Tensor], tag: int) -> Messages:
        """Which part of the memory is for the readers, by rank. They are told by ``write``; the
        memory counts as lent from now on."""
        memory.lend(list(parts))
        self._lent.add(memory)
        return Messages(tag, {reader: memory.address(part) for reader, part in parts.items()})

    def write(self, letters: Messages, patience: Callable[[], float]) -> None:
        """Tell the readers. Any thread may."""
        for reader, address in letters.addresses.items():
            write = functools.partial(self._outboxes[reader].write, letters.tag, address)
            if not write(0) and not self._wait(self._making_room(write), [reader], patience):
                raise RuntimeError(f"rank {reader} takes no more letters")

    def _making_room(self, write: Callable[[float], bool]) -> Callable[[float], bool]:
        """The reader may itself wait for room at this rank."""

        def written(seconds: float) -> bool:
            for inbox in self._inboxes.values():
                inbox.make_room()
            return write(seconds)

        return written

    def borrow(self, lender: int, tag: int) -> SharedRead:
        """What the lender's next ``lend`` with this tag will tell."""
        return SharedRead(self, lender, self._inboxes[lender].expect(tag))

    def find(self, shared_read: SharedRead, patience: Callable[[], float]) -> Address:
        """Where the data is; waits for the letter."""
        inbox = self._inboxes[shared_read.lender]
        has_come = functools.partial(inbox.has, shared_read.letter)
        if not has_come(0) and not self._wait(has_come, [shared_read.lender], patience):
            raise RuntimeError(f"rank {shared_read.lender} has not lent what it should")
        return inbox.take_out(shared_read.letter)

    def map(self, lender: int, at: Address) -> MappedMemory:
        """The memory of a neighbour, mapped when it is met for the first time."""
        known = self._borrowed.get((lender, at.fd))
        if known is None or known.generation != at.generation:
            try:
                known = MappedMemory(memory_of(self.pids[lender], at.fd), self.hosts.world_size)
                if known.generation != at.generation:
                    raise OSError("another one has its descriptor")
            except OSError as error:
                raise RuntimeError(f"the memory of rank {lender} is gone") from error
            self._borrowed[lender, at.fd] = known
        return known

    def wait_until_read(self, memory: SharedMemory, patience: Callable[[], float]) -> None:
        """Until all readers of what was lent before have read it; at once, nearly always."""
        if not memory.wait_until_read(0):
            unread = memory.unread()
            if not self._wait(memory.wait_until_read, unread, patience):
                raise RuntimeError(f"ranks {unread} have not read what was lent to them")

    def _wait(
        self,
        is_done: Callable[[float], bool],
        ranks: Sequence[int],
        patience: Callable[[], float],
    ) -> bool:
        """Until it is done, or one of the ranks has ended, or patience has. ``is_done`` waits so
        many seconds itself; ``patience``, in seconds, is asked for only if that takes long."""
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

    def forget(self) -> None:
        """Let go of what is no longer used; what is met again will be mapped again."""
        self._borrowed.clear()
        # A copy: an optimizer that is collected in the meantime forgets, too, in any thread.
        self._lent.difference_update([each for each in list(self._lent) if not each.unread()])

    def abandon(self) -> None:
        """Nobody will read what was lent."""
        self._lent.clear()


def _linger(lent: Iterable[SharedMemory], pids: Mapping[int, int]) -> None:
    """Memory that a reader has not mapped yet vanishes with the process, or with its group: give
    the reader a moment."""
    until = time.monotonic() + _LINGERING
    with contextlib.ExitStack() as stack:
        have_ended = None
        for memory in list(lent):
            while memory.unmapped() and time.monotonic() < until:
                have_ended = have_ended or _ends_of(pids.values(), stack)
                if have_ended():
                    return
                time.sleep(0.001)


# -------------------------------------------------------------------------- who is one


def find_local_ranks(
    rank: int, everybody: Callable[[bytes], list[bytes]], world_size: int
) -> LocalRanks:
    """Who is on this host. Collective: ``everybody`` gathers equally long payloads of all ranks.

    All ranks of a host are neighbours, or none: if one of them cannot read another's memory.
    """
    probe = _probe(world_size)
    host, fd = (os.urandom(16), -1) if probe is None else (probe.host, probe.memory.fd)
    said = everybody(struct.pack(_ABOUT, host, os.getpid(), fd))
    hosts, pids, fds = zip(*(struct.unpack(_ABOUT, each) for each in said), strict=True)
    same = [other for other in range(world_size) if hosts[other] == host]
    with contextlib.ExitStack() as closing:
        desk = _desk(len(same), closing) if probe is not None else None
        reads_all = all(_can_read(pids[other], fds[other], world_size) for other in same)
        desks = everybody(struct.pack(_DESK, desk.fd if desk is not None and reads_all else -1))
        boxes = _inboxes(same.index(rank), {r: (pids[r], desks[r]) for r in same if r != rank})
        # Collective also in that the desks stay open until all have looked.
        have_all = everybody(bytes([desk is not None and boxes is not None]))
    lacking = {hosts[other] for other in range(world_size) if have_all[other] == b"\0"}
    apart = [(each, other if each in lacking else -1) for other, each in enumerate(hosts)]
    found = Topology.by_name(apart)
    if desk is None or boxes is None or host in lacking:
        return LocalRanks(rank, found)
    outboxes = {other: desk.outboxes[same.index(other)] for other in boxes}
    return LocalRanks(rank, found, {r: pids[r] for r in boxes}, outboxes, boxes)


def _desk(boxes: int, closing: contextlib.ExitStack) -> Desk | None:
    try:
        desk = Desk.make(boxes)
    except (OSError, RuntimeError):  # no such memory here
        return None
    closing.callback(os.close, desk.fd)
    return desk


def _inboxes(mine: int, desks: Mapping[int, tuple[int, bytes]]) -> dict[int, Inbox] | None:
    """This rank's boxes at the others' desks, if all are there."""
    try:
        return {
            rank: Desk.inbox(memory_of(pid, *struct.unpack(_DESK, desk)), mine)
            for rank, (pid, desk) in desks.items()
        }
    except (OSError, RuntimeError):
        return None


_ABOUT = "16sqq"  # a rank: its host, its process, the file descriptor of its probe
_DESK = "q"  # the file descriptor of its desk; -1 if it cannot read the others' memory
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
