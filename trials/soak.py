"""Soak: random operations on a training job for a long time, compared with an unsharded reference.

    make soak                            # 30 minutes, 8 ranks
    make soak MINUTES=5 SEED=7 RANKS=4

A soak is a sequence of runs. Each trains from scratch in one of the cases of soak_reference.py, in
an order that the seed decides. A run has six segments, in a short soak two. A segment is a job
with its own processes, which starts from the checkpoint of the segment before. Every other segment
is on all ranks, those between are on fewer; ranks of one host read all parts in each other's
memory, the larger parts, or none. All ranks share two cores.

Within a segment parameters are frozen and unfrozen, groups are added, gradients are accumulated,
clipped and dropped, modes change, checkpoints are saved and loaded, and the optimizer is copied, in
an order that the seed decides. At every checkpoint and at the end of every segment the job is
compared, bit for bit, with a reference: the same training by plain optimizers, unsharded.

The exit code is 1 if anything differed, hung or raised, or if an operation, mode or case was never
met in a long soak. The last lines say how to repeat a failure.
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
from soak_job import EVERY_OPERATION, MODES, SHARED_FROM, WAYS, Segment, Tally, run_segment
from soak_reference import CASES
from trial_common import JOB_TIMEOUTS, count_failures

SEGMENTS = 6  # of a run
FEW_SEGMENTS = 2  # of a run in a short soak, so that it meets more cases
CORES = 2
SHORT = 10.0  # minutes
LONG = 20.0  # minutes: a longer soak must meet everything


@dataclass
class Soak:
    """The settings of a soak, and its results."""

    seed: int
    ranks: int
    rounds: int  # of a segment, each an operation and a step
    directory: Path
    segments_each: int = SEGMENTS  # of a run
    tally: Tally = field(default_factory=Tally)
    steps_on: Counter[int] = field(default_factory=Counter)  # by number of ranks
    segments_about: Counter[str] = field(default_factory=Counter)  # by case, way, sharing
    segments: int = 0
    runs: int = 0
    changes: int = 0  # of the number of ranks
    failure: str = ""

    def plan(self, number: int) -> Iterator[tuple[int, Segment]]:
        """The segments of a run, and on how many ranks each runs. They depend on the seed only."""
        draw = random.Random(f"{self.seed} {number}")
        around, place = divmod(number, len(CASES))
        case = random.Random(f"{self.seed} cases {around}").sample(list(CASES), len(CASES))[place]
        directory = self.directory / f"run{number}"
        fewer = range(1, max(self.ranks, 2))
        loads_by = None
        for segment in range(self.segments_each):
            saves_by, shared_from = draw.choice(WAYS), draw.choice(SHARED_FROM)
            # Numbered over the whole soak, so that no two segments draw the same operations.
            of_all = number * self.segments_each + segment
            ranks = self.ranks if segment % 2 == 0 else draw.choice(fewer)
            yield (
                ranks,
                Segment(
                    self.seed, of_all, case, self.rounds, directory, saves_by, loads_by, shared_from
                ),
            )
            loads_by = saves_by

    def run(self, minutes: float, most_segments: float = float("inf")) -> None:
        """Run segments until the time is over, a number of them is done, or one fails."""
        start = time.monotonic()
        for number in itertools.count():
            self.runs += 1
            for ranks, segment in self.plan(number):
                self.changes += segment.loads_by is not None
                self._show(ranks, segment, time.monotonic() - start)
                try:
                    results = harness.run_on_ranks(
                        ranks, run_segment, segment, fresh=True, **JOB_TIMEOUTS
                    )
                except harness.RankFailure as failure:
                    self.failure = str(failure)
                    return
                self.tally.add(results[0])
                self.steps_on[ranks] += results[0].steps
                self.segments_about.update(_about(segment))
                self.segments += 1
                if time.monotonic() - start > 60 * minutes or self.segments >= most_segments:
                    return
            shutil.rmtree(self.directory / f"run{number}")

    def _show(self, ranks: int, segment: Segment, seconds: float) -> None:
        if sys.stderr.isatty():
            line = (
                f"{seconds / 60:.1f} min, segment {self.segments + 1}: {segment.case} on {ranks} "
            )
            line += f"ranks, {self.tally.steps} steps, {self.tally.comparisons} comparisons"
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

    def never_happened(self) -> list[str]:
        """What a long soak must meet, and this one did not."""
        abouts = [*CASES, *map(_saved_by, WAYS), *map(_sharing, SHARED_FROM)]
        expected = (
            (self.tally.operations, EVERY_OPERATION),
            (self.tally.modes, map(str, MODES)),
            (self.segments_about, abouts),
        )
        return [name for counted, names in expected for name in names if not counted[name]]

    def summary(self, minutes: float) -> str:
        tally = self.tally
        return (
            f"operations: {_listed(tally.operations)}\n"
            f"steps by mode: {_listed(tally.modes)}\n"
            f"steps by number of ranks: {_listed(self.steps_on)}\n"
            f"segments: {_listed(self.segments_about)}\n"
            f"soak: {minutes:.1f} minutes, {len(os.sched_getaffinity(0))} cores, "
            f"{self.ranks} ranks at most, {self.runs} runs, "
            f"{self.segments} segments, {self.changes} changes of world size, {tally.steps} steps, "
            f"{sum(tally.operations.values())} operations, {tally.checkpoints} checkpoints, "
            f"{tally.comparisons} comparisons: {count_failures(self.failure)}"
        )


def _about(segment: Segment) -> list[str]:
    return [segment.case, _saved_by(segment.saves_by), _sharing(segment.shared_from)]


def _saved_by(way: str) -> str:
    return f"saved by {way}"


def _sharing(shared_from: int) -> str:
    return "sharing nothing" if shared_from == sys.maxsize else f"sharing from {shared_from} B"


def _listed(counts: Counter[Any]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))


def share_cores(most: int = CORES) -> None:
    """Let all processes that are started from now on run on so many cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:most])


