"""Measure training steps of several methods, which alternate on the same machine.

Each method has worker processes, one per rank, with memory and libraries of their own. They build
the model, and then wait for commands to train a few steps. So many methods are alive side by side:
as many as memory allows form a group, and in each round all of a group train, in an order that is
drawn anew. DDP and torch's class are in every group, because ratios of times are only meaningful
within a round. A first round warms up and measures memory. A method that raises, dies or does not
answer in time is left out, with its error; the others continue.

Processes come from a fork server that has imported torch, so starting them is cheap.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from costs import resident
from hosts import LOOPBACK, Wire
from methods import DDP, METHODS, TORCHS
from results import Measurement, Memory, Row, Samples, Table, row_of
from workloads import WORKLOADS, Workload

# ---------------------------------------------------------------------- progress

_WIDTH = 24


@contextlib.contextmanager
def ends_by_exception() -> Iterator[None]:
    """Raise SystemExit on `kill` and when the terminal is closed, so that the program cleans up."""

    def stop(*_: object) -> None:
        sys.exit("terminated")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Progress:
    """A progress bar on a terminal; elsewhere one line, so that logs stay readable.

    ``tick(text)`` is called before each of ``total`` pieces of work.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._start = time.monotonic()
        self._is_live = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        if not self._is_live:
            print(f"measuring {self._name}", file=sys.stderr, flush=True)
        return self

    def tick(self, text: str) -> None:
        if self._is_live:
            full = _WIDTH * self._done // max(1, self._total)
            seconds = time.monotonic() - self._start
            bar = "#" * full + "." * (_WIDTH - full)
            line = f"[{bar}] {self._name}, {seconds:.0f} s: {text}"
            print(f"\r\x1b[2K{line[:118]}", end="", file=sys.stderr, flush=True)
        self._done += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- worker processes

ANSWER_TIMEOUT = 180.0  # seconds for an answer


class MethodFailed(Exception):
    """A method cannot run here. The message is its error."""


