"""The memory layout of dense tensors: elements in storage order, and ranges of them as chunks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

_T = TypeVar("_T")


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory without gaps, in any order of dimensions."""
    expected = 1
    dims = ((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1)
    if tensor.numel() == 0:
        return True
    for stride, size in sorted(dims):
        if stride != expected:
            return False
        expected *= size
    return True


def flat_range(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a dense tensor in storage order, sharing its memory."""
    return tensor.as_strided((stop - start,), (1,), tensor.storage_offset() + start)


def part_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """``flat_range``, or the whole tensor if it has gaps: such tensors are never cut."""
    return flat_range(tensor, start, stop) if is_dense(tensor) else tensor


def in_layout_of(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, with its elements in the same storage order as those of ``param``.

    Why: pairing a contiguous gradient with a channels_last weight element by element in storage
    order would mix up the elements.
    """
    same = all(
        a == b or size == 1  # the stride of a dimension of size one means nothing
        for a, b, size in zip(param.stride(), tensor.stride(), param.shape, strict=True)
    )
    if same:
        return tensor
    laid_out = torch.empty_strided(
        param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return laid_out.copy_(tensor)


def one_of_each(values: Iterable[_T]) -> list[_T]:
    """The same values, with one object for all that are equal.

    Why: thousands of parameters have few shapes; each remembered shape would be an object.
    """
    known: dict[_T, _T] = {}
    return [known.setdefault(value, value) for value in values]


def fills_its_storage(tensor: torch.Tensor) -> bool:
    """Whether the storage holds nothing but this tensor."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def first_overlap(params: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """The positions of two tensors that share an element; None if no two do."""
    spans = sorted(
        (str(param.device), *_span(param), position)
        for position, param in enumerate(params)
        if param.numel() and param.device.type != "meta"
    )
    for at, (device, _, stop, a) in enumerate(spans):
        for other, start, _, b in itertools.islice(spans, at + 1, None):
            if other != device or start >= stop:
                break
            if _share_elements(params[a], params[b]):
                return (a, b) if a < b else (b, a)
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """[start, stop) of the addresses of a tensor, gaps included."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    return start, start + reach * tensor.element_size()


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """For tensors whose spans overlap: interleaved columns of a matrix share no element."""
    if (is_dense(a) and is_dense(b)) or a.element_size() != b.element_size():
        return True
    (a_start, a_stop), (b_start, b_stop) = _span(a), _span(b)
    base, size = min(a_start, b_start), a.element_size()
    places = torch.arange((max(a_stop, b_stop) - base) // size)
    of_a = places.as_strided(a.shape, a.stride(), (a_start - base) // size)
    of_b = places.as_strided(b.shape, b.stride(), (b_start - base) // size)
    return bool(torch.isin(of_a.contiguous(), of_b.contiguous()).any())


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangular part of a tensor whose elements are consecutive in storage order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # elements of the tensor, in storage order
    stop: int

    def view(self, flat: torch.Tensor, first: int, order: Sequence[int]) -> torch.Tensor:
        """The chunk as a view of ``flat``, which holds the tensor's elements from ``first`` on."""
        run = flat[self.start - first : self.stop - first]
        back = [order.index(dim) for dim in range(len(order))]
        return run.view([self.sizes[dim] for dim in order]).permute(back)

    def overlap(self, offsets: Sequence[int], sizes: Sequence[int]) -> Chunk | None:
        """The intersection with another chunk of the tensor, without ``start`` and ``stop``."""
        first = [max(a, b) for a, b in zip(self.offsets, offsets, strict=True)]
        last = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, offsets, sizes, strict=True)
        ]
        lengths = [stop - start for start, stop in zip(first, last, strict=True)]
        if any(length <= 0 for length in lengths):
            return None
        return Chunk(tuple(first), tuple(lengths), 0, 0)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def storage_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a dense tensor, from the slowest in memory to the fastest."""
    if math.prod(shape) == 0:
        return tuple(range(len(shape)))
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim])))


def chunks_of(shape: Sequence[int], order: Sequence[int], start: int, stop: int) -> Iterator[Chunk]:
    """Elements [start, stop) of a tensor, in storage order, as at most 2 N - 1 chunks.

    An empty tensor is one empty chunk, so that checkpoints have an entry for it.
    """
    if math.prod(shape) == 0:
        yield Chunk((0,) * len(shape), tuple(shape), 0, 0)
        return
    in_storage = [shape[dim] for dim in order] or [1]
    strides = [math.prod(in_storage[dim + 1 :]) for dim in range(len(in_storage))]
    places = [order.index(dim) for dim in range(len(order))]
    while start < stop:
        # The slowest dimension along which something complete begins here.
        dim = next(d for d, n in enumerate(strides) if start % n == 0 and start + n <= stop)
        offsets = [start // n % size for n, size in zip(strides, in_storage, strict=True)]
        count = min((stop - start) // strides[dim], in_storage[dim] - offsets[dim])
        sizes = [1] * dim + [count] + in_storage[dim + 1 :]
        end = start + count * strides[dim]
        yield Chunk(
            tuple(offsets[at] for at in places), tuple(sizes[at] for at in places), start, end
        )
        start = end
