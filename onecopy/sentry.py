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

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from onecopy.buffers import flat_range, is_dense
from onecopy.fingerprints import ODD, Checksums, checksum
from onecopy.local import LocalOptimizer
from onecopy.pieces import MASTER, OwnedPiece
from onecopy.plan import Plan


class Content(NamedTuple):
    """A tensor of this rank's state: of which parameter, from where on, and under which key."""

    param: int
    start: int
    key: str
    tensor: torch.Tensor

    @property
    def label(self) -> tuple[int, int, str]:
        return self[:3]


def contents(local: LocalOptimizer, pieces: Sequence[OwnedPiece]) -> list[Content]:
    """All tensors of the state of these pieces, master copies among them."""
    found = []
    for owned, state in _states(local, pieces):
        place = owned.piece.param, owned.piece.start
        if owned.has_master:
            found.append(Content(*place, MASTER, owned.tensor))
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                found.append(Content(*place, str(key), value))
    return found


def counters(local: LocalOptimizer, params: int) -> list[list[str]]:
    """By parameter, what each of its pieces on this rank says of ``step`` and other numbers. An
    elementwise class keeps the same in all pieces, since it cannot know which one it has."""
    said: list[list[str]] = [[] for _ in range(params)]
    for owned, state in _states(local, local.pieces):
        numbers = [
            f"{key} = {value.item() if isinstance(value, torch.Tensor) else value!r}"
            for key, value in sorted(state.items(), key=lambda item: str(item[0]))
            if isinstance(value, (bool, int, float))
            or (isinstance(value, torch.Tensor) and not value.dim())
        ]
        if numbers:
            said[owned.piece.param].append(", ".join(numbers))
    return said


def _states(
    local: LocalOptimizer, pieces: Sequence[OwnedPiece]
) -> Iterator[tuple[OwnedPiece, dict[Any, Any]]]:
    states = [inner.optimizer.state for inner in local.inners]
    for owned in pieces:
        yield owned, next((state[owned.tensor] for state in states if owned.tensor in state), {})


class Sentry:
    """Looks at what an optimizer holds, bucket by bucket, before it is updated and afterwards."""

    def __init__(self) -> None:
        self._step = 0
        self._plan: Plan | None = None
        self._params: Sequence[torch.Tensor] = ()
        self._guards: list[_Guard] = []  # by bucket
        self._since = 0  # the first step in the history
        self._past: torch.Tensor | None = None  # the history under earlier plans, by parameter
        self._suspicions: dict[int, str] = {}  # by parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Sentry:
        """A copy of the optimizer begins anew."""
        return Sentry()

    def begin(
        self, step: int, local: LocalOptimizer, plan: Plan, params: Sequence[torch.Tensor]
    ) -> None:
        """A step begins, with this plan."""
        self._since = self._since or step
        self._step = step
        if plan is not self._plan:
            self._past = self._histories()
            self.unseal()
            self._plan = plan
            buckets = range(len(plan.buckets))
            self._guards = [_Guard(local, plan, params, bucket) for bucket in buckets]
        self._params = params

    def look(self, bucket: int) -> None:
        """A bucket is about to be updated. Once for each step, however often that is tried: so the
        histories of the ranks stay level."""
        guard = self._guards[bucket]
        if guard.looked_before < self._step:
            guard.looked_before = self._step
            guard.take_in()
            guard.inspect(self._step)

    def look_at_all(self) -> None:
        """The step will change more than the bucket that comes, or nothing any more."""
        for bucket in range(len(self._guards)):
            self.look(bucket)

    def forget_looks(self) -> None:
        """What was seen before this step has been told: if it is tried again, look again."""
        for guard in self._guards:
            guard.looked_before = 0

    def seal(self, bucket: int) -> None:
        """A bucket has been updated: until the next step nobody touches its state."""
        self._guards[bucket].seal(self._suspicions)

    def unseal(self) -> None:
        """The state has been changed, as it should be."""
        for guard in self._guards:
            guard.unseal(self._suspicions)

    def inspect(self) -> None:
        """Between two steps somebody asks: is the state what it was?"""
        for guard in self._guards:
            guard.inspect(self._step + 1)

    def history(self) -> tuple[torch.Tensor, str]:
        """What each parameter was before the steps up to this one, before which all were looked
        at, and which steps those are; a new history begins."""
        assert self._plan is not None
        found = self._histories()
        # Nothing heals or spreads what is not trained: it is as wrong now as it ever was.
        frozen = [i for i in range(len(self._params)) if i not in self._plan.params]
        for index in frozen:
            found[index] += checksum(self._params[index]).cpu()
        when = f"{self._since}" if self._since == self._step else f"{self._since} to {self._step}"
        self._past, self._since = None, 0
        for guard in self._guards:
            guard.history.zero_()
        return found, f" (looked at before step {when})"

    def _histories(self) -> torch.Tensor:
        found = torch.zeros(len(self._params), dtype=torch.int64)
        if self._past is not None:  # parameters are only ever added
            found[: len(self._past)] = self._past * ODD
        for guard in self._guards:
            found.index_add_(0, guard.of, guard.history.cpu())
        return found

    def suspicions(self, params: int) -> list[str]:
        """By parameter, what of its state has changed when; they are then forgotten."""
        for guard in self._guards:
            guard.settle(self._suspicions)
        found, self._suspicions = self._suspicions, {}
        return [found.get(index, "") for index in range(params)]


