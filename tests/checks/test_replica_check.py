"""Replicas are compared when asked for, every so many steps, and with ONECOPY_CHECK=step."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from harness import World, distributed
from manners import give_gradients, sharded
from models import (
    MixedNet,
    Mlp,
    assert_same_parameters,
    random_parameter,
    train_on_constants,
)
from test_join import TwoLayers
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler

from onecopy import RanksDisagree, ZeroRedundancyOptimizer


@distributed(2, 3, 4)
def test_the_check_of_every_step_finds_a_rank_with_another_learning_rate(world: World) -> None:
    os.environ["ONECOPY_CHECK"] = "step"
    model = Mlp()
    optimizer = sharded(model)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    give_gradients(model)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    before = copy.deepcopy(model)
    if world.rank == world.size - 1:
        optimizer.param_groups[0]["lr"] = 0.125
    with pytest.raises(RanksDisagree, match=rf"(?s)rank {world.size - 1}: .*lr = 0\.125"):
        optimizer.step()
    assert_same_parameters(model, before)


@distributed(2, 3, 4)
def test_a_flipped_bit_is_found_and_named_on_all_ranks(world: World) -> None:
    def flip(param: torch.Tensor) -> None:
        if world.rank == world.size - 1:
            integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[param.element_size()]
            param.data.view(integers).view(-1)[3] ^= 1

    model = MixedNet()
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=0.01)
    optimizer.assert_replicas_equal()
    for name, param in model.named_parameters():
        flip(param)
        with pytest.raises(RuntimeError, match=rf"{name}.*rank {world.size - 1}\b"):
            optimizer.assert_replicas_equal()
        flip(param)
        optimizer.assert_replicas_equal()


@distributed(2, 3, 4)
def test_check_every_compares_the_replicas_every_so_many_steps(world: World) -> None:
    model = Mlp()
    model.norm.requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=0.01, check_every=2)
    for _ in range(4):
        model.zero_grad()
        model(model.batch((world.rank,))).backward()
        optimizer.step()
    if world.rank == 0:
        model.norm.weight.data[5] += 1  # frozen: no gather repairs it
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"norm\.weight.*rank 0"):
        optimizer.step()


@distributed(1, 2, 3)
def test_replicas_with_empty_parameters_can_be_compared(world: World) -> None:
    params = [random_parameter(0), random_parameter(3, 0), random_parameter(5)]
    opt = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, check_every=1)
    train_on_constants(opt, params)


@distributed(1, 2)
def test_a_check_that_does_not_exist_is_refused_on_all_ranks(world: World) -> None:
    if world.rank == world.size - 1:
        os.environ["ONECOPY_CHECK"] = "steps"
    with pytest.raises((ValueError, RanksDisagree), match='ONECOPY_CHECK=steps: expected "step"'):
        ZeroRedundancyOptimizer(TwoLayers().parameters(), torch.optim.SGD, lr=0.1)


# ------------------------------------------------------------------ steps that are refused


@distributed(2, 3)
@pytest.mark.parametrize("check_every", [1, 2])
def test_a_step_that_was_refused_on_one_rank_is_called_again_while_replicas_are_watched(
    world: World, check_every: int
) -> None:
    param = nn.Parameter(torch.ones(100, 10))
    optimizer = ZeroRedundancyOptimizer([param], SGD, lr=1.0, check_every=check_every)
    if world.rank == 0:
        param.grad = torch.ones(100, 10).to_sparse()
        with pytest.raises(RuntimeError, match="sparse gradient"):
            optimizer.step()
    param.grad = torch.ones(100, 10)
    for _ in range(3):
        optimizer.step()
    assert (param == -2).all()


@distributed(2)
def test_a_gradient_that_is_sparse_on_one_rank_is_found_if_every_step_is_compared(
    world: World,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONECOPY_CHECK", "step")
        param = nn.Parameter(torch.ones(100, 10))
        optimizer = ZeroRedundancyOptimizer([param], SGD, lr=1.0)
    gradient = torch.ones(100, 10)
    param.grad = gradient.to_sparse() if world.rank == 0 else gradient
    with pytest.raises(RanksDisagree, match=r"rank 0: .*a sparse gradient"):
        optimizer.step()
    param.grad = gradient
    optimizer.step()
    assert not param.any()
