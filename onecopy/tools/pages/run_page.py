"""The page of a traced run: what was exchanged, what was hidden, who waited."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from onecopy.comm.stats import Cost, Timeline, measured, phase_named
from onecopy.planning.sizes import MemoryReport
from onecopy.planning.text import in_bytes, in_seconds, name_ranks, plural
from onecopy.tools.estimate import Table
from onecopy.tools.models import Failure
from onecopy.tools.pages import charts
from onecopy.tools.pages.charts import Bar, Mark, Row

_FILE = re.compile(r"rank-(\d+)\.json")
_HOW = "record one with ONECOPY_TRACE=DIR torchrun ... train.py"
_US = 1e-6  # the times of a trace are in microseconds
_TIMELINES = 8  # at most
_PALE = 0.38  # opacity

# Roles of colours.
_COMPUTE, _STEP, _EXPOSED = 0, 2, 5
_ROLE = {"reduce_scatter": 1, "all_gather": 4}  # by phase, in the order of a step
_MEANING = {"reduce_scatter": "gradients to their owners", "all_gather": "parameters to all ranks"}


def _time(microseconds: float) -> str:
    return in_seconds(microseconds * _US)


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank has recorded."""

    rank: int
    world_size: int
    is_attached: bool
    classes: tuple[str, ...]
    backend: str
    memory: MemoryReport
    sent: Mapping[tuple[str, int], float]  # bytes each time, by phase and bucket
    timeline: Timeline  # of the traced steps; it ends with the last of them
    costs: Mapping[tuple[str, int | None], Cost]  # of all of them
    zero: float  # microseconds on the clock of its host at the zero of its timeline

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
        """Microseconds of a step, of all phases."""
        return sum(self.cost(phase).exposed for phase in _ROLE)

    @property
    def hidden(self) -> float:
        return sum(self.cost(phase).hidden for phase in _ROLE)


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
        present = {phase for trace in self.traces for phase, _ in trace.sent}
        return tuple(phase for phase in _ROLE if phase in present)

    @property
    def bucket_numbers(self) -> tuple[int, ...]:
        return tuple(sorted({bucket for trace in self.traces for _, bucket in trace.sent}))

    @property
    def title(self) -> str:
        """``Steps 3 to 5 on 8 ranks``."""
        recorded = self.traces[0].timeline.steps
        first, last = recorded[0].number, recorded[-1].number
        steps = f"Step {first}" if first == last else f"Steps {first} to {last}"
        return f"{steps} on {plural(self.world_size, 'rank')}"

    def in_words(self) -> str:
        """What was run: ``AdamW, attached, gloo``."""
        first = self.traces[0]
        mode = "attached" if first.is_attached else "drop-in"
        words = [" and ".join(first.classes), mode, first.backend]
        if len(self.traces) != self.world_size:
            words.append(f"traces of {plural(len(self.traces), 'rank')}")
        return ", ".join(filter(None, words))

    def origins(self) -> tuple[float, ...]:
        """The start of the common time axis, in the time of each trace.

        The clocks of one host agree and show who waits for whom. Those of several hosts may not:
        if traces that must overlap do not, the axis of each rank starts with its own trace.
        """
        lines = [trace.timeline for trace in self.traces]
        starts = [trace.zero + trace.timeline.start for trace in self.traces]
        if max(starts) - min(starts) > max(line.stop - line.start for line in lines):
            return tuple(line.start for line in lines)
        return tuple(min(starts) - trace.zero for trace in self.traces)


def read_run(directory: Path) -> Run:
    """All traces in a directory."""
    if not directory.is_dir():
        raise Failure(f"{directory} is no directory of traces: {_HOW}")
    files = {int(m[1]): f for f in directory.iterdir() if (m := _FILE.fullmatch(f.name))}
    if not files:
        raise Failure(f"{directory} holds no traces (rank-0.json, ...): {_HOW}")
    traces = tuple(_read(files[rank]) for rank in sorted(files))
    sizes = sorted({trace.world_size for trace in traces})
    steps = {tuple(step.number for step in trace.timeline.steps) for trace in traces}
    if len(sizes) > 1 or len(steps) > 1:
        differ = f"{' and '.join(map(str, sizes))} ranks" if len(sizes) > 1 else "different steps"
        raise Failure(f"{directory} holds traces of {differ}: empty it, and record one run")
    return Run(traces)


