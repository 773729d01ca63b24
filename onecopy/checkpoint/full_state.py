"""The full state dict: gathered to one rank, checked and cut when it is loaded.

Gathering sends skeletons, which say what states look like, and then tensors, in the order of the
skeletons: no pickle. The rank that asks puts every part into a tensor of the parameter's shape.

Loading communicates nothing. All ranks check the whole dict, so that all refuse it alike; each then
takes the parts that it owns.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from onecopy.checkpoint.state import (
    StateDictMisfit,
    StateShard,
    adopt,
    as_plain_dict,
    by_owned,
    copied,
    encode_state,
    load_into,
    masters_in,
)
from onecopy.comm.agreement import same_outcome
from onecopy.comm.group import RankGroup, bytes_from_tensor, tensor_from_bytes
from onecopy.comm.transfer import Form, decode, receive_tensors, send_tensors
from onecopy.planning.layout import flat_range, in_layout_of, is_dense
from onecopy.planning.param_groups import MASTER, check_names, update_dtype
from onecopy.planning.plan import Plan
from onecopy.planning.text import shown
from onecopy.planning.traits import class_name, is_torch_class, options_of
from onecopy.sharding.inner import Inner, InnerOptimizers, OwnedShard
from onecopy.sharding.sharded_params import ShardedParams

logger = logging.getLogger("onecopy")

Groups = Sequence[Mapping[str, Any]]
FullState = dict[Any, Any]  # state by parameter, or by a key of the class's own


# -------------------------------------------------------------------------- gathering


class Manifest(NamedTuple):
    """What a rank holds: the skeleton of the state of each owned shard, and forms of its tensors.

    Most shards are alike, so each kind is written once. It travels as JSON.
    """

    kinds: list[tuple[Any, list[Form]]]  # skeleton None: no state
    kind_of: list[int]  # by owned shard, in the order of the plan

    @classmethod
    def of(cls, local: InnerOptimizers) -> tuple[Manifest, list[torch.Tensor]]:
        """This rank's, and its tensors as 1-D runs."""
        kinds: list[tuple[Any, list[Form]]] = []
        kind_of, numbers, flats = [], dict[str, int](), []
        for owned in local.shards:
            tensors: list[torch.Tensor] = []
            state, skeleton = local.state_to_save(owned), None
            if state is not None:
                name = f"parameter {owned.shard.param}"
                skeleton = encode_state(state, tensors, name, owned.is_cut)
            tensors = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
            tensors = [t if is_dense(t) else t.contiguous() for t in tensors]
            kind = (skeleton, [Form.of(tensor) for tensor in tensors])
            number = numbers.setdefault(json.dumps(kind), len(kinds))
            kinds += [kind] if number == len(kinds) else []
            kind_of.append(number)
            flats += [flat_range(tensor, 0, tensor.numel()) for tensor in tensors]
        return cls(kinds, kind_of), flats

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        kinds, kind_of = json.loads(data)
        return cls(
            [(kept, [Form.from_json(*form) for form in forms]) for kept, forms in kinds], kind_of
        )


def consolidate(
    plan: Plan,
    params: Sequence[torch.Tensor],
    rank_group: RankGroup,
    to: int,
    manifest: Manifest,
    flats: Sequence[torch.Tensor],
) -> dict[int, dict[Any, Any]] | None:
    """The whole job's state on rank ``to``, on the CPU, by the plan's parameter numbers."""
    text = json.dumps(manifest).encode()
    lengths = rank_group.all_gather_bytes(len(text).to_bytes(8, "little"))
    if rank_group.rank != to:
        send_tensors(rank_group, [tensor_from_bytes(text)], to)
        send_tensors(rank_group, flats, to)
        return None
    states: dict[int, dict[Any, Any]] = {}
    incoming: dict[int, list[torch.Tensor]] = {}
    for rank, length in enumerate(lengths):
        theirs = manifest
        if rank != to:
            count = int.from_bytes(length, "little")
            received = torch.empty(count, dtype=torch.uint8, device="cpu")
            receive_tensors(rank_group, {rank: [received]})
            theirs = Manifest.from_bytes(bytes_from_tensor(received))
        incoming[rank] = _make_room(plan, params, states, rank, theirs)
    mine = incoming.pop(to)

    def copy_mine() -> None:
        for target, source in zip(mine, flats, strict=True):
            target.copy_(source)

    receive_tensors(rank_group, incoming, meanwhile=copy_mine)
    return dict(sorted(states.items()))


