"""Gradients on their way to their owners while backward runs.

To be read in the order of a backward: ``GradientReducer.begin``, ``arrived`` for every gradient,
``_launch_next``, which sends the buckets in the order of the plan, ``GradBucket.fill``, ``end``,
``judge`` and ``gradients_in``. At the end the ranks exchange which parameters had a gradient, for
which buckets one came too late, and whether a rank gave up (``UsedParameters``).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from onecopy.comm.agreement import RanksDisagree, same_outcome
from onecopy.comm.group import GATHER_TAGS, RankGroup
from onecopy.comm.interface import (
    BucketLayout,
    Buffer,
    Collective,
    Comm,
    GradientSlot,
    ReduceBuffers,
)
from onecopy.comm.monitor import Handle, do_nothing
from onecopy.comm.stats import Phase
from onecopy.planning.layout import flat_range, in_layout_of, is_dense, one_of_each
from onecopy.planning.param_groups import grad_dtype, gradient_dtype
from onecopy.planning.plan import Plan, Segment, Shard
from onecopy.planning.sizes import IN_FLIGHT, SHARED_BUFFERS, reduce_scatter_elements, sum_dtype
from onecopy.planning.text import name_ranks, plural
from onecopy.sharding.engine import BucketQueue, StagingRequest, allocate_staging
from onecopy.torch_private import flatten_dense_tensors

_ATTACHMENTS = 4000  # with tags of their own
# Backwards are counted modulo this, so that a byte will do: no rank is that far behind another.
_CYCLE = 101


class GradientsDropped(RuntimeError):
    """A backward that raised on some rank was given up, on all ranks."""


@dataclass(slots=True)
class _Backward:
    """One backward: what has arrived, and how far the buckets have come."""

    missing: list[set[int]]  # the parameters for whose gradients each bucket waits
    keeps_back: bool  # no bucket leaves before backward has ended
    origin: int  # ``BucketQueue.launched`` before its first bucket: see ``_next``
    held: dict[int, torch.Tensor] = field(default_factory=dict)  # gradients for the next buckets
    taken: set[int] = field(default_factory=set)  # whose gradients came from this rank's memory
    launcher: int | None = None  # the thread that launches the next bucket
    is_closed: bool = False  # no thread may launch a bucket any more: it is given up


class Prepared(NamedTuple):
    """What follows from a plan: replaced as a whole, or not at all."""

    plan: Plan
    params: Sequence[torch.Tensor] = ()
    forms: Sequence[Any] = []  # all of the parameters that this depends on
    buckets: Sequence[GradBucket] = ()
    buckets_of: Mapping[int, tuple[int, ...]] = {}  # by planned parameter
    staging: Collection[Buffer] = ()  # through which the gradients of all buckets pass


class GradientReducer:
    """Sums the gradients of the planned parameters over the ranks, each rank its own slots."""

    def __init__(
        self,
        rank_group: RankGroup,
        reduce_dtype: torch.dtype | None,
        master_dtype: torch.dtype | None,
        name_of: Callable[[int], str] = "parameter {}".format,
    ) -> None:
        """Gradients travel in ``reduce_dtype``, and are summed for a master of ``master_dtype``.
        ``name_of``: a parameter in an error."""
        self.rank_group, self._name_of = rank_group, name_of
        self._reduce_dtype, self.master_dtype = reduce_dtype, master_dtype
        self.accumulates = master_dtype is not None  # whether ``accumulate`` may do something
        # Apart from all-gathers and other attachments: ranks on which one backward reaches several
        # attached modules may launch their buckets in different orders.
        self._first_tag = GATHER_TAGS * (1 + rank_group.monitor.status.attachments % _ATTACHMENTS)
        # Gradients of backwards inside no_sync(), by parameter, in the dtype of the master copy.
        self._accumulated: dict[int, torch.Tensor] = {}
        self.prepared = Prepared(Plan(rank_group.world_size, 1))  # of no parameter yet
        self.queue = BucketQueue(rank_group, Phase.REDUCE_SCATTER)
        self._backward: _Backward | None = None
        self._lock = threading.Lock()  # of the backward
        self._launched = threading.Condition(self._lock)  # a launch is over
        self._used: UsedParameters | None = None  # from the end of a backward until ``judge``
        self._late: dict[int, torch.Tensor] = {}  # gradients that came when their bucket had left
        # The parameters that have a gradient, after ``judge``. The same on all ranks.
        self.present: set[int] = set()
        self._new: int | None = None  # the first bucket that the last backward may have missed
        self.when_dropped: Callable[[], None] = do_nothing  # because a backward was given up
        self.backwards = 0  # since the gradients were used up or dropped
        self.share = 1 / rank_group.world_size  # what a rank's gradient counts in the average

    # ------------------------------------------------------------------ backward

    @property
    def is_active(self) -> bool:
        """Whether a backward is under way."""
        return self._backward is not None

    def begin(self, keeps_back: bool = False) -> _Backward:
        """A backward has begun, on all ranks; ``keeps_back``: no bucket leaves before its end."""
        self.judge()
        self.backwards += 1
        # Frozen ones no bucket waits for; a DDP that was made when they were trained still delivers
        # them.
        frozen = {i for i, p in enumerate(self.prepared.params) if not p.requires_grad}
        missing = [{*bucket.params} - frozen for bucket in self.prepared.buckets]
        self._backward = _Backward(missing, keeps_back, self.queue.launched)
        return self._backward

    def arrived(self, index: int, grad: torch.Tensor | None = None) -> None:
        """The gradient of a parameter is there: given, or in ``param.grad``.

        To be called for thousands of parameters in every backward, by the threads of autograd.
        """
        backward = self._backward
        assert backward is not None
        # What was unfrozen and is not planned yet stays in ``param.grad``: see ``catch_up``.
        numbers = self.prepared.buckets_of.get(index, ())
        with self._lock:
            if numbers and grad is not None:
                backward.held.setdefault(index, grad)  # not what comes a second time
            completes = False
            for number in numbers:
                missing = backward.missing[number]
                missing.discard(index)
                completes = completes or not missing
        if completes and not backward.keeps_back:
            self._launch_next(backward, self.prepared.params[index].device)

    @torch.no_grad()
    def _launch_next(self, backward: _Backward, device: torch.device | None = None) -> None:
        """Launch the next buckets; ``device``: as long as they are complete and on this device.

        Returns if another thread launches a bucket: that one goes on with the next.
        """
        held, buckets_of = backward.held, self.prepared.buckets_of
        while True:
            try:
                number = self._claim(backward, device)
                if number is None:
                    return
                bucket = self.prepared.buckets[number]
                # Other threads may add to the backward meanwhile, but not what this bucket needs:
                # each operation on a dict or a set is one step of the interpreter.
                local = [i for i in bucket.params if i not in held or i in self._accumulated]
                gradients = self._take(bucket.params, held)
                backward.taken.update(index for index in local if index in gradients)
                held.update(gradients)  # if the launch is interrupted, the next one finds them
                self._launch(bucket, gradients)
                for index in bucket.params:
                    if buckets_of[index][-1] <= number:
                        held.pop(index, None)  # the last bucket that needs it has it
            finally:
                with self._launched:
                    if backward.launcher == threading.get_ident():
                        backward.launcher = None
                        self._launched.notify_all()

    def _claim(self, backward: _Backward, device: torch.device | None) -> int | None:
        """The next bucket, for this thread to launch, if there is one and nobody else launches."""
        with self._lock:
            number, is_claimed = self._next(backward), backward.launcher is not None
            if backward.is_closed or is_claimed or number == len(backward.missing):
                return None
            wire = self.prepared.buckets[number].wire
            if device is not None and (backward.missing[number] or wire.device != device):
                return None
            backward.launcher = threading.get_ident()
            return number

    def _next(self, backward: _Backward) -> int:
        """The first bucket that has not left. Why counted by the queue, in the same step in which a
        bucket leaves: an interrupt before or after a launch must not change what is next."""
        return self.queue.launched - backward.origin

    def _launch(self, bucket: GradBucket, gradients: Mapping[int, torch.Tensor]) -> None:
        """Send a bucket, with gradients by parameter and zeros for those that are missing."""
        fill = functools.partial(bucket.fill, gradients, self.share)
        self.queue.launch(bucket.number, bucket.op, fill)

    def _take(
        self, indices: Iterable[int], given: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The gradients of these parameters, with what was accumulated for them. What is not
        ``given`` is taken from ``param.grad``."""
        params = self.prepared.params
        found, taken = {}, []
        for index in indices:
            grad = given.get(index)
            if grad is None:
                grad = params[index].grad
                taken.append(index)
            total = self._accumulated.pop(index, None) if self._accumulated else None
            if total is not None:
                grad = total if grad is None else total.to(grad.device).add_(grad)
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{self._name_of(index)} has a sparse gradient, which cannot be reduced in "
                    "attached mode: use sparse=False, or leave out attach(...)"
                )
            found[index] = grad
        for index in taken:
            params[index].grad = None
        return found

    @torch.no_grad()
    def end(self, present: Collection[int] | None = None) -> None:
        """Backward has ended, on all ranks. ``present``: the parameters that had a gradient, if
        whoever delivers them knows better than we do."""
        backward = self._backward or self.begin()
        self._launch_next(backward)
        if self._next(backward) != len(backward.missing):  # autograd has ended its other threads
            raise RuntimeError(
                f"at the end of backward, bucket {self._next(backward)} has not left"
            )
        if present is None:
            present = self._late = self._take(self.not_reduced(), {})
        self._backward = None
        buckets_of = self.prepared.buckets_of
        late = {number for index in self._late for number in buckets_of[index]}
        self._post(backward.taken.union(present), late)

    def _post(self, present: Iterable[int], late: Iterable[int], gives_up: bool = False) -> None:
        """Tell the other ranks how backward has ended on this one."""
        group, prepared = self.rank_group, self.prepared
        sizes = len(prepared.params), len(prepared.buckets), group.world_size, 2
        had_gradient, came_late, gave_up, backwards = map(bytearray, sizes)
        for index in present:
            had_gradient[index] = 1
        for number in late:
            came_late[number] = 1
        gave_up[group.rank] = gives_up
        # The greatest of both over all ranks add up so only if the ranks have the same.
        backwards[0] = self.backwards % _CYCLE
        backwards[1] = _CYCLE - backwards[0]
        said = had_gradient + came_late + gave_up + backwards
        marks = torch.frombuffer(said, dtype=torch.uint8).to(group.control_device)
        self._used = UsedParameters(marks, sizes, group.maximum(marks))

    # ------------------------------------------------------------------ afterwards

    @torch.no_grad()
    def judge(self) -> None:
        """Read how the last backward has ended on all ranks, and do what follows. That may be a
        second round: to be called on all ranks."""
        if self._used is None:
            return
        present, again, gave_up, equally_often = self._used.read()
        if gave_up:
            self.drop()
            raise GradientsDropped(
                f"the last backward has not come to its end, because it raised on "
                f"{name_ranks(gave_up)}, and its gradients were dropped on all ranks: call "
                "zero_grad() and go on with the next batch"
            )
        self._used = None
        if not equally_often:
            held = f"with {plural(self.backwards, 'backward')} since the last step or zero_grad()"
            try:
                same_outcome(self.rank_group, "reducing gradients", lambda: [held])
            except RanksDisagree:
                self.drop()  # on all ranks: nobody may step with a part of them
                raise
        self.present.update(present)
        late, self._late = self._late, {}
        for number in again:
            self._launch(self.prepared.buckets[number], late)
        self.queue.wait(again)

    @torch.no_grad()
    def gradients_in(self, bucket: int) -> list[torch.Tensor | None]:
        """The gradients of this rank's shards in a bucket, in the order of the plan, after
        ``judge``. The other buckets may still be on their way."""
        self.queue.wait([bucket])
        views = self.prepared.buckets[bucket].views
        return [view if shard.param in self.present else None for shard, view in views]

    def gradients(self) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Those of all shards that have elements, in the order of the plan, after ``judge``."""
        self.queue.wait()
        views = itertools.chain.from_iterable(bucket.views for bucket in self.prepared.buckets)
        return ((s, view) for s, view in views if s.param in self.present and s.numel)

    @torch.no_grad()
    def clear(self) -> None:
        """The gradients are used up."""
        assert self._used is None
        # A step waits for what it uses only: buckets in which this rank owns nothing are left.
        self.queue.wait()
        self.present = set()
        self.backwards = 0
        for bucket in self.prepared.buckets:
            bucket.slot.holds = False

    @property
    def holds_anything(self) -> bool:
        """Whether there are gradients that no step has used. The same on all ranks."""
        held = any(bucket.slot.holds for bucket in self.prepared.buckets)
        return bool(held or self._backward or self.queue.in_flight or self._used or self.present)

    # ------------------------------------------------------------------ not averaged

    @torch.no_grad()
    def accumulate(self, index: int, param: torch.Tensor) -> None:
        """The gradient of a backward inside ``no_sync()`` is in ``param.grad``. If the parameter
        has a master copy, add it to what is accumulated in the dtype of that copy."""
        grad, dtype = param.grad, gradient_dtype(param, self.master_dtype)
        if grad is None or grad.layout is not torch.strided:
            return  # the next averaged backward refuses what is sparse
        if grad.dtype.itemsize < dtype.itemsize:
            total = self._accumulated.get(index)
            total = grad.to(dtype) if total is None else total.to(grad.device).add_(grad)
            self._accumulated[index], param.grad = total, None

    def left_in_params(self) -> list[int]:
        """The planned parameters with a gradient in ``param.grad``: of this rank alone."""
        gradients = list(map(attrgetter("grad"), self.prepared.params))
        if all(map(is_, gradients, repeat(None))):  # nearly always, and there may be thousands
            return []
        return [index for index in self.prepared.buckets_of if gradients[index] is not None]

    def not_reduced(self) -> list[int]:
        """The planned parameters that have a gradient of this rank alone."""
        accumulated = self._accumulated.keys() & self.prepared.buckets_of.keys()
        return sorted(accumulated.union(self.left_in_params()))

    def catch_up(self) -> None:
        """Reduce the buckets that were added to the plan, on all ranks, from ``param.grad``."""
        first, self._new = self._new, None
        if first is not None:
            self.begin().origin -= first
            self.backwards -= 1  # no backward of the user's
            self.end()

    # ------------------------------------------------------------------ giving up

    @torch.no_grad()
    def give_up(self) -> None:
        """Finish a backward that has raised, with zeros: the other ranks wait for the buckets."""
        backward = self._backward or self.begin()
        self._close(backward)
        backward.held.clear()
        for bucket in self.prepared.buckets[self._next(backward) :]:
            self._launch(bucket, {})
        self._backward, self._late = None, {}
        self._post((), (), gives_up=True)
        for index in self.left_in_params():
            self.prepared.params[index].grad = None
        self._accumulated.clear()

    def _close(self, backward: _Backward) -> None:
        """Let no thread launch a bucket any more, and wait until no other one does."""
        me, monitor = threading.get_ident(), self.rank_group.monitor
        patience = monitor.patience()
        with self._launched:
            backward.is_closed = True
            # Its own claim is of a launch that was interrupted.
            is_over = self._launched.wait_for(lambda: backward.launcher in (None, me), patience)
        if not is_over:
            with monitor.or_give_up("waiting for a thread that sends gradients"):
                raise RuntimeError(
                    "the last backward raised, and one of its threads has not finished sending a "
                    f"bucket of gradients after {patience:g} s, the timeout of the process group. "
                    "The other ranks wait for this one: start the job again from a checkpoint"
                )

    @torch.no_grad()
    def drop(self) -> None:
        """Forget all gradients, also those of a backward that was never finished."""
        self._drop_averaged()
        self._accumulated.clear()

    def _drop_averaged(self) -> None:
        is_working = self.rank_group.monitor.refusal is None
        if is_working and self._backward is not None:
            self.give_up()
        self.queue.discard()
        gave_up: list[int] = []
        if is_working and self._used is not None:
            _, _, gave_up, _ = self._used.read()
        self._backward, self._used, self._late = None, None, {}
        self.clear()
        if gave_up:
            self.when_dropped()

    # ------------------------------------------------------------------ preparing

    def prepare(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        """Follow a plan. What is held stays, if the plan only grew. If there is too little memory,
        all is as before."""
        before = self.prepared
        forms = one_of_each((p.shape, p.stride(), p.dtype, p.device) for p in params)
        if plan is before.plan and forms == before.forms:  # no more than addresses have changed
            return
        are_others = forms[: len(before.forms)] != before.forms
        if are_others and self.holds_anything:
            raise RuntimeError(
                "the parameters have been converted since the last backward: call zero_grad() and "
                "compute the gradients again"
            )
        kept = before.buckets
        if are_others or plan.buckets[: len(kept)] != before.plan.buckets:
            self._drop_averaged()  # what is accumulated depends on no plan
            kept = ()
        new = range(len(kept), len(plan.buckets))
        rank, dtypes = self.rank_group.rank, (self._reduce_dtype, self.master_dtype)
        buckets = [
            *kept,
            *(GradBucket(BucketLayout(plan, i), params, rank, *dtypes) for i in new),
        ]
        comms = [self.queue.comm_for(bucket.wire.device) for bucket in buckets]
        self.queue.release_unused()
        # May fail: nothing has changed yet.
        staging = allocate_staging(self._requests(plan, buckets, comms))
        ops = [
            comm.reduce_scatter(
                bucket.layout,
                ReduceBuffers(*staging[3 * bucket.number : 3 * bucket.number + 3]),
                bucket.slot,
                self._first_tag + bucket.number,
            )
            for bucket, comm in zip(buckets, comms, strict=True)
        ]
        buckets_of: dict[int, tuple[int, ...]] = {}
        for bucket, op in zip(buckets, ops, strict=True):
            bucket.send, bucket.op = op.buffers[0], op
            bucket.fills = _fills(bucket.layout.segments(), params, bucket.send.tensor)
            alone = (bucket.number,)  # one object for all
            for index in bucket.params:
                buckets_of[index] = buckets_of.get(index, ()) + alone
        if before.buckets and not kept:
            self._new = None  # gradients were dropped
        elif before.params and new and self._new is None:
            self._new = len(kept)
        self.prepared = Prepared(plan, params, forms, buckets, buckets_of, set(staging))

    def _requests(
        self, plan: Plan, buckets: Sequence[GradBucket], comms: Sequence[Comm]
    ) -> list[StagingRequest]:
        """The staging of each bucket, in the order of ``ReduceBuffers``."""
        found = []
        for bucket, comm in zip(buckets, comms, strict=True):
            number, wire, held = bucket.number, bucket.wire, bucket.slot.tensor.dtype
            sums = wire.to(sum_dtype(wire.dtype, held))
            sizes = wire.itemsize, held.itemsize, sums.dtype != wire.dtype
            own = bucket.slot.tensor.numel()
            received, summed = reduce_scatter_elements(plan, number, own, comm.links, *sizes)
            depth = SHARED_BUFFERS if comm.links.local_ranks > 1 else IN_FLIGHT
            turn, send_turn = number % IN_FLIGHT, number % depth
            found += [
                StagingRequest(("send", send_turn), bucket.layout.numel, wire, comm.allocate),
                StagingRequest(("receive", turn), received, wire, Buffer.allocate),
                StagingRequest(("sums", turn), summed, sums, Buffer.allocate),
            ]
        return found

    def send_buffer(self, bucket: int, dtype: torch.dtype) -> Buffer | None:
        """The memory from which a bucket is sent, for its all-gather, if that is of this dtype."""
        found = self.prepared.buckets[bucket]
        return found.send if found.wire.dtype == dtype else None

    @property
    def held_bytes(self) -> int:
        """Memory of this rank's gradients, besides ``param.grad``."""
        slots = sum(bucket.slot.tensor.nbytes for bucket in self.prepared.buckets)
        return slots + sum(grad.nbytes for grad in self._accumulated.values())

    @property
    def staged_bytes(self) -> int:
        """Memory that buckets pass through; it is kept between the steps."""
        return sum(buffer.tensor.nbytes for buffer in self.prepared.staging)


