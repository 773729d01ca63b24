"""The full state dict: gathered to one rank, checked and cut when it is loaded."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from onecopy.checkpoint.state import (
    StateDictMisfit,
    _plain,
    as_plain_dict,
    copied,
    load_into,
    require_cut_state,
)
from onecopy.comm.agreement import same_outcome
from onecopy.comm.group import RankGroup, bytes_from_tensor, tensor_from_bytes
from onecopy.comm.transfer import Form, NotPlain, decode, encode, receive_tensors, send_tensors
from onecopy.planning.layout import flat_range, in_layout_of
from onecopy.planning.param_groups import MASTER, ParamRegistry, check_names, update_dtype
from onecopy.planning.plan import Plan, Shard
from onecopy.planning.text import shown
from onecopy.planning.traits import class_name, is_torch_class, options_of
from onecopy.sharding.inner import Inner, InnerOptimizers
from onecopy.sharding.owned import OwnedShard
from onecopy.sharding.sharded_params import ShardedParams

State = dict[str, Any]


# -------------------------------------------------------------------------- the format


@dataclass(frozen=True, slots=True)
class ParamIds:
    """The ids by which ``state_dict`` knows the parameters, as ``torch.optim`` gives them out."""

    ids: dict[torch.Tensor, int]
    groups: list[list[int]]

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]]) -> ParamIds:
        ids: dict[torch.Tensor, int] = {}
        numbers: list[list[int]] = []
        start = 0
        for group in groups:
            listed = enumerate(group["params"], start)
            ids.update({param: number for number, param in listed if param not in ids})
            numbers.append([ids[param] for param in group["params"]])
            start += len(group["params"])
        return cls(ids, numbers)


def state_outside_the_plan(
    local: InnerOptimizers, registry: ParamRegistry, plan: Plan, groups: Sequence[Mapping[str, Any]]
) -> dict[Any, Any]:
    """What a plain optimizer's dict holds besides the state of parameters that were trained.

    That is state which a class makes in its constructor, for frozen parameters too, and state
    that belongs to no parameter.
    """
    found: dict[Any, Any] = {}
    frozen = [registry.entries[index] for index in registry.unplanned(plan)]
    for number, (group, policy) in enumerate(zip(groups, registry.policies, strict=True)):
        params = [entry.param for entry in frozen if entry.group == number]
        made = local.constructor_state(policy.optimizer_class, group, params)
        found.update({param: copy.deepcopy(state) for param, state in made.items()})
    for inner in local.inners:
        for key, value in inner.optimizer.state.items():
            if not isinstance(key, torch.Tensor):
                found[key] = copy.deepcopy(value)
    return found


def has_no_state(
    local: InnerOptimizers, registry: ParamRegistry, groups: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether an optimizer that has not stepped has no state, on any rank: its classes make none
    in their constructors."""
    return not len(local.state) and not any(
        local.constructor_state(policy.optimizer_class, group, group["params"][:1])
        for group, policy in zip(groups, registry.policies, strict=True)
    )


# -------------------------------------------------------------------------- gathering


