"""Bytes and time of every phase of every bucket: counted always, traced with ``ONECOPY_TRACE``."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from onecopy.torch_private import is_profiling

_MB = 10**6


class Phase(Enum):
    """What is done with a bucket, as traces and ``comm_stats()`` name it."""

    REDUCE_SCATTER = "reduce_scatter"  # gradients to their owners
    STEP = "step"  # this rank's shards are updated
    ALL_GATHER = "all_gather"  # updated parameters to all ranks


# As releases before named them, in traces and in ``CommStats.as_dict()``.
_OLD_NAMES = {Phase.REDUCE_SCATTER.value: "reduce", Phase.ALL_GATHER.value: "gather"}
_NEW_NAMES = {old: new for new, old in _OLD_NAMES.items()}


def phase_named(name: str) -> str:
    """The name of a phase that a trace names so, of this release or of one before."""
    return _NEW_NAMES.get(name, name)


def named(phase: Phase, bucket: int, waits: bool = False) -> torch.profiler.record_function:
    """A range in a profiler's trace."""
    return torch.profiler.record_function(f"onecopy::{'wait for ' * waits}{phase.value} {bucket}")


@dataclass(slots=True)
class _Totals:
    """One phase of one bucket, summed over all steps."""

    times: int = 0
    messages: int = 0
    bytes: int = 0
    exposed: float = 0.0  # seconds of launching and waiting, packing and unpacking included
    hidden: float = 0.0  # from the end of a launch until somebody waited
    launched_at: float = 0.0  # the last time


@dataclass(slots=True)
class Traffic:
    """What this rank has put on the wire, and the time of every phase of every bucket."""

    messages: int = 0
    bytes: int = 0
    totals: defaultdict[tuple[Phase, int], _Totals] = field(
        default_factory=functools.partial(defaultdict, _Totals)
    )

    def add(self, tensor: torch.Tensor, copies: int = 1) -> None:
        """What is empty is not sent."""
        if tensor.numel():
            self.messages += copies
            self.bytes += copies * tensor.numel() * tensor.element_size()

    @contextlib.contextmanager
    def launching(self, phase: Phase, bucket: int) -> Iterator[None]:
        totals = self.totals[phase, bucket]
        messages, sent = self.messages, self.bytes
        start = time.perf_counter()
        with named(phase, bucket):
            yield
        totals.launched_at = time.perf_counter()
        totals.exposed += totals.launched_at - start
        totals.times += 1
        totals.messages += self.messages - messages
        totals.bytes += self.bytes - sent

    @contextlib.contextmanager
    def waiting(self, phase: Phase, bucket: int) -> Iterator[None]:
        totals = self.totals[phase, bucket]
        start = time.perf_counter()
        with named(phase, bucket, waits=True):
            yield
        totals.exposed += time.perf_counter() - start
        totals.hidden += start - totals.launched_at

    def stats(self, steps: int) -> CommStats:
        buckets = [
            BucketStats(phase.value, bucket, t.times, t.messages, t.bytes, t.exposed, t.hidden)
            for (phase, bucket), t in self.totals.items()
        ]
        buckets.sort(key=lambda each: (each.phase, each.bucket))
        return CommStats(steps, self.messages, self.bytes, tuple(buckets))


@dataclass(frozen=True, slots=True)
class BucketStats:
    """One phase of one bucket on this rank, summed over all steps."""

    phase: str  # "reduce_scatter" or "all_gather"
    bucket: int
    times: int
    messages: int
    bytes: int  # sent
    exposed: float  # seconds that training stood still for it
    hidden: float  # seconds, at most, that it was under way while training went on