# -------------------------------------------------------------------------- a bucket


class GradBucket:
    """A bucket of gradients, and the sum of what this rank owns in it."""

    fills: Sequence[GradientFill] = ()
    send: Buffer  # staging of the whole bucket
    op: Collective

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[torch.Tensor],
        rank: int,
        reduce_dtype: torch.dtype | None,
        master_dtype: torch.dtype | None,
    ) -> None:
        self.layout, self.number = layout, layout.index
        indices = [segment.param for segment in layout.plan.segments(layout.index)]
        self.params = frozenset(indices)  # that have a part in it
        param = params[indices[0]]
        first, stop = layout.range(rank)
        held_in = gradient_dtype(param, master_dtype)
        held = torch.zeros(stop - first, dtype=held_in, device=param.device)
        self.slot = GradientSlot(held)
        sent_in = reduce_dtype if param.is_floating_point() else None  # complex ones stay so
        # An empty tensor of the dtype and the device in which it travels.
        self.wire = held.new_empty(0, dtype=sent_in or grad_dtype(param))
        # The shards of this rank, and their gradients in the form of the inner optimizer's tensors.
        self.views: list[tuple[Shard, torch.Tensor]] = []
        for shard in layout.plan.shards_in(layout.index, rank):
            param = params[shard.param]
            view = held.narrow(0, shard.offset - first if shard.numel else 0, shard.numel)
            if shard.param not in layout.plan.cut_params:
                view = in_form_of(param, view)
            self.views.append((shard, view))

    def fill(self, gradients: Mapping[int, torch.Tensor], share: float) -> None:
        """Every gradient to its place, times ``share``; zeros where there is none."""
        for each in self.fills:
            each.fill(gradients, share)


