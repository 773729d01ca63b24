"""Bucket collectives by the process group's own, on every backend.

Equal slots travel in one all-gather and one reduce-scatter. A remainder is padded to equal slots in
an all-gather; a bucket of whole tensors is broadcast, owner by owner. What a backend cannot sum, or
not in the right dtype, is exchanged in one all-to-all, and each owner adds up what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from onecopy.comm.group import Part, RankGroup, as_real
from onecopy.comm.interface import (
    BucketLayout,
    BucketParams,
    Buffer,
    Collective,
    Comm,
    CopyList,
    GatherBuffers,
    GradientSlot,
    ReduceBuffers,
    is_in_place,
    total_numel,
)
from onecopy.comm.monitor import Handle
from onecopy.planning.sizes import Links, is_one_sum
from onecopy.planning.traits import Kind


class C10dComm(Comm):
    """Without messages between two ranks and without shared memory."""

    def __init__(self, group: RankGroup, is_native: bool) -> None:
        """``is_native``: all_gather and reduce_scatter of the backend are used, too."""
        self.group = group
        self.links = Links(is_native)

    def release_unused(self) -> None:
        """Nothing is kept besides the buffers."""

    def allocate(self, numel: int, like: torch.Tensor) -> Buffer:
        return Buffer.allocate(numel, like)

    def all_gather(self, params: BucketParams, staging: GatherBuffers) -> Collective:
        packed = staging.packed
        if params.layout.kind is Kind.WHOLE or not self.links.native:
            return self._broadcasts(params, packed)
        if params.layout.has_equal_slots:
            return self._equal_slots(params, packed)
        return self._padded_slots(params, packed)

    def _equal_slots(self, params: BucketParams, packed: Buffer | None) -> Collective:
        """In place, or through one staged copy."""
        if packed is None:
            assert params.one_run is not None
            return self._gathering(params.one_run)
        copy_in, copy_out = CopyList(), CopyList()
        staging = packed.tensor[: params.layout.numel]
        for shard in params.shards(self.group.rank):
            copy_in.add(staging.narrow(0, shard.offset, shard.numel), params.view(shard))
        for segment in params.layout.segments():
            numel = segment.stop - segment.start
            copy_out.add(params.view(segment), staging.narrow(0, segment.offset, numel))
        return self._gathering(staging, [packed], copy_in, copy_out)

    def _padded_slots(self, params: BucketParams, packed: Buffer | None) -> Collective:
        """Slots padded to the longest."""
        assert packed is not None
        world = self.group.world_size
        slots = [params.layout.range(rank) for rank in range(world)]
        longest = max(stop - start for start, stop in slots)
        copy_in, copy_out = CopyList(), CopyList()
        for owner, (start, _) in enumerate(slots):
            for shard in params.shards(owner):
                place = owner * longest + shard.offset - start
                staged = packed.tensor.narrow(0, place, shard.numel)
                if owner == self.group.rank:
                    copy_in.add(staged, params.view(shard))
                else:
                    copy_out.add(params.view(shard), staged)
        return self._gathering(packed.tensor[: longest * world], [packed], copy_in, copy_out)

    def _gathering(
        self,
        slots: torch.Tensor,
        buffers: Sequence[Buffer] = (),
        copy_in: CopyList | None = None,
        copy_out: CopyList | None = None,
    ) -> Collective:
        group = self.group
        numel = slots.numel() // group.world_size
        mine = slots.narrow(0, group.rank * numel, numel)

        def launch() -> Handle:
            group.traffic.add(mine, group.world_size - 1)
            with group.monitor.naming_absentees():
                work = _all_gather_single(slots, mine, group=group.process_group, async_op=True)
            return Handle(group.monitor, [work], [slots])

        return _Operation(buffers, copy_in, launch, copy_out)

    def _broadcasts(self, params: BucketParams, packed: Buffer | None) -> Collective:
        """Large views in place, small ones packed by owner."""
        parts, start = [], 0
        copy_in, copy_out = CopyList(), CopyList()
        for owner in range(self.group.world_size):
            for message in params.messages(owner):
                tensor = message[0]
                if not is_in_place(message):
                    assert packed is not None
                    tensor = packed.tensor[start : start + total_numel(message)]
                    start += tensor.numel()
                    if owner == self.group.rank:
                        copy_in.pack(message, tensor)
                    else:
                        copy_out.unpack(tensor, message)
                parts.append(Part(owner, tensor))
        buffers = () if packed is None else (packed,)
        return _Operation(buffers, copy_in, lambda: self.group.broadcast_tensors(parts), copy_out)

    def reduce_scatter(
        self,
        layout: BucketLayout,
        staging: ReduceBuffers,
        slot: GradientSlot,
        tag: int,
    ) -> Collective:
        del tag  # collectives are matched in the order in which they are launched
        send, receive, _ = staging
        group, numel, world = self.group, slot.tensor.numel(), self.group.world_size
        outgoing = send.tensor[: layout.numel]
        wire, held = send.tensor.itemsize, slot.tensor.itemsize
        if world == 1:
            launch, contributions = group.nothing, [layout.part(outgoing, 0)]
        elif is_one_sum(layout.plan, layout.index, self.links, wire, held):
            mine = receive.tensor[:numel]
            launch, contributions = self._reducing(outgoing, mine), [mine]
        else:
            incoming = receive.tensor[: numel * world]
            launch = self._exchanging(layout, outgoing, incoming)
            contributions = list(incoming.view(world, numel)) if numel else []
        return _Operation((send, receive), None, launch, None, slot, contributions)

    def _reducing(self, outgoing: torch.Tensor, mine: torch.Tensor) -> Callable[[], Handle]:
        """``outgoing`` is equal slots; ``mine`` becomes the sum of this rank's over all ranks."""
        group = self.group

        def launch() -> Handle:
            group.traffic.add(mine, group.world_size - 1)
            with group.monitor.naming_absentees():
                tensors = as_real(mine), as_real(outgoing)
                work = _reduce_scatter_single(*tensors, group=group.process_group, async_op=True)
            return Handle(group.monitor, [work], [outgoing, mine])

        return launch

    def _exchanging(
        self, layout: BucketLayout, outgoing: torch.Tensor, incoming: torch.Tensor
    ) -> Callable[[], Handle]:
        """``incoming`` becomes what each rank has for this one, in the order of the ranks.

        The part for this rank is copied, too: without it the others would not be one run.
        """
        group, world = self.group, self.group.world_size
        sizes = [stop - start for start, stop in map(layout.range, range(world))]
        parts = [layout.part(outgoing, rank) for rank in range(world) if rank != group.rank]
        outgoing = outgoing[: sum(sizes)]
        splits = [sizes[group.rank]] * world, sizes

        def launch() -> Handle:
            for part in parts:
                group.traffic.add(part)
            with group.monitor.naming_absentees():
                work = dist.all_to_all_single(
                    incoming, outgoing, *splits, group=group.process_group, async_op=True
                )
            return Handle(group.monitor, [work], [outgoing, incoming])

        return launch


class _Operation(Collective):
    """Copies, one launch, copies; or contributions that are added up."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        copy_in: CopyList | None,
        launch: Callable[[], Handle],
        copy_out: CopyList | None,
        slot: GradientSlot | None = None,
        contributions: Sequence[torch.Tensor] = (),
    ) -> None:
        self.buffers = buffers
        self._copy_in, self._launch, self._copy_out = copy_in, launch, copy_out
        self._slot, self._contributions = slot, contributions
        self._handle: Handle | None = None

    def start(self) -> None:
        if self._copy_in is not None:
            self._copy_in.run()
        self._handle = self._launch()

    def wait(self) -> None:
        assert self._handle is not None
        self._handle.wait()

    def complete(self) -> None:
        if self._copy_out is not None:
            self._copy_out.run()
        if self._slot is not None:
            self._slot.add(self._contributions)

    def discard(self) -> None:
        """The memory is this rank's own."""


# torch 2.13 renamed these and warns about the old names.
_all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
