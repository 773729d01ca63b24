"""Master copies in every kind of checkpoint."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, distributed
from inside import local_of
from masters import (
    BF16,
    CLASSES,
    FP32,
    Net,
    Reference,
    assert_equal,
    give_gradients,
    ours,
    pair,
    train,
)
from torch import nn
from torch.optim import SGD, AdamW

from onecopy.planning.param_groups import MASTER

# ---------------------------------------- checkpoints -------------------------------------------


def through_a_dict(
    world: World, optimizer: Any, model: nn.Module, _: Path
) -> Callable[[Any, nn.Module], None]:
    optimizer.consolidate_state_dict(to=0)
    box = [optimizer.state_dict() if world.rank == 0 else None]
    dist.broadcast_object_list(box)
    return lambda other, _: other.load_state_dict(box[0])


def through_files(
    world: World, optimizer: Any, model: nn.Module, path: Path
) -> Callable[[Any, nn.Module], None]:
    optimizer.save(path)
    return lambda other, module: other.load(path, module)


def through_dcp(
    world: World, optimizer: Any, model: nn.Module, path: Path
) -> Callable[[Any, nn.Module], None]:
    dcp.save({"optim": optimizer.sharded()}, checkpoint_id=path)
    return lambda other, _: dcp.load({"optim": other.sharded()}, checkpoint_id=path)


EVERY_WAY = pytest.mark.parametrize("way", [through_a_dict, through_files, through_dcp])


@distributed(1, 2, 3)
@EVERY_WAY
@pytest.mark.parametrize("name", ["SGD", "AdamW-fused", "Adafactor"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_resumed_job_goes_on_with_all_digits(
    world: World, way: Any, name: str, steps: int, tmp_path: Path
) -> None:
    model, optimizer, theirs, reference = pair(name)
    train(world, optimizer, model, reference, theirs, range(steps))
    load = way(world, optimizer, model, tmp_path)
    resumed = Net()
    resumed.load_state_dict(model.state_dict())
    cls, options = CLASSES[name]
    # Buckets of another size, so other pieces.
    again = ours(resumed, cls, **options, bucket_mb=0.01)
    load(again, resumed)
    train(world, again, resumed, reference, theirs, range(steps, steps + 3))


@distributed(4)
@pytest.mark.parametrize("loaders", [1, 2, 3])
def test_another_number_of_ranks_goes_on_with_all_digits(
    world: World, loaders: int, tmp_path: Path
) -> None:
    model, optimizer, theirs, reference = pair("AdamW-fused")
    train(world, optimizer, model, reference, theirs, range(2))
    optimizer.save(tmp_path)
    group = dist.new_group(list(range(loaders)))
    resumed = Net()
    resumed.load_state_dict(model.state_dict())
    again = None
    if world.rank < loaders:
        cls, options = CLASSES["AdamW-fused"]
        again = ours(resumed, cls, **options, process_group=group)
        again.load(tmp_path)
    for step in range(2, 4):
        give_gradients(world, step, resumed, theirs)
        reference.step()
        if again is not None:
            again.step()
            assert_equal(resumed, theirs)


@distributed(2)
@EVERY_WAY
def test_the_model_may_be_loaded_after_the_optimizer(
    world: World, way: Any, tmp_path: Path
) -> None:
    model, optimizer, theirs, reference = pair("AdamW-foreach")
    train(world, optimizer, model, reference, theirs, range(2))
    load = way(world, optimizer, model, tmp_path)
    resumed = Net()
    again = ours(resumed, *CLASSES["AdamW-foreach"][:1], **CLASSES["AdamW-foreach"][1])
    load(again, resumed)
    resumed.load_state_dict(model.state_dict())
    train(world, again, resumed, reference, theirs, range(2, 4))


@distributed(2)
def test_a_full_dict_has_masters_and_loads_into_the_plain_class(world: World) -> None:
    model, optimizer, theirs, reference = pair("AdamW-foreach")
    train(world, optimizer, model, reference, theirs, range(2))
    optimizer.consolidate_state_dict(to=0)
    if world.rank != 0:
        return
    state = optimizer.state_dict()["state"]
    for number, (param, master) in enumerate(zip(reference.params, reference.masters, strict=True)):
        assert (MASTER in state[number]) == (param is not master)
        if param is not master:
            assert torch.equal(state[number][MASTER], master)
            assert state[number]["exp_avg"].dtype == FP32
    plain_model = Net(FP32)
    plain = AdamW(plain_model.parameters(), lr=0.01)
    plain.load_state_dict(optimizer.state_dict())
    plain.step()


class Heard(logging.Handler):
    """What the package logs, inside a worker process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Heard:
        logging.getLogger("onecopy").addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("onecopy").removeHandler(self)


