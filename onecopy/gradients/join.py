"""Uneven inputs: ``torch.distributed.algorithms.Join``.

A rank that has run out of inputs still owns its pieces, and they must follow the gradient that the
others compute. DDP keeps that gradient from it. So while some rank has joined, the lowest rank
that has not lends each joined rank the gradients of its pieces, and its own options, because a
joined rank's scheduler no longer moves. (An attached optimizer needs to borrow options only: its
gradients are reduced to their owners, wherever they are.)
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from onecopy.comm.agreement import DIGEST_BYTES, RanksDisagree, difference
from onecopy.comm.group import RankGroup
from onecopy.comm.transfer import NotPlain, decode, encode, receive_tensors, send_tensors
from onecopy.planning.layout import flat_range, in_layout_of, is_dense
from onecopy.planning.param_groups import grad_dtype
from onecopy.planning.plan import Plan, Shard
from onecopy.planning.text import name_ranks
from onecopy.planning.traits import options_of

_NONE, _DENSE, _SPARSE = "n", "d", "s"


class OptimizerJoinHook(JoinHook):
    """Takes a joined rank's part whenever the ranks that go on step."""

    def __init__(self, take_part: Callable[[], None], leave: Callable[[], None]) -> None:
        self._take_part = take_part
        self._leave = leave

    def main_hook(self) -> None:
        self._take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        del is_last_joiner
        self._leave()


class Turn(enum.Enum):
    """What a rank is about to do together with the others."""

    STEP = b"s"
    SKIP = b"k"  # no step: a scaler has found an infinity, or the gradients are dropped
    LOOK = b"l"  # at gradients of which every rank has a part: norm, clipping, unscaling
    BACKWARD = b"b"  # of an attached bare module, of which nobody else tells the joined ranks
    JOINED = b"j"  # whatever the others do


_TURNS = {turn.value for turn in Turn}


@dataclass(frozen=True, slots=True)
class JoinRound:
    """Who lends to whom in this turn. On all ranks of a turn in which somebody has joined."""

    turn: Turn
    lender: int
    borrowers: tuple[int, ...]


def find_round(rank_group: RankGroup, mine: Turn) -> JoinRound | None:
    """Collective, in every turn inside a join context. None while nobody has joined. If those that
    have not joined differ in what they are about to do, it is an error on all ranks."""
    said = rank_group.all_gather_bytes(mine.value.ljust(DIGEST_BYTES, b"\0"))
    words = [message.rstrip(b"\0") for message in said]
    if not all(word in _TURNS for word in words):
        raise difference(rank_group, [f"inside Join: {mine.name}"])
    turns = [Turn(word) for word in words]
    ranks: dict[Turn, list[int]] = {}
    for rank, turn in enumerate(turns):
        ranks.setdefault(turn, []).append(rank)
    borrowers = tuple(ranks.pop(Turn.JOINED, ()))
    if len(ranks) > 1:
        views = "".join(f"\n  {name_ranks(who)}: {turn.name}" for turn, who in ranks.items())
        raise RanksDisagree(
            f"inside Join, the ranks that have inputs left do different things:{views}\n"
            "Every one of them must take the same steps in the same order."
        )
    if not borrowers:
        return None
    ((turn, others),) = ranks.items()
    return JoinRound(turn, others[0], borrowers)


def follow_lender(
    rank_group: RankGroup,
    join_round: JoinRound,
    groups: Sequence[MutableMapping[str, Any]],
    trainable: Sequence[int],
) -> list[int]:
    """The lender's options for the groups of joined ranks, and what it has newly found trainable.

    Why: on a joined rank neither the scheduler nor the code that unfreezes parameters runs.
    """
    is_lender = rank_group.rank == join_round.lender
    news = json.dumps([list(trainable), [_options(group) for group in groups]]).encode()
    theirs, options = json.loads(
        rank_group.broadcast_bytes(news if is_lender else None, join_round.lender)
    )
    if rank_group.rank not in join_round.borrowers:
        return list(trainable)
    for group, values in zip(groups, options, strict=True):
        _follow_options(group, values)
    found: list[int] = theirs
    return found


