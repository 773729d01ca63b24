"""Bits that change while nobody should touch them, noticed between one step and the next.

There is one copy of the state, so there is nothing to compare it with but itself: a checksum is
taken when it has been updated, and again right before the next update. Parameters have a copy on
every rank; but a step heals the copies of other ranks and spreads the owner's mistake, so they too
must be read before every step. Their checksums run into a history, one number for each parameter,
which the ranks compare every so many steps: it differs if the parameter did before any step since.

    step 7, a bucket is updated      state: checksum --.
                                                       equal?
    step 8, before it is updated     state: checksum --'
                                     parameters: history = history * odd + checksum

It happens bucket by bucket, because the update is about to read the same memory, or has just
written it: then it comes from the cache. Nothing here waits for an accelerator, and only what the
caller passes in communicates.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from onecopy.comm.agreement import same_outcome
from onecopy.comm.group import RankGroup
from onecopy.planning.layout import is_dense, part_of
from onecopy.planning.param_groups import MASTER
from onecopy.planning.plan import Plan
from onecopy.sharding.inner import InnerOptimizers, OwnedShard
from onecopy.sharding.sharded_params import (
    INTEGERS,
    ODD,
    WORD_BYTES,
    ShardedParams,
    checksum,
    words_of,
)

# Compares the ranks: history of each parameter, when it was read, what changed of its state.
Compare = Callable[[torch.Tensor, str, Sequence[str]], None]


@dataclass(eq=False)
class CorruptionCheck:
    """Reads what an optimizer holds, bucket by bucket, before it is updated and afterwards.

    A reading that is followed by the update counts: it goes into the history. If a step is refused
    and tried again, there is another reading, and the first is forgotten.
    """

    every: int  # 0: nothing is read
    _compared: int = 0  # before which step, last
    _step: int = 0
    _plan: Plan | None = None
    _params: Sequence[torch.Tensor] = ()
    _buckets: list[_BucketCheck] = field(default_factory=list)
    _since: int = 0  # the first step in the history
    _past: torch.Tensor | None = None  # the history under earlier plans, by parameter
    _changes: dict[int, str] = field(default_factory=dict)  # by parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> CorruptionCheck:
        """A copy of the optimizer begins anew."""
        return CorruptionCheck(self.every)

    def before_step(self, step: int, sharded_params: ShardedParams, compare: Compare) -> None:
        """A step begins, and nothing has been changed yet."""
        if not self.every:
            return
        inner = sharded_params.inner
        self._begin(step, inner, sharded_params.plan, sharded_params.registry.params)
        compares, masters_will_follow = step % self.every == 0, bool(inner.masters.behind())
        if compares or masters_will_follow:  # else each bucket is read when its turn comes
            self.read_all()
        if masters_will_follow:
            self.state_changed()
        if compares and self._compared < step:  # not again if the step is called again
            try:
                compare(*self._history(), self._take_changes(len(self._params)))
            except RuntimeError:
                # The step will be refused: there is another reading if it is called again.
                self._begin_history(counted=0)
                raise
            self._begin_history(counted=step)
            self._compared = step

    def _begin(
        self, step: int, inner: InnerOptimizers, plan: Plan, params: Sequence[torch.Tensor]
    ) -> None:
        self._step = step
        for bucket in self._buckets:
            # The step that it was before was refused, and other ranks may have none.
            bucket.reading = None
        if plan is not self._plan and plan != self._plan:
            for bucket in self._buckets:  # no shard has moved: its state can still be compared
                bucket.state.compare(step)
            self.state_changed()
            self._past = self._histories()
            self._buckets = [
                _BucketCheck(inner, plan, params, number, self._changes)
                for number in range(len(plan.buckets))
            ]
        self._plan, self._params = plan, params

    def _begin_history(self, counted: int) -> None:
        """The history was compared."""
        self._past, self._since = None, 0
        for bucket in self._buckets:
            bucket.history, bucket.reading, bucket.counted = None, None, counted

    def read_all(self) -> None:
        """Before all buckets are updated at once: what ``watch`` does before each of them."""
        for bucket in self._buckets:
            bucket.read(self._step)

    @contextlib.contextmanager
    def watch(self, bucket: int) -> Iterator[None]:
        """While a bucket is updated."""
        if not self.every:
            yield
            return
        check = self._buckets[bucket]
        check.read(self._step)
        yield
        self._count_reading(check)
        check.state.remember()  # while it is in the cache

    def step_failed(self) -> None:
        """In the middle, after something was updated."""
        # Other ranks have read every bucket in this step: so does this one, or its history would
        # be another. Memory that cannot be read has failed before: the user has to know that.
        with contextlib.suppress(Exception):
            self.read_all()
            for bucket in self._buckets:
                self._count_reading(bucket)
        self.state_changed()

    def _count_reading(self, bucket: _BucketCheck) -> None:
        """The bucket has been updated: there will be no other reading before this step."""
        if bucket.reading is not None:
            bucket.history, bucket.reading = bucket.with_reading(), None
            bucket.counted = self._step
            self._since = self._since or self._step

    def state_changed(self) -> None:
        """As it should: by a load, or by the user who says so."""
        for bucket in self._buckets:
            bucket.state.forget()

    def changes(self, count: int) -> list[str]:
        """Between two steps: of each of so many parameters, what of its state has changed when."""
        for bucket in self._buckets:
            bucket.state.compare(self._step + 1)
        return self._take_changes(count)

    def _take_changes(self, count: int) -> list[str]:
        """They are then forgotten."""
        for bucket in self._buckets:
            bucket.state.report()
        found = [self._changes.get(index, "") for index in range(count)]
        self._changes.clear()
        return found

    def require_unchanged(self, rank_group: RankGroup, names: Sequence[str]) -> None:
        """Before the state is saved: else what has flipped would come back with every restart.
        Collective."""

        def prepare() -> list[str]:
            for name, change in zip(names, self.changes(len(names)), strict=True):
                if change:
                    raise RuntimeError(
                        f"the state of {name} has changed although no step was taken: {change}. It "
                        "is not saved: go back to an earlier checkpoint. If your code writes into "
                        "the state, or to load over it, say so: optimizer.state = optimizer.state"
                    )
            return []

        if self.every:
            same_outcome(rank_group, "looking at the state before it is saved", prepare)

    def _history(self) -> tuple[torch.Tensor, str]:
        """What each parameter was before the steps up to this one, before which all were read, and
        which steps those are."""
        assert self._plan is not None
        found = self._histories()
        # Nothing heals or spreads what is not trained: it is as wrong now as it ever was.
        for index, param in enumerate(self._params):
            if index not in self._plan.params:
                found[index] += checksum(param).cpu()
        since = self._since or self._step
        when = f"{since}" if since == self._step else f"{since} to {self._step}"
        return found, f" (looked at before step {when})"

    def _histories(self) -> torch.Tensor:
        found = torch.zeros(len(self._params), dtype=torch.int64, device="cpu")
        if self._past is not None:  # parameters are only ever added
            found[: len(self._past)] = self._past * ODD
        for bucket in self._buckets:
            found.index_add_(0, bucket.params, bucket.with_reading().cpu())
        return found


class _BucketCheck:
    """The parameters in a bucket: what they were before the steps so far, one number for each part
    of a parameter; and the record of this rank's state."""

    def __init__(
        self,
        inner: InnerOptimizers,
        plan: Plan,
        params: Sequence[torch.Tensor],
        bucket: int,
        changes: dict[int, str],
    ) -> None:
        segments = list(plan.segments(bucket))
        self._segments = [(params[s.param], s.start, s.stop) for s in segments]
        self.params = torch.tensor([s.param for s in segments], dtype=torch.int64, device="cpu")
        self.history: torch.Tensor | None = None
        self.reading: torch.Tensor | None = None  # that does not count yet
        self.counted = 0  # the step before which a reading counted, last
        self._places: list[int] = []  # of the parameters in memory
        self._checksums = Checksums([])  # of the segments
        self.state = _StateRecord(inner, bucket, changes)

    def read(self, step: int) -> None:
        """Once per attempt at a step, and not after a reading before this step that counted."""
        if self.counted >= step or self.reading is not None:
            return
        places = [param.data_ptr() for param, _, _ in self._segments]
        if places != self._places:
            self._places = places
            self._checksums = Checksums([part_of(p.detach(), i, j) for p, i, j in self._segments])
        self.reading = self._checksums.now()
        self.state.compare(step)

    def with_reading(self) -> torch.Tensor:
        """The history, and the reading that does not count yet."""
        if self.history is None:
            return torch.zeros_like(self.params) if self.reading is None else self.reading
        if self.reading is None:
            return self.history
        return torch.add(self.reading, self.history.to(self.reading.device), alpha=ODD)


