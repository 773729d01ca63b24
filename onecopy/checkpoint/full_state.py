"""The full state dict: gathered to one rank, checked and cut when it is loaded.

Gathering sends skeletons, which say what states look like, and then tensors, in the order of the
skeletons: no pickle. The rank that asks puts every part into a tensor of the parameter's shape.

Loading communicates nothing. All ranks check the whole dict, so that all refuse it alike; each then
takes the parts that it owns.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from onecopy.checkpoint.state import (
    StateDictMisfit,
    States,
    adopt,
    as_plain_dict,
    copied,
    leaves_of_state,
    load_into,
    made_for_frozen,
)
from onecopy.comm.agreement import same_outcome
from onecopy.comm.group import RankGroup, bytes_from_tensor, tensor_from_bytes
from onecopy.comm.transfer import Form, decode, encode, receive_tensors, send_tensors
from onecopy.planning.layout import flat_range, in_layout_of, is_dense
from onecopy.planning.param_groups import MASTER, Groups, check_names, update_dtype
from onecopy.planning.text import shown
from onecopy.planning.traits import class_name, is_torch_class, options_of
from onecopy.sharding.inner import Inner, InnerOptimizers
from onecopy.sharding.sharded_params import ShardedParams

logger = logging.getLogger("onecopy")

FullState = dict[Any, Any]  # state by parameter, or by a key of the class's own


# -------------------------------------------------------------------------- gathering


def consolidate(
    rank_group: RankGroup,
    sharded_params: ShardedParams,
    groups: Groups,
    steps: int,
    to: int,
    let_go: Callable[[], None],
) -> FullState | None:
    """The whole job's state on rank ``to``, on the CPU. Collective. ``let_go`` drops the last one
    there, as soon as no rank refuses: there are never two."""
    rank_group.monitor.enter(f"consolidating the state to rank {to}")
    manifest, flats = b"", list[torch.Tensor]()

    def prepare() -> list[str]:
        nonlocal manifest, flats
        if type(to) is not int or not 0 <= to < rank_group.world_size:
            last = rank_group.world_size - 1
            raise ValueError(f"to must be a rank of the group, 0 to {last}, got {to!r}")
        manifest, flats = _manifest(sharded_params.inner)
        return [f"to rank {to}", f"after {steps} steps", f"plan {sharded_params.plan.digest}"]

    same_outcome(rank_group, "consolidating the state", prepare)
    lengths = rank_group.all_gather_bytes(len(manifest).to_bytes(8, "little"))
    if rank_group.rank != to:
        send_tensors(rank_group, [tensor_from_bytes(manifest)], to)
        send_tensors(rank_group, flats, to)
        return None
    let_go()
    states: dict[int, dict[Any, Any]] = {}
    incoming: dict[int, list[torch.Tensor]] = {}
    for rank, length in enumerate(lengths):
        theirs = manifest
        if rank != to:
            count = int.from_bytes(length, "little")
            received = torch.empty(count, dtype=torch.uint8, device="cpu")
            receive_tensors(rank_group, {rank: [received]})
            theirs = bytes_from_tensor(received)
        incoming[rank] = _make_room(sharded_params, states, rank, theirs)
    mine = incoming.pop(to)

    def copy_mine() -> None:
        for target, source in zip(mine, flats, strict=True):
            target.copy_(source)

    receive_tensors(rank_group, incoming, meanwhile=copy_mine)
    params = sharded_params.registry.params
    trained = {params[index]: states[index] for index in sorted(states)}
    return {**trained, **_state_outside_the_plan(sharded_params, groups)}


def _manifest(local: InnerOptimizers) -> tuple[bytes, list[torch.Tensor]]:
    """What this rank holds, as JSON, and its tensors as 1-D runs.

    For each owned shard, in the order of the plan, it has the skeleton of the state (None: no
    state) and the forms of its tensors. Most shards are alike, so each kind is written once.
    """
    kinds: dict[str, int] = {}
    kind_of, flats = [], []
    for owned in local.shards:
        tensors: list[torch.Tensor] = []
        state, skeleton = local.state_to_save(owned), None
        if state is not None:
            leaves_of_state(state, f"parameter {owned.shard.param}", owned.is_cut)
            skeleton = encode(dict(state), tensors)
        tensors = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
        tensors = [t if is_dense(t) else t.contiguous() for t in tensors]
        kind = json.dumps([skeleton, [Form.of(tensor) for tensor in tensors]])
        kind_of.append(kinds.setdefault(kind, len(kinds)))
        flats += [flat_range(tensor, 0, tensor.numel()) for tensor in tensors]
    return json.dumps([[json.loads(kind) for kind in kinds], kind_of]).encode(), flats


def _make_room(
    sharded_params: ShardedParams, states: dict[int, dict[Any, Any]], rank: int, manifest: bytes
) -> list[torch.Tensor]:
    """Extend ``states`` by what a rank holds; the 1-D runs in it that this rank's tensors fill."""
    plan, targets = sharded_params.plan, list[torch.Tensor]()
    kinds, kind_of = json.loads(manifest)
    for shard, number in zip(plan.shards(rank), kind_of, strict=True):
        skeleton, forms = kinds[number]
        if skeleton is None:
            continue
        tensors = [Form.from_json(*form).empty() for form in forms]
        runs = [flat_range(tensor, 0, tensor.numel()) for tensor in tensors]
        held = decode(skeleton, tensors)
        if shard.param not in plan.cut_params:
            states[shard.param] = held
            targets += runs
            continue
        # Tensors as long as the shard are parts of one of the parameter's shape; others are equal
        # in all shards, and the first is kept.
        state = states.setdefault(shard.param, {})
        param = sharded_params.registry.params[shard.param]
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
            place = next(i for i, tensor in enumerate(tensors) if tensor is value)
            runs[place] = flat_range(state[key], shard.start, shard.stop)
        targets += runs
    return targets


