"""The options of groups in a checkpoint, for groups that may be cut otherwise here."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

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
) -> list[dict[str, Any]]:
    """The options of each of our groups, from saved groups that list the same names."""
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
        found.append(candidates[0] if candidates else ours)
    return found


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
