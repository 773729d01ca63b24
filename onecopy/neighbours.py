"""Ranks on the same host, and memory that they can read of one another.

gloo carries everything through TCP, also between two processes of one machine, where the kernel
then copies each byte twice and does the work of a network besides. Neighbours send *where* the data
is instead of the data::

    lender    fill memory -- "it is at this address" --> reader    read it in place, or copy it
              wait until it was read, before it is filled again  <-- note the ticket as read

The memory is anonymous (``memfd``): it has no name that others could guess, nothing is left behind
when a process is killed, and a reader's mapping stays valid when the lender is gone. It begins with
one number for each rank: the last ticket whose data that rank has read. A reader opens the memory
through ``/proc``, which the kernel admits for processes of the same user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import select
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

# Below this a message through gloo costs less than the two that lending takes.
WORTH_LENDING = 64 * 1024
_ALIGNMENT = 64
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0

_generations = itertools.count(1)


def worth_lending(numbytes: int) -> bool:
    return numbytes >= WORTH_LENDING


class Address(NamedTuple):
    """Where lent data is. Travels as a message of numbers."""

    fd: int  # of the memory, in the lender's process
    generation: int  # of the memory: others may have had the descriptor before
    start: int  # in bytes
    stop: int
    ticket: int  # to be noted when it was read


class SharedMemory:
    """Memory of this process that neighbours can map. It starts with zeros."""

    def __init__(self, numbytes: int, world_size: int) -> None:
        head = _rounded_up(8 * world_size)
        size = head + max(numbytes, 1)
        self._fd = os.memfd_create("onecopy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = _mapped(f"/proc/self/fd/{self._fd}", size)
        self._read = memory[: 8 * world_size].view(torch.int64)  # the last ticket, by reader
        self.data = memory[head : head + numbytes]
        self._generation = next(_generations)
        self._ticket = 0
        self._readers: Sequence[int] = ()

    @property
    def fd(self) -> int:
        return self._fd

    def lend(self, readers: Sequence[int]) -> None:
        """The data is complete; the readers will note when they have read it."""
        self._ticket += 1
        self._readers = readers

    def address(self, data: torch.Tensor) -> Address:
        """Of a part of the data, for a reader."""
        start = data.data_ptr() - self.data.data_ptr()
        return Address(self._fd, self._generation, start, start + data.nbytes, self._ticket)

    def unread(self) -> list[int]:
        """The readers that have not read what was lent last."""
        if not self._readers:
            return []
        read = self._read.tolist()
        return [reader for reader in self._readers if read[reader] < self._ticket]


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Memory of a neighbour, mapped."""

    generation: int
    read: torch.Tensor
    data: torch.Tensor


@dataclass(slots=True, eq=False)
class Loan:
    """Data that a neighbour lends: where it is arrives as a message, and then it can be read."""

    neighbourhood: Neighbourhood
    lender: int
    message: torch.Tensor = field(default_factory=lambda: torch.empty(5, dtype=torch.int64))

    def address(self) -> Address:
        """Once the message is here."""
        return Address(*self.message.tolist())

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The data, in the lender's memory: not to be written to."""
        at = self.address()
        return self.memory().data[at.start : at.stop].view(dtype)

    def give_back(self) -> None:
        """It was read: the lender may write there again."""
        self.memory().read[self.neighbourhood.rank] = self.address().ticket

    def memory(self) -> Borrowed:
        at = self.address()
        return self.neighbourhood.borrow(self.lender, at.fd, at.generation)


