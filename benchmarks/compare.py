"""Our own modes at two revisions, side by side in one run: has a change made them slower?

The other revision is checked out into a temporary work tree, and its package is imported from there
by teams of their own, which take turns with those of the present one. Each mode is compared with
itself: the ratio is present / base, within rounds.

    make bench-compare BASE=main
    .venv-bench/bin/python benchmarks/compare.py v0.1.0 --only gpt tiny --ranks 2 --rounds 7
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from heats import Course, Entry, take_turns
from hosts import LOOPBACK
from methods import OURS
from progress import Progress, ends_by_exception
from results import Samples, Spread, ratios
from workloads import WORKLOADS

ROOT = Path(__file__).parents[1]


def compare(course: Course, method: str, base: Path, progress: Progress) -> tuple[str, bool]:
    """A line of the table, and whether the mode has become slower beyond the noise."""
    entries = [Entry("base", method, base), Entry("present", method, ROOT)]
    samples = take_turns(course, entries, progress.tick)
    for name in ("present", "base"):
        each = samples[name]
        if each.error is not None:
            return f"{method:32}{name} did not run: {each.error}", name == "present"
    ratio = ratios(samples["present"], samples["base"])
    assert ratio is not None
    times = [_milliseconds(samples[name]) for name in ("base", "present")]
    is_slower = ratio.low > 1.0 and ratio.middle > 1.05
    spread = f"{ratio.middle:8.3f}  ({ratio.low:.3f}-{ratio.high:.3f})"
    line = f"{method:32}{times[0]:9.1f}{times[1]:9.1f}{spread}"
    return line + ("  slower" if is_slower else ""), is_slower


def _milliseconds(samples: Samples) -> float:
    return Spread.of(samples.seconds()).middle * 1e3


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A temporary work tree of that revision."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory, "base")
        git = ["git", "-C", str(ROOT), "worktree"]
        done = subprocess.run(
            [*git, "add", "--detach", str(tree), revision],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"git knows no revision {revision!r}: {done.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a git revision")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=["gpt", "tiny"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=5)
    names = [method.name for method in OURS]
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    slower = 0
    with ends_by_exception(), checked_out(args.base) as base:
        for name, ranks in itertools.product(args.only, args.ranks):
            course = Course(WORKLOADS[name], ranks, LOOPBACK, "loopback", args.rounds)
            print(f"\n{course.workload.title}; {ranks} ranks, {course.wire_name}")
            print(f"{'':32}{'base ms':>9}{'now ms':>9}{'ratio':>8}  (quartiles)", flush=True)
            for method in args.methods:
                with Progress(method, 2 * (args.rounds + 2)) as progress:
                    line, is_slower = compare(course, method, base, progress)
                print(line, flush=True)
                slower += is_slower
    print(f"\n{slower} slower than at {args.base}" if slower else "\nnothing slower")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
