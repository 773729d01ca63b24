"""``optimizer.load(path)``: whole or not at all, from a checkpoint of any job.

::

    rank 0        reads .metadata and sends it: all ranks see the same checkpoint
    each rank     finds the optimizer's part of it                             find_saved_state
                  plans for the options and the frozen parameters that it has  options_from
                  compares it with the state that the class would make         match
                  reads its shards                          (nobody waits in a collective)
    rank 0        decides from the reports of all
    all ranks     give the state to the inner optimizers
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onecopy.checkpoint.files import DataFileReader, Progress
from onecopy.checkpoint.full_state import Loadable, with_ranks_told
from onecopy.checkpoint.metadata import (
    Metadata,
    TensorEntry,
    ValueEntry,
    parse_metadata,
    read_metadata,
)
from onecopy.checkpoint.safe_pickle import DamagedCheckpoint
from onecopy.checkpoint.save import MARK, classes_of, digest
from onecopy.checkpoint.state import (
    BY_INDEX,
    States,
    StateShard,
    StateView,
    adopt,
    collect,
    describe_names,
    dotted,
    leaves_of,
    states_of,
    without_uninitialized,
)
from onecopy.checkpoint.state import Path as Steps
from onecopy.comm.agreement import same_outcome
from onecopy.comm.group import RankGroup
from onecopy.planning.layout import Chunk
from onecopy.planning.param_groups import MASTER, GroupPolicy
from onecopy.planning.traits import is_torch_class, options_of
from onecopy.sharding.sharded_params import ShardedParams

Entry = TensorEntry | ValueEntry

# -------------------------------------------------------------------------- what a checkpoint has


class SavedValue(NamedTuple):
    """A tensor or value of a parameter's state."""

    key: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class SavedState:
    """The optimizer's part of a checkpoint."""

    states: dict[str, dict[str, SavedValue]]  # by parameter, by dotted path within
    groups: list[dict[str, Any]]  # options, and the names under "params"
    by_position: bool
    # The names in each group. None if the checkpoint is flattened and does not tell: then every
    # parameter has options of its own.
    grouping: Sequence[Sequence[str]] | None
    # Parameters whose state did not exist yet; None where something else than ``optimizer.save``
    # wrote the checkpoint, which does not tell.
    not_begun: set[str] | None = None
    # Likewise: parameters that had no state because they were frozen, and everybody's class.
    frozen: set[str] | None = None
    classes: Mapping[str, str] = field(default_factory=dict)


class _Section(NamedTuple):
    """An entry of the optimizer's part: ("state", ("layer.weight", "exp_avg")) and the like."""

    title: str  # "state", "param_groups" or the mark's
    rest: Steps  # nested: a step each
    flat: str  # flattened: what follows the title in the same key, else empty

    @classmethod
    def of(cls, path: Steps) -> _Section:
        title, _, flat = str(path[0]).partition(".")
        return cls(title, path[1:], flat)


def find_saved_state(
    contents: Metadata, reader: DataFileReader, key: str | None, expected: Container[str]
) -> SavedState:
    """The optimizer's part, in whichever of torch's forms it was written. Names that are expected
    help to tell a parameter's name from what follows it."""
    prefix = _prefix(contents, key)
    sections = {
        full: _Section.of(path[len(prefix) :])
        for full, path in contents.paths.items()
        if path[: len(prefix)] == prefix and len(path) > len(prefix)
    }
    groups = _groups(contents, reader, sections, expected)
    listed = [name for group in groups for name in group["params"]]
    given = _given_names(groups)
    for group in groups:
        group["params"] = [
            given.get(n, f"{BY_INDEX}{n}") if isinstance(n, int) else n for n in group["params"]
        ]
    names = {name for group in groups for name in group["params"]}
    states: dict[str, dict[str, SavedValue]] = {}
    mark: Mapping[str, Any] = {}
    for full, (title, rest, flat) in sections.items():
        entry = contents.entries[full]
        if title == "state":
            name, *within = map(str, (*_split_flat(flat, names), *rest) if flat else rest)
            if name.isdigit() and any(isinstance(n, int) for n in listed):
                name = given.get(int(name), f"{BY_INDEX}{name}")
            states.setdefault(name, {})[".".join(within)] = SavedValue(full, entry)
        elif title == MARK and isinstance(entry, ValueEntry):
            mark = _checked_mark(reader.value(entry, full))
            _require_digest(contents, full, mark)
    by_position = not given and all(isinstance(n, int) or n.startswith(BY_INDEX) for n in listed)
    is_flat = any(section.title == "param_groups" and section.flat for section in sections.values())
    grouping = mark.get("groups") if is_flat else [group["params"] for group in groups]
    found = SavedState(states, groups, by_position, grouping)
    if not mark:
        return found
    classes = {name: cls for cls, of_class in mark["classes"].items() for name in of_class}
    return replace(
        found, not_begun=set(mark["not_begun"]), frozen=set(mark["frozen"]), classes=classes
    )


