"""What a training takes of every rank, before the run; who owns what, in rows.

The parameters of a model, or shapes, become parameters on the meta device. Groups, policies,
registry and plan are made of them as of real ones, by the same functions.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from onecopy.planning.layout import is_dense
from onecopy.planning.param_groups import (
    ParamRegistry,
    PartitionPolicy,
    Settings,
    check_reduce_dtype,
    check_switches,
    empty_plan,
    forces_c10d,
    grad_dtype,
    gradient_dtype,
    take_groups,
    update_dtype,
)
from onecopy.planning.plan import Plan
from onecopy.planning.sizes import (
    Links,
    MemoryReport,
    StagingSizes,
    count_elements,
    imbalance,
    slot_elements,
)
from onecopy.planning.text import in_bytes, plural
from onecopy.planning.traits import Kind, StateBytes, StateTemplate, options_of
from onecopy.tools.baselines import (
    Baseline,
    CommModel,
    evenly,
    evenly_sharded,
    from_owners,
    torch_class,
    torch_owners,
)
from onecopy.version import __version__

# ------------------------------------------------------------------ what is trained


class ModelSpec:
    """Parameters without memory, in groups, with the classes that update them."""

    def __init__(
        self,
        model: Any,
        optimizer_class: type[Optimizer],
        dtype: torch.dtype | None,
        settings: Settings,
        defaults: Mapping[str, Any],
    ) -> None:
        settings.validate({})
        self.master_dtype = settings.master_dtype
        self.registry = ParamRegistry()
        self.templates: list[StateTemplate] = []  # by group
        stand_ins: _StandIns = {}
        policies = PartitionPolicy(optimizer_class, settings, defaults)
        for listed in _groups_of(model, optimizer_class, dtype):
            group = _without_memory(listed, dtype, stand_ins)
            policy = policies.of(group, defaults)
            cls, given = policy.optimizer_class, options_of(group)
            options = {**defaults, **given} if cls is optimizer_class else given
            self.templates.append(_template(cls, options))
            self.registry = self.registry.with_group(group, policy)
        self.params: Sequence[torch.Tensor] = self.registry.params  # by index in the plan
        self.names = [name for _, name in stand_ins.values()]
        # Or on the meta device, or shapes: not on an accelerator.
        self.on_cpu = all(param.device.type in ("cpu", "meta") for param in stand_ins)
        self.classes = tuple(dict.fromkeys(p.optimizer_class for p in self.registry.policies))
        self._bytes_of_shards = [cache(t.bytes_of_shards) for t in self.templates]
        self._bytes_of_tensor = [cache(t.bytes_of_tensor) for t in self.templates]

    def state_bytes(self, param: int, has_master: bool = True) -> StateBytes:
        """Of a parameter that may be cut."""
        dtype = update_dtype(self.params[param].dtype, self.master_dtype if has_master else None)
        return self._bytes_of_shards[self.registry.entries[param].group](dtype)

    def state_of(self, param: int, has_master: bool = True) -> Mapping[str, int]:
        """Bytes of the state of a whole parameter, by key."""
        tensor, group = self.params[param], self.registry.entries[param].group
        if self.registry.policies[group].kind is Kind.ELEMENTWISE and is_dense(tensor):
            return self.state_bytes(param, has_master).of(tensor.numel(), 1)
        dtype = update_dtype(tensor.dtype, self.master_dtype if has_master else None)
        return self._bytes_of_tensor[group](tensor.shape, dtype)


def _template(cls: type[Optimizer], options: Mapping[str, Any]) -> StateTemplate:
    return StateTemplate(cls, lambda param: cls([param], **options), options.get("lr", 0.0))


def _groups_of(model: Any, optimizer_class: Any, dtype: torch.dtype | None) -> list[dict[str, Any]]:
    if isinstance(model, torch.nn.Module):
        model = list(model.named_parameters())
        if not model:
            raise ValueError("the model has no parameters")
    elif isinstance(model, Mapping):
        model = [(str(name), _of_shape(shape, dtype)) for name, shape in model.items()]
    elif isinstance(model, Sequence) and model and all(map(_is_shape, model)):
        model = [_of_shape(shape, dtype) for shape in model]
    groups, refusal = take_groups(model, optimizer_class)
    if refusal is not None:
        raise refusal
    return groups


def _is_shape(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(size, int) for size in value)


def _of_shape(shape: Any, dtype: torch.dtype | None) -> torch.nn.Parameter:
    if not _is_shape(shape) or any(size < 0 for size in shape):
        raise ValueError(f"expected the shape of a parameter, such as (768, 3072), got {shape!r}")
    return torch.nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))


_StandIns = dict[torch.Tensor, tuple[torch.Tensor, str]]  # with its name, by the original


def _without_memory(
    group: Mapping[str, Any], dtype: torch.dtype | None, stand_ins: _StandIns
) -> dict[str, Any]:
    """The group with a stand-in on the meta device for each parameter; one that is listed twice
    has one."""
    params = []
    names = group.get("param_names")
    for number, entry in enumerate(group["params"]):
        name, param = entry if isinstance(entry, tuple) else ("", entry)
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"expected parameters, got {type(param).__name__}: {param!r}")
        if param not in stand_ins:
            target = dtype if dtype is not None and param.is_floating_point() else param.dtype
            # Why strides: a tensor with gaps in its memory is not cut.
            new = torch.empty_strided(param.shape, param.stride(), dtype=target, device="meta")
            if isinstance(param, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=param.requires_grad)
            name = str(name or (names[number] if names else f"parameter {number}"))
            stand_ins[param] = new, name
        params.append(stand_ins[param][0])
    return {**group, "params": params}


# ------------------------------------------------------------------ how


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
        check_reduce_dtype(self.reduce_dtype)
        check_switches(
            attached=self.attached,
            under_ddp=self.under_ddp,
            lazy_gather=self.lazy_gather,
            parameters_as_bucket_view=self.parameters_as_bucket_view,
            no_sync=self.no_sync,
        )
        for name in ("under_ddp", "lazy_gather", "reduce_dtype", "no_sync"):
            if getattr(self, name) and not self.attached:
                raise ValueError(f"{name} means something in attached mode only: attached=True")


# ------------------------------------------------------------------ what it takes

Ranges = tuple[tuple[int, int], ...]  # of ranks: first and last
Table = tuple[list[str], list[list[str]]]  # head and rows


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


class Estimate:
    """Bytes on every rank, bytes that travel, and the same of other ways to train.

    ``print`` shows the fullest rank as a table.
    """

    def __init__(self, spec: ModelSpec, plan: Plan, setting: Setting) -> None:
        self.spec = spec
        self.plan = plan
        self.setting = setting
        self.world_size = plan.world_size
        self._kinds = {param: stream.kind for stream in plan.streams for param in stream.params}
        self._trained = [spec.params[param] for param in sorted(plan.params)]
        self._parameter_bytes = sum(param.nbytes for param in spec.params)
        self._trained_bytes = sum(param.nbytes for param in self._trained)
        # Of all gradients, as backward leaves them.
        self._gradient_bytes = sum(p.numel() * grad_dtype(p).itemsize for p in self._trained)
        self._count_owned()
        self.imbalance = imbalance(self.loads)  # elements on the fullest rank / an even share
        self._torchs_owners = torch_owners(spec.registry.entries, self.world_size)
        self.torchs_loads = [0] * self.world_size
        for param in plan.params:
            self.torchs_loads[self._torchs_owners[param]] += spec.params[param].numel()
        self.torchs_imbalance = imbalance(self.torchs_loads)  # of the partition of torch's class
        # By stream: the dtypes in which gradients are summed and held, and in which they travel.
        held_in, wire = [], []
        for stream in plan.streams:
            first = spec.params[stream.params[0]]
            held_in.append(gradient_dtype(first, spec.master_dtype))
            given = setting.reduce_dtype if first.is_floating_point() else None
            wire.append(given or grad_dtype(first))
        native = setting.backend != "gloo" or forces_c10d(os.environ)
        messages = not native and spec.on_cpu
        links = Links(native, messages, self.world_size if messages else 1)
        is_eager = setting.attached and not setting.lazy_gather
        self._staging = StagingSizes(plan, links).add_all_gathers(
            setting.lazy_gather,
            setting.parameters_as_bucket_view,
            lambda param: is_dense(spec.params[param]),
            # All-gathers of a stream share the memory from which its gradients were sent.
            lambda stream: is_eager and _name_of(wire[stream]) == plan.streams[stream].dtype,
        )
        self._held = [self._gradient_bytes] * self.world_size
        gradients = evenly("all-reduce", self._gradient_bytes, self.world_size, rounds=2)
        if setting.attached:
            self._staging.add_reduce_scatters(wire.__getitem__, held_in.__getitem__)
            slots = slot_elements(plan)
            self._held = self._by_rank(zip((d.itemsize for d in held_in), slots, strict=True))
            sent = self._by_rank(zip((d.itemsize for d in wire), slots, strict=True))
            gradients = from_owners("reduce-scatter", sent, len(plan.buckets), direct=True)
        if setting.no_sync:  # all gradients are held besides, in the dtype of the master copies
            sizes = ((p.numel(), gradient_dtype(p, spec.master_dtype)) for p in self._trained)
            accumulated = sum(numel * dtype.itemsize for numel, dtype in sizes)
            self._held = [held + accumulated for held in self._held]
        gather = from_owners("all-gather", self._owned_bytes, len(plan.buckets), not native)
        self.wire = CommModel(self.world_size, (gradients, gather))  # what travels in a step
        self._totals = [self.on(rank).total for rank in range(self.world_size)]
        self.fullest_rank = self._totals.index(max(self._totals))  # the first of them
        self.fullest = self.on(self.fullest_rank)

    def __str__(self) -> str:
        return str(self.fullest)

    def on(self, rank: int) -> MemoryReport:
        """What one rank holds after a step, or with ``no_sync`` before the backward that averages:
        the fields are those of ``memory_report()``."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"expected a rank from 0 to {self.world_size - 1}, got {rank}")
        return MemoryReport(
            parameters=self._parameter_bytes,
            gradients=self._held[rank],
            state={key: of[rank] for key, of in self._state.items() if of[rank]},
            master_copies=self._masters[rank],
            staging=self._staging.on(rank),
            ddp_buckets=self._trained_bytes if self.setting.under_ddp else 0,
        )

    @property
    def ways(self) -> tuple[Baseline, ...]:
        """This one, and the peers."""
        return Baseline("onecopy", self.fullest, self.wire), *self.peers

    @cached_property
    def peers(self) -> tuple[Baseline, ...]:
        """DDP, torch's class (unless there are several optimizer classes), ZeRO-2 and ZeRO-3."""
        spec = self.spec
        state: Counter[str] = Counter()
        for param in sorted(self.plan.params):
            state.update(spec.state_of(param))
        sizes = self._parameter_bytes, self._gradient_bytes, state, sum(self._masters)
        whole = MemoryReport(*sizes, staging=0, ddp_buckets=0)
        ddp, *stages = evenly_sharded(whole, self._trained_bytes, self.world_size)
        if len(spec.classes) > 1:
            return ddp, *stages
        entries, own_state = spec.registry.entries, partial(spec.state_of, has_master=False)
        torchs = torch_class(entries, self._torchs_owners, own_state, whole, self.world_size)
        return ddp, torchs, *stages

    # ------------------------------------------------------------------ in words and rows

    def in_words(self) -> str:
        """What is trained, and how."""
        spec, setting = self.spec, self.setting
        kinds = list(dict.fromkeys(_name_of(param.dtype) for param in spec.params))
        if frozen := len(spec.params) - len(self._trained):
            kinds.append(f"{frozen} of them frozen")
        classes = " and ".join(cls.__name__ for cls in spec.classes)
        if any(self._masters):
            classes += f" on {_name_of(spec.master_dtype)} master copies"
        mode = "drop-in"
        if setting.attached:
            mode = "attached to DDP" if setting.under_ddp else "attached"
        return (
            f"{sum(param.numel() for param in spec.params):,} parameters in "
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
        facts = list(zip(self.loads, self.shards, self._totals, strict=True))
        runs = (list(run) for _, run in groupby(range(self.world_size), key=facts.__getitem__))
        return [RankRow((run[0], run[-1]), *facts[run[0]]) for run in runs]

    def rank_table(self) -> Table:
        rows = [
            [rank_range(ranks), f"{elements:,}", f"{shards:,}", in_bytes(total)]
            for ranks, elements, shards, total in self.rank_rows()
        ]
        return ["rank", "elements", "shards", "holds in all"], rows

    def param_rows(self) -> list[ParamRow]:
        """The planned parameters, in the order of the model."""
        owners: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # in each bucket
        for number in range(len(self.plan.buckets)):
            for segment in self.plan.segments(number):
                owners[segment.param].append(self.plan.owners(number, segment))
        rows = []
        for index, param in zip(sorted(self.plan.params), self._trained, strict=True):
            merged: list[tuple[int, int]] = []
            for first, last in sorted(owners[index]):
                if merged and first <= merged[-1][1] + 1:
                    merged[-1] = merged[-1][0], max(last, merged[-1][1])
                else:
                    merged.append((first, last))
            form = tuple(param.shape), _name_of(param.dtype), self._kinds[index].value
            sizes, place = (param.numel(), param.nbytes), (tuple(merged), len(owners[index]))
            rows.append(ParamRow(index, self.spec.names[index], *form, *sizes, *place))
        return rows

    def param_table(self) -> Table:
        rows = []
        for row in self.param_rows():
            shape = " x ".join(map(str, row.shape)) or "scalar"
            everyone = self.world_size > 1 and row.owners == ((0, self.world_size - 1),)
            owners = "all" if everyone else ", ".join(map(rank_range, row.owners))
            form = [row.name, shape, row.dtype, row.kind]
            rows.append([*form, in_bytes(row.bytes), owners, str(row.buckets)])
        return ["parameter", "shape", "dtype", "kind", "bytes", "owners", "buckets"], rows

    def as_dict(self, bandwidth: float | None = None, latency: float = 0.0) -> dict[str, Any]:
        """For JSON: the fullest rank, and beside it the peers; the time of a step if there is a
        bandwidth."""

        def numbers(way: Baseline) -> dict[str, Any]:
            seconds = {"seconds": way.wire.seconds(bandwidth, latency)} if bandwidth else {}
            sent: Counter[str] = Counter()  # ZeRO-3 gathers parameters twice
            for part in way.wire.parts:
                sent[part.name] += part.numbytes
            return {
                "memory": {**way.memory.as_dict(), "total": way.memory.total},
                "wire": dict(sent),
                **seconds,
            }

        ours, *peers = self.ways
        return {
            "world_size": self.world_size,
            "mode": "attached" if self.setting.attached else "drop-in",
            "backend": self.setting.backend,
            "elements": sum(param.numel() for param in self.spec.params),
            "trained_elements": sum(self.loads),
            "fullest_rank": self.fullest_rank,
            **numbers(ours),
            "imbalance": self.imbalance,
            "torchs_imbalance": self.torchs_imbalance,
            "peers": {peer.name: numbers(peer) for peer in peers},
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

    # ------------------------------------------------------------------ counts

    def _count_owned(self) -> None:
        """What each rank owns."""
        spec, plan = self.spec, self.plan

        def label_of(param: int) -> tuple[StateBytes | None, int, int]:
            dtype = spec.params[param].dtype
            master = update_dtype(dtype, spec.master_dtype)
            state = spec.state_bytes(param) if self._kinds[param] is Kind.ELEMENTWISE else None
            return state, 0 if master == dtype else master.itemsize, dtype.itemsize

        counts = count_elements(plan, label_of)
        elements: Mapping[Any, list[int]] = counts.elements
        self.loads = self._by_rank((1, of) for of in elements.values())  # elements
        self.shards = self._by_rank((1, of) for of in counts.shards.values())
        # Bytes of the parameters, and of their master copies.
        self._owned_bytes = self._by_rank((label[2], of) for label, of in elements.items())
        self._masters = self._by_rank((label[1], of) for label, of in elements.items())
        state: defaultdict[str, list[int]] = defaultdict(lambda: [0] * self.world_size)
        for label, of in elements.items():
            for rank in range(self.world_size) if label[0] else ():
                for key, count in label[0].of(of[rank], counts.shards[label][rank]).items():
                    state[key][rank] += count
        for stream in plan.streams:
            for param, owner in zip(stream.params, stream.owners, strict=False):
                for key, count in spec.state_of(param).items():
                    state[key][owner] += count
        self._state = dict(sorted(state.items()))

    def _by_rank(self, terms: Iterable[tuple[int, list[int]]]) -> list[int]:
        """The sum of size times count, for each rank."""
        totals = [0] * self.world_size
        for size, counts in terms:
            totals = [total + size * n for total, n in zip(totals, counts, strict=True)]
        return totals


def _name_of(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def rank_range(ends: tuple[int, int]) -> str:
    return f"{ends[0]}" if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"


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
    settings = Settings(partition, master_dtype=master_dtype)
    spec = ModelSpec(model_or_shapes, optimizer_class, dtype, settings, defaults)
    nothing = empty_plan([{"params": spec.params}], world_size, bucket_mb)
    plan = spec.registry.extend(nothing, spec.registry.to_plan(nothing))
    return Estimate(spec, plan, setting)
