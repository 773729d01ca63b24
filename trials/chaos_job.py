"""Runs one job of a trial under torchrun, and reads what its ranks wrote down.

A *life* is one start of all processes, by torchrun or by us: "0.2" is the second restart of the
first launch. The names of replays are those of lives too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().parent / "chaos_worker.py"
# A life writes a line in every step, and before the first one it imports torch. The process group's
# own timeout is longer than this: a rank that waits for that counts as a hang.
LONGEST_SILENCE = 240.0
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see the example

Curve = dict[int, str]  # loss by step, in hexadecimal digits: equal means equal to the bit


class Hang(Exception):
    """A job did not end in time."""


@dataclass(slots=True)
class Life:
    """What the ranks of one life wrote down."""

    name: str
    ranks: int = 0
    curves: dict[int, Curve] = field(default_factory=dict)  # by rank
    started: float = 0.0
    joined: int = 0  # ranks that found the others
    resumed: int | None = None  # at which step; None if it did not come so far
    saved: int = 0  # the last step whose save returned on rank 0, which completes it
    kill: dict[str, Any] | None = None
    errors: dict[int, str] = field(default_factory=dict)  # by rank
    done: int = 0  # ranks

    @property
    def lost_its_port(self) -> bool:
        """torchrun chooses a free port, on which rank 0 listens a few seconds later: another
        program may have taken it. Nothing of ours has run by then, and torchrun tries again."""
        return not self.joined and "EADDRINUSE" in self.what_went_wrong

    @property
    def did_not_load(self) -> bool:
        return self.joined > 0 and self.resumed is None and bool(self.errors)

    @property
    def what_went_wrong(self) -> str:
        return "".join(f"rank {rank}: {error}" for rank, error in self.errors.items())

    @property
    def last_step(self) -> int:
        return max((max(curve) for curve in self.curves.values() if curve), default=0)

    def mean(self) -> dict[int, float]:
        """The loss of the whole batch, where all ranks have written theirs."""
        curves = self.curves.values()
        common = set.intersection(*map(set, curves)) if curves else set()
        return {n: sum(float.fromhex(c[n]) for c in curves) / len(curves) for n in common}


def read_lives(job: Path) -> dict[str, Life]:
    lives: dict[str, Life] = {}
    for path in sorted((job / "lives").glob("*.jsonl")):
        name, _, rank = path.stem.rpartition("-")
        life = lives.setdefault(name, Life(name))
        life.curves.setdefault(int(rank), {})
        for line in path.read_text().splitlines():
            _take_down(life, int(rank), json.loads(line))
    return lives


def _take_down(life: Life, rank: int, entry: dict[str, Any]) -> None:
    if "pid" in entry:
        life.ranks, life.started = entry["ranks"], max(life.started, entry["time"])
    if "loss" in entry:
        life.curves[rank][entry["step"]] = entry["loss"]
    if "resumed" in entry:
        life.resumed = entry["resumed"]
    if "saved" in entry and rank == 0:
        life.saved = max(life.saved, entry["saved"])
    if "killed" in entry:
        life.kill = entry
    if "error" in entry:
        life.errors[rank] = entry["error"]
    life.joined += "joined" in entry
    life.done += "done" in entry


def torchrun(job: Path, ranks: int, restarts: int, *arguments: str) -> int:
    """The exit code; raises Hang, with all stacks in the log, if nothing is written any more."""
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return _run(job, [options], arguments, OWN_STORE if restarts else {})


def torchrun_on_two_machines(job: Path, restarts: int, *arguments: str) -> int:
    """Two agents with a rank each, of which one is enough. The exit code of the first, which
    hosts the rendezvous and so must not be lost."""
    port = _free_port()
    agents = [
        [
            *("--nnodes=1:2", "--nproc-per-node=1", f"--max-restarts={restarts}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"),
            # How long the first waits for the second, and who is the first: else they race for it.
            f"--rdzv-conf=last_call_timeout=40,is_host={is_host}",
        ]
        for is_host in ("true", "false")
    ]
    return _run(job, agents, arguments, OWN_STORE)


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _run(
    job: Path, agents: list[list[str]], arguments: tuple[str, ...], environment: dict[str, str]
) -> int:
    (job / "lives").mkdir(exist_ok=True)
    processes = []
    try:
        with (job / "log").open("a") as log:
            for options in agents:
                command = ["-m", "torch.distributed.run", *options, str(WORKER), str(job)]
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command, *arguments],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                    )
                )
        return _wait(processes[0], job / "lives")
    finally:
        _end(processes, job)


def _wait(process: subprocess.Popen[bytes], lives: Path) -> int:
    written, heard = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        size = sum(path.stat().st_size for path in lives.iterdir())
        if size != written:
            written, heard = size, time.monotonic()
        if time.monotonic() - heard > LONGEST_SILENCE:
            raise Hang(f"nothing happened for {LONGEST_SILENCE:.0f} s, see {lives.parent / 'log'}")
    return process.returncode


def _end(processes: list[subprocess.Popen[bytes]], job: Path) -> None:
    """If the first is still running: stacks of all ranks into the log. And an end to all."""
    if processes[0].poll() is None:
        for pid in _workers(job):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(2)  # nothing tells when a dump is complete
    for process in processes:
        process.kill()
        process.wait()
    for pid in _workers(job):
        os.kill(pid, signal.SIGKILL)


def _workers(job: Path) -> list[int]:
    """The ranks of this job that are alive."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(job).encode() in words and b"torch.distributed.run" not in words:
            found.append(int(entry.name))
    return found
