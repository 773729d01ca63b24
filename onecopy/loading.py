"""``optimizer.load(path)``: from a checkpoint of any job, each rank its own boxes only.

The metadata is read first, so that what is missing, unexpected or of another shape is known, and
told by name, before anything is changed. The checkpoint may have been written by
``optimizer.save``, by DCP with ``optimizer.sharded()`` or with ``get_optimizer_state_dict``, nested
or flattened, by any number of ranks, under any key.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
from onecopy.beginnings import beginnings, names_not_begun, without
from onecopy.comparing import (
    Findings,
    compare,
    of_other_classes,
    with_saved_forms,
    without_masters_not_in,
)
from onecopy.exchange import Exchange
from onecopy.fragments import Fragment, Path_, dotted, leaves
from onecopy.intake import GroupPolicy
from onecopy.naming import BY_INDEX
from onecopy.options import SAME_GROUPS, options_from, regrouped
from onecopy.pickles import DamagedCheckpoint
from onecopy.portrait import MasterCopies, PieceStates, Portrait
from onecopy.progress import Progress
from onecopy.reader import Reader
from onecopy.restore import Loadable
from onecopy.restore import load as load_into
from onecopy.saved import SavedState, SavedValue, find_state, read_whole
from onecopy.shards import Shards
from onecopy.transport import Transport

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
    exchange = transport.company.exchange(token, f"loading {directory}")
    take: _Take | None = None

    def read() -> list[list[str]]:
        nonlocal take
        with Reader(directory) as reader:
            saved = find_state(
                parse_metadata(metadata), reader, key, {*names, *chain(*_spellings(names))}
            )
            mine = _names(names, saved)
            portrait = Portrait(
                shards.local, shards.roster, shards.plan, groups, mine, transport.rank
            )
            others = of_other_classes(portrait, saved)
            moved = regrouped(portrait, saved.grouping or [])
            # Those that are grouped otherwise are reported below, and refused if it is strict.
            is_strict = strict and not moved.params
            options = options_from(portrait, saved.groups, is_strict, others, moved.groups)
            params = zip(mine, shards.roster.params, strict=True)
            with_state = {param for name, param in params if name in saved.states}
            with_state -= _made_anew(shards, portrait, saved, reader)
            before, live = shards.plan, set(shards.local.state)
            shards.make_room_for(groups, with_state, policies_for(options))
            # From here on for the plan and with the options that are to be.
            changed = [{**ours, **theirs} for ours, theirs in zip(groups, options, strict=True)]
            portrait = replace(portrait, roster=shards.roster, plan=shards.plan, groups=changed)
            tree, rebuilt = without_masters_not_in(saved, portrait.tree(live=False))
            tree = with_saved_forms(portrait, tree, saved)
            found = compare(portrait, tree, saved)
            found.rebuilt = rebuilt
            found.mismatched |= {
                f"{_GROUPS}{name} ({where})" for name, where in moved.params.items()
            }
            if (
                live
                and found.unfit
                and shards.plan.buckets[: len(before.buckets)] != before.buckets
            ):
                raise ValueError(
                    "the options in the checkpoint cut tensors elsewhere, so that the state of "
                    f"{', '.join(sorted(found.unfit)[:5])}, which does not fit, could not be kept: "
                    "build the optimizer with these options (fused) before loading"
                )
            if not (strict and found.any):
                pieces, masters = _read(portrait, tree, saved, found, reader, exchange)
                kept, kept_masters = _kept(portrait, found)
                masters |= kept_masters
                take = _Take(portrait, options, saved, pieces, kept, masters)
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
    pieces: PieceStates
    kept: PieceStates  # of parameters that do not fit, what they have
    masters: MasterCopies

    def loadable(self, transport: Transport) -> Loadable:
        """Without the state that did not exist when it was saved. Collective."""
        not_begun = self.saved.not_begun
        if not_begun is None:
            said, _ = transport.minimum_and_maximum(beginnings(self.portrait, self.pieces))
            not_begun = names_not_begun(self.portrait, said)
        begun = without(self.portrait, self.pieces, not_begun)
        return Loadable({}, {}, self.options, {**begun, **self.kept}, self.masters)


def _read(
    portrait: Portrait,
    tree: Mapping[str, Any],
    saved: SavedState,
    found: Findings,
    reader: Reader,
    exchange: Exchange,
) -> tuple[PieceStates, MasterCopies]:
    """The state of this rank's pieces of the parameters that fit, and their master copies."""
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


def _kept(portrait: Portrait, found: Findings) -> tuple[PieceStates, MasterCopies]:
    """The live state and the master copies of parameters that do not fit."""
    live = portrait.local.state
    params = zip(portrait.names, portrait.roster.params, strict=True)
    unfit = [o for name, p in params if name in found.unfit for o in portrait.local.of(p)]
    states = {o.tensor: dict(live[o.tensor]) for o in unfit if o.tensor in live}
    return states, {o.tensor: o.tensor.detach().clone() for o in unfit if o.has_master}


def _share_metadata(transport: Transport, directory: Path) -> tuple[str, bytes]:
    """A token for this round, and the metadata as rank 0 has read it: all see the same."""
    transport.company.note(f"loading {directory}")
    payload = None
    if transport.rank == 0:
        try:
            payload = b"+" + uuid.uuid4().hex[:12].encode() + read_metadata(directory)
        except OSError as error:
            payload = b"-" + str(error).encode(errors="replace")
        except DamagedCheckpoint as error:
            payload = b"!" + str(error).encode(errors="replace")
    payload = transport.broadcast_bytes(payload, source=0)
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
    shards: Shards, portrait: Portrait, saved: SavedState, reader: Reader
) -> set[torch.Tensor]:
    """Frozen parameters whose saved state is just what the class makes in its constructor."""
    states = {}
    for index in portrait.made_for_frozen():
        states[shards.roster.params[index]] = {
            path: read_whole(entry, reader, full) if isinstance(entry, TensorEntry) else None
            for path, (full, entry, _) in saved.states.get(portrait.names[index], {}).items()
        }
    return shards.made_anew(portrait.groups, states)


def _read_state(
    state: Mapping[str, Any],
    saved: Mapping[str, SavedValue],
    reader: Reader,
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