@distributed(1, 2, 3)
@EVERY_WAY
def test_without_masters_in_the_checkpoint_they_are_rebuilt_and_it_is_said(
    world: World, way: Any, tmp_path: Path
) -> None:
    saved_model = Net()
    saver = ours(saved_model, AdamW, lr=0.01, master_dtype=None)
    give_gradients(world, 0, saved_model)
    saver.step()
    load = way(world, saver, saved_model, tmp_path)
    model, theirs = Net(), Net()
    optimizer, reference = ours(model, AdamW, lr=0.01), Reference(theirs, AdamW, lr=0.01)
    train(world, optimizer, model, reference, theirs, range(2))  # masters to be forgotten
    for net in (model, theirs):
        net.load_state_dict(saved_model.state_dict())
    with Heard() as heard:
        if way is through_dcp:  # DCP wants to be told that a checkpoint may lack something
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
            dcp.load({"optim": optimizer.sharded()}, checkpoint_id=tmp_path, planner=planner)
        else:
            report = load(optimizer, model)
            if way is through_files:
                expected = [n for n, p in model.named_parameters() if p.dtype != FP32]
                assert list(report.rebuilt) == sorted(f"state.{n}.{MASTER}" for n in expected)
                assert report.fits
    assert ["rebuilt" in message for message in heard.messages] == [True] * (world.rank == 0)
    reference = Reference(theirs, AdamW, lr=0.01)
    plain = copy.deepcopy(saver)
    plain.consolidate_state_dict(to=0)
    box = [plain.state_dict() if world.rank == 0 else None]
    dist.broadcast_object_list(box)
    reference.optimizer.load_state_dict(box[0])
    train(world, optimizer, model, reference, theirs, range(2, 4))


@distributed(2)
@EVERY_WAY
def test_masters_that_nobody_wants_are_not_ignored_in_silence(
    world: World, way: Any, tmp_path: Path
) -> None:
    model, optimizer, theirs, reference = pair("AdamW-foreach")
    train(world, optimizer, model, reference, theirs, range(1))
    load = way(world, optimizer, model, tmp_path)
    wide = Net(FP32)
    other = ours(wide, AdamW, lr=0.01, master_dtype=None)
    with Heard() as heard:
        if way is through_files:
            with pytest.raises(ValueError, match=MASTER):
                load(other, wide)
            report = other.load(tmp_path, wide, strict=False)
            assert any(MASTER in key for key in report.unexpected)
            assert other.state  # the rest fits, and is loaded
        else:
            load(other, wide)
    if way is through_a_dict:
        assert ["left out" in message for message in heard.messages] == [True] * (world.rank == 0)


@distributed(1, 2)
@EVERY_WAY
def test_a_parameter_without_state_gets_none_from_its_master(
    world: World, way: Any, tmp_path: Path
) -> None:
    """Plain Adam would take a master copy alone for state that is complete."""
    model = Net()
    optimizer = ours(model, AdamW, lr=0.01)
    give_gradients(world, 0, model)
    model.first.zero_grad()
    optimizer.step()
    load = way(world, optimizer, model, tmp_path)
    again = ours(model, AdamW, lr=0.01)
    load(again, model)
    assert not any(MASTER in state for state in again.state.values())
    again.consolidate_state_dict(to=0)
    if world.rank == 0:
        plain = AdamW(model.parameters(), lr=0.01)
        plain.load_state_dict(again.state_dict())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        plain.step()


@distributed(1, 2)
@EVERY_WAY
def test_state_that_had_not_begun_has_not_begun(world: World, way: Any, tmp_path: Path) -> None:
    """With dampening the first step of a momentum is another than the second."""
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    model, theirs = Net(), Net()
    optimizer, reference = ours(model, SGD, **options), Reference(theirs, SGD, **options)
    load = way(world, optimizer, model, tmp_path)
    again = ours(model, SGD, **options, bucket_mb=0.01)
    load(again, model)
    train(world, again, model, reference, theirs, range(2))


@distributed(1, 2)
def test_what_is_not_loaded_keeps_its_digits(world: World, tmp_path: Path) -> None:
    model, optimizer, theirs, reference = pair("SGD-momentum")
    train(world, optimizer, model, reference, theirs, range(2))
    other = Net()
    other.first = nn.Linear(11, 36).to(BF16)
    ours(other, SGD, lr=0.1, momentum=0.9).save(tmp_path)
    before = [o.tensor.clone() for o in local_of(optimizer).of(model.first.weight)]
    report = optimizer.load(tmp_path, strict=False)
    assert any("first.weight" in key for key in report.mismatched)
    after = [o.tensor for o in local_of(optimizer).of(model.first.weight)]
    assert all(map(torch.equal, before, after))


@distributed(1, 2)
def test_what_was_written_into_the_parameters_is_saved(world: World) -> None:
    model, optimizer, theirs, reference = pair("AdamW-foreach")
    train(world, optimizer, model, reference, theirs, range(1))
    model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
    optimizer.consolidate_state_dict(to=0)
    if world.rank == 0:
        for state in optimizer.state_dict()["state"].values():
            assert MASTER not in state or bool((state[MASTER] == 1).all())


class KeepsX(torch.optim.Optimizer):
    key = "x"

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault(self.key, torch.zeros_like(param)).add_(param.grad)
                    param.sub_(state[self.key], alpha=group["lr"])


class KeepsA(KeepsX):
    key = "a"


@distributed(1, 2)
def test_state_of_another_class_is_refused_with_masters_too(world: World, tmp_path: Path) -> None:
    model = Net()
    optimizer = ours(model, KeepsX, partition="elementwise")
    give_gradients(world, 0, model)
    optimizer.step()
    optimizer.save(tmp_path)
    with pytest.raises(ValueError, match="does not fit"):
        ours(model, KeepsA, partition="elementwise").load(tmp_path)
