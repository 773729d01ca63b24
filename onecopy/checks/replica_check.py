"""Do the ranks hold what they should? What must be equal on them is compared by 64-bit numbers, in
one small all-reduce; if something is not, the same error on all ranks says what, and where."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch

from onecopy.comm.group import RankGroup
from onecopy.planning.text import name_ranks
from onecopy.sharding.inner import InnerOptimizers

_LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1
_VIEW_BYTES = 200


class Evidence(NamedTuple):
    """What this rank knows of each parameter, in the order of the parameters."""

    names: Sequence[str]
    fingerprints: torch.Tensor  # of the parameters: equal on all ranks
    counters: Sequence[Sequence[str]]  # the numbers in the state of its shards here
    changes: Sequence[str]  # what has changed of its state, or nothing
    since: str = ""  # when the parameters were read, if not now

    @classmethod
    def of(
        cls,
        inner: InnerOptimizers,
        names: Sequence[str],
        fingerprints: torch.Tensor,
        changes: Sequence[str],
        since: str = "",
    ) -> Evidence:
        """With the counters of the state: an elementwise class keeps the same in all shards of a
        parameter, since it cannot know which one it has."""
        counters: list[list[str]] = [[] for _ in names]
        for owned in inner.shards:
            state = inner.state.get(owned.tensor, {})
            numbers = [
                f"{key} = {value.item() if isinstance(value, torch.Tensor) else value!r}"
                for key, value in sorted(state.items(), key=lambda item: str(item[0]))
                if isinstance(value, (bool, int, float))
                or (isinstance(value, torch.Tensor) and not value.dim())
            ]
            if numbers:
                counters[owned.shard.param].append(", ".join(numbers))
        return cls(names, fingerprints, counters, changes, since)


def require_equal_replicas(rank_group: RankGroup, mine: Evidence) -> None:
    """Raise on all ranks, naming the first parameter with which something is wrong. Collective."""
    count = len(mine.names)
    if not count:
        return
    prints = mine.fingerprints.cpu()
    counters = [sorted(map(_number, said)) for said in mine.counters]
    # A rank without shards of a parameter is neither below nor above the others.
    low = [said[0] if said else _GREATEST for said in counters]
    high = [said[-1] if said else _LEAST for said in counters]
    changed = [int(bool(said)) for said in mine.changes]
    least, greatest = rank_group.extremes(
        torch.cat([prints, torch.tensor([*low, *[0] * count], device="cpu")]),
        torch.cat([prints, torch.tensor([*high, *changed], device="cpu")]),
    )
    wrong = (least < greatest).nonzero().flatten().tolist()
    if wrong:
        _complain(rank_group, mine, wrong)


def _complain(rank_group: RankGroup, mine: Evidence, wrong: Sequence[int]) -> NoReturn:
    count = len(mine.names)
    kind, index = divmod(wrong[0], count)
    name = mine.names[index]
    alike = [place for place in wrong if place // count == kind]
    more = f" ({len(alike) - 1} more parameters are affected)" if len(alike) > 1 else ""
    if kind == 0:
        views = _views(rank_group, f"{int(mine.fingerprints[index]):x}")
        within = "; ".join(name_ranks(ranks) for ranks in views.values())
        raise RuntimeError(
            f"{name} is not the same on all ranks{mine.since}: it is equal only within {within}"
            f"{more}. Did the ranks start from different values, did something change a parameter "
            "on some of them, or has a bit in memory flipped?"
        )
    if kind == 1:
        views = _views(rank_group, " and ".join(sorted(set(mine.counters[index]))))
        raise RuntimeError(
            f"the parts of {name} have state that differs: {_listed(views)}{more}. Was state "
            "loaded or written on some ranks only, or has a bit in memory flipped?"
        )
    views = _views(rank_group, mine.changes[index])
    raise RuntimeError(
        f"the state of {name} has changed although no step was taken: {_listed(views)}{more}. Has "
        "a bit in memory flipped? If your code writes into the state, let it say so: "
        "optimizer.state = optimizer.state"
    )


def _views(rank_group: RankGroup, mine: str) -> dict[str, list[int]]:
    """What the ranks say, each text with those that say it, without those that say nothing."""
    payload = mine.encode()[:_VIEW_BYTES].ljust(_VIEW_BYTES, b"\0")
    holders: dict[str, list[int]] = {}
    for rank, said in enumerate(rank_group.all_gather_bytes(payload)):
        text = said.rstrip(b"\0").decode(errors="ignore")
        if text:
            holders.setdefault(text, []).append(rank)
    return holders


def _listed(views: dict[str, list[int]]) -> str:
    return "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in views.items())


def _number(text: str) -> int:
    """The same for the same text, in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