@dataclass(slots=True)
class Workers:
    """The worker processes of one method, as the benchmark sees them."""

    method: str
    processes: list[Any] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def send(self, *message: Any) -> None:
        for rank, connection in enumerate(self.connections):
            try:
                connection.send(message)
            except OSError:
                raise MethodFailed(self._exit_message(rank)) from None

    def answers(self, timeout: float = ANSWER_TIMEOUT) -> list[Any]:
        """Receive the answer of each rank."""
        end = time.monotonic() + timeout
        found: dict[int, Any] = {}
        ranks = {id(connection): rank for rank, connection in enumerate(self.connections)}
        while len(found) < len(ranks):
            waiting = [c for c in self.connections if ranks[id(c)] not in found]
            ready = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                missing = [rank for rank in ranks.values() if rank not in found]
                raise MethodFailed(f"ranks {missing} did not answer within {timeout:.0f} s")
            for connection in ready:
                rank = ranks[id(connection)]
                try:
                    found[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    raise MethodFailed(self._exit_message(rank)) from None
                if isinstance(found[rank], Exception):
                    raise MethodFailed(str(found[rank]))
        return [found[rank] for rank in range(len(ranks))]

    def _exit_message(self, rank: int) -> str:
        self.processes[rank].join(5)
        said = self.logs[rank].read_text(errors="replace").strip().splitlines()
        last = f", and last said: {said[-1][:300]}" if said else ""
        return f"rank {rank} ended with exit code {self.processes[rank].exitcode}{last}"

    def stop(self) -> None:
        for connection in self.connections:
            connection.close()  # which ends a rank that waits for a command
        end = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        self.processes, self.connections = [], []


@contextlib.contextmanager
def start_workers(
    method: str, workload: Workload, world: int, wire: Wire = LOOPBACK, source: Path | None = None
) -> Iterator[Workers]:
    """Start the processes of a method. ``source`` is a directory from which to import onecopy,
    instead of the installed one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all methods run on the CPU
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "workloads"])
    found = Workers(method)
    with tempfile.TemporaryDirectory() as directory:
        try:
            for number in range(world):
                ours, theirs = context.Pipe()
                log = Path(directory, f"rank-{number}.log")
                log.touch()
                rank = _Rank(number, world, directory, wire, source)
                process = context.Process(
                    target=_run_worker, args=(rank, method, workload.name, theirs), daemon=True
                )
                process.start()
                theirs.close()
                found.processes.append(process)
                found.connections.append(ours)
                found.logs.append(log)
            yield found
        finally:
            found.stop()


# ---------------------------------------------------------------------- one rank


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    world: int
    directory: str
    wire: Wire
    source: Path | None


def _run_worker(rank: _Rank, method: str, workload: str, parent: Connection) -> None:
    log = os.open(f"{rank.directory}/rank-{rank.number}.log", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _join_process_group(rank)
        worker = _Worker(METHODS[method], WORKLOADS[workload], rank.wire)
        while True:
            command, *arguments = parent.recv()
            parent.send(getattr(worker, command)(*arguments))
    except EOFError:
        pass  # the benchmark has closed the connection
    except BaseException as error:
        parent.send(MethodFailed(f"{type(error).__name__}: {_one_line(error)}"))
        raise


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"


def _join_process_group(rank: _Rank) -> None:
    """Join a gloo group, with the environment that torchrun sets."""
    if rank.source is not None:
        sys.path.insert(0, str(rank.source))
    rank.wire.enter(rank.number, rank.world)
    numbers = {"RANK": rank.number, "LOCAL_RANK": rank.number, "WORLD_SIZE": rank.world}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    torch.set_num_threads(1)
    store = dist.FileStore(f"{rank.directory}/store", rank.world)
    timeout = timedelta(seconds=ANSWER_TIMEOUT)
    dist.init_process_group(
        "gloo", store=store, rank=rank.number, world_size=rank.world, timeout=timeout
    )


class _Worker:
    """One rank of a method. Its public methods are the commands."""

    def __init__(self, method: Any, workload: Workload, wire: Wire) -> None:
        self._method, self._workload, self._wire = method, workload, wire
        self._batches = torch.Generator().manual_seed(dist.get_rank())

    def build(self) -> float:
        """Build the model and wrap it. Return the seconds, without imports and other first uses."""
        self._workload.model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in self._method.modules:
                importlib.import_module(module)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._resident = resident("VmRSS")
        dist.barrier()
        start = time.perf_counter()
        self._training = self._method.build(self._workload)
        dist.barrier()
        return time.perf_counter() - start

    def train(self, steps: int) -> Measurement:
        """Train some steps. Return means over them."""
        training, clock = self._training, time.perf_counter
        forward = backward = step = 0.0
        batches = [self._workload.batch(self._batches) for _ in range(steps)]
        dist.barrier()
        sent, begin = self._wire.bytes_sent(), clock()
        for batch in batches:
            start = clock()
            loss = training.forward(batch)
            after_forward = clock()
            training.backward(loss)
            after_backward = clock()
            training.step()
            forward += after_forward - start
            backward += after_backward - after_forward
            step += clock() - after_backward
        before_the_end = clock()
        training.finish()
        step += clock() - before_the_end
        dist.barrier()
        seconds, sent = clock() - begin, self._wire.bytes_sent() - sent
        return Measurement(
            seconds / steps, forward / steps, backward / steps, step / steps, sent / steps,
            float(loss.detach()),
        )  # fmt: skip

    def warm_up(self, steps: int) -> Memory:
        """Train some steps. Return the memory of the last one."""
        self.train(steps - 1)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        training = self._training
        loss = training.forward(self._workload.batch(self._batches))
        training.backward(loss)
        gradients = training.gradient_bytes()
        training.step()
        training.finish()
        peak = resident("VmHWM") - self._resident
        return Memory(training.state_bytes(), gradients, peak)


# ---------------------------------------------------------------------- groups

REFERENCES = (DDP, TORCHS)
# What a rank may take per parameter: itself, gradient, bucket, a copy on the way, Adam's state.
_BYTES_PER_PARAMETER = 24
_BYTES_PER_PROCESS = 150 * 10**6

Tick = Callable[[str], None]  # called with a description before every piece of work


@dataclass(frozen=True, slots=True)
class Entry:
    """A method to measure; maybe with onecopy from another directory than the installed one."""

    name: str
    method: str
    source: Path | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """What is trained, on how many ranks and over which network, and how often."""

    workload: Workload
    ranks: int
    wire: Wire
    wire_name: str
    rounds: int

    def ticks(self, groups: Sequence[Sequence[Entry]]) -> int:
        """How often `measure_groups` will call `tick`."""
        return sum(len(group) * (self.rounds + 2) for group in groups)

    def groups(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Divide the entries into groups, as large as memory allows, each with the references."""
        references = [entry for entry in entries if entry.name in REFERENCES]
        others = [entry for entry in entries if entry.name not in REFERENCES]
        each = _BYTES_PER_PARAMETER * self.workload.numel() + _BYTES_PER_PROCESS
        alive_at_once = int(0.75 * _available_memory() / (each * self.ranks))
        size = max(2, alive_at_once - len(references))
        count = max(1, -(-len(others) // size))
        return [[*references, *others[i::count]] for i in range(count)]


def measure_groups(setup: Setup, groups: Sequence[Sequence[Entry]], tick: Tick) -> Table:
    """Measure all groups. Ratios are taken within a group; the rows of the references are about all
    groups together."""
    rows: dict[str, Row] = {}
    pooled = {name: Samples() for name in REFERENCES}
    for group in groups:
        samples = alternate(setup, group, tick)
        ddp, torchs = (samples.get(name, Samples(error="not here")) for name in REFERENCES)
        for entry in group:
            own = samples[entry.name]
            if entry.name in pooled:
                pooled[entry.name].add(own)
            rows[entry.name] = row_of(entry.name, own, ddp, torchs, setup.wire.hosts)
    ddp, torchs = (pooled[name] for name in REFERENCES)
    for name in REFERENCES:
        if name in rows:
            rows[name] = row_of(name, pooled[name], ddp, torchs, setup.wire.hosts)
    workload = setup.workload
    return Table(
        workload.name,
        workload.title,
        setup.ranks,
        setup.wire_name,
        setup.rounds,
        steps=(setup.rounds + 1) * workload.steps,
        rows=tuple(rows[name] for name in METHODS if name in rows),
    )


def alternate(setup: Setup, group: Sequence[Entry], tick: Tick) -> dict[str, Samples]:
    """Measure one group. Return the samples of each entry."""
    samples = {entry.name: Samples() for entry in group}
    with contextlib.ExitStack() as stack:
        workers = {
            entry.name: stack.enter_context(
                start_workers(entry.method, setup.workload, setup.ranks, setup.wire, entry.source)
            )
            for entry in group
        }

        def ask(name: str, *command: object) -> list[Any]:
            """The answers of all ranks; none if the method has failed, whose error is noted."""
            if samples[name].error is not None:
                return []
            try:
                workers[name].send(*command)
                return workers[name].answers()
            except MethodFailed as error:
                samples[name].error = str(error)
                workers[name].stop()  # its other ranks would disturb the other methods
                return []

        for name in workers:
            tick(f"{name}: building")
            samples[name].construction = max(ask(name, "build"), default=0.0)
        for name in workers:
            tick(f"{name}: warming up")
            samples[name].memory = ask(name, "warm_up", setup.workload.steps)
        # The same order in every run, and different orders in different groups.
        order = random.Random(f"{setup.workload.name} {setup.ranks} {list(workers)}")
        for number in range(1, setup.rounds + 1):
            for name in order.sample(list(workers), len(workers)):
                tick(f"{name}: round {number} of {setup.rounds}")
                samples[name].rounds.append(ask(name, "train", setup.workload.steps))
    return samples


def _available_memory() -> int:
    found = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            found.append(int(line.split()[1]) * 1024)
    group = Path("/sys/fs/cgroup")  # of a container, which may be allowed less than there is
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        found.append(int(limit.read_text()) - int(used.read_text()))
    return min(found)
