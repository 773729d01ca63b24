"""A backward that raises, on one rank or on all: gradients are dropped on all ranks, or refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import failing_jobs
import pytest
import torch
import torch.distributed as dist
from failing_jobs import ATTACHED, BACKWARD, Fault, Job
from harness import World, distributed
from inside import (
    ddps_around,
    local_of,
    plan_of,
    reducer_of,
    shards_of,
)
from models import Mlp, assert_same_parameters
from test_failed_step import WHO, assert_same_as, fails_here
from test_join import sharded
from test_parameter_changes import Replacing
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from onecopy import RanksDisagree, ZeroRedundancyOptimizer


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


NEXT: dict[str, Callable[[Job], Any]] = {
    "backward": lambda job: job.compute(3),
    "clip": lambda job: job.optimizer.clip_grad_norm_(1.0),
    "full_grad": lambda job: job.optimizer.full_grad(job.model.first.weight),
}


@distributed(2, 3)
@pytest.mark.parametrize("mode", [mode for mode in ATTACHED if mode != "accumulating"])
@pytest.mark.parametrize("then", NEXT)
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
            NEXT[then](job)
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

    hook, failing_jobs.allreduce_hook = failing_jobs.allreduce_hook, averages
    try:
        job.wrap_again()
    finally:
        failing_jobs.allreduce_hook = hook
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
    with Join([job.optimizer]):
        if world.rank == 0:
            job.arm("autograd function")
            with pytest.raises(Fault):
                job.compute(1)
        else:
            job.compute(1)
        with pytest.raises(RuntimeError, match="raised on rank 0"):
            job.optimizer.step()
    job.train(2)
    assert_same_as(world, "module", job, 2)


# ------------------------------------------------------------------ with DDP


class Broken(Exception):
    pass


def breaks(_: torch.Tensor) -> None:
    raise Broken


@distributed(2, 3)
def test_ddp_goes_on_after_the_ranks_have_disagreed_in_backward(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONECOPY_CHECK", "step")
        torch.manual_seed(0)
        module = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
        optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1)
        optimizer.attach(module)
    inputs = torch.ones(2, 8)
    module(inputs).sum().backward()
    if world.rank == 1:
        optimizer.zero_grad()
    with pytest.raises(RanksDisagree, match="in backward 2"):
        module(inputs).sum().backward()
    optimizer.zero_grad()
    for _ in range(2):
        module(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.assert_replicas_equal()


@distributed(2)
def test_ddp_is_still_watched_after_an_attached_optimizer_has_mended_it(world: World) -> None:
    module = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=1e-5
    )
    optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1)
    optimizer.attach(module)
    inner: Any = module.module[0]
    with inner.register_forward_hook(lambda _, __, out: out.register_hook(breaks) and None):
        out = module(torch.ones(1, 4))
    with contextlib.suppress(Broken):
        out.sum().backward()
    optimizer.zero_grad()
    assert len(ddps_around(optimizer)) == 1


# ------------------------------------------------------------------ what is left behind


class Lost(RuntimeError):
    """What a failed collective raises."""


def lost(*_: Any) -> Any:
    raise Lost


@pytest.mark.also_c10d
@distributed(2, 3)
def test_a_step_that_cannot_get_its_gradients_leaves_none_behind(world: World) -> None:
    """A class of another package has the gradients of all buckets at once."""
    model = Mlp()
    optimizer = sharded(model.parameters(), Replacing)
    optimizer.attach(model)
    model(model.batch((world.rank + 1, 1))).backward()
    reducer = reducer_of(optimizer)
    found, last = reducer.gradients_in, len(plan_of(optimizer).buckets) - 1
    assert last > 0
    failing = mock.patch.object(
        reducer, "gradients_in", lambda bucket: lost() if bucket == last else found(bucket)
    )
    with failing, pytest.raises(Lost):
        optimizer.step()
    assert all(owned.tensor.grad is None for owned in local_of(optimizer).shards)


@pytest.mark.also_c10d
@distributed(1, 2)
@pytest.mark.parametrize("where", ["reducer", "gatherer"])
def test_detach_undoes_all_after_a_collective_has_failed(world: World, where: str) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    optimizer.attach(model, lazy_gather=True)
    sharded_params = shards_of(optimizer)
    target, method = (
        (reducer_of(optimizer), "drop")
        if where == "reducer"
        else (sharded_params.all_gathers.queue, "wait")
    )
    with mock.patch.object(target, method, lost), pytest.raises(Lost):
        optimizer.detach()
    assert "zero_grad" not in model.__dict__
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]
    assert sharded_params.follower is None
    assert not sharded_params.gathers_lazily
    model(model.batch((world.rank + 1, 1))).backward()
    assert all(param.grad is not None for param in model.parameters())
    with pytest.raises(RuntimeError, match="is not attached"):
        optimizer.detach()
    optimizer.attach(model)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(*_: Any) -> Any:
        raise Lost


@pytest.mark.also_c10d
@distributed(1, 2)
def test_the_gradients_of_a_backward_that_raised_are_not_shown(world: World) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].register_forward_hook(lambda _, __, output: Fails.apply(output))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    with pytest.raises(Lost):
        model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="has not come to its end"):
        optimizer.full_grad(model[1].weight)