def _make_room(
    plan: Plan,
    params: Sequence[torch.Tensor],
    states: dict[int, dict[Any, Any]],
    rank: int,
    manifest: Manifest,
) -> list[torch.Tensor]:
    """Extend ``states`` by what a rank holds; the 1-D runs in it that this rank's tensors fill."""
    targets: list[torch.Tensor] = []
    for shard, number in zip(plan.shards(rank), manifest.kind_of, strict=True):
        skeleton, forms = manifest.kinds[number]
        if skeleton is None:
            continue
        tensors = [form.empty() for form in forms]
        runs = [flat_range(tensor, 0, tensor.numel()) for tensor in tensors]
        held = decode(skeleton, tensors)
        targets += runs
        if shard.param not in plan.cut_params:
            states[shard.param] = held
            continue
        # Tensors as long as the shard are parts of one of the parameter's shape; others are equal
        # in all shards, and the first is kept.
        state, param = states.setdefault(shard.param, {}), params[shard.param]
        for key, value in held.items():
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
            place = next(i for i, tensor in enumerate(tensors) if tensor is value) - len(runs)
            targets[place] = flat_range(state[key], shard.start, shard.stop)
    return targets


def _state_outside_the_plan(sharded_params: ShardedParams, groups: Groups) -> dict[Any, Any]:
    """What a plain optimizer's dict holds besides the state of parameters that were trained.

    That is state which a class makes in its constructor, for frozen parameters too, and state
    that belongs to no parameter.
    """
    inner, registry = sharded_params.inner, sharded_params.registry
    found: dict[Any, Any] = {}
    frozen = [registry.entries[index] for index in registry.unplanned(sharded_params.plan)]
    for number, (group, policy) in enumerate(zip(groups, registry.policies, strict=True)):
        params = [entry.param for entry in frozen if entry.group == number]
        found.update(inner.constructor_state(policy.optimizer_class, group, params))
    for each in inner.inners:
        of_class = each.optimizer.state.items()
        found.update({key: held for key, held in of_class if not isinstance(key, torch.Tensor)})
    return {key: copy.deepcopy(held) for key, held in found.items()}


def agree_to_gather(
    rank_group: RankGroup, sharded_params: ShardedParams, steps: int, to: int
) -> tuple[Manifest, list[torch.Tensor]]:
    """What this rank has for the full state, once all ranks agree to gather it. Collective."""
    rank_group.monitor.enter(f"consolidating the state to rank {to}")
    mine: list[Any] = []

    def prepare() -> list[str]:
        if type(to) is not int or not 0 <= to < rank_group.world_size:
            last = rank_group.world_size - 1
            raise ValueError(f"to must be a rank of the group, 0 to {last}, got {to!r}")
        mine.extend(Manifest.of(sharded_params.inner))
        return [f"to rank {to}", f"after {steps} steps", f"plan {sharded_params.plan.digest}"]

    same_outcome(rank_group, "consolidating the state", prepare)
    manifest, flats = mine
    return manifest, flats


def gather(
    rank_group: RankGroup,
    sharded_params: ShardedParams,
    groups: Groups,
    mine: tuple[Manifest, list[torch.Tensor]],
    to: int,
) -> FullState | None:
    """The full state on rank ``to``. Collective."""
    params = sharded_params.registry.params
    gathered = consolidate(sharded_params.plan, params, rank_group, to, *mine)
    rank_group.monitor.note("state consolidated")
    if gathered is None:
        return None
    trained = {params[index]: state for index, state in gathered.items()}
    return {**trained, **_state_outside_the_plan(sharded_params, groups)}


def full_state_dict(
    full_state: FullState | str,
    has_state: bool,
    rank: int,
    sharded_params: ShardedParams,
    groups: Groups,
) -> dict[str, Any]:
    """The dict for the user. ``has_state``: a step or a load has given state to some rank."""
    inner = sharded_params.inner
    if isinstance(full_state, str) and not has_state and not len(inner.state):
        policies = zip(groups, sharded_params.registry.policies, strict=True)
        # Before the first step no rank has any, unless a constructor makes it. Trainers ask.
        if not any(
            inner.constructor_state(policy.optimizer_class, group, group["params"][:1])
            for group, policy in policies
        ):
            full_state = {}
    if isinstance(full_state, str):
        raise RuntimeError(
            f"rank {rank} has no state dict: {full_state}. Call "
            f"consolidate_state_dict(to={rank}) on all ranks first; or, for "
            "torch.distributed.checkpoint, save optimizer.sharded(), which gathers nothing"
        )
    return as_plain_dict(full_state, groups)