@dataclass(slots=True, eq=False)
class Neighbourhood:
    """The ranks on this host, by their process; this one is not among them."""

    rank: int
    world_size: int
    pids: dict[int, int] = field(default_factory=dict)
    _borrowed: dict[tuple[int, int], Borrowed] = field(default_factory=dict)
    # What was lent is kept until it was read, also if its owner has let go of it.
    _lent: set[SharedMemory] = field(default_factory=set)

    def __contains__(self, rank: int) -> bool:
        return rank in self.pids

    def __len__(self) -> int:
        return len(self.pids)

    def borrow(self, lender: int, fd: int, generation: int) -> Borrowed:
        """The memory of a neighbour, mapped when it is met for the first time."""
        known = self._borrowed.get((lender, fd))
        if known is None or known.generation != generation:
            try:
                known = _map(self.pids[lender], fd, generation, self.world_size)
            except OSError as error:
                raise RuntimeError(f"the memory of rank {lender} is gone") from error
            self._borrowed[lender, fd] = known
        return known

    def lend(self, memory: SharedMemory, readers: Sequence[int]) -> None:
        memory.lend(readers)
        self._lent.add(memory)

    def forget(self) -> None:
        """Let go of what is no longer used; what is met again will be mapped again."""
        self._borrowed.clear()
        self._lent = {memory for memory in self._lent if memory.unread()}

    def wait_until_read(self, memory: SharedMemory, patience: float) -> None:
        """Until all readers of what was lent last have read it; at once, nearly always."""
        unread = memory.unread()
        if not unread:
            return
        deadline, nap = time.monotonic() + patience, _SHORTEST_NAP
        with contextlib.ExitStack() as stack:
            ended = _ends_of([self.pids[rank] for rank in unread], stack)
            while unread:
                if ended() or time.monotonic() > deadline:
                    raise RuntimeError(f"ranks {unread} have not read what was lent to them")
                time.sleep(nap)
                nap = min(1.5 * nap, _LONGEST_NAP)
                unread = memory.unread()


def find(rank: int, everybody: Callable[[bytes], list[bytes]], world_size: int) -> Neighbourhood:
    """Who is on this host. Collective: ``everybody`` gathers equally long payloads of all ranks.

    All ranks of a host are neighbours, or none: if one of them cannot read another's memory.
    """
    probe = _probe(world_size)
    host, fd = (os.urandom(16), -1) if probe is None else (_host(), probe.fd)
    said = everybody(struct.pack(_ABOUT, host, os.getpid(), fd))
    hosts, pids, fds = zip(*(struct.unpack(_ABOUT, each) for each in said), strict=True)
    same = [other for other in range(world_size) if hosts[other] == host]
    reads_all = all(_can_read(pids[other], fds[other], world_size) for other in same)
    can_read = everybody(bytes([reads_all]))
    if any(can_read[other] == b"\0" for other in same):
        same = [rank]
    return Neighbourhood(rank, world_size, {r: pids[r] for r in same if r != rank})


_ABOUT = "16sqq"  # a rank: its host, its process, the file descriptor of its probe
_SECRET = b"onecopy memory\0\0"


def _probe(world_size: int) -> SharedMemory | None:
    """Memory by which others find out whether they can read it."""
    if os.environ.get("ONECOPY_SHARED_MEMORY") == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        memory = SharedMemory(len(_SECRET), world_size)
    except (OSError, RuntimeError):  # no such memory here
        return None
    memory.data.copy_(torch.frombuffer(bytearray(_SECRET), dtype=torch.uint8))
    return memory


def _can_read(pid: int, fd: int, world_size: int) -> bool:
    try:
        found = _map(pid, fd, 0, world_size).data
        os.close(os.pidfd_open(pid))
    except (OSError, RuntimeError):
        return False
    return bytes(found.tolist()) == _SECRET


def _host() -> bytes:
    """The same for processes that share a kernel and see each other's processes and network."""
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(repr((boot, *spaces)).encode()).digest()[:16]


def _map(pid: int, fd: int, generation: int, world_size: int) -> Borrowed:
    path = f"/proc/{pid}/fd/{fd}"
    memory = _mapped(path, os.stat(path).st_size)
    head = _rounded_up(8 * world_size)
    return Borrowed(generation, memory[: 8 * world_size].view(torch.int64), memory[head:])


def _mapped(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


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


def _rounded_up(numbytes: int) -> int:
    return -(-numbytes // _ALIGNMENT) * _ALIGNMENT
