"""Bits that change while nobody should touch them, noticed between one step and the next.

There is one copy of the state, so there is nothing to compare it with but itself: a checksum is
taken when it has been updated, and again right before the next update. Parameters have a copy on
every rank; but a step heals the copies of other ranks and spreads the owner's mistake, so they too
must be looked at before every step. Their checksums run into a history, one number for each
parameter, which the ranks compare now and then: it differs if the parameter did before any step
since.

    step 7, a bucket is updated      state: checksum --.
                                                       equal?
    step 8, before it is updated     state: checksum --'
                                     parameters: history = history * odd + checksum

It happens bucket by bucket, because the update is about to read the same memory, or has just
written it: then it comes from the cache. Nothing here communicates, or waits for an accelerator.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from onecopy.planning.layout import part_of
from onecopy.planning.param_groups import MASTER
from onecopy.planning.plan import Plan
from onecopy.sharding.fingerprints import ODD, Checksums, checksum
from onecopy.sharding.inner import InnerOptimizers
from onecopy.sharding.owned import OwnedShard


class Content(NamedTuple):
    """A tensor of this rank's state: of which parameter, from where on, and under which key."""

    param: int
    start: int
    key: str
    tensor: torch.Tensor

    @property
    def label(self) -> tuple[int, int, str]:
        return self[:3]


def contents(local: InnerOptimizers, shards: Sequence[OwnedShard]) -> list[Content]:
    """All tensors of the state of these pieces, master copies among them."""
    found = []
    for owned, state in _states(local, shards):
        place = owned.shard.param, owned.shard.start
        if owned.has_master:
            found.append(Content(*place, MASTER, owned.tensor))
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found += [Content(*place, name, memory) for name, memory in _in_memory(key, value)]
    return found


