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
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onecopy.checkpoint.files import DataFileReader, progress
from onecopy.checkpoint.full_state import Loadable
from onecopy.checkpoint.metadata import (
    MARK,
    Entry,
    Metadata,
    digest,
    parse_metadata,
    read_metadata,
)
from onecopy.checkpoint.safe_pickle import DamagedCheckpoint
from onecopy.checkpoint.state import (
    BY_INDEX,
    States,
    StateShard,
    StateView,
    Steps,
    adopt,
    collect,
    dotted,
    made_for_frozen,
    states_of,
    without_uninitialized,
)
from onecopy.comm.agreement import same_outcome
from onecopy.comm.group import RankGroup
from onecopy.planning.param_groups import MASTER, GroupPolicy
from onecopy.planning.traits import is_torch_class, options_of

# -------------------------------------------------------------------------- what a checkpoint has


class SavedState(NamedTuple):
    """The optimizer's part of a checkpoint."""

    states: Mapping[tuple[str, str], Entry]  # by parameter and dotted path within
    groups: Sequence[dict[str, Any]]  # options, and the names under "params"
    # The names in each group. None if the checkpoint is flattened and does not tell: then every
    # parameter has options of its own.
    grouping: Sequence[Sequence[str]] | None
    # Only ``save`` tells which parameters had no state yet, which were frozen, and everybody's
    # class.
    not_begun: set[str] | None = None
    frozen: set[str] | None = None
    classes: Mapping[str, str] = {}


def find_saved_state(
    contents: Metadata, reader: DataFileReader, key: str | None, expected: Container[str]
) -> SavedState:
    """The optimizer's part, in whichever of torch's forms it was written. Names that are expected
    help to tell a parameter's name from what follows it."""
    prefix = _prefix(contents, key)
    depth = len(prefix)
    states: dict[tuple[str, str], Entry] = {}
    leaves: dict[Steps, Any] = {}
    mark: Mapping[str, Any] = {}
    for entry in contents.values():
        path = entry[0].path
        if path[:depth] != prefix or len(path) == depth:
            continue
        title, *rest = _unflattened(path[depth:], expected)
        if title == "state":
            name, *within = map(str, rest)
            states[name, ".".join(within)] = entry
        elif title == "param_groups":
            leaves[tuple(rest)] = reader.read(entry)
        elif title == MARK and not entry[0].dtype:
            mark = _checked_mark(reader.read(entry))
            others = (s for each in contents.values() if each is not entry for s in each)
            if digest(others) != mark.get("digest"):
                raise DamagedCheckpoint(
                    "the metadata is not what was written: its checksum is wrong"
                )
    groups = _nested(leaves)
    is_flat = isinstance(groups, dict)  # every parameter is a group of its own
    if isinstance(groups, dict):
        groups = [
            {**options, "params": [name]} if isinstance(options, dict) else options
            for name, options in groups.items()
        ]
    for group in groups if isinstance(groups, list) else [None]:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or not all(isinstance(name, (str, int)) for name in params):
            raise DamagedCheckpoint("a group of the checkpoint lists no parameters")
    # A plain optimizer's dict has numbers, and names beside them if it was given any.
    named = all(len(g.get("param_names", ())) == len(g["params"]) for g in groups)
    called: dict[str, str] = {}  # by number
    for group in groups:
        for place, name in enumerate(group["params"]):
            if isinstance(name, int):
                found = str(group["param_names"][place]) if named else f"{BY_INDEX}{name}"
                called[str(name)] = group["params"][place] = found
    return SavedState(
        {(called.get(name, name), path): entry for (name, path), entry in states.items()},
        groups,
        mark.get("groups") if is_flat else [group["params"] for group in groups],
        set(mark["not_begun"]) if mark else None,
        set(mark["frozen"]) if mark else None,
        {name: cls for cls, names in mark.get("classes", {}).items() for name in names},
    )


def _unflattened(path: Steps, names: Container[str]) -> Steps:
    """The path in nested form: of ("state.layer.weight.exp_avg",) it is ("state", "layer.weight",
    "exp_avg"). The name is the longest that is known; after any other comes a key without a dot."""
    title, *parts = str(path[0]).split(".")
    if title not in ("state", "param_groups") or not parts:
        return path
    lengths = range(len(parts) - 1, 0, -1)
    length = next((n for n in lengths if ".".join(parts[:n]) in names), len(parts) - 1)
    return title, ".".join(parts[:length]), ".".join(parts[length:]), *path[1:]


def _checked_mark(mark: Any) -> Mapping[str, Any]:
    """What ``optimizer.save`` writes beside the state, if it has the form of it."""
    try:
        groups = mark.get("groups", [])  # older ones have none
        lists = [mark["not_begun"], mark["frozen"], *mark["classes"].values(), *groups]
        is_mark = all(type(n) is list and all(type(name) is str for name in n) for n in lists)
    except (AttributeError, KeyError, TypeError):
        is_mark = False
    if not is_mark:
        raise DamagedCheckpoint("the metadata is not what was written: its mark is no mark")
    found: Mapping[str, Any] = mark
    return found


