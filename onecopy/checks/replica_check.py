"""Do the ranks hold what they should? What must be equal on them is compared by 64-bit numbers.

``compare_gradients``: are the gradients that ``step`` gets in drop-in mode the same on all ranks,
that is, averaged? ``require_equal_replicas``: are parameters and state what they should be?
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Sequence

import torch

from onecopy.comm.agreement import RanksDisagree, same_outcome
from onecopy.comm.group import RankGroup
from onecopy.planning.layout import in_layout_of, is_dense
from onecopy.planning.text import name_ranks
from onecopy.sharding.inner import InnerOptimizers
from onecopy.sharding.sharded_params import (
    ODD,
    SAME_ORDER,
    ShardedParams,
    fingerprint,
    gather_digests,
    is_permuted,
)

_LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1
_VIEW_BYTES = 200


def compare_gradients(
    rank_group: RankGroup, sharded_params: ShardedParams, step: int, strict: bool
) -> bool:
    """Raise or warn on all ranks if ``param.grad`` differs; whether this has settled it: gradients
    that are zero everywhere prove nothing. ``strict``: raise. Collective.

    Why only a warning by default: torch's class accepts such training. It is an error if one rank
    has the gradients of another in another order, all of them, and each parameter has a gradient
    other than zero on all ranks or on none: then the parameters are in another order.
    """
    registry = sharded_params.registry
    views, are_zero = _gradients_in_words(registry.params)
    lines = [f"{name}: {view}" for name, view in zip(registry.names, views, strict=True)]
    try:
        same_outcome(rank_group, f"comparing gradients in step {step}", lambda: lines)
    except RanksDisagree as difference:
        if difference.line is None:  # the ranks do not even do the same
            raise
        name = sharded_params.name_in_module(difference.line)
        found = "\n".join([f"{rank_group.whose}:", *difference.message.split("\n")[1:-1], ""])
        zeros, *digests = gather_digests(rank_group, are_zero, views, sorted(views))
        if len(set(zeros)) == 1 and is_permuted(*digests):
            raise RanksDisagree(
                f"the gradient of {name} is that of another parameter on some ranks{found}"
                f"{SAME_ORDER}"
            ) from None
        error = _not_averaged(name, found)
        if strict:
            raise error from None
        warnings.warn(str(error), stacklevel=_user_level())
        return True
    return "no" in are_zero


def _not_averaged(name: str, found: str) -> RanksDisagree:
    return RanksDisagree(
        f"the gradient of {name} is not the same on all ranks, so it was not averaged{found}"
        "Without attach(...), step() expects gradients that were averaged over the ranks. Wrap the "
        "module, DistributedDataParallel(model), call that, and do the last backward before "
        "step() outside of no_sync(); or call optimizer.attach(model)"
    )


@torch.no_grad()
def _gradients_in_words(params: Sequence[torch.Tensor]) -> tuple[list[str], list[str]]:
    """Each parameter's gradient in words, and whether it is zero: "yes", "no" or "not known"."""
    views: list[str] = []
    numbers: list[torch.Tensor] = []
    fingerprinted: list[int] = []  # of the parameters
    for param in params:
        grad = param.grad
        parts: list[torch.Tensor] = []
        if grad is None:
            view = "no gradient"
        elif grad.layout is torch.strided:
            view = "a gradient"
            parts = [in_layout_of(param, grad) if is_dense(param) else grad.contiguous()]
        elif grad.layout is torch.sparse_coo:
            rows = grad.coalesce()
            view = "a sparse gradient"
            parts = [rows.values().contiguous(), rows.indices().contiguous()]
        else:
            view = f"a gradient in {grad.layout}"
        if parts:
            total = fingerprint(parts[0])
            for other in parts[1:]:
                total = total * ODD + fingerprint(other)
            numbers.append(torch.stack([total, parts[0].bool().any().to(total)]))
            fingerprinted.append(len(views))
        views.append(view)
    # Read together, so that an accelerator is waited for once.
    read = torch.stack([pair.to(numbers[0].device) for pair in numbers]).tolist() if numbers else []
    are_zero = ["not known" for _ in params]
    for index, (number, is_nonzero) in zip(fingerprinted, read, strict=True):
        views[index] += f", fingerprint {number % (1 << 64):x}"
        are_zero[index] = "no" if is_nonzero else "yes"
    return views, are_zero


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


