"""Memory that other processes map, and the mailboxes and semaphores that announce it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

SEMAPHORE_BYTES = 64  # more than a sem_t has on any system, and a line of the cache

_libc = ctypes.CDLL(None, use_errno=True)
_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def are_available() -> bool:
    return hasattr(_libc, "sem_init") and hasattr(_libc, "sem_timedwait")


class Semaphore:
    """At the beginning of ``memory``; initialised by one process, used by several."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory  # must not be unmapped
        self._at = ctypes.c_void_p(memory.data_ptr())

    @classmethod
    def make(cls, memory: torch.Tensor, value: int = 0) -> Semaphore:
        made = cls(memory)
        if _libc.sem_init(made._at, 1, value) != 0:
            raise OSError(ctypes.get_errno(), "this system has no semaphores between processes")
        return made

    def post(self) -> None:
        _libc.sem_post(self._at)

    def take(self) -> bool:
        """Decrement it, if that is possible at once."""
        return bool(_libc.sem_trywait(self._at) == 0)

    def wait(self, seconds: float) -> bool:
        """Decrement it within so many seconds. A signal ends the wait: call it in a loop."""
        if self.take():
            return True
        if _sem_clockwait is not None:
            until = _timespec(time.monotonic() + seconds)
            done = _sem_clockwait(self._at, _CLOCK_MONOTONIC, ctypes.byref(until))
        else:
            until = _timespec(time.time() + seconds)
            done = _libc.sem_timedwait(self._at, ctypes.byref(until))
        if done != 0 and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "waiting for a semaphore failed")
        return bool(done == 0)


# It takes the monotonic clock, which is never set back. Old C libraries lack it.
_sem_clockwait = getattr(_libc, "sem_clockwait", None)


def _timespec(moment: float) -> _Timespec:
    return _Timespec(int(moment), int(moment % 1 * 1e9))


_ALIGNMENT = 64
_FILE_NAME = "onecopy"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0

# Distinct from those of all other processes.
_generations = itertools.count(int.from_bytes(os.urandom(7), "little"))


class Address(NamedTuple):
    """Where shared data is."""

    fd: int  # of the memory, in the process of its owner
    generation: int  # of the memory: another one may have had the descriptor before
    start: int  # in bytes
    stop: int
    sequence: int  # marked when the data was read


NOT_COMING = Address(-1, 0, 0, 0, 0)  # what was to be shared will never come


# -------------------------------------------------------------------------- memory


def is_available() -> bool:
    """Whether this system has such memory, and reports when a process has ended."""
    functions = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    return functions and bool(_SEALS) and hasattr(fcntl, "F_ADD_SEALS") and are_available()


def anonymous_memory(numbytes: int) -> tuple[int, torch.Tensor]:
    """A file without a name, which cannot change its size, and all of it, mapped."""
    fd = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, numbytes)  # an error now, instead of a signal when it is used
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, _mapped(f"/proc/self/fd/{fd}", numbytes)
    except BaseException:
        os.close(fd)
        raise


