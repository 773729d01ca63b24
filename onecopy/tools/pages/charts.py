"""Parts of a self-contained HTML page, as functions from numbers to markup.

A chart is a box that takes the focus. It holds rows of marks, and each mark carries a text
(``data-tip``) that ``script.js`` shows when it is chosen by pointer or arrow keys. Arguments are
text, which is escaped here, unless they are called ``content`` or ``parts``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from math import ceil

from onecopy.planning.sizes import MemoryReport
from onecopy.planning.text import in_bytes, in_seconds, name_ranks
from onecopy.tools.estimate import Table
from onecopy.version import __version__

# Why: a parameter may be called anything, and must not make a browser load something.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    style, script = (
        files("onecopy.tools.pages").joinpath(name).read_text(encoding="utf-8")
        for name in ("style.css", "script.js")
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="generator" content="onecopy {__version__}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<main id="content">
<header>
<h1>{escape(title)}</h1>
<p class="soft">{escape(subtitle)}</p>
</header>
{chr(10).join(parts)}
<footer>Written by onecopy {__version__}. This file needs no network.</footer>
</main>
<div id="tip" role="presentation" hidden></div>
<script>
{script}</script>
</body>
</html>
"""


def section(title: str, text: str, *parts: str, chosen: str = "", long: bool = False) -> str:
    """``chosen``: what the marks of its charts are. The script writes the text of the chosen mark
    into a line below them; screen readers read it aloud. ``long``: the section may be broken over
    printed pages."""
    kind = ' class="long"' if long else ""
    content = [f"<p>{escape(text)}</p>", *parts]
    if chosen:
        hint = f"Choose {chosen}: click, or focus the chart and use the arrow keys."
        content.append(f'<output class="detail" aria-live="polite">{escape(hint)}</output>')
    return f"<section{kind}>\n<h2>{escape(title)}</h2>\n{chr(10).join(content)}\n</section>"


