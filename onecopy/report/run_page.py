"""The page of a traced run: its memory, when it communicated and waited, bytes of each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from onecopy.recorded import Run, Trace
from onecopy.report.charts import Bar, Slice, detail_line, legend, stacked_bars
from onecopy.report.grouping import in_groups, ranks_of
from onecopy.report.memory_bars import memory_scale, present_stages, rank_bars
from onecopy.report.page import cards, folded, html_table, page, paragraph, section
from onecopy.report.run_lanes import timeline_section
from onecopy.report.run_tables import bucket_table, memory_table, rank_table
from onecopy.words import counted, in_bytes, in_seconds

_BARS = 8  # rows of a chart of ranks
_LISTED = 200  # rows of a table
_US = 1e-6
_EXPOSED, _HIDDEN = 5, {"reduce": 1, "gather": 4}  # roles of colours


def run_page(run: Run) -> str:
    """One self-contained page about a traced run."""
    parts = [_key_figures(run), timeline_section(run)]
    if run.phases:
        parts.append(_communication(run))
    return page(
        run.title,
        run.in_words(),
        [*parts, _memory(run), _tables(run)],
    )


# -------------------------------------------------------------------------- key figures, memory


def _key_figures(run: Run) -> str:
    step = median(trace.step_time for trace in run.traces)
    slowest = max(run.traces, key=lambda trace: trace.exposed)
    exposed = slowest.exposed
    hidden = mean(trace.hidden for trace in run.traces)
    fullest = max(run.traces, key=lambda trace: trace.memory.total)
    return cards(
        [
            ("time of a step", in_seconds(step * _US), "under the profiler, median"),
            (
                "exposed, of a step",
                in_seconds(exposed * _US),
                f"{exposed / (slowest.step_time or 1):.0%} of it, on rank {slowest.rank}",
            ),
            ("hidden, of a step", in_seconds(hidden * _US), "at most; mean of the ranks"),
            (
                "sent per rank and step" if run.is_attached else "sent by the optimizer",
                in_bytes(max(trace.sent_per_step for trace in run.traces)),
                counted(len(run.bucket_numbers), "bucket")
                + ("" if run.is_attached else "; DDP's all-reduce not counted"),
            ),
            (
                "on the fullest rank",
                in_bytes(fullest.memory.total),
                f"rank {fullest.rank}; activations not counted",
            ),
        ]
    )


def _memory(run: Run) -> str:
    reports = {trace.rank: trace.memory for trace in run.traces}
    bars = rank_bars(list(reports), reports.__getitem__)
    text = "What each rank held after the last traced step. " + (
        "Of ranks that are put together, the fullest is shown. " * (len(bars) < len(reports))
    )
    return section(
        "Memory of each rank",
        paragraph(text),
        legend(present_stages(bars)),
        stacked_bars(
            "Memory of each rank, by what it holds.", bars, memory_scale(bars), "memory-detail"
        ),
        detail_line("memory-detail", "Choose a part of a bar: click, or use the arrow keys."),
    )


# -------------------------------------------------------------------------- communication


def _communication(run: Run) -> str:
    traces = {trace.rank: trace for trace in run.traces}
    bars = []
    for ranks in in_groups(list(traces), _BARS):
        most = max((traces[rank] for rank in ranks), key=lambda trace: trace.exposed)
        bars.append(_cost_bar(ranks_of(ranks), most, run.phases))
    entries = [(_EXPOSED, "exposed")]
    entries += [(_HIDDEN[phase], f"hidden: {phase}") for phase in run.phases]
    text = (
        "Of a step, in the mean. Exposed: packing, launching, waiting and unpacking, while "
        "training stands still; this is the figure behind the bar. Hidden: under way while "
        "training went on, at most; however many buckets are, a moment counts once. "
    )
    text += "Of ranks that are put together, the most exposed is shown. " * (
        len(bars) < len(traces)
    )
    longest = max(bar.size for bar in bars)
    return section(
        "Exposed and hidden communication",
        paragraph(text),
        legend(entries),
        stacked_bars(
            "Communication of each rank.", bars, ("0", in_seconds(longest)), "communication-detail"
        ),
        detail_line(
            "communication-detail", "Choose a part of a bar: click, or use the arrow keys."
        ),
    )


def _cost_bar(name: str, trace: Trace, phases: Sequence[str]) -> Bar:
    exposed: list[Slice] = []
    hidden: list[Slice] = []
    for phase in phases:
        cost = trace.cost(phase)
        for slices, what, time, role in (
            (exposed, "exposed", cost.exposed, _EXPOSED),
            (hidden, "hidden", cost.hidden, _HIDDEN[phase]),
        ):
            tip = f"{name}: {phase}, {what} {in_seconds(time * _US)} of a step"
            slices.append(Slice(time * _US, role, tip))
    return Bar(name, (*exposed, *hidden), in_seconds(trace.exposed * _US))


# -------------------------------------------------------------------------- tables


def _tables(run: Run) -> str:
    found = [
        ("By bucket, each time", "Buckets", bucket_table(run)),
        ("By rank, each step", "Communication by rank", rank_table(run)),
        ("By rank, memory", "Memory by rank", memory_table(run)),
    ]
    parts = []
    for title, caption, (head, rows) in found:
        cut = f": the first {_LISTED:,} of {len(rows):,} rows" if len(rows) > _LISTED else ""
        table = html_table(caption, head, rows[:_LISTED], numbers=range(1, len(head)))
        parts.append(folded(title + cut, table))
    text = "Times of buckets are means over the ranks. Bytes are counted, not estimated."
    return section("In numbers", paragraph(text), *parts, long=True)
