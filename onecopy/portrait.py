"""An optimizer's share of the state as a checkpoint sees it: named, and of unsharded shape.

A ``Portrait`` shows the share as a tree in the form of torch's ``get_optimizer_state_dict``::

    {"state": {"layer.weight": {"step": Fragment, "exp_avg": Fragment, ...}, ...},
     "param_groups": [{"lr": 0.1, ..., "params": ["layer.weight", ...]}]}

and turns such a tree, with its fragments filled, back into the state of each piece.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onecopy.blueprint import Maker, is_toy_shaped, number_at_start
from onecopy.boxes import storage_order
from onecopy.buffers import is_dense
from onecopy.fragments import Fragment, Part, rebuilt, replaced
from onecopy.intake import options_of
from onecopy.kinds import Kind, class_name, is_torchs
from onecopy.local import LocalOptimizer
from onecopy.parcels import NotPlain, encode
from onecopy.pieces import MASTER, OwnedPiece
from onecopy.plan import Plan
from onecopy.roster import Roster
from onecopy.state import require_cut_state

PieceStates = dict[torch.Tensor, dict[str, Any]]  # by the tensors of the inner optimizers
MasterCopies = dict[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Portrait:
    """An optimizer's share of the state, as a checkpoint sees it."""

    local: LocalOptimizer
    roster: Roster
    plan: Plan
    groups: Sequence[Mapping[str, Any]]  # with the options that decide what state there is
    names: Sequence[str]  # of the parameters, by their number
    rank: int
    # What toys showed, by group and dtype: most parameters are alike.
    _toys: dict[Any, dict[str, Any]] = field(default_factory=dict, init=False)
    _changes: dict[Any, bool] = field(default_factory=dict, init=False)

    # ------------------------------------------------------------------ showing

    def tree(self, live: bool = True) -> dict[str, Any]:
        """The share, with fragments of the live state, or of what the class would make.

        Where there is no state yet, fragments have the values with which the class starts.
        """
        self._require_no_common_state()
        state = {}
        for index in self.indices():
            pieces = self.local.of(self.roster.params[index])
            of_param = self._state_of(index, pieces, live) if pieces else {}
            if of_param:
                state[self.names[index]] = of_param
        return {"state": {**state, **self._state_of_frozen()}, "param_groups": self.group_trees()}

    def group_trees(self) -> list[dict[str, Any]]:
        found = []
        for number, group in enumerate(self.groups):
            for key, value in options_of(group).items():
                self._require_plain(value, f"option {key!r} of group {number}")
            options = replaced(options_of(group), torch.Tensor, self._shared)
            found.append({**options, "params": self.names_in(number)})
        return found

    def names_in(self, number: int) -> list[str]:
        """The names of the parameters of a group."""
        entries = zip(self.names, self.roster.entries, strict=True)
        return [name for name, entry in entries if entry.group == number]

    def indices(self) -> list[int]:
        return sorted(self.plan.params)

    def _state_of(self, index: int, pieces: Sequence[OwnedPiece], live: bool) -> dict[str, Any]:
        state = self._inner_state_of(index, pieces, live)
        if not pieces[0].has_master:
            return state
        masters = [owned.tensor.detach() for owned in pieces]
        if pieces[0].is_whole:
            return {**state, MASTER: Fragment.of_whole(masters[0])}
        return {**state, MASTER: self._cut_fragment(pieces, masters)}

    def _inner_state_of(
        self, index: int, pieces: Sequence[OwnedPiece], live: bool
    ) -> dict[str, Any]:
        # An empty state is none: a class may have looked for one.
        states = [self.local.state.get(owned.tensor) or None if live else None for owned in pieces]
        if any(state is None for state in states):
            return self._start(index, pieces)
        if pieces[0].is_whole:
            (state,) = states
            self._require_plain(state, f"the state of {self.names[index]}")
            shown: dict[str, Any] = replaced(dict(state or {}), torch.Tensor, Fragment.of_whole)
            return shown
        self._require_plain(states[0], f"the state of {self.names[index]}")
        require_cut_state(states[0] or {}, self.names[index])
        return {
            str(key): self._cut_value(pieces, [state[key] for state in states if state])
            for key in states[0] or ()
        }

    def _cut_value(self, pieces: Sequence[OwnedPiece], values: Sequence[Any]) -> Any:
        if not isinstance(values[0], torch.Tensor):
            return values[0]
        if values[0].shape != (pieces[0].piece.numel,):
            return Fragment.of_whole(values[0], is_mine_to_write=_has_first(pieces))
        return self._cut_fragment(pieces, [value.detach() for value in values])

    def _cut_fragment(self, pieces: Sequence[OwnedPiece], data: Sequence[torch.Tensor]) -> Fragment:
        param = pieces[0].param
        parts = tuple(
            Part(owned.piece.start, owned.piece.stop, values)
            for owned, values in zip(pieces, data, strict=True)
        )
        return Fragment(tuple(param.shape), storage_order(param.shape, param.stride()), parts)

    def maker(self, index: int) -> Maker:
        number = self.roster.entries[index].group
        group, cls = self.groups[number], self.roster.policies[number].optimizer_class
        options = options_of(group)
        return Maker(
            cls,
            lambda stand_in: self.local.construct(cls, [{"params": [stand_in], **options}]),
            group.get("lr", 0.0),
        )

    def _start(self, index: int, pieces: Sequence[OwnedPiece]) -> dict[str, Any]:
        """The state with which the class begins."""
        kind = self.roster.policies[self.roster.entries[index].group].kind
        if kind is Kind.ELEMENTWISE and is_dense(pieces[0].param):
            return self._elementwise_start(index, pieces)
        return self._whole_start(index, pieces[0].tensor)

    def _whole_start(self, index: int, tensor: torch.Tensor) -> dict[str, Any]:
        maker = self.maker(index)

        def started(key: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return number_at_start(value)
            device = tensor.device if value.is_meta else value.device
            return _started(value, maker.start_of(key), device)

        return {
            str(key): replaced(
                value, (torch.Tensor, int, float), functools.partial(started, str(key))
            )
            for key, value in maker.state_for(tensor).items()
        }

    def _elementwise_start(self, index: int, pieces: Sequence[OwnedPiece]) -> dict[str, Any]:
        maker, tensor = self.maker(index), pieces[0].tensor
        found: dict[str, Any] = {}
        look = (self.roster.entries[index].group, tensor.dtype, tensor.device)
        if look not in self._toys:
            self._toys[look] = maker.state_for_cut(tensor.dtype, tensor.device)
        for key, value in self._toys[look].items():
            if not isinstance(value, torch.Tensor):
                found[key] = number_at_start(value)
            elif is_toy_shaped(value):
                start = maker.start_of(key)
                data = [_repeated(value, start, owned.piece.numel) for owned in pieces]
                found[key] = self._cut_fragment(pieces, data)
            else:
                whole = _started(value, maker.start_of(key), value.device)
                found[key] = replace(whole, is_mine_to_write=_has_first(pieces))
        return found

    def _state_of_frozen(self) -> dict[str, Any]:
        """State that a class makes in its constructor, for parameters that are not planned too."""
        found = {}
        for index, made in self.made_for_frozen().items():
            found[self.names[index]] = replaced(dict(made), torch.Tensor, self._shared)
        return found

    def _shared(self, tensor: torch.Tensor) -> Fragment:
        """What all ranks have alike."""
        return Fragment.of_whole(tensor, is_mine_to_write=self.rank == 0)

    def made_for_frozen(self) -> dict[int, Mapping[str, Any]]:
        found = {}
        for index in self.roster.unplanned(self.plan):
            number, param = self.roster.entries[index].group, self.roster.params[index]
            cls = self.roster.policies[number].optimizer_class
            made = self.local.state_made_at_once(cls, self.groups[number], [param])
            if param in made:
                found[index] = made[param]
        return found

    def written_here(self) -> set[str]:
        """The parameters whose values that are not tensors it is for this rank to write."""
        pieces = [(name, self.local.of(self.roster.params[i])) for i, name in enumerate(self.names)]
        return {name for name, of in pieces if (_has_first(of) if of else self.rank == 0)}

    def _require_plain(self, value: Any, what: str) -> None:
        try:
            encode(value, [])
        except NotPlain as error:
            raise TypeError(
                f"{what} holds {error}, which a checkpoint cannot carry: only tensors, numbers, "
                "strings, None and containers of them"
            ) from None

    def _require_no_common_state(self) -> None:
        for inner in self.local.inners:
            for key in inner.optimizer.state:
                if not isinstance(key, torch.Tensor):
                    raise TypeError(
                        f"{type(inner.optimizer).__name__} keeps state under {key!r}, which "
                        "belongs to no parameter: a sharded checkpoint has no place for it. Use "
                        "consolidate_state_dict() and state_dict()"
                    )

    # ------------------------------------------------------------------ reading back

    def pieces_from(self, states: Mapping[str, Any]) -> tuple[PieceStates, MasterCopies]:
        """The state of each piece and its master copy, by the tensor of the inner optimizer, from
        the ``"state"`` of a tree."""
        found: PieceStates = {}
        masters: MasterCopies = {}
        for index in self.indices():
            state = states.get(self.names[index])
            pieces = self.local.of(self.roster.params[index]) if state is not None else ()
            for number, owned in enumerate(pieces):
                of_piece = {
                    key: replaced(value, Fragment, functools.partial(_taken, number))
                    for key, value in (state or {}).items()
                }
                if owned.has_master and MASTER in of_piece:
                    masters[owned.tensor] = of_piece.pop(MASTER)
                found[owned.tensor] = self._in_its_containers(index, owned, of_piece)
        return found, masters

    # ------------------------------------------------------------------ what is frozen, forms

    def frozen_from(self, states: Mapping[str, Any]) -> dict[torch.Tensor, dict[str, Any]]:
        """State of parameters that are not planned, which every rank has whole."""
        names = {index: self.names[index] for index in self.made_for_frozen()}
        return {
            self.roster.params[index]: replaced(states[name], Fragment, Fragment.whole)
            for index, name in names.items()
            if name in states
        }

    def may_change_form(self, index: int) -> bool:
        """Whether the state of a parameter may come to have another form as it trains: that of a
        class that is not torch's."""
        policy = self.roster.policies[self.roster.entries[index].group]
        return not is_torchs(class_name(policy.optimizer_class))

    def outlined(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> Fragment | None:
        """What this rank would have of a tensor of the state of a parameter, if it can have one
        of that shape."""
        param = self.roster.params[index]
        pieces = self.local.of(param)
        outline = torch.zeros((), dtype=dtype, device=param.device)
        if tuple(shape) == tuple(param.shape) and is_dense(param):
            return self._cut_fragment(pieces, [outline.expand(o.piece.numel) for o in pieces])
        if pieces[0].is_whole or not shape:
            part = Part(0, torch.Size(shape).numel(), outline.expand(torch.Size(shape).numel()))
            return Fragment(tuple(shape), tuple(range(len(shape))), (part,))
        return None

    def changes_form(self, index: int) -> bool:
        """Whether it is seen to do so, on a small parameter."""
        entry = self.roster.entries[index]
        look = (entry.group, entry.param.dtype, entry.param.dim())
        if look not in self._changes:
            changes = self.may_change_form(index) and self.maker(index).changes_form(entry.param)
            self._changes[look] = changes
        return self._changes[look]

    def require_steady_forms(self) -> None:
        """Raise if a class makes more state than what its first step makes: whoever reads no more
        than that would leave the rest behind."""
        for index in filter(self.changes_form, self.indices()):
            policy = self.roster.policies[self.roster.entries[index].group]
            raise ValueError(
                f"{policy.optimizer_class.__name__} changes the form of its state as it trains, "
                "and dcp.load reads only the form that it is given: use optimizer.load(path, "
                "module), which takes the form from the checkpoint"
            )

    def names_owned(self) -> list[str]:
        """The parameters of which this rank has pieces."""
        params = self.roster.params
        return [self.names[index] for index in self.indices() if self.local.of(params[index])]

    def _in_its_containers(self, index: int, owned: OwnedPiece, state: Any) -> dict[str, Any]:
        """Files know lists and string keys only; state of other forms is like the class makes."""
        if owned.is_whole and any(isinstance(v, (dict, list, tuple)) for v in state.values()):
            state = rebuilt(self.maker(index).state_for(owned.tensor), state)
        return dict(state)


def _has_first(pieces: Sequence[OwnedPiece]) -> bool:
    return any(owned.piece.start == 0 for owned in pieces)


def _repeated(
    like: torch.Tensor, start: float, count: int, device: torch.device | None = None
) -> torch.Tensor:
    """So many times the start of a state: one element in memory. Integers start at zero."""
    value = start if like.is_floating_point() or like.is_complex() else 0
    return torch.tensor(value, dtype=like.dtype, device=device or like.device).expand(count)


def _started(like: torch.Tensor, start: float, device: torch.device) -> Fragment:
    """A tensor like this one in which everything is at its start."""
    part = Part(0, like.numel(), _repeated(like, start, like.numel(), device))
    order = storage_order(like.shape, like.stride()) if is_dense(like) else tuple(range(like.dim()))
    return Fragment(tuple(like.shape), order, (part,))


def _taken(number: int, fragment: Fragment) -> torch.Tensor:
    """The data of the ``number``-th piece; each has a scalar of its own."""
    if fragment.parts[0].stop - fragment.parts[0].start < torch.Size(fragment.shape).numel():
        return fragment.parts[number].data
    return fragment.whole().clone() if number else fragment.whole()
