"""Charts as pure functions from numbers to markup.

A chart is a box that takes the focus. In it are rows, in the rows marks, and what a mark says is
its ``tip``. The script needs to know no more to show it on hover, on click and by arrow keys.
Lengths are relative, so that a chart fits a phone, a screen and paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 1000  # of a drawing, in units of its own
# Of the width that a letter takes: narrower parts of a strip go without their name, ...
_LETTER = 0.0075
_ON_A_PHONE = 3  # ... and on a phone all that are not so many times as wide
_ROW = 10


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a bar."""

    size: float
    role: int  # which colour
    tip: str


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    slices: tuple[Slice, ...]
    figure: str  # what stands behind it
    is_strong: bool = False

    @property
    def size(self) -> float:
        return sum(part.size for part in self.slices)


@dataclass(frozen=True, slots=True)
class Mark:
    """A rectangle in a map: from ``start`` to ``stop``, both between 0 and 1."""

    start: float
    stop: float
    tip: str
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class MapRow:
    name: str
    hue: float  # degrees
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Column:
    size: float
    tip: str


def legend(entries: Sequence[tuple[int, str]]) -> str:
    """The colours by role, and what they mean."""
    items = "".join(f'<li><i class="c{role}"></i>{escape(name)}</li>' for role, name in entries)
    return f'<ul class="legend">{items}</ul>'


def stacked_bars(label: str, bars: Sequence[Bar], ends: tuple[str, str], detail: str) -> str:
    """Horizontal bars on a scale from 0 to the longest, which ``ends`` name. ``detail``: the id of
    the line in which the script tells what was chosen."""
    longest = max((bar.size for bar in bars), default=0) or 1
    rows = []
    for bar in bars:
        parts = "".join(
            f'<div class="mark c{part.role}" style="width:{100 * part.size / longest:.3f}%" '
            f'data-tip="{escape(part.tip)}"></div>'
            for part in bar.slices
            if part.size
        )
        strong = ' class="strong"' if bar.is_strong else ""
        rows.append(
            f'<div class="row"><span{strong}>{escape(bar.name)}</span>'
            f'<div class="track">{parts}</div><span{strong}>{escape(bar.figure)}</span></div>'
        )
    axis = "".join(f"<span>{escape(end)}</span>" for end in ends)
    rows.append(f'<div class="scale" aria-hidden="true">{axis}</div>')
    return framed("bars", label, "\n".join(rows), detail)


def strip(parts: Sequence[tuple[str, float]]) -> str:
    """Names above a map, each as wide as what it stands for; the shares add up to 1."""
    found = []
    for name, share in parts:
        needed = (len(name) + 1) * _LETTER
        text = escape(name) if share >= needed else ""
        kind = ' class="roomy"' if share >= needed * _ON_A_PHONE else ""
        found.append(f'<span{kind} style="flex:{share:.5f}">{text}</span>')
    return f'<div class="strip" aria-hidden="true">{"".join(found)}</div>'


def ownership_map(label: str, rows: Sequence[MapRow], above: str, detail: str) -> str:
    """A row for each rank (or some of them), and in it what it owns along the parameters."""
    drawn = []
    for number, row in enumerate(rows):
        marks = "".join(_rectangle(mark, number) for mark in row.marks)
        drawn.append(f'<g class="row" style="--h:{row.hue:.0f}">{marks}</g>')
    height = min(max(len(rows) * 1.5, 3), 30)
    names = "".join(f"<span>{escape(row.name)}</span>" for row in rows)
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {len(rows) * _ROW}" preserveAspectRatio="none" '
        f'style="height:{height:g}rem" aria-hidden="true">{"".join(drawn)}</svg>'
    )
    content = (
        f'<span></span>{above}<div class="names" aria-hidden="true">{names}</div>'
        f'<div class="plot">{svg}</div>'
    )
    return framed("map", label, content, detail)


def column_chart(
    title: str,
    figure: str,
    columns: Sequence[Column],
    *,
    top: float,
    role: int,
    ends: Sequence[str],
    detail: str,
) -> str:
    """Vertical bars of which 1 is an even share, marked by a dashed line; ``top`` is the scale."""
    width = _WIDTH / max(len(columns), 1)
    gap = min(width * 0.18, 4)
    bars = "".join(
        f'<rect class="mark c{role}" x="{i * width + gap / 2:.2f}" '
        f'y="{100 * (1 - column.size / top):.2f}" width="{width - gap:.2f}" '
        f'height="{100 * column.size / top:.2f}" data-tip="{escape(column.tip)}"/>'
        for i, column in enumerate(columns)
    )
    even = 100 * (1 - 1 / top)
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} 100" preserveAspectRatio="none" aria-hidden="true">'
        f'<g class="row">{bars}</g>'
        f'<line class="even" x1="0" x2="{_WIDTH}" y1="{even:.2f}" y2="{even:.2f}"/></svg>'
    )
    axis = "".join(f"<span>{escape(end)}</span>" for end in ends)
    head = f"<h3><span>{escape(title)}</span><span>{escape(figure)}</span></h3>"
    return (
        f'<div class="columns">{head}'
        f'<div class="chart" tabindex="0" role="application" aria-label="{escape(title)}: '
        f'{escape(figure)}. Arrow keys move between ranks." data-detail="{detail}">{svg}</div>'
        f'<div class="axis" aria-hidden="true">{axis}</div></div>'
    )


def detail_line(name: str, hint: str) -> str:
    """Where the script writes what a chosen mark says; a screen reader reads it aloud."""
    return f'<output class="detail" id="{name}" aria-live="polite">{escape(hint)}</output>'


def framed(kind: str, label: str, content: str, detail: str) -> str:
    """A chart: a box that takes the focus. ``label`` is what a screen reader says of it."""
    return (
        f'<figure><div class="chart {kind}" tabindex="0" role="application" '
        f'aria-label="{escape(label)} Arrow keys move between its parts." data-detail="{detail}">\n'
        f"{content}\n</div></figure>"
    )


def _rectangle(mark: Mark, row: int) -> str:
    # A sliver that is thinner than a pixel could neither be seen nor be pointed at.
    width = max((mark.stop - mark.start) * _WIDTH, 0.6)
    strength = "" if mark.strength >= 1 else f' opacity="{max(mark.strength, 0.12):.2f}"'
    return (
        f'<rect class="mark piece" x="{mark.start * _WIDTH:.2f}" y="{row * _ROW}" '
        f'width="{width:.2f}" height="{_ROW - 1}"{strength} data-tip="{escape(mark.tip)}"/>'
    )
