"""What communication costs: bytes and time of every phase of every bucket, counted as they happen.

::

    reduce 2 |pack, send|.........under way.........|wait|
                         backward goes on meanwhile

A transfer is under way from its launch until somebody has waited for it. What is spent launching
and waiting is exposed: training stands still. The rest is hidden behind computation, at most: a
transfer may have arrived long before anybody asked. On accelerators, where launching and waiting
only give orders to a stream, these times say little; a profiler's trace does (``tracing.py``), in
which the same phases have names.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch

_MB = 10**6


class Phase(Enum):
    """What is done with a bucket; how it is called in a trace."""

    REDUCE = "reduce"  # gradients to their owners
    STEP = "step"  # this rank's part is updated
    GATHER = "gather"  # updated parameters to everybody


def named(phase: Phase, bucket: int) -> torch.profiler.record_function:
    """A range in a profiler's trace."""
    return torch.profiler.record_function(f"onecopy::{phase.value} {bucket}")


def named_wait(phase: Phase, bucket: int) -> torch.profiler.record_function:
    return torch.profiler.record_function(f"onecopy::wait for {phase.value} {bucket}")


@dataclass(slots=True)
class Traffic:
    """What this rank has put on the wire."""

    messages: int = 0
    bytes: int = 0

    def add(self, tensor: torch.Tensor, copies: int = 1) -> None:
        """What is empty is not sent."""
        if not tensor.numel():
            return
        self.messages += copies
        self.bytes += copies * tensor.numel() * tensor.element_size()


@dataclass(slots=True)
class Account:
    """One phase of one bucket, summed over all that happened so far."""

    phase: Phase
    bucket: int
    times: int = 0
    sent: Traffic = field(default_factory=Traffic)
    launching: float = 0.0  # seconds: packing included
    waiting: float = 0.0  # unpacking included
    under_way: float = 0.0  # from launch until somebody had waited
    launched_at: float = 0.0  # the last time

    @property
    def exposed(self) -> float:
        return self.launching + self.waiting


class Ledger:
    """All accounts of a rank."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._accounts: dict[tuple[Phase, int], Account] = {}

    @property
    def accounts(self) -> list[Account]:
        return list(self._accounts.values())

    @contextlib.contextmanager
    def launching(self, phase: Phase, bucket: int) -> Iterator[None]:
        account = self._account(phase, bucket)
        messages, sent = self._traffic.messages, self._traffic.bytes
        start = time.perf_counter()
        with named(phase, bucket):
            yield
        account.launched_at = time.perf_counter()
        account.launching += account.launched_at - start
        account.times += 1
        account.sent.messages += self._traffic.messages - messages
        account.sent.bytes += self._traffic.bytes - sent

    @contextlib.contextmanager
    def waiting(self, phase: Phase, bucket: int) -> Iterator[None]:
        account = self._account(phase, bucket)
        start = time.perf_counter()
        with named_wait(phase, bucket):
            yield
        end = time.perf_counter()
        account.waiting += end - start
        account.under_way += end - account.launched_at

    def _account(self, phase: Phase, bucket: int) -> Account:
        key = phase, bucket
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(phase, bucket)
        return account


@dataclass(frozen=True, slots=True)
class BucketStats:
    """One phase of one bucket on this rank, summed over all steps."""

    phase: str  # "reduce" or "gather"
    bucket: int
    times: int
    messages: int
    bytes: int  # sent
    exposed: float  # seconds that training stood still for it
    hidden: float  # seconds, at most, that it was under way while training went on


@dataclass(frozen=True, slots=True)
class CommStats:
    """What this rank has sent and waited for since the optimizer was built.

    ``print(stats)`` shows a table, ``as_dict()`` is for loggers.
    """

    steps: int
    messages: int  # all of them, small ones and state dicts included
    bytes: int
    buckets: tuple[BucketStats, ...]

    def as_dict(self) -> dict[str, float]:
        """Flat, for TensorBoard and the like: ``{"bytes": ..., "gather/exposed": ...}``."""
        found: dict[str, float] = {
            "steps": self.steps,
            "messages": self.messages,
            "bytes": self.bytes,
        }
        for phase in dict.fromkeys(each.phase for each in self.buckets):
            of_phase = [each for each in self.buckets if each.phase == phase]
            for name in ("times", "messages", "bytes", "exposed", "hidden"):
                found[f"{phase}/{name}"] = sum(getattr(each, name) for each in of_phase)
        return found

    def __str__(self) -> str:
        head = f"{'':14}{'times':>7}{'messages':>10}{'MB sent':>10}{'exposed':>11}{'hidden':>11}"
        lines = [
            f"{f'{each.phase} {each.bucket}':14}{each.times:7}{each.messages:10}"
            f"{each.bytes / _MB:10.2f}{each.exposed * 1e3:8.1f} ms{each.hidden * 1e3:8.1f} ms"
            for each in self.buckets
        ]
        steps = f"{self.steps} steps"
        total = f"{steps:21}{self.messages:10}{self.bytes / _MB:10.2f}"
        return "\n".join([head, *lines, total])


def comm_stats(ledger: Ledger, traffic: Traffic, steps: int) -> CommStats:
    buckets = tuple(
        BucketStats(
            account.phase.value,
            account.bucket,
            account.times,
            account.sent.messages,
            account.sent.bytes,
            account.exposed,
            max(0.0, account.under_way - account.waiting),
        )
        for account in sorted(ledger.accounts, key=lambda a: (a.phase.value, a.bucket))
    )
    return CommStats(steps, traffic.messages, traffic.bytes, buckets)
