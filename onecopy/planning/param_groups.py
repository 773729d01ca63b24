"""What the user hands over: settings, param groups, and the parameters in them.

Read `Settings`, `take_groups` (groups in every form that torch accepts, or why they are refused),
`PartitionPolicy` (the class and the kind of a group) and `ParamRegistry` (the parameters, in the
order of the plan's indices). Nothing here communicates: ``ParamRegistry.description`` and
``readiness`` are the lines that ranks compare.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.planning.layout import fills_its_storage, first_overlap, is_dense
from onecopy.planning.plan import ParamSpec, Plan, default_bucket_mb, make_plan
from onecopy.planning.text import shown
from onecopy.planning.traits import (
    NOT_OPTIONS,
    Kind,
    class_name,
    options_of,
    partition_kind,
    update_cost,
)

MASTER = "master_param"  # the key of a master copy in saved state

Groups = Sequence[Mapping[str, Any]]  # the user's param_groups


def grad_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient; recent releases let it be another than its own."""
    found: torch.dtype | None = getattr(param, "grad_dtype", None)
    return param.dtype if found is None else found


def update_dtype(dtype: torch.dtype, master_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter is updated: that of its master copy, if its own is narrower.

    >>> update_dtype(torch.bfloat16, torch.float32), update_dtype(torch.float64, torch.float32)
    (torch.float32, torch.float64)
    """
    if master_dtype is None or not dtype.is_floating_point:
        return dtype
    return master_dtype if dtype.itemsize < master_dtype.itemsize else dtype


def gradient_dtype(param: torch.Tensor, master_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter's gradient is summed over the ranks, and kept for a step."""
    dtype = update_dtype(param.dtype, master_dtype)
    return grad_dtype(param) if dtype == param.dtype else dtype


def forces_c10d(environ: Mapping[str, str]) -> bool:
    """Whether all communication uses the process group's own collectives, also on gloo."""
    asked = environ.get("ONECOPY_COMM", "")
    if asked not in ("", "auto", "c10d"):
        raise ValueError(f'ONECOPY_COMM={asked}: expected "auto", "c10d", or nothing')
    return asked == "c10d"


# -------------------------------------------------------------------------- settings


@dataclass(frozen=True, slots=True)
class Settings:
    """The constructor's arguments besides parameters, a class with its options, and a group."""

    partition: str = "auto"
    bucket_mb: float | None = None
    master_dtype: torch.dtype | None = None
    check_every: int | None = None
    bucket_view: bool = False  # parameters_as_bucket_view
    overlap_with_ddp: bool = False

    def validate(self, environ: Mapping[str, str]) -> None:
        """Raise if a setting or an environment variable has a value that it cannot have.

        Planning refuses a wrong ``partition`` or ``bucket_mb``.
        """
        every, dtype = self.check_every, self.master_dtype
        if every is not None:
            if isinstance(every, bool) or not isinstance(every, int):
                raise TypeError(f"check_every must be a number of steps, got {shown(every)}")
            if every < 1:
                raise ValueError(
                    f"check_every must be a positive number of steps, got {shown(every)}"
                )
        if not (dtype is None or dtype is torch.float32 or dtype is torch.float64):
            raise ValueError(
                f"master_dtype must be torch.float32, torch.float64 or None, got {shown(dtype)}"
            )
        asked = environ.get("ONECOPY_SHARED_MEMORY", "")
        if asked not in ("", "0", "1"):
            raise ValueError(f"ONECOPY_SHARED_MEMORY={asked}: expected 0, 1, or nothing")
        check_switches(
            parameters_as_bucket_view=self.bucket_view, overlap_with_ddp=self.overlap_with_ddp
        )
        asked = environ.get("ONECOPY_CHECK", "")
        if asked not in ("", "step"):
            raise ValueError(f'ONECOPY_CHECK={asked}: expected "step", or nothing')


def check_switches(**switches: Any) -> None:
    """Why: the text "false" of some configuration would count as true."""
    for name, value in switches.items():
        if not isinstance(value, int):  # a bool is one
            raise TypeError(f"{name} must be True or False, got {shown(value)}")


def check_reduce_dtype(dtype: Any) -> None:
    """Why not 8 bits: torch neither sums nor promotes them."""
    known = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if dtype is not None and not any(dtype is each for each in known):
        raise TypeError(
            "reduce_dtype must be a floating point dtype of 16 to 64 bits or None, got "
            f"{shown(dtype)}"
        )


def as_number(name: str, value: Any) -> float:
    """A number, or a tensor that holds one."""
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta
    if not isinstance(value, Real) and not is_scalar:
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    try:
        return float(value)
    except (OverflowError, RuntimeError, TypeError):  # too large, or a complex scalar
        raise ValueError(f"{name} must be a real number in range, got {shown(value)}") from None


def check_names(names: Any, count: int) -> None:
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) != count:
        raise ValueError(
            f'"param_names" of a group must list a name for each of its {count} parameters, got '
            f"{shown(names)}"
        )


