"""Norms, clipping and loss scaling in attached mode, against torch's on all gradients."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import EVERY_FEED, AttachedTwins
from harness import World, distributed
from inside import held_gradients
from models import BranchNet, MixedNet, Mlp, TiedNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from onecopy import GradScaler, ZeroRedundancyOptimizer

NORMS = [2.0, 1.0, 3.0, 0.5, 0.0, math.inf, -math.inf, -1.0]


def same_on_all_ranks(value: torch.Tensor) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, float(value))
    return len(set(everyone)) == 1


@pytest.mark.also_c10d
@distributed(1, 3)
@EVERY_FEED
@pytest.mark.parametrize(
    ("norm_type", "cls"), [*((norm, AdamW) for norm in NORMS), (2.0, torch.optim.Adafactor)]
)
def test_the_norm_is_that_of_all_gradients(
    world: World, hooks: str, norm_type: float, cls: Any
) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, TiedNet(), cls, hooks, lr=0.01)
    twins.backward()
    expected = clip_grad_norm_(twins.plain_model.parameters(), 1e-3, norm_type)
    assert same_on_all_ranks(twins.optimizer.grad_norm(norm_type))
    found = twins.optimizer.clip_grad_norm_(1e-3, norm_type)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert found.dtype == expected.dtype
    twins.assert_same_gradients(rtol=1e-4, atol=1e-7)
    twins.step()
    twins.assert_same(rtol=1e-4, atol=1e-5)


@distributed(1, 2, 3)
@EVERY_FEED
def test_a_small_norm_is_not_clipped(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    twins.backward()
    twins.optimizer.clip_grad_norm_(1e6)
    twins.assert_same_gradients()


@distributed(1, 2)
@EVERY_FEED
def test_gradients_of_several_dtypes(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, MixedNet(), SGD, hooks, lr=0.01)
    twins.backward()
    expected = torch.stack([p.grad.double().norm() for p in twins.plain_model.parameters()]).norm()
    torch.testing.assert_close(twins.optimizer.grad_norm().double(), expected, rtol=1e-2, atol=0)


@distributed(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0])
def test_norms_of_16_bit_gradients_have_the_digits_of_float32(
    world: World, dtype: torch.dtype, norm_type: float
) -> None:
    """In float16 the norm itself would be infinite: it is above 65,504."""
    model = nn.Linear(500, 400, bias=False).to(dtype)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    rows = torch.randn(8, 500, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
    (model(rows).sum() * 200).backward()
    whole = optimizer.full_grad(model.weight)
    expected = whole.double().abs().pow(norm_type).sum().pow(1 / norm_type)
    found = optimizer.clip_grad_norm_(1.0, norm_type)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=5e-5, atol=0)
    clipped = optimizer.full_grad(model.weight)
    assert expected > 65504 or norm_type == 3.0
    torch.testing.assert_close(clipped.double(), whole.double() / expected, rtol=2e-2, atol=1e-6)


@distributed(1, 2, 3)
@EVERY_FEED
def test_parameters_without_gradient_do_not_count(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(
        *(world, BranchNet(lambda _: (True, False)), SGD, hooks),
        ddp={"find_unused_parameters": True},
        lr=0.1,
    )
    assert twins.optimizer.grad_norm() == 0
    twins.backward()
    for norm_type in (2.0, 0.0, -math.inf):
        expected = clip_grad_norm_(twins.plain_model.parameters(), math.inf, norm_type)
        torch.testing.assert_close(twins.optimizer.grad_norm(norm_type), expected)


@distributed(1, 2)
@EVERY_FEED
def test_a_norm_that_is_not_finite(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    batch = twins.batch()
    if world.rank == 0:
        batch[0, 0] = math.nan
    twins.ddp(batch).backward()
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        twins.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert math.isnan(twins.optimizer.clip_grad_norm_(1.0))


@distributed(2, 3)
@EVERY_FEED
@pytest.mark.parametrize("norm_type", [2.0, math.inf, -math.inf, 0.5])
def test_a_nan_in_one_ranks_share_is_seen_by_all(
    world: World, hooks: str, norm_type: float
) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    if world.rank == 0:
        twins.model.second.bias.register_hook(lambda grad: grad * math.nan)
    twins.ddp(twins.batch()).backward()
    norms: list[Any] = [None] * world.size
    dist.all_gather_object(norms, float(twins.optimizer.grad_norm(norm_type)))
    assert all(map(math.isnan, norms)), norms


@distributed(1, 2)
def test_norms_do_not_follow_the_default_device(world: World) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, "module", lr=0.1)
    twins.backward()
    for norm_type in (2.0, math.inf):
        expected = clip_grad_norm_(twins.plain_model.parameters(), math.inf, norm_type)
        with torch.device("meta"):
            found = twins.optimizer.grad_norm(norm_type)
        torch.testing.assert_close(found, expected)


@distributed(1, 2)
def test_as_drop_in_it_is_torchs(world: World) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    model(model.batch((1, 2))).backward()
    full = [p.grad.clone() for p in model.parameters()]
    expected = torch.stack([g.norm() for g in full]).norm()
    torch.testing.assert_close(optimizer.grad_norm(), expected)
    assert optimizer.full_grad(model.first.weight) is model.first.weight.grad
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e-3), expected)
    assert optimizer.grad_norm() < 1.01e-3


# ---------------------------------------- loss scaling ----------------------------------------


@pytest.mark.also_c10d
@distributed(1, 2, 3)
@EVERY_FEED
def test_scaled_training_is_that_of_torchs_scaler_under_ddp(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1, momentum=0.9)
    plain, ours = (
        cls("cpu", init_scale=1024.0, growth_interval=2)
        for cls in (torch.amp.GradScaler, GradScaler)
    )
    for step in range(6):
        batch = twins.batch()
        if step == 3 and world.rank == world.size - 1:
            batch[0, 0] = math.inf
        plain.scale(twins.plain_ddp(batch)).backward()
        ours.scale(twins.ddp(batch)).backward()
        if step % 2:
            plain.unscale_(twins.plain)
            ours.unscale_(twins.optimizer)
        before = [p.clone() for p in twins.model.parameters()]
        plain.step(twins.plain)
        ours.step(twins.optimizer)
        plain.update()
        ours.update()
        twins.plain.zero_grad()  # ours keeps nothing, whether it has stepped or not
        assert ours.get_scale() == plain.get_scale()
        twins.assert_same()
        stood_still = all(
            torch.equal(a, b) for a, b in zip(before, twins.model.parameters(), strict=True)
        )
        assert stood_still == (step == 3)


@distributed(2, 3)
@EVERY_FEED
def test_an_infinity_in_one_ranks_share_stops_all(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    scaler = GradScaler("cpu", init_scale=16.0)
    before = [param.clone() for param in twins.model.parameters()]

    def with_infinity(grad: torch.Tensor) -> torch.Tensor:
        changed = grad.clone()
        changed[0] = math.inf
        return changed

    if world.rank == 0:
        twins.model.second.bias.register_hook(with_infinity)
    scaler.scale(twins.ddp(twins.batch())).backward()
    seen = [
        grad is not None and not torch.isfinite(grad).all()
        for grad in held_gradients(twins.optimizer)
    ]
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, any(seen))
    assert sum(everyone) == 1  # only the owner of that element can see it
    scaler.step(twins.optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    for param, start in zip(twins.model.parameters(), before, strict=True):
        assert torch.equal(param, start)


@distributed(1, 2)
@EVERY_FEED
def test_torchs_scaler_is_told_to_be_ours(world: World, hooks: str) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp(), SGD, hooks, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(twins.ddp(twins.batch())).backward()
    with pytest.raises(RuntimeError, match=r"onecopy\.GradScaler"):
        scaler.step(twins.optimizer)


@distributed(1, 2)
@EVERY_FEED
def test_float16_parameters_cannot_be_unscaled_as_with_torchs(world: World, hooks: str) -> None:
    model = nn.Linear(3, 2, dtype=torch.float16)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    module = DistributedDataParallel(model) if hooks == "ddp" else model
    optimizer.attach(module)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(module(torch.ones(1, 3, dtype=torch.float16)).sum()).backward()
    with pytest.raises(ValueError, match="float16 parameters cannot be unscaled"):
        scaler.unscale_(optimizer)


@distributed(1, 2)
def test_ours_serves_other_optimizers_too(world: World) -> None:
    model = nn.Linear(3, 2)
    for optimizer in (
        SGD(model.parameters(), lr=0.1),
        ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1),
    ):
        scaler = GradScaler("cpu", init_scale=4.0)
        before = model.weight.clone()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(model.weight, before - 0.1)
        optimizer.zero_grad()


class ComplexNet(nn.Module):
    """Kept whole, the complex tensor is on one rank only; of one element, torch's norm of type zero
    warns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.waves = nn.Parameter(torch.randn(1, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.waves * x).abs().square().sum() + (self.real * x).sum()


@pytest.mark.also_c10d
@distributed(1, 2, 3, timeout=20, pg_timeout=5)
def test_complex_gradients_are_unscaled_and_clipped(world: World) -> None:
    model, plain_model = ComplexNet(), ComplexNet()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, partition="whole")
    optimizer.attach(model)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.full((5,), 1.0 + world.rank))).backward()
    scaler.unscale_(optimizer)
    for rank in range(world.size):
        (plain_model(torch.full((5,), 1.0 + rank)) / world.size).backward()
    torch.set_warn_always(True)
    for norm_type in (2.0, 0.0, math.inf):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = optimizer.clip_grad_norm_(1.0, norm_type)
            warnings.simplefilter("ignore")  # torch's own
            expected = clip_grad_norm_(plain_model.parameters(), 1.0, norm_type)
        torch.testing.assert_close(found, expected)
    torch.set_warn_always(False)
    for mine, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_grad(mine), theirs.grad)
    before = model.waves.detach().clone()
    scaler.step(optimizer)
    torch.testing.assert_close(model.waves.detach(), before - 0.1 * plain_model.waves.grad)