@dataclass(frozen=True, slots=True)
class CommStats:
    """What this rank has sent and waited for since the optimizer was built.

    ``print(stats)`` shows a table, ``as_dict()`` is for loggers.
    """

    steps: int
    messages: int  # all of them, small ones and state dicts included
    bytes: int
    buckets: tuple[BucketStats, ...]

    def as_dict(self) -> dict[str, float]:
        """Flat, for TensorBoard and the like: ``{"bytes": ..., "all_gather/exposed": ...}``.

        For one release, ``reduce/...`` and ``gather/...`` say the same as ``reduce_scatter/...``
        and ``all_gather/...``.
        """
        found: dict[str, float] = {
            "steps": self.steps,
            "messages": self.messages,
            "bytes": self.bytes,
        }
        for phase in dict.fromkeys(each.phase for each in self.buckets):
            of_phase = [each for each in self.buckets if each.phase == phase]
            for name in ("times", "messages", "bytes", "exposed", "hidden"):
                total = sum(getattr(each, name) for each in of_phase)
                found[f"{phase}/{name}"] = found[f"{_OLD_NAMES[phase]}/{name}"] = total
        return found

    def __str__(self) -> str:
        head = f"{'':19}{'times':>7}{'messages':>10}{'MB sent':>10}{'exposed':>11}{'hidden':>11}"
        lines = [
            f"{f'{each.phase} {each.bucket}':19}{each.times:7}{each.messages:10}"
            f"{each.bytes / _MB:10.2f}{each.exposed * 1e3:8.1f} ms{each.hidden * 1e3:8.1f} ms"
            for each in self.buckets
        ]
        steps = f"{self.steps} steps"
        total = f"{steps:26}{self.messages:10}{self.bytes / _MB:10.2f}"
        return "\n".join([head, *lines, total])


# ------------------------------------------------------------------ reading a trace

