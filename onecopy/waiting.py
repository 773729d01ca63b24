"""Waiting for other ranks in a way that Ctrl-C ends.

Python handles a signal when its main thread runs Python again. A thread that waits in gloo does not
for as long as the group's timeout allows, which may be half an hour. So the main thread lets
another one wait, and waits for that one on a lock, which a signal interrupts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
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
_SETTLING = 1.0  # seconds, at most, that an ending process waits for its threads


def keep_for_ever(group: Any) -> None:
    """Never destroy a process group in which something is under way that may not end: gloo waits
    for it, and the interpreter with it."""
    if id(group) not in _kept:
        _kept.add(id(group))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def let_threads_settle() -> None:
    """Before the interpreter ends: until gloo's threads have let go of what was sent.

    Why: a work is done before the thread that did it lets go of its tensors, and that takes the
    interpreter. A thread that asks for it while it ends is unwound through functions that may
    not be, which aborts the process. On a busy machine a thread may well be that late.
    """
    until = time.monotonic() + _SETTLING
    quiet = 0
    while quiet < 2 and time.monotonic() < until:
        # Asleep, this thread has not got the interpreter: whoever waits for it gets it.
        time.sleep(0.0005)
        quiet = 0 if _others_are_busy() else quiet + 1


def _others_are_busy() -> bool:
    """Whether another thread of this process runs, or would if it had a processor."""
    mine = threading.get_native_id()
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state in _BUSY and int(task.name) != mine:
                return True
    return False


_BUSY = "RD"  # of the letters by which Linux tells the state of a thread
