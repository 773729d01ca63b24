"""Loss scaling in attached mode, where a rank holds a part of the gradients only."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.amp import GradScaler as TorchGradScaler
from torch.optim import Optimizer


class GradScaler(TorchGradScaler):
    """``torch.amp.GradScaler`` that also serves an optimizer in attached mode.

    An infinity or NaN in any rank's share makes all ranks skip the step and lower the scale. A step
    that is skipped leaves no gradients behind.
    """

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        attachment: Any = getattr(optimizer, "_attachment", None)
        if attachment is None:
            found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
                optimizer, inv_scale, found_inf, allow_fp16
            )
            return found
        attached: Any = optimizer
        verdict = attached._unscale(inv_scale, allow_fp16).to(found_inf)
        return {found_inf.device: torch.maximum(found_inf, verdict)}

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
