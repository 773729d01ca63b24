"""`master_dtype`: narrow parameters with a wide copy, which is sharded and updated."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import EVERY_FEED
from harness import World, distributed, pretend_hosts
from inside import hooked_for_no_sync, local_of, plan_of, traffic_of
from masters import (
    BF16,
    EVERY_CLASS,
    FP16,
    FP32,
    Loss,
    Net,
    Reference,
    assert_equal,
    give_gradients,
    ours,
    pair,
    train,
)
from models import noise
from test_master_copies_saved import EVERY_WAY, Heard, through_a_dict
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from onecopy import GradScaler, ZeroRedundancyOptimizer
from onecopy.planning.param_groups import MASTER

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
    before = traffic_of(optimizer).bytes
    optimizer.step()
    sent = torch.tensor(traffic_of(optimizer).bytes - before)
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
    pretend_hosts(world)  # all on one host: the sum is in the order of the ranks
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


@pytest.mark.also_c10d
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


# ---------------------------------------- attached, accumulated ---------------------------------


def attached(
    hooks: str, model: nn.Module, **options: Any
) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    module = DistributedDataParallel(model, **options) if hooks == "ddp" else model
    optimizer = ours(model, AdamW, lr=0.01)
    optimizer.attach(module)
    return module, optimizer


def gradients_of(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor | None]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def expected_average(world: World, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sums of this rank, rounded for the wire, summed in float32 in the order of the ranks."""
    found = []
    for total in mine:
        share = (total * (1 / world.size)).to(BF16)
        everyone = [torch.empty_like(share) for _ in range(world.size)]
        dist.all_gather(everyone, share)
        average = everyone[0].to(FP32)
        for other in everyone[1:]:
            average += other
        found.append(average)
    return found


@distributed(1, 2, 3, 4)
@EVERY_FEED
def test_gradients_of_16_micro_batches_are_accumulated_in_float32(world: World, hooks: str) -> None:
    pretend_hosts(world)
    model, twin = Loss(), Loss()
    module, optimizer = attached(hooks, model)
    numel = sum(param.numel() for param in model.parameters())
    held = optimizer.memory_report().gradients
    wide = [torch.zeros_like(p, dtype=FP32) for p in twin.parameters()]
    narrow, exact = [w.to(BF16) for w in wide], [w.double() for w in wide]
    for micro in range(16):
        x = noise(6, 11, seed=(world.rank + 1, micro + 1)).to(BF16)
        for sums in (wide, narrow, exact):
            for total, grad in zip(sums, gradients_of(twin, twin(x)), strict=True):
                total.add_(grad)
        if micro == 15:
            module(x).backward()
            break
        with optimizer.no_sync():
            module(x).backward()
        assert all(param.grad is None for param in model.parameters())
        assert optimizer.memory_report().gradients == held + 4 * numel
    assert optimizer.memory_report().gradients == held
    found = [optimizer.full_grad(param) for param in model.parameters()]
    for mine, expected in zip(found, expected_average(world, wide), strict=True):
        assert torch.equal(mine, expected)

    for total in exact:
        dist.all_reduce(total)

    def error(averages: list[torch.Tensor]) -> float:
        pairs = zip(averages, exact, strict=True)
        differences = [(each - whole / world.size).norm() for each, whole in pairs]
        return float(torch.stack(differences).norm() * world.size / norm)

    norm = torch.stack([whole.norm() for whole in exact]).norm()
    assert error(found) < 2**-9  # one rounding, for the wire
    assert error(found) < 0.5 * error(expected_average(world, narrow))
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.also_c10d
@distributed(1, 2)
@EVERY_FEED
@pytest.mark.parametrize("reduce_dtype", [None, FP32], ids=["own", "reduce_dtype"])
@pytest.mark.parametrize("master_dtype", [None, FP32], ids=["no_masters", "masters"])
def test_accumulation_is_as_under_ddp_or_closer_to_the_exact_sum(
    world: World, hooks: str, reduce_dtype: Any, master_dtype: Any
) -> None:
    """16 micro-batches, with and without masters, sent in 16 and in 32 bits."""
    model, twin = Loss(), Loss()
    reference = DistributedDataParallel(twin)
    module = DistributedDataParallel(model) if hooks == "ddp" else model
    optimizer = ours(model, AdamW, lr=0.01, master_dtype=master_dtype)
    optimizer.attach(module, reduce_dtype=reduce_dtype)
    shadow = Loss()
    exact = [torch.zeros_like(param, dtype=torch.float64) for param in shadow.parameters()]
    for micro in range(16):
        x = noise(6, 11, seed=(world.rank + 1, micro + 1)).to(BF16)
        for total, grad in zip(exact, gradients_of(shadow, shadow(x)), strict=True):
            total.add_(grad)
        is_last = micro == 15
        with contextlib.nullcontext() if is_last else optimizer.no_sync():
            module(x).backward()
        with contextlib.nullcontext() if is_last else reference.no_sync():
            reference(x).backward()
        if not is_last:
            in_params = [param.grad is not None for param in model.parameters()]
            assert set(in_params) == {master_dtype is None}
    for total in exact:
        dist.all_reduce(total)
        total.div_(world.size)
    mine = [optimizer.full_grad(param) for param in model.parameters()]
    of_ddp = [param.grad for param in twin.parameters()]
    if master_dtype is None:
        assert all(map(torch.equal, mine, of_ddp))
        return

    def error(averages: list[torch.Tensor]) -> float:
        return max(
            float((each - whole).norm() / whole.norm())
            for each, whole in zip(averages, exact, strict=True)
        )

    bound = 1e-6 if reduce_dtype is FP32 else 2**-9  # one rounding, for the wire
    assert error(mine) < bound < error(of_ddp)


