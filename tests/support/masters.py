"""`master_dtype`: narrow parameters with a wide copy, which is sharded, updated and saved.

`Reference` is what everybody writes by hand without it: float32 copies of all parameters, stepped
by the plain class and rounded back. Gradients differ on every rank; ours must give the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World
from models import SMALL_BUCKETS, noise
from torch import nn
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer

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


class Loss(nn.Module):
    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(11, 37, dtype=dtype)
        self.second = nn.Linear(37, 7, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()
