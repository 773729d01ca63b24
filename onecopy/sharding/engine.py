"""The bucket engine: a queue of bucket collectives, its memory, and the all-gathers of parameters.

One queue exists for the all-gathers of an optimizer and one for its reduce-scatters, because with
``lazy_gather`` the parameters of a bucket may be in flight while its gradients already fill. What
is started depends on the plan only, in its order, never on which gradients exist::

    parameters   replicated -> updated -> in flight -> replicated
    gradients    none -> in flight -> held -> (in flight: another backward) ... -> none

No field repeats what others say: `BucketQueue.in_flight`, `AllGathers`, and ``GradientSlot.holds``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from onecopy.comm.group import RankGroup
from onecopy.comm.interface import (
    BucketLayout,
    BucketParams,
    Buffer,
    Collective,
    Comm,
    GatherBuffers,
    make_comm,
)
from onecopy.comm.stats import Phase
from onecopy.planning.layout import fills_its_storage, is_dense, one_of_each
from onecopy.planning.plan import Plan, Stream
from onecopy.planning.sizes import (
    IN_FLIGHT,
    SHARED_BUFFERS,
    in_flight_limit,
    packed_elements,
    shared_elements,
)
from onecopy.torch_private import disable_dynamo


class BucketQueue:
    """Collectives on buckets: started in order, a few in flight, each completed once."""

    def __init__(self, group: RankGroup, phase: Phase) -> None:
        self._group, self._phase = group, phase
        # A reduce-scatter that was sent, or added up, in part can never be repeated: the group is
        # given up. Copies of parameters can.
        can_be_repeated = phase is Phase.ALL_GATHER
        self._or_give_up: Callable[[str], contextlib.AbstractContextManager[object]]
        self._or_give_up = contextlib.nullcontext if can_be_repeated else group.monitor.or_give_up
        # Of its own. Why: two queues may launch their buckets in different orders on two ranks.
        self._comms: dict[torch.device, Comm] = {}
        self.limit = IN_FLIGHT
        # By the number of the bucket, the oldest first.
        self.in_flight: dict[int, Collective] = {}
        self.launched = 0  # buckets, since construction

    def comm_for(self, device: torch.device) -> Comm:
        if device not in self._comms:
            self._comms[device] = make_comm(self._group, device)
        return self._comms[device]

    def release_unused(self) -> None:
        """Let go of memory that belonged to the staging before."""
        for comm in self._comms.values():
            comm.release_unused()

    @torch.no_grad()
    def launch(self, number: int, op: Collective, fill: Callable[[], object] | None = None) -> None:
        """Start the operation of a bucket; ``fill`` its buffers before."""
        while len(self.in_flight) >= self.limit:
            self.wait([next(iter(self.in_flight))])
        self.wait([number])
        for buffer in op.buffers:
            if buffer.wait_for_user is not None:  # in this queue or in another one
                buffer.wait_for_user()
        with self._group.traffic.launching(self._phase, number):
            for buffer in op.buffers:
                buffer.wait_until_read()  # may fail: nothing is in flight yet
            if fill is not None:
                fill()
            with self._or_give_up("sending gradients"):
                op.start()
                for buffer in op.buffers:
                    buffer.wait_for_user = functools.partial(self.wait, [number])
                self.in_flight[number] = op
                self.launched += 1

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """Until these buckets, or all, are complete."""
        for number in list(self.in_flight) if buckets is None else buckets:
            if number in self.in_flight:
                self._finish(number)

    @disable_dynamo  # hooks on modules call it, which may be compiled: nothing to be traced
    @torch.no_grad()
    def _finish(self, number: int) -> None:
        op = self.in_flight[number]
        with self._group.traffic.waiting(self._phase, number):
            op.wait()
            with self._or_give_up("adding up gradients"):
                op.complete()
                # Not before: whoever uses the bucket must not pass for lack of it.
                self._cross_off(number, op)

    def _cross_off(self, number: int, op: Collective) -> None:
        for buffer in op.buffers:
            buffer.wait_for_user = None
        del self.in_flight[number]

    def discard(self) -> None:
        """Wait for all, and use nothing of what arrives. Without a group nothing will arrive."""
        for number, op in list(self.in_flight.items()):
            if self._group.monitor.refusal is None:
                op.wait()
                op.discard()
            self._cross_off(number, op)


# -------------------------------------------------------------------------- memory


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
        # By parameter: its stream, and its view. Not as a tensor: there may be thousands.
        self._places: dict[int, tuple[int, tuple[torch.Size, tuple[int, ...], int]]] = {}

    def adopt(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        """Move in the parameters of the plan's streams that live elsewhere, and move back what was
        given other memory in the meantime.

        If the plan does not extend the one before, everybody moves.
        """
        if plan.streams[: len(self._streams)] != self._streams:
            self._flats, self._complete = [], []
        self._streams = plan.streams
        for number, stream in enumerate(plan.streams[len(self._flats) :], len(self._flats)):
            like = params[stream.params[0]]
            self._flats.append(torch.zeros(stream.stop, dtype=like.dtype, device=like.device))
            forms = one_of_each((params[i].shape, params[i].stride()) for i in stream.params)
            for index, start, form in zip(stream.params, stream.starts, forms, strict=True):
                param = params[index]
                if index in self._places or (is_dense(param) and fills_its_storage(param)):
                    self._places[index] = number, (*form, start)
            self._complete.append(all(index in self._places for index in stream.params))
        for index, (number, view) in self._places.items():
            param, flat = params[index], self._flats[number]
            if param.data_ptr() != flat.data_ptr() + view[-1] * flat.element_size():
                memory = flat.as_strided(*view)
                memory.copy_(param.detach())
                param.data = memory

    def range(self, stream: int, start: int, stop: int) -> torch.Tensor | None:
        """[start, stop) of a stream as one tensor, if all of its parameters live there."""
        return self._flats[stream][start:stop] if self._complete[stream] else None


class StagingRequest(NamedTuple):
    """What a bucket needs of a buffer. Those of one turn, dtype and device share it."""

    turn: Hashable
    numel: int
    like: torch.Tensor
    allocate: Callable[[int, torch.Tensor], Buffer]


def allocate_staging(requests: Sequence[StagingRequest]) -> list[Buffer]:
    """The buffer of each request, as large as the largest of those that share it.

    To be kept: fresh buffers of tens of megabytes would cost page faults in every step.
    """
    keys = [(each.turn, each.like.dtype, each.like.device) for each in requests]
    largest: dict[Hashable, StagingRequest] = {}
    for key, request in zip(keys, requests, strict=True):
        if key not in largest or request.numel > largest[key].numel:
            largest[key] = request
    buffers = {key: each.allocate(each.numel, each.like) for key, each in largest.items()}
    return [buffers[key] for key in keys]


# -------------------------------------------------------------------------- parameters

# The memory from which the gradients of a bucket are sent, if local ranks can read it and it is of
# a dtype. They have left it when parameters are gathered.
SendBuffers = Callable[[int, torch.dtype], Buffer | None]


class AllGathers:
    """Sends what the owners have updated: for each bucket in ``order``, ``mark_updated`` before
    this rank's part of it changes, and then ``launch``."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.queue = BucketQueue(group, Phase.ALL_GATHER)
        # None if preparing them has failed for lack of memory or files, and while they change.
        self.buckets: list[Collective] | None = []
        self.order: Sequence[int] = ()  # in which the buckets are to be launched
        self._updated: set[int] = set()  # buckets: this rank's part is new, and not sent yet
        self._staging: Collection[Buffer] = ()

    def release_staging(self) -> None:
        """It is about to change: nothing can be gathered before ``prepare``."""
        self.queue.wait()
        self.buckets, self._staging, self._updated = None, (), set()

    def prepare(
        self,
        plan: Plan,
        params: Sequence[torch.Tensor],
        storage: FlatStorage | None,
        lazy: bool,
        send_buffers: SendBuffers | None = None,
    ) -> None:
        """Prepare the all-gathers. To be repeated when the plan or a storage changes.

        ``lazy``: leave the waiting to who uses the parameters. Then all buckets may be in flight
        together, so none shares its staging, unless there are very many; and they leave in the
        order in which the next forward wants them, the reverse of that in which backward completes
        them.
        """
        self.release_staging()
        numbers = range(len(plan.buckets))
        self.order = numbers[::-1] if lazy else numbers
        if self._group.world_size == 1:
            self.buckets = []
            return
        limit = self.queue.limit = in_flight_limit(len(numbers), lazy)
        # Not seen by autograd, which is told once for all.
        memory = [param.data for param in params]
        found: list[tuple[Comm, BucketParams, int, int, Buffer | None]] = []
        requests = []
        for number, bucket in enumerate(plan.buckets):
            where = bucket.stream, bucket.start, bucket.stop
            flat = None if storage is None else storage.range(*where)
            each = BucketParams(BucketLayout(plan, number), memory, flat)
            like, comm = each.like, self.queue.comm_for(each.like.device)
            packed = packed_elements(
                plan, number, comm.links, flat is not None, lambda index: is_dense(memory[index])
            )
            owners = self._group.rank, *comm.links.relayed
            shared = shared_elements(plan, number, owners, comm.links, like.element_size())
            # Also on a rank that shares nothing of this bucket. Why: the owner waits until others
            # have read the gradients in this memory, and they do so when they come to use it. Not
            # if lazy: what is in flight after a step would still be read in the next backward.
            reused = None
            if send_buffers is not None and comm.links.messages and not lazy:
                reused = send_buffers(number, like.dtype)
            turn, numel = number % max(SHARED_BUFFERS, limit), 0 if reused else shared
            requests += [
                StagingRequest(("packed", number % limit), packed, like, Buffer.allocate),
                StagingRequest(("shared", turn), numel, like, comm.allocate),
            ]
            found.append((comm, each, packed, shared, reused))
        self.queue.release_unused()
        buffers = allocate_staging(requests)
        self._staging = set(buffers)
        prepared = []
        for number, (comm, each, packed, shared, reused) in enumerate(found):
            own = buffers[2 * number : 2 * number + 2]
            staging = GatherBuffers(
                own[0] if packed else None, reused or (own[1] if shared else None)
            )
            prepared.append(comm.all_gather(each, staging))
        self.buckets = prepared

    def mark_updated(self, bucket: int) -> None:
        """This rank's part of a bucket is about to change. Waits for an all-gather of it."""
        if self._group.world_size > 1:
            assert self.buckets is not None  # whoever steps has seen to that
            self.queue.wait([bucket])
            self._updated.add(bucket)

    def launch(self, bucket: int) -> None:
        """Send this rank's part of a bucket, and receive the others', in the background."""
        if self._group.world_size > 1:
            assert self.buckets is not None
            if bucket not in self._updated:
                raise RuntimeError(f"bucket {bucket} was not marked as updated")
            self.queue.launch(bucket, self.buckets[bucket])
            self._updated.discard(bucket)

    @property
    def staged_bytes(self) -> int:
        """Memory of its own that buckets pass through; it is kept between the steps."""
        return sum(buffer.tensor.nbytes for buffer in self._staging)
