"""Attached mode and parameters that were unfrozen, but that no step has planned yet."""

from __future__ import annotations

import copy
import errno
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from attached import EVERY_FEED
from harness import World, distributed, is_native
from inside import SHARED_MEMORY, plan_of
from models import Mlp, seed_of
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer

pytestmark = pytest.mark.also_c10d


class HalfFrozen:
    """A model of which one layer is frozen when the optimizer is built."""

    def __init__(self, world: World, hooks: str) -> None:
        torch.manual_seed(0)
        self.world, self.hooks = world, hooks
        self.model = Mlp()
        self.model.first.requires_grad_(False)
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), AdamW, lr=0.1)
        self.steps = 0

    def attach(self) -> None:
        self.module: Any = self.model
        if self.hooks == "ddp":
            self.module = DistributedDataParallel(self.model)
        self.optimizer.attach(self.module)

    def step(self) -> None:
        self.steps += 1
        self.module(self.model.batch(seed_of(self.world, self.steps))).backward()
        self.optimizer.step()

    def trained(self) -> dict[str, torch.Tensor]:
        for _ in range(3):
            self.step()
        return copy.deepcopy(self.model.state_dict())


def unfrozen_by_a_group(world: World, hooks: str) -> dict[str, torch.Tensor]:
    """The same training, with the parameters in the plan from the start."""
    job = HalfFrozen(world, hooks)
    job.model.first.requires_grad_(True)
    job.optimizer = ZeroRedundancyOptimizer(job.model.parameters(), AdamW, lr=0.1)
    job.attach()
    return job.trained()


def assert_equal(
    world: World, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    # The order in which gloo's reduce_scatter sums depends on where a number is in its bucket.
    close = {"rtol": 1e-5, "atol": 1e-6} if is_native() and world.size > 2 else None
    for name, value in expected.items():
        if close is None:
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, **close)


@distributed(1, 2, 3)
@EVERY_FEED
def test_unfrozen_before_attach(world: World, hooks: str) -> None:
    job = HalfFrozen(world, hooks)
    job.model.first.requires_grad_(True)
    job.attach()
    assert_equal(world, job.trained(), unfrozen_by_a_group(world, hooks))


@distributed(1, 2, 3)
@EVERY_FEED
def test_unfrozen_while_detached(world: World, hooks: str) -> None:
    job = HalfFrozen(world, hooks)
    job.attach()
    job.step()
    job.optimizer.detach()
    job.model.first.requires_grad_(True)
    before = copy.deepcopy(job.model.state_dict())
    job.attach()
    job.step()
    for name, value in job.model.state_dict().items():
        assert not torch.equal(value, before[name]), name
    job.optimizer.assert_replicas_equal()


@distributed(1, 2)
@EVERY_FEED
def test_unfrozen_before_a_load_that_changes_the_plan(
    world: World, hooks: str, tmp_path: Path
) -> None:
    """One layer has state in the checkpoint and is frozen here; another was just unfrozen."""
    saver = HalfFrozen(world, hooks)
    saver.model.first.requires_grad_(True)
    saver.attach()
    saver.step()
    saver.optimizer.save(tmp_path, saver.model)
    job = HalfFrozen(world, hooks)
    job.attach()
    job.model.first.weight.requires_grad_(True)
    job.optimizer.load(tmp_path, job.model)
    job.step()
    job.optimizer.assert_replicas_equal()


@distributed(2, 3)
@pytest.mark.parametrize("always", [0, 1, 2])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_one_is_frozen_and_another_unfrozen_under_the_same_ddp(
    world: World, always: int, is_swapped: bool
) -> None:
    """DDP still delivers what was frozen since, and does not know what was unfrozen: a bucket that
    holds both must wait for the latter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(3)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
    assert len(plan_of(optimizer).buckets) == 1
    first, later = [number for number in range(3) if number != always][:: -1 if is_swapped else 1]

    def train(*layers: int) -> None:
        for number, layer in enumerate(model):
            layer.weight.requires_grad_(number in layers)

    def step() -> None:
        before = [layer.weight.detach().clone() for layer in model]
        inputs = torch.full((1, 3), world.rank + 1.0)
        weights = [layer.weight for layer in model if layer.weight.requires_grad]
        gradients = torch.autograd.grad(model(inputs).sum(), weights)
        for gradient in gradients:
            torch.distributed.all_reduce(gradient.div_(world.size))
        ddp(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged = dict(zip(weights, gradients, strict=True))
        for layer, old in zip(model, before, strict=True):
            expected = old - averaged.get(layer.weight, torch.zeros(3, 3))
            assert torch.allclose(layer.weight.detach(), expected, rtol=1e-5, atol=1e-5)

    train(always, first)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer.attach(ddp)
    step()
    train(always, later)
    step()
    train(always, first, later)
    step()


@pytest.mark.of_messages  # which take memory to lend
@distributed(2, 3, timeout=40, pg_timeout=8)
@pytest.mark.parametrize("call", [1, 2, 4])
def test_memory_that_cannot_be_had_for_what_was_unfrozen(world: World, call: int) -> None:
    """Files for memory that is lent run out, on all ranks; then there are some again."""
    weights = torch.nn.ParameterList(torch.zeros(300 * world.size) for _ in range(6))
    module = torch.nn.Module()
    module.weights = weights
    module.forward = lambda x: torch.stack(
        [(weight * x).sum() * (i + 1) for i, weight in enumerate(weights)]
    ).sum()
    for weight in list(weights)[3:]:
        weight.requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), SGD, lr=1.0, bucket_mb=1200 * world.size / 2**20
    )
    optimizer.attach(module)

    def backward() -> None:
        optimizer.zero_grad()
        module(2.0 * world.rank).backward()

    backward()
    optimizer.step()
    weights.requires_grad_(True)
    real, calls = getattr(*SHARED_MEMORY), itertools.count(1)

    def scarce(numbytes: int, world_size: int) -> Any:
        if next(calls) == call:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(numbytes, world_size)

    backward()
    with (
        mock.patch.object(*SHARED_MEMORY, scarce),
        pytest.raises(OSError, match="Too many open files"),
    ):
        optimizer.step()
    before = [weight.detach().clone() for weight in weights]
    for _ in range(2):
        backward()
        optimizer.step()
    for i, (weight, old) in enumerate(zip(weights, before, strict=True)):
        torch.testing.assert_close(weight.detach(), old - 2 * (world.size - 1) * (i + 1))
    optimizer.assert_replicas_equal()
