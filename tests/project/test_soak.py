"""`make soak` in small: every class on a short run, and mistakes that it has to find."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from harness import RankFailure, World, run_on_ranks
from soak import FEW_SEGMENTS, SEGMENTS, Soak, share_cores
from soak_job import (
    EVERY_OPERATION,
    SHARED_FROM,
    WAYS,
    Difference,
    Job,
    Segment,
    run_segment,
    train,
)
from soak_reference import CASES
from trial_common import count_failures, step_timeout

from onecopy.planning.param_groups import MASTER

PATIENCE = {"timeout": 600.0, "pg_timeout": 900.0}  # of seconds


@pytest.mark.parametrize("case", CASES)
def test_a_run_ends_where_its_reference_does(case: str, tmp_path: Path) -> None:
    number = list(CASES).index(case)
    loads_by, steps = None, 0
    for place, size in enumerate((4, 3)):
        saves_by = WAYS[(number + place) % len(WAYS)]
        shared_from = SHARED_FROM[(number + place) % len(SHARED_FROM)]
        segment = Segment(
            number, 10 * number + place, case, 6, tmp_path, saves_by, loads_by, shared_from
        )
        tallies = run_on_ranks(size, run_segment, segment, **PATIENCE)
        assert tallies[0] == tallies[-1]
        assert tallies[0].modes.total() == 6
        assert set(tallies[0].operations) <= set(EVERY_OPERATION)
        steps += tallies[0].steps
        assert tallies[0].comparisons
        assert tallies[0].checkpoints
        loads_by = saves_by
    assert steps == 12


def test_a_soak_depends_on_its_seed_only(tmp_path: Path) -> None:
    runs = [list(Soak(5, 8, 3, tmp_path).plan(number)) for number in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    sizes = [size for size, _ in runs[0]]
    assert len(sizes) == SEGMENTS
    assert sizes[::2] == [8] * (SEGMENTS // 2)
    assert all(1 <= size < 8 for size in sizes[1::2])
    assert [size for size, _ in Soak(5, 1, 3, tmp_path).plan(0)] == [1] * SEGMENTS
    segments = [each for number in range(10) for _, each in Soak(5, 8, 3, tmp_path).plan(number)]
    assert {segment.shared_from for segment in segments} == set(SHARED_FROM)


@pytest.mark.parametrize("seed", range(20))
def test_a_short_soak_soon_meets_all_cases(seed: int, tmp_path: Path) -> None:
    """A soak of two minutes has about 15 segments."""
    soak = Soak(seed, 8, 3, tmp_path, FEW_SEGMENTS)
    segments = [segment for number in range(8) for _, segment in soak.plan(number)][:15]
    assert {segment.case for segment in segments} == set(CASES)
    assert [segment.number for segment in segments] == list(range(15))
    again = Soak(seed, 8, 3, tmp_path, FEW_SEGMENTS)
    assert [each for number in range(8) for _, each in again.plan(number)][:15] == segments


def test_the_seed_decides_the_order_of_the_cases(tmp_path: Path) -> None:
    orders = {
        tuple(each.case for number in range(len(CASES)) for _, each in soak.plan(number))
        for soak in (Soak(seed, 8, 3, tmp_path) for seed in range(20))
    }
    assert len(orders) > 10


def test_a_soak_knows_what_never_happened(tmp_path: Path) -> None:
    soak = Soak(1, 2, 1, tmp_path)
    everything = soak.never_happened()
    assert {"save async", "clip", "drop-in DDP", "AdamW", "sharing nothing"} <= set(everything)
    assert len(set(everything)) == len(everything)
    soak.tally.operations.update(everything)
    soak.tally.modes.update(everything)
    soak.segments_about.update(everything)
    assert soak.never_happened() == []
    soak.tally.operations["clip"] = 0
    assert soak.never_happened() == ["clip"]


def test_a_soak_shares_two_cores() -> None:
    before = os.sched_getaffinity(0)
    try:
        share_cores(1)
        assert len(os.sched_getaffinity(0)) == 1
    finally:
        os.sched_setaffinity(0, before)


# ---------------------------------------- what it finds ----------------------------------------


def train_with_one_wrong_bit(world: World, segment: Segment, where: str) -> None:
    job = Job(world, segment)
    train(job)
    job.optimizer.wait()
    last = world.rank == world.size - 1
    if where == "parameter" and last:
        with torch.no_grad():
            job.net.trunk.bias.view(torch.int32)[0] ^= 1
    elif where == "state":
        for state in job.optimizer.state.values():
            if state["exp_avg"].ndim == 1 and state["exp_avg"].numel():
                state["exp_avg"].view(torch.int32)[0] ^= 1
    elif where == "sign of a zero":
        with torch.no_grad():
            job.net.trunk.bias[0] = -0.0
            job.reference.params["trunk.bias"][0] = 0.0
    elif where == "options":
        job.optimizer.param_groups[1]["lr"] *= 1.0000001
    job.compare()


@pytest.mark.parametrize("where", ["parameter", "state", "sign of a zero", "options"])
def test_one_wrong_bit_is_a_difference(where: str, tmp_path: Path) -> None:
    segment = Segment(1, 0, "AdamW", 1, tmp_path, "own")
    with pytest.raises(RankFailure, match="differ on rank"):
        run_on_ranks(2, train_with_one_wrong_bit, segment, where, **PATIENCE)


def train_and_lose_a_master_copy(world: World, segment: Segment) -> None:
    job = Job(world, segment)
    train(job)
    job.compare()
    job.optimizer.consolidate_state_dict(0)
    if world.rank == 0:
        state = job.optimizer.state_dict()["state"]
        job._compare_state(state)
        del next(each for each in state.values() if MASTER in each)[MASTER]
        with pytest.raises(Difference, match=MASTER):
            job._compare_state(state)


def test_a_master_copy_that_is_missing_is_a_difference(tmp_path: Path) -> None:
    segment = Segment(1, 0, "masters", 1, tmp_path, "own")
    run_on_ranks(2, train_and_lose_a_master_copy, segment, **PATIENCE)


def train_and_forget_to_go_back(world: World, segment: Segment) -> None:
    """The reference goes back to a checkpoint, the job does not."""
    job = Job(world, segment)
    train(job)
    job.checkpoints.keep("own", job)
    train(job)
    job.checkpoints.load = lambda *_: None
    job.checkpoints.load_kept(job)
    job.compare()


def test_a_load_that_does_nothing_is_a_difference(tmp_path: Path) -> None:
    segment = Segment(1, 0, "AdamW", 1, tmp_path, "own")
    with pytest.raises(RankFailure, match="Difference: "):
        run_on_ranks(2, train_and_forget_to_go_back, segment, **PATIENCE)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ("Difference: bias differ on rank 1", "1 differences, 0 hangs, 0 errors"),
        ("rank 0 printed\nTimeout (0:05:00)!", "0 differences, 1 hangs, 0 errors"),
        ("==== rank 0 raised ====\nValueError: no", "0 differences, 0 hangs, 1 errors"),
        ("", "0 differences, 0 hangs, 0 errors"),
    ],
)
def test_a_summary_says_what_went_wrong(failure: str, expected: str, tmp_path: Path) -> None:
    soak = Soak(1, 2, 1, tmp_path)
    soak.failure = failure
    assert soak.summary(0.5).endswith(expected)


def stall(world: World) -> None:
    with step_timeout(2.0) as progress:
        progress()
        while world.rank == 0:
            time.sleep(0.1)


def test_a_rank_that_makes_no_progress_tells_where_it_is() -> None:
    with pytest.raises(RankFailure, match="Timeout") as failure:
        run_on_ranks(2, stall, fresh=True, **PATIENCE)
    assert count_failures(str(failure.value)) == "0 differences, 1 hangs, 0 errors"
    assert "in stall" in str(failure.value)
