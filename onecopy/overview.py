"""Who owns what, in as few words as it takes: the rows of tables, the JSON and the page of a plan.

Ranks and parameters that are alike are put together, so that a plan for 16,384 ranks is as easy to
read as one for eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from onecopy.estimating import Estimate
from onecopy.kinds import Kind
from onecopy.plan import Plan
from onecopy.version import __version__
from onecopy.words import counted

# More pieces than this are not listed: nobody reads them, and a billion would fill a disk.
LISTED_PIECES = 20_000

Ranges = tuple[tuple[int, int], ...]  # of ranks: first and last


@dataclass(frozen=True, slots=True)
class RankRow:
    """Neighbouring ranks that own equally much."""

    first: int
    last: int
    elements: int  # of each of them
    pieces: int
    total: int  # bytes of everything that it holds

    @property
    def ranks(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class ParamRow:
    """A planned parameter, and who owns it."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    numel: int
    nbytes: int
    owners: Ranges
    buckets: int


def rank_rows(estimate: Estimate) -> list[RankRow]:
    pieces = estimate.pieces
    totals = [estimate.on(rank).total for rank in range(estimate.world_size)]
    alike = groupby(
        range(estimate.world_size), key=lambda r: (estimate.loads[r], pieces[r], totals[r])
    )
    found = []
    for numbers, ranks in alike:
        members = list(ranks)
        found.append(RankRow(members[0], members[-1], *numbers))
    return found


def param_rows(estimate: Estimate) -> list[ParamRow]:
    """The planned parameters, in the order of the model."""
    plan = estimate.plan
    owners = owners_of(plan)
    kinds = {param: stream.kind for stream in plan.streams for param in stream.params}
    rows = []
    for index in sorted(plan.params):
        param = estimate.subject.params[index]
        ranges, buckets = owners[index]
        dtype = str(param.dtype).removeprefix("torch.")
        rows.append(
            ParamRow(
                *(index, param.name, param.shape, dtype, kinds[index]),
                *(param.numel, param.nbytes, ranges, buckets),
            )
        )
    return rows


def owners_of(plan: Plan) -> dict[int, tuple[Ranges, int]]:
    """For each parameter the ranks that own some of it, and in how many buckets it lies."""
    ranges: dict[int, set[tuple[int, int]]] = {}
    buckets: dict[int, int] = {}
    for stream in plan.streams:
        for param, owner in zip(stream.params, stream.owners, strict=False):
            ranges[param], buckets[param] = {(owner, owner)}, 1
    for number, bucket in enumerate(plan.buckets):
        if plan.streams[bucket.stream].kind is Kind.ELEMENTWISE:
            for segment in plan.segments(number):
                last = segment.offset + segment.stop - segment.start - 1
                run = plan.rank_at(number, segment.offset), plan.rank_at(number, last)
                ranges.setdefault(segment.param, set()).add(run)
                buckets[segment.param] = buckets.get(segment.param, 0) + 1
    return {param: (_merged(runs), buckets[param]) for param, runs in ranges.items()}


def _merged(runs: set[tuple[int, int]]) -> Ranges:
    """Ranges that touch, as one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def count_pieces(estimate: Estimate) -> int:
    return sum(estimate.pieces)


def as_json(estimate: Estimate, model: str) -> dict[str, Any]:
    """All of a plan, for other programs; pieces only if there are not too many."""
    plan = estimate.plan
    listed = count_pieces(estimate) <= LISTED_PIECES
    return {
        "onecopy": __version__,
        "model": model,
        "bucket_bytes": plan.bucket_bytes,
        **estimate.as_dict(),
        "ranks": [
            {
                "ranks": [row.first, row.last],
                "elements": row.elements,
                "pieces": row.pieces,
                "total_bytes": row.total,
            }
            for row in rank_rows(estimate)
        ],
        "parameters": [
            {
                "name": row.name,
                "shape": list(row.shape),
                "dtype": row.dtype,
                "kind": row.kind.value,
                "elements": row.numel,
                "bytes": row.nbytes,
                "owners": [list(run) for run in row.owners],
                "buckets": row.buckets,
            }
            for row in param_rows(estimate)
        ],
        "buckets": len(plan.buckets),
        "pieces": _pieces(estimate) if listed else None,
    }


def _pieces(estimate: Estimate) -> list[dict[str, Any]]:
    return [
        {
            "rank": piece.rank,
            "parameter": estimate.subject.params[piece.param].name,
            "start": piece.start,
            "stop": piece.stop,
            "bucket": piece.bucket,
        }
        for rank in range(estimate.world_size)
        for piece in estimate.plan.pieces(rank)
    ]


def training_in_words(estimate: Estimate) -> str:
    """What is trained, and how."""
    subject = estimate.subject
    dtypes = dict.fromkeys(str(param.dtype).removeprefix("torch.") for param in subject.params)
    frozen = len(subject.params) - len(subject.trained)
    kinds = [*dtypes, *([f"{frozen} of them frozen"] if frozen else [])]
    words = [
        f"{sum(param.numel for param in subject.params):,} parameters in "
        f"{counted(len(subject.params), 'tensor')} ({', '.join(kinds)})",
        " and ".join(cls.__name__ for cls in subject.classes),
    ]
    if any(subject.master_bytes(i) for i in subject.trained):
        words[-1] += f" on {str(subject.master_dtype).removeprefix('torch.')} master copies"
    words.append(_mode(estimate))
    words.append(estimate.setting.backend)
    return ", ".join(words)


def notes_on_peers(estimate: Estimate) -> list[str]:
    """What must be known to compare with them."""
    notes = [
        "DDP and the ZeRO stages are formulas, without the buffers that they have besides; DDP "
        "keeps a second copy of all gradients, alone or with an optimizer that is not attached, "
        "unless gradient_as_bucket_view=True."
    ]
    return notes + [f"{peer.name} {peer.note}." for peer in estimate.peers if peer.note]


def _mode(estimate: Estimate) -> str:
    if not estimate.setting.attached:
        return "drop-in"
    return "attached to DDP" if estimate.setting.under_ddp else "attached"
