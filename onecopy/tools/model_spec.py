"""What is to be trained and how, before any of it exists: the input of an estimate or of a plan.

A model, or mere shapes, become parameters without memory (on the meta device). From there on they
take the way of real ones: the same groups, policies, roster and planner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.planning.layout import is_dense
from onecopy.planning.param_groups import (
    ParamRegistry,
    PartitionPolicy,
    Settings,
    as_groups,
    check_class,
    check_tensors,
    empty_plan,
    is_trainable,
    require_parameters,
    update_dtype,
)
from onecopy.planning.plan import Plan
from onecopy.planning.traits import Kind, StateBytes, StateTemplate


@dataclass(frozen=True, slots=True)
class Described:
    """A parameter as an estimate knows it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """Parameters without memory, in groups, with the classes that update them."""

    registry: ParamRegistry
    makers: tuple[StateTemplate, ...]  # by group
    params: tuple[Described, ...]  # by number in the plan
    master_dtype: torch.dtype | None
    on_cpu: bool = True  # or on the meta device, or mere shapes: not on an accelerator

    @classmethod
    def of(
        cls,
        model: Any,
        optimizer_class: type[Optimizer],
        *,
        dtype: torch.dtype | None = None,
        partition: str = "auto",
        master_dtype: torch.dtype | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> ModelSpec:
        """``model``: a module, shapes, names with shapes, or what an optimizer accepts."""
        check_class(optimizer_class)
        settings = Settings(partition, master_dtype=master_dtype)
        settings.validate({})
        defaults = dict(defaults or {})
        shadows: dict[torch.Tensor, torch.Tensor] = {}
        groups = [_without_memory(g, dtype, shadows) for g in _groups_of(model, dtype)]
        on_cpu = all(param.device.type in ("cpu", "meta") for param in shadows)
        policies = PartitionPolicy(optimizer_class, settings, defaults)
        registry, makers = ParamRegistry(), []
        names: list[str] = []
        for group in groups:
            policy = policies.of(group, defaults)
            of_class = defaults if policy.optimizer_class is optimizer_class else {}
            makers.append(StateTemplate.of(policy.optimizer_class, group, of_class))
            before = len(registry.entries)
            registry = registry.with_group(group, policy)
            known = dict(zip(group["params"], group["param_names"], strict=True))
            names += [known[entry.param] for entry in registry.entries[before:]]
        params = tuple(
            Described(name, tuple(e.param.shape), e.param.dtype, e.group)
            for name, e in zip(names, registry.entries, strict=True)
        )
        return cls(registry, tuple(makers), params, master_dtype, on_cpu)

    def plan(self, world_size: int, bucket_mb: float | None = None) -> Plan:
        """The plan that the optimizer would make for so many ranks."""
        nothing = empty_plan([{"params": self.registry.params}], world_size, bucket_mb)
        return self.registry.extend(nothing, self.registry.to_plan(nothing))

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The parameters that are not frozen."""
        return tuple(i for i, p in enumerate(self.registry.params) if is_trainable(p))

    @cached_property
    def classes(self) -> tuple[type[Optimizer], ...]:
        return tuple(dict.fromkeys(policy.optimizer_class for policy in self.registry.policies))

    def tensor(self, param: int) -> torch.Tensor:
        """The stand-in on the meta device."""
        return self.registry.params[param]

    def is_cuttable(self, param: int) -> bool:
        """Whether its state can be told by the element."""
        policy = self.registry.policies[self.params[param].group]
        return policy.kind is Kind.ELEMENTWISE and is_dense(self.tensor(param))

    def recipe(self, param: int, with_master: bool = True) -> StateBytes:
        """The state of a parameter that may be cut."""
        described = self.params[param]
        dtype = self._updated_in(param, with_master)
        return self._recipes(described.group, dtype)

    def state_of(self, param: int, with_master: bool = True) -> Mapping[str, int]:
        """The bytes of the state of all of a parameter, by key."""
        described = self.params[param]
        if self.is_cuttable(param):
            return self.recipe(param, with_master).of(described.numel, 1)
        return self._whole(described.group, described.shape, self._updated_in(param, with_master))

    def master_bytes(self, param: int) -> int:
        """Bytes of one element in the parameter's master copy, or 0 if it has none."""
        dtype = self._updated_in(param, with_master=True)
        return 0 if dtype == self.params[param].dtype else dtype.itemsize

    def _updated_in(self, param: int, with_master: bool) -> torch.dtype:
        return update_dtype(self.params[param].dtype, self.master_dtype if with_master else None)

    @cached_property
    def _known(self) -> dict[Any, Any]:
        return {}

    def _recipes(self, group: int, dtype: torch.dtype) -> StateBytes:
        if (group, dtype) not in self._known:
            self._known[group, dtype] = self.makers[group].bytes_of_shards(dtype)
        found: StateBytes = self._known[group, dtype]
        return found

    def _whole(self, group: int, shape: Sequence[int], dtype: torch.dtype) -> Mapping[str, int]:
        key = (group, shape, dtype)
        if key not in self._known:
            self._known[key] = self.makers[group].bytes_of_tensor(shape, dtype)
        found: Mapping[str, int] = self._known[key]
        return found


def _groups_of(model: Any, dtype: torch.dtype | None) -> list[dict[str, Any]]:
    if isinstance(model, torch.nn.Module):
        model = list(model.named_parameters())
        if not model:
            raise ValueError("the model has no parameters")
    elif isinstance(model, Mapping):
        model = [(str(name), _stand_in(shape, dtype)) for name, shape in model.items()]
    elif isinstance(model, Sequence) and model and all(map(_is_shape, model)):
        model = [_stand_in(shape, dtype) for shape in model]
    groups = as_groups(model)
    require_parameters(groups)
    check_tensors(groups)
    return groups


def _is_shape(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(size, int) for size in value)


def _stand_in(shape: Any, dtype: torch.dtype | None) -> torch.nn.Parameter:
    if not _is_shape(shape) or any(size < 0 for size in shape):
        raise ValueError(f"expected the shape of a parameter, such as (768, 3072), got {shape!r}")
    dtype = dtype or torch.get_default_dtype()
    return torch.nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))


def _without_memory(
    group: Mapping[str, Any],
    dtype: torch.dtype | None,
    shadows: dict[torch.Tensor, torch.Tensor],
) -> dict[str, Any]:
    """A group of stand-ins with names; the same one for a parameter that is listed twice."""
    names, params = [], []
    given = group.get("param_names")
    for number, entry in enumerate(group["params"]):
        name, param = entry if isinstance(entry, tuple) else ("", entry)
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"expected parameters, got {type(param).__name__}: {param!r}")
        names.append(str(name or (given[number] if given else f"parameter {number}")))
        if param not in shadows:
            shadows[param] = _shadow(param, dtype)
        params.append(shadows[param])
    return {**group, "params": params, "param_names": names}


def _shadow(param: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    takes = dtype is not None and param.is_floating_point()
    target = dtype if takes else param.dtype
    if param.is_meta and param.dtype == target:
        return param
    # Strides too: a tensor with gaps in its memory is planned unlike others.
    empty = torch.empty_strided(param.shape, param.stride(), dtype=target, device="meta")
    if not isinstance(param, torch.nn.Parameter):
        return empty
    return torch.nn.Parameter(empty, requires_grad=param.requires_grad)
