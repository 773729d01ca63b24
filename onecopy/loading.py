"""``optimizer.load(path)``: from a checkpoint of any job, each rank its own boxes only.

The metadata is read first, so that what is missing, unexpected or of another shape is known, and
told by name, before anything is changed. The checkpoint may have been written by
``optimizer.save``, by DCP with ``optimizer.sharded()`` or with ``get_optimizer_state_dict``, nested
or flattened, by any number of ranks, under any key.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onecopy.agreement import agree
from onecopy.archive import (
    TensorEntry,
    ValueEntry,
    parse_metadata,
    read_metadata,
)
from onecopy.exchange import Exchange
from onecopy.fragments import Fragment, leaves
from onecopy.intake import GroupPolicy
from onecopy.naming import BY_INDEX
from onecopy.portrait import Portrait
from onecopy.progress import Progress
from onecopy.reader import Reader
from onecopy.restore import Loadable
from onecopy.restore import load as load_into
from onecopy.saved import Entry, SavedState, find_state, read_whole
from onecopy.saving import classes_of
from onecopy.shards import Shards
from onecopy.transport import Transport

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


# -------------------------------------------------------------------------- comparing


@dataclass(slots=True)
class _Findings:
    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    mismatched: set[str] = field(default_factory=set)
    unfit: set[str] = field(default_factory=set)  # parameters that cannot be loaded

    @property
    def any(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def as_json(self) -> list[list[str]]:
        return [sorted(self.missing), sorted(self.unexpected), sorted(self.mismatched)]


def _compare(portrait: Portrait, tree: Mapping[str, Any], saved: SavedState) -> _Findings:
    """What does not fit of this rank's share; on rank 0, also what belongs to nobody."""
    found = _Findings()
    params = zip(portrait.names, portrait.roster.params, strict=True)
    dtypes = {name: param.dtype for name, param in params}
    for name in {**tree["state"], **dict.fromkeys(portrait.names_owned())}:
        state = tree["state"].get(name, {})
        expected = {tuple(map(str, path)): leaf for path, leaf in leaves(state)} if state else {}
        there = saved.states.get(name)
        if there is None:
            # It was frozen, or had no gradient; if that is known not to be so, it is missing.
            if saved.frozen is not None and name not in saved.frozen:
                found.missing |= {_key(name, path) for path in expected}
                found.unfit.add(name)
            continue
        missing = {_key(name, path) for path in expected.keys() - there.keys()}
        unexpected = {_key(name, path) for path in there.keys() - expected.keys()}
        mismatched = {
            f"{_key(name, path)} ({difference})"
            for path in expected.keys() & there.keys()
            if (difference := _difference(expected[path], there[path][1], dtypes[name]))
        }
        found.missing |= missing
        found.unexpected |= unexpected
        found.mismatched |= mismatched
        if missing or unexpected or mismatched:
            found.unfit.add(name)
    known = set(portrait.names)
    listed = {name for group in saved.groups for name in group["params"]}
    found.unfit |= known - listed
    if portrait.rank == 0:
        for name in saved.states.keys() - known:
            found.unexpected |= {_key(name, path) for path in saved.states[name]}
        found.missing |= {f"param_groups: {name}" for name in known - listed}
        found.unexpected |= {f"param_groups: {name}" for name in listed - known}
        for cls, names in classes_of(portrait).items():
            for name in names:
                theirs = saved.classes.get(name, cls)
                # Classes of other packages may have been renamed since; their keys must tell.
                if theirs != cls and {theirs[:12], cls[:12]} == {"torch.optim."}:
                    found.mismatched.add(f"{name} ({theirs} in the checkpoint, {cls} here)")
    return found


