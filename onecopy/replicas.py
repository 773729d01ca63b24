"""Do the ranks hold what they should? What must be equal on them is compared by 64-bit numbers, in
one small all-reduce; if something is not, the same error on all ranks says what, and where."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from onecopy.agreement import difference, name_ranks
from onecopy.fingerprints import fingerprint
from onecopy.roster import Entry, Roster
from onecopy.transport import Transport
from onecopy.watch import ModuleNames

_LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1
_VIEW_BYTES = 200


@dataclass(frozen=True, slots=True)
class Evidence:
    """What this rank has to say of each parameter, in the order of the parameters."""

    names: Sequence[str]
    fingerprints: torch.Tensor  # of the parameters: equal on all ranks
    counters: Sequence[Sequence[str]]  # what its pieces here say of ``step`` and the like
    suspicions: Sequence[str]  # what has changed of its state, or nothing
    since: str = ""  # when the parameters were looked at, if not now


def require_equal(transport: Transport, mine: Evidence) -> None:
    """Raise on all ranks, naming the first parameter with which something is wrong. Collective."""
    count = len(mine.names)
    if not count:
        return
    prints = mine.fingerprints.cpu()
    counters = [sorted(map(_number, said)) for said in mine.counters]
    # Who has nothing to say of a parameter is neither below nor above the others.
    low = [said[0] if said else _GREATEST for said in counters]
    high = [said[-1] if said else _LEAST for said in counters]
    suspected = [int(bool(said)) for said in mine.suspicions]
    least, greatest = transport.extremes(
        torch.cat([prints, torch.tensor([*low, *[0] * count], device="cpu")]),
        torch.cat([prints, torch.tensor([*high, *suspected], device="cpu")]),
    )
    wrong = (least < greatest).nonzero().flatten().tolist()
    if wrong:
        _complain(transport, mine, wrong)


def _complain(transport: Transport, mine: Evidence, wrong: Sequence[int]) -> NoReturn:
    count = len(mine.names)
    kind, index = divmod(wrong[0], count)
    name = mine.names[index]
    alike = [place for place in wrong if place // count == kind]
    more = f" ({len(alike) - 1} more parameters are affected)" if len(alike) > 1 else ""
    if kind == 0:
        views = _views(transport, f"{int(mine.fingerprints[index]):x}")
        within = "; ".join(name_ranks(ranks) for ranks in views.values())
        raise RuntimeError(
            f"{name} is not the same on all ranks{mine.since}: it is equal only within {within}"
            f"{more}. Did the ranks start from different values, did something change a parameter "
            "on some of them, or has a bit in memory flipped?"
        )
    if kind == 1:
        views = _views(transport, " and ".join(sorted(set(mine.counters[index]))))
        raise RuntimeError(
            f"the parts of {name} have state that differs: {_listed(views)}{more}. Was state "
            "loaded or written on some ranks only, or has a bit in memory flipped?"
        )
    views = _views(transport, mine.suspicions[index])
    raise RuntimeError(
        f"the state of {name} has changed although no step was taken: {_listed(views)}{more}. Has "
        "a bit in memory flipped? If your code writes into the state, let it say so: "
        "optimizer.state = optimizer.state"
    )


def _views(transport: Transport, mine: str) -> dict[str, list[int]]:
    """What the ranks say, each text with those that say it, without those that say nothing."""
    payload = mine.encode()[:_VIEW_BYTES].ljust(_VIEW_BYTES, b"\0")
    holders: dict[str, list[int]] = {}
    for rank, said in enumerate(transport.all_gather_bytes(payload)):
        text = said.rstrip(b"\0").decode(errors="ignore")
        if text:
            holders.setdefault(text, []).append(rank)
    return holders


def _listed(views: dict[str, list[int]]) -> str:
    return "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in views.items())


# -------------------------------------------------------------------------- the order of parameters

_SAME_ORDER = (
    "These are different parameters, in one position. Pass the parameters in the same order on all "
    "ranks; named_parameters() instead of parameters() lets the ranks compare names."
)


def require_same_order(
    transport: Transport, subject: str, roster: Roster, found: ModuleNames, first: int
) -> None:
    """Raise on all ranks if one of them holds the parameters from ``first`` on in another order.
    Collective, after the ranks have agreed on shapes and names that were given.

    Names that modules give are compared. If they cannot be, because there is no module or because
    the modules differ, values are: that ranks have different values is no mistake, since DDP may
    still broadcast them; that one rank has the values of another in another order is.
    """
    if transport.world_size == 1:
        return
    entries, names = roster.entries[first:], found.of[first:]
    mine = [_digest(names), _digest(sorted(names)), _digest(found.structure)]
    everyone = transport.all_gather_bytes(b"".join(mine))
    ordered, unordered, structures = (_column(everyone, number) for number in range(3))
    unnamed = [index for index, name in enumerate(names) if not name]
    if len(set(ordered)) > 1:
        is_same_model = len(set(structures)) == 1 and not _is_any(transport, bool(unnamed))
        if is_same_model or _is_permuted(ordered, unordered):
            lines = [
                f"{entry.name} is {name or 'not in a module'}"
                for entry, name in zip(entries, names, strict=True)
            ]
            raise difference(transport, [f"{subject}{transport.whose}", *lines], _SAME_ORDER)
        unnamed = list(range(len(entries)))
    if unnamed:
        _require_same_order_of_values(transport, subject, [entries[i] for i in unnamed])


def _require_same_order_of_values(
    transport: Transport, subject: str, entries: Sequence[Entry]
) -> None:
    values = [_value(entry.param) for entry in entries]
    everyone = transport.all_gather_bytes(_digest(values) + _digest(sorted(values)))
    if _is_permuted(_column(everyone, 0), _column(everyone, 1)):
        lines = [
            f"{entry.name} has the values {value}"
            for entry, value in zip(entries, values, strict=True)
        ]
        raise difference(transport, [f"{subject}{transport.whose}", *lines], _SAME_ORDER)


def _is_permuted(ordered: Sequence[bytes], unordered: Sequence[bytes]) -> bool:
    """Whether two ranks have the same in another order."""
    return len(set(zip(ordered, unordered, strict=True))) > len(set(unordered))


def _is_any(transport: Transport, mine: bool) -> bool:
    return any(map(any, transport.all_gather_bytes(bytes([mine]))))


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


def _number(text: str) -> int:
    """The same for the same text, in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
