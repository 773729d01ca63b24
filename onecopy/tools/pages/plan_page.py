"""The page of a plan: who owns what, and what it takes of each rank."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from onecopy.planning.sizes import count_elements, imbalance
from onecopy.planning.text import in_bytes, in_short, plural
from onecopy.planning.traits import Kind
from onecopy.tools.baselines import torch_loads
from onecopy.tools.estimate import (
    Estimate,
    ParamRow,
    notes_on_peers,
    param_rows,
    rank_rows,
    ranks_in_words,
    training_in_words,
)
from onecopy.tools.pages.charts import (
    Column,
    MapRow,
    Mark,
    cards,
    column_chart,
    detail_line,
    folded,
    heading,
    html_table,
    in_groups,
    legend,
    memory_bar,
    memory_scale,
    ownership_map,
    page,
    paragraph,
    present_stages,
    range_in_words,
    rank_bars,
    ranks_of,
    section,
    stacked_bars,
    strip,
)

_PIECES = 1500  # drawn one by one, at most
_ROWS = 16  # of an aggregated map ...
_COLUMNS = 40  # ... and about so many columns
_NAMES = 40  # of layers above it; with more there would be no room
_HUES = (255.0, 520.0)  # from blue over violet and red to green


def map_section(estimate: Estimate) -> str:
    rows = param_rows(estimate)
    is_exact = sum(estimate.shards) <= _PIECES
    drawn = _exact_rows(estimate, rows) if is_exact else _aggregated_rows(estimate, rows)
    elements = sum(row.numel for row in rows) or 1
    above = strip([(name, count / elements) for name, count in _modules(rows)])
    text = "All parameters from left to right, as wide as they are large; a row is what " + (
        "one rank owns: it keeps their optimizer state and updates them."
        if is_exact
        else "some ranks own together, the stronger the colour the larger their share. "
        "There are too many pieces to draw them one by one."
    )
    return section(
        "Who owns what",
        paragraph(text),
        ownership_map("Map of the plan.", drawn, above, "map-detail"),
        detail_line(
            "map-detail", "Choose a piece: click, or focus the map and use the arrow keys."
        ),
    )


def _exact_rows(estimate: Estimate, rows: Sequence[ParamRow]) -> list[MapRow]:
    starts, elements = _positions(rows)
    of_param = {row.index: row for row in rows}
    found = []
    for rank in range(estimate.world_size):
        marks = []
        shards = [shard for shard in estimate.plan.shards(rank) if shard.numel]
        for shard in sorted(shards, key=lambda p: (p.param, p.start)):
            row, first = of_param[shard.param], starts[shard.param]
            span = (
                "all of it"
                if shard.numel == row.numel
                else f"elements {shard.start:,} to {shard.stop:,} of {row.numel:,}"
            )
            size = in_bytes(shard.numel * row.nbytes / row.numel)
            tip = f"rank {rank} · {row.name} · {span} · {size} · bucket {shard.bucket}"
            start, stop = first + shard.start, first + shard.stop
            marks.append(Mark(start / elements, stop / elements, tip))
        found.append(MapRow(str(rank), _hue(rank, estimate.world_size), tuple(marks)))
    return found


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring parameters that are drawn as one."""

    name: str
    start: int
    elements: int
    nbytes: int


def _aggregated_rows(estimate: Estimate, rows: Sequence[ParamRow]) -> list[MapRow]:
    run_of, runs = _runs(rows)
    elements = sum(run.elements for run in runs) or 1
    counted = count_elements(estimate.plan, lambda param: run_of[param])
    found = []
    groups = in_groups(range(estimate.world_size), _ROWS)
    for number, ranks in enumerate(groups):
        marks = []
        for at, run in enumerate(runs):
            owned = sum(counted.elements[at][ranks[0] : ranks[-1] + 1])
            if not owned:
                continue
            share = owned / run.elements
            even = len(ranks) / estimate.world_size
            tip = (
                f"{ranks_of(ranks)} · {run.name} · "
                f"{in_bytes(share * run.nbytes)} · {share:.1%} of it (even would be {even:.1%})"
            )
            start, stop = run.start / elements, (run.start + run.elements) / elements
            marks.append(Mark(start, stop, tip, strength=share / even * 0.75))
        found.append(MapRow(range_in_words(ranks), _hue(number, len(groups)), tuple(marks)))
    return found


def _runs(rows: Sequence[ParamRow]) -> tuple[dict[int, int], list[_Run]]:
    """Runs of parameters, each about 1/_COLUMNS of all; the run of each parameter."""
    limit = sum(row.numel for row in rows) / _COLUMNS
    members: list[list[ParamRow]] = []
    for row in rows:
        if members and sum(r.numel for r in members[-1]) + row.numel <= limit:
            members[-1].append(row)
        else:
            members.append([row])
    runs: list[_Run] = []
    run_of: dict[int, int] = {}
    start = 0
    for number, run in enumerate(members):
        name = run[0].name if len(run) == 1 else f"{run[0].name} to {run[-1].name}"
        elements = sum(row.numel for row in run)
        runs.append(_Run(name, start, elements, sum(row.nbytes for row in run)))
        run_of |= {row.index: number for row in run}
        start += elements
    return run_of, runs


def _positions(rows: Sequence[ParamRow]) -> tuple[dict[int, int], int]:
    """Where each parameter begins when all are laid end to end, and how long that is."""
    starts, end = {}, 0
    for row in rows:
        starts[row.index] = end
        end += row.numel
    return starts, end or 1


def _modules(rows: Sequence[ParamRow]) -> list[tuple[str, int]]:
    """Neighbours of one layer and their elements; of all layers together, if there are many."""
    layers = [(_layer(row.name), row.numel) for row in rows]
    if len({name for name, _ in layers}) > _NAMES:
        layers = [(re.sub(r"\.\d+$", "", name), numel) for name, numel in layers]
    return [
        (name, sum(numel for _, numel in together))
        for name, together in itertools.groupby(layers, key=lambda layer: layer[0])
    ]


def _layer(name: str) -> str:
    """
    >>> _layer("model.layers.3.mlp.weight"), _layer("model.norm.weight"), _layer("weight")
    ('layers.3', 'norm', 'weight')
    """
    numbered = re.match(r"(?:.*?\.)??([^.]+\.\d+)(?=\.)", name)
    return numbered[1] if numbered else name.split(".")[-2:][0]


def _hue(number: int, count: int) -> float:
    first, last = _HUES
    return (first + (last - first) * number / max(count, 1)) % 360


_BALANCE = 64  # columns of the chart of the balance
_LISTED = 200  # rows of a table


def plan_page(estimate: Estimate, model: str) -> str:
    """One self-contained page about a plan."""
    world = estimate.world_size
    return page(
        f"{model} on {plural(world, 'rank')}",
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
    ours, torchs = estimate.loads, torch_loads(estimate.subject, estimate.world_size)
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
        ("rank", "elements", "shards", "holds in all"),
        [
            (row.ranks, f"{row.elements:,}", f"{row.shards:,}", in_bytes(row.total))
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
        f"{whole or 'none'} of them kept whole; {plural(len(plan.buckets), 'bucket')} of at most "
        f"{in_bytes(plan.bucket_bytes)}; {plural(sum(estimate.shards), 'shard')}."
    )


def _title(what: str, rows: int) -> str:
    every = f"By {what}"
    return every if rows <= _LISTED else f"{every}: the first {_LISTED:,} of {rows:,} rows"
