"""The bits of a tensor as one 64-bit number, computed where the tensor is.

Sums of the memory as 64-bit words, modulo 2**64. A flipped bit changes one word by a power of two,
which no sum and no product with an odd number can hide: that single bits are noticed is certain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onecopy.planning.layout import flat_range, is_dense

CHUNK = 1 << 16  # words: what the weights are made for, so that they stay in the cache
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # an arbitrary odd number, as a signed 64-bit one
_WORD_BYTES = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Reads the memory once, as fast as it can be read. Elements that have changed places are not
    noticed: it is for memory that nobody should have touched."""
    words, rest = _words(tensor)
    total: torch.Tensor = words.sum()
    return total + rest.sum() if rest.numel() else total


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """The same with odd weights, which notices elements in other places, too."""
    words, rest = _words(tensor)
    weights = torch.arange(
        1, 2 * max(1, min(CHUNK, words.numel())), 2, dtype=torch.int64, device=tensor.device
    )
    total = (rest * weights.new_tensor([1, 3, 5, 7, 9, 11, 13, 15])[: rest.numel()]).sum()
    for chunk in torch.split(words, CHUNK) if words.numel() else ():
        weighted = _weighted_sum(chunk, weights[: chunk.numel()])
        total = total * ODD + weighted
    return total


class Checksums:
    """Those of the same tensors, again and again: what does not change is prepared once."""

    @torch.inference_mode(False)
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._places = [(tensor.data_ptr(), tensor.shape) for tensor in tensors]
        devices = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
        # Where the others are, so that nothing is waited for.
        self._device = devices[0] if devices else torch.device("cpu")
        numbers: dict[torch.dtype, list[int]] = {}
        larger: list[int] = []
        for index, tensor in enumerate(self._tensors):
            is_number = tensor.dim() == 0 and tensor.device.type == "cpu"
            if is_number and tensor.element_size() < _WORD_BYTES:
                numbers.setdefault(tensor.dtype, []).append(index)
            else:
                larger.append(index)
        # Single elements, as `step`, are read in one go: those of one dtype have cells in a row.
        order = [*larger, *(index for indices in numbers.values() for index in indices)]
        self._cell_of = torch.tensor(order, dtype=torch.int64, device="cpu").argsort()
        self._cells = torch.zeros(len(order), dtype=torch.int64, device="cpu")
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []  # words, and where the sum goes
        self._rests: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._others: list[int] = []  # to be read the long way, by position
        for index, cell in zip(larger, self._cells[: len(larger)], strict=True):
            self._prepare(index, self._tensors[index].detach(), cell)
        self._numbers: list[tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]] = []
        start = len(larger)
        for dtype, indices in numbers.items():
            cells = self._cells[start : start + len(indices)]
            together = torch.empty(len(indices), dtype=dtype, device="cpu")
            self._numbers.append(
                ([self._tensors[index].detach() for index in indices], together, cells)
            )
            start += len(indices)

    def _prepare(self, index: int, tensor: torch.Tensor, cell: torch.Tensor) -> None:
        is_misaligned = tensor.storage_offset() * tensor.element_size() % _WORD_BYTES
        if tensor.device.type != "cpu" or not is_dense(tensor) or is_misaligned:
            self._others.append(index)
            return
        words, rest = _words(tensor)
        self._sums.append((words, cell))
        if rest.numel():
            self._rests.append((rest, cell))

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same ones, where they were."""
        return len(tensors) == len(self._tensors) and all(
            tensor is known and (tensor.data_ptr(), tensor.shape) == place
            for tensor, known, place in zip(tensors, self._tensors, self._places, strict=True)
        )

    def now(self) -> torch.Tensor:
        """The numbers, in the order of the tensors."""
        for words, cell in self._sums:
            torch.sum(words, 0, out=cell)
        for rest, cell in self._rests:
            cell.add_(rest.sum())
        for tensors, together, cells in self._numbers:
            torch.stack(tensors, out=together)
            cells.copy_(together.view(_INTEGERS[together.element_size()]))
        found = self._cells.index_select(0, self._cell_of)
        if self._device.type != "cpu":
            found = found.to(self._device, non_blocking=True)
        for index in self._others:
            found[index] = checksum(self._tensors[index])
        return found


def _weighted_sum(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if words.device.type == "cpu":
        return torch.dot(words, weights)  # in one pass; accelerators have it for floats only
    return (words * weights).sum()


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory in words, and the few elements at the end that fill none."""
    memory = tensor.detach()
    if memory.is_complex():
        memory = torch.view_as_real(memory)
    # Not as what they are: a copy of a bool need not have its bits.
    memory = memory.view(_INTEGERS[memory.element_size()])
    dense = memory if is_dense(memory) else memory.contiguous()
    integers = flat_range(dense, 0, dense.numel())
    in_word = _WORD_BYTES // dense.element_size()
    if integers.storage_offset() % in_word:
        integers = integers.clone()  # words begin where the tensor does, wherever in memory it lies
    end = integers.numel() // in_word * in_word
    return integers[:end].view(torch.int64), integers[end:]