# -------------------------------------------------------------------------- groups


def as_groups(params: Any) -> list[dict[str, Any]]:
    """``params`` in any form that ``torch.optim`` accepts, as new group dicts with lists.

    Generators are consumed here, once, also those inside a group.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError(
            "params argument given to the optimizer should be an iterable of Tensors or dicts, but "
            f"got {torch.typename(params)}: pass [tensor]"
        )
    _require_order(params, "params")
    try:
        entries = list(params)
    except TypeError as error:
        raise TypeError(
            "params argument given to the optimizer should be an iterable of Tensors or dicts, but "
            f"got {type(params).__name__}"
        ) from error
    if not entries:
        raise ValueError("params is empty: there is nothing to optimize")
    if all(isinstance(entry, dict) for entry in entries):
        return [_as_group(entry) for entry in entries]
    if all(isinstance(e, torch.Tensor) for e in entries) or all(map(_is_named, entries)):
        return [{"params": entries}]
    unnamed = [place for place, entry in enumerate(entries) if not isinstance(entry, tuple)]
    if not isinstance(entries[0], dict) and 0 < len(unnamed) < len(entries):
        raise ValueError(  # as torch does, with its class and its words
            "all optimizer params should be with/without names. Some param names are missing: "
            f"entry {unnamed[0]} of params is a {type(entries[unnamed[0]]).__name__}, others "
            "are (name, tensor) pairs. Pass model.named_parameters(), or model.parameters()"
        )
    kinds = sorted({type(entry).__name__ for entry in entries})
    raise TypeError(
        "params must hold only tensors, only (name, tensor) pairs, or only group dicts, "
        f"got {', '.join(kinds)}"
    )


class GroupWithoutParams(ValueError, KeyError):
    """A parameter group without parameters. Torch's class raises a ``KeyError``."""

    def __str__(self) -> str:  # a KeyError would print the repr
        return str(self.args[0])


def _as_group(entry: Mapping[str, Any]) -> dict[str, Any]:
    for key in entry:
        if not isinstance(key, str):
            raise TypeError(f"the keys of a parameter group must be text, got {shown(key)}")
    if "params" not in entry:
        raise GroupWithoutParams(f'a parameter group needs the key "params", got {sorted(entry)}')
    group = dict(entry)
    params = group["params"]
    _require_order(params, '"params" of a group')
    if not isinstance(params, Iterable):
        raise TypeError(f"the params of a group must be tensors, got {type(params).__name__}")
    group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    if "param_names" in group:
        check_names(group["param_names"], len(group["params"]))
    return group


def _require_order(params: Any, what: str) -> None:
    """Raise as torch does for a set inside of a group (and, since 2.14, warns for any other)."""
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            "optimizer parameters need to be organized in ordered collections, but the ordering of "
            "tensors in sets will change between runs. Please use a list instead. "
            f"{what} is a {type(params).__name__}, and its order would differ between ranks, too"
        )


def _is_named(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], torch.Tensor)


