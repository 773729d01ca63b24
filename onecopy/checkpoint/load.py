"""Loading in one call, whole or not at all, from a checkpoint of any job."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from onecopy.checkpoint.files import DataFileReader, Progress
from onecopy.checkpoint.full_state import Loadable
from onecopy.checkpoint.full_state import adopt_state as load_into
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
    Fragment,
    LoadedMasters,
    Path_,
    ShardStates,
    StateShard,
    StateView,
    beginnings,
    dotted,
    leaves,
    names_not_begun,
    rebuilt,
    without,
)
from onecopy.comm.agreement import StoreChannel, same_outcome
from onecopy.comm.group import RankGroup
from onecopy.comm.transfer import encode
from onecopy.planning.param_groups import MASTER, GroupPolicy
from onecopy.planning.traits import is_torch_class, options_of
from onecopy.sharding.sharded_params import ShardedParams

Entry = TensorEntry | ValueEntry


class SavedValue(NamedTuple):
    """A tensor or value of a parameter's state."""

    key: str
    entry: Entry
    within: tuple[str | int, ...]  # its path in the state; numbers where there were lists


@dataclass(frozen=True, slots=True)
class SavedState:
    """The optimizer's part of a checkpoint."""

    states: dict[str, dict[str, SavedValue]]  # by parameter, by dotted path within
    groups: list[dict[str, Any]]  # options, and the names under "params"
    by_position: bool
    # Parameters whose state did not exist yet; None where something else than ``optimizer.save``
    # wrote the checkpoint, which does not tell.
    not_begun: set[str] | None = None
    # Likewise: parameters that had no state because they were frozen, and everybody's class.
    frozen: set[str] | None = None
    classes: Mapping[str, str] = field(default_factory=dict)
    # The names in each group. None if the checkpoint is flattened and does not tell: then every
    # parameter has options of its own.
    grouping: Sequence[Sequence[str]] | None = None


class _Section(NamedTuple):
    """An entry of the optimizer's part: ("state", ("layer.weight", "exp_avg")) and the like."""

    title: str  # "state", "param_groups" or the mark's
    rest: tuple[str | int, ...]  # nested: a step each
    flat: str  # flattened: what follows the title in the same key, else empty


