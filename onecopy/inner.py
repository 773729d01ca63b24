"""One optimizer class on this rank; the state of all; the closure that they may ask for a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.kinds import class_name, is_torchs
from onecopy.torch_private import step_hooks


@dataclass(slots=True)
class Inner:
    """One optimizer class on this rank, and the numbers of the groups that it serves."""

    optimizer: Optimizer
    groups: list[int]

    @property
    def steps_by_bucket(self) -> bool:
        """Whether it may be stepped on a part of its parameters at a time: a class that keeps all
        its state by parameter, as torch's do. Others may count their steps."""
        optimizer = self.optimizer
        return is_torchs(class_name(type(optimizer))) and not any(step_hooks(optimizer))

    @contextlib.contextmanager
    def narrowed(self, params: Mapping[int, list[torch.Tensor]]) -> Iterator[None]:
        """While the block runs, there are these groups only, with these parameters."""
        groups = self.optimizer.param_groups
        before = [(groups[number], groups[number]["params"]) for number in params]
        for (group, _), some in zip(before, params.values(), strict=True):
            group["params"] = some
        self.optimizer.param_groups = [group for group, _ in before]
        try:
            yield
        finally:
            self.optimizer.param_groups = groups
            for group, everything in before:
                group["params"] = everything


@dataclass(slots=True)
class InnerBefore:
    """What an inner optimizer was, to go back to."""

    inner: Inner
    groups: list[int]
    state: MutableMapping[Any, Any]
    state_entries: dict[Any, Any]
    param_groups: list[tuple[dict[str, Any], dict[str, Any]]]  # each with a copy of it

    @classmethod
    def of(cls, inner: Inner) -> InnerBefore:
        state = inner.optimizer.state
        param_groups = [(group, dict(group)) for group in inner.optimizer.param_groups]
        return cls(inner, list(inner.groups), state, dict(state), param_groups)

    def restore(self) -> None:
        self.state.clear()
        self.state.update(self.state_entries)
        for group, before in self.param_groups:
            group.clear()
            group.update(before)
        self.inner.groups = self.groups
        self.inner.optimizer.state = self.state  # type: ignore[assignment]
        self.inner.optimizer.param_groups = [group for group, _ in self.param_groups]


class OwnedState(MutableMapping[torch.Tensor, Any]):
    """The state of what this rank owns, keyed by the tensors of the inner optimizers.

    True even when empty. Why: torch's checkpoint helpers take a false ``state`` for one that has
    yet to be made, and make it by stepping the live optimizer.
    """

    def __init__(self, inners: Callable[[], Sequence[Inner]]) -> None:
        self._inners = inners

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, tensor: torch.Tensor) -> Any:
        return self._holder(tensor)[tensor]

    def __setitem__(self, tensor: torch.Tensor, value: Any) -> None:
        self._holder(tensor)[tensor] = value

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._holder(tensor)[tensor]

    def _holder(self, tensor: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        for inner in self._inners():
            if tensor in inner.optimizer.state:
                return inner.optimizer.state
        raise KeyError(
            "this rank holds no state under that tensor: no step has made any yet, or it is not "
            'one of its tensors, which are in optimizer.optim.param_groups[i]["params"], since a '
            "parameter may be cut over the ranks"
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        for inner in self._inners():
            yield from inner.optimizer.state

    def __len__(self) -> int:
        return sum(len(inner.optimizer.state) for inner in self._inners())


class Replay:
    """A closure that has been run: gives its loss to the inner optimizers, once to each.

    Why not the closure itself: it would run once per class and per rank as its optimizer pleases,
    and every run is a backward in which all ranks must take part.
    """

    def __init__(self, closure: Callable[[], Any]) -> None:
        with torch.enable_grad():
            self.loss = closure()

    def once(self) -> Callable[[], Any]:
        """The closure for one inner optimizer, which may call it once."""
        calls = 0

        def loss() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RuntimeError(
                    "this optimizer class evaluates its closure more than once per step. Sharded, "
                    "that cannot work: in between, each rank has moved only its own parameters"
                )
            return self.loss

        return loss