def check_tensors(groups: Groups) -> None:
    """Refuse what cannot be sharded, naming it."""
    first_type: str | None = None
    for number, group in enumerate(groups):
        for position, entry in enumerate(group["params"]):
            param = entry[1] if _is_named(entry) else entry
            if not isinstance(param, torch.Tensor):
                continue  # torch's own message is good
            where = f"parameter {position} of group {number}"
            if _is_named(entry) and not isinstance(entry[0], str):
                raise TypeError(f"the name of {where} must be text, got {shown(entry[0])}")
            if torch.nn.parameter.is_lazy(param) or param.is_nested:
                raise ValueError(
                    f"{where} has no shape, because it is lazy or nested: let the module run once, "
                    "or use padded tensors"
                )
            if param.layout != torch.strided:
                raise ValueError(f"{where} is sparse ({param.layout}): only dense ones are sharded")
            if hasattr(param, "device_mesh"):
                raise ValueError(
                    f"{where} is a DTensor, which already is distributed: pass plain parameters"
                )
            first_type = first_type or param.device.type
            if param.device.type != first_type:
                raise ValueError(
                    f"{where} is on {param.device}, the first parameter on {first_type}: all must "
                    "be on devices of one type"
                )


def check_class(optimizer_class: Any) -> None:
    if not isinstance(optimizer_class, type):
        raise TypeError(
            "optimizer_class must be a class such as torch.optim.AdamW, got "
            f"{shown(optimizer_class)}"
        )
    if not issubclass(optimizer_class, Optimizer):
        raise ValueError(
            f"optimizer_class must be a torch.optim.Optimizer, got {optimizer_class.__name__}, "
            "which is not (torch's functional optimizers are not)"
        )


def take_groups(params: Any, optimizer_class: Any) -> tuple[list[dict[str, Any]], Exception | None]:
    """The parameter groups, or why they are refused: all ranks are told once they are connected."""
    try:
        groups = as_groups(params)
        if not any(group["params"] for group in groups):
            raise ValueError("none of the parameter groups holds a parameter")
        check_tensors(groups)
        check_class(optimizer_class)
    except Exception as error:  # the user's generator may raise anything
        return [], error
    return groups, None


def first_device(groups: Groups) -> torch.device | None:
    params = (param for group in groups for param in group["params"])
    first = next(params, None)
    first = first[1] if isinstance(first, tuple) else first
    return first.device if isinstance(first, torch.Tensor) else None


def is_trainable(param: torch.Tensor) -> bool:
    """Whether the parameter is to be planned.

    A frozen Parameter is left out until it is unfrozen. A plain tensor is never frozen: its
    ``.grad`` is set by hand, as torch's optimizers allow.
    """
    if not (param.is_floating_point() or param.is_complex()):
        return False
    plain = not isinstance(param, torch.nn.Parameter)
    return param.requires_grad or plain or param.grad is not None


# -------------------------------------------------------------------------- policies


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """How the parameters of a group are sharded."""

    optimizer_class: type[Optimizer]
    class_name: str  # with its module, as checkpoints say it
    kind: Kind
    fused: bool

    def needs_other_cuts_than(self, before: GroupPolicy) -> bool:
        """Whether a plan made for another policy is wrong for this one."""
        turns_fused = self.kind is Kind.ELEMENTWISE and self.fused and not before.fused
        return self.kind is not before.kind or turns_fused


