"""A self-contained HTML page: skeleton, bars, maps and tables, made from numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from math import ceil

from onecopy.planning.sizes import MemoryReport
from onecopy.planning.text import in_bytes, in_seconds
from onecopy.version import __version__

# A browser will not load anything from elsewhere, whatever a parameter may be called.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    """A whole page. ``parts`` is markup; title and subtitle are text."""
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
{_resource("style.css")}</style>
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
{_resource("script.js")}</script>
</body>
</html>
"""


def section(title: str, *parts: str, long: bool = False) -> str:
    """A titled part of a page; ``long``: it may be broken over printed pages."""
    kind = ' class="long"' if long else ""
    return f"<section{kind}>\n<h2>{escape(title)}</h2>\n{chr(10).join(parts)}\n</section>"


def heading(text: str) -> str:
    """Of a part of a section."""
    return f'<h3 class="part">{escape(text)}</h3>'


def paragraph(text: str, soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f"<p{kind}>{escape(text)}</p>"


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Key figures: what, how much, and what that means."""
    found = [
        f"<li><span>{escape(what)}</span><b>{escape(figure)}</b><span>{escape(note)}</span></li>"
        for what, figure, note in items
    ]
    return f'<ul class="cards">\n{chr(10).join(found)}\n</ul>'


def folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>"


def html_table(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    """A table; the columns in ``numbers`` lean to the right."""

    def cell(tag: str, at: int, text: str) -> str:
        kind = ' class="number"' if at in numbers else ' class="name"' if at == 0 else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{kind}{scope}>{escape(text)}</{tag}>"

    def line(tag: str, row: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, at, text) for at, text in enumerate(row))}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<thead>{line('th', head)}</thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _resource(name: str) -> str:
    return files("onecopy.tools.pages").joinpath(name).read_text(encoding="utf-8")


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


_BARS = 8  # rows of a chart of ranks

_STAGES = (  # the parts of a report, in the order of a bar
    ("parameters", 0),
    ("gradients", 1),
    ("optimizer state", 2),
    ("master copies", 3),
    ("staging", 4),
    ("DDP's buckets", 5),
)


def rank_bars(ranks: Sequence[int], report_of: Callable[[int], MemoryReport]) -> list[Bar]:
    """A bar for each rank; of ranks that are put together, that of the fullest."""
    bars = []
    for together in in_groups(ranks, _BARS):
        fullest = max(map(report_of, together), key=lambda report: report.total)
        bars.append(memory_bar(ranks_of(together), fullest))
    return bars


def memory_bar(name: str, report: MemoryReport, strong: bool = False) -> Bar:
    keys = ", ".join(f"{key} {in_bytes(size)}" for key, size in report.state.items())
    sizes = (
        report.parameters,
        report.gradients,
        sum(report.state.values()),
        report.master_copies,
        report.staging,
        report.ddp_buckets,
    )
    slices = []
    for (what, role), size in zip(_STAGES, sizes, strict=True):
        inside = f" ({keys})" if what == "optimizer state" and keys else ""
        share = size / (report.total or 1)
        tip = f"{name}: {what} {in_bytes(size)}{inside}, {share:.0%} of its memory"
        slices.append(Slice(size, role, tip))
    return Bar(name, tuple(slices), in_bytes(report.total), strong)


def present_stages(bars: Sequence[Bar]) -> list[tuple[int, str]]:
    """For the legend: the parts that any of the bars has."""
    roles = {part.role for bar in bars for part in bar.slices if part.size}
    return [(role, name) for name, role in _STAGES if role in roles]


def memory_scale(bars: Sequence[Bar]) -> tuple[str, str]:
    return "0", in_bytes(max(bar.size for bar in bars))


LIMIT = 60  # marks of a lane
_DEPTH = 4  # marks below each other
_CHART_WIDTH, _LANE, _GAP = 1000, 12, 2  # of the drawing, in units of its own


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took from ``start`` to ``stop``, in seconds on the axis."""

    start: float
    stop: float
    role: int  # which colour
    tip: str
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class TimelineRow:
    name: str
    events: tuple[Event, ...]
    is_deep: bool = False  # whether they may overlap

    @property
    def height(self) -> int:
        return _LANE * (2 if self.is_deep else 1)


def timeline_chart(
    label: str,
    lanes: Sequence[TimelineRow],
    length: float,
    edges: Sequence[float],
    above: str,
    detail: str,
) -> str:
    """``length`` of the axis in seconds; ``edges`` are times to mark; ``above`` is a strip."""
    drawn, full = [], 0
    for lane in lanes:
        top = full + _GAP / 2
        full += lane.height
        rows = in_rows(together(lane.events)) if lane.is_deep else [together(lane.events)]
        height = (lane.height - _GAP) / max(len(rows), 1)
        marks = [(event, top + at * height) for at, row in enumerate(rows) for event in row]
        marks.sort(key=lambda mark: mark[0].start)  # the order of the arrow keys
        boxes = "".join(_box(event, length, y, height) for event, y in marks)
        drawn.append(f'<g class="row">{boxes}</g>')
    lines = "".join(
        f'<line class="edge" x1="{at:.2f}" x2="{at:.2f}" y1="0" y2="{full}"/>'
        for at in (_CHART_WIDTH * edge / length for edge in edges)
    )
    names = "".join(
        f'<span style="flex:{lane.height}">{escape(lane.name)}</span>' for lane in lanes
    )
    content = (
        f'<span></span>{above}<div class="names" aria-hidden="true">{names}</div>'
        f'<div class="plot"><svg viewBox="0 0 {_CHART_WIDTH} {full}" preserveAspectRatio="none" '
        f'style="height:{full / 8:g}rem" aria-hidden="true">{lines}{"".join(drawn)}</svg>'
        f'</div><span></span><div class="axis" aria-hidden="true"><span>0</span>'
        f"<span>{in_seconds(length)}</span></div>"
    )
    return framed("map lanes", label, content, detail)


def _box(event: Event, length: float, top: float, height: float) -> str:
    # A sliver that is thinner than a pixel could neither be seen nor be pointed at.
    width = max((event.stop - event.start) / length * _CHART_WIDTH, 1.5)
    faint = " faint" if event.is_faint else ""
    return (
        f'<rect class="mark c{event.role}{faint}" x="{event.start / length * _CHART_WIDTH:.2f}" '
        f'y="{top:.2f}" width="{width:.2f}" height="{height - 0.4:.2f}" '
        f'data-tip="{escape(event.tip)}"/>'
    )


def together(events: Sequence[Event], limit: int = LIMIT) -> list[Event]:
    """All events, or if they are more than ``limit``, neighbours put together: those of a kind, and
    not across a pause, for which there may be some marks more."""
    ordered = sorted(events, key=lambda event: (event.start, -event.stop))
    if len(ordered) <= limit:
        return ordered
    most = ceil(len(ordered) / limit)
    pause = (max(event.stop for event in ordered) - ordered[0].start) / limit
    groups = [[ordered[0]]]
    for event in ordered[1:]:
        group = groups[-1]
        is_of_a_kind = (event.role, event.is_faint) == (group[0].role, group[0].is_faint)
        if is_of_a_kind and len(group) < most and event.start <= group[-1].stop + pause:
            group.append(event)
        else:
            groups.append([event])
    return [_merged(group) for group in groups]


def _merged(events: Sequence[Event]) -> Event:
    first, last = events[0], events[-1]
    if first is last:
        return first
    total = sum(event.stop - event.start for event in events)
    tip = f"{first.tip} … {last.tip}: {len(events)} together, {in_seconds(total)} in all"
    stop = max(event.stop for event in events)
    return Event(first.start, stop, first.role, tip, first.is_faint)


def in_rows(events: Sequence[Event], depth: int = _DEPTH) -> list[list[Event]]:
    """Rows in which nothing overlaps, as long as ``depth`` of them suffice."""
    rows: list[list[Event]] = []
    for event in events:
        free = [row for row in rows if row[-1].stop <= event.start]
        if free:
            free[0].append(event)
        elif len(rows) < depth:
            rows.append([event])
        else:
            min(rows, key=lambda row: row[-1].stop).append(event)
    return rows
