"""Bits that change while nobody should touch them, noticed between one step and the next.

There is one copy of the state, so there is nothing to compare it with but itself: a checksum is
taken when a step ends, and again when the next begins. Parameters have a copy on every rank; but a
step heals the copies of other ranks and spreads the owner's mistake, so they too must be looked
at before every step. Their checksums run into a history, one number for each parameter, which the
ranks compare now and then: it differs if the parameter did before any step since.

    step 7 ends      state: checksum --.
                                       equal?
    step 8 begins    state: checksum --'
                     parameters: history = history * odd + checksum, compared every n steps

Nothing here communicates, or waits for an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from onecopy.fingerprints import ODD, checksum
from onecopy.local import LocalOptimizer
from onecopy.pieces import MASTER


class Content(NamedTuple):
    """A tensor of this rank's state: of which parameter, from where on, and under which key."""

    param: int
    start: int
    key: str
    tensor: torch.Tensor

    @property
    def label(self) -> tuple[int, int, str]:
        return self[:3]


def contents(local: LocalOptimizer) -> list[Content]:
    """All tensors of the state, master copies among them."""
    found = []
    for owned, state in _states(local):
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
    for owned, state in _states(local):
        numbers = [
            f"{key} = {value.item() if isinstance(value, torch.Tensor) else value!r}"
            for key, value in sorted(state.items(), key=lambda item: str(item[0]))
            if isinstance(value, (bool, int, float))
            or (isinstance(value, torch.Tensor) and not value.dim())
        ]
        if numbers:
            said[owned.piece.param].append(", ".join(numbers))
    return said


def _states(local: LocalOptimizer) -> Iterator[tuple[Any, dict[Any, Any]]]:
    states = [inner.optimizer.state for inner in local.inners]
    for owned in local.pieces:
        yield owned, next((state[owned.tensor] for state in states if owned.tensor in state), {})


class Sentry:
    def __init__(self) -> None:
        self._history: torch.Tensor | None = None
        self._since = 0  # the first step in the history
        self._labels: list[tuple[int, int, str]] = []
        self._sealed: torch.Tensor | None = None  # checksums, by label
        self._changed_at: torch.Tensor | None = None  # the first step before which one had changed
        self._suspicions: dict[int, str] = {}  # by parameter

    # ------------------------------------------------------------------ parameters

    def watch(self, params: Sequence[torch.Tensor], step: int) -> None:
        """A step begins: take the parameters into the history."""
        seen = _checksums(params)
        if self._history is None or len(self._history) != len(seen):
            self._history, self._since = torch.zeros_like(seen), step
        self._history = self._history.to(seen.device) * ODD + seen

    def history(self, step: int) -> tuple[torch.Tensor, str]:
        """What the parameters were before the steps up to this one, and which steps those are;
        a new history begins."""
        assert self._history is not None
        history, self._history = self._history, None
        when = f"{self._since}" if self._since == step else f"{self._since} to {step}"
        return history, f" (looked at before step {when})"

    # ------------------------------------------------------------------ state

    def seal(self, state: Sequence[Content]) -> None:
        """A step has ended: from now on nobody touches the state."""
        labels = [content.label for content in state]
        if labels != self._labels or self._sealed is None:
            self._settle()
            self._labels = labels
        self._sealed = _checksums([content.tensor for content in state])

    def unseal(self) -> None:
        """The state has been changed, as it should be."""
        self._settle()
        self._sealed = None

    def inspect(self, state: Sequence[Content], step: int) -> None:
        """A step begins, or somebody asks: is the state what it was?"""
        if self._sealed is None or not len(self._sealed):
            return
        sums = dict(zip((c.label for c in state), (c.tensor for c in state), strict=True))
        if self._labels != list(sums):
            self.unseal()  # the plan is another one, or state was taken away or added by hand
            return
        changed = _checksums(list(sums.values())).to(self._sealed.device) != self._sealed
        if self._changed_at is None:
            self._changed_at = torch.zeros_like(self._sealed)
        is_first = changed & (self._changed_at == 0)
        self._changed_at = torch.where(is_first, step, self._changed_at)

    def suspicions(self, params: int) -> list[str]:
        """By parameter, what of its state has changed when; they are then forgotten."""
        self._settle()
        found, self._suspicions = self._suspicions, {}
        return [found.get(index, "") for index in range(params)]

    def _settle(self) -> None:
        """Write down what has been noticed so far."""
        if self._changed_at is not None:
            for label, step in zip(self._labels, self._changed_at.tolist(), strict=True):
                if step:
                    param, _, key = label
                    self._suspicions.setdefault(param, f"{key}, before step {step}")
        self._changed_at = None


def _checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    # Where the others are, so that nothing is waited for.
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([checksum(tensor).to(device, non_blocking=True) for tensor in tensors])
