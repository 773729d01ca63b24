"""docs/benchmarks.md: the tables and plots of the last run, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import costs
from costs import Cost
from goals import Verdict, verdicts
from plots import picture
from results import Row, Table
from tables import MB, MEANING, as_markdown

_DOCS = Path(__file__).parents[1] / "docs"
PAGE = _DOCS / "benchmarks.md"
README = _DOCS.parent / "README.md"
_BEGIN, _END = "<!-- make bench writes this table -->\n", "<!-- end of the table -->\n"
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
one receives parameters for all, so that with two ranks on each host *MB sent* is two thirds of DDP's. Memory of a neighbour that is
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
    sections = [_OPENING, _machine(description), _goals(verdicts(tables))]
    sections += [f"## The tables\n\n{MEANING[0].upper()}{MEANING[1:]}\n"]
    sections += [_section(table) for table in tables]
    if other:
        sections += ["## Other costs\n", *(_cost(cost) for cost in other)]
    PAGE.write_text("\n".join(sections))
    if headline is None:
        return
    before, rest = README.read_text().split(_BEGIN)
    _, after = rest.split(_END)
    README.write_text(f"{before}{_BEGIN}{summary(headline)}{_END}{after}")


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
        ratios = [_ratio(each) for each in found]
        peak = f"{row.peak / MB:.0f}" if row.error is None else ""
        lines.append("| " + " | ".join([row.method, *ratios, peak]) + " |")
    return "\n".join(lines) + "\n"


def _ratio(row: Row) -> str:
    if row.error is not None:
        return "did not run"
    return "" if row.of_ddp is None else f"{row.of_ddp.middle:.2f}"


def _machine(description: Mapping[str, str]) -> str:
    lines = [f"| {name} | {value} |" for name, value in description.items()]
    table = "\n".join(["| | |", "|---|---|", *lines])
    return f"## The machine\n\n{table}\n"


def _goals(found: Sequence[Verdict]) -> str:
    lines = ["| | where | goal | measured | |", "|---|---|--:|--:|---|"]
    for verdict in found:
        measured = "" if verdict.measured is None else f"{verdict.measured:.3f}"
        lines.append(
            f"| {verdict.claim} | {verdict.where} | {verdict.limit:g} | {measured} | "
            f"{_outcome(verdict)} |"
        )
    reached = [verdict for verdict in found if verdict.holds]
    missed = [verdict for verdict in found if not verdict.holds]
    close = [sum(v.is_close for v in some) for some in (reached, missed)]
    return (
        "## Goals\n\nRatios that must not be exceeded; medians are judged. Of those that are close the "
        f"limit is within the spread: another run may say otherwise. {len(reached)} of {len(found)} "
        f"are reached, {close[0]} of them closely; {len(missed)} are missed, {close[1]} of them "
        "closely.\n\n" + "\n".join(lines) + "\n"
    )


def _outcome(verdict: Verdict) -> str:
    if verdict.measured is None:
        return "did not run"
    missed = f"missed by {verdict.measured - verdict.limit:.3f}"
    return ("reached" if verdict.holds else missed) + (", close" if verdict.is_close else "")


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
    return f"### {cost.title}\n\n{costs.as_markdown(cost)}\n"
