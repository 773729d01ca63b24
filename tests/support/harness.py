"""Run a test body on 1, 2, 3, 4 real processes, and say clearly what went wrong on which rank.

    @distributed(1, 2, 3, 4)
    def test_sum(world):                      # runs on every rank, with asserts of its own
        x = torch.full((), world.rank + 1.0, device=world.device)
        dist.all_reduce(x)
        assert x == world.size * (world.size + 1) / 2

How: a `Pool` of worker processes per world size lives as long as the pytest session. Importing
torch is what makes a process slow to start, so workers are forked from a server that has done it.
A body travels as module and name, its arguments and results as pickles; each rank answers through
a pipe of its own. Every body gets a new default process group, which is cheap, so that no subgroup,
message or group name of one test can reach the next. The store in which the ranks meet lives here
in the parent and survives any of them.

A rank fails by raising, dying or not answering in time. After the first failure the others, which
may be waiting for it in a collective, get `GRACE` seconds more. Whoever is then still busy has the
Python stacks of its threads dumped; all of it goes into one `RankFailure`, with what the ranks
printed. A pool that saw a failure is killed, and the next test gets another one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.config import get_config
from inside import set_host, share_memory_from, share_no_memory

# Of every body, before what its own test sets. Why that of now: workers are forked by a server,
# which has the environment of whichever test was the first to need it.
ENVIRONMENT = dict(os.environ)
DEVICE = os.environ.get("ONECOPY_TEST_DEVICE", "cpu")
BACKEND = {"cpu": "gloo", "cuda": "nccl"}[DEVICE]
START_TIMEOUT = 120.0  # seconds for a pool to come up on a busy machine
GRACE = 5.0  # seconds that the other ranks get after the first failure


@dataclass(frozen=True, slots=True)
class World:
    """What a body knows about the process it runs in."""

    rank: int
    size: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Job:
    """A body on its way to the workers."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pg_timeout: float
    keep_result: bool
    warning_filters: tuple[Any, ...]  # the parent's, as pytest has set them for this test
    comm: str | None = None  # ONECOPY_COMM of the parent, which the `comm` fixture sets


class RankFailure(AssertionError):
    """At least one rank raised, died or did not finish; the message shows each of them."""


# ---------------------------------------- what tests use ----------------------------------------


def lend_nothing() -> None:
    """In a body: as if each rank were on a host of its own. Before the optimizer is built."""
    share_no_memory()


def pretend_hosts(world: World, *hosts: int) -> None:
    """In a body: as if the ranks were on these hosts, by rank; without any, on one. Before the
    process group has an optimizer."""
    set_host(hosts[world.rank] if hosts else 0)


def is_native() -> bool:
    """In a body: whether it runs with ONECOPY_COMM=c10d, without messages and shared memory."""
    return os.environ.get("ONECOPY_COMM") == "c10d"


