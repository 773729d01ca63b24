"""Bits that flip in memory."""

from __future__ import annotations

import random

import torch


def flip(tensor: torch.Tensor, source: random.Random) -> None:
    """One bit of a tensor's memory, as a particle does it: nobody is told."""
    memory = tensor.detach()
    memory = torch.view_as_real(memory) if memory.is_complex() else memory
    dense = memory.untyped_storage()
    size = memory.element_size()
    element = source.randrange(memory.numel())
    at = memory.storage_offset()
    for index, stride in zip(
        torch.unravel_index(torch.tensor(element), memory.shape), memory.stride(), strict=True
    ):
        at += int(index) * stride
    byte = at * size + source.randrange(size)
    dense[byte] = dense[byte] ^ (1 << source.randrange(8))
