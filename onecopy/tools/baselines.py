"""The same training by DDP, torch's class, ZeRO-2 and ZeRO-3.

Communication is counted per step, in bytes and collectives. Its time is that of the alpha-beta
model: a latency for each of the log2(W) rounds of a collective, and the bytes at full bandwidth.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onecopy.planning.sizes import MemoryReport
from onecopy.tools.model_spec import ModelSpec

DDP_BUCKET = 25 * 2**20


@dataclass(frozen=True, slots=True)
class CommPart:
    """All collectives of one kind in a step."""

    name: str
    numbytes: int  # that the busiest rank sends, or receives if that is more
    collectives: int
    rounds: int = 1  # each of log2(W) latencies

    def seconds(self, world_size: int, bandwidth: float, latency: float) -> float:
        waits = self.collectives * self.rounds * math.ceil(math.log2(max(world_size, 1)))
        return waits * latency + self.numbytes / bandwidth


@dataclass(frozen=True, slots=True)
class CommModel:
    """What a step sends."""

    world_size: int
    parts: tuple[CommPart, ...] = ()

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
        return sum(each.seconds(self.world_size, bandwidth, latency) for each in self.parts)


def evenly(name: str, numbytes: int, world_size: int, rounds: int = 1) -> CommPart:
    """Equal shares in buckets of DDP's size: a reduce-scatter or an all-gather."""
    moved = rounds * numbytes * (world_size - 1) // world_size
    buckets = math.ceil(numbytes / DDP_BUCKET) if world_size > 1 else 0
    return CommPart(name, moved, buckets, rounds)


def all_reduce(numbytes: int, world_size: int) -> CommPart:
    """DDP's, of all gradients: a reduce-scatter and an all-gather."""
    return evenly("all-reduce", numbytes, world_size, rounds=2)


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
    """Another way to train the same, on its fullest rank."""

    name: str
    memory: MemoryReport
    wire: CommModel
    remark: str = ""


def baselines_of(spec: ModelSpec, gradient_bytes: int, world_size: int) -> tuple[Baseline, ...]:
    state: Counter[str] = Counter()
    for param in spec.trained:
        state.update(spec.state_of(param))
    masters = sum(spec.master_bytes(i) * spec.params[i].tensor.numel() for i in spec.trained)
    parameters = sum(param.tensor.nbytes for param in spec.params)
    whole = MemoryReport(parameters, gradient_bytes, state, masters, staging=0, ddp_buckets=0)
    wire = CommModel(world_size, (all_reduce(gradient_bytes, world_size),))
    torchs = [_torch_class(spec, whole, world_size)] if len(spec.classes) == 1 else []
    return (Baseline("DDP", whole, wire), *torchs, *_zero_stages(spec, whole, world_size))


def _zero_stages(spec: ModelSpec, whole: MemoryReport, world: int) -> tuple[Baseline, Baseline]:
    def share(count: int) -> int:
        return -(-count // world)

    second = replace(
        whole,
        gradients=share(whole.gradients),
        state={key: share(count) for key, count in whole.state.items()},
        master_copies=share(whole.master_copies),
    )
    third = replace(second, parameters=share(whole.parameters))  # the frozen ones, too
    trained = sum(spec.params[i].tensor.nbytes for i in spec.trained)
    reduce = evenly("reduce-scatter", whole.gradients, world)
    updated = evenly("all-gather", trained, world)
    everything = evenly("all-gather", whole.parameters, world)
    return (
        Baseline("ZeRO-2", second, CommModel(world, (reduce, updated))),
        Baseline("ZeRO-3", third, CommModel(world, (reduce, everything, everything))),
    )


def _torch_class(spec: ModelSpec, whole: MemoryReport, world: int) -> Baseline:
    owners = torch_owners(spec, world)
    state: list[Counter[str]] = [Counter() for _ in range(world)]
    sent = [0] * world
    trained = frozenset(spec.trained)
    for param, owner in enumerate(owners):
        sent[owner] += spec.params[param].tensor.nbytes
        if param in trained:
            state[owner].update(spec.state_of(param, with_master=False))
    broadcasts = from_owners("broadcasts", sent, len(owners), direct=False)
    wire = CommModel(world, (all_reduce(whole.gradients, world), broadcasts))
    memory = replace(
        whole, state=max(state, key=lambda of_rank: sum(of_rank.values())), master_copies=0
    )
    remark = "keeps no master copies, and state in the dtype of the parameters"
    return Baseline("torch's class", memory, wire, remark if whole.master_copies else "")


def torch_owners(spec: ModelSpec, world: int) -> list[int]:
    """The rank that torch's class gives each parameter to."""
    owners = [0] * len(spec.params)
    heap = [(0, rank) for rank in range(world)]
    for group in range(len(spec.templates)):
        members = [i for i, param in enumerate(spec.params) if param.group == group]
        for param in sorted(members, key=lambda i: -spec.params[i].tensor.numel()):
            load, owners[param] = heap[0]
            heapq.heapreplace(heap, (load + spec.params[param].tensor.numel(), owners[param]))
    return owners


def torch_loads(spec: ModelSpec, world: int) -> list[int]:
    """Elements that each rank updates under torch's partition, which deals out frozen ones too."""
    loads = [0] * world
    owners = torch_owners(spec, world)
    for param in spec.trained:
        loads[owners[param]] += spec.params[param].tensor.numel()
    return loads
