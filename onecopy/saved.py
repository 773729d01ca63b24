"""The optimizer's part of a checkpoint, in whichever of torch's forms it was written.

Nested, as ``get_optimizer_state_dict`` gives it, or flattened; under any key; by name, by position,
or with the bare numbers of ``optimizer.state_dict()``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from onecopy.archive import Contents, TensorEntry, ValueEntry
from onecopy.fragments import Fragment, dotted
from onecopy.naming import BY_INDEX
from onecopy.pickles import DamagedCheckpoint
from onecopy.reader import Reader
from onecopy.saving import MARK, digest

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


def find_state(
    contents: Contents, reader: Reader, key: str | None, expected: Container[str]
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


def _require_digest(contents: Contents, mark_key: str, mark: Mapping[str, Any]) -> None:
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


def _prefix(contents: Contents, key: str | None) -> tuple[str | int, ...]:
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


def _with_state(contents: Contents) -> set[tuple[str | int, ...]]:
    """The steps that lead to anything called state."""
    return {
        path[:depth]
        for path in contents.paths.values()
        for depth, step in enumerate(path)
        if _section([step]).title == "state"
    }


def _groups(
    contents: Contents, reader: Reader, sections: Mapping[str, _Section], names: Container[str]
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


def read_whole(entry: TensorEntry, reader: Reader, key: str) -> torch.Tensor:
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
