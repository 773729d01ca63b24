"""What a training takes of every rank, before the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.planning.layout import is_dense
from onecopy.planning.param_groups import forces_c10d, grad_dtype, gradient_dtype
from onecopy.planning.plan import Plan
from onecopy.planning.sizes import (
    Counts,
    GatherStaging,
    Links,
    MemoryReport,
    ReduceStaging,
    count_elements,
    imbalance,
    slot_elements,
)
from onecopy.planning.text import plural
from onecopy.planning.traits import Kind, StateBytes
from onecopy.tools.baselines import (
    Baseline,
    CommModel,
    CommPart,
    all_reduce,
    baselines_of,
    from_owners,
    torch_loads,
)
from onecopy.tools.model_spec import ModelSpec
from onecopy.version import __version__


def part_in_words(name: str) -> str:
    """A part of a memory report.

    >>> part_in_words("master_copies"), part_in_words("state/exp_avg")
    ('master copies', 'state: exp_avg')
    """
    return {"ddp_buckets": "DDP's buckets"}.get(name) or name.replace("_copies", " copies").replace(
        "state/", "state: "
    )


def ranks_in_words(ranges: Sequence[tuple[int, int]], world_size: int) -> str:
    """The ranks in ranges (first, last).

    >>> ranks_in_words([(0, 3), (5, 5)], 8), ranks_in_words([(0, 7)], 8)
    ('0-3, 5', 'all')
    """
    if world_size > 1 and list(ranges) == [(0, world_size - 1)]:
        return "all"
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True, slots=True)
class Setting:
    """How the optimizer is run; the names are those of its own arguments."""

    attached: bool = False
    under_ddp: bool = False  # attached to a DDP module, which keeps its buckets
    lazy_gather: bool = False
    reduce_dtype: torch.dtype | None = None
    parameters_as_bucket_view: bool = False
    backend: str = "nccl"
    no_sync: bool = False  # gradients are accumulated inside no_sync()

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        for name in ("under_ddp", "lazy_gather", "reduce_dtype", "no_sync"):
            if getattr(self, name) and not self.attached:
                raise ValueError(f"{name} means something in attached mode only: attached=True")

    @property
    def is_native(self) -> bool:
        """Whether collectives of the backend are used, instead of messages and shared memory."""
        return self.backend != "gloo" or forces_c10d(os.environ)


class Estimate:
    """Bytes on every rank, on the wire, and what others would take. ``print`` shows a table."""

    def __init__(self, subject: ModelSpec, plan: Plan, setting: Setting) -> None:
        self.subject = subject
        self.plan = plan
        self.setting = setting
        self.world_size = plan.world_size

    # ------------------------------------------------------------------ memory

    def on(self, rank: int) -> MemoryReport:
        """What one rank holds after a step, or with ``no_sync`` before the backward that averages:
        the fields are those of ``memory_report()``."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"expected a rank from 0 to {self.world_size - 1}, got {rank}")
        gradients, staging = self._gradient_bytes, self._gather_staging.on(rank)
        if self.setting.attached:
            gradients = sum(held[rank] for held in self._held_gradients)
            gradients += self._accumulated_bytes if self.setting.no_sync else 0
            staging += self._reduce_staging.on(rank)
        return MemoryReport(
            parameters=self._parameter_bytes,
            gradients=gradients,
            state={key: of[rank] for key, of in sorted(self._state.items()) if of[rank]},
            master_copies=self._masters[rank],
            staging=staging,
            ddp_buckets=self._trained_bytes if self.setting.under_ddp else 0,
        )

    @cached_property
    def fullest_rank(self) -> int:
        """The rank that holds most; the first of them."""
        return max(range(self.world_size), key=lambda rank: (self.on(rank).total, -rank))

    @cached_property
    def fullest(self) -> MemoryReport:
        return self.on(self.fullest_rank)

    @cached_property
    def loads(self) -> list[int]:
        """Elements that every rank owns and updates."""
        return self._tally.loads(self.world_size)

    @cached_property
    def shards(self) -> list[int]:
        """In how many pieces that is, by rank."""
        counts = self._tally.shards.values()
        return [sum(of[rank] for of in counts) for rank in range(self.world_size)]

    @property
    def imbalance(self) -> float:
        """Elements on the fullest rank, relative to an even share."""
        return imbalance(self.loads)

    @cached_property
    def torchs_imbalance(self) -> float:
        """The same for the partition of torch's class."""
        return imbalance(torch_loads(self.subject, self.world_size))

    @cached_property
    def _tally(self) -> Counts:
        def label(param: int) -> tuple[StateBytes | None, int, int]:
            subject = self.subject
            recipe = subject.recipe(param) if param in self._cut_streams else None
            return recipe, subject.master_bytes(param), subject.params[param].dtype.itemsize

        return count_elements(self.plan, label)

    @cached_property
    def _cut_streams(self) -> frozenset[int]:
        """The parameters in elementwise streams."""
        streams = (s for s in self.plan.streams if s.kind is Kind.ELEMENTWISE)
        return frozenset(param for stream in streams for param in stream.params)

    @cached_property
    def _state(self) -> dict[str, list[int]]:
        """Bytes by key and rank."""
        found: dict[str, list[int]] = {}

        def add(key: str, rank: int, count: int) -> None:
            found.setdefault(key, [0] * self.world_size)[rank] += count

        for label, elements in self._tally.elements.items():
            assert isinstance(label, tuple)
            if label[0] is not None:
                shards = self._tally.shards[label]
                for rank in range(self.world_size):
                    for key, count in label[0].of(elements[rank], shards[rank]).items():
                        add(key, rank, count)
        for stream in self.plan.streams:
            for param, owner in zip(stream.params, stream.owners, strict=False):
                for key, count in self.subject.state_of(param).items():
                    add(key, owner, count)
        return found

    @cached_property
    def _masters(self) -> list[int]:
        return self._owned(lambda label: label[1])

    @cached_property
    def _owned_bytes(self) -> list[int]:
        """Bytes of the parameters that each rank owns."""
        return self._owned(lambda label: label[2])

    def _owned(self, itemsize: Any) -> list[int]:
        sizes = [(itemsize(label), of) for label, of in self._tally.elements.items()]
        return [sum(size * of[rank] for size, of in sizes) for rank in range(self.world_size)]

    @cached_property
    def _parameter_bytes(self) -> int:
        return sum(param.nbytes for param in self.subject.params)

    @cached_property
    def _trained_bytes(self) -> int:
        return sum(self.subject.params[param].nbytes for param in self.subject.trained)

    @cached_property
    def _gradient_bytes(self) -> int:
        """Of all gradients, as backward leaves them."""
        subject = self.subject
        return sum(
            subject.params[i].numel * grad_dtype(subject.tensor(i)).itemsize
            for i in subject.trained
        )

    @cached_property
    def _accumulated_bytes(self) -> int:
        """Of all gradients inside ``no_sync()``, in the dtype of the master copies if there are."""
        subject = self.subject
        dtypes = {
            i: gradient_dtype(subject.tensor(i), subject.master_dtype) for i in subject.trained
        }
        return sum(subject.params[i].numel * dtype.itemsize for i, dtype in dtypes.items())

    @cached_property
    def _held_gradients(self) -> list[list[int]]:
        """In attached mode: bytes by stream and rank."""
        found = []
        for stream, slots in enumerate(slot_elements(self.plan)):
            itemsize = self._held_in(stream).itemsize
            found.append([count * itemsize for count in slots])
        return found

    def _held_in(self, stream: int) -> torch.dtype:
        param = self.subject.tensor(self.plan.streams[stream].params[0])
        return gradient_dtype(param, self.subject.master_dtype)

    def _wire_dtype(self, stream: int) -> torch.dtype:
        param = self.subject.tensor(self.plan.streams[stream].params[0])
        given = self.setting.reduce_dtype if param.is_floating_point() else None
        return given or grad_dtype(param)

    def _lends_anew(self, stream: int) -> bool:
        setting, param = self.setting, self.subject.tensor(self.plan.streams[stream].params[0])
        is_eager = setting.attached and not setting.lazy_gather
        return is_eager and self._wire_dtype(stream) == param.dtype

    @cached_property
    def _ways(self) -> Links:
        return Links(
            native=self.setting.is_native,
            one_host=not self.setting.is_native and self.subject.on_cpu,
            on_cpu=self.subject.on_cpu,
            in_place=self.setting.parameters_as_bucket_view,
            lazily=self.setting.lazy_gather,
            lends_anew=self._lends_anew,
            is_dense=lambda param: is_dense(self.subject.tensor(param)),
        )

    @cached_property
    def _gather_staging(self) -> GatherStaging:
        return GatherStaging(self.plan, self._ways)

    @cached_property
    def _reduce_staging(self) -> ReduceStaging:
        return ReduceStaging(self.plan, self._ways, self._wire_dtype, self._held_in)

    # ------------------------------------------------------------------ wire and peers

    @cached_property
    def wire(self) -> CommModel:
        """What travels in a step."""
        direct = not self.setting.is_native
        gather = from_owners("all-gather", self._owned_bytes, len(self.plan.buckets), direct)
        return CommModel(self.world_size, (self._reduction, gather))

    @property
    def _reduction(self) -> CommPart:
        if not self.setting.attached:
            return all_reduce(self._gradient_bytes, self.world_size)
        slots = slot_elements(self.plan)
        sizes = [self._wire_dtype(stream).itemsize for stream in range(len(slots))]
        owned = [
            sum(size * of[rank] for size, of in zip(sizes, slots, strict=True))
            for rank in range(self.world_size)
        ]
        return from_owners("reduce-scatter", owned, len(self.plan.buckets), direct=True)

    @cached_property
    def peers(self) -> tuple[Baseline, ...]:
        """DDP, torch's class (unless there are several optimizer classes), ZeRO-2 and ZeRO-3."""
        return baselines_of(self.subject, self._gradient_bytes, self.world_size)

    # ------------------------------------------------------------------ telling

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fullest rank, and beside it the peers."""
        return {
            "world_size": self.world_size,
            "mode": "attached" if self.setting.attached else "drop-in",
            "backend": self.setting.backend,
            "elements": sum(param.numel for param in self.subject.params),
            "trained_elements": sum(self.loads),
            "fullest_rank": self.fullest_rank,
            "memory": {**self.fullest.as_dict(), "total": self.fullest.total},
            "wire": {each.name: each.numbytes for each in self.wire.parts},
            "imbalance": self.imbalance,
            "torchs_imbalance": self.torchs_imbalance,
            "peers": {
                peer.name: {
                    "memory": {**peer.memory.as_dict(), "total": peer.memory.total},
                    "wire": {each.name: each.numbytes for each in peer.wire.parts},
                }
                for peer in self.peers
            },
        }

    def __str__(self) -> str:
        return str(self.fullest)


def estimate(
    model_or_shapes: Any,
    optimizer_class: type[Optimizer],
    world_size: int,
    *,
    attached: bool = False,
    under_ddp: bool = False,
    lazy_gather: bool = False,
    reduce_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    partition: str = "auto",
    bucket_mb: float | None = None,
    master_dtype: torch.dtype | None = None,
    parameters_as_bucket_view: bool = False,
    backend: str = "nccl",
    no_sync: bool = False,
    **defaults: Any,
) -> Estimate:
    """What training takes on each of ``world_size`` ranks, without building or running anything.

    Args:
        model_or_shapes: a module (on the meta device, if it is large), names with shapes, a list of
            shapes, or what an optimizer accepts: parameters or groups.
        optimizer_class: the class to run. It takes a step on small tensors or on such without
            memory, so that its state is known whatever class it is.
        world_size: the number of ranks.
        attached: ``optimizer.attach(module)`` is used; ``under_ddp``: on a DDP module.
        dtype: train floating-point parameters in this dtype instead of their own.
        backend: ``"nccl"`` or ``"gloo"``: how buckets travel, and what staging that takes. With
            gloo the ranks are taken to be on one host, and parameters on the meta device or mere
            shapes to be on the CPU; if ``ONECOPY_COMM=c10d`` is set here, they use gloo's
            collectives.
        no_sync: attached, gradients are accumulated inside ``no_sync()``: count them too.
        **defaults: options of ``optimizer_class``.

    All else is as for :class:`ZeroRedundancyOptimizer` and its ``attach``.

    >>> found = estimate({"weight": (1000, 1000)}, torch.optim.AdamW, 8, backend="gloo")
    >>> found.fullest.state
    {'exp_avg': 500000, 'exp_avg_sq': 500000, 'step': 16}
    """
    setting = Setting(
        *(attached, under_ddp, lazy_gather, reduce_dtype, parameters_as_bucket_view, backend),
        no_sync=no_sync,
    )
    subject = ModelSpec.of(
        model_or_shapes,
        optimizer_class,
        dtype=dtype,
        partition=partition,
        master_dtype=master_dtype,
        defaults=defaults,
    )
    return Estimate(subject, subject.plan(world_size, bucket_mb), setting)


# More pieces than this are not listed: nobody reads them, and a billion would fill a disk.
LISTED_PIECES = 20_000

Ranges = tuple[tuple[int, int], ...]  # of ranks: first and last


@dataclass(frozen=True, slots=True)
class RankRow:
    """Neighbouring ranks that own equally much."""

    first: int
    last: int
    elements: int  # of each of them
    shards: int
    total: int  # bytes of everything that it holds

    @property
    def ranks(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class ParamRow:
    """A planned parameter, and who owns it."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    numel: int
    nbytes: int
    owners: Ranges
    buckets: int


