"""Are the gradients that ``step`` gets in drop-in mode the same on all ranks, that is, averaged?

They are compared by fingerprints in the first step in which one is not zero, and in every step
with ``ONECOPY_CHECK=step``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence

import torch

from onecopy.comm.agreement import RanksDisagree, same_outcome
from onecopy.comm.group import RankGroup
from onecopy.planning.layout import in_layout_of, is_dense
from onecopy.sharding.sharded_params import ODD, ShardedParams, fingerprint


class GradientCheck:
    """Compares ``param.grad`` of the ranks until it has found one that is not zero."""

    def __init__(self) -> None:
        self._is_done = False

    def compare(
        self, rank_group: RankGroup, sharded_params: ShardedParams, step: int, strict: bool
    ) -> None:
        """Raise or warn on all ranks if gradients differ. ``strict``: in every step, and raise.
        Collective.

        Why only a warning by default: torch's class accepts such training.
        """
        if self._is_done and not strict:
            return
        registry = sharded_params.registry
        views, any_nonzero = _views(registry.params)
        lines = [f"{name}: {view}" for name, view in zip(registry.names, views, strict=True)]
        try:
            same_outcome(rank_group, f"comparing gradients in step {step}", lambda: lines)
        except RanksDisagree as difference:
            if difference.line is None:  # the ranks do not even do the same
                raise
            error = _not_averaged(difference, sharded_params.name_in_module(difference.line))
            if strict:
                raise error from None
            self._is_done = True
            warnings.warn(str(error), stacklevel=_user_level())
        if any_nonzero:  # gradients that are zero everywhere prove nothing
            self._is_done = True


def _not_averaged(difference: RanksDisagree, name: str) -> RanksDisagree:
    views = "\n".join(difference.message.split("\n")[1:-1])
    return RanksDisagree(
        f"the gradient of {name} is not the same on all ranks, so it was not averaged:\n"
        f"{views}\nWithout attach(...), step() expects gradients that were averaged over the "
        "ranks. Wrap the module, DistributedDataParallel(model), call that, and do the last "
        "backward before step() outside of no_sync(); or call optimizer.attach(model)"
    )


@torch.no_grad()
def _views(params: Sequence[torch.Tensor]) -> tuple[list[str], bool]:
    """Each parameter's gradient in words, and whether any of them is not zero."""
    kinds, numbers = [], []
    for param in params:
        kind, parts = _kind_and_parts(param)
        kinds.append(kind)
        if parts:
            total = fingerprint(parts[0])
            for other in parts[1:]:
                total = total * ODD + fingerprint(other)
            numbers.append(torch.stack([total, parts[0].bool().any().to(total)]))
    # Read together, so that an accelerator is waited for once.
    device = numbers[0].device if numbers else None
    read = torch.stack([pair.to(device) for pair in numbers]).tolist() if numbers else []
    fingerprints = iter(read)
    views = [
        f"{kind}{next(fingerprints)[0] % (1 << 64):x}" if kind.endswith(" ") else kind
        for kind in kinds
    ]
    return views, any(is_nonzero for _, is_nonzero in read)


def _kind_and_parts(param: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
    """What kind of gradient it is, and the tensors to take a fingerprint of, values first."""
    grad = param.grad
    if grad is None:
        return "no gradient", []
    if grad.layout is torch.strided:
        laid_out = in_layout_of(param, grad) if is_dense(param) else grad.contiguous()
        return "a gradient, fingerprint ", [laid_out]
    if grad.layout is torch.sparse_coo:
        rows = grad.coalesce()
        tensors = [rows.values().contiguous(), rows.indices().contiguous()]
        return "a sparse gradient, fingerprint ", tensors
    return f"a gradient in {grad.layout}", []


def _user_level() -> int:
    """The ``stacklevel`` with which the caller's warning names the user's line: a step may be
    called through profiler hooks, schedulers and scalers of torch."""
    level, frame = 0, inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("onecopy", "torch"):
            break
        level, frame = level + 1, frame.f_back
    return level
