"""Loading a full state dict: ours, the plain class's, or torch's own sharded class's.

Everything is checked first, with the same verdict on every rank, because loading is not
collective. Then every inner optimizer loads a dict that was cut for it with its own
``load_state_dict``, so that the rules of its class (casts, where ``step`` lives) hold.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from onecopy.buffers import flat_range, in_layout_of
from onecopy.checks import check_names
from onecopy.inner import Inner
from onecopy.intake import options_of
from onecopy.kinds import class_name, is_torchs
from onecopy.local import LocalOptimizer
from onecopy.pieces import MASTER, OwnedPiece, updated_in
from onecopy.state import Numbering
from onecopy.transport import Transport
from onecopy.words import shown


@dataclass(frozen=True, slots=True)
class Loadable:
    """State and options that fit the optimizer."""

    states: Mapping[torch.Tensor, Mapping[str, Any]]  # of whole parameters, to be cut
    common: dict[Any, Any]  # what a class keeps under keys that are no parameter's
    groups: Sequence[Mapping[str, Any]]
    # State that is cut already, and ours to keep, by the tensors of the inner optimizers.
    pieces: Mapping[torch.Tensor, Mapping[str, Any]] = field(default_factory=dict)
    masters: Mapping[torch.Tensor, torch.Tensor] = field(default_factory=dict)  # likewise
    lacks_masters: bool = False  # with some of the state that is cut, on any rank
    has_pieces: bool = False  # there is state that is cut, on any rank
    group_of: Mapping[torch.Tensor, int] = field(default_factory=dict)  # of whole parameters

    @property
    def is_empty(self) -> bool:
        """Whether no rank loads any state. Options may be loaded."""
        return not (self.states or self.common or self.pieces or self.has_pieces)


class StateDictMisfit(ValueError, KeyError, IndexError):
    """A state dict that is not whole. Also what torch's class raises then."""

    def __str__(self) -> str:  # a KeyError would print the repr
        return str(self.args[0])


def checked(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    cuttable: set[torch.Tensor],
) -> Loadable:
    """``state_dict`` matched with our parameters, or the reason why it does not fit."""
    states, saved_groups = _parts_of(state_dict)
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the state dict has {len(saved_groups)} parameter groups, the optimizer {len(groups)}"
        )
    by_id: dict[Any, torch.Tensor] = {}
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        _check_group(number, saved, len(group["params"]))
        for key, param in zip(saved["params"], group["params"], strict=True):
            if by_id.setdefault(key, param) is not param:
                raise ValueError(f"the state dict lists parameter {key} more than once")
    unknown = [key for key in states if isinstance(key, int) and key not in by_id]
    if unknown:
        raise StateDictMisfit(
            f"the state dict holds state of parameters {shown(unknown[:5])}, which none of its "
            "groups lists"
        )
    found = Loadable(
        {by_id[key]: state for key, state in states.items() if key in by_id},
        {key: _copied(state) for key, state in states.items() if key not in by_id},
        [_copied(dict(saved)) for saved in saved_groups],
        group_of={
            param: number for number, group in enumerate(groups) for param in group["params"]
        },
    )
    for key, param in by_id.items():
        if param in found.states:
            _check_state(key, found.states[param], param, param in cuttable)
    return found


