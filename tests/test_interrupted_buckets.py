"""A bucket is interrupted on its way: nothing is added twice, or used although it was never added.

Ctrl-C, a handler of a signal that raises, or a lack of memory may come anywhere in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from faults import Job, meet
from harness import World, distributed
from inside import AFTER_GATHER, CLAIM_BUCKET, SEND_GRADIENTS, params_of
from models import assert_same_on_all_ranks, assert_same_parameters
from states import consolidated_everywhere

from onecopy import keeping
from onecopy.buffers import Copies
from onecopy.flights import Flight, Flights
from onecopy.lanes import Lane

LAUNCH = (Flights, "launch")
ERRORS = pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])


@contextlib.contextmanager
def raising_once(
    owner: Any, name: str, error: type[BaseException], when: str, at: int = 1
) -> Iterator[None]:
    """The `at`-th call of a function raises, before it does anything or afterwards."""
    real, calls = getattr(owner, name), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] != at:
            return real(*args, **kwargs)
        if when == "after":
            real(*args, **kwargs)
        raise error("in the middle")

    with mock.patch.object(owner, name, interrupted):
        yield
    assert calls[0], f"nobody has called {name}"


# ------------------------------------------------------------------ gradients

LANDING = [
    (Lane, "add", "before", MemoryError),
    (Lane, "add", "after", KeyboardInterrupt),
    (Flight, "give_back", "after", KeyboardInterrupt),
]
USES: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "clip_grad_norm_": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "full_grad": lambda optimizer: optimizer.full_grad(params_of(optimizer)[0]),
}
SLOWLY = [pytest.param(use, marks=pytest.mark.slow) for use in ("clip_grad_norm_", "full_grad")]


def train(job: Job, use: str, *numbers: int) -> None:
    for number in numbers:
        job.compute(number)  # in which buckets land, too, if more are under way than may be
        USES[use](job.optimizer)
        job.optimizer.step()


@distributed(2, 3, timeout=60, pg_timeout=3)
@pytest.mark.parametrize(("owner", "name", "when", "error"), LANDING)
@pytest.mark.parametrize("use", ["step", *SLOWLY])
def test_gradients_that_were_added_up_in_part_are_never_used(
    world: World, owner: Any, name: str, when: str, error: type[BaseException], use: str
) -> None:
    job = Job(world, "module")
    job.train(1)
    if world.rank == world.size - 1:
        with raising_once(owner, name, error, when), pytest.raises(error):
            train(job, use, 2)
        before = [param.detach().clone() for param in job.model.parameters()]
        for again in USES.values():
            with pytest.raises(RuntimeError, match=f"{error.__name__} came while this rank was"):
                again(job.optimizer)
        assert all(map(torch.equal, before, job.model.parameters()))
    else:
        with pytest.raises(RuntimeError, match=r"a collective failed|of no use any more"):
            train(job, use, 2, 3)
    meet(world, "both know")


@distributed(2, 3, timeout=60, pg_timeout=3)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_bucket_that_was_sent_in_part_is_not_sent_again(world: World, when: str) -> None:
    job = Job(world, "module")
    job.train(1)
    if world.rank == world.size - 1:
        with (
            raising_once(*SEND_GRADIENTS, KeyboardInterrupt, when),
            pytest.raises(KeyboardInterrupt),
        ):
            job.compute(2)
        with pytest.raises(RuntimeError, match="came while this rank was sending gradients"):
            job.optimizer.step()
    else:
        with pytest.raises(RuntimeError, match=r"a collective failed|of no use any more"):
            job.train(2, 3)
    meet(world, "both know")


@distributed(2, 3)
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(
    ("place", "when"),
    [(CLAIM_BUCKET, "before"), (CLAIM_BUCKET, "after"), (LAUNCH, "before"), (LAUNCH, "after")],
)
def test_a_bucket_that_is_interrupted_before_or_after_it_is_sent_is_sent_once(
    world: World, place: tuple[Any, str], when: str, at: int
) -> None:
    """On one rank: the others wait for every bucket, in the order of the plan."""
    job, undisturbed = Job(world, "module"), Job(world, "module")
    job.train(1)
    undisturbed.train(1)
    if world.rank == world.size - 1:
        with raising_once(*place, KeyboardInterrupt, when, at), pytest.raises(KeyboardInterrupt):
            job.compute(2)
        # A second one, while it is given up.
        with raising_once(*LAUNCH, KeyboardInterrupt, when), contextlib.suppress(KeyboardInterrupt):
            job.optimizer.zero_grad()
    else:
        job.compute(2)
    job.optimizer.zero_grad()
    for each in (job, undisturbed):
        each.train(3, 4)
    assert_same_parameters(job.model, undisturbed.model)
    assert_same_on_all_ranks(job.model)


# ------------------------------------------------------------------ parameters


@distributed(2, 3)
@pytest.mark.parametrize(("owner", "name"), [(Copies, "run"), AFTER_GATHER])
@pytest.mark.parametrize("when", ["before", "after"])
@ERRORS
def test_a_gather_that_is_interrupted_is_awaited_again(
    world: World, owner: Any, name: str, when: str, error: type[BaseException]
) -> None:
    job = Job(world, "lazy")
    job.compute(1)
    job.step()
    with raising_once(owner, name, error, when), pytest.raises(error):
        job.compute(2)
    job.optimizer.zero_grad()
    job.train(2)
    undisturbed = Job(world, "lazy")
    undisturbed.train(1, 2)
    assert_same_parameters(job.model, undisturbed.model)
    assert_same_on_all_ranks(job.model)


# ------------------------------------------------------------------ loading


@distributed(1, 2, 3)
@pytest.mark.parametrize("name", ["load_masters", "options_of"])
@ERRORS
def test_a_load_that_is_interrupted_at_its_end_is_never_used_in_part(
    world: World, name: str, error: type[BaseException]
) -> None:
    saving = Job(world, "masters")
    saving.train(1)
    saved = consolidated_everywhere(saving.optimizer)
    disturbed, undisturbed = Job(world, "masters"), Job(world, "masters")
    for job in (disturbed, undisturbed):
        job.train(2)
    with raising_once(keeping, name, error, "before"), pytest.raises(error):
        disturbed.optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=f"loading has failed in the middle .{error.__name__}"):
        disturbed.optimizer.step()
    for job in (disturbed, undisturbed):
        job.optimizer.load_state_dict(saved)
        job.train(3)
    assert_same_parameters(disturbed.model, undisturbed.model)
    assert_same_on_all_ranks(disturbed.model)
