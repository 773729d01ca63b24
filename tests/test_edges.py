"""Corners where several parts meet: groups of groups, Join and unfreezing, steps that fail."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from onecopy import RanksDisagree, ZeroRedundancyOptimizer, is_elementwise
from onecopy.fingerprints import CHUNK, fingerprint


def parameter(*shape: int) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(*shape))


def train(opt: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 2) -> None:
    for step in range(steps):
        for param in params:
            param.grad = torch.full_like(param, 0.1 + step)
        opt.step()


# ---------------------------------------- process groups ----------------------------------------


@distributed(2, 3, 4)
def test_ranks_may_be_in_different_numbers_of_groups(world: World) -> None:
    dist.new_group([world.size - 1])  # only the last rank is a member
    param = parameter(7, 5)
    train(ZeroRedundancyOptimizer([param], torch.optim.AdamW), [param])


@distributed(3, 4)
def test_subgroups_may_overlap(world: World) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    for group, members in ((first, (0, 1)), (second, (1, 2))):
        if world.rank in members:
            param = parameter(7, 5)
            opt = ZeroRedundancyOptimizer([param], torch.optim.AdamW, process_group=group)
            train(opt, [param])
            opt.assert_replicas_equal()


# ---------------------------------------- parameters ----------------------------------------


@distributed(1, 2)
def test_a_parameter_exchanged_in_its_group_is_refused(world: World) -> None:
    old, new = parameter(5), parameter(6)
    opt = ZeroRedundancyOptimizer([old], torch.optim.SGD, lr=0.1)
    opt.param_groups[0]["params"][0] = new
    with pytest.raises(RuntimeError, match="add_param_group"):
        train(opt, [old, new])


@distributed(1, 2, 3)
def test_an_empty_group_can_be_added(world: World) -> None:
    param = parameter(9)
    opt = ZeroRedundancyOptimizer([param], torch.optim.AdamW)
    opt.add_param_group({"params": []})
    train(opt, [param])
    assert len(opt.optim.param_groups) == 2


@distributed(1, 2, 3)
def test_replicas_with_empty_parameters_can_be_compared(world: World) -> None:
    params = [parameter(0), parameter(3, 0), parameter(5)]
    opt = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, check_every=1)
    train(opt, params)


def test_values_moved_between_chunks_change_the_fingerprint() -> None:
    first, second = torch.zeros(2 * CHUNK + 2), torch.zeros(2 * CHUNK + 2)  # two in each word
    first[0], second[2 * CHUNK] = 1.0, 1.0
    assert fingerprint(first) != fingerprint(second)


@distributed(2)
def test_a_users_attribute_survives_a_deepcopy(world: World) -> None:
    opt = ZeroRedundancyOptimizer([parameter(5)], torch.optim.SGD, lr=0.1)
    opt.my_hooks = [1, 2]  # type: ignore[attr-defined]
    assert copy.deepcopy(opt).my_hooks == [1, 2]


# ---------------------------------------- classes ----------------------------------------


class QuantisesLarge(torch.optim.SGD):
    """Rounds its steps to the largest one, but only in tensors of 4096 elements or more."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = p.grad.abs().max() if p.numel() >= 4096 else 1.0
                    p.sub_(p.grad / scale * group["lr"])


