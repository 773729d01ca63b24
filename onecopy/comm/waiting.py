"""Waiting for other ranks in a way that Ctrl-C ends.

Python handles a signal when its main thread runs Python again. A thread that waits in gloo does not
for as long as the group's timeout allows, which may be half an hour; one that waits for an answer
of the c10d store does not as long as the process that hosts it is stopped. So the main thread lets
another one wait, and waits for that one on a lock, which a signal interrupts, or a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Task:
    """What a background thread does for another thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_running = threading.Lock()
        self._is_running.acquire()

    def run(self) -> None:
        assert self._work is not None
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = None  # nobody holds on to the memory that was sent
            self._is_running.release()

    def is_running(self) -> bool:
        """Without taking the lock, which another thread that asks would take for a running task."""
        return self._is_running.locked()

    def ends(self, seconds: float = -1) -> bool:
        """Wait until it has ended, or a signal handler raises; False after so many seconds. Can be
        repeated."""
        with marking_interruptions():
            has_ended = self._is_running.acquire(timeout=seconds)
        if has_ended:
            self._is_running.release()
        return has_ended

    def wait(self) -> Any:
        """Wait for the result, or raise once what the task has raised."""
        self.ends()
        error, self._error = self._error, None
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error  # a cycle, which would hold on to the memory that was sent


class BackgroundThread:
    """A thread that runs tasks in order, and ends with the process if nobody ends it before."""

    def __init__(self, owner: object = None) -> None:
        """``owner``: it works for this object alone, and ends with it."""
        tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._tasks = tasks
        threading.Thread(
            target=_run_tasks, args=(tasks,), name="onecopy-waiter", daemon=True
        ).start()
        if owner is not None:
            _owned.add(self)
            weakref.finalize(owner, tasks.put, None).atexit = False

    def send(self, work: Callable[[], Any]) -> Task:
        task = Task(work)
        self._tasks.put(task)
        return task


def _run_tasks(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # while it waits for the next, it holds nothing


def _idle_thread() -> BackgroundThread:
    try:
        return _idle.pop()
    except IndexError:
        return BackgroundThread()


_owned: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()  # those that have an owner
_idle: list[BackgroundThread] = []  # one, unless a signal handler waits, too, or several threads do
_abandoned: list[Sequence[Any]] = []


def wait_interruptibly(works: Sequence[Any]) -> None:
    """Until these are done, or a signal handler raises. Only where waiting blocks the thread: on
    accelerators it gives an order to the stream of the thread that calls."""
    if not works:
        return
    if threading.current_thread() is not threading.main_thread():
        wait_here(works)
        return
    thread = _idle_thread()
    task = thread.send(functools.partial(wait_here, works))
    try:
        task.ends()
    except BaseException:  # a signal: the thread still waits, and the next task gets another one
        _abandoned.append(works)  # their end in that thread might be that of the process: as below
        raise
    _idle.append(thread)
    task.wait()


def wait_here(works: Sequence[Any]) -> None:
    """A function of its own, so that the thread holds none of them when the main thread goes on.

    Why: the end of a work releases the interpreter for a moment. If the process ends in that
    moment, the thread cannot come back, and the process aborts.
    """
    for work in works:
        work.wait()


# -------------------------------------------------------------------------- signals


@contextlib.contextmanager
def marking_interruptions() -> Iterator[None]:
    """Around a wait that raises nothing by itself: what comes is of a signal handler. That may be
    any class, as the TimeoutError of an alarm, or one by which others tell that a rank is lost."""
    try:
        yield
    except BaseException as error:
        vars(error)[_INTERRUPTS] = True
        raise


def is_interruption(error: BaseException) -> bool:
    return _INTERRUPTS in vars(error)


_INTERRUPTS = "_onecopy_interrupts"


# -------------------------------------------------------------------------- questions to the store


class NoAnswer(RuntimeError):
    """The c10d store has not answered in time."""


class _Question(NamedTuple):
    store: Any
    task: Task
    is_late: bool  # or a signal has ended the wait


_open: list[_Question] = []  # nobody waits for the answer any more


def ask_store(store: Any, question: Callable[[], Any], patience: float) -> Any:
    """What the store answers, within seconds of patience. It has no deadline of its own for most
    questions: one to a process that is stopped waits for ever.

    A question that is not answered keeps the connection from all others. So until it is, nobody
    else asks, and waits for its whole patience.
    """
    root = root_of(store)
    if not any(each.is_late for each in _questions_to(root)):
        thread = _idle_thread()
        task = thread.send(question)
        try:
            has_answered = task.ends(patience)
        except BaseException:
            _open.append(_Question(root, task, is_late=False))
            raise
        if has_answered:
            _idle.append(thread)
            return task.wait()
        _open.append(_Question(root, task, is_late=True))
    raise NoAnswer("the store does not answer: the process that hosts it is lost or stopped")


def is_silent(store: Any) -> bool:
    """Whether a question to it is open, so that whoever calls it now may wait for ever. Cheap, as
    long as there is none to any store."""
    return bool(_open) and bool(_questions_to(root_of(store)))


def _questions_to(root: Any) -> list[_Question]:
    _open[:] = [each for each in _open if each.task.is_running()]
    return [each for each in _open if each.store is root]


def root_of(store: Any) -> Any:
    """What holds the connection: groups have stores of their own that share one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


if hasattr(os, "register_at_fork"):
    # A child has no such threads.
    os.register_at_fork(after_in_child=_idle.clear)
    os.register_at_fork(after_in_child=_open.clear)


# -------------------------------------------------------------------------- at the end

_FINISHING = 5.0  # seconds, at most, that an ending process gives what others count on
_SETTLING = 1.0  # and then its threads, to let go of memory


def never_destroy(group: Any) -> None:
    """Never destroy a process group in which something is under way that may not end: gloo waits
    for it, and the interpreter with it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def let_threads_finish() -> None:
    """Before the interpreter ends: until threads have done what other ranks count on, and gloo's
    have let go of what was sent.

    Why: a work is done before the thread that did it lets go of its tensors, and that takes the
    interpreter. A thread that asks for it while it ends is unwound through functions that may
    not be, which aborts the process. On a busy machine a thread may well be that late.
    """
    until = time.monotonic() + _FINISHING
    for task in [thread.send(lambda: None) for thread in list(_owned)]:
        task.ends(max(0.0, until - time.monotonic()))
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
            if state in "RD" and int(task.name) != mine:  # runs, or waits for a disk
                return True
    return False
