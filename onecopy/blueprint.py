"""What state an optimizer class makes for a parameter, found out without touching the live one.

A class makes most of its state in its first step. To read a checkpoint into an optimizer that has
not stepped, or to write one, the state must be known before. So a fresh instance of the class takes
a step on a stand-in: a toy for elementwise classes, whose state is parameter-shaped or a scalar;
for others a tensor of the real shape, on the meta device if the class can step there.

State that does not exist yet is written as what the class starts from, mostly zeros. So that it can
be told from real state when it is read again, the zeros are negative: -0.0, a zero to everybody.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.kinds import class_name, step_without_hooks
from onecopy.words import shown

_TOY_SHAPE = (2, 3)
_SMALL = 4
_MANY_STEPS = 64


@dataclass(frozen=True, slots=True)
class Maker:
    """An optimizer class with the options of a group."""

    optimizer_class: type[Optimizer]
    construct: Callable[[torch.Tensor], Optimizer]
    lr: Any

    def state_for_cut(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """State by key for a parameter that is cut: a toy's. Tensors are toy-shaped or scalars."""
        return self._step_on(torch.zeros(_TOY_SHAPE, dtype=dtype, device=device))

    def state_for(self, param: torch.Tensor) -> dict[str, Any]:
        """State by key for a whole parameter like this one; its tensors may hold nothing."""
        try:
            return self._step_on(torch.empty_like(param, device="meta"))
        except Exception:  # it looks at values, which a meta tensor has not
            return self._step_on(torch.zeros_like(param))

    def changes_form(self, param: torch.Tensor) -> bool:
        """Whether the state of a parameter like this one comes to have other keys, lengths or
        shapes than after its first step. Found out on a small one."""

        def state_after(steps: int) -> dict[str, Any]:
            sizes = [min(size, _SMALL) for size in param.shape]
            toy = torch.zeros(sizes, dtype=param.dtype, device=param.device)
            return self._step_on(toy, steps)

        try:
            return bool(form_of(state_after(1)) != form_of(state_after(_MANY_STEPS)))
        except Exception:  # it takes no such toy; nothing is known against it
            return False

    def _step_on(self, values: torch.Tensor, steps: int = 1) -> dict[str, Any]:
        stand_in = torch.nn.Parameter(values.detach())
        optimizer = self.construct(stand_in)
        if hasattr(optimizer, "train"):  # schedule-free ones step in that mode only
            optimizer.train()
        for _ in range(steps):
            stand_in.grad = torch.zeros_like(stand_in)
            if isinstance(optimizer, torch.optim.SparseAdam):
                stand_in.grad = torch.ones_like(stand_in).to_sparse()
            self._try_step(optimizer)
        return dict(optimizer.state.get(stand_in, {}))

    def _try_step(self, optimizer: Optimizer) -> None:
        try:
            step_without_hooks(optimizer)()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ValueError(
                f"{class_name(self.optimizer_class)} cannot take a step with the options that it "
                f"has: {shown(error, longest=200)}"
            ) from error

    @property
    def _starts(self) -> Mapping[str, Any]:
        classes = (cls for cls in self.optimizer_class.__mro__ if cls in _STARTS)
        return _STARTS.get(next(classes, Optimizer), {})

    def is_marked(self, key: str) -> bool:
        """Whether a state begins with negative zeros."""
        return key not in self._starts

    def start_of(self, key: str) -> float:
        """The value with which a state begins; -0.0 unless the class is known to start elsewhere.

        >>> Maker(torch.optim.NAdam, ..., lr=0.1).start_of("mu_product")
        1.0
        """
        known = self._starts.get(key, -0.0)
        return float(self.lr) if known is _LR else float(known)


_LR: Any = object()
_STARTS: Mapping[type[Optimizer], Mapping[str, Any]] = {
    torch.optim.NAdam: {"mu_product": 1.0},
    torch.optim.ASGD: {"eta": _LR, "mu": 1.0},
    torch.optim.Rprop: {"step_size": _LR},
}


def is_toy_shaped(value: torch.Tensor) -> bool:
    return tuple(value.shape) == _TOY_SHAPE


class Begun(enum.IntEnum):
    """Whether state that was read existed when it was written."""

    YES = 0
    CANNOT_BE_TOLD = 1  # it has no elements
    NO = 2


def begun(state: Mapping[str, Any], maker: Maker) -> Begun:
    """State that did not exist was written as negative zeros throughout."""
    marks = [
        leaf
        for key, value in state.items()
        if maker.is_marked(key)
        for leaf in tensors_in(value)
        if leaf.is_floating_point()
    ]
    with_elements = [mark for mark in marks if mark.numel()]
    if marks and not with_elements:
        return Begun.CANNOT_BE_TOLD
    # The first elements tell in nearly all cases, without reading everything.
    zeros = all(
        _is_negative_zero(mark.flatten()[:1]) and _is_negative_zero(mark) for mark in with_elements
    )
    return Begun.NO if with_elements and zeros else Begun.YES


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in tensors_in(item)]
    return []


def form_of(value: Any) -> Any:
    """The containers, keys and shapes of a state, without its values."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: form_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [form_of(item) for item in value]
    return None


def number_at_start(value: Any) -> Any:
    """A plain value of a state as it is before the first step."""
    return type(value)(0) if type(value) in (int, float) else value


def _is_negative_zero(values: torch.Tensor) -> bool:
    return bool(((values == 0) & torch.signbit(values)).all())
