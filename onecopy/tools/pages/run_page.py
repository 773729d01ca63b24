"""The page of a traced run: what was exchanged, what was hidden, who waited."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from onecopy.comm.stats import BucketStats, Cost, Timeline, measured
from onecopy.planning.sizes import MemoryReport
from onecopy.planning.text import in_bytes, in_seconds, plural
from onecopy.tools.models import Failure
from onecopy.tools.pages.charts import (
    Bar,
    Event,
    Slice,
    TimelineRow,
    cards,
    detail_line,
    folded,
    heading,
    html_table,
    in_groups,
    legend,
    memory_scale,
    page,
    paragraph,
    present_stages,
    rank_bars,
    ranks_of,
    section,
    stacked_bars,
    strip,
    timeline_chart,
)

_FILE = re.compile(r"rank-(\d+)\.json")
_HOW = "record one with ONECOPY_TRACE=DIR torchrun ... train.py"


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank has recorded."""

    rank: int
    world_size: int
    is_attached: bool
    classes: tuple[str, ...]
    backend: str
    memory: MemoryReport
    buckets: tuple[BucketStats, ...]  # since the optimizer was built
    timeline: Timeline  # of the traced steps
    costs: Mapping[tuple[str, int | None], Cost]  # of all of them
    zero: float  # microseconds on the clock of its host at the zero of its timeline

    @property
    def begin(self) -> float:
        return self.timeline.start

    @property
    def end(self) -> float:
        """Of the last traced step."""
        return self.timeline.steps[-1].stop

    @property
    def step_time(self) -> float:
        """Microseconds from the end of a step to the end of the next one."""
        return median(step.stop - step.began for step in self.timeline.steps)

    def cost(self, phase: str, bucket: int | None = None) -> Cost:
        """Of a traced step, in the mean; of one bucket, or of all."""
        whole, steps = self.costs.get((phase, bucket), Cost(0.0, 0.0)), len(self.timeline.steps)
        return Cost(whole.exposed / steps, whole.hidden / steps)

    @property
    def exposed(self) -> float:
        """Microseconds of a step."""
        return sum(self.cost(phase).exposed for phase in ("reduce", "gather"))

    @property
    def hidden(self) -> float:
        return sum(self.cost(phase).hidden for phase in ("reduce", "gather"))

    def sent(self) -> dict[tuple[str, int], float]:
        """Bytes each time, by phase and bucket."""
        return {(b.phase, b.bucket): b.bytes / b.times for b in self.buckets if b.times}

    @property
    def sent_per_step(self) -> float:
        return sum(self.sent().values())


@dataclass(frozen=True, slots=True)
class Run:
    """The traces of a run, by rank."""

    traces: tuple[Trace, ...]

    @property
    def world_size(self) -> int:
        return self.traces[0].world_size

    @property
    def phases(self) -> tuple[str, ...]:
        """In the order of a step."""
        present = {each.phase for trace in self.traces for each in trace.buckets}
        return tuple(phase for phase in ("reduce", "gather") if phase in present)

    @property
    def bucket_numbers(self) -> tuple[int, ...]:
        return tuple(sorted({each.bucket for trace in self.traces for each in trace.buckets}))

    @property
    def step_numbers(self) -> tuple[int, ...]:
        return tuple(step.number for step in self.traces[0].timeline.steps)

    @property
    def title(self) -> str:
        """``Steps 3 to 5 on 8 ranks``."""
        first, *_, last = (*self.step_numbers, self.step_numbers[-1])
        steps = f"Step {first}" if first == last else f"Steps {first} to {last}"
        return f"{steps} on {plural(self.world_size, 'rank')}"

    @property
    def is_attached(self) -> bool:
        return self.traces[0].is_attached

    def in_words(self) -> str:
        """What was run: ``AdamW, attached, gloo``."""
        first = self.traces[0]
        mode = "attached" if self.is_attached else "drop-in"
        words = [" and ".join(first.classes), mode, first.backend]
        if len(self.traces) != self.world_size:
            words.append(f"traces of {plural(len(self.traces), 'rank')}")
        return ", ".join(filter(None, words))

    def origins(self) -> tuple[float, ...]:
        """Where the common time axis begins in the time of each trace.

        Clocks of one host agree, and show who waits for whom. Those of several may not: if traces
        that must overlap do not, each rank begins at its own start.
        """
        starts = [trace.zero + trace.begin for trace in self.traces]
        longest = max(trace.end - trace.begin for trace in self.traces)
        if max(starts) - min(starts) > longest:
            return tuple(trace.begin for trace in self.traces)
        return tuple(min(starts) - trace.zero for trace in self.traces)


