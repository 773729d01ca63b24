"""Load: ranks that outnumber the cores train for a long time, while everything happens to them.

    make soak                            # 30 minutes, 8 ranks
    make soak MINUTES=5 SEED=7 RANKS=4

A soak is a row of voyages, each a training run from scratch in one of the cases of `soak_net.py`,
whose order the seed decides. A voyage has six legs, in a short soak two. Each leg is a job with
processes of its own, every other one on all ranks and those between on fewer, and starts from the
checkpoint of the leg before; neighbours lend each other all parts, the larger ones, or none. All
share two cores. Within a leg parameters are frozen and unfrozen, groups are added, gradients are
accumulated, clipped and dropped, modes change, checkpoints are written and gone back to, and the
job is copied, in an order that the seed decides. At every checkpoint and at the end of every leg it
is compared, bit for bit, with a shadow: the same training by plain optimizers, unsharded.

The exit code is 1 if anything differed, hung or raised, and the last lines say how to repeat it;
also if something that should have happened in a long soak never did.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import harness
from soak_checkpoints import WAYS
from soak_job import LENT_FROM, MODES, Leg, Tally
from soak_net import CASES
from soak_operations import EVERY_OPERATION, sail
from watchdog import FOREVER, verdict

LEGS = 6  # of a voyage
FEW_LEGS = 2  # of a voyage of a short soak, so that it meets more cases
CORES = 2
SHORT = 10.0  # minutes
LONG = 20.0  # minutes in which everything has to happen


@dataclass
class Soak:
    """What a soak is told, and what has become of it."""

    seed: int
    ranks: int
    rounds: int  # of an operation and a step, in a leg
    directory: Path
    legs_each: int = LEGS  # legs of a voyage
    tally: Tally = field(default_factory=Tally)
    steps_on: Counter[int] = field(default_factory=Counter)  # by number of ranks
    legs_of: Counter[str] = field(default_factory=Counter)  # by what they were about
    legs: int = 0
    voyages: int = 0
    changes: int = 0  # of the number of ranks
    failure: str = ""

    def voyage(self, number: int) -> Iterator[tuple[int, Leg]]:
        """The numbers of ranks and the legs of a voyage, which depend on the seed only."""
        draw = random.Random(f"{self.seed} {number}")
        around, place = divmod(number, len(CASES))
        case = random.Random(f"{self.seed} cases {around}").sample(list(CASES), len(CASES))[place]
        directory = self.directory / f"voyage{number}"
        fewer = range(1, max(self.ranks, 2))
        finds = None
        for leg in range(self.legs_each):
            leaves, lent_from = draw.choice(WAYS), draw.choice(LENT_FROM)
            # Numbered through, so that no two legs of a soak draw the same operations.
            of_all = number * self.legs_each + leg
            ranks = self.ranks if leg % 2 == 0 else draw.choice(fewer)
            told = (self.seed, of_all, case, self.rounds, directory, leaves, finds, lent_from)
            yield ranks, Leg(*told)
            finds = leaves

    def run(self, minutes: float, most_legs: float = float("inf")) -> None:
        """Until the time is over, a number of legs is done, or one of them fails."""
        start = time.monotonic()
        for number in itertools.count():
            self.voyages += 1
            for ranks, leg in self.voyage(number):
                self.changes += leg.finds is not None
                self._show(ranks, leg, time.monotonic() - start)
                try:
                    results = harness.run_on_ranks(ranks, sail, leg, fresh=True, **FOREVER)
                except harness.RankFailure as failure:
                    self.failure = str(failure)
                    return
                self.tally.add(results[0])
                self.steps_on[ranks] += results[0].steps
                self.legs_of.update(_about(leg))
                self.legs += 1
                if time.monotonic() - start > 60 * minutes or self.legs >= most_legs:
                    return
            shutil.rmtree(self.directory / f"voyage{number}")

    def _show(self, ranks: int, leg: Leg, seconds: float) -> None:
        if sys.stderr.isatty():
            line = f"{seconds / 60:.1f} min, leg {self.legs + 1}: {leg.case} on {ranks} ranks"
            line += f", {self.tally.steps} steps, {self.tally.comparisons} comparisons"
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

    def never_happened(self) -> list[str]:
        """What a long soak must have met, and this one has not."""
        modes = map(str, MODES)
        abouts = [*CASES, *map(_left_by, WAYS), *map(_lending, LENT_FROM)]
        expected = (
            (self.tally.operations, EVERY_OPERATION),
            (self.tally.modes, modes),
            (self.legs_of, abouts),
        )
        return [name for counted, names in expected for name in names if not counted[name]]

    def summary(self, minutes: float) -> str:
        tally = self.tally
        return (
            f"operations: {_listed(tally.operations)}\n"
            f"steps by mode: {_listed(tally.modes)}\n"
            f"steps by number of ranks: {_listed(self.steps_on)}\n"
            f"legs: {_listed(self.legs_of)}\n"
            f"soak: {minutes:.1f} minutes, {len(os.sched_getaffinity(0))} cores, "
            f"{self.ranks} ranks at most, {self.voyages} voyages, "
            f"{self.legs} legs, {self.changes} changes of world size, {tally.steps} steps, "
            f"{sum(tally.operations.values())} operations, {tally.checkpoints} checkpoints, "
            f"{tally.comparisons} comparisons: {verdict(self.failure)}"
        )


def _about(leg: Leg) -> list[str]:
    return [leg.case, _left_by(leg.leaves), _lending(leg.lent_from)]


def _left_by(way: str) -> str:
    return f"left by {way}"


def _lending(lent_from: int) -> str:
    return "lending nothing" if lent_from == sys.maxsize else f"lending from {lent_from} B"


def _listed(counts: Counter[Any]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))


def share_cores(most: int = CORES) -> None:
    """So many for all processes that are started from now on, however many the machine has."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:most])


