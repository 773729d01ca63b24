"""Where each rank was last seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from onecopy import notes as notes_module
from onecopy.notes import Lobby, Notes
from onecopy.waiting import is_silent


def test_without_a_store_the_report_is_about_this_rank_alone() -> None:
    notes = Notes(None, Lobby(None, "0", [0, 1]), rank=1, world_size=2)
    notes.write("in step 3")
    assert notes.report() == "a collective failed on rank 1: in step 3"
    expected = "a collective failed: ranks 0, 2 ended. This one was last in step 3"
    assert notes.report(ended=[0, 2]) == expected


def reports(failing: Sequence[int], store: Any = None, **places: str) -> list[str]:
    """What these of three ranks say when a collective fails, each in a thread of its own."""
    store = store or dist.HashStore()
    lobby = Lobby(None, "0", [0, 1, 2])
    ranks = [Notes(store, lobby, rank, world_size=3) for rank in range(3)]
    for rank, notes in enumerate(ranks):
        notes.write(places.get(f"rank_{rank}", "in step 3"))
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda rank: ranks[rank].report(), failing))


@pytest.fixture(autouse=True)
def _is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "ANSWER_WITHIN", 0.5)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_of_ranks_at_the_same_place_the_one_that_does_not_answer_is_named(lost: int) -> None:
    said, same = reports([rank for rank in range(3) if rank != lost])
    assert said == same
    assert f"rank {lost} did not answer: lost, stopped, or still waiting. Last seen:" in said
    assert "\n  ranks 0-2: in step 3, since" in said


def test_if_all_ranks_answer_nobody_is_named() -> None:
    (said,) = {*reports([0, 1, 2])}
    assert "all ranks are there" in said


def test_ranks_at_different_places_need_no_roll_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "ANSWER_WITHIN", 3600.0)
    said, same = reports([0, 1], rank_2="saving")
    assert said == same
    assert "the ranks are doing different things, or one was lost" in said


class GoesDown(dist.HashStore):
    """A store that is lost during the roll call."""

    def check(self, keys: list[str]) -> bool:
        if len(keys) > 1:
            raise dist.DistNetworkError("connection reset")
        return super().check(keys)


def test_a_store_that_goes_down_during_the_roll_call_is_told() -> None:
    said, same = reports([0, 1], GoesDown())
    assert said == same
    assert "one was lost, and with it the store that would tell which. Last seen:" in said


class Stopped(dist.HashStore):
    """A store whose host is stopped: what is asked is not answered, what is told is."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.goes_on.wait()
        return super().check(keys)


def test_a_store_that_does_not_answer_is_told_and_nobody_waits_for_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes_module, "REPORT_WITHIN", 0.5)
    store = Stopped()
    notes = Notes(store, Lobby(None, "0", [0, 1]), rank=1, world_size=2)
    notes.write("in step 3")
    expected = "a collective failed on rank 1: in step 3; the store does not answer: "
    assert notes.report().startswith(expected)
    monkeypatch.setattr(notes_module, "REPORT_WITHIN", 3600.0)
    assert notes.report([0]).startswith("a collective failed: rank 0 ended. This one was last in")
    assert is_silent(store)
    assert not is_silent(dist.HashStore())
    store.goes_on.set()
    until = time.monotonic() + 60
    while is_silent(store):
        assert time.monotonic() < until
        time.sleep(0.01)
