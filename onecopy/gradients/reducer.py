"""Gradients on their way to their owners while backward runs.

A bucket leaves when its last gradient has arrived and all buckets before it have left, whichever
thread of autograd brought the gradient. At the end of backward the ranks exchange which parameters
had a gradient, for which buckets one came too late, and whether a rank gave up.

Read in this order: GradientFill, GradBucket, UsedParameters, GradientReducer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from onecopy.comm.agreement import RanksDisagree, same_outcome
from onecopy.comm.group import GATHER_TAGS, RankGroup
from onecopy.comm.interface import (
    BucketLayout,
    Buffer,
    Comm,
    GradientSlot,
    ReduceBuffers,
)
from onecopy.comm.monitor import Handle, do_nothing
from onecopy.comm.stats import Phase
from onecopy.planning.layout import flat_range, in_layout_of, is_dense, one_of_each
from onecopy.planning.param_groups import grad_dtype, gradient_dtype
from onecopy.planning.plan import Plan, Segment, Shard
from onecopy.planning.sizes import IN_FLIGHT, reduce_scatter_elements, sum_dtype
from onecopy.planning.text import name_ranks, plural
from onecopy.sharding.engine import (
    BucketQueue,
    GradPhase,
    QueuedBucket,
    StagingRequest,
    allocate_staging,
)
from onecopy.torch_private import flatten_dense_tensors

_WORTH_ITS_OWN_CALL = 1 << 14  # elements: below, one call for many tensors is cheaper
_STRETCH = 1 << 15  # elements: so many of small tensors are copied at once, which takes memory


class GradientFill(NamedTuple):
    """Where the gradient of a parameter, or of a part of it, goes in a bucket."""

    param: int
    start: int  # elements of the parameter
    stop: int
    is_whole: bool  # all of it: the target has the form of the gradient
    target: torch.Tensor  # in the outgoing staging

    def fill(self, gradients: Mapping[int, torch.Tensor], share: float) -> None:
        grad = gradients.get(self.param)
        if grad is None:
            self.target.zero_()
        else:
            part = grad if self.is_whole else flat_range(grad, self.start, self.stop)
            _put(part, share, self.target)


class SmallGradients(NamedTuple):
    """Small tensors, each of them whole, side by side in a bucket: filled together.

    One target for all of them, and no views: there may be thousands.
    """

    params: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    target: torch.Tensor  # flat

    def fill(self, gradients: Mapping[int, torch.Tensor], share: float) -> None:
        if gradients.keys().isdisjoint(self.params):
            self.target.zero_()
            return
        found = [
            gradients[param] if param in gradients else self.target.new_zeros(shape)
            for param, shape in zip(self.params, self.shapes, strict=True)
        ]
        flat: torch.Tensor = flatten_dense_tensors(found)
        _put(flat.view_as(self.target), share, self.target)  # else it would change its length


def _put(source: torch.Tensor, share: float, target: torch.Tensor) -> None:
    """A gradient times its share."""
    if source.dtype.itemsize < target.dtype.itemsize:
        target.copy_(source).mul_(share)
    else:
        # Before it is rounded for the wire, where it could overflow; and the memory is touched
        # once.
        torch.mul(source, share, out=target)


class GradBucket(QueuedBucket):
    """A bucket of gradients, and the sum of what this rank owns in it."""

    fills: tuple[GradientFill | SmallGradients, ...] = ()
    send: Buffer  # staging of the whole bucket

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[torch.Tensor],
        rank: int,
        reduce_dtype: torch.dtype | None,
        master_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(layout.index, GradPhase.EMPTY)
        self.layout = layout
        indices = [segment.param for segment in layout.plan.segments(layout.index)]
        self.params = frozenset(indices)  # that have a part in it
        param = params[indices[0]]
        sent_in = reduce_dtype if param.is_floating_point() else None  # complex ones stay so
        # An empty tensor of the dtype and the device in which it travels.
        self.wire = torch.empty(0, dtype=sent_in or grad_dtype(param), device=param.device)
        start, stop = layout.range(rank)
        held_in = gradient_dtype(param, master_dtype)
        held = torch.zeros(stop - start, dtype=held_in, device=param.device)
        self.slot = GradientSlot(held)

    def view(self, shard: Shard, param: torch.Tensor, is_cut: bool) -> torch.Tensor:
        """The gradient of a shard of this rank, in the form of the inner optimizer's tensor."""
        held = self.slot.tensor
        if not shard.numel:
            return torch.zeros(param.shape, dtype=held.dtype, device=param.device)
        flat = held.narrow(0, self.layout.offset_of(shard), shard.numel)
        return flat if is_cut else _in_form_of(param, flat)

    def fill(self, gradients: Mapping[int, torch.Tensor], share: float) -> None:
        """Every gradient to its place, times ``share``; zeros where there is none."""
        for each in self.fills:
            each.fill(gradients, share)


