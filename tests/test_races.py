"""`make races` in small: delays around every collective and hook change no bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import pytest
from harness import RankFailure, World, run_on_ranks
from race_courses import FEEDS, Course, courses
from race_delays import DELAYED, Delays
from races import batches, race

from onecopy.gatherer import Gatherer
from onecopy.lazy import LazyWaits
from onecopy.reducer import Reducer

PATIENCE = {"timeout": 600.0, "pg_timeout": 900.0}  # of seconds


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_delays_change_no_bit(ranks: int, tmp_path: Path) -> None:
    chosen = itertools.islice(courses(), 3 * (ranks - 2), 3 * (ranks - 1))
    runs = [(100 * ranks + number, course) for number, course in enumerate(chosen)]
    slept = run_on_ranks(ranks, race, runs, tmp_path, **PATIENCE)
    assert all(count > 20 for count in slept), slept


def test_courses_take_every_way_there_is() -> None:
    found = list(courses())
    assert {course.feed for course in found} == set(FEEDS)
    assert sum(course.saves for course in found) > len(found) // 5
    assert sum(course.lazy for course in found) > len(found) // 5
    assert {size for size, _ in batches(1, 100)} == {2, 3, 4}
    seeds = [seed for _, batch in batches(7, 50) for seed, _ in batch]
    assert seeds == list(range(7, 57))


def test_everything_is_as_before_when_the_delays_are_over() -> None:
    before = [dict(vars(cls)) for cls in DELAYED]
    with Delays(seed=1, rank=0):
        assert Gatherer.start is not before[DELAYED.index(Gatherer)]["start"]
    assert [dict(vars(cls)) for cls in DELAYED] == before


# ---------------------------------------- what it finds ----------------------------------------


def race_with_a_fault(
    world: World, runs: list[tuple[int, Course]], directory: Path, fault: str
) -> None:
    if fault == "a forward does not wait":
        patch = mock.patch.object(LazyWaits, "_before", return_value=None)
    else:
        patch = mock.patch.object(Reducer, "_land", land_without_waiting)
    with patch:
        race(world, runs, directory)


def land_without_waiting(reducer: Reducer) -> None:
    """As ``Reducer._land``; what has not arrived yet is added up as it is."""
    flight = reducer._flights.popleft()
    flight.lane.add(flight.contributions)
    flight.pending.wait()


@pytest.mark.parametrize(
    ("fault", "feed"),
    [("a forward does not wait", "bare"), ("a bucket is not awaited", "ddp")],
)
def test_a_wait_that_is_missing_is_found(fault: str, feed: str, tmp_path: Path) -> None:
    course = Course(feed, "SGD", lazy=True, small_buckets=True)
    runs = [(seed, course) for seed in range(5)]
    with pytest.raises(RankFailure, match="Difference: "):
        run_on_ranks(3, race_with_a_fault, runs, tmp_path, fault, **PATIENCE)
