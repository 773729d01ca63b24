"""Random delays around every collective and every hook of the package, from outside.

While a `Delays` is entered, every method of the classes in the modules below may sleep before and
after it runs: those that launch and await collectives, those that autograd, DDP and modules call as
hooks, those that share memory between ranks. When and how long is decided by a seed, on each rank
otherwise. Threads change places a thousand times as often as usual.

Enter it before the optimizer is built: hooks are bound when they are registered.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import onecopy

# Modules with classes that launch and await collectives, that are called as hooks, and that share
# memory between ranks.
COLLECTIVES = ("company", "exchange", "flights", "gatherer", "lanes", "pending", "reducer")
COLLECTIVES += ("roadway", "transfers", "transport", "verdict")
HOOKS = ("attachment", "feeds", "lazy", "optimizer")
SHARED_MEMORY = ("lending", "neighbours", "semaphores")


def classes_of(module: str) -> list[type]:
    """All that the module defines."""
    name = f"{onecopy.__name__}.{module}"
    members = vars(importlib.import_module(name)).values()
    return [each for each in members if inspect.isclass(each) and each.__module__ == name]


DELAYED = [cls for module in (*COLLECTIVES, *HOOKS, *SHARED_MEMORY) for cls in classes_of(module)]
LONGEST = 0.003  # seconds: many times what a collective of the small models takes
OFTEN = 0.08  # of the calls
QUICK_SWITCHES = 5e-6  # seconds


class Delays(contextlib.ExitStack):
    """Sleeps, seeded, in this process."""

    def __init__(self, seed: int, rank: int, longest: float = LONGEST) -> None:
        super().__init__()
        self._random = random.Random(f"{seed} {rank}")
        self._longest = longest
        self.count = 0  # of sleeps

    def __enter__(self) -> Delays:
        super().__enter__()
        for cls in DELAYED:
            for name, member in list(vars(cls).items()):
                late = None if name.startswith("__") else self._late_member(member)
                if late is not None:
                    self.enter_context(mock.patch.object(cls, name, late))
        self.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(QUICK_SWITCHES)
        return self

    def sleep(self, *_: Any) -> None:
        """Perhaps. May be a hook itself."""
        if self._random.random() < OFTEN:
            self.count += 1
            time.sleep(self._random.random() * self._longest)

    def _late_member(self, member: Any) -> Any:
        """A method with delays; nothing instead of what is none."""
        if isinstance(member, classmethod):
            return classmethod(self._late(member.__func__))
        if not inspect.isfunction(member):
            return None
        is_manager = inspect.isgeneratorfunction(inspect.unwrap(member))
        return self._late_manager(member) if is_manager else self._late(member)

    def _late_manager(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def late(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self.sleep()
            with function(*args, **kwargs) as value:
                self.sleep()
                yield value
                self.sleep()
            self.sleep()

        return late

    def _late(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # DDP looks at the annotations of its hook
        def late(*args: Any, **kwargs: Any) -> Any:
            self.sleep()
            try:
                return function(*args, **kwargs)
            finally:
                self.sleep()

        return late
