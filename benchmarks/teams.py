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
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hosts import LOOPBACK, Wire
from measuring import resident
from results import Memory, Turn
from workloads import WORKLOADS, Workload

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
