"""What of a saved state fits an optimizer, and what does not, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from onecopy.archive import TensorEntry, ValueEntry
from onecopy.fragments import Fragment, dotted, leaves
from onecopy.kinds import is_torchs
from onecopy.pieces import MASTER
from onecopy.portrait import Portrait
from onecopy.saved import Entry, SavedState, SavedValue, form_of_saved
from onecopy.saving import classes_of

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


def compare(portrait: Portrait, tree: Mapping[str, Any], saved: SavedState) -> Findings:
    """What does not fit of this rank's share; on rank 0, also what belongs to nobody."""
    found = Findings()
    _compare_states(portrait, tree, saved, found)
    _compare_names(portrait, saved, found)
    for name, difference in of_other_classes(portrait, saved).items():
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


def of_other_classes(portrait: Portrait, saved: SavedState) -> dict[str, str]:
    """The parameters that had another class, and which, as far as the checkpoint tells."""
    found = {}
    for cls, names in classes_of(portrait).items():
        for name in names:
            theirs = saved.classes.get(name, cls)
            # Classes of other packages may have been renamed since; their keys must tell.
            if theirs != cls and is_torchs(theirs) and is_torchs(cls):
                found[name] = f"{theirs} in the checkpoint, {cls} here"
    return found


def _compare_states(
    portrait: Portrait, tree: Mapping[str, Any], saved: SavedState, found: Findings
) -> None:
    params = zip(portrait.names, portrait.roster.params, strict=True)
    dtypes = {name: param.dtype for name, param in params}
    for name in {**tree["state"], **dict.fromkeys(portrait.names_owned())}:
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


def _compare_names(portrait: Portrait, saved: SavedState, found: Findings) -> None:
    known = set(portrait.names)
    listed = {name for group in saved.groups for name in group["params"]}
    found.unfit |= known - listed
    if portrait.rank == 0:
        for name in saved.states.keys() - known:
            found.unexpected |= {_key(name, path) for path in saved.states[name]}
        found.missing |= {f"param_groups: {name}" for name in known - listed}
        found.unexpected |= {f"param_groups: {name}" for name in listed - known}


def with_saved_forms(
    portrait: Portrait, tree: Mapping[str, Any], saved: SavedState
) -> dict[str, Any]:
    """The tree with states in the form in which they were saved, if they may have become so: how
    far a class has changed the form of its state, only the checkpoint knows."""
    state = dict(tree["state"])
    params = zip(portrait.names, portrait.roster.params, strict=True)
    for index, (name, param) in enumerate(params):
        there = saved.states.get(name)
        if there is None or not portrait.may_change_form(index) or not portrait.local.of(param):
            continue
        # The master copy is no state of the class, and tells nothing about its form.
        there, _ = _split_master(there)
        like, master = _split_master(state.get(name, {}))
        expected = _by_path(like)
        outlines = {
            path: _outline(portrait, index, value.entry, expected.get(path))
            for path, value in there.items()
        }
        fits = all(
            outlines[path] is not None or isinstance(value.entry, ValueEntry)
            for path, value in there.items()
        )
        lacks_nothing = expected.keys() <= there.keys() or portrait.changes_form(index)
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


def _outline(portrait: Portrait, index: int, entry: Entry, expected: Any) -> Fragment | None:
    if isinstance(entry, ValueEntry):
        return None
    if isinstance(expected, Fragment) and expected.shape == entry.shape:
        return expected
    return portrait.outlined(index, entry.shape, entry.dtype)


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
