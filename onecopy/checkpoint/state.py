"""Optimizer state as a list of shards: collected for a checkpoint, and given back from one.

:class:`StateShard` is the only form in which checkpoints see state. :func:`collect` makes the list
of this rank, of live state or of what the class would make; :func:`adopt` gives such a list to the
inner optimizers. Whoever loads fills :meth:`StateShard.empty_like` of each shard of
``collect(view, live=False)``.

State that does not exist yet is saved as -0.0 throughout (:func:`uninitialized`).
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.comm.group import RankGroup
from onecopy.comm.transfer import NotPlain, Path, decode, encode, paths
from onecopy.planning.layout import Chunk, chunks_of, is_dense, storage_order
from onecopy.planning.param_groups import MASTER, ParamRegistry
from onecopy.planning.plan import Plan
from onecopy.planning.text import shown
from onecopy.planning.traits import (
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
from onecopy.sharding.sharded_params import names_in
from onecopy.torch_private import WRAPPED_MODULES

BY_INDEX = "by_index."


@dataclass(frozen=True, slots=True)
class StateShard:
    """Elements [start, stop) of one tensor of the unsharded optimizer state, in storage order; or a
    plain value."""

    param: int  # number in the registry
    path: Path  # in the state of the parameter: ("exp_avg",), ("history", 0), (MASTER,)
    data: Any  # a tensor as the inner optimizer holds it, 1-D if it is cut; or a plain value
    start: int = 0
    stop: int = 0
    shape: tuple[int, ...] = ()  # of the unsharded tensor ...
    order: tuple[int, ...] = ()  # ... and the order of its dimensions in storage
    is_writer: bool = True  # of what several ranks hold alike (step), one rank writes it
    owned: OwnedShard | None = None  # whose state it is on this rank; None: of a frozen parameter
    # The containers of the state of which it is a leaf (``transfer.encode``), the same object in
    # all leaves; but for the master copy, none may be missing. None: the state is a flat dict.
    skeleton: Any = None

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

    def on_cpu(self) -> StateShard:
        """A copy that the next step does not change."""
        return replace(self, data=self.data.to("cpu", copy=True))

    def __deepcopy__(self, _: Any) -> StateShard:
        """Why: torch's stagers copy objects deeply, and would copy the parameters too."""
        return self.on_cpu() if self.is_tensor else self

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

    local: InnerOptimizers
    registry: ParamRegistry
    plan: Plan
    groups: Sequence[Mapping[str, Any]]  # with the options that decide what state there is
    names: Sequence[str]  # of the parameters, by their number
    rank: int
    # What classes make in their first step, by group and form of the tensor: most are alike.
    _first: dict[Any, Any] = field(default_factory=dict, init=False)

    def names_in(self, number: int) -> list[str]:
        """The names of the parameters of a group."""
        entries = zip(self.names, self.registry.entries, strict=True)
        return [name for name, entry in entries if entry.group == number]

    def names_owned(self) -> list[str]:
        """The parameters of which this rank owns shards."""
        params = self.registry.params
        return [self.names[i] for i in sorted(self.plan.params) if self.local.of(params[i])]

    def template(self, index: int) -> StateTemplate:
        """Of the state of a parameter: its class, with the options of its group."""
        number = self.registry.entries[index].group
        group, cls = self.groups[number], self.registry.policies[number].optimizer_class
        options = options_of(group)
        return StateTemplate(
            cls,
            lambda stand_in: self.local.construct(cls, [{"params": [stand_in], **options}]),
            group.get("lr", 0.0),
        )

    def saved_groups(self) -> list[dict[str, Any]]:
        """The groups as they are saved: their options, and names under ``"params"``."""
        found = []
        for number, group in enumerate(self.groups):
            for key, value in options_of(group).items():
                _encode_plain(value, [], f"option {key!r} of group {number}")
            found.append({**options_of(group), "params": self.names_in(number)})
        return found

    def made_at_construction(self) -> dict[int, Mapping[str, Any]]:
        """The state of frozen parameters, if the class makes it in its constructor."""
        found = {}
        for index in self.registry.unplanned(self.plan):
            number, param = self.registry.entries[index].group, self.registry.params[index]
            cls = self.registry.policies[number].optimizer_class
            made = self.local.constructor_state(cls, self.groups[number], [param])
            if param in made:
                found[index] = made[param]
        return found