def _state_outside_the_plan(sharded_params: ShardedParams, groups: Groups) -> FullState:
    """What a plain optimizer's dict holds besides the state of parameters that were trained.

    That is state which a class makes in its constructor, for frozen parameters too, and state
    that belongs to no parameter.
    """
    params = sharded_params.registry.params
    made = made_for_frozen(sharded_params, groups)
    found: FullState = {params[index]: state for index, state in made}
    for each in sharded_params.inner.inners:
        of_class = each.optimizer.state.items()
        found.update({key: held for key, held in of_class if not isinstance(key, torch.Tensor)})
    return {key: copy.deepcopy(held) for key, held in found.items()}


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


# -------------------------------------------------------------------------- checking


@dataclass(frozen=True, slots=True)
class Loadable:
    """State and options that fit the optimizer: of a full state dict, or of a checkpoint."""

    groups: Groups
    whole: Mapping[torch.Tensor, Mapping[Any, Any]]  # state of whole parameters, to be cut
    cut: States  # what is cut already, and ours to keep
    common: Mapping[Any, Any]  # what a class keeps under keys that are no parameter's
    lacks_masters: bool = False  # with some of the state that is cut, on any rank
    is_empty: bool = False  # no rank loads any state. Options may be loaded

    @property
    def masters(self) -> dict[torch.Tensor, torch.Tensor]:
        """The master copies, by the tensors of the inner optimizers."""
        return {o.tensor: state[MASTER] for o, state in self.cut.items() if MASTER in state}


