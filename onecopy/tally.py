"""How much every rank owns, counted without listing pieces.

A parameter covers most slots of a bucket entirely. Those are counted by arithmetic, so a tally of
405 billion parameters over 16,384 ranks takes O(parameters + buckets + ranks), not O(pieces)::

    slots        |  rank 0  |  rank 1  |  rank 2  |  rank 3  |
    a parameter        |-------------------------------|
                  counted    all of it   all of it   counted
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from onecopy.kinds import Kind
from onecopy.plan import Plan, Segment
from onecopy.words import counted

Label = Hashable


@dataclass(frozen=True, slots=True)
class Tally:
    """Elements and pieces by label and rank; padding is not counted."""

    elements: Mapping[Label, list[int]]
    pieces: Mapping[Label, list[int]]

    def loads(self, world_size: int) -> list[int]:
        """Elements of every rank, whatever their label."""
        return [sum(of[rank] for of in self.elements.values()) for rank in range(world_size)]


def tally(plan: Plan, label_of: Callable[[int], Label] = lambda _: None) -> Tally:
    """Count what every rank owns; ``label_of`` a parameter says under what it is counted."""
    elements: dict[Label, _Count] = {}
    pieces: dict[Label, _Count] = {}

    def counts(param: int) -> tuple[_Count, _Count]:
        label = label_of(param)
        if label not in elements:
            elements[label], pieces[label] = _Count(plan.world_size), _Count(plan.world_size)
        return elements[label], pieces[label]

    for stream in plan.streams:
        for param, numel, owner in zip(stream.params, stream.numels, stream.owners, strict=False):
            of_elements, of_pieces = counts(param)
            of_elements.add(owner, numel)
            of_pieces.add(owner, 1)
    for number, bucket in enumerate(plan.buckets):
        if plan.streams[bucket.stream].kind is Kind.ELEMENTWISE:
            for segment in plan.segments(number):
                _add_segment(plan, number, segment, *counts(segment.param))
    return Tally(
        {label: count.by_rank() for label, count in elements.items()},
        {label: count.by_rank() for label, count in pieces.items()},
    )


def imbalance(loads: list[int]) -> float:
    """The fullest rank, relative to an even share.

    >>> imbalance([2, 4])
    1.3333333333333333
    """
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def in_one_line(plan: Plan, classes: Iterable[type]) -> str:
    """What was planned, for the log."""
    loads = tally(plan).loads(plan.world_size)
    whole = sum(len(stream.params) for stream in plan.streams if stream.kind is Kind.WHOLE)
    kept = f", {whole} of them kept whole" if whole else ""
    names = " and ".join(dict.fromkeys(cls.__name__ for cls in classes))
    return (
        f"planned {counted(len(plan.params), 'parameter')}{kept}, {sum(loads):,} elements, for "
        f"{names} on {counted(plan.world_size, 'rank')} in {counted(len(plan.buckets), 'bucket')}: "
        f"at most {max(loads):,} elements on a rank, {imbalance(loads):.3f} times an even share"
    )


def slot_elements(plan: Plan) -> list[list[int]]:
    """Elements in the slots of each stream, by rank: with the padding, as gradients are held."""
    found = [[0] * plan.world_size for _ in plan.streams]
    for number, bucket in enumerate(plan.buckets):
        stream, slots = plan.streams[bucket.stream], found[bucket.stream]
        if stream.kind is Kind.WHOLE:
            for rank, (start, stop) in owned_ranges(plan, number).items():
                slots[rank] += stop - start
        else:
            for rank in bucket.extra:
                slots[rank] += stream.unit
    for at, stream in enumerate(plan.streams):
        if stream.kind is Kind.ELEMENTWISE:
            each = sum(equal_part(plan, n) for n, b in enumerate(plan.buckets) if b.stream == at)
            found[at] = [extra + each for extra in found[at]]
    return found


def equal_part(plan: Plan, bucket: int) -> int:
    """Elements of an elementwise bucket that every rank has; those in ``extra`` a unit more."""
    b = plan.buckets[bucket]
    unit = plan.streams[b.stream].unit
    return b.numel // unit // plan.world_size * unit


def owned_ranges(plan: Plan, bucket: int) -> dict[int, tuple[int, int]]:
    """What the owners have in a bucket of whole tensors: for each of them one run."""
    b = plan.buckets[bucket]
    stream = plan.streams[b.stream]
    found: dict[int, tuple[int, int]] = {}
    for i, first, last in stream.between(b.start, b.stop):
        if last > first:
            start = stream.starts[i] - b.start
            owner = stream.owners[i]
            found[owner] = found.get(owner, (start, start))[0], start + last
    return found


class _Count:
    """A number for each rank, to which much can be added at once."""

    def __init__(self, world_size: int) -> None:
        self._points = [0] * world_size
        self._steps = [0] * (world_size + 1)  # differences between neighbours

    def add(self, rank: int, count: int) -> None:
        self._points[rank] += count

    def add_between(self, first: int, last: int, count: int) -> None:
        """To the ranks after ``first`` and before ``last``."""
        if last > first + 1:
            self._steps[first + 1] += count
            self._steps[last] -= count

    def by_rank(self) -> list[int]:
        return [a + b for a, b in zip(self._points, accumulate(self._steps), strict=False)]


def _add_segment(
    plan: Plan, bucket: int, segment: Segment, elements: _Count, pieces: _Count
) -> None:
    start, stop = segment.offset, segment.offset + segment.stop - segment.start
    first, last = plan.rank_at(bucket, start), plan.rank_at(bucket, stop - 1)
    if first == last:
        elements.add(first, stop - start)
        pieces.add(first, 1)
        return
    elements.add(first, plan.slot(bucket, first)[1] - start)
    elements.add(last, stop - plan.slot(bucket, last)[0])
    pieces.add(first, 1)
    pieces.add(last, 1)
    each = equal_part(plan, bucket)
    elements.add_between(first, last, each)
    pieces.add_between(first, last, 1 if each else 0)
    unit = plan.streams[plan.buckets[bucket].stream].unit
    for rank in plan.buckets[bucket].extra:
        if first < rank < last:
            elements.add(rank, unit)
            pieces.add(rank, 0 if each else 1)
