"""Teams of processes that take turns: one team per method, one process per rank.

A team is started, builds its model, and then sleeps until it is told to train a few steps. So many
methods are alive side by side and take turns on the same machine, while each has processes, memory
and libraries of its own. A team that raises, dies or does not answer in time is out, with its
error; the others go on.

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
from results import Memory, Row, Samples, Table, Turn, row_of
from workloads import WORKLOADS, Workload

# ======== progress

_WIDTH = 24


@contextlib.contextmanager
def ends_by_exception() -> Iterator[None]:
    """Let `kill` and a closed terminal end the program as Ctrl-C does: it cleans up behind it."""

    def stop(*_: object) -> None:
        sys.exit("terminated")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Progress:
    """A bar on a terminal; a line per job elsewhere, so that logs stay readable.

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


# ======== teams

PATIENCE = 180.0  # seconds for an answer


class TeamFailed(Exception):
    """The method cannot run here; the message is what it said."""


@dataclass(slots=True)
class Team:
    """The processes of one method, seen from the program that gives them turns."""

    method: str
    processes: list[Any] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def tell(self, *message: Any) -> None:
        for rank, connection in enumerate(self.connections):
            try:
                connection.send(message)
            except OSError:
                raise TeamFailed(self._epitaph(rank)) from None

    def answers(self, patience: float = PATIENCE) -> list[Any]:
        """One of each rank, in their order."""
        end = time.monotonic() + patience
        found: dict[int, Any] = {}
        ranks = {id(connection): rank for rank, connection in enumerate(self.connections)}
        while len(found) < len(ranks):
            waiting = [c for c in self.connections if ranks[id(c)] not in found]
            ready = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                missing = [rank for rank in ranks.values() if rank not in found]
                raise TeamFailed(f"ranks {missing} did not answer within {patience:.0f} s")
            for connection in ready:
                rank = ranks[id(connection)]
                try:
                    found[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    raise TeamFailed(self._epitaph(rank)) from None
                if isinstance(found[rank], Exception):
                    raise TeamFailed(str(found[rank]))
        return [found[rank] for rank in range(len(ranks))]

    def _epitaph(self, rank: int) -> str:
        self.processes[rank].join(5)
        said = self.logs[rank].read_text(errors="replace").strip().splitlines()
        last = f", and last said: {said[-1][:300]}" if said else ""
        return f"rank {rank} ended with exit code {self.processes[rank].exitcode}{last}"

    def end(self) -> None:
        for connection in self.connections:
            connection.close()  # a rank that waits for orders ends by that
        patience = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, patience - time.monotonic()))
            process.kill()
            process.join()
        self.processes, self.connections = [], []