def _checked_mark(mark: Any) -> Mapping[str, Any]:
    """What ``optimizer.save`` writes beside the state, if it has the form of it."""
    lists = [mark.get("not_begun"), mark.get("frozen")] if isinstance(mark, dict) else [None]
    classes = mark.get("classes") if isinstance(mark, dict) else None
    lists += list(classes.values()) if isinstance(classes, dict) else [None]
    groups = mark.get("groups", []) if isinstance(mark, dict) else None  # older ones have none
    lists += groups if isinstance(groups, list) else [None]
    for names in lists:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DamagedCheckpoint("the metadata is not what was written: its mark is no mark")
    found: Mapping[str, Any] = mark
    return found


def _require_digest(contents: Metadata, mark_key: str, mark: Mapping[str, Any]) -> None:
    """The metadata has no checksum of its own; the mark has one of what it said."""
    facts: list[tuple[Any, ...]] = []
    for key, entry in contents.entries.items():
        path = contents.paths[key]
        if isinstance(entry, ValueEntry):
            facts += [(path, entry.place, "", (), (), ())] if key != mark_key else []
        else:
            dtype = str(entry.dtype).removeprefix("torch.")
            facts += [(path, c.place, dtype, entry.shape, c.offsets, c.sizes) for c in entry.chunks]
    if digest(facts) != mark.get("digest"):
        raise DamagedCheckpoint("the metadata is not what was written: its checksum is wrong")


