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
    if not present:
        return torch.tensor(0.0)
    place = {index: number for number, index in enumerate(sorted(present))}
    mine = [
        (place[piece.param], grad)
        for piece, grad in zip(pieces, gradients, strict=True)
        if grad is not None and grad.numel()
    ]
    device = transport.control_device
    if math.isinf(norm_type):
        # Of the type -inf the least counts: the greatest of the negative ones.
        sign = 1.0 if norm_type > 0 else -1.0
        parts = torch.full((len(place),), 0.0 if sign > 0 else -math.inf, dtype=torch.float64)
        for number, grad in mine:
            value = sign * torch.linalg.vector_norm(grad.detach(), norm_type).to("cpu")
            parts[number] = torch.maximum(parts[number], value.to(parts.dtype))
        parts = parts.to(device)
        transport.maximum(parts).wait()
        norms = sign * parts.cpu()
    else:
        parts = torch.zeros(len(place), dtype=torch.float64)
        if mine:
            found = torch._foreach_norm([grad for _, grad in mine], norm_type)
            values = torch.stack([norm.to("cpu", torch.float64) for norm in found])
            powers = values if norm_type == 0 else values**norm_type
            parts.index_add_(0, torch.tensor([number for number, _ in mine]), powers)
        parts = parts.to(device)
        transport.total(parts).wait()
        norms = parts.cpu() if norm_type == 0 else parts.cpu() ** (1 / norm_type)
    total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    return total.float()


def clip_coefficient(norm: torch.Tensor, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
    """What to multiply gradients of this norm by, as ``torch.nn.utils.clip_grad_norm_`` does."""
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped. To clip them "
            "all the same, pass error_if_nonfinite=False"
        )
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
