"""The same training by DDP, torch's class, ZeRO-2 and ZeRO-3.

Communication is counted per step, in bytes and collectives. Its time is that of the alpha-beta
model: a latency for each of the log2(W) rounds of a collective, and the bytes at full bandwidth.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from onecopy.planning.param_groups import Entry, is_trainable
from onecopy.planning.sizes import MemoryReport

DDP_BUCKET = 25 * 2**20


@dataclass(frozen=True, slots=True)
class CommPart:
    """All collectives of one kind in a step."""

    name: str
    numbytes: int  # that the busiest rank sends, or receives if that is more
    collectives: int
    rounds: int = 1  # each of log2(W) latencies


@dataclass(frozen=True, slots=True)
class CommModel:
    """What a step sends."""

    world_size: int
    parts: tuple[CommPart, ...]

    @property
    def numbytes(self) -> int:
        return sum(each.numbytes for each in self.parts)

    def seconds(self, bandwidth: float, latency: float = 0.0) -> float:
        """Bandwidth in bytes per second, latency in seconds."""
        if bandwidth <= 0 or latency < 0:
            raise ValueError(
                f"expected a positive bandwidth (bytes per second) and a latency in seconds, got "
                f"{bandwidth} and {latency}"
            )
        rounds = sum(each.collectives * each.rounds for each in self.parts)
        waits = rounds * math.ceil(math.log2(self.world_size))
        return waits * latency + self.numbytes / bandwidth


def evenly(name: str, numbytes: int, world_size: int, rounds: int = 1) -> CommPart:
    """Equal shares in buckets of DDP's size: a reduce-scatter or an all-gather. DDP's all-reduce
    is both: two rounds."""
    moved = rounds * numbytes * (world_size - 1) // world_size
    buckets = math.ceil(numbytes / DDP_BUCKET) if world_size > 1 else 0
    return CommPart(name, moved, buckets, rounds)


def from_owners(name: str, owned: Sequence[int], collectives: int, direct: bool) -> CommPart:
    """Every rank receives what the others own (an all-gather), or sends it (a reduce-scatter).
    ``direct``: an owner exchanges its part with each of the W - 1 others; otherwise ranks pass
    parts on, as in a ring."""
    world = len(owned)
    if world == 1:
        return CommPart(name, 0, 0)
    of_others = sum(owned) - min(owned)
    return CommPart(name, max(of_others, max(owned) * (world - 1) * direct), collectives)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A way to train the same, on its fullest rank."""

    name: str
    memory: MemoryReport
    wire: CommModel
    remark: str = ""


def evenly_sharded(whole: MemoryReport, trained: int, world: int) -> tuple[Baseline, ...]:
    """DDP, on which each rank holds ``whole``, and ZeRO-2 and ZeRO-3. ``trained``: bytes of the
    parameters that are not frozen."""

    def share(count: int) -> int:
        return -(-count // world)

    second = replace(
        whole,
        gradients=share(whole.gradients),
        state={key: share(count) for key, count in whole.state.items()},
        master_copies=share(whole.master_copies),
    )
    third = replace(second, parameters=share(whole.parameters))  # the frozen ones, too
    all_reduce = evenly("all-reduce", whole.gradients, world, rounds=2)
    reduce = evenly("reduce-scatter", whole.gradients, world)
    updated = evenly("all-gather", trained, world)
    everything = evenly("all-gather", whole.parameters, world)
    return (
        Baseline("DDP", whole, CommModel(world, (all_reduce,))),
        Baseline("ZeRO-2", second, CommModel(world, (reduce, updated))),
        Baseline("ZeRO-3", third, CommModel(world, (reduce, everything, everything))),
    )


def torch_class(
    entries: Sequence[Entry],
    owners: Sequence[int],
    state_of: Callable[[int], Mapping[str, int]],
    whole: MemoryReport,
    world: int,
) -> Baseline:
    """``state_of``: bytes of a parameter's state without a master copy."""
    state: list[Counter[str]] = [Counter() for _ in range(world)]
    sent = [0] * world
    for index, owner in enumerate(owners):
        sent[owner] += entries[index].param.nbytes
        if is_trainable(entries[index].param):
            state[owner].update(state_of(index))
    all_reduce = evenly("all-reduce", whole.gradients, world, rounds=2)
    broadcasts = from_owners("broadcasts", sent, len(entries), direct=False)
    fullest = max(state, key=lambda of_rank: of_rank.total())
    memory = replace(whole, state=fullest, master_copies=0)
    remark = "keeps no master copies, and state in the dtype of the parameters"
    wire = CommModel(world, (all_reduce, broadcasts))
    return Baseline("torch's class", memory, wire, remark if whole.master_copies else "")


def torch_owners(entries: Sequence[Entry], world: int) -> list[int]:
    """The rank that torch's class gives each parameter to, also the frozen ones."""
    owners = [0] * len(entries)
    heap = [(0, rank) for rank in range(world)]
    sizes = [(entry.group, -entry.param.numel()) for entry in entries]
    for index in sorted(range(len(entries)), key=sizes.__getitem__):
        load, owners[index] = heap[0]
        heapq.heapreplace(heap, (load - sizes[index][1], owners[index]))
    return owners