# -------------------------------------------------------------------------- collecting


def collect(view: StateView, live: bool = True) -> list[StateShard]:
    """The state of this rank as checkpoints need it, parameter by parameter.

    It is the live state. Of parameters that have none, or of all without ``live``, it is the state
    that the class would make, with the values with which it starts; -0.0 marks that it does not
    exist. Raises ``TypeError`` or ``ValueError`` if a checkpoint cannot carry the state.
    """
    _require_state_by_param(view.local)
    found = []
    for index in sorted(view.plan.params):
        held = view.local.of(view.registry.params[index])
        # An empty state is none: a class may have looked for one.
        states = [view.local.state.get(owned.tensor) or None if live else None for owned in held]
        has_state = None not in states
        for owned, state in zip(held, states, strict=True):
            if state and has_state:
                master = {MASTER: owned.tensor} if owned.has_master else {}
                shards = shards_of(owned, {**state, **master}, view.names[index])
                _require_first_form(view, owned, shards)
                found += shards
            else:
                found += _first_shards(view, index, owned)
    for index, state in view.made_at_construction().items():
        found += _leaves_of(index, None, state, view.names[index], is_writer=view.rank == 0)
    return found


def collect_groups(view: StateView) -> list[list[StateShard]]:
    """The options of each group, and the names of its parameters under ``"params"``, for rank 0 to
    write. Here ``param`` is the number of the group."""
    return [
        _leaves_of(number, None, group, f"group {number}", is_writer=view.rank == 0)
        for number, group in enumerate(view.saved_groups())
    ]


def shards_of(owned: OwnedShard, state: Mapping[Any, Any], name: str) -> list[StateShard]:
    """The state of an owned shard, in shards; ``name`` is that of the parameter, for errors."""
    index, is_writer = owned.shard.param, owned.shard.start == 0
    return _leaves_of(index, owned, state, name, is_writer)


def _leaves_of(
    param: int, owned: OwnedShard | None, state: Mapping[Any, Any], name: str, is_writer: bool
) -> list[StateShard]:
    tensors: list[torch.Tensor] = []
    skeleton = encode_state(state, tensors, name, owned is not None and owned.is_cut)
    found = []
    for path, leaf in paths(skeleton).items():
        data = decode(leaf, tensors)
        shard = StateShard(param, path, data, is_writer=is_writer, owned=owned, skeleton=skeleton)
        found.append(_placed(shard) if shard.is_tensor else shard)
    return found


def encode_state(
    state: Mapping[Any, Any],
    tensors: list[torch.Tensor],
    name: str,
    is_cut: bool,
) -> Any:
    """The skeleton of the state of a parameter, or the error why it cannot be saved."""
    for key, value in state.items() if is_cut else ():
        if isinstance(value, (dict, list, tuple)) and tensors_in(value):
            raise TypeError(
                f"the state {key!r} of {name} is a {type(value).__name__} of tensors, and the "
                "parameter is cut over the ranks: they cannot be put together again. Use "
                'partition="whole"'
            )
    return _encode_plain(dict(state), tensors, f"the state of {name}")


def _encode_plain(value: Any, tensors: list[torch.Tensor], what: str) -> Any:
    try:
        return encode(value, tensors)
    except NotPlain as error:
        raise TypeError(
            f"{what} holds {error}, which a checkpoint cannot carry: only tensors, numbers, "
            "strings, None and containers of them"
        ) from None


