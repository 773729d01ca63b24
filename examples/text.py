"""Text that is on every machine: the sources of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library(size: int) -> Tensor:
    """Return the first `size` bytes of the standard library's top-level modules, as uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            return torch.frombuffer(text, dtype=torch.uint8)[:size]
    raise RuntimeError(f"expected {size} bytes of Python sources in {folder}, got {len(text)}")


def draw_batch(
    text: Tensor, batch_size: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `batch_size` windows at random: the bytes, and the bytes that follow each of them."""
    starts = torch.randint(len(text) - context, (batch_size,), generator=generator)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
