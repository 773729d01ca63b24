"""The options of groups in a checkpoint, for groups that may be cut otherwise here."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onecopy.fragments import rebuilt
from onecopy.intake import options_of
from onecopy.parcels import encode
from onecopy.portrait import Portrait


def options_from(
    portrait: Portrait,
    saved: Sequence[Mapping[str, Any]],
    strict: bool = True,
    of_other_classes: Container[str] = (),
    kept: Container[int] = (),
) -> list[dict[str, Any]]:
    """The options of each of our groups, from saved groups that list the same names. The groups
    with the numbers ``kept`` keep theirs."""
    of_name = {name: number for number, group in enumerate(saved) for name in group["params"]}
    found = []
    for number, group in enumerate(portrait.groups):
        ours = options_of(group)
        names = [name for name in portrait.names_in(number) if name not in of_other_classes]
        known = {of_name[name] for name in names if name in of_name}
        if _is_empty_in(portrait, saved, number):
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


def regrouped(portrait: Portrait, grouping: Sequence[Sequence[str]]) -> Regrouped:
    """The parameters that are not with the same others as in the saved groups, which list names.

    Groups may come in another order. Names that only one side has are not compared.
    """
    of_name = {name: number for number, names in enumerate(grouping) for name in names}
    shared: dict[tuple[int, int], list[str]] = {}  # by group here and group there
    for number in range(len(portrait.groups)):
        for name in portrait.names_in(number):
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


def require_same_groups(portrait: Portrait, grouping: Sequence[Sequence[str]]) -> None:
    moved = regrouped(portrait, grouping).params
    if moved:
        listed = [f"{name} ({where})" for name, where in moved.items()]
        raise ValueError(
            f"parameters are grouped otherwise than in the checkpoint: {', '.join(listed[:5])}"
            f"{', ...' * (len(listed) > 5)}. {SAME_GROUPS}"
        )


SAME_GROUPS = (
    "Options belong to groups: build the optimizer with the groups that it had when it was saved"
)


def _is_empty_in(portrait: Portrait, saved: Sequence[Mapping[str, Any]], number: int) -> bool:
    """Whether a group has no parameters by which to know it, here and there."""
    alike = len(saved) == len(portrait.groups) and not saved[number]["params"]
    return alike and not portrait.names_in(number)


def require_all_in(portrait: Portrait, saved: Sequence[Mapping[str, Any]]) -> None:
    known = {name for group in saved for name in group["params"]}
    lost = [name for name in portrait.names if name not in known]
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