def _placed(shard: StateShard) -> StateShard:
    """With its place in the unsharded tensor. Of a cut parameter, a tensor as long as the owned
    shard is a part; any other is the same on all owners."""
    data, owned = shard.data.detach().resolve_conj().resolve_neg(), shard.owned
    if owned is not None and owned.is_cut and data.shape == owned.tensor.shape:
        shape = tuple(owned.param.shape)
        order = storage_order(shape, owned.param.stride())
        start, stop = owned.shard.start, owned.shard.stop
        return replace(
            shard, data=data, start=start, stop=stop, shape=shape, order=order, is_writer=True
        )
    order = storage_order(data.shape, data.stride()) if is_dense(data) else tuple(range(data.dim()))
    return replace(shard, data=data, stop=data.numel(), shape=tuple(data.shape), order=order)


def leaves_of(tree: Mapping[str, Any]) -> dict[Path, Any]:
    """The tensors and plain values in nested containers, by the paths that DCP gives them."""
    tensors: list[torch.Tensor] = []
    leaves = paths(encode(dict(tree), tensors))
    return {path: decode(leaf, tensors) for path, leaf in leaves.items()}


def _require_state_by_param(local: InnerOptimizers) -> None:
    for inner in local.inners:
        for key in inner.optimizer.state:
            if not isinstance(key, torch.Tensor):
                raise TypeError(
                    f"{type(inner.optimizer).__name__} keeps state under {key!r}, which "
                    "belongs to no parameter: a sharded checkpoint has no place for it. Use "
                    "consolidate_state_dict() and state_dict()"
                )


def _require_first_form(view: StateView, owned: OwnedShard, shards: Sequence[StateShard]) -> None:
    """Refuse state of another form than the class makes in its first step.

    Why: whoever loads the checkpoint knows that form only, and would leave the rest behind.
    """
    index = owned.shard.param
    cls = view.template(index).optimizer_class
    if is_torch_class(class_name(cls)):
        return
    name = view.names[index]
    forms = [
        {shard.path: shard.shape if shard.is_tensor else None for shard in each}
        for each in (_first_shards(view, index, owned), shards)
    ]
    if forms[0] != forms[1]:
        changed = min(dotted(p) for p, _ in forms[0].items() ^ forms[1].items())
        raise ValueError(
            f"{cls.__name__} changes the form of its state as it trains ({changed} of {name} is "
            "not what its first step makes), and a sharded checkpoint can be loaded in that form "
            "only. Use consolidate_state_dict() and state_dict(), which take any form"
        )


# -------------------------------------------------------------------------- before the first step


def _first_shards(view: StateView, index: int, owned: OwnedShard) -> list[StateShard]:
    """The state with which the class begins; its tensors are one element each in memory."""
    number, tensor, name = view.registry.entries[index].group, owned.tensor, view.names[index]
    template = view.template(index)
    # A small stand-in shows that of an elementwise class; others may treat every shape otherwise.
    is_small = view.registry.policies[number].kind is Kind.ELEMENTWISE and is_dense(owned.param)
    shape = None if is_small else (tensor.shape, tensor.stride())
    form = (number, tensor.dtype, tensor.device, shape)
    if form not in view._first:
        device = tensor.device
        made = template.for_shard(tensor.dtype, device) if is_small else template.for_tensor(tensor)
        tensors: list[torch.Tensor] = []
        skeleton = encode(made, tensors)
        # Without memory, but for scalars, which may be on another device.
        view._first[form] = decode(skeleton, [t.to("meta") if t.dim() else t for t in tensors])
    state = {
        key: torch.empty_like(tensor, dtype=value.dtype, device="meta")
        if is_small and isinstance(value, torch.Tensor) and is_per_element(value)
        else value
        for key, value in view._first[form].items()
    }
    master = {MASTER: tensor} if owned.has_master else {}
    shards = shards_of(owned, {**state, **master}, name)
    return [_at_start(template, shard, tensor.device) for shard in shards]


