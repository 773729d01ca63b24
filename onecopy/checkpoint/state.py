"""The state that this rank owns, named and cut as checkpoints need it."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onecopy.comm.transfer import NotPlain, encode
from onecopy.planning.layout import Chunk, chunks_of, flat_range, is_dense, storage_order
from onecopy.planning.param_groups import MASTER, ParamRegistry
from onecopy.planning.plan import Plan
from onecopy.planning.traits import (
    Kind,
    StateTemplate,
    class_name,
    is_torch_class,
    is_toy_shaped,
    number_at_start,
    options_of,
    tensors_in,
)
from onecopy.sharding.inner import InnerOptimizers
from onecopy.sharding.owned import OwnedShard
from onecopy.sharding.parameter_changes import names_in
from onecopy.torch_private import WRAPPED_MODULES

BY_INDEX = "by_index."


def checkpoint_names(
    registry: ParamRegistry, groups: Sequence[Mapping[str, Any]], module: torch.nn.Module | None
) -> list[str]:
    """A name for every parameter, by its number in the roster."""
    if module is not None:
        known = names_in(module)
        lost = [entry.name for entry in registry.entries if entry.param not in known]
        if lost:
            raise ValueError(
                f"{', '.join(lost[:5])}{', ...' * (len(lost) > 5)}: not in the module that was "
                "given. Pass the module whose parameters this optimizer updates"
            )
        names = [known[entry.param] for entry in registry.entries]
    else:
        given = _given_names(groups)
        names = [
            given.get(entry.param, f"{BY_INDEX}{index}")
            for index, entry in enumerate(registry.entries)
        ]
        if all(name.startswith("module.") for name in names):
            names = [name.removeprefix("module.") for name in names]  # named by a DDP wrapper
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two parameters are called {twice!r}: a checkpoint needs unique names")
    return names


def describe_names(registry: ParamRegistry, names: Sequence[str]) -> list[str]:
    """Lines for agreement: the ranks must give the same names to the same parameters."""
    return [
        f"{entry.name} is called {name}" if name else f"{entry.name} is not in the module"
        for entry, name in zip(registry.entries, names, strict=True)
    ]


def _given_names(groups: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, str]:
    found: dict[torch.Tensor, str] = {}
    for group in groups:
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False):
            parts = [part for part in name.split(".") if part not in WRAPPED_MODULES]
            found.setdefault(param, ".".join(parts))
    return found


def require_cut_state(state: Mapping[str, Any], whose: str) -> None:
    """Raise where it cannot be told which tensors of a piece's state are parts of a whole."""
    for key, value in state.items():
        tensors: list[torch.Tensor] = []
        if isinstance(value, (dict, list, tuple)):
            encode(value, tensors)
        if tensors:
            raise TypeError(
                f"the state {key!r} of {whose} is a {type(value).__name__} of tensors, and the "
                "parameter is cut over the ranks: they cannot be put together again. Use "
                'partition="whole"'
            )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory is one run of its values: dense, and not a lazy view."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if is_dense(tensor) else tensor.contiguous()


class Begun(enum.IntEnum):
    """Whether state that was read existed when it was written."""

    YES = 0
    CANNOT_BE_TOLD = 1  # it has no elements
    NO = 2


def begun(state: Mapping[str, Any], maker: StateTemplate) -> Begun:
    """State that did not exist was written as negative zeros throughout."""
    marks = [
        leaf
        for key, value in state.items()
        if maker.is_marked(key)
        for leaf in tensors_in(value)
        if leaf.is_floating_point()
    ]
    with_elements = [mark for mark in marks if mark.numel()]
    if marks and not with_elements:
        return Begun.CANNOT_BE_TOLD
    # The first elements tell in nearly all cases, without reading everything.
    zeros = all(
        _is_negative_zero(mark.flatten()[:1]) and _is_negative_zero(mark) for mark in with_elements
    )
    return Begun.NO if with_elements and zeros else Begun.YES


