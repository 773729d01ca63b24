"""Whole training steps of every peer and of our own modes, side by side in one run.

Peers are real and installed beside us: DDP, torch's ZeroRedundancyOptimizer, FSDP2, DeepSpeed and
fairscale. All train the same models on the same batches with the same fused AdamW (and Muon), each
in processes of its own; they take turns (heats.py), and ratios are taken within a round. One that
cannot run is listed with its error. Ranks talk over the loopback device, or between two hosts in
network namespaces over a cable of 1 or 10 Gbit/s, if this is root. Bytes are the kernel's counters.

The tables are printed, kept in docs/benchmarks/bench.json, and written with plots into
docs/benchmarks.md, where a run that differs from the one before shows as a diff.

    make bench                                              # some ten minutes on two cores
    make bench FULL=1                                       # everything: an hour
    .venv-bench/bin/python benchmarks/bench.py --only gpt --ranks 2 --methods DDP onecopy
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import costs
import machine
import page
from hosts import LOOPBACK, NoHosts, Wire, two_hosts
from measure import REFERENCES, Course, Entry, Progress, ends_by_exception, run
from methods import METHODS
from page import MEANING, as_text, changes
from results import ATTACHED, LAZY, NARROW, TCP, Table, table_from_json, to_json
from workloads import WORKLOADS

# ======== machine

_PROJECTS = ("torch", "deepspeed", "fairscale", "onecopy")


def describe() -> dict[str, str]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "processor": _first_in("/proc/cpuinfo", "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(_first_in('/proc/meminfo', 'MemTotal').split()[0]) / 2**20:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "threads": "one per rank, so 4 ranks share the cores of this machine if it has fewer",
        "commit": _commit(),
        **{name: _version(name) for name in _PROJECTS},
    }


def as_text(description: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in description.items())


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _version(project: str) -> str:
    try:
        return importlib.metadata.version(project)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _first_in(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


# ======== bench

# Where a turn is short, a disturbance weighs more, and another turn costs less.
ROUNDS = {"gpt": 4, "gpt-short": 5, "tiny": 7, "conv": 4, "muon": 7}
# One of each kind; the others are variants of them.
CORE = (
    *REFERENCES,
    *("FSDP2", "DeepSpeed ZeRO-1", "fairscale OSS"),
    *("onecopy", "onecopy attached to DDP", ATTACHED, TCP, LAZY),
)
# The fastest of those, for tables that take long.
FASTEST = (*REFERENCES, "fairscale OSS", "onecopy", "onecopy attached to DDP", ATTACHED, TCP, LAZY)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A table to be made."""

    workload: str
    ranks: int
    rounds: int
    gbit: float | None = None  # of the cable between two hosts
    methods: Sequence[str] = CORE

    @property
    def wire(self) -> str:
        return "loopback" if self.gbit is None else f"two hosts, {self.gbit:g} Gbit/s"


QUICK = (
    Wanted("gpt", 2, rounds=4),
    Wanted("gpt-short", 2, rounds=4),
    Wanted("tiny", 2, rounds=7),
    Wanted("gpt-short", 2, rounds=3, gbit=1),
)
# All methods where two ranks share a host. Turns take longer on a cable, and differ less.
FULL = (
    *(Wanted(name, 2, rounds, methods=tuple(METHODS)) for name, rounds in ROUNDS.items()),
    *(Wanted(name, 4, rounds=3) for name in ("gpt", "gpt-short")),
    *(Wanted("gpt-short", 2, rounds=3, gbit=gbit, methods=(*CORE, NARROW)) for gbit in (1, 10)),
    Wanted("gpt-short", 4, rounds=2, gbit=1),
    Wanted("gpt-short", 4, rounds=2, gbit=10, methods=FASTEST),
    Wanted("conv", 2, rounds=2, gbit=1),
)
PARTIAL = page.JSON.with_name("bench.partial.json")
# What the README shows.
HEADLINE = (
    *((name, 2, "loopback") for name in WORKLOADS),
    ("gpt-short", 4, "loopback"),
    *(("gpt-short", ranks, "two hosts, 1 Gbit/s") for ranks in (2, 4)),
)


