"""The page of a plan: memory of each rank, who owns what, and the balance beside torch's class.

However large the plan, a page has a bounded number of marks: ranks and parameters are put together
where there are many, and a mark says what it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

from onecopy.estimating import Estimate
from onecopy.kinds import Kind
from onecopy.overview import notes_on_peers, param_rows, rank_rows, training_in_words
from onecopy.peers import torchs_loads
from onecopy.report.charts import (
    Column,
    column_chart,
    detail_line,
    legend,
    stacked_bars,
)
from onecopy.report.grouping import in_groups, range_in_words
from onecopy.report.memory_bars import memory_bar, memory_scale, present_stages, rank_bars
from onecopy.report.page import cards, folded, heading, html_table, page, paragraph, section
from onecopy.report.plan_map import map_section
from onecopy.tally import imbalance
from onecopy.words import counted, in_bytes, in_short, ranks_in_words

_BALANCE = 64  # columns of the chart of the balance
_LISTED = 200  # rows of a table


def plan_page(estimate: Estimate, model: str) -> str:
    """One self-contained page about a plan."""
    world = estimate.world_size
    return page(
        f"{model} on {counted(world, 'rank')}",
        training_in_words(estimate),
        [
            _key_figures(estimate),
            _memory(estimate),
            map_section(estimate),
            _balance(estimate),
            _tables(estimate),
        ],
    )


# -------------------------------------------------------------------------- key figures, memory


def _key_figures(estimate: Estimate) -> str:
    ours, ddp = estimate.fullest.total, estimate.peers[0]
    saved = ddp.memory.total / ours if ours else 1.0
    wire, plain = estimate.wire.numbytes, ddp.wire.numbytes
    against = f"{wire / plain:.2f} times DDP's" if plain else "nothing to send"
    return cards(
        [
            ("on the fullest rank", in_bytes(ours), "activations not counted"),
            ("under plain DDP", in_bytes(ddp.memory.total), f"{saved:.1f} times as much"),
            ("sent per rank and step", in_bytes(wire), against),
            (
                "fullest rank / even share",
                f"{estimate.imbalance:.3f}",
                f"torch's partition: {estimate.torchs_imbalance:.3f}"
                if len(estimate.subject.classes) == 1
                else "torch's class runs one class only",
            ),
        ]
    )


def _memory(estimate: Estimate) -> str:
    bars = rank_bars(range(estimate.world_size), estimate.on)
    others = [memory_bar("onecopy", estimate.fullest, strong=True)]
    others += [memory_bar(peer.name, peer.memory) for peer in estimate.peers]
    text = "What each rank holds after a step, from the plan that is really used. " + (
        "Of ranks that are put together, the fullest is shown. " * (len(bars) < estimate.world_size)
    )
    return section(
        "Memory of each rank",
        paragraph(text),
        legend(present_stages([*bars, *others])),
        stacked_bars(
            "Memory of each rank, by what it holds.", bars, memory_scale(bars), "memory-detail"
        ),
        heading("Beside others, on their fullest rank"),
        paragraph(_about_peers(estimate), soft=True),
        stacked_bars(
            "Memory beside other ways to train.", others, memory_scale(others), "memory-detail"
        ),
        detail_line("memory-detail", "Choose a part of a bar: click, or use the arrow keys."),
    )


def _about_peers(estimate: Estimate) -> str:
    return " ".join(notes_on_peers(estimate))


# -------------------------------------------------------------------------- the balance


def _balance(estimate: Estimate) -> str:
    ours, torchs = estimate.loads, torchs_loads(estimate.subject, estimate.world_size)
    top = max(imbalance(ours), imbalance(torchs)) * 1.06
    charts = "".join(
        column_chart(
            title,
            f"fullest {imbalance(loads):.3f}",
            _columns(loads),
            top=top,
            role=role,
            ends=("rank 0", f"rank {estimate.world_size - 1}"),
            detail="balance-detail",
        )
        for title, loads, role in (("onecopy", ours, 2), ("torch's class", torchs, 0))
    )
    text = (
        "Elements that each rank owns, relative to an even share (the dashed line). torch's class "
        "gives each tensor to one rank, so its fullest rank sets the memory of all."
    )
    if len(estimate.subject.classes) > 1:
        text += " It could not run this mixture of classes; shown is how it would share it out."
    return section(
        "Balance, beside torch's partition",
        paragraph(text),
        f'<div class="pair">{charts}</div>',
        detail_line("balance-detail", "Choose a rank: click, or use the arrow keys."),
    )


def _columns(loads: Sequence[int]) -> list[Column]:
    even = sum(loads) / len(loads) or 1
    found = []
    for ranks in in_groups(range(len(loads)), _BALANCE):
        fullest = max(loads[rank] for rank in ranks)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {range_in_words(ranks)}, at most"
        tip = f"{who}: {fullest:,} elements, {fullest / even:.3f} times an even share"
        found.append(Column(fullest / even, tip))
    return found


# -------------------------------------------------------------------------- tables


def _tables(estimate: Estimate) -> str:
    world = estimate.world_size
    params = param_rows(estimate)
    of_params = html_table(
        "Parameters and their owners",
        ("parameter", "shape", "dtype", "kind", "bytes", "owners", "buckets"),
        [
            (
                *(row.name, " × ".join(map(str, row.shape)) or "scalar", row.dtype),
                *(row.kind.value, in_bytes(row.nbytes)),
                *(ranks_in_words(row.owners, world), str(row.buckets)),
            )
            for row in params[:_LISTED]
        ],
        numbers=(4, 6),
    )
    ranks = rank_rows(estimate)
    of_ranks = html_table(
        "Ranks and what they hold",
        ("rank", "elements", "pieces", "holds in all"),
        [
            (row.ranks, f"{row.elements:,}", f"{row.pieces:,}", in_bytes(row.total))
            for row in ranks[:_LISTED]
        ],
        numbers=(1, 2, 3),
    )
    return section(
        "In numbers",
        paragraph(_facts(estimate)),
        folded(_title("rank", len(ranks)), of_ranks),
        folded(_title("parameter", len(params)), of_params),
        long=True,
    )


def _facts(estimate: Estimate) -> str:
    plan = estimate.plan
    whole = sum(len(stream.params) for stream in plan.streams if stream.kind is Kind.WHOLE)
    return (
        f"{in_short(sum(estimate.loads))} elements in {len(plan.params):,} parameters, "
        f"{whole or 'none'} of them kept whole; {counted(len(plan.buckets), 'bucket')} of at most "
        f"{in_bytes(plan.bucket_bytes)}; {counted(sum(estimate.pieces), 'piece')}."
    )


def _title(what: str, rows: int) -> str:
    every = f"By {what}"
    return every if rows <= _LISTED else f"{every}: the first {_LISTED:,} of {rows:,} rows"
