"""Things that users do to parameters behind an optimizer's back.

``module.to()`` and ``param.data = ...`` give a parameter other memory; ``load_state_dict(...,
assign=True)`` replaces the Parameter objects themselves, and the optimizer is left with the old
ones. The first is followed or refused, the second is refused: an update is never lost silently.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from onecopy.roster import Entry


class MemoryWatch:
    """Remembers where parameters were and what they looked like."""

    def __init__(self) -> None:
        self._params: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._forms: list[tuple[Entry, str]] = []

    def remember(self, entries: Sequence[Entry]) -> None:
        self._params = [entry.param for entry in entries]
        self._addresses = [param.data_ptr() for param in self._params]
        self._forms = [(entry, _form(entry.param)) for entry in entries]

    def has_moved(self) -> bool:
        return [param.data_ptr() for param in self._params] != self._addresses

    def require_same_form(self) -> None:
        """Raise if anything but the address of a parameter has changed."""
        for entry, form in self._forms:
            if _form(entry.param) != form:
                raise RuntimeError(
                    f"{entry.name} has changed since the optimizer was built, from {form} to "
                    f"{_form(entry.param)}, but its state is laid out for the former. Convert or "
                    "move the model before you build the optimizer"
                )


def _form(param: torch.Tensor) -> str:
    return f"{param.dtype}, shape {tuple(param.shape)}, stride {param.stride()}, {param.device}"


class LifeWatch:
    """Knows whether the parameters belonged to modules, and finds out when they no longer do."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        ours = {id(param) for param in params}
        self._were_in_modules = any(id(param) in ours for param in _parameters_of_all_modules())

    def require_live(self, params: Sequence[torch.Tensor]) -> None:
        """Raise if no module holds any of our parameters, but one holds twins with gradients.

        Called when no parameter has a gradient. That is legal, and rare; only then is it worth
        looking through all modules for the sign of ``load_state_dict(..., assign=True)``.
        """
        if not self._were_in_modules:
            return
        ours = {id(param) for param in params}
        shapes = Counter(tuple(p.shape) for p in params if isinstance(p, torch.nn.Parameter))
        twins: Counter[tuple[int, ...]] = Counter()
        for param in _parameters_of_all_modules():
            if id(param) in ours:
                return
            if param.grad is not None:
                twins[tuple(param.shape)] += 1
        if twins >= shapes:
            raise RuntimeError(
                "none of this optimizer's parameters has a gradient or belongs to a module any "
                "more, but a module with parameters of the same shapes does have gradients. Were "
                "they replaced, by load_state_dict(..., assign=True) for example? Build the "
                "optimizer after that"
            )


def _parameters_of_all_modules() -> Iterator[torch.Tensor]:
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.nn.Module):
            for param in obj.__dict__.get("_parameters", {}).values():
                if param is not None:
                    yield param
