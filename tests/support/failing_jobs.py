"""A small training job in each mode, in which something can be made to raise.

job = Job(world, "lazy")
job.train(3)
job.arm("autograd function")        # on this rank, once
...                                 # job.compute() or job.step() raises Fault
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import World
from models import SMALL_BUCKETS, Mlp, seed_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from onecopy import ZeroRedundancyOptimizer, hook_with_zero_step

ATTACHED = ("ddp", "module", "lazy", "masters", "accumulating")
MODES = ("drop-in", "overlap", *ATTACHED)

# Where a rank can raise: before backward, in it, before the update, and after it.
BEFORE = ("data loader", "forward", "module hook", "closure")
BACKWARD = ("gradient hook", "autograd function", "backward hook", "last hook")
STEP = ("step pre hook", "global step pre hook")
AFTER = ("step post hook", "global step post hook")


def meet(world: World, name: str) -> None:
    """Wait for all ranks without a collective, of which none may work any more."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name} {world.rank}", "")
    store.wait([f"{name} {rank}" for rank in range(world.size)], timedelta(seconds=50))


class Fault(Exception):
    """What the user's code raises."""


class Trap:
    """Raises once where it is armed. Hooks hold on to it, and not to the job: a cycle through the
    hooks of a tensor is never collected."""

    def __init__(self) -> None:
        self.armed: str | None = None
        self.in_no_sync = self.is_in_no_sync = False

    def reach(self, place: str) -> None:
        if self.armed == place and self.is_in_no_sync == self.in_no_sync:
            self.armed = None
            raise Fault(place)

    def at(self, place: str) -> Callable[..., None]:
        return lambda *_: self.reach(place)


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trap: Trap) -> torch.Tensor:
        ctx.trap = trap
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.trap.reach("autograd function")
        return grad, None


class Job:
    def __init__(self, world: World, mode: str, optimizer_class: Any = AdamW) -> None:
        self.world, self.mode, self.trap = world, mode, Trap()
        torch.manual_seed(0)
        self.model = Mlp().to(torch.bfloat16 if mode == "masters" else torch.float32)
        _put_hooks(self.model, self.trap)
        masters = torch.float32 if mode == "masters" else None
        self.module: nn.Module = self.model
        if mode in ("drop-in", "overlap", "ddp"):
            self.module = DistributedDataParallel(self.model, bucket_cap_mb=0.0005)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class,
            overlap_with_ddp=mode == "overlap",
            bucket_mb=SMALL_BUCKETS,
            master_dtype=masters,
            lr=0.05,
        )
        if mode in ATTACHED:
            self.optimizer.attach(self.module, lazy_gather=mode == "lazy")
        if mode == "overlap":
            self._step_in_backward()
        self.optimizer.register_step_pre_hook(self.trap.at("step pre hook"))
        self.optimizer.register_step_post_hook(self.trap.at("step post hook"))

    def _step_in_backward(self) -> None:
        hook = hook_with_zero_step(allreduce_hook, self.module, self.optimizer)
        self.module.register_comm_hook(None, hook)

    def wrap_again(self) -> None:
        """What DDP needs after a backward that raised."""
        self.module = DistributedDataParallel(self.model, bucket_cap_mb=0.0005)
        if self.mode == "overlap":
            self._step_in_backward()

    # ------------------------------------------------------------------ faults

    def arm(self, place: str, in_no_sync: bool = False) -> None:
        self.trap.armed, self.trap.in_no_sync = place, in_no_sync

    @contextlib.contextmanager
    def global_hooks(self) -> Iterator[None]:
        handles = [
            register_optimizer_step_pre_hook(self.trap.at("global step pre hook")),
            register_optimizer_step_post_hook(self.trap.at("global step post hook")),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # ------------------------------------------------------------------ an iteration

    def batch(self, number: int) -> torch.Tensor:
        self.trap.reach("data loader")
        return self.model.batch(seed_of(self.world, number))

    def compute(self, number: int) -> None:
        """Gradients of a batch, or of two that are accumulated."""
        batch = self.batch(number)
        self.trap.reach("closure")
        if self.mode == "accumulating":
            with self.optimizer.no_sync(), self._in_no_sync():
                self.module(self.model.batch(seed_of(self.world, number + 100))).backward()
        self.module(batch).backward()

    @contextlib.contextmanager
    def _in_no_sync(self) -> Iterator[None]:
        self.trap.is_in_no_sync = True
        try:
            yield
        finally:
            self.trap.is_in_no_sync = False

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, *numbers: int) -> None:
        for number in numbers:
            self.compute(number)
            self.step()
        self.optimizer.wait()


def _put_hooks(model: Mlp, trap: Trap) -> None:
    model.norm.register_forward_pre_hook(trap.at("forward"))
    model.second.register_forward_hook(trap.at("module hook"))
    model.norm.register_full_backward_hook(trap.at("backward hook"))
    model.norm.weight.register_hook(trap.at("gradient hook"))
    model.first.weight.register_hook(trap.at("last hook"))
    model.norm.register_forward_hook(lambda _, __, output: _RaisesInBackward.apply(output, trap))
