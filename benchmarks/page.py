"""Results as text, as Markdown and as pictures, and docs/benchmarks.md, which has all of a run.

Pictures are SVG, two panels of horizontal bars for light and dark pages, written without a plotting
library, so that the same numbers give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from costs import Cost
from results import GoalResult, Row, Spread, Table, goal_results

MB = 10**6

COLUMNS = (
    "method", "ms", "of DDP", "", "of torch", "", "forward", "backward", "step",
    "MB sent", "state", "gradients", "peak MB", "build s", "loss",
)  # fmt: skip
MEANING = (
    "ms: a whole step, median. of DDP, of torch: its ratio to theirs, medians and quartiles over "
    "the rounds, or the extremes of fewer than five. forward, backward, step: ms that a rank is in "
    "these calls. MB sent: per rank and step (on a cable: per host). state, gradients: MB on the "
    "fullest rank. peak: growth of a process during a step, model included. build: seconds to make "
    "the model and wrap it. loss: mean over the ranks after the last step; with ! it is not DDP's, "
    "so other work was done. Where there were several groups, ms of different rows are not to be "
    "compared: ratios are, which were taken within a group."
)


def cells(row: Row, is_alike: bool = True) -> list[str]:
    """A line of the table; of a method that did not run, its name and nothing else."""
    if row.seconds is None or row.phases is None:
        return [row.method, "did not run", *[""] * (len(COLUMNS) - 2)]
    phases = row.phases
    return [
        row.method,
        f"{row.seconds.middle * 1e3:.1f}",
        *_ratio(row.of_ddp),
        *_ratio(row.of_torch),
        *(f"{each * 1e3:.1f}" for each in (phases.forward, phases.backward, phases.step)),
        f"{row.sent / MB:.2f}",
        *(f"{each / MB:.1f}" for each in (row.state, row.gradients, row.peak)),
        f"{row.construction:.1f}",
        f"{row.loss:.4f}{'' if is_alike else ' !'}",
    ]


def _ratio(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "", ""
    return f"{spread.middle:.2f}", f"{spread.low:.2f}-{spread.high:.2f}"


def as_text(table: Table) -> str:
    if table.skipped is not None:
        return f"\n{table.heading}\n  skipped: {table.skipped}"
    lines = [list(COLUMNS), *(cells(row, table.trains_alike(row)) for row in table.rows)]
    widths = [max(len(line[i]) for line in lines if len(line) > i) for i in range(len(COLUMNS))]
    text = [f"\n{table.heading}"]
    for line in lines:
        name, *numbers = (cell.ljust(widths[0]) if i == 0 else cell.rjust(widths[i])
                          for i, cell in enumerate(line))  # fmt: skip
        text.append("  ".join([name, *numbers]).rstrip())
    return "\n".join([*text, *(f"  {line}" for line in errors(table))])


def as_markdown(table: Table) -> str:
    if table.skipped is not None:
        return f"Skipped: {table.skipped}."
    head = [
        "| " + " | ".join(COLUMNS) + " |",
        "|---|" + "--:|" * (len(COLUMNS) - 1),
    ]
    body = ["| " + " | ".join(cells(row, table.trains_alike(row))) + " |" for row in table.rows]
    failures = [f"- {line}" for line in errors(table)]
    return "\n".join([*head, *body, *([""] if failures else []), *failures])


def errors(table: Table) -> list[str]:
    return [f"{row.method}: {row.error}" for row in table.rows if row.error is not None]


def changes(before: Sequence[Table], after: Sequence[Table]) -> list[str]:
    """Where a ratio to DDP is another by 5 %, and the quartiles of both runs do not overlap."""
    known = {(t.workload, t.ranks, t.wire): t for t in before}
    found = []
    for table in after:
        old = known.get((table.workload, table.ranks, table.wire))
        for row in table.rows if old is not None else ():
            was = old.row(row.method) if old is not None else None
            if was is None or was.of_ddp is None or row.of_ddp is None:
                continue
            apart = row.of_ddp.low > was.of_ddp.high or row.of_ddp.high < was.of_ddp.low
            if apart and abs(row.of_ddp.middle / was.of_ddp.middle - 1) > 0.05:
                where = f"{table.workload}, {table.ranks} ranks, {table.wire}"
                ratio = f"{was.of_ddp.middle:.2f} -> {row.of_ddp.middle:.2f} of DDP"
                found.append(f"{where}: {row.method}: {ratio}")
    return found


# ---------------------------------------------------------------------- pictures

_ROW, _BAR, _TOP = 24, 12, 58
_NAMES, _PANEL, _GAP, _MARGIN = 232, 320, 66, 46

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
    width = _NAMES + len(panels) * _PANEL + (len(panels) - 1) * _GAP + _MARGIN
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


# ---------------------------------------------------------------------- the page

_DOCS = Path(__file__).parents[1] / "docs"
PAGE = _DOCS / "benchmarks.md"
README = _DOCS.parent / "README.md"
_TABLE_BEGIN, _TABLE_END = "<!-- make bench writes this table -->\n", "<!-- end of the table -->\n"
PICTURES = _DOCS / "benchmarks"
JSON = PICTURES / "bench.json"

_OPENING = """\
# Benchmarks

