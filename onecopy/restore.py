"""Loading a full state dict: ours, the plain class's, or torch's own sharded class's.

Everything is checked first, with the same verdict on every rank, because loading is not
collective. Then every inner optimizer loads a dict that was cut for it with its own
``load_state_dict``, so that the rules of its class (casts, where ``step`` lives) hold.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from onecopy.buffers import flat_range, in_layout_of
from onecopy.inner import Inner
from onecopy.intake import options_of
from onecopy.local import LocalOptimizer
from onecopy.pieces import MASTER, OwnedPiece, updated_in
from onecopy.state import Numbering
from onecopy.transport import Transport


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


def checked(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    cuttable: set[torch.Tensor],
) -> Loadable:
    """``state_dict`` matched with our parameters, or the reason why it does not fit."""
    states, saved_groups = state_dict["state"], state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the state dict has {len(saved_groups)} parameter groups, the optimizer {len(groups)}"
        )
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"group {number} of the state dict has {len(saved['params'])} parameters, that of "
                f"the optimizer {len(group['params'])}"
            )
    saved_ids = chain.from_iterable(saved["params"] for saved in saved_groups)
    ours = chain.from_iterable(group["params"] for group in groups)
    by_id = dict(zip(saved_ids, ours, strict=True))
    unknown = [key for key in states if isinstance(key, int) and key not in by_id]
    if unknown:
        raise IndexError(
            f"the state dict holds state of parameters {unknown[:5]}, which none of its groups "
            "lists"
        )
    found = Loadable(
        {by_id[key]: state for key, state in states.items() if key in by_id},
        {key: state for key, state in states.items() if key not in by_id},
        saved_groups,
    )
    for key, param in by_id.items():
        if param in found.states:
            _check_state(key, found.states[param], param, param in cuttable)
    return found


def _check_state(number: Any, state: Any, param: torch.Tensor, cuttable: bool) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state of parameter {number} must be a dict, got {type(state).__name__}"
        )
    for key, value in state.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if shape != tuple(param.shape) and (key == MASTER or (shape and cuttable)):
            found = f"is a {type(value).__name__}" if shape is None else f"has shape {shape}"
            raise ValueError(
                f"the state {key!r} of parameter {number} {found}, the parameter has shape "
                f"{tuple(param.shape)}: is the state dict of another model or optimizer class?"
            )


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
                lines.append(f"{name}: loaded {key} = {value}")
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
    """Give each inner optimizer its part."""
    for inner in local.inners:
        inner.optimizer.load_state_dict(_dict_for(local, inner, loadable))


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
    return {"state": {**state, **copy.deepcopy(loadable.common)}, "param_groups": groups}


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


def with_lack_told(transport: Transport, local: LocalOptimizer, loadable: Loadable) -> Loadable:
    """With the knowledge of all ranks of which master copies there are. Collective."""
    lacks = any(
        owned.has_master
        and loadable.pieces.get(owned.tensor)
        and owned.tensor not in loadable.masters
        for owned in local.pieces
    )
    told = torch.tensor([int(lacks)], device=transport.control_device)
    transport.maximum(told).wait()
    return replace(loadable, lacks_masters=bool(told))


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
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if owned.is_whole or value.dim() == 0:
        return value.detach().clone()
    laid_out = in_layout_of(owned.param, value.detach())
    return flat_range(laid_out, owned.piece.start, owned.piece.stop).clone()
