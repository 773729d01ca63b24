"""Results as text: the same cells for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from results import Row, Spread, Table

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
    "so other work was done. Where there were several heats, ms of different rows are not to be "
    "compared: ratios are, which were taken within a heat."
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
    notes = [f"- {line}" for line in errors(table)]
    return "\n".join([*head, *body, *([""] if notes else []), *notes])


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