def _in_memory(key: Any, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor, or those that it is made of, as quantized state is."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _in_memory(f"{key}.{name}", getattr(tensor, name))
    elif tensor.layout is torch.strided and _has_memory(tensor):
        yield str(key), tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    """Not a subclass that keeps its elements where only it knows."""
    try:
        return tensor.data_ptr() != 0 or not tensor.numel()
    except RuntimeError:
        return False


def counters(local: InnerOptimizers, params: int) -> list[list[str]]:
    """By parameter, what each of its pieces on this rank says of ``step`` and other numbers. An
    elementwise class keeps the same in all pieces, since it cannot know which one it has."""
    said: list[list[str]] = [[] for _ in range(params)]
    for owned, state in _states(local, local.shards):
        numbers = [
            f"{key} = {value.item() if isinstance(value, torch.Tensor) else value!r}"
            for key, value in sorted(state.items(), key=lambda item: str(item[0]))
            if isinstance(value, (bool, int, float))
            or (isinstance(value, torch.Tensor) and not value.dim())
        ]
        if numbers:
            said[owned.shard.param].append(", ".join(numbers))
    return said


def _states(
    local: InnerOptimizers, shards: Sequence[OwnedShard]
) -> Iterator[tuple[OwnedShard, dict[Any, Any]]]:
    states = [inner.optimizer.state for inner in local.inners]
    for owned in shards:
        yield owned, next((state[owned.tensor] for state in states if owned.tensor in state), {})


class CorruptionCheck:
    """Looks at what an optimizer holds, bucket by bucket, before it is updated and afterwards.

    A look that is followed by the update counts: it goes into the history. If a step is refused and
    tried again, it is looked at again, and the first look is forgotten.
    """

    def __init__(self) -> None:
        self._step = 0
        self._attempt = 0  # at any step
        self._plan: Plan | None = None
        self._params: Sequence[torch.Tensor] = ()
        self._guards: list[_Guard] = []  # by bucket
        self._since = 0  # the first step in the history
        self._past: torch.Tensor | None = None  # the history under earlier plans, by parameter
        self._suspicions: dict[int, str] = {}  # by parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> CorruptionCheck:
        """A copy of the optimizer begins anew."""
        return CorruptionCheck()

    def begin(
        self, step: int, local: InnerOptimizers, plan: Plan, params: Sequence[torch.Tensor]
    ) -> None:
        """A step begins, with this plan."""
        self._step = step
        self._attempt += 1
        for guard in self._guards:
            guard.history.forget_look()
        if plan is not self._plan and plan != self._plan:
            for guard in self._guards:  # no piece has moved: what was sealed can still be compared
                guard.state.inspect(step)
            self.unseal()
            self._past = self._histories()
            buckets = range(len(plan.buckets))
            self._guards = [_Guard(local, plan, params, bucket) for bucket in buckets]
        self._plan, self._params = plan, params

    def look(self, bucket: int) -> None:
        """A bucket is about to be updated."""
        self._guards[bucket].look(self._step, self._attempt)

    def look_at_all(self) -> None:
        """All buckets are, or the step has failed, and none will be."""
        for guard in self._guards:
            guard.look(self._step, self._attempt)

    def seal(self, bucket: int) -> None:
        """A bucket has been updated: until the next step nobody touches its state."""
        self._count_look(self._guards[bucket])
        self._guards[bucket].state.seal(self._suspicions)

    def finish(self) -> None:
        """The step has failed in the middle. Other ranks have looked at every bucket in it: so does
        this one, or its history would be another."""
        self.look_at_all()
        for guard in self._guards:
            self._count_look(guard)

    def _count_look(self, guard: _Guard) -> None:
        if guard.count_look(self._step):
            self._since = self._since or self._step

    def unseal(self) -> None:
        """The state has been changed, as it should be."""
        for guard in self._guards:
            guard.state.unseal(self._suspicions)

    def inspect_now(self) -> None:
        """Between two steps somebody asks: is the state what it was?"""
        for guard in self._guards:
            guard.state.inspect(self._step + 1)

    def history(self) -> tuple[torch.Tensor, str]:
        """What each parameter was before the steps up to this one, before which all were looked
        at, and which steps those are."""
        assert self._plan is not None
        found = self._histories()
        # Nothing heals or spreads what is not trained: it is as wrong now as it ever was.
        frozen = [i for i in range(len(self._params)) if i not in self._plan.params]
        for index in frozen:
            found[index] += checksum(self._params[index]).cpu()
        since = self._since or self._step
        when = f"{since}" if since == self._step else f"{since} to {self._step}"
        return found, f" (looked at before step {when})"

    def begin_history(self, is_all_well: bool) -> None:
        """The history was compared. If all is not well, the step will be refused, and the looks
        before it were the last ones that anybody hears of."""
        self._past, self._since = None, 0
        for guard in self._guards:
            guard.begin_history(self._step if is_all_well else 0)

    def _histories(self) -> torch.Tensor:
        found = torch.zeros(len(self._params), dtype=torch.int64, device="cpu")
        if self._past is not None:  # parameters are only ever added
            found[: len(self._past)] = self._past * ODD
        for guard in self._guards:
            found.index_add_(0, guard.history.params, guard.history.with_look().cpu())
        return found

    def suspicions(self, params: int) -> list[str]:
        """By parameter, what of its state has changed when; they are then forgotten."""
        for guard in self._guards:
            guard.state.settle(self._suspicions)
        found, self._suspicions = self._suspicions, {}
        return [found.get(index, "") for index in range(params)]


class _Guard:
    """What is known of a bucket."""

    def __init__(
        self, local: InnerOptimizers, plan: Plan, params: Sequence[torch.Tensor], bucket: int
    ) -> None:
        self.history = _History(plan, params, bucket)
        self.state = _Seal(local, bucket)
        self._looked_in = 0  # an attempt at a step
        self._counted = 0  # the step before which a look counted, last

    def look(self, step: int, attempt: int) -> None:
        if self._counted < step and self._looked_in < attempt:
            self._looked_in = attempt
            self.history.look()
            self.state.inspect(step)

    def count_look(self, step: int) -> bool:
        """The bucket has been updated: there will be no other look before this step. Whether there
        was one that had not been counted."""
        if not self.history.count_look():
            return False
        self._counted = step
        return True

    def begin_history(self, counted: int) -> None:
        self.history.forget()
        self._counted = counted


class _History:
    """The parameters in a bucket: what they were before the steps so far, one number for each part
    of a parameter."""

    def __init__(self, plan: Plan, params: Sequence[torch.Tensor], bucket: int) -> None:
        segments = list(plan.segments(bucket))
        self._segments = [(params[s.param], s.start, s.stop) for s in segments]
        self.params = torch.tensor([s.param for s in segments], dtype=torch.int64, device="cpu")
        self._counted: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None  # in a look that does not count yet
        self._places: list[int] = []  # of the parameters in memory
        self._checksums = Checksums([])  # of the segments

    def look(self) -> None:
        places = [param.data_ptr() for param, _, _ in self._segments]
        if places != self._places:
            self._places = places
            self._checksums = Checksums([part_of(p.detach(), i, j) for p, i, j in self._segments])
        self._seen = self._checksums.now()

    def forget_look(self) -> None:
        """The step that it was before was refused, and other ranks may not have looked."""
        self._seen = None

    def count_look(self) -> bool:
        """Take the last look into the history, if there was one."""
        if self._seen is None:
            return False
        self._counted, self._seen = self.with_look(), None
        return True

    def with_look(self) -> torch.Tensor:
        """The history, and the look that does not count yet."""
        if self._counted is None:
            return torch.zeros_like(self.params) if self._seen is None else self._seen
        if self._seen is None:
            return self._counted
        return torch.add(self._seen, self._counted.to(self._seen.device), alpha=ODD)

    def forget(self) -> None:
        self._counted = self._seen = None


class _Seal:
    """This rank's state in a bucket: whether it is what the last step has left."""

    def __init__(self, local: InnerOptimizers, bucket: int) -> None:
        self._local, self._bucket = local, bucket
        self._labels: list[tuple[int, int, str]] = []
        self._steady: Checksums | None = None  # of the state, if it stays where it is
        self._last: list[weakref.ref[torch.Tensor]] = []  # the state, as it was sealed
        self._sealed: torch.Tensor | None = None  # checksums, by label
        self._changed_at: torch.Tensor | None = None  # the first step before which one had changed

    def _contents(self) -> list[Content]:
        return contents(self._local, self._local.shards_in(self._bucket))

    def seal(self, suspicions: dict[int, str]) -> None:
        state = self._contents()
        tensors = [content.tensor for content in state]
        if self._sealed is not None and self._steady is not None and self._steady.are_of(tensors):
            self._sealed = self._steady.now()
            return
        labels = [content.label for content in state]
        if labels != self._labels or self._sealed is None:
            self.settle(suspicions)
            self._labels = labels
        # What a class makes anew in every step is not held on to: it would be there twice.
        same = [ref() for ref in self._last]
        is_steady = len(same) == len(tensors) and all(map(operator.is_, same, tensors))
        self._last = list(map(weakref.ref, tensors))
        self._steady = Checksums(tensors) if is_steady else None
        self._sealed = (self._steady or Checksums(tensors)).now()

    def unseal(self, suspicions: dict[int, str]) -> None:
        self.settle(suspicions)
        self._sealed = self._steady = None

    def inspect(self, step: int) -> None:
        """Is the state what it was when it was sealed?"""
        if self._sealed is None or not len(self._sealed):
            return
        state = self._contents()
        tensors = [content.tensor for content in state]
        if self._steady is not None and self._steady.are_of(tensors):
            now = self._steady.now()
        elif self._labels == [content.label for content in state]:
            now = Checksums(tensors).now()
        else:
            self._sealed = None  # state was taken away or added by hand
            return
        if now.device.type == "cpu" and torch.equal(now, self._sealed):
            return  # elsewhere the answer would have to be waited for
        changed = now.to(self._sealed.device) != self._sealed
        if self._changed_at is None:
            self._changed_at = torch.zeros_like(self._sealed)
        is_first = changed & (self._changed_at == 0)
        self._changed_at = torch.where(is_first, step, self._changed_at)

    def settle(self, suspicions: dict[int, str]) -> None:
        """Write down what has been noticed so far."""
        if self._changed_at is not None:
            for label, step in zip(self._labels, self._changed_at.tolist(), strict=True):
                if step:
                    param, _, key = label
                    suspicions.setdefault(param, f"{key}, before step {step}")
        self._changed_at = None