def same_call(rank_group: RankGroup, join_round: JoinRound, mine: Sequence[Any]) -> list[Any]:
    """The lender's method and arguments, which must be plain, on all ranks."""
    said = json.dumps(mine).encode() if rank_group.rank == join_round.lender else None
    call: list[Any] = json.loads(rank_group.broadcast_bytes(said, join_round.lender))
    return call


def lend_gradients(
    rank_group: RankGroup, join_round: JoinRound, plan: Plan, params: Sequence[torch.Tensor]
) -> list[torch.Tensor | None] | None:
    """On a joined rank: the gradients of its pieces, in the plan's order. Elsewhere: None."""
    is_lender = rank_group.rank == join_round.lender
    marks = "".join(_presence(params[index]) for index in sorted(plan.params))
    presence = rank_group.broadcast_bytes(
        marks.encode() if is_lender else None, join_round.lender
    ).decode()
    if _SPARSE in presence:
        raise ValueError(
            "uneven inputs (Join) with sparse gradients are not supported: use sparse=False"
        )
    has_gradient = {
        index: mark == _DENSE for index, mark in zip(sorted(plan.params), presence, strict=True)
    }
    if is_lender:
        for rank in join_round.borrowers:
            wanted = [shard for shard in plan.shards(rank) if has_gradient[shard.param]]
            send_tensors(rank_group, [_flat_gradient(params[p.param], p) for p in wanted], rank)
    if rank_group.rank not in join_round.borrowers:
        return None
    return _borrow(rank_group, plan, params, has_gradient, join_round.lender)


def _presence(param: torch.Tensor) -> str:
    if param.grad is None:
        return _NONE
    return _DENSE if param.grad.layout == torch.strided else _SPARSE


def _flat_gradient(param: torch.Tensor, shard: Shard) -> torch.Tensor:
    grad = param.grad
    assert grad is not None
    laid_out = in_layout_of(param, grad) if is_dense(param) else grad.contiguous()
    return flat_range(laid_out.detach(), shard.start, shard.stop)


def _borrow(
    rank_group: RankGroup,
    plan: Plan,
    params: Sequence[torch.Tensor],
    has_gradient: dict[int, bool],
    lender: int,
) -> list[torch.Tensor | None]:
    gradients: list[torch.Tensor | None] = []
    room: list[torch.Tensor] = []
    for shard in plan.shards(rank_group.rank):
        if not has_gradient[shard.param]:
            gradients.append(None)
            continue
        param = params[shard.param]
        if shard.param in plan.cut_params:
            gradient = torch.empty(shard.numel, dtype=grad_dtype(param), device=param.device)
        elif is_dense(param):
            gradient = torch.empty_strided(
                param.shape, param.stride(), dtype=grad_dtype(param), device=param.device
            )
        else:
            gradient = torch.empty(param.shape, dtype=grad_dtype(param), device=param.device)
        gradients.append(gradient)
        room.append(flat_range(gradient, 0, gradient.numel()))
    receive_tensors(rank_group, {lender: room})
    return gradients


def _options(group: MutableMapping[str, Any]) -> dict[str, Any]:
    """The options that can be written down, with the numbers of their tensors; the rest is what it
    was at construction."""
    written = {}
    for key, value in options_of(group).items():
        tensors: list[torch.Tensor] = []
        try:
            encoded = encode(value, tensors)
        except NotPlain:
            continue
        written[key] = [encoded, [tensor.tolist() for tensor in tensors]]
    return written


def _follow_options(group: MutableMapping[str, Any], values: dict[str, Any]) -> None:
    for key, (encoded, numbers) in values.items():
        mine: list[torch.Tensor] = []
        with contextlib.suppress(NotPlain):
            encode(group.get(key), mine)
        if len(mine) == len(numbers):  # the user may hold on to the tensors, as to a tensor lr
            for tensor, new in zip(mine, numbers, strict=True):
                tensor.copy_(torch.tensor(new, device="cpu"))
        else:
            mine = [torch.tensor(new, device="cpu") for new in numbers]
        group[key] = decode(encoded, mine)
