"""A chart of what went on when: lanes along a time axis, and marks in them.

The marks of a lane that overlap stand below each other. If there are more than ``LIMIT``,
neighbours are put together, and a mark says what it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil

from onecopy.report.charts import framed
from onecopy.words import in_seconds

LIMIT = 60  # marks of a lane
_DEPTH = 4  # marks below each other
_WIDTH, _LANE, _GAP = 1000, 12, 2  # of the drawing, in units of its own


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took from ``start`` to ``stop``, in seconds on the axis."""

    start: float
    stop: float
    role: int  # which colour
    tip: str
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    events: tuple[Event, ...]
    is_deep: bool = False  # whether they may overlap

    @property
    def height(self) -> int:
        return _LANE * (2 if self.is_deep else 1)


def lanes_chart(
    label: str,
    lanes: Sequence[Lane],
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
        for at in (_WIDTH * edge / length for edge in edges)
    )
    names = "".join(
        f'<span style="flex:{lane.height}">{escape(lane.name)}</span>' for lane in lanes
    )
    content = (
        f'<span></span>{above}<div class="names" aria-hidden="true">{names}</div>'
        f'<div class="plot"><svg viewBox="0 0 {_WIDTH} {full}" preserveAspectRatio="none" '
        f'style="height:{full / 8:g}rem" aria-hidden="true">{lines}{"".join(drawn)}</svg>'
        f'</div><span></span><div class="axis" aria-hidden="true"><span>0</span>'
        f"<span>{in_seconds(length)}</span></div>"
    )
    return framed("map lanes", label, content, detail)


def _box(event: Event, length: float, top: float, height: float) -> str:
    # A sliver that is thinner than a pixel could neither be seen nor be pointed at.
    width = max((event.stop - event.start) / length * _WIDTH, 1.5)
    faint = " faint" if event.is_faint else ""
    return (
        f'<rect class="mark c{event.role}{faint}" x="{event.start / length * _WIDTH:.2f}" '
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
