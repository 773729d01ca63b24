"""Where each rank was last seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed
from inside import NOTES_ANSWER_SECONDS, NOTES_REPORT_SECONDS, store_grows

from onecopy import ZeroRedundancyOptimizer
from onecopy.notes import Lobby, Notes
from onecopy.waiting import is_silent


def test_without_a_store_the_report_is_about_this_rank_alone() -> None:
    notes = Notes(None, Lobby(None, "0", [0, 1]), rank=1, world_size=2)
    notes.write("in step 3")
    assert notes.report() == (
        "a collective failed on rank 1: in step 3; where the others are is not known: their "
        "process group has no store"
    )
    expected = "a collective failed: ranks 0, 2 ended. This one was last in step 3"
    assert notes.report(ended=[0, 2]) == expected


def reports(
    failing: Sequence[int], store: Any = None, raised: Sequence[int] = (), **places: str
) -> list[str]:
    """What these of three ranks say when a collective fails, each in a thread of its own."""
    store = store or dist.HashStore()
    lobby = Lobby(None, "0", [0, 1, 2])
    grows = store_grows(store)
    ranks = [Notes(store, lobby, rank, 3, writes_errors_only=grows) for rank in range(3)]
    for rank, notes in enumerate(ranks):
        notes.write(places.get(f"rank_{rank}", "in step 3"))
        if rank in raised:
            notes.take_back("in step 3 raised ValueError: no")
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda rank: ranks[rank].report(), failing))


@pytest.fixture(autouse=True)
def _is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*NOTES_ANSWER_SECONDS, 0.5)


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
    monkeypatch.setattr(*NOTES_ANSWER_SECONDS, 3600.0)
    said, same = reports([0, 1], rank_2="saving")
    assert said == same
    assert 'rank 2 did something else than ranks 0-1 ("saving", not "in step 3")' in said
    assert said.endswith("without waiting for a timeout")


def written(*places: Sequence[str]) -> str:
    """What is reported when each rank has written these notes."""
    store, lobby = dist.HashStore(), Lobby(None, "0", range(len(places)))
    ranks = [Notes(store, lobby, rank, len(places)) for rank in range(len(places))]
    for notes, texts in zip(ranks, places, strict=True):
        for text in texts:
            notes.write(text)
    return ranks[0].report()


def test_of_ranks_that_did_different_things_the_first_difference_counts_not_who_is_further() -> (
    None
):
    same = ["optimizer built", "in backward 1"]
    backwards, steps = [*same, "in backward 2", "in backward 3"], [*same, "in step 1"]
    said = 'did something else than {} ("in step 1", not "in backward 2")'
    assert f"rank 1 {said.format('rank 0')}. Last" in written(backwards, steps)
    assert f"rank 0 {said.format('rank 1')}. Last" in written(steps, backwards)
    assert f"rank 2 {said.format('ranks 0-1')}. Last" in written(backwards, backwards, steps)
    assert 'rank 0 did something else than ranks 1-2 ("in b' in written(backwards, steps, steps)
    # A rank that is behind, on the same way, is missing; so is one that lies far behind.
    assert "rank 1 did not arrive" in written(steps, same)
    assert "rank 1 did not arrive" in written([*same, *map(str, range(20))], same)
    # A rank that has joined follows the others under another name.
    follows = [*same, "looking at gradients, joined", "in step 1"]
    assert "did not answer" in written([*same, "clipping", "in step 1"], follows)


def test_what_was_taken_back_is_no_difference() -> None:
    store, lobby = dist.HashStore(), Lobby(None, "0", [0, 1])
    one, two = (Notes(store, lobby, rank, 2) for rank in range(2))
    one.write("in step 1")
    one.take_back("in step 1 raised")
    for notes in (one, two):
        notes.write("in step 2")
    assert "did not answer" in one.report()


def stores(directory: Path) -> dict[str, Any]:
    file = dist.FileStore(str(directory / "file"), 1)
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = {"hash": dist.HashStore(), "tcp": tcp, "file": file}
    for name in list(found):
        inner = dist.PrefixStore("inner", found[name])
        found[f"{name} with prefixes"] = dist.PrefixStore("outer", inner)
    return found


def test_with_every_store_the_rank_that_raised_is_named_with_its_error(tmp_path: Path) -> None:
    for name, store in stores(tmp_path).items():
        (said,) = {*reports([0, 1], store, raised=[2])}
        assert "rank 2 did not arrive" in said, name
        assert "\n  rank 2: in step 3 raised ValueError: no, since" in said, name
        assert "\n  ranks 0-1: in step 3, since" in said or "file" in name, said


def test_with_every_store_a_rank_that_says_nothing_is_named(tmp_path: Path) -> None:
    for name, store in stores(tmp_path).items():
        (said,) = {*reports([0, 2], store)}
        assert "rank 1 did not answer: lost, stopped, or still waiting" in said, name
        says_why = (
            "\n  rank 1: not known: with a file store ranks say where they are only if" in said
        )
        assert says_why == name.startswith("file")


def test_in_a_file_store_a_rank_writes_its_errors_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "file"
    store = dist.FileStore(str(file), 1)
    notes = Notes(store, Lobby(None, "0", [0, 1]), 0, 2, writes_errors_only=True)
    notes.write("in step 1")
    before = file.stat().st_size if file.exists() else 0
    notes.write("in step 1 raised ValueError", same_place=True, is_error=True)
    assert b"raised ValueError" in store.get("onecopy/0")
    notes.write("in step 1")  # again, and it works
    assert store.get("onecopy/0") == b""
    once = file.stat().st_size - before
    for step in range(1000):
        notes.write(f"in step {step}")
    assert file.stat().st_size - before == once


@distributed(3)
def test_in_a_job_with_a_file_store_the_rank_that_raised_is_named(
    world: World, tmp_path: Path
) -> None:
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path / 'store'}",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=2),
    )
    weight = torch.nn.Parameter(torch.ones(8))
    opt = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.1)
    weight.grad = torch.ones(8)
    opt.step()
    opt.wait()
    if world.rank == 1:
        weight.grad = weight.grad.to_sparse()
        with pytest.raises(RuntimeError, match="sparse gradient"):
            opt.step()
        return
    says = r"rank 1 did not arrive(.|\n)*rank 1: in step 2 raised RuntimeError: .* sparse gradient"
    with pytest.raises(RuntimeError, match=says):
        opt.step()  # with one bucket it waits for the gather


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
    monkeypatch.setattr(*NOTES_REPORT_SECONDS, 0.5)
    store = Stopped()
    notes = Notes(store, Lobby(None, "0", [0, 1]), rank=1, world_size=2)
    notes.write("in step 3")
    expected = "a collective failed on rank 1: in step 3; the store does not answer: "
    assert notes.report().startswith(expected)
    monkeypatch.setattr(*NOTES_REPORT_SECONDS, 3600.0)
    assert notes.report([0]).startswith("a collective failed: rank 0 ended. This one was last in")
    assert is_silent(store)
    assert not is_silent(dist.HashStore())
    store.goes_on.set()
    until = time.monotonic() + 60
    while is_silent(store):
        assert time.monotonic() < until
        time.sleep(0.01)
