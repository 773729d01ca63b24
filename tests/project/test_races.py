"""`make races` in small: delays around every collective and hook change no bit."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankFailure, World, run_on_ranks
from inside import (
    AFTER_GATHER,
    AFTER_REDUCE,
    BEFORE_LAZY_FORWARD,
    CLAIM_BUCKET,
    WAIT_FOR_GRADIENTS,
    WAIT_FOR_READERS,
)
from races import (
    DELAYED,
    MODES,
    SHARED_FROM,
    Config,
    Delays,
    batches,
    compare_runs,
    configs,
    first_difference,
)
from trial_common import count_of_different_elements, have_equal_bits

from onecopy import ZeroRedundancyOptimizer
from onecopy.comm.gloo.local_ranks import LocalRanks, SharedRead
from onecopy.comm.group import RankGroup
from onecopy.gradients.reducer import GradBucket
from onecopy.sharding.engine import AllGathers, BucketQueue

PATIENCE = {"timeout": 600.0, "pg_timeout": 900.0}  # of seconds


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_delays_change_no_bit(ranks: int, tmp_path: Path) -> None:
    chosen = itertools.islice(configs(), 3 * (ranks - 2), 3 * (ranks - 1))
    runs = [
        (100 * ranks + number, replace(config, shared_from=shared_from))
        for number, (config, shared_from) in enumerate(zip(chosen, SHARED_FROM, strict=True))
    ]
    slept = run_on_ranks(ranks, compare_runs, runs, tmp_path, **PATIENCE)
    assert all(count > 20 for count in slept), slept


def test_configurations_take_every_way_there_is() -> None:
    found = list(configs())
    assert {config.mode for config in found} == set(MODES)
    assert sum(config.saves for config in found) > len(found) // 5
    assert sum(config.lazy for config in found) > len(found) // 5
    for runs in (20, 100):
        assert {size for size, _ in batches(1, runs)} == {2, 3, 4}
    assert [config for _, batch in batches(1, 3) for _, config in batch] != [
        config for _, batch in batches(2, 3) for _, config in batch
    ]
    seeds = [seed for _, batch in batches(7, 50) for seed, _ in batch]
    assert seeds == list(range(7, 57))
    lent = Counter((size, c.shared_from) for size, batch in batches(7, 180) for _, c in batch)
    assert set(lent) == set(itertools.product((2, 3, 4), SHARED_FROM))
    assert min(lent.values()) > 10


def test_what_communicates_holds_gradients_or_is_a_hook_is_delayed() -> None:
    hooks = {BEFORE_LAZY_FORWARD[0], CLAIM_BUCKET[0], ZeroRedundancyOptimizer}
    assert hooks | {
        BucketQueue,
        AllGathers,
        AFTER_GATHER[0],
        AFTER_REDUCE[0],
        GradBucket,
        SharedRead,
        LocalRanks,
        RankGroup,
    } <= set(DELAYED)


def test_everything_is_as_before_when_the_delays_are_over() -> None:
    before = [dict(vars(cls)) for cls in DELAYED]
    with Delays(seed=1, rank=0):
        assert AllGathers.launch is not before[DELAYED.index(AllGathers)]["launch"]
    assert [dict(vars(cls)) for cls in DELAYED] == before


# ---------------------------------------- what it finds ----------------------------------------


def race_with_a_fault(
    world: World, runs: list[tuple[int, Config]], directory: Path, fault: str
) -> None:
    with contextlib.ExitStack() as stack:
        for patch in FAULTS[fault]:
            stack.enter_context(mock.patch.object(*patch))
        compare_runs(world, runs, directory)


def do_nothing(*_: Any) -> None:
    """In place of something that is needed."""


def add_up_and_wait(op: Any) -> None:
    """As ``complete`` of a reduce-scatter; what has not arrived yet is added up as it is."""
    COMPLETE(op)
    WAIT(op)


def arrive_and_release(read: SharedRead, patience: float, arrive: Any = SharedRead.arrive) -> None:
    """As ``SharedRead.arrive``; the owner may write there at once, not only when it was read."""
    arrive(read, patience)
    read.memory.mark_read(read.local_ranks.rank, read.address.sequence)


def launch_at_once_what_is_sent(
    queue: BucketQueue, number: int, op: Any, *args: Any, launch: Any = BucketQueue.launch
) -> None:
    """As ``BucketQueue.launch``, but gradients of which nothing is shared do not wait for those who
    read the memory that they have in common with other buckets."""
    with contextlib.ExitStack() as stack:
        if isinstance(op, AFTER_REDUCE[0]) and not op.routes.read_by:
            stack.enter_context(mock.patch.object(*WAIT_FOR_READERS, do_nothing))
        launch(queue, number, op, *args)


COMPLETE, WAIT = getattr(*AFTER_REDUCE), getattr(*WAIT_FOR_GRADIENTS)
FAULTS: dict[str, list[tuple[Any, str, Any]]] = {
    "a forward does not wait": [(*BEFORE_LAZY_FORWARD, do_nothing)],
    "a bucket is not awaited": [
        (*WAIT_FOR_GRADIENTS, do_nothing),
        (*AFTER_REDUCE, add_up_and_wait),
    ],
    "a lender does not wait": [(LocalRanks, "wait_until_read", do_nothing)],
    "a loan is given back too early": [
        (SharedRead, "arrive", arrive_and_release),
        (SharedRead, "release", do_nothing),
    ],
    "what is sent does not wait": [(BucketQueue, "launch", launch_at_once_what_is_sent)],
}


@pytest.mark.parametrize(
    ("fault", "mode"),
    [("a forward does not wait", "bare"), ("a bucket is not awaited", "ddp")],
)
def test_a_wait_that_is_missing_is_found(fault: str, mode: str, tmp_path: Path) -> None:
    config = Config(mode, "SGD", lazy=True, small_buckets=True)
    runs = [(seed, config) for seed in range(5)]
    with pytest.raises(RankFailure, match="Difference: "):
        run_on_ranks(3, race_with_a_fault, runs, tmp_path, fault, **PATIENCE)


@pytest.mark.parametrize(
    ("fault", "ranks", "mode"),
    [
        ("a lender does not wait", 4, "bare"),
        ("a loan is given back too early", 2, "drop-in"),
        ("what is sent does not wait", 4, "bare"),
    ],
)
def test_memory_that_is_written_while_others_read_it_is_found(
    fault: str, ranks: int, mode: str, tmp_path: Path
) -> None:
    shared_from = 64 if "sent" in fault else 1
    config = Config(mode, "SGD", small_buckets=True, shared_from=shared_from)
    runs = [(seed, config) for seed in range(30)]
    with pytest.raises(RankFailure, match="Difference: "):
        run_on_ranks(ranks, race_with_a_fault, runs, tmp_path, fault, **PATIENCE)


def test_bits_are_compared_and_not_numbers() -> None:
    zero, nan = torch.zeros(3), torch.full((3,), float("nan"))
    minus = torch.tensor([0.0, -0.0, 0.0])
    assert torch.equal(zero, minus)
    assert not have_equal_bits(zero, minus)
    assert count_of_different_elements(zero, minus) == 1
    assert first_difference({"a": [minus]}, {"a": [zero]}) == "['a'][0]"
    assert have_equal_bits(nan, nan.clone())
    assert not have_equal_bits(zero, zero.double())
    assert first_difference([1], [1.0]) is not None