def heading(text: str) -> str:
    return f'<h3 class="part">{escape(text)}</h3>'


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Key figures: title, figure and remark of each."""
    found = [
        f"<li><span>{escape(what)}</span><b>{escape(figure)}</b><span>{escape(remark)}</span></li>"
        for what, figure, remark in items
    ]
    return f'<ul class="cards">\n{chr(10).join(found)}\n</ul>'


_LISTED = 200  # rows of a table


def folded_table(title: str, content: Table, numbers: Sequence[int]) -> str:
    """A table under its title, to be unfolded. Columns in ``numbers`` are aligned to the right."""
    head, rows = content
    if len(rows) > _LISTED:
        title += f": the first {_LISTED:,} of {len(rows):,} rows"

    def line(tag: str, row: Sequence[str]) -> str:
        scope, cells = ' scope="col"' * (tag == "th"), []
        for at, text in enumerate(row):
            kind = ' class="number"' if at in numbers else ' class="name"' if at == 0 else ""
            cells.append(f"<{tag}{kind}{scope}>{escape(text)}</{tag}>")
        return f"<tr>{''.join(cells)}</tr>"

    body = "\n".join(line("td", row) for row in rows[:_LISTED])
    return (
        f"<details><summary>{escape(title)}</summary>\n"
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(title)}"><table>'
        f"<thead>{line('th', head)}</thead>\n<tbody>\n{body}\n</tbody></table>"
        "</div>\n</details>"
    )


_WIDTH = 1000  # of a drawing, in its own units
# Share of the width that a character takes. A part of a strip that is narrower than its name has
# no name; on a phone, one that is not so many times as wide.
_CHARACTER = 0.0075
_ON_A_PHONE = 3
_SUBROWS = 4  # of a row whose marks overlap
MARKS = 60  # of a row of a timeline


@dataclass(frozen=True, slots=True)
class Mark:
    """A part of a row that can be chosen. ``tip`` says what it is."""

    start: float
    stop: float
    tip: str
    role: int | None = None  # which colour; without one, that of the row
    opacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    marks: Sequence[Mark]
    hue: float = 0.0  # degrees, of the marks without a role
    overlaps: bool = False  # twice as high, and marks that overlap are drawn below each other

    @property
    def height(self) -> int:
        return 24 if self.overlaps else 12


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    parts: Sequence[tuple[float, int, str]]  # size, role and tip
    figure: str  # printed behind the bar
    is_strong: bool = False


def legend(entries: Sequence[tuple[int, str]]) -> str:
    """The colours by role, and what they mean."""
    items = "".join(f'<li><i class="c{role}"></i>{escape(name)}</li>' for role, name in entries)
    return f'<ul class="legend">{items}</ul>'


def stacked_bars(label: str, bars: Sequence[Bar], in_words: Callable[[float], str]) -> str:
    """Horizontal bars on a scale from 0 to the longest; ``in_words`` makes its size text."""
    longest = max((sum(size for size, _, _ in bar.parts) for bar in bars), default=0)
    rows = []
    for bar in bars:
        parts = "".join(
            f'<div class="mark c{role}" style="width:{100 * size / longest:.3f}%" '
            f'data-tip="{escape(tip)}"></div>'
            for size, role, tip in bar.parts
            if size
        )
        strong = ' class="strong"' if bar.is_strong else ""
        rows.append(
            f'<div class="row"><span{strong}>{escape(bar.name)}</span>'
            f'<div class="track">{parts}</div><span{strong}>{escape(bar.figure)}</span></div>'
        )
    rows.append(
        '<div class="scale" aria-hidden="true"><span>0</span>'
        f"<span>{escape(in_words(longest))}</span></div>"
    )
    return _chart("bars", label, "\n".join(rows))


Shares = Sequence[tuple[str, float]]  # names above a chart of rows; the shares add up to 1


def strip(names: Shares) -> str:
    """Each name is as wide as its share."""
    found = []
    for name, share in names:
        needed = (len(name) + 1) * _CHARACTER
        text = escape(name) if share >= needed else ""
        kind = ' class="roomy"' if share >= needed * _ON_A_PHONE else ""
        found.append(f'<span{kind} style="flex:{share:.5f}">{text}</span>')
    return f'<div class="strip" aria-hidden="true">{"".join(found)}</div>'


def ownership_map(label: str, rows: Sequence[Row], names: Shares) -> str:
    """A row for each rank or group of ranks; the marks lie between 0 and 1."""
    height = min(max(len(rows) * 1.5, 3), 30)
    return _chart("map", label, _drawn(rows, 1.0, height, names))


def timeline(
    label: str, rows: Sequence[Row], length: float, edges: Sequence[float], names: Shares
) -> str:
    """``length`` of the axis in seconds; ``edges`` are times that are marked by a line."""
    axis = (
        '<span></span><div class="axis" aria-hidden="true"><span>0</span>'
        f"<span>{in_seconds(length)}</span></div>"
    )
    shown = [replace(row, marks=merged_marks(row.marks)) for row in rows]
    height = sum(row.height for row in rows) / 8
    return _chart("map timeline", label, _drawn(shown, length, height, names, edges) + axis)


def _drawn(
    rows: Sequence[Row], length: float, height: float, names: Shares, edges: Sequence[float] = ()
) -> str:
    """``height`` on the page, in rem."""
    scale = _WIDTH / length
    groups, top = [], 0
    for row in rows:
        subrows = in_subrows(row.marks) if row.overlaps else [row.marks]
        each = (row.height - 2) / max(len(subrows), 1)
        places = [(m, top + 1 + n * each) for n, marks in enumerate(subrows) for m in marks]
        rectangles = []
        for mark, y in sorted(places, key=lambda place: place[0].start):  # for the arrow keys
            # Why: a mark that is narrower than a pixel could neither be seen nor be pointed at.
            width = max((mark.stop - mark.start) * scale, 0.6 if mark.role is None else 1.5)
            kind = "of-row" if mark.role is None else f"c{mark.role}"
            pale = "" if mark.opacity >= 1 else f' fill-opacity="{max(mark.opacity, 0.12):.2f}"'
            rectangles.append(
                f'<rect class="mark {kind}" x="{mark.start * scale:.2f}" y="{y:.2f}" '
                f'width="{width:.2f}" height="{each - 0.4:.2f}"{pale} '
                f'data-tip="{escape(mark.tip)}"/>'
            )
        groups.append(f'<g class="row" style="--h:{row.hue:.0f}">{"".join(rectangles)}</g>')
        top += row.height
    titles = "".join(f'<span style="flex:{row.height}">{escape(row.name)}</span>' for row in rows)
    lines = "".join(
        f'<line class="edge" x1="{at:.2f}" x2="{at:.2f}" y1="0" y2="{top}"/>'
        for at in (edge * scale for edge in edges)
    )
    return (
        f'<span></span>{strip(names)}<div class="names" aria-hidden="true">{titles}</div>'
        f'<div class="plot"><svg viewBox="0 0 {_WIDTH} {top}" preserveAspectRatio="none" '
        f'style="height:{height:g}rem" aria-hidden="true">{lines}{"".join(groups)}</svg></div>'
    )


def merged_marks(marks: Sequence[Mark], limit: int = MARKS) -> list[Mark]:
    """All marks, by their start. If they are more than ``limit``, adjacent ones of one colour are
    merged, but not across a pause, so that there may be some more than ``limit``."""
    ordered = sorted(marks, key=lambda mark: (mark.start, -mark.stop))
    if len(ordered) <= limit:
        return ordered
    most = ceil(len(ordered) / limit)
    pause = (max(mark.stop for mark in ordered) - ordered[0].start) / limit
    groups = [[ordered[0]]]
    for mark in ordered[1:]:
        group = groups[-1]
        is_alike = (mark.role, mark.opacity) == (group[0].role, group[0].opacity)
        if is_alike and len(group) < most and mark.start <= group[-1].stop + pause:
            group.append(mark)
        else:
            groups.append([mark])
    found = []
    for group in groups:
        total = in_seconds(sum(mark.stop - mark.start for mark in group))
        tip = f"{group[0].tip} … {group[-1].tip}: {len(group)} together, {total} in all"
        one = replace(group[0], stop=max(mark.stop for mark in group), tip=tip)
        found.append(one if len(group) > 1 else group[0])
    return found


def in_subrows(marks: Sequence[Mark], limit: int = _SUBROWS) -> list[list[Mark]]:
    """Rows in which nothing overlaps, as long as ``limit`` of them suffice."""
    rows: list[list[Mark]] = []
    for mark in marks:
        free = [row for row in rows if row[-1].stop <= mark.start]
        if free:
            free[0].append(mark)
        elif len(rows) < limit:
            rows.append([mark])
        else:
            min(rows, key=lambda row: row[-1].stop).append(mark)
    return rows


def column_chart(
    title: str,
    figure: str,
    columns: Sequence[tuple[float, str]],
    *,
    top: float,
    role: int,
    ends: Sequence[str],
) -> str:
    """Vertical bars, given by size and tip. ``top`` is the end of the scale; a dashed line marks
    1, the even share."""
    width = _WIDTH / max(len(columns), 1)
    gap = min(width * 0.18, 4)
    bars = "".join(
        f'<rect class="mark c{role}" x="{i * width + gap / 2:.2f}" '
        f'y="{100 * (1 - size / top):.2f}" width="{width - gap:.2f}" '
        f'height="{100 * size / top:.2f}" data-tip="{escape(tip)}"/>'
        for i, (size, tip) in enumerate(columns)
    )
    even = 100 * (1 - 1 / top)
    axis = "".join(f"<span>{escape(end)}</span>" for end in ends)
    content = (
        f'<svg viewBox="0 0 {_WIDTH} 100" preserveAspectRatio="none" aria-hidden="true">'
        f'<g class="row">{bars}</g>'
        f'<line class="even" x1="0" x2="{_WIDTH}" y1="{even:.2f}" y2="{even:.2f}"/></svg>'
    )
    return (
        f'<div class="columns"><h3><span>{escape(title)}</span><span>{escape(figure)}</span></h3>'
        f"{_chart('', f'{title}: {figure}.', content)}"
        f'<div class="axis" aria-hidden="true">{axis}</div></div>'
    )


def _chart(kind: str, label: str, content: str) -> str:
    """``label`` is what a screen reader says of it."""
    return (
        f'<figure><div class="{f"chart {kind}".strip()}" tabindex="0" role="application" '
        f'aria-label="{escape(label)} Arrow keys move between its parts.">\n{content}\n</div>'
        "</figure>"
    )


def in_groups(ranks: Sequence[int], limit: int) -> list[Sequence[int]]:
    """At most ``limit`` groups of adjacent ranks, of nearly equal size.

    >>> in_groups(range(5), 2)
    [range(0, 2), range(2, 5)]
    """
    count = min(len(ranks), limit)
    edges = [len(ranks) * i // count for i in range(count + 1)]
    return [ranks[a:b] for a, b in itertools.pairwise(edges)]


BARS = 8  # of a chart of ranks


def memory_parts(report: MemoryReport) -> dict[str, int]:
    """In the order of a bar; the number of each is its colour."""
    return {
        "parameters": report.parameters,
        "gradients": report.gradients,
        "optimizer state": sum(report.state.values()),
        "master copies": report.master_copies,
        "staging": report.staging,
        "DDP's buckets": report.ddp_buckets,
    }


def memory_section(
    ranks: Sequence[int], report_of: Callable[[int], MemoryReport], text: str, *parts: str
) -> str:
    """A bar for each rank, or for each group of ranks; ``parts`` follow the chart."""
    bars: list[Bar] = []
    names: dict[int, str] = {}
    for group in in_groups(ranks, BARS):
        fullest = max(map(report_of, group), key=lambda report: report.total)
        bars.append(memory_bar(name_ranks(group), fullest))
        present = enumerate(memory_parts(fullest).items())
        names |= {role: name for role, (name, size) in present if size}
    if len(bars) < len(ranks):
        text += " A bar of several ranks shows the fullest of them."
    chart = stacked_bars("Memory of each rank, by what it holds.", bars, in_bytes)
    colours = legend(sorted(names.items()))
    return section("Memory of each rank", text, colours, chart, *parts, chosen="a part of a bar")


def memory_bar(name: str, report: MemoryReport, is_strong: bool = False) -> Bar:
    keys = ", ".join(f"{key} {in_bytes(size)}" for key, size in report.state.items())
    parts = []
    for role, (what, size) in enumerate(memory_parts(report).items()):
        inside = f" ({keys})" if what == "optimizer state" and keys else ""
        share = size / (report.total or 1)
        tip = f"{name}: {what} {in_bytes(size)}{inside}, {share:.0%} of its memory"
        parts.append((size, role, tip))
    return Bar(name, parts, in_bytes(report.total), is_strong)
