"""`master_dtype`: narrow parameters with a wide copy, which is sharded, updated and saved.

`Reference` is what everybody writes by hand without it: float32 copies of all parameters, stepped
by the plain class and rounded back. Gradients differ on every rank; ours must give the same bits.
"""

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
from models import SMALL_BUCKETS, noise
from torch import nn
from torch.optim import SGD, AdamW

from onecopy import GradScaler, ZeroRedundancyOptimizer
from onecopy.pieces import MASTER

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1}),
    "SGD-momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW-foreach": (AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW-fused": (AdamW, {"lr": 0.01, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}
EVERY_CLASS = pytest.mark.parametrize("name", CLASSES)


class Net(nn.Module):
    """Narrow layers, one wide one, one in channels_last; the loss uses what `skip` leaves."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 2).to(dtype).to(memory_format=torch.channels_last)
        self.first = nn.Linear(11, 37).to(dtype)
        self.wide = nn.LayerNorm(37)
        self.second = nn.Linear(37, 7).to(dtype)


class Reference:
    """Float32 copies, the plain class, and rounding."""

    def __init__(self, model: nn.Module, cls: type, **options: Any) -> None:
        self.params = list(model.parameters())
        self.masters = [
            nn.Parameter(param.detach().to(FP32)) if param.dtype != FP32 else param
            for param in self.params
        ]
        self.optimizer = cls(self.masters, **options)

    def step(self) -> None:
        narrow = [
            (param, master)
            for param, master in zip(self.params, self.masters, strict=True)
            if param is not master
        ]
        for param, master in narrow:
            master.grad = None if param.grad is None else param.grad.to(FP32)
        self.optimizer.step()
        with torch.no_grad():
            for param, master in narrow:
                param.copy_(master)


def give_gradients(world: World, step: int, *models: nn.Module, scale: float = 1.0) -> None:
    """The same averaged gradients to all models, from data that differ on every rank."""
    for number, params in enumerate(zip(*(m.parameters() for m in models), strict=True)):
        grad = noise(*params[0].shape, seed=(world.rank + 1, step + 1, number + 1)) * scale
        dist.all_reduce(grad)
        grad = (grad / world.size).to(params[0].dtype)
        for param in params:
            param.grad = grad.clone()


def ours(model: nn.Module, cls: type, **options: Any) -> ZeroRedundancyOptimizer:
    given = {"master_dtype": FP32, "bucket_mb": SMALL_BUCKETS, **options}
    return ZeroRedundancyOptimizer(model.named_parameters(), cls, **given)


def train(
    world: World,
    optimizer: Any,
    model: nn.Module,
    reference: Reference,
    their_model: nn.Module,
    steps: range,
) -> None:
    for step in steps:
        give_gradients(world, step, model, their_model)
        optimizer.step()
        reference.step()
        assert_equal(model, their_model)


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine.stride() == theirs.stride(), name


def pair(
    name: str, dtype: torch.dtype = BF16, **zero: Any
) -> tuple[nn.Module, ZeroRedundancyOptimizer, nn.Module, Reference]:
    cls, options = CLASSES[name]
    model, theirs = Net(dtype), Net(dtype)
    return model, ours(model, cls, **options, **zero), theirs, Reference(theirs, cls, **options)


# ---------------------------------------- training ----------------------------------------------


@distributed(1, 2, 3, 4)
@EVERY_CLASS
@pytest.mark.parametrize("flat", [False, True], ids=["own-storage", "bucket-view"])
def test_it_trains_like_copies_made_by_hand(world: World, name: str, flat: bool) -> None:
    model, optimizer, theirs, reference = pair(name, parameters_as_bucket_view=flat)
    train(world, optimizer, model, reference, theirs, range(4))


@distributed(2)
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_other_dtypes(world: World, dtype: torch.dtype) -> None:
    """With parameters that are wide enough there is nothing to copy."""
    model, optimizer, theirs, reference = pair("AdamW-foreach", dtype)
    train(world, optimizer, model, reference, theirs, range(3))


@distributed(2)
def test_float64_masters_of_float32_parameters(world: World) -> None:
    model = Net(FP32)
    optimizer = ours(model, SGD, lr=2**-30, master_dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    for _ in range(8):  # each update is lost in float32, where all of them together are not
        for param in model.parameters():
            param.grad = torch.full_like(param, 1.0)
        optimizer.step()
    moved = [not torch.equal(before[key], value) for key, value in model.state_dict().items()]
    assert any(moved)


@distributed(1, 2, 3)
def test_updates_smaller_than_the_rounding_add_up(world: World) -> None:
    model = nn.Linear(8, 8, bias=False, dtype=BF16)
    nn.init.ones_(model.weight)
    optimizer = ours(model, SGD, lr=1e-3)
    for _ in range(10):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert torch.equal(model.weight, torch.full_like(model.weight, 1 - 1e-2))


@distributed(2, 4)
def test_parameters_travel_in_their_own_dtype(world: World) -> None:
    model = nn.Linear(256, 64, bias=False, dtype=BF16)
    optimizer = ours(model, AdamW, lr=0.1, bucket_mb=25)
    model.weight.grad = torch.ones_like(model.weight)
    before = optimizer._transport.traffic.bytes
    optimizer.step()
    sent = torch.tensor(optimizer._transport.traffic.bytes - before)
    dist.all_reduce(sent)
    assert int(sent) == model.weight.numel() * 2 * (world.size - 1)


@distributed(2, 3)
def test_copies_and_state_are_sharded(world: World) -> None:
    model = nn.Linear(64, 48, bias=False, dtype=BF16)
    optimizer = ours(model, AdamW, lr=0.1)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    (group,) = optimizer.optim.param_groups
    mine = torch.tensor(sum(t.numel() for t in group["params"]))
    assert all(t.dtype == FP32 for t in group["params"])
    assert int(mine) * world.size == pytest.approx(64 * 48, abs=64 * world.size)
    dist.all_reduce(mine)
    assert int(mine) == 64 * 48


# ---------------------------------------- attached ----------------------------------------------


class Loss(nn.Module):
    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(11, 37, dtype=dtype)
        self.second = nn.Linear(37, 7, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def summed_wide(model: nn.Module, loss: torch.Tensor, world: World) -> None:
    """Each rank's share, rounded for the wire, summed in float32 in the order of the ranks."""
    loss.backward()
    for param in model.parameters():
        assert param.grad is not None
        share = param.grad * (1 / world.size)
        everyone = [torch.empty_like(share) for _ in range(world.size)]
        dist.all_gather(everyone, share)
        total = everyone[0].to(FP32)
        for other in everyone[1:]:
            total += other
        param.grad_in_float32 = total


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("lazy", [False, True], ids=["", "lazy"])
def test_attached_gradients_are_summed_in_the_masters_dtype(world: World, lazy: bool) -> None:
    model, theirs = Loss(), Loss()
    optimizer = ours(model, AdamW, lr=0.01)
    optimizer.attach(model, lazy_gather=lazy)
    masters = [nn.Parameter(p.detach().to(FP32)) for p in theirs.parameters()]
    plain = AdamW(masters, lr=0.01)
    for step in range(4):
        x = noise(6, 11, seed=(world.rank + 1, step + 1)).to(BF16)
        model(x).backward()
        summed_wide(theirs, theirs(x), world)
        for master, param in zip(masters, theirs.parameters(), strict=True):
            master.grad = param.grad_in_float32
        norm = optimizer.clip_grad_norm_(0.05)
        assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(masters, 0.05)))
        optimizer.step()
        plain.step()
        with torch.no_grad():
            for master, param in zip(masters, theirs.parameters(), strict=True):
                param.copy_(master)
                param.grad = None
        optimizer.wait()
        for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=2**-7, atol=1e-6)