This page is written by `make bench FULL=1` (an hour on two cores) or `make bench` (four of the tables, some ten minutes), which set up an
environment of their own with the peers in it. Run it on your machine: a difference shows as a diff of this page, and ratios that
left the spread of the run before are printed.

Every method trains the same model on the same batches with the same fused AdamW, in processes of its own, one thread each. As many
as memory allows are alive side by side, DDP and torch's class always among them; they take turns in an order that is drawn anew for
each round, and ratios are taken within a round, so what else the machine does meets all of them alike. Bytes are the kernel's counters
of the network device (on loopback whatever else uses it counts, too), memory is that of the process. Losses agree to the digits that
the order of sums leaves; a method whose loss differs trains something else, is marked, and no goal is judged by it. One that cannot
run is listed with its error. Cables of 1 and 10 Gbit/s are emulated between two network namespaces. A full run takes all methods
with two ranks on loopback, one of each kind with four ranks and on cables, and, for lack of time, only those that were fastest
elsewhere with four ranks at 10 Gbit/s.

- **DDP**: `DistributedDataParallel` and the unsharded class, as most people run it; also with `gradient_as_bucket_view`, and with the
  foreach instead of the fused implementation. Buffers are not broadcast in every forward (`broadcast_buffers=False`): none of the
  others does that.
- **torch**: `torch.distributed.optim.ZeroRedundancyOptimizer` under DDP, with and without `parameters_as_bucket_view`, and with DDP's
  `gradient_as_bucket_view` besides. Its `overlap_with_ddp` refuses gloo.
- **FSDP2**: `fully_shard` of the embedding, each block, the head and the root, with `reshard_after_forward` or without. It shards the
  parameters, too. (Blocks alone, with embedding and head in the root, are a bit faster on loopback and take more memory.) A model
  without blocks is one unit, which is the root, and stays gathered either way.
- **DeepSpeed** ZeRO-1 and ZeRO-2 on its CPU accelerator, the same torch optimizer, no clipping, buckets of 25 MB as DDP's (by default this
  model would be one bucket), `overlap_comm` as it is by default. Muon is its own implementation. The first time on a machine it
  compiles an extension, which counts as building. Its state includes a second copy of
  the rank's parameters, which it keeps in float32 whatever they are.
- **fairscale**: `OSS` and `ShardedDataParallel`.
- **onecopy**: drop-in under DDP, with bucket views or without; attached to DDP, also with its `gradient_as_bucket_view`; attached to the bare module; the same with the gather of
  the parameters left to the next forward, and with gradients that travel in bfloat16. See [modes](modes.md).

**On one host a part of our advantage is the transport, not the algorithm.** There our ranks read large parts in one another's
memory, which the others leave to TCP: compare the rows *all through TCP*, which are those without that, and slower than DDP on loopback.
Between hosts all use TCP. There it is the algorithm again: our ranks of a host add up their gradients before one of them sends the sum, and
one receives parameters for all, so that with two ranks on each host *MB sent* is two thirds of DDP's. Memory of another rank that is
mapped counts as this process's own in its peak.

**Drop-in mode leaves the gradients to DDP**, whose all-reduce sends twice what fairscale's reduction to the owners does, or our attached
mode's: where sending is most of a step, and above all where four ranks share two cores, it cannot be faster than fairscale. It is the mode
for code that needs complete gradients.

