"""`ONECOPY_TRACE`: a trace of a few steps in which every phase of every bucket has its name."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World, distributed
from hypothesis import given
from hypothesis import strategies as st
from inside import is_tracing, local_of, plan_of
from models import SMALL_BUCKETS, Mlp, seed_of
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from onecopy import ZeroRedundancyOptimizer
from onecopy.comm.stats import (
    Cost,
    Span,
    Step,
    Timeline,
    Tracer,
    Transfer,
    covered,
    transfer_events,
)

# ------------------------------------------------------------------ what is asked for


def test_nothing_is_asked_for_unless_the_variable_is_set() -> None:
    assert Tracer.from_environment({}) is None
    assert Tracer.from_environment({"ONECOPY_TRACE": ""}) is None
    with pytest.raises(ValueError, match="ONECOPY_TRACE_STEPS has no effect without"):
        Tracer.from_environment({"ONECOPY_TRACE_STEPS": "3-5"})


def asked_for(**environ: str) -> tuple[Path, int, int]:
    tracer = Tracer.from_environment(environ)
    assert tracer is not None
    return tracer.directory, tracer.first, tracer.last


def test_the_third_to_the_fifth_step_unless_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked_for(ONECOPY_TRACE=str(tmp_path / "x")) == (tmp_path / "x", 3, 5)
    assert (tmp_path / "x").is_dir()  # whoever cannot write there learns it early
    monkeypatch.chdir(tmp_path)
    named = asked_for(ONECOPY_TRACE="traces", ONECOPY_TRACE_STEPS="10-10")
    assert named == (tmp_path / "traces", 10, 10)  # whatever directory training goes to


BAD_STEPS = ["", "3", "0-2", "5-3", "a-b", "1-", "-1-2", "1 - 2", "1-2-3", "01-2"]


@pytest.mark.parametrize("steps", BAD_STEPS)
def test_bad_steps(steps: str) -> None:
    with pytest.raises(ValueError, match=r'expected the first and the last step .* as in "3-5"'):
        Tracer.from_environment({"ONECOPY_TRACE": "x", "ONECOPY_TRACE_STEPS": steps})


# ------------------------------------------------------------------ on ranks


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Messages of our logger, all levels."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onecopy")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def ask_for(directory: Path, steps: str) -> None:
    """The harness takes it back after the test."""
    os.environ["ONECOPY_TRACE"] = str(directory)
    os.environ["ONECOPY_TRACE_STEPS"] = steps


class Training:
    def __init__(self, world: World, kind: str = "ddp", **options: Any) -> None:
        self.world, self.steps, self.model = world, 0, Mlp()
        self.module = DistributedDataParallel(self.model) if "ddp" in kind else self.model
        self.optimizer = ZeroRedundancyOptimizer(
            self.module.parameters(), AdamW, lr=0.1, bucket_mb=SMALL_BUCKETS, **options
        )
        if "attached" in kind:
            self.optimizer.attach(self.module, lazy_gather="lazy" in kind)

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.module(self.model.batch(seed_of(self.world, self.steps))).backward()
            self.optimizer.step()
            self.steps += 1
        self.optimizer.wait()


@pytest.mark.parametrize("kind", ["ddp", "attached", "attached lazy", "attached ddp"])
@distributed(2)
def test_every_phase_of_every_bucket_is_named(world: World, kind: str, tmp_path: Path) -> None:
    ask_for(tmp_path / "new" / "traces", "2-3")
    with logged() as lines:
        training = Training(world, kind)
        training.go_on(2)
        assert not list(tmp_path.rglob(f"rank-{world.rank}*"))
        training.go_on(2)
    file = tmp_path / "new" / "traces" / f"rank-{world.rank}.json"
    assert lines[-1] == f"trace of rank {world.rank} written to {file}"
    training.optimizer.assert_replicas_equal()

    trace = json.loads(file.read_text())
    events = trace["traceEvents"]
    timeline = Timeline.of(events)
    assert [step.number for step in timeline.steps] == [2, 3]
    named = Counter(e["name"].removeprefix("onecopy::") for e in events if e.get("ph") == "X")
    optimizer = training.optimizer
    buckets = range(len(plan_of(optimizer).buckets))
    mine = {owned.shard.bucket for owned in local_of(optimizer).shards}
    for bucket in buckets:
        assert named[f"all_gather {bucket}"] == 2
        # If lazy, those of the step before are awaited in the first traced forward.
        assert named[f"wait for all_gather {bucket}"] == (3 if "lazy" in kind else 2)
        assert named[f"step {bucket}"] == (2 if bucket in mine else 0)
        reduced = 2 if "attached" in kind else 0
        assert (
            named[f"reduce_scatter {bucket}"]
            == named[f"wait for reduce_scatter {bucket}"]
            == reduced
        )
    flying = Counter((e["ph"], e["name"]) for e in events if e.get("cat") == "onecopy")
    phases = ["all_gather", "reduce_scatter"] if "attached" in kind else ["all_gather"]
    expected = {f"{phase} {bucket} under way" for phase in phases for bucket in buckets}
    assert flying == {(end, name): 2 for end in "be" for name in expected}

    facts = trace["onecopy"]
    assert (facts["rank"], facts["world_size"]) == (world.rank, 2)
    assert facts["is_attached"] == ("attached" in kind)
    assert facts["classes"] == ["AdamW"]
    assert facts["memory"]["parameters"] == 328 * 4
    assert {(each["phase"], each["bucket"], each["times"]) for each in facts["buckets"]} == {
        (phase, bucket, 3) for phase in phases for bucket in buckets
    }


@pytest.mark.parametrize("wrong", [(0, 1), (1,)], ids=["all", "one"])
@distributed(2)
def test_bad_steps_are_refused_on_all_ranks(
    world: World, tmp_path: Path, wrong: tuple[int, ...]
) -> None:
    ask_for(tmp_path, "5-3" if world.rank in wrong else "3-5")
    with pytest.raises(ValueError, match="ONECOPY_TRACE_STEPS=5-3: expected the first and"):
        Training(world)
    del os.environ["ONECOPY_TRACE"], os.environ["ONECOPY_TRACE_STEPS"]
    Training(world).go_on(1)


@distributed(2)
def test_a_directory_that_cannot_be_made_is_refused_on_all_ranks(
    world: World, tmp_path: Path
) -> None:
    if world.rank == 0:
        (tmp_path / "file").touch()
    torch.distributed.barrier()
    ask_for(tmp_path / "file", "3-5")
    with pytest.raises(ValueError, match=r"ONECOPY_TRACE=.*file: traces cannot be"):
        Training(world)


@distributed(2)
def test_a_second_optimizer_is_not_traced_and_says_so(world: World, tmp_path: Path) -> None:
    ask_for(tmp_path, "1-2")
    with logged() as lines:
        first, second = Training(world), Training(world)
        second.go_on(3)
        assert not list(tmp_path.glob("*"))
        first.go_on(3)
        warning = "ONECOPY_TRACE: another optimizer of this process is traced already"
        assert lines.count(warning) == 1
    content = (tmp_path / f"rank-{world.rank}.json").read_bytes()
    third = Training(world)  # nor does it write over the trace
    third.go_on(3)
    assert (tmp_path / f"rank-{world.rank}.json").read_bytes() == content


@distributed(2)
def test_another_directory_is_another_trace(world: World, tmp_path: Path) -> None:
    for name in "ab":
        ask_for(tmp_path / name, "1-1")
        Training(world).go_on(1)
        assert (tmp_path / name / f"rank-{world.rank}.json").exists()


@distributed(2)
def test_a_profiler_that_runs_already_is_left_alone(world: World, tmp_path: Path) -> None:
    ask_for(tmp_path, "2-3")
    training = Training(world)
    with logged() as lines, torch.profiler.profile() as profiler:
        training.go_on(4)
    assert lines == ["ONECOPY_TRACE has no effect: a profiler is running already"]
    assert not list(tmp_path.iterdir())
    assert "onecopy::all_gather 0" in {event.key for event in profiler.key_averages()}


@distributed(2)
def test_a_copy_is_not_traced(world: World, tmp_path: Path) -> None:
    ask_for(tmp_path, "1-2")
    training = Training(world)
    training.go_on(1)
    model, optimizer = copy.deepcopy((training.model, training.optimizer))
    for _ in range(4):
        model(model.batch((1, 1))).backward()
        optimizer.step()
    assert not list(tmp_path.glob("rank*"))
    training.go_on(1)
    assert (tmp_path / f"rank-{world.rank}.json").exists()


@distributed(2)
def test_a_file_that_cannot_be_written_does_not_end_the_training(
    world: World, tmp_path: Path
) -> None:
    mine = tmp_path / f"of {world.rank}"
    ask_for(mine, "1-1")
    training = Training(world)
    mine.rmdir()
    with logged() as lines:
        training.go_on(2)
    assert [line for line in lines if "could not be written" in line and str(mine) in line]


@distributed(2)
def test_nothing_happens_if_nothing_is_asked_for(world: World, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    with logged() as lines:
        training = Training(world)
        del lines[:]
        for _ in range(6):
            training.go_on(1)
            assert not torch.autograd.profiler._is_profiler_enabled
    os.chdir("/")
    assert not is_tracing(training.optimizer)
    assert lines == []
    assert list(tmp_path.iterdir()) == []


ENDS_EARLY = """
import torch, torch.distributed as dist
from onecopy import ZeroRedundancyOptimizer

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(3, 3)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
optimizer.attach(model)
for _ in range(3):
    model(torch.ones(3)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_run_that_ends_before_the_last_step_still_writes(tmp_path: Path) -> None:
    environment = {**os.environ, "ONECOPY_TRACE": "traces", "ONECOPY_TRACE_STEPS": "2-100"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", ENDS_EARLY],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert [file.name for file in (tmp_path / "traces").iterdir()] == ["rank-0.json"]
    events = json.loads((tmp_path / "traces" / "rank-0.json").read_text())["traceEvents"]
    assert [step.number for step in Timeline.of(events).steps] == [2, 3]


# ------------------------------------------------------------------ timelines


def event(name: str, start: float, stop: float, **others: Any) -> dict[str, Any]:
    return {"ph": "X", "name": f"onecopy::{name}", "ts": start, "dur": stop - start, **others}


TRACE = [
    {"ph": "M", "name": "process_name"},  # without a time
    {"ph": "X", "name": "aten::mm", "ts": 0.0, "dur": 100.0},
    event("wait for all_gather 1", 2, 3),  # launched before the trace began
    event("reduce_scatter 0", 10, 12),
    event("reduce_scatter 1", 20, 22),
    event("wait for reduce_scatter 0", 30, 31),
    event("wait for reduce_scatter 1", 31, 35),
    event("optimizer step 3", 29, 50),
    event("step 0", 36, 40),
    event("all_gather 0", 40, 41),
    event("all_gather 0", 40, 70, cat="gpu_user_annotation"),  # the same on the row of a stream
    event("all_gather 1", 45, 46),  # nobody waits for it
    event("wait for all_gather 0", 52, 53),  # after the step
    event("unknown 0", 1, 2),
    {"ph": "X", "name": "my onecopy::reduce_scatter 7", "ts": 5, "dur": 1},
]


def test_phases_are_found_by_their_names_in_order() -> None:
    timeline = Timeline.of(reversed(TRACE))
    assert [(s.phase, s.bucket, s.is_wait) for s in timeline.spans] == [
        ("all_gather", 1, True),
        ("reduce_scatter", 0, False),
        ("reduce_scatter", 1, False),
        ("reduce_scatter", 0, True),
        ("reduce_scatter", 1, True),
        ("step", 0, False),
        ("all_gather", 0, False),
        ("all_gather", 1, False),
        ("all_gather", 0, True),
    ]
    assert timeline.steps == (Step(3, began=0, start=29, stop=50),)
    assert (timeline.start, timeline.stop) == (0, 100)


def test_traces_of_releases_before_are_read() -> None:
    old = json.dumps(TRACE).replace("reduce_scatter", "reduce").replace("all_gather", "gather")
    assert Timeline.of(json.loads(old)) == Timeline.of(TRACE)


def test_steps_begin_where_the_one_before_has_ended() -> None:
    events = [event("optimizer step 4", 50, 60), event("optimizer step 3", 10, 20)]
    assert Timeline.of(events).steps == (Step(3, 10, 10, 20), Step(4, 20, 50, 60))


def test_nothing_in_a_trace_is_an_empty_timeline() -> None:
    assert Timeline.of([]) == Timeline((), ()) == Timeline.of([]).of_steps()


def exposed(transfer: Transfer) -> float:
    return sum(span.stop - span.start for span in (transfer.launch, transfer.wait))


def test_transfers_are_launches_with_their_waits() -> None:
    found = Timeline.of(TRACE).transfers()
    assert [each.name for each in found] == ["reduce_scatter 0", "reduce_scatter 1", "all_gather 0"]
    assert [exposed(each) for each in found] == [3, 6, 2]
    assert [each.hidden for each in found] == [18, 9, 11]


def test_what_comes_after_the_last_step_can_be_left_out() -> None:
    timeline = Timeline.of(TRACE).of_steps()
    assert [each.name for each in timeline.transfers()] == ["reduce_scatter 0", "reduce_scatter 1"]
    assert timeline.stop == 50


def test_a_moment_counts_once_whatever_is_under_way() -> None:
    costs = Timeline.of(TRACE).costs()
    # Under way from 12 to 30 and from 22 to 31, but for the launch and the wait in between.
    assert costs["reduce_scatter", None] == Cost(exposed=2 + 2 + 1 + 4, hidden=18 - 2)
    assert costs["reduce_scatter", 0] == Cost(exposed=3, hidden=18 - 2)
    assert costs["reduce_scatter", 1] == Cost(exposed=6, hidden=8)
    assert costs["all_gather", None] == Cost(exposed=1 + 1 + 1 + 1, hidden=11 - 1)
    assert ("step", 0) not in costs


def test_flights_are_asynchronous_events_on_rows_of_their_own() -> None:
    found = transfer_events(Timeline.of(TRACE).transfers(), pid=7)
    assert [(each["ph"], each["name"], each["ts"]) for each in found[:4]] == [
        ("b", "reduce_scatter 0 under way", 10),
        ("e", "reduce_scatter 0 under way", 31),
        ("b", "reduce_scatter 1 under way", 20),
        ("e", "reduce_scatter 1 under way", 35),
    ]
    assert len({each["id"] for each in found}) == 3
    assert {each["pid"] for each in found} == {7}


# ------------------------------------------------------------------ properties


NUMBERS = st.integers(0, 60)
INTERVALS = st.lists(st.tuples(NUMBERS, NUMBERS).map(lambda pair: tuple(sorted(pair))))


def moments(intervals: Any) -> set[int]:
    return {moment for start, stop in intervals for moment in range(start, stop)}


@given(INTERVALS)
def test_a_moment_in_several_intervals_is_covered_once(intervals: Any) -> None:
    assert covered(intervals) == len(moments(intervals))


@st.composite
def schedules(draw: st.DrawFn) -> list[Span]:
    """Spans one after another: launches, and later waits for some of what was launched."""
    clock, flying, spans = 0.0, set(), []
    for _ in range(draw(st.integers(0, 40))):
        clock += draw(st.integers(0, 5))
        start = clock
        clock += draw(st.integers(0, 5))
        key = draw(st.sampled_from(["reduce_scatter", "all_gather"])), draw(st.integers(0, 3))
        spans.append(Span(*key, start, clock, is_wait=key in flying))
        flying ^= {key}
    return spans


@given(schedules())
def test_costs_are_those_of_sets_of_moments(spans: list[Span]) -> None:
    timeline = Timeline(tuple(spans), ())
    busy = moments((int(span.start), int(span.stop)) for span in spans)
    for (phase, bucket), cost in timeline.costs().items():
        mine = [span for span in spans if span.phase == phase and bucket in (span.bucket, None)]
        away = moments(
            (int(each.launch.stop), int(each.wait.start))
            for each in timeline.transfers()
            if each.launch in mine
        )
        assert cost.exposed == len(moments((int(each.start), int(each.stop)) for each in mine))
        assert cost.hidden == len(away - busy)


def each_end(transfer: Transfer) -> tuple[Span, Span]:
    return transfer.launch, transfer.wait


@given(schedules())
def test_transfers_pair_launches_and_waits(spans: list[Span]) -> None:
    timeline = Timeline(tuple(spans), ())
    found = timeline.transfers()
    waits = [span for span in spans if span.is_wait]
    assert [each.wait for each in found] == waits  # each has its launch, none is used twice
    assert len({id(each.launch) for each in found}) == len(found)
    for each in found:
        assert (each.launch.phase, each.launch.bucket) == (each.wait.phase, each.wait.bucket)
        assert not each.launch.is_wait
        assert each.hidden >= 0
        assert exposed(each) + each.hidden == pytest.approx(each.wait.stop - each.launch.start)
        first, last = (next(i for i, s in enumerate(spans) if s is t) for t in each_end(each))
        between = [(s.phase, s.bucket) for s in spans[first + 1 : last]]
        assert (each.wait.phase, each.wait.bucket) not in between
    for phase in ("reduce_scatter", "all_gather"):
        cost = timeline.costs().get((phase, None), Cost(0, 0))
        whole = max((span.stop for span in spans), default=0)
        assert cost.exposed >= 0 <= cost.hidden
        assert cost.exposed + cost.hidden <= whole
        assert cost.hidden <= sum(t.hidden for t in found if t.launch.phase == phase)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300, -1e300, "1e999"])
def test_a_time_that_no_clock_can_have_shown_is_refused(value: object) -> None:
    for times in ({"ts": value, "dur": 1}, {"ts": 1, "dur": value}):
        with pytest.raises(ValueError, match="is no time"):
            Timeline.of([{"ph": "X", "name": "onecopy::reduce_scatter 0", **times}])