def measure(wanted: Sequence[Wanted], methods: set[str], rounds: int | None) -> Iterator[Table]:
    """Make the tables, printing each as soon as it is there."""
    for number, each in enumerate(wanted, start=1):
        entries = [Entry(name, name) for name in METHODS if name in methods & {*each.methods}]
        table = _one_table(each, entries, rounds or each.rounds, f"{number}/{len(wanted)}")
        print(as_text(table), flush=True)
        yield table


def _one_table(wanted: Wanted, entries: Sequence[Entry], rounds: int, label: str) -> Table:
    workload = WORKLOADS[wanted.workload]
    try:
        with _wire(wanted) as wire:
            course = Course(workload, wanted.ranks, wire, wanted.wire, rounds)
            name = f"{label} {workload.name}, {wanted.ranks} ranks, {wanted.wire}"
            heats = course.heats(entries)
            with Progress(name, course.ticks(heats)) as progress:
                return run(course, heats, progress.tick)
    except NoHosts as reason:
        why = f"two hosts cannot be emulated here, {reason}"
        return Table(workload.name, workload.title, wanted.ranks, wanted.wire, 0, 0, skipped=why)


@contextlib.contextmanager
def _wire(wanted: Wanted) -> Iterator[Wire]:
    if wanted.gbit is None:
        yield LOOPBACK
    else:
        with two_hosts(wanted.gbit) as wire:
            yield wire


def main() -> None:
    args = _arguments()
    wanted = [w for w in (FULL if args.full else QUICK) if _is_asked_for(w, args)]
    if not wanted:
        sys.exit("no table fits these options; --full has more of them")
    before = _tables_in(page.JSON)
    description = machine.describe()
    description["this run"] = "full" if args.full else "quick"
    print(machine.as_text(description), MEANING, sep="\n", flush=True)
    begin = time.monotonic()
    record: dict[str, Any] = {"machine": description, "tables": [], "costs": []}
    tables: list[Table] = record["tables"]
    with ends_by_exception():
        for table in measure(wanted, args.methods, args.rounds):
            tables.append(table)
            if not args.print:
                _write_json(record, PARTIAL)  # an interrupted run has not been in vain
        if not args.print:
            record["costs"] = costs.measure(args.full)
    for cost in record["costs"]:
        print(costs.as_text(cost), flush=True)
    for line in changes(before, tables):
        print("changed:", line)
    if not args.print:
        description["this run"] += f", {(time.monotonic() - begin) / 60:.0f} minutes"
        _write_json(record, page.JSON)
        PARTIAL.unlink()
        shown = [t for t in tables if (t.workload, t.ranks, t.wire) in HEADLINE]
        page.write(description, tables, shown if args.full else None, record["costs"])
        written = [page.JSON, page.PAGE, *([page.README] if args.full else [])]
        print(f"\nwritten: {', '.join(map(str, written))}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="A run of a part of the tables or methods, or of other rounds, is printed and not "
        "written to files. The README shows a full run.",
    )
    parser.add_argument("--full", action="store_true", help="all tables and methods")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--wire", nargs="+", help="loopback, or speeds in Gbit/s")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rounds", type=int, help="of each table, instead of its own number")
    args = parser.parse_args()
    parts = (args.only, args.ranks, args.wire, args.methods)
    args.print = args.rounds is not None or parts != (list(WORKLOADS), [2, 4], None, list(METHODS))
    args.methods = {*args.methods, *REFERENCES}
    return args


def _is_asked_for(wanted: Wanted, args: argparse.Namespace) -> bool:
    wire = "loopback" if wanted.gbit is None else f"{wanted.gbit:g}"
    fits = wanted.workload in args.only and wanted.ranks in args.ranks
    return fits and (not args.wire or wire in args.wire)


def _tables_in(path: Path) -> list[Table]:
    if not path.exists():
        return []
    try:
        return [table_from_json(table) for table in json.loads(path.read_text())["tables"]]
    except (KeyError, TypeError, ValueError):  # of another version: nothing to compare with
        return []


def _write_json(record: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(record), indent=1) + "\n")


if __name__ == "__main__":
    main()