def memory_of(pid: int, fd: int) -> torch.Tensor:
    """Anonymous memory of another process, mapped. OSError if the file is anything else."""
    path = f"/proc/{pid}/fd/{fd}"
    _require_ours(path)  # before it is opened: that alone can have effects
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _require_ours(f"/proc/self/fd/{own}")
        if fcntl.fcntl(own, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError(f"{path} could shrink while it is read")
        return _mapped(f"/proc/self/fd/{own}", os.fstat(own).st_size)
    finally:
        os.close(own)


def _require_ours(path: str) -> None:
    if not os.readlink(path).startswith(f"/memfd:{_FILE_NAME} "):
        raise OSError(f"{path} is not memory that was shared")


@torch.inference_mode(False)  # here and below: it will be written to in other modes, too
def _mapped(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu")


class SharedMemory:
    """Memory of this process that local ranks can map. It starts with zeros."""

    @torch.inference_mode(False)
    def __init__(self, numbytes: int, world_size: int) -> None:
        head = _head(world_size)
        self.fd, memory = anonymous_memory(head + max(numbytes, 1))
        # Not when the process ends: a reader may be about to open it, and the kernel closes it.
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._was_read = Semaphore.make(memory)
        self._read = _sequences(memory, world_size)
        self.data = memory[head : head + numbytes]
        self._generation = next(_generations)
        _generation_in(memory).fill_(self._generation)
        self._sequence = 0
        self._readers: Sequence[int] = ()
        self._awaited = 0  # times that a reader has yet to post

    def share(self, readers: Sequence[int]) -> None:
        """The data is complete; the readers mark when they have read it."""
        self._sequence += 1
        self._readers = readers
        self._awaited += len(readers)

    def address(self, data: torch.Tensor) -> Address:
        """Of a part of the data, for a reader."""
        start = data.data_ptr() - self.data.data_ptr()
        return Address(self.fd, self._generation, start, start + data.nbytes, self._sequence)

    def wait_until_read(self, seconds: float) -> bool:
        """Whether nobody reads what was shared before; then the memory may be filled again."""
        while self._awaited and self._was_read.wait(seconds):
            self._awaited -= 1
        return not self._awaited

    def unread(self) -> list[int]:
        """The readers that have not read what was shared last."""
        if not self._readers:
            return []
        read = self._read.tolist()
        return [reader for reader in self._readers if read[reader] < self._sequence]

    def unmapped(self) -> list[int]:
        """The readers that have never read anything here, and have to."""
        read = self._read.tolist()
        return [reader for reader in self.unread() if not read[reader]]


class MappedMemory:
    """Memory of another process, mapped."""

    @torch.inference_mode(False)
    def __init__(self, memory: torch.Tensor, world_size: int) -> None:
        if len(memory) < _head(world_size):
            raise OSError("that memory is too small to have been shared")
        self.generation = int(_generation_in(memory))
        self.data = memory[_head(world_size) :]
        self._was_read = Semaphore(memory)
        self._read = _sequences(memory, world_size)

    def mark_read(self, rank: int, sequence: int) -> None:
        """This rank has read what was shared with that number."""
        self._read[rank] = sequence
        self._was_read.post()


_SEQUENCES = SEMAPHORE_BYTES + _ALIGNMENT  # where they begin


def _head(world_size: int) -> int:
    return _SEQUENCES + -(-8 * world_size // _ALIGNMENT) * _ALIGNMENT


def _generation_in(memory: torch.Tensor) -> torch.Tensor:
    return memory[SEMAPHORE_BYTES : SEMAPHORE_BYTES + 8].view(torch.int64)


def _sequences(memory: torch.Tensor, world_size: int) -> torch.Tensor:
    """By rank, the number of what it has read last."""
    return memory[_SEQUENCES : _SEQUENCES + 8 * world_size].view(torch.int64)


# -------------------------------------------------------------------------- mailboxes

_MESSAGE = struct.Struct("6q")  # a tag and an address
_MESSAGES = 1024  # in a mailbox: more than the buckets of a few optimizers that are in flight
_MAILBOX = 2 * SEMAPHORE_BYTES + _MESSAGES * _MESSAGE.size


class _Mailbox:
    """Messages from one rank to another, in a ring."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._room, self._posted = memory[:SEMAPHORE_BYTES], memory[SEMAPHORE_BYTES:]
        self._ring = (ctypes.c_char * (_MESSAGES * _MESSAGE.size)).from_address(
            memory.data_ptr() + 2 * SEMAPHORE_BYTES
        )
        self._next = 0
        self._lock = threading.Lock()

    def _next_offset(self) -> int:
        """Where the next message is. With the lock, by threads of this process."""
        offset = self._next % _MESSAGES * _MESSAGE.size
        self._next += 1
        return offset


class Outbox(_Mailbox):
    """What this rank posts to another."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self._free = Semaphore.make(self._room, _MESSAGES)
        self._full = Semaphore.make(self._posted)

    def post(self, tag: int, address: Address, seconds: float) -> bool:
        """Unless there is no room within a time."""
        if not self._free.wait(seconds):
            return False
        with self._lock:
            _MESSAGE.pack_into(self._ring, self._next_offset(), tag, *address)
            self._full.post()
        return True


class Inbox(_Mailbox):
    """What another rank posts to this one. Messages of one tag are matched in the order in which
    they were posted, whichever is asked for first."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self._free = Semaphore(self._room)
        self._full = Semaphore(self._posted)
        self._expected: Counter[int] = Counter()  # by tag
        self._received: Counter[int] = Counter()
        self._unclaimed: dict[tuple[int, int], Address] = {}  # by tag and number

    def expect(self, tag: int) -> tuple[int, int]:
        """The key of the next message with this tag."""
        self._expected[tag] += 1
        return tag, self._expected[tag]

    def has(self, key: tuple[int, int], seconds: float) -> bool:
        """Whether a message comes within a time."""
        while key not in self._unclaimed and self._full.wait(seconds):
            self._receive()
        return key in self._unclaimed

    def take(self, key: tuple[int, int]) -> Address:
        """A message that is here."""
        return self._unclaimed.pop(key)

    def make_room(self) -> None:
        """Receive what is there: the sender may wait for that."""
        while self._full.take():
            self._receive()

    def _receive(self) -> None:
        with self._lock:
            tag, *address = _MESSAGE.unpack_from(self._ring, self._next_offset())
            self._received[tag] += 1
            self._unclaimed[tag, self._received[tag]] = Address(*address)
        self._free.post()


def make_outboxes(count: int) -> tuple[int, list[Outbox]]:
    """Mailboxes to all local ranks, in memory of this one, and its descriptor."""
    fd, memory = anonymous_memory(count * _MAILBOX)
    return fd, [Outbox(_mailbox(memory, number)) for number in range(count)]


def inbox_in(memory: torch.Tensor, number: int) -> Inbox:
    """The mailbox of that number in memory of another rank."""
    return Inbox(_mailbox(memory, number))


def _mailbox(memory: torch.Tensor, number: int) -> torch.Tensor:
    return memory[number * _MAILBOX : (number + 1) * _MAILBOX]
