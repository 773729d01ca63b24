"""Where each rank was last seen."""

from __future__ import annotations

import os
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
from harness import World, distributed, pretend_hosts
from inside import NOTES_ANSWER_SECONDS, NOTES_REPORT_SECONDS
from torch.distributed.algorithms.join import Join

from onecopy import ZeroRedundancyOptimizer
from onecopy.comm.monitor import RankStatus
from onecopy.comm.waiting import is_silent


def test_without_a_store_the_report_is_about_this_rank_alone() -> None:
    notes = RankStatus(None, rank=1, world_size=2)
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
    ranks = [RankStatus(store, rank, 3) for rank in range(3)]
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


JOINED = "looking at gradients with the others"


def written(
    *places: Sequence[str | tuple[int, str]], ended: Sequence[int] = (), optimizer: int = 0
) -> str:
    """What is reported when each rank has written these notes, of this optimizer or of another."""
    store = dist.HashStore()
    ranks = [RankStatus(store, rank, len(places)) for rank in range(len(places))]
    for notes, texts in zip(ranks, places, strict=True):
        for each in texts:
            number, text = (optimizer, each) if isinstance(each, str) else each
            notes.write(text, optimizer=number, is_joined=text.startswith(JOINED))
    return ranks[0].report(ended)


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


@pytest.mark.parametrize("optimizer", [0, 1])
def test_a_rank_that_has_joined_follows_the_others_under_another_name(optimizer: int) -> None:
    which = f" (optimizer {optimizer + 1} of the process group)" * optimizer
    leads = [f"clipping{which}", f"in step 1{which}"]
    follows = [f"{JOINED}, joined{which}", leads[1]]
    assert "did not answer" in written(leads, follows, optimizer=optimizer)
    assert "rank 2 ended" in written(leads, follows, leads, ended=[2], optimizer=optimizer)
    assert "rank 2 did not arrive" in written(leads, follows, leads[:1], optimizer=optimizer)


def iteration(number: int, order: Sequence[int] = (0, 1)) -> list[tuple[int, str]]:
    """What a rank writes that reaches two attached modules in this order."""
    backward = [(each, f"in backward 1 after step {number} of {each}") for each in order]
    return [*backward, *((each, f"in step {number + 1} of {each}") for each in (0, 1))]


def test_two_modules_in_another_order_are_no_difference_and_the_lost_rank_is_named() -> None:
    usual = [place for number in range(4) for place in iteration(number)]
    other = [place for number in range(4) for place in iteration(number, (1, 0))]
    for length in range(1, len(usual)):
        assert "rank 2 did not arrive" in written(other, usual, usual[:length]), length
    # Ranks 0 and 1 wait in the backwards of different modules.
    assert "rank 2 did not arrive" in written(other[:13], usual[:13], usual[:12])
    # The rank that has ended is further than those that wait for it, and came another way.
    assert "rank 2 ended" in written(other[:13], usual[:13], usual[:14], ended=[2])
    assert "rank 2 ended" in written(["in step 1"], ["in step 1"], ["saving"], ended=[2])
    # Rank 1 lives, though it has not come either.
    assert ": rank 2 did not arrive" in written(usual, usual[:12], usual[:12], ended=[2])


def test_a_difference_after_which_all_have_done_the_same_is_none() -> None:
    recovered = ["saving to a", "in step 1"], ["saving to b", "in step 1"]
    assert "did not answer" in written(*recovered)
    assert "rank 1 did not arrive" in written([*recovered[0], "step 1 finished"], recovered[1])


@pytest.mark.parametrize("optimizers", [2, 40])
def test_of_several_optimizers_those_called_in_another_order_or_not_at_all_are_shown(
    optimizers: int,
) -> None:
    start = [(each, "optimizer built") for each in range(optimizers)]
    last = optimizers - 1
    first, second = (last - 1, "in step 1 of a"), (last, "in step 1 of b")
    later = (last - 1, "in backward 1 of a")
    said = written([*start, first], [*start, second], [*start, first])
    assert 'rank 1 did something else than ranks 0, 2 ("in step 1 of b", not "in step 1 of a")' in (
        said
    )
    said = written([*start, first, later], [*start, first, second], [*start, first, later])
    assert "rank 1 did something else than ranks 0, 2" in said
    assert '("in step 1 of b", not "in backward 1 of a")' in said
    assert "rank 1 did not arrive" in written([*start, first, second], [*start, first])
    assert "rank 1 did not arrive" in written([*start, (optimizers, "building")], start)


def test_what_was_taken_back_is_no_difference() -> None:
    store = dist.HashStore()
    one, two = (RankStatus(store, rank, 2) for rank in range(2))
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
    notes = RankStatus(store, 0, 2)
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


@distributed(3, fresh=True, pg_timeout=30)
@pytest.mark.parametrize("on_one_host", [False, True])
def test_a_lost_rank_is_named_though_another_reaches_two_modules_in_another_order(
    world: World, on_one_host: bool
) -> None:
    if not on_one_host:
        pretend_hosts(world, 0, 1, 2)  # so that no rank sees that the process has ended
    modules = [torch.nn.Linear(8, 8) for _ in range(2)]
    optimizers = [
        ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1) for module in modules
    ]
    for optimizer, module in zip(optimizers, modules, strict=True):
        optimizer.attach(module)

    def iterate() -> None:
        losses = [module(torch.ones(2, 8)).sum() for module in modules[:: -1 if world.rank else 1]]
        (losses[0] + losses[1]).backward()
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(3):
        iterate()
    for optimizer in optimizers:
        optimizer.wait()
    dist.barrier()
    if world.rank == 2:
        os._exit(0)
    with pytest.raises(RuntimeError) as caught:
        iterate()
    named = "a collective failed: rank 2 did not arrive. Last seen:"
    assert str(caught.value).startswith(named), caught.value


@distributed(3, fresh=True, pg_timeout=10)
@pytest.mark.parametrize("second", [False, True])
def test_of_any_optimizer_a_rank_that_has_joined_is_not_blamed_for_a_lost_one(
    world: World, second: bool
) -> None:
    pretend_hosts(world, 0, 1, 2)  # so that no rank sees that the process has ended
    module = torch.nn.Linear(8, 8)
    for _ in range(1 + second):
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.attach(module)

    def train() -> None:
        with Join([optimizer]):
            for number in range(1 if world.rank == 0 else 3):
                module(torch.ones(2, 8)).sum().backward()
                optimizer.clip_grad_norm_(1.0)
                if world.rank == 2 and number == 2:
                    os._exit(0)
                optimizer.step()

    with pytest.raises(RuntimeError) as caught:
        train()
    if world.rank == 1:  # the other one is in a collective of torch's Join
        which = " (optimizer 2 of the process group)" * second
        text = str(caught.value)
        assert "a collective failed: the ranks are doing different things, or one was" in text
        assert f"rank 0: looking at gradients with the others, joined{which}, since" in text


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
    notes = RankStatus(store, rank=1, world_size=2)
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
