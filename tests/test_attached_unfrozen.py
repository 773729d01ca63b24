"""Attached mode and parameters that were unfrozen, but that no step has planned yet."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from attached import EVERY_FEED
from harness import World, distributed
from models import Mlp, seed_of
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from onecopy import ZeroRedundancyOptimizer


class HalfFrozen:
    """A model of which one layer is frozen when the optimizer is built."""

    def __init__(self, world: World, feed: str) -> None:
        torch.manual_seed(0)
        self.world, self.feed = world, feed
        self.model = Mlp()
        self.model.first.requires_grad_(False)
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), AdamW, lr=0.1)
        self.steps = 0

    def attach(self) -> None:
        self.module: Any = self.model
        if self.feed == "ddp":
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


def unfrozen_by_a_group(world: World, feed: str) -> dict[str, torch.Tensor]:
    """The same training, with the parameters in the plan from the start."""
    job = HalfFrozen(world, feed)
    job.model.first.requires_grad_(True)
    job.optimizer = ZeroRedundancyOptimizer(job.model.parameters(), AdamW, lr=0.1)
    job.attach()
    return job.trained()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@distributed(1, 2, 3)
@EVERY_FEED
def test_unfrozen_before_attach(world: World, feed: str) -> None:
    job = HalfFrozen(world, feed)
    job.model.first.requires_grad_(True)
    job.attach()
    assert_equal(job.trained(), unfrozen_by_a_group(world, feed))


@distributed(1, 2, 3)
@EVERY_FEED
def test_unfrozen_while_detached(world: World, feed: str) -> None:
    job = HalfFrozen(world, feed)
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
    world: World, feed: str, tmp_path: Path
) -> None:
    """One layer has state in the checkpoint and is frozen here; another was just unfrozen."""
    saver = HalfFrozen(world, feed)
    saver.model.first.requires_grad_(True)
    saver.attach()
    saver.step()
    saver.optimizer.save(tmp_path, saver.model)
    job = HalfFrozen(world, feed)
    job.attach()
    job.model.first.weight.requires_grad_(True)
    job.optimizer.load(tmp_path, job.model)
    job.step()
    job.optimizer.assert_replicas_equal()