def find_saved_state(
    contents: Metadata, reader: DataFileReader, key: str | None, expected: Container[str]
) -> SavedState:
    """The optimizer's part, in whichever of torch's forms it was written. Names that are expected
    help to tell a parameter's name from what follows it."""
    prefix = _prefix(contents, key)
    sections = {
        full: _section(path[len(prefix) :])
        for full, path in contents.paths.items()
        if path[: len(prefix)] == prefix and len(path) > len(prefix)
    }
    groups = _groups(contents, reader, sections, expected)
    by_position = all(
        isinstance(name, int) or name.startswith(BY_INDEX) for g in groups for name in g["params"]
    )
    plain_numbers = any(isinstance(name, int) for g in groups for name in g["params"])
    titles = _titles(groups)
    by_position = by_position and not titles
    for group in groups:
        group["params"] = [
            titles.get(n, f"{BY_INDEX}{n}") if isinstance(n, int) else n for n in group["params"]
        ]
    names = {name for group in groups for name in group["params"]}
    states: dict[str, dict[str, SavedValue]] = {}
    mark: Mapping[str, Any] = {}
    for full, section in sections.items():
        entry = contents.entries[full]
        if section.title == "state":
            name, within = _split_name(section, names)
            if plain_numbers and name.isdigit():
                name = titles.get(int(name), f"{BY_INDEX}{name}")
            states.setdefault(name, {})[dotted(within)] = SavedValue(full, entry, within)
        elif section.title == MARK and isinstance(entry, ValueEntry):
            mark = _checked_mark(reader.value(entry, full))
            _require_digest(contents, full, mark)
    is_flat = any(section.title == "param_groups" and section.flat for section in sections.values())
    grouping = mark.get("groups") if is_flat else [group["params"] for group in groups]
    if not mark:
        return SavedState(states, groups, by_position, grouping=grouping)
    return SavedState(
        states,
        groups,
        by_position,
        set(mark["not_begun"]),
        set(mark["frozen"]),
        {name: cls for cls, names in mark["classes"].items() for name in names},
        grouping,
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


def _titles(groups: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The names that a plain optimizer's dict has beside its numbers, if it was given any."""
    if not all(len(g.get("param_names", ())) == len(g["params"]) for g in groups):
        return {}
    return {
        number: name
        for group in groups
        for number, name in zip(group["params"], group["param_names"], strict=True)
        if isinstance(number, int)
    }


def _section(path: Sequence[str | int]) -> _Section:
    title, _, flat = str(path[0]).partition(".")
    return _Section(title, tuple(path[1:]), flat)


def _prefix(contents: Metadata, key: str | None) -> tuple[str | int, ...]:
    """The steps that lead to the optimizer's part."""
    found = {
        path[:depth]
        for path in contents.paths.values()
        for depth, step in enumerate(path)
        if _section([step]).title == "param_groups"
    }
    # A module or parameter may be called param_groups, too.
    found = {p for p in found if not any(p[:depth] in found for depth in range(len(p)))}
    if len(found) > 1:
        found = found & _with_state(contents) or found
    shown = {".".join(map(str, prefix)): prefix for prefix in found}
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


def _with_state(contents: Metadata) -> set[tuple[str | int, ...]]:
    """The steps that lead to anything called state."""
    return {
        path[:depth]
        for path in contents.paths.values()
        for depth, step in enumerate(path)
        if _section([step]).title == "state"
    }


def _groups(
    contents: Metadata,
    reader: DataFileReader,
    sections: Mapping[str, _Section],
    names: Container[str],
) -> list[dict[str, Any]]:
    """The saved groups. Flattened, every parameter is a group of its own."""
    groups: dict[str | int, dict[str, Any]] = {}
    for full, (title, rest, flat) in sections.items():
        if title != "param_groups":
            continue
        entry = contents.entries[full]
        value = (
            reader.value(entry, full)
            if isinstance(entry, ValueEntry)
            else read_whole(entry, reader, full)
        )
        name, option = _split_flat(flat, names)
        number, *within = (name, option, *rest) if flat else rest
        _put(
            groups.setdefault(number, {} if isinstance(number, int) else {"params": [name]}),
            within,
            value,
        )
    if not all(isinstance(group.get("params"), list) for group in groups.values()):
        raise DamagedCheckpoint("a group of the checkpoint lists no parameters")
    numbers = sorted(number for number in groups if isinstance(number, int))
    ordered = [groups[number] for number in numbers] or list(groups.values())
    return [{key: _with_lists(value) for key, value in group.items()} for group in ordered]


def form_of_saved(
    state: Mapping[str, SavedValue], outlines: Mapping[str, Fragment | None]
) -> dict[str, Any]:
    """A parameter's state as it was saved, whatever its form: the outlines of its tensors, and
    None for values."""
    form: dict[Any, Any] = {}
    for path, value in state.items():
        _put(form, value.within, outlines[path])
    return {str(key): _with_lists(value) for key, value in form.items()}


def _put(tree: dict[Any, Any], path: Sequence[str | int], value: Any) -> None:
    *steps, last = path
    for step in steps:
        tree = tree.setdefault(step, {})
    tree[last] = value


def _with_lists(tree: Any) -> Any:
    """Where a path had numbers there was a list."""
    if not isinstance(tree, dict):
        return tree
    items = {key: _with_lists(value) for key, value in tree.items()}
    if items and all(isinstance(key, int) for key in items):
        return [items[key] for key in sorted(items)]
    return items


def read_whole(entry: TensorEntry, reader: DataFileReader, key: str) -> torch.Tensor:
    reader.require_bytes(entry, key)
    fragment = Fragment.of_whole(torch.empty(entry.shape, dtype=entry.dtype, device="cpu"))
    for box, view in fragment.boxes():
        reader.fill(box, view, entry, key)
    return fragment.whole()


def _split_name(section: _Section, names: set[str]) -> tuple[str, tuple[str | int, ...]]:
    """(name of the parameter, path within its state)."""
    steps = section.rest
    if not section.flat:
        return str(steps[0]), steps[1:]
    name, key = _split_flat(section.flat, names)
    return name, (key, *steps)


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


_Value = TypeVar("_Value")


@dataclass(slots=True)
class Findings:
    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    mismatched: set[str] = field(default_factory=set)
    rebuilt: set[str] = field(default_factory=set)  # master copies that are not there
    unfit: set[str] = field(default_factory=set)  # parameters that cannot be loaded

    @property
    def any(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def as_json(self) -> list[list[str]]:
        return [
            sorted(keys) for keys in (self.missing, self.unexpected, self.mismatched, self.rebuilt)
        ]


def compare(state_view: StateView, tree: Mapping[str, Any], saved: SavedState) -> Findings:
    """What does not fit of this rank's share; on rank 0, also what belongs to nobody."""
    found = Findings()
    _compare_states(state_view, tree, saved, found)
    _compare_names(state_view, saved, found)
    for name, difference in of_other_classes(state_view, saved).items():
        found.mismatched.add(f"{name} ({difference})")
        found.unfit.add(name)
    return found


def without_masters_not_in(
    saved: SavedState, tree: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """The tree without the master copies that the checkpoint lacks, and their keys: they can be
    made anew."""
    lacking = {
        name
        for name, state in tree["state"].items()
        if MASTER in state and MASTER not in saved.states.get(name, {})
    }
    states = {
        name: _split_master(state)[0] if name in lacking else state
        for name, state in tree["state"].items()
    }
    return {**tree, "state": states}, {_key(name, MASTER) for name in lacking}


def of_other_classes(state_view: StateView, saved: SavedState) -> dict[str, str]:
    """The parameters that had another class, and which, as far as the checkpoint tells."""
    found = {}
    for cls, names in classes_of(state_view).items():
        for name in names:
            theirs = saved.classes.get(name, cls)
            # Classes of other packages may have been renamed since; their keys must tell.
            if theirs != cls and is_torch_class(theirs) and is_torch_class(cls):
                found[name] = f"{theirs} in the checkpoint, {cls} here"
    return found


def _compare_states(
    state_view: StateView, tree: Mapping[str, Any], saved: SavedState, found: Findings
) -> None:
    params = zip(state_view.names, state_view.registry.params, strict=True)
    dtypes = {name: param.dtype for name, param in params}
    for name in {**tree["state"], **dict.fromkeys(state_view.names_owned())}:
        expected = _by_path(tree["state"].get(name, {}))
        there = saved.states.get(name)
        if there is None:
            # It was frozen, or had no gradient; if that is known not to be so, it is missing.
            if expected and saved.frozen is not None and name not in saved.frozen:
                found.missing |= {_key(name, path) for path in expected}
                found.unfit.add(name)
            continue
        missing = {_key(name, path) for path in expected.keys() - there.keys()}
        unexpected = {_key(name, path) for path in there.keys() - expected.keys()}
        mismatched = {
            f"{_key(name, path)} ({difference})"
            for path in expected.keys() & there.keys()
            if (difference := _difference(expected[path], there[path].entry, dtypes[name]))
        }
        found.missing |= missing
        found.unexpected |= unexpected
        found.mismatched |= mismatched
        if missing or unexpected - {_key(name, MASTER)} or mismatched:
            found.unfit.add(name)


def _compare_names(state_view: StateView, saved: SavedState, found: Findings) -> None:
    known = set(state_view.names)
    listed = {name for group in saved.groups for name in group["params"]}
    found.unfit |= known - listed
    if state_view.rank == 0:
        for name in saved.states.keys() - known:
            found.unexpected |= {_key(name, path) for path in saved.states[name]}
        found.missing |= {f"param_groups: {name}" for name in known - listed}
        found.unexpected |= {f"param_groups: {name}" for name in listed - known}


def with_saved_forms(
    state_view: StateView, tree: Mapping[str, Any], saved: SavedState
) -> dict[str, Any]:
    """The tree with states in the form in which they were saved, if they may have become so: how
    far a class has changed the form of its state, only the checkpoint knows."""
    state = dict(tree["state"])
    params = zip(state_view.names, state_view.registry.params, strict=True)
    for index, (name, param) in enumerate(params):
        there = saved.states.get(name)
        if there is None or not state_view.may_change_form(index) or not state_view.local.of(param):
            continue
        # The master copy is no state of the class, and tells nothing about its form.
        there, _ = _split_master(there)
        like, master = _split_master(state.get(name, {}))
        expected = _by_path(like)
        outlines = {
            path: _outline(state_view, index, value.entry, expected.get(path))
            for path, value in there.items()
        }
        fits = all(
            outlines[path] is not None or isinstance(value.entry, ValueEntry)
            for path, value in there.items()
        )
        lacks_nothing = expected.keys() <= there.keys() or state_view.changes_form(index)
        if fits and lacks_nothing and _may_have_become(expected, there, param):
            form = _with_empty_dicts(form_of_saved(there, outlines), like)
            state[name] = {**form, **master}
    return {**tree, "state": state}


def _split_master(state: Mapping[str, _Value]) -> tuple[dict[str, _Value], dict[str, _Value]]:
    """The state of the class itself, and the master copy, if there is one."""
    rest = dict(state)
    master = {MASTER: rest.pop(MASTER)} if MASTER in rest else {}
    return rest, master


def _with_empty_dicts(form: dict[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint has no entry for a dict without entries: it is where the class makes one."""
    missing: dict[str, Any] = {
        key: {} for key, value in like.items() if value == {} and key not in form
    }
    inner = {
        key: _with_empty_dicts(value, like[key])
        for key, value in form.items()
        if isinstance(value, dict) and isinstance(like.get(key), dict)
    }
    return {**form, **inner, **missing}


def _outline(state_view: StateView, index: int, entry: Entry, expected: Any) -> Fragment | None:
    if isinstance(entry, ValueEntry):
        return None
    if isinstance(expected, Fragment) and expected.shape == entry.shape:
        return expected
    return state_view.outlined(index, entry.shape, entry.dtype)


def _may_have_become(
    expected: Mapping[str, Any],
    there: Mapping[str, SavedValue],
    param: torch.Tensor,
) -> bool:
    """Whether state of this form may have become that one as the class went on: they have keys in
    common, and what is shaped like the parameter has stayed so."""
    common = expected.keys() & there.keys()
    shaped = [p for p in common if param.numel() > 1 and _shape(expected[p]) == param.shape]
    return bool(common or not expected) and all(
        _shape(there[path].entry) == param.shape for path in shaped
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    return value.shape if isinstance(value, (Fragment, TensorEntry)) else None


def _by_path(state: Mapping[str, Any]) -> dict[str, Any]:
    return {dotted(path): leaf for path, leaf in leaves(state)} if state else {}


def _key(name: str, path: str) -> str:
    return f"state.{name}.{path}"


def _difference(expected: Any, entry: Entry, of_param: torch.dtype) -> str:
    if isinstance(expected, Fragment) != isinstance(entry, TensorEntry):
        return "a tensor on one side, a plain value on the other"
    if isinstance(expected, Fragment) and isinstance(entry, TensorEntry):
        if expected.shape != entry.shape:
            return f"shape {entry.shape} in the checkpoint, {expected.shape} here"
        # To a parameter's own dtype torch casts state when it is loaded.
        is_cast = entry.dtype == of_param and expected.dtype.is_floating_point
        if expected.dtype != entry.dtype and not is_cast:
            return f"{entry.dtype} in the checkpoint, {expected.dtype} here"
    return ""


def options_from(
    state_view: StateView,
    saved: Sequence[Mapping[str, Any]],
    strict: bool = True,
    of_other_classes: Container[str] = (),
    kept: Container[int] = (),
) -> list[dict[str, Any]]:
    """The options of each of our groups, from saved groups that list the same names. The groups
    with the numbers ``kept`` keep theirs."""
    of_name = {name: number for number, group in enumerate(saved) for name in group["params"]}
    found = []
    for number, group in enumerate(state_view.groups):
        ours = options_of(group)
        names = [name for name in state_view.names_in(number) if name not in of_other_classes]
        known = {of_name[name] for name in names if name in of_name}
        if _is_empty_in(state_view, saved, number):
            known = {number}
        candidates = [rebuilt(ours, {**ours, **options_of(saved[n])}) for n in sorted(known)]
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


def regrouped(state_view: StateView, grouping: Sequence[Sequence[str]]) -> Regrouped:
    """The parameters that are not with the same others as in the saved groups, which list names.

    Groups may come in another order. Names that only one side has are not compared.
    """
    of_name = {name: number for number, names in enumerate(grouping) for name in names}
    shared: dict[tuple[int, int], list[str]] = {}  # by group here and group there
    for number in range(len(state_view.groups)):
        for name in state_view.names_in(number):
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


def require_same_groups(state_view: StateView, grouping: Sequence[Sequence[str]]) -> None:
    moved = regrouped(state_view, grouping).params
    if moved:
        listed = [f"{name} ({where})" for name, where in moved.items()]
        raise ValueError(
            f"parameters are grouped otherwise than in the checkpoint: {', '.join(listed[:5])}"
            f"{', ...' * (len(listed) > 5)}. {SAME_GROUPS}"
        )


SAME_GROUPS = (
    "Options belong to groups: build the optimizer with the groups that it had when it was saved"
)


def _is_empty_in(state_view: StateView, saved: Sequence[Mapping[str, Any]], number: int) -> bool:
    """Whether a group has no parameters by which to know it, here and there."""
    alike = len(saved) == len(state_view.groups) and not saved[number]["params"]
    return alike and not state_view.names_in(number)


def require_all_in(state_view: StateView, saved: Sequence[Mapping[str, Any]]) -> None:
    known = {name for group in saved for name in group["params"]}
    lost = [name for name in state_view.names if name not in known]
    if lost:
        raise ValueError(
            f"the checkpoint does not know {', '.join(lost[:5])}{', ...' * (len(lost) > 5)}: "
            "is it of another model, or were the groups others? load(path) finds them by name"
        )


def _written(options: Mapping[str, Any]) -> str:
    """Options as text, by which they can be compared whatever they are."""
    tensors: list[torch.Tensor] = []
    encoded = encode(dict(sorted(options.items())), tensors)
    return json.dumps([encoded, [tensor.tolist() for tensor in tensors]])


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
    take: _Take | None = None

    def read() -> list[list[str]]:
        nonlocal take
        with DataFileReader(directory) as reader:
            saved = find_saved_state(
                parse_metadata(metadata), reader, key, {*names, *chain(*_spellings(names))}
            )
            mine = _names(names, saved)
            state_view = StateView(
                sharded_params.inner,
                sharded_params.registry,
                sharded_params.plan,
                groups,
                mine,
                rank_group.rank,
            )
            others = of_other_classes(state_view, saved)
            moved = regrouped(state_view, saved.grouping or [])
            # Those that are grouped otherwise are reported below, and refused if it is strict.
            is_strict = strict and not moved.params
            options = options_from(state_view, saved.groups, is_strict, others, moved.groups)
            params = zip(mine, sharded_params.registry.params, strict=True)
            with_state = {param for name, param in params if name in saved.states}
            with_state -= _made_anew(sharded_params, state_view, saved, reader)
            before, live = sharded_params.plan, set(sharded_params.inner.state)
            sharded_params.make_room_for(groups, with_state, policies_for(options))
            # From here on for the plan and with the options that are to be.
            changed = [{**ours, **theirs} for ours, theirs in zip(groups, options, strict=True)]
            state_view = replace(
                state_view,
                registry=sharded_params.registry,
                plan=sharded_params.plan,
                groups=changed,
            )
            tree, rebuilt = without_masters_not_in(saved, state_view.tree(live=False))
            tree = with_saved_forms(state_view, tree, saved)
            found = compare(state_view, tree, saved)
            found.rebuilt = rebuilt
            found.mismatched |= {
                f"{_GROUPS}{name} ({where})" for name, where in moved.params.items()
            }
            if (
                live
                and found.unfit
                and sharded_params.plan.buckets[: len(before.buckets)] != before.buckets
            ):
                raise ValueError(
                    "the options in the checkpoint cut tensors elsewhere, so that the state of "
                    f"{', '.join(sorted(found.unfit)[:5])}, which does not fit, could not be kept: "
                    "build the optimizer with these options (fused) before loading"
                )
            if not (strict and found.any):
                shards, masters = _read(state_view, tree, saved, found, reader, exchange)
                kept, kept_masters = _kept(state_view, found)
                masters |= kept_masters
                take = _Take(state_view, options, saved, shards, kept, masters)
        return found.as_json()

    def decide(reports: list[Any]) -> list[list[str]]:
        together = [sorted(set().union(*lists)) for lists in zip(*reports, strict=True)]
        report = LoadReport(*map(tuple, together))
        if strict and not report.fits:
            raise ValueError(
                f"{directory} does not fit this optimizer; nothing was changed\n{report}\n"
                "If this is meant to be, load(path, strict=False) takes what fits"
                + _hint(names, report)
            )
        return together

    report = LoadReport(*map(tuple, same_outcome(exchange, exchange.doing, read, decide)))
    assert take is not None
    loadable = take.loadable(rank_group)

    def give() -> list[str]:
        load_into(sharded_params.inner, loadable)
        return []

    same_outcome(rank_group, f"loading {directory}", give)
    return loadable, report


@dataclass(frozen=True, slots=True)
class _Take:
    """What was read for this rank."""

    state_view: StateView
    options: Sequence[Mapping[str, Any]]
    saved: SavedState
    shards: ShardStates
    kept: ShardStates  # of parameters that do not fit, what they have
    masters: LoadedMasters

    def loadable(self, rank_group: RankGroup) -> Loadable:
        """Without the state that did not exist when it was saved. Collective."""
        not_begun = self.saved.not_begun
        if not_begun is None:
            said, _ = rank_group.minimum_and_maximum(beginnings(self.state_view, self.shards))
            not_begun = names_not_begun(self.state_view, said)
        begun = without(self.state_view, self.shards, not_begun)
        states = {**begun, **self.kept}
        shards = [
            StateShard(owned.shard.param, (key,), value, owned=owned)
            for owned in self.state_view.local.shards
            for key, value in {
                **states.get(owned.tensor, {}),
                **({MASTER: self.masters[owned.tensor]} if owned.tensor in self.masters else {}),
            }.items()
        ]
        return Loadable({}, {}, self.options, shards)


def _read(
    state_view: StateView,
    tree: Mapping[str, Any],
    saved: SavedState,
    found: Findings,
    reader: DataFileReader,
    exchange: StoreChannel,
) -> tuple[ShardStates, LoadedMasters]:
    """The state of this rank's pieces of the parameters that fit, and their master copies."""
    total = sum(leaf.nbytes for _, leaf in leaves(tree["state"]) if isinstance(leaf, Fragment))
    with Progress("loading", total, state_view.rank == 0) as bar:

        def did(nbytes: int) -> None:
            bar.add(nbytes)
            exchange.beat()

        states = {
            name: _read_state(state, saved.states[name], reader, did)
            for name, state in tree["state"].items()
            if name in saved.states and name not in found.unfit
        }
    return state_view.pieces_from(states)


def _kept(state_view: StateView, found: Findings) -> tuple[ShardStates, LoadedMasters]:
    """The live state and the master copies of parameters that do not fit."""
    live = state_view.local.state
    params = zip(state_view.names, state_view.registry.params, strict=True)
    unfit = [o for name, p in params if name in found.unfit for o in state_view.local.of(p)]
    states = {o.tensor: dict(live[o.tensor]) for o in unfit if o.tensor in live}
    return states, {o.tensor: o.tensor.detach().clone() for o in unfit if o.has_master}


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


def _made_anew(
    sharded_params: ShardedParams, state_view: StateView, saved: SavedState, reader: DataFileReader
) -> set[torch.Tensor]:
    """Frozen parameters whose saved state is just what the class makes in its constructor."""
    states = {}
    for index in state_view.made_for_frozen():
        states[sharded_params.registry.params[index]] = {
            path: read_whole(entry, reader, full) if isinstance(entry, TensorEntry) else None
            for path, (full, entry, _) in saved.states.get(state_view.names[index], {}).items()
        }
    return sharded_params.frozen_with_constructor_state(state_view.groups, states)


def _read_state(
    state: Mapping[str, Any],
    saved: Mapping[str, SavedValue],
    reader: DataFileReader,
    did: Any,
) -> dict[str, Any]:
    """A parameter's state with everything read; fragments have memory of their own."""
    read: dict[str, Any] = {}
    for path, leaf in leaves(state):
        full, entry, _ = saved[dotted(path)]
        if isinstance(entry, ValueEntry):
            read[dotted(path)] = reader.value(entry, full)
            continue
        reader.require_bytes(entry, full)
        fragment = leaf.like()
        for box, view in fragment.boxes():
            reader.fill(box, view, entry, full)
            did(view.nbytes)
        read[dotted(path)] = fragment
    filled: dict[str, Any] = _put_back(state, read, ())
    return filled


def _put_back(tree: Any, read: Mapping[str, Any], path: Path_) -> Any:
    """``tree`` with its leaves replaced by what was read under their paths."""
    if dotted(path) in read:
        return read[dotted(path)]
    if isinstance(tree, dict):
        return {key: _put_back(value, read, (*path, str(key))) for key, value in tree.items()}
    return [_put_back(value, read, (*path, n)) for n, value in enumerate(tree)]
