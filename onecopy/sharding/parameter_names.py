"""The names that modules give to parameters, and whether all ranks hold them in one order.

An optimizer is given parameters, not modules. So modules are searched for among all objects of the
process. Names are relative to the innermost module that holds the parameters, without wrappers:
they are equal on ranks of which only some wrap the model.
"""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm.agreement import difference
from onecopy.comm.group import RankGroup
from onecopy.planning.param_groups import ParamRegistry
from onecopy.sharding.fingerprints import fingerprint
from onecopy.torch_private import WRAPPED_MODULES, own_parameters

# A module, and the parameters of the module itself by name.
ModuleParameters = tuple[torch.nn.Module, dict[str, torch.Tensor | None]]


def names_in(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    """The parameters of a module with their names; a tied parameter has its first name."""
    found: dict[torch.Tensor, str] = {}
    for name, param in _walk(module, ""):
        found.setdefault(param, name)
    return found


def _walk(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Like ``named_parameters``, without the wrappers in the names."""
    # Why not module.named_parameters: a class may override it with other arguments.
    for name, param in torch.nn.Module.named_parameters(module, recurse=False):
        yield prefix + name, param
    is_ddp = isinstance(module, DistributedDataParallel)
    for name, child in torch.nn.Module.named_children(module):
        is_wrapper = name in WRAPPED_MODULES or (is_ddp and name == "module")
        yield from _walk(child, prefix if is_wrapper else f"{prefix}{name}.")


def all_modules() -> Iterator[ModuleParameters]:
    """All modules of the process."""
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.nn.Module):
            try:
                parameters = own_parameters(obj)
            # Why: a module that raises, perhaps because it is not built yet or has its own
            # __getattribute__, must not fail an optimizer that does not use it.
            except Exception:
                continue
            if parameters is not None:
                yield obj, parameters


# -------------------------------------------------------------------------- names


class ModuleNames(NamedTuple):
    """The names that modules give to parameters."""

    of: tuple[str, ...]  # by parameter; empty if no module names it, or two name it differently
    structure: tuple[str, ...]  # the names of all parameters of these modules


def find_names(params: Sequence[torch.Tensor], modules: Sequence[ModuleParameters]) -> ModuleNames:
    """Names for the parameters, relative to the innermost module that holds most of them.

    Why the innermost: a wrapper around the model, which may exist on one rank only, must not change
    the names. Parameters of several models get the class of theirs as a prefix.
    """
    masks, holders = _coverage(params, modules)
    found = [""] * len(params)
    structure: list[str] = []
    unnamed = (1 << len(params)) - 1
    roots: list[tuple[torch.nn.Module, list[int]]] = []
    for mask in sorted(holders, key=lambda mask: (-mask.bit_count(), mask)):
        indices = list(_set_bits(mask & unnamed))
        if not indices:
            continue
        unnamed &= ~mask
        innermost = [
            module
            for module in holders[mask]
            if not any(masks.get(id(child)) == mask for child in _children(module))
        ]
        try:
            namings = [names_in(module) for module in innermost]
        except Exception:  # a module that contains itself, or cannot be walked, names nothing
            continue
        ways = {tuple(naming.get(params[index], "") for index in indices) for naming in namings}
        if len(ways) != 1:
            continue
        roots.append((innermost[0], indices))
        for index, name in zip(indices, ways.pop(), strict=True):
            found[index] = name
        structure += sorted(namings[0].values())
    if len(roots) > 1:
        for module, indices in roots:
            for index in indices:
                found[index] = found[index] and f"{type(module).__name__}.{found[index]}"
    counts = Counter(found)
    return ModuleNames(tuple(name if counts[name] == 1 else "" for name in found), tuple(structure))


def _coverage(
    params: Sequence[torch.Tensor], modules: Sequence[ModuleParameters]
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
    for holder, parameters in modules:
        mask = 0
        for param in parameters.values():
            mask |= bits.get(id(param), 0)
        above = [holder] if mask else []
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


def _set_bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _children(module: torch.nn.Module) -> list[torch.nn.Module]:
    try:
        return [child for _, child in torch.nn.Module.named_children(module)]
    except Exception:  # as in all_modules
        return []


# -------------------------------------------------------------------------- order

_SAME_ORDER = (
    "These are different parameters, in one position. Pass the parameters in the same order on all "
    "ranks; named_parameters() instead of parameters() lets the ranks compare names."
)


def require_same_order(
    rank_group: RankGroup, doing: str, registry: ParamRegistry, found: ModuleNames, first: int
) -> None:
    """Raise on all ranks if one of them holds the parameters from ``first`` on in another order.
    Collective, after the ranks have agreed on shapes and on names that were given.

    Names that modules give are compared. Where there are none, or the modules differ, values are
    compared: that ranks have different values is no mistake, since DDP may still broadcast them;
    that one rank has the values of another in another order is.
    """
    if rank_group.world_size == 1:
        return
    entries, names = registry.entries[first:], found.of[first:]

    def refusal(lines: Sequence[str]) -> Exception:
        return difference(rank_group, [f"{doing}{rank_group.whose}", *lines], _SAME_ORDER)

    mine = [_digest(names), _digest(sorted(names)), _digest(found.structure)]
    ordered, unordered, structures = _gather(rank_group, mine)
    unnamed = [entry for entry, name in zip(entries, names, strict=True) if not name]
    if len(set(ordered)) > 1:
        is_same_model = len(set(structures)) == 1 and not any(
            map(any, rank_group.all_gather_bytes(bytes([bool(unnamed)])))
        )
        if is_same_model or _is_permuted(ordered, unordered):
            raise refusal(
                [
                    f"{entry.name} is {name or 'not in a module'}"
                    for entry, name in zip(entries, names, strict=True)
                ]
            )
        unnamed = list(entries)
    if unnamed:
        values = [_value(entry.param) for entry in unnamed]
        if _is_permuted(*_gather(rank_group, [_digest(values), _digest(sorted(values))])):
            raise refusal(
                [
                    f"{entry.name} has the values {value}"
                    for entry, value in zip(unnamed, values, strict=True)
                ]
            )


def _is_permuted(ordered: Sequence[bytes], unordered: Sequence[bytes]) -> bool:
    """Whether two ranks have the same in another order."""
    return len(set(zip(ordered, unordered, strict=True))) > len(set(unordered))


def _value(param: torch.Tensor) -> str:
    """The beginning of a parameter, and a fingerprint of all of it."""
    memory = param.detach()
    try:
        first = memory[(0,) * memory.dim()].item()
        return f"[{first:.4g}, ...], fingerprint {int(fingerprint(memory)) % (1 << 64):016x}"
    except Exception:  # it has no elements, or none that can be read, on all ranks alike
        return "[]"


def _digest(lines: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode(errors="backslashreplace")).digest()


def _gather(rank_group: RankGroup, digests: Sequence[bytes]) -> list[list[bytes]]:
    """Each of these digests, of all ranks."""
    everyone = rank_group.all_gather_bytes(b"".join(digests))
    return [[of[32 * i : 32 * (i + 1)] for of in everyone] for i in range(len(digests))]
