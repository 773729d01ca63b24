"""The parameters in the order in which the user gave them, and what planning makes of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from onecopy.buffers import is_dense
from onecopy.intake import (
    GroupPolicy,
    check_no_shared_memory,
    describe_group,
    describe_param,
    device_words,
    is_trainable,
    spec_of,
)
from onecopy.kinds import Kind
from onecopy.plan import ParamSpec, Plan, make_plan, suitable_bucket_mb

_MOST_BUCKETS = 1_000_000  # a plan lists them


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A parameter; its place in the roster is its number in the plan."""

    param: torch.Tensor
    name: str
    group: int


def _needs_other_cuts(before: GroupPolicy, after: GroupPolicy) -> bool:
    """Whether a plan made for one policy is wrong for another."""
    turns_fused = after.kind is Kind.ELEMENTWISE and after.fused and not before.fused
    return after.kind is not before.kind or turns_fused


class GroupsChanged(RuntimeError, AssertionError):
    """``param_groups`` was changed by hand. An AssertionError too, as torch's class raises."""


@dataclass(frozen=True, eq=False)
class Roster:
    """All parameters, each once however often it is tied or listed, and how groups are sharded."""

    entries: tuple[Entry, ...] = ()
    policies: tuple[GroupPolicy, ...] = ()
    listed: tuple[tuple[torch.Tensor, ...], ...] = ()  # the groups' parameters, as they were given

    def with_group(self, group: Mapping[str, Any], policy: GroupPolicy) -> Roster:
        """A roster that holds one more group."""
        known = {entry.param for entry in self.entries}
        names = group.get("param_names") or [""] * len(group["params"])
        entries = list(self.entries)
        for param, name in zip(group["params"], names, strict=True):
            if param not in known:
                known.add(param)
                title = f"parameter {len(entries)}" + (f" ({name})" if name else "")
                entries.append(Entry(param, title, len(self.policies)))
        return Roster(
            tuple(entries), (*self.policies, policy), (*self.listed, tuple(group["params"]))
        )

    def require_same_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise if parameters were added or removed behind our back."""
        same = len(groups) == len(self.listed) and all(
            len(group["params"]) == len(listed) and all(map(operator.is_, group["params"], listed))
            for group, listed in zip(groups, self.listed, strict=True)
        )
        if not same:
            raise GroupsChanged(
                "the parameters in param_groups are not those that were given: changing the lists "
                "by hand has no effect here. Use add_param_group(...) on all ranks, or build "
                "another optimizer"
            )

    def with_policies(self, policies: Sequence[GroupPolicy]) -> Roster:
        """A roster for groups with these policies; this one if its plan is right for them too."""
        changed = any(map(_needs_other_cuts, self.policies, policies))
        return replace(self, policies=tuple(policies)) if changed else self

    def require_same_classes(self, policies: Sequence[GroupPolicy]) -> None:
        """Raise if a group was given another optimizer class by hand."""
        for number, (before, after) in enumerate(zip(self.policies, policies, strict=True)):
            if before.optimizer_class is not after.optimizer_class:
                raise GroupsChanged(
                    f"group {number} was built with {before.optimizer_class.__name__} and now says "
                    f"{after.optimizer_class.__name__}: changing optimizer_class by hand has no "
                    "effect here. Build another optimizer"
                )

    def require_plan_fits(self, policies: Sequence[GroupPolicy]) -> None:
        """Raise if options were changed that decide where tensors may be cut."""
        for number, (before, after) in enumerate(zip(self.policies, policies, strict=True)):
            if _needs_other_cuts(before, after):
                what = "fused is on" if after.kind is before.kind else f"it is {after.kind.value}"
                raise RuntimeError(
                    f"the options of group {number} have changed: now {what}, and its tensors were "
                    f"cut for an update that is {before.kind.value} and not fused. Give the "
                    "constructor or the group these options, or load them: load_state_dict(...) "
                    "and load(path) make another plan"
                )

    @cached_property
    def params(self) -> list[torch.Tensor]:
        return [entry.param for entry in self.entries]

    @cached_property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    def planned(self, plan: Plan) -> list[Entry]:
        return [self.entries[index] for index in sorted(plan.params)]

    def to_plan(self, plan: Plan) -> list[int]:
        """The trainable parameters that the plan does not hold yet."""
        return [index for index in self.unplanned(plan) if is_trainable(self.params[index])]

    def unplanned(self, plan: Plan) -> list[int]:
        return [index for index in range(len(self.entries)) if index not in plan.params]

    def extend(self, plan: Plan, new: Sequence[int]) -> Plan:
        """A plan that holds these parameters, too."""
        return plan.extended(self._specs(plan, new)) if new else plan

    def _specs(self, plan: Plan, new: Sequence[int]) -> list[ParamSpec]:
        if plan.world_size > 1:
            both = [self.entries[index] for index in sorted({*plan.params, *new})]
            check_no_shared_memory([e.param for e in both], [e.name for e in both])
        words = device_words(self.params)
        return [
            spec_of(index, entry.param, self.policies[entry.group], words)
            for index, entry in ((index, self.entries[index]) for index in new)
        ]

    def cuttable(self) -> set[torch.Tensor]:
        """The parameters whose state is parameter-shaped, because it may be cut."""
        return {
            entry.param
            for entry in self.entries
            if self.policies[entry.group].kind is Kind.ELEMENTWISE and is_dense(entry.param)
        }

    def readiness(self, with_gradients: bool) -> list[str]:
        """What of the parameters must be alike whenever a step is taken, as lines."""
        lines = []
        for entry in self.entries:
            grad = entry.param.grad if with_gradients else None
            form = "no gradient"
            if grad is not None:
                is_sparse = grad.layout is not torch.strided
                form = f"a {'sparse ' * is_sparse}gradient of {tuple(grad.shape)}"
            has = f", {form}" if with_gradients else ""
            lines.append(f"{entry.name}: requires_grad={entry.param.requires_grad}{has}")
        return lines

    def description(
        self, groups: Sequence[Mapping[str, Any]], plan: Plan, with_storage: bool
    ) -> list[str]:
        """What all ranks must hold alike, as lines for agreement."""
        lines = []
        for number, (group, policy) in enumerate(zip(groups, self.policies, strict=True)):
            lines += describe_group(number, group, policy)
        words = device_words(self.params)
        for index, entry in enumerate(self.entries):
            word, planned = words[entry.param.device], index in plan.params
            lines.append(describe_param(entry.name, entry.param, word, planned, with_storage))
        return [*lines, f"plan {plan.digest}"]


def plan_to_extend(
    groups: Iterable[Mapping[str, Any]], world_size: int, bucket_mb: float | None
) -> Plan:
    """An empty plan, with buckets that suit the parameters of these groups if no size is given."""
    params = [param for group in groups for param in group["params"]]
    numbytes = sum(p.numel() * p.element_size() for p in params)
    if bucket_mb is None:
        return make_plan([], world_size, suitable_bucket_mb(numbytes))
    plan = make_plan([], world_size, bucket_mb)
    if numbytes > plan.bucket_bytes * _MOST_BUCKETS:
        raise ValueError(
            f"bucket_mb={bucket_mb} would cut these parameters into more than {_MOST_BUCKETS:,} "
            "buckets: leave it out, or say more"
        )
    return plan
