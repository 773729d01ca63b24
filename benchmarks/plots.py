"""Results as pictures: two panels of horizontal bars in one SVG, for light and dark pages.

Written by hand, without a plotting library, so that the same numbers give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from results import Row, Table

MB = 10**6

_ROW, _BAR, _TOP = 24, 12, 58
_NAMES, _PANEL, _GAP, _END = 232, 320, 66, 46

_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f; }
  .small { font-size: 11px; fill: #57606a; }
  .head { font-weight: 600; }
  .axis { stroke: #d0d7de; }
  .one { stroke: #57606a; stroke-dasharray: 3 3; }
  .spread { stroke: #24292f; stroke-width: 1.5; }
  .peer { fill: #8c959f; }
  .ours { fill: #1f7a5c; }
  .reference { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .small { fill: #9198a1; }
    .axis { stroke: #3d444d; }
    .one { stroke: #9198a1; }
    .spread { stroke: #e6edf3; }
    .peer { fill: #656c76; }
    .ours { fill: #3fb68b; }
    .reference { fill: #9198a1; }
  }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    value: float
    label: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    bars: Sequence[Bar]
    mark: float | None = None  # a dashed line, "as much as DDP"

    @property
    def longest(self) -> float:
        return 1.05 * max([bar.high or bar.value for bar in self.bars] + [self.mark or 0.0])


def picture(table: Table) -> str:
    """Step time and peak memory of all methods that ran; shorter is better."""
    rows = [row for row in table.rows if row.of_ddp is not None]
    times = [
        Bar(row.of_ddp.middle, f"{row.of_ddp.middle:.2f}", row.of_ddp.low, row.of_ddp.high)
        for row in rows
        if row.of_ddp is not None
    ]
    peaks = [Bar(row.peak / MB, f"{row.peak / MB:.0f}") for row in rows]
    panels = [
        Panel("time of a step / DDP's, and quartiles", times, mark=1.0),
        Panel("peak memory of a rank, MB", peaks, mark=_of_ddp(rows)),
    ]
    return _svg(table.heading, rows, panels)


def _of_ddp(rows: Sequence[Row]) -> float | None:
    return next((row.peak / MB for row in rows if row.method == "DDP"), None)


def _svg(title: str, rows: Sequence[Row], panels: Sequence[Panel]) -> str:
    width = _NAMES + len(panels) * _PANEL + (len(panels) - 1) * _GAP + _END
    height = _TOP + _ROW * len(rows) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<text x="0" y="16" class="head">{escape(title)}</text>',
    ]
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number + _BAR
        weight = ' class="head"' if row.method.startswith("onecopy") else ""
        parts.append(
            f'<text x="{_NAMES - 10}" y="{y}" text-anchor="end"{weight}>{escape(row.method)}</text>'
        )
    for number, panel in enumerate(panels):
        parts += _panel(panel, rows, _NAMES + number * (_PANEL + _GAP))
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, rows: Sequence[Row], left: int) -> list[str]:
    scale = _PANEL / panel.longest if panel.longest else 0.0
    bottom = _TOP + _ROW * len(rows)
    parts = [
        f'<text x="{left}" y="40" class="small">{escape(panel.title)}</text>',
        f'<line class="axis" x1="{left}" x2="{left}" y1="{_TOP - 6}" y2="{bottom}"/>',
    ]
    for number, (row, bar) in enumerate(zip(rows, panel.bars, strict=True)):
        y = _TOP + _ROW * number
        length = bar.value * scale
        end = (bar.high or bar.value) * scale
        parts.append(
            f'<rect class="{_kind(row)}" x="{left}" y="{y}" width="{length:.1f}" '
            f'height="{_BAR + 2}" rx="2"><title>{escape(row.method)}: {bar.label}</title></rect>'
        )
        if bar.low is not None and bar.high is not None:
            middle = y + _BAR // 2 + 1
            parts.append(
                f'<line class="spread" x1="{left + bar.low * scale:.1f}" '
                f'x2="{left + bar.high * scale:.1f}" y1="{middle}" y2="{middle}"/>'
            )
        parts.append(
            f'<text class="small" x="{left + max(length, end) + 6:.1f}" y="{y + _BAR}">'
            f"{bar.label}</text>"
        )
    if panel.mark is not None:
        x = left + panel.mark * scale
        parts.append(f'<line class="one" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom}"/>')
    return parts


def _kind(row: Row) -> str:
    if row.method.startswith("onecopy"):
        return "ours"
    return "reference" if row.method == "DDP" else "peer"
