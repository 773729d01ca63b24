"""Bits that change while nobody should touch them, noticed between one step and the next.

There is one copy of the state, so there is nothing to compare it with but itself: a checksum is
taken when it has been updated, and again right before the next update. Parameters have a copy on
every rank; but a step heals the copies of other ranks and spreads the owner's mistake, so they too
must be read before every step. Their checksums run into a history, one number for each parameter,
which the ranks compare every so many steps: it differs if the parameter did before any step since.

    step 7, after the updates        state: checksum --.
                                                       equal?
    step 8, before the updates       state: checksum --'
                                     parameters: history = history * odd + checksum

Nothing here waits for an accelerator, and only what the caller passes in communicates.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from onecopy.comm.agreement import same_outcome
from onecopy.comm.group import RankGroup
from onecopy.planning.layout import is_dense
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
Label = tuple[int, int, str]  # of a tensor of the state: parameter, first element there, key


@dataclass(eq=False)
class _StateRecord:
    """This rank's state: whether it is what the last step has left."""

    _contents: Callable[[], tuple[list[Label], list[torch.Tensor]]] | None = None
    _labels: Sequence[Label] = ()
    _steady: Checksums | None = None  # of the state, if it stays where it is
    _last: Sequence[weakref.ref[torch.Tensor]] = ()  # the state that was remembered
    _checksums: torch.Tensor | None = None  # that were remembered, by label
    _changed_at: torch.Tensor | None = None  # the first step before which one had changed
    _changes: dict[int, str] = field(default_factory=dict)  # what was noticed, by parameter

    def remember(self, inner: InnerOptimizers) -> None:
        """The state was updated: until the next step nobody touches it."""
        # Of these shards: when the plan has grown, what they hold can still be compared.
        self._contents = functools.partial(state_tensors, inner, inner.shards)
        labels, tensors = self._contents()
        if labels != self._labels or self._checksums is None:
            self._report()
            self._labels = labels
        if self._steady is None or not self._steady.are_of(tensors):
            # What a class makes anew in every step is not held on to: it would be there twice.
            same = [ref() for ref in self._last]
            is_steady = len(same) == len(tensors) and all(map(operator.is_, same, tensors))
            self._last = list(map(weakref.ref, tensors))
            self._steady = Checksums(tensors) if is_steady else None
        self._checksums = (self._steady or Checksums(tensors)).now()

    def forget(self) -> None:
        """The state is about to change, or has changed, as it should."""
        self._report()
        self._contents = self._checksums = self._steady = None

    def compare(self, step: int) -> None:
        """Is the state what it was when it was remembered?"""
        if self._contents is None or self._checksums is None or not len(self._checksums):
            return
        labels, tensors = self._contents()
        if labels != self._labels:
            self._checksums = None  # state was taken away or added by hand
            return
        steady = self._steady
        if steady is None or not steady.are_of(tensors):
            steady = Checksums(tensors)
        now = steady.now()
        if now.device.type == "cpu" and torch.equal(now, self._checksums):
            return  # elsewhere the answer would have to be waited for
        changed = now.to(self._checksums.device) != self._checksums
        if self._changed_at is None:
            self._changed_at = torch.zeros_like(self._checksums)
        is_first = changed & (self._changed_at == 0)
        self._changed_at = torch.where(is_first, step, self._changed_at)

    def _report(self) -> None:
        """Write down what has been noticed so far."""
        if self._changed_at is not None:
            for (param, _, key), step in zip(self._labels, self._changed_at.tolist(), strict=True):
                if step:
                    self._changes.setdefault(param, f"{key}, before step {step}")
        self._changed_at = None

    def take_changes(self, count: int) -> list[str]:
        """What has been noticed of so many parameters. It is then forgotten."""
        self._report()
        found = [self._changes.get(index, "") for index in range(count)]
        self._changes.clear()
        return found


