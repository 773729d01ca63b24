"""Whole training steps of every peer and of our own modes, side by side in one run.

Peers are real and installed beside us: DDP, torch's ZeroRedundancyOptimizer, FSDP2, DeepSpeed and
fairscale. All train the same models on the same batches with the same fused AdamW (and Muon), each
in processes of its own; they alternate (measure.py), and ratios are taken within a round. One that
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
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import page
from costs import Cost, cost_as_text
from hosts import LOOPBACK, NoHosts, two_hosts
from measure import REFERENCES, Entry, Progress, Setup, ends_by_exception, measure_groups
from methods import METHODS
from page import MEANING, as_text, changes
from results import ATTACHED, LAZY, NARROW, TCP, Table, table_from_json, to_json
from workloads import WORKLOADS

# Where a round is short, a disturbance changes it more, and another round costs less.
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
class TableSpec:
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
    TableSpec("gpt", 2, rounds=4),
    TableSpec("gpt-short", 2, rounds=4),
    TableSpec("tiny", 2, rounds=7),
    TableSpec("gpt-short", 2, rounds=3, gbit=1),
)
# All methods where two ranks share a host. Rounds take longer on a cable, and differ less.
FULL = (
    *(TableSpec(name, 2, rounds, methods=tuple(METHODS)) for name, rounds in ROUNDS.items()),
    *(TableSpec(name, 4, rounds=3) for name in ("gpt", "gpt-short")),
    *(TableSpec("gpt-short", 2, rounds=3, gbit=gbit, methods=(*CORE, NARROW)) for gbit in (1, 10)),
    TableSpec("gpt-short", 4, rounds=2, gbit=1),
    TableSpec("gpt-short", 4, rounds=2, gbit=10, methods=FASTEST),
    TableSpec("conv", 2, rounds=2, gbit=1),
)
COSTS_TIMEOUT = 1800  # seconds
PARTIAL = page.JSON.with_name("bench.partial.json")
# What the README shows.
HEADLINE = (
    *((name, 2, "loopback") for name in WORKLOADS),
    ("gpt-short", 4, "loopback"),
    *(("gpt-short", ranks, "two hosts, 1 Gbit/s") for ranks in (2, 4)),
)


def measure_tables(
    specs: Sequence[TableSpec], methods: set[str], rounds: int | None
) -> Iterator[Table]:
    """Make the tables, printing each as soon as it is there."""
    for number, each in enumerate(specs, start=1):
        entries = [Entry(name, name) for name in METHODS if name in methods & {*each.methods}]
        table = _one_table(each, entries, rounds or each.rounds, f"{number}/{len(specs)}")
        print(as_text(table), flush=True)
        yield table


def _one_table(spec: TableSpec, entries: Sequence[Entry], rounds: int, label: str) -> Table:
    workload = WORKLOADS[spec.workload]
    try:
        with (
            contextlib.nullcontext(LOOPBACK) if spec.gbit is None else two_hosts(spec.gbit) as wire
        ):
            setup = Setup(workload, spec.ranks, wire, spec.wire, rounds)
            name = f"{label} {workload.name}, {spec.ranks} ranks, {spec.wire}"
            groups = setup.groups(entries)
            with Progress(name, setup.ticks(groups)) as progress:
                return measure_groups(setup, groups, progress.tick)
    except NoHosts as reason:
        why = f"two hosts cannot be emulated here, {reason}"
        return Table(workload.name, workload.title, spec.ranks, spec.wire, 0, 0, skipped=why)


# ---------------------------------------------------------------------- other costs


def measure_costs(full: bool) -> list[Cost]:
    """What else users wait for: planning, collecting the full state, and checkpoints, with larger
    states and more rounds in a full run."""
    of_state = ["--mb", "128" if full else "32", "--rounds", "5" if full else "3", "--ranks", "2"]
    commands = (
        ["plan.py", "time"],
        ["state.py", "consolidate", *of_state],
        ["state.py", "checkpoint", *of_state],
    )
    return [
        Cost(cost["title"], tuple(cost["columns"]), tuple(map(tuple, cost["rows"])))
        for command in commands
        for cost in _run_costs(*command)
    ]


def _run_costs(program: str, *arguments: str) -> list[dict[str, Any]]:
    """Run another benchmark of this directory, and return the tables that it has appended."""
    name = f"{program} {arguments[0]}"
    print(f"measuring {name}", file=sys.stderr, flush=True)

    def failure(said: str) -> list[dict[str, Any]]:
        return [{"title": name, "columns": ["did not run"], "rows": [[said]]}]

    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory, "results.json")
        path = Path(__file__).with_name(program)
        command = [sys.executable, str(path), *arguments, "--json", str(results)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=COSTS_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return failure(f"did not end within {COSTS_TIMEOUT} s")
        if done.returncode != 0:
            return failure(
                (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            )
        if not results.exists():
            return failure("it has said nothing")
        found: list[dict[str, Any]] = json.loads(results.read_text())
        return found


# ---------------------------------------------------------------------- the machine

_PROJECTS = ("torch", "deepspeed", "fairscale", "onecopy")


def describe_machine() -> dict[str, str]:
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


# ---------------------------------------------------------------------- the run


def main() -> None:
    args = _arguments()
    specs = [w for w in (FULL if args.full else QUICK) if _is_asked_for(w, args)]
    if not specs:
        sys.exit("no table fits these options; --full has more of them")
    before = _tables_in(page.JSON)
    description = describe_machine()
    description["this run"] = "full" if args.full else "quick"
    on = ", ".join(f"{name} {value}" for name, value in description.items())
    print(on, MEANING, sep="\n", flush=True)
    begin = time.monotonic()
    record: dict[str, Any] = {"machine": description, "tables": [], "costs": []}
    tables: list[Table] = record["tables"]
    with ends_by_exception():
        for table in measure_tables(specs, args.methods, args.rounds):
            tables.append(table)
            if not args.print:
                _write_json(record, PARTIAL)  # an interrupted run has not been in vain
        if not args.print:
            record["costs"] = measure_costs(args.full)
    for cost in record["costs"]:
        print(cost_as_text(cost), flush=True)
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


def _is_asked_for(spec: TableSpec, args: argparse.Namespace) -> bool:
    wire = "loopback" if spec.gbit is None else f"{spec.gbit:g}"
    fits = spec.workload in args.only and spec.ranks in args.ranks
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
