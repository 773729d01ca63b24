"""Norm, clipping and loss scaling of gradients of which every rank holds a part."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.comm.group import RankGroup
from onecopy.planning.plan import Shard
from onecopy.torch_private import GradScalerBase, foreach_copy_, foreach_norm


def total_norm(
    rank_group: RankGroup,
    shards: Sequence[Shard],
    gradients: Sequence[torch.Tensor | None],
    present: Collection[int],
    norm_type: float,
) -> torch.Tensor:
    """What ``torch.nn.utils.get_total_norm`` gives for the gradients of the parameters
    ``present``, of whose pieces this rank has some, as float64. The same on all ranks.

    As torch does, it is the norm of the norms of the parameters: that matters for the norm of type
    zero only.
    """
    device = rank_group.control_device
    place = {index: number for number, index in enumerate(sorted(present))}
    mine = [
        (place[shard.param], grad)
        for shard, grad in zip(shards, gradients, strict=True)
        if grad is not None and grad.numel()
    ]
    places = torch.tensor([number for number, _ in mine], dtype=torch.int64, device=device)
    values = torch.zeros(len(mine), dtype=torch.float64, device=device)
    if mine:
        found = _norms([grad for _, grad in mine], norm_type)
        foreach_copy_(list(values.unbind()), found)
    combine = _extremes if math.isinf(norm_type) else _sums_of_powers
    norms = combine(rank_group, places, values, len(place), norm_type)
    total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type) if place else norms.sum()
    return total


def _norms(gradients: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each tensor, of 16-bit ones in float32.

    Why: the norm of a 16-bit tensor in its own dtype has three digits, and in float16 it is
    infinite above 65,504. With pieces of a parameter on several ranks, the error would depend on
    their number.
    """
    # Why abs: torch warns about some norms of complex numbers.
    sizes = [grad.abs() if grad.is_complex() else grad for grad in gradients]
    found: list[torch.Tensor] = [_NOT_YET] * len(sizes)
    for is_narrow in (False, True):
        chosen = [i for i, size in enumerate(sizes) if (size.dtype.itemsize < 4) is is_narrow]
        if chosen:
            dtype = torch.float32 if is_narrow else None
            norms = foreach_norm([sizes[i] for i in chosen], norm_type, dtype)
            for i, norm in zip(chosen, norms, strict=True):
                found[i] = norm
    return found


_NOT_YET = torch.empty(0)


def _sums_of_powers(
    rank_group: RankGroup,
    places: torch.Tensor,
    values: torch.Tensor,
    count: int,
    norm_type: float,
) -> torch.Tensor:
    """The norms of whole parameters from those of their pieces."""
    exponent = norm_type or 1.0  # that of type zero is a number of elements
    parts = values.new_zeros(count).index_add_(0, places, values**exponent)
    rank_group.total(parts).wait()
    norms: torch.Tensor = parts ** (1 / exponent)
    return norms


def _extremes(
    rank_group: RankGroup,
    places: torch.Tensor,
    values: torch.Tensor,
    count: int,
    norm_type: float,
) -> torch.Tensor:
    """The same for the types inf and -inf.

    A maximum over the ranks may lose a NaN, and not on all of them alike: it has a row of its own.
    """
    sign = 1.0 if norm_type > 0 else -1.0  # of the least, the negative is the greatest
    of_nothing = 0.0 if sign > 0 else -math.inf
    is_nan = values.isnan()
    parts = values.new_zeros((2, count))
    parts[0] = of_nothing
    parts[0].scatter_reduce_(0, places, (sign * values).masked_fill(is_nan, of_nothing), "amax")
    parts[1].scatter_reduce_(0, places, is_nan.to(parts.dtype), "amax")
    rank_group.maximum(parts).wait()
    norms: torch.Tensor = (sign * parts[0]).masked_fill(parts[1] > 0, math.nan)
    return norms


def clip_coefficient(norm: torch.Tensor, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
    """What to multiply gradients of this norm by, as ``torch.nn.utils.clip_grad_norm_`` does."""
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped. To clip them "
            "all the same, pass error_if_nonfinite=False"
        )
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


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
