"""Kill ranks of real jobs at chosen moments, and see whether the jobs go on as if nothing had been.

    python trials/chaos.py --trials 55 --machines 5        (make chaos)

A trial is one `kill -9` of a random rank: in backward, in step, in gather, while memory is lent, in
save, in load, or at any time; 55 trials meet every site of `chaos_plan.py`. Five trials share a
job, which is `examples/elastic.py` under `torchrun --max-restarts`: after each kill torchrun starts
the ranks again, and they resume from the last complete checkpoint. A job saves and loads in one of
the ways of `chaos_ways.py`: by `optimizer.save`, by the full state dict, or by DCP. Some of the
jobs go on with one rank less at some point: torchrun gives up, and is started again. In further
trials a whole machine is lost, a rank together with its agent: the other one is left to find that
out by itself, must name the rank that is gone, and goes on alone (`--nnodes=1:2`).

The model is small: so that it is lent and overlapped like a large one, everything counts as worth
lending, and buckets are small.

Afterwards the job is judged. From each checkpoint from which it resumed, the training is repeated
without a kill, in one bucket, which is sent:

- on the same number of ranks: every loss of every rank must be equal to the bit;
- on the number of ranks there was before: the loss of a batch must be equal within BOUND;
- from the very start, as if nobody had ever been killed: equal to the bit, but within BOUND in
  drop-in mode on 3 ranks. DDP lays its buckets out anew after the first step of each life, and in
  a ring of 3 the order of a sum depends on the element's place in its bucket: a restart changes the
  last bit of a few gradients, whatever the optimizer.

A kill that was planned and did not happen, because its site was not met, is a failure of the trial.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path

from chaos_job import Hang, Life, read_lives, torchrun, torchrun_on_two_machines
from chaos_plan import SAVE_EVERY, STEPS, Plan, make_plans

BOUND = 1e-5  # relative
# What torch says of a lost connection, if it was waiting inside dcp.save: in the collectives that
# DCP makes on the job's own group, of which the optimizer knows nothing.
IN_DCP = re.compile(
    r"torch/distributed/checkpoint/state_dict_saver\.py\", line \d+, in save\n((?!\n\n).)*"
    r"\nRuntimeError: \[[^\]\n]*gloo[^\]\n]*\] "
    r"(Connection closed by peer|(Read|Write) error) \[[^\n]*\s*\Z",
    re.DOTALL,
)
ATTEMPTS = 3  # to run a job that loses its port to another program


@dataclass(slots=True)
class Tally:
    """What was tried and seen, over all jobs."""

    kills: Counter[str] = field(default_factory=Counter)  # by phase
    places: Counter[str] = field(default_factory=Counter)  # the same by site
    planned: int = 0  # kills
    jobs: int = 0
    resumed: int = 0  # kills after which the job went on, as is judged
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
            f"at {len(self.places)} sites: "
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
    """One job: run, repeated undisturbed, judged."""

    def __init__(self, plan: Plan, directory: Path, tally: Tally) -> None:
        self.plan, self.directory, self.tally = plan, directory, tally
        self.faults: list[str] = []

    def run(self) -> list[str]:
        """What went wrong. Raises PortTaken if that was all."""
        plan = self.plan
        orders = {"mode": plan.mode, "way": plan.way, "lends": plan.lends, "kills": plan.kills}
        (self.directory / "orders.json").write_text(
            json.dumps({**orders, "steps": STEPS, "save_every": SAVE_EVERY})
        )
        try:
            code = self._launch()
            lives = list(read_lives(self.directory).values())
            lost_a_port = any(life.lost_its_port for life in lives)
            self._judge_lives(lives, None if lost_a_port else code)
            if lost_a_port and not self.faults:
                raise PortTaken
            if not self.faults:
                self._judge_losses()
        except Hang as hang:
            self.tally.hangs += 1
            self.faults.append(str(hang))
        return self.faults

    def _launch(self) -> int:
        """The exit code of the last launch."""
        *others, (ranks, kills) = self.plan.launches
        if self.plan.on_machines:
            return torchrun_on_two_machines(self.directory, kills, "train", "0")
        for number, (more, last) in enumerate(others):  # the last kill is one too many
            torchrun(self.directory, more, last - 1, "train", str(number))
        return torchrun(self.directory, ranks, kills, "train", str(len(others)))

    def _judge_lives(self, lives: Sequence[Life], code: int | None) -> None:
        """Each was ended by its kill alone, and began where those before it had saved. Without an
        exit code the number of lives and their end tell nothing."""
        self.tally.planned += len(self.plan.kills)
        saved = begun = 0
        for life, after in zip_longest(lives, lives[1:]):
            self._judge_life(life, is_last=after is None and code is not None)
            if life.resumed is not None:
                if life.resumed < saved:
                    self._fault(f"{life.name} resumed at {life.resumed}, {saved} was complete")
                self.tally.lost_steps += max(0, begun - life.resumed)
                begun = life.resumed
            saved = max(saved, life.saved)
            if life.kill and after:
                self.tally.kills[life.kill["phase"]] += 1
                self.tally.places[f"{life.kill['phase']}: {life.kill['where']}"] += 1
                begun += life.kill["begun"]
                wait = after.started - life.kill["time"]
                self.tally.slowest_restart = max(self.tally.slowest_restart, wait)
        if code is not None and (len(lives) != len(self.plan.kills) + 1 or code != 0):
            self._fault(f"{len(lives)} lives, torchrun ended with {code}")
        if not self.faults:
            self.tally.resumed += len(lives) - 1

    def _judge_life(self, life: Life, is_last: bool) -> None:
        order, wrong = self.plan.kills.get(life.name), life.what_went_wrong
        if order and not life.kill and not life.lost_its_port:
            if life.done:
                self._fault(f"{life.name} never came to a kill {order['site']}")
            elif life.did_not_load:
                self.tally.not_loaded += 1
                self.faults.append(f"{life.name} did not load:\n{wrong}")
            else:
                self._fault(f"{life.name} ended by itself:\n{wrong}")
        if life.kill and self.plan.on_machines:
            self._judge_survivor(life, life.kill["killed"])
        if is_last and not order and life.did_not_load:
            self.tally.not_loaded += 1
            self.faults.append(f"{life.name} did not load:\n{wrong}")
        elif is_last and (life.done != life.ranks or life.last_step not in (0, STEPS)):
            self._fault(f"{life.name} did not come to its end:\n{wrong}")

    def _judge_survivor(self, life: Life, lost: int) -> None:
        """Nobody has ended it: it has noticed, and says who is gone. In DCP's own save torch may
        have noticed."""
        error = life.errors.get(1 - lost, "")
        said = rf"\brank {lost} (did not arrive|did not answer|ended)"
        names = rf"{said}|from rank {lost}\b|of the ranks \[{lost}\]"
        if life.kill and life.kill["phase"] == "dcp save" and IN_DCP.search(error):
            self.tally.told_by_torch += 1
        elif not re.search(names, error):
            self._fault(f"{life.name}: the other machine does not name rank {lost}:\n{error}")

    def _fault(self, what: str) -> None:
        self.tally.other_faults += 1
        self.faults.append(what)

    # -------------------------------------------------------------------------- losses

    def _judge_losses(self) -> None:
        lives = list(read_lives(self.directory).values())
        ranks = self.plan.launches[0][0]
        fewer = next((life for life in lives if life.ranks < ranks and life.last_step), None)
        replays = [(life.ranks, life.name, life.last_step) for life in lives if life.last_step]
        replays.append((ranks, "never killed", STEPS))
        replays.append((lives[-1].ranks, "the last checkpoint", STEPS))
        if fewer:
            replays.append((ranks, f"{fewer.name} on {ranks}", STEPS))
        for size in {size for size, _, _ in replays}:
            self._replay(size, [(name, until) for ranks, name, until in replays if ranks == size])
        if self.faults:
            return
        found = read_lives(self.directory)
        for life in lives:
            if life.last_step:
                self._compare(life, found[f"again {life.name}"])
        whole = found["again never killed"]
        for life in lives:
            if life.ranks == ranks and self._sums_in_one_order(ranks):
                self._compare(life, whole)
            elif life.ranks == ranks:
                self._compare_means(life, whole)
            elif fewer:
                self._compare_means(life, found[f"again {fewer.name} on {ranks}"])
        if found["again the last checkpoint"].done != lives[-1].ranks:
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

    def _compare(self, life: Life, other: Life) -> None:
        for rank, curve in life.curves.items():
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
                    f"{life.name}, rank {rank}: {len(wrong)} of {len(curve)} losses differ from "
                    f"{other.name}, first at step {wrong[0]}: {float.fromhex(curve[wrong[0]])!r}"
                )

    def _compare_means(self, life: Life, other: Life) -> None:
        theirs = other.mean()
        for step, loss in life.mean().items():
            expected = theirs.get(step, math.nan)
            difference = abs(loss - expected) / abs(expected)
            self.tally.means += 1
            self.tally.widest = max(self.tally.widest, difference)
            if not difference <= BOUND:  # a NaN is not
                self.tally.differing += 1
                self.faults.append(f"{life.name}, step {step}: {difference:.1e} off {other.name}")


def run(plan: Plan, tally: Tally) -> None:
    start = time.monotonic()
    for _ in range(ATTEMPTS):
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
        faults = [f"lost its port {ATTEMPTS} times"]
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
