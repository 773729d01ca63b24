"""``ZeroRedundancyOptimizer``: wires planning, the local step, the gather and the state dict.

One step, in drop-in mode (gradients are complete and averaged when ``step`` is called)::

    options in  ->  gradients to my pieces  ->  my optimizer steps  ->  options out  ->  gather
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from onecopy.agreement import agree, require_agreement
from onecopy.full_state import FullState
from onecopy.intake import (
    NOT_OPTIONS,
    GroupPolicy,
    as_groups,
    check_options,
    check_tensors,
    first_device,
    options_of,
    take_in,
)
from onecopy.join import OptimizerJoinHook, Party, find_party, follow_lender, lend_gradients
from onecopy.loading import LoadReport
from onecopy.loading import load as load_checkpoint
from onecopy.local import LocalOptimizer, OwnedState, Replay
from onecopy.naming import names_of
from onecopy.plan import Plan, make_plan
from onecopy.policies import Policies
from onecopy.portrait import Portrait
from onecopy.replicas import require_equal_replicas
from onecopy.restore import Loadable, checked, load
from onecopy.roster import Roster
from onecopy.saving import require_name, save
from onecopy.shards import Shards
from onecopy.stateful import ShardedState
from onecopy.transport import Transport
from onecopy.version import __version__

# Methods of an optimizer class that move the parameters themselves, as schedule-free ones do.
_MOVES_PARAMETERS = ("train", "eval")


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Any optimizer, with its state cut over the ranks: one copy in the whole job.

    A drop-in for the class of the same name in ``torch.distributed.optim``::

        model = DistributedDataParallel(Net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)

    Each rank keeps the state of its share of the parameters, updates that share, and receives the
    rest from the other ranks. Results are those of the unsharded optimizer, bit for bit, for every
    class that updates elements one by one (SGD, Adam, ...); classes that need whole tensors (Muon,
    Adafactor) have each tensor on one rank.

    Args:
        params: what ``torch.optim`` accepts: parameters, (name, parameter) pairs, or group dicts.
            A group may bring an ``"optimizer_class"`` and a ``"partition"`` of its own.
        optimizer_class: the class to run, any subclass of ``torch.optim.Optimizer``.
        process_group: the ranks to shard over; by default all.
        parameters_as_bucket_view: give the parameters flat storage, so that gathering them needs
            no copies. Their strides stay as they are.
        overlap_with_ddp: not available in this version.
        partition: ``"auto"`` (by what the class needs), ``"elementwise"`` or ``"whole"``.
        bucket_mb: how much is gathered at once, in MiB.
        check_every: every so many steps, compare the parameters of all ranks.
        **defaults: options of ``optimizer_class``.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: str = "auto",
        bucket_mb: float = 25,
        check_every: int | None = None,
        **defaults: Any,
    ) -> None:
        self.initialized = False
        groups, refusal = take_in(params, optimizer_class)
        try:
            self._transport = Transport(process_group, first_device(groups))
        except (ValueError, TypeError):
            if refusal is not None:
                raise refusal from None
            raise
        self.process_group = self._transport.user_group
        self.rank = self._transport.rank
        self.world_size = self._transport.world_size
        self.global_rank = dist.get_rank()
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._optimizer_class = optimizer_class
        self._check_every = check_every
        self._check_steps = os.environ.get("ONECOPY_CHECK") == "step"
        self._steps = 0
        self._policies = Policies(optimizer_class, partition, self.world_size > 1, defaults)
        self._full_state = FullState()

        def prepare() -> list[str]:
            if refusal is not None:
                raise refusal
            check_options(overlap_with_ddp, check_every)
            Joinable.__init__(self)
            Optimizer.__init__(self, groups, {})
            local = LocalOptimizer(optimizer_class, defaults)
            plan = make_plan([], self.world_size, bucket_mb)
            self._shards = Shards(self._transport, local, plan, parameters_as_bucket_view)
            policies = [self._policies.of(group, defaults) for group in self.param_groups]
            self._shards.admit(self.param_groups, policies)
            local.build(self.param_groups, [policy.optimizer_class for policy in policies])
            local.options_out(self.param_groups)
            return self._description()

        agree(self._transport, "building the optimizer", prepare)
        self.defaults = self._local.defaults
        self._policies.remember_flags(self._roster.policies, self.param_groups)
        self._shards.look_for_modules()
        self._shards.settle()
        self._transport.note("optimizer built")
        self.initialized = True

    # ------------------------------------------------------------------ parameters and the plan

    @property  # type: ignore[override]
    def state(self) -> OwnedState:
        """The state of what this rank owns."""
        return self._local.state

    @state.setter
    def state(self, value: Mapping[torch.Tensor, Any]) -> None:
        if "_shards" in self.__dict__:  # the base class's constructor sets an empty one before
            self._local.replace_state(value)

    @property
    def _local(self) -> LocalOptimizer:
        return self._shards.local

    @property
    def _roster(self) -> Roster:
        return self._shards.roster

    @property
    def _plan(self) -> Plan:
        return self._shards.plan

    @property
    def _all_params(self) -> list[torch.Tensor]:
        return self._roster.params

    def _description(self) -> list[str]:
        """What all ranks must hold alike."""
        return [
            f"onecopy {__version__}, {self.world_size} ranks, {self._steps} steps taken",
            f"check_every={self._check_every}, ONECOPY_CHECK={'step' * self._check_steps}",
            *self._shards.description(self.param_groups),
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, on all ranks. No existing piece moves; a state dict consolidated before is
        dropped. If it is refused, on any rank, nothing has changed."""
        if not self.initialized:  # the base class's constructor adds the groups one by one
            Optimizer.add_param_group(self, param_group)
            return
        self._transport.note("adding a parameter group")
        before = len(self.param_groups)

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
            return self._description()

        try:
            with self._shards.all_or_nothing():
                agree(self._transport, "adding a parameter group", prepare)
        except Exception:
            del self.param_groups[before:]
            raise
        self.defaults = self._local.defaults
        self._policies.remember_flags(self._roster.policies, self.param_groups)
        self._full_state.forget("a parameter group was added after the last consolidation")
        self._shards.look_for_modules()
        self._shards.settle()

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

    def _follow_flags(self) -> None:
        """Refuse switches that were flipped by hand and that the plan is not made for."""
        present = self._roster.policies
        if self._policies.have_flipped(present, self.param_groups):
            policies = self._policies_with(self.param_groups)
            self._roster.require_same_classes(policies)
            if self.world_size > 1:
                self._roster.require_plan_fits(policies)
            self._policies.remember_flags(present, self.param_groups)

    def _policies_with(self, options: Sequence[Mapping[str, Any]]) -> list[GroupPolicy]:
        return self._policies.with_options(self._roster.policies, self.param_groups, options)

    def _take_in(self, unfrozen: Sequence[int]) -> None:
        """Extend the plan by what was unfrozen, and see that all ranks hold the same."""
        what = "taking in unfrozen parameters" if unfrozen else "comparing what was loaded"
        self._transport.note(f"{what} in step {self._steps}", same_place=True)

        def prepare() -> list[str]:
            self._shards.extend(self.param_groups, unfrozen)
            return self._description()

        with self._shards.all_or_nothing():
            agree(self._transport, what, prepare)
        self._shards.is_confirmed = True
        self._shards.settle()

    # ------------------------------------------------------------------ step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters on all ranks. Keywords go to the optimizer class's ``step``.

        A closure is run once, on every rank; its result, this rank's loss, is returned.
        """
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        return self._step(Replay(closure) if callable(closure) else closure, kwargs, joined=False)

    def _step_joined(self) -> None:
        """A step of the others, on a rank that has run out of inputs."""
        self._step(None, {}, joined=True)

    def _step(self, closure: Any, kwargs: Mapping[str, Any], joined: bool) -> Any:
        self._steps += 1
        self._transport.note(f"in step {self._steps}")
        party = find_party(self._transport, joined) if self._join_config.enable else None
        self._follow_changes(party)
        if self._check_steps:
            require_agreement(self._transport, "checking a step", self._description())
        borrowed = None
        if party is not None:
            borrowed = lend_gradients(self._transport, party, self._plan, self._roster.params)
        if not joined:
            self._require_usable_gradients()
        self._local.options_in(self.param_groups)
        bound = (
            self._local.gradients_bound()
            if borrowed is None
            else self._local.gradients_borrowed(borrowed)
        )
        self._full_state.forget("the optimizer has stepped since the last consolidation")
        try:
            with bound, torch.profiler.record_function("onecopy::step"):
                result = self._local.step(closure, kwargs)
        except Exception as error:
            # The other ranks will wait for this one's parameters: tell them why they wait.
            self._transport.note(f"step {self._steps} raised {error!r}", same_place=True)
            raise
        self._local.options_out(self.param_groups)
        self._shards.gather()
        if self._check_every and self._steps % self._check_every == 0:
            self.assert_replicas_equal()
        self._transport.note(f"step {self._steps} finished")
        return result

    def _require_usable_gradients(self) -> None:
        for index in self._plan.cut_params:
            grad = self._roster.params[index].grad
            if grad is not None and grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{self._roster.names[index]} has a sparse gradient, and its state is cut over "
                    f"the ranks. Keep it whole: put it into a group of its own with "
                    f'"partition": "whole", or pass partition="whole"'
                )

    def assert_replicas_equal(self) -> None:
        """Compare the parameters of all ranks, bit for bit. Collective. Raises ``RuntimeError`` on
        all ranks, naming the first parameter that differs and the ranks."""
        require_equal_replicas(self._roster.params, self._roster.names, self._transport)

    # ------------------------------------------------------------------ the full state dict

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the full state to rank ``to`` of the group, where ``state_dict`` then returns it.

        Collective. The result is a copy on the CPU; it is dropped at the next step.
        """
        self._full_state.gather(self._transport, self._shards, self.param_groups, self._steps, to)

    def state_dict(self) -> dict[str, Any]:
        """The full state, as the unsharded optimizer class writes it.

        ``consolidate_state_dict(to)`` must have gathered it to this rank since the last step.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        result = self._full_state.as_plain_dict(self.rank, self.param_groups)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
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
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._adopt(checked(state_dict, self.param_groups, self._roster.cuttable()))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
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
        if self._plan is not plan:
            self._shards.settle()
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
        self._full_state.forget("a state dict was loaded after the last consolidation")

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
        self._follow_changes()
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
            return [f"from {path}", f"strict={strict}, key={key!r}"]

        self._transport.note(f"loading {path}")
        agree(self._transport, "loading a checkpoint", prepare)
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
        self._finish_loading(loadable, plan)
        return report

    def _shown(self, module: torch.nn.Module | None) -> dict[str, Any]:
        """This rank's share as a tree. Collective: a rank that cannot show its share tells all."""
        self._follow_changes()
        tree: dict[str, Any] = {}

        def prepare() -> list[str]:
            tree.update(self._portrait(module).tree())
            return []

        self._transport.note("showing the state for a checkpoint")
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
        self._transport.note("loading a checkpoint")
        options: list[dict[str, Any]] = []

        def prepare() -> list[str]:
            if incomplete:
                raise ValueError(
                    f"the checkpoint does not cover the state of {', '.join(incomplete[:5])}"
                    f"{', ...' * (len(incomplete) > 5)}: is it complete?"
                )
            portrait.require_steady_forms()
            portrait.require_all_in(groups)
            options.extend(portrait.options_from(groups))
            if self.world_size > 1:
                self._roster.require_plan_fits(self._policies_with(options))
            return []

        agree(self._transport, "loading a checkpoint", prepare)
        pieces = portrait.pieces_from(state)
        said, _ = self._transport.minimum_and_maximum(portrait.beginnings(pieces))
        pieces = portrait.without(pieces, portrait.names_not_begun(said))
        self._adopt(Loadable(portrait.frozen_from(state), {}, options, pieces))

    # ------------------------------------------------------------------ as torch's class has it

    @property
    def optim(self) -> Any:
        """The optimizer on this rank's pieces; with several classes, all of them as one."""
        inners = self._local.inners
        return inners[0].optimizer if len(inners) == 1 else self._local

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``torch.distributed.algorithms.Join``. The keywords belong to other joinables."""
        del kwargs
        return OptimizerJoinHook(self._step_joined, self._leave_join)

    def _leave_join(self) -> None:
        """torch leaves the context switched on when it ends; every later step would pay for it."""
        self._join_config = self._join_config._replace(enable=False)

    @property
    def join_device(self) -> torch.device:
        return self._roster.params[0].device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    def __getattr__(self, name: str) -> Any:
        """What only the wrapped class has: its attributes, and ``train`` and ``eval``."""
        shards = self.__dict__.get("_shards")
        if shards is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        having = [i.optimizer for i in shards.local.inners if hasattr(i.optimizer, name)]
        if not having:
            raise AttributeError(
                f"neither {type(self).__name__} nor {self._optimizer_class.__name__} has an "
                f"attribute {name!r}"
            )
        if name in _MOVES_PARAMETERS:
            return functools.partial(self._move_parameters, name, having)
        value = getattr(having[0], name)
        if callable(value):
            raise AttributeError(
                f"{name} is a method of {self._optimizer_class.__name__} on this rank's pieces "
                f"only. If that is what you want, call optimizer.optim.{name}"
            )
        return value

    def _move_parameters(
        self, name: str, optimizers: Sequence[Optimizer], *args: Any, **kwargs: Any
    ) -> None:
        self._follow_changes()
        self._full_state.forget(f"{name}() was called after the last consolidation")
        self._local.options_in(self.param_groups)
        for optimizer in optimizers:
            getattr(optimizer, name)(*args, **kwargs)
        self._local.options_out(self.param_groups)
        self._shards.gather()

    # ------------------------------------------------------------------ copying

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroRedundancyOptimizer:
        """A working optimizer on copies of the parameters, in the same process group."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo[id(self.process_group)] = self.process_group
        # Hooks are left behind, as torch does, and so is the `step` that a scheduler has wrapped.
        left = {"step", "_shards", "_full_state"}
        for key, value in self.__dict__.items():
            if key not in left and not (key.startswith("_optimizer_") and key.endswith("_hooks")):
                new.__dict__[key] = copy.deepcopy(value, memo)
        local, roster = copy.deepcopy((self._local, self._roster), memo)
        new._shards = self._shards.copied(local, roster)
        new._full_state = FullState("this optimizer is a copy that was not consolidated")
        Optimizer.__setstate__(new, {})
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: this rank holds only its share of the "
            "state, and a process group. Save consolidate_state_dict() + state_dict() instead"
        )
