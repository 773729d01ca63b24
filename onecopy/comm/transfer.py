"""Tensors and plain values from rank to rank, without pickle.

A state value is a tensor, a plain Python value, or a container of both. ``encode`` takes the
tensors out and leaves a *skeleton* of JSON; ``decode`` is its inverse. The tensors travel in
messages: a large tensor in ranges of its own memory, small tensors packed together. Both sides
compute the same messages from the sizes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def empty(self) -> torch.Tensor:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"expected the name of a dtype, got {self.dtype!r}")
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device="cpu")


def split_into_messages(flats: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The bytes of 1-D contiguous tensors, as views, in lists of those that travel together.

    The number of a message is its tag.
    """
    packed: list[torch.Tensor] = []
    packed_bytes = 0
    for flat in flats:
        view = flat.view(torch.uint8)
        size = view.numel()
        if size >= _MIN_MESSAGE_BYTES:
            for part in torch.split(view, RANGE_BYTES):
                yield [part]
        elif size:
            if packed_bytes + size > PACKED_BYTES:
                yield packed
                packed, packed_bytes = [], 0
            packed.append(view)
            packed_bytes += size
    if packed:
        yield packed


def _staged_bytes(message: Sequence[torch.Tensor], wire: torch.device) -> int:
    """0: it is sent and received in the memory of the tensor."""
    is_in_place = len(message) == 1 and message[0].device.type == wire.type
    return 0 if is_in_place else sum(view.numel() for view in message)


def _copy(message: Sequence[torch.Tensor], buffer: torch.Tensor, packs: bool) -> None:
    """Pack the views into a buffer, one after the other; or unpack them.

    A function, so that no view of the buffer stays among the variables of those that free it.
    """
    parts = torch.split(buffer, [view.numel() for view in message])
    for part, view in zip(parts, message, strict=True):
        part.copy_(view) if packs else view.copy_(part)


def send_tensors(rank_group: RankGroup, flats: Sequence[torch.Tensor], to: int) -> None:
    """Send 1-D contiguous tensors: in place where they are on the device of the wire, otherwise
    through one staging buffer."""
    wire = rank_group.control_device
    messages = [(each, _staged_bytes(each, wire)) for each in split_into_messages(flats)]
    size = max((staged for _, staged in messages), default=0)
    staging = torch.empty(size, dtype=torch.uint8, device=wire)
    uses_staging: Handle | None = None
    in_flight: deque[Handle] = deque()
    for tag, (message, staged) in enumerate(messages):
        if staged:
            if uses_staging is not None:
                uses_staging.wait()
            sent = staging[:staged]
            _copy(message, sent, packs=True)
            uses_staging = rank_group.send(sent, to, tag)
            in_flight.append(uses_staging)
        else:
            in_flight.append(rank_group.send(message[0], to, tag))
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
    receiving = [each for each in receiving if next(each, False)]
    meanwhile()
    while receiving:
        receiving = [each for each in receiving if next(each, False)]


def _receive(rank_group: RankGroup, source: int, flats: Sequence[torch.Tensor]) -> Iterator[bool]:
    """Receive from one rank, and yield True after each message that was posted or has arrived."""
    wire = rank_group.control_device
    in_flight: deque[tuple[Handle, list[torch.Tensor], torch.Tensor | None]] = deque()

    def finish_first() -> None:
        handle, message, staging = in_flight.popleft()
        handle.wait()
        if staging is not None:
            _copy(message, staging, packs=False)

    for tag, message in enumerate(split_into_messages(flats)):
        room, staging = message[0], None
        if staged := _staged_bytes(message, wire):
            room = staging = torch.empty(staged, dtype=torch.uint8, device=wire)
        in_flight.append((rank_group.receive(room, source, tag), message, staging))
        if len(in_flight) > _RECEIVES_IN_FLIGHT:
            finish_first()
        yield True
    while in_flight:
        finish_first()
        yield True