def _is_negative_zero(values: torch.Tensor) -> bool:
    return bool(((values == 0) & torch.signbit(values)).all())


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of a tensor in storage order, and where they are."""

    start: int
    stop: int
    data: torch.Tensor  # 1-D


@dataclass(frozen=True, slots=True)
class Fragment:
    """What this rank holds of a tensor."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # of the dimensions in storage
    parts: tuple[Part, ...]
    is_mine_to_write: bool = True  # a scalar is on many ranks, and one writes it

    @classmethod
    def of_whole(cls, tensor: torch.Tensor, is_mine_to_write: bool = True) -> Fragment:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        tensor = tensor if is_dense(tensor) else tensor.contiguous()
        part = Part(0, tensor.numel(), flat_range(tensor, 0, tensor.numel()))
        order = storage_order(tensor.shape, tensor.stride())
        return cls(tuple(tensor.shape), order, (part,), is_mine_to_write)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].data.dtype

    @property
    def nbytes(self) -> int:
        return sum(part.stop - part.start for part in self.parts) * self.dtype.itemsize

    def boxes(self) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """The parts as boxes of the tensor, with views of the data."""
        for part in self.parts:
            for box in chunks_of(self.shape, self.order, part.start, part.stop):
                yield box, box.view(part.data, part.start, self.order)

    def like(self) -> Fragment:
        """The same with fresh memory, to be filled."""
        parts = [
            replace(part, data=part.data.new_empty(part.stop - part.start)) for part in self.parts
        ]
        return replace(self, parts=tuple(parts))

    def staged(self) -> Fragment:
        """A copy on the CPU, which the optimizer's next step does not change."""
        parts = [replace(part, data=part.data.to("cpu", copy=True)) for part in self.parts]
        return replace(self, parts=tuple(parts))

    def __deepcopy__(self, _: Any) -> Fragment:
        """torch's stagers copy objects deeply: without this they would walk through all of it."""
        return self.staged()

    def whole(self) -> torch.Tensor:
        """The tensor itself, where this rank has all of it in one part."""
        (box,) = self.boxes()
        return box[1]


Leaf = type | tuple[type, ...]


