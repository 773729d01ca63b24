"""Equal bit for bit, unlike ``torch.equal``: to it 0.0 equals -0.0, and no nan itself."""

from __future__ import annotations

import torch


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, element after element."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def have_equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of the same dtype and shape."""
    same_form = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
    return same_form and torch.equal(bits_of(a), bits_of(b))


def count_of_different_elements(a: torch.Tensor, b: torch.Tensor) -> int:
    """Of two tensors of the same form."""
    differs = (bits_of(a) != bits_of(b)).view(-1, a.element_size())
    return int(differs.any(dim=1).sum())