_NAME = re.compile(r"onecopy::(wait for )?(reduce_scatter|step|all_gather|reduce|gather) (\d+)")
_STEP = re.compile(r"onecopy::optimizer step (\d+)")
# A profiler shows a range again on the row of the stream that its kernels ran on.
_REPEATED = "gpu_user_annotation"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on one rank, in microseconds of its trace."""

    phase: str  # "reduce_scatter", "step" or "all_gather"
    bucket: int
    start: float
    stop: float
    is_wait: bool = False


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
        spans, found = [], {}
        first, last = float("inf"), float("-inf")
        for event in events:
            if event.get("ph") != "X" or event.get("cat") == _REPEATED:
                continue
            name, start = str(event.get("name")), measured(event["ts"])
            stop = start + measured(event.get("dur", 0))
            first, last = min(first, start), max(last, stop)
            if match := _NAME.fullmatch(name):
                wait, phase, bucket = match.groups()
                spans.append(Span(phase_named(phase), int(bucket), start, stop, wait is not None))
            elif match := _STEP.fullmatch(name):
                found[int(match[1])] = (start, stop)
        if first > last:
            first = last = 0.0
        steps, began = [], first
        for number, (start, stop) in sorted(found.items()):
            steps.append(Step(number, began, start, stop))
            began = stop
        spans.sort(key=lambda span: (span.start, span.stop))
        return cls(tuple(spans), tuple(steps), first, last)

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
        """By phase and bucket, and by phase and None for all its buckets.

        Launches and waits are exposed also where the other half is outside of the trace.
        """
        spans = [span for span in self.spans if span.phase != "step"]
        busy = [(span.start, span.stop) for span in spans]
        mine: defaultdict[tuple[str, int | None], list[tuple[float, float]]] = defaultdict(list)
        under_way = mine.copy()
        for span in spans:
            for bucket in (span.bucket, None):
                mine[span.phase, bucket].append((span.start, span.stop))
        for each in self.transfers():
            for bucket in (each.launch.bucket, None):
                interval = each.launch.stop, each.wait.start
                under_way[each.launch.phase, bucket].append(interval)
        occupied = covered(busy)
        return {
            key: Cost(covered(intervals), max(0.0, covered([*under_way[key], *busy]) - occupied))
            for key, intervals in mine.items()
        }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The time in any of them, each moment counted once.

    >>> covered([(4, 6), (1, 2), (5, 9)])
    6.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def transfer_events(transfers: Sequence[Transfer], pid: int) -> list[dict[str, Any]]:
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


# ------------------------------------------------------------------ recording a trace

logger = logging.getLogger("onecopy")

DIRECTORY, STEPS = "ONECOPY_TRACE", "ONECOPY_TRACE_STEPS"
TRACE_VARIABLES = {DIRECTORY, STEPS}
_DEFAULT_STEPS = "3-5"  # the first ones allocate buffers and connect ranks

# What this process has begun to trace. The next optimizer must not write over it.
_begun: set[Path] = set()


class Tracer:
    """Records some steps with torch's profiler, and writes a file for each rank."""

    def __init__(self, directory: Path, first: int, last: int) -> None:
        self.directory, self.first, self.last = directory, first, last
        self._file: Path | None = None  # None: nothing is recorded
        self._profiler: torch.profiler.profile | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Tracer | None:
        """What the environment asks for, if anything. Makes the directory: a run should not learn
        that it cannot write when it has something to write."""
        directory = environ.get(DIRECTORY)
        if not directory:
            if STEPS in environ:
                raise ValueError(f"{STEPS} has no effect without {DIRECTORY}=directory")
            return None
        steps = environ.get(STEPS, _DEFAULT_STEPS)
        match = re.fullmatch(r"([1-9]\d*)-([1-9]\d*)", steps)
        if match is None or int(match[1]) > int(match[2]):
            raise ValueError(
                f"{STEPS}={steps}: expected the first and the last step to trace, counted from 1, "
                f'as in "{_DEFAULT_STEPS}"'
            )
        tracer = cls(Path(directory).absolute(), int(match[1]), int(match[2]))
        try:
            tracer.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{DIRECTORY}={tracer.directory}: traces cannot be written there: {error.strerror}"
            ) from error
        return tracer

    def begin(
        self, rank: int, wait: Callable[[], None], facts: Callable[[], Mapping[str, Any]]
    ) -> None:
        """The optimizer is built. ``wait`` returns when nothing is under way; ``facts`` are plain
        values to write into the trace. Nothing is recorded if another optimizer of this process is
        traced to the same file."""
        file = self.directory / f"rank-{rank}.json"
        if file in _begun:
            logger.warning("%s: another optimizer of this process is traced already", DIRECTORY)
            return
        _begun.add(file)
        self._file, self._rank, self._wait, self._facts = file, rank, wait, facts
        self.step_finished(0)

    def step_finished(self, number: int) -> None:
        if number == self.last:
            self.finish()
        if number != self.first - 1 or self._file is None:
            return
        if is_profiling():
            logger.warning("%s has no effect: a profiler is running already", DIRECTORY)
            return
        activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        atexit.register(self.finish)  # if training ends before the last step that was asked for

    def finish(self) -> None:
        """Write what there is; once. Training goes on, whatever becomes of the file."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        assert self._file is not None
        atexit.unregister(self.finish)
        # Why: torch's record of a transfer ends with it, and one that ends after the profiler has
        # stopped writes into memory that is gone.
        with contextlib.suppress(RuntimeError):  # the process group may be gone, at exit
            self._wait()
        profiler.add_metadata_json("onecopy", json.dumps({"rank": self._rank, **self._facts()}))
        profiler.stop()
        # The whole file or none, with rows for what is under way, which the profiler does not know.
        draft = self._file.with_name(f"{self._file.stem}.{os.getpid()}.draft.json")
        try:
            profiler.export_chrome_trace(str(draft))
            trace = json.loads(draft.read_text())
            transfers = Timeline.of(trace["traceEvents"]).transfers()
            trace["traceEvents"] += transfer_events(transfers, os.getpid())
            draft.write_text(json.dumps(trace))
            draft.replace(self._file)
        except (OSError, RuntimeError) as error:
            logger.warning("the trace %s could not be written: %s", self._file, error)
        else:
            logger.info("trace of rank %d written to %s", self._rank, self._file)
        finally:
            draft.unlink(missing_ok=True)
