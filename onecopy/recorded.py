"""What a run has recorded with ``ONECOPY_TRACE``: the traces of its ranks, read and checked.

Traces are files of the user's, so anything may stand in them: what is no trace of ours raises
``Failure``, which says what would help.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from onecopy.ledger import BucketStats
from onecopy.memory import MemoryReport
from onecopy.models import Failure
from onecopy.timeline import Cost, Timeline, measured
from onecopy.words import counted

_FILE = re.compile(r"rank-(\d+)\.json")
_HOW = "record one with ONECOPY_TRACE=DIR torchrun ... train.py"


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank has recorded."""

    rank: int
    world_size: int
    is_attached: bool
    classes: tuple[str, ...]
    backend: str
    memory: MemoryReport
    buckets: tuple[BucketStats, ...]  # since the optimizer was built
    timeline: Timeline  # of the traced steps
    costs: Mapping[tuple[str, int | None], Cost]  # of all of them
    zero: float  # microseconds on the clock of its host at the zero of its timeline

    @property
    def begin(self) -> float:
        return self.timeline.start

    @property
    def end(self) -> float:
        """Of the last traced step."""
        return self.timeline.steps[-1].stop

    @property
    def step_time(self) -> float:
        """Microseconds from the end of a step to the end of the next one."""
        return median(step.stop - step.began for step in self.timeline.steps)

    def cost(self, phase: str, bucket: int | None = None) -> Cost:
        """Of a traced step, in the mean; of one bucket, or of all."""
        whole, steps = self.costs.get((phase, bucket), Cost(0.0, 0.0)), len(self.timeline.steps)
        return Cost(whole.exposed / steps, whole.hidden / steps)

    @property
    def exposed(self) -> float:
        """Microseconds of a step."""
        return sum(self.cost(phase).exposed for phase in ("reduce", "gather"))

    @property
    def hidden(self) -> float:
        return sum(self.cost(phase).hidden for phase in ("reduce", "gather"))

    def sent(self) -> dict[tuple[str, int], float]:
        """Bytes each time, by phase and bucket."""
        return {(b.phase, b.bucket): b.bytes / b.times for b in self.buckets if b.times}

    @property
    def sent_per_step(self) -> float:
        return sum(self.sent().values())


@dataclass(frozen=True, slots=True)
class Run:
    """The traces of a run, by rank."""

    traces: tuple[Trace, ...]

    @property
    def world_size(self) -> int:
        return self.traces[0].world_size

    @property
    def phases(self) -> tuple[str, ...]:
        """In the order of a step."""
        present = {each.phase for trace in self.traces for each in trace.buckets}
        return tuple(phase for phase in ("reduce", "gather") if phase in present)

    @property
    def bucket_numbers(self) -> tuple[int, ...]:
        return tuple(sorted({each.bucket for trace in self.traces for each in trace.buckets}))

    @property
    def step_numbers(self) -> tuple[int, ...]:
        return tuple(step.number for step in self.traces[0].timeline.steps)

    @property
    def title(self) -> str:
        """``Steps 3 to 5 on 8 ranks``."""
        first, *_, last = (*self.step_numbers, self.step_numbers[-1])
        steps = f"Step {first}" if first == last else f"Steps {first} to {last}"
        return f"{steps} on {counted(self.world_size, 'rank')}"

    @property
    def is_attached(self) -> bool:
        return self.traces[0].is_attached

    def in_words(self) -> str:
        """What was run: ``AdamW, attached, gloo``."""
        first = self.traces[0]
        mode = "attached" if self.is_attached else "drop-in"
        words = [" and ".join(first.classes), mode, first.backend]
        if len(self.traces) != self.world_size:
            words.append(f"traces of {counted(len(self.traces), 'rank')}")
        return ", ".join(filter(None, words))

    def origins(self) -> tuple[float, ...]:
        """Where the common time axis begins in the time of each trace.

        Clocks of one host agree, and show who waits for whom. Those of several may not: if traces
        that must overlap do not, each rank begins at its own start.
        """
        starts = [trace.zero + trace.begin for trace in self.traces]
        longest = max(trace.end - trace.begin for trace in self.traces)
        if max(starts) - min(starts) > longest:
            return tuple(trace.begin for trace in self.traces)
        return tuple(min(starts) - trace.zero for trace in self.traces)


def read_run(directory: Path) -> Run:
    """All traces in a directory."""
    if not directory.is_dir():
        raise Failure(f"{directory} is no directory of traces: {_HOW}")
    files = {int(m[1]): f for f in directory.iterdir() if (m := _FILE.fullmatch(f.name))}
    if not files:
        raise Failure(f"{directory} holds no traces (rank-0.json, ...): {_HOW}")
    traces = tuple(_read(files[rank]) for rank in sorted(files))
    _require_same_run(directory, traces)
    return Run(traces)


def _require_same_run(directory: Path, traces: Sequence[Trace]) -> None:
    sizes = sorted({trace.world_size for trace in traces})
    steps = {tuple(step.number for step in trace.timeline.steps) for trace in traces}
    if len(sizes) > 1:
        what = f"of {' and '.join(map(str, sizes))} ranks"
    elif len(steps) > 1:
        what = "of different steps"
    else:
        return
    raise Failure(f"{directory} holds traces {what}: empty it, and record one run")


def _read(file: Path) -> Trace:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise Failure(f"{file} cannot be read ({error}): remove it, and record again") from error
    try:
        trace = _understood(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Failure(f"{file} is no trace that onecopy has written: {_HOW}") from error
    if not trace.timeline.steps:
        raise Failure(
            f"{file} holds no whole step: let the run take the steps in ONECOPY_TRACE_STEPS, "
            "3-5 if it is not set"
        )
    return trace


def _understood(content: Mapping[str, Any]) -> Trace:
    facts = content["onecopy"]
    timeline = Timeline.of(content["traceEvents"]).of_steps()
    memory = {str(name): _counted(count) for name, count in facts["memory"].items()}
    return Trace(
        rank=_counted(facts["rank"]),
        world_size=_counted(facts["world_size"]),
        is_attached=bool(facts["is_attached"]),
        classes=tuple(map(str, facts["classes"])),
        backend=str((content.get("distributedInfo") or {}).get("backend", "")),
        memory=MemoryReport.from_dict(memory),
        buckets=tuple(_stats(each) for each in facts["buckets"]),
        timeline=timeline,
        costs=timeline.costs(),
        zero=measured(content.get("baseTimeNanoseconds", 0)) / 1e3,
    )


def _stats(found: Mapping[str, Any]) -> BucketStats:
    phase = str(found["phase"])
    if phase not in ("reduce", "gather"):
        raise ValueError(phase)
    return BucketStats(
        phase,
        _counted(found["bucket"]),
        _counted(found["times"]),
        _counted(found["messages"]),
        _counted(found["bytes"]),
        measured(found["exposed"]),
        measured(found["hidden"]),
    )


def _counted(value: Any) -> int:
    """A number of bytes, messages or ranks. ValueError if nobody can have counted so far."""
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError(value)
    return number