class GradientFill(NamedTuple):
    """Where a gradient, or a part of it, goes in a bucket; or small gradients, each of them whole,
    that lie side by side. They have one target and no views: there may be thousands."""

    params: Sequence[int]
    likes: Sequence[torch.Tensor]  # the parameters themselves
    part: tuple[int, int] | None  # elements, if it is not all of the gradient
    target: torch.Tensor  # in the outgoing staging; of one gradient, in its form

    def fill(self, gradients: Mapping[int, torch.Tensor], share: float) -> None:
        """The gradients times ``share``; zeros for those that are missing."""
        target = self.target
        if gradients.keys().isdisjoint(self.params):
            target.zero_()
            return
        if len(self.params) == 1:
            (source,) = (gradients[index] for index in self.params)
            if self.part is not None:
                source = flat_range(in_layout_of(self.likes[0], source), *self.part)
        else:
            found = [
                gradients[index] if index in gradients else target.new_zeros(like.shape)
                for index, like in zip(self.params, self.likes, strict=True)
            ]
            source = flatten_dense_tensors(found).view_as(target)  # else it would be resized
        if source.dtype.itemsize < target.dtype.itemsize:
            target.copy_(source).mul_(share)
        else:
            # Before it is rounded for the wire, where it could overflow; and the memory is touched
            # once.
            torch.mul(source, share, out=target)


