"""Flat storage of parameters, and the staging pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from onecopy.comm.interface import Buffer
from onecopy.planning.layout import fills_its_storage, is_dense, one_of_each
from onecopy.planning.plan import Plan, Stream


class _Place(NamedTuple):
    """Where a parameter lives, and in which form. Not as a tensor: there may be thousands."""

    stream: int
    start: int
    shape: torch.Size
    stride: tuple[int, ...]


class FlatStorage:
    """Flat storage of whole streams, with parameters living in it as views.

    Then what a rank owns in a bucket is one gapless range, and gathering needs no copies. Strides
    are kept. A parameter that shares its storage with anything else, or that is not dense, stays
    where it is: moving it would tear it from what it shares with.
    """

    def __init__(self) -> None:
        self._streams: tuple[Stream, ...] = ()  # those of the plan, each with ...
        self._flats: list[torch.Tensor] = []  # ... its storage
        self._complete: list[bool] = []  # whether all parameters of the stream live in it
        self._places: dict[int, _Place] = {}

    def adopt(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        """Move in the parameters of the plan's streams that live elsewhere.

        If the plan does not extend the one before, everybody moves.
        """
        if plan.streams[: len(self._streams)] != self._streams:
            self._flats, self._complete = [], []
        self._streams = plan.streams
        for number, stream in enumerate(plan.streams[len(self._flats) :], len(self._flats)):
            like = params[stream.params[0]]
            flat = torch.zeros(stream.stop, dtype=like.dtype, device=like.device)
            forms = one_of_each((params[i].shape, params[i].stride()) for i in stream.params)
            for index, start, form in zip(stream.params, stream.starts, forms, strict=True):
                param = params[index]
                if index in self._places or (is_dense(param) and fills_its_storage(param)):
                    self._places[index] = _Place(number, start, *form)
            self._flats.append(flat)
            self._complete.append(all(index in self._places for index in stream.params))
        self.move_back(params)

    def move_back(self, params: Sequence[torch.Tensor]) -> None:
        """Move in what is new, and move back what was given other memory in the meantime."""
        for index, place in self._places.items():
            param, flat = params[index], self._flats[place.stream]
            if param.data_ptr() != flat.data_ptr() + place.start * flat.element_size():
                memory = flat.as_strided(place.shape, place.stride, place.start)
                memory.copy_(param.detach())
                param.data = memory

    def range(self, stream: int, start: int, stop: int) -> torch.Tensor | None:
        """[start, stop) of a stream as one tensor, if all of its parameters live there."""
        return self._flats[stream][start:stop] if self._complete[stream] else None


class StagingPool:
    """A few reusable buffers, by turn, dtype and device, each as large as its users need.

    Fresh buffers of tens of megabytes would cost page faults in every step.
    """

    def __init__(self) -> None:
        self._sizes: dict[_BufferKey, int] = {}
        self._buffers: dict[_BufferKey, Buffer] = {}

    def announce(self, turn: int, numel: int, like: torch.Tensor) -> None:
        """State what ``reserve`` will ask for. All is stated before the first reserve."""
        key = turn, like.dtype, like.device
        self._sizes[key] = max(numel, self._sizes.get(key, 0))

    def reserve(
        self, turn: int, like: torch.Tensor, allocate: Callable[[int, torch.Tensor], Buffer]
    ) -> Buffer:
        """The buffer of a turn: the same in every call."""
        key = turn, like.dtype, like.device
        if key not in self._buffers:
            self._buffers[key] = allocate(self._sizes[key], like)
        return self._buffers[key]

    def nbytes(self) -> int:
        return sum(buffer.tensor.nbytes for buffer in self._buffers.values())


_BufferKey = tuple[int, torch.dtype, torch.device]
