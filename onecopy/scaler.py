"""Loss scaling in attached mode, where a rank holds a part of the gradients only."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.torch_private import GradScalerBase


class GradScaler(GradScalerBase):
    """``torch.amp.GradScaler`` that also serves an optimizer in attached mode.

    An infinity or NaN in any rank's share makes all ranks skip the step and lower the scale. A step
    that is skipped leaves no gradients behind.
    """

    def unscaled(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, allow_fp16: bool
    ) -> torch.Tensor | None:
        ours: Any = optimizer
        if getattr(optimizer, "_attachment", None) is None:
            return None
        found: torch.Tensor = ours._unscale(inv_scale, allow_fp16)
        return found

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's."""
        is_ours = hasattr(optimizer, "_skip_step")
        if not is_ours or not self.is_enabled():  # switched off, it skips no steps
            return super().step(optimizer, *args, **kwargs)
        ours: Any = optimizer
        attachment, steps = ours._attachment, ours._steps
        with contextlib.nullcontext() if attachment is None else attachment.scaled():
            result = super().step(optimizer, *args, **kwargs)
        if ours._steps == steps:
            ours._skip_step()
        return result