def main() -> int:
    parser = argparse.ArgumentParser(description="train under load, beside an unsharded shadow")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (30)")
    parser.add_argument("--ranks", type=int, default=8, help="processes at most (8)")
    parser.add_argument("--seed", type=int, help="decides all that happens (a new one)")
    parser.add_argument("--rounds", type=int, default=25, help="steps in a leg (25)")
    parser.add_argument("--legs", type=int, help="end after so many legs, whatever the time")
    parser.add_argument("--legs-each", type=int, help="legs of a voyage (6; 2 in a short soak)")
    given = parser.parse_args()
    # Why: DDP warns on each rank where no parameter happens to be unused.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    share_cores()
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    print(f"soak: seed {seed}, {given.minutes:g} minutes, up to {given.ranks} ranks", flush=True)
    legs_each = given.legs_each or (FEW_LEGS if given.minutes < SHORT else LEGS)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="onecopy-soak-") as directory:
        soak = Soak(seed, given.ranks, given.rounds, Path(directory), legs_each)
        try:
            soak.run(float("inf") if given.legs else given.minutes, given.legs or float("inf"))
        finally:
            harness.shutdown()
            if sys.stderr.isatty():
                print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    is_long = given.legs is None and given.minutes >= LONG
    if is_long and not soak.failure and (never := soak.never_happened()):
        soak.failure = f"never happened in {given.minutes:g} minutes: {', '.join(never)}"
    if soak.failure:
        print(soak.failure)
    print(soak.summary((time.monotonic() - start) / 60))
    if soak.failure:
        print(
            f"to repeat it: {sys.executable} {sys.argv[0]} --seed {seed} --ranks {given.ranks} "
            f"--rounds {given.rounds} --legs-each {legs_each} --legs {soak.legs + 1}"
        )
    return int(bool(soak.failure))


if __name__ == "__main__":
    sys.exit(main())
