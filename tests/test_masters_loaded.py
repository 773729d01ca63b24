"""Master copies between a load and the next step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed
from inside import local_of, plan_of
from masters import BF16, FP32, Net, give_gradients, ours, pair, train
from test_masters_saved import EVERY_WAY, Heard, through_a_dict
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from onecopy import ZeroRedundancyOptimizer
from onecopy.pieces import MASTER


def full_state(optimizer: Any) -> dict[int, Any]:
    """On every rank."""
    optimizer.consolidate_state_dict(to=0)
    box = [optimizer.state_dict()["state"] if optimizer.rank == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def masters_in(state: dict[int, Any]) -> dict[int, torch.Tensor]:
    return {number: of_param[MASTER] for number, of_param in state.items() if MASTER in of_param}


def assert_same_masters(found: dict[int, Any], expected: dict[int, Any]) -> None:
    torch.testing.assert_close(masters_in(found), masters_in(expected), rtol=0, atol=0)


def shifted() -> nn.Module:
    """A model with none of the values that are to be loaded."""
    model = Net()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return model


@distributed(1, 2, 3)
@EVERY_WAY
def test_what_was_loaded_is_saved_again_before_the_model_is_loaded(
    world: World, way: Any, tmp_path: Path
) -> None:
    model, optimizer, theirs, reference = pair("AdamW-foreach")
    train(world, optimizer, model, reference, theirs, range(2))
    expected = full_state(optimizer)
    load = way(world, optimizer, model, tmp_path / "first")
    middle_model, last_model = shifted(), Net()
    middle = ours(middle_model, AdamW, lr=0.01)
    load(middle, middle_model)
    load = way(world, middle, middle_model, tmp_path / "second")
    for resumed in (middle_model, last_model):
        resumed.load_state_dict(model.state_dict())
    assert_same_masters(full_state(middle), expected)
    last = ours(last_model, AdamW, lr=0.01, foreach=True, bucket_mb=0.01)
    load(last, last_model)
    train(world, last, last_model, reference, theirs, range(2, 4))


def loaded_into_another(world: World) -> tuple[nn.Module, ZeroRedundancyOptimizer, dict[int, Any]]:
    """An optimizer whose model is not the one that its state was saved with; and that state."""
    saved_model = Net()
    saver = ours(saved_model, AdamW, lr=0.01)
    give_gradients(world, 0, saved_model)
    saver.step()
    load = through_a_dict(world, saver, saved_model, Path())
    model = shifted()
    optimizer = ours(model, AdamW, lr=0.01)
    load(optimizer, model)
    return model, optimizer, full_state(saver)


@distributed(1, 2)
def test_another_group_or_a_copy_does_not_change_what_was_loaded(world: World) -> None:
    _, optimizer, expected = loaded_into_another(world)
    assert_same_masters(full_state(copy.deepcopy(optimizer)), expected)
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(3)))]})
    assert_same_masters(full_state(optimizer), expected)


@distributed(1, 2)
def test_of_what_was_loaded_only_what_is_written_over_changes(world: World) -> None:
    model, optimizer, expected = loaded_into_another(world)
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        model.first.weight.fill_(2.0)
    expected[names.index("first.weight")][MASTER].fill_(2.0)
    assert_same_masters(full_state(optimizer), expected)


@distributed(1, 2)
def test_a_step_after_a_load_believes_the_parameters(world: World) -> None:
    model, optimizer, _ = loaded_into_another(world)
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.param_groups[0].update(lr=0.0)
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@distributed(1, 2)
def test_memory_that_was_replaced_counts_whatever_comes_next(world: World) -> None:
    model, optimizer, theirs, reference = pair("AdamW-foreach")
    train(world, optimizer, model, reference, theirs, range(1))
    model.first.weight.data = torch.full_like(model.first.weight, 2.0)
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(3)))]})
    number = [name for name, _ in model.named_parameters()].index("first.weight")
    assert bool((full_state(optimizer)[number][MASTER] == 2).all())


# ---------------------------------------- what does not fit -------------------------------------


@distributed(1, 2)
def test_what_a_checkpoint_does_not_fit_is_what_was_written(world: World, tmp_path: Path) -> None:
    model, optimizer, theirs, reference = pair("SGD-momentum")
    train(world, optimizer, model, reference, theirs, range(2))
    other = Net()
    other.first = nn.Linear(11, 36).to(BF16)
    ours(other, SGD, lr=0.1, momentum=0.9).save(tmp_path)
    with torch.no_grad():
        model.first.weight.fill_(2.0)
    assert not optimizer.load(tmp_path, strict=False).fits
    number = [name for name, _ in model.named_parameters()].index("first.weight")
    assert bool((full_state(optimizer)[number][MASTER] == 2).all())


@distributed(1, 2)
@pytest.mark.parametrize("bad", [torch.tensor(7.0), torch.ones(3), None, 7.0], ids=repr)
def test_a_master_copy_of_another_form_is_refused(world: World, bad: Any) -> None:
    model, optimizer, theirs, reference = pair("AdamW-foreach")
    train(world, optimizer, model, reference, theirs, range(1))
    before = full_state(optimizer)
    state = {**before, 0: {**before[0], MASTER: bad}}
    groups = [{**optimizer.param_groups[0], "params": list(range(len(list(model.parameters()))))}]
    with pytest.raises(ValueError, match=rf"{MASTER}' of parameter 0"):
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    assert_same_masters(full_state(optimizer), before)


@distributed(2, 3)
@pytest.mark.parametrize("which", ["lacking", "unused"])
def test_master_copies_of_another_ranks_pieces_are_warned_of(world: World, which: str) -> None:
    """Every tensor is on one rank: what rank 0 has tells nothing about the last rank's."""
    params = [nn.Parameter(torch.ones(8, dtype=BF16)) for _ in range(world.size)]
    given: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "partition": "whole"}
    optimizer = ZeroRedundancyOptimizer(params, SGD, master_dtype=FP32, **given)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = full_state(optimizer)
    plan = plan_of(optimizer)
    (last,) = {piece.param for piece in plan.pieces(world.size - 1)}
    for number in state:
        if (number == last) == (which == "lacking"):
            del state[number][MASTER]
    master_dtype = FP32 if which == "lacking" else None
    other = ZeroRedundancyOptimizer(params, SGD, master_dtype=master_dtype, **given)
    groups = [{**optimizer.param_groups[0], "params": list(range(world.size))}]
    with Heard() as heard:
        other.load_state_dict({"state": state, "param_groups": groups})
    text = "rebuilt" if which == "lacking" else "left out"
    assert [text in message for message in heard.messages] == [True] * (world.rank == 0)


