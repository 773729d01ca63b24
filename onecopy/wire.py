"""What travels in a step, and how long it would take by the alpha-beta model.

The model knows of a collective only how many bytes the busiest rank sends or receives, and that it
takes about log2(W) rounds, each of which costs one latency. Nothing is hidden behind computation,
and all links are equal. It is a model: good for comparing, not for promising.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

DDP_BUCKET = 25 * 2**20


@dataclass(frozen=True, slots=True)
class WirePart:
    """One kind of collective in a step."""

    name: str
    numbytes: int  # that the busiest rank sends, or receives if that is more
    collectives: int
    rounds: int = 1  # in units of log2(W): an all-reduce is a reduce-scatter and an all-gather

    def seconds(self, world_size: int, bandwidth: float, latency: float) -> float:
        """With so many bytes per second, and seconds until the first of them arrives."""
        waits = self.collectives * self.rounds * math.ceil(math.log2(max(world_size, 1)))
        return waits * latency + self.numbytes / bandwidth


@dataclass(frozen=True, slots=True)
class Wire:
    """All that travels in a step."""

    world_size: int
    parts: tuple[WirePart, ...] = ()

    @property
    def numbytes(self) -> int:
        return sum(each.numbytes for each in self.parts)

    def seconds(self, bandwidth: float, latency: float = 0.0) -> float:
        """By the alpha-beta model: see the module."""
        if bandwidth <= 0 or latency < 0:
            raise ValueError(
                f"expected a positive bandwidth (bytes per second) and a latency in seconds, got "
                f"{bandwidth} and {latency}"
            )
        return sum(each.seconds(self.world_size, bandwidth, latency) for each in self.parts)


def all_reduce(numbytes: int, world_size: int) -> WirePart:
    """DDP's, of all gradients in its buckets."""
    moved = 2 * numbytes * (world_size - 1) // world_size
    return WirePart("all-reduce", moved, _ddp_buckets(numbytes, world_size), rounds=2)


def evenly(name: str, numbytes: int, world_size: int) -> WirePart:
    """A reduce-scatter or an all-gather of equal shares."""
    moved = numbytes * (world_size - 1) // world_size
    return WirePart(name, moved, _ddp_buckets(numbytes, world_size))


def from_owners(name: str, owned: Iterable[int], collectives: int, direct: bool) -> WirePart:
    """What each rank owns goes to all others (or comes from all others, which is the same
    backwards): everybody gets what others own. ``direct``: the owner itself sends it to everyone,
    and is busy with its own part W - 1 times; otherwise those who have it pass it on."""
    shares = list(owned)
    world = len(shares)
    if world == 1:
        return WirePart(name, 0, 0)
    gets = sum(shares) - min(shares)
    return WirePart(name, max(gets, max(shares) * (world - 1) * direct), collectives)


def _ddp_buckets(numbytes: int, world_size: int) -> int:
    return math.ceil(numbytes / DDP_BUCKET) if world_size > 1 else 0
