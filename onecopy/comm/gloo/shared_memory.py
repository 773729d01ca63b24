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
from dataclasses import dataclass
from typing import NamedTuple

import torch

SEMAPHORE_BYTES = (
    64  # bytes that one is given: more than a sem_t has anywhere, and a line of the cache
)

_libc = ctypes.CDLL(None, use_errno=True)
_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def are_available() -> bool:
    return hasattr(_libc, "sem_init") and hasattr(_libc, "sem_timedwait")


class Semaphore:
    """At the beginning of ``memory``; made there by one process, used by several."""

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
        """Pass it, if that is possible at once."""
        return bool(_libc.sem_trywait(self._at) == 0)

    def wait(self, seconds: float) -> bool:
        """Pass it within a time. A signal may end that earlier: to be called in a loop."""
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


# A clock that nobody sets; only younger libraries know how to use it here.
_sem_clockwait = getattr(_libc, "sem_clockwait", None)


def _timespec(moment: float) -> _Timespec:
    return _Timespec(int(moment), int(moment % 1 * 1e9))


_ALIGNMENT = 64
_NAME = "onecopy"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0

# What no other memory has, of any process.
_generations = itertools.count(int.from_bytes(os.urandom(7), "little"))


class Address(NamedTuple):
    """Where lent data is."""

    fd: int  # of the memory, in the lender's process
    generation: int  # by which the memory is known: others may have had the descriptor before
    start: int  # in bytes
    stop: int
    ticket: int  # to be noted when it was read


NOT_COMING = Address(-1, 0, 0, 0, 0)  # what should have been lent never came


# -------------------------------------------------------------------------- memory


def is_available() -> bool:
    """Whether this system has such memory, and can tell when a process has ended."""
    functions = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    return functions and bool(_SEALS) and hasattr(fcntl, "F_ADD_SEALS") and are_available()


def anonymous_memory(numbytes: int) -> tuple[int, torch.Tensor]:
    """A file without a name, which cannot change its size, and all of it, mapped."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
    if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
        raise OSError(f"{path} is not memory that was lent")


@torch.inference_mode(False)  # here and below: it will be written to in other modes, too
def _mapped(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu")


class SharedMemory:
    """Memory of this process that neighbours can map. It starts with zeros."""

    @torch.inference_mode(False)
    def __init__(self, numbytes: int, world_size: int) -> None:
        head = _head(world_size)
        self.fd, memory = anonymous_memory(head + max(numbytes, 1))
        # Not when the process ends: a reader may be about to open it, and the kernel closes it.
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._was_read = Semaphore.make(memory)
        self._read = _tickets(memory, world_size)
        self.data = memory[head : head + numbytes]
        self._generation = next(_generations)
        _known_by(memory).fill_(self._generation)
        self._ticket = 0
        self._readers: Sequence[int] = ()
        self._awaited = 0  # times that a reader has yet to post

    def lend(self, readers: Sequence[int]) -> None:
        """The data is complete; the readers will note when they have read it."""
        self._ticket += 1
        self._readers = readers
        self._awaited += len(readers)

    def address(self, data: torch.Tensor) -> Address:
        """Of a part of the data, for a reader."""
        start = data.data_ptr() - self.data.data_ptr()
        return Address(self.fd, self._generation, start, start + data.nbytes, self._ticket)

    def wait_until_read(self, seconds: float) -> bool:
        """Whether nobody reads what was lent before; the memory may be filled again then."""
        while self._awaited and self._was_read.wait(seconds):
            self._awaited -= 1
        return not self._awaited

    def unread(self) -> list[int]:
        """The readers that have not read what was lent last."""
        if not self._readers:
            return []
        read = self._read.tolist()
        return [reader for reader in self._readers if read[reader] < self._ticket]

    def unmapped(self) -> list[int]:
        """The readers that have never read anything here, and have to."""
        read = self._read.tolist()
        return [reader for reader in self.unread() if not read[reader]]


class MappedMemory:
    """Memory of a neighbour, mapped."""

    @torch.inference_mode(False)
    def __init__(self, memory: torch.Tensor, world_size: int) -> None:
        if len(memory) < _head(world_size):
            raise OSError("that memory is too small to have been lent")
        self.generation = int(_known_by(memory))
        self.data = memory[_head(world_size) :]
        self._was_read = Semaphore(memory)
        self._read = _tickets(memory, world_size)

    def give_back(self, rank: int, ticket: int) -> None:
        """This rank has read what was lent with the ticket."""
        self._read[rank] = ticket
        self._was_read.post()


_TICKETS = SEMAPHORE_BYTES + _ALIGNMENT  # where they begin


def _head(world_size: int) -> int:
    return _TICKETS + -(-8 * world_size // _ALIGNMENT) * _ALIGNMENT


def _known_by(memory: torch.Tensor) -> torch.Tensor:
    return memory[SEMAPHORE_BYTES : SEMAPHORE_BYTES + 8].view(torch.int64)


def _tickets(memory: torch.Tensor, world_size: int) -> torch.Tensor:
    return memory[_TICKETS : _TICKETS + 8 * world_size].view(torch.int64)


# -------------------------------------------------------------------------- letters

_LETTER = struct.Struct("6q")  # a tag and an address
_LETTERS = 1024  # in a box: more than the buckets of a few optimizers that are under way
_BOX = 2 * SEMAPHORE_BYTES + _LETTERS * _LETTER.size


class _Box:
    """Letters from one rank to another, in a ring."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._room, self._letters = memory[:SEMAPHORE_BYTES], memory[SEMAPHORE_BYTES:]
        self._ring = (ctypes.c_char * (_LETTERS * _LETTER.size)).from_address(
            memory.data_ptr() + 2 * SEMAPHORE_BYTES
        )
        self._next = 0
        self._lock = threading.Lock()

    def _place(self) -> int:
        """Where the next letter is; to be called with the lock, by threads of this process."""
        place = self._next % _LETTERS * _LETTER.size
        self._next += 1
        return place