def _parts_of(state_dict: Mapping[str, Any]) -> tuple[Mapping[Any, Any], Sequence[Any]]:
    """Its two entries, if they have the right types."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise StateDictMisfit(f"the state dict has no {key!r}: is it one of an optimizer?")
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(states, Mapping) or not isinstance(groups, (list, tuple)):
        raise TypeError(
            "a state dict needs a dict under 'state' and a list under 'param_groups', got "
            f"{type(states).__name__} and {type(groups).__name__}"
        )
    return states, groups


def _check_group(number: int, saved: Any, count: int) -> None:
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        raise TypeError(f"group {number} of the state dict must be a dict of options, by name")
    if "params" not in saved:
        raise StateDictMisfit(f"group {number} of the state dict has no 'params'")
    ids = saved["params"]
    if not isinstance(ids, (list, tuple)) or not all(isinstance(key, (int, str)) for key in ids):
        raise TypeError(f"the 'params' of group {number} of the state dict must be numbers")
    if len(ids) != count:
        raise ValueError(
            f"group {number} of the state dict has {len(ids)} parameters, that of the optimizer "
            f"{count}"
        )
    if "param_names" in saved:
        check_names(saved["param_names"], count)


def _check_state(number: Any, state: Any, param: torch.Tensor, cuttable: bool) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state of parameter {number} must be a dict, got {type(state).__name__}"
        )
    for key, value in state.items():
        is_tensor = isinstance(value, torch.Tensor)
        shape = tuple(value.shape) if is_tensor else None
        if shape != tuple(param.shape) and (key == MASTER or (shape and cuttable)):
            found = f"is a {type(value).__name__}" if shape is None else f"has shape {shape}"
            raise ValueError(
                f"the state {shown(key)} of parameter {number} {found}, the parameter has shape "
                f"{tuple(param.shape)}: is the state dict of another model or optimizer class?"
            )
        if is_tensor and (value.is_meta or (value.layout is not torch.strided and cuttable)):
            what = "on the meta device" if value.is_meta else f"sparse ({value.layout})"
            raise ValueError(
                f"the state {shown(key)} of parameter {number} is {what}: it has no values that "
                "could be cut over the ranks"
            )
        if is_tensor and value.is_complex() and not param.is_complex():
            raise ValueError(
                f"the state {shown(key)} of parameter {number} is complex, the parameter is real: "
                "half of it would be lost"
            )
        if is_tensor and value.layout is torch.strided and _is_hollow(value):
            raise ValueError(
                f"the state {shown(key)} of parameter {number} claims {value.nbytes:,} bytes, of "
                "which it holds but a few: expanded, it would not fit into memory"
            )


_MOST_EXPANDED = 1 << 30  # bytes


def _is_hollow(tensor: torch.Tensor) -> bool:
    """Whether its elements share memory, and would need much if they did not. A rank copies the
    state that it owns: all of them refuse what would be too much for one."""
    try:
        held = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return False
    return tensor.nbytes > max(held, _MOST_EXPANDED)


def _copied(value: Any) -> Any:
    """The caller keeps the original, whatever it is."""
    try:
        return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    except Exception as error:  # too deep, too large, or an object that refuses
        raise ValueError(
            f"the state dict holds {shown(type(value))}, which cannot be copied: {shown(error)}"
        ) from error


_SAMPLED = 16  # elements of a tensor


def in_outline(
    loadable: Loadable, params: Sequence[torch.Tensor], names: Sequence[str]
) -> list[str]:
    """The state of whole parameters in a few words, by which ranks find out whether they were
    given the same. Elements are sampled: another step or run is told apart, a single bit is not."""
    lines = []
    for param, name in zip(params, names, strict=True):
        for key, value in loadable.states.get(param, {}).items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                numbers = ", ".join(f"{number:.9g}" for number in _sample(value))
                lines.append(f"{name}: loaded {key} of shape {tuple(value.shape)}: {numbers}")
            elif isinstance(value, (bool, int, float)):
                lines.append(f"{name}: loaded {key} = {shown(value)}")
    return lines


def _sample(tensor: torch.Tensor) -> list[float]:
    """Some elements, evenly spread, without a copy of the rest."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    count = min(_SAMPLED, values.numel())
    places = torch.arange(count, device=values.device) * max(1, values.numel() // max(1, count))
    found = values[torch.unravel_index(places, values.shape)] if values.dim() else values
    numbers: list[float] = found.detach().flatten().double().tolist()
    return numbers


def load(local: LocalOptimizer, loadable: Loadable) -> None:
    """Give each inner optimizer its part, once all have rehearsed."""
    for inner in local.inners:
        _rehearse(local, inner, loadable)
    for inner in local.inners:
        _load_into(inner.optimizer, _dict_for(local, inner, loadable))


def _load_into(optimizer: Optimizer, part: dict[str, Any]) -> None:
    try:
        optimizer.load_state_dict(part)
    except RecursionError as error:  # classes walk through what they are given
        raise ValueError("the state dict holds containers that hold themselves") from error
    except Exception as error:
        name = class_name(type(optimizer))
        if not is_torchs(name):
            raise  # it may refuse in words of its own
        # Torch's do not look, and then miss something: a bare KeyError says nothing of the dict.
        raise StateDictMisfit(f"{name} cannot load the state dict: {shown(error)}") from error


def _rehearse(local: LocalOptimizer, inner: Inner, loadable: Loadable) -> None:
    """Have the class load the state of all parameters, each of them without elements.

    Why: a rank loads its own pieces only. What the class refuses in one of them, all ranks must
    refuse. Classes that are not torch's may want tensors as they are, and are not asked.
    """
    cls = type(inner.optimizer)
    if not (loadable.states and is_torchs(class_name(cls))):
        return
    groups: dict[int, dict[str, Any]] = {
        number: {**options_of(inner_group), "params": []}
        for number, inner_group in zip(inner.groups, inner.optimizer.param_groups, strict=True)
    }
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for param, state in loadable.states.items():
        group = groups.get(loadable.group_of.get(param, -1))
        if group is not None:
            dtype = updated_in(param.dtype, local.master_dtype)
            empty = torch.empty([0] * param.dim(), dtype=dtype, device=param.device)
            group["params"].append(empty)
            states[empty] = {key: _outlined(v) for key, v in state.items() if key != MASTER}
    try:
        stand_in = local.construct(cls, list(groups.values()))
    except Exception:  # a class that takes no such tensors
        return
    numbering = Numbering.of(stand_in.param_groups)
    saved = [
        {**options_of(loadable.groups[number]), "params": ids}
        for number, ids in zip(inner.groups, numbering.groups, strict=True)
    ]
    numbered = {numbering.ids[empty]: state for empty, state in states.items()}
    _load_into(stand_in, {"state": numbered, "param_groups": saved})


def _outlined(value: Any) -> Any:
    """A state value without the elements of a tensor."""
    if isinstance(value, torch.Tensor) and value.dim():
        return torch.empty([0] * value.dim(), dtype=value.dtype, device=value.device)
    return _copied(value)


def _dict_for(local: LocalOptimizer, inner: Inner, loadable: Loadable) -> dict[str, Any]:
    numbering = Numbering.of(inner.optimizer.param_groups)
    state: dict[Any, Any] = {
        numbering.ids[owned.tensor]: {
            key: _part_of(owned, value)
            for key, value in loadable.states[owned.param].items()
            if key != MASTER
        }
        for owned in local.pieces
        if owned.param in loadable.states and owned.tensor in numbering.ids
    }
    for tensor, of_piece in loadable.pieces.items():
        if tensor in numbering.ids:
            state[numbering.ids[tensor]] = of_piece
    groups = [
        {**options_of(loadable.groups[number]), "params": ids}
        for number, ids in zip(inner.groups, numbering.groups, strict=True)
    ]
    return {"state": {**state, **_copied(loadable.common)}, "param_groups": groups}


class MasterReport(NamedTuple):
    """Whether there are master copies on one side only, of the parameters of any rank."""

    are_lacking: bool  # here, and not in what was loaded
    are_unused: bool  # in what was loaded, and not here


def compare_masters(
    loadable: Loadable, planned: Iterable[torch.Tensor], master_dtype: torch.dtype | None
) -> MasterReport:
    """The same on all ranks; of the parameters, those ``planned`` may have master copies."""
    lacking, unused = loadable.lacks_masters, False
    for param in planned:
        state = loadable.states.get(param, {})
        if updated_in(param.dtype, master_dtype) == param.dtype:
            unused |= MASTER in state
        else:
            lacking |= bool(state) and MASTER not in state
    return MasterReport(lacking, unused)


def with_ranks_told(transport: Transport, local: LocalOptimizer, loadable: Loadable) -> Loadable:
    """With the knowledge of all ranks of which master copies and which state there are.
    Collective."""
    lacks = any(
        owned.has_master
        and loadable.pieces.get(owned.tensor)
        and owned.tensor not in loadable.masters
        for owned in local.pieces
    )
    mine = [int(lacks), int(bool(loadable.pieces))]
    told = torch.tensor(mine, device=transport.control_device)
    transport.maximum(told).wait()
    lacks_masters, has_pieces = map(bool, told.tolist())
    return replace(loadable, lacks_masters=lacks_masters, has_pieces=has_pieces)


def load_masters(local: LocalOptimizer, loadable: Loadable) -> None:
    """Give the master copies what was saved of them; others are made anew."""
    found = dict(loadable.masters)
    for owned in local.pieces:
        state = loadable.states.get(owned.param, {})
        if owned.has_master and MASTER in state:
            found[owned.tensor] = _part_of(owned, state[MASTER])
    local.masters.load(found)


def _part_of(owned: OwnedPiece, value: Any) -> Any:
    """This piece's part of a state value: a copy, because the caller keeps the original."""
    if not isinstance(value, torch.Tensor) or owned.is_whole or value.dim() == 0:
        return _copied(value)
    laid_out = in_layout_of(owned.param, value.detach())
    return flat_range(laid_out, owned.piece.start, owned.piece.stop).clone()