def require_equal_replicas(
    rank_group: RankGroup,
    inner: InnerOptimizers,
    names: Sequence[str],
    fingerprints: torch.Tensor,
    changes: Sequence[str],
    since: str = "",
) -> None:
    """Raise on all ranks, naming the first parameter with which something is wrong. One small
    all-reduce. Collective.

    Of each parameter: its name; its fingerprint, which must be equal on all ranks, and when it was
    taken, if not now; and what has changed of its state, or nothing. An elementwise class keeps
    the same numbers in the state of all shards of a parameter, since it cannot know which one it
    has: these are compared, too.
    """
    count = len(names)
    if not count:
        return
    prints = fingerprints.cpu()
    numbers = _numbers_in_state(inner, count)
    hashed = [sorted(map(_hash, said)) for said in numbers]
    # A rank without shards of a parameter is neither below nor above the others.
    low = [said[0] if said else _GREATEST for said in hashed]
    high = [said[-1] if said else _LEAST for said in hashed]
    changed = [int(bool(said)) for said in changes]
    least, greatest = rank_group.extremes(
        torch.cat([prints, torch.tensor([*low, *[0] * count], device="cpu")]),
        torch.cat([prints, torch.tensor([*high, *changed], device="cpu")]),
    )
    wrong = (least < greatest).nonzero().flatten().tolist()
    if not wrong:
        return
    kind, index = divmod(wrong[0], count)
    name = names[index]
    alike = sum(place // count == kind for place in wrong)
    more = f" ({alike - 1} more parameters are affected)" if alike > 1 else ""
    mine = (
        f"{int(fingerprints[index]):x}",
        " and ".join(sorted(set(numbers[index]))),
        changes[index],
    )[kind]
    holders: dict[str, list[int]] = {}  # of what the ranks say, if they say something
    payload = mine.encode()[:_VIEW_BYTES].ljust(_VIEW_BYTES, b"\0")
    for rank, said in enumerate(rank_group.all_gather_bytes(payload)):
        if text := said.rstrip(b"\0").decode(errors="ignore"):
            holders.setdefault(text, []).append(rank)
    if kind == 0:
        within = "; ".join(map(name_ranks, holders.values()))
        raise RuntimeError(
            f"{name} is not the same on all ranks{since}: it is equal only within {within}"
            f"{more}. Did the ranks start from different values, did something change a parameter "
            "on some of them, or has a bit in memory flipped?"
        )
    views = "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in holders.items())
    if kind == 1:
        raise RuntimeError(
            f"the parts of {name} have state that differs: {views}{more}. Was state "
            "loaded or written on some ranks only, or has a bit in memory flipped?"
        )
    raise RuntimeError(
        f"the state of {name} has changed although no step was taken: {views}{more}. Has "
        "a bit in memory flipped? If your code writes into the state, let it say so: "
        "optimizer.state = optimizer.state"
    )


def _numbers_in_state(inner: InnerOptimizers, count: int) -> list[list[str]]:
    """By parameter, as text: those in the state of each of its shards here."""
    found: list[list[str]] = [[] for _ in range(count)]
    for owned in inner.shards:
        numbers = [
            f"{key} = {value.item() if isinstance(value, torch.Tensor) else value!r}"
            for key, value in sorted(
                inner.state.get(owned.tensor, {}).items(), key=lambda item: str(item[0])
            )
            if isinstance(value, (bool, int, float))
            or (isinstance(value, torch.Tensor) and not value.dim())
        ]
        if numbers:
            found[owned.shard.param].append(", ".join(numbers))
    return found


def _hash(text: str) -> int:
    """The same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
