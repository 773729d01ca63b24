"""Memory reports as bars: one for each rank, or for ranks that are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onecopy.memory import MemoryReport
from onecopy.report.charts import Bar, Slice
from onecopy.report.grouping import in_groups, ranks_of
from onecopy.words import in_bytes

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
