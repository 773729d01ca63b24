"""A table of what one rank may do differently, and the judge of what came of it.

A row is a script that every rank runs; `rank.is_odd` tells the one that does it differently. The
script ends in an error on every rank, and the row says when, and in which words.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import World
from inside import is_attached, private_groups
from torch.nn import Linear, Module, Parameter, Sequential
from torch.optim import SGD
from torch.torch_version import TorchVersion

from onecopy import RanksDisagree, ZeroRedundancyOptimizer

PATIENCE = 60.0  # seconds, the timeout of groups in which a difference is found at once
SOON = 30.0  # well before that, however busy the machine is
IMPATIENCE = 1.5  # seconds, the timeout where somebody is waited for in vain
MESSAGE_PATIENCE = 4.0  # the same of messages from one rank to another, also before that


# Public since torch 2.14, which warns of the old name.
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
FOLLOWS_SET_TIMEOUT = TorchVersion(torch.__version__) >= "2.7"  # gloo's collectives do


class Found(enum.Enum):
    AT_ONCE = "at once"
    IN_TIME = "within the timeout"
    NEVER = "not at all"


@dataclass(frozen=True)
class Row:
    """What one rank does differently, and how all must learn of it.

    `says` are words of the error on all ranks; ODD and OTHERS in them stand for the names of ranks.
    Where the odd rank raises an exception of its own, which the others are told of or wait in vain
    for, `own` are words of that.
    """

    name: str
    script: Callable[[Rank], Any]
    says: tuple[str, ...]
    own: str | None = None
    found: Found = Found.AT_ONCE
    asked: Found = Found.AT_ONCE  # the same with ONECOPY_CHECK=step
    is_about_messages: bool = False  # whose timeout is that with which the group was made
    says_then: tuple[str, ...] = ()  # by all ranks, if that is something else


@dataclass
class Rank:
    """What a script knows of the rank on which it runs."""

    world: World
    odd: int
    row: int
    directory: Path
    group: Any = None  # None: the default one
    checks: bool = False  # ONECOPY_CHECK=step
    built: list[ZeroRedundancyOptimizer] = field(default_factory=list)

    @property
    def is_odd(self) -> bool:
        return self.world.rank == self.odd

    def either(self, usual: Any, odd: Any) -> Any:
        return odd if self.is_odd else usual

    def build(self, params: Any = None, cls: Any = SGD, **options: Any) -> ZeroRedundancyOptimizer:
        params = [vector(10), vector(7)] if params is None else params
        options = {"lr": 0.1, "process_group": self.group, **options}
        self.built.append(ZeroRedundancyOptimizer(params, cls, **options))
        return self.built[-1]

    def trained(self, **options: Any) -> ZeroRedundancyOptimizer:
        """An optimizer that has taken a step, drop-in."""
        optimizer = self.build(**options)
        stepped(optimizer)
        return optimizer

    def attached(self, **options: Any) -> tuple[ZeroRedundancyOptimizer, Module]:
        """One that has taken a step, attached."""
        module = small_model()
        optimizer = self.build(module.parameters(), **options)
        optimizer.attach(module)
        backward(module, self.world.rank)
        optimizer.step()
        return optimizer, module

    def part(self) -> None:
        """From here on the ranks do different things. All have come here, so that nobody is late
        for want of a processor, and the group waits no longer than it must."""
        dist.monitored_barrier(timeout=timedelta(seconds=PATIENCE))
        if self.group is not None:
            for group in (self.group, private_groups()[self.group]):
                set_timeout(timedelta(seconds=IMPATIENCE), group)

    def stay_away(self) -> None:
        """Until the others have had their errors."""
        for rank in range(self.world.size):
            if rank != self.world.rank:
                self.outcome_of(rank)

    def has_ended(self, outcome: Outcome) -> None:
        """Through the store, which no failed collective takes along."""
        said = json.dumps([outcome.kind, outcome.text, outcome.seconds])
        _store().set(f"row {self.row}, rank {self.world.rank}", said)

    def outcome_of(self, rank: int) -> Outcome:
        key = f"row {self.row}, rank {rank}"
        _store().wait([key], timedelta(seconds=2 * PATIENCE))
        return Outcome(*json.loads(_store().get(key)))


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def vector(length: int = 10, **options: Any) -> Parameter:
    return Parameter(torch.ones(length), **options)


def small_model() -> Module:
    torch.manual_seed(0)
    return Sequential(Linear(6, 5), Linear(5, 3))


def backward(module: Module, seed: int = 0, scale: Callable[[Any], Any] = lambda x: x) -> None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    scale(module(inputs).square().sum()).backward()


def stepped(optimizer: ZeroRedundancyOptimizer, times: int = 1) -> None:
    for _ in range(times):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    param.grad = torch.ones_like(param)
        optimizer.step()


# ------------------------------------------------------------------ running and judging


@dataclass(frozen=True)
class Outcome:
    """What a script ended in on one rank."""

    kind: str
    text: str
    seconds: float


def outcomes(row: Row, rank: Rank) -> list[Outcome]:
    """Run a script on all ranks; what it ended in on each of them."""
    os.environ.pop("ONECOPY_CHECK", None)
    if rank.checks:
        os.environ["ONECOPY_CHECK"] = "step"
    error, start = None, time.monotonic()
    try:
        row.script(rank)
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - start
    kind = "nothing"
    if error is not None:
        kind = "RanksDisagree" if isinstance(error, RanksDisagree) else type(error).__name__
    rank.has_ended(Outcome(kind, str(error or ""), seconds))
    everyone = [rank.outcome_of(number) for number in range(rank.world.size)]
    for optimizer in rank.built:
        if is_attached(optimizer):
            _let_go(optimizer)
    return everyone


def _let_go(optimizer: ZeroRedundancyOptimizer) -> None:
    """No row leaves hooks behind, whatever became of its group."""
    with contextlib.suppress(RuntimeError):
        optimizer.detach()


def complaints(row: Row, found: Found, rank: Rank, ended: Sequence[Outcome]) -> list[str]:
    """What is wrong with the outcomes of a row."""
    says, own = row.says, row.own
    if rank.checks and row.says_then:
        says, own = row.says_then, None
    if found is Found.NEVER:
        return [f"{row.name}: {each}" for each in ended if each.kind != "nothing"]
    others = [each for number, each in enumerate(ended) if number != rank.odd]
    wrong = []
    if own is not None:
        mine = ended[rank.odd]
        if own not in mine.text or mine.kind == "RanksDisagree":
            wrong.append(f"the odd rank should show its own error, {own!r}")
    else:
        others = list(ended)
    if len({(each.kind, each.text) for each in others}) != 1:
        wrong.append("the errors are not the same on all ranks")
    for words in says:
        spelled = words.replace("OTHERS", name_of_others(rank)).replace("ODD", f"rank {rank.odd}")
        if spelled not in others[0].text:
            wrong.append(f"{spelled!r} is not said")
    slowest = max(each.seconds for each in ended)
    if slowest > SOON:
        wrong.append(f"it took {slowest:.1f} s")
    if found is Found.IN_TIME and max(each.seconds for each in others) < IMPATIENCE * 0.9:
        wrong.append("found before the timeout: it belongs to another column")
    return [f"{row.name}: {'; '.join(wrong)}\n{ended}"] if wrong else []


def name_of_others(rank: Rank) -> str:
    others = [r for r in range(rank.world.size) if r != rank.odd]
    if len(others) == 1:
        return f"rank {others[0]}"
    return f"ranks {others[0]}{'-' if others[1] == others[0] + 1 else ', '}{others[1]}"


def judge(
    world: World, rows: Iterable[Row], found: str, directory: Path, checks: bool = False
) -> None:
    """Run rows one after the other, each with another odd rank, and complain of all at once."""
    wrong: list[str] = []
    for number, row in enumerate(rows):
        expected: Found = getattr(row, found)
        group = None
        if expected is Found.IN_TIME:
            is_settable = FOLLOWS_SET_TIMEOUT and not row.is_about_messages
            patience = PATIENCE if is_settable else MESSAGE_PATIENCE
            group = dist.new_group(timeout=timedelta(seconds=patience))
        odd = (number + sum(row.name.encode())) % world.size  # also rank 0, whose view is the base
        rank = Rank(world, odd, number, directory / str(number), group, checks)
        wrong += complaints(row, expected, rank, outcomes(row, rank))
    assert world.rank or not wrong, "\n\n".join(wrong)  # all ranks know the same
