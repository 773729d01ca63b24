"""The page of a plan: who owns what, and what it takes of each rank."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from html import escape

from onecopy.planning.sizes import count_elements, imbalance
from onecopy.planning.text import in_bytes, in_short, name_ranks, plural
from onecopy.planning.traits import Kind
from onecopy.tools.estimate import Estimate, ParamRow, rank_range
from onecopy.tools.pages import charts
from onecopy.tools.pages.charts import Mark, Row

_SHARDS = 1500  # drawn one by one, at most
# Of a map of a larger plan: rows, and about so many marks in each.
_ROWS = 16
_MARKS = 40
_NAMES = 40  # of layers above a map; with more there would be no room
_HUES = (255.0, 520.0)  # from blue over violet and red to green
_COLUMNS = 64  # of a chart of the balance


def plan_page(estimate: Estimate, model: str) -> str:
    parts = [part(estimate) for part in (_key_figures, _memory, _map, _balance, _tables)]
    title = f"{model} on {plural(estimate.world_size, 'rank')}"
    return charts.page(title, estimate.in_words(), parts)


def _key_figures(estimate: Estimate) -> str:
    ours, ddp = estimate.fullest.total, estimate.peers[0]
    saved = ddp.memory.total / ours if ours else 1.0
    sent, of_ddp = estimate.wire.numbytes, ddp.wire.numbytes
    against = f"{sent / of_ddp:.2f} times DDP's" if of_ddp else "nothing to send"
    torchs = "torch's class runs one class only"
    if len(estimate.spec.classes) == 1:
        torchs = f"torch's partition: {estimate.torchs_imbalance:.3f}"
    return charts.cards(
        [
            ("on the fullest rank", in_bytes(ours), "activations not counted"),
            ("under plain DDP", in_bytes(ddp.memory.total), f"{saved:.1f} times as much"),
            ("sent per rank and step", in_bytes(sent), against),
            ("fullest rank / even share", f"{estimate.imbalance:.3f}", torchs),
        ]
    )


def _memory(estimate: Estimate) -> str:
    ways = enumerate(estimate.ways)
    bars = [charts.memory_bar(way.name, way.memory, is_strong=not number) for number, way in ways]
    return charts.memory_section(
        range(estimate.world_size),
        estimate.on,
        "What each rank holds after a step, from the plan that is really used.",
        charts.heading("Beside others, on their fullest rank"),
        f'<p class="soft">{escape(" ".join(estimate.remarks()))}</p>',
        charts.stacked_bars("Memory beside other ways to train.", bars, in_bytes),
    )


# ------------------------------------------------------------------ the map


def _map(estimate: Estimate) -> str:
    params = estimate.param_rows()
    elements = sum(param.elements for param in params) or 1
    text = "All parameters from left to right, as wide as they are large; a row is what "
    if sum(estimate.shards) <= _SHARDS:
        rows = _rows_of_shards(estimate, params, elements)
        text += "one rank owns: it keeps their optimizer state and updates them."
    else:
        rows = _rows_of_runs(estimate, params, elements)
        text += (
            "some ranks own together, the stronger the colour the larger their share. "
            "There are too many shards to draw them one by one."
        )
    layers = [(_layer(param.name), param.elements / elements) for param in params]
    if len({name for name, _ in layers}) > _NAMES:  # all layers of a list together
        layers = [(re.sub(r"\.\d+$", "", name), share) for name, share in layers]
    names = [
        (name, sum(share for _, share in group))
        for name, group in itertools.groupby(layers, key=lambda layer: layer[0])
    ]
    chart = charts.ownership_map("Map of the plan.", rows, names)
    return charts.section("Who owns what", text, chart, chosen="a shard")


def _rows_of_shards(estimate: Estimate, params: Sequence[ParamRow], elements: int) -> list[Row]:
    starts = itertools.accumulate((param.elements for param in params), initial=0)
    places = {param.number: (start, param) for start, param in zip(starts, params, strict=False)}
    rows = []
    for rank in range(estimate.world_size):
        marks = []
        shards = [shard for shard in estimate.plan.shards(rank) if shard.numel]
        for shard in sorted(shards, key=lambda each: (each.param, each.start)):
            first, param = places[shard.param]
            part = f"elements {shard.start:,} to {shard.stop:,} of {param.elements:,}"
            if shard.numel == param.elements:
                part = "all of it"
            size = in_bytes(shard.numel * param.bytes / param.elements)
            tip = f"rank {rank} · {param.name} · {part} · {size} · bucket {shard.bucket}"
            start, stop = first + shard.start, first + shard.stop
            marks.append(Mark(start / elements, stop / elements, tip))
        rows.append(Row(str(rank), marks, _hue(rank, estimate.world_size)))
    return rows


def _rows_of_runs(estimate: Estimate, params: Sequence[ParamRow], elements: int) -> list[Row]:
    """Groups of ranks as rows, runs of parameters as marks."""
    runs: list[list[ParamRow]] = []
    for param in params:
        if runs and sum(p.elements for p in runs[-1]) + param.elements <= elements / _MARKS:
            runs[-1].append(param)
        else:
            runs.append([param])
    run_of = {param.number: number for number, run in enumerate(runs) for param in run}
    counts = count_elements(estimate.plan, run_of.__getitem__)
    groups = charts.in_groups(range(estimate.world_size), _ROWS)
    rows = []
    for group, ranks in enumerate(groups):
        marks: list[Mark] = []
        who, even, start = name_ranks(ranks), len(ranks) / estimate.world_size, 0
        for number, run in enumerate(runs):
            name = run[0].name if len(run) == 1 else f"{run[0].name} to {run[-1].name}"
            numel = sum(param.elements for param in run)
            if owned := sum(counts.elements[number][ranks[0] : ranks[-1] + 1]):
                share = owned / numel
                size = in_bytes(share * sum(param.bytes for param in run))
                tip = f"{who} · {name} · {size} · {share:.1%} of it (even would be {even:.1%})"
                stop, opacity = start + numel, share / even * 0.75
                marks.append(Mark(start / elements, stop / elements, tip, opacity=opacity))
            start += numel
        rows.append(Row(rank_range((ranks[0], ranks[-1])), marks, _hue(group, len(groups))))
    return rows


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


# ------------------------------------------------------------------ balance and tables


def _balance(estimate: Estimate) -> str:
    top = max(estimate.imbalance, estimate.torchs_imbalance) * 1.06
    ends = "rank 0", f"rank {estimate.world_size - 1}"
    pair = ""
    for title, loads, role in (
        ("onecopy", estimate.loads, 2),
        ("torch's class", estimate.torchs_loads, 0),
    ):
        figure, columns = f"fullest {imbalance(loads):.3f}", _columns(loads)
        pair += charts.column_chart(title, figure, columns, top=top, role=role, ends=ends)
    text = (
        "Elements that each rank owns, relative to an even share (the dashed line). torch's class "
        "gives each tensor to one rank, so its fullest rank sets the memory of all."
    )
    if len(estimate.spec.classes) > 1:
        text += " It could not run this mixture of classes; shown is how it would share it out."
    content = f'<div class="pair">{pair}</div>'
    return charts.section("Balance, beside torch's partition", text, content, chosen="a rank")


def _columns(loads: Sequence[int]) -> list[tuple[float, str]]:
    even = sum(loads) / len(loads) or 1
    columns = []
    for ranks in charts.in_groups(range(len(loads)), _COLUMNS):
        fullest = max(loads[rank] for rank in ranks)
        who = name_ranks(ranks) + (", at most" if len(ranks) > 1 else "")
        tip = f"{who}: {fullest:,} elements, {fullest / even:.3f} times an even share"
        columns.append((fullest / even, tip))
    return columns


def _tables(estimate: Estimate) -> str:
    plan = estimate.plan
    whole = sum(len(stream.params) for stream in plan.streams if stream.kind is Kind.WHOLE)
    return charts.section(
        "In numbers",
        f"{in_short(sum(estimate.loads))} elements in {len(plan.params):,} parameters, "
        f"{whole or 'none'} of them kept whole; {plural(len(plan.buckets), 'bucket')} of at most "
        f"{in_bytes(plan.bucket_bytes)}; {plural(sum(estimate.shards), 'shard')}.",
        charts.folded_table("By rank", estimate.rank_table(), numbers=(1, 2, 3)),
        charts.folded_table("By parameter", estimate.param_table(), numbers=(4, 6)),
        long=True,
    )