Label = tuple[int, int, str]  # of a tensor of the state: parameter, first element there, key


class _StateRecord:
    """This rank's state in a bucket: whether it is what the last step has left."""

    def __init__(self, inner: InnerOptimizers, bucket: int, changes: dict[int, str]) -> None:
        self._inner, self._bucket = inner, bucket
        self._changes = changes  # where what was noticed is written down, by parameter
        self._labels: list[Label] = []
        self._steady: Checksums | None = None  # of the state, if it stays where it is
        self._last: list[weakref.ref[torch.Tensor]] = []  # the state that was remembered
        self._checksums: torch.Tensor | None = None  # that were remembered, by label
        self._changed_at: torch.Tensor | None = None  # the first step before which one had changed

    def remember(self) -> None:
        """The state was updated: until the next step nobody touches it."""
        labels, tensors = state_tensors(self._inner, self._inner.shards_in(self._bucket))
        steady = self._steady
        if self._checksums is not None and steady is not None and steady.are_of(tensors):
            self._checksums = steady.now()
            return
        if labels != self._labels or self._checksums is None:
            self.report()
            self._labels = labels
        # What a class makes anew in every step is not held on to: it would be there twice.
        same = [ref() for ref in self._last]
        is_steady = len(same) == len(tensors) and all(map(operator.is_, same, tensors))
        self._last = list(map(weakref.ref, tensors))
        self._steady = Checksums(tensors) if is_steady else None
        self._checksums = (self._steady or Checksums(tensors)).now()

    def forget(self) -> None:
        self.report()
        self._checksums = self._steady = None

    def compare(self, step: int) -> None:
        """Is the state what it was when it was remembered?"""
        if self._checksums is None or not len(self._checksums):
            return
        labels, tensors = state_tensors(self._inner, self._inner.shards_in(self._bucket))
        if self._steady is not None and self._steady.are_of(tensors):
            now = self._steady.now()
        elif self._labels == labels:
            now = Checksums(tensors).now()
        else:
            self._checksums = None  # state was taken away or added by hand
            return
        if now.device.type == "cpu" and torch.equal(now, self._checksums):
            return  # elsewhere the answer would have to be waited for
        changed = now.to(self._checksums.device) != self._checksums
        if self._changed_at is None:
            self._changed_at = torch.zeros_like(self._checksums)
        is_first = changed & (self._changed_at == 0)
        self._changed_at = torch.where(is_first, step, self._changed_at)

    def report(self) -> None:
        """Write down what has been noticed so far."""
        if self._changed_at is not None:
            for (param, _, key), step in zip(self._labels, self._changed_at.tolist(), strict=True):
                if step:
                    self._changes.setdefault(param, f"{key}, before step {step}")
        self._changed_at = None


