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

This page is written by `make bench` (some ten minutes on two cores, four tables) or `make bench FULL=1` (all of it, more than an hour), which set up an
environment of their own with the peers in it. Run it on your machine: a difference shows as a diff of this page, and ratios that left the quartiles of the
run before are printed.

Every method trains the same model on the same batches with the same fused AdamW, in processes of its own, one thread each. All are
alive side by side and take turns in an order that is drawn anew for each round, and ratios are taken within a round, so what else
the machine does meets all of them alike. Bytes are the kernel's counters of the network device (on loopback whatever else uses it
counts, too), memory is that of the process. Losses agree to the digits that the order of sums leaves; a method whose loss differs
trains something else, is marked, and no goal is judged by it. One that cannot run is listed with its error. Cables of 1 and 10 Gbit/s are emulated between two network
namespaces, for the language models and, at 1 Gbit/s, for the others.

- **DDP**: `DistributedDataParallel` and the unsharded class, as most people run it; also with `gradient_as_bucket_view`, and with the
  foreach instead of the fused implementation. Buffers are not broadcast in every forward (`broadcast_buffers=False`): none of the
  others does that.
- **torch**: `torch.distributed.optim.ZeroRedundancyOptimizer` under DDP, with and without `parameters_as_bucket_view`, and with DDP's
  `gradient_as_bucket_view` besides.
- **FSDP2**: `fully_shard` of each block and of the root, with `reshard_after_forward` or without. It shards the parameters, too. A model
  without blocks is one unit, which is the root, and stays gathered either way.
- **DeepSpeed** ZeRO-1 and ZeRO-2 on its CPU accelerator, the same torch optimizer, no clipping. Muon is its own implementation. The first time on a machine it
  compiles an extension, which counts as building. Its state includes a second copy of
  the rank's parameters, which it keeps in float32 whatever they are.
- **fairscale**: `OSS` and `ShardedDataParallel`.
- **onecopy**: drop-in under DDP, with bucket views or without; attached to DDP, also with its `gradient_as_bucket_view`; attached to the bare module; the same with the gather of
  the parameters left to the next forward, and with gradients that travel in bfloat16. See [modes](modes.md). On loopback its ranks read
  large parts in one another's memory, which the others leave to TCP; *all through TCP* is the row without that. Memory of a
  neighbour that is mapped counts as this process's own in its peak.

No GPU was here. These are CPU processes and gloo, and say what the algorithms cost, not what NCCL would do with them.
"""


def write(
    description: Mapping[str, str],
    tables: Sequence[Table],
    headline: Sequence[Table],
    other: Sequence[Cost],
) -> None:
    """``headline``: the tables that the README shows."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.glob("*.svg"):
        old.unlink()
    sections = [_OPENING, _machine(description), _goals(verdicts(tables))]
    sections += [_section(table) for table in tables]
    if other:
        sections += ["## Other costs\n", *(_cost(cost) for cost in other)]
    PAGE.write_text("\n".join(sections))
    before, rest = README.read_text().split(_BEGIN)
    _, after = rest.split(_END)
    README.write_text(f"{before}{_BEGIN}{summary(headline)}{_END}{after}")


def summary(tables: Sequence[Table]) -> str:
    """A column for each table, a line for each method, and its peak memory in the first table."""
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
        found = [table.row(row.method) for table in shown]
        ratios = ["" if each is None else _ratio(each) for each in found]
        peak = f"{row.peak / MB:.0f}" if row.error is None else ""
        lines.append("| " + " | ".join([row.method, *ratios, peak]) + " |")
    return "\n".join(lines) + "\n"


def _ratio(row: Row) -> str:
    if row.error is not None:
        return "cannot"
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
    reached = sum(verdict.holds for verdict in found)
    return (
        "## Goals\n\nRatios that must not be exceeded; medians, so the quartiles below say how sure "
        f"they are. {reached} of {len(found)} are reached.\n\n" + "\n".join(lines) + "\n"
    )


def _outcome(verdict: Verdict) -> str:
    if verdict.measured is None:
        return "did not run"
    return "reached" if verdict.holds else f"missed by {verdict.measured - verdict.limit:.3f}"


def _section(table: Table) -> str:
    parts = [f"## {table.heading}\n"]
    if table.rows:
        slug = f"{table.workload}-{table.ranks}-{table.wire}"
        name = "".join(c if c.isalnum() else "-" for c in slug).lower().replace("--", "-")
        (PICTURES / f"{name}.svg").write_text(picture(table))
        parts.append(f"![{table.heading}](benchmarks/{name}.svg)\n")
    parts.append(as_markdown(table) + "\n")
    if table.rows:
        numbers = f"Rounds: {table.rounds}; steps behind each loss: {table.steps}."
        parts.append(f"{MEANING[0].upper()}{MEANING[1:]} {numbers}\n")
    return "\n".join(parts)


def _cost(cost: Cost) -> str:
    return f"### {cost.title}\n\n{costs.as_markdown(cost)}\n"