# ---------------------------------------- other ways to be wrong --------------------------------


class Uneven(nn.Module):
    """A tensor of which one rank's master copy says more than the parameter, the other's not."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.last = (
            nn.Parameter(torch.ones(numel, dtype=BF16)) for numel in (64, 192, 64)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small.sum() + (self.large * x).sum() + self.last.sum()


@distributed(2)
@pytest.mark.parametrize("lazy", [False, True])
def test_a_full_state_dict_waits_for_the_parameters(world: World, lazy: bool) -> None:
    model = Uneven()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.5, master_dtype=FP32)
    optimizer.attach(model, lazy_gather=lazy)
    x = torch.ones(192, dtype=BF16)
    for piece in plan_of(optimizer).pieces(0):
        if piece.param == 1:
            x[piece.start : piece.stop] = 0.001
    model(x).backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if world.rank == 0:
        master = optimizer.state_dict()["state"][1][MASTER]
        expected = torch.where(x == 1, 0.5, 1 - 0.5 * x.float())
        torch.testing.assert_close(master, expected, rtol=0, atol=0)


class NoNumbers(TorchDispatchMode):
    """Refuses what would make an accelerator stop: a number brought to Python."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@distributed(1, 2)
def test_masters_follow_their_parameters_on_the_device(world: World) -> None:
    model = shifted()
    optimizer = ours(model, SGD, lr=0.1)
    with torch.no_grad():
        model.first.weight.mul_(2.0)
    with NoNumbers():
        local_of(optimizer).masters.follow_params()
    assert not any(owned.is_ahead for owned in local_of(optimizer).pieces)