@contextlib.contextmanager
def team(
    method: str, workload: Workload, world: int, wire: Wire = LOOPBACK, source: Path | None = None
) -> Iterator[Team]:
    """``source`` is a directory to import onecopy from, instead of the installed one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all methods run on the CPU
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "workloads"])
    found = Team(method)
    with tempfile.TemporaryDirectory() as directory:
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                log = Path(directory, f"rank-{rank}.log")
                log.touch()
                place = _Place(rank, world, directory, wire, source)
                process = context.Process(
                    target=_be_rank, args=(place, method, workload.name, theirs), daemon=True
                )
                process.start()
                theirs.close()
                found.processes.append(process)
                found.connections.append(ours)
                found.logs.append(log)
            yield found
        finally:
            found.end()


# ---------------------------------------------------------------------- one rank


@dataclass(frozen=True, slots=True)
class _Place:
    rank: int
    world: int
    directory: str
    wire: Wire
    source: Path | None


def _be_rank(place: _Place, method: str, workload: str, parent: Connection) -> None:
    log = os.open(f"{place.directory}/rank-{place.rank}.log", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        with _joined(place):
            from methods import METHODS

            _work(_Worker(METHODS[method], WORKLOADS[workload], place.wire), parent)
    except EOFError:
        pass  # the program that gave turns has ended
    except BaseException as error:
        parent.send(TeamFailed(f"{type(error).__name__}: {_one_line(error)}"))
        raise


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"


@contextlib.contextmanager
def _joined(place: _Place) -> Iterator[None]:
    """Be a rank of a gloo group, as under torchrun."""
    if place.source is not None:
        sys.path.insert(0, str(place.source))
    place.wire.enter(place.rank, place.world)
    numbers = {"RANK": place.rank, "LOCAL_RANK": place.rank, "WORLD_SIZE": place.world}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    torch.set_num_threads(1)
    store = dist.FileStore(f"{place.directory}/store", place.world)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.world, timeout=patience
    )
    yield


def _work(worker: _Worker, parent: Connection) -> None:
    while True:
        order, *rest = parent.recv()
        parent.send(getattr(worker, order)(*rest))


class _Worker:
    """One rank of a method: its public methods are the orders that it takes."""

    def __init__(self, method: Any, workload: Workload, wire: Wire) -> None:
        self._method, self._workload, self._wire = method, workload, wire
        self._batches = torch.Generator().manual_seed(dist.get_rank())

    def build(self) -> float:
        """Seconds."""
        # First use of code, and imports: not what a method takes.
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
        self._trainee = self._method.build(self._workload)
        dist.barrier()
        return time.perf_counter() - start

    def train(self, steps: int) -> Turn:
        trainee, clock = self._trainee, time.perf_counter
        forward = backward = step = 0.0
        batches = [self._workload.batch(self._batches) for _ in range(steps)]
        dist.barrier()
        sent, begin = self._wire.bytes_sent(), clock()
        for batch in batches:
            start = clock()
            loss = trainee.forward(batch)
            after_forward = clock()
            trainee.backward(loss)
            after_backward = clock()
            trainee.step()
            forward += after_forward - start
            backward += after_backward - after_forward
            step += clock() - after_backward
        before_the_end = clock()
        trainee.finish()
        step += clock() - before_the_end
        dist.barrier()
        seconds, sent = clock() - begin, self._wire.bytes_sent() - sent
        return Turn(
            seconds / steps, forward / steps, backward / steps, step / steps, sent / steps,
            float(loss.detach()),
        )  # fmt: skip

    def warm_up(self, steps: int) -> Memory:
        """So many steps, and what the last one of them takes."""
        self.train(steps - 1)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        trainee = self._trainee
        loss = trainee.forward(self._workload.batch(self._batches))
        trainee.backward(loss)
        gradients = trainee.gradient_bytes()
        trainee.step()
        trainee.finish()
        peak = resident("VmHWM") - self._resident
        return Memory(trainee.state_bytes(), gradients, peak)


# ======== heats

REFERENCES = (DDP, TORCHS)
# What a rank may take per parameter: itself, gradient, bucket, a copy on the way, Adam's state.
_BYTES_PER_PARAMETER = 24
_BYTES_PER_PROCESS = 150 * 10**6

Tick = Callable[[str], None]  # told what happens next, before every piece of work


@dataclass(frozen=True, slots=True)
class Entry:
    """A method that takes part, maybe with another onecopy than the installed one."""

    name: str
    method: str
    source: Path | None = None


@dataclass(frozen=True, slots=True)
class Course:
    """Where a heat takes place."""

    workload: Workload
    ranks: int
    wire: Wire
    wire_name: str
    rounds: int

    def ticks(self, heats: Sequence[Sequence[Entry]]) -> int:
        """How often a run of these heats will tick."""
        return sum(len(heat) * (self.rounds + 2) for heat in heats)

    def heats(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Entries in heats, each with the references."""
        references = [entry for entry in entries if entry.name in REFERENCES]
        others = [entry for entry in entries if entry.name not in REFERENCES]
        size = max(2, self._alive_at_once() - len(references))
        count = max(1, -(-len(others) // size))
        return [[*references, *others[i::count]] for i in range(count)]

    def _alive_at_once(self) -> int:
        each = _BYTES_PER_PARAMETER * self.workload.numel() + _BYTES_PER_PROCESS
        return int(0.75 * _available_memory() / (each * self.ranks))


def run(course: Course, heats: Sequence[Sequence[Entry]], tick: Tick) -> Table:
    """Compare within each heat; the references' own rows are about all heats together."""
    rows: dict[str, Row] = {}
    pooled = {name: Samples() for name in REFERENCES}
    for heat in heats:
        samples = take_turns(course, heat, tick)
        ddp, torchs = (samples.get(name, Samples(error="not here")) for name in REFERENCES)
        for entry in heat:
            own = samples[entry.name]
            if entry.name in pooled:
                pooled[entry.name].add(own)
            rows[entry.name] = row_of(entry.name, own, ddp, torchs, course.wire.hosts)
    ddp, torchs = (pooled[name] for name in REFERENCES)
    for name in REFERENCES:
        if name in rows:
            rows[name] = row_of(name, pooled[name], ddp, torchs, course.wire.hosts)
    workload = course.workload
    return Table(
        workload.name,
        workload.title,
        course.ranks,
        course.wire_name,
        course.rounds,
        steps=(course.rounds + 1) * workload.steps,
        rows=tuple(rows[name] for name in METHODS if name in rows),
    )


def take_turns(course: Course, heat: Sequence[Entry], tick: Tick) -> dict[str, Samples]:
    """One heat: what each entry did."""
    samples = {entry.name: Samples() for entry in heat}
    with contextlib.ExitStack() as stack:
        teams = {
            entry.name: stack.enter_context(
                team(entry.method, course.workload, course.ranks, course.wire, entry.source)
            )
            for entry in heat
        }

        def ask(name: str, *order: object) -> list[Any]:
            """The answers of all ranks; none if the team is out, with what it says noted."""
            if samples[name].error is not None:
                return []
            try:
                teams[name].tell(*order)
                return teams[name].answers()
            except TeamFailed as error:
                samples[name].error = str(error)
                teams[name].end()  # what is left of it would disturb the others
                return []

        for name in teams:
            tick(f"{name}: building")
            samples[name].construction = max(ask(name, "build"), default=0.0)
        for name in teams:
            tick(f"{name}: warming up")
            samples[name].memory = ask(name, "warm_up", course.workload.steps)
        # The same in every run, and another one in each heat.
        order = random.Random(f"{course.workload.name} {course.ranks} {list(teams)}")
        for number in range(1, course.rounds + 1):
            for name in order.sample(list(teams), len(teams)):
                tick(f"{name}: round {number} of {course.rounds}")
                samples[name].rounds.append(ask(name, "train", course.workload.steps))
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
