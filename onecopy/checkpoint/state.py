"""Optimizer state as a list of shards: collected for a checkpoint, and given back from one.

:class:`StateShard` is the only form in which checkpoints see state. :func:`collect` makes the list
of this rank, of live state or of what the class would make. Whoever loads fills
:meth:`StateShard.empty_like` of each shard of ``collect(view, live=False)``; :func:`states_of` puts
them together, and :func:`adopt` gives the states to the inner optimizers.

State that does not exist yet is saved as -0.0 throughout (:func:`without_uninitialized`).
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.comm.group import RankGroup
from onecopy.planning.layout import Chunk, chunks_of, is_dense, storage_order
from onecopy.planning.param_groups import MASTER, GroupPolicy, Groups, ParamRegistry
from onecopy.planning.text import shown
from onecopy.planning.traits import (
    NOT_OPTIONS,
    OUR_KEYS,
    Kind,
    StateTemplate,
    class_name,
    is_per_element,
    is_torch_class,
    options_of,
    tensors_in,
)
from onecopy.sharding.inner import InnerOptimizers, OwnedShard
from onecopy.sharding.sharded_params import ShardedParams, names_in
from onecopy.torch_private import WRAPPED_MODULES

BY_INDEX = "by_index."

Steps = tuple[str | int, ...]  # the way to a leaf of nested containers
States = dict[OwnedShard, dict[Any, Any]]  # what a class keeps of each, and the master copy


@dataclass(frozen=True, slots=True)
class StateShard:
    """Elements [start, stop) of one tensor of the unsharded optimizer state, in storage order; or a
    plain value."""

    param: int  # number in the registry
    path: Steps  # in the state of the parameter: ("exp_avg",), ("history", 0), (MASTER,)
    data: Any  # a tensor as the inner optimizer holds it, 1-D if it is cut; or a plain value
    start: int = 0
    stop: int = 0
    shape: tuple[int, ...] = ()  # of the unsharded tensor ...
    order: tuple[int, ...] = ()  # ... and the order of its dimensions in storage
    is_writer: bool = True  # of what several ranks hold alike (step), one rank writes it
    owned: OwnedShard | None = None  # whose state it is on this rank; None: of a frozen parameter
    tree: Any = None  # the state of which it is a leaf

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.data, torch.Tensor)

    @property
    def is_master(self) -> bool:
        return self.path == (MASTER,)

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size() if self.is_tensor else 0

    def chunks(self) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """The rectangular chunks of the unsharded tensor that are here, with views of the data."""
        is_cut = self.data.shape != self.shape
        for chunk in chunks_of(self.shape, self.order, self.start, self.stop):
            yield chunk, chunk.view(self.data, self.start, self.order) if is_cut else self.data

    def __deepcopy__(self, _: Any) -> StateShard:
        """On the CPU, without what it is part of. Why: torch's stagers copy objects deeply, and
        would copy the parameters too."""
        data = self.data.to("cpu", copy=True) if self.is_tensor else self.data
        return replace(self, data=data, owned=None, tree=None)

    def empty_like(self) -> StateShard:
        """The same with memory of its own, to be filled."""
        data = self.data.new_empty(self.stop - self.start)
        if self.data.shape != self.shape:
            return replace(self, data=data)
        ((chunk, _),) = self.chunks()
        return replace(self, data=chunk.view(data, 0, self.order))


@dataclass(frozen=True, slots=True)
class StateView:
    """What :func:`collect` reads of an optimizer, and the names of its parameters."""

    params: ShardedParams
    groups: Sequence[Mapping[str, Any]]  # with the options that decide what state there is
    names: Sequence[str]  # of the parameters, by their number
    rank: int
    # What classes make in their first step, by group and form of the tensor: most are alike.
    _first: dict[Any, Any] = field(default_factory=dict, init=False)

    def names_in(self, number: int) -> list[str]:
        """The names of the parameters of a group."""
        entries = zip(self.names, self.params.registry.entries, strict=True)
        return [name for name, entry in entries if entry.group == number]

    def policy(self, index: int) -> GroupPolicy:
        """Of the group of a parameter."""
        registry = self.params.registry
        return registry.policies[registry.entries[index].group]

    def template(self, index: int) -> StateTemplate:
        """Of the state of a parameter: its class, with the options of its group."""
        group = self.groups[self.params.registry.entries[index].group]
        cls, options = self.policy(index).optimizer_class, options_of(group)
        return StateTemplate(
            cls,
            lambda stand_in: self.params.inner.construct(cls, [{"params": [stand_in], **options}]),
            group.get("lr", 0.0),
        )


def made_for_frozen(
    params: ShardedParams, groups: Groups
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The state of each parameter that the plan does not hold, if the class makes it in its
    constructor; one after the other, for they may be large."""
    registry, plan = params.registry, params.plan
    makes_any: dict[int, bool] = {}  # by group: asked once, since thousands may be frozen
    for index, entry in enumerate(registry.entries):
        if index in plan.params:
            continue
        number, cls = entry.group, registry.policies[entry.group].optimizer_class
        if number not in makes_any:
            small = torch.nn.Parameter(torch.zeros(2, 2, device="cpu"))
            makes_any[number] = bool(params.inner.constructor_state(cls, groups[number], [small]))
        if makes_any[number]:
            made = params.inner.constructor_state(cls, groups[number], [entry.param])
            if entry.param in made:
                yield index, made[entry.param]