def _prefix(contents: Metadata, key: str | None) -> Steps:
    """The steps that lead to the optimizer's part."""
    leading_to: dict[str, set[Steps]] = {"param_groups": set(), "state": set()}
    for entry in contents.values():
        path = entry[0].path
        for depth, step in enumerate(path):
            title = str(step).partition(".")[0]
            if title in leading_to:
                leading_to[title].add(path[:depth])
    found = leading_to["param_groups"]
    # A module or parameter may be called param_groups, too.
    found = {p for p in found if not any(p[:depth] in found for depth in range(len(p)))}
    if len(found) > 1:
        found = found & leading_to["state"] or found
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


# -------------------------------------------------------------------------- what fits

_SHOWN = 20
_GROUPS = "param_groups: "


class LoadReport(NamedTuple):
    """What of a checkpoint and of the optimizer did not fit together, by name."""

    missing: tuple[str, ...] = ()  # the optimizer needs it, the checkpoint lacks it
    unexpected: tuple[str, ...] = ()  # the checkpoint has it, the optimizer has no place for it
    mismatched: tuple[str, ...] = ()  # of another shape, dtype or kind
    rebuilt: tuple[str, ...] = ()  # master copies it lacks: made anew from the parameters

    @classmethod
    def of(cls, columns: Iterable[Iterable[str]]) -> LoadReport:
        return cls(*(tuple(sorted(names)) for names in columns))

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
    view: StateView,
    shards: Sequence[StateShard],
    saved: SavedState,
    moved: Mapping[str, str],
    other_classes: Mapping[str, str],
) -> tuple[LoadReport, set[str]]:
    """What does not fit of this rank's state, and on rank 0 what belongs to nobody; and the names
    of the parameters that cannot be loaded.

    ``shards`` are those that the class would make. Why parameters are ``moved`` to other groups,
    or of ``other_classes``, is told by name.
    """
    known, listed = set(view.names), {name for group in saved.groups for name in group["params"]}
    owned = {
        *{view.names[owned.shard.param] for owned in view.params.inner.shards},
        *(view.names[shard.param] for shard in shards),
    }
    ours = {(view.names[shard.param], dotted(shard.path)): shard for shard in shards}
    theirs = {key: entry for key, entry in saved.states.items() if key[0] in owned}
    with_state = {name for name, _ in theirs}
    rebuilt = {key for key, shard in ours.items() if shard.is_master and key not in theirs}
    missing = {
        (name, path)
        for name, path in ours.keys() - theirs.keys() - rebuilt
        # It was frozen, or had no gradient; if that is known not to be so, it is missing.
        if name in with_state or (saved.frozen is not None and name not in saved.frozen)
    }
    unexpected = theirs.keys() - ours.keys()
    different = {
        key: why
        for key, shard in ours.items()
        if key in theirs and (why := _difference(view, shard, theirs[key]))
    }
    unfit = {name for name, path in missing | unexpected if path != MASTER}
    unfit |= {name for name, _ in different} | (known - listed) | other_classes.keys()
    mismatched = {
        *(f"{_text(key)} ({why})" for key, why in different.items()),
        *(f"{name} ({classes})" for name, classes in other_classes.items()),
        *(f"{_GROUPS}{name} ({where})" for name, where in moved.items()),
    }
    lacking, needless = set(map(_text, missing)), set(map(_text, unexpected))
    if view.rank == 0:
        lacking |= {f"{_GROUPS}{name}" for name in known - listed}
        needless |= {f"{_GROUPS}{name}" for name in listed - known}
        needless |= {_text(key) for key in saved.states if key[0] not in known}
    return LoadReport.of((lacking, needless, mismatched, map(_text, rebuilt))), unfit


def _text(key: tuple[str, str]) -> str:
    name, path = key
    return f"state.{name}.{path}"


def _difference(view: StateView, expected: StateShard, entry: Entry) -> str:
    saved = entry[0]
    if expected.is_tensor != bool(saved.dtype):
        return "a tensor on one side, a plain value on the other"
    if saved.dtype:
        if expected.shape != saved.shape:
            return f"shape {saved.shape} in the checkpoint, {expected.shape} here"
        # To a parameter's own dtype torch casts state when it is loaded.
        dtype, theirs = expected.data.dtype, getattr(torch, saved.dtype)
        of_param = view.params.registry.params[expected.param].dtype
        if dtype != theirs and not (theirs == of_param and dtype.is_floating_point):
            return f"{theirs} in the checkpoint, {dtype} here"
    return ""


