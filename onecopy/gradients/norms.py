"""Norm, clipping, loss scaling and full tensors of gradients of which every rank owns a part.

The functions are collective, and take what has reduced the gradients, after ``judge``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.comm.group import Part, RankGroup
from onecopy.gradients.reducer import GradientReducer
from onecopy.planning.layout import flat_range, is_dense
from onecopy.planning.param_groups import gradient_dtype
from onecopy.torch_private import (
    GradScalerBase,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    foreach_unscale_,
)


def _dtypes(reducer: GradientReducer) -> set[torch.dtype]:
    """Those in which the ranks hold the gradients; real ones for complex gradients."""
    params, master_dtype = reducer.prepared.params, reducer.master_dtype
    return {gradient_dtype(params[index], master_dtype).to_real() for index in reducer.present}


def _by_dtype(reducer: GradientReducer) -> Iterable[list[torch.Tensor]]:
    """The gradients of this rank in lists of one device and dtype. Complex ones are viewed as
    real: torch's kernels for scaling support real numbers only."""
    lists: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for _, grad in reducer.gradients():
        real = torch.view_as_real(grad) if grad.is_complex() else grad
        lists.setdefault((real.device, real.dtype), []).append(real)
    return lists.values()


def grad_norm(reducer: GradientReducer, norm_type: float) -> torch.Tensor:
    """The norm of all gradients, at least in float32: as narrow as narrow gradients, it would
    lose digits."""
    dtype = functools.reduce(torch.promote_types, _dtypes(reducer), torch.float32)
    return _total_norm(reducer, norm_type).to(dtype)


