"""The bits of a tensor as one 64-bit number, computed where the tensor is.

Sums of the memory as 64-bit words, modulo 2**64. A flipped bit changes one word by a power of two,
which no sum and no product with an odd number can hide: that single bits are noticed is certain.
"""

from __future__ import annotations

import torch

from onecopy.planning.layout import flat_range, is_dense

CHUNK = 1 << 16  # words: what the weights are made for, so that they stay in the cache
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # an arbitrary odd number, as a signed 64-bit one
WORD_BYTES = 8
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Reads the memory once, as fast as it can be read. Elements that have changed places are not
    noticed: it is for memory that nobody should have touched."""
    words, rest = words_of(tensor)
    total: torch.Tensor = words.sum()
    return total + rest.sum() if rest.numel() else total


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """The same with odd weights, which notices elements in other places, too."""
    words, rest = words_of(tensor)
    weights = torch.arange(
        1, 2 * max(1, min(CHUNK, words.numel())), 2, dtype=torch.int64, device=tensor.device
    )
    total = (rest * weights.new_tensor([1, 3, 5, 7, 9, 11, 13, 15])[: rest.numel()]).sum()
    for chunk in torch.split(words, CHUNK) if words.numel() else ():
        weighted = _weighted_sum(chunk, weights[: chunk.numel()])
        total = total * ODD + weighted
    return total


def _weighted_sum(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if words.device.type == "cpu":
        return torch.dot(words, weights)  # in one pass; accelerators have it for floats only
    return (words * weights).sum()


def words_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory in words, and the few elements at the end that fill none."""
    memory = tensor.detach()
    if memory.is_complex():
        memory = torch.view_as_real(memory)
    # Not as what they are: a copy of a bool need not have its bits.
    memory = memory.view(INTEGERS[memory.element_size()])
    dense = memory if is_dense(memory) else memory.contiguous()
    integers = flat_range(dense, 0, dense.numel())
    in_word = WORD_BYTES // dense.element_size()
    if integers.storage_offset() % in_word:
        integers = integers.clone()  # words begin where the tensor does, wherever in memory it lies
    end = integers.numel() // in_word * in_word
    return integers[:end].view(torch.int64), integers[end:]
