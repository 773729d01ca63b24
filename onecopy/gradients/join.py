"""Uneven inputs: ``torch.distributed.algorithms.Join``.

A rank that has run out of inputs, a joined rank, still owns its shards, and they must follow the
gradient that the other ranks compute. DDP keeps that gradient from it. So while some rank has
joined, the lowest rank that has not, the source, sends each joined rank the gradients of its
shards, and its own options, because the scheduler of a joined rank no longer runs. (An attached
optimizer needs only the options: its gradients are reduced to their owners on all ranks.)

To be read in the order of a turn: ``JoinParticipant.announce`` on the ranks that go on and
``JoinParticipant.follow`` on those that have joined meet in ``find_round``; then all ranks call
``follow_source`` and, in a step, ``send_gradients``.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from onecopy.comm.agreement import DIGEST_BYTES, RanksDisagree, difference
from onecopy.comm.group import RankGroup
from onecopy.comm.transfer import NotPlain, decode, encode, receive_tensors, send_tensors
from onecopy.gradients.reducer import GradientsDropped, in_form_of
from onecopy.planning.layout import flat_range, in_layout_of, is_dense
from onecopy.planning.param_groups import grad_dtype
from onecopy.planning.plan import Plan
from onecopy.planning.text import name_ranks
from onecopy.planning.traits import options_of
from onecopy.torch_private import join_config


class Turn(enum.Enum):
    """What a rank is about to do together with the others."""

    STEP = b"s"
    SKIP = b"k"  # no step: a scaler has found an infinity, or the gradients are dropped
    INSPECT = b"l"  # a function of all gradients: norm, clipping, unscaling, a full gradient
    BACKWARD = b"b"  # of an attached bare module, of which nobody else tells the joined ranks
    JOINED = b"j"  # whatever the others do


@dataclass(frozen=True, slots=True)
class JoinRound:
    """A turn in which some ranks have joined, and which rank sends them what they need."""

    turn: Turn
    source: int
    joined: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JoinParticipant:
    """What an optimizer does inside ``Join``."""

    optimizer: weakref.ref[Joinable]
    rank_group: RankGroup

    @property
    def is_active(self) -> bool:
        """Whether this is a ``Join`` context, in which ranks may have joined."""
        optimizer = self.optimizer()
        return optimizer is not None and bool(join_config(optimizer).enable)

    def announce(self, turn: Turn) -> JoinRound | None:
        """If ``is_active``: tell the joined ranks what comes. None without any. Collective."""
        optimizer = self.optimizer()
        assert optimizer is not None
        monitor = self.rank_group.monitor
        monitor.add_to_note(f"inside Join, before {turn.name}")
        with monitor.naming_absentees():  # also those outside of the context
            work = Join.notify_join_context(optimizer)
        if work is not None:
            monitor.wait_for([work])
        return find_round(self.rank_group, turn)

    def follow(self, take_turn: Callable[[JoinRound], None]) -> None:
        """Do on a joined rank what the others do, until they have stepped."""
        while True:
            join_round = find_round(self.rank_group, Turn.JOINED)
            assert join_round is not None
            with contextlib.suppress(GradientsDropped):  # the ranks that have inputs are told
                take_turn(join_round)
            optimizer = self.optimizer()
            assert optimizer is not None  # it takes the turns
            # Join calls the hook of the first joinable once for every turn, that of any other one
            # once per iteration.
            if join_config(optimizer).is_first_joinable or join_round.turn in (
                Turn.STEP,
                Turn.SKIP,
            ):
                return


@dataclass(frozen=True, slots=True)
class JoinCallbacks(JoinHook):
    """For ``Join``: what is done on a joined rank, and when the context ends."""

    take_part: Callable[[], None]
    leave: Callable[[bool], None]

    def main_hook(self) -> None:
        self.take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.leave(is_last_joiner)


def find_round(rank_group: RankGroup, mine: Turn) -> JoinRound | None:
    """What the ranks do in this turn; None while nobody has joined. If those that have not joined
    differ in what they are about to do, it is an error on all ranks. Collective."""
    # As long as the first message of anything else: gloo ends the process if lengths differ.
    said = rank_group.all_gather_bytes(mine.value.ljust(DIGEST_BYTES, b"\0"))
    ranks: dict[Turn, list[int]] = {}
    try:
        for rank, message in enumerate(said):
            ranks.setdefault(Turn(message.rstrip(b"\0")), []).append(rank)
    except ValueError:
        raise difference(rank_group, [f"inside Join: {mine.name}"]) from None
    joined = tuple(ranks.pop(Turn.JOINED, ()))
    if len(ranks) > 1:
        views = "".join(f"\n  {name_ranks(who)}: {turn.name}" for turn, who in ranks.items())
        raise RanksDisagree(
            f"inside Join, the ranks that have inputs left do different things:{views}\n"
            "Every one of them must take the same steps in the same order."
        )
    if not joined:
        return None
    ((turn, others),) = ranks.items()
    return JoinRound(turn, others[0], joined)


def follow_source(
    rank_group: RankGroup,
    join_round: JoinRound,
    groups: Sequence[MutableMapping[str, Any]],
    trainable: Sequence[int],
) -> list[int]:
    """Give joined ranks the source's options; the parameters that it has newly found trainable.

    Why: on a joined rank neither the scheduler nor the code that unfreezes parameters runs.
    """
    mine = [list(trainable), [_encode_options(group) for group in groups]]
    theirs: list[int]
    theirs, options = broadcast_plain(rank_group, join_round, mine)
    if rank_group.rank not in join_round.joined:
        return list(trainable)
    for group, values in zip(groups, options, strict=True):
        _set_options(group, values)
    return theirs


def broadcast_plain(rank_group: RankGroup, join_round: JoinRound, mine: Sequence[Any]) -> list[Any]:
    """The source's list of plain values, on all ranks."""
    is_source = rank_group.rank == join_round.source
    payload = json.dumps(mine).encode() if is_source else None
    values: list[Any] = json.loads(rank_group.broadcast_bytes(payload, join_round.source))
    return values


