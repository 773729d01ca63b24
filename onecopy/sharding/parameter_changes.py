"""Notices parameters that were replaced in their module, or moved in memory, by the user."""

from __future__ import annotations

import gc
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from onecopy.planning.layout import one_of_each
from onecopy.planning.param_groups import Entry
from onecopy.torch_private import WRAPPED_MODULES, is_unfinished, own_parameters


def names_in(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    """The parameters of a module with their names."""
    found: dict[torch.Tensor, str] = {}
    for name, param in _walk(module, ""):
        found.setdefault(param, name)  # a tied weight has its first name
    return found


def children_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The children of a module with their names, whatever its class has overridden."""
    return torch.nn.Module.named_children(module)


def _walk(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Like ``named_parameters``, without the wrappers in the names."""
    # Why not module.named_parameters: a class may override it with other arguments.
    for name, param in torch.nn.Module.named_parameters(module, recurse=False):
        yield prefix + name, param
    is_ddp = isinstance(module, torch.nn.parallel.DistributedDataParallel)
    for name, child in children_of(module):
        is_wrapper = name in WRAPPED_MODULES or (is_ddp and name == "module")
        yield from _walk(child, prefix if is_wrapper else f"{prefix}{name}.")


_address: Callable[[torch.Tensor], int] = operator.methodcaller("data_ptr")
_stride: Callable[[torch.Tensor], tuple[int, ...]] = operator.methodcaller("stride")
_shape: Callable[[torch.Tensor], torch.Size] = operator.attrgetter("shape")


class MemoryWatch:
    """Remembers where parameters were and what they looked like."""

    def __init__(self) -> None:
        self._params: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._shapes: list[torch.Size] = []
        self._strides: list[tuple[int, ...]] = []
        self._forms: list[tuple[Entry, str]] = []

    def remember(self, entries: Sequence[Entry]) -> None:
        self._params = [entry.param for entry in entries]
        self._addresses = list(map(_address, self._params))
        self._shapes = one_of_each(map(_shape, self._params))
        self._strides = one_of_each(map(_stride, self._params))
        forms = one_of_each(map(_form, self._params))
        self._forms = list(zip(entries, forms, strict=True))

    def has_moved(self) -> bool:
        """Whether a parameter has other memory, or sees the same memory in another way."""
        return (
            list(map(_address, self._params)) != self._addresses
            or list(map(_shape, self._params)) != self._shapes
            or list(map(_stride, self._params)) != self._strides
        )

    def require_same_form(self) -> None:
        """Raise if anything but the address of a parameter has changed, as its dtype."""
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

    A parameter does not know its modules, and an optimizer is not given them; so they are looked
    for among all objects, once, when parameters come in. The steps after that only look there.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        ours = {id(entry.param): entry for entry in entries}
        self._gone: list[Any] = []  # references to modules that have died
        modules = list(_all_modules()) if ours else []
        self.names = find_names([entry.param for entry in entries], modules)
        self._arrange(
            ModulePlace(weakref.ref(module, self._gone.append), parameters, name, ours[id(param)])
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

    def _arrange(self, homes: Iterable[ModulePlace]) -> None:
        self._homes = list(homes)
        # The same in columns, which can be compared without a Python loop in every step.
        self._places = [home.parameters for home in self._homes]
        self._names = [home.name for home in self._homes]
        self._params = [home.entry.param for home in self._homes]

    def require_in_place(self) -> None:
        """Raise if a parameter's place is taken by another one.

        A parameter that was deleted, or whose module is gone, is none of our business.
        """
        if self._gone:
            self._gone.clear()
            self._arrange(home for home in self._homes if home.module() is not None)
        found = map(dict.get, self._places, self._names)
        if not all(map(operator.is_, found, self._params)):
            for home in self._homes:
                if home.parameters.get(home.name) is not home.entry.param:
                    self._require_not_replaced(home.entry)

    def require_finished_backward(self) -> None:
        """Raise if DDP waits for the end of a backward that has raised."""
        if any(is_unfinished(ddp) for ddp in self._alive()):
            raise RuntimeError(
                "the last backward under DDP has not come to its end, and a part of the gradients "
                "is not averaged: it raised, or parameters were not used. Call zero_grad(), wrap "
                "the module again, DistributedDataParallel(model), on all ranks, and compute the "
                "gradients again"
            )

    def forgive_backward(self) -> None:
        """The gradients were dropped: a DDP module that can never go on is no longer watched."""
        self._ddps = [weakref.ref(ddp) for ddp in self._alive() if not is_unfinished(ddp)]

    def _alive(self) -> list[DistributedDataParallel]:
        return [ddp for ddp in (ref() for ref in self._ddps) if ddp is not None]

    def _require_not_replaced(self, entry: Entry) -> None:
        homes = [home for home in self._homes if home.entry is entry]
        now = [home.parameters.get(home.name) for home in homes]
        if all(param is not None and param is not entry.param for param in now):
            raise RuntimeError(
                f"{entry.name} is no longer the one that its module uses: another Parameter has "
                "taken its place, and this optimizer would go on updating the old one. Was it "
                "load_state_dict(..., assign=True)? Build the optimizer after that"
            )


class ModuleNames(NamedTuple):
    """The names that modules give to parameters."""

    of: tuple[str, ...]  # by parameter; empty if no module names it, or two name it differently
    structure: tuple[str, ...]  # the names of all parameters of these modules


def find_names(
    params: Sequence[torch.Tensor],
    modules: Sequence[tuple[torch.nn.Module, dict[str, torch.Tensor | None]]],
) -> ModuleNames:
    """Names for the parameters, relative to the innermost module that holds most of them.

    Why the innermost: a wrapper around the model, which may exist on one rank only, must not change
    the names. Parameters of several models get the class of theirs as a prefix.
    """
    masks, holders = _coverage(params, modules)
    found = [""] * len(params)
    structure: list[str] = []
    left = (1 << len(params)) - 1
    roots: list[tuple[torch.nn.Module, list[int]]] = []
    for mask in sorted(holders, key=lambda mask: (-mask.bit_count(), mask)):
        if not left:
            break
        new = mask & left
        if not new:
            continue
        inner = [module for module in holders[mask] if not _has_child_with(mask, module, masks)]
        indices = list(_set_bits(new))
        left &= ~mask
        try:
            namings = [names_in(module) for module in inner]
        except Exception:  # a module that contains itself, or cannot be walked, names nothing
            continue
        ways = {tuple(naming.get(params[index], "") for index in indices) for naming in namings}
        if len(ways) != 1:
            continue
        (names,) = ways
        roots.append((inner[0], indices))
        for index, name in zip(indices, names, strict=True):
            found[index] = name
        structure += sorted(namings[0].values())
    if len(roots) > 1:
        for module, indices in roots:
            for index in indices:
                found[index] = found[index] and f"{type(module).__name__}.{found[index]}"
    counts = Counter(found)
    return ModuleNames(tuple(name if counts[name] == 1 else "" for name in found), tuple(structure))


def _coverage(
    params: Sequence[torch.Tensor],
    modules: Sequence[tuple[torch.nn.Module, dict[str, torch.Tensor | None]]],
) -> tuple[dict[int, int], dict[int, list[torch.nn.Module]]]:
    """Which of the parameters each module holds, itself or in its children: a bit mask, by the id
    of the module; and the modules by mask."""
    bits = {id(param): 1 << index for index, param in enumerate(params)}
    parents: dict[int, list[torch.nn.Module]] = {}
    for module, _ in modules:
        for child in _children(module):
            parents.setdefault(id(child), []).append(module)
    masks: dict[int, int] = {}
    by_id: dict[int, torch.nn.Module] = {}
    for home, parameters in modules:
        mask = 0
        for param in parameters.values():
            mask |= bits.get(id(param), 0)
        above = [home] if mask else []
        while above:
            module = above.pop()
            before = masks.get(id(module), 0)
            if before | mask != before:
                masks[id(module)] = before | mask
                by_id[id(module)] = module
                above += parents.get(id(module), ())
    holders: dict[int, list[torch.nn.Module]] = {}
    for key, mask in masks.items():
        holders.setdefault(mask, []).append(by_id[key])
    return masks, holders


def _has_child_with(mask: int, module: torch.nn.Module, masks: dict[int, int]) -> bool:
    return any(masks.get(id(child)) == mask for child in _children(module))


def _set_bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _children(module: torch.nn.Module) -> list[torch.nn.Module]:
    try:
        return [child for _, child in children_of(module)]
    # Why: all modules of the process are asked. One that raises, perhaps because it is not built
    # yet or has its own __getattribute__, must not fail an optimizer that does not use it.
    except Exception:
        return []


def _parameters_of(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    try:
        return names_in(module)
    except Exception:  # as above
        return ()


def _all_modules() -> Iterator[tuple[torch.nn.Module, dict[str, torch.Tensor | None]]]:
    """All modules that are alive, with the parameters of each itself."""
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.nn.Module):
            try:
                parameters = own_parameters(obj)
            except Exception:  # as above
                continue
            if parameters is not None:
                yield obj, parameters
