"""Tensors and plain values from rank to rank, without pickle.

A state value is a tensor, a plain Python value, or a container of both. ``encode`` takes the
tensors out and leaves a *skeleton* of JSON; ``decode`` is its inverse. The tensors travel in
messages: a large tensor in ranges of its own memory, small tensors packed together. Both sides
compute the same messages from the sizes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onecopy.comm.group import RankGroup
from onecopy.comm.monitor import Handle

_SENDS_IN_FLIGHT = 4
_RECEIVES_IN_FLIGHT = 2  # from each rank
PACKED_BYTES = 4 * 2**20  # the longest message of packed tensors
RANGE_BYTES = 32 * 2**20  # the longest message of one tensor
_MIN_MESSAGE_BYTES = 64 * 2**10  # shorter tensors are packed


class NotPlain(TypeError):
    """A state value that cannot be written down without pickle."""


def encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The skeleton of ``value``. Its tensors are appended to ``tensors``; the skeleton has their
    positions."""
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


def decode(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of ``encode``."""
    ((kind, content),) = skeleton.items()
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
    """Cut and pack tensors of these sizes in bytes. Each tuple of ranges is one message."""
    packed: list[Range] = []
    packed_bytes = 0
    for position, size in enumerate(sizes):
        if size >= _MIN_MESSAGE_BYTES:
            for start in range(0, size, RANGE_BYTES):
                yield (Range(position, start, min(start + RANGE_BYTES, size)),)
        elif size:
            if packed_bytes + size > PACKED_BYTES:
                yield tuple(packed)
                packed, packed_bytes = [], 0
            packed.append(Range(position, 0, size))
            packed_bytes += size
    if packed:
        yield tuple(packed)


def _messages(flats: Sequence[torch.Tensor]) -> Iterator[tuple[int, tuple[Range, ...]]]:
    """Numbered messages of 1-D contiguous tensors; the number is the tag."""
    return enumerate(split_into_messages([flat.nbytes for flat in flats]))


def _in_place(
    ranges: Sequence[Range], flats: Sequence[torch.Tensor], wire: torch.device
) -> torch.Tensor | None:
    """The memory of a message that is one range of a tensor on the device of the wire."""
    first = flats[ranges[0].position]
    if len(ranges) > 1 or first.device.type != wire.type:
        return None
    return first.view(torch.uint8)[ranges[0].start : ranges[0].stop]


def _pairs(
    ranges: Sequence[Range], flats: Sequence[torch.Tensor], buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The ranges, packed into a buffer one after the other, and where the tensors have them."""
    start = 0
    for r in ranges:
        in_tensor = flats[r.position].view(torch.uint8)[r.start : r.stop]
        yield buffer[start : start + r.nbytes], in_tensor
        start += r.nbytes


# Functions, so that no view of the buffer stays among the variables of those that free it.


def _pack(ranges: Sequence[Range], flats: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    for packed, in_tensor in _pairs(ranges, flats, buffer):
        packed.copy_(in_tensor)


def _unpack(ranges: Sequence[Range], flats: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    for packed, in_tensor in _pairs(ranges, flats, buffer):
        in_tensor.copy_(packed)


def send_tensors(rank_group: RankGroup, flats: Sequence[torch.Tensor], to: int) -> None:
    """Send 1-D contiguous tensors: in place where they are on the device of the wire, otherwise
    through one staging buffer."""
    wire = rank_group.control_device
    staging = torch.empty(0, dtype=torch.uint8, device=wire)
    uses_staging: Handle | None = None
    in_flight: deque[Handle] = deque()
    for tag, ranges in _messages(flats):
        message = _in_place(ranges, flats, wire)
        is_staged = message is None
        if message is None:
            if uses_staging is not None:
                uses_staging.wait()
            size = sum(r.nbytes for r in ranges)
            if staging.numel() < size:
                staging = torch.empty(0, device="cpu")  # free the smaller one first
                staging = torch.empty(size, dtype=torch.uint8, device=wire)
            message = staging[:size]
            _pack(ranges, flats, message)
        in_flight.append(rank_group.send(message, to, tag))
        if is_staged:
            uses_staging = in_flight[-1]
        if len(in_flight) > _SENDS_IN_FLIGHT:
            in_flight.popleft().wait()
    for handle in in_flight:
        handle.wait()


def receive_tensors(
    rank_group: RankGroup,
    rooms: Mapping[int, Sequence[torch.Tensor]],
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Fill the tensors for each rank with what it sends: from all ranks at once, in turns.

    ``meanwhile`` is local work that is done while the first messages are on their way.
    """
    receiving = [_receive(rank_group, rank, flats) for rank, flats in rooms.items()]
    receiving = [each for each in receiving if next(each, _DONE) is not _DONE]
    meanwhile()
    while receiving:
        receiving = [each for each in receiving if next(each, _DONE) is not _DONE]


_DONE = object()


def _receive(rank_group: RankGroup, source: int, flats: Sequence[torch.Tensor]) -> Iterator[None]:
    """Receive from one rank, and yield after each message that was posted or has arrived."""
    wire = rank_group.control_device
    in_flight: deque[tuple[Handle, Sequence[Range], torch.Tensor | None]] = deque()

    def finish_first() -> None:
        handle, ranges, buffer = in_flight.popleft()
        handle.wait()
        if buffer is not None:
            _unpack(ranges, flats, buffer)

    for tag, ranges in _messages(flats):
        message, buffer = _in_place(ranges, flats, wire), None
        if message is None:
            size = sum(r.nbytes for r in ranges)
            message = buffer = torch.empty(size, dtype=torch.uint8, device=wire)
        in_flight.append((rank_group.receive(message, source, tag), ranges, buffer))
        if len(in_flight) > _RECEIVES_IN_FLIGHT:
            finish_first()
        yield
    while in_flight:
        finish_first()
        yield