@dataclass(eq=False)
class CorruptionCheck:
    """Reads parameters and state before each step, and the state again after it.

    A reading of the parameters that is followed by an update counts: it goes into the history. If a
    step is refused and tried again, there is another reading, and the first is forgotten.
    """

    every: int  # 0: nothing is read
    _step: int = 0
    _compared: int = 0  # before which step, last
    _plan: Plan | None = None
    _watched: list[int] = field(default_factory=list)  # planned parameters; more may be added
    _checksums: Checksums | None = None  # of those
    _reading: torch.Tensor | None = None  # that does not count yet
    _history: torch.Tensor | None = None
    _since: int = 0  # the first step in the history
    _state: _StateRecord = field(default_factory=_StateRecord)

    def __deepcopy__(self, memo: dict[int, Any]) -> CorruptionCheck:
        """A copy of the optimizer begins anew."""
        return CorruptionCheck(self.every)

    def before_step(self, step: int, sharded_params: ShardedParams, compare: Compare) -> None:
        """A step begins, and nothing has been changed yet."""
        if not self.every:
            return
        self._step = step
        self._state.compare(step)
        if sharded_params.inner.masters.behind():  # they will follow
            self.state_changed()
        if self._compared == step:  # the step is called again, and this reading was compared
            return
        params = sharded_params.registry.params
        self._read(sharded_params.plan, params)
        if step % self.every == 0:
            changes = self._state.take_changes(len(params))
            try:
                compare(*self._summary(params), changes)
            except RuntimeError:
                # The step will be refused: there is another reading if it is called again.
                self._begin_history()
                raise
            self._begin_history()
            self._compared = step

    def _read(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        if plan is not self._plan:
            self._plan = plan
            self._watched += sorted(set(plan.params).difference(self._watched))
        watched = [params[index] for index in self._watched]
        if self._checksums is None or not self._checksums.are_of(watched):
            self._checksums = Checksums(watched)
        self._reading = self._checksums.now()

    def after_step(self, inner: InnerOptimizers) -> None:
        """Everything was updated: until the next step nobody touches the state."""
        if self.every:
            self._count_reading()
            self._state.remember(inner)

    def step_failed(self) -> None:
        """In the middle, after something was updated. The reading counts, as on other ranks."""
        self._count_reading()
        self.state_changed()

    def _count_reading(self) -> None:
        if self._reading is not None:
            self._history, self._reading = self._with_history(self._reading), None
            self._since = self._since or self._step

    def _with_history(self, reading: torch.Tensor) -> torch.Tensor:
        if self._history is None:
            return reading
        before = torch.nn.functional.pad(self._history, (0, len(reading) - len(self._history)))
        return torch.add(reading, before.to(reading.device), alpha=ODD)

    def _begin_history(self) -> None:
        """The history was compared."""
        self._history, self._reading, self._since = None, None, 0

    def _summary(self, params: Sequence[torch.Tensor]) -> tuple[torch.Tensor, str]:
        """What each parameter was before the steps up to this one, and which steps those are."""
        assert self._reading is not None
        found = torch.zeros(len(params), dtype=torch.int64, device="cpu")
        found[self._watched] = self._with_history(self._reading).cpu()
        # Nothing heals or spreads what is not trained: it is as wrong now as it ever was.
        for index in set(range(len(params))).difference(self._watched):
            found[index] = checksum(params[index]).cpu()
        since = self._since or self._step
        when = f"{since}" if since == self._step else f"{since} to {self._step}"
        return found, f" (looked at before step {when})"

    def state_changed(self) -> None:
        """As it should: by a load, or by the user who says so."""
        self._state.forget()

    def changes(self, count: int) -> list[str]:
        """Between two steps: of each of so many parameters, what of its state has changed when."""
        self._state.compare(self._step + 1)
        return self._state.take_changes(count)

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


def state_tensors(
    inner: InnerOptimizers, shards: Sequence[OwnedShard]
) -> tuple[list[Label], list[torch.Tensor]]:
    """All tensors of the state of these shards that have memory, master copies among them.

    Why not ``checkpoint.state.collect``: this runs twice in a step, and checks nothing.
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
        # The numbers go where other tensors are, so that nothing is waited for.
        self._device = devices[0] if devices else torch.device("cpu")
        self._cells = torch.zeros(len(tensors), dtype=torch.int64, device="cpu")
        # Words, the elements that fill none if there are any, and where their sum goes.
        self._sums: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        self._others: list[int] = []  # to be read the long way, by position
        numbers: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            size = tensor.element_size()
            is_cpu = tensor.device.type == "cpu"
            if is_cpu and tensor.dim() == 0 and size < WORD_BYTES:
                numbers.setdefault(tensor.dtype, []).append(index)
            elif is_cpu and is_dense(tensor) and tensor.storage_offset() * size % WORD_BYTES == 0:
                words, rest = words_of(tensor)
                self._sums.append((words, rest if rest.numel() else None, self._cells[index]))
            else:
                self._others.append(index)
        # Single elements, as `step`, are read in one go: those of one dtype, and their positions.
        self._numbers = [
            (
                [tensors[index].detach() for index in indices],
                torch.empty(len(indices), dtype=dtype, device="cpu"),
                torch.tensor(indices, device="cpu"),
            )
            for dtype, indices in numbers.items()
        ]

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same ones, where they were."""
        return len(tensors) == len(self._tensors) and all(
            tensor is known and (tensor.data_ptr(), tensor.shape) == place
            for tensor, known, place in zip(tensors, self._tensors, self._places, strict=True)
        )

    def now(self) -> torch.Tensor:
        """The numbers, in the order of the tensors."""
        for words, rest, cell in self._sums:
            torch.sum(words, 0, out=cell)
            if rest is not None:
                cell.add_(rest.sum())
        for tensors, together, positions in self._numbers:
            torch.stack(tensors, out=together)
            self._cells[positions] = together.view(INTEGERS[together.element_size()]).long()
        found = self._cells.clone().to(self._device, non_blocking=True)
        for index in self._others:
            found[index] = checksum(self._tensors[index])
        return found