_WORTH_ITS_OWN_CALL = 1 << 14  # elements: below, one call for many tensors is cheaper
_STRETCH = 1 << 15  # elements: so many of small tensors are copied at once, which takes memory


def _fills(
    segments: Iterable[Segment], params: Sequence[torch.Tensor], staging: torch.Tensor
) -> list[GradientFill]:
    """Where the gradients of a bucket go in its staging, in their order."""
    runs: list[list[Segment]] = []
    end: int | None = None  # of the last run, if it is of small gradients
    for segment in segments:
        param, numel = params[segment.param], segment.stop - segment.start
        is_small = numel == param.numel() and numel < _WORTH_ITS_OWN_CALL
        # Also stored as it is read: its gradient is contiguous in the bucket.
        is_small = is_small and (param.is_contiguous() or not is_dense(param))
        stop = segment.offset + numel
        if is_small and segment.offset == end and stop - runs[-1][0].offset <= _STRETCH:
            runs[-1].append(segment)
        else:
            runs.append([segment])
        end = stop if is_small else None
    fills = []
    for run in runs:
        first, last, part = run[0], run[-1], None
        indices = [segment.param for segment in run]
        likes = [params[index] for index in indices]
        target = staging[first.offset : last.offset + last.stop - last.start]
        if target.numel() < likes[0].numel():
            part = first.start, first.stop
        elif len(run) == 1:
            target = in_form_of(likes[0], target)
        fills.append(GradientFill(indices, likes, part, target))
    return fills


def in_form_of(param: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A run of as many elements, in the shape and the storage order of a parameter."""
    if not is_dense(param):
        return flat.view(param.shape)
    return flat.as_strided(param.shape, param.stride(), flat.storage_offset())


# -------------------------------------------------------------------------- the end of a backward


class UsedParameters(NamedTuple):
    """A bitmap of the parameters that had a gradient on any rank, in flight."""

    # One byte for each parameter, for each bucket and for each rank, and two for the number of
    # backwards: the greatest over the ranks, when nothing is pending.
    marks: torch.Tensor
    sizes: Sequence[int]  # how many there were of each: there may be more since
    pending: Handle

    def read(self) -> tuple[list[int], list[int], list[int], bool]:
        """The parameters that had a gradient, the buckets that need a second round, the ranks that
        gave up, and whether all ranks have had the same number of backwards."""
        self.pending.wait()
        *marks, backwards = self.marks.cpu().split_with_sizes(self.sizes)
        present, again, gave_up = (each.nonzero().flatten().tolist() for each in marks)
        return present, again, gave_up, int(backwards.sum()) == _CYCLE