# -------------------------------------------------------------------------- trees


def leaves_of(tree: Any, what: str, path: Steps = ()) -> dict[Steps, Any]:
    """The tensors and plain values in nested containers, by the paths that DCP gives them.

    A list or tuple without tensors is one leaf, unless it is a list of dicts or lists. Raises
    ``TypeError`` if a checkpoint cannot carry ``what`` the tree is.

    >>> list(leaves_of({"step": 1, 2: [torch.zeros(1), None], "betas": (0.9, 0.99)}, "the state"))
    [('step',), ('2', 0), ('2', 1), ('betas',)]
    """
    items: Iterable[tuple[str | int, Any]]
    if tree is None or isinstance(tree, (torch.Tensor, bool, int, float, str)):
        return {path: tree}
    if isinstance(tree, dict) and all(isinstance(key, (str, int)) for key in tree):
        items = [(str(key), item) for key, item in tree.items()]
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        is_dict, kind = isinstance(tree, dict), type(tree).__name__
        found = "a dict with keys other than str and int" if is_dict else f"a value of type {kind}"
        raise TypeError(
            f"{what} holds {found}, which a checkpoint cannot carry: only tensors, numbers, "
            "strings, None and containers of them"
        )
    leaves = {
        at: leaf for key, item in items for at, leaf in leaves_of(item, what, (*path, key)).items()
    }
    if isinstance(tree, dict) or any(isinstance(leaf, torch.Tensor) for leaf in leaves.values()):
        return leaves
    if isinstance(tree, list) and any(isinstance(item, (dict, list)) for item in tree):
        return leaves
    return {path: rebuild(tree, {})}