def _at_start(template: StateTemplate, shard: StateShard, device: torch.device) -> StateShard:
    if shard.is_master:
        return shard
    if not shard.is_tensor:
        is_number = type(shard.data) in (int, float)
        return replace(shard, data=type(shard.data)(0)) if is_number else shard
    like = shard.data
    is_integer = not (like.is_floating_point() or like.is_complex())
    known = template.start_of(str(shard.path[0]))
    start = 0 if is_integer else -0.0 if known is None else known
    device = device if like.is_meta else like.device
    return replace(
        shard, data=torch.tensor(start, dtype=like.dtype, device=device).expand(like.shape)
    )


def names_without_state(view: StateView) -> list[str]:
    """The parameters of which this rank owns shards without state."""
    state, params = view.local.state, view.registry.params
    return [
        view.names[index]
        for index in sorted(view.plan.params)
        if any(not state.get(owned.tensor) for owned in view.local.of(params[index]))
    ]


class _Existed(enum.IntEnum):
    """Whether the state of a parameter existed when it was saved."""

    YES = 0
    UNKNOWN = 1  # it has no elements
    NO = 2


def uninitialized(view: StateView, shards: Sequence[StateShard], rank_group: RankGroup) -> set[str]:
    """The parameters whose state did not exist when it was saved. Collective.

    A shard may hold negative zeros by chance: the least answer of all ranks counts. A parameter
    without elements is as the others of its group.
    """
    mine = torch.full((len(view.names),), _Existed.NO, dtype=torch.int64, device="cpu")
    for of_owned in by_owned(shards).values():
        index = of_owned[0].param
        mine[index] = min(int(mine[index]), _existed(of_owned, view.template(index)))
    least, _ = rank_group.extremes(mine, mine)
    entries = list(zip(view.names, view.registry.entries, least.tolist(), strict=True))
    begun = {entry.group for _, entry, answer in entries if answer == _Existed.YES}
    return {
        name
        for name, entry, answer in entries
        if answer == _Existed.NO or (answer == _Existed.UNKNOWN and entry.group not in begun)
    }


def _existed(shards: Sequence[StateShard], template: StateTemplate) -> _Existed:
    marks = [
        shard.data
        for shard in shards
        if shard.is_tensor
        and not shard.is_master
        and template.start_of(str(shard.path[0])) is None
        and shard.data.is_floating_point()
    ]
    with_elements = [mark for mark in marks if mark.numel()]
    if marks and not with_elements:
        return _Existed.UNKNOWN
    # The first elements tell in nearly all cases, without reading everything.
    is_marked = all(
        _is_negative_zero(mark.flatten()[:1]) and _is_negative_zero(mark) for mark in with_elements
    )
    return _Existed.NO if with_elements and is_marked else _Existed.YES


def _is_negative_zero(values: torch.Tensor) -> bool:
    return bool(((values == 0) & torch.signbit(values)).all())


def drop_state(
    view: StateView, shards: Sequence[StateShard], names: Container[str]
) -> list[StateShard]:
    """Without the state of these parameters. Master copies stay, and what frozen ones have."""
    return [
        shard
        for shard in shards
        if shard.owned is None or shard.is_master or view.names[shard.param] not in names
    ]


# -------------------------------------------------------------------------- giving back


def by_owned(shards: Sequence[StateShard]) -> dict[OwnedShard, list[StateShard]]:
    found: dict[OwnedShard, list[StateShard]] = {}
    for shard in shards:
        if shard.owned is not None:
            found.setdefault(shard.owned, []).append(shard)
    return found


