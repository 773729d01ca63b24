"""The same training by DDP, torch's class, ZeRO-2 and ZeRO-3, and a model of communication."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onecopy.planning.sizes import MemoryReport
from onecopy.tools.model_spec import ModelSpec

DDP_BUCKET = 25 * 2**20


@dataclass(frozen=True, slots=True)
class CommPart:
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
class CommModel:
    """All that travels in a step."""

    world_size: int
    parts: tuple[CommPart, ...] = ()

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


def all_reduce(numbytes: int, world_size: int) -> CommPart:
    """DDP's, of all gradients in its buckets."""
    moved = 2 * numbytes * (world_size - 1) // world_size
    return CommPart("all-reduce", moved, _ddp_buckets(numbytes, world_size), rounds=2)


def evenly(name: str, numbytes: int, world_size: int) -> CommPart:
    """A reduce-scatter or an all-gather of equal shares."""
    moved = numbytes * (world_size - 1) // world_size
    return CommPart(name, moved, _ddp_buckets(numbytes, world_size))


def from_owners(name: str, owned: Iterable[int], collectives: int, direct: bool) -> CommPart:
    """What each rank owns goes to all others (or comes from all others, which is the same
    backwards): everybody gets what others own. ``direct``: the owner itself sends it to everyone,
    and is busy with its own part W - 1 times; otherwise those who have it pass it on."""
    shares = list(owned)
    world = len(shares)
    if world == 1:
        return CommPart(name, 0, 0)
    gets = sum(shares) - min(shares)
    return CommPart(name, max(gets, max(shares) * (world - 1) * direct), collectives)


def _ddp_buckets(numbytes: int, world_size: int) -> int:
    return math.ceil(numbytes / DDP_BUCKET) if world_size > 1 else 0


@dataclass(frozen=True, slots=True)
class Baseline:
    """Another way to train the same, on its fullest rank."""

    name: str
    memory: MemoryReport
    wire: CommModel
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Totals:
    """Bytes of everything, unsharded."""

    parameters: int  # also those that are frozen
    trained: int
    gradients: int
    state: Mapping[str, int]
    masters: int


def baselines_of(subject: ModelSpec, gradient_bytes: int, world_size: int) -> tuple[Baseline, ...]:
    state: dict[str, int] = {}
    for param in subject.trained:
        _add(state, subject.state_of(param))
    totals = _Totals(
        parameters=sum(param.nbytes for param in subject.params),
        trained=sum(subject.params[i].nbytes for i in subject.trained),
        gradients=gradient_bytes,
        state=state,
        masters=sum(subject.master_bytes(i) * subject.params[i].numel for i in subject.trained),
    )
    torchs = [_torch_class(subject, totals, world_size)] if len(subject.classes) == 1 else []
    return (_ddp(totals, world_size), *torchs, *_zero_stages(totals, world_size))


def _ddp(totals: _Totals, world: int) -> Baseline:
    wire = CommModel(world, (all_reduce(totals.gradients, world),))
    return Baseline("DDP", _memory(totals, totals.gradients, totals.state, totals.masters), wire)


def _zero_stages(totals: _Totals, world: int) -> tuple[Baseline, Baseline]:
    gradients, masters = -(-totals.gradients // world), -(-totals.masters // world)
    state = {key: -(-count // world) for key, count in totals.state.items()}
    reduce = evenly("reduce-scatter", totals.gradients, world)
    updated = evenly("all-gather", totals.trained, world)
    everything = evenly("all-gather", totals.parameters, world)  # frozen ones are sharded, too
    second = _memory(totals, gradients, state, masters)
    third = MemoryReport(
        -(-totals.parameters // world), gradients, state, masters, staging=0, ddp_buckets=0
    )
    return (
        Baseline("ZeRO-2", second, CommModel(world, (reduce, updated))),
        Baseline("ZeRO-3", third, CommModel(world, (reduce, everything, everything))),
    )


def _torch_class(subject: ModelSpec, totals: _Totals, world: int) -> Baseline:
    owners = torch_owners(subject, world)
    state: list[dict[str, int]] = [{} for _ in range(world)]
    sent = [0] * world
    trained = frozenset(subject.trained)
    for param, owner in enumerate(owners):
        sent[owner] += subject.params[param].nbytes
        if param in trained:
            _add(state[owner], subject.state_of(param, with_master=False))
    fullest = max(state, key=lambda of_rank: sum(of_rank.values()))
    broadcasts = from_owners("broadcasts", sent, len(owners), direct=False)
    wire = CommModel(world, (all_reduce(totals.gradients, world), broadcasts))
    note = "keeps no master copies, and state in the dtype of the parameters"
    note = note if totals.masters else ""
    return Baseline("torch's class", _memory(totals, totals.gradients, fullest, 0), wire, note)


def torch_owners(subject: ModelSpec, world: int) -> list[int]:
    """The rank that torch's class gives each parameter to."""
    owners = [0] * len(subject.params)
    heap = [(0, rank) for rank in range(world)]
    for group in range(len(subject.makers)):
        members = [i for i, param in enumerate(subject.params) if param.group == group]
        for param in sorted(members, key=lambda i: -subject.params[i].numel):
            load, owners[param] = heap[0]
            heapq.heapreplace(heap, (load + subject.params[param].numel, owners[param]))
    return owners


def torch_loads(subject: ModelSpec, world: int) -> list[int]:
    """Elements that every rank updates under torch's partition, which counts frozen ones, too."""
    loads = [0] * world
    owners = torch_owners(subject, world)
    for param in subject.trained:
        loads[owners[param]] += subject.params[param].numel
    return loads


def _memory(
    totals: _Totals, gradients: int, state: Mapping[str, int], masters: int
) -> MemoryReport:
    return MemoryReport(totals.parameters, gradients, state, masters, staging=0, ddp_buckets=0)


def _add(to: dict[str, int], counts: Mapping[str, int]) -> None:
    for key, count in counts.items():
        to[key] = to.get(key, 0) + count
