"""Neighbouring ranks that are put together where there are too many to draw one by one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def in_groups(ranks: Sequence[int], limit: int) -> list[Sequence[int]]:
    """At most ``limit`` groups of neighbours, of nearly equal size.

    >>> in_groups(range(5), 2)
    [range(0, 2), range(2, 5)]
    """
    count = min(len(ranks), limit)
    edges = [len(ranks) * i // count for i in range(count + 1)]
    return [ranks[a:b] for a, b in itertools.pairwise(edges)]


def range_in_words(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"


def ranks_of(ranks: Sequence[int]) -> str:
    """
    >>> ranks_of([3]), ranks_of(range(4, 8))
    ('rank 3', 'ranks 4–7')
    """
    return f"rank{'s' * (len(ranks) > 1)} {range_in_words(ranks)}"
