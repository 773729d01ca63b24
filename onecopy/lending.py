"""Memory of one process that others read, and letters that say where in it the data is.

::

    lender    fill memory -- letter: "it is there" --> reader    read it in place, or copy it
              wait until it was read, before it is filled again  <-- post that it was

The memory is anonymous (``memfd``): it has no name that others could guess, nothing is left behind
when a process is killed, and a reader's mapping stays valid when the lender is gone. It begins with
a semaphore, which readers post, and with one number for each rank: the last ticket whose data that
rank has read, for error messages. A reader opens the memory through ``/proc``, which the kernel
admits for processes of the same user.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import struct
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from onecopy.semaphores import SIZE as SEMAPHORE
from onecopy.semaphores import Semaphore

_ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0

_generations = itertools.count(1)


class Address(NamedTuple):
    """Where lent data is."""

    fd: int  # of the memory, in the lender's process
    generation: int  # of the memory: others may have had the descriptor before
    start: int  # in bytes
    stop: int
    ticket: int  # to be noted when it was read


# -------------------------------------------------------------------------- memory


def anonymous_memory(numbytes: int) -> tuple[int, torch.Tensor]:
    """A file without a name, which cannot change its size, and all of it, mapped."""
    fd = os.memfd_create("onecopy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, numbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, _mapped(f"/proc/self/fd/{fd}", numbytes)
    except BaseException:
        os.close(fd)
        raise


def memory_of(pid: int, fd: int) -> torch.Tensor:
    """A file of another process, mapped."""
    path = f"/proc/{pid}/fd/{fd}"
    return _mapped(path, os.stat(path).st_size)


def _mapped(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


class SharedMemory:
    """Memory of this process that neighbours can map. It starts with zeros."""

    def __init__(self, numbytes: int, world_size: int) -> None:
        head = _head(world_size)
        self.fd, memory = anonymous_memory(head + max(numbytes, 1))
        weakref.finalize(self, os.close, self.fd)
        self._was_read = Semaphore.make(memory)
        self._read = _tickets(memory, world_size)
        self.data = memory[head : head + numbytes]
        self._generation = next(_generations)
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


class Borrowed:
    """Memory of a neighbour, mapped."""

    def __init__(self, memory: torch.Tensor, generation: int, world_size: int) -> None:
        self.generation = generation
        self.data = memory[_head(world_size) :]
        self._was_read = Semaphore(memory)
        self._read = _tickets(memory, world_size)

    def give_back(self, rank: int, ticket: int) -> None:
        """This rank has read what was lent with the ticket."""
        self._read[rank] = ticket
        self._was_read.post()


def _head(world_size: int) -> int:
    return SEMAPHORE + -(-8 * world_size // _ALIGNMENT) * _ALIGNMENT


def _tickets(memory: torch.Tensor, world_size: int) -> torch.Tensor:
    return memory[SEMAPHORE : SEMAPHORE + 8 * world_size].view(torch.int64)


# -------------------------------------------------------------------------- letters

_LETTER = struct.Struct("6q")  # a tag and an address
_LETTERS = 1024  # in a box: more than are under way, unless a thousand gathers are left to others
_BOX = 2 * SEMAPHORE + _LETTERS * _LETTER.size


class _Box:
    """Letters from one rank to another, in a ring."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._room, self._letters = memory[:SEMAPHORE], memory[SEMAPHORE:]
        self._ring = (ctypes.c_char * (_LETTERS * _LETTER.size)).from_address(
            memory.data_ptr() + 2 * SEMAPHORE
        )
        self._next = 0

    def _place(self) -> int:
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

    def find(self, letter: tuple[int, int], seconds: float) -> Address | None:
        """A letter, if it comes within a time."""
        while letter not in self._waiting and self._written.wait(seconds):
            self._take()
        return self._waiting.pop(letter, None)

    def make_room(self) -> None:
        """Take what is there: the writer may wait for that."""
        while self._written.take():
            self._take()

    def _take(self) -> None:
        tag, *address = _LETTER.unpack_from(self._ring, self._place())
        self._room_left.post()
        self._received[tag] += 1
        self._waiting[tag, self._received[tag]] = Address(*address)


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