@dataclass(frozen=True, slots=True)
class PartitionPolicy:
    """How groups are sharded by an optimizer with these settings, class and options."""

    default_class: type[Optimizer]
    settings: Settings
    given: Mapping[str, Any]  # the constructor's keywords, for groups of ``default_class``
    world_size: int = 1

    def of(self, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> GroupPolicy:
        cls = group.get("optimizer_class", self.default_class)
        check_class(cls)
        options = {**(defaults if cls is self.default_class else {}), **options_of(group)}
        master_dtype = self.settings.master_dtype
        dtypes = dict.fromkeys(update_dtype(param.dtype, master_dtype) for param in group["params"])
        kind = partition_kind(cls, options, group.get("partition", self.settings.partition), dtypes)
        switches = {name: options.get(name) for name in ("fused", "differentiable")}
        check_switches(**{name: value for name, value in switches.items() if value is not None})
        if switches["differentiable"] and self.world_size > 1:
            raise ValueError(
                "differentiable=True cannot be sharded: no graph leads through a parameter that "
                "arrives from another rank"
            )
        return GroupPolicy(cls, class_name(cls), kind, bool(switches["fused"]))

    def with_options(
        self, present: Sequence[GroupPolicy], groups: Groups, options: Groups
    ) -> list[GroupPolicy]:
        """How groups that have the policies ``present`` would be sharded with other options."""
        found = []
        for policy, ours, theirs in zip(present, groups, options, strict=True):
            # The options that the class takes. It may keep others in its groups for itself.
            accepted = inspect.signature(policy.optimizer_class).parameters
            merged = {**ours, **options_of(theirs)}.items()
            group = {k: value for k, value in merged if k in accepted or k in NOT_OPTIONS}
            found.append(self.of(group, self.given))
        return found


# -------------------------------------------------------------------------- the registry


def device_names(params: Iterable[torch.Tensor]) -> dict[torch.device, str]:
    """Names for devices that are the same on every rank.

    Why: rank 0's parameters are on cuda:0 and rank 1's on cuda:1, and their plans must be equal.
    """
    devices = dict.fromkeys(param.device for param in params)
    return {device: f"{device.type} #{number}" for number, device in enumerate(devices)}


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A parameter. Its index in the registry is its number in the plan."""

    param: torch.Tensor
    name: str
    group: int


class GroupsChanged(RuntimeError, AssertionError):
    """``param_groups`` was changed by hand. An AssertionError too, as torch's class raises."""


@dataclass(frozen=True, eq=False)
class ParamRegistry:
    """All parameters, each once, however often it is tied or listed; and the groups' policies."""

    entries: tuple[Entry, ...] = ()
    policies: tuple[GroupPolicy, ...] = ()
    listed: tuple[tuple[torch.Tensor, ...], ...] = ()  # the parameters of each group, as given

    def with_group(self, group: Mapping[str, Any], policy: GroupPolicy) -> ParamRegistry:
        """A registry with one more group."""
        known = {entry.param for entry in self.entries}
        names = group.get("param_names") or [""] * len(group["params"])
        entries = list(self.entries)
        for param, name in zip(group["params"], names, strict=True):
            if param not in known:
                known.add(param)
                title = f"parameter {len(entries)}" + (f" ({name})" if name else "")
                entries.append(Entry(param, title, len(self.policies)))
        return ParamRegistry(
            tuple(entries), (*self.policies, policy), (*self.listed, tuple(group["params"]))
        )

    def require_plan_fits(self, policies: Sequence[GroupPolicy], world_size: int) -> None:
        """Raise if a group was given another optimizer class by hand, or options that decide where
        tensors may be cut."""
        for number, (before, after) in enumerate(zip(self.policies, policies, strict=True)):
            if before.optimizer_class is not after.optimizer_class:
                raise GroupsChanged(
                    f"group {number} was built with {before.optimizer_class.__name__} and now says "
                    f"{after.optimizer_class.__name__}: changing optimizer_class by hand has no "
                    "effect here. Build another optimizer"
                )
            if world_size > 1 and after.needs_other_cuts_than(before):
                what = "fused is on" if after.kind is before.kind else f"it is {after.kind.value}"
                raise RuntimeError(
                    f"the options of group {number} have changed: now {what}, and its tensors were "
                    f"cut for an update that is {before.kind.value} and not fused. Give the "
                    "constructor or the group these options, or load them: load_state_dict(...) "
                    "and load(path) make another plan"
                )

    @cached_property
    def params(self) -> list[torch.Tensor]:
        return [entry.param for entry in self.entries]

    @cached_property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    def planned(self, plan: Plan) -> list[Entry]:
        return [self.entries[index] for index in sorted(plan.params)]

    def to_plan(self, plan: Plan) -> list[int]:
        """The trainable parameters that the plan does not hold yet."""
        return [index for index in self.unplanned(plan) if is_trainable(self.params[index])]

    def unplanned(self, plan: Plan) -> list[int]:
        return [index for index in range(len(self.entries)) if index not in plan.params]

    def extend(self, plan: Plan, new: Sequence[int]) -> Plan:
        """A plan that holds these parameters, too."""
        if new and plan.world_size > 1:
            both = [self.entries[index] for index in sorted({*plan.params, *new})]
            overlap = first_overlap([entry.param for entry in both])
            if overlap is not None:
                a, b = overlap
                raise ValueError(
                    f"{both[a].name} and {both[b].name} are different parameters in the same "
                    "memory: two owners would overwrite each other's updates. Tie weights by using "
                    "one Parameter object for both"
                )
        return plan.extended(self.specs(new)) if new else plan

    def specs(self, indices: Iterable[int]) -> list[ParamSpec]:
        """What the planner needs to know. A tensor with gaps in its memory is kept whole."""
        devices = device_names(self.params)
        specs = []
        for index in indices:
            param, policy = self.params[index], self.policies[self.entries[index].group]
            spec = ParamSpec(
                index=index,
                numel=param.numel(),
                dtype=str(param.dtype).removeprefix("torch."),
                itemsize=param.element_size(),
                device=devices[param.device],
                kind=policy.kind if is_dense(param) else Kind.WHOLE,
                cost=update_cost(policy.optimizer_class, param.shape),
                fused=policy.fused,
            )
            specs.append(spec)
        return specs

    def cuttable(self) -> set[torch.Tensor]:
        """The parameters whose state is parameter-shaped, because it may be cut."""
        return {
            entry.param
            for entry in self.entries
            if self.policies[entry.group].kind is Kind.ELEMENTWISE and is_dense(entry.param)
        }

    def readiness(self, with_gradients: bool) -> list[str]:
        """What all ranks must have alike of the parameters in a step, as lines to compare."""
        lines = []
        for entry in self.entries:
            grad = entry.param.grad if with_gradients else None
            form = "no gradient"
            if grad is not None:
                is_sparse = grad.layout is not torch.strided
                form = f"a {'sparse ' * is_sparse}gradient of {tuple(grad.shape)}"
            has = f", {form}" if with_gradients else ""
            lines.append(f"{entry.name}: requires_grad={entry.param.requires_grad}{has}")
        return lines

    def description(self, groups: Groups, plan: Plan, with_storage: bool) -> list[str]:
        """What all ranks must have alike of parameters and groups, as lines to compare."""
        lines = []
        for number, (group, policy) in enumerate(zip(groups, self.policies, strict=True)):
            counted = f"{len(group['params'])} parameters"
            lines.append(f"group {number}: {policy.class_name}, {policy.kind.value}, {counted}")
            for key, value in sorted(options_of(group).items()):
                lines.append(f"group {number}: {key} = {_describe_value(value)}")
        devices = device_names(self.params)
        for index, entry in enumerate(self.entries):
            param, storage = entry.param, ""
            if with_storage:
                alone = fills_its_storage(param)
                storage = ", alone in its storage" if alone else ", in a shared storage"
            lines.append(
                f"{entry.name}: shape {tuple(param.shape)}, stride {param.stride()}{storage}, "
                f"{param.dtype}, {devices[param.device]}, "
                f"{'trainable' if index in plan.params else 'frozen'}"
            )
        return [*lines, f"plan {plan.digest}"]


_DEEPEST = 8  # of lists within an option, of which one may hold itself


def _describe_value(value: Any, depth: int = 0) -> str:
    if isinstance(value, torch.Tensor):
        is_small = value.numel() <= 16 and value.layout is torch.strided and not value.is_meta
        return f"tensor {value.tolist()}" if is_small else f"tensor {value.shape}"
    if isinstance(value, int):
        return hex(value) if abs(value) >= 2**63 else repr(value)  # of a huge one repr may raise
    if isinstance(value, (float, complex, str, type(None))):
        return repr(value)
    if isinstance(value, (list, tuple)) and depth < _DEEPEST:
        return "(" + ", ".join(_describe_value(v, depth + 1) for v in value) + ")"
    # Anything else may print its address, which differs between ranks.
    return type(value).__name__


_MOST_BUCKETS = 1_000_000  # a plan lists them


def empty_plan(
    groups: Iterable[Mapping[str, Any]], world_size: int, bucket_mb: float | None
) -> Plan:
    """A plan of nothing; by default its buckets have the size for the parameters of the groups."""
    params = [param for group in groups for param in group["params"]]
    numbytes = sum(p.numel() * p.element_size() for p in params)
    chosen = default_bucket_mb(numbytes) if bucket_mb is None else bucket_mb
    plan = make_plan([], world_size, chosen)
    if bucket_mb is not None and numbytes > plan.bucket_bytes * _MOST_BUCKETS:
        raise ValueError(
            f"bucket_mb={bucket_mb} would cut these parameters into more than {_MOST_BUCKETS:,} "
            "buckets: leave it out, or say more"
        )
    return plan