class RoundsNarrow(torch.optim.SGD):
    """Rounds stochastically, but only in 16 bits."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    noise = torch.rand_like(p) if p.dtype == torch.bfloat16 else 0.0
                    p.sub_(p.grad * group["lr"] * (1 + noise))


def test_a_class_that_treats_large_tensors_in_another_way_is_not_cut() -> None:
    assert not is_elementwise(QuantisesLarge, lr=0.1)


@distributed(2)
def test_a_class_that_rounds_at_random_in_16_bits_is_refused_there_only(world: World) -> None:
    ZeroRedundancyOptimizer([parameter(5)], RoundsNarrow, lr=0.1)
    narrow = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="random"):
        ZeroRedundancyOptimizer([narrow], RoundsNarrow, lr=0.1)


class WithExtras(torch.optim.SGD):
    flavour = "vanilla"

    def first_step(self) -> None:
        raise AssertionError("reached")


@distributed(2)
def test_methods_that_would_see_only_one_ranks_pieces_are_not_passed_on(world: World) -> None:
    opt = ZeroRedundancyOptimizer([parameter(5)], WithExtras, lr=0.1)
    assert opt.flavour == "vanilla"
    with pytest.raises(AttributeError, match=r"optim\.first_step"):
        opt.first_step()


# ---------------------------------------- Join ----------------------------------------


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


@distributed(1, 2)
def test_a_check_that_does_not_exist_is_refused_on_all_ranks(world: World) -> None:
    if world.rank == world.size - 1:
        os.environ["ONECOPY_CHECK"] = "steps"
    with pytest.raises((ValueError, RanksDisagree), match='ONECOPY_CHECK=steps: expected "step"'):
        ZeroRedundancyOptimizer(TwoLayers().parameters(), torch.optim.SGD, lr=0.1)


@distributed(2, 3)
def test_a_scheduler_under_join_is_no_disagreement(world: World) -> None:
    os.environ["ONECOPY_CHECK"] = "step"
    model = DistributedDataParallel(TwoLayers())
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    with Join([model, opt]):
        for i in range(1 + world.rank):
            opt.zero_grad()
            model(torch.full((2, 4), float(i + world.rank))).backward()
            opt.step()
            scheduler.step()
    opt.assert_replicas_equal()


@distributed(2, 3)
def test_parameters_may_be_unfrozen_after_a_rank_has_joined(world: World) -> None:
    params = [parameter(9), parameter(5, 4)]
    params[1].requires_grad_(False)
    start = params[1].detach().clone()
    opt = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    with Join([opt]):
        for i in range(1 + 2 * world.rank):
            if i == 1:
                params[1].requires_grad_(True)
            for param in params:
                param.grad = torch.ones_like(param) if param.requires_grad else None
            opt.step()
    opt.assert_replicas_equal()
    last = 2 * (world.size - 1)  # how often the rank with the most inputs stepped it
    expected = start
    for _ in range(last):
        expected = expected - 0.1
    assert torch.equal(params[1], expected)


# ---------------------------------------- failures ----------------------------------------


class FailsOnRankOne(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        if dist.get_rank() == 1 and self.param_groups[0].get("fail"):
            raise ArithmeticError("the sky is falling")
        super().step()


@distributed(2, 3, fresh=True, pg_timeout=5)
def test_the_others_are_told_why_a_rank_does_not_come(world: World) -> None:
    param = parameter(9)
    opt = ZeroRedundancyOptimizer([param], FailsOnRankOne, lr=0.1)
    train(opt, [param])
    opt.param_groups[0]["fail"] = True
    error, text = (
        (ArithmeticError, "falling") if world.rank == 1 else (RuntimeError, "sky is falling")
    )
    with pytest.raises(error, match=text):
        train(opt, [param])


@distributed(1, 2)
def test_a_step_that_fails_drops_the_consolidated_dict(world: World) -> None:
    param = parameter(9)
    opt = ZeroRedundancyOptimizer([param], torch.optim.AdamW)
    train(opt, [param])
    opt.consolidate_state_dict(to=0)
    with pytest.raises(TypeError):
        opt.step(unknown_keyword=1)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        opt.state_dict()


@distributed(2, 3)
def test_ranks_that_loaded_different_dicts_for_frozen_parameters_are_told(world: World) -> None:
    params = [parameter(6), parameter(7)]
    plain = torch.optim.AdamW(params)
    train(plain, params)
    state = plain.state_dict()
    params[1].requires_grad_(False)
    params[1].grad = None
    opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW)
    if world.rank == 0:
        state["state"][1] = {}
        state["param_groups"][0]["lr"] = 0.5
    opt.load_state_dict(state)
    params[0].grad = torch.ones(6)
    with pytest.raises(RanksDisagree, match="lr"):
        opt.step()
