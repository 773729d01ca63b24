"""What the same training takes by other means: DDP, torch's class, ZeRO-2 and ZeRO-3.

DDP and the ZeRO stages are formulas, without the buffers that each of them has besides. Torch's
class is its real partition: whole tensors, the largest first, each to the rank that has the fewest
elements so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from onecopy.memory import MemoryReport
from onecopy.subject import Subject
from onecopy.wire import Wire, all_reduce, evenly, from_owners


@dataclass(frozen=True, slots=True)
class Peer:
    """Another way to train the same, on its fullest rank."""

    name: str
    memory: MemoryReport
    wire: Wire
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Totals:
    """Bytes of everything, unsharded."""

    parameters: int  # also those that are frozen
    trained: int
    gradients: int
    state: Mapping[str, int]
    masters: int


def peers_of(subject: Subject, gradient_bytes: int, world_size: int) -> tuple[Peer, ...]:
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
    torchs = [_torchs_class(subject, totals, world_size)] if len(subject.classes) == 1 else []
    return (_ddp(totals, world_size), *torchs, *_zero_stages(totals, world_size))


def _ddp(totals: _Totals, world: int) -> Peer:
    wire = Wire(world, (all_reduce(totals.gradients, world),))
    return Peer("DDP", _memory(totals, totals.gradients, totals.state, totals.masters), wire)


def _zero_stages(totals: _Totals, world: int) -> tuple[Peer, Peer]:
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
        Peer("ZeRO-2", second, Wire(world, (reduce, updated))),
        Peer("ZeRO-3", third, Wire(world, (reduce, everything, everything))),
    )


def _torchs_class(subject: Subject, totals: _Totals, world: int) -> Peer:
    owners = torchs_owners(subject, world)
    state: list[dict[str, int]] = [{} for _ in range(world)]
    sent = [0] * world
    trained = frozenset(subject.trained)
    for param, owner in enumerate(owners):
        sent[owner] += subject.params[param].nbytes
        if param in trained:
            _add(state[owner], subject.state_of(param, with_master=False))
    fullest = max(state, key=lambda of_rank: sum(of_rank.values()))
    broadcasts = from_owners("broadcasts", sent, len(owners), direct=False)
    wire = Wire(world, (all_reduce(totals.gradients, world), broadcasts))
    note = "keeps no master copies, and state in the dtype of the parameters"
    note = note if totals.masters else ""
    return Peer("torch's class", _memory(totals, totals.gradients, fullest, 0), wire, note)


def torchs_owners(subject: Subject, world: int) -> list[int]:
    """The rank that torch's class gives each parameter to."""
    owners = [0] * len(subject.params)
    heap = [(0, rank) for rank in range(world)]
    for group in range(len(subject.makers)):
        members = [i for i, param in enumerate(subject.params) if param.group == group]
        for param in sorted(members, key=lambda i: -subject.params[i].numel):
            load, owners[param] = heap[0]
            heapq.heapreplace(heap, (load + subject.params[param].numel, owners[param]))
    return owners


def torchs_loads(subject: Subject, world: int) -> list[int]:
    """Elements that every rank updates under torch's partition, which counts frozen ones, too."""
    loads = [0] * world
    owners = torchs_owners(subject, world)
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