@dataclass(frozen=True, slots=True)
class Loadable:
    """State and options that fit the optimizer: of a full state dict, or of a checkpoint."""

    states: Mapping[torch.Tensor, Mapping[Any, Any]]  # of whole parameters, to be cut
    common: Mapping[Any, Any]  # what a class keeps under keys that are no parameter's
    groups: Groups
    shards: Sequence[StateShard] = ()  # what is cut already, and ours to keep
    lacks_masters: bool = False  # with some of the state that is cut, on any rank
    has_shards: bool = False  # there is state that is cut, on any rank
    group_of: Mapping[torch.Tensor, int] = field(default_factory=dict)  # of whole parameters

    @property
    def is_empty(self) -> bool:
        """Whether no rank loads any state. Options may be loaded."""
        return not (self.states or self.common or self.has_shards)


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
    """Give the inner optimizers their parts, once all classes have rehearsed."""
    for inner in local.inners:
        _rehearse(local, inner, loadable)
    cut = cut_full_state(local, loadable.states)
    adopt(local, [*loadable.shards, *cut], loadable.groups, loadable.common)


def cut_full_state(
    local: InnerOptimizers, states: Mapping[torch.Tensor, Mapping[Any, Any]]
) -> list[StateShard]:
    """This rank's parts of the state of whole parameters: copies."""
    found = []
    for owned in local.shards:
        for key, value in states.get(owned.param, {}).items():
            path = (key,)
            found.append(StateShard(owned.shard.param, path, _part_of(owned, value), owned=owned))
        if owned.param in states and not states[owned.param]:  # a state without entries is one, too
            found.append(StateShard(owned.shard.param, (), None, owned=owned))
    return found


def _rehearse(local: InnerOptimizers, inner: Inner, loadable: Loadable) -> None:
    """Have the class load the state of all parameters, each of them without elements.

    Why: a rank loads its own shards only. What the class refuses in one of them, all ranks must
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
    numbered = zip(inner.groups, stand_in.param_groups, strict=True)
    saved = [
        {**options_of(loadable.groups[number]), "params": group["params"]}
        for number, group in numbered
    ]
    load_into(stand_in, as_plain_dict(states, saved))


def _outlined(value: Any) -> Any:
    """A state value without the elements of a tensor."""
    if isinstance(value, torch.Tensor) and value.dim():
        return torch.empty([0] * value.dim(), dtype=value.dtype, device=value.device)
    return copied(value)


def warn_of_masters(
    loadable: Loadable, planned: Iterable[torch.Tensor], master_dtype: torch.dtype | None
) -> None:
    """Log if only one of the saved and the present state has master copies. One rank calls it: all
    would log the same."""
    lacking, unused = loadable.lacks_masters, False
    for param in planned:
        state = loadable.states.get(param, {})
        if update_dtype(param.dtype, master_dtype) == param.dtype:
            unused |= MASTER in state
        else:
            lacking |= bool(state) and MASTER not in state
    if lacking:
        logger.warning(
            "what was loaded lacks master copies (%s): they were rebuilt from the parameters",
            MASTER,
        )
    if unused:
        logger.warning(
            "what was loaded has master copies (%s), for which this optimizer has no use: they "
            "were left out. To keep them, build it with master_dtype=torch.float32",
            MASTER,
        )


def with_ranks_told(rank_group: RankGroup, loadable: Loadable) -> Loadable:
    """With the knowledge of all ranks of which master copies and which state there are.
    Collective."""
    lacks = has_shards = False
    for owned, shards in by_owned(loadable.shards).items():
        masters = sum(shard.is_master for shard in shards)
        has_shards |= masters < len(shards)
        lacks |= owned.has_master and not masters
    of_ranks = rank_group.all_gather_bytes(bytes([lacks, has_shards]))
    lacks, has_shards = (any(column) for column in zip(*of_ranks, strict=True))
    return replace(loadable, lacks_masters=lacks, has_shards=has_shards)


def load_masters(local: InnerOptimizers, loadable: Loadable) -> None:
    """Give the master copies what was saved of them; others are made anew."""
    saved = {
        param: {MASTER: state[MASTER]}
        for param, state in loadable.states.items()
        if MASTER in state
    }
    local.masters.load(masters_in([*loadable.shards, *cut_full_state(local, saved)]))


def _part_of(owned: OwnedShard, value: Any) -> Any:
    """The shard's part of a state value: a copy, because the caller keeps the original."""
    if not isinstance(value, torch.Tensor) or not owned.is_cut or value.dim() == 0:
        return copied(value)
    laid_out = in_layout_of(owned.param, value.detach())
    return flat_range(laid_out, owned.shard.start, owned.shard.stop).clone()
