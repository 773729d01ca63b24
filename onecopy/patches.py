"""Methods of a user's module that do something of ours besides.

They are put in place for one module and not for its class, hold on to nothing of it, and are not
copied: a copy of the module, or what is read back of it, has the methods of its class.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel


class Patch:
    """A method of one module, instead of that of its class."""

    name: str  # of the method

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        module.__dict__[self.name] = self

    @classmethod
    def is_on(cls, module: torch.nn.Module) -> bool:
        return isinstance(module.__dict__.get(cls.name), cls)

    def remove(self) -> None:
        module = self._module()
        if module is not None and module.__dict__.get(self.name) is self:
            del module.__dict__[self.name]

    def _of_class(self, module: Any) -> Callable[..., Any]:
        return functools.partial(getattr(type(module), self.name), module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._of_class(copy.deepcopy(self._module(), memo))

    def __reduce__(self) -> Any:
        module = self._module()
        return functools.partial, (getattr(type(module), self.name), module)


class ZeroGrad(Patch):
    """``module.zero_grad`` that reaches the optimizer's share of the gradients too."""

    name = "zero_grad"

    def __init__(self, module: torch.nn.Module, drop: Callable[[], None]) -> None:
        super().__init__(module)
        self._drop = weakref.WeakMethod(drop)

    def __call__(self, set_to_none: bool = True) -> None:
        module, drop = self._module(), self._drop()
        if module is not None:
            self._of_class(module)(set_to_none)
        if drop is not None:
            drop()


class AfterJoinHook(Patch):
    """``join_hook`` of a DDP module, for ``Join``: what DDP does on a rank that has run out of
    inputs, and then something of ours, before the next of those that take part has its turn."""

    name = "join_hook"

    def __init__(self, ddp: DistributedDataParallel, then: Callable[[], None]) -> None:
        super().__init__(ddp)
        self._then = then

    def __call__(self, **kwargs: Any) -> JoinHook:
        ddp = self._module()  # it is asked for its hook, so it exists
        return _Followed(self._of_class(ddp)(**kwargs), self._then)


@dataclass(frozen=True, slots=True)
class _Followed(JoinHook):
    hook: JoinHook
    then: Callable[[], None]

    def main_hook(self) -> None:
        self.hook.main_hook()
        self.then()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.hook.post_hook(is_last_joiner)
