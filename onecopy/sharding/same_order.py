"""Do all ranks hold the same parameters in the same order?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from onecopy.comm.agreement import difference
from onecopy.comm.group import RankGroup
from onecopy.planning.param_groups import Entry, ParamRegistry
from onecopy.sharding.fingerprints import fingerprint
from onecopy.sharding.parameter_changes import ModuleNames

# -------------------------------------------------------------------------- the order of parameters

_SAME_ORDER = (
    "These are different parameters, in one position. Pass the parameters in the same order on all "
    "ranks; named_parameters() instead of parameters() lets the ranks compare names."
)


def require_same_order(
    rank_group: RankGroup, subject: str, registry: ParamRegistry, found: ModuleNames, first: int
) -> None:
    """Raise on all ranks if one of them holds the parameters from ``first`` on in another order.
    Collective, after the ranks have agreed on shapes and names that were given.

    Names that modules give are compared. If they cannot be, because there is no module or because
    the modules differ, values are: that ranks have different values is no mistake, since DDP may
    still broadcast them; that one rank has the values of another in another order is.
    """
    if rank_group.world_size == 1:
        return
    entries, names = registry.entries[first:], found.of[first:]
    mine = [_digest(names), _digest(sorted(names)), _digest(found.structure)]
    everyone = rank_group.all_gather_bytes(b"".join(mine))
    ordered, unordered, structures = (_column(everyone, number) for number in range(3))
    unnamed = [index for index, name in enumerate(names) if not name]
    if len(set(ordered)) > 1:
        is_same_model = len(set(structures)) == 1 and not _is_any(rank_group, bool(unnamed))
        if is_same_model or _is_permuted(ordered, unordered):
            lines = [
                f"{entry.name} is {name or 'not in a module'}"
                for entry, name in zip(entries, names, strict=True)
            ]
            raise difference(rank_group, [f"{subject}{rank_group.whose}", *lines], _SAME_ORDER)
        unnamed = list(range(len(entries)))
    if unnamed:
        _require_same_order_of_values(rank_group, subject, [entries[i] for i in unnamed])


def _require_same_order_of_values(
    rank_group: RankGroup, subject: str, entries: Sequence[Entry]
) -> None:
    values = [_value(entry.param) for entry in entries]
    everyone = rank_group.all_gather_bytes(_digest(values) + _digest(sorted(values)))
    if _is_permuted(_column(everyone, 0), _column(everyone, 1)):
        lines = [
            f"{entry.name} has the values {value}"
            for entry, value in zip(entries, values, strict=True)
        ]
        raise difference(rank_group, [f"{subject}{rank_group.whose}", *lines], _SAME_ORDER)


def _is_permuted(ordered: Sequence[bytes], unordered: Sequence[bytes]) -> bool:
    """Whether two ranks have the same in another order."""
    return len(set(zip(ordered, unordered, strict=True))) > len(set(unordered))


def _is_any(rank_group: RankGroup, mine: bool) -> bool:
    return any(map(any, rank_group.all_gather_bytes(bytes([mine]))))


def _value(param: torch.Tensor) -> str:
    """The beginning of a parameter, and a fingerprint of all of it."""
    memory = param.detach()
    try:
        first = memory[(0,) * memory.dim()].item()
        return f"[{first:.4g}, ...], fingerprint {int(fingerprint(memory)) % (1 << 64):016x}"
    except Exception:  # it has no elements, or none that can be read, on all ranks alike
        return "[]"


def _digest(lines: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode(errors="backslashreplace")).digest()


def _column(messages: Sequence[bytes], number: int) -> list[bytes]:
    return [message[32 * number : 32 * (number + 1)] for message in messages]