def rank_rows(estimate: Estimate) -> list[RankRow]:
    shards = estimate.shards
    totals = [estimate.on(rank).total for rank in range(estimate.world_size)]
    alike = groupby(
        range(estimate.world_size), key=lambda r: (estimate.loads[r], shards[r], totals[r])
    )
    found = []
    for numbers, ranks in alike:
        members = list(ranks)
        found.append(RankRow(members[0], members[-1], *numbers))
    return found


def param_rows(estimate: Estimate) -> list[ParamRow]:
    """The planned parameters, in the order of the model."""
    plan = estimate.plan
    owners = owners_of(plan)
    kinds = {param: stream.kind for stream in plan.streams for param in stream.params}
    rows = []
    for index in sorted(plan.params):
        param = estimate.subject.params[index]
        ranges, buckets = owners[index]
        dtype = str(param.dtype).removeprefix("torch.")
        rows.append(
            ParamRow(
                *(index, param.name, param.shape, dtype, kinds[index]),
                *(param.numel, param.nbytes, ranges, buckets),
            )
        )
    return rows


def owners_of(plan: Plan) -> dict[int, tuple[Ranges, int]]:
    """For each parameter the ranks that own some of it, and in how many buckets it lies."""
    ranges: dict[int, set[tuple[int, int]]] = {}
    buckets: dict[int, int] = {}
    for stream in plan.streams:
        for param, owner in zip(stream.params, stream.owners, strict=False):
            ranges[param], buckets[param] = {(owner, owner)}, 1
    for number, bucket in enumerate(plan.buckets):
        if plan.streams[bucket.stream].kind is Kind.ELEMENTWISE:
            for segment in plan.segments(number):
                last = segment.offset + segment.stop - segment.start - 1
                run = plan.rank_at(number, segment.offset), plan.rank_at(number, last)
                ranges.setdefault(segment.param, set()).add(run)
                buckets[segment.param] = buckets.get(segment.param, 0) + 1
    return {param: (_merged(runs), buckets[param]) for param, runs in ranges.items()}