@distributed(1, 2, 3)
def test_float16_with_a_loss_scale(world: World) -> None:
    """Summed and unscaled in float32: what would vanish in float16 arrives."""
    model = nn.Linear(4, 4, bias=False, dtype=FP16)
    nn.init.ones_(model.weight)
    optimizer = ours(model, SGD, lr=1.0)
    optimizer.attach(model)
    scaler = GradScaler("cpu", init_scale=2.0**14)
    tiny = torch.full((1, 4), 2.0**-12 * (1 + world.rank), dtype=FP16)
    loss = (model(tiny) * 2.0**-13).sum()  # its gradient, 2**-25, is zero in float16
    scaler.scale(loss.float()).backward()
    scaler.unscale_(optimizer)
    average = 2.0**-25 * (1 + (world.size - 1) / 2)
    assert float(optimizer.grad_norm(torch.inf)) == pytest.approx(average, rel=1e-3)
    scaler.step(optimizer)
    scaler.update()


# ---------------------------------------- parameters that others change -------------------------


@distributed(1, 2, 3)
@pytest.mark.parametrize("how", ["load_state_dict", "clamp_"])
def test_what_is_written_into_a_parameter_counts(world: World, how: str) -> None:
    model, optimizer, theirs, reference = pair("AdamW-foreach")
    train(world, optimizer, model, reference, theirs, range(2))

    def change(net: nn.Module) -> None:
        if how == "clamp_":
            with torch.no_grad():
                for param in net.parameters():
                    param.clamp_(-0.1, 0.1)
        else:
            net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()})

    change(model)
    change(theirs)
    with torch.no_grad():  # by hand one must take care: changed values count, others keep digits
        for param, master in zip(reference.params, reference.masters, strict=True):
            changed = master.to(param.dtype) != param
            master.copy_(torch.where(changed, param.to(FP32), master))
    train(world, optimizer, model, reference, theirs, range(2, 4))


