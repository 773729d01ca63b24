"""The full state, gathered to one rank.

Every rank tells the target what it holds as JSON, then sends its tensors in parcels straight from
its memory; the target receives them straight into the parameter-shaped result. Other ranks
allocate at most one parcel. Nothing is pickled.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from onecopy.buffers import flat_range, is_dense
from onecopy.intake import OUR_KEYS
from onecopy.local import LocalOptimizer
from onecopy.parcels import Form, NotPlain, decode, encode, receive_tensors, send_tensors
from onecopy.pieces import MASTER
from onecopy.plan import Piece, Plan
from onecopy.roster import Roster
from onecopy.transport import Transport, bytes_from_tensor, tensor_from_bytes

State = dict[str, Any]


# -------------------------------------------------------------------------- the format


@dataclass(frozen=True, slots=True)
class Numbering:
    """The ids by which ``state_dict`` knows the parameters, as ``torch.optim`` gives them out."""

    ids: dict[torch.Tensor, int]
    groups: list[list[int]]

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]]) -> Numbering:
        ids: dict[torch.Tensor, int] = {}
        numbers: list[list[int]] = []
        start = 0
        for group in groups:
            listed = enumerate(group["params"], start)
            ids.update({param: number for number, param in listed if param not in ids})
            numbers.append([ids[param] for param in group["params"]])
            start += len(group["params"])
        return cls(ids, numbers)


def as_plain_dict(states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """State by parameter, or by a key of the class's own, in the format of ``torch.optim``."""
    numbering = Numbering.of(groups)
    of_params = {
        numbering.ids[key]: dict(state)
        for key, state in states.items()
        if isinstance(key, torch.Tensor)
    }
    common = {key: state for key, state in states.items() if not isinstance(key, torch.Tensor)}
    return {
        "state": {**dict(sorted(of_params.items())), **common},
        "param_groups": [
            {**{k: v for k, v in group.items() if k not in {*OUR_KEYS, "params"}}, "params": ids}
            for group, ids in zip(groups, numbering.groups, strict=True)
        ],
    }


def state_outside_the_plan(
    local: LocalOptimizer, roster: Roster, plan: Plan, groups: Sequence[Mapping[str, Any]]
) -> dict[Any, Any]:
    """What a plain optimizer's dict holds besides the state of parameters that were trained.

    That is state which a class makes in its constructor, for frozen parameters too, and state
    that belongs to no parameter.
    """
    found: dict[Any, Any] = {}
    frozen = [roster.entries[index] for index in roster.unplanned(plan)]
    for number, (group, policy) in enumerate(zip(groups, roster.policies, strict=True)):
        params = [entry.param for entry in frozen if entry.group == number]
        made = local.state_made_at_once(policy.optimizer_class, group, params)
        found.update({param: copy.deepcopy(state) for param, state in made.items()})
    for inner in local.inners:
        for key, value in inner.optimizer.state.items():
            if not isinstance(key, torch.Tensor):
                found[key] = copy.deepcopy(value)
    return found