def _key(name: str, path: Sequence[str]) -> str:
    return ".".join(["state", name, *path])


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
    take: _Take | None = None

    def read() -> list[list[str]]:
        nonlocal take
        with Reader(directory) as reader:
            saved = find_state(parse_metadata(metadata), reader, key)
            mine = _names(names, saved)
            portrait = Portrait(
                shards.local, shards.roster, shards.plan, groups, mine, transport.rank
            )
            options = portrait.options_from(saved.groups, strict)
            params = zip(mine, shards.roster.params, strict=True)
            with_state = {param for name, param in params if name in saved.states}
            with_state -= _made_anew(shards, portrait, saved, reader)
            shards.make_room_for(groups, with_state, policies_for(options))
            # From here on for the plan and with the options that are to be.
            changed = [{**ours, **theirs} for ours, theirs in zip(groups, options, strict=True)]
            portrait = replace(portrait, roster=shards.roster, plan=shards.plan, groups=changed)
            tree = portrait.tree(live=False)
            found = _compare(portrait, tree, saved)
            if not (strict and found.any):
                pieces = _read(portrait, tree, saved, found, reader, exchange)
                take = _Take(portrait, options, saved, pieces, _kept(portrait, found))
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

    report = LoadReport(*map(tuple, exchange.run(read, decide)))
    assert take is not None
    loadable = take.loadable(transport)

    def give() -> list[str]:
        load_into(shards.local, loadable)
        return []

    agree(transport, f"loading {directory}", give)
    return loadable, report


@dataclass(frozen=True, slots=True)
class _Take:
    """What was read for this rank."""

    portrait: Portrait
    options: Sequence[Mapping[str, Any]]
    saved: SavedState
    pieces: dict[torch.Tensor, dict[str, Any]]
    kept: dict[torch.Tensor, dict[str, Any]]  # of parameters that do not fit, what they have

    def loadable(self, transport: Transport) -> Loadable:
        """Without the state that did not exist when it was saved. Collective."""
        not_begun = self.saved.not_begun
        if not_begun is None:
            said, _ = transport.minimum_and_maximum(self.portrait.beginnings(self.pieces))
            not_begun = self.portrait.names_not_begun(said)
        begun = self.portrait.without(self.pieces, not_begun)
        return Loadable({}, {}, self.options, {**begun, **self.kept})


def _read(
    portrait: Portrait,
    tree: Mapping[str, Any],
    saved: SavedState,
    found: _Findings,
    reader: Reader,
    exchange: Exchange,
) -> dict[torch.Tensor, dict[str, Any]]:
    """The state of this rank's pieces of the parameters that fit."""
    total = sum(leaf.nbytes for _, leaf in leaves(tree["state"]) if isinstance(leaf, Fragment))
    with Progress("loading", total, portrait.rank == 0) as bar:

        def did(nbytes: int) -> None:
            bar.add(nbytes)
            exchange.beat()

        states = {
            name: _read_state(state, saved.states[name], reader, did)
            for name, state in tree["state"].items()
            if name in saved.states and name not in found.unfit
        }
    return portrait.pieces_from(states)


def _kept(portrait: Portrait, found: _Findings) -> dict[torch.Tensor, dict[str, Any]]:
    """The live state of parameters that do not fit."""
    live = portrait.local.state
    return {
        owned.tensor: dict(live[owned.tensor])
        for name, param in zip(portrait.names, portrait.roster.params, strict=True)
        if name in found.unfit
        for owned in portrait.local.of(param)
        if owned.tensor in live
    }


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
    """Ours, or positions if the checkpoint knows those only. Names of a module that was wrapped
    when it gave them to one side only differ by a prefix."""
    if saved.by_position:
        return [f"{BY_INDEX}{index}" for index in range(len(names))]
    listed = {name for group in saved.groups for name in group["params"]}
    if not listed & set(names):
        for other in (
            [f"module.{name}" for name in names],
            [name.removeprefix("module.") for name in names],
        ):
            if set(other) <= listed:
                return other
    return list(names)


def _hint(names: Sequence[str], report: LoadReport) -> str:
    unnamed = all(name.startswith(BY_INDEX) for name in names)
    if unnamed and report.missing:
        return (
            ". The checkpoint knows parameters by name, this optimizer by position only: "
            "load(path, module) tells it the names"
        )
    return ""


def _made_anew(
    shards: Shards, portrait: Portrait, saved: SavedState, reader: Reader
) -> set[torch.Tensor]:
    """Frozen parameters whose saved state is just what the class makes in its constructor."""
    states = {}
    for index in portrait.made_for_frozen():
        states[shards.roster.params[index]] = {
            path[0]: read_whole(entry, reader, full) if isinstance(entry, TensorEntry) else None
            for path, (full, entry) in saved.states.get(portrait.names[index], {}).items()
        }
    return shards.made_anew(portrait.groups, states)


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
