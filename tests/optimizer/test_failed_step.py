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
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from failing_jobs import AFTER, ATTACHED, BEFORE, MODES, STEP, Fault, Job, meet
from harness import World, distributed
from inside import STEP_WITHOUT_HOOKS, plan_of
from models import (
    assert_same_on_all_ranks,
    assert_same_parameters,
    random_parameter,
    train_on_constants,
)
from torch.optim import SGD

from onecopy import ZeroRedundancyOptimizer

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


# ---------------------------------------- in a step ----------------------------------------


@contextlib.contextmanager
def raising_in_call(number: int) -> Iterator[None]:
    """The inner optimizer raises when it is called for the `number`-th time: in that bucket."""
    original, calls = getattr(*STEP_WITHOUT_HOOKS), 0

    def step_without_hooks(optimizer: Any) -> Callable[..., Any]:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Fault("in the update")
        return original(optimizer)

    with mock.patch.object(*STEP_WITHOUT_HOOKS, step_without_hooks):
        yield


REFUSED: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "consolidate": lambda optimizer: optimizer.consolidate_state_dict(),
    "save": lambda optimizer: optimizer.save("/nowhere"),
    "sharded": lambda optimizer: optimizer.sharded().state_dict(),
    "compare": lambda optimizer: optimizer.assert_replicas_equal(),
    "add": lambda optimizer: optimizer.add_param_group({"params": [torch.nn.Parameter(ONES)]}),
}
ONES = torch.ones(2)


def assert_refuses(optimizer: Any, match: str) -> None:
    for method in REFUSED.values():
        with pytest.raises(RuntimeError, match=match):
            method(optimizer)


@distributed(1, 2, 3)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "overlap"])
@pytest.mark.parametrize("where", ["in the same bucket", "in different buckets"])
def test_a_step_that_fails_in_the_middle_on_all_ranks_is_mended_by_loading(
    world: World, mode: str, where: str, tmp_path: Path
) -> None:
    job = Job(world, mode)
    job.train(1)
    job.optimizer.save(tmp_path)
    parameters = copy.deepcopy(job.model.state_dict())
    job.compute(2)
    call = world.size if where == "in the same bucket" else 1 + world.rank
    with raising_in_call(call), pytest.raises(Fault):
        job.optimizer.step()
    buckets = len(plan_of(job.optimizer).buckets)
    assert_refuses(
        job.optimizer, rf"step 2 failed after \d+ of {buckets} buckets \(Fault: in the up"
    )
    job.optimizer.zero_grad()  # does not mend it
    with pytest.raises(RuntimeError, match="Load a checkpoint of the model and of the optimizer"):
        job.optimizer.step()
    job.optimizer.load(tmp_path)
    job.model.load_state_dict(parameters)
    job.train(3, 4)
    assert_same_as(world, mode, job, 1, 3, 4)


@distributed(2)
def test_a_step_that_failed_is_mended_by_load_state_dict_too(world: World) -> None:
    job = Job(world, "module")
    job.train(1)
    states = []
    for rank in range(world.size):
        job.optimizer.consolidate_state_dict(to=rank)
        if rank == world.rank:
            states.append(job.optimizer.state_dict())
    parameters = copy.deepcopy(job.model.state_dict())
    job.compute(2)
    with raising_in_call(1 + world.rank), pytest.raises(Fault):
        job.optimizer.step()
    job.optimizer.load_state_dict(states[0])
    job.model.load_state_dict(parameters)
    job.train(3)
    assert_same_as(world, "module", job, 1, 3)


class RaisesInTheMiddle(SGD):
    """Not one of torch's: steps once for all its parameters."""

    raises = False

    def step(self, _: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        for number, param in enumerate(params):
            if self.raises and number == 1:
                raise Fault("in the update")
            param.data.sub_(param.grad, alpha=0.1)


@distributed(1, 2)
def test_a_class_of_the_users_that_raises_has_torn_the_parameters(world: World) -> None:
    job = Job(world, "module", RaisesInTheMiddle)
    job.train(1)
    job.compute(2)
    job.optimizer.optim.raises = True
    with pytest.raises(Fault):
        job.optimizer.step()
    assert_refuses(job.optimizer, "step 2 failed after 0 of .* buckets")


def step_and_wait(job: Job) -> None:
    job.optimizer.step()
    job.optimizer.wait()


@distributed(2, 3, fresh=True, pg_timeout=4.0)
@pytest.mark.parametrize("mode", ["drop-in", "module", "lazy"])
def test_a_step_that_fails_on_one_rank_is_told_to_the_others(world: World, mode: str) -> None:
    job = Job(world, mode)
    job.train(1)
    job.compute(2)
    dist.barrier()
    if world.rank == 0:
        with raising_in_call(2), pytest.raises(Fault):
            job.optimizer.step()
        assert_refuses(job.optimizer, "step 2 failed after 1 of")
    else:
        with pytest.raises(RuntimeError, match=r"rank 0: step 2 failed after 1 of .*Fault"):
            step_and_wait(job)
        assert_refuses(job.optimizer, "step 2 failed|of no use any more")
    meet(world, "done")


# ---------------------------------------- without a group ----------------------------------------


@distributed(2, 3, fresh=True, pg_timeout=6.0)
@pytest.mark.parametrize("mode", ["module", "lazy", "ddp"])
def test_a_group_that_has_failed_refuses_at_once_and_with_the_reason(
    world: World, mode: str
) -> None:
    job = Job(world, mode)
    job.train(1)
    start = time.monotonic()
    if world.rank == 0:
        job.arm("autograd function")
        with pytest.raises(Fault):
            job.compute(2)
    else:
        with pytest.raises(RuntimeError, match="a collective failed"):
            job.train(2)
        assert time.monotonic() - start > 4
        start = time.monotonic()
        assert_refuses(job.optimizer, "of no use any more, because a collective failed")
        job.optimizer.zero_grad()
        job.optimizer.detach()
        with pytest.raises(RuntimeError, match="of no use any more"):
            job.optimizer.attach(job.module)
        assert time.monotonic() - start < 6  # none of them has waited
    meet(world, "done")  # until then the rank that raised has told nobody


@distributed(1, 2, fresh=True)
@pytest.mark.parametrize("mode", MODES)
def test_methods_say_that_the_process_group_was_destroyed(world: World, mode: str) -> None:
    job = Job(world, mode)
    job.train(1)
    job.compute(2)
    if mode == "lazy":
        job.optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    refused = dict(REFUSED)
    if mode == "overlap":
        del refused["step"]  # which does nothing there
    for method in refused.values():
        with pytest.raises(RuntimeError, match="process group of this optimizer was destroyed"):
            method(job.optimizer)
    job.optimizer.zero_grad()
    if mode in ATTACHED:
        job.optimizer.detach()
    job.optimizer.memory_report()
    job.optimizer.comm_stats()


# ------------------------------------------------------------------ the consolidated dict


@distributed(1, 2)
def test_a_step_that_fails_drops_the_consolidated_dict(world: World) -> None:
    param = random_parameter(9)
    opt = ZeroRedundancyOptimizer([param], torch.optim.AdamW)
    train_on_constants(opt, [param])
    opt.consolidate_state_dict(to=0)
    with pytest.raises(TypeError):
        opt.step(unknown_keyword=1)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        opt.state_dict()