def _fills(
    segments: Iterable[Segment], params: Sequence[torch.Tensor], staging: torch.Tensor
) -> Iterator[GradientFill | SmallGradients]:
    """Where the gradients of a bucket go in its staging, in their order."""
    together: list[Segment] = []

    def stretch() -> Iterator[SmallGradients]:
        if together:
            indices = tuple(segment.param for segment in together)
            shapes = tuple(params[index].shape for index in indices)
            start, stop = together[0].offset, _end(together[-1])
            together.clear()
            yield SmallGradients(indices, shapes, staging[start:stop])

    for segment in segments:
        param, numel = params[segment.param], segment.stop - segment.start
        is_whole = numel == param.numel()
        if is_whole and numel < _WORTH_ITS_OWN_CALL and _is_stored_as_it_is_read(param):
            if together and (
                _end(together[-1]) != segment.offset
                or _end(segment) - together[0].offset > _STRETCH
            ):
                yield from stretch()
            together.append(segment)
            continue
        yield from stretch()
        target = staging.narrow(0, segment.offset, numel)
        if is_whole:
            target = _in_form_of(param, target)
        yield GradientFill(segment.param, segment.start, segment.stop, is_whole, target)
    yield from stretch()


def _end(segment: Segment) -> int:
    """Where it ends in its bucket."""
    return segment.offset + segment.stop - segment.start


def _is_stored_as_it_is_read(param: torch.Tensor) -> bool:
    """Whether the gradient of a parameter is contiguous in its bucket."""
    return param.is_contiguous() or not is_dense(param)


