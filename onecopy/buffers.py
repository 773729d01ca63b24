"""Memory: parameters and gradients as flat ranges, and flat homes for parameters.

A *dense* tensor (contiguous in some order of its dimensions, channels_last for example) is seen as
the one-dimensional run of its elements in storage order. Pieces are ranges of that run, so cutting
never depends on strides, and parameters keep theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from onecopy.lending import SharedMemory
from onecopy.plan import Plan, Stream
from onecopy.torch_private import foreach_copy_

_T = TypeVar("_T")


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one gapless run of memory, in whatever order of dimensions."""
    expected = 1
    dims = ((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1)
    if tensor.numel() == 0:
        return True
    for stride, size in sorted(dims):
        if stride != expected:
            return False
        expected *= size
    return True


def flat_range(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a dense tensor in storage order, sharing its memory."""
    return tensor.as_strided((stop - start,), (1,), tensor.storage_offset() + start)


def part_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The same; but a tensor with gaps is never cut, and comes as it is."""
    return flat_range(tensor, start, stop) if is_dense(tensor) else tensor


def in_layout_of(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, with its elements in the same storage order as those of ``param``.

    Why: pairing a contiguous gradient with a channels_last weight element by element in storage
    order would mix up the elements.
    """
    if tensor.stride() == param.stride() or _same_order(param, tensor):
        return tensor
    return torch.empty_strided(
        param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _same_order(param: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Strides of dimensions of size one mean nothing."""
    return all(
        a == b
        for a, b, size in zip(param.stride(), tensor.stride(), param.shape, strict=True)
        if size != 1
    )


def one_of_each(values: Iterable[_T]) -> list[_T]:
    """The same values, with one object for all that are equal.

    Thousands of parameters have few shapes, and each that is remembered would be an object.
    """
    known: dict[_T, _T] = {}
    return [known.setdefault(value, value) for value in values]


def fills_its_storage(tensor: torch.Tensor) -> bool:
    """Whether nothing else can live in the tensor's storage."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def first_overlap(params: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Positions of two tensors that share an element, if any do."""
    spans = sorted(
        (str(param.device), *_span(param), position)
        for position, param in enumerate(params)
        if param.numel() and param.device.type != "meta"
    )
    for at, (device, _, stop, a) in enumerate(spans):
        for other, start, _, b in itertools.islice(spans, at + 1, None):
            if other != device or start >= stop:
                break
            if _share_elements(params[a], params[b]):
                return (a, b) if a < b else (b, a)
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first byte of a tensor to behind its last, gaps included."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    return start, start + reach * tensor.element_size()


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """For tensors whose spans cross. Interleaved columns of one matrix, say, share nothing."""
    if (is_dense(a) and is_dense(b)) or a.element_size() != b.element_size():
        return True
    (a_start, a_stop), (b_start, b_stop) = _span(a), _span(b)
    base, size = min(a_start, b_start), a.element_size()
    places = torch.arange((max(a_stop, b_stop) - base) // size)
    of_a = places.as_strided(a.shape, a.stride(), (a_start - base) // size)
    of_b = places.as_strided(b.shape, b.stride(), (b_start - base) // size)
    return bool(torch.isin(of_a.contiguous(), of_b.contiguous()).any())


@dataclass(slots=True)
class Copies:
    """Pairs of equally shaped views, copied by one call."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.targets.append(target)
        self.sources.append(source)

    def extend(self, others: Copies) -> None:
        self.targets += others.targets
        self.sources += others.sources

    def reversed(self) -> Copies:
        return Copies(self.sources, self.targets)

    def run(self) -> None:
        if self.targets:
            foreach_copy_(self.targets, self.sources)


class _Home(NamedTuple):
    """Where a parameter lives, and in which form. Not as a tensor: there may be thousands."""

    stream: int
    start: int
    shape: torch.Size
    stride: tuple[int, ...]


class FlatHomes:
    """Flat storage of whole streams, with parameters living in it as views.

    Then what a rank owns in a bucket is one gapless range, and gathering needs no copies. Strides
    are kept. A parameter that shares its storage with anything else, or that is not dense, stays
    where it is: moving it would tear it from what it shares with.
    """

    def __init__(self) -> None:
        self._streams: tuple[Stream, ...] = ()  # those of the plan, each with ...
        self._flats: list[torch.Tensor] = []  # ... its storage
        self._complete: list[bool] = []  # whether all parameters of the stream live in it
        self._homes: dict[int, _Home] = {}

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
                    self._homes[index] = _Home(number, start, *form)
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


class Staging:
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
