"""What state a class keeps, in bytes, found by letting it step on stand-ins.

An elementwise class keeps so many bytes for every element, and a few for every piece (``step``).
For a class that needs whole tensors it depends on the shape: a tensor without memory (on the meta
device) takes the step if the class can, otherwise a small one whose dimensions are told from one
another by their prime factors, so that the state of the real one can be read off it::

    parameter (4096, 14336)  ->  stand-in (131, 137)  ->  row_var (131, 1)  ->  (4096, 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.blueprint import Maker, is_toy_shaped, tensors_in
from onecopy.intake import options_of

_PRIMES = (131, 137, 139, 149, 151, 157)
_LARGE = 128  # classes that factorise do so from about this size on


@dataclass(frozen=True, slots=True)
class Recipe:
    """State of an elementwise class, by key: bytes for each element, and for each piece."""

    per_element: tuple[tuple[str, int], ...]
    per_piece: tuple[tuple[str, int], ...]

    def bytes_for(self, elements: int, pieces: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for counts, times in ((self.per_element, elements), (self.per_piece, pieces)):
            for key, size in counts:
                found[key] = found.get(key, 0) + size * times
        return found


def maker_of(cls: type[Optimizer], group: Mapping[str, Any], defaults: Mapping[str, Any]) -> Maker:
    """Makes fresh optimizers of a group's class with its options."""
    options = {**defaults, **options_of(group)}
    return Maker(cls, lambda stand_in: cls([stand_in], **options), options.get("lr", 0.0))


def recipe_for_cut(maker: Maker, dtype: torch.dtype) -> Recipe:
    per_element, per_piece = {}, {}
    for key, value in maker.state_for_cut(dtype, torch.device("cpu")).items():
        tensors = tensors_in(value)
        per_element[str(key)] = sum(t.element_size() for t in tensors if is_toy_shaped(t))
        per_piece[str(key)] = _nbytes(t for t in tensors if not is_toy_shaped(t))
    return Recipe(_present(per_element), _present(per_piece))


def state_of_whole(maker: Maker, shape: Sequence[int], dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the state of a whole parameter, by key."""
    try:
        state = maker.state_for(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        originals: dict[int, int] = {}
    except Exception:  # it looks at values, which a meta tensor has not
        small, originals = _small(shape)
        state = maker.state_for(torch.zeros(small, dtype=dtype))
    found = {
        str(key): sum(_real_numel(t, originals) * t.element_size() for t in tensors_in(value))
        for key, value in state.items()
    }
    return dict(_present(found))


def _small(shape: Sequence[int]) -> tuple[tuple[int, ...], dict[int, int]]:
    """A small shape, and the real size for each of the primes in it."""
    primes = iter(_PRIMES)
    small, originals = [], {}
    for size in shape:
        stand_in = size if size < _LARGE else next(primes, size)
        small.append(stand_in)
        if stand_in != size:
            originals[stand_in] = size
    return tuple(small), originals


def _real_numel(tensor: torch.Tensor, originals: Mapping[int, int]) -> int:
    """Elements of a state tensor, if the parameter had its real size.

    >>> _real_numel(torch.empty(131, 3), {131: 4096})
    12288
    """
    return math.prod(_real_size(size, originals) for size in tensor.shape)


def _real_size(size: int, originals: Mapping[int, int]) -> int:
    factor = 1
    for prime, original in originals.items():
        while size and size % prime == 0:
            size, factor = size // prime, factor * original
    return size * factor


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _present(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((key, count) for key, count in sorted(counts.items()) if count)
