"""The timeline of a traced run: for each rank, what it did and what was under way meanwhile."""

from __future__ import annotations

from onecopy.recorded import Run, Trace
from onecopy.report.charts import detail_line, legend, strip
from onecopy.report.lanes import Event, Lane, lanes_chart
from onecopy.report.page import heading, paragraph, section
from onecopy.words import in_seconds

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
    lanes = [Lane("compute", tuple(computing)), Lane("step", tuple(stepping))]
    for phase in phases:
        launches = [
            event(span.start, span.stop, _ROLE[phase], f"{phase} {span.bucket}, launched")
            for span in spans
            if span.phase == phase and not span.is_wait
        ]
        lanes.append(Lane(phase, tuple(launches)))
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
        lanes += [Lane("under way", tuple(flights), is_deep=True), Lane("wait", tuple(waits))]
    edges = [(step.stop - origin) * _SECONDS for step in steps[:-1]]
    return lanes_chart(
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
