"""A model twice: under plain DDP with the unsharded class, and with ours attached to it.

    twins = AttachedTwins(world, Mlp(), AdamW, feed="ddp", lr=0.1)
    twins.train(3)                                  # compares after every step

`feed` says what ours is attached to: a DDP module, or the bare one. With one and two ranks the two
are equal bit for bit. With more the sum over the ranks is taken in another order, and each of the
W - 1 additions of a gradient rounds once: the bound is W times the rounding error of the sum of
the absolute values.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import World
from models import SMALL_BUCKETS, assert_same_on_all_ranks, hooks, seed_of
from test_bit_equality import CASES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onecopy import ZeroRedundancyOptimizer

FEEDS = ("ddp", "module")
EVERY_FEED = pytest.mark.parametrize("hooks", FEEDS)


# The other classes differ from these in nothing that attached mode could touch.
QUICK = {"SGD-momentum", "AdamW", "Adagrad", "Rprop"}
EVERY_CLASS = pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)


class AttachedTwins:
    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        hooks: str,
        *,
        groups: Callable[[nn.Module], Any] = nn.Module.parameters,
        ddp: dict[str, Any] | None = None,
        zero: dict[str, Any] | None = None,
        attach: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.world = world
        self.plain_model, self.model = model, copy.deepcopy(model)
        ddp = ddp or {}
        self.plain_ddp = DistributedDataParallel(self.plain_model, **ddp)
        self.plain = optimizer_class(groups(self.plain_model), **copy.deepcopy(options))
        self.ddp = DistributedDataParallel(self.model, **ddp) if hooks == "ddp" else self.model
        zero = {"bucket_mb": SMALL_BUCKETS, **(zero or {})}
        self.optimizer = ZeroRedundancyOptimizer(
            groups(self.model), optimizer_class, **zero, **options
        )
        self.optimizer.attach(self.ddp, **(attach or {}))
        self.steps = 0

    def batch(self) -> Any:
        self.steps += 1
        return self.model.batch(seed_of(self.world, self.steps))

    def backward(self, synced: bool = True) -> None:
        """Gradients of another batch, for both."""
        batch = self.batch()
        with contextlib.nullcontext() if synced else self.no_sync():
            hooks(self.plain_ddp, batch).backward()
            hooks(self.ddp, batch).backward()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.plain_ddp.no_sync(), self.optimizer.no_sync():
            yield

    def step(self) -> None:
        for optimizer in (self.plain, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: int, **tolerance: float) -> None:
        for _ in range(steps):
            self.backward()
            self.assert_same_gradients(**tolerance)
            self.step()
            self.assert_same(**tolerance)
        assert_same_on_all_ranks(self.model)

    def assert_same_gradients(self, **tolerance: float) -> None:
        for (name, mine), theirs in zip(
            self.model.named_parameters(), self.plain_model.parameters(), strict=True
        ):
            assert mine.grad is None, name
            found = self.optimizer.full_grad(mine)
            if found is None:
                assert theirs.grad is None, name
            else:
                assert found.stride() == mine.stride(), name
                self._assert_close(found, theirs.grad, name, tolerance)

    def assert_same(self, **tolerance: float) -> None:
        self.optimizer.wait()
        for (name, mine), theirs in zip(
            self.model.named_parameters(), self.plain_model.parameters(), strict=True
        ):
            self._assert_close(mine, theirs, name, tolerance)

    def _assert_close(
        self, mine: torch.Tensor, theirs: Any, name: str, tolerance: dict[str, float]
    ) -> None:
        assert theirs is not None, name
        if self.world.size <= 2 and not tolerance:
            assert torch.equal(mine, theirs), name
        else:
            epsilon = torch.finfo(mine.dtype).eps
            default = {"rtol": 100 * epsilon, "atol": 100 * epsilon}
            torch.testing.assert_close(
                mine, theirs, **{**default, **tolerance}, msg=lambda m: f"{name}: {m}"
            )
