"""``optimizer.load(path)``: from a checkpoint of any job, each rank its own boxes only.

The metadata is read first, so that what is missing, unexpected or of another shape is known, and
told by name, before anything is changed. The checkpoint may have been written by
``optimizer.save``, by DCP with ``optimizer.sharded()`` or with ``get_optimizer_state_dict``, nested
or flattened, by any number of ranks, under any key.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onecopy.archive import (
    Contents,
    DamagedCheckpoint,
    TensorEntry,
    ValueEntry,
    parse_metadata,
    read_metadata,
)
from onecopy.fragments import Fragment, Portrait
from onecopy.intake import GroupPolicy
from onecopy.naming import BY_INDEX
from onecopy.progress import Progress
from onecopy.reader import Reader
from onecopy.restore import Loadable
from onecopy.restore import load as load_into
from onecopy.saving import MARK, leaves
from onecopy.shards import Shards
from onecopy.transport import Transport

Entry = TensorEntry | ValueEntry
_SHOWN = 20


class LoadReport(NamedTuple):
    """What of a checkpoint and of the optimizer did not fit together, by name."""

    missing: tuple[str, ...] = ()  # the optimizer needs it, the checkpoint lacks it
    unexpected: tuple[str, ...] = ()  # the checkpoint has it, the optimizer has no place for it
    mismatched: tuple[str, ...] = ()  # of another shape, dtype or kind

    def __str__(self) -> str:
        lines = []
        for title, names in zip(self._fields, self, strict=True):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                lines.append(f"  {title}: {', '.join(names[:_SHOWN])}{more}")
        return "\n".join(lines) or "  everything fits"


@dataclass(frozen=True, slots=True)
class SavedState:
    """The optimizer's part of a checkpoint."""

    states: dict[str, dict[tuple[str, ...], tuple[str, Entry]]]  # by parameter, by path within
    groups: list[dict[str, Any]]  # options, and the names under "params"
    without_state: set[str] | None  # names that rightly have none; None if that is not known
    by_position: bool


# -------------------------------------------------------------------------- what is in the file


def find_state(contents: Contents, reader: Reader, key: str | None) -> SavedState:
    """The optimizer's part, in whichever of torch's forms it was written."""
    prefix = _prefix(contents, key)
    rests = {
        name: tuple(map(str, _dotted(path[len(prefix) :])))
        for name, path in contents.paths.items()
        if _dotted(path)[: len(_dotted(prefix))] == _dotted(prefix)
    }
    groups = _groups(contents, reader, rests)
    by_position = all(
        isinstance(name, int) or name.startswith(BY_INDEX) for g in groups for name in g["params"]
    )
    for group in groups:
        group["params"] = [f"{BY_INDEX}{n}" if isinstance(n, int) else n for n in group["params"]]
    names = {name for group in groups for name in group["params"]}
    states: dict[str, dict[tuple[str, ...], tuple[str, Entry]]] = {}
    for full, rest in rests.items():
        if rest[0] == "state":
            name, within = _split_name(rest[1:], names)
            states.setdefault(name, {})[within] = (full, contents.entries[full])
    mark = next((full for full, rest in rests.items() if rest == (MARK,)), None)
    without_state = None
    if mark is not None:
        entry = contents.entries[mark]
        if isinstance(entry, ValueEntry):
            without_state = set(reader.value(entry, mark).get("frozen", ()))
    return SavedState(states, groups, without_state, by_position)


def _dotted(path: Sequence[str | int]) -> tuple[str | int, ...]:
    """A path with keys that were flattened taken apart: ("optim", "state.a.b") is as long as
    ("optim", "state", "a", "b")."""
    parts: list[str | int] = []
    for step in path:
        parts += step.split(".") if isinstance(step, str) else [step]
    return tuple(parts)