@dataclass(slots=True)
class Manifest:
    """What a rank holds: for each of its pieces the encoded state, and the forms of its tensors.

    Most pieces look alike, so each look is written once.
    """

    looks: list[tuple[Any, list[Form]]] = field(default_factory=list)
    of_piece: list[int] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        return json.dumps([self.looks, self.of_piece]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        looks, of_piece = json.loads(data)
        return cls(
            [(encoded, [Form.from_json(*form) for form in forms]) for encoded, forms in looks],
            of_piece,
        )

    def __iter__(self) -> Iterator[tuple[Any, list[Form]]]:
        return (self.looks[number] for number in self.of_piece)


def take_stock(local: InnerOptimizers) -> tuple[Manifest, list[torch.Tensor]]:
    """This rank's manifest, and its tensors as 1-D runs in the manifest's order."""
    manifest = Manifest()
    numbers: dict[str, int] = {}
    flats: list[torch.Tensor] = []
    for owned in local.shards:
        tensors: list[torch.Tensor] = []
        held = local.state_to_save(owned)
        try:
            encoded = None if held is None else encode(dict(held), tensors)
            if held is not None and not owned.is_whole:
                require_cut_state(held, f"parameter {owned.shard.param}")
        except NotPlain as error:
            raise TypeError(
                f"the state of parameter {owned.shard.param} holds {error}, which a state dict "
                "cannot carry: only tensors, numbers, strings, None and containers of them"
            ) from None
        tensors = [_plain(tensor) for tensor in tensors]
        forms = [Form.of(tensor) for tensor in tensors]
        look = json.dumps([encoded, forms])
        if look not in numbers:
            numbers[look] = len(manifest.looks)
            manifest.looks.append((encoded, forms))
        manifest.of_piece.append(numbers[look])
        flats += [flat_range(tensor, 0, tensor.numel()) for tensor in tensors]
    return manifest, flats


def consolidate(
    plan: Plan,
    params: Sequence[torch.Tensor],
    rank_group: RankGroup,
    to: int,
    stock: tuple[Manifest, list[torch.Tensor]],
) -> dict[int, State] | None:
    """The whole job's state on rank ``to``, on the CPU, by the plan's parameter numbers."""
    manifest, flats = stock
    text = manifest.to_bytes()
    lengths = rank_group.all_gather_bytes(len(text).to_bytes(8, "little"))
    if rank_group.rank != to:
        send_tensors(rank_group, [tensor_from_bytes(text)], to)
        send_tensors(rank_group, flats, to)
        return None
    whole = _Whole(plan, params)
    incoming: dict[int, list[torch.Tensor]] = {}
    for rank, length in enumerate(lengths):
        if rank == to:
            theirs = manifest
        else:
            count = int.from_bytes(length, "little")
            room = torch.empty(count, dtype=torch.uint8, device="cpu")
            receive_tensors(rank_group, {rank: [room]})
            theirs = Manifest.from_bytes(bytes_from_tensor(room))
        incoming[rank] = whole.expect(rank, theirs)
    mine = incoming.pop(to)

    def copy_mine() -> None:
        for target, source in zip(mine, flats, strict=True):
            target.copy_(source)

    receive_tensors(rank_group, incoming, meanwhile=copy_mine)
    return whole.states()


class _Whole:
    """Parameter-shaped state under construction on the target."""

    def __init__(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        self._plan = plan
        self._params = params
        self._states: dict[int, State] = {}

    def expect(self, rank: int, manifest: Manifest) -> list[torch.Tensor]:
        """Room for what a rank will send, as 1-D runs in the order of its manifest."""
        room: list[torch.Tensor] = []
        for shard, (encoded, forms) in zip(self._plan.shards(rank), manifest, strict=True):
            if encoded is not None:
                cut = shard.param in self._plan.cut_params
                room += (self._place_cut if cut else self._place)(shard, encoded, forms)
        return room

    def _place(self, shard: Shard, encoded: Any, forms: Sequence[Form]) -> list[torch.Tensor]:
        tensors = [form.empty() for form in forms]
        self._states[shard.param] = decode(encoded, tensors)
        return [flat_range(tensor, 0, tensor.numel()) for tensor in tensors]

    def _place_cut(self, shard: Shard, encoded: Any, forms: Sequence[Form]) -> list[torch.Tensor]:
        """Tensors as long as the piece are parts of a parameter-shaped one; others are equal in
        all pieces, and the first is kept."""
        state = self._states.setdefault(shard.param, {})
        param = self._params[shard.param]
        tensors = [form.empty() for form in forms]
        room = [flat_range(tensor, 0, tensor.numel()) for tensor in tensors]
        for key, value in decode(encoded, tensors).items():
            if not (isinstance(value, torch.Tensor) and value.shape == (shard.numel,)):
                state.setdefault(key, value)
                continue
            if key not in state:
                # An owner whose parameter never had a gradient has no state to send: zeros, and
                # for a master copy the parameter itself.
                state[key] = torch.zeros_like(
                    param, dtype=value.dtype, device="cpu", memory_format=torch.preserve_format
                ).detach()
                if key == MASTER:
                    state[key].copy_(param.detach())
            position = next(i for i, tensor in enumerate(tensors) if tensor is value)
            room[position] = flat_range(state[key], shard.start, shard.stop)
        return room

    def states(self) -> dict[int, State]:
        return dict(sorted(self._states.items()))


Groups = Sequence[Mapping[str, Any]]


class FullState:
    def __init__(self, why_not: str | None = None) -> None:
        self._state: dict[Any, Any] | None = None  # by parameter
        # No rank has state of a step or of a load: there is nothing to gather.
        self._is_new = why_not is None
        self._why_not = why_not or "no state dict has been consolidated"

    def forget(self, why: str, is_state_same: bool = False) -> None:
        """``is_state_same``: no rank has other state than before, so that an optimizer that was
        new still has nothing to gather."""
        self._state, self._why_not = None, why
        self._is_new = self._is_new and is_state_same

    def gather(
        self,
        rank_group: RankGroup,
        sharded_params: ShardedParams,
        groups: Groups,
        steps: int,
        to: int,
    ) -> None:
        """Collective."""
        rank_group.enter(f"consolidating the state to rank {to}")
        stock: Any = None

        def prepare() -> list[str]:
            nonlocal stock
            if type(to) is not int or not 0 <= to < rank_group.world_size:
                last = rank_group.world_size - 1
                raise ValueError(f"to must be a rank of the group, 0 to {last}, got {to!r}")
            stock = take_stock(sharded_params.inner)
            return [f"to rank {to}", f"after {steps} steps", f"plan {sharded_params.plan.digest}"]

        same_outcome(rank_group, "consolidating the state", prepare)
        if to == rank_group.rank:
            self._state = None  # not two of them at once
        params = sharded_params.registry.params
        gathered = consolidate(sharded_params.plan, params, rank_group, to, stock)
        if gathered is not None:
            self._state = {
                **{params[index]: state for index, state in gathered.items()},
                **state_outside_the_plan(
                    sharded_params.inner, sharded_params.registry, sharded_params.plan, groups
                ),
            }
        elif self._state is None:
            self._why_not = f"the state was consolidated to rank {to}"
        rank_group.monitor.note("state consolidated")

    @property
    def is_here(self) -> bool:
        return self._state is not None

    def as_plain_dict(
        self, rank: int, sharded_params: ShardedParams, groups: Groups
    ) -> dict[str, Any]:
        state = self._state
        if (
            state is None
            and self._is_new
            and has_no_state(sharded_params.inner, sharded_params.registry, groups)
        ):
            state = {}  # on every rank: trainers ask for it before the first step
        if state is None:
            raise RuntimeError(
                f"rank {rank} has no state dict: {self._why_not}. Call "
                f"consolidate_state_dict(to={rank}) on all ranks first; or, for "
                "torch.distributed.checkpoint, save optimizer.sharded(), which gathers nothing"
            )
        return as_plain_dict(state, groups)


@dataclass(frozen=True, slots=True)
class Loadable:
    """State and options that fit the optimizer."""

    states: Mapping[torch.Tensor, Mapping[str, Any]]  # of whole parameters, to be cut
    common: dict[Any, Any]  # what a class keeps under keys that are no parameter's
    groups: Sequence[Mapping[str, Any]]
    # State that is cut already, and ours to keep, by the tensors of the inner optimizers.
    shards: Mapping[torch.Tensor, Mapping[str, Any]] = field(default_factory=dict)
    masters: Mapping[torch.Tensor, torch.Tensor] = field(default_factory=dict)  # likewise
    lacks_masters: bool = False  # with some of the state that is cut, on any rank
    has_pieces: bool = False  # there is state that is cut, on any rank
    group_of: Mapping[torch.Tensor, int] = field(default_factory=dict)  # of whole parameters

    @property
    def is_empty(self) -> bool:
        """Whether no rank loads any state. Options may be loaded."""
        return not (self.states or self.common or self.shards or self.has_pieces)


def check_state_dict(
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
        {key: copied(state) for key, state in states.items() if key not in by_id},
        [copied(dict(saved)) for saved in saved_groups],
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


_SAMPLED = 16  # elements of a tensor


def sample_lines(
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


def adopt_state(local: InnerOptimizers, loadable: Loadable) -> None:
    """Give each inner optimizer its part, once all have rehearsed."""
    for inner in local.inners:
        _rehearse(local, inner, loadable)
    for inner in local.inners:
        load_into(inner.optimizer, _dict_for(local, inner, loadable))


def _rehearse(local: InnerOptimizers, inner: Inner, loadable: Loadable) -> None:
    """Have the class load the state of all parameters, each of them without elements.

    Why: a rank loads its own pieces only. What the class refuses in one of them, all ranks must
    refuse. Classes that are not torch's may want tensors as they are, and are not asked.
    """
    cls = type(inner.optimizer)
    if not (loadable.states and is_torch_class(class_name(cls))):
        return
    groups: dict[int, dict[str, Any]] = {
        number: {**options_of(inner_group), "params": []}
        for number, inner_group in zip(inner.groups, inner.optimizer.param_groups, strict=True)
    }
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for param, state in loadable.states.items():
        group = groups.get(loadable.group_of.get(param, -1))
        if group is not None:
            dtype = update_dtype(param.dtype, local.master_dtype)
            empty = torch.empty([0] * param.dim(), dtype=dtype, device=param.device)
            group["params"].append(empty)
            states[empty] = {key: _outlined(v) for key, v in state.items() if key != MASTER}
    try:
        stand_in = local.construct(cls, list(groups.values()))
    except Exception:  # a class that takes no such tensors
        return
    numbering = ParamIds.of(stand_in.param_groups)
    saved = [
        {**options_of(loadable.groups[number]), "params": ids}
        for number, ids in zip(inner.groups, numbering.groups, strict=True)
    ]
    numbered = {numbering.ids[empty]: state for empty, state in states.items()}
    load_into(stand_in, {"state": numbered, "param_groups": saved})


def _outlined(value: Any) -> Any:
    """A state value without the elements of a tensor."""
    if isinstance(value, torch.Tensor) and value.dim():
        return torch.empty([0] * value.dim(), dtype=value.dtype, device=value.device)
    return copied(value)


def _dict_for(local: InnerOptimizers, inner: Inner, loadable: Loadable) -> dict[str, Any]:
    numbering = ParamIds.of(inner.optimizer.param_groups)
    state: dict[Any, Any] = {
        numbering.ids[owned.tensor]: {
            key: _part_of(owned, value)
            for key, value in loadable.states[owned.param].items()
            if key != MASTER
        }
        for owned in local.shards
        if owned.param in loadable.states and owned.tensor in numbering.ids
    }
    for tensor, of_piece in loadable.shards.items():
        if tensor in numbering.ids:
            state[numbering.ids[tensor]] = of_piece
    groups = [
        {**options_of(loadable.groups[number]), "params": ids}
        for number, ids in zip(inner.groups, numbering.groups, strict=True)
    ]
    return {"state": {**state, **copied(loadable.common)}, "param_groups": groups}


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
        if update_dtype(param.dtype, master_dtype) == param.dtype:
            unused |= MASTER in state
        else:
            lacking |= bool(state) and MASTER not in state
    return MasterReport(lacking, unused)


def with_ranks_told(rank_group: RankGroup, local: InnerOptimizers, loadable: Loadable) -> Loadable:
    """With the knowledge of all ranks of which master copies and which state there are.
    Collective."""
    lacks = any(
        owned.has_master
        and loadable.shards.get(owned.tensor)
        and owned.tensor not in loadable.masters
        for owned in local.shards
    )
    mine = [int(lacks), int(bool(loadable.shards))]
    told = torch.tensor(mine, device=rank_group.control_device)
    rank_group.maximum(told).wait()
    lacks_masters, has_pieces = map(bool, told.tolist())
    return replace(loadable, lacks_masters=lacks_masters, has_pieces=has_pieces)


def load_masters(local: InnerOptimizers, loadable: Loadable) -> None:
    """Give the master copies what was saved of them; others are made anew."""
    found = dict(loadable.masters)
    for owned in local.shards:
        state = loadable.states.get(owned.param, {})
        if owned.has_master and MASTER in state:
            found[owned.tensor] = _part_of(owned, state[MASTER])
    local.masters.load(found)


def _part_of(owned: OwnedShard, value: Any) -> Any:
    """This piece's part of a state value: a copy, because the caller keeps the original."""
    if not isinstance(value, torch.Tensor) or owned.is_whole or value.dim() == 0:
        return copied(value)
    laid_out = in_layout_of(owned.param, value.detach())
    return flat_range(laid_out, owned.shard.start, owned.shard.stop).clone()