def state_tensors(
    inner: InnerOptimizers, shards: Sequence[OwnedShard]
) -> tuple[list[Label], list[torch.Tensor]]:
    """All tensors of the state of these shards that have memory, master copies among them.

    Why not ``checkpoint.state.collect``: this runs twice per bucket and step, and checks nothing.
    """
    labels: list[Label] = []
    tensors: list[torch.Tensor] = []
    states = [each.optimizer.state for each in inner.inners]
    for owned in shards:
        param, start = owned.shard.param, owned.shard.start
        if owned.has_master:
            labels.append((param, start, MASTER))
            tensors.append(owned.tensor)
        state: Any = next((state[owned.tensor] for state in states if owned.tensor in state), {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                for name, memory in _in_memory(key, value):
                    labels.append((param, start, name))
                    tensors.append(memory)
    return labels, tensors


def _in_memory(key: Any, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor, or those that it is made of, as quantized state is."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _in_memory(f"{key}.{name}", getattr(tensor, name))
    elif tensor.layout is torch.strided:
        # RuntimeError: a subclass keeps its elements where only it knows.
        with contextlib.suppress(RuntimeError):
            if tensor.data_ptr() != 0 or not tensor.numel():
                yield str(key), tensor


class Checksums:
    """Those of the same tensors, again and again: what does not change is prepared once."""

    @torch.inference_mode(False)
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._places = [(tensor.data_ptr(), tensor.shape) for tensor in tensors]
        devices = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
        # Where the others are, so that nothing is waited for.
        self._device = devices[0] if devices else torch.device("cpu")
        numbers: dict[torch.dtype, list[int]] = {}
        larger: list[int] = []
        for index, tensor in enumerate(self._tensors):
            is_number = tensor.dim() == 0 and tensor.device.type == "cpu"
            if is_number and tensor.element_size() < WORD_BYTES:
                numbers.setdefault(tensor.dtype, []).append(index)
            else:
                larger.append(index)
        # Single elements, as `step`, are read in one go: those of one dtype have cells in a row.
        order = [*larger, *(index for indices in numbers.values() for index in indices)]
        self._cell_of = torch.tensor(order, dtype=torch.int64, device="cpu").argsort()
        self._cells = torch.zeros(len(order), dtype=torch.int64, device="cpu")
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []  # words, and where the sum goes
        self._rests: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._others: list[int] = []  # to be read the long way, by position
        for index, cell in zip(larger, self._cells[: len(larger)], strict=True):
            tensor = self._tensors[index].detach()
            is_misaligned = tensor.storage_offset() * tensor.element_size() % WORD_BYTES
            if tensor.device.type != "cpu" or not is_dense(tensor) or is_misaligned:
                self._others.append(index)
                continue
            words, rest = words_of(tensor)
            self._sums.append((words, cell))
            if rest.numel():
                self._rests.append((rest, cell))
        self._numbers: list[tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]] = []
        start = len(larger)
        for dtype, indices in numbers.items():
            cells = self._cells[start : start + len(indices)]
            together = torch.empty(len(indices), dtype=dtype, device="cpu")
            self._numbers.append(
                ([self._tensors[index].detach() for index in indices], together, cells)
            )
            start += len(indices)

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same ones, where they were."""
        return len(tensors) == len(self._tensors) and all(
            tensor is known and (tensor.data_ptr(), tensor.shape) == place
            for tensor, known, place in zip(tensors, self._tensors, self._places, strict=True)
        )

    def now(self) -> torch.Tensor:
        """The numbers, in the order of the tensors."""
        for words, cell in self._sums:
            torch.sum(words, 0, out=cell)
        for rest, cell in self._rests:
            cell.add_(rest.sum())
        for tensors, together, cells in self._numbers:
            torch.stack(tensors, out=together)
            cells.copy_(together.view(INTEGERS[together.element_size()]))
        found = self._cells.index_select(0, self._cell_of)
        if self._device.type != "cpu":
            found = found.to(self._device, non_blocking=True)
        for index in self._others:
            found[index] = checksum(self._tensors[index])
        return found
