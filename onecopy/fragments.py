"""Parts of whole tensors, and trees of them: what a checkpoint holds of a rank's state.

A *fragment* is what this rank has of one tensor of the unsharded state: one part per piece, each a
1-D run of the tensor's elements in storage order. A tree is nested dicts and lists, as torch's
checkpoint functions use them, with fragments in place of tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from onecopy.boxes import Box, boxes_of, storage_order
from onecopy.buffers import flat_range, is_dense


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of a tensor in storage order, and where they are."""

    start: int
    stop: int
    data: torch.Tensor  # 1-D


@dataclass(frozen=True, slots=True)
class Fragment:
    """What this rank holds of a tensor."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # of the dimensions in storage
    parts: tuple[Part, ...]
    is_mine_to_write: bool = True  # a scalar is on many ranks, and one writes it

    @classmethod
    def of_whole(cls, tensor: torch.Tensor, is_mine_to_write: bool = True) -> Fragment:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        tensor = tensor if is_dense(tensor) else tensor.contiguous()
        part = Part(0, tensor.numel(), flat_range(tensor, 0, tensor.numel()))
        order = storage_order(tensor.shape, tensor.stride())
        return cls(tuple(tensor.shape), order, (part,), is_mine_to_write)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].data.dtype

    @property
    def nbytes(self) -> int:
        return sum(part.stop - part.start for part in self.parts) * self.dtype.itemsize

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """The parts as boxes of the tensor, with views of the data."""
        for part in self.parts:
            for box in boxes_of(self.shape, self.order, part.start, part.stop):
                yield box, box.view(part.data, part.start, self.order)

    def like(self) -> Fragment:
        """The same with fresh memory, to be filled."""
        parts = [
            replace(part, data=part.data.new_empty(part.stop - part.start)) for part in self.parts
        ]
        return replace(self, parts=tuple(parts))

    def staged(self) -> Fragment:
        """A copy on the CPU, which the optimizer's next step does not change."""
        parts = [replace(part, data=part.data.to("cpu", copy=True)) for part in self.parts]
        return replace(self, parts=tuple(parts))

    def __deepcopy__(self, _: Any) -> Fragment:
        """torch's stagers copy objects deeply: without this they would walk through all of it."""
        return self.staged()

    def whole(self) -> torch.Tensor:
        """The tensor itself, where this rank has all of it in one part."""
        (box,) = self.boxes()
        return box[1]


Leaf = type | tuple[type, ...]


def replaced(tree: Any, leaf: Leaf, change: Callable[[Any], Any]) -> Any:
    """The tree with every leaf of a type replaced; tuples become lists, which DCP looks into."""
    if isinstance(tree, leaf):
        return change(tree)
    if isinstance(tree, dict):
        return {str(key): replaced(value, leaf, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and has_leaf(tree, leaf):
        return [replaced(value, leaf, change) for value in tree]
    return tree


def has_leaf(tree: Any, leaf: Leaf) -> bool:
    if isinstance(tree, (dict, list, tuple)):
        return any(has_leaf(v, leaf) for v in (tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, leaf)


def rebuilt(like: Any, tree: Any) -> Any:
    """``tree``, which may have gone through a file, in the containers and with the keys of
    ``like``."""
    if isinstance(like, dict) and isinstance(tree, dict):
        keys = {str(key): key for key in like}
        return {
            keys.get(key, key): rebuilt(like.get(keys.get(key)), value)
            for key, value in tree.items()
        }
    if isinstance(like, (list, tuple)) and isinstance(tree, (list, tuple)):
        # A list may have grown: the items that came later are like the last.
        examples = itertools.chain(like, itertools.repeat(like[-1] if like else None))
        items = [rebuilt(a, b) for a, b in zip(examples, tree, strict=False)]
        return tuple(items) if isinstance(like, tuple) else items
    return tree


Path_ = tuple[str | int, ...]


def dotted(path: Path_) -> str:
    """A path as DCP writes it."""
    return ".".join(map(str, path))


def leaves(tree: Any) -> Iterator[tuple[Path_, Any]]:
    """(path, value) of everything that has no fragments within it."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            for path, leaf in leaves(value):
                yield (str(key), *path), leaf
    elif isinstance(tree, list) and any(isinstance(v, (dict, list, Fragment)) for v in tree):
        for number, value in enumerate(tree):
            for path, leaf in leaves(value):
                yield (number, *path), leaf
    else:
        yield (), tree