def has_no_state(
    local: LocalOptimizer, roster: Roster, groups: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether an optimizer that has not stepped has no state, on any rank: its classes make none
    in their constructors."""
    return not len(local.state) and not any(
        local.state_made_at_once(policy.optimizer_class, group, group["params"][:1])
        for group, policy in zip(groups, roster.policies, strict=True)
    )


# -------------------------------------------------------------------------- gathering


@dataclass(slots=True)
class Manifest:
    """What a rank holds: for each of its pieces the encoded state, and the forms of its tensors.

    Most pieces look alike, so each look is written once.
    """

    looks: list[tuple[Any, list[Form]]] = field(default_factory=list)
    of_piece: list[int] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        return json.dumps([self.looks, self.of_piece]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        looks, of_piece = json.loads(data)
        return cls(
            [(encoded, [Form.from_json(*form) for form in forms]) for encoded, forms in looks],
            of_piece,
        )

    def __iter__(self) -> Iterator[tuple[Any, list[Form]]]:
        return (self.looks[number] for number in self.of_piece)


def take_stock(local: LocalOptimizer) -> tuple[Manifest, list[torch.Tensor]]:
    """This rank's manifest, and its tensors as 1-D runs in the manifest's order."""
    manifest = Manifest()
    numbers: dict[str, int] = {}
    flats: list[torch.Tensor] = []
    for owned in local.pieces:
        tensors: list[torch.Tensor] = []
        held = local.state_to_save(owned)
        try:
            encoded = None if held is None else encode(dict(held), tensors)
            if held is not None and not owned.is_whole:
                require_cut_state(held, f"parameter {owned.piece.param}")
        except NotPlain as error:
            raise TypeError(
                f"the state of parameter {owned.piece.param} holds {error}, which a state dict "
                "cannot carry: only tensors, numbers, strings, None and containers of them"
            ) from None
        tensors = [_plain(tensor) for tensor in tensors]
        forms = [Form.of(tensor) for tensor in tensors]
        look = json.dumps([encoded, forms])
        if look not in numbers:
            numbers[look] = len(manifest.looks)
            manifest.looks.append((encoded, forms))
        manifest.of_piece.append(numbers[look])
        flats += [flat_range(tensor, 0, tensor.numel()) for tensor in tensors]
    return manifest, flats


def require_cut_state(state: Mapping[str, Any], whose: str) -> None:
    """Raise where it cannot be told which tensors of a piece's state are parts of a whole."""
    for key, value in state.items():
        tensors: list[torch.Tensor] = []
        if isinstance(value, (dict, list, tuple)):
            encode(value, tensors)
        if tensors:
            raise TypeError(
                f"the state {key!r} of {whose} is a {type(value).__name__} of tensors, and the "
                "parameter is cut over the ranks: they cannot be put together again. Use "
                'partition="whole"'
            )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory is one run of its values: dense, and not a lazy view."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if is_dense(tensor) else tensor.contiguous()


def consolidate(
    plan: Plan,
    params: Sequence[torch.Tensor],
    transport: Transport,
    to: int,
    stock: tuple[Manifest, list[torch.Tensor]],
) -> dict[int, State] | None:
    """The whole job's state on rank ``to``, on the CPU, by the plan's parameter numbers."""
    manifest, flats = stock
    text = manifest.to_bytes()
    lengths = transport.all_gather_bytes(len(text).to_bytes(8, "little"))
    if transport.rank != to:
        send_tensors(transport, [tensor_from_bytes(text)], to)
        send_tensors(transport, flats, to)
        return None
    whole = _Whole(plan, params)
    incoming: dict[int, list[torch.Tensor]] = {}
    for rank, length in enumerate(lengths):
        if rank == to:
            theirs = manifest
        else:
            count = int.from_bytes(length, "little")
            room = torch.empty(count, dtype=torch.uint8, device="cpu")
            receive_tensors(transport, {rank: [room]})
            theirs = Manifest.from_bytes(bytes_from_tensor(room))
        incoming[rank] = whole.expect(rank, theirs)
    mine = incoming.pop(to)

    def copy_mine() -> None:
        for target, source in zip(mine, flats, strict=True):
            target.copy_(source)

    receive_tensors(transport, incoming, meanwhile=copy_mine)
    return whole.states()


class _Whole:
    """Parameter-shaped state under construction on the target."""

    def __init__(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        self._plan = plan
        self._params = params
        self._states: dict[int, State] = {}

    def expect(self, rank: int, manifest: Manifest) -> list[torch.Tensor]:
        """Room for what a rank will send, as 1-D runs in the order of its manifest."""
        room: list[torch.Tensor] = []
        for piece, (encoded, forms) in zip(self._plan.pieces(rank), manifest, strict=True):
            if encoded is not None:
                cut = piece.param in self._plan.cut_params
                room += (self._place_cut if cut else self._place)(piece, encoded, forms)
        return room

    def _place(self, piece: Piece, encoded: Any, forms: Sequence[Form]) -> list[torch.Tensor]:
        tensors = [form.empty() for form in forms]
        self._states[piece.param] = decode(encoded, tensors)
        return [flat_range(tensor, 0, tensor.numel()) for tensor in tensors]

    def _place_cut(self, piece: Piece, encoded: Any, forms: Sequence[Form]) -> list[torch.Tensor]:
        """Tensors as long as the piece are parts of a parameter-shaped one; others are equal in
        all pieces, and the first is kept."""
        state = self._states.setdefault(piece.param, {})
        param = self._params[piece.param]
        tensors = [form.empty() for form in forms]
        room = [flat_range(tensor, 0, tensor.numel()) for tensor in tensors]
        for key, value in decode(encoded, tensors).items():
            if not (isinstance(value, torch.Tensor) and value.shape == (piece.numel,)):
                state.setdefault(key, value)
                continue
            if key not in state:
                # An owner whose parameter never had a gradient has no state to send: zeros, and
                # for a master copy the parameter itself.
                state[key] = torch.zeros_like(
                    param, dtype=value.dtype, device="cpu", memory_format=torch.preserve_format
                ).detach()
                if key == MASTER:
                    state[key].copy_(param.detach())
            position = next(i for i, tensor in enumerate(tensors) if tensor is value)
            room[position] = flat_range(state[key], piece.start, piece.stop)
        return room

    def states(self) -> dict[int, State]:
        return dict(sorted(self._states.items()))