def rebuild(
    tree: Any, leaves: Mapping[Steps, Any], as_saved: bool = False, path: Steps = ()
) -> Any:
    """The containers of a tree, with these leaves in place of its own. ``as_saved``: as DCP knows
    them, with text for keys and lists of tensors for tuples."""
    if path in leaves:
        return leaves[path]
    if isinstance(tree, dict):
        return {
            str(key) if as_saved else key: rebuild(item, leaves, as_saved, (*path, str(key)))
            for key, item in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        items = [rebuild(item, leaves, as_saved, (*path, n)) for n, item in enumerate(tree)]
        return tuple(items) if isinstance(tree, tuple) and not as_saved else items
    return tree


def leaves_of_state(state: Mapping[Any, Any], name: str, is_cut: bool) -> dict[Steps, Any]:
    """The leaves of the state of a parameter, or the error why it cannot be saved."""
    for key, value in state.items() if is_cut else ():
        if isinstance(value, (dict, list, tuple)) and tensors_in(value):
            raise TypeError(
                f"the state {key!r} of {name} is a {type(value).__name__} of tensors, and the "
                "parameter is cut over the ranks: they cannot be put together again. Use "
                'partition="whole"'
            )
    return leaves_of(dict(state), f"the state of {name}")


# -------------------------------------------------------------------------- collecting


def collect(view: StateView, live: bool = True) -> list[StateShard]:
    """The state of this rank as checkpoints need it, parameter by parameter.

    It is the live state. Of parameters that have none, or of all without ``live``, it is the state
    that the class would make, with the values with which it starts; -0.0 marks that it does not
    exist. Raises ``TypeError`` or ``ValueError`` if a checkpoint cannot carry the state.
    """
    for each in view.params.inner.inners:
        for key in each.optimizer.state:
            if not isinstance(key, torch.Tensor):
                raise TypeError(
                    f"{type(each.optimizer).__name__} keeps state under {key!r}, which "
                    "belongs to no parameter: a sharded checkpoint has no place for it. Use "
                    "consolidate_state_dict() and state_dict()"
                )
    found, inner = [], view.params.inner
    for index in sorted(view.params.plan.params):
        held = inner.of(view.params.registry.params[index])
        # An empty state is none: a class may have looked for one.
        states = [inner.state.get(owned.tensor) or None if live else None for owned in held]
        for owned, state in zip(held, states, strict=True):
            if state is None or None in states:
                found += _first_shards(view, owned)
            else:
                shards = _shards_of(view, owned, state)
                _require_first_form(view, owned, shards)
                found += shards
    for index, made in made_for_frozen(view.params, view.groups):
        leaves = leaves_of_state(made, view.names[index], is_cut=False)
        found += _as_shards(index, made, leaves, is_writer=view.rank == 0)
    return found


def collect_groups(view: StateView) -> list[list[StateShard]]:
    """The options of each group, and the names of its parameters under ``"params"``, for rank 0 to
    write. Here ``param`` is the number of the group."""
    found = []
    for number, group in enumerate(view.groups):
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        tree = {**options, "params": view.names_in(number)}
        leaves: dict[Steps, Any] = {}
        for key, value in tree.items():
            leaves |= leaves_of(value, f"option {key!r} of group {number}", (key,))
        found.append(_as_shards(number, tree, leaves, is_writer=view.rank == 0))
    return found


def _shards_of(view: StateView, owned: OwnedShard, state: Mapping[Any, Any]) -> list[StateShard]:
    tree = {**state, MASTER: owned.tensor} if owned.has_master else dict(state)
    index = owned.shard.param
    leaves = leaves_of_state(tree, view.names[index], owned.is_cut)
    return _as_shards(index, tree, leaves, owned.shard.start == 0, owned)


def _as_shards(
    param: int,
    tree: Mapping[Any, Any],
    leaves: Mapping[Steps, Any],
    is_writer: bool,
    owned: OwnedShard | None = None,
) -> list[StateShard]:
    """Each leaf with its place in the unsharded tensor. Of a cut parameter, a tensor as long as the
    owned shard is a part; any other is the same on all owners."""
    found = []
    for path, leaf in leaves.items():
        shard = StateShard(param, path, leaf, is_writer=is_writer, owned=owned, tree=tree)
        if shard.is_tensor:
            data = leaf.detach().resolve_conj().resolve_neg()
            like, stop = data, data.numel()
            if owned is not None and owned.is_cut and data.shape == owned.tensor.shape:
                like, stop = owned.param, owned.shard.stop
                shard = replace(shard, start=owned.shard.start, is_writer=True)
            order = tuple(range(like.dim()))
            if is_dense(like):
                order = storage_order(like.shape, like.stride())
            shard = replace(shard, data=data, stop=stop, shape=tuple(like.shape), order=order)
        found.append(shard)
    return found


def _require_first_form(view: StateView, owned: OwnedShard, shards: Sequence[StateShard]) -> None:
    """Refuse state of another form than the class makes in its first step.

    Why: whoever loads the checkpoint knows that form only, and would leave the rest behind.
    """
    index = owned.shard.param
    cls = view.policy(index).optimizer_class
    if cls.__module__.startswith("torch.optim."):  # their state does not change its form
        return
    first, now = (
        {(shard.path, shard.shape if shard.is_tensor else None) for shard in each}
        for each in (_first_shards(view, owned), shards)
    )
    if first != now:
        changed = min(dotted(path) for path, _ in first ^ now)
        raise ValueError(
            f"{cls.__name__} changes the form of its state as it trains ({changed} of "
            f"{view.names[index]} is not what its first step makes), and a sharded checkpoint can "
            "be loaded in that form only. Use consolidate_state_dict() and state_dict(), which "
            "take any form"
        )


# -------------------------------------------------------------------------- before the first step


def _first_shards(view: StateView, owned: OwnedShard) -> list[StateShard]:
    """The state with which the class begins; its tensors are one element each in memory."""
    index, tensor = owned.shard.param, owned.tensor
    number, template = view.params.registry.entries[index].group, view.template(index)
    # A small stand-in shows that of an elementwise class; others may treat every shape otherwise.
    is_small = view.policy(index).kind is Kind.ELEMENTWISE and is_dense(owned.param)
    shape = None if is_small else (tensor.shape, tensor.stride())
    form = (number, tensor.dtype, tensor.device, shape)
    if form not in view._first:
        device = tensor.device
        made = template.for_shard(tensor.dtype, device) if is_small else template.for_tensor(tensor)
        leaves = leaves_of(made, f"the state of {view.names[index]}").items()
        # Without memory, but for scalars, which may be on another device.
        view._first[form] = rebuild(
            made,
            {p: t.to("meta") for p, t in leaves if isinstance(t, torch.Tensor) and t.dim()},
        )
    state = {
        key: torch.empty_like(tensor, dtype=value.dtype, device="meta")
        if is_small and isinstance(value, torch.Tensor) and is_per_element(value)
        else value
        for key, value in view._first[form].items()
    }
    found = []
    for shard in _shards_of(view, owned, state):
        data = shard.data
        if type(data) in (int, float):
            data = type(data)(0)
        elif shard.is_tensor and not shard.is_master:
            is_integer = not (data.is_floating_point() or data.is_complex())
            known = template.start_of(str(shard.path[0]))
            start = 0 if is_integer else -0.0 if known is None else known
            device = tensor.device if data.is_meta else data.device
            data = torch.tensor(start, dtype=data.dtype, device=device).expand(data.shape)
        found.append(replace(shard, data=data))
    return found


def without_uninitialized(
    view: StateView,
    states: Mapping[Any, Mapping[Any, Any]],
    rank_group: RankGroup,
    names: Container[str] | None = None,
) -> States:
    """The states without those that did not exist when they were saved. Master copies stay.

    ``names`` are the parameters whose state did not exist. If the checkpoint does not tell, it is
    collective: a shard may hold negative zeros by chance, so the least answer of all ranks counts.
    A parameter without elements is as the others of its group.
    """
    if names is None:
        mine = torch.ones(len(view.names), dtype=torch.int64, device="cpu")
        for owned, state in states.items():
            index = owned.shard.param
            if _existed(state, view.template(index)):
                mine[index] = 0
        least, _ = rank_group.extremes(mine, mine)
        entries = list(zip(view.names, view.params.registry.entries, least.tolist(), strict=True))
        begun = {entry.group for _, entry, is_new in entries if not is_new and entry.param.numel()}
        names = {
            name
            for name, entry, is_new in entries
            if (is_new if entry.param.numel() else entry.group not in begun)
        }
    found = {}
    for owned, state in states.items():
        is_new = view.names[owned.shard.param] in names
        kept = {key: value for key, value in state.items() if key == MASTER or not is_new}
        if kept:
            found[owned] = kept
    return found


def _existed(state: Mapping[Any, Any], template: StateTemplate) -> bool:
    marks = [
        tensor
        for key, value in state.items()
        if key != MASTER and template.start_of(str(key)) is None
        for tensor in tensors_in(value)
        if tensor.is_floating_point() and tensor.numel()
    ]
    # The first elements tell in nearly all cases, without reading everything.
    return not marks or not all(
        bool(((part == 0) & torch.signbit(part)).all())
        for mark in marks
        for part in (mark.flatten()[:1], mark)
    )


# -------------------------------------------------------------------------- giving back


def states_of(shards: Iterable[StateShard]) -> dict[Any, dict[Any, Any]]:
    """What these are all leaves of, but for a master copy that may be missing: the states of owned
    shards, and of frozen parameters by their numbers."""
    trees: dict[Any, Any] = {}
    leaves: dict[Any, dict[Steps, Any]] = {}
    for shard in shards:
        key = shard.param if shard.owned is None else shard.owned
        trees[key] = shard.tree
        leaves.setdefault(key, {})[shard.path] = shard.data
    found = {key: rebuild(tree, leaves[key]) for key, tree in trees.items()}
    for key, state in found.items():
        if (MASTER,) not in leaves[key]:
            state.pop(MASTER, None)
    return found


def adopt(
    local: InnerOptimizers,
    states: Mapping[OwnedShard, Mapping[Any, Any]],
    options: Sequence[Mapping[str, Any]],
    common: Mapping[Any, Any] | None = None,
) -> None:
    """Give the inner optimizers these states to keep, and options by group, through
    ``load_state_dict`` of the class. Master copies are left out. ``common`` is what a class keeps
    under keys that are no parameter's."""
    by_tensor = {
        owned.tensor: {key: value for key, value in state.items() if key != MASTER}
        for owned, state in states.items()
        if state.keys() != {MASTER}
    }
    for inner in local.inners:
        load_into(inner.optimizer, by_tensor, [options[n] for n in inner.groups], common)


def load_into(
    optimizer: Optimizer,
    states: Mapping[torch.Tensor, Mapping[Any, Any]],
    options: Sequence[Mapping[str, Any]],
    common: Mapping[Any, Any] | None = None,
) -> None:
    """Give an optimizer the states of its parameters, and options by group."""
    groups = [
        {**options_of(given), "params": group["params"]}
        for given, group in zip(options, optimizer.param_groups, strict=True)
    ]
    params = [param for group in groups for param in group["params"]]
    own = {param: states[param] for param in params if param in states}
    state_dict = as_plain_dict({**own, **copied(common or {})}, groups)
    try:
        optimizer.load_state_dict(state_dict)
    except RecursionError as error:  # classes walk through what they are given
        raise ValueError("the state dict holds containers that hold themselves") from error
    except Exception as error:
        name = class_name(type(optimizer))
        if not is_torch_class(name):
            raise  # it may refuse in words of its own
        # Torch's do not look, and then miss something: a bare KeyError says nothing of the dict.
        raise StateDictMisfit(f"{name} cannot load the state dict: {shown(error)}") from error


class StateDictMisfit(ValueError, KeyError, IndexError):
    """A state dict that is not whole. Also what torch's class raises then."""

    def __str__(self) -> str:  # a KeyError would print the repr
        return str(self.args[0])


def as_plain_dict(states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """State by parameter, or by a key of the class's own, in the format of ``torch.optim``."""
    ids: dict[Any, int] = {}
    saved = []
    start = 0
    for group in groups:
        params = group["params"]
        ids |= {param: number for number, param in enumerate(params, start) if param not in ids}
        start += len(params)
        options = {k: v for k, v in group.items() if k not in {*OUR_KEYS, "params"}}
        saved.append({**options, "params": [ids[param] for param in params]})
    of_params = {ids[key]: dict(state) for key, state in states.items() if key in ids}
    common = {key: state for key, state in states.items() if key not in ids}
    return {"state": {**dict(sorted(of_params.items())), **common}, "param_groups": saved}


def copied(value: Any) -> Any:
    """The caller keeps the original, whatever it is."""
    try:
        return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    except Exception as error:  # too deep, too large, or an object that refuses
        raise ValueError(
            f"the state dict holds {shown(type(value))}, which cannot be copied: {shown(error)}"
        ) from error


# -------------------------------------------------------------------------- names


def dotted(path: Steps) -> str:
    """A path as DCP writes it."""
    return ".".join(map(str, path))


def checkpoint_names(
    registry: ParamRegistry, groups: Sequence[Mapping[str, Any]], module: torch.nn.Module | None
) -> list[str]:
    """A name for every parameter, by its number in the registry."""
    if module is not None:
        known = names_in(module)
        lost = [entry.name for entry in registry.entries if entry.param not in known]
        if lost:
            raise ValueError(
                f"{', '.join(lost[:5])}{', ...' * (len(lost) > 5)}: not in the module that was "
                "given. Pass the module whose parameters this optimizer updates"
            )
        names = [known[param] for param in registry.params]
    else:
        given: dict[torch.Tensor, str] = {}
        for group in groups:
            for param, name in zip(group["params"], group.get("param_names", ()), strict=False):
                parts = [part for part in name.split(".") if part not in WRAPPED_MODULES]
                given.setdefault(param, ".".join(parts))
        names = [given.get(param, f"{BY_INDEX}{i}") for i, param in enumerate(registry.params)]
        if all(name.startswith("module.") for name in names):
            names = [name.removeprefix("module.") for name in names]  # named by a DDP wrapper
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two parameters are called {twice!r}: a checkpoint needs unique names")
    return names


def describe_names(registry: ParamRegistry, names: Sequence[str]) -> list[str]:
    """Lines for agreement: the ranks must give the same names to the same parameters."""
    return [
        f"{title} is called {name}" if name else f"{title} is not in the module"
        for title, name in zip(registry.names, names, strict=True)
    ]
