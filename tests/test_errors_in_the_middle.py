"""Something raises in the middle of an iteration: the optimizer can be used again, or says why not.

Every test compares with a job to which nothing happened.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
import torch.distributed as dist
from faults import AFTER, ATTACHED, BACKWARD, BEFORE, MODES, STEP, Fault, Job
from harness import World, distributed
from models import Mlp, assert_same_on_all_ranks, assert_same_parameters, seed_of
from torch.distributed.algorithms.join import Join
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer, local

WHO = pytest.mark.parametrize("who", ["one rank", "all ranks"])


def fails_here(world: World, who: str) -> bool:
    return who == "all ranks" or world.rank == world.size - 1


def assert_same_as(
    world: World, mode: str, job: Job, *numbers: int, wrapped_again_after: int = 0
) -> None:
    """Bit for bit what a job comes to that has only ever seen these batches. A new DDP has other
    buckets, which with three ranks are summed in another order."""
    job.optimizer.wait()
    reference = Job(world, mode)
    for number in numbers:
        reference.train(number)
        if number == wrapped_again_after:
            reference.wrap_again()
    assert_same_parameters(job.model, reference.model)
    assert_same_on_all_ranks(job.model)


# ---------------------------------------- before and after ----------------------------------------


@distributed(2, 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", BEFORE)
@WHO
def test_what_raises_before_backward_is_tried_again(
    world: World, mode: str, place: str, who: str
) -> None:
    job = Job(world, mode)
    job.train(1)
    if fails_here(world, who):
        job.arm(place)
        with pytest.raises(Fault):
            job.compute(2)
        job.optimizer.zero_grad()
    job.train(2, 3)
    assert_same_as(world, mode, job, 1, 2, 3)


@distributed(2, 3)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "overlap"])
@pytest.mark.parametrize("place", [*STEP, "closure"])
@WHO
def test_a_step_that_raises_before_it_has_changed_anything_is_called_again(
    world: World, mode: str, place: str, who: str
) -> None:
    job = Job(world, mode)
    job.train(1)
    with job.global_hooks():
        if fails_here(world, who):
            job.arm(place)
            if place != "closure":
                job.compute(2)
            with pytest.raises(Fault):
                job.optimizer.step((lambda: job.compute(2)) if place == "closure" else None)
        if place == "closure":
            job.optimizer.step(lambda: job.compute(2))
        else:
            if not fails_here(world, who):
                job.compute(2)
            job.optimizer.step()
        job.optimizer.zero_grad()
        job.train(3)
    assert_same_as(world, mode, job, 1, 2, 3)


@distributed(2, 3)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "overlap"])
@pytest.mark.parametrize("place", AFTER)
@WHO
def test_a_step_after_which_a_hook_raises_has_been_taken(
    world: World, mode: str, place: str, who: str
) -> None:
    job = Job(world, mode)
    job.train(1)
    job.compute(2)
    with job.global_hooks():
        if fails_here(world, who):
            job.arm(place)
            with pytest.raises(Fault):
                job.optimizer.step()
        else:
            job.optimizer.step()
        job.optimizer.zero_grad()
        job.train(3)
    assert_same_as(world, mode, job, 1, 2, 3)


# ---------------------------------------- in backward ----------------------------------------


def give_up_by(how: str, job: Job) -> None:
    """What the rank does after its backward has raised."""
    if how == "zero_grad":
        job.optimizer.zero_grad()
    elif how == "module.zero_grad":
        job.module.zero_grad()
    elif how == "step":
        with pytest.raises(RuntimeError, match="has not come to its end, because it raised"):
            job.optimizer.step()
    elif how == "clip":
        with pytest.raises(RuntimeError, match="has not come to its end, because it raised"):
            job.optimizer.clip_grad_norm_(1.0)


@distributed(2, 3)
@pytest.mark.parametrize("mode", ATTACHED)
@pytest.mark.parametrize("place", BACKWARD)
@WHO
@pytest.mark.parametrize("how", ["zero_grad", "module.zero_grad", "step", "clip", "nothing"])
def test_a_backward_that_raises_is_dropped_on_all_ranks(
    world: World, mode: str, place: str, who: str, how: str
) -> None:
    job = Job(world, mode)
    job.train(1)
    if fails_here(world, who):
        job.arm(place)
        with pytest.raises(Fault):
            job.compute(2)
        assert job.trap.armed is None
        give_up_by(how, job)
    else:
        job.compute(2)
        with pytest.raises(RuntimeError, match=f"raised on rank {world.size - 1},"):
            job.optimizer.step()
    if who == "one rank" or how == "nothing":
        job.train(3, 4)  # without zero_grad()
    else:
        job.optimizer.zero_grad()
        job.train(3, 4)
    assert_same_as(world, mode, job, 1, 3, 4)


@distributed(2, 3)
@pytest.mark.parametrize("mode", [mode for mode in ATTACHED if mode != "accumulating"])
@pytest.mark.parametrize("then", ["backward", "clip", "full_grad"])
def test_the_others_learn_of_it_by_whatever_they_do_next(
    world: World, mode: str, then: str
) -> None:
    job = Job(world, mode)
    job.train(1)
    if world.rank == 0:
        job.arm("autograd function")
        with pytest.raises(Fault):
            job.compute(2)
        job.optimizer.zero_grad()
    else:
        job.compute(2)
        with pytest.raises(RuntimeError, match="because it raised on rank 0"):
            if then == "backward":
                job.compute(3)
            elif then == "clip":
                job.optimizer.clip_grad_norm_(1.0)
            else:
                job.optimizer.full_grad(job.model.first.weight)
        job.optimizer.zero_grad()
    job.train(3, 4)
    assert_same_as(world, mode, job, 1, 3, 4)


@distributed(2, 3)
@WHO
def test_a_backward_that_raises_inside_no_sync_concerns_nobody(world: World, who: str) -> None:
    job = Job(world, "accumulating")
    job.train(1)
    if fails_here(world, who):
        job.arm("autograd function", in_no_sync=True)
        with pytest.raises(Fault):
            job.compute(2)
        with pytest.raises(RuntimeError, match="was not averaged"):
            job.optimizer.step()
        job.optimizer.zero_grad()
    job.train(2, 3)
    assert_same_as(world, "accumulating", job, 1, 2, 3)


@distributed(2, 3)
@pytest.mark.parametrize("mode", ["drop-in", "overlap"])
@pytest.mark.parametrize("place", BACKWARD)
def test_drop_in_the_gradients_of_a_backward_that_raised_are_refused(
    world: World, mode: str, place: str
) -> None:
    """DDP itself cannot go on; the optimizer can, with another one."""
    job = Job(world, mode)
    job.train(1)
    job.arm(place)
    with pytest.raises(Fault):
        job.compute(2)
    if mode == "drop-in":
        before = copy.deepcopy(job.model)
        with pytest.raises(RuntimeError, match="under DDP has not come to its end"):
            job.optimizer.step()
        assert_same_parameters(job.model, before)
    job.optimizer.zero_grad()
    job.wrap_again()
    job.train(3, 4)
    assert_same_as(world, mode, job, 1, 3, 4, wrapped_again_after=1)


@distributed(2)
def test_a_hook_of_the_users_that_averages_and_raises_leaves_no_step(world: World) -> None:
    job = Job(world, "overlap")
    job.train(1)
    trap = job.trap

    def averages(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        trap.reach("comm hook")
        return hook(state, bucket)

    hook, faults.allreduce_hook = faults.allreduce_hook, averages
    try:
        job.wrap_again()
    finally:
        faults.allreduce_hook = hook
    job.train(2)
    job.arm("comm hook")
    before = copy.deepcopy(job.model)
    with pytest.raises(Fault):
        job.compute(3)
    assert_same_parameters(job.model, before)
    job.optimizer.zero_grad()
    job.wrap_again()
    job.train(4)
    assert_same_as(world, "overlap", job, 1, 2, 4)


@distributed(2, 3)
def test_ranks_raise_at_different_places_of_a_backward(world: World) -> None:
    job = Job(world, "module")
    job.train(1)
    job.arm(BACKWARD[world.rank])
    with pytest.raises(Fault):
        job.compute(2)
    job.optimizer.zero_grad()
    job.train(3)
    assert_same_as(world, "module", job, 1, 3)


@distributed(2, 3)
@pytest.mark.parametrize("mode", ["ddp", "module"])
def test_a_backward_may_fail_many_times(world: World, mode: str) -> None:
    job = Job(world, mode)
    for number in range(1, 9):
        if number % world.size == world.rank:
            job.arm(BACKWARD[number % 4])
        with contextlib.suppress(Fault, RuntimeError):
            job.compute(number)
            job.step()
    job.train(9)
    assert_same_as(world, mode, job, 9)


@distributed(2, 3)
def test_inside_join_a_backward_that_raises_on_all_ranks_is_dropped(world: World) -> None:
    job, reference = Job(world, "module"), Job(world, "module")
    job.train(1)
    with Join([job.optimizer]):
        for number in range(2, 4 + world.rank):
            if number == 3:
                job.arm("autograd function")
                with pytest.raises(Fault):
                    job.compute(number)
                job.optimizer.zero_grad()
            else:
                job.compute(number)
                job.step()
    reference.train(1)
    with Join([reference.optimizer]):
        for number in (n for n in range(2, 4 + world.rank) if n != 3):
            reference.compute(number)
            reference.step()
    assert_same_parameters(job.model, reference.model)


@distributed(2, 3)
def test_inside_join_a_backward_that_raises_on_one_rank_is_an_error_on_all(world: World) -> None:
    job = Job(world, "module")
    with pytest.raises(RuntimeError, match="raised on rank 0"), Join([job.optimizer]):
        if world.rank == 0:
            job.arm("autograd function")
            with pytest.raises(Fault):
                job.compute(1)
        else:
            job.compute(1)
        job.optimizer.step()
    job.optimizer._leave_join()
    job.train(2)
    assert_same_as(world, "module", job, 2)


# ---------------------------------------- in a step ----------------------------------------


@contextlib.contextmanager
def raising_in_call(monkeypatch: Any, number: int) -> Iterator[None]:
    """The inner optimizer raises when it is called for the `number`-th time: in that bucket."""
    original, calls = local.step_without_hooks, 0

    def step_without_hooks(optimizer: Any) -> Callable[..., Any]:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Fault("in the update")
        return original(optimizer)

    with monkeypatch.context() as patched:
        patched.setattr(local, "step_without_hooks", step_without_hooks)
        yield


REFUSED: dict[str, Callable[[Any], Any]] = {
    "step": lambda job: job.optimizer.step(),
    "consolidate": lambda job: job.optimizer.consolidate_state_dict(),
    "save": lambda job: job.optimizer.save("/nowhere"),
    "sharded": lambda job: job.optimizer.sharded().state_dict(),
    "compare": lambda job: job.optimizer.assert_replicas_equal(),
    "add": lambda job: job.optimizer.add_param_group(
        {"params": [torch.nn.Parameter(torch.ones(2))]}
    ),
}
