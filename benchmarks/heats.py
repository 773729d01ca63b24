"""All methods on one workload: heats of as many teams as memory allows, which take turns.

DDP and torch's class are in every heat, because a ratio is worth something only if both sides ran
in the same minutes. The order of turns is drawn anew for each round. A round before them, in which
memory is measured, warms up.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import Wire
from methods import DDP, METHODS, TORCHS
from results import Row, Samples, Table, row_of
from teams import TeamFailed, team
from workloads import Workload

REFERENCES = (DDP, TORCHS)
# What a rank may take per parameter: itself, gradient, bucket, a copy on the way, Adam's state.
_BYTES_PER_PARAMETER = 24
_BYTES_PER_PROCESS = 150 * 10**6

Tick = Callable[[str], None]  # told what happens next, before every piece of work


@dataclass(frozen=True, slots=True)
class Entry:
    """A method that takes part, maybe with another onecopy than the installed one."""

    name: str
    method: str
    source: Path | None = None


@dataclass(frozen=True, slots=True)
class Course:
    """Where a heat takes place."""

    workload: Workload
    ranks: int
    wire: Wire
    wire_name: str
    rounds: int

    def ticks(self, heats: Sequence[Sequence[Entry]]) -> int:
        """How often a run of these heats will tick."""
        return sum(len(heat) * (self.rounds + 2) for heat in heats)

    def heats(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Entries in heats, each with the references."""
        references = [entry for entry in entries if entry.name in REFERENCES]
        others = [entry for entry in entries if entry.name not in REFERENCES]
        size = max(2, self._alive_at_once() - len(references))
        count = max(1, -(-len(others) // size))
        return [[*references, *others[i::count]] for i in range(count)]

    def _alive_at_once(self) -> int:
        each = _BYTES_PER_PARAMETER * self.workload.numel() + _BYTES_PER_PROCESS
        return int(0.75 * _available_memory() / (each * self.ranks))


def run(course: Course, heats: Sequence[Sequence[Entry]], tick: Tick) -> Table:
    """Compare within each heat; the references' own rows are about all heats together."""
    rows: dict[str, Row] = {}
    pooled = {name: Samples() for name in REFERENCES}
    for heat in heats:
        samples = take_turns(course, heat, tick)
        ddp, torchs = (samples.get(name, Samples(error="not here")) for name in REFERENCES)
        for entry in heat:
            own = samples[entry.name]
            if entry.name in pooled:
                pooled[entry.name].add(own)
            rows[entry.name] = row_of(entry.name, own, ddp, torchs, course.wire.hosts)
    ddp, torchs = (pooled[name] for name in REFERENCES)
    for name in REFERENCES:
        if name in rows:
            rows[name] = row_of(name, pooled[name], ddp, torchs, course.wire.hosts)
    workload = course.workload
    return Table(
        workload.name,
        workload.title,
        course.ranks,
        course.wire_name,
        course.rounds,
        steps=(course.rounds + 1) * workload.steps,
        rows=tuple(rows[name] for name in METHODS if name in rows),
    )


def take_turns(course: Course, heat: Sequence[Entry], tick: Tick) -> dict[str, Samples]:
    """One heat: what each entry did."""
    samples = {entry.name: Samples() for entry in heat}
    with contextlib.ExitStack() as stack:
        teams = {
            entry.name: stack.enter_context(
                team(entry.method, course.workload, course.ranks, course.wire, entry.source)
            )
            for entry in heat
        }

        def ask(name: str, *order: object) -> list[Any]:
            """The answers of all ranks; none if the team is out, with what it says noted."""
            if samples[name].error is not None:
                return []
            try:
                teams[name].tell(*order)
                return teams[name].answers()
            except TeamFailed as error:
                samples[name].error = str(error)
                teams[name].end()  # what is left of it would disturb the others
                return []

        for name in teams:
            tick(f"{name}: building")
            samples[name].construction = max(ask(name, "build"), default=0.0)
        for name in teams:
            tick(f"{name}: warming up")
            samples[name].memory = ask(name, "warm_up", course.workload.steps)
        # The same in every run, and another one in each heat.
        order = random.Random(f"{course.workload.name} {course.ranks} {list(teams)}")
        for number in range(1, course.rounds + 1):
            for name in order.sample(list(teams), len(teams)):
                tick(f"{name}: round {number} of {course.rounds}")
                samples[name].rounds.append(ask(name, "train", course.workload.steps))
    return samples


def _available_memory() -> int:
    found = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            found.append(int(line.split()[1]) * 1024)
    group = Path("/sys/fs/cgroup")  # of a container, which may be allowed less than there is
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        found.append(int(limit.read_text()) - int(used.read_text()))
    return min(found)