def adopt(
    local: InnerOptimizers,
    shards: Sequence[StateShard],
    options: Sequence[Mapping[str, Any]],
    common: Mapping[Any, Any] | None = None,
) -> None:
    """Give the inner optimizers their state, through ``load_state_dict`` of the class.

    Master copies are left out (:func:`masters_in`), and so is state of what this rank does not own.

    Args:
        shards: ours to keep; all leaves of a state or none.
        options: by group.
        common: what a class keeps under keys that are no parameter's.
    """
    states = {}
    for owned, of_owned in by_owned(shards).items():
        leaves = [shard for shard in of_owned if not shard.is_master]
        if leaves:
            states[owned.tensor] = _state_of(leaves)
    for inner in local.inners:
        groups = [
            {**options_of(options[number]), "params": group["params"]}
            for number, group in zip(inner.groups, inner.optimizer.param_groups, strict=True)
        ]
        own = {
            tensor: states[tensor]
            for group in groups
            for tensor in group["params"]
            if tensor in states
        }
        load_into(inner.optimizer, as_plain_dict({**own, **copied(common or {})}, groups))


def states_of_frozen(view: StateView, shards: Sequence[StateShard]) -> dict[torch.Tensor, Any]:
    """State that every rank has whole, by parameter."""
    found: dict[int, list[StateShard]] = {}
    for shard in shards:
        if shard.owned is None:
            found.setdefault(shard.param, []).append(shard)
    return {view.registry.params[index]: _state_of(leaves) for index, leaves in found.items()}


def _state_of(leaves: Sequence[StateShard]) -> dict[Any, Any]:
    data = {leaf.path: leaf.data for leaf in leaves}
    if leaves[0].skeleton is None:
        return {path[0]: value for path, value in data.items() if path}
    state = rebuild(leaves[0].skeleton, {**data, (MASTER,): None})
    return {key: value for key, value in state.items() if key != MASTER}


def rebuild(
    skeleton: Any, leaves: Mapping[Path, Any], as_saved: bool = False, path: Path = ()
) -> Any:
    """The containers of a skeleton, with these leaves. ``as_saved``: as DCP knows them, with text
    for keys and lists of tensors for tuples."""
    if path in leaves:
        return leaves[path]
    ((kind, content),) = skeleton.items()
    if kind == "dict":
        return {
            str(key) if as_saved else key: rebuild(item, leaves, as_saved, (*path, str(key)))
            for key, item in content
        }
    items = [rebuild(item, leaves, as_saved, (*path, n)) for n, item in enumerate(content)]
    return tuple(items) if kind == "tuple" and not as_saved else items


def load_into(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
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


def masters_in(shards: Sequence[StateShard]) -> dict[torch.Tensor, torch.Tensor]:
    """The master copies, by the tensors of the inner optimizers."""
    return {shard.owned.tensor: shard.data for shard in shards if shard.is_master and shard.owned}


def as_plain_dict(states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """State by parameter, or by a key of the class's own, in the format of ``torch.optim``."""
    ids: dict[torch.Tensor, int] = {}
    listed: list[list[int]] = []
    start = 0
    for group in groups:
        numbered = enumerate(group["params"], start)
        ids.update({param: number for number, param in numbered if param not in ids})
        listed.append([ids[param] for param in group["params"]])
        start += len(group["params"])
    of_params = {
        ids[key]: dict(state) for key, state in states.items() if isinstance(key, torch.Tensor)
    }
    common = {key: state for key, state in states.items() if not isinstance(key, torch.Tensor)}
    return {
        "state": {**dict(sorted(of_params.items())), **common},
        "param_groups": [
            {
                **{k: v for k, v in group.items() if k not in {*OUR_KEYS, "params"}},
                "params": numbers,
            }
            for group, numbers in zip(groups, listed, strict=True)
        ],
    }


def copied(value: Any) -> Any:
    """The caller keeps the original, whatever it is."""
    try:
        return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    except Exception as error:  # too deep, too large, or an object that refuses
        raise ValueError(
            f"the state dict holds {shown(type(value))}, which cannot be copied: {shown(error)}"
        ) from error


# -------------------------------------------------------------------------- names


def dotted(path: Path) -> str:
    """A path as DCP writes it."""
    return ".".join(map(str, path))


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
