"""Threads and races: random delays around every collective and hook, overlap on, no bit changes.

    make races                           # 200 seeded runs on 2, 3 and 4 ranks
    make races RUNS=1000 SEED=5

A run trains a small model in one of many ways (`race_courses.py`): attached to DDP or to the bare
module, gathers awaited by the next forward, steps inside backward, accumulation, a checkpoint
written in the background; neighbours lend each other all parts, the larger ones, or none. It is
compared, bit for bit, with the same training without delays, without what need not overlap and
without lending.

The exit code is 1 if anything differed, hung or raised, and the last line says how to repeat it.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import harness
import torch.distributed as dist
from race_courses import LENT_FROM, Course, Run, courses, first_difference
from race_delays import Delays
from watchdog import FOREVER, verdict, watchdog

SIZES = (2, 3, 4)
BATCH = 20  # runs in one set of processes


class Difference(AssertionError):
    """Delays have changed a result."""


def race(world: harness.World, runs: Sequence[tuple[int, Course]], directory: Path) -> int:
    """Take courses with delays, one after the other; how often somebody slept, on this rank."""
    # Four are on two hosts, the last one alone: then what a host adds up comes first in any sum, so
    # that the order of sums, and their bits, are those of ranks that are all apart.
    harness.pretend_hosts(world, *{4: (0, 0, 0, 1)}.get(world.size, ()))
    expected: dict[Course, Any] = {}
    savers = dist.new_group()  # async_save communicates from a thread
    sleeps = 0
    ignored: list[str] = []  # errors in finalizers, which nobody can catch

    def note(error: Any) -> None:
        ignored.append(f"{error.exc_value!r} in {error.object!r}")

    for seed, course in runs:
        path = directory / str(seed)
        if course.plain not in expected:
            with watchdog():
                expected[course.plain] = Run(course.plain, None, path, savers).result()
        listening = mock.patch.object(sys, "unraisablehook", note)
        with watchdog(), listening, Delays(seed, world.rank) as delays:
            found = Run(course, delays, path, savers).result()
        sleeps += delays.count
        plain = expected[course.plain]
        different = first_difference(found, {key: plain[key] for key in found})
        if different is not None:
            what = f"run {seed}, {course}, rank {world.rank} of {world.size}"
            raise Difference(f"{different} differs: {what}")
        if ignored:
            raise RuntimeError(f"run {seed}, {course}: {ignored}")
        dist.barrier()
    return sleeps


def batches(seed: int, runs: int) -> list[tuple[int, list[tuple[int, Course]]]]:
    """World sizes, and what is run on so many ranks: seeds and courses."""
    every = list(courses())
    todo = [lending(number, every[number % len(every)]) for number in range(seed, seed + runs)]
    size = min(BATCH, max(1, -(-runs // len(SIZES))))  # a few runs are on all world sizes, too
    cut = [todo[start : start + size] for start in range(0, runs, size)]
    return [(SIZES[number % len(SIZES)], batch) for number, batch in enumerate(cut)]


def lending(seed: int, course: Course) -> tuple[int, Course]:
    """The seed and the course, with what it lends drawn from the seed."""
    return seed, replace(course, lent_from=random.Random(f"lent {seed}").choice(LENT_FROM))


def main() -> int:
    parser = argparse.ArgumentParser(description="seeded runs with random delays")
    parser.add_argument("--runs", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, help="of the first run (a new one)")
    given = parser.parse_args()
    # Why: DDP warns on each rank where no parameter happens to be unused.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    print(f"races: seed {seed}, {given.runs} runs", flush=True)
    start, done, sleeps, failure = time.monotonic(), 0, 0, ""
    lent: Counter[int] = Counter()
    with tempfile.TemporaryDirectory(prefix="onecopy-races-") as directory:
        for size, runs in batches(seed, given.runs):
            if sys.stderr.isatty():
                text = f"\r\x1b[2K{done} of {given.runs} runs, now on {size} ranks"
                print(text, end="", file=sys.stderr, flush=True)
            try:
                slept = harness.run_on_ranks(size, race, runs, Path(directory), **FOREVER)
            except harness.RankFailure as error:
                failure = str(error)
                break
            done, sleeps = done + len(runs), sleeps + sum(slept)
            lent.update(course.lent_from for _, course in runs)
    harness.shutdown()
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    if failure:
        print(failure)
    print(
        f"races: {(time.monotonic() - start) / 60:.1f} minutes, {done} runs on "
        f"{', '.join(map(str, SIZES))} ranks ({lent[LENT_FROM[0]]} lend everything, "
        f"{lent[LENT_FROM[1]]} the larger parts, {lent[LENT_FROM[2]]} nothing), {sleeps} delays: "
        f"{verdict(failure)}"
    )
    if failure:
        print(f"to repeat it: {sys.executable} {sys.argv[0]} --seed {seed} --runs {given.runs}")
    return int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())