class _Guard:
    """What is known of a bucket."""

    def __init__(
        self, local: LocalOptimizer, plan: Plan, params: Sequence[torch.Tensor], bucket: int
    ) -> None:
        self._local, self._bucket = local, bucket
        self._segments = [(params[s.param], s.start, s.stop) for s in plan.segments(bucket)]
        self.of = torch.tensor([s.param for s in plan.segments(bucket)], dtype=torch.int64)
        self.history = torch.zeros(len(self._segments), dtype=torch.int64)
        self.looked_before = 0  # a step
        self._places: list[int] = []  # of the parameters in memory
        self._reading: Checksums | None = None  # of the segments
        self._labels: list[tuple[int, int, str]] = []
        self._state = Checksums([])
        self._sealed: torch.Tensor | None = None  # checksums, by label
        self._changed_at: torch.Tensor | None = None  # the first step before which one had changed

    def take_in(self) -> None:
        """The parameters as they are."""
        places = [param.data_ptr() for param, _, _ in self._segments]
        if self._reading is None or places != self._places:
            self._places = places
            self._reading = Checksums([_part(*segment) for segment in self._segments])
        seen = self._reading.now()
        self.history = self.history.to(seen.device) * ODD + seen

    def _contents(self) -> list[Content]:
        return contents(self._local, self._local.pieces_in(self._bucket))

    def _now(self, state: Sequence[Content]) -> torch.Tensor:
        tensors = [content.tensor for content in state]
        if not self._state.are_of(tensors):
            self._state = Checksums(tensors)
        return self._state.now()

    def seal(self, suspicions: dict[int, str]) -> None:
        state = self._contents()
        labels = [content.label for content in state]
        if labels != self._labels or self._sealed is None:
            self.settle(suspicions)
            self._labels = labels
        self._sealed = self._now(state)

    def unseal(self, suspicions: dict[int, str]) -> None:
        self.settle(suspicions)
        self._sealed = None

    def inspect(self, step: int) -> None:
        if self._sealed is None or not len(self._sealed):
            return
        state = self._contents()
        if self._labels != [content.label for content in state]:
            self._sealed = None  # state was taken away or added by hand
            return
        now = self._now(state)
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


def _part(param: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    memory = param.detach()
    return flat_range(memory, start, stop) if is_dense(memory) else memory
