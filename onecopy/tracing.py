"""``ONECOPY_TRACE=directory``: a profiler's trace of a few steps, one file per rank.

Nothing in the training script changes. Every phase of every bucket has a name in the trace, and
transfers that are under way have rows of their own, so that one sees what they overlap with::

    ONECOPY_TRACE=traces torchrun --nproc-per-node 2 train.py
    ONECOPY_TRACE=traces ONECOPY_TRACE_STEPS=10-12 torchrun ...

``rank-0.json`` and the others open in https://ui.perfetto.dev and in chrome://tracing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onecopy.timeline import Timeline, flights
from onecopy.torch_private import is_profiling

logger = logging.getLogger("onecopy")

DIRECTORY, STEPS = "ONECOPY_TRACE", "ONECOPY_TRACE_STEPS"
_DEFAULT_STEPS = "3-5"  # the first ones allocate buffers and connect ranks
METADATA = "onecopy"


class Traced(NamedTuple):
    """What a trace needs of the optimizer."""

    wait: Callable[[], None]  # until nothing is under way
    facts: Callable[[], Mapping[str, Any]]  # what else to write into the trace, plain values


@dataclass(frozen=True, slots=True)
class Order:
    """What the environment asks for."""

    directory: Path
    first: int
    last: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Order | None:
        directory = environment.get(DIRECTORY)
        if not directory:
            if STEPS in environment:
                raise ValueError(f"{STEPS} has no effect without {DIRECTORY}=directory")
            return None
        steps = environment.get(STEPS, _DEFAULT_STEPS)
        match = re.fullmatch(r"([1-9]\d*)-([1-9]\d*)", steps)
        if match is None or int(match[1]) > int(match[2]):
            raise ValueError(
                f"{STEPS}={steps}: expected the first and the last step to trace, counted from 1, "
                f'as in "{_DEFAULT_STEPS}"'
            )
        return cls(Path(directory).absolute(), int(match[1]), int(match[2]))

    def make_directory(self) -> None:
        """Early: a run should not learn that it cannot write when it has something to write."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{DIRECTORY}={self.directory}: traces cannot be written there: {error.strerror}"
            ) from error

    def file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.json"


# What this process has begun to trace. The next optimizer must not write over it.
_begun: set[Path] = set()


class Tracing:
    """Starts the profiler when the time has come, and writes the file in the end."""

    def __init__(self, order: Order, rank: int, traced: Traced) -> None:
        self._order, self._rank, self._traced = order, rank, traced
        self._profiler: torch.profiler.profile | None = None
        if order.first == 1:
            self._start()

    @classmethod
    def of(cls, order: Order | None, rank: int, traced: Traced) -> Tracing | None:
        """None, if nothing is asked for, or if another optimizer of this process is traced to the
        same file."""
        if order is None:
            return None
        file = order.file(rank)
        if file in _begun:
            logger.warning("%s: another optimizer of this process is traced already", DIRECTORY)
            return None
        _begun.add(file)
        return cls(order, rank, traced)

    def step_finished(self, number: int) -> None:
        if number == self._order.first - 1:
            self._start()
        elif number == self._order.last:
            self.finish()

    def _start(self) -> None:
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
        atexit.unregister(self.finish)
        # Why: torch's record of a transfer ends with it, and one that ends after the profiler has
        # stopped writes into memory that is gone.
        with contextlib.suppress(RuntimeError):  # the process group may be gone, at exit
            self._traced.wait()
        facts = {"rank": self._rank, **self._traced.facts()}
        profiler.add_metadata_json(METADATA, json.dumps(facts))
        profiler.stop()
        file = self._order.file(self._rank)
        try:
            _write(profiler, file)
        except (OSError, RuntimeError) as error:
            logger.warning("the trace %s could not be written: %s", file, error)
        else:
            logger.info("trace of rank %d written to %s", self._rank, file)


def _write(profiler: torch.profiler.profile, file: Path) -> None:
    """The whole file or none, with rows for what is under way, which the profiler does not know."""
    draft = file.with_name(f"{file.stem}.{os.getpid()}.draft.json")
    try:
        profiler.export_chrome_trace(str(draft))
        trace = json.loads(draft.read_text())
        timeline = Timeline.of(trace["traceEvents"])
        trace["traceEvents"] += flights(timeline.transfers(), os.getpid())
        draft.write_text(json.dumps(trace))
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
