"""Our own modes at two revisions, side by side in one run: has a change made them slower?

The other revision is checked out into a temporary work tree. Processes which import the package
from there alternate with those of the present one. Each mode is compared with
itself: the ratio is present / base, within rounds. A mode that looks slower is measured once more,
with more rounds, before it counts as slower. The last line has the geometric mean of all ratios.

    make bench-compare BASE=main
    .venv-bench/bin/python benchmarks/compare.py v0.1.0 --only gpt tiny --ranks 2 --rounds 7
    .venv-bench/bin/python benchmarks/compare.py v0.1.0 --ranks 4 --wire loopback 1
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hosts import LOOPBACK, NoHosts, two_hosts
from measure import Entry, Progress, Setup, alternate, ends_by_exception
from methods import OURS
from results import Samples, Spread, ratios
from workloads import WORKLOADS

ROOT = Path(__file__).parents[1]
RERUN_ROUNDS = 15  # for a mode that looked slower


class Cell(NamedTuple):
    """One mode on one workload: a line of the table."""

    line: str
    ratio: float | None  # median of present / base; None if one of them did not run
    is_slower: bool  # by more than 5 %, with the lower quartile above 1; or it did not run


def compare(setup: Setup, method: str, base: Path) -> Cell:
    entries = [Entry("base", method, base), Entry("present", method, ROOT)]
    with Progress(method, 2 * (setup.rounds + 2)) as progress:
        samples = alternate(setup, entries, progress.tick)
    for name in ("present", "base"):
        each = samples[name]
        if each.error is not None:
            line = f"{method:40}{name} did not run: {each.error}"
            return Cell(line, None, is_slower=name == "present")
    ratio = ratios(samples["present"], samples["base"])
    assert ratio is not None
    times = [_milliseconds(samples[name]) for name in ("base", "present")]
    spread = f"{ratio.middle:8.3f}  ({ratio.low:.3f}-{ratio.high:.3f})"
    line = f"{method:40}{times[0]:9.1f}{times[1]:9.1f}{spread}"
    is_slower = ratio.low > 1.0 and ratio.middle > 1.05
    return Cell(line + ("  slower" if is_slower else ""), ratio.middle, is_slower)


def compare_all(setup: Setup, methods: Sequence[str], base: Path) -> list[Cell]:
    """A table of these modes, printed as they are measured."""
    print(f"\n{setup.workload.title}; {setup.ranks} ranks, {setup.wire_name}")
    print(f"{'':40}{'base ms':>9}{'now ms':>9}{'ratio':>8}  (quartiles)", flush=True)
    cells = []
    for method in methods:
        cell = compare(setup, method, base)
        print(cell.line, flush=True)
        if cell.is_slower and cell.ratio is not None and setup.rounds < RERUN_ROUNDS:
            cell = compare(dataclasses.replace(setup, rounds=RERUN_ROUNDS), method, base)
            print(f"{cell.line}  ({RERUN_ROUNDS} rounds)", flush=True)
        cells.append(cell)
    return cells


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


def _gbit(text: str) -> float | None:
    """The speed of a cable; None for loopback."""
    return None if text == "loopback" else float(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a git revision")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=["gpt", "tiny"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--wire",
        nargs="+",
        type=_gbit,
        default=[None],
        metavar="WIRE",
        help="loopback, or the speed in Gbit/s of a cable between two hosts",
    )
    names = [method.name for method in OURS]
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    cells: list[Cell] = []
    with ends_by_exception(), checked_out(args.base) as base:
        for name, ranks, gbit in itertools.product(args.only, args.ranks, args.wire):
            wire_name = "loopback" if gbit is None else f"two hosts, {gbit:g} Gbit/s"
            try:
                with contextlib.nullcontext(LOOPBACK) if gbit is None else two_hosts(gbit) as wire:
                    setup = Setup(WORKLOADS[name], ranks, wire, wire_name, args.rounds)
                    cells += compare_all(setup, args.methods, base)
            except NoHosts as error:
                sys.exit(f"{wire_name}: {error}")
    known = [cell.ratio for cell in cells if cell.ratio is not None]
    if known:
        mean = statistics.geometric_mean(known)
        print(f"\ngeometric mean of {len(known)} ratios: {mean:.3f}, greatest {max(known):.3f}")
    slower = sum(cell.is_slower for cell in cells)
    print(f"{slower} slower than at {args.base}" if slower else "nothing slower")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
