"""The map of a plan: each rank's pieces over the parameters.

Up to ``_PIECES`` pieces are drawn one by one. Beyond, neighbouring ranks and neighbouring
parameters are put together, and a mark says how much of its parameters its ranks own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from onecopy.estimating import Estimate
from onecopy.overview import ParamRow, param_rows
from onecopy.report.charts import MapRow, Mark, detail_line, ownership_map, strip
from onecopy.report.grouping import in_groups, range_in_words, ranks_of
from onecopy.report.page import paragraph, section
from onecopy.tally import tally
from onecopy.words import in_bytes

_PIECES = 1500  # drawn one by one, at most
_ROWS = 16  # of an aggregated map ...
_COLUMNS = 40  # ... and about so many columns
_NAMES = 40  # of layers above it; with more there would be no room
_HUES = (255.0, 520.0)  # from blue over violet and red to green


def map_section(estimate: Estimate) -> str:
    rows = param_rows(estimate)
    is_exact = sum(estimate.pieces) <= _PIECES
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
        pieces = [piece for piece in estimate.plan.pieces(rank) if piece.numel]
        for piece in sorted(pieces, key=lambda p: (p.param, p.start)):
            row, first = of_param[piece.param], starts[piece.param]
            span = (
                "all of it"
                if piece.numel == row.numel
                else f"elements {piece.start:,} to {piece.stop:,} of {row.numel:,}"
            )
            size = in_bytes(piece.numel * row.nbytes / row.numel)
            tip = f"rank {rank} · {row.name} · {span} · {size} · bucket {piece.bucket}"
            start, stop = first + piece.start, first + piece.stop
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
    counted = tally(estimate.plan, lambda param: run_of[param])
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