def _merged(runs: set[tuple[int, int]]) -> Ranges:
    """Ranges that touch, as one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def count_pieces(estimate: Estimate) -> int:
    return sum(estimate.shards)


def as_json(estimate: Estimate, model: str) -> dict[str, Any]:
    """All of a plan, for other programs; pieces only if there are not too many."""
    plan = estimate.plan
    listed = count_pieces(estimate) <= LISTED_PIECES
    return {
        "onecopy": __version__,
        "model": model,
        "bucket_bytes": plan.bucket_bytes,
        **estimate.as_dict(),
        "ranks": [
            {
                "ranks": [row.first, row.last],
                "elements": row.elements,
                "pieces": row.shards,
                "total_bytes": row.total,
            }
            for row in rank_rows(estimate)
        ],
        "parameters": [
            {
                "name": row.name,
                "shape": list(row.shape),
                "dtype": row.dtype,
                "kind": row.kind.value,
                "elements": row.numel,
                "bytes": row.nbytes,
                "owners": [list(run) for run in row.owners],
                "buckets": row.buckets,
            }
            for row in param_rows(estimate)
        ],
        "buckets": len(plan.buckets),
        "pieces": _shards(estimate) if listed else None,
    }


def _shards(estimate: Estimate) -> list[dict[str, Any]]:
    return [
        {
            "rank": shard.rank,
            "parameter": estimate.subject.params[shard.param].name,
            "start": shard.start,
            "stop": shard.stop,
            "bucket": shard.bucket,
        }
        for rank in range(estimate.world_size)
        for shard in estimate.plan.shards(rank)
    ]


def training_in_words(estimate: Estimate) -> str:
    """What is trained, and how."""
    subject = estimate.subject
    dtypes = dict.fromkeys(str(param.dtype).removeprefix("torch.") for param in subject.params)
    frozen = len(subject.params) - len(subject.trained)
    kinds = [*dtypes, *([f"{frozen} of them frozen"] if frozen else [])]
    words = [
        f"{sum(param.numel for param in subject.params):,} parameters in "
        f"{plural(len(subject.params), 'tensor')} ({', '.join(kinds)})",
        " and ".join(cls.__name__ for cls in subject.classes),
    ]
    if any(subject.master_bytes(i) for i in subject.trained):
        words[-1] += f" on {str(subject.master_dtype).removeprefix('torch.')} master copies"
    words.append(_mode(estimate))
    words.append(estimate.setting.backend)
    return ", ".join(words)


def notes_on_peers(estimate: Estimate) -> list[str]:
    """What must be known to compare with them."""
    notes = [
        "DDP and the ZeRO stages are formulas, without the buffers that they have besides; DDP "
        "keeps a second copy of all gradients, alone or with an optimizer that is not attached, "
        "unless gradient_as_bucket_view=True."
    ]
    return notes + [f"{peer.name} {peer.note}." for peer in estimate.peers if peer.note]


def _mode(estimate: Estimate) -> str:
    if not estimate.setting.attached:
        return "drop-in"
    return "attached to DDP" if estimate.setting.under_ddp else "attached"