def _given_names(groups: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The names that a plain optimizer's dict has beside its numbers, if it was given any."""
    if not all(len(g.get("param_names", ())) == len(g["params"]) for g in groups):
        return {}
    return {
        number: name
        for group in groups
        for number, name in zip(group["params"], group["param_names"], strict=True)
        if isinstance(number, int)
    }


def _prefix(contents: Metadata, key: str | None) -> Steps:
    """The steps that lead to the optimizer's part."""
    found = _leading_to("param_groups", contents)
    # A module or parameter may be called param_groups, too.
    found = {p for p in found if not any(p[:depth] in found for depth in range(len(p)))}
    if len(found) > 1:
        found = found & _leading_to("state", contents) or found
    shown = {dotted(prefix): prefix for prefix in found}
    listed = ", ".join(sorted(map(repr, shown))) or "no key"
    if key is not None:
        if key not in shown:
            raise ValueError(
                f"the checkpoint has no optimizer state under {key!r}; it has some under {listed}"
            )
        return shown[key]
    if not found:
        raise ValueError("the checkpoint holds no optimizer state: no key has param_groups in it")
    if len(found) > 1:
        raise ValueError(
            f"the checkpoint holds the states of several optimizers, under {listed}: say which "
            "one, load(path, key=...)"
        )
    return next(iter(found))


def _leading_to(title: str, contents: Metadata) -> set[Steps]:
    """The steps that lead to anything of this name."""
    return {
        path[:depth]
        for path in contents.paths.values()
        for depth, step in enumerate(path)
        if _Section.of((step,)).title == title
    }


def _groups(
    contents: Metadata,
    reader: DataFileReader,
    sections: Mapping[str, _Section],
    names: Container[str],
) -> list[dict[str, Any]]:
    """The saved groups. Flattened, every parameter is a group of its own."""
    leaves: dict[Steps, Any] = {}
    for full, (title, rest, flat) in sections.items():
        if title == "param_groups":
            path = (*_split_flat(flat, names), *rest) if flat else rest
            if flat:
                leaves[path[0], "params"] = [path[0]]
            leaves[path] = _read_whole(contents.entries[full], reader, full)
    groups = _nested(leaves)
    groups = list(groups.values()) if isinstance(groups, dict) else groups
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        raise DamagedCheckpoint("a group of the checkpoint lists no parameters")
    return groups


def _is_group(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("params"), list)


def _nested(leaves: Mapping[Steps, Any]) -> Any:
    """Values by their paths, in containers: where the steps are numbers there was a list."""
    if () in leaves:
        return leaves[()]
    by_step: dict[str | int, dict[Steps, Any]] = {}
    for (step, *rest), value in leaves.items():
        by_step.setdefault(step, {})[tuple(rest)] = value
    items = {step: _nested(inner) for step, inner in by_step.items()}
    if items and all(isinstance(step, int) for step in items):
        return [items[step] for step in sorted(items)]
    return items


def _read_whole(entry: Entry, reader: DataFileReader, key: str) -> Any:
    if isinstance(entry, ValueEntry):
        return reader.value(entry, key)
    reader.require_bytes(entry, key)
    tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    reader.fill(Chunk((0,) * tensor.dim(), entry.shape, 0, 0), tensor, entry, key)
    return tensor


def _split_flat(flat: str, names: Container[str]) -> tuple[str, str]:
    """(name of the parameter, key): the longest name that is known, and any other is taken to have
    a key without a dot."""
    parts = flat.split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        if name in names:
            return name, ".".join(parts[length:])
    name, _, key = flat.rpartition(".")
    return name, key


# -------------------------------------------------------------------------- what fits

_SHOWN = 20
_GROUPS = "param_groups: "


class LoadReport(NamedTuple):
    """What of a checkpoint and of the optimizer did not fit together, by name."""

    missing: tuple[str, ...] = ()  # the optimizer needs it, the checkpoint lacks it
    unexpected: tuple[str, ...] = ()  # the checkpoint has it, the optimizer has no place for it
    mismatched: tuple[str, ...] = ()  # of another shape, dtype or kind
    rebuilt: tuple[str, ...] = ()  # master copies it lacks: made anew from the parameters

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = []
        for title, names in zip(self._fields, self, strict=True):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                lines.append(f"  {title}: {', '.join(names[:_SHOWN])}{more}")
        return "\n".join(lines) or "  everything fits"


def match(
    view: StateView, shards: Sequence[StateShard], saved: SavedState
) -> tuple[LoadReport, set[str]]:
    """What does not fit of this rank's state, and on rank 0 what belongs to nobody; and the names
    of the parameters that cannot be loaded.

    ``shards`` are those that the class would make, without master copies that can be rebuilt.
    """
    missing: set[str] = set()
    unexpected: set[str] = set()
    mismatched: set[str] = set()
    known, listed = set(view.names), {name for group in saved.groups for name in group["params"]}
    unfit = known - listed
    expected: dict[str, dict[str, StateShard]] = {
        view.names[owned.shard.param]: {} for owned in view.local.shards
    }
    for shard in shards:
        expected.setdefault(view.names[shard.param], {})[dotted(shard.path)] = shard
    dtypes = {
        name: param.dtype for name, param in zip(view.names, view.registry.params, strict=True)
    }
    for name, ours in expected.items():
        theirs = saved.states.get(name)
        if theirs is None:
            # It was frozen, or had no gradient; if that is known not to be so, it is missing.
            if ours and saved.frozen is not None and name not in saved.frozen:
                missing |= {_key(name, path) for path in ours}
                unfit.add(name)
            continue
        differences = {
            path: _difference(ours[path], theirs[path].entry, dtypes[name])
            for path in ours.keys() & theirs.keys()
        }
        missing |= {_key(name, path) for path in ours.keys() - theirs.keys()}
        unexpected |= {_key(name, path) for path in theirs.keys() - ours.keys()}
        mismatched |= {f"{_key(name, path)} ({why})" for path, why in differences.items() if why}
        if ours.keys() - {MASTER} != theirs.keys() - {MASTER} or any(differences.values()):
            unfit.add(name)
    for name, difference in _of_other_classes(view, saved).items():
        mismatched.add(f"{name} ({difference})")
        unfit.add(name)
    if view.rank == 0:
        for name in saved.states.keys() - known:
            unexpected |= {_key(name, path) for path in saved.states[name]}
        missing |= {f"{_GROUPS}{name}" for name in known - listed}
        unexpected |= {f"{_GROUPS}{name}" for name in listed - known}
    return LoadReport(*(tuple(sorted(found)) for found in (missing, unexpected, mismatched))), unfit


def _key(name: str, path: str) -> str:
    return f"state.{name}.{path}"


def _difference(expected: StateShard, entry: Entry, of_param: torch.dtype) -> str:
    if expected.is_tensor != isinstance(entry, TensorEntry):
        return "a tensor on one side, a plain value on the other"
    if isinstance(entry, TensorEntry):
        if expected.shape != entry.shape:
            return f"shape {entry.shape} in the checkpoint, {expected.shape} here"
        # To a parameter's own dtype torch casts state when it is loaded.
        dtype = expected.data.dtype
        if dtype != entry.dtype and not (entry.dtype == of_param and dtype.is_floating_point):
            return f"{entry.dtype} in the checkpoint, {dtype} here"
    return ""


def _of_other_classes(view: StateView, saved: SavedState) -> dict[str, str]:
    """The parameters that had another class, and which, as far as the checkpoint tells."""
    found = {}
    for cls, names in classes_of(view).items():
        for name in names:
            theirs = saved.classes.get(name, cls)
            # Classes of other packages may have been renamed since; their keys must tell.
            if theirs != cls and is_torch_class(theirs) and is_torch_class(cls):
                found[name] = f"{theirs} in the checkpoint, {cls} here"
    return found


# -------------------------------------------------------------------------- options and groups


def options_from(
    view: StateView,
    saved: Sequence[Mapping[str, Any]],
    strict: bool = True,
    of_other_classes: Container[str] = (),
    kept: Container[int] = (),
) -> list[dict[str, Any]]:
    """The options of each of our groups, from saved groups that list the same names. The groups
    with the numbers ``kept`` keep theirs."""
    of_name = {name: number for number, group in enumerate(saved) for name in group["params"]}
    found = []
    for number, group in enumerate(view.groups):
        ours = options_of(group)
        names = [name for name in view.names_in(number) if name not in of_other_classes]
        known = {of_name[name] for name in names if name in of_name}
        if _is_empty_in(view, saved, number):
            known = {number}
        candidates = [_as_in(ours, {**ours, **options_of(saved[n])}) for n in sorted(known)]
        if len({_written(options) for options in candidates}) > 1:
            if strict:
                raise ValueError(
                    f"group {number} of the optimizer holds parameters of groups "
                    f"{', '.join(map(str, sorted(known)))} of the checkpoint, which have "
                    "different options: give the optimizer the groups that it had when it was "
                    "saved"
                )
            candidates = []
        found.append(candidates[0] if candidates and number not in kept else ours)
    return found


class Regrouped(NamedTuple):
    """What differs between the groups of the optimizer and those of a checkpoint."""

    params: dict[str, str]  # by name: in which groups they are
    groups: set[int]  # of the optimizer, those that are concerned


def regrouped(view: StateView, grouping: Sequence[Sequence[str]]) -> Regrouped:
    """The parameters that are not with the same others as in the saved groups, which list names.

    Groups may come in another order. Names that only one side has are not compared.
    """
    of_name = {name: number for number, names in enumerate(grouping) for name in names}
    shared: dict[tuple[int, int], list[str]] = {}  # by group here and group there
    for number in range(len(view.groups)):
        for name in view.names_in(number):
            if name in of_name:
                shared.setdefault((number, of_name[name]), []).append(name)
    # Groups that share most of their parameters are taken for the same.
    there: dict[int, int] = {}  # by group here
    here: dict[int, int] = {}  # by group there
    for ours, theirs in sorted(shared, key=lambda pair: (-len(shared[pair]), pair)):
        if ours not in there and theirs not in here:
            there[ours], here[theirs] = theirs, ours
    found = Regrouped({}, set())
    for (ours, theirs), names in shared.items():
        if there.get(ours) == theirs:
            continue
        where = f"in group {theirs} of the checkpoint, in group {ours} here"
        if ours in there:
            other = there[ours]
            where += f" with {shared[ours, other][0]} of group {other}"
            found.groups.add(ours)
        if theirs in here:
            other = here[theirs]
            where += f", without {shared[other, theirs][0]} of group {theirs}"
            found.groups.update((ours, other))
        found.params.update(dict.fromkeys(names, where))
    return found


def require_same_groups(view: StateView, grouping: Sequence[Sequence[str]]) -> None:
    moved = regrouped(view, grouping).params
    if moved:
        listed = [f"{name} ({where})" for name, where in moved.items()]
        raise ValueError(
            f"parameters are grouped otherwise than in the checkpoint: {', '.join(listed[:5])}"
            f"{', ...' * (len(listed) > 5)}. {SAME_GROUPS}"
        )


SAME_GROUPS = (
    "Options belong to groups: build the optimizer with the groups that it had when it was saved"
)


def _is_empty_in(view: StateView, saved: Sequence[Mapping[str, Any]], number: int) -> bool:
    """Whether a group has no parameters by which to know it, here and there."""
    alike = len(saved) == len(view.groups) and not saved[number]["params"]
    return alike and not view.names_in(number)


def require_all_in(view: StateView, saved: Sequence[Mapping[str, Any]]) -> None:
    known = {name for group in saved for name in group["params"]}
    lost = [name for name in view.names if name not in known]
    if lost:
        raise ValueError(
            f"the checkpoint does not know {', '.join(lost[:5])}{', ...' * (len(lost) > 5)}: "
            "is it of another model, or were the groups others? load(path) finds them by name"
        )


def _written(options: Mapping[str, Any]) -> str:
    """Options as text, by which they can be compared whatever they are."""
    leaves = leaves_of(dict(sorted(options.items())), "a group").items()
    values = ((path, v.tolist() if isinstance(v, torch.Tensor) else v) for path, v in leaves)
    return json.dumps([(path, type(value).__name__, value) for path, value in values])


def _as_in(like: Any, value: Any) -> Any:
    """``value``, which may have gone through a file, in the containers and with the keys of
    ``like``: a file knows lists and text only."""
    if isinstance(like, dict) and isinstance(value, dict):
        keys = {str(key): key for key in like}
        return {keys.get(k, k): _as_in(like.get(keys.get(k)), v) for k, v in value.items()}
    if isinstance(like, (list, tuple)) and isinstance(value, (list, tuple)):
        items = [_as_in(a, b) for a, b in zip(chain(like, repeat(None)), value, strict=False)]
        return tuple(items) if isinstance(like, tuple) else items
    return value


# -------------------------------------------------------------------------- loading


def agree_on_shards(
    rank_group: RankGroup,
    view: StateView,
    shards: Sequence[StateShard],
    groups: Sequence[Mapping[str, Any]],
    incomplete: Sequence[str],
    policies_for: Callable[[Sequence[Mapping[str, Any]]], Sequence[GroupPolicy]],
) -> Loadable:
    """The state that DCP has read, or an error on all ranks. Collective."""
    options: list[dict[str, Any]] = []

    def prepare() -> list[str]:
        if incomplete:
            raise ValueError(
                f"the checkpoint does not cover the state of {', '.join(incomplete[:5])}"
                f"{', ...' * (len(incomplete) > 5)}: is it complete?"
            )
        require_all_in(view, groups)
        require_same_groups(view, [group["params"] for group in groups])
        options.extend(options_from(view, groups))
        if rank_group.world_size > 1:
            view.registry.require_plan_fits(policies_for(options))
        return describe_names(view.registry, view.names)

    same_outcome(rank_group, "loading a checkpoint", prepare)
    states, params = states_of(shards), view.registry.params
    frozen = {params[key]: states.pop(key) for key in list(states) if isinstance(key, int)}
    cut = without_uninitialized(view, states, rank_group)
    return with_ranks_told(rank_group, Loadable(options, frozen, cut, {}))


def load_checkpoint(
    rank_group: RankGroup,
    sharded_params: ShardedParams,
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    directory: Path,
    *,
    policies_for: Callable[[Sequence[Mapping[str, Any]]], Sequence[GroupPolicy]],
    strict: bool,
    key: str | None,
) -> tuple[Loadable, LoadReport]:
    """Give the inner optimizers what the checkpoint has for them. Collective.

    To be called inside ``sharded_params.all_or_nothing``: if it raises, it does so on all ranks.
    """
    token, metadata = _share_metadata(rank_group, directory)
    exchange = rank_group.monitor.exchange(token, f"loading {directory}")
    view: StateView | None = None
    options: list[dict[str, Any]] = []
    not_begun: set[str] | None = None
    read: list[StateShard] = []
    kept: States = {}

    def read_mine() -> LoadReport:
        nonlocal view, options, not_begun, read, kept
        with DataFileReader(directory) as reader:
            saved = find_saved_state(
                parse_metadata(metadata), reader, key, {*names, *chain(*_spellings(names))}
            )
            view = StateView(
                sharded_params.inner,
                sharded_params.registry,
                sharded_params.plan,
                groups,
                _names(names, saved),
                rank_group.rank,
            )
            moved = regrouped(view, saved.grouping or [])
            # Those that are grouped otherwise are reported below, and refused if it is strict.
            is_strict = strict and not moved.params
            others = _of_other_classes(view, saved)
            options = options_from(view, saved.groups, is_strict, others, moved.groups)
            before, live = sharded_params.plan, set(sharded_params.inner.state)
            with_state = _with_state(sharded_params, view, saved, reader)
            sharded_params.make_room_for(groups, with_state, policies_for(options))
            # From here on for the plan and with the options that are to be.
            view = replace(
                view,
                registry=sharded_params.registry,
                plan=sharded_params.plan,
                groups=[{**ours, **theirs} for ours, theirs in zip(groups, options, strict=True)],
            )
            shards, rebuilt = _without_masters_not_in(saved, view, collect(view, live=False))
            report, unfit = match(view, shards, saved)
            misplaced = {f"{_GROUPS}{name} ({where})" for name, where in moved.params.items()}
            report = report._replace(
                mismatched=tuple(sorted({*report.mismatched, *misplaced})), rebuilt=rebuilt
            )
            if (
                live
                and unfit
                and sharded_params.plan.buckets[: len(before.buckets)] != (before.buckets)
            ):
                raise ValueError(
                    "the options in the checkpoint cut tensors elsewhere, so that the state of "
                    f"{', '.join(sorted(unfit)[:5])}, which does not fit, could not be kept: "
                    "build the optimizer with these options (fused) before loading"
                )
            if report.fits or not strict:
                fitting = [
                    shard
                    for shard in shards
                    if shard.owned and view.names[shard.param] in saved.states.keys() - unfit
                ]
                read = _read(view, fitting, saved, reader, exchange.beat)
                kept = _kept(view, unfit)
                not_begun = saved.not_begun
        return report

    def decide(reports: list[Any]) -> LoadReport:
        columns = zip(*reports, strict=True)
        report = LoadReport(*(tuple(sorted(set().union(*column))) for column in columns))
        if strict and not report.fits:
            raise ValueError(
                f"{directory} does not fit this optimizer; nothing was changed\n{report}\n"
                "If this is meant to be, load(path, strict=False) takes what fits"
                + _hint(names, report)
            )
        return report

    report = LoadReport(*map(tuple, same_outcome(exchange, exchange.doing, read_mine, decide)))
    assert view is not None
    states = {**without_uninitialized(view, states_of(read), rank_group, not_begun), **kept}

    def give() -> list[str]:
        adopt(sharded_params.inner, states, options)
        return []

    same_outcome(rank_group, f"loading {directory}", give)
    return Loadable(options, {}, states, {}), report


def _with_state(
    sharded_params: ShardedParams, view: StateView, saved: SavedState, reader: DataFileReader
) -> set[torch.Tensor]:
    """The parameters that have state in the checkpoint. Not counted are frozen ones whose saved
    state is what the class makes in its constructor."""
    params, states = sharded_params.registry.params, {}
    for index in view.made_at_construction():
        states[params[index]] = {
            path: _read_whole(entry, reader, full) if isinstance(entry, TensorEntry) else None
            for path, (full, entry) in saved.states.get(view.names[index], {}).items()
        }
    named = zip(view.names, params, strict=True)
    return {param for name, param in named if name in saved.states} - (
        sharded_params.frozen_with_constructor_state(view.groups, states)
    )


def _without_masters_not_in(
    saved: SavedState, view: StateView, shards: Sequence[StateShard]
) -> tuple[list[StateShard], tuple[str, ...]]:
    """The shards without the master copies that the checkpoint lacks, and the keys of those: they
    can be made anew."""
    lacking = {
        shard.param
        for shard in shards
        if shard.is_master and MASTER not in saved.states.get(view.names[shard.param], {})
    }
    rest = [shard for shard in shards if not (shard.is_master and shard.param in lacking)]
    return rest, tuple(sorted(_key(view.names[index], MASTER) for index in lacking))


def _read(
    view: StateView,
    shards: Sequence[StateShard],
    saved: SavedState,
    reader: DataFileReader,
    beat: Callable[[], None],
) -> list[StateShard]:
    """These shards, with memory of their own, as they were saved."""
    found = []
    total = sum(shard.nbytes for shard in shards)
    with Progress("loading", total, view.rank == 0) as bar:
        for shard in shards:
            key, entry = saved.states[view.names[shard.param]][dotted(shard.path)]
            if isinstance(entry, ValueEntry):
                found.append(replace(shard, data=reader.value(entry, key)))
                continue
            reader.require_bytes(entry, key)
            filled = shard.empty_like()
            for chunk, target in filled.chunks():
                reader.fill(chunk, target, entry, key)
                bar.add(target.nbytes)
                beat()
            found.append(filled)
    return found


def _kept(view: StateView, unfit: Container[str]) -> States:
    """The live state and the master copies of parameters that do not fit."""
    found = {}
    for owned in view.local.shards:
        if view.names[owned.shard.param] in unfit:
            state = dict(view.local.state.get(owned.tensor, {}))
            if owned.has_master:
                state[MASTER] = owned.tensor.detach().clone()
            if state:
                found[owned] = state
    return found


def _share_metadata(rank_group: RankGroup, directory: Path) -> tuple[str, bytes]:
    """A token for this round, and the metadata as rank 0 has read it: all see the same."""
    rank_group.monitor.note(f"loading {directory}")
    payload = None
    if rank_group.rank == 0:
        try:
            payload = b"+" + uuid.uuid4().hex[:12].encode() + read_metadata(directory)
        except OSError as error:
            payload = b"-" + str(error).encode(errors="replace")
        except DamagedCheckpoint as error:
            payload = b"!" + str(error).encode(errors="replace")
    payload = rank_group.broadcast_bytes(payload, source=0)
    if payload[:1] == b"-":
        raise FileNotFoundError(payload[1:].decode())
    if payload[:1] == b"!":
        raise DamagedCheckpoint(payload[1:].decode())
    return payload[1:13].decode(), payload[13:]


def _names(names: Sequence[str], saved: SavedState) -> list[str]:
    """Ours, or positions if the checkpoint knows those only. Names of a module that was wrapped
    when it gave them to one side only differ by a prefix."""
    if saved.by_position:
        return [f"{BY_INDEX}{index}" for index in range(len(names))]
    listed = {name for group in saved.groups for name in group["params"]}
    if not listed & set(names):
        for other in _spellings(names):
            if set(other) <= listed:
                return other
    return list(names)


def _spellings(names: Sequence[str]) -> tuple[list[str], list[str]]:
    return [f"module.{name}" for name in names], [name.removeprefix("module.") for name in names]


def _hint(names: Sequence[str], report: LoadReport) -> str:
    unnamed = all(name.startswith(BY_INDEX) for name in names)
    if unnamed and report.missing:
        return (
            ". The checkpoint knows parameters by name, this optimizer by position only: "
            "load(path, module) tells it the names"
        )
    if any(text.startswith(_GROUPS) for text in report.mismatched):
        return f". Groups that differ then keep their options. {SAME_GROUPS}"
    return ""
