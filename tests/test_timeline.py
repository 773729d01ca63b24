"""Timelines: phases found in a trace, launches and waits paired, moments counted once."""

from __future__ import annotations

import doctest
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import onecopy.timeline
from onecopy.timeline import Cost, Span, Step, Timeline, Transfer, flights, length, overlap, union


def event(name: str, start: float, stop: float, **others: Any) -> dict[str, Any]:
    return {"ph": "X", "name": f"onecopy::{name}", "ts": start, "dur": stop - start, **others}


TRACE = [
    {"ph": "M", "name": "process_name"},  # without a time
    {"ph": "X", "name": "aten::mm", "ts": 0.0, "dur": 100.0},
    event("wait for gather 1", 2, 3),  # launched before the trace began
    event("reduce 0", 10, 12),
    event("reduce 1", 20, 22),
    event("wait for reduce 0", 30, 31),
    event("wait for reduce 1", 31, 35),
    event("optimizer step 3", 29, 50),
    event("step 0", 36, 40),
    event("gather 0", 40, 41),
    event("gather 0", 40, 70, cat="gpu_user_annotation"),  # the same on the row of a stream
    event("gather 1", 45, 46),  # nobody waits for it
    event("wait for gather 0", 52, 53),  # after the step
    event("unknown 0", 1, 2),
    {"ph": "X", "name": "my onecopy::reduce 7", "ts": 5, "dur": 1},
]


def test_phases_are_found_by_their_names_in_order() -> None:
    timeline = Timeline.of(reversed(TRACE))
    assert [(s.phase, s.bucket, s.is_wait) for s in timeline.spans] == [
        ("gather", 1, True),
        ("reduce", 0, False),
        ("reduce", 1, False),
        ("reduce", 0, True),
        ("reduce", 1, True),
        ("step", 0, False),
        ("gather", 0, False),
        ("gather", 1, False),
        ("gather", 0, True),
    ]
    assert timeline.steps == (Step(3, began=0, start=29, stop=50),)
    assert (timeline.start, timeline.stop) == (0, 100)


def test_steps_begin_where_the_one_before_has_ended() -> None:
    events = [event("optimizer step 4", 50, 60), event("optimizer step 3", 10, 20)]
    assert Timeline.of(events).steps == (Step(3, 10, 10, 20), Step(4, 20, 50, 60))


def test_nothing_in_a_trace_is_an_empty_timeline() -> None:
    assert Timeline.of([]) == Timeline((), ()) == Timeline.of([]).of_steps()


def test_transfers_are_launches_with_their_waits() -> None:
    found = Timeline.of(TRACE).transfers()
    assert [each.name for each in found] == ["reduce 0", "reduce 1", "gather 0"]
    assert [each.exposed for each in found] == [3, 6, 2]
    assert [each.hidden for each in found] == [18, 9, 11]


def test_what_comes_after_the_last_step_can_be_left_out() -> None:
    timeline = Timeline.of(TRACE).of_steps()
    assert [each.name for each in timeline.transfers()] == ["reduce 0", "reduce 1"]
    assert timeline.stop == 50


def test_a_moment_counts_once_whatever_is_under_way() -> None:
    costs = Timeline.of(TRACE).costs()
    # Under way from 12 to 30 and from 22 to 31, but for the launch and the wait in between.
    assert costs["reduce", None] == Cost(exposed=2 + 2 + 1 + 4, hidden=18 - 2)
    assert costs["reduce", 0] == Cost(exposed=3, hidden=18 - 2)
    assert costs["reduce", 1] == Cost(exposed=6, hidden=8)
    assert costs["gather", None] == Cost(exposed=1 + 1 + 1 + 1, hidden=11 - 1)
    assert ("step", 0) not in costs


def test_flights_are_asynchronous_events_on_rows_of_their_own() -> None:
    found = flights(Timeline.of(TRACE).transfers(), pid=7)
    assert [(each["ph"], each["name"], each["ts"]) for each in found[:4]] == [
        ("b", "reduce 0 under way", 10),
        ("e", "reduce 0 under way", 31),
        ("b", "reduce 1 under way", 20),
        ("e", "reduce 1 under way", 35),
    ]
    assert len({each["id"] for each in found}) == 3
    assert {each["pid"] for each in found} == {7}


# ------------------------------------------------------------------ properties

NUMBERS = st.integers(0, 60)
INTERVALS = st.lists(st.tuples(NUMBERS, NUMBERS).map(lambda pair: tuple(sorted(pair))))


def moments(intervals: Any) -> set[int]:
    return {moment for start, stop in intervals for moment in range(start, stop)}


@given(INTERVALS, INTERVALS)
def test_unions_and_overlaps_are_those_of_sets(a: Any, b: Any) -> None:
    some, others = union(a), union(b)
    assert moments(some) == moments(a)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(some))
    assert length(some) == len(moments(a))
    assert moments(overlap(some, others)) == moments(a) & moments(b)


@st.composite
def schedules(draw: st.DrawFn) -> list[Span]:
    """Spans one after another: launches, and later waits for some of what was launched."""
    clock, flying, spans = 0.0, set(), []
    for _ in range(draw(st.integers(0, 40))):
        clock += draw(st.integers(0, 5))
        start = clock
        clock += draw(st.integers(0, 5))
        key = draw(st.sampled_from(["reduce", "gather"])), draw(st.integers(0, 3))
        spans.append(Span(*key, start, clock, is_wait=key in flying))
        flying ^= {key}
    return spans


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
        assert each.exposed + each.hidden == pytest.approx(each.wait.stop - each.launch.start)
        first, last = (next(i for i, s in enumerate(spans) if s is t) for t in each_end(each))
        between = [(s.phase, s.bucket) for s in spans[first + 1 : last]]
        assert (each.wait.phase, each.wait.bucket) not in between
    for phase in ("reduce", "gather"):
        cost = timeline.costs().get((phase, None), Cost(0, 0))
        whole = max((span.stop for span in spans), default=0)
        assert cost.exposed >= 0 <= cost.hidden
        assert cost.exposed + cost.hidden <= whole
        assert cost.hidden <= sum(t.hidden for t in found if t.launch.phase == phase)


def test_the_examples_in_docstrings() -> None:
    assert doctest.testmod(onecopy.timeline).failed == 0


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300, -1e300, "1e999"])
def test_a_time_that_no_clock_can_have_shown_is_refused(value: object) -> None:
    for times in ({"ts": value, "dur": 1}, {"ts": 1, "dur": value}):
        with pytest.raises(ValueError, match="is no time"):
            Timeline.of([{"ph": "X", "name": "onecopy::reduce 0", **times}])
