"""One leg of a soak: a job of so many ranks that trains with our optimizer beside its shadow.

A leg starts from nothing or from the checkpoint of the leg before, which may have had another
number of ranks. All ranks draw the same operations (``soak_operations.py``) from the leg's seed;
batches differ on every rank.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from equal_bits import count_of_different_elements, have_equal_bits
from harness import World
from inside import share_memory_from
from soak_checkpoints import BY_DCP, Keeper
from soak_net import CASES, Batch, SoakNet
from soak_shadow import Shadow, average_by_hand, ddp
from torch import nn

from onecopy import ZeroRedundancyOptimizer
from onecopy.pieces import MASTER

# torch gives `differentiable` to groups that are added after a load; DCP does not bring it back.
NOT_OPTIONS = {"params", "param_names", "optimizer_class", "partition", "differentiable"}


class Difference(AssertionError):
    """The job and its shadow are not equal, bit for bit."""


@dataclass(frozen=True)
class Mode:
    """How gradients come to the optimizer."""

    is_attached: bool
    in_ddp: bool
    is_lazy: bool = False

    def __str__(self) -> str:
        feed = "DDP" if self.in_ddp else "bare" if self.is_attached else "by hand"
        return f"{'attached' if self.is_attached else 'drop-in'} {feed}{' lazy' * self.is_lazy}"


MODES = [
    *(Mode(False, in_ddp) for in_ddp in (False, True)),
    *(Mode(True, in_ddp, is_lazy) for in_ddp in (False, True) for is_lazy in (False, True)),
]

# From how many bytes on neighbours lend: always; so that some buckets are lent and others are sent;
# never.
LENT_FROM = (1, 2048, sys.maxsize)


@dataclass(frozen=True)
class Leg:
    """What the ranks of a leg are told. The same leg always does the same."""

    seed: int
    number: int  # in the whole soak
    case: str
    rounds: int  # of an operation and a step
    directory: Path  # of the voyage: here legs leave what the next one needs
    leaves: str  # the way in which it saves
    finds: str | None = None  # that of the leg before; None: there was none
    lent_from: int = 1  # bytes


@dataclass
class Tally:
    """What was done. Legs are added up."""

    steps: int = 0
    modes: Counter[str] = field(default_factory=Counter)  # steps made in each
    operations: Counter[str] = field(default_factory=Counter)
    checkpoints: int = 0
    comparisons: int = 0

    def add(self, other: Tally) -> None:
        self.steps += other.steps
        self.modes += other.modes
        self.operations += other.operations
        self.checkpoints += other.checkpoints
        self.comparisons += other.comparisons


class Job:
    """A model, our optimizer and its mode; and the shadow, to which everything happens too."""

    def __init__(self, world: World, leg: Leg) -> None:
        share_memory_from(leg.lent_from)
        self.world, self.leg, self.case = world, leg, CASES[leg.case]
        self.random = random.Random(f"{leg.seed} {leg.number}")  # the same on all ranks
        self.tally = Tally()
        self.keeper = Keeper(leg.directory, world.rank)
        self.net = SoakNet(self.case.dtype)
        self.mode = Mode(is_attached=False, in_ddp=False)
        self.module: nn.Module = self.net
        self.has_unfrozen = False  # since the last step
        if leg.finds is None:
            self.shadow = Shadow(self.case, self.case.first_groups(self.net))
            self.optimizer = self._built()
        else:
            self._resume(leg.finds)
        self.enter(self.random.choice(MODES))

    def _resume(self, way: str) -> None:
        left = self.keeper.shadow_left_by(self.leg.number - 1)
        self.shadow = Shadow.resumed(self.case, left)
        self.net.grown = self.shadow.net.grown
        self.follow_flags()
        if way in BY_DCP:  # it would leave the state of what is frozen behind
            for name, param in self.net.named_parameters():
                param.requires_grad_(name in left["planned"])
        self.optimizer = self._built()
        self.keeper.load(way, self.keeper.left_by(self.leg.number - 1), self)
        self.follow_flags()
        self.compare()

    def _built(self) -> ZeroRedundancyOptimizer:
        """On the groups of the shadow: all at once, or one after the other."""
        draw = self.random
        first = draw.choice([len(self.shadow.groups), 2])
        optimizer = ZeroRedundancyOptimizer(
            [group.on(self.net) for group in self.shadow.groups[:first]],
            self.case.optimizer_class,
            parameters_as_bucket_view=draw.random() < 0.3,
            bucket_mb=draw.choice([None, 0.003, 0.02]),
            master_dtype=self.case.master_dtype,
            check_every=draw.choice([None, 7]),
            **self.case.options,
        )
        for group in self.shadow.groups[first:]:
            optimizer.add_param_group(group.on(self.net))
        return optimizer

    # ------------------------------------------------------------------ mode

    def leave(self) -> None:
        """Back to drop-in mode without DDP, and without gradients."""
        if self.mode.is_attached:
            self.optimizer.detach()
        self.zero_grad()
        self.mode, self.module = Mode(is_attached=False, in_ddp=False), self.net
        self.shadow.wrap(in_ddp=False)

    def enter(self, mode: Mode) -> None:
        self.mode = mode
        self.module = ddp(self.net) if mode.in_ddp else self.net
        self.shadow.wrap(in_ddp=mode.in_ddp and not mode.is_attached)
        if mode.is_attached:
            self.optimizer.attach(self.module, lazy_gather=mode.is_lazy)

    def enter_again(self) -> None:
        """Wrap anew: a DDP knows only the parameters that were trained when it was made."""
        mode = self.mode
        self.leave()
        self.enter(mode)

    # ------------------------------------------------------------------ training

    def follow_flags(self) -> None:
        """Freeze what the shadow has frozen."""
        for name, param in self.net.named_parameters():
            param.requires_grad_(self.shadow.params[name].requires_grad)

    def zero_grad(self, set_to_none: bool = True, of_module: bool = False) -> None:
        (self.module if of_module else self.optimizer).zero_grad(set_to_none)
        self.shadow.zero_grad(set_to_none)

    def backward(self, micro: int, synced: bool) -> None:
        batch = Batch.drawn(
            self.leg.seed + 1, self.leg.number + 1, self.tally.steps + 1, micro + 1, self.world.rank
        )
        with contextlib.ExitStack() as contexts:
            if not synced and self.mode.is_attached:
                contexts.enter_context(self.optimizer.no_sync())
            elif not synced and self.mode.in_ddp:
                contexts.enter_context(self.module.no_sync())
                contexts.enter_context(self.shadow.module.no_sync())
            self.module(batch.tokens, batch.branches).backward()
            self.shadow.backward(batch)
        if synced and self.mode.is_attached:
            self.shadow.reduce()
        elif self.mode.is_attached:
            self.shadow.accumulate()
        elif synced and not self.mode.in_ddp:
            average_by_hand(self.net)
            self.shadow.average()

    def step(self) -> None:
        self.optimizer.step()
        self.shadow.step()
        self.has_unfrozen = False
        self.tally.steps += 1
        self.tally.modes[str(self.mode)] += 1

    # ------------------------------------------------------------------ comparing

    def compare_parameters(self) -> None:
        self.optimizer.wait()
        for name, param in self.net.named_parameters():
            self.require_equal(param, self.shadow.params[name], name)
            if param.stride() != self.shadow.params[name].stride():
                raise self._difference(f"the strides of {name}")
        self.tally.comparisons += 1

    def compare(self) -> None:
        """Parameters on all ranks, options on all, and the state on one. If one rank finds a
        difference, all raise."""
        found: list[Difference] = []
        with _noting(found):
            self.compare_parameters()
            self._compare_options()
        to = self.random.randrange(self.world.size)
        self.optimizer.consolidate_state_dict(to)
        if self.world.rank == to:
            with _noting(found):
                self._compare_state(self.optimizer.state_dict()["state"])
        anywhere = torch.tensor(len(found))
        dist.all_reduce(anywhere)
        if anywhere:
            raise found[0] if found else Difference("found by another rank")

    def _compare_options(self) -> None:
        for group, theirs in zip(self.optimizer.param_groups, self.shadow.options, strict=True):
            mine = {key: group[key] for key in group.keys() - NOT_OPTIONS}
            plain = {key: theirs[key] for key in theirs.keys() - NOT_OPTIONS}
            if mine != plain:
                raise self._difference(f"options: {mine} and {plain}")

    def _compare_state(self, found: dict[int, dict[str, Any]]) -> None:
        names = [name for group in self.shadow.groups for name in group.names]
        masters = self.shadow.masters
        for number, name in enumerate(names):
            mine, plain = dict(found.get(number, {})), dict(self.shadow.state(name))
            if name in masters and plain:  # a master copy is state of what has been stepped
                plain[MASTER] = masters[name].detach()
            if mine.keys() != plain.keys():
                raise self._difference(f"keys of {name}: {sorted(mine)} and {sorted(plain)}")
            for key, value in plain.items():
                self.require_equal(mine[key], value, f"{key} of {name}")

    def require_equal(self, mine: Any, plain: Any, what: str) -> None:
        if isinstance(mine, torch.Tensor) != isinstance(plain, torch.Tensor):
            raise self._difference(f"{what}: {type(mine)} and {type(plain)}")
        if not isinstance(mine, torch.Tensor):
            if mine != plain:
                raise self._difference(f"{what}: {mine!r} and {plain!r}")
        elif (mine.dtype, mine.shape) != (plain.dtype, plain.shape):
            raise self._difference(
                f"{what}: {mine.dtype} {mine.shape}, {plain.dtype} {plain.shape}"
            )
        elif not have_equal_bits(mine, plain):
            count = count_of_different_elements(mine, plain)
            raise self._difference(f"{what}: {count} of {mine.numel()} elements")

    def _difference(self, what: str) -> Difference:
        place = f"leg {self.leg.number} ({self.leg.case}, {self.mode}), step {self.tally.steps}"
        last = ", ".join(self.keeper.diary[-12:])
        return Difference(f"{what} differ on rank {self.world.rank}; {place}; before it: {last}")


@contextlib.contextmanager
def _noting(found: list[Difference]) -> Iterator[None]:
    try:
        yield
    except Difference as difference:
        found.append(difference)
