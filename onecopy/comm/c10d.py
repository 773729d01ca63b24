"""Bucket collectives by the process group's own, on every backend.

Equal slots travel in one all-gather and one reduce-scatter. A remainder is padded to equal slots in
an all-gather; a bucket of whole tensors is broadcast, owner by owner. What a backend cannot sum, or
not in the right dtype, is exchanged in one all-to-all, and each owner adds up what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        self.group, self.links = group, Links(is_native)

    def release_unused(self) -> None:
        """Nothing is kept besides the buffers."""

    def all_gather(self, params: BucketParams, staging: GatherBuffers) -> Collective:
        packed = staging.packed
        if params.layout.kind is Kind.WHOLE or not self.links.native:
            return self._broadcasts(params, packed)
        if packed is not None:
            return self._staged_slots(params, packed)
        assert params.one_run is not None
        return self._gathering(params.one_run, (), CopyList(), CopyList())

    def _staged_slots(self, params: BucketParams, packed: Buffer) -> Collective:
        """Through one staged copy; unequal slots are padded to the longest."""
        layout, rank, world = params.layout, self.group.rank, self.group.world_size
        copy_in, copy_out = CopyList(), CopyList()
        if layout.plan.has_equal_slots(layout.index):
            numel, owners = layout.numel // world, [rank]
            for segment in layout.segments():  # those of several slots are copied out at once
                length = segment.stop - segment.start
                staged = packed.tensor.narrow(0, segment.offset, length)
                copy_out.add(params.view(segment), staged)
        else:
            slots = map(layout.range, range(world))
            numel, owners = max(stop - start for start, stop in slots), [*range(world)]
        for owner in owners:
            for shard in params.shards(owner):
                place = owner * numel + shard.offset - layout.range(owner)[0]
                staged = packed.tensor.narrow(0, place, shard.numel)
                if owner == rank:
                    copy_in.add(staged, params.view(shard))
                else:
                    copy_out.add(params.view(shard), staged)
        return self._gathering(packed.tensor[: numel * world], [packed], copy_in, copy_out)

    def _gathering(
        self,
        slots: torch.Tensor,
        buffers: Sequence[Buffer],
        copy_in: CopyList,
        copy_out: CopyList,
    ) -> Collective:
        group = self.group
        numel = slots.numel() // group.world_size
        mine = slots.narrow(0, group.rank * numel, numel)

        def launch() -> Handle:
            group.traffic.add(mine, group.world_size - 1)
            return group.launch(_all_gather_single, slots, mine, async_op=True)

        return _Operation(buffers, launch, copy_in, copy_out)

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
        return _Operation(buffers, lambda: self.group.broadcast_tensors(parts), copy_in, copy_out)

    def reduce_scatter(
        self, layout: BucketLayout, staging: ReduceBuffers, slot: GradientSlot, tag: int
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
        return _Operation((send, receive), launch, slot=slot, contributions=contributions)

    def _reducing(self, outgoing: torch.Tensor, mine: torch.Tensor) -> Callable[[], Handle]:
        """``outgoing`` is equal slots; ``mine`` becomes the sum of this rank's over all ranks."""
        group = self.group

        def launch() -> Handle:
            group.traffic.add(mine, group.world_size - 1)
            tensors = as_real(mine), as_real(outgoing)
            return group.launch(_reduce_scatter_single, *tensors, async_op=True)

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
        tensors = incoming, outgoing[: sum(sizes)], [sizes[group.rank]] * world, sizes

        def launch() -> Handle:
            for part in parts:
                group.traffic.add(part)
            return group.launch(dist.all_to_all_single, *tensors, async_op=True)

        return launch


@dataclass(eq=False)
class _Operation(Collective):
    """Copies, one launch, copies; or contributions that are added up."""

    buffers: Sequence[Buffer]
    launch: Callable[[], Handle]
    copy_in: CopyList = field(default_factory=CopyList)
    copy_out: CopyList = field(default_factory=CopyList)
    slot: GradientSlot | None = None
    contributions: Sequence[torch.Tensor] = ()
    handle: Handle | None = None

    def start(self) -> None:
        self.copy_in.run()
        self.handle = self.launch()

    def wait(self) -> None:
        assert self.handle is not None
        self.handle.wait()

    def complete(self) -> None:
        self.copy_out.run()
        if self.slot is not None:
            self.slot.add(self.contributions)

    def discard(self) -> None:
        """The memory is this rank's own."""


# torch 2.13 renamed these and warns about the old names.
_all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
