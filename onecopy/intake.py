"""What the user hands over: checked, and described for planning and for agreement.

Everything that can be wrong with parameters and groups is found here, before anything is changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.buffers import fills_its_storage, first_overlap, is_dense
from onecopy.checks import check_names, is_on
from onecopy.kinds import Kind, choose_kind, update_cost
from onecopy.pieces import updated_in
from onecopy.plan import ParamSpec
from onecopy.words import shown

# Keys of a parameter group that are ours or torch's, not options of the optimizer class.
OUR_KEYS = frozenset({"optimizer_class", "partition"})
_DEEPEST = 8  # of lists within an option, of which one may hold itself
NOT_OPTIONS = OUR_KEYS | {"params", "param_names"}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the optimizer class in a parameter group."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


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
        groups = [_as_group(entry) for entry in entries]
    elif all(isinstance(e, torch.Tensor) for e in entries) or all(map(_is_named, entries)):
        groups = [{"params": entries}]
    else:
        _require_all_names(entries)
        kinds = sorted({type(entry).__name__ for entry in entries})
        raise TypeError(
            "params must hold only tensors, only (name, tensor) pairs, or only group dicts, "
            f"got {', '.join(kinds)}"
        )
    return groups


def _require_all_names(entries: Sequence[Any]) -> None:
    """Raise where torch raises because of names that are missing: with its class and its words."""
    unnamed = [place for place, entry in enumerate(entries) if not isinstance(entry, tuple)]
    if not isinstance(entries[0], dict) and 0 < len(unnamed) < len(entries):
        raise ValueError(
            "all optimizer params should be with/without names. Some param names are missing: "
            f"entry {unnamed[0]} of params is a {type(entries[unnamed[0]]).__name__}, others are "
            "(name, tensor) pairs. Pass model.named_parameters(), or model.parameters()"
        )


class GroupWithoutParams(ValueError, KeyError):
    """A parameter group without parameters. Torch's class raises a ``KeyError``."""

    def __str__(self) -> str:  # a KeyError would print the repr
        return str(self.args[0])


def require_parameters(groups: Sequence[Mapping[str, Any]]) -> None:
    if not any(group["params"] for group in groups):
        raise ValueError("none of the parameter groups holds a parameter")


def _as_group(entry: Mapping[str, Any]) -> dict[str, Any]:
    for key in entry:
        if not isinstance(key, str):
            raise TypeError(f"the keys of a parameter group must be text, got {shown(key)}")
    if "params" not in entry:
        raise GroupWithoutParams(f'a parameter group needs the key "params", got {sorted(entry)}')
    group = dict(entry)
    params = group["params"]
    if isinstance(params, torch.Tensor):
        group["params"] = [params]
    else:
        _require_order(params, '"params" of a group')
        if not isinstance(params, Iterable):
            raise TypeError(f"the params of a group must be tensors, got {type(params).__name__}")
        group["params"] = list(params)
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


def check_tensors(groups: Sequence[Mapping[str, Any]]) -> None:
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


def take_in(params: Any, optimizer_class: Any) -> tuple[list[dict[str, Any]], Exception | None]:
    """The parameter groups, or why they are refused; told to all ranks once they can be reached."""
    try:
        groups = as_groups(params)
        require_parameters(groups)
        check_tensors(groups)
        check_class(optimizer_class)
    except Exception as error:  # the user's generator may raise anything
        return [], error
    return groups, None


def first_device(groups: Sequence[Mapping[str, Any]]) -> torch.device | None:
    params = (param for group in groups for param in group["params"])
    first = next(params, None)
    first = first[1] if isinstance(first, tuple) else first
    return first.device if isinstance(first, torch.Tensor) else None


