"""Values, counts and ranks as text, for error messages and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-2, 5".

    >>> name_ranks([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    ordered = sorted(ranks)
    runs = []
    for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        numbers = [rank for _, rank in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(runs)


def in_bytes(count: float) -> str:
    """
    >>> in_bytes(999), in_bytes(16_060_522_496), in_bytes(0)
    ('999 B', '16.1 GB', '0 B')
    """
    return _scaled(count, (" B", " kB", " MB", " GB", " TB", " PB", " EB"))


def in_short(count: float) -> str:
    """
    >>> in_short(8_030_261_248), in_short(327)
    ('8.03B', '327')
    """
    return _scaled(count, ("", "K", "M", "B", "T"))


def _scaled(count: float, units: Sequence[str]) -> str:
    at = 0
    # Why not 1000: 999.96 would be printed as 1000.
    while abs(count) >= 999.5 and at < len(units) - 1:
        count, at = count / 1000, at + 1
    if at == 0:
        return f"{count:.0f}{units[0]}"
    decimals = max(0, 3 - len(str(int(abs(count) + 0.05))))
    return f"{count:.{decimals}f}{units[at]}"


def in_seconds(seconds: float) -> str:
    """
    >>> in_seconds(0.0123), in_seconds(4.2e-5), in_seconds(75), in_seconds(0)
    ('12.3 ms', '42.0 us', '75.0 s', '0 s')
    """
    if not seconds:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "rank"), plural(16384, "rank")
    ('1 rank', '16,384 ranks')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows with aligned columns, of which the first ``left`` are aligned to the left.

    >>> print(table([["a", "1"], ["bcd", "20"]]))
    a      1
    bcd   20
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("   ".join(cells).rstrip())
    return "\n".join(lines)


def shown(value: Any, longest: int = 80) -> str:
    """A value of any type for an error message: one line of limited length.

    >>> shown("x" * 9, longest=5), shown(10**5000)
    ("'xxxx...", 'a value of type int')
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # nested too deeply, too long, or a __repr__ that raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= longest else f"{text[:longest]}..."