def _prefix(contents: Contents, key: str | None) -> tuple[str | int, ...]:
    """The keys under which the optimizer's state lies."""
    found = set()
    for path in contents.paths.values():
        parts = _dotted(path)
        if "param_groups" in parts:
            found.add(parts[: parts.index("param_groups")])
    if key is not None:
        wanted = tuple(key.split(".")) if key else ()
        if wanted not in found:
            raise ValueError(
                f"the checkpoint has no optimizer state under {key!r}; it has some under "
                f"{_listed(found)}"
            )
        return wanted
    if len(found) != 1:
        raise ValueError(
            "the checkpoint holds no optimizer state: no key has param_groups in it"
            if not found
            else f"the checkpoint holds several optimizers' states, under {_listed(found)}: say "
            "which one, load(path, key=...)"
        )
    (prefix,) = found
    return prefix


def _listed(prefixes: set[tuple[str | int, ...]]) -> str:
    return ", ".join(sorted(repr(".".join(map(str, prefix))) for prefix in prefixes)) or "no key"


def _groups(
    contents: Contents, reader: Reader, rests: Mapping[str, tuple[str, ...]]
) -> list[dict[str, Any]]:
    """The saved groups. Flattened, every parameter is a group of its own."""
    groups: dict[str, dict[str, Any]] = {}
    for full, rest in rests.items():
        if rest[0] == "param_groups":
            entry = contents.entries[full]
            value = (
                reader.value(entry, full)
                if isinstance(entry, ValueEntry)
                else _whole(entry, reader, full)
            )
            name, option = ".".join(rest[1:-1]), rest[-1]
            groups.setdefault(name, {})[option] = value
    if all("params" in group for group in groups.values()):
        return [groups[number] for number in sorted(groups, key=int)]
    if any("params" in group for group in groups.values()):
        raise DamagedCheckpoint("some groups of the checkpoint list no parameters")
    return [{**options, "params": [name]} for name, options in groups.items()]


def _whole(entry: TensorEntry, reader: Reader, key: str) -> torch.Tensor:
    fragment = Fragment.of_whole(torch.empty(entry.shape, dtype=entry.dtype))
    for box, view in fragment.boxes():
        reader.fill(box, view, entry, key)
    return fragment.whole()


def _split_name(rest: Sequence[str], names: set[str]) -> tuple[str, tuple[str, ...]]:
    """(name of the parameter, path within its state)."""
    for length in range(len(rest), 0, -1):
        name = ".".join(rest[:length])
        if name in names:
            return name, tuple(rest[length:])
        if f"{BY_INDEX}{name}" in names and length == 1:
            return f"{BY_INDEX}{name}", tuple(rest[length:])
    return ".".join(rest[:-1]), tuple(rest[-1:])


# -------------------------------------------------------------------------- comparing


@dataclass(slots=True)
class _Findings:
    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    mismatched: set[str] = field(default_factory=set)
    unfit: set[str] = field(default_factory=set)  # parameters that cannot be loaded

    def as_json(self) -> list[list[str]]:
        return [sorted(self.missing), sorted(self.unexpected), sorted(self.mismatched)]


def _compare(portrait: Portrait, tree: Mapping[str, Any], saved: SavedState) -> _Findings:
    """What does not fit of this rank's share; on rank 0, also what belongs to nobody."""
    found = _Findings()
    for name, state in tree["state"].items():
        expected = {tuple(map(str, path)): leaf for path, leaf in leaves(state)}
        there = saved.states.get(name)
        if there is None:
            if saved.without_state is not None and name not in saved.without_state:
                found.missing |= {f"state.{name}.{'.'.join(path)}" for path in expected}
            continue
        before = len(found.missing), len(found.unexpected), len(found.mismatched)
        found.missing |= {_key(name, path) for path in expected.keys() - there.keys()}
        found.unexpected |= {_key(name, path) for path in there.keys() - expected.keys()}
        for path in expected.keys() & there.keys():
            difference = _difference(expected[path], there[path][1])
            if difference:
                found.mismatched.add(f"{_key(name, path)} ({difference})")
        if before != (len(found.missing), len(found.unexpected), len(found.mismatched)):
            found.unfit.add(name)
    if portrait.rank == 0:
        known = set(portrait.names)
        for name in saved.states.keys() - known:
            found.unexpected |= {_key(name, path) for path in saved.states[name]}
        listed = {name for group in saved.groups for name in group["params"]}
        found.missing |= {f"param_groups: {name}" for name in known - listed}
        found.unexpected |= {f"param_groups: {name}" for name in listed - known}
    return found


