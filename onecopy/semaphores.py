"""Semaphores in memory that processes share: those of the C library.

Why not a number that one writes and the other looks at: a semaphore orders memory, so that who has
passed it sees all that was written before it was posted, on every processor; and who waits sleeps
until then. A signal ends a wait, so that Ctrl-C works.
"""

from __future__ import annotations

import ctypes
import errno
import time

import torch

SIZE = 64  # bytes that one is given: more than a sem_t has anywhere, and a line of the cache

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
