"""Loading a full state dict: ours, the plain class's, or torch's own sharded class's.

Everything is checked first, with the same verdict on every rank, because loading is not
collective. Then every inner optimizer loads a dict that was cut for it with its own
``load_state_dict``, so that the rules of its class (casts, where ``step`` lives) hold.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from onecopy.buffers import flat_range, in_layout_of
from onecopy.inner import Inner
from onecopy.intake import options_of
from onecopy.local import LocalOptimizer
from onecopy.pieces import MASTER, OwnedPiece
from onecopy.state import Numbering


@dataclass(frozen=True, slots=True)
class Loadable:
    """State and options that fit the optimizer."""

    states: Mapping[torch.Tensor, Mapping[str, Any]]  # of whole parameters, to be cut
    common: dict[Any, Any]  # what a class keeps under keys that are no parameter's
    groups: Sequence[Mapping[str, Any]]
    # State that is cut already, and ours to keep, by the tensors of the inner optimizers.
    pieces: Mapping[torch.Tensor, Mapping[str, Any]] = field(default_factory=dict)
    masters: Mapping[torch.Tensor, torch.Tensor] = field(default_factory=dict)  # likewise


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
        odd = isinstance(value, torch.Tensor) and value.dim() and value.shape != param.shape
        if odd and (cuttable or key == MASTER):
            raise ValueError(
                f"the state {key!r} of parameter {number} has shape {tuple(value.shape)}, the "
                f"parameter {tuple(param.shape)}: is the state dict of another model or "
                "optimizer class?"
            )


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
    """Whether there are master copies on one side only, among this rank's pieces."""

    are_lacking: bool  # here, and not in what was loaded
    are_unused: bool  # in what was loaded, and not here


def load_masters(local: LocalOptimizer, loadable: Loadable) -> MasterReport:
    """Give the master copies what was saved of them; others are made anew."""
    found, lacking, unused = dict(loadable.masters), False, False
    for owned in local.pieces:
        state = loadable.states.get(owned.param, {})
        saved = state.get(MASTER)
        if not owned.has_master:
            unused |= saved is not None
        elif isinstance(saved, torch.Tensor):
            found[owned.tensor] = _part_of(owned, saved)
        elif owned.tensor not in found and (state or loadable.pieces.get(owned.tensor)):
            lacking = True
    local.take_masters(found)
    return MasterReport(lacking, unused)


def _part_of(owned: OwnedPiece, value: Any) -> Any:
    """This piece's part of a state value: a copy, because the caller keeps the original."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if owned.is_whole or value.dim() == 0:
        return value.detach().clone()
    laid_out = in_layout_of(owned.param, value.detach())
    return flat_range(laid_out, owned.piece.start, owned.piece.stop).clone()