def _in_form_of(param: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A run of as many elements, in the shape and the storage order of a parameter."""
    if not is_dense(param):
        return flat.view(param.shape)
    return flat.as_strided(param.shape, param.stride(), flat.storage_offset())


_grad, _layout, _stride = attrgetter("grad"), attrgetter("layout"), torch.Tensor.stride


class _Prepared(NamedTuple):
    """What follows from a plan: replaced as a whole, or not at all."""

    plan: Plan
    params: Sequence[torch.Tensor] = ()
    forms: Sequence[Any] = []  # all of the parameters that this depends on
    buckets: Sequence[GradBucket] = ()
    buckets_of: Mapping[int, tuple[int, ...]] = {}  # by planned parameter
    are_dense: Sequence[bool] = ()  # by parameter
    # For each shard of this rank in a bucket: its parameter, and where its gradient is.
    views: Sequence[Sequence[tuple[int, torch.Tensor]]] = ()
    staging: Collection[Buffer] = ()  # through which the gradients of all buckets pass


_ATTACHMENTS = 4000  # with tags of their own
# Backwards are counted modulo this, so that a byte will do: no rank is that far behind another.
_CYCLE = 101


class BackwardOutcome(NamedTuple):
    """How the last backward has ended on all ranks together."""

    present: set[int]  # parameters that had a gradient
    again: list[int]  # buckets that need a second round
    gave_up: list[int]  # ranks
    equally_often: bool  # all have had the same number of backwards


@dataclass(frozen=True, slots=True)
class UsedParameters:
    """A bitmap of the parameters that had a gradient on any rank, in flight."""

    # One for each parameter, for each bucket, for each rank, and two for the number of backwards.
    marks: torch.Tensor
    params: int  # how many there were: more may have come since
    buckets: int
    pending: Handle

    @classmethod
    def post(
        cls,
        rank_group: RankGroup,
        *,
        params: int,
        buckets: int,
        backwards: int,
        present: Collection[int],
        late: Collection[int],
        gives_up: bool,
    ) -> UsedParameters:
        """Say which of the parameters had a gradient on this rank, for which of the buckets one
        came too late, and whether it gives up."""
        said = bytearray(params + buckets + rank_group.world_size)
        for index in present:
            said[index] = 1
        for bucket in late:
            said[params + bucket] = 1
        if gives_up:
            said[params + buckets + rank_group.rank] = 1
        # The greatest of both over all ranks add up so only if the ranks have the same.
        number = backwards % _CYCLE
        said += bytes([number, _CYCLE - number])
        marks = torch.frombuffer(said, dtype=torch.uint8).to(rank_group.control_device)
        return cls(marks, params, buckets, rank_group.maximum(marks))

    def read(self) -> BackwardOutcome:
        self.pending.wait()
        *marks, most, least = self.marks.tolist()
        first_bucket, first_rank = self.params, self.params + self.buckets
        said = list(compress(count(), marks))
        return BackwardOutcome(
            present={mark for mark in said if mark < first_bucket},
            again=[mark - first_bucket for mark in said if first_bucket <= mark < first_rank],
            gave_up=[mark - first_rank for mark in said if mark >= first_rank],
            equally_often=most + least == _CYCLE,
        )


class GradientsDropped(RuntimeError):
    """A backward that raised on some rank was given up, on all ranks."""


@dataclass(slots=True)
class _Backward:
    """One backward: what has arrived, and how far the buckets have come."""

    missing: list[int]  # how many gradients each bucket waits for
    expected: dict[int, tuple[int, ...]]  # the buckets that wait for each that has not arrived
    keeps_back: bool = False  # no bucket leaves before backward has ended
    taken: set[int] = field(default_factory=set)  # whose gradients came from ``param.grad``
    held: dict[int, torch.Tensor] = field(default_factory=dict)
    origin: int = 0  # ``BucketQueue.launched`` before its first bucket: see ``_next``
    launcher: int | None = None  # the thread that launches the next bucket
    is_closed: bool = False  # no thread may launch a bucket any more: it is given up


class GradientReducer:
    """Sums the gradients of the planned parameters over the ranks, each rank its own slots."""

    def __init__(
        self,
        rank_group: RankGroup,
        reduce_dtype: torch.dtype | None,
        master_dtype: torch.dtype | None,
    ) -> None:
        """Gradients travel in ``reduce_dtype``, and are summed for a master of ``master_dtype``."""
        self._rank_group = rank_group
        self._dtypes = reduce_dtype, master_dtype
        # Apart from all-gathers and other attachments: ranks on which one backward reaches several
        # attached modules may launch their buckets in different orders.
        self._first_tag = GATHER_TAGS * (1 + rank_group.monitor.status.attachments % _ATTACHMENTS)
        # Gradients of backwards inside no_sync(), by parameter, in the dtype of the master copy.
        self._accumulated: dict[int, torch.Tensor] = {}
        self._prepared = _Prepared(Plan(rank_group.world_size, 1))  # of no parameter yet
        self._queue = BucketQueue(
            rank_group, Phase.REDUCE_SCATTER, GradPhase.REDUCING, GradPhase.HELD
        )
        self._backward: _Backward | None = None
        self._lock = threading.Lock()  # of the backward
        self._launched = threading.Condition(self._lock)  # a launch is over
        self._used: UsedParameters | None = None
        self._late: dict[int, torch.Tensor] = {}
        self._present: set[int] = set()
        self.when_dropped: Callable[[], None] = do_nothing  # because a backward was given up
        self.backwards = 0  # since the gradients were used up or dropped
        self.share = 1 / rank_group.world_size  # what a rank's gradient counts in the average

    # ------------------------------------------------------------------ preparing

    def prepare(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        """Follow a plan. What is held stays, if the plan only grew. If there is too little memory,
        all is as before."""
        before = self._prepared
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
        rank = self._rank_group.rank
        buckets = [
            *kept,
            *(
                GradBucket(BucketLayout(plan, number), params, rank, *self._dtypes)
                for number in range(len(kept), len(plan.buckets))
            ),
        ]
        comms = [self._queue.comm_for(bucket.wire.device) for bucket in buckets]
        self._queue.release_unused()
        # May fail: nothing has changed yet.
        staging = allocate_staging(self._requests(plan, buckets, comms))
        buckets_of: dict[int, tuple[int, ...]] = {}
        ops = [
            comm.reduce_scatter(
                bucket.layout,
                ReduceBuffers(*staging[3 * bucket.number : 3 * bucket.number + 3]),
                bucket.slot,
                self._first_tag + bucket.number,
            )
            for bucket, comm in zip(buckets, comms, strict=True)
        ]
        for bucket, op in zip(buckets, ops, strict=True):
            bucket.send, bucket.op = op.buffers[0], op
            bucket.fills = tuple(_fills(bucket.layout.segments(), params, bucket.send.tensor))
            alone = (bucket.number,)  # the same for nearly all
            for index in bucket.params:
                buckets_of[index] = (
                    (*buckets_of[index], bucket.number) if index in buckets_of else alone
                )
        views = [
            [
                (
                    shard.param,
                    bucket.view(shard, params[shard.param], shard.param in plan.cut_params),
                )
                for shard in plan.shards_in(bucket.number, rank)
            ]
            for bucket in buckets
        ]
        dense = list(map(is_dense, params))
        self._prepared = _Prepared(
            plan, params, forms, buckets, buckets_of, dense, views, set(staging)
        )

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
            turn, send_turn = number % IN_FLIGHT, number % (IN_FLIGHT + comm.spare_buffers)
            found += [
                StagingRequest(("send", send_turn), bucket.layout.numel, wire, comm.allocate),
                StagingRequest(("receive", turn), received, wire, Buffer.allocate),
                StagingRequest(("sums", turn), summed, sums, Buffer.allocate),
            ]
        return found

    def release_unused(self) -> None:
        """Let go of memory that belonged to the staging before."""
        self._queue.release_unused()

    def send_buffer(self, bucket: int, dtype: torch.dtype) -> Buffer | None:
        """The memory from which a bucket is sent, for its all-gather, if that is of this dtype."""
        found = self._prepared.buckets[bucket]
        return found.send if found.wire.dtype == dtype else None

    @property
    def slot_bytes(self) -> int:
        """Memory of this rank's gradients."""
        return sum(bucket.slot.tensor.nbytes for bucket in self._prepared.buckets)

    @property
    def staged_bytes(self) -> int:
        """Memory that buckets pass through; it is kept between the steps."""
        return sum(buffer.tensor.nbytes for buffer in self._prepared.staging)

    def laid_out(self, gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients by parameter, each in the order in which the parameter is stored."""
        found, forms = gradients.values(), self._prepared.forms
        if (  # nearly always, and there may be thousands
            all(map(is_, map(_layout, found), repeat(torch.strided)))
            and list(map(_stride, found)) == [forms[index][1] for index in gradients]
            and all(map(self._prepared.are_dense.__getitem__, gradients))
        ):
            return gradients
        return {index: self._laid_out(index, grad) for index, grad in gradients.items()}

    def _laid_out(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {index} has a sparse gradient, which cannot be reduced in attached "
                "mode: use sparse=False, or leave out attach(...)"
            )
        param, grad = self._prepared.params[index], grad.detach()
        return in_layout_of(param, grad) if self._prepared.are_dense[index] else grad.contiguous()

    def left_in_params(self) -> list[int]:
        """The planned parameters with a gradient in ``param.grad``: of this rank alone."""
        gradients = list(map(_grad, self._prepared.params))
        if all(map(is_, gradients, repeat(None))):  # nearly always, and there may be thousands
            return []
        return [index for index in self._prepared.buckets_of if gradients[index] is not None]

    # ------------------------------------------------------------------ backward

    @property
    def is_active(self) -> bool:
        """Whether a backward is under way."""
        return self._backward is not None

    @property
    def keeps_back(self) -> bool:
        """Whether in the backward that is under way no bucket leaves before its end."""
        return self._backward is not None and self._backward.keeps_back

    @property
    def accumulates(self) -> bool:
        """Whether there may be parameters for which ``accumulate`` does something."""
        return self._dtypes[1] is not None

    @torch.no_grad()
    def accumulate(self, index: int, param: torch.Tensor) -> None:
        """The gradient of a backward inside ``no_sync()`` is in ``param.grad``. If the parameter
        has a master copy, add it to what is accumulated in the dtype of that copy."""
        grad, dtype = param.grad, gradient_dtype(param, self._dtypes[1])
        if grad is None or grad.dtype.itemsize >= dtype.itemsize:
            return
        if grad.layout is not torch.strided:
            return  # the next averaged backward refuses it
        before = self._accumulated.get(index)
        if before is None:
            self._accumulated[index] = grad.to(dtype)
        else:
            self._accumulated[index] = before.to(grad.device).add_(grad)
        param.grad = None

    @property
    def accumulated_bytes(self) -> int:
        """Memory of what was accumulated inside ``no_sync()``, beside ``param.grad``."""
        return sum(grad.nbytes for grad in self._accumulated.values())

    def not_reduced(self) -> list[int]:
        """The planned parameters that have a gradient of this rank alone."""
        found = self.left_in_params()
        if not self._accumulated:  # nearly always
            return found
        accumulated = self._accumulated.keys() & self._prepared.buckets_of.keys()
        return sorted(accumulated.union(found))

    def catch_up(self, first: int) -> None:
        """Reduce the buckets from ``first`` on, which are new, from ``param.grad``."""
        self.begin()
        assert self._backward is not None
        self._backward.origin -= first
        self.backwards -= 1  # no backward of the user's
        self.end()

    def begin(self, keeps_back: bool = False) -> None:
        """A backward has begun, on all ranks; ``keeps_back``: no bucket leaves before its end."""
        self.judge()
        self.backwards += 1
        buckets, buckets_of = self._prepared.buckets, self._prepared.buckets_of
        missing, expected = [len(bucket.params) for bucket in buckets], dict(buckets_of)
        trainable = list(map(attrgetter("requires_grad"), self._prepared.params))
        if not all(trainable):
            for index in [index for index in buckets_of if not trainable[index]]:
                for number in buckets_of[index]:
                    missing[number] -= 1
                # No bucket waits for it; a DDP that was made when it was trained still delivers it.
                expected[index] = ()
        self._backward = _Backward(missing, expected, keeps_back, origin=self._queue.launched)

    def arrived(self, index: int, grad: torch.Tensor | None = None) -> None:
        """The gradient of a parameter is there: given, or in ``param.grad``.

        To be called for thousands of parameters in every backward.
        """
        backward = self._backward
        assert backward is not None
        # Nobody expects what comes a second time, nor what was unfrozen and is not planned yet,
        # which stays in ``param.grad``: see ``catch_up``.
        completes = False
        with self._lock:
            numbers = backward.expected.pop(index, None)
            if numbers is None:
                return
            if grad is not None:
                backward.held[index] = grad
            missing = backward.missing
            for number in numbers:
                left = missing[number] = missing[number] - 1
                if not left:
                    completes = True
        if completes and not backward.keeps_back:
            self._launch_next(backward, self._prepared.params[index].device)

    def _launch(self, bucket: GradBucket, gradients: Mapping[int, torch.Tensor]) -> None:
        """Send a bucket, with gradients by parameter and zeros for those that are missing."""
        self._queue.launch(bucket, functools.partial(bucket.fill, gradients, self.share))

    def _next(self, backward: _Backward) -> int:
        """The first bucket that has not left. Why counted by the queue, in the same step in which a
        bucket leaves: an interrupt before or after a launch must not change what is next."""
        return self._queue.launched - backward.origin

    def _launch_next(self, backward: _Backward, device: torch.device | None = None) -> None:
        """Launch the next buckets; ``device``: as long as they are complete and on this device.

        Returns if another thread launches a bucket: that one goes on with the next.
        """
        while True:
            try:
                number = self._claim(backward, device)
                if number is None:
                    return
                self._launch_arrived(backward, number)
            finally:
                self._release(backward)

    def _claim(self, backward: _Backward, device: torch.device | None) -> int | None:
        """The next bucket, for this thread to launch, if there is one and nobody else launches."""
        with self._lock:
            number = self._next(backward)
            if (
                backward.is_closed
                or backward.launcher is not None
                or number == len(backward.missing)
            ):
                return None
            if device is not None and (
                backward.missing[number] or self._prepared.buckets[number].wire.device != device
            ):
                return None
            backward.launcher = threading.get_ident()
            return number

    def _release(self, backward: _Backward) -> None:
        """This thread launches nothing now."""
        with self._launched:
            if backward.launcher == threading.get_ident():
                backward.launcher = None
                self._launched.notify_all()

    def _close(self, backward: _Backward) -> None:
        """Let no thread launch a bucket any more, and wait until no other one does."""
        me, monitor = threading.get_ident(), self._rank_group.monitor
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
    def end(self, present: set[int] | None = None) -> None:
        """Backward has ended, on all ranks. ``present``: the parameters that had a gradient, if
        the feed knows better than we do."""
        if self._backward is None:
            self.begin()
        backward = self._backward
        assert backward is not None
        self._launch_next(backward)
        if self._next(backward) != len(backward.missing):  # autograd has ended its other threads
            raise RuntimeError(
                f"at the end of backward, bucket {self._next(backward)} has not left"
            )
        buckets_of = self._prepared.buckets_of
        if present is None:
            self._late = self._late_gradients()
            present = buckets_of.keys() - backward.expected.keys() | self._late.keys()
        present = present | backward.taken
        self._backward = None
        self._post(present, {number for index in self._late for number in buckets_of[index]})

    def _post(
        self, present: Collection[int], late: Collection[int], gives_up: bool = False
    ) -> None:
        """Tell the other ranks how backward has ended on this one."""
        self._used = UsedParameters.post(
            self._rank_group,
            params=len(self._prepared.params),
            buckets=len(self._prepared.buckets),
            backwards=self.backwards,
            present=present,
            late=late,
            gives_up=gives_up,
        )

    @torch.no_grad()
    def give_up(self) -> None:
        """Finish a backward that has raised, with zeros: the other ranks wait for the buckets."""
        backward = self._backward
        assert backward is not None
        self._close(backward)
        backward.held.clear()
        for bucket in self._prepared.buckets[self._next(backward) :]:
            self._launch(bucket, {})
        self._backward, self._late = None, {}
        self._post((), (), gives_up=True)
        for index in self.left_in_params():
            self._prepared.params[index].grad = None
        self._accumulated.clear()

    def _late_gradients(self) -> dict[int, torch.Tensor]:
        """Gradients that came when their bucket had left."""
        return self._take(self.not_reduced())

    def _take(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        """What is in ``param.grad`` of these parameters or was accumulated, and no longer there."""
        params = self._prepared.params
        if self._accumulated:
            indices = list(indices)
        found = {i: grad for i in indices if (grad := params[i].grad) is not None}
        found = self.laid_out(found)
        for index in found:
            params[index].grad = None
        if self._accumulated:
            found.update(self._with_accumulated(indices, found))
        return found

    def _with_accumulated(
        self, indices: Iterable[int], gradients: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """What was accumulated for these parameters, and the gradients of this backward."""
        found = {}
        for index in [index for index in indices if index in self._accumulated]:
            total, grad = self._accumulated.pop(index), gradients.get(index)
            if grad is not None:
                total = total.to(grad.device).add_(grad)
            found[index] = total
        return self.laid_out(found)

    @torch.no_grad()
    def _launch_arrived(self, backward: _Backward, number: int) -> None:
        """Let a bucket leave. Other threads may add to the backward meanwhile, but not what this
        bucket needs: each operation on a dict or a set is one step of the interpreter."""
        held, buckets_of = backward.held, self._prepared.buckets_of
        bucket = self._prepared.buckets[number]
        taken = self._take(index for index in bucket.params if index not in held)
        if self._accumulated:
            taken.update(self._with_accumulated(bucket.params, held))
        held.update(taken)
        backward.taken.update(taken)
        for index in taken:
            backward.expected.pop(index, None)
        self._launch(bucket, held)
        for index in bucket.params:
            if buckets_of[index][-1] <= bucket.number:
                held.pop(index, None)  # the last bucket that needs it has it

    # ------------------------------------------------------------------ afterwards

    @torch.no_grad()
    def wait(self) -> None:
        """Wait until everything that has left is here."""
        self._queue.wait()
        self.judge()

    @torch.no_grad()
    def judge(self) -> None:
        """Read how the last backward has ended on all ranks, and do what follows. That may be a
        second round: to be called on all ranks."""
        if self._used is None:
            return
        outcome = self._used.read()
        if outcome.gave_up:
            self.drop()
            raise GradientsDropped(
                f"the last backward has not come to its end, because it raised on "
                f"{name_ranks(outcome.gave_up)}, and its gradients were dropped on all ranks: call "
                "zero_grad() and go on with the next batch"
            )
        self._used = None
        if not outcome.equally_often:
            held = f"with {plural(self.backwards, 'backward')} since the last step or zero_grad()"
            try:
                same_outcome(self._rank_group, "reducing gradients", lambda: [held])
            except RanksDisagree:
                self.drop()  # on all ranks: nobody may step with a part of them
                raise
        self._present |= outcome.present
        again = outcome.again
        late, self._late = self._late, {}
        for number in again:
            self._launch(self._prepared.buckets[number], late)
        if again:
            self._queue.wait()

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients of this rank's shards, in the order of the plan, after ``wait``."""
        return [
            grad for bucket in self._prepared.buckets for grad in self.gradients_in(bucket.number)
        ]

    @torch.no_grad()
    def gradients_in(self, bucket: int) -> list[torch.Tensor | None]:
        """The same for one bucket, after ``judge``: the others may still be on their way."""
        self._queue.wait([bucket])
        present = self._present
        return [view if index in present else None for index, view in self._prepared.views[bucket]]

    @property
    def present(self) -> Collection[int]:
        """The parameters that have a gradient, after ``wait``. The same on all ranks."""
        return self._present

    @property
    def holds_anything(self) -> bool:
        """Whether there are gradients that no step has used. The same on all ranks."""
        held = any(bucket.slot.holds for bucket in self._prepared.buckets)
        pending = self._backward or self._queue.in_flight or self._used or self._present
        return held or bool(pending)

    @torch.no_grad()
    def drop(self) -> None:
        """Forget all gradients, also those of a backward that was never finished."""
        self._drop_averaged()
        self._accumulated.clear()

    def _drop_averaged(self) -> None:
        gave_up: list[int] = []
        if self._rank_group.monitor.refusal is None:
            if self._backward is not None:
                self.give_up()
            self._queue.discard()
            if self._used is not None:
                gave_up = self._used.read().gave_up
        self._queue.discard()  # without a group, too
        self._backward, self._used, self._late = None, None, {}
        self.clear()
        if gave_up:
            self.when_dropped()

    @torch.no_grad()
    def clear(self) -> None:
        """The gradients are used up."""
        assert self._used is None
        # A step waits for what it uses only: buckets in which this rank owns nothing are left.
        self._queue.wait()
        self._present = set()
        self.backwards = 0
        for bucket in self._prepared.buckets:
            bucket.slot.holds = False
            bucket.move_to(GradPhase.EMPTY)
