"""What is trained and how, before any of it exists: the input of an estimate or of a plan.

The parameters of a model, or shapes, become parameters on the meta device. Groups, policies,
registry and plan are made of them as of real ones, by the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from onecopy.planning.layout import is_dense
from onecopy.planning.param_groups import (
    ParamRegistry,
    PartitionPolicy,
    Settings,
    empty_plan,
    is_trainable,
    take_groups,
    update_dtype,
)
from onecopy.planning.plan import Plan
from onecopy.planning.traits import Kind, StateBytes, StateTemplate


class Described(NamedTuple):
    """A parameter of a model spec."""

    name: str
    tensor: torch.Tensor  # on the meta device
    group: int


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """Parameters without memory, in groups, with the classes that update them."""

    registry: ParamRegistry
    templates: tuple[StateTemplate, ...]  # by group
    params: tuple[Described, ...]  # by index in the plan
    master_dtype: torch.dtype | None
    on_cpu: bool  # or on the meta device, or shapes: not on an accelerator
    _computed: dict[Any, Any] = field(default_factory=dict)

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
        settings = Settings(partition, master_dtype=master_dtype)
        settings.validate({})
        defaults = dict(defaults or {})
        stand_ins: dict[torch.Tensor, torch.Tensor] = {}
        groups = [
            _without_memory(g, dtype, stand_ins) for g in _groups_of(model, optimizer_class, dtype)
        ]
        on_cpu = all(param.device.type in ("cpu", "meta") for param in stand_ins)
        policies = PartitionPolicy(optimizer_class, settings, defaults)
        registry, templates = ParamRegistry(), []
        params: list[Described] = []
        for number, group in enumerate(groups):
            policy = policies.of(group, defaults)
            of_class = defaults if policy.optimizer_class is optimizer_class else {}
            templates.append(StateTemplate.of(policy.optimizer_class, group, of_class))
            registry = registry.with_group(group, policy)
            names = dict(zip(group["params"], group["param_names"], strict=True))
            new = (entry.param for entry in registry.entries[len(params) :])
            params += [Described(names[param], param, number) for param in new]
        return cls(registry, tuple(templates), tuple(params), master_dtype, on_cpu)

    def plan(self, world_size: int, bucket_mb: float | None = None) -> Plan:
        """The plan that the optimizer makes on so many ranks."""
        nothing = empty_plan([{"params": self.registry.params}], world_size, bucket_mb)
        return self.registry.extend(nothing, self.registry.to_plan(nothing))

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The parameters that are not frozen."""
        return tuple(i for i, param in enumerate(self.params) if is_trainable(param.tensor))

    @cached_property
    def classes(self) -> tuple[type[Optimizer], ...]:
        return tuple(dict.fromkeys(policy.optimizer_class for policy in self.registry.policies))

    def state_bytes(self, param: int, with_master: bool = True) -> StateBytes:
        """Of a parameter that may be cut."""
        dtype, group = self._update_dtype(param, with_master), self.params[param].group
        if (group, dtype) not in self._computed:
            self._computed[group, dtype] = self.templates[group].bytes_of_shards(dtype)
        found: StateBytes = self._computed[group, dtype]
        return found

    def state_of(self, param: int, with_master: bool = True) -> Mapping[str, int]:
        """The bytes of the state of a whole parameter, by key."""
        _, tensor, group = self.params[param]
        if self.registry.policies[group].kind is Kind.ELEMENTWISE and is_dense(tensor):
            return self.state_bytes(param, with_master).of(tensor.numel(), 1)
        key = group, self._update_dtype(param, with_master), tensor.shape
        if key not in self._computed:
            self._computed[key] = self.templates[group].bytes_of_tensor(tensor.shape, key[1])
        found: Mapping[str, int] = self._computed[key]
        return found

    def master_bytes(self, param: int) -> int:
        """Bytes of one element in the parameter's master copy, or 0 if it has none."""
        dtype = self._update_dtype(param, with_master=True)
        return 0 if dtype == self.params[param].tensor.dtype else dtype.itemsize

    def _update_dtype(self, param: int, with_master: bool) -> torch.dtype:
        master = self.master_dtype if with_master else None
        return update_dtype(self.params[param].tensor.dtype, master)


def _groups_of(model: Any, optimizer_class: Any, dtype: torch.dtype | None) -> list[dict[str, Any]]:
    if isinstance(model, torch.nn.Module):
        model = list(model.named_parameters())
        if not model:
            raise ValueError("the model has no parameters")
    elif isinstance(model, Mapping):
        model = [(str(name), _of_shape(shape, dtype)) for name, shape in model.items()]
    elif isinstance(model, Sequence) and model and all(map(_is_shape, model)):
        model = [_of_shape(shape, dtype) for shape in model]
    groups, refusal = take_groups(model, optimizer_class)
    if refusal is not None:
        raise refusal
    return groups


def _is_shape(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(size, int) for size in value)


def _of_shape(shape: Any, dtype: torch.dtype | None) -> torch.nn.Parameter:
    if not _is_shape(shape) or any(size < 0 for size in shape):
        raise ValueError(f"expected the shape of a parameter, such as (768, 3072), got {shape!r}")
    dtype = dtype or torch.get_default_dtype()
    return torch.nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))


def _without_memory(
    group: Mapping[str, Any],
    dtype: torch.dtype | None,
    stand_ins: dict[torch.Tensor, torch.Tensor],
) -> dict[str, Any]:
    """The group with a stand-in and a name for each parameter; one that is listed twice has one
    stand-in."""
    names, params = [], []
    given = group.get("param_names")
    for number, entry in enumerate(group["params"]):
        name, param = entry if isinstance(entry, tuple) else ("", entry)
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"expected parameters, got {type(param).__name__}: {param!r}")
        names.append(str(name or (given[number] if given else f"parameter {number}")))
        if param not in stand_ins:
            stand_ins[param] = _on_meta(param, dtype)
        params.append(stand_ins[param])
    return {**group, "params": params, "param_names": names}


def _on_meta(param: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    target = dtype if dtype is not None and param.is_floating_point() else param.dtype
    if param.is_meta and param.dtype == target:
        return param
    # Why strides: a tensor with gaps in its memory is not cut.
    empty = torch.empty_strided(param.shape, param.stride(), dtype=target, device="meta")
    if not isinstance(param, torch.nn.Parameter):
        return empty
    return torch.nn.Parameter(empty, requires_grad=param.requires_grad)
