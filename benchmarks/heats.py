"""All methods on one workload: heats of as many teams as memory allows, which take turns.

DDP and torch's class are in every heat, because a ratio is worth something only if both sides ran
in the same minutes. Another method begins each round. A round before them, in which memory is
measured, warms up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import Wire
from methods import DDP, TORCHS
from results import Row, Samples, Table, row_of
from teams import Team, TeamFailed, team
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

    def ticks(self, entries: Sequence[Entry]) -> int:
        """How often a run of these entries will tick."""
        return sum(len(heat) * (self.rounds + 2) for heat in self.heats(entries))

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


def run(course: Course, entries: Sequence[Entry], tick: Tick) -> Table:
    rows: dict[str, Row] = {}
    for heat in course.heats(entries):
        samples = take_turns(course, heat, tick)
        ddp, torchs = (samples.get(name) or Samples(error="not here") for name in REFERENCES)
        for entry in heat:
            row = row_of(entry.name, samples[entry.name], ddp, torchs, course.wire.hosts)
            rows.setdefault(entry.name, row)
    workload = course.workload
    return Table(
        workload.name,
        workload.title,
        course.ranks,
        course.wire_name,
        steps=(course.rounds + 1) * workload.steps,
        rows=tuple(rows[entry.name] for entry in entries),
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
        for name, each in teams.items():
            tick(f"{name}: building")
            with _judging(samples[name]):
                samples[name].construction = max(_ask(each, "build"))
        for name, each in teams.items():
            tick(f"{name}: warming up")
            with _judging(samples[name]):
                samples[name].memory = _ask(each, "warm_up", course.workload.steps)
        for number in range(course.rounds):
            for turn in range(len(heat)):
                name = heat[(number + turn) % len(heat)].name
                tick(f"{name}: round {number + 1} of {course.rounds}")
                with _judging(samples[name]):
                    samples[name].rounds.append(_ask(teams[name], "train", course.workload.steps))
    return samples


@contextlib.contextmanager
def _judging(samples: Samples) -> Iterator[None]:
    """Note the first error of a team."""
    try:
        yield
    except TeamFailed as error:
        if samples.error is None:
            samples.error = str(error)


def _ask(asked: Team, *order: object) -> list[Any]:
    asked.tell(*order)
    return asked.answers()


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell MemAvailable in /proc/meminfo")