def replaced(tree: Any, leaf: Leaf, change: Callable[[Any], Any]) -> Any:
    """The tree with every leaf of a type replaced; tuples become lists, which DCP looks into."""
    if isinstance(tree, leaf):
        return change(tree)
    if isinstance(tree, dict):
        return {str(key): replaced(value, leaf, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and has_leaf(tree, leaf):
        return [replaced(value, leaf, change) for value in tree]
    return tree


def has_leaf(tree: Any, leaf: Leaf) -> bool:
    if isinstance(tree, (dict, list, tuple)):
        return any(has_leaf(v, leaf) for v in (tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, leaf)


def rebuilt(like: Any, tree: Any) -> Any:
    """``tree``, which may have gone through a file, in the containers and with the keys of
    ``like``."""
    if isinstance(like, dict) and isinstance(tree, dict):
        keys = {str(key): key for key in like}
        return {
            keys.get(key, key): rebuilt(like.get(keys.get(key)), value)
            for key, value in tree.items()
        }
    if isinstance(like, (list, tuple)) and isinstance(tree, (list, tuple)):
        # A list may have grown: the items that came later are like the last.
        examples = itertools.chain(like, itertools.repeat(like[-1] if like else None))
        items = [rebuilt(a, b) for a, b in zip(examples, tree, strict=False)]
        return tuple(items) if isinstance(like, tuple) else items
    return tree


Path_ = tuple[str | int, ...]


def dotted(path: Path_) -> str:
    """A path as DCP writes it."""
    return ".".join(map(str, path))


def leaves(tree: Any) -> Iterator[tuple[Path_, Any]]:
    """(path, value) of everything that has no fragments within it."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            for path, leaf in leaves(value):
                yield (str(key), *path), leaf
    elif isinstance(tree, list) and any(isinstance(v, (dict, list, Fragment)) for v in tree):
        for number, value in enumerate(tree):
            for path, leaf in leaves(value):
                yield (number, *path), leaf
    else:
        yield (), tree


ShardStates = dict[torch.Tensor, dict[str, Any]]  # by the tensors of the inner optimizers
LoadedMasters = dict[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateView:
    """An optimizer's share of the state, as a checkpoint sees it."""

    local: InnerOptimizers
    registry: ParamRegistry
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
            shards = self.local.of(self.registry.params[index])
            of_param = self._state_of(index, shards, live) if shards else {}
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
        entries = zip(self.names, self.registry.entries, strict=True)
        return [name for name, entry in entries if entry.group == number]

    def indices(self) -> list[int]:
        return sorted(self.plan.params)

    def _state_of(self, index: int, shards: Sequence[OwnedShard], live: bool) -> dict[str, Any]:
        state = self._inner_state_of(index, shards, live)
        if not shards[0].has_master:
            return state
        masters = [owned.tensor.detach() for owned in shards]
        if shards[0].is_whole:
            return {**state, MASTER: Fragment.of_whole(masters[0])}
        return {**state, MASTER: self._cut_fragment(shards, masters)}

    def _inner_state_of(
        self, index: int, shards: Sequence[OwnedShard], live: bool
    ) -> dict[str, Any]:
        # An empty state is none: a class may have looked for one.
        states = [self.local.state.get(owned.tensor) or None if live else None for owned in shards]
        if any(state is None for state in states):
            return self._start(index, shards)
        if shards[0].is_whole:
            (state,) = states
            self._require_plain(state, f"the state of {self.names[index]}")
            shown: dict[str, Any] = replaced(dict(state or {}), torch.Tensor, Fragment.of_whole)
            return shown
        self._require_plain(states[0], f"the state of {self.names[index]}")
        require_cut_state(states[0] or {}, self.names[index])
        return {
            str(key): self._cut_value(shards, [state[key] for state in states if state])
            for key in states[0] or ()
        }

    def _cut_value(self, shards: Sequence[OwnedShard], values: Sequence[Any]) -> Any:
        if not isinstance(values[0], torch.Tensor):
            return values[0]
        if values[0].shape != (shards[0].shard.numel,):
            return Fragment.of_whole(values[0], is_mine_to_write=_has_first(shards))
        return self._cut_fragment(shards, [value.detach() for value in values])

    def _cut_fragment(self, shards: Sequence[OwnedShard], data: Sequence[torch.Tensor]) -> Fragment:
        param = shards[0].param
        parts = tuple(
            Part(owned.shard.start, owned.shard.stop, values)
            for owned, values in zip(shards, data, strict=True)
        )
        return Fragment(tuple(param.shape), storage_order(param.shape, param.stride()), parts)

    def maker(self, index: int) -> StateTemplate:
        number = self.registry.entries[index].group
        group, cls = self.groups[number], self.registry.policies[number].optimizer_class
        options = options_of(group)
        return StateTemplate(
            cls,
            lambda stand_in: self.local.construct(cls, [{"params": [stand_in], **options}]),
            group.get("lr", 0.0),
        )

    def _start(self, index: int, shards: Sequence[OwnedShard]) -> dict[str, Any]:
        """The state with which the class begins."""
        kind = self.registry.policies[self.registry.entries[index].group].kind
        if kind is Kind.ELEMENTWISE and is_dense(shards[0].param):
            return self._elementwise_start(index, shards)
        return self._whole_start(index, shards[0].tensor)

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

    def _elementwise_start(self, index: int, shards: Sequence[OwnedShard]) -> dict[str, Any]:
        maker, tensor = self.maker(index), shards[0].tensor
        found: dict[str, Any] = {}
        look = (self.registry.entries[index].group, tensor.dtype, tensor.device)
        if look not in self._toys:
            self._toys[look] = maker.state_for_cut(tensor.dtype, tensor.device)
        for key, value in self._toys[look].items():
            if not isinstance(value, torch.Tensor):
                found[key] = number_at_start(value)
            elif is_toy_shaped(value):
                start = maker.start_of(key)
                data = [_repeated(value, start, owned.shard.numel) for owned in shards]
                found[key] = self._cut_fragment(shards, data)
            else:
                whole = _started(value, maker.start_of(key), value.device)
                found[key] = replace(whole, is_mine_to_write=_has_first(shards))
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
        for index in self.registry.unplanned(self.plan):
            number, param = self.registry.entries[index].group, self.registry.params[index]
            cls = self.registry.policies[number].optimizer_class
            made = self.local.state_made_at_once(cls, self.groups[number], [param])
            if param in made:
                found[index] = made[param]
        return found

    def written_here(self) -> set[str]:
        """The parameters whose values that are not tensors it is for this rank to write."""
        shards = [
            (name, self.local.of(self.registry.params[i])) for i, name in enumerate(self.names)
        ]
        return {name for name, of in shards if (_has_first(of) if of else self.rank == 0)}

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

    def pieces_from(self, states: Mapping[str, Any]) -> tuple[ShardStates, LoadedMasters]:
        """The state of each piece and its master copy, by the tensor of the inner optimizer, from
        the ``"state"`` of a tree."""
        found: ShardStates = {}
        masters: LoadedMasters = {}
        for index in self.indices():
            state = states.get(self.names[index])
            shards = self.local.of(self.registry.params[index]) if state is not None else ()
            for number, owned in enumerate(shards):
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
            self.registry.params[index]: replaced(states[name], Fragment, Fragment.whole)
            for index, name in names.items()
            if name in states
        }

    def may_change_form(self, index: int) -> bool:
        """Whether the state of a parameter may come to have another form as it trains: that of a
        class that is not torch's."""
        policy = self.registry.policies[self.registry.entries[index].group]
        return not is_torch_class(class_name(policy.optimizer_class))

    def outlined(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> Fragment | None:
        """What this rank would have of a tensor of the state of a parameter, if it can have one
        of that shape."""
        param = self.registry.params[index]
        shards = self.local.of(param)
        outline = torch.zeros((), dtype=dtype, device=param.device)
        if tuple(shape) == tuple(param.shape) and is_dense(param):
            return self._cut_fragment(shards, [outline.expand(o.shard.numel) for o in shards])
        if shards[0].is_whole or not shape:
            part = Part(0, torch.Size(shape).numel(), outline.expand(torch.Size(shape).numel()))
            return Fragment(tuple(shape), tuple(range(len(shape))), (part,))
        return None

    def changes_form(self, index: int) -> bool:
        """Whether it is seen to do so, on a small parameter."""
        entry = self.registry.entries[index]
        look = (entry.group, entry.param.dtype, entry.param.dim())
        if look not in self._changes:
            changes = self.may_change_form(index) and self.maker(index).changes_form(entry.param)
            self._changes[look] = changes
        return self._changes[look]

    def require_steady_forms(self) -> None:
        """Raise if a class makes more state than what its first step makes: whoever reads no more
        than that would leave the rest behind."""
        for index in filter(self.changes_form, self.indices()):
            policy = self.registry.policies[self.registry.entries[index].group]
            raise ValueError(
                f"{policy.optimizer_class.__name__} changes the form of its state as it trains, "
                "and dcp.load reads only the form that it is given: use optimizer.load(path, "
                "module), which takes the form from the checkpoint"
            )

    def names_owned(self) -> list[str]:
        """The parameters of which this rank has pieces."""
        params = self.registry.params
        return [self.names[index] for index in self.indices() if self.local.of(params[index])]

    def _in_its_containers(self, index: int, owned: OwnedShard, state: Any) -> dict[str, Any]:
        """Files know lists and string keys only; state of other forms is like the class makes."""
        if owned.is_whole and any(isinstance(v, (dict, list, tuple)) for v in state.values()):
            state = rebuilt(self.maker(index).state_for(owned.tensor), state)
        return dict(state)


def _has_first(shards: Sequence[OwnedShard]) -> bool:
    return any(owned.shard.start == 0 for owned in shards)


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


def not_begun(state_view: StateView) -> list[str]:
    """The parameters of this rank that have no state yet."""
    return [
        state_view.names[index]
        for index in state_view.indices()
        if any(
            not state_view.local.state.get(owned.tensor)
            for owned in state_view.local.of(state_view.registry.params[index])
        )
    ]


def beginnings(state_view: StateView, shards: Mapping[torch.Tensor, Any]) -> torch.Tensor:
    """What the pieces that were read here say of each parameter, as ``Begun``.

    A piece may hold negative zeros by chance: the least of what all ranks say counts.
    """
    said = torch.full((len(state_view.names),), Begun.NO, dtype=torch.int64, device="cpu")
    for index in state_view.indices():
        maker = state_view.maker(index)
        for owned in state_view.local.of(state_view.registry.params[index]):
            if owned.tensor in shards:
                said[index] = min(int(said[index]), begun(shards[owned.tensor], maker))
    return said


def names_not_begun(state_view: StateView, said: torch.Tensor) -> set[str]:
    """The parameters whose state did not exist, from what all ranks said. One that cannot be
    told, because it has no elements, is as the others of its group."""
    begun_groups = {
        entry.group
        for entry, verdict in zip(state_view.registry.entries, said.tolist(), strict=True)
        if verdict == Begun.YES
    }
    return {
        name
        for name, entry, verdict in zip(
            state_view.names, state_view.registry.entries, said.tolist(), strict=True
        )
        if verdict == Begun.NO
        or (verdict == Begun.CANNOT_BE_TOLD and entry.group not in begun_groups)
    }


def without(
    state_view: StateView, shards: Mapping[torch.Tensor, dict[str, Any]], not_begun: Container[str]
) -> dict[torch.Tensor, dict[str, Any]]:
    """The pieces of those parameters that had state."""
    dropped = {
        owned.tensor
        for name, param in zip(state_view.names, state_view.registry.params, strict=True)
        if name in not_begun
        for owned in state_view.local.of(param)
    }
    return {tensor: state for tensor, state in shards.items() if tensor not in dropped}
