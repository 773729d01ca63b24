"""The phases of a traced run, read from a profiler's trace: what was under way, and who waited.

Pure: it takes the events of a Chrome trace, as ``torch.profiler`` writes them, and knows our phases
by the names that ``ledger.py`` gives them::

    launch |##|                        exposed
    wait              |#####|          exposed
    under way  |......|                hidden, at most
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"onecopy::(wait for )?(reduce|step|gather) (\d+)")
_STEP = re.compile(r"onecopy::optimizer step (\d+)")
# A profiler shows a range again on the row of the stream that its kernels ran on.
_REPEATED = "gpu_user_annotation"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on one rank, in microseconds of its trace."""

    phase: str  # "reduce", "step" or "gather"
    bucket: int
    start: float
    stop: float
    is_wait: bool = False

    @property
    def length(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Step:
    """A call of ``optimizer.step()``; ``began`` is when the one before it had returned."""

    number: int
    began: float
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """A bucket on its way: launched, then under way, then waited for."""

    launch: Span
    wait: Span

    @property
    def name(self) -> str:
        return f"{self.launch.phase} {self.launch.bucket}"

    @property
    def exposed(self) -> float:
        """Microseconds that this rank spent on it."""
        return self.launch.length + self.wait.length

    @property
    def hidden(self) -> float:
        """Microseconds, at most, that it was under way while this rank did something else."""
        return max(0.0, self.wait.start - self.launch.stop)


_LONGER_THAN_EVER = 1e21  # in any unit: sums of much larger numbers would be infinite


def measured(value: Any) -> float:
    """A time in a trace. ValueError if no clock can have shown it."""
    number = float(value)
    if not abs(number) < _LONGER_THAN_EVER:
        raise ValueError(f"{value} is no time")
    return number


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds in which this rank was occupied by transfers, and in which some were under way
    while it did something else. However many are, a moment counts once."""

    exposed: float
    hidden: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What one rank did."""

    spans: tuple[Span, ...]  # by their start
    steps: tuple[Step, ...]  # by their number
    start: float = 0.0  # of the trace
    stop: float = 0.0

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Timeline:
        spans, steps = [], {}
        first, last = float("inf"), float("-inf")
        for event in events:
            if event.get("ph") != "X" or event.get("cat") == _REPEATED:
                continue
            name, start = str(event.get("name")), measured(event["ts"])
            stop = start + measured(event.get("dur", 0))
            first, last = min(first, start), max(last, stop)
            if match := _NAME.fullmatch(name):
                wait, phase, bucket = match.groups()
                spans.append(Span(phase, int(bucket), start, stop, is_wait=wait is not None))
            elif match := _STEP.fullmatch(name):
                steps[int(match[1])] = (start, stop)
        if first > last:
            first = last = 0.0
        ordered = tuple(sorted(spans, key=lambda span: (span.start, span.stop)))
        return cls(ordered, _steps(steps, first), first, last)

    def of_steps(self) -> Timeline:
        """Without what came after the last step: half a backward, or the waits that end a trace."""
        if not self.steps:
            return self
        stop = self.steps[-1].stop
        spans = tuple(span for span in self.spans if span.start < stop)
        return Timeline(spans, self.steps, self.start, stop)

    def transfers(self) -> list[Transfer]:
        """Launches with the waits that follow them. What was launched before the trace began, or
        waited for after its end, is left out."""
        found, launched = [], {}
        for span in self.spans:
            key = span.phase, span.bucket
            if span.phase == "step":
                continue
            if not span.is_wait:
                launched[key] = span
            elif key in launched:
                found.append(Transfer(launched.pop(key), span))
        return found

    def costs(self) -> dict[tuple[str, int | None], Cost]:
        """By phase ("reduce" or "gather") and bucket, and by phase and None for all its buckets.

        Launches and waits are exposed also where the other half is outside of the trace.
        """
        busy = union((span.start, span.stop) for span in self.spans if span.phase != "step")
        mine: dict[tuple[str, int | None], list[tuple[float, float]]] = {}
        flying: dict[tuple[str, int | None], list[tuple[float, float]]] = {}
        for span in self.spans:
            if span.phase != "step":
                for bucket in (span.bucket, None):
                    mine.setdefault((span.phase, bucket), []).append((span.start, span.stop))
        for each in self.transfers():
            for bucket in (each.launch.bucket, None):
                if each.hidden:
                    interval = each.launch.stop, each.wait.start
                    flying.setdefault((each.launch.phase, bucket), []).append(interval)
        found = {}
        for key, intervals in mine.items():
            away = union(flying.get(key, ()))
            found[key] = Cost(length(union(intervals)), length(away) - length(overlap(away, busy)))
        return found


Intervals = Sequence[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same moments, in intervals that are in order and apart.

    >>> union([(4, 6), (1, 2), (5, 9)])
    [(1, 2), (4, 9)]
    """
    found: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def overlap(some: Intervals, others: Intervals) -> list[tuple[float, float]]:
    """The moments in both, which are unions.

    >>> overlap([(1, 5), (7, 9)], [(2, 3), (4, 8)])
    [(2, 3), (4, 5), (7, 8)]
    """
    found: list[tuple[float, float]] = []
    i = 0
    # What ends before the first of them begins need not be looked at.
    j = bisect_right(others, some[0][0], key=lambda interval: interval[1]) if some else 0
    while i < len(some) and j < len(others):
        start, stop = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < stop:
            found.append((start, stop))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Intervals) -> float:
    return sum(stop - start for start, stop in intervals)


def _steps(found: Mapping[int, tuple[float, float]], began: float) -> tuple[Step, ...]:
    steps = []
    for number, (start, stop) in sorted(found.items()):
        steps.append(Step(number, began, start, stop))
        began = stop
    return tuple(steps)


def flights(transfers: Sequence[Transfer], pid: int) -> list[dict[str, Any]]:
    """Transfers as events of a Chrome trace, on rows of their own: what was under way, when."""
    found = []
    for number, transfer in enumerate(transfers):
        common = {
            "cat": "onecopy",
            "name": f"{transfer.name} under way",
            "id": f"onecopy-{number}",
            "pid": pid,
            "tid": pid,
        }
        found.append({"ph": "b", "ts": transfer.launch.start, **common})
        found.append({"ph": "e", "ts": transfer.wait.stop, **common})
    return found