def is_trainable(param: torch.Tensor) -> bool:
    """Whether the parameter is to be planned.

    A frozen Parameter is left out until it is unfrozen. A plain tensor is never "frozen": whoever
    passes one sets its ``.grad`` by hand, as torch's optimizers allow.
    """
    if not (param.is_floating_point() or param.is_complex()):
        return False
    plain = not isinstance(param, torch.nn.Parameter)
    return param.requires_grad or plain or param.grad is not None


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """How the parameters of a group are sharded."""

    optimizer_class: type[Optimizer]
    kind: Kind
    fused: bool
    differentiable: bool


def policy_of(
    group: Mapping[str, Any],
    default_class: type[Optimizer],
    defaults: Mapping[str, Any],
    partition: str,
    master_dtype: torch.dtype | None = None,
) -> GroupPolicy:
    """The class and the kind of a group; keywords of the constructor go to ``default_class``."""
    cls = group.get("optimizer_class", default_class)
    check_class(cls)
    options = {**(defaults if cls is default_class else {}), **options_of(group)}
    dtypes = dict.fromkeys(updated_in(param.dtype, master_dtype) for param in group["params"])
    kind = choose_kind(cls, options, group.get("partition", partition), dtypes)
    return GroupPolicy(
        cls,
        kind,
        fused=is_on("fused", options),
        differentiable=is_on("differentiable", options),
    )


def constructor_options(cls: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group's options that the class takes. It may keep others there for itself."""
    hashable: Any = cls
    taken = _parameters_of(hashable)
    return {key: value for key, value in options_of(options).items() if key in taken}


@functools.lru_cache(maxsize=64)
def _parameters_of(cls: Any) -> frozenset[str]:
    return frozenset(inspect.signature(cls).parameters)


def flags_of(cls: type[Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that switch something: those that may change what a class does with a tensor.

    Numbers are left out, because schedulers change them in every step.
    """
    return {
        key: value
        for key, value in constructor_options(cls, group).items()
        if value is None or isinstance(value, (bool, str))
    }


def device_words(params: Iterable[torch.Tensor]) -> dict[torch.device, str]:
    """Names for devices that are the same on every rank.

    Why: rank 0's parameters are on cuda:0 and rank 1's on cuda:1, and their plans must be equal.
    """
    words: dict[torch.device, str] = {}
    for param in params:
        words.setdefault(param.device, f"{param.device.type} #{len(words)}")
    return words


def spec_of(
    index: int, param: torch.Tensor, policy: GroupPolicy, words: Mapping[torch.device, str]
) -> ParamSpec:
    """What the planner needs to know. A tensor with gaps in its memory is kept whole."""
    return ParamSpec(
        index=index,
        numel=param.numel(),
        dtype=str(param.dtype).removeprefix("torch."),
        itemsize=param.element_size(),
        device=words[param.device],
        kind=policy.kind if is_dense(param) else Kind.WHOLE,
        cost=update_cost(policy.optimizer_class, param.shape),
        fused=policy.fused,
    )


def check_no_shared_memory(params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    overlap = first_overlap(params)
    if overlap is not None:
        a, b = overlap
        raise ValueError(
            f"{names[a]} and {names[b]} are different parameters in the same memory: two owners "
            "would overwrite each other's updates. Tie weights by using one Parameter object for "
            "both"
        )


# -------------------------------------------------------------------------- for agreement


def describe_param(name: str, param: torch.Tensor, word: str, planned: bool, homed: bool) -> str:
    memory = f", stride {param.stride()}"
    if homed:
        memory += ", alone in its storage" if fills_its_storage(param) else ", in a shared storage"
    return (
        f"{name}: shape {tuple(param.shape)}{memory}, {param.dtype}, {word}, "
        f"{'trainable' if planned else 'frozen'}"
    )


def describe_group(number: int, group: Mapping[str, Any], policy: GroupPolicy) -> list[str]:
    lines = [
        f"group {number}: {policy.optimizer_class.__module__}.{policy.optimizer_class.__qualname__}"
        f", {policy.kind.value}, {len(group['params'])} parameters"
    ]
    for key, value in sorted(options_of(group).items()):
        lines.append(f"group {number}: {key} = {_describe_value(value)}")
    return lines


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
