"""A range of a tensor's elements as rectangular boxes of the tensor: pure arithmetic.

Checkpoints know rectangular parts of tensors; a piece is a range of elements in storage order. A
range of an N-d tensor is at most 2N - 1 boxes. Elements 4 to 18 of a 4 x 6 tensor::

    . . . . a a        a   row 0, columns 4 and 5
    b b b b b b        b   rows 1 and 2
    b b b b b b
    c . . . . .        c   row 3, column 0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor whose elements follow each other in storage order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # elements of the tensor, in storage order
    stop: int

    def view(self, flat: torch.Tensor, first: int, order: Sequence[int]) -> torch.Tensor:
        """The box within ``flat``, which holds the tensor's elements from ``first`` on."""
        run = flat[self.start - first : self.stop - first]
        back = [order.index(dim) for dim in range(len(order))]
        return run.view([self.sizes[dim] for dim in order]).permute(back)

    def overlap(self, offsets: Sequence[int], sizes: Sequence[int]) -> Box | None:
        """The common part with another box of the tensor; its range means nothing."""
        first = [max(a, b) for a, b in zip(self.offsets, offsets, strict=True)]
        last = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, offsets, sizes, strict=True)
        ]
        lengths = [stop - start for start, stop in zip(first, last, strict=True)]
        if any(length <= 0 for length in lengths):
            return None
        return Box(tuple(first), tuple(lengths), 0, 0)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def storage_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a dense tensor, from the slowest in memory to the fastest."""
    if math.prod(shape) == 0:
        return tuple(range(len(shape)))
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim])))


def boxes_of(shape: Sequence[int], order: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of a tensor, in storage order, as boxes of the tensor.

    An empty tensor is one empty box, so that it leaves a trace.
    """
    if math.prod(shape) == 0:
        yield Box((0,) * len(shape), tuple(shape), 0, 0)
        return
    permuted = [shape[dim] for dim in order]
    for offsets, sizes, first in _rows(permuted, start, stop, 0):
        yield Box(
            tuple(offsets[order.index(dim)] for dim in range(len(order))),
            tuple(sizes[order.index(dim)] for dim in range(len(order))),
            first,
            first + math.prod(sizes),
        )


def _rows(
    shape: Sequence[int], start: int, stop: int, base: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(offsets, sizes, first element) of boxes in a contiguous tensor that begins at ``base``."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape), base + start
        return
    row = math.prod(shape[1:])
    first, into_first = divmod(start, row)
    last, into_last = divmod(stop, row)
    if first == last:
        yield from _in_row(shape, first, into_first, into_last, base)
        return
    if into_first:
        yield from _in_row(shape, first, into_first, row, base)
        first += 1
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield (first, *zeros), (last - first, *shape[1:]), base + first * row
    if into_last:
        yield from _in_row(shape, last, 0, into_last, base)


def _in_row(
    shape: Sequence[int], row: int, start: int, stop: int, base: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    at = base + row * math.prod(shape[1:])
    for offsets, sizes, first in _rows(shape[1:], start, stop, at):
        yield (row, *offsets), (1, *sizes), first
