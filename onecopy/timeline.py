"""The phases of a traced run, read from a profiler's trace: what was under way, and who waited.

Pure: it takes the events of a Chrome trace, as ``torch.profiler`` writes them, and knows our phases
by the names that ``ledger.py`` gives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"onecopy::(wait for )?(reduce|step|gather) (\d+)")
_STEP = re.compile(r"onecopy::optimizer step (\d+)")


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


@dataclass(frozen=True, slots=True)
class Timeline:
    """What one rank did."""

    spans: tuple[Span, ...]  # by their start
    steps: tuple[tuple[int, float, float], ...]  # number, start and stop of ``optimizer.step()``

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Timeline:
        spans, steps = [], []
        for event in events:
            if event.get("ph") != "X":
                continue
            name, start = str(event.get("name")), float(event["ts"])
            stop = start + float(event.get("dur", 0))
            if match := _NAME.fullmatch(name):
                wait, phase, bucket = match.groups()
                spans.append(Span(phase, int(bucket), start, stop, is_wait=wait is not None))
            elif match := _STEP.fullmatch(name):
                steps.append((int(match[1]), start, stop))
        return cls(tuple(sorted(spans, key=lambda s: s.start)), tuple(sorted(steps)))

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