def check_state_dict(
    state_dict: Mapping[str, Any], groups: Groups, cuttable: set[torch.Tensor]
) -> Loadable:
    """``state_dict`` matched with our parameters, or the reason why it does not fit."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise StateDictMisfit(f"the state dict has no {key!r}: is it one of an optimizer?")
    states, saved_groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(states, Mapping) or not isinstance(saved_groups, (list, tuple)):
        raise TypeError(
            "a state dict needs a dict under 'state' and a list under 'param_groups', got "
            f"{type(states).__name__} and {type(saved_groups).__name__}"
        )
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
    common = {key: copied(state) for key, state in states.items() if key not in by_id}
    options = [copied(dict(saved)) for saved in saved_groups]
    for key, param in by_id.items():
        if key in states:
            _check_state(key, states[key], param, param in cuttable)
    whole = {param: states[key] for key, param in by_id.items() if key in states}
    return Loadable(options, whole, {}, common, is_empty=not (whole or common))


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


_MOST_EXPANDED = 1 << 30  # bytes


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
        if not is_tensor:
            continue
        if value.is_meta or (value.layout is not torch.strided and cuttable):
            what = "on the meta device" if value.is_meta else f"sparse ({value.layout})"
            raise ValueError(
                f"the state {shown(key)} of parameter {number} is {what}: it has no values that "
                "could be cut over the ranks"
            )
        if value.is_complex() and not param.is_complex():
            raise ValueError(
                f"the state {shown(key)} of parameter {number} is complex, the parameter is real: "
                "half of it would be lost"
            )
        if value.layout is not torch.strided or value.nbytes <= _MOST_EXPANDED:
            continue
        with contextlib.suppress(NotImplementedError, RuntimeError):  # a subclass without memory
            # A rank copies the state that it owns: all refuse what would be too much for one.
            if value.nbytes > value.untyped_storage().nbytes():
                raise ValueError(
                    f"the state {shown(key)} of parameter {number} claims {value.nbytes:,} bytes, "
                    "of which it holds but a few: expanded, it would not fit into memory"
                )


_SAMPLED = 16  # elements of a tensor


def sample_lines(
    loadable: Loadable, params: Sequence[torch.Tensor], names: Sequence[str]
) -> list[str]:
    """The state of whole parameters in a few words, by which ranks find out whether they were
    given the same. Elements are sampled: another step or run is told apart, a single bit is not."""
    lines = []
    for param, name in zip(params, names, strict=True):
        for key, value in loadable.whole.get(param, {}).items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                # Evenly spread, without a copy of the rest.
                found = torch.view_as_real(value) if value.is_complex() else value
                if found.dim():
                    count, numel = min(_SAMPLED, found.numel()), found.numel()
                    places = torch.arange(count, device=found.device) * (numel // max(1, count))
                    found = found[torch.unravel_index(places, found.shape)]
                sample = found.detach().flatten().double().tolist()
                numbers = ", ".join(f"{number:.9g}" for number in sample)
                lines.append(f"{name}: loaded {key} of shape {tuple(value.shape)}: {numbers}")
            elif isinstance(value, (bool, int, float)):
                lines.append(f"{name}: loaded {key} = {shown(value)}")
    return lines


# -------------------------------------------------------------------------- loading


def adopt_state(sharded_params: ShardedParams, loadable: Loadable) -> Loadable:
    """Give the inner optimizers their parts, once all classes have rehearsed; with these parts."""
    local = sharded_params.inner
    for inner in local.inners:
        _rehearse(sharded_params, inner, loadable)
    cut = dict(loadable.cut)
    for owned in local.shards:
        if owned.param in loadable.whole:
            part = cut[owned] = {}
            for key, value in loadable.whole[owned.param].items():
                if isinstance(value, torch.Tensor) and owned.is_cut and value.dim():
                    laid_out = in_layout_of(owned.param, value.detach())
                    start, stop = owned.shard.start, owned.shard.stop
                    part[key] = flat_range(laid_out, start, stop).clone()
                else:
                    part[key] = copied(value)  # the caller keeps the original
    adopt(local, cut, loadable.groups, loadable.common)
    return replace(loadable, cut=cut)


def _rehearse(sharded_params: ShardedParams, inner: Inner, loadable: Loadable) -> None:
    """Have the class load the state of all parameters, each of them without elements.

    Why: a rank loads its own shards only. What the class refuses in one of them, all ranks must
    refuse. Classes that are not torch's may want tensors as they are, and are not asked.
    """
    cls, local = type(inner.optimizer), sharded_params.inner
    if not (loadable.whole and is_torch_class(class_name(cls))):
        return
    params: dict[int, list[torch.Tensor]] = {number: [] for number in inner.groups}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for entry in sharded_params.registry.entries:
        if entry.group in params and entry.param in loadable.whole:
            dtype = update_dtype(entry.param.dtype, local.master_dtype)
            empty = _without_elements(entry.param, dtype)
            params[entry.group].append(empty)
            states[empty] = {
                key: _without_elements(value, value.dtype)
                if isinstance(value, torch.Tensor) and value.dim()
                else copied(value)
                for key, value in loadable.whole[entry.param].items()
                if key != MASTER
            }
    numbered = zip(inner.groups, inner.optimizer.param_groups, strict=True)
    groups = [{**options_of(group), "params": params[number]} for number, group in numbered]
    try:
        stand_in = local.construct(cls, groups)
    except Exception:  # a class that takes no such tensors
        return
    load_into(stand_in, states, [loadable.groups[number] for number in inner.groups])


def _without_elements(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty([0] * like.dim(), dtype=dtype, device=like.device)


def with_ranks_told(rank_group: RankGroup, loadable: Loadable) -> Loadable:
    """With the knowledge of all ranks of which master copies and which state there are.
    Collective."""
    lacks = any(owned.has_master and MASTER not in state for owned, state in loadable.cut.items())
    has_state = bool(loadable.whole) or any(
        state.keys() - {MASTER} for state in loadable.cut.values()
    )
    of_ranks = rank_group.all_gather_bytes(bytes([lacks, has_state]))
    lacks, has_state = (any(column) for column in zip(*of_ranks, strict=True))
    return replace(loadable, lacks_masters=lacks, is_empty=not has_state)


def warn_of_masters(
    loadable: Loadable, planned: Iterable[torch.Tensor], master_dtype: torch.dtype | None
) -> None:
    """Log if only one of the saved and the present state has master copies. One rank calls it: all
    would log the same."""
    lacking, unused = loadable.lacks_masters, False
    for param in planned:
        state = loadable.whole.get(param, {})
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
