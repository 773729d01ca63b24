"""What the tests of the contract with torch's class share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from harness import World
from torch import nn
from torch.optim import SGD, Optimizer

SMALL = {"bucket_mb": 0.001}  # 262 float32 elements: even tiny models have several buckets


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))


def averaged_gradients(params: Iterable[torch.Tensor], seed: int, world: World) -> None:
    """Gradients as after DDP: each rank's own data, averaged over the ranks."""
    source = torch.Generator().manual_seed(1000 * seed + world.rank)
    for param in params:
        grad = torch.randn(param.shape, generator=source, dtype=param.dtype) / world.size
        dist.all_reduce(grad)
        param.grad = grad


def train_both(
    ours: Optimizer,
    mine: Iterable[torch.Tensor],
    plain: Optimizer,
    theirs: Iterable[torch.Tensor],
    world: World,
    seeds: Iterable[int],
) -> None:
    """Step both on the same gradients and require equal bits after every step."""
    mine, theirs = list(mine), list(theirs)
    for seed in seeds:
        averaged_gradients(mine, seed, world)
        for a, b in zip(mine, theirs, strict=True):
            b.grad = None if a.grad is None else a.grad.clone()
        ours.step()
        plain.step()
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b), f"parameter {number} after seed {seed}"


def parameters_of(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """(name, kind, default) of each; what **keywords are collected in is nobody's business."""
    found = inspect.signature(function).parameters.values()
    return [(p.name if p.kind is not p.VAR_KEYWORD else "**", p.kind, p.default) for p in found]


class Halving(Optimizer):
    """A class of somebody's own: a closure-less step with a keyword, and a key of its own."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> str:
        for group in self.param_groups:
            group["steps_seen"] = group.get("steps_seen", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * factor * param.grad)
        return "stepped"


class Recording(SGD):
    """Keeps what its step was given."""

    def step(self, closure: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        self.given = (closure, kwargs)
        super().step(closure if callable(closure) else None)
        return ("result", closure)


class Refusing(SGD):
    """Takes no parameters at all."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError(f"not these: {len(param_group['params'])}")


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
