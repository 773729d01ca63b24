"""Parameters that come later: groups that are added, parameters that are unfrozen or moved.

The plan only ever grows, and no piece moves. Each change is made on all ranks together, or not at
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from onecopy.agreement import agree
from onecopy.intake import as_groups, check_tensors
from onecopy.join import Party, follow_lender
from onecopy.parts import Parts


class Grows(Parts):
    """``add_param_group``, and what the next step follows by itself."""

    initialized: bool

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, on all ranks. No existing piece moves; a state dict consolidated before is
        dropped. If it is refused, on any rank, nothing has changed."""
        if not self.initialized:  # the base class's constructor adds the groups one by one
            Optimizer.add_param_group(self, param_group)
            return
        self._require_usable()
        self._transport.enter("adding a parameter group")
        before, known = len(self.param_groups), len(self._roster.entries)

        def prepare() -> list[str]:
            if not isinstance(param_group, dict):
                raise TypeError(f"a parameter group must be a dict, got {type(param_group)}")
            self._roster.require_same_groups(self.param_groups)
            (group,) = as_groups([param_group])
            check_tensors([*self.param_groups, group])
            self._local.options_in(self.param_groups)
            self._add_to_base(group)
            policy = self._policies.of(group, self.defaults)
            self._shards.admit([group], [policy])
            self._local.add_group(before, group, policy.optimizer_class)
            self._local.refill_groups(self.param_groups)  # what was unfrozen is planned, too
            self._local.options_out(self.param_groups)
            self._shards.look_for_modules()
            return self._description()

        try:
            with self._shards.all_or_nothing():
                agree(self._transport, "adding a parameter group", prepare)
                self._shards.require_same_order("adding a parameter group", known)
        except BaseException:
            del self.param_groups[before:]
            raise
        self.defaults = self._local.defaults
        self._policies.remember_flags(self._roster.policies, self.param_groups)
        self._full_state.forget(
            "a parameter group was added after the last consolidation", is_state_same=True
        )
        self._shards.settle()
        if self._attachment is not None:
            self._attachment.catch_up()

    def _add_to_base(self, group: dict[str, Any]) -> None:
        """The base class's checks, without its defaults: a group may be of another class, and the
        inner optimizer completes it."""
        defaults, self.defaults = self.defaults, {}
        try:
            Optimizer.add_param_group(self, group)
        finally:
            self.defaults = defaults

    def _follow_changes(self, party: Party | None = None) -> None:
        """What happened to the parameters since the last step: unfrozen, or given new memory."""
        self._shards.require_untouched(self.param_groups)
        self._follow_flags()
        unfrozen = self._shards.unfrozen()
        if party is not None:
            unfrozen = follow_lender(self._transport, party, self.param_groups, unfrozen)
        if unfrozen or not self._shards.is_confirmed:
            self._take_in(unfrozen)
        self._shards.follow_memory()
        if self._attachment is not None:
            self._attachment.catch_up()

    def _follow_flags(self) -> None:
        """Refuse switches that were flipped by hand and that the plan is not made for."""
        present = self._roster.policies
        if self._policies.have_flipped(present, self.param_groups):
            policies = self._policies_with(self.param_groups)
            self._roster.require_same_classes(policies)
            if self.world_size > 1:
                self._roster.require_plan_fits(policies)
            self._policies.remember_flags(present, self.param_groups)

    def _take_in(self, unfrozen: Sequence[int]) -> None:
        """Extend the plan by what was unfrozen, and see that all ranks hold the same."""
        what = "taking in unfrozen parameters" if unfrozen else "comparing what was loaded"
        self._company.add_to_note(what)

        def prepare() -> list[str]:
            self._shards.extend(self.param_groups, unfrozen)
            return [*self._description(), *self._loaded]

        with self._shards.all_or_nothing():
            agree(self._transport, what, prepare)
        self._shards.is_confirmed, self._loaded = True, []
        self._shards.settle()