No GPU was here. These are CPU processes and gloo, and do not say what NCCL would do.
"""


def write(
    description: Mapping[str, str],
    tables: Sequence[Table],
    headline: Sequence[Table] | None,
    other: Sequence[Cost],
) -> None:
    """``headline``: the tables that the README shows; None if it stays as it is."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.glob("*.svg"):
        old.unlink()
    sections = [_OPENING, _machine(description), _goals(goal_results(tables))]
    sections += [f"## The tables\n\n{MEANING[0].upper()}{MEANING[1:]}\n"]
    sections += [_section(table) for table in tables]
    if other:
        sections += ["## Other costs\n", *(_cost(cost) for cost in other)]
    PAGE.write_text("\n".join(sections))
    if headline is None:
        return
    before, rest = README.read_text().split(_TABLE_BEGIN)
    _, after = rest.split(_TABLE_END)
    README.write_text(f"{before}{_TABLE_BEGIN}{summary(headline)}{_TABLE_END}{after}")


def summary(tables: Sequence[Table]) -> str:
    """A column for each table, a line for each method that is in all of them, and its peak memory
    in the first."""
    shown = [table for table in tables if table.rows]
    heads = [f"{table.workload}, {table.ranks} ranks, {table.wire}" for table in shown]
    if not shown:
        return ""
    first = shown[0]
    lines = [
        "| " + " | ".join(["", *heads, f"MB ({heads[0]})"]) + " |",
        "|---|" + "--:|" * (len(heads) + 1),
    ]
    for row in first.rows:
        found = [each for each in (table.row(row.method) for table in shown) if each is not None]
        if len(found) < len(shown):
            continue
        ratios = [_median(each) for each in found]
        peak = f"{row.peak / MB:.0f}" if row.error is None else ""
        lines.append("| " + " | ".join([row.method, *ratios, peak]) + " |")
    return "\n".join(lines) + "\n"


def _median(row: Row) -> str:
    if row.error is not None:
        return "did not run"
    return "" if row.of_ddp is None else f"{row.of_ddp.middle:.2f}"


def _machine(description: Mapping[str, str]) -> str:
    lines = [f"| {name} | {value} |" for name, value in description.items()]
    table = "\n".join(["| | |", "|---|---|", *lines])
    return f"## The machine\n\n{table}\n"


def _goals(found: Sequence[GoalResult]) -> str:
    lines = ["| | where | goal | measured | |", "|---|---|--:|--:|---|"]
    for result in found:
        measured = "" if result.measured is None else f"{result.measured:.3f}"
        lines.append(
            f"| {result.claim} | {result.where} | {result.limit:g} | {measured} | "
            f"{_outcome(result)} |"
        )
    reached = [result for result in found if result.holds]
    missed = [result for result in found if not result.holds]
    close = [sum(v.is_close for v in some) for some in (reached, missed)]
    return (
        "## Goals\n\nRatios that must not be exceeded; medians are judged. Of those that are close the "
        f"limit is within the spread: another run may say otherwise. {len(reached)} of {len(found)} "
        f"are reached, {close[0]} of them closely; {len(missed)} are missed, {close[1]} of them "
        "closely.\n\n" + "\n".join(lines) + "\n"
    )


def _outcome(result: GoalResult) -> str:
    if result.measured is None:
        return "did not run"
    missed = f"missed by {result.measured - result.limit:.3f}"
    return ("reached" if result.holds else missed) + (", close" if result.is_close else "")


def _section(table: Table) -> str:
    parts = [f"### {table.heading}\n"]
    if table.rows:
        slug = f"{table.workload}-{table.ranks}-{table.wire}"
        name = "".join(c if c.isalnum() else "-" for c in slug).lower().replace("--", "-")
        (PICTURES / f"{name}.svg").write_text(picture(table))
        parts.append(f"![{table.heading}](benchmarks/{name}.svg)\n")
    parts.append(as_markdown(table) + "\n")
    if table.rows:
        parts.append(f"Rounds: {table.rounds}; steps behind each loss: {table.steps}.\n")
    return "\n".join(parts)


def _cost(cost: Cost) -> str:
    rule = "|---|" + "--:|" * (len(cost.columns) - 1)
    head, *rows = ["| " + " | ".join(line) + " |" for line in (cost.columns, *cost.rows)]
    table = "\n".join([head, rule, *rows])
    return f"### {cost.title}\n\n{table}\n"