@distributed(1, 2, 3)
@EVERY_FEED
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_of_wide_gradients_has_all_their_digits(
    world: World, hooks: str, norm_type: float
) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(world, Mlp().double(), SGD, hooks, lr=0.1)
    batch = twins.batch().double()
    for ddp in (twins.plain_ddp, twins.ddp):
        ddp(batch).backward()
    expected = clip_grad_norm_(twins.plain_model.parameters(), 1e-3, norm_type)
    torch.testing.assert_close(twins.optimizer.grad_norm(norm_type), expected, rtol=1e-14, atol=0)
    found = twins.optimizer.clip_grad_norm_(1e-3, norm_type)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    twins.assert_same_gradients(rtol=1e-13, atol=1e-18)


@distributed(1, 2)
def test_wide_gradients_of_float16_parameters_are_unscaled_and_shown_as_they_are(
    world: World,
) -> None:
    model = nn.Linear(8, 2, bias=False, dtype=torch.float16)
    if not hasattr(model.weight, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    model.weight.grad_dtype = torch.float32
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    scaler = GradScaler("cpu", init_scale=4.0)
    fine = 2.0**-12 * world.rank  # beside 1, float16 has no digits for it
    model.weight.register_hook(lambda grad: torch.full_like(grad, 4.0 * (1 + fine)))
    scaler.scale(model(torch.ones(1, 8, dtype=torch.float16)).sum()).backward()
    scaler.unscale_(optimizer)
    found = optimizer.full_grad(model.weight)
    assert found is not None
    assert found.dtype == torch.float32
    average = 1 + 2.0**-12 * (world.size - 1) / 2
    assert torch.equal(found, torch.full((2, 8), average))


@distributed(1, 2)
def test_full_gradients_for_master_copies_are_not_rounded(world: World) -> None:
    model = nn.Linear(8, 2, bias=False, dtype=torch.bfloat16)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, master_dtype=torch.float32)
    optimizer.attach(model)
    model(torch.full((1, 8), 1 + 2.0**-7 * world.rank, dtype=torch.bfloat16)).sum().backward()
    found = optimizer.full_grad(model.weight)
    assert found is not None
    assert torch.equal(found, torch.full((2, 8), 1 + 2.0**-7 * (world.size - 1) / 2))
