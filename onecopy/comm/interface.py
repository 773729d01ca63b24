"""What the bucket engine asks of a backend, and the records that both share.

A bucket is a flat run of elements; every rank owns one range of it. Two operations exist::

    all_gather       this rank's range of the parameters  -> the parameters of all ranks
    reduce_scatter   the whole bucket of every rank       -> the sum of this rank's range

An operation is prepared once, when the plan or the memory changes, and started in every step, as a
persistent collective of MPI. The engine owns all buffers; a buffer has at most one user.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from onecopy.comm.group import RankGroup
from onecopy.planning.layout import flat_range, part_of
from onecopy.planning.plan import Plan, Segment, Shard
from onecopy.planning.sizes import MIN_MESSAGE_BYTES, Links
from onecopy.planning.traits import Kind
from onecopy.torch_private import foreach_copy_

# Elements that stay in the cache while contributions are added up.
CACHED_ELEMENTS = 1 << 17


@dataclass(slots=True)
class CopyList:
    """Pairs of equally shaped views, copied by one call."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.targets.append(target)
        self.sources.append(source)

    def pack(self, views: Sequence[torch.Tensor], run: torch.Tensor) -> None:
        """Copy views into a run of memory, one after the other."""
        self.targets += _places(views, run)
        self.sources += views

    def unpack(self, run: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """The inverse of ``pack``."""
        self.targets += views
        self.sources += _places(views, run)

    def run(self) -> None:
        if self.targets:
            foreach_copy_(self.targets, self.sources)


def _places(views: Sequence[torch.Tensor], run: torch.Tensor) -> Iterator[torch.Tensor]:
    """The part of the run that each view fills."""
    for part, view in zip(torch.split(run, [view.numel() for view in views]), views, strict=True):
        yield part.view(view.shape)


def total_numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


class BucketLayout:
    """A bucket of a plan in staging: the ranges of the ranks, one after the other."""

    def __init__(self, plan: Plan, index: int) -> None:
        self.plan, self.index = plan, index
        self.numel = plan.buckets[index].numel
        self.kind = plan.streams[plan.buckets[index].stream].kind

    @functools.cached_property
    def _owned(self) -> dict[int, tuple[int, int]]:
        """Of whole tensors, by owner."""
        return self.plan.owned_ranges(self.index)

    def range(self, rank: int) -> tuple[int, int]:
        """[start, stop) of what a rank owns."""
        if self.kind is Kind.ELEMENTWISE:
            return self.plan.slot(self.index, rank)
        return self._owned.get(rank, (0, 0))

    def part(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank owns in the staging of the bucket."""
        start, stop = self.range(rank)
        return flat[start:stop]

    def segments(self) -> Iterator[Segment]:
        """The parameters in the bucket that have elements."""
        return (segment for segment in self.plan.segments(self.index) if segment.numel)


@dataclass(frozen=True, slots=True)
class BucketParams:
    """Where the parameters of a bucket are."""

    layout: BucketLayout
    params: Sequence[torch.Tensor]
    flat: torch.Tensor | None  # the bucket as one run, if its parameters live in flat storage

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the dtype and the device of the bucket."""
        return self.params[next(self.layout.plan.segments(self.layout.index)).param]

    def shards(self, owner: int) -> list[Shard]:
        plan, index = self.layout.plan, self.layout.index
        return [shard for shard in plan.shards_in(index, owner) if shard.numel]

    def view(self, part: Segment) -> torch.Tensor:
        """A run of memory, or a tensor with gaps."""
        return part_of(self.params[part.param], part.start, part.stop)

    def owned_by(self, owner: int) -> list[torch.Tensor]:
        """What a rank owns, in the order of the bucket."""
        shards = self.shards(owner)
        if shards and self.flat is not None:
            return [self.flat[shards[0].offset : shards[-1].offset + shards[-1].numel]]
        return [self.view(shard) for shard in shards]

    @property
    def one_run(self) -> torch.Tensor | None:
        """An elementwise bucket as one tensor, if its memory is one run."""
        first, *others = self.layout.plan.segments(self.layout.index)
        if not others and first.stop - first.start == self.layout.numel:
            return flat_range(self.params[first.param], first.start, first.stop)
        return self.flat

    def messages(self, owner: int) -> list[list[torch.Tensor]]:
        """What a rank owns, by message: each large view alone, in place, all small ones together.

        Every rank finds the same messages, in the same order.
        """
        views = self.owned_by(owner)
        large: list[torch.Tensor] = []
        small: list[torch.Tensor] = []
        for view in views:
            is_large = len(views) == 1 or view.nbytes >= MIN_MESSAGE_BYTES
            (large if is_large and view.is_contiguous() else small).append(view)
        return [*([view] for view in large), *([small] if small else [])]


def is_in_place(message: Sequence[torch.Tensor]) -> bool:
    """Whether a message is sent from, and received in, the memory of the parameters."""
    return len(message) == 1 and message[0].is_contiguous()


class Buffer:
    """Staging of the engine, allocated by a ``Comm``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.wait_for_user: Callable[[], None] | None = None  # set while a collective uses it

    @classmethod
    def allocate(cls, numel: int, like: torch.Tensor) -> Buffer:
        return cls(torch.zeros(numel, dtype=like.dtype, device=like.device))

    def wait_until_read(self) -> None:
        """Wait until no other rank reads what was in it."""


class GatherBuffers(NamedTuple):
    """Staging of an all-gather, as far as it needs any."""

    packed: Buffer | None  # for what is copied to travel
    shared: Buffer | None  # for what local ranks read


class ReduceBuffers(NamedTuple):
    """Staging of a reduce-scatter."""

    send: Buffer  # the gradients of this rank
    receive: Buffer  # contributions in the dtype of ``send``
    sums: Buffer  # contributions in a wider dtype


class Collective(ABC):
    """A prepared operation on one bucket: start, wait, complete, again and again."""

    buffers: Sequence[Buffer]

    @abstractmethod
    def start(self) -> None:
        """Launch it. Its buffers are free, and a reduce-scatter finds the gradients in them."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until everything has arrived. Can be called again if it is interrupted."""

    @abstractmethod
    def complete(self) -> None:
        """Copy out, or add up; then other ranks may use their memory again."""

    @abstractmethod
    def discard(self) -> None:
        """In place of ``complete``: use nothing of what has arrived."""


class GradientSlot:
    """The sum over the ranks of this rank's range of a bucket."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.holds = False  # whether there is a gradient in it

    def add(self, contributions: Sequence[torch.Tensor]) -> None:
        """Add up contributions in this order, and add the sum to what is held.

        The order decides the last bit. With more than two, in runs that stay in the cache.
        """
        numel = self.tensor.numel()
        in_runs = len(contributions) > 2 and self.tensor.device.type == "cpu"
        run = CACHED_ELEMENTS if in_runs else max(numel, 1)
        for start in range(0, numel, run):
            parts = [each[start : start + run] for each in contributions]
            _add_run(self.tensor[start : start + run], self.holds, *parts)
        self.holds = True


def _add_run(slot: torch.Tensor, holds: bool, first: torch.Tensor, *others: torch.Tensor) -> None:
    if others and not holds and first.dtype == slot.dtype:
        torch.add(first, others[0], out=slot)
        for other in others[1:]:
            slot.add_(other)
        return
    # Narrow contributions are summed in the wider dtype of the gradient.
    total = first.to(torch.promote_types(first.dtype, slot.dtype))
    for other in others:  # the first may lie in the memory of another rank: not to be written to
        total = total + other if total is first else total.add_(other)
    slot.add_(total) if holds else slot.copy_(total)


class Comm(ABC):
    """Bucket collectives among the ranks of a group, for tensors of one kind of device."""

    group: RankGroup
    links: Links  # how this rank exchanges buckets, from which the staging is computed

    def allocate(self, numel: int, like: torch.Tensor) -> Buffer:
        """A buffer that other ranks may read, if they can."""
        return Buffer.allocate(numel, like)

    @abstractmethod
    def all_gather(self, params: BucketParams, staging: GatherBuffers) -> Collective: ...

    @abstractmethod
    def reduce_scatter(
        self, layout: BucketLayout, staging: ReduceBuffers, slot: GradientSlot, tag: int
    ) -> Collective:
        """``tag`` tells its messages from those of other reduce-scatters."""

    @abstractmethod
    def release_unused(self) -> None:
        """Memory of the engine has changed: let go of what belonged to the old one."""


def make_comm(group: RankGroup, device: torch.device) -> Comm:
    """The collectives for tensors on a device. Collective: local ranks find one another."""
    is_native = group.is_native(device)
    if group.world_size == 1 or device.type != "cpu" or is_native:
        from onecopy.comm.c10d import C10dComm

        return C10dComm(group, is_native)
    from onecopy.comm.gloo.comm import GlooComm

    return GlooComm(group)