class Outbox(_Box):
    """What this rank writes to a neighbour."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self._room_left = Semaphore.make(self._room, _LETTERS)
        self._written = Semaphore.make(self._letters)

    def write(self, tag: int, address: Address, seconds: float) -> bool:
        """Unless there is no room within a time."""
        if not self._room_left.wait(seconds):
            return False
        with self._lock:
            _LETTER.pack_into(self._ring, self._place(), tag, *address)
            self._written.post()
        return True


class Inbox(_Box):
    """What a neighbour writes to this rank: letters with the same tag are meant in the order in
    which they were written, whatever was asked for first."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self._room_left = Semaphore(self._room)
        self._written = Semaphore(self._letters)
        self._expected: Counter[int] = Counter()  # by tag
        self._received: Counter[int] = Counter()
        self._waiting: dict[tuple[int, int], Address] = {}  # by tag and number

    def expect(self, tag: int) -> tuple[int, int]:
        """By what the next letter with this tag is to be asked for."""
        self._expected[tag] += 1
        return tag, self._expected[tag]

    def has(self, letter: tuple[int, int], seconds: float) -> bool:
        """Whether a letter comes within a time."""
        while letter not in self._waiting and self._written.wait(seconds):
            self._take()
        return letter in self._waiting

    def take_out(self, letter: tuple[int, int]) -> Address:
        """A letter that is here."""
        return self._waiting.pop(letter)

    def make_room(self) -> None:
        """Take what is there: the writer may wait for that."""
        while self._written.take():
            self._take()

    def _take(self) -> None:
        with self._lock:
            tag, *address = _LETTER.unpack_from(self._ring, self._place())
            self._received[tag] += 1
            self._waiting[tag, self._received[tag]] = Address(*address)
        self._room_left.post()


@dataclass(frozen=True, slots=True)
class Desk:
    """The boxes of all neighbours, in memory of this rank."""

    fd: int
    outboxes: Sequence[Outbox]

    @classmethod
    def make(cls, boxes: int) -> Desk:
        fd, memory = anonymous_memory(boxes * _BOX)
        return cls(fd, [Outbox(_box(memory, number)) for number in range(boxes)])

    @staticmethod
    def inbox(memory: torch.Tensor, number: int) -> Inbox:
        """The box of that number at a neighbour's desk."""
        return Inbox(_box(memory, number))


def _box(memory: torch.Tensor, number: int) -> torch.Tensor:
    return memory[number * _BOX : (number + 1) * _BOX]
