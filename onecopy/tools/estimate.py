"""What a training takes of every rank, before the run; who owns what, in rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from onecopy.planning.layout import is_dense
from onecopy.planning.param_groups import forces_c10d, grad_dtype, gradient_dtype
from onecopy.planning.plan import Plan
from onecopy.planning.sizes import (
    Counts,
    Links,
    MemoryReport,
    StagingSizes,
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

Ranges = tuple[tuple[int, int], ...]  # of ranks: first and last


class RankRow(NamedTuple):
    """Adjacent ranks that own equally much."""

    ranks: tuple[int, int]  # first and last
    elements: int  # of each of them
    shards: int
    total_bytes: int  # of everything that it holds


class ParamRow(NamedTuple):
    """A planned parameter, and who owns it."""

    number: int  # among the parameters of the model
    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    elements: int
    bytes: int
    owners: Ranges
    buckets: int


def ranks_in_words(ranges: Sequence[tuple[int, int]], world_size: int = 1) -> str:
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
        """Whether the collectives of the backend are used, not messages and shared memory."""
        return self.backend != "gloo" or forces_c10d(os.environ)


class Estimate:
    """Bytes on every rank, bytes that travel, and the same of other ways to train.

    ``print`` shows the fullest rank as a table.
    """

    def __init__(self, spec: ModelSpec, plan: Plan, setting: Setting) -> None:
        self.spec = spec
        self.plan = plan
        self.setting = setting
        self.world_size = plan.world_size

    def __str__(self) -> str:
        return str(self.fullest)

    def on(self, rank: int) -> MemoryReport:
        """What one rank holds after a step, or with ``no_sync`` before the backward that averages:
        the fields are those of ``memory_report()``."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"expected a rank from 0 to {self.world_size - 1}, got {rank}")
        gradients = self._gradient_bytes
        if self.setting.attached:
            gradients = sum(held[rank] for held in self._held_gradients)
            gradients += self._accumulated_bytes if self.setting.no_sync else 0
        return MemoryReport(
            parameters=self._parameter_bytes,
            gradients=gradients,
            state={key: of[rank] for key, of in sorted(self._state.items()) if of[rank]},
            master_copies=self._masters[rank],
            staging=self._staging.on(rank),
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
        """Elements that each rank owns and updates."""
        return self._counts.loads(self.world_size)

    @cached_property
    def shards(self) -> list[int]:
        """How many shards each rank owns."""
        counts = self._counts.shards.values()
        return [sum(of[rank] for of in counts) for rank in range(self.world_size)]

    @property
    def imbalance(self) -> float:
        """Elements on the fullest rank, relative to an even share."""
        return imbalance(self.loads)

    @cached_property
    def torchs_imbalance(self) -> float:
        """The same for the partition of torch's class."""
        return imbalance(torch_loads(self.spec, self.world_size))

    @cached_property
    def wire(self) -> CommModel:
        """What travels in a step."""
        direct = not self.setting.is_native
        gather = from_owners("all-gather", self._owned_bytes, len(self.plan.buckets), direct)
        return CommModel(self.world_size, (self._gradients_on_the_wire, gather))

    @cached_property
    def peers(self) -> tuple[Baseline, ...]:
        """DDP, torch's class (unless there are several optimizer classes), ZeRO-2 and ZeRO-3."""
        return baselines_of(self.spec, self._gradient_bytes, self.world_size)

    # ------------------------------------------------------------------ in words and rows

    def in_words(self) -> str:
        """What is trained, and how."""
        spec, setting = self.spec, self.setting
        dtypes = dict.fromkeys(_name_of(param.tensor.dtype) for param in spec.params)
        frozen = len(spec.params) - len(spec.trained)
        kinds = [*dtypes, *([f"{frozen} of them frozen"] if frozen else [])]
        classes = " and ".join(cls.__name__ for cls in spec.classes)
        if any(map(spec.master_bytes, spec.trained)):
            classes += f" on {_name_of(spec.master_dtype)} master copies"
        mode = "drop-in"
        if setting.attached:
            mode = "attached to DDP" if setting.under_ddp else "attached"
        return (
            f"{sum(param.tensor.numel() for param in spec.params):,} parameters in "
            f"{plural(len(spec.params), 'tensor')} ({', '.join(kinds)}), {classes}, {mode}, "
            f"{setting.backend}"
        )

    def remarks(self) -> list[str]:
        """What must be known to compare with the others."""
        remarks = [
            "DDP and the ZeRO stages are formulas, without the buffers that they have besides; DDP "
            "keeps a second copy of all gradients, alone or with an optimizer that is not "
            "attached, unless gradient_as_bucket_view=True."
        ]
        return remarks + [f"{peer.name} {peer.remark}." for peer in self.peers if peer.remark]

    def rank_rows(self) -> list[RankRow]:
        ranks = range(self.world_size)
        facts = [(self.loads[rank], self.shards[rank], self.on(rank).total) for rank in ranks]
        rows = []
        for numbers, group in groupby(ranks, key=facts.__getitem__):
            members = list(group)
            rows.append(RankRow((members[0], members[-1]), *numbers))
        return rows

    def param_rows(self) -> list[ParamRow]:
        """The planned parameters, in the order of the model."""
        owners = _owners_of(self.plan)
        rows = []
        for index in sorted(self.plan.params):
            name, tensor, _ = self.spec.params[index]
            rows.append(
                ParamRow(
                    *(index, name, tuple(tensor.shape), _name_of(tensor.dtype)),
                    *(self._kinds[index].value, tensor.numel(), tensor.nbytes),
                    *owners[index],
                )
            )
        return rows

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fullest rank, and beside it the peers."""
        return {
            "world_size": self.world_size,
            "mode": "attached" if self.setting.attached else "drop-in",
            "backend": self.setting.backend,
            "elements": sum(param.tensor.numel() for param in self.spec.params),
            "trained_elements": sum(self.loads),
            "fullest_rank": self.fullest_rank,
            **_memory_and_wire(self.fullest, self.wire),
            "imbalance": self.imbalance,
            "torchs_imbalance": self.torchs_imbalance,
            "peers": {peer.name: _memory_and_wire(peer.memory, peer.wire) for peer in self.peers},
        }

    def plan_as_dict(self, model: str) -> dict[str, Any]:
        """For JSON: the whole plan."""
        return {
            "onecopy": __version__,
            "model": model,
            "bucket_bytes": self.plan.bucket_bytes,
            **self.as_dict(),
            "ranks": [row._asdict() for row in self.rank_rows()],
            "parameters": [row._asdict() for row in self.param_rows()],
            "buckets": len(self.plan.buckets),
        }

    # ------------------------------------------------------------------ what is owned

    @cached_property
    def _kinds(self) -> dict[int, Kind]:
        """By planned parameter."""
        return {param: stream.kind for stream in self.plan.streams for param in stream.params}

    @cached_property
    def _counts(self) -> Counts:
        """By bytes of the state (of elementwise classes), and by the bytes of an element in the
        master copy and in the parameter."""
        spec = self.spec

        def label(param: int) -> tuple[StateBytes | None, int, int]:
            state = spec.state_bytes(param) if self._kinds[param] is Kind.ELEMENTWISE else None
            return state, spec.master_bytes(param), spec.params[param].tensor.itemsize

        return count_elements(self.plan, label)

    @cached_property
    def _state(self) -> dict[str, list[int]]:
        """Bytes by key and rank."""
        found: dict[str, list[int]] = {}

        def add(key: str, rank: int, count: int) -> None:
            found.setdefault(key, [0] * self.world_size)[rank] += count

        for label, elements in self._counts.elements.items():
            assert isinstance(label, tuple)
            if label[0] is not None:
                shards = self._counts.shards[label]
                for rank in range(self.world_size):
                    for key, count in label[0].of(elements[rank], shards[rank]).items():
                        add(key, rank, count)
        for stream in self.plan.streams:
            for param, owner in zip(stream.params, stream.owners, strict=False):
                for key, count in self.spec.state_of(param).items():
                    add(key, owner, count)
        return found

    @cached_property
    def _masters(self) -> list[int]:
        """Bytes of the master copies, by rank."""
        return self._owned(lambda label: label[1])

    @cached_property
    def _owned_bytes(self) -> list[int]:
        """Bytes of the parameters, by owner."""
        return self._owned(lambda label: label[2])

    def _owned(self, itemsize: Callable[[Any], int]) -> list[int]:
        sizes = [(itemsize(label), of) for label, of in self._counts.elements.items()]
        return [sum(size * of[rank] for size, of in sizes) for rank in range(self.world_size)]

    # ------------------------------------------------------------------ parameters and gradients

    @cached_property
    def _parameter_bytes(self) -> int:
        return sum(param.tensor.nbytes for param in self.spec.params)

    @cached_property
    def _trained_bytes(self) -> int:
        return sum(self.spec.params[param].tensor.nbytes for param in self.spec.trained)

    @cached_property
    def _gradient_bytes(self) -> int:
        """Of all gradients, as backward leaves them."""
        tensors = [self.spec.params[param].tensor for param in self.spec.trained]
        return sum(tensor.numel() * grad_dtype(tensor).itemsize for tensor in tensors)

    @cached_property
    def _accumulated_bytes(self) -> int:
        """Of all gradients inside ``no_sync()``, in the dtype of the master copies if there are."""
        tensors = [self.spec.params[param].tensor for param in self.spec.trained]
        master = self.spec.master_dtype
        return sum(tensor.numel() * gradient_dtype(tensor, master).itemsize for tensor in tensors)

    @cached_property
    def _held_gradients(self) -> list[list[int]]:
        """In attached mode: bytes by stream and rank."""
        return [
            [count * self._held_dtype(stream).itemsize for count in slots]
            for stream, slots in enumerate(slot_elements(self.plan))
        ]

    def _first_of(self, stream: int) -> torch.Tensor:
        return self.spec.params[self.plan.streams[stream].params[0]].tensor

    def _held_dtype(self, stream: int) -> torch.dtype:
        return gradient_dtype(self._first_of(stream), self.spec.master_dtype)

    def _wire_dtype(self, stream: int) -> torch.dtype:
        param = self._first_of(stream)
        given = self.setting.reduce_dtype if param.is_floating_point() else None
        return given or grad_dtype(param)

    @property
    def _gradients_on_the_wire(self) -> CommPart:
        if not self.setting.attached:
            return all_reduce(self._gradient_bytes, self.world_size)
        owned = [0] * self.world_size
        for stream, slots in enumerate(slot_elements(self.plan)):
            size = self._wire_dtype(stream).itemsize
            owned = [before + size * count for before, count in zip(owned, slots, strict=True)]
        return from_owners("reduce-scatter", owned, len(self.plan.buckets), direct=True)

    # ------------------------------------------------------------------ staging

    def _reuses_gradients(self, stream: int) -> bool:
        """Whether all-gathers of a stream share the memory from which its gradients were sent."""
        is_eager = self.setting.attached and not self.setting.lazy_gather
        return is_eager and self._wire_dtype(stream) == self._first_of(stream).dtype

    @cached_property
    def _staging(self) -> StagingSizes:
        setting = self.setting
        messages = not setting.is_native and self.spec.on_cpu
        local_ranks = self.world_size if messages else 1
        staging = StagingSizes(self.plan, Links(setting.is_native, messages, local_ranks))
        staging.add_all_gathers(
            setting.lazy_gather,
            setting.parameters_as_bucket_view,
            lambda param: is_dense(self.spec.params[param].tensor),
            self._reuses_gradients,
        )
        if setting.attached:
            staging.add_reduce_scatters(self._wire_dtype, self._held_dtype)
        return staging


def _memory_and_wire(memory: MemoryReport, wire: CommModel) -> dict[str, Any]:
    return {
        "memory": {**memory.as_dict(), "total": memory.total},
        "wire": {part.name: part.numbytes for part in wire.parts},
    }


def _name_of(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _owners_of(plan: Plan) -> dict[int, tuple[Ranges, int]]:
    """The ranks that own some of each parameter, and the number of buckets in which it lies."""
    runs: dict[int, set[tuple[int, int]]] = {}
    buckets: dict[int, int] = {}
    for stream in plan.streams:
        for param, owner in zip(stream.params, stream.owners, strict=False):
            runs[param], buckets[param] = {(owner, owner)}, 1
    for number, bucket in enumerate(plan.buckets):
        if plan.streams[bucket.stream].kind is Kind.ELEMENTWISE:
            for segment in plan.segments(number):
                last = segment.offset + segment.stop - segment.start - 1
                run = plan.rank_at(number, segment.offset), plan.rank_at(number, last)
                runs.setdefault(segment.param, set()).add(run)
                buckets[segment.param] = buckets.get(segment.param, 0) + 1
    found = {}
    for param, ranges in runs.items():
        merged: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        found[param] = tuple(merged), buckets[param]
    return found


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
        optimizer_class: the class to run. It takes a step on small tensors or on the meta device,
            so that its state is known for any class.
        world_size: the number of ranks.
        attached: ``optimizer.attach(module)`` is used; ``under_ddp``: on a DDP module.
        dtype: train floating-point parameters in this dtype instead of their own.
        backend: ``"nccl"`` or ``"gloo"``: how buckets travel, and what staging that takes. With
            gloo the ranks are taken to be on one host, and parameters on the meta device or mere
            shapes to be on the CPU; if ``ONECOPY_COMM=c10d`` is set here, they use gloo's
            collectives.
        no_sync: attached, gradients are accumulated inside ``no_sync()``: count them too.
        **defaults: options of ``optimizer_class``.

    The other arguments are those of :class:`ZeroRedundancyOptimizer` and of its ``attach``.

    >>> found = estimate({"weight": (1000, 1000)}, torch.optim.AdamW, 8, backend="gloo")
    >>> found.fullest.state
    {'exp_avg': 500000, 'exp_avg_sq': 500000, 'step': 16}
    """
    setting = Setting(
        *(attached, under_ddp, lazy_gather, reduce_dtype, parameters_as_bucket_view, backend),
        no_sync=no_sync,
    )
    spec = ModelSpec.of(
        model_or_shapes,
        optimizer_class,
        dtype=dtype,
        partition=partition,
        master_dtype=master_dtype,
        defaults=defaults,
    )
    return Estimate(spec, spec.plan(world_size, bucket_mb), setting)