def send_gradients(
    rank_group: RankGroup, join_round: JoinRound, plan: Plan, params: Sequence[torch.Tensor]
) -> Mapping[int, list[torch.Tensor | None]] | None:
    """On a joined rank: the gradients of its shards, by bucket. Elsewhere: None."""
    is_source = rank_group.rank == join_round.source
    planned = sorted(plan.params)
    gradients = [params[index].grad for index in planned]
    forms = [None if grad is None else grad.layout == torch.strided for grad in gradients]
    is_dense_grad = broadcast_plain(rank_group, join_round, forms)
    if False in is_dense_grad:
        raise ValueError(
            "uneven inputs (Join) with sparse gradients are not supported: use sparse=False"
        )
    present = set(itertools.compress(planned, is_dense_grad))
    if is_source:
        for rank in join_round.joined:
            flats = []
            for shard in plan.shards(rank):
                param = params[shard.param]
                if shard.param in present:
                    assert param.grad is not None
                    grad = param.grad.detach()
                    laid_out = in_layout_of(param, grad) if is_dense(param) else grad.contiguous()
                    flats.append(flat_range(laid_out, shard.start, shard.stop))
            send_tensors(rank_group, flats, rank)
    if rank_group.rank not in join_round.joined:
        return None
    flats = []
    received: Mapping[int, list[torch.Tensor | None]] = defaultdict(list)
    for shard in plan.shards(rank_group.rank):
        if shard.param not in present:
            received[shard.bucket].append(None)
            continue
        param = params[shard.param]
        flat = torch.empty(shard.numel, dtype=grad_dtype(param), device=param.device)
        flats.append(flat)
        is_cut = shard.param in plan.cut_params
        received[shard.bucket].append(flat if is_cut else in_form_of(param, flat))
    receive_tensors(rank_group, {join_round.source: flats})
    return received


def _encode_options(group: MutableMapping[str, Any]) -> dict[str, Any]:
    """The options that can be encoded, with the numbers in their tensors. Joined ranks keep what
    they have of any other option."""
    encoded = {}
    for key, value in options_of(group).items():
        tensors: list[torch.Tensor] = []
        with contextlib.suppress(NotPlain):
            skeleton = encode(value, tensors)
            encoded[key] = [skeleton, [tensor.tolist() for tensor in tensors]]
    return encoded


def _set_options(group: MutableMapping[str, Any], values: dict[str, Any]) -> None:
    for key, (skeleton, numbers) in values.items():
        tensors: list[torch.Tensor] = []
        with contextlib.suppress(NotPlain):
            encode(group.get(key), tensors)
        if len(tensors) == len(numbers):  # the user may hold references to them, as to a tensor lr
            for tensor, new in zip(tensors, numbers, strict=True):
                tensor.copy_(torch.tensor(new, device="cpu"))
        else:
            tensors = [torch.tensor(new, device="cpu") for new in numbers]
        group[key] = decode(skeleton, tensors)
