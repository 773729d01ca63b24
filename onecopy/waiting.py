"""Waiting for other ranks in a way that Ctrl-C ends.

Python handles a signal when its main thread runs Python again. A thread that waits in gloo does not
for as long as the group's timeout allows, which may be half an hour. So the main thread lets
another one wait, and waits for that one on a lock, which a signal interrupts.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Sequence
from typing import Any


class _Errand:
    """What the waiter does for the main thread."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works
        self.error: BaseException | None = None
        self.lock = threading.Lock()
        self.lock.acquire()

    def run(self) -> None:
        try:
            _wait_for(self.works)
        except BaseException as error:
            self.error = error
        finally:
            self.works = ()  # nobody holds on to the memory that was sent
            self.lock.release()


def _wait_for(works: Sequence[Any]) -> None:
    """A function of its own, so that the waiter holds none of them when the main thread goes on.

    Why: the end of a work releases the interpreter for a moment. If the process ends in that
    moment, the thread cannot come back, and the process aborts.
    """
    for work in works:
        work.wait()


class _Waiter:
    """A thread that waits, and ends with the process."""

    def __init__(self) -> None:
        self._errands: queue.SimpleQueue[_Errand] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="onecopy-waiter", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._errands.get().run()

    def send(self, works: Sequence[Any]) -> _Errand:
        errand = _Errand(works)
        self._errands.put(errand)
        return errand


_idle: list[_Waiter] = []  # one, unless a signal handler waits, too
_abandoned: list[Sequence[Any]] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # it has no such thread


def wait_interruptibly(works: Sequence[Any]) -> None:
    """Until these are done, or a signal handler raises. Only where waiting blocks the thread: on
    accelerators it gives an order to the stream of the thread that calls."""
    if not works:
        return
    if threading.current_thread() is not threading.main_thread():
        _wait_for(works)
        return
    waiter = _idle.pop() if _idle else _Waiter()
    errand = waiter.send(works)
    try:
        errand.lock.acquire()
    except BaseException:  # a signal: the thread still waits, and the next errand gets another one
        _abandoned.append(works)  # their end in that thread might be that of the process: as above
        raise
    _idle.append(waiter)
    error, errand.error = errand.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error, errand  # a cycle, which would hold on to the memory that was sent


# -------------------------------------------------------------------------- at the end


_kept: set[int] = set()


def keep_for_ever(group: Any) -> None:
    """Never destroy a process group in which something is under way that may not end: gloo waits
    for it, and the interpreter with it."""
    if id(group) not in _kept:
        _kept.add(id(group))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