@distributed(2)
def test_groups_and_frozen_parameters_come_in_later(world: World) -> None:
    model, theirs = Net(), Net()
    for net in (model, theirs):
        net.first.requires_grad_(False)
    optimizer, reference = ours(model, AdamW, lr=0.01), Reference(theirs, AdamW, lr=0.01)
    for step in range(2):
        give_gradients(world, step, model, theirs)
        for net in (model, theirs):
            net.first.zero_grad()
        optimizer.step()
        reference.step()
    for net in (model, theirs):
        net.first.requires_grad_(True)
    extra, their_extra = (nn.Parameter(torch.ones(9, dtype=BF16)) for _ in range(2))
    optimizer.add_param_group({"params": [("extra", extra)], "lr": 0.1})
    their_master = nn.Parameter(their_extra.detach().to(FP32))
    reference.optimizer.add_param_group({"params": [their_master], "lr": 0.1})
    reference.params.append(their_extra)
    reference.masters.append(their_master)
    for step in range(2, 4):
        give_gradients(world, step, model, theirs)
        for param in (extra, their_extra):
            param.grad = torch.full_like(param, step)
        optimizer.step()
        reference.step()
    assert_equal(model, theirs)
    assert torch.equal(extra, their_extra)


@distributed(2)
def test_a_copy_of_the_optimizer_has_copies_of_the_masters(world: World) -> None:
    model, optimizer, theirs, reference = pair("SGD-momentum")
    train(world, optimizer, model, reference, theirs, range(2))
    twin = copy.deepcopy({"optimizer": optimizer, "model": model})
    train(world, twin["optimizer"], twin["model"], reference, theirs, range(2, 4))


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
@pytest.mark.parametrize("way", [through_files, through_dcp])
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
    before = [o.tensor.clone() for o in optimizer._local.of(model.first.weight)]
    report = optimizer.load(tmp_path, strict=False)
    assert any("first.weight" in key for key in report.mismatched)
    after = [o.tensor for o in optimizer._local.of(model.first.weight)]
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


class Averaging(SGD):
    """Has `eval`, as schedule-free classes do."""

    def eval(self) -> None:
        pass


@distributed(1, 2)
def test_eval_does_not_undo_what_was_loaded_into_the_module(world: World) -> None:
    model = Net()
    optimizer = ours(model, Averaging, lr=0.1, partition="elementwise")
    give_gradients(world, 0, model)
    optimizer.step()
    model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
    optimizer.eval()
    assert all(bool((param == 1).all()) for param in model.parameters())


@distributed(1, 2)
def test_a_graph_from_before_the_step_is_refused(world: World) -> None:
    model = Loss()
    optimizer = ours(model, SGD, lr=0.1)
    loss = model(torch.ones(2, 11, dtype=BF16))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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


# ---------------------------------------- bad input ---------------------------------------------


@distributed(1, 2)
@pytest.mark.parametrize("bad", [torch.bfloat16, torch.int64, "float32"], ids=str)
def test_a_dtype_that_cannot_be_a_masters_is_refused(world: World, bad: Any) -> None:
    with pytest.raises(ValueError, match="master_dtype"):
        ours(Net(), SGD, lr=0.1, master_dtype=bad)


@distributed(2)
def test_ranks_that_disagree_on_masters_are_told(world: World) -> None:
    with pytest.raises(ValueError, match=r"ranks disagree.*\n.*master_dtype"):
        ours(Net(), SGD, lr=0.1, master_dtype=FP32 if world.rank else None)
