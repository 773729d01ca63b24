"""State of any shape as bytes on the wire, without pickle.

A state value may be a tensor, a plain Python value, or a container of both. ``encode`` takes the
tensors out and leaves JSON; ``decode`` puts them back. The tensors then travel in *parcels*: a
large one in ranges of its own memory, small ones packed together. Both sides compute the same
parcels from the sizes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onecopy.comm.group import Handle, RankGroup

_SENDS_IN_FLIGHT = 4
_RECEIVES_IN_FLIGHT = 2
PACKED_BYTES = 4 * 2**20  # the most that is packed together
RANGE_BYTES = 32 * 2**20  # the longest range of a tensor that travels at once
_MIN_MESSAGE_BYTES = 64 * 2**10


class NotPlain(TypeError):
    """A state value that cannot be written down without pickle."""


def encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` as JSON, its tensors appended to ``tensors`` and replaced by their positions."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(item, tensors) for item in value]}
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int)) for key in value):
            raise NotPlain("a dict with keys other than str and int")
        return {"dict": [[key, encode(item, tensors)] for key, item in value.items()]}
    raise NotPlain(f"a value of type {type(value).__name__}")


def decode(encoded: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of ``encode``."""
    ((kind, content),) = encoded.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    if kind == "dict":
        return {key: decode(item, tensors) for key, item in content}
    items = [decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)


class Form(NamedTuple):
    """What must be known of a tensor to receive it. It travels as JSON."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())

    @classmethod
    def from_json(cls, dtype: str, shape: Sequence[int], stride: Sequence[int]) -> Form:
        return cls(dtype, tuple(shape), tuple(stride))

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"expected the name of a dtype, got {self.dtype!r}")
        return dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.torch_dtype, device="cpu")


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, stop) of the ``position``-th tensor."""

    position: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def split_into_messages(sizes: Sequence[int]) -> Iterator[tuple[Range, ...]]:
    """Cut and pack tensors of these sizes in bytes; a parcel of one range travels in place."""
    pack: list[Range] = []
    packed = 0
    for position, size in enumerate(sizes):
        if size >= _MIN_MESSAGE_BYTES:
            for start in range(0, size, RANGE_BYTES):
                yield (Range(position, start, min(start + RANGE_BYTES, size)),)
        elif size:
            if packed + size > PACKED_BYTES:
                yield tuple(pack)
                pack, packed = [], 0
            pack.append(Range(position, 0, size))
            packed += size
    if pack:
        yield tuple(pack)


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """A 1-D contiguous tensor as uint8, sharing its memory."""
    return flat.view(torch.uint8)


def _pack(ranges: Sequence[Range], tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Write ranges of 1-D contiguous tensors one after the other."""
    for target, source in _pairs(ranges, tensors, into):
        target.copy_(source)


def _unpack(ranges: Sequence[Range], tensors: Sequence[torch.Tensor], source: torch.Tensor) -> None:
    """The inverse of ``_pack``."""
    for packed, target in _pairs(ranges, tensors, source):
        target.copy_(packed)


def _pairs(
    ranges: Sequence[Range], tensors: Sequence[torch.Tensor], buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    start = 0
    for r in ranges:
        yield buffer[start : start + r.nbytes], _as_bytes(tensors[r.position])[r.start : r.stop]
        start += r.nbytes


# -------------------------------------------------------------------------- on the wire


def _sizes(flats: Sequence[torch.Tensor]) -> list[int]:
    return [flat.numel() * flat.element_size() for flat in flats]


def send_tensors(rank_group: RankGroup, flats: Sequence[torch.Tensor], to: int) -> None:
    """From where the tensors are if the wire starts there; else through one staged parcel."""
    wire = rank_group.control_device
    staged = torch.empty(0, dtype=torch.uint8, device=wire)
    staged_is_busy: Handle | None = None
    in_flight: deque[Handle] = deque()
    for tag, ranges in enumerate(split_into_messages(_sizes(flats))):
        first = flats[ranges[0].position]
        if len(ranges) == 1 and first.device.type == wire.type:
            message = _as_bytes(first)[ranges[0].start : ranges[0].stop]
            in_flight.append(rank_group.send(message, to, tag))
        else:
            if staged_is_busy is not None:
                staged_is_busy.wait()
            size = sum(r.nbytes for r in ranges)
            if staged.numel() < size:
                staged = torch.empty(0, device="cpu")  # let go of the smaller one first
                staged = torch.empty(size, dtype=torch.uint8, device=wire)
            _pack(ranges, flats, staged[:size])
            staged_is_busy = rank_group.send(staged[:size], to, tag)
            in_flight.append(staged_is_busy)
        if len(in_flight) > _SENDS_IN_FLIGHT:
            in_flight.popleft().wait()
    for pending in in_flight:
        pending.wait()


def receive_tensors(
    rank_group: RankGroup,
    rooms: Mapping[int, Sequence[torch.Tensor]],
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Fill each rank's room with what it sends: from all of them at once, taking turns.

    ``meanwhile`` is work of this rank's own, done while the first parcels are on their way.
    """
    inboxes = [_Receiver(rank_group, rank, room) for rank, room in rooms.items()]
    for inbox in inboxes:
        inbox.ask()
    meanwhile()
    while inboxes:
        for inbox in inboxes:
            inbox.advance()
        inboxes = [inbox for inbox in inboxes if not inbox.is_done]


class _Receiver:
    """What one rank sends, a few parcels in flight."""

    def __init__(self, rank_group: RankGroup, source: int, room: Sequence[torch.Tensor]) -> None:
        self._rank_group = rank_group
        self._source = source
        self._room = room
        self._expected = deque(enumerate(split_into_messages(_sizes(room))))
        self._under_way: deque[tuple[Handle, Sequence[Range], torch.Tensor | None]] = deque()

    @property
    def is_done(self) -> bool:
        return not self._expected and not self._under_way

    def advance(self) -> None:
        """Ask for the next parcel; settle the oldest if enough are in flight."""
        self.ask()
        if len(self._under_way) > _RECEIVES_IN_FLIGHT or not self._expected:
            self._settle()

    def ask(self) -> None:
        if self._expected:
            self._post(*self._expected.popleft())

    def _post(self, tag: int, ranges: Sequence[Range]) -> None:
        wire = self._rank_group.control_device
        only = self._room[ranges[0].position]
        buffer = None
        if len(ranges) == 1 and only.device.type == wire.type:
            target = _as_bytes(only)[ranges[0].start : ranges[0].stop]
        else:
            size = sum(r.nbytes for r in ranges)
            target = buffer = torch.empty(size, dtype=torch.uint8, device=wire)
        pending = self._rank_group.receive(target, self._source, tag)
        self._under_way.append((pending, ranges, buffer))

    def _settle(self) -> None:
        if self._under_way:
            pending, ranges, buffer = self._under_way.popleft()
            pending.wait()
            if buffer is not None:
                _unpack(ranges, self._room, buffer)