def _of_other_classes(view: StateView, saved: SavedState) -> dict[str, str]:
    """The parameters that had another class, and which, as far as the checkpoint tells."""
    found = {}
    for index, name in enumerate(view.names):
        ours = view.policy(index).class_name
        theirs = saved.classes.get(name, ours)
        # Classes of other packages may have been renamed since; their keys must tell.
        if theirs != ours and is_torch_class(theirs) and is_torch_class(ours):
            found[name] = f"{theirs} in the checkpoint, {ours} here"
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
        ours, names = options_of(group), view.names_in(number)
        known = {of_name[n] for n in names if n in of_name and n not in of_other_classes}
        # A group without parameters is known by its number.
        if not names and len(saved) == len(view.groups) and not saved[number]["params"]:
            known = {number}
        candidates = [_as_in(ours, {**ours, **options_of(saved[n])}) for n in sorted(known)]
        # As text options can be compared whatever they are.
        texts = {json.dumps(dict(sorted(c.items())), default=_for_json) for c in candidates}
        if len(texts) > 1:
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


def _as_in(like: Any, value: Any) -> Any:
    """``value``, which may have gone through a file, in the containers and with the keys of
    ``like``: a file knows lists and text only."""
    if isinstance(like, dict) and isinstance(value, dict):
        keys = {str(key): key for key in like}
        return {keys.get(k, k): _as_in(like.get(keys.get(k)), v) for k, v in value.items()}
    if isinstance(like, (list, tuple)) and isinstance(value, (list, tuple)):
        alike = [*like, *[None] * len(value)]
        items = [_as_in(a, b) for a, b in zip(alike, value, strict=False)]
        return tuple(items) if isinstance(like, tuple) else items
    return value


def _for_json(value: Any) -> Any:
    return [value.tolist()] if isinstance(value, torch.Tensor) else repr(value)


