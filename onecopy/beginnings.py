"""State that did not exist when it was saved: known by its negative zeros, or by a list."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch

from onecopy.blueprint import Begun, begun
from onecopy.portrait import Portrait


def not_begun(portrait: Portrait) -> list[str]:
    """The parameters of this rank that have no state yet."""
    return [
        portrait.names[index]
        for index in portrait.indices()
        if any(
            not portrait.local.state.get(owned.tensor)
            for owned in portrait.local.of(portrait.roster.params[index])
        )
    ]


def beginnings(portrait: Portrait, pieces: Mapping[torch.Tensor, Any]) -> torch.Tensor:
    """What the pieces that were read here say of each parameter, as ``Begun``.

    A piece may hold negative zeros by chance: the least of what all ranks say counts.
    """
    said = torch.full((len(portrait.names),), Begun.NO, dtype=torch.int64, device="cpu")
    for index in portrait.indices():
        maker = portrait.maker(index)
        for owned in portrait.local.of(portrait.roster.params[index]):
            if owned.tensor in pieces:
                said[index] = min(int(said[index]), begun(pieces[owned.tensor], maker))
    return said


def names_not_begun(portrait: Portrait, said: torch.Tensor) -> set[str]:
    """The parameters whose state did not exist, from what all ranks said. One that cannot be
    told, because it has no elements, is as the others of its group."""
    begun_groups = {
        entry.group
        for entry, verdict in zip(portrait.roster.entries, said.tolist(), strict=True)
        if verdict == Begun.YES
    }
    return {
        name
        for name, entry, verdict in zip(
            portrait.names, portrait.roster.entries, said.tolist(), strict=True
        )
        if verdict == Begun.NO
        or (verdict == Begun.CANNOT_BE_TOLD and entry.group not in begun_groups)
    }


def without(
    portrait: Portrait, pieces: Mapping[torch.Tensor, dict[str, Any]], not_begun: Container[str]
) -> dict[torch.Tensor, dict[str, Any]]:
    """The pieces of those parameters that had state."""
    dropped = {
        owned.tensor
        for name, param in zip(portrait.names, portrait.roster.params, strict=True)
        if name in not_begun
        for owned in portrait.local.of(param)
    }
    return {tensor: state for tensor, state in pieces.items() if tensor not in dropped}