def main() -> int:
    parser = argparse.ArgumentParser(description="train under load, beside an unsharded reference")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (30)")
    parser.add_argument("--ranks", type=int, default=8, help="processes at most (8)")
    parser.add_argument("--seed", type=int, help="decides all that happens (a new one)")
    parser.add_argument("--rounds", type=int, default=25, help="steps in a segment (25)")
    parser.add_argument("--segments", "--legs", type=int, help="end after so many segments")
    parser.add_argument(
        "--segments-each", "--legs-each", type=int, help="segments of a run (6; 2 in a short soak)"
    )
    given = parser.parse_args()
    # Why: DDP warns on each rank where no parameter happens to be unused.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    share_cores()
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    print(f"soak: seed {seed}, {given.minutes:g} minutes, up to {given.ranks} ranks", flush=True)
    segments_each = given.segments_each or (FEW_SEGMENTS if given.minutes < SHORT else SEGMENTS)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="onecopy-soak-") as directory:
        soak = Soak(seed, given.ranks, given.rounds, Path(directory), segments_each)
        try:
            minutes = float("inf") if given.segments else given.minutes
            soak.run(minutes, given.segments or float("inf"))
        finally:
            harness.shutdown()
            if sys.stderr.isatty():
                print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    is_long = given.segments is None and given.minutes >= LONG
    if is_long and not soak.failure and (never := soak.never_happened()):
        soak.failure = f"never happened in {given.minutes:g} minutes: {', '.join(never)}"
    if soak.failure:
        print(soak.failure)
    print(soak.summary((time.monotonic() - start) / 60))
    if soak.failure:
        print(
            f"to repeat it: {sys.executable} {sys.argv[0]} --seed {seed} --ranks {given.ranks} "
            f"--rounds {given.rounds} --segments-each {segments_each} "
            f"--segments {soak.segments + 1}"
        )
    return int(bool(soak.failure))


if __name__ == "__main__":
    sys.exit(main())
