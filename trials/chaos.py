"""Kill ranks of real jobs at chosen calls, and compare the jobs with jobs that were not disturbed.

    python trials/chaos.py --trials 55 --machines 5        (make chaos)

A trial is one `kill -9` of a random rank: in backward, in step, in a gather, while memory is read,
in a save, in a load, or at any time; 55 trials reach every point of chaos_plan.py. Five share
a job, which is `examples/elastic.py` under `torchrun --max-restarts`: after each kill torchrun
starts the ranks again, and they resume from the last complete checkpoint. A job saves and loads by
`optimizer.save`, by the full state dict, or by DCP (see chaos_worker.py). Some jobs continue with
one rank less at some point: torchrun gives up, and is started again. In further trials a machine is
lost, a rank together with its agent: the other rank must end by itself with an error that names the
lost rank, and continues alone (`--nnodes=1:2`).

The model is small. So that it communicates like a large one, all parts are shared, and buckets are
small.

Afterwards the job is checked. From each checkpoint from which it resumed, the training is repeated
without kills, in one bucket, which is sent:

- on the same number of ranks: every loss of every rank must be equal to the bit;
- on the number of ranks before it shrank: the loss of a batch must be equal within BOUND;
- from the start, without any kill: equal to the bit, but within BOUND in drop-in mode on 3 ranks.
  DDP lays its buckets out anew after the first step of each attempt, and in a ring of 3 the order
  of a sum depends on the element's place in its bucket: a restart changes the last bit of a few
  gradients, whatever the optimizer.

A planned kill that did not happen, because its point was not reached, is a failure of the trial.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

from chaos_plan import SAVE_EVERY, STEPS, Plan, make_plans

# ---------------------------------------- running a job ----------------------------------------

WORKER = Path(__file__).resolve().parent / "chaos_worker.py"
# Seconds after which a job hangs if no rank has written a line. Each writes one in every step.
# The timeout of the process group is longer: a job that waits for it hangs, too.
LONGEST_SILENCE = 240.0
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see the example

Curve = dict[int, str]  # loss by step, in hexadecimal digits: equal means equal to the bit


class Hang(Exception):
    """A job did not end in time."""


@dataclass(slots=True)
class Attempt:
    """What the ranks wrote in one attempt: one start of all processes, by torchrun or by us. "0.2"
    is the second restart of the first launch; replays have other names."""

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


def read_attempts(job: Path) -> dict[str, Attempt]:
    attempts: dict[str, Attempt] = {}
    for path in sorted((job / "attempts").glob("*.jsonl")):
        name, _, rank = path.stem.rpartition("-")
        attempt = attempts.setdefault(name, Attempt(name))
        attempt.curves.setdefault(int(rank), {})
        for line in path.read_text().splitlines():
            _add_entry(attempt, int(rank), json.loads(line))
    return attempts


def _add_entry(attempt: Attempt, rank: int, entry: dict[str, Any]) -> None:
    if "pid" in entry:
        attempt.ranks, attempt.started = entry["ranks"], max(attempt.started, entry["time"])
    if "loss" in entry:
        attempt.curves[rank][entry["step"]] = entry["loss"]
    if "resumed" in entry:
        attempt.resumed = entry["resumed"]
    if "saved" in entry and rank == 0:
        attempt.saved = max(attempt.saved, entry["saved"])
    if "killed" in entry:
        attempt.kill = entry
    if "error" in entry:
        attempt.errors[rank] = entry["error"]
    attempt.joined += "joined" in entry
    attempt.done += "done" in entry


def torchrun(job: Path, ranks: int, restarts: int, *arguments: str) -> int:
    """Run a job, return its exit code. If it hangs, write all stacks to the log and raise Hang."""
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return _run_agents(job, [options], arguments, OWN_STORE if restarts else {})


def torchrun_on_two_machines(job: Path, restarts: int, *arguments: str) -> int:
    """Run a job by two agents with a rank each, of which one is enough. Return the exit code of the
    first, which hosts the rendezvous and so must not be lost."""
    with socket.create_server(("localhost", 0)) as server:  # a free port
        port = server.getsockname()[1]
    agents = [
        [
            *("--nnodes=1:2", "--nproc-per-node=1", f"--max-restarts={restarts}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"),
            # How long the first waits for the second, and who is the first: else they race for it.
            f"--rdzv-conf=last_call_timeout=40,is_host={is_host}",
        ]
        for is_host in ("true", "false")
    ]
    return _run_agents(job, agents, arguments, OWN_STORE)


def _run_agents(
    job: Path, agents: list[list[str]], arguments: tuple[str, ...], environment: dict[str, str]
) -> int:
    (job / "attempts").mkdir(exist_ok=True)
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
        return _wait_for(processes[0], job / "attempts")
    finally:
        _end_agents(processes, job)


def _wait_for(process: subprocess.Popen[bytes], attempts: Path) -> int:
    written, heard = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        size = sum(path.stat().st_size for path in attempts.iterdir())
        if size != written:
            written, heard = size, time.monotonic()
        if time.monotonic() - heard > LONGEST_SILENCE:
            raise Hang(
                f"nothing happened for {LONGEST_SILENCE:.0f} s, see {attempts.parent / 'log'}"
            )
    return process.returncode


def _end_agents(processes: list[subprocess.Popen[bytes]], job: Path) -> None:
    """End all processes of the job. If the first agent still runs, write all stacks to the log."""
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


# ---------------------------------------- checking a job ----------------------------------------

BOUND = 1e-5  # relative
# What torch says of a lost connection, if it was waiting inside dcp.save: in the collectives that
# DCP makes on the job's own group, of which the optimizer knows nothing.
IN_DCP = re.compile(
    r"torch/distributed/checkpoint/state_dict_saver\.py\", line \d+, in save\n((?!\n\n).)*"
    r"\nRuntimeError: \[[^\]\n]*gloo[^\]\n]*\] "
    r"(Connection closed by peer|(Read|Write) error) \[[^\n]*\s*\Z",
    re.DOTALL,
)
TRIES = 3  # to run a job that loses its port to another program


@dataclass(slots=True)
class Tally:
    """Counts over all jobs."""

    kills: Counter[str] = field(default_factory=Counter)  # by phase
    places: Counter[str] = field(default_factory=Counter)  # the same by point
    planned: int = 0  # kills
    jobs: int = 0
    resumed: int = 0  # kills after which the job continued
    told_by_torch: int = 0  # lost machines whose survivor waited in DCP
    lost_steps: int = 0  # begun, and done again after the restart
    hangs: int = 0
    not_loaded: int = 0
    other_faults: int = 0
    compared: int = 0  # losses, to the bit
    means: int = 0  # losses of whole batches, within the bound
    differing: int = 0
    widest: float = 0.0  # relative difference where a bound holds
    slowest_restart: float = 0.0
    begun_again: int = 0  # jobs that lost a port to another program

    @property
    def missed(self) -> int:
        return self.planned - self.kills.total()

    @property
    def failures(self) -> int:
        faults = self.hangs + self.not_loaded + self.other_faults + self.differing
        return faults + max(0, self.missed)

    def add(self, other: Tally) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            is_extreme = each.name in ("widest", "slowest_restart")
            setattr(self, each.name, max(mine, theirs) if is_extreme else mine + theirs)

    def __str__(self) -> str:
        by_phase = ", ".join(f"{phase} {self.kills[phase]}" for phase in sorted(self.kills))
        return (
            f"chaos: {self.kills.total()} of {self.planned} kills in {self.jobs} jobs ({by_phase}) "
            f"at {len(self.places)} points: "
            f"{self.resumed} resumed, {self.lost_steps} steps lost and done again, "
            f"{self.told_by_torch} told by torch alone, in DCP, "
            f"{self.hangs} hangs, {self.not_loaded} checkpoints that did not load, "
            f"{self.differing} of {self.compared + self.means} losses differ "
            f"({self.compared} compared to the bit, {self.means} means within {BOUND:g}, of which "
            f"the widest is {self.widest:.1e} off), {self.other_faults} other faults; "
            f"slowest restart {self.slowest_restart:.0f} s; "
            f"{self.begun_again} jobs begun again because a port was taken"
        )


class PortTaken(Exception):
    """A job could not be run as it was planned."""


class Job:
    """Runs one job, repeats it without kills, and compares the two."""

    def __init__(self, plan: Plan, directory: Path, tally: Tally) -> None:
        self.plan, self.directory, self.tally = plan, directory, tally
        self.faults: list[str] = []

    def run(self) -> list[str]:
        """Return what went wrong. Raise PortTaken if nothing else did."""
        plan = self.plan
        orders = {
            "mode": plan.mode,
            "way": plan.way,
            "shares_memory": plan.shares_memory,
            "kills": plan.kills,
        }
        (self.directory / "orders.json").write_text(
            json.dumps({**orders, "steps": STEPS, "save_every": SAVE_EVERY})
        )
        try:
            code = self._launch()
            attempts = list(read_attempts(self.directory).values())
            lost_a_port = any(attempt.lost_its_port for attempt in attempts)
            self._check_attempts(attempts, None if lost_a_port else code)
            if lost_a_port and not self.faults:
                raise PortTaken
            if not self.faults:
                self._check_losses()
        except Hang as hang:
            self.tally.hangs += 1
            self.faults.append(str(hang))
        return self.faults

    def _launch(self) -> int:
        """Run the launches of the plan, and return the exit code of the last one."""
        *others, (ranks, kills) = self.plan.launches
        if self.plan.on_machines:
            return torchrun_on_two_machines(self.directory, kills, "train", "0")
        for number, (more, last) in enumerate(others):  # the last kill is one too many
            torchrun(self.directory, more, last - 1, "train", str(number))
        return torchrun(self.directory, ranks, kills, "train", str(len(others)))

    def _check_attempts(self, attempts: Sequence[Attempt], code: int | None) -> None:
        """Check that each attempt ended by its kill alone, and resumed where those before it had
        saved. Without an exit code, the number of attempts and their end are not checked."""
        self.tally.planned += len(self.plan.kills)
        saved = begun = 0
        for attempt, after in zip_longest(attempts, attempts[1:]):
            self._check_attempt(attempt, is_last=after is None and code is not None)
            if attempt.resumed is not None:
                if attempt.resumed < saved:
                    self._fault(
                        f"{attempt.name} resumed at {attempt.resumed}, {saved} was complete"
                    )
                self.tally.lost_steps += max(0, begun - attempt.resumed)
                begun = attempt.resumed
            saved = max(saved, attempt.saved)
            if attempt.kill and after:
                self.tally.kills[attempt.kill["phase"]] += 1
                self.tally.places[f"{attempt.kill['phase']}: {attempt.kill['where']}"] += 1
                begun += attempt.kill["begun"]
                wait = after.started - attempt.kill["time"]
                self.tally.slowest_restart = max(self.tally.slowest_restart, wait)
        if code is not None and (len(attempts) != len(self.plan.kills) + 1 or code != 0):
            self._fault(f"{len(attempts)} attempts, torchrun ended with {code}")
        if not self.faults:
            self.tally.resumed += len(attempts) - 1

    def _check_attempt(self, attempt: Attempt, is_last: bool) -> None:
        order, wrong = self.plan.kills.get(attempt.name), attempt.what_went_wrong
        if order and not attempt.kill and not attempt.lost_its_port:
            if attempt.done:
                self._fault(f"{attempt.name} never came to a kill {order['point']}")
            elif attempt.did_not_load:
                self.tally.not_loaded += 1
                self.faults.append(f"{attempt.name} did not load:\n{wrong}")
            else:
                self._fault(f"{attempt.name} ended by itself:\n{wrong}")
        if attempt.kill and self.plan.on_machines:
            self._check_survivor(attempt, attempt.kill["killed"])
        if is_last and not order and attempt.did_not_load:
            self.tally.not_loaded += 1
            self.faults.append(f"{attempt.name} did not load:\n{wrong}")
        elif is_last and (attempt.done != attempt.ranks or attempt.last_step not in (0, STEPS)):
            self._fault(f"{attempt.name} did not come to its end:\n{wrong}")

    def _check_survivor(self, attempt: Attempt, lost: int) -> None:
        """Check that the other rank ended by itself, with an error that names the lost one. In
        DCP's own save the error may be torch's."""
        error = attempt.errors.get(1 - lost, "")
        said = rf"\brank {lost} (did not arrive|did not answer|ended)"
        names = rf"{said}|from rank {lost}\b|of the ranks \[{lost}\]"
        if attempt.kill and attempt.kill["phase"] == "dcp save" and IN_DCP.search(error):
            self.tally.told_by_torch += 1
        elif not re.search(names, error):
            self._fault(f"{attempt.name}: the other machine does not name rank {lost}:\n{error}")

    def _fault(self, what: str) -> None:
        self.tally.other_faults += 1
        self.faults.append(what)

    # -------------------------------------------------------------------------- losses

    def _check_losses(self) -> None:
        attempts = list(read_attempts(self.directory).values())
        trained = [attempt for attempt in attempts if attempt.last_step]
        ranks = self.plan.launches[0][0]
        fewer = next((each for each in trained if each.ranks < ranks), None)
        replays = [(each.ranks, each.name, each.last_step) for each in trained]
        replays.append((ranks, "never killed", STEPS))
        replays.append((attempts[-1].ranks, "the last checkpoint", STEPS))
        if fewer:
            replays.append((ranks, f"{fewer.name} on {ranks}", STEPS))
        for size in {size for size, _, _ in replays}:
            self._replay(size, [(name, until) for ranks, name, until in replays if ranks == size])
        if self.faults:
            return
        found = read_attempts(self.directory)
        for attempt in trained:
            self._compare(attempt, found[f"again {attempt.name}"])
        whole = found["again never killed"]
        for attempt in attempts:
            if attempt.ranks == ranks and self._sums_in_one_order(ranks):
                self._compare(attempt, whole)
            elif attempt.ranks == ranks:
                self._compare_means(attempt, whole)
            elif fewer:
                self._compare_means(attempt, found[f"again {fewer.name} on {ranks}"])
        if found["again the last checkpoint"].done != attempts[-1].ranks:
            self.tally.not_loaded += 1
            self.faults.append("the last checkpoint did not load")

    def _sums_in_one_order(self, ranks: int) -> bool:
        return ranks < 3 or self.plan.mode != "drop-in"

    def _replay(self, ranks: int, replays: list[tuple[str, int]]) -> None:
        orders = []
        for name, until in replays:
            start = f"kept/{name.split(' ')[0]}"
            if name == "the last checkpoint":
                start = "checkpoints"
            orders.append({"name": f"again {name}", "start": start, "until": until})
        path = self.directory / f"replay-on-{ranks}.json"
        path.write_text(json.dumps(orders))
        if torchrun(self.directory, ranks, 0, "replay", path.name) != 0:
            self._fault(f"the undisturbed run on {ranks} ranks failed")

    def _compare(self, attempt: Attempt, other: Attempt) -> None:
        for rank, curve in attempt.curves.items():
            theirs = other.curves.get(rank, {})
            self.tally.compared += len(curve)
            wrong = [
                step
                for step, loss in curve.items()
                if loss != theirs.get(step) or not math.isfinite(float.fromhex(loss))
            ]
            if wrong:
                self.tally.differing += len(wrong)
                self.faults.append(
                    f"{attempt.name}, rank {rank}: {len(wrong)} of {len(curve)} losses differ from "
                    f"{other.name}, first at step {wrong[0]}: {float.fromhex(curve[wrong[0]])!r}"
                )

    def _compare_means(self, attempt: Attempt, other: Attempt) -> None:
        theirs = other.mean()
        for step, loss in attempt.mean().items():
            expected = theirs.get(step, math.nan)
            difference = abs(loss - expected) / abs(expected)
            self.tally.means += 1
            self.tally.widest = max(self.tally.widest, difference)
            if not difference <= BOUND:  # a NaN is not
                self.tally.differing += 1
                self.faults.append(
                    f"{attempt.name}, step {step}: {difference:.1e} off {other.name}"
                )


def run(plan: Plan, tally: Tally) -> None:
    start = time.monotonic()
    for _ in range(TRIES):
        directory = Path(tempfile.mkdtemp(prefix="onecopy-chaos-"))
        of_job = Tally(jobs=1)
        try:
            faults = Job(plan, directory, of_job).run()
            break
        except PortTaken:
            tally.begun_again += 1
            shutil.rmtree(directory)
    else:
        of_job = Tally(jobs=1, planned=len(plan.kills))
        faults = [f"lost its port {TRIES} times"]
    tally.add(of_job)
    kills = len(plan.kills)
    print(f"{plan}: kills {of_job.kills.total()}, {time.monotonic() - start:.0f} s", flush=True)
    if faults:
        print(*faults, sep="\n")
        count = "--trials 0 --machines 1" if plan.on_machines else f"--trials {kills} --machines 0"
        print(f"FAILED. To repeat: python trials/chaos.py --seed {plan.seed} {count}")
        print(f"All that it wrote: {directory}", flush=True)
    else:
        shutil.rmtree(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trials", type=int, default=55, help="ranks to kill")
    parser.add_argument("--machines", type=int, default=5, help="machines to lose")
    parser.add_argument("--seed", type=int, help="of the first job (a new one); then seed+1")
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    trials, machines = options.trials, options.machines
    print(f"chaos: seed {seed}, {trials} ranks and {machines} machines to kill", flush=True)
    tally = Tally()
    for plan in make_plans(trials, machines, seed):
        run(plan, tally)
    for place, count in sorted(tally.places.items()):
        print(f"{count:4}  {place}")
    print(tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