def regrouped(
    view: StateView, grouping: Sequence[Sequence[str]]
) -> tuple[dict[str, str], set[int]]:
    """The parameters that are not with the same others as in the saved groups, which list names:
    by name, in which groups they are; and the groups of the optimizer that this concerns.

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
    moved: dict[str, str] = {}
    concerned: set[int] = set()
    for (ours, theirs), names in shared.items():
        if there.get(ours) == theirs:
            continue
        where = f"in group {theirs} of the checkpoint, in group {ours} here"
        if ours in there:
            other = there[ours]
            where += f" with {shared[ours, other][0]} of group {other}"
            concerned.add(ours)
        if theirs in here:
            other = here[theirs]
            where += f", without {shared[other, theirs][0]} of group {theirs}"
            concerned.update((ours, other))
        moved.update(dict.fromkeys(names, where))
    return moved, concerned


# The policies of the groups, with these options of theirs.
PoliciesFor = Callable[[Sequence[Mapping[str, Any]]], Sequence[GroupPolicy]]
SAME_GROUPS = (
    "Options belong to groups: build the optimizer with the groups that it had when it was saved"
)


# -------------------------------------------------------------------------- loading


def first_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' * (len(names) > 5)}"


def load_checkpoint(
    rank_group: RankGroup,
    view: StateView,
    directory: Path,
    *,
    policies_for: PoliciesFor,
    strict: bool,
    key: str | None,
) -> tuple[Loadable, LoadReport]:
    """Give the inner optimizers what the checkpoint has for them. Collective.

    To be called inside ``view.params.all_or_nothing``: if it raises, it does so on all ranks.
    """
    sharded_params, groups, names = view.params, view.groups, view.names
    token, metadata = _share_metadata(rank_group, directory)
    exchange = rank_group.monitor.exchange(token, f"loading {directory}")
    found: list[Any] = []

    def read_mine() -> LoadReport:
        with DataFileReader(directory) as reader:
            expected = {*names, *(name for others in _spellings(names) for name in others)}
            expected.update(_positions(names))
            saved = find_saved_state(parse_metadata(metadata), reader, key, expected)
            before, live = sharded_params.plan, set(sharded_params.inner.state)
            named = replace(view, names=_names(names, saved))
            moved, concerned = regrouped(named, saved.grouping or [])
            other_classes = _of_other_classes(named, saved)
            # Those that are grouped otherwise are reported below, and refused if it is strict.
            options = options_from(
                named, saved.groups, strict and not moved, other_classes, concerned
            )
            with_state = _with_state(named, saved, reader)
            sharded_params.make_room_for(groups, with_state, policies_for(options))
            # From here on with the options that are to be, as for the plan.
            given = zip(groups, options, strict=True)
            loading = replace(named, groups=[{**ours, **theirs} for ours, theirs in given])
            shards = collect(loading, live=False)
            report, unfit = match(loading, shards, saved, moved, other_classes)
            buckets = sharded_params.plan.buckets[: len(before.buckets)]
            if live and unfit and buckets != before.buckets:
                raise ValueError(
                    "the options in the checkpoint cut tensors elsewhere, so that the state of "
                    f"{first_of(sorted(unfit))}, which does not fit, could not be kept: build the "
                    "optimizer with these options (fused) before loading"
                )
            if report.fits or not strict:
                read = _read(loading, shards, unfit, saved, reader, exchange.beat)
                found.extend((loading, options, read, _kept(loading, unfit), saved.not_begun))
        return report

    def decide(reports: list[Any]) -> LoadReport:
        report = LoadReport.of(set().union(*column) for column in zip(*reports, strict=True))
        if strict and not report.fits:
            hint = ""
            if report.missing and all(name.startswith(BY_INDEX) for name in names):
                hint = (
                    ". The checkpoint knows parameters by name, this optimizer by position only: "
                    "load(path, module) tells it the names"
                )
            elif any(text.startswith(_GROUPS) for text in report.mismatched):
                hint = f". Groups that differ then keep their options. {SAME_GROUPS}"
            raise ValueError(
                f"{directory} does not fit this optimizer; nothing was changed\n{report}\n"
                f"If this is meant to be, load(path, strict=False) takes what fits{hint}"
            )
        return report

    report = LoadReport.of(same_outcome(exchange, exchange.doing, read_mine, decide))
    view, options, read, kept, not_begun = found
    states = {**without_uninitialized(view, states_of(read), rank_group, not_begun), **kept}

    def give() -> list[str]:
        adopt(sharded_params.inner, states, options)
        return []

    same_outcome(rank_group, f"loading {directory}", give)
    return Loadable(options, {}, states, {}), report


def _with_state(view: StateView, saved: SavedState, reader: DataFileReader) -> set[torch.Tensor]:
    """The parameters that have state in the checkpoint. Not counted are frozen ones whose saved
    state is what the class makes in its constructor."""
    params = dict(zip(view.names, view.params.registry.params, strict=True))
    with_state = {params[name] for name, _ in saved.states if name in params}
    frozen = {view.names[index] for index, _ in made_for_frozen(view.params, view.groups)}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for (name, path), entry in saved.states.items():
        if name in frozen:
            states.setdefault(params[name], {})[path] = reader.read(entry)
    return with_state - view.params.frozen_with_constructor_state(view.groups, states)


def _read(
    view: StateView,
    shards: Sequence[StateShard],
    unfit: Container[str],
    saved: SavedState,
    reader: DataFileReader,
    beat: Callable[[], None],
) -> list[StateShard]:
    """Our shards that fit, with memory of their own, as they were saved."""
    fitting = []
    for shard in shards:
        name = view.names[shard.param]
        entry = saved.states.get((name, dotted(shard.path)))
        if shard.owned and name not in unfit and entry is not None:
            fitting.append((shard, entry))
    found = []
    total = sum(shard.nbytes for shard, _ in fitting)
    with progress("loading", total, view.rank == 0) as add:
        for shard, entry in fitting:
            if not shard.is_tensor:
                found.append(replace(shard, data=reader.read(entry)))
                continue
            filled = shard.empty_like()
            for chunk, target in filled.chunks():
                reader.fill(chunk, target, entry)
                add(target.nbytes)
                beat()
            found.append(filled)
    return found


def _kept(view: StateView, unfit: Container[str]) -> States:
    """The live state and the master copies of parameters that do not fit."""
    found = {}
    for owned in view.params.inner.shards:
        if view.names[owned.shard.param] in unfit:
            state = dict(view.params.inner.state.get(owned.tensor, {}))
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
        except (OSError, DamagedCheckpoint) as error:
            kind = b"-" if isinstance(error, OSError) else b"!"
            payload = kind + str(error).encode(errors="replace")
    payload = rank_group.broadcast_bytes(payload, source=0)
    errors = {b"-": FileNotFoundError, b"!": DamagedCheckpoint}
    if payload[:1] in errors:
        raise errors[payload[:1]](payload[1:].decode())
    return payload[1:13].decode(), payload[13:]


def _names(names: Sequence[str], saved: SavedState) -> list[str]:
    """Ours, or positions if the checkpoint knows those only. Names of a module that was wrapped
    when it gave them to one side only differ by a prefix."""
    listed = {name for group in saved.groups for name in group["params"]}
    if all(name.startswith(BY_INDEX) for name in listed):
        return _positions(names)
    others = _spellings(names) if listed.isdisjoint(names) else ()
    return next((other for other in others if listed.issuperset(other)), list(names))


def _positions(names: Sequence[str]) -> list[str]:
    return [f"{BY_INDEX}{index}" for index in range(len(names))]


def _spellings(names: Sequence[str]) -> tuple[list[str], list[str]]:
    return [f"module.{name}" for name in names], [name.removeprefix("module.") for name in names]
