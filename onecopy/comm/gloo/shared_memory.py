"""Memory that other processes map, and the mailboxes and semaphores that announce it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

_LINE = 64  # bytes of a line of the cache, and more than a sem_t has on any system
_libc = ctypes.CDLL(None, use_errno=True)
# It takes the monotonic clock, which is never set back. Old C libraries lack it.
_sem_clockwait = getattr(_libc, "sem_clockwait", None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphore:
    """At the beginning of ``memory``; initialised by one process, used by several."""

    def __init__(self, memory: torch.Tensor, value: int | None = None) -> None:
        """``value``: with which it is initialised; None if another process has done that."""
        self._memory = memory  # must not be unmapped
        self._at = ctypes.c_void_p(memory.data_ptr())
        if value is not None and _libc.sem_init(self._at, 1, value) != 0:
            raise OSError(ctypes.get_errno(), "this system has no semaphores between processes")

    def post(self) -> None:
        _libc.sem_post(self._at)

    def take(self) -> bool:
        """Decrement it, if that is possible at once."""
        return bool(_libc.sem_trywait(self._at) == 0)

    def wait(self, seconds: float) -> bool:
        """Decrement it within so many seconds. A signal ends the wait: call it in a loop."""
        if self.take():
            return True
        until = (time.time() if _sem_clockwait is None else time.monotonic()) + seconds
        moment = ctypes.byref(_Timespec(int(until), int(until % 1 * 1e9)))
        if _sem_clockwait is None:
            done = _libc.sem_timedwait(self._at, moment)
        else:
            done = _sem_clockwait(self._at, time.CLOCK_MONOTONIC, moment)
        if done != 0 and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "waiting for a semaphore failed")
        return bool(done == 0)


class Address(NamedTuple):
    """Where shared data is."""

    fd: int  # of the memory, in the process of its owner
    generation: int  # of the memory: another one may have had the descriptor before
    start: int  # in bytes
    stop: int
    sequence: int  # marked when the data was read


NOT_COMING = Address(-1, 0, 0, 0, 0)  # what was to be shared will never come


# -------------------------------------------------------------------------- memory

_FILE_NAME = "onecopy"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0

# Distinct from those of all other processes.
_generations = itertools.count(int.from_bytes(os.urandom(7), "little"))


def is_available() -> bool:
    """Whether this system has such memory, and reports when a process has ended."""
    in_os = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open") and bool(_SEALS)
    return in_os and hasattr(_libc, "sem_init") and hasattr(_libc, "sem_timedwait")


def memory_of(pid: int, fd: int) -> torch.Tensor:
    """Anonymous memory of another process, mapped. OSError if the file is anything else."""
    path = f"/proc/{pid}/fd/{fd}"
    _require_ours(path)  # before it is opened: that alone can have effects
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _require_ours(f"/proc/self/fd/{own}")
        if fcntl.fcntl(own, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError(f"{path} could shrink while it is read")
        return _mapped(own, os.fstat(own).st_size)
    finally:
        os.close(own)


def _require_ours(path: str) -> None:
    if not os.readlink(path).startswith(f"/memfd:{_FILE_NAME} "):
        raise OSError(f"{path} is not memory that was shared")


@torch.inference_mode(False)  # here and below: it will be written to in other modes, too
def _mapped(fd: int, size: int) -> torch.Tensor:
    path = f"/proc/self/fd/{fd}"
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu")


class SharedMemory:
    """Memory of this process that local ranks can map: a file without a name, which cannot change
    its size. It starts with zeros."""

    @torch.inference_mode(False)
    def __init__(self, numbytes: int, world_size: int) -> None:
        self.fd = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Not when the process ends: a reader may be about to open it, and the kernel closes it.
        weakref.finalize(self, os.close, self.fd).atexit = False
        size = _head(world_size) + numbytes
        os.posix_fallocate(self.fd, 0, size)  # an error now, instead of a signal when it is used
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = _mapped(self.fd, size)
        self._was_read = Semaphore(memory, 0)
        self._words = _words(memory, world_size)
        self.data = memory[_head(world_size) :]
        self.generation = self._words[0] = next(_generations)
        self._sequence = 0
        self._readers: Sequence[int] = ()
        self._awaited = 0  # times that a reader has yet to post

    def share(self, part: torch.Tensor, readers: Sequence[int]) -> Address:
        """Where the readers find a part of the data. They mark when they have read it."""
        self._sequence += 1
        self._readers = readers
        self._awaited += len(readers)
        start = part.data_ptr() - self.data.data_ptr()
        return Address(self.fd, self.generation, start, start + part.nbytes, self._sequence)

    def wait_until_read(self, seconds: float) -> bool:
        """Whether nobody reads what was shared before; then the memory may be filled again."""
        while self._awaited and self._was_read.wait(seconds):
            self._awaited -= 1
        return not self._awaited

    def unread(self) -> dict[int, int]:
        """The readers that have not read what was shared last, each with the number of what it has
        read: 0 if it has never mapped this memory."""
        read = self._words[1:].tolist() if self._readers else []
        return {reader: read[reader] for reader in self._readers if read[reader] < self._sequence}


class MappedMemory:
    """Memory of another process, mapped. OSError if it is not there, or has another generation."""

    @torch.inference_mode(False)
    def __init__(self, pid: int, fd: int, world_size: int, generation: int | None = None) -> None:
        memory = memory_of(pid, fd)
        if len(memory) < _head(world_size):
            raise OSError("that memory is too small to have been shared")
        self._was_read = Semaphore(memory)
        self._words = _words(memory, world_size)
        self.data = memory[_head(world_size) :]
        self.generation = int(self._words[0])
        if generation not in (None, self.generation):
            raise OSError("other memory has its descriptor")

    def mark_read(self, rank: int, sequence: int) -> None:
        """This rank has read what was shared with that number."""
        self._words[1 + rank] = sequence
        self._was_read.post()


def _words(memory: torch.Tensor, world_size: int) -> torch.Tensor:
    """Behind the semaphore: the generation, and by rank the number of what it has read last."""
    return memory[_LINE : _LINE + 8 * (1 + world_size)].view(torch.int64)


def _head(world_size: int) -> int:
    """The bytes before the data."""
    return _LINE + -(-8 * (1 + world_size) // _LINE) * _LINE


# -------------------------------------------------------------------------- mailboxes

_MESSAGES = 1024  # in a mailbox: more than the buckets of a few optimizers that are in flight
_Ring = (ctypes.c_int64 * 6) * _MESSAGES  # each is a tag and an address
MAILBOX_BYTES = 2 * _LINE + ctypes.sizeof(_Ring)


class Mailbox:
    """Messages from one rank to another, in a ring: one of them posts, the other receives.

    Messages of one tag are matched in the order in which they were posted, whichever is asked for
    first.
    """

    def __init__(self, memory: torch.Tensor, number: int, posts: bool) -> None:
        """It is that of a number in the memory, which belongs to the rank that posts."""
        memory = memory[number * MAILBOX_BYTES : (number + 1) * MAILBOX_BYTES]
        self._room = Semaphore(memory, _MESSAGES if posts else None)
        self._posted = Semaphore(memory[_LINE:], 0 if posts else None)
        self._ring = _Ring.from_address(memory.data_ptr() + 2 * _LINE)
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # among the threads of this process
        self._expected: Counter[int] = Counter()  # by tag
        self._received: Counter[int] = Counter()
        self._unclaimed: dict[tuple[int, int], Address] = {}  # by tag and number

    def post(self, tag: int, address: Address, seconds: float) -> bool:
        """Unless there is no room within a time."""
        if not self._room.wait(seconds):
            return False
        with self._lock:
            self._ring[next(self._numbers) % _MESSAGES][:] = [tag, *address]
            self._posted.post()
        return True

    def expect(self, tag: int) -> tuple[int, int]:
        """The key of the next message with this tag."""
        self._expected[tag] += 1
        return tag, self._expected[tag]

    def has(self, key: tuple[int, int], seconds: float) -> bool:
        """Whether a message comes within a time."""
        while key not in self._unclaimed and self._posted.wait(seconds):
            self._receive()
        return key in self._unclaimed

    def take(self, key: tuple[int, int]) -> Address:
        """A message that is here."""
        return self._unclaimed.pop(key)

    def make_room(self) -> None:
        """Receive what is there: the sender may wait for that."""
        while self._posted.take():
            self._receive()

    def _receive(self) -> None:
        with self._lock:
            tag, *address = self._ring[next(self._numbers) % _MESSAGES]
            self._received[tag] += 1
            self._unclaimed[tag, self._received[tag]] = Address(*address)
        self._room.post()
