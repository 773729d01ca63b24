"""Flat storage of parameters, the staging pool, and copies of many tensors in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from onecopy.comm.gloo.shared_memory import SharedMemory
from onecopy.planning.layout import fills_its_storage, is_dense, one_of_each
from onecopy.planning.plan import Plan, Stream
from onecopy.torch_private import foreach_copy_


@dataclass(slots=True)
class CopyList:
    """Pairs of equally shaped views, copied by one call."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.targets.append(target)
        self.sources.append(source)

    def extend(self, others: CopyList) -> None:
        self.targets += others.targets
        self.sources += others.sources

    def reversed(self) -> CopyList:
        return CopyList(self.sources, self.targets)

    def run(self) -> None:
        if self.targets:
            foreach_copy_(self.targets, self.sources)


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
        self._homes: dict[int, _Place] = {}

    def adopt(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        """Give homes to the parameters of the plan's streams that have none yet.

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
                if index in self._homes or (is_dense(param) and fills_its_storage(param)):
                    self._homes[index] = _Place(number, start, *form)
            self._flats.append(flat)
            self._complete.append(all(index in self._homes for index in stream.params))
        self.bring_home(params)

    def bring_home(self, params: Sequence[torch.Tensor]) -> None:
        """Move in what is new, and move back what was given other memory in the meantime."""
        for index, home in self._homes.items():
            param, flat = params[index], self._flats[home.stream]
            if param.data_ptr() != flat.data_ptr() + home.start * flat.element_size():
                memory = flat.as_strided(home.shape, home.stride, home.start)
                memory.copy_(param.detach())
                param.data = memory

    def range(self, stream: int, start: int, stop: int) -> torch.Tensor | None:
        """[start, stop) of a stream as one tensor, if all of its parameters live there."""
        return self._flats[stream][start:stop] if self._complete[stream] else None


_BufferKey = tuple[int, torch.dtype, torch.device]


class StagingPool:
    """A few reusable buffers: as many as there are gathers in flight, each as large as needed.

    Fresh buffers of tens of megabytes would cost page faults in every step.
    """

    def __init__(
        self, depth: int, memory_to_lend: Callable[[int], SharedMemory] | None = None
    ) -> None:
        """``memory_to_lend``: where buffers on the CPU come from that neighbours are to read."""
        self._depth = depth
        self._memory_to_lend = memory_to_lend
        self._sizes: dict[_BufferKey, int] = {}
        self._buffers: dict[_BufferKey, torch.Tensor] = {}
        self._lent: dict[_BufferKey, SharedMemory] = {}

    def demand(self, turn: int, numel: int, like: torch.Tensor) -> None:
        """Announce what ``reserve`` will ask for. All demands come before the first reserve."""
        key = self._key(turn, like)
        self._sizes[key] = max(numel, self._sizes.get(key, 0))

    def reserve(self, turn: int, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer for the ``turn``-th gather; the one for ``turn + depth`` is the same memory."""
        key = self._key(turn, like)
        if key not in self._buffers:
            self._buffers[key] = self._allocate(key, like)
        assert numel <= self._sizes[key]
        return self._buffers[key][:numel]

    def lender(self, turn: int, like: torch.Tensor) -> SharedMemory | None:
        """The memory behind a buffer that was reserved, if neighbours can read it."""
        return self._lent.get(self._key(turn, like))

    def _allocate(self, key: _BufferKey, like: torch.Tensor) -> torch.Tensor:
        numel = self._sizes[key]
        if self._memory_to_lend is None or like.device.type != "cpu" or not numel:
            return torch.zeros(numel, dtype=like.dtype, device=like.device)
        self._lent[key] = self._memory_to_lend(numel * like.element_size())
        return self._lent[key].data.view(like.dtype)

    def _key(self, turn: int, like: torch.Tensor) -> _BufferKey:
        return turn % self._depth, like.dtype, like.device

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