def _key(name: str, path: Sequence[str]) -> str:
    return ".".join(["state", name, *path])


def _difference(expected: Any, entry: Entry) -> str:
    if isinstance(expected, Fragment) != isinstance(entry, TensorEntry):
        return "a tensor on one side, a plain value on the other"
    if isinstance(expected, Fragment) and isinstance(entry, TensorEntry):
        if expected.shape != entry.shape:
            return f"shape {entry.shape} in the checkpoint, {expected.shape} here"
        if expected.dtype != entry.dtype:
            return f"{entry.dtype} in the checkpoint, {expected.dtype} here"
    return ""


# -------------------------------------------------------------------------- loading


def load(
    transport: Transport,
    shards: Shards,
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    directory: Path,
    *,
    policies_for: Callable[[Sequence[Mapping[str, Any]]], Sequence[GroupPolicy]],
    strict: bool,
    key: str | None,
) -> tuple[Loadable, LoadReport]:
    """Give the inner optimizers what the checkpoint has for them. Collective.

    To be called inside ``shards.all_or_nothing``: if it raises, it does so on all ranks.
    """
    token, metadata = _share_metadata(transport, directory)
    exchange = transport.exchange(token, f"loading {directory}")
    loadable: Loadable | None = None

    def read() -> list[list[str]]:
        nonlocal loadable
        with Reader(directory) as reader:
            saved = find_state(parse_metadata(metadata), reader, key)
            mine = _names(names, saved)
            options = _options(groups, shards, mine, saved)
            params = zip(mine, shards.roster.params, strict=True)
            with_state = {param for name, param in params if name in saved.states}
            with_state -= _made_anew(shards, groups, mine, saved, reader)
            shards.make_room_for(groups, with_state, policies_for(options))
            with_options = [
                {**group, **of_group} for group, of_group in zip(groups, options, strict=True)
            ]
            portrait = Portrait(
                shards.local, shards.roster, shards.plan, with_options, mine, transport.rank
            )
            tree = portrait.tree(live=False)
            found = _compare(portrait, tree, saved)
            if strict and (found.missing or found.unexpected or found.mismatched):
                return found.as_json()
            title = f"loading {directory.name}"
            with Progress(title, _nbytes(tree), transport.rank == 0) as bar:

                def did(nbytes: int) -> None:
                    bar.add(nbytes)
                    exchange.beat()

                states = {
                    name: _read_state(state, saved.states[name], reader, did)
                    for name, state in tree["state"].items()
                    if name in saved.states and name not in found.unfit
                }
        pieces = portrait.pieces_from(states)
        pieces.update(_kept(shards, portrait, found.unfit))
        loadable = Loadable({}, {}, options, pieces)
        load_into(shards.local, loadable)
        return found.as_json()

    def decide(reports: list[Any]) -> list[list[str]]:
        together = [sorted(set().union(*lists)) for lists in zip(*reports, strict=True)]
        report = LoadReport(*map(tuple, together))
        if strict and any(report):
            raise ValueError(
                f"{directory} does not fit this optimizer; nothing was changed\n{report}\n"
                "If this is meant to be, load(path, strict=False) takes what fits"
                + _hint(names, report)
            )
        return together

    together = exchange.run(read, decide)
    assert loadable is not None
    return loadable, LoadReport(*map(tuple, together))