@torch.no_grad()
def clip_grad_norm_(
    reducer: GradientReducer, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale all gradients as ``torch.nn.utils.clip_grad_norm_`` does; their norm before."""
    norm = grad_norm(reducer, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped. To clip them "
            "all the same, pass error_if_nonfinite=False"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in _by_dtype(reducer):
        foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


@torch.no_grad()
def unscale_(reducer: GradientReducer, inv_scale: float, allow_fp16: bool) -> torch.Tensor:
    """Undo the scaling of the loss; 1.0 if any rank has found an infinity or NaN, else 0.0."""
    if torch.float16 in _dtypes(reducer) and not allow_fp16:
        raise ValueError(
            "gradients of float16 parameters cannot be unscaled, as with torch's scaler: build "
            "the optimizer with master_dtype=torch.float32, or keep the parameters in float32 "
            "and use torch.autocast"
        )
    found_inf = torch.zeros(1, device=reducer.rank_group.control_device)
    for gradients in _by_dtype(reducer):
        found = torch.zeros(1, device=gradients[0].device)
        inverse = torch.as_tensor(inv_scale, dtype=torch.float32, device=found.device)
        foreach_unscale_(gradients, found, inverse)
        found_inf = torch.maximum(found_inf, found.to(found_inf.device))
    reducer.rank_group.maximum(found_inf).wait()
    return found_inf


@torch.no_grad()
def full_grad(reducer: GradientReducer, index: int) -> torch.Tensor | None:
    """The gradient of a parameter, on all ranks."""
    if index not in reducer.present:
        return None
    param, plan = reducer.prepared.params[index], reducer.prepared.plan
    full = torch.empty_like(param, dtype=gradient_dtype(param, reducer.master_dtype))
    full = full if is_dense(param) else full.contiguous()
    for shard, grad in reducer.gradients():
        if shard.param == index:
            flat_range(full, shard.start, shard.stop).copy_(flat_range(grad, 0, grad.numel()))
    parts = [
        Part(shard.rank, flat_range(full, shard.start, shard.stop))
        for bucket in reducer.prepared.buckets_of[index]
        for rank in range(plan.world_size)
        for shard in plan.shards_in(bucket, rank)
        if shard.param == index and shard.numel
    ]
    reducer.rank_group.broadcast_tensors(parts).wait()
    return full


# What the user calls them, in messages and in what ranks tell each other.
OPERATIONS: dict[str, Callable[..., torch.Tensor | None]] = {
    "clip_grad_norm_": clip_grad_norm_,
    "grad_norm": grad_norm,
    "full_grad of parameter ": full_grad,
    "GradScaler.unscale_": unscale_,
}


# -------------------------------------------------------------------------- the norm


def _total_norm(reducer: GradientReducer, norm_type: float) -> torch.Tensor:
    """What ``torch.nn.utils.get_total_norm`` gives for the gradients of all parameters that have
    one, as float64. The same on all ranks.

    As in torch, it is the norm of the norms of the parameters: that matters for the norm of type
    zero only.
    """
    device = reducer.rank_group.control_device
    rows = {index: row for row, index in enumerate(sorted(reducer.present))}
    # Why abs: torch warns about some norms of complex numbers.
    parts = reducer.gradients()
    sizes = [(s.param, grad.abs() if grad.is_complex() else grad) for s, grad in parts]
    places: list[int] = []
    norms: list[torch.Tensor] = []
    # 16-bit tensors in float32. Why: in its own dtype the norm of one has three digits, and in
    # float16 it is infinite above 65,504. With parts of a parameter on several ranks, the error
    # would depend on their number.
    for is_narrow in (False, True):
        chosen = [(i, size) for i, size in sizes if (size.dtype.itemsize < 4) is is_narrow]
        if chosen:
            places += [rows[index] for index, _ in chosen]
            dtype = torch.float32 if is_narrow else None
            norms += foreach_norm([size for _, size in chosen], norm_type, dtype)
    values = torch.zeros(len(norms), dtype=torch.float64, device=device)
    if norms:  # copied together: no norm is brought to the host by itself
        foreach_copy_(list(values.unbind()), norms)
    at = torch.tensor(places, dtype=torch.int64, device=device)
    whole = _norms_of_params(reducer.rank_group, at, values, len(rows), norm_type)
    total: torch.Tensor = torch.linalg.vector_norm(whole, norm_type) if rows else whole.sum()
    return total


def _norms_of_params(
    rank_group: RankGroup,
    places: torch.Tensor,
    values: torch.Tensor,
    count: int,
    norm_type: float,
) -> torch.Tensor:
    """The norms of whole parameters from those of their shards."""
    norms: torch.Tensor
    if not math.isinf(norm_type):
        exponent = norm_type or 1.0  # a norm of type zero is a number of elements
        parts = values.new_zeros(count).index_add_(0, places, values**exponent)
        rank_group.total(parts).wait()
        norms = parts ** (1 / exponent)
        return norms
    sign = 1.0 if norm_type > 0 else -1.0  # a minimum is the maximum of the negatives
    of_nothing = 0.0 if sign > 0 else -math.inf
    # A maximum over the ranks may lose a NaN, and not on all alike: it has a row of its own.
    is_nan = values.isnan()
    parts = values.new_zeros((2, count))
    parts[0] = of_nothing
    parts[0].scatter_reduce_(0, places, (sign * values).masked_fill(is_nan, of_nothing), "amax")
    parts[1].scatter_reduce_(0, places, is_nan.to(parts.dtype), "amax")
    rank_group.maximum(parts).wait()
    norms = (sign * parts[0]).masked_fill(parts[1] > 0, math.nan)
    return norms


# -------------------------------------------------------------------------- loss scaling


class GradScaler(GradScalerBase):
    """``torch.amp.GradScaler`` that also serves an optimizer in attached mode.

    If any rank finds an infinity or NaN in its part of the gradients, all ranks skip the step and
    lower the scale. A step that is skipped leaves no gradients behind.
    """

    def unscaled(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, allow_fp16: bool
    ) -> torch.Tensor | None:
        ours: Any = optimizer
        if getattr(optimizer, "_attachment", None) is None:
            return None
        call = ("GradScaler.unscale_", float(inv_scale), allow_fp16)
        found_inf: torch.Tensor = ours._inspect_gradients(*call)
        return found_inf

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's."""
        is_ours = hasattr(optimizer, "_skip_step")
        if not is_ours or not self.is_enabled():  # switched off, it skips no steps
            return super().step(optimizer, *args, **kwargs)
        ours: Any = optimizer
        steps, ours._is_scaled = ours._steps, True
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            ours._is_scaled = False
        if ours._steps == steps:
            ours._skip_step()
        return result
