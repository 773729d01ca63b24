"""Are the parameters the same on all ranks? Compared by fingerprints, one small all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onecopy.agreement import name_ranks
from onecopy.buffers import flat_range, is_dense
from onecopy.transport import Transport

_CHUNK = 1 << 20
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # an arbitrary odd number, as a signed 64-bit one
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_equal_replicas(
    params: Sequence[torch.Tensor], names: Sequence[str], transport: Transport
) -> None:
    """Raise on all ranks, naming the first parameter that differs in a bit, and where."""
    if not params:
        return
    mine = torch.stack([fingerprint(param.detach()).cpu() for param in params])
    low, high = transport.minimum_and_maximum(mine)
    different = (low != high).nonzero().flatten().tolist()
    if not different:
        return
    first = different[0]
    everyone = transport.all_gather_bytes(int(mine[first]).to_bytes(8, "little", signed=True))
    holders: dict[bytes, list[int]] = {}
    for rank, theirs in enumerate(everyone):
        holders.setdefault(theirs, []).append(rank)
    views = "; ".join(name_ranks(ranks) for ranks in holders.values())
    raise RuntimeError(
        f"{names[first]} is not the same on all ranks: it is equal only within {views}"
        + (f" ({len(different) - 1} more parameters differ)" if len(different) > 1 else "")
        + ". Did the ranks start from different values, or did something change a parameter on "
        "some of them?"
    )


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit number that changes with any single bit.

    The sum of all elements, as integers, times odd weights: an odd number has an inverse modulo
    2**64, so no flipped bit can vanish.
    """
    dense = tensor if is_dense(tensor) else tensor.contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    integers = flat_range(dense, 0, dense.numel()).view(_INTEGERS[dense.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not integers.numel():
        return total
    weights = torch.arange(
        1, 2 * min(_CHUNK, integers.numel()), 2, dtype=torch.int64, device=tensor.device
    )
    for chunk in torch.split(integers, _CHUNK):
        total = total * _ODD + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return total