def _share_metadata(transport: Transport, directory: Path) -> tuple[str, bytes]:
    """A token for this round, and the metadata as rank 0 has read it: all see the same."""
    transport.note(f"loading {directory}")
    payload = None
    if transport.rank == 0:
        try:
            payload = b"+" + uuid.uuid4().hex[:12].encode() + read_metadata(directory)
        except OSError as error:
            payload = b"-" + str(error).encode()
    payload = transport.broadcast_bytes(payload, source=0)
    if payload[:1] == b"-":
        raise FileNotFoundError(payload[1:].decode())
    return payload[1:13].decode(), payload[13:]


def _names(names: Sequence[str], saved: SavedState) -> list[str]:
    """Ours, or positions if the checkpoint knows those only."""
    if saved.by_position:
        return [f"{BY_INDEX}{index}" for index in range(len(names))]
    return list(names)


def _hint(names: Sequence[str], report: LoadReport) -> str:
    unnamed = all(name.startswith(BY_INDEX) for name in names)
    if unnamed and report.missing:
        return (
            ". The checkpoint knows parameters by name, this optimizer by position only: "
            "load(path, module) tells it the names"
        )
    return ""


def _options(
    groups: Sequence[Mapping[str, Any]], shards: Shards, names: Sequence[str], saved: SavedState
) -> list[dict[str, Any]]:
    portrait = Portrait(shards.local, shards.roster, shards.plan, groups, names, 0)
    return portrait.options_from(saved.groups)


def _made_anew(
    shards: Shards,
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    saved: SavedState,
    reader: Reader,
) -> set[torch.Tensor]:
    """Frozen parameters whose saved state is just what the class makes in its constructor."""
    portrait = Portrait(shards.local, shards.roster, shards.plan, groups, names, 0)
    states = {}
    for index in portrait.made_for_frozen():
        state = {
            path[0]: _whole(entry, reader, full) if isinstance(entry, TensorEntry) else None
            for path, (full, entry) in saved.states.get(names[index], {}).items()
        }
        states[shards.roster.params[index]] = state
    return shards.made_anew(groups, states)


def _read_state(
    state: Mapping[str, Any],
    saved: Mapping[tuple[str, ...], tuple[str, Entry]],
    reader: Reader,
    did: Any,
) -> dict[str, Any]:
    """A parameter's state with everything read; fragments have memory of their own."""
    read: dict[tuple[str, ...], Any] = {}
    for path, leaf in leaves(state):
        full, entry = saved[tuple(map(str, path))]
        if isinstance(entry, ValueEntry):
            read[tuple(map(str, path))] = reader.value(entry, full)
            continue
        fragment = leaf.like()
        for box, view in fragment.boxes():
            reader.fill(box, view, entry, full)
            did(view.nbytes)
        read[tuple(map(str, path))] = fragment
    filled: dict[str, Any] = _put_back(state, read, ())
    return filled


def _put_back(tree: Any, read: Mapping[tuple[str, ...], Any], path: tuple[str, ...]) -> Any:
    """``tree`` with its leaves replaced by what was read under their paths."""
    if path in read:
        return read[path]
    if isinstance(tree, dict):
        return {key: _put_back(value, read, (*path, str(key))) for key, value in tree.items()}
    return [_put_back(value, read, (*path, str(n))) for n, value in enumerate(tree)]


def _kept(shards: Shards, portrait: Portrait, unfit: set[str]) -> dict[torch.Tensor, Any]:
    """The live state of parameters that could not be loaded."""
    found = {}
    for index, name in enumerate(portrait.names):
        for owned in shards.local.of(shards.roster.params[index]) if name in unfit else ():
            if owned.tensor in shards.local.state:
                found[owned.tensor] = dict(shards.local.state[owned.tensor])
    return found


def _nbytes(tree: Mapping[str, Any]) -> int:
    return sum(leaf.nbytes for _, leaf in leaves(tree["state"]) if isinstance(leaf, Fragment))