class Branches(Loss):
    """Uses the second layer only if it is told to."""

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        return super().forward(x) if both else self.first(x).square().mean()


@distributed(1, 2)
@EVERY_FEED
def test_what_was_accumulated_is_averaged_once_or_dropped(world: World, hooks: str) -> None:
    pretend_hosts(world)
    model, twin = Branches(), Branches()
    module, optimizer = attached(hooks, model, find_unused_parameters=True)
    x = noise(6, 11, seed=(world.rank + 1,)).to(BF16)

    def accumulate(both: bool = True) -> None:
        with optimizer.no_sync():
            module(x, both).backward()

    def is_held() -> bool:
        return optimizer.memory_report().gradients > slots

    slots = optimizer.memory_report().gradients
    for drop in (optimizer.zero_grad, module.zero_grad):
        accumulate()
        assert is_held()
        drop()
        assert not is_held()
    accumulate()
    with pytest.raises(
        RuntimeError, match=r"\(first\.weight\) has a gradient that was not averaged"
    ):
        optimizer.step()
    optimizer.zero_grad()

    # The second layer has a gradient inside no_sync() only. So has a layer that was unfrozen, which
    # the next step plans.
    accumulate()
    accumulate()
    module(x, False).backward()
    assert not is_held()
    wide = [torch.zeros_like(p, dtype=FP32) for p in twin.parameters()]
    for both in (True, True, False):
        for total, grad in zip(wide, gradients_of(twin, twin(x, both)), strict=True):
            total.add_(0 if grad is None else grad)
    expected = expected_average(world, wide)
    for param, average in zip(model.parameters(), expected, strict=True):
        assert torch.equal(optimizer.full_grad(param), average)
    optimizer.step()

    # A backward that raises is given up, with what was accumulated before it.
    accumulate()
    handle = model.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(x).backward()
    handle.remove()
    optimizer.zero_grad()
    assert not is_held()
    module(x).backward()
    optimizer.step()
    accumulate()
    optimizer.detach()
    assert all(param.grad is None for param in model.parameters())


@distributed(2)
@EVERY_FEED
def test_what_was_unfrozen_is_accumulated_in_float32(world: World, hooks: str) -> None:
    pretend_hosts(world)
    model, twin = Loss(), Loss()
    model.second.requires_grad_(False)
    module, optimizer = attached(hooks, model)
    module(torch.ones(2, 11, dtype=BF16)).backward()
    optimizer.step()
    twin.load_state_dict(model.state_dict())
    model.second.requires_grad_(True)
    wide = [torch.zeros_like(p, dtype=FP32) for p in twin.parameters()]
    for micro in range(8):
        x = noise(6, 11, seed=(world.rank + 1, micro + 1)).to(BF16)
        for total, grad in zip(wide, gradients_of(twin, twin(x)), strict=True):
            total.add_(grad)
        with contextlib.nullcontext() if micro == 7 else optimizer.no_sync():
            module(x).backward()
    for param, average in zip(model.parameters(), expected_average(world, wide), strict=True):
        assert torch.equal(optimizer.full_grad(param), average)
    optimizer.step()


@distributed(1, 2)
def test_parameters_are_hooked_by_the_first_forward_inside_no_sync(world: World) -> None:
    pretend_hosts(world)
    model = Loss()
    model.second.requires_grad_(False)
    module, optimizer = attached("ddp", model)
    params = list(model.parameters())
    x = noise(6, 11, seed=(world.rank + 1,)).to(BF16)

    def trained() -> set[int]:
        return {index for index, param in enumerate(params) if param.requires_grad}

    for _ in range(2):
        module(x).backward()
        optimizer.step()
    with torch.no_grad(), optimizer.no_sync():
        module(x)
    assert hooked_for_no_sync(optimizer) == set()
    before = trained()
    for _ in range(2):
        with optimizer.no_sync():
            module(x).backward()
        assert hooked_for_no_sync(optimizer) == before
    model.first.requires_grad_(False)  # as many as before, and others
    model.second.requires_grad_(True)
    assert len(trained()) == len(before)
    with optimizer.no_sync():
        module(x).backward()
    assert hooked_for_no_sync(optimizer) == before | trained()
    assert all(param.grad is None for param in params)
    optimizer.zero_grad()
    optimizer.detach()


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


# ---------------------------------------- between a load and the next step


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
def test_master_copies_of_another_ranks_shards_are_warned_of(world: World, which: str) -> None:
    """Every tensor is on one rank: what rank 0 has tells nothing about the last rank's."""
    params = [nn.Parameter(torch.ones(8, dtype=BF16)) for _ in range(world.size)]
    given: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "partition": "whole"}
    optimizer = ZeroRedundancyOptimizer(params, SGD, master_dtype=FP32, **given)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = full_state(optimizer)
    plan = plan_of(optimizer)
    (last,) = {shard.param for shard in plan.shards(world.size - 1)}
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
    for shard in plan_of(optimizer).shards(0):
        if shard.param == 1:
            x[shard.start : shard.stop] = 0.001
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
    for owned in local_of(optimizer).shards:
        assert torch.equal(owned.tensor, owned.values().to(owned.tensor.dtype))
