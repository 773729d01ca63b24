"""The norm of all gradients, of which every rank holds a part: one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from onecopy.plan import Piece
from onecopy.transport import Transport


def total_norm(
    transport: Transport,
    pieces: Sequence[Piece],
    gradients: Sequence[torch.Tensor | None],
    present: set[int],
    norm_type: float,
) -> torch.Tensor:
    """What ``torch.nn.utils.get_total_norm`` gives for the gradients of the parameters
    ``present``, of whose pieces this rank has some. The same on all ranks.

    As torch does, it is the norm of the norms of the parameters: that matters for the norm of type
    zero only.
    """
    place = {index: number for number, index in enumerate(sorted(present))}
    mine = [
        (place[piece.param], grad)
        for piece, grad in zip(pieces, gradients, strict=True)
        if grad is not None and grad.numel()
    ]
    with torch.device("cpu"):  # whatever the default device is
        found = torch._foreach_norm([grad for _, grad in mine], norm_type) if mine else []
        values = torch.tensor([float(norm) for norm in found], dtype=torch.float64)
        places = torch.tensor([number for number, _ in mine], dtype=torch.int64)
        if math.isinf(norm_type):
            norms = _extremes(transport, places, values, len(place), norm_type)
        else:
            norms = _sums_of_powers(transport, places, values, len(place), norm_type)
        total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type) if place else norms.sum()
    return total.float()


def _sums_of_powers(
    transport: Transport,
    places: torch.Tensor,
    values: torch.Tensor,
    count: int,
    norm_type: float,
) -> torch.Tensor:
    """The norms of whole parameters from those of their pieces."""
    exponent = norm_type or 1.0  # that of type zero is a number of elements
    parts = torch.zeros(count, dtype=torch.float64)
    parts.index_add_(0, places, values**exponent)
    parts = parts.to(transport.control_device)
    transport.total(parts).wait()
    return parts.cpu() ** (1 / exponent)


def _extremes(
    transport: Transport,
    places: torch.Tensor,
    values: torch.Tensor,
    count: int,
    norm_type: float,
) -> torch.Tensor:
    """The same for the types inf and -inf.

    A maximum over the ranks may lose a NaN, and not on all of them alike: it has a row of its own.
    """
    sign = 1.0 if norm_type > 0 else -1.0  # of the least, the negative is the greatest
    parts = torch.zeros((2, count), dtype=torch.float64)
    parts[0] = 0.0 if sign > 0 else -math.inf  # the norm of no elements
    for place, value in zip(places.tolist(), values.tolist(), strict=True):
        if math.isnan(value):
            parts[1, place] = 1.0
        else:
            parts[0, place] = max(float(parts[0, place]), sign * value)
    parts = parts.to(transport.control_device)
    transport.maximum(parts).wait()
    extremes, nan = parts.cpu()
    norms: torch.Tensor = (sign * extremes).masked_fill(nan > 0, math.nan)
    return norms


def clip_coefficient(norm: torch.Tensor, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
    """What to multiply gradients of this norm by, as ``torch.nn.utils.clip_grad_norm_`` does."""
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped. To clip them "
            "all the same, pass error_if_nonfinite=False"
        )
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
