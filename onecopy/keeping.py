"""The state of the optimizer: full, on one rank, and sharded, in checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from onecopy.agreement import agree
from onecopy.beginnings import beginnings, names_not_begun, without
from onecopy.intake import NOT_OPTIONS, options_of
from onecopy.loading import LoadReport
from onecopy.loading import load as load_checkpoint
from onecopy.naming import describe_names, names_of
from onecopy.options import options_from, require_all_in, require_same_groups
from onecopy.parts import Parts
from onecopy.pieces import MASTER
from onecopy.plan import Plan
from onecopy.portrait import Portrait
from onecopy.restore import (
    Loadable,
    checked,
    compare_masters,
    in_outline,
    load,
    load_masters,
    with_ranks_told,
)
from onecopy.saving import require_name, save
from onecopy.stateful import ShardedState
from onecopy.torch_private import load_state_dict_hooks, state_dict_hooks

logger = logging.getLogger("onecopy")


class KeepsState(Parts):
    """``state_dict`` and ``load_state_dict``, ``sharded``, ``save`` and ``load``."""

    # ------------------------------------------------------------------ the full state dict

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the full state to rank ``to`` of the group, where ``state_dict`` then returns it.

        Collective. The result is a copy on the CPU; it is dropped at the next step.
        """
        self._require_usable()
        self._require_unharmed_state()
        self._bring_masters_up_to_date()
        self._full_state.gather(self._transport, self._shards, self.param_groups, self._steps, to)

    def state_dict(self) -> dict[str, Any]:
        """The full state, as the unsharded optimizer class writes it.

        ``consolidate_state_dict(to)`` must have gathered it to this rank since the last step.
        Before the first step there is nothing to gather, unless the class makes state when it is
        built. A new optimizer may load a state dict without state, or gain a group, before.
        """
        before, after = state_dict_hooks(self)
        for pre_hook in before.values():
            pre_hook(self)
        result = self._full_state.as_plain_dict(self.rank, self._shards, self.param_groups)
        for post_hook in after.values():
            changed = post_hook(self, result)
            result = result if changed is None else changed
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a full state dict: ours at any world size, the plain class's,
        or torch's own sharded class's. To be called on all ranks; the dict is not changed.

        A dict that does not fit is refused before anything is changed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        before, after = load_state_dict_hooks(self)
        for pre_hook in before.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._bring_level()
        loadable = checked(state_dict, self.param_groups, self._roster.cuttable())
        self._adopt(loadable)
        if self.world_size > 1:
            self._loaded = in_outline(loadable, self._roster.params, self._roster.names)
        for post_hook in after.values():
            post_hook(self)

    def _adopt(self, loadable: Loadable) -> None:
        """Take over state and options; if that fails, nothing has changed."""
        plan = self._plan
        policies = self._policies_with(loadable.groups)
        made = self._shards.made_anew(self.param_groups, loadable.states)
        with torch.inference_mode(False), self._shards.all_or_nothing():
            self._shards.make_room_for(self.param_groups, loadable.states.keys() - made, policies)
            load(self._local, loadable)
        self._finish_loading(loadable, plan)

    def _finish_loading(self, loadable: Loadable, plan: Plan) -> None:
        """Follow what the inner optimizers have loaded; ``plan`` was ours before."""
        with self._condition.loading():
            self._state_has_changed()
            self._full_state.forget(
                "a state dict was loaded after the last consolidation",
                is_state_same=loadable.is_empty,  # if there was none before
            )
            if self._plan is not plan:
                self._shards.settle()
            load_masters(self._local, loadable)
            for group, inner, saved in zip(
                self.param_groups, self._local.param_groups, loadable.groups, strict=True
            ):
                kept = {key: group[key] for key in NOT_OPTIONS if key in group}
                if "param_names" in saved:
                    kept["param_names"] = list(saved["param_names"])
                group.clear()
                group.update(kept)
                group.update(options_of(inner))
            self._policies.remember_flags(self._roster.policies, self.param_groups)
        self._warn_of_masters(loadable)

    def _warn_of_masters(self, loadable: Loadable) -> None:
        """Of master copies on one side only, once for all ranks."""
        planned = [entry.param for entry in self._roster.planned(self._plan)]
        found = compare_masters(loadable, planned, self._local.master_dtype)
        if self.rank == 0 and found.are_lacking:
            logger.warning(
                "what was loaded lacks master copies (%s): they were rebuilt from the parameters",
                MASTER,
            )
        if self.rank == 0 and found.are_unused:
            logger.warning(
                "what was loaded has master copies (%s), for which this optimizer has no use: they "
                "were left out. To keep them, build it with master_dtype=torch.float32",
                MASTER,
            )

    def _bring_masters_up_to_date(self) -> None:
        """Before they are saved: the parameters are here, and what was written into them counts."""
        self.wait()
        if self._local.masters.follow_writes():
            self._state_has_changed()

    # ------------------------------------------------------------------ sharded checkpoints

    def sharded(
        self, module: torch.nn.Module | None = None, *, flatten_optimizer_state_dict: bool = False
    ) -> ShardedState:
        """This rank's share of the state, for ``torch.distributed.checkpoint``, on all ranks::

            dcp.save({"model": model, "optim": optimizer.sharded(model)}, checkpoint_id=path)
            dcp.load({"model": model, "optim": optimizer.sharded(model)}, checkpoint_id=path)

        The checkpoint holds the state of the unsharded optimizer, under the names and keys that
        torch's ``get_optimizer_state_dict`` gives, whatever the number of ranks.

        Args:
            module: gives the parameters their names. Not needed if the optimizer was built from
                ``named_parameters()``; with neither, parameters are known by their position.
            flatten_optimizer_state_dict: as in torch's ``StateDictOptions``.
        """
        return ShardedState(
            lambda: self._shown(module),
            lambda: self._portrait(module),
            self._adopt_sharded,
            flatten_optimizer_state_dict,
        )

    def save(
        self,
        path: str | os.PathLike[str],
        module: torch.nn.Module | None = None,
        *,
        flatten_optimizer_state_dict: bool = False,
    ) -> None:
        """Write a sharded checkpoint of the state into the directory ``path``. Collective.

        Every rank writes its own share. A checkpoint that is there already is replaced in one
        instant: whenever a process dies, the directory holds the old one or the new one. What
        torch's ``dcp.load`` reads from it lies under the key ``"optim"``. The arguments are those
        of :meth:`sharded`.
        """
        self._require_usable()
        self._transport.enter(f"saving to {path}")
        self._require_unharmed_state()
        self._follow_changes()
        self._bring_masters_up_to_date()
        save(
            self._transport,
            lambda: self._portrait(module),
            Path(path),
            flatten_optimizer_state_dict,
        )

    def load(
        self,
        path: str | os.PathLike[str],
        module: torch.nn.Module | None = None,
        strict: bool = True,
        *,
        key: str | None = None,
    ) -> LoadReport:
        """Read the state from a checkpoint directory, this rank's share only. Collective.

        The checkpoint may be of any job: ours, of the unsharded class, or of FSDP2, saved by
        :meth:`save` or by ``dcp.save``. No code in it is run. What does not fit raises
        ``ValueError`` on all ranks, with lists of what is missing, unexpected or of another shape,
        and nothing has changed; with ``strict=False`` what fits is loaded and the lists returned.
        Parameters must be grouped as in the checkpoint, because options belong to groups; the order
        of groups does not matter. With ``strict=False`` groups that differ keep their options.
        Master copies that the checkpoint lacks are made from the parameters, and the report names
        them as ``rebuilt``.

        Args:
            path: the directory.
            module: gives the parameters their names, see :meth:`sharded`.
            strict: refuse a checkpoint that does not fit exactly.
            key: where in the checkpoint the state is, if it holds that of several optimizers.
        """
        names: list[str] = []

        def prepare() -> list[str]:
            require_name(Path(path))
            names.extend(names_of(self._roster, self.param_groups, module))
            return [
                f"from {path}",
                f"strict={strict}, key={key!r}",
                *describe_names(self._roster, names),
            ]

        self._company.require_working()
        self._bring_level()
        self._transport.enter(f"loading {path}")
        agree(self._transport, "loading a checkpoint", prepare)
        self._bring_masters_up_to_date()  # those that the checkpoint has nothing for are kept
        plan = self._plan
        # State that is made in inference mode could never be stepped.
        with torch.inference_mode(False), self._shards.all_or_nothing():
            loadable, report = load_checkpoint(
                self._transport,
                self._shards,
                self.param_groups,
                names,
                Path(path),
                policies_for=self._policies_with,
                strict=strict,
                key=key,
            )
        self._finish_loading(with_ranks_told(self._transport, self._local, loadable), plan)
        return report

    def _shown(self, module: torch.nn.Module | None) -> dict[str, Any]:
        """This rank's share as a tree. Collective: a rank that cannot show its share tells all."""
        self._require_usable()
        self._transport.enter("showing the state for a checkpoint")
        self._require_unharmed_state()
        self._follow_changes()
        self._bring_masters_up_to_date()
        tree: dict[str, Any] = {}

        def prepare() -> list[str]:
            portrait = self._portrait(module)
            tree.update(portrait.tree())
            return describe_names(self._roster, portrait.names)

        agree(self._transport, "showing the state for a checkpoint", prepare)
        return tree

    def _portrait(self, module: torch.nn.Module | None) -> Portrait:
        names = names_of(self._roster, self.param_groups, module)
        return Portrait(self._local, self._roster, self._plan, self.param_groups, names, self.rank)

    def _adopt_sharded(
        self,
        portrait: Portrait,
        state: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        incomplete: Sequence[str],
    ) -> None:
        self._company.require_working()
        self._bring_level()
        self._transport.enter("loading a checkpoint")
        options: list[dict[str, Any]] = []

        def prepare() -> list[str]:
            if incomplete:
                raise ValueError(
                    f"the checkpoint does not cover the state of {', '.join(incomplete[:5])}"
                    f"{', ...' * (len(incomplete) > 5)}: is it complete?"
                )
            portrait.require_steady_forms()
            require_all_in(portrait, groups)
            require_same_groups(portrait, [group["params"] for group in groups])
            options.extend(options_from(portrait, groups))
            if self.world_size > 1:
                self._roster.require_plan_fits(self._policies_with(options))
            return describe_names(self._roster, portrait.names)

        agree(self._transport, "loading a checkpoint", prepare)
        pieces, masters = portrait.pieces_from(state)
        said, _ = self._transport.minimum_and_maximum(beginnings(portrait, pieces))
        pieces = without(portrait, pieces, names_not_begun(portrait, said))
        loadable = Loadable(portrait.frozen_from(state), {}, options, pieces, masters)
        self._adopt(with_ranks_told(self._transport, self._local, loadable))
