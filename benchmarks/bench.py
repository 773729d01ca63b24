"""Whole training steps of every peer and of our own modes, side by side in one run.

Peers are real and installed beside us: DDP, torch's ZeroRedundancyOptimizer, FSDP2, DeepSpeed and
fairscale. All train the same models on the same batches with the same fused AdamW (and Muon), each
in processes of its own; they take turns (heats.py), and ratios are taken within a round. One that
cannot run is listed with its error. Ranks talk over the loopback device, or between two hosts in
network namespaces over a cable of 1 or 10 Gbit/s, if this is root. Bytes are the kernel's counters.

The tables are printed, kept in docs/benchmarks/bench.json, and written with plots into
docs/benchmarks.md, where a run that differs from the one before shows as a diff.

    make bench                                              # a few minutes
    make bench FULL=1                                       # everything: an hour or two
    .venv-bench/bin/python benchmarks/bench.py --only gpt --ranks 2 --methods DDP onecopy --print
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import costs
import machine
import page
from goals import ATTACHED, LAZY
from heats import REFERENCES, Course, Entry, run
from hosts import LOOPBACK, NoHosts, Wire, two_hosts
from methods import METHODS
from progress import Progress
from results import Table, table_from_json, to_json
from tables import MEANING, as_text, changes
from workloads import WORKLOADS

QUICK_ROUNDS, FULL_ROUNDS = 3, 7
# In a quick run one table has all methods, and the others these, which fit into one heat.
CORE = (
    *REFERENCES,
    *("FSDP2", "DeepSpeed ZeRO-1", "fairscale OSS"),
    *("onecopy", "onecopy attached to DDP", ATTACHED, LAZY),
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A table to be made."""

    workload: str
    ranks: int
    gbit: float | None = None  # of the cable between two hosts
    methods: Sequence[str] = tuple(METHODS)

    @property
    def wire(self) -> str:
        return "loopback" if self.gbit is None else f"two hosts, {self.gbit:g} Gbit/s"


QUICK = (
    Wanted("gpt-short", 2),
    *(Wanted(name, 2, methods=CORE) for name in ("gpt", "tiny", "conv", "muon")),
    Wanted("gpt-short", 4, methods=CORE),
    Wanted("gpt-short", 2, gbit=1, methods=CORE),
)
FULL = (
    *(Wanted(workload, ranks) for workload in WORKLOADS for ranks in (2, 4)),
    *(Wanted("gpt", ranks, gbit) for gbit in (1, 10) for ranks in (2, 4)),
    *(Wanted("gpt-short", 2, gbit) for gbit in (1, 10)),
)


def measure(wanted: Sequence[Wanted], methods: set[str], rounds: int) -> list[Table]:
    """Make the tables, printing each as soon as it is there."""
    found = []
    for number, each in enumerate(wanted, start=1):
        entries = [Entry(name, name) for name in METHODS if name in methods & {*each.methods}]
        table = _one_table(each, entries, rounds, f"{number}/{len(wanted)}")
        print(as_text(table), flush=True)
        found.append(table)
    return found


def _one_table(wanted: Wanted, entries: Sequence[Entry], rounds: int, label: str) -> Table:
    workload = WORKLOADS[wanted.workload]
    try:
        with _wire(wanted) as wire:
            course = Course(workload, wanted.ranks, wire, wanted.wire, rounds)
            name = f"{label} {workload.name}, {wanted.ranks} ranks, {wanted.wire}"
            with Progress(name, course.ticks(entries)) as progress:
                return run(course, entries, progress.tick)
    except NoHosts as reason:
        why = f"two hosts cannot be emulated here, {reason}"
        return Table(workload.name, workload.title, wanted.ranks, wanted.wire, 0, skipped=why)


@contextlib.contextmanager
def _wire(wanted: Wanted) -> Iterator[Wire]:
    if wanted.gbit is None:
        yield LOOPBACK
    else:
        with two_hosts(wanted.gbit) as wire:
            yield wire


def main() -> None:
    args = _arguments()
    before = _tables_in(page.JSON)
    description = machine.describe()
    print(machine.as_text(description), MEANING, sep="\n", flush=True)
    wanted = [w for w in (FULL if args.full else QUICK) if _is_asked_for(w, args)]
    rounds = args.rounds or (FULL_ROUNDS if args.full else QUICK_ROUNDS)
    tables = measure(wanted, args.methods, rounds)
    other = [] if args.print else costs.measure(args.full)
    for cost in other:
        print(costs.as_text(cost), flush=True)
    for line in changes(before, tables):
        print("changed:", line)
    if args.print:
        return
    record = {"machine": description, "rounds": rounds, "tables": tables, "costs": other}
    _write_json(to_json(record))
    page.write(description, tables, other, rounds)
    print(f"\nwritten: {page.JSON} and {page.PAGE}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all tables, more rounds")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--wire", nargs="+", help="loopback, or speeds in Gbit/s")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--print", action="store_true", help="print only, write no files")
    args = parser.parse_args()
    args.methods = {*args.methods, *REFERENCES}
    return args


def _is_asked_for(wanted: Wanted, args: argparse.Namespace) -> bool:
    wire = "loopback" if wanted.gbit is None else f"{wanted.gbit:g}"
    fits = wanted.workload in args.only and wanted.ranks in args.ranks
    return fits and (not args.wire or wire in args.wire)


def _tables_in(path: Path) -> list[Table]:
    if not path.exists():
        return []
    return [table_from_json(table) for table in json.loads(path.read_text())["tables"]]


def _write_json(record: Any) -> None:
    page.JSON.parent.mkdir(parents=True, exist_ok=True)
    page.JSON.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