def _read(file: Path) -> Trace:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise Failure(f"{file} cannot be read ({error}): remove it, and record again") from error
    try:
        trace = parse_trace(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Failure(f"{file} is no trace that onecopy has written: {_HOW}") from error
    if not trace.timeline.steps:
        raise Failure(
            f"{file} holds no whole step: let the run take the steps in ONECOPY_TRACE_STEPS, "
            "3-5 if it is not set"
        )
    return trace


def parse_trace(content: Mapping[str, Any]) -> Trace:
    facts = content["onecopy"]
    steps = Timeline.of(content["traceEvents"]).of_steps()
    memory = {str(name): _counted(count) for name, count in facts["memory"].items()}
    return Trace(
        rank=_counted(facts["rank"]),
        world_size=_counted(facts["world_size"]),
        is_attached=bool(facts["is_attached"]),
        classes=tuple(map(str, facts["classes"])),
        backend=str((content.get("distributedInfo") or {}).get("backend", "")),
        memory=MemoryReport.from_dict(memory),
        sent=dict(map(_sent, facts["buckets"])),
        timeline=steps,
        costs=steps.costs(),
        zero=measured(content.get("baseTimeNanoseconds", 0)) / 1e3,
    )


def _sent(found: Mapping[str, Any]) -> tuple[tuple[str, int], float]:
    phase = phase_named(str(found["phase"]))
    if phase not in _ROLE:
        raise ValueError(phase)
    bucket, times, sent = (_counted(found[name]) for name in ("bucket", "times", "bytes"))
    return (phase, bucket), sent / max(times, 1)


def _counted(value: Any) -> int:
    """A number of bytes, messages or ranks. ValueError if it is negative or too large."""
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError(value)
    return number


# ------------------------------------------------------------------ tables


def rank_table(run: Run) -> Table:
    """Time of a step, and what of it is communication, by rank."""
    head = ["rank", "time of a step"]
    for phase in run.phases:
        head += [f"{phase} exposed", f"{phase} hidden"]
    rows = []
    for trace in run.traces:
        costs = [trace.cost(phase) for phase in run.phases]
        times = [time for cost in costs for time in (cost.exposed, cost.hidden)]
        rows.append([str(trace.rank), *map(_time, (trace.step_time, *times))])
    return head, rows


def memory_table(run: Run) -> Table:
    """What each rank holds."""
    rows = []
    for trace in run.traces:
        sizes = (*charts.memory_parts(trace.memory).values(), trace.memory.total)
        rows.append([str(trace.rank), *map(in_bytes, sizes)])
    return ["rank", *charts.memory_parts(run.traces[0].memory), "total"], rows


def bucket_table(run: Run) -> Table:
    """What each bucket sends, and what it costs, by phase."""
    rows = []
    for bucket in run.bucket_numbers:
        for phase in run.phases:
            costs = [trace.cost(phase, bucket) for trace in run.traces]
            most = max(trace.sent.get((phase, bucket), 0) for trace in run.traces)
            exposed = mean(cost.exposed for cost in costs)
            hidden = mean(cost.hidden for cost in costs)
            rows.append([f"{phase} {bucket}", in_bytes(most), _time(exposed), _time(hidden)])
    return ["bucket", "sent by the busiest rank", "exposed", "hidden"], rows


# ------------------------------------------------------------------ the page


def run_page(run: Run) -> str:
    """One self-contained page about a traced run."""
    reports = {trace.rank: trace.memory for trace in run.traces}
    text = "What each rank held after the last traced step."
    memory = charts.memory_section(list(reports), reports.__getitem__, text)
    communication = [_communication(run)] if run.phases else []
    parts = [_key_figures(run), _timelines(run), *communication, memory, _tables(run)]
    return charts.page(run.title, run.in_words(), parts)


def _key_figures(run: Run) -> str:
    slowest = max(run.traces, key=lambda trace: trace.exposed)
    fullest = max(run.traces, key=lambda trace: trace.memory.total)
    share = f"{slowest.exposed / (slowest.step_time or 1):.0%} of it, on rank {slowest.rank}"
    time = _time(median(trace.step_time for trace in run.traces))
    hidden = _time(mean(trace.hidden for trace in run.traces))
    what, remark = "sent per rank and step", plural(len(run.bucket_numbers), "bucket")
    if not run.traces[0].is_attached:
        what, remark = "sent by the optimizer", f"{remark}; DDP's all-reduce not counted"
    sent = in_bytes(max(sum(trace.sent.values()) for trace in run.traces))
    full = f"rank {fullest.rank}; activations not counted"
    return charts.cards(
        [
            ("time of a step", time, "under the profiler, median"),
            ("exposed, of a step", _time(slowest.exposed), share),
            ("hidden, of a step", hidden, "at most; mean of the ranks"),
            (what, sent, remark),
            ("on the fullest rank", in_bytes(fullest.memory.total), full),
        ]
    )


def _communication(run: Run) -> str:
    bars = []
    groups = charts.in_groups(range(len(run.traces)), charts.BARS)
    for group in groups:
        ranks = name_ranks(run.traces[number].rank for number in group)
        trace = max((run.traces[number] for number in group), key=lambda each: each.exposed)
        costs = [(phase, trace.cost(phase)) for phase in run.phases]
        shown = [(_EXPOSED, phase, "exposed", cost.exposed) for phase, cost in costs]
        shown += [(_ROLE[phase], phase, "hidden", cost.hidden) for phase, cost in costs]
        parts = [
            (time, role, f"{ranks}: {phase}, {what} {_time(time)} of a step")
            for role, phase, what, time in shown
        ]
        bars.append(Bar(ranks, parts, _time(trace.exposed)))
    text = (
        "Of a step, in the mean. Exposed: packing, launching, waiting and unpacking, while "
        "training stands still; this is the figure behind the bar. Hidden: under way while "
        "training went on, at most; however many buckets are, a moment counts once."
    )
    if len(bars) < len(run.traces):
        text += " A bar of several ranks shows the most exposed of them."
    colours = [(_EXPOSED, "exposed"), *((_ROLE[each], f"hidden: {each}") for each in run.phases)]
    chart = charts.stacked_bars("Communication of each rank.", bars, _time)
    title = "Exposed and hidden communication"
    return charts.section(title, text, charts.legend(colours), chart, chosen="a part of a bar")


def _tables(run: Run) -> str:
    tables = [
        charts.folded_table(title, found, numbers=range(1, len(found[0])))
        for title, found in (
            ("By bucket, each time", bucket_table(run)),
            ("By rank, each step", rank_table(run)),
            ("By rank, memory", memory_table(run)),
        )
    ]
    text = "Times of buckets are means over the ranks. Bytes are counted, not estimated."
    return charts.section("In numbers", text, *tables, long=True)


# ------------------------------------------------------------------ timelines


def _timelines(run: Run) -> str:
    shown = list(run.traces)
    text = (
        "Under way, in pale colours: a bucket was launched and nobody waits for it yet, so it "
        "travels behind computation. Red: training stands still until it has arrived."
    )
    if len(shown) > _TIMELINES:
        text += (
            f" Of {len(shown):,} ranks those are shown that waited least and most: who waits "
            "least is waited for."
        )
        by_wait = sorted(shown, key=lambda trace: trace.exposed)
        half = _TIMELINES // 2
        shown = sorted(by_wait[:half] + by_wait[-half:], key=lambda trace: trace.rank)
    entries = [(_COMPUTE, "forward and backward"), (_STEP, "optimizer step")]
    entries += [(_ROLE[phase], f"{phase}: {_MEANING[phase]}") for phase in run.phases]
    if run.phases:
        entries.append((_EXPOSED, "waiting: exposed"))
    origins = {t.rank: origin for t, origin in zip(run.traces, run.origins(), strict=True)}
    length = max(trace.timeline.stop - origins[trace.rank] for trace in shown) or 1 / _US
    rows = []
    for trace in shown:
        rows.append(charts.heading(f"rank {trace.rank}"))
        rows.append(_timeline(trace, run.phases, origins[trace.rank], length))
    parts, many = (charts.legend(entries), *rows), len(shown) > 3
    return charts.section("Timeline", text, *parts, chosen="a mark", long=many)


def _timeline(trace: Trace, phases: Sequence[str], origin: float, length: float) -> str:
    """One rank; ``origin`` is the start of the axis in the time of its trace."""

    names = ("compute", "step", *phases, *(("under way", "wait") if phases else ()))
    marks: dict[str, list[Mark]] = {name: [] for name in names}

    def add(row: str, start: float, stop: float, role: int, text: str, opacity: float = 1) -> None:
        at, duration = (start - origin) * _US, (stop - start) * _US
        tip = f"rank {trace.rank} · {text} · {in_seconds(duration)}"
        if row in marks:
            marks[row].append(Mark(at, at + duration, tip, role, opacity))

    steps = trace.timeline.steps
    for step in steps:
        name = f"step {step.number}"
        add("compute", step.began, step.start, _COMPUTE, f"{name}, forward and backward")
        add("step", step.start, step.stop, _STEP, f"{name}, optimizer.step()", _PALE)
    for span in trace.timeline.spans:
        name, times = f"{span.phase} {span.bucket}", (span.start, span.stop)
        if span.phase == "step":
            add("step", *times, _STEP, f"step of bucket {span.bucket}")
        elif span.is_wait:
            add("wait", *times, _EXPOSED, f"waited for {name}")
        else:
            add(span.phase, *times, _ROLE[span.phase], f"{name}, launched")
    for each in trace.timeline.transfers():
        if each.hidden:
            times, role = (each.launch.stop, each.wait.start), _ROLE[each.launch.phase]
            add("under way", *times, role, f"{each.name} under way, hidden", _PALE)
    rows = [Row(name, found, overlaps=name == "under way") for name, found in marks.items()]
    shares = [("", (trace.timeline.start - origin) / length)]
    shares += [(f"step {step.number}", (step.stop - step.began) / length) for step in steps]
    shares.append(("", 1 - (trace.timeline.stop - origin) / length))
    return charts.timeline(
        f"Timeline of rank {trace.rank}.",
        rows,
        length * _US,
        edges=[(step.stop - origin) * _US for step in steps[:-1]],
        names=[share for share in shares if share[0] or share[1] > 0],
    )