def read_run(directory: Path) -> Run:
    """All traces in a directory."""
    if not directory.is_dir():
        raise Failure(f"{directory} is no directory of traces: {_HOW}")
    files = {int(m[1]): f for f in directory.iterdir() if (m := _FILE.fullmatch(f.name))}
    if not files:
        raise Failure(f"{directory} holds no traces (rank-0.json, ...): {_HOW}")
    traces = tuple(_read(files[rank]) for rank in sorted(files))
    _require_same_run(directory, traces)
    return Run(traces)


def _require_same_run(directory: Path, traces: Sequence[Trace]) -> None:
    sizes = sorted({trace.world_size for trace in traces})
    steps = {tuple(step.number for step in trace.timeline.steps) for trace in traces}
    if len(sizes) > 1:
        what = f"of {' and '.join(map(str, sizes))} ranks"
    elif len(steps) > 1:
        what = "of different steps"
    else:
        return
    raise Failure(f"{directory} holds traces {what}: empty it, and record one run")


def _read(file: Path) -> Trace:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise Failure(f"{file} cannot be read ({error}): remove it, and record again") from error
    try:
        trace = _understood(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Failure(f"{file} is no trace that onecopy has written: {_HOW}") from error
    if not trace.timeline.steps:
        raise Failure(
            f"{file} holds no whole step: let the run take the steps in ONECOPY_TRACE_STEPS, "
            "3-5 if it is not set"
        )
    return trace


def _understood(content: Mapping[str, Any]) -> Trace:
    facts = content["onecopy"]
    timeline = Timeline.of(content["traceEvents"]).of_steps()
    memory = {str(name): _counted(count) for name, count in facts["memory"].items()}
    return Trace(
        rank=_counted(facts["rank"]),
        world_size=_counted(facts["world_size"]),
        is_attached=bool(facts["is_attached"]),
        classes=tuple(map(str, facts["classes"])),
        backend=str((content.get("distributedInfo") or {}).get("backend", "")),
        memory=MemoryReport.from_dict(memory),
        buckets=tuple(_stats(each) for each in facts["buckets"]),
        timeline=timeline,
        costs=timeline.costs(),
        zero=measured(content.get("baseTimeNanoseconds", 0)) / 1e3,
    )


def _stats(found: Mapping[str, Any]) -> BucketStats:
    phase = str(found["phase"])
    if phase not in ("reduce", "gather"):
        raise ValueError(phase)
    return BucketStats(
        phase,
        _counted(found["bucket"]),
        _counted(found["times"]),
        _counted(found["messages"]),
        _counted(found["bytes"]),
        measured(found["exposed"]),
        measured(found["hidden"]),
    )


def _counted(value: Any) -> int:
    """A number of bytes, messages or ranks. ValueError if nobody can have counted so far."""
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError(value)
    return number


Table = tuple[list[str], list[list[str]]]  # head and rows

_US = 1e-6  # the times of a trace are in microseconds


def rank_table(run: Run) -> Table:
    """Time of a step, and what of it is communication, by rank."""
    head = ["rank", "time of a step"]
    for phase in run.phases:
        head += [f"{phase} exposed", f"{phase} hidden"]
    rows = []
    for trace in run.traces:
        row = [str(trace.rank), in_seconds(trace.step_time * _US)]
        for phase in run.phases:
            cost = trace.cost(phase)
            row += [in_seconds(cost.exposed * _US), in_seconds(cost.hidden * _US)]
        rows.append(row)
    return head, rows


def memory_table(run: Run) -> Table:
    """What each rank holds."""
    head = ["rank", "parameters", "gradients", "state", "master copies", "staging"]
    rows = []
    for trace in run.traces:
        memory = trace.memory
        state = sum(memory.state.values())
        sizes = [memory.parameters, memory.gradients, state, memory.master_copies, memory.staging]
        rows.append([str(trace.rank), *map(in_bytes, (*sizes, memory.ddp_buckets, memory.total))])
    return [*head, "DDP's buckets", "total"], rows


def bucket_table(run: Run) -> Table:
    """What each bucket sends, and what it costs, by phase."""
    head = ["bucket", "sent by the busiest rank", "exposed", "hidden"]
    rows = []
    sent = [trace.sent() for trace in run.traces]
    for bucket in run.bucket_numbers:
        for phase in run.phases:
            costs = [trace.cost(phase, bucket) for trace in run.traces]
            rows.append(
                [
                    f"{phase} {bucket}",
                    in_bytes(max(each.get((phase, bucket), 0) for each in sent)),
                    in_seconds(mean(cost.exposed for cost in costs) * _US),
                    in_seconds(mean(cost.hidden for cost in costs) * _US),
                ]
            )
    return head, rows


_RANKS = 8  # that are drawn
_COMPUTE, _REDUCE, _STEP, _GATHER, _WAIT = 0, 1, 2, 4, 5  # roles of colours
_ROLE = {"reduce": _REDUCE, "gather": _GATHER}
_LEGEND = {
    "reduce": (_REDUCE, "reduce: gradients to their owners"),
    "gather": (_GATHER, "gather: parameters to everybody"),
}
_SECONDS = 1e-6  # the times of a trace are in microseconds


def timeline_section(run: Run) -> str:
    shown = _shown(run)
    entries = [(_COMPUTE, "forward and backward"), (_STEP, "optimizer step")]
    entries += [_LEGEND[phase] for phase in run.phases]
    if run.phases:
        entries.append((_WAIT, "waiting: exposed"))
    origins = {t.rank: origin for t, origin in zip(run.traces, run.origins(), strict=True)}
    length = max((trace.end - origins[trace.rank]) * _SECONDS for trace in shown) or 1.0
    charts = []
    for trace in shown:
        charts.append(heading(f"rank {trace.rank}"))
        charts.append(_chart(trace, run.phases, origins[trace.rank], length))
    return section(
        "Timeline",
        paragraph(_text(run, shown)),
        legend(entries),
        *charts,
        detail_line(
            "timeline-detail", "Choose a mark: click, or focus a timeline and use the arrow keys."
        ),
        long=len(shown) > 3,
    )


def _text(run: Run, shown: list[Trace]) -> str:
    text = (
        "Under way, in pale colours: a bucket has left and nobody has waited for it yet, so it "
        "travels behind computation. Red: training stands still until it has arrived. "
    )
    if len(shown) < len(run.traces):
        text += (
            f"Of {len(run.traces):,} ranks those are shown that waited least and most: who waits "
            "least is waited for. "
        )
    return text


def _shown(run: Run) -> list[Trace]:
    """The ranks that waited most and least."""
    if len(run.traces) <= _RANKS:
        return list(run.traces)
    ordered = sorted(run.traces, key=lambda trace: trace.exposed)
    half = _RANKS // 2
    return sorted([*ordered[:half], *ordered[-half:]], key=lambda trace: trace.rank)


def _chart(trace: Trace, phases: tuple[str, ...], origin: float, length: float) -> str:
    """One rank; ``origin`` is where the axis begins in the time of its trace."""

    def event(start: float, stop: float, role: int, text: str, is_faint: bool = False) -> Event:
        duration = in_seconds((stop - start) * _SECONDS)
        tip = f"rank {trace.rank} · {text} · {duration}"
        at = (start - origin) * _SECONDS
        return Event(at, at + (stop - start) * _SECONDS, role, tip, is_faint)

    spans, steps = trace.timeline.spans, trace.timeline.steps
    computing = [
        event(step.began, step.start, _COMPUTE, f"step {step.number}, forward and backward")
        for step in steps
    ]
    stepping = [
        event(step.start, step.stop, _STEP, f"step {step.number}, optimizer.step()", is_faint=True)
        for step in steps
    ]
    stepping += [
        event(span.start, span.stop, _STEP, f"step of bucket {span.bucket}")
        for span in spans
        if span.phase == "step"
    ]
    lanes = [TimelineRow("compute", tuple(computing)), TimelineRow("step", tuple(stepping))]
    for phase in phases:
        launches = [
            event(span.start, span.stop, _ROLE[phase], f"{phase} {span.bucket}, launched")
            for span in spans
            if span.phase == phase and not span.is_wait
        ]
        lanes.append(TimelineRow(phase, tuple(launches)))
    if phases:
        flights = [
            event(
                each.launch.stop,
                each.wait.start,
                _ROLE[each.launch.phase],
                f"{each.name} under way, hidden",
                is_faint=True,
            )
            for each in trace.timeline.transfers()
            if each.hidden
        ]
        waits = [
            event(span.start, span.stop, _WAIT, f"waited for {span.phase} {span.bucket}")
            for span in spans
            if span.is_wait
        ]
        lanes += [
            TimelineRow("under way", tuple(flights), is_deep=True),
            TimelineRow("wait", tuple(waits)),
        ]
    edges = [(step.stop - origin) * _SECONDS for step in steps[:-1]]
    return timeline_chart(
        f"Timeline of rank {trace.rank}.",
        lanes,
        length=length,
        edges=edges,
        above=_step_strip(trace, origin, length),
        detail="timeline-detail",
    )


def _step_strip(trace: Trace, origin: float, length: float) -> str:
    """Which part of the axis belongs to which step."""
    parts = [("", (trace.begin - origin) * _SECONDS / length)]
    parts += [
        (f"step {step.number}", (step.stop - step.began) * _SECONDS / length)
        for step in trace.timeline.steps
    ]
    parts.append(("", max(0.0, length - (trace.end - origin) * _SECONDS) / length))
    return strip([part for part in parts if part[0] or part[1] > 0])


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
                plural(len(run.bucket_numbers), "bucket")
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
