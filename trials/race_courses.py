"""What is run with and without delays: short training runs in which as much as possible overlaps.

A `Course` says what a run does. `plain` is the same run with nothing that overlaps more than it
must; it has to give the same bits.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from equal_bits import have_equal_bits
from inside import share_memory_from
from race_delays import Delays
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from onecopy import ZeroRedundancyOptimizer, hook_with_zero_step

FEEDS = ("bare", "ddp", "drop-in", "step in backward")
STEPS = 3
# From how many bytes on neighbours lend: always; so that some buckets are lent and others, which
# share memory with them, are sent; never.
LENT_FROM = (1, 64, sys.maxsize)


@dataclass(frozen=True)
class Course:
    """A training run."""

    feed: str
    kind: str  # of what it is trained with: see `_optimizer`
    lazy: bool = False  # parameters are awaited by the forward that uses them
    small_buckets: bool = False
    flat: bool = False  # parameters live in buckets
    accumulates: bool = False
    clips: bool = False
    saves: bool = False  # a checkpoint is written in the background
    lent_from: int = sys.maxsize  # bytes: smaller parts are sent to neighbours, too

    @property
    def plain(self) -> Course:
        """Without what must not change a bit. (A norm depends on where tensors are cut.)"""
        small = self.small_buckets and self.clips
        return replace(
            self, lazy=False, small_buckets=small, flat=False, saves=False, lent_from=sys.maxsize
        )

    @property
    def is_attached(self) -> bool:
        return self.feed in ("bare", "ddp")


def courses() -> Iterator[Course]:
    """In an order in which any few of them differ in everything."""
    kinds = ["AdamW", "masters", "SGD"] + ["mixture"] * hasattr(torch.optim, "Muon")
    flags = itertools.product([True, False], repeat=3)
    found = []
    for feed, kind, (lazy, small, flat) in itertools.product(FEEDS, kinds, flags):
        draw = random.Random(f"{feed} {kind} {lazy} {small} {flat}")
        attached, stepping = feed in ("bare", "ddp"), feed == "step in backward"
        if lazy and not attached:
            continue
        accumulates, clips = (draw.random() < 0.5 and not stepping for _ in range(2))
        saves = draw.random() < 0.4
        found.append(Course(feed, kind, lazy, small, flat, accumulates, clips, saves))
    random.Random(0).shuffle(found)
    return iter(found)


# ---------------------------------------- the model ----------------------------------------


class Crossing(nn.Module):
    """Even ranks compute the left branch first, odd ones the right: gradients come in another
    order on each. One layer is used by the last rank alone."""

    def __init__(self, rank: int, is_last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.is_last = rank, is_last
        self.trunk = nn.Linear(11, 33)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(33, 19), nn.Tanh(), nn.Linear(19, 3)) for _ in range(2)
        )
        self.rare = nn.Linear(33, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.trunk(x.to(self.trunk.weight.dtype)))
        order = self.branches if self.rank % 2 == 0 else reversed(self.branches)
        loss = torch.cat([branch(x) for branch in order]).float().square().mean()
        return loss + self.rare(x).float().square().mean() if self.is_last else loss


def _optimizer(model: nn.Module, course: Course) -> ZeroRedundancyOptimizer:
    classes: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "masters": (torch.optim.AdamW, {"lr": 0.01, "master_dtype": torch.float32}),
    }
    cls, options = classes.get(course.kind, (torch.optim.AdamW, {"lr": 0.01}))
    params: Any = model.parameters()
    if course.kind == "mixture":
        muon = {"optimizer_class": torch.optim.Muon, "lr": 0.02}
        matrices = [p for p in model.parameters() if p.ndim == 2]
        params = [
            {"params": [p for p in model.parameters() if p.ndim != 2]},
            {"params": matrices, **muon},
        ]
    return ZeroRedundancyOptimizer(
        params,
        cls,
        parameters_as_bucket_view=course.flat,
        overlap_with_ddp=course.feed == "step in backward",
        bucket_mb=5e-4 if course.small_buckets else None,
        **options,
    )


# ---------------------------------------- a run ----------------------------------------


class Run:
    """One course, taken on this rank."""

    def __init__(self, course: Course, delays: Delays | None, directory: Path, savers: Any) -> None:
        share_memory_from(course.lent_from)
        self.course, self.directory, self.savers = course, directory, savers
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = self._model()
        self.looks = delays is None  # at the state that others save while they go on
        if delays is not None:
            self._delay(delays)
        self.module: nn.Module = self.model
        if course.feed != "bare":
            self.module = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.optimizer = _optimizer(self.model, course)
        if course.is_attached:
            self.optimizer.attach(self.module, lazy_gather=course.lazy)
        elif course.feed == "step in backward":
            hook = hook_with_zero_step(allreduce_hook, self.module, self.optimizer)
            self.module.register_comm_hook(None, hook)
        self.norms: list[torch.Tensor] = []

    def _model(self) -> Crossing:
        model = Crossing(self.rank, is_last=self.rank == self.world - 1)
        return model.bfloat16() if self.course.kind == "masters" else model

    def _delay(self, delays: Delays) -> None:
        """Forwards and gradients, too, take other times on every rank."""
        for module in self.model.modules():
            module.register_forward_pre_hook(delays.sleep)
        for param in self.model.parameters():
            param.register_hook(delays.sleep)

    def result(self) -> dict[str, Any]:
        """Train; parameters, state, norms, and the state after two steps if it was saved."""
        found: dict[str, Any] = {"norms": self.norms}
        saving = None
        for step in range(STEPS):
            self._step(step)
            if step == 1 and self.looks:
                found["saved"] = self._full_state()
            elif step == 1 and self.course.saves:
                form = {"optim": self.optimizer.sharded(self.model)}
                group = {"process_group": self.savers}
                saving = dcp.async_save(form, checkpoint_id=self.directory, **group)
        self.optimizer.wait()
        found["parameters"] = copy.deepcopy(self.model.state_dict())
        found["state"] = self._full_state()
        if saving is not None:
            saving.result()
            found["saved"] = self._state_read_back()
        if self.course.is_attached:
            self.optimizer.detach()
        return found

    def _step(self, step: int) -> None:
        course = self.course
        if course.accumulates:
            no_sync = self.optimizer if course.is_attached else self.module
            with no_sync.no_sync():
                self._backward(step, 0)
        self._backward(step, 1)
        if course.clips:
            self.norms.append(self.optimizer.clip_grad_norm_(0.5))
        self.optimizer.step()  # of `step in backward`, nothing
        self.optimizer.zero_grad()

    def _backward(self, *seeds: int) -> None:
        seed = sum(s * 101**i for i, s in enumerate((self.rank, *seeds)))
        batch = torch.randn(6, 11, generator=torch.Generator().manual_seed(seed))
        self.module(batch).backward()

    def _full_state(self) -> dict[str, Any]:
        to = self.world - 1
        self.optimizer.consolidate_state_dict(to)
        return self.optimizer.state_dict()["state"] if self.rank == to else {}

    def _state_read_back(self) -> dict[str, Any]:
        """What a new optimizer finds in the checkpoint."""
        kept, model = self.optimizer, self._model()
        self.optimizer = _optimizer(model, self.course)
        self.optimizer.load(self.directory, model)
        found, self.optimizer = self._full_state(), kept
        return found


def first_difference(found: Any, expected: Any, path: str = "") -> str | None:
    """Where two results differ, bit for bit."""
    if type(found) is not type(expected):
        return f"{path}: {type(found)} and {type(expected)}"
    if isinstance(expected, torch.Tensor):
        return None if have_equal_bits(found, expected) else path
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return f"{path}: {sorted(found)} and {sorted(expected)}"
        pairs = ((f"{path}[{key!r}]", found[key], expected[key]) for key in expected)
    elif isinstance(expected, list):
        if len(found) != len(expected):
            return path
        pairs = (
            (f"{path}[{i}]", f, e) for i, (f, e) in enumerate(zip(found, expected, strict=True))
        )
    else:
        return None if found == expected else path
    return next((d for name, f, e in pairs if (d := first_difference(f, e, name))), None)
