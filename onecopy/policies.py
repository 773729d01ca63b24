"""How the groups of an optimizer are sharded, and what happens when their options change.

Which class a group has, and whether that class needs whole tensors, follows from its options. They
may change: a state dict is loaded, or a switch is flipped by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.intake import NOT_OPTIONS, GroupPolicy, constructor_options, flags_of, policy_of

Groups = Sequence[Mapping[str, Any]]
_FIXED = ("optimizer_class", "partition")  # decided when the group comes in


@dataclass(slots=True)
class Policies:
    """Decides with what the constructor was given."""

    default_class: type[Optimizer]
    partition: str
    is_shared: bool  # by more than one rank
    given: Mapping[str, Any]  # the constructor's keywords
    master_dtype: torch.dtype | None = None
    _flags: list[dict[str, Any]] = field(default_factory=list)

    def of(self, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> GroupPolicy:
        policy = policy_of(group, self.default_class, defaults, self.partition, self.master_dtype)
        if policy.differentiable and self.is_shared:
            raise ValueError(
                "differentiable=True cannot be sharded: no graph leads through a parameter that "
                "arrives from another rank"
            )
        return policy

    def with_options(
        self, present: Sequence[GroupPolicy], groups: Groups, options: Groups
    ) -> list[GroupPolicy]:
        """How the groups, which have these policies at present, would be sharded with others'
        options."""
        found = []
        for policy, ours, theirs in zip(present, groups, options, strict=True):
            taken = constructor_options(policy.optimizer_class, {**ours, **theirs})
            fixed = {key: ours[key] for key in NOT_OPTIONS if key in ours}
            found.append(self.of({**fixed, **taken}, self.given))
        return found

    def remember_flags(self, present: Sequence[GroupPolicy], groups: Groups) -> None:
        self._flags = _flags(present, groups)

    def have_flipped(self, present: Sequence[GroupPolicy], groups: Groups) -> bool:
        """Whether a switch is not as it was remembered."""
        return _flags(present, groups) != self._flags


def _flags(present: Sequence[GroupPolicy], groups: Groups) -> list[dict[str, Any]]:
    pairs = zip(present, groups, strict=True)
    return [
        {**flags_of(policy.optimizer_class, group), **{key: group.get(key) for key in _FIXED}}
        for policy, group in pairs
    ]
