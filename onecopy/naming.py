"""Names for parameters in a checkpoint, as torch's own checkpoint functions give them.

They come from the module, or from the names given at construction. Wrappers leave no trace: a
parameter of ``DistributedDataParallel(net)``, of a compiled module or of a checkpointed block has
the name that it has in ``net``. Without a module and without names a parameter is called by its
position, ``by_index.3``, which says so in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from onecopy.roster import Roster
from onecopy.torch_private import WRAPPED_MODULES

BY_INDEX = "by_index."


def names_of(
    roster: Roster, groups: Sequence[Mapping[str, Any]], module: torch.nn.Module | None
) -> list[str]:
    """A name for every parameter, by its number in the roster."""
    if module is not None:
        known = names_in(module)
        lost = [entry.name for entry in roster.entries if entry.param not in known]
        if lost:
            raise ValueError(
                f"{', '.join(lost[:5])}{', ...' * (len(lost) > 5)}: not in the module that was "
                "given. Pass the module whose parameters this optimizer updates"
            )
        names = [known[entry.param] for entry in roster.entries]
    else:
        given = _given_names(groups)
        names = [
            given.get(entry.param, f"{BY_INDEX}{index}")
            for index, entry in enumerate(roster.entries)
        ]
        if all(name.startswith("module.") for name in names):
            names = [name.removeprefix("module.") for name in names]  # named by a DDP wrapper
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two parameters are called {twice!r}: a checkpoint needs unique names")
    return names


def describe_names(roster: Roster, names: Sequence[str]) -> list[str]:
    """Lines for agreement: the ranks must give the same names to the same parameters."""
    return [
        f"{entry.name} is called {name}" if name else f"{entry.name} is not in the module"
        for entry, name in zip(roster.entries, names, strict=True)
    ]


def _given_names(groups: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, str]:
    found: dict[torch.Tensor, str] = {}
    for group in groups:
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False):
            parts = [part for part in name.split(".") if part not in WRAPPED_MODULES]
            found.setdefault(param, ".".join(parts))
    return found


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
