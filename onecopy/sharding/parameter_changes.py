"""Finds parameters that the user has replaced in their module, or moved in memory.

Both are looked for in every step, and models have thousands of parameters. So what is remembered
stands in columns, which are compared without a Python loop.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from onecopy.planning.layout import one_of_each
from onecopy.planning.param_groups import Entry
from onecopy.sharding.parameter_names import all_modules, find_names, names_in
from onecopy.torch_private import is_unfinished

_address: Callable[[torch.Tensor], int] = operator.methodcaller("data_ptr")
_stride: Callable[[torch.Tensor], tuple[int, ...]] = operator.methodcaller("stride")
_shape: Callable[[torch.Tensor], torch.Size] = operator.attrgetter("shape")


class MemoryWatch:
    """Remembers the memory and the form of parameters."""

    def __init__(self) -> None:
        self.remember(())

    def remember(self, entries: Sequence[Entry]) -> None:
        self._params = [entry.param for entry in entries]
        self._addresses = list(map(_address, self._params))
        self._shapes = one_of_each(map(_shape, self._params))
        self._strides = one_of_each(map(_stride, self._params))
        self._forms = list(zip(entries, one_of_each(map(_form, self._params)), strict=True))

    def has_moved(self) -> bool:
        """Whether a parameter has other memory, or views the same memory in another way."""
        return (
            list(map(_address, self._params)) != self._addresses
            or list(map(_shape, self._params)) != self._shapes
            or list(map(_stride, self._params)) != self._strides
        )

    def require_same_form(self) -> None:
        """Raise if anything but the address of a parameter has changed, such as its dtype."""
        for entry, form in self._forms:
            if _form(entry.param) != form:
                raise RuntimeError(
                    f"{entry.name} has changed since the optimizer was built, from {form} to "
                    f"{_form(entry.param)}, but its state is laid out for the former. Convert or "
                    "move the model before you build the optimizer"
                )


def _form(param: torch.Tensor) -> str:
    return f"{param.dtype}, shape {tuple(param.shape)}, stride {param.stride()}, {param.device}"


class ModulePlace(NamedTuple):
    """A place in a module where a parameter was found."""

    module: weakref.ref[torch.nn.Module]
    parameters: dict[str, torch.Tensor | None]  # those of the module itself
    name: str
    entry: Entry


class ModuleWatch:
    """Remembers which modules hold the parameters, and finds those that were replaced there.

    All objects are searched for the modules once, when parameters are added; steps look only at the
    places that were found.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        ours = {id(entry.param): entry for entry in entries}
        self._dead: list[Any] = []  # references to modules that have died
        modules = list(all_modules()) if ours else []
        self.names = find_names([entry.param for entry in entries], modules)
        self._remember(
            ModulePlace(weakref.ref(module, self._dead.append), parameters, name, ours[id(param)])
            for module, parameters in modules
            for name, param in parameters.items()
            if id(param) in ours
        )
        self._ddps = [
            weakref.ref(module)
            for module, _ in modules
            if isinstance(module, DistributedDataParallel)
            and any(id(param) in ours for param in _parameters_of(module))
        ]

    def _remember(self, places: Iterable[ModulePlace]) -> None:
        self._places = list(places)
        # The same in columns, to compare them without a Python loop in every step.
        self._parameters = [place.parameters for place in self._places]
        self._names = [place.name for place in self._places]
        self._params = [place.entry.param for place in self._places]

    def require_in_place(self) -> None:
        """Raise if another parameter has taken the place of one.

        A parameter that was deleted, or whose module is gone, is left alone.
        """
        if self._dead:
            self._dead.clear()
            self._remember(place for place in self._places if place.module() is not None)
        found = map(dict.get, self._parameters, self._names)
        if all(map(operator.is_, found, self._params)):
            return
        now: dict[Entry, list[torch.Tensor | None]] = {}
        for place in self._places:
            now.setdefault(place.entry, []).append(place.parameters.get(place.name))
        for entry, params in now.items():
            if all(param is not None and param is not entry.param for param in params):
                raise RuntimeError(
                    f"{entry.name} is no longer the one that its module uses: another Parameter "
                    "has taken its place, and this optimizer would go on updating the old one. Was "
                    "it load_state_dict(..., assign=True)? Build the optimizer after that"
                )

    def require_finished_backward(self) -> None:
        """Raise if DDP waits for the end of a backward that has raised."""
        if any(is_unfinished(ddp) for ddp in self._live_ddps()):
            raise RuntimeError(
                "the last backward under DDP has not come to its end, and a part of the gradients "
                "is not averaged: it raised, or parameters were not used. Call zero_grad(), wrap "
                "the module again, DistributedDataParallel(model), on all ranks, and compute the "
                "gradients again"
            )

    def forgive_backward(self) -> None:
        """The gradients were dropped: DDP modules that can never go on are no longer watched."""
        self._ddps = [weakref.ref(ddp) for ddp in self._live_ddps() if not is_unfinished(ddp)]

    def _live_ddps(self) -> list[DistributedDataParallel]:
        return [ddp for ddp in (ref() for ref in self._ddps) if ddp is not None]


def _parameters_of(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    try:
        return names_in(module)
    except Exception:  # as in all_modules
        return ()
