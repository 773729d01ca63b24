"""Numbers and tables as people read them. Pure text: no colour, the same on a terminal and in a
pipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def in_bytes(count: float) -> str:
    """
    >>> in_bytes(999), in_bytes(16_060_522_496), in_bytes(0)
    ('999 B', '16.1 GB', '0 B')
    """
    return _scaled(count, _UNITS, " ")


def in_short(count: float) -> str:
    """
    >>> in_short(8_030_261_248), in_short(327)
    ('8.03B', '327')
    """
    return _scaled(count, ("", "K", "M", "B", "T"), "", digits=3)


def _scaled(count: float, units: Sequence[str], space: str, digits: int = 3) -> str:
    at = 0
    # Why not 1000: 999.96 would be printed as 1000.
    while abs(count) >= 999.5 and at < len(units) - 1:
        count, at = count / 1000, at + 1
    if at == 0:
        return f"{count:.0f}{space}{units[0]}"
    decimals = max(0, digits - len(str(int(abs(count) + 0.05))))
    return f"{count:.{decimals}f}{space}{units[at]}"


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "step"), plural(0, "backward")
    ('1 step', '0 backwards')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def in_seconds(seconds: float) -> str:
    """
    >>> in_seconds(0.0123), in_seconds(4.2e-5), in_seconds(75)
    ('12.3 ms', '42.0 us', '75.0 s')
    """
    if not seconds:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def counted(number: int, what: str) -> str:
    """
    >>> counted(1, "rank"), counted(16384, "rank")
    ('1 rank', '16,384 ranks')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"


def part_in_words(name: str) -> str:
    """A part of a memory report.

    >>> part_in_words("master_copies"), part_in_words("state/exp_avg")
    ('master copies', 'state: exp_avg')
    """
    return {"ddp_buckets": "DDP's buckets"}.get(name) or name.replace("_copies", " copies").replace(
        "state/", "state: "
    )


def ranks_in_words(ranges: Sequence[tuple[int, int]], world_size: int) -> str:
    """The ranks in ranges (first, last).

    >>> ranks_in_words([(0, 3), (5, 5)], 8), ranks_in_words([(0, 7)], 8)
    ('0-3, 5', 'all')
    """
    if world_size > 1 and list(ranges) == [(0, world_size - 1)]:
        return "all"
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns as wide as they need to be; the first ``left`` of them lean to the left.

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
    """A value in an error: whatever it is, in one line that is not too long.

    >>> shown("x" * 9, longest=5), shown(10**5000)
    ("'xxxx...", 'a value of type int')
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # too deep, too long, or an object that cannot be shown
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= longest else f"{text[:longest]}..."