def distributed(
    *sizes: int, timeout: float = 60.0, fresh: bool = False, pg_timeout: float = 60.0
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make `body(world, ...)` a test that runs on all ranks of each world size in `sizes`.

    Other parameters come from `pytest.mark.parametrize` or fixtures and are pickled (`tmp_path`
    works: one directory for all ranks). `pg_timeout` is the process group's. `fresh` gives the
    body processes of its own, for tests that break them on purpose: there, and only there, a rank
    may leave for good with `os._exit(0)`.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        first, *others = inspect.signature(body).parameters.values()
        if first.name != "world":
            raise TypeError(f"{body.__name__}: expected first parameter `world`, got `{first}`")

        @pytest.mark.parametrize("ranks", sizes, ids=lambda ranks: f"ranks={ranks}")
        @functools.wraps(body)
        def test(ranks: int, **params: Any) -> None:
            report = ""
            try:
                _run(ranks, _job(body, (), params, pg_timeout), timeout, fresh)
            except RankFailure as failure:
                report = str(failure)
            if report:  # not inside `except`, or pytest shows everything twice
                pytest.fail(report, pytrace=False)

        ranks = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([ranks, *others])
        test.body = body
        return test

    return decorate


def run_on_ranks(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    fresh: bool = False,
    pg_timeout: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(world, *args, **kwargs)` on `size` ranks and return what each of them returned."""
    return _run(size, _job(fn, args, kwargs, pg_timeout, keep_result=True), timeout, fresh)


def shutdown() -> None:
    """End all processes we have started, and wait for them, when the session is over."""
    while _pools:
        _pools.popitem()[1].kill()
    # Why: these two end by themselves after us, but as zombies where process 1 does not reap.
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


# ---------------------------------------- parent's side ----------------------------------------

_pools: dict[int, Pool] = {}


def _job(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pg_timeout: float,
    keep_result: bool = False,
) -> Job:
    name = fn.__qualname__
    if "<locals>" in name:
        raise ValueError(f"workers look a body up by name; move {name} to the top of its module")
    filters, comm = tuple(warnings.filters), os.environ.get("ONECOPY_COMM")
    return Job(fn.__module__, name, args, kwargs, pg_timeout, keep_result, filters, comm)


def _run(size: int, job: Job, timeout: float, fresh: bool) -> list[Any]:
    if DEVICE == "cuda" and size > torch.cuda.device_count():
        pytest.skip(f"needs {size} GPUs")
    pool = None if fresh else _pools.pop(size, None)
    try:
        if pool is None:
            pool = Pool(size, may_leave=fresh)
            pool.run(_job(_nothing, (), {}, START_TIMEOUT), START_TIMEOUT)
        results = pool.run(job, timeout)
    except BaseException:  # Ctrl-C too: the ranks are in the middle of something
        if pool is not None:
            pool.kill()
        raise
    if fresh:
        pool.kill()
    else:
        _pools[size] = pool
    return results


class Pool:
    """`size` worker processes that run one body after another."""

    def __init__(self, size: int, may_leave: bool = False) -> None:
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        # Why torch._dynamo: the first call of an optimizer imports it, which takes seconds.
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "pytest"])
        self.may_leave = may_leave
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.directory = tempfile.TemporaryDirectory(prefix="onecopy-ranks-")
        self.logs = [Path(self.directory.name, f"rank{rank}") for rank in range(size)]
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank, log in enumerate(self.logs):
            log.touch()
            ours, theirs = context.Pipe()
            args = (rank, size, self.store.port, theirs, str(log), ENVIRONMENT)
            self.processes.append(context.Process(target=_work, args=args, daemon=True))
            self.processes[-1].start()
            self.pipes.append(ours)
            theirs.close()  # the worker's is now the only one, and its death an EOF for us

    def run(self, job: Job, timeout: float) -> list[Any]:
        """Give `job` to all ranks; return their results, or raise what happened instead."""
        message = pickle.dumps(job)
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # it has died since: its answer will be an EOF
                pipe.send_bytes(message)
        results, failures = self._collect(timeout)
        printed = self._printed()
        if not failures:
            sys.stdout.write(printed)
            return [results[rank] for rank in sorted(results)]
        if all(what == "skipped" for what, _ in failures.values()):
            pytest.skip(next(iter(failures.values()))[1])
        title = f"{job.module}.{job.name}: {len(failures)} of {len(self.pipes)} ranks failed\n"
        shown = [f"==== rank {rank} {what} ====\n{text}" for rank, (what, text) in failures.items()]
        raise RankFailure("\n".join([title, *shown, printed]))

    def _collect(self, timeout: float) -> tuple[dict[int, Any], dict[int, tuple[str, str]]]:
        """Results by rank, and failures by rank as (what, details) with the first one first."""
        results: dict[int, Any] = {}
        failures: dict[int, tuple[str, str]] = {}
        pending = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        deadline, limit = time.monotonic() + timeout, f"within {timeout:g} s"
        while pending and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(pending), left):
                rank = pending.pop(pipe)
                what, value = self._answer(rank)
                if what == "returned":
                    results[rank] = value
                    continue
                failures[rank] = (what, value)
                if len(failures) == 1 and time.monotonic() + GRACE < deadline:
                    deadline = time.monotonic() + GRACE
                    limit = f"within {GRACE:g} s after the first failure"
        for rank in pending.values():
            failures[rank] = (f"did not finish {limit}", "its stacks are among what it printed\n")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5 if pending else 0)  # nothing tells when a dump is complete
        return results, failures

    def _answer(self, rank: int) -> tuple[str, Any]:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            left = code == 0 and self.may_leave
            return ("returned", None) if left else (f"died with exit code {code}", "")

    def _printed(self) -> str:
        """What the ranks have printed since last time, under headings."""
        printed = ""
        for rank, log in enumerate(self.logs):
            if text := log.read_text(errors="replace"):
                printed += f"---- rank {rank} printed ----\n{text}"
            os.truncate(log, 0)
        return printed

    def kill(self) -> None:
        """End all processes at once; none of them has anything to lose."""
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            process.close()
            pipe.close()
        self.directory.cleanup()


# ---------------------------------------- worker's side ----------------------------------------


def _nothing(world: World) -> None:
    """The first job of every pool: returns when all ranks have met."""


def _work(
    rank: int, size: int, port: int, pipe: Connection, log: str, environment: dict[str, str]
) -> None:
    """Main function of a worker: bodies in, answers out, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    for output in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # os._exit loses nothing
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2, all_threads=True)
    install_importhook(get_config())  # asserts in test modules show their values, as in the parent
    torch.set_num_threads(1)
    device = torch.device(f"cuda:{rank}" if DEVICE == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    gc.freeze()  # what is here now stays, so that collecting after every body is quick
    for number in itertools.count():
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(environment)
        own_store = dist.PrefixStore(f"body {number}", store)
        pipe.send_bytes(_perform(message, World(rank, size, device), own_store))


def _perform(pickled: bytes, world: World, store: dist.Store) -> bytes:
    """Run one body from a clean start; the answer is a pickle of (what happened, details)."""
    try:
        job: Job = pickle.loads(pickled)
        _start_clean(job, world, store)
        found = functools.reduce(getattr, job.name.split("."), importlib.import_module(job.module))
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for action, message, category, module, line in reversed(job.warning_filters):
                text, place = (getattr(p, "pattern", p) or "" for p in (message, module))
                warnings.filterwarnings(action, text, category, place, line)
            result = getattr(found, "body", found)(world, *job.args, **job.kwargs)
        return pickle.dumps(("returned", result if job.keep_result else None))
    except pytest.skip.Exception as skip:
        return pickle.dumps(("skipped", str(skip)))
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # not this frame
        return pickle.dumps(("raised", "".join(traceback.format_exception(error))))


def _start_clean(job: Job, world: World, store: dist.Store) -> None:
    if job.comm is not None:
        os.environ["ONECOPY_COMM"] = job.comm
    # The parent sends a body when all ranks have answered the last one: nobody uses the old group.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    timeout = timedelta(seconds=job.pg_timeout)
    dist.init_process_group(
        BACKEND, store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )
    # Three ranks lend nothing, as if each were on a host of its own. Four are on two hosts, where
    # they lend some parts, which pass between the hosts once; the others all send to all.
    share_memory_from({3: sys.maxsize, 4: 64}.get(world.size, 1))
    pretend_hosts(world, *{4: (0, 0, 1, 1)}.get(world.size, ()))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
