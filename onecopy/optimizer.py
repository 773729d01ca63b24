"""``ZeroRedundancyOptimizer``: any optimizer class, with its state sharded over the ranks.

The class owns one object for each concern, none of which knows the optimizer: the ranks
(``RankGroup``), the user's class on this rank's shards (``InnerOptimizers``), plan, memory and
all-gathers (``ShardedParams``), reduced gradients (``Attachment``), uneven inputs
(``JoinParticipant``) and the checks. Read ``step``, ``_step`` and ``_prepare_step`` first.

Invariant: every method that communicates does so in the same order on all ranks. What one rank
alone can refuse, it refuses before; everything else is refused by all ranks, in ``same_outcome``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy.checkpoint.dcp import ShardedState
from onecopy.checkpoint.full_state import (
    FullState,
    Loadable,
    adopt_state,
    check_state_dict,
    consolidate,
    full_state_dict,
    sample_lines,
    warn_of_masters,
    with_ranks_told,
)
from onecopy.checkpoint.load import LoadReport, load_checkpoint
from onecopy.checkpoint.metadata import require_name
from onecopy.checkpoint.save import save_checkpoint
from onecopy.checkpoint.state import StateView, checkpoint_names, describe_names
from onecopy.checks.corruption_check import CorruptionCheck
from onecopy.checks.replica_check import compare_gradients, require_equal_replicas
from onecopy.comm.agreement import same_outcome
from onecopy.comm.group import RankGroup
from onecopy.comm.monitor import do_nothing
from onecopy.comm.stats import TRACE_VARIABLES, CommStats, Tracer
from onecopy.gradients.attachment import Attachment, broadcast_module, require_attachable
from onecopy.gradients.join import JoinCallbacks, JoinParticipant, JoinRound, Turn
from onecopy.gradients.norms import OPERATIONS
from onecopy.planning.param_groups import (
    GroupPolicy,
    PartitionPolicy,
    Settings,
    as_groups,
    as_number,
    check_switches,
    check_tensors,
    empty_plan,
    first_device,
    take_groups,
)
from onecopy.planning.plan import Plan
from onecopy.planning.sizes import MemoryReport, nbytes_of, plan_summary, state_bytes
from onecopy.planning.text import plural, shown
from onecopy.planning.traits import NOT_OPTIONS, options_of
from onecopy.sharding.inner import (
    GradientsOf,
    InnerOptimizers,
    OwnedState,
    RunClosure,
    Update,
    flags_of,
)
from onecopy.sharding.sharded_params import ShardedParams, fingerprint, names_in
from onecopy.torch_private import (
    ASKED_BY_GRAD_SCALER,
    is_table_of_hooks,
    join_config,
    leave_join,
    load_state_dict_hooks,
    state_dict_hooks,
)
from onecopy.version import __version__

logger = logging.getLogger("onecopy")

# Methods of an optimizer class that move the parameters themselves, as schedule-free ones do.
_MOVES_PARAMETERS = ("train", "eval")


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Shard the state of an optimizer over the ranks of a process group.

    Each rank holds the state of its shard of the parameters, updates that shard, and receives the
    rest from the other ranks. It is a drop-in replacement of the class of the same name in
    ``torch.distributed.optim``.

    Parameters and state equal those of the unsharded optimizer bit for bit if the class updates
    elements independently of each other, as SGD and Adam do. A class that needs whole tensors, as
    Muon and Adafactor do, updates each tensor on one rank.

    The constructor is collective: all ranks of the group call it with equal arguments.

    Args:
        params (iterable): parameters, ``(name, parameter)`` pairs, or dicts of parameter groups, as
            ``torch.optim`` accepts them. A group may have an ``"optimizer_class"`` and a
            ``"partition"`` of its own.
        optimizer_class (type[Optimizer]): the subclass of ``torch.optim.Optimizer`` to run.
        process_group (ProcessGroup, optional): the ranks to shard over. Default: all ranks.
        parameters_as_bucket_view (bool): move the parameters into flat storage, so that they are
            all-gathered without copies. Their strides do not change. Default: ``False``.
        overlap_with_ddp (bool): update inside backward, from a DDP communication hook made by
            :func:`onecopy.hook_with_zero_step`. :meth:`step` then does nothing. Default: ``False``.
        partition (str): how tensors may be cut: ``"elementwise"`` anywhere, ``"whole"`` not at
            all, ``"auto"`` as the class allows. Default: ``"auto"``.
        bucket_mb (float, optional): MiB of parameters in one all-gather. Default: 25, and less for
            small models.
        master_dtype (torch.dtype, optional): keep a master copy in this dtype, usually
            ``torch.float32``, of every parameter of a narrower dtype, and update that copy. Master
            copies are sharded, and part of the state. Parameters are all-gathered in their own
            dtype.
        check_every (int, optional): take checksums of parameters and state at every step, and
            compare them over the ranks every so many steps. Default: no check.
        **defaults: options of ``optimizer_class``.

    Raises:
        ValueError, TypeError: on all ranks, if the arguments are wrong on any rank, or not the same
            on all.

    Example::

        model = DistributedDataParallel(Net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        model(batch).sum().backward()
        optimizer.step()
    """

    # ------------------------------------------------------------------ construction

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: str = "auto",
        bucket_mb: float | None = None,
        master_dtype: torch.dtype | None = None,
        check_every: int | None = None,
        **defaults: Any,
    ) -> None:
        self.initialized = False
        groups, refusal = take_groups(params, optimizer_class)
        try:
            self._rank_group = RankGroup(process_group, first_device(groups))
        except (ValueError, TypeError):
            if refusal is not None:
                raise refusal from None
            raise
        self.process_group = self._rank_group.user_group
        self.rank = self._rank_group.rank
        self.world_size = self._rank_group.world_size
        self.global_rank = dist.get_rank()
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._optimizer_class = optimizer_class
        # In drop-in mode: whether gradients were compared since parameters were added or unfrozen.
        self._gradients_compared = False
        self._steps = 0
        bucket_view = parameters_as_bucket_view
        settings = Settings(
            partition, bucket_mb, master_dtype, check_every, bucket_view, overlap_with_ddp
        )
        self._policies = PartitionPolicy(optimizer_class, settings, defaults, self.world_size)
        # The consolidated state, or why there is none.
        self._full_state: FullState | str = "no state dict has been consolidated"
        self._has_state = False  # of a step or of a load, on any rank
        self._loaded: list[str] = []  # what was loaded, until all ranks are known to have the same
        self._attachment: Attachment | None = None
        self._tracing: Tracer | None = None
        self._is_scaled = False  # while onecopy.GradScaler takes a step
        self._join = JoinParticipant(weakref.ref(self), self._rank_group)

        def prepare() -> list[str]:
            if refusal is not None:
                raise refusal
            settings.validate(os.environ)
            self._overlaps_with_ddp = bool(overlap_with_ddp)
            self._corruption = CorruptionCheck(check_every or 0)
            self._check_steps = os.environ.get("ONECOPY_CHECK") == "step"
            if TRACE_VARIABLES & os.environ.keys():
                self._tracing = Tracer.from_environment(os.environ)
            Joinable.__init__(self)
            Optimizer.__init__(self, groups, {})
            self._inner = InnerOptimizers(optimizer_class, defaults, master_dtype)
            plan = empty_plan(self.param_groups, self.world_size, bucket_mb)
            self._params = ShardedParams(self._rank_group, self._inner, plan, bucket_view)
            policies = [self._policies.of(group, defaults) for group in self.param_groups]
            self._params.admit(self.param_groups, policies)
            self._inner.build(self.param_groups, [policy.optimizer_class for policy in policies])
            self._inner.options_out(self.param_groups)
            self._params.find_modules()
            return self._description()

        same_outcome(self._rank_group, "building the optimizer", prepare)
        self._params.require_same_order("building the optimizer")
        self._rank_group.monitor.status.optimizers += 1
        if self._check_steps:
            self._rank_group.monitor.compares_in = self._rank_group
        self.defaults = self._inner.defaults
        self._flags = flags_of(self.param_groups)  # when they were last checked
        self._params.rebuild()
        if self._tracing is not None:
            self._tracing.begin(self.global_rank, self.wait, self._facts)
        self._rank_group.monitor.note("optimizer built")
        if self.rank == 0 and logger.isEnabledFor(logging.INFO):
            classes = [policy.optimizer_class for policy in self._params.registry.policies]
            logger.info(plan_summary(self._params.plan, classes))
        self.initialized = True

    def _description(self) -> list[str]:
        """What all ranks must hold alike."""
        return [
            f"onecopy {__version__}, torch {torch.__version__}, {self.world_size} ranks, "
            f"{self._steps} steps taken",
            f"check_every={self._corruption.every or None}, "
            f"ONECOPY_CHECK={'step' * self._check_steps}, "
            f"overlap_with_ddp={self._overlaps_with_ddp}",
            *self._params.description(self.param_groups),
        ]

    def _require_usable(self) -> None:
        """Raise if a step was torn or the process group has failed, with what helps."""
        self._params.status.require_whole()
        self._rank_group.monitor.require_working()

    def _enter(self, what: str) -> None:
        """Begin what all ranks do together."""
        self._require_usable()
        self._rank_group.monitor.enter(what)

    # ------------------------------------------------------------------ step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters on all ranks. Collective.

        Args:
            closure (Callable, optional): computes the gradients and returns the loss. It is called
                once, on every rank.
            **kwargs: arguments for the ``step`` of the optimizer class.

        Returns:
            The closure's loss on this rank, or what the optimizer class returns. ``None`` with
            ``overlap_with_ddp=True``: the update has happened in backward.

        Raises:
            RuntimeError: if a gradient is not averaged or cannot be cut, on the rank that has it,
                which can call ``step`` again; and if the update fails, after which a checkpoint
                has to be loaded.
        """
        if self._overlaps_with_ddp:
            return None
        self._require_usable()
        with self._rank_group.monitor.noting_errors(f"the closure of step {self._steps + 1}"):
            has_run = RunClosure(closure) if callable(closure) else closure
        if self._attachment is not None:
            self._attachment.finish_raised()
        # This rank can call step() again if it raises before anything is done together. With
        # ONECOPY_CHECK=step all ranks are told.
        if not self._check_steps:
            with self._rank_group.monitor.noting_errors(f"in step {self._steps + 1}{self._mode}"):
                self._require_usable_gradients()
        return self._step(has_run, kwargs, self._announce(Turn.STEP))

    def _step_in_backward(self) -> None:
        """Called by a DDP communication hook when all gradients have arrived."""
        self._require_usable()
        self._step(None, {}, self._announce(Turn.STEP))

    def _step(self, closure: Any, kwargs: Mapping[str, Any], join_round: JoinRound | None) -> Any:
        """Prepare, and then for each bucket: reduce, update, gather."""
        with self._next_step():
            gradients = self._prepare_step(closure, kwargs, join_round)
            self._inner.options_in(self.param_groups)
            self._full_state = "the optimizer has stepped since the last consolidation"
            self._has_state = True
            with torch.profiler.record_function(f"onecopy::optimizer step {self._steps}"):
                changing = self._params.status.changes
                update = Update(self._inner, closure, kwargs, gradients, changing)
                order = self._params.begin_sending()
                if update.steps_at_once:
                    update.update_at_once(order)
                for bucket in order:
                    update.update_bucket(bucket)  # attached: waits for the bucket's gradients
                    self._params.all_gather(bucket)  # in flight while the next bucket is updated
                    self._params.status.updated()
                self._corruption.after_step(self._inner)
                self._params.finish_step()  # waits for the all-gathers, unless they are lazy
            self._inner.options_out(self.param_groups)
            if self._attachment is not None:
                self._attachment.used_up(self._steps)
        with self._rank_group.monitor.noting_errors():
            if join_config(self).enable:
                self.wait()  # DDP may broadcast its parameters when the context ends
        self._rank_group.monitor.note(f"step {self._steps} finished")
        if self._tracing is not None:
            self._tracing.step_finished(self._steps)
        return update.result

    @contextlib.contextmanager
    def _next_step(self) -> Iterator[None]:
        """Count a step, unless it raises before it has changed anything."""
        self._steps += 1
        where = f"in step {self._steps}{self._mode}"
        monitor, status = self._rank_group.monitor, self._params.status
        try:
            monitor.enter(where)
            with status.stepping(self._steps, len(self._params.plan.buckets)):
                yield
        except BaseException as error:
            # The other ranks may wait for this one's parameters: tell them why they wait.
            if status.refusal is not None:
                monitor.note(status.refusal, same_place=True, is_error=True)
                self._corruption.step_failed()
            else:
                monitor.status.take_back(f"{where} raised {type(error).__name__}: {error}")
                self._steps -= 1
            raise

    def _prepare_step(
        self, closure: Any, kwargs: Mapping[str, Any], join_round: JoinRound | None
    ) -> GradientsOf | None:
        """Do everything that can be refused, in the same order on all ranks. Return the
        gradients, or None: those of the parameters."""
        if self._attachment is not None:
            self._attachment.judge()
        self.wait()
        self._follow_changes(join_round)
        # Before master copies follow, which is no corruption.
        self._corruption.before_step(self._steps, self._params, self._compare_replicas)
        self._inner.masters.follow_params()
        if self._check_steps:
            self._compare_step(closure, kwargs, join_round)
        if not (
            (self._gradients_compared and not self._check_steps)
            or self.world_size == 1
            or self._attachment is not None
            or self._overlaps_with_ddp
            or join_config(self).enable  # joined ranks have no gradients
        ):
            self._gradients_compared |= compare_gradients(
                self._rank_group, self._params, self._steps, strict=self._check_steps
            )
        if self._attachment is not None:
            return self._attachment.gradients()
        if join_round is not None:
            received = join_round.send_gradients(self._params.plan, self._params.registry.params)
            if received is not None:  # this rank has joined
                return received
        self._require_usable_gradients()  # once more, of what was unfrozen just now
        return None

    @property
    def _mode(self) -> str:
        if self._attachment is None:
            return ""
        return f", attached, after {plural(self._attachment.reducer.backwards, 'backward')}"

    def _compare_replicas(
        self, fingerprints: torch.Tensor, since: str, changes: Sequence[str]
    ) -> None:
        """Compare what the corruption check has found, with ``check_every``. Collective."""
        self._rank_group.monitor.add_to_note("comparing replicas")
        same_outcome(self._rank_group, "comparing the ranks", self._description)
        names = self._params.registry.names
        require_equal_replicas(self._rank_group, self._inner, names, fingerprints, changes, since)

    def _compare_step(
        self, closure: Any, kwargs: Mapping[str, Any], join_round: JoinRound | None
    ) -> None:
        """Compare what all ranks must hold alike now, with ``ONECOPY_CHECK=step``. Collective."""
        lines = self._description()
        if join_round is None:  # a rank that has joined borrows its gradients
            lines += [
                f"step with {'a' if closure is not None else 'no'} closure, keywords {[*kwargs]}",
                *self._params.registry.readiness(with_gradients=self._attachment is None),
            ]
        same_outcome(self._rank_group, f"comparing step {self._steps}", lambda: lines)

    def _require_usable_gradients(self) -> None:
        """Raise if a gradient is not averaged, or cannot be cut as its parameter is."""
        if self._attachment is not None:
            self._attachment.require_averaged()
            return
        self._params.modules.require_finished_backward()
        registry = self._params.registry
        for index in self._params.plan.cut_params:
            grad = registry.params[index].grad
            if grad is not None and grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{registry.names[index]} has a sparse gradient, and its state is cut "
                    f"over the ranks. Keep it whole: put it into a group of its own with "
                    f'"partition": "whole", or pass partition="whole"'
                )

    # ------------------------------------------------------------------ parameter groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, on all ranks. Collective.

        No existing shard moves. A state dict that was consolidated before is dropped.

        Args:
            param_group (dict): ``"params"`` and, optionally, options of the optimizer class,
                ``"optimizer_class"`` and ``"partition"``.

        Raises:
            ValueError, TypeError: on all ranks, if the group is refused on any rank; nothing has
                changed then.
        """
        if not self.initialized:  # the base class's constructor adds the groups one by one
            Optimizer.add_param_group(self, param_group)
            return
        self._enter("adding a parameter group")
        before, known = len(self.param_groups), len(self._params.registry.entries)
        self._gradients_compared = False

        def prepare() -> list[str]:
            if not isinstance(param_group, dict):
                raise TypeError(f"a parameter group must be a dict, got {type(param_group)}")
            self._params.require_same_groups(self.param_groups)
            (group,) = as_groups([param_group])
            check_tensors([*self.param_groups, group])
            self._inner.options_in(self.param_groups)
            # Without defaults: a group may be of another class, and the inner optimizer adds them.
            defaults, self.defaults = self.defaults, {}
            try:
                Optimizer.add_param_group(self, group)
            finally:
                self.defaults = defaults
            policy = self._policies.of(group, self.defaults)
            self._params.admit(self.param_groups, [policy])  # and what was unfrozen
            self._inner.add_group(before, group, policy.optimizer_class)
            self._inner.options_out(self.param_groups)
            self._params.find_modules()
            return self._description()

        try:
            with self._params.all_or_nothing():
                same_outcome(self._rank_group, "adding a parameter group", prepare)
                self._params.require_same_order("adding a parameter group", known)
        except BaseException:
            del self.param_groups[before:]
            raise
        self.defaults = self._inner.defaults
        self._flags = flags_of(self.param_groups)
        self._full_state = "a parameter group was added after the last consolidation"
        self._params.rebuild()
        if self._attachment is not None:
            self._attachment.reducer.catch_up()

    def _follow_changes(self, join_round: JoinRound | None = None) -> None:
        """Take over what happened to the parameters since the last step: they were unfrozen, given
        other memory, or state was loaded that is not compared yet. Collective if there is any."""
        self._params.require_same_groups(self.param_groups)
        self._params.modules.require_in_place()
        flags = flags_of(self.param_groups)
        if flags != self._flags:  # as `fused`: the plan may forbid the new ones
            policies = self._policies_with(self.param_groups)
            self._params.registry.require_plan_fits(policies, self.world_size)
            self._flags = flags
        unfrozen = self._params.unfrozen()
        if join_round is not None:
            unfrozen = join_round.follow_source(self.param_groups, unfrozen)
        if unfrozen or not self._params.is_confirmed:
            self._plan_unfrozen(unfrozen)
        self._params.follow_memory()
        if self._attachment is not None:
            self._attachment.reducer.catch_up()

    def _policies_with(self, options: Sequence[Mapping[str, Any]]) -> list[GroupPolicy]:
        return self._policies.with_options(
            self._params.registry.policies, self.param_groups, options
        )

    def _plan_unfrozen(self, unfrozen: Sequence[int]) -> None:
        """Extend the plan by what was unfrozen, and compare the plans and what was loaded."""
        what = "taking in unfrozen parameters" if unfrozen else "comparing what was loaded"
        self._rank_group.monitor.add_to_note(what)
        self._gradients_compared = False  # before anything that can be interrupted on one rank

        def prepare() -> list[str]:
            self._params.extend(self.param_groups, unfrozen)
            return [*self._description(), *self._loaded]

        with self._params.all_or_nothing():
            same_outcome(self._rank_group, what, prepare)
        self._params.is_confirmed, self._loaded = True, []
        self._params.rebuild()

    # ------------------------------------------------------------------ attached mode

    def attach(
        self,
        module: torch.nn.Module,
        *,
        reduce_dtype: torch.dtype | None = None,
        lazy_gather: bool = False,
    ) -> None:
        """Shard the gradients of a module, too. Collective.

        From now on gradients are averaged over the ranks while backward runs, and each rank keeps
        those of its own shards. A step then communicates as much as plain DDP. ``param.grad`` is
        ``None`` after backward: use :meth:`clip_grad_norm_`, :meth:`grad_norm`, :meth:`full_grad`
        and :class:`onecopy.GradScaler`; ``torch.nn.utils.clip_grad_norm_`` sees no gradients.

        Args:
            module (Module): a ``DistributedDataParallel``, whose buckets this optimizer then
                reduces, or a bare module with all parameters of this optimizer. Parameters and
                buffers of a bare module are first broadcast from rank 0.
            reduce_dtype (torch.dtype, optional): the dtype in which each rank sends its gradients.
                They are summed in the wider of it and the dtype in which they are held. Default:
                the dtype of each gradient.
            lazy_gather (bool): return from :meth:`step` before the updated parameters have arrived.
                Forwards of the module and of its children wait for the parameters that they use;
                ``state_dict`` and all methods of this optimizer wait for all. Call :meth:`wait`
                before you read parameters in any other way. Default: ``False``.

        Raises:
            ValueError, TypeError, RuntimeError: on all ranks, if the module is refused on any rank,
                or a rank has too little memory; the optimizer is not attached then.
        """
        self._enter("attaching")

        def prepare() -> list[str]:
            if self._overlaps_with_ddp:
                raise RuntimeError(
                    "attach(...) and overlap_with_ddp=True exclude each other: the one leaves the "
                    "update to step(), the other does it inside backward"
                )
            if self._attachment is not None:
                raise RuntimeError("the optimizer is attached already: call detach() first")
            require_attachable(module, self._params, self._rank_group, reduce_dtype, lazy_gather)
            known = names_in(module)
            names = [known.get(entry.param, "") for entry in self._params.registry.entries]
            kind, number = type(module).__name__, self._rank_group.monitor.status.attachments
            how = f"reduce_dtype={reduce_dtype}, lazy_gather={bool(lazy_gather)}"
            lines = [f"attach({kind}, {how})", f"{plural(number, 'attachment')} before"]
            return [*lines, *self._description(), *describe_names(self._params.registry, names)]

        same_outcome(self._rank_group, "attaching", prepare)
        self._rank_group.monitor.status.attachments += 1
        self.wait()
        if not isinstance(module, DistributedDataParallel):
            broadcast_module(self._rank_group, module)
        self._attachment = Attachment(
            module, self._params, self._join, reduce_dtype, lazy_gather, self._steps
        )
        # Else hooks would go on taking gradients away from whoever comes next.
        self._last_will = weakref.finalize(self, self._attachment.detach)
        self._last_will.atexit = False

        def take_memory() -> list[str]:
            self._params.rebuild()
            return []

        try:
            same_outcome(self._rank_group, "taking memory for gradients", take_memory)
        except BaseException:  # on all ranks, if there is too little on one of them
            self.detach()
            with contextlib.suppress(OSError, RuntimeError):  # maybe there is enough without it
                self._params.rebuild()
            raise
        logger.info(
            "attached: gradients are sharded during backward and param.grad is None after it; clip "
            "with optimizer.clip_grad_norm_, scale with onecopy.GradScaler"
        )

    def detach(self) -> None:
        """Undo :meth:`attach`. Gradients that no step has used are dropped.

        Raises:
            RuntimeError: if the optimizer is not attached.
        """
        if self._attachment is None:
            raise RuntimeError("the optimizer is not attached")
        try:
            self._last_will()
        finally:
            self._attachment = None
            self._gradients_compared = False  # from now on somebody else averages them
            self._rank_group.monitor.add_to_note("then detached")

    def wait(self) -> None:
        """Wait until the parameters that the last step updated have arrived.

        Only needed with ``lazy_gather=True`` (see :meth:`attach`).
        """
        if self._params.all_gathers.queue.in_flight:
            self._params.all_gathers.queue.wait()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backwards accumulate this rank's gradients, as DDP's does.

        The first backward after it averages them all. Gradients of parameters with master copies
        are accumulated in the dtype of those, and ``param.grad`` is ``None``.

        Raises:
            RuntimeError: if the optimizer is not attached.
        """
        if self._attachment is None:
            raise RuntimeError("no_sync() is for attached mode: call attach(module) first")
        return self._attachment.hooks.no_sync()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip the norm of all gradients, as ``torch.nn.utils.clip_grad_norm_`` does.

        Collective in attached mode.

        Args:
            max_norm (float): the maximum of the norm.
            norm_type (float): the type of the norm, as ``inf``. Default: 2.
            error_if_nonfinite (bool): raise if the norm is not finite. Default: ``False``.
            foreach (bool, optional): without effect in attached mode.

        Returns:
            The norm before clipping, the same on all ranks.

        Raises:
            RuntimeError: with ``overlap_with_ddp=True``, which has used the gradients already; or
                with ``error_if_nonfinite``.
        """
        if self._overlaps_with_ddp:
            raise RuntimeError(
                "with overlap_with_ddp=True the update has happened when backward() returns: it is "
                "too late to clip. Leave it out, or use attach(...)"
            )
        max_norm, norm_type = as_number("max_norm", max_norm), as_number("norm_type", norm_type)
        chosen = {} if foreach is None else {"foreach": foreach}
        check_switches(error_if_nonfinite=error_if_nonfinite, **chosen)
        if self._attachment is None:
            return torch.nn.utils.clip_grad_norm_(
                self._params.registry.params, max_norm, norm_type, error_if_nonfinite, foreach
            )
        arguments = (max_norm, norm_type, error_if_nonfinite)
        norm: torch.Tensor = self._inspect_gradients("clip_grad_norm_", *arguments)
        return norm

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of all gradients. Collective in attached mode.

        Args:
            norm_type (float): the type of the norm, as ``inf``. Default: 2.
        """
        norm_type = as_number("norm_type", norm_type)
        if self._attachment is None:
            gradients = [p.grad for p in self._params.registry.params if p.grad is not None]
            return torch.nn.utils.get_total_norm(gradients, norm_type)
        norm: torch.Tensor = self._inspect_gradients("grad_norm", norm_type)
        return norm

    def full_grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the averaged gradient of a parameter, or ``None``. Collective in attached mode.

        Args:
            param (Tensor): a parameter of this optimizer.

        Returns:
            ``param.grad``. In attached mode a copy of the whole gradient, on all ranks, in the
            dtype of the master copy if the parameter has one.
        """
        index = next((i for i, p in enumerate(self._params.registry.params) if p is param), None)
        if index is None:
            raise ValueError("full_grad(p): p is not a parameter of this optimizer")
        if self._attachment is None:
            return param.grad
        full: torch.Tensor | None = self._inspect_gradients("full_grad of parameter ", index)
        return full

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters.

        Args:
            set_to_none (bool): set ``param.grad`` to ``None`` instead of zero. Default: ``True``.
        """
        super().zero_grad(set_to_none)
        if self._attachment is not None:
            self._attachment.zero_grad()
        self._params.modules.forgive_backward()  # what the attachment could not mend

    def _drop_gradients(self) -> None:
        """Drop the reduced gradients. ``param.grad`` is the user's."""
        if self._attachment is not None:
            self._attachment.drop()

    def _inspect_gradients(self, name: str, *args: Any) -> Any:
        """Call a function of ``gradients/norms.py`` on all ranks, in attached mode. Inside ``Join``
        also on joined ranks. What was unfrozen is planned before."""
        attachment = self._attachment
        assert attachment is not None
        self._require_usable()
        attachment.finish_raised()
        join_round = self._announce(Turn.INSPECT)
        attachment.judge()  # a backward that has raised ends here, on all ranks
        call = f"{name}{shown(args, longest=200)}"
        self._rank_group.monitor.note(f"{call} after {self._steps} steps{self._mode}")
        with self._rank_group.monitor.noting_errors():
            if join_round is None:
                # Owners that clip differently, or send the gradients of different parameters,
                # would go wrong without a sign of it.
                same_outcome(self._rank_group, call, list)
            self._follow_changes(join_round)
            if join_round is not None:
                join_round.broadcast([name, *args])
            attachment.judge()  # of what was unfrozen just now
            return OPERATIONS[name](attachment.reducer, *args)

    def _skip_step(self) -> None:
        """The scaler does not take a step that joined ranks wait for."""
        self._announce(Turn.SKIP)
        self._drop_gradients()

    def _require_usable_scaler(self) -> None:
        """Raise if the ``GradScaler`` that is about to call ``step`` cannot work."""
        if self._overlaps_with_ddp:
            raise RuntimeError(
                "with overlap_with_ddp=True the update happens inside backward, with gradients of "
                "the scaled loss: a GradScaler cannot work. Leave it out, or use attach(...)"
            )
        if self._attachment is not None and not self._is_scaled:
            raise RuntimeError(
                "torch.amp.GradScaler looks at param.grad, which is None while the optimizer is "
                "attached. Use onecopy.GradScaler, which is the same otherwise"
            )

    # ------------------------------------------------------------------ Join

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for ``torch.distributed.algorithms.Join``.

        Args:
            **kwargs: of these only ``divide_by_initial_world_size`` is used: if it is ``False``,
                an attached optimizer averages over the ranks that have inputs left, as DDP does.
        """
        if self._attachment is not None:
            self._attachment.divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        # With overlap_with_ddp, joined ranks step when DDP has finished: see hook_with_zero_step.
        take_part = do_nothing if self._overlaps_with_ddp else self._run_joined
        return JoinCallbacks(take_part, lambda _: leave_join(self))

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` communicates."""
        return self._params.registry.params[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group in which ``Join`` communicates."""
        return self.process_group

    def _announce(self, turn: Turn) -> JoinRound | None:
        """Inside ``Join``: tell the ranks that have joined what comes. None if there are none."""
        return self._join.announce(turn) if join_config(self).enable else None

    def _run_joined(self) -> None:
        """On a joined rank: take part in what the other ranks do."""
        self._join.follow(self._take_turn)

    def _take_turn(self, join_round: JoinRound) -> None:
        """What the other ranks do in this turn, in the same order."""
        attachment = self._attachment
        if join_round.turn is Turn.STEP:
            self._step(None, {}, join_round)
        elif join_round.turn is Turn.SKIP:
            self._drop_gradients()
        elif join_round.turn is Turn.BACKWARD:
            assert attachment is not None  # the ranks attach together
            attachment.follow_backward(join_round)
        else:
            assert attachment is not None
            attachment.judge()
            self._rank_group.monitor.note(
                "looking at gradients with the others, joined", is_joined=True
            )
            self._follow_changes(join_round)
            name, *args = join_round.broadcast(())
            attachment.judge()
            OPERATIONS[name](attachment.reducer, *args)

    # ------------------------------------------------------------------ full state dict

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the full state to one rank, where :meth:`state_dict` then returns it. Collective.

        The result is a copy on the CPU. It is dropped at the next step.

        Args:
            to (int): the rank, as a number in the process group. Default: 0.
        """
        self._require_usable()
        self._corruption.require_unchanged(self._rank_group, self._params.registry.names)
        self._bring_masters_up_to_date()

        def let_go() -> None:
            self._full_state = "the last consolidation has failed"

        found = consolidate(
            self._rank_group, self._params, self.param_groups, self._steps, to, let_go
        )
        self._rank_group.monitor.note("state consolidated")
        if found is not None:
            self._full_state = found
        elif isinstance(self._full_state, str):
            self._full_state = f"the state was consolidated to rank {to}"

    def state_dict(self) -> dict[str, Any]:
        """Return the full state, as the unsharded optimizer class returns it. Not collective.

        :meth:`consolidate_state_dict` must have gathered it to this rank since the last step.
        Before the first step that is not needed, unless the class makes state when it is built.

        Raises:
            RuntimeError: if the state was not gathered to this rank, or has changed since.
        """
        before, after = state_dict_hooks(self)
        for pre_hook in before.values():
            pre_hook(self)
        result = full_state_dict(
            self._full_state, self._has_state, self.rank, self._params, self.param_groups
        )
        for post_hook in after.values():
            changed = post_hook(self, result)
            result = result if changed is None else changed
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state dict, of which this rank keeps its shards. To be called on all ranks.

        The dict may come from :meth:`state_dict` at any world size, from the unsharded optimizer
        class, or from torch's class of the same name. It is not changed. The ranks do not
        communicate: whether all have loaded the same is compared in the next step.

        Args:
            state_dict (dict): the state and the options of all groups.

        Raises:
            ValueError, TypeError: if the dict does not fit; nothing has changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        before, after = load_state_dict_hooks(self)
        for pre_hook in before.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._send_rest_of_torn_step()
        loadable = check_state_dict(state_dict, self.param_groups, self._params.registry.cuttable())
        self._adopt(loadable)
        if self.world_size > 1:
            self._loaded = sample_lines(
                loadable, self._params.registry.params, self._params.registry.names
            )
        for post_hook in after.values():
            post_hook(self)

    def _adopt(self, loadable: Loadable) -> None:
        """Take over state and options; if that fails, nothing has changed."""
        plan = self._params.plan
        policies = self._policies_with(loadable.groups)
        made = self._params.frozen_with_constructor_state(self.param_groups, loadable.whole)
        with torch.inference_mode(False), self._params.all_or_nothing():
            self._params.make_room_for(self.param_groups, loadable.whole.keys() - made, policies)
            loadable = adopt_state(self._params, loadable)
        self._finish_loading(loadable, plan)

    def _finish_loading(self, loadable: Loadable, plan: Plan) -> None:
        """Follow what the inner optimizers have loaded; ``plan`` was ours before."""
        with self._params.status.loading():
            self._corruption.state_changed()
            self._full_state = "a state dict was loaded after the last consolidation"
            self._has_state |= not loadable.is_empty
            if self._params.plan is not plan:
                self._params.rebuild()
            self._inner.masters.load(loadable.masters)
            for group, inner, saved in zip(
                self.param_groups, self._inner.param_groups, loadable.groups, strict=True
            ):
                kept = {key: group[key] for key in NOT_OPTIONS if key in group}
                if "param_names" in saved:
                    kept["param_names"] = list(saved["param_names"])
                group.clear()
                group.update(kept)
                group.update(options_of(inner))
            self._flags = flags_of(self.param_groups)
        if self.rank == 0:
            planned = [entry.param for entry in self._params.registry.planned(self._params.plan)]
            warn_of_masters(loadable, planned, self._inner.master_dtype)

    def _prepare_to_save(self, what: str) -> None:
        """Refuse corrupted state, and bring plan and master copies up to date."""
        self._enter(what)
        self._corruption.require_unchanged(self._rank_group, self._params.registry.names)
        self._follow_changes()
        self._bring_masters_up_to_date()

    def _prepare_to_load(self, what: str) -> None:
        """Refuse a lost process group, and end a torn step."""
        self._rank_group.monitor.require_working()
        self._send_rest_of_torn_step()
        self._rank_group.monitor.enter(what)

    def _bring_masters_up_to_date(self) -> None:
        """Let master copies follow what was written into the parameters since the last step."""
        self.wait()
        if self._inner.masters.follow_params(also_loaded=False):
            self._corruption.state_changed()

    def _send_rest_of_torn_step(self) -> None:
        """Before state is loaded: send the buckets that a torn step has not sent, since other ranks
        may wait for them, and drop its gradients."""
        if self._params.status.refusal is not None and self._rank_group.monitor.refusal is None:
            self._params.send_remaining()
            self.wait()
            self._drop_gradients()

    # ------------------------------------------------------------------ sharded checkpoints

    def sharded(
        self, module: torch.nn.Module | None = None, *, flatten_optimizer_state_dict: bool = False
    ) -> ShardedState:
        """Return this rank's shards of the state, for ``torch.distributed.checkpoint``.

        The checkpoint holds the state of the unsharded optimizer, under the names and keys that
        torch's ``get_optimizer_state_dict`` gives, whatever the number of ranks.

        Args:
            module (Module, optional): gives the parameters their names. Not needed if the optimizer
                was built from ``named_parameters()``. With neither, parameters are named by their
                position.
            flatten_optimizer_state_dict (bool): as in torch's ``StateDictOptions``. Default:
                ``False``.

        Example::

            dcp.save({"model": model, "optim": optimizer.sharded(model)}, checkpoint_id=path)
            dcp.load({"model": model, "optim": optimizer.sharded(model)}, checkpoint_id=path)
        """
        return ShardedState(
            self._rank_group,
            self._prepare_to_save,
            self._prepare_to_load,
            lambda: self._state_view(module),
            self._policies_with,
            self._adopt,
            flatten_optimizer_state_dict,
        )

    def save(
        self,
        path: str | os.PathLike[str],
        module: torch.nn.Module | None = None,
        *,
        flatten_optimizer_state_dict: bool = False,
    ) -> None:
        """Write a sharded checkpoint of the state into a directory. Collective.

        Each rank writes its own shards. A checkpoint that is there already is replaced atomically:
        whenever a process dies, the directory holds the old one or the new one. ``dcp.load`` finds
        the state under the key ``"optim"``.

        Args:
            path (str or PathLike): the directory, the same on all ranks.
            module (Module, optional): as in :meth:`sharded`.
            flatten_optimizer_state_dict (bool): as in :meth:`sharded`. Default: ``False``.
        """
        self._prepare_to_save(f"saving to {path}")
        save_checkpoint(
            self._rank_group,
            lambda: self._state_view(module),
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
        """Load the state from a checkpoint directory. Each rank reads its own shards. Collective.

        The checkpoint may come from :meth:`save` or ``dcp.save``, at any world size: of this class,
        of the unsharded class, or of FSDP2. No code in it is run.

        Parameters must be grouped as in the checkpoint, because options belong to groups; the order
        of the groups does not matter. Master copies that the checkpoint lacks are made from the
        parameters.

        Args:
            path (str or PathLike): the directory, the same on all ranks.
            module (Module, optional): gives the parameters their names, as in :meth:`sharded`.
            strict (bool): refuse a checkpoint that does not fit exactly. If ``False``, load what
                fits; groups that differ keep their options. Default: ``True``.
            key (str, optional): where in the checkpoint the state is, if it has that of several
                optimizers.

        Returns:
            A report of what is missing, unexpected, of another shape, and rebuilt.

        Raises:
            ValueError: on all ranks, if the checkpoint does not fit; nothing has changed then.
        """
        views: list[StateView] = []

        def prepare() -> list[str]:
            require_name(Path(path))
            views.append(self._state_view(module))
            return [
                f"from {path}",
                f"strict={strict}, key={key!r}",
                *describe_names(self._params.registry, views[0].names),
            ]

        self._prepare_to_load(f"loading {path}")
        same_outcome(self._rank_group, "loading a checkpoint", prepare)
        self._bring_masters_up_to_date()  # those that the checkpoint has nothing for are kept
        plan = self._params.plan
        # State that is made in inference mode could never be stepped.
        with torch.inference_mode(False), self._params.all_or_nothing():
            loadable, report = load_checkpoint(
                self._rank_group,
                views[0],
                Path(path),
                policies_for=self._policies_with,
                strict=strict,
                key=key,
            )
        self._finish_loading(with_ranks_told(self._rank_group, loadable), plan)
        return report

    def _state_view(self, module: torch.nn.Module | None) -> StateView:
        names = checkpoint_names(self._params.registry, self.param_groups, module)
        return StateView(self._params, self.param_groups, names, self.rank)

    # ------------------------------------------------------------------ checks and reports

    def assert_replicas_equal(self) -> None:
        """Compare what all ranks hold. Collective.

        Compared are the parameters, bit for bit, and the numbers in the state, as ``step``, of
        parameters that are cut. With ``check_every``, each rank also compares its state with what
        it was after the last step.

        Raises:
            RuntimeError: on all ranks, naming the first parameter that differs, and the ranks.
        """
        self._enter("comparing replicas")
        self.wait()
        registry = self._params.registry
        changes = self._corruption.changes(len(registry.params))
        if registry.params:
            prints = torch.stack([fingerprint(param).cpu() for param in registry.params])
            require_equal_replicas(self._rank_group, self._inner, registry.names, prints, changes)

    def memory_report(self) -> MemoryReport:
        """Return how many bytes of memory this rank holds now, by kind. Not collective."""
        params, attachment = self._params.registry.params, self._attachment
        staging = self._params.all_gathers.staged_bytes
        gradients = nbytes_of(param.grad for param in params if param.grad is not None)
        if attachment is not None:
            gradients += attachment.reducer.held_bytes
            staging += attachment.reducer.staged_bytes
        return MemoryReport(
            parameters=nbytes_of(params),
            gradients=gradients,
            state=state_bytes(self._inner.state.values()),
            master_copies=nbytes_of(o.tensor for o in self._inner.shards if o.has_master),
            staging=staging,
            ddp_buckets=0 if attachment is None else attachment.hooks.ddp_bytes,
        )

    def comm_stats(self) -> CommStats:
        """Return what this rank has sent since construction, and how long it has waited for
        communication. Not collective."""
        return self._rank_group.traffic.stats(self._steps)

    def _facts(self) -> dict[str, Any]:
        """For the trace of a run, whose page is made from them."""
        stats = self.comm_stats()
        classes = dict.fromkeys(policy.optimizer_class for policy in self._params.registry.policies)
        return {
            "version": __version__,
            "world_size": self._rank_group.world_size,
            "is_attached": self._attachment is not None,
            "classes": [optimizer_class.__name__ for optimizer_class in classes],
            "memory": self.memory_report().as_dict(),
            "communication": stats.as_dict(),
            "buckets": [asdict(each) for each in stats.buckets],
        }

    # ------------------------------------------------------------------ torch.optim.Optimizer

    @property  # type: ignore[override]
    def state(self) -> OwnedState:
        """The state of this rank's shards, by the tensors in ``optim.param_groups``.

        After writing into it, assign it, ``optimizer.state = optimizer.state``: with
        ``check_every``, it is else taken for corrupted.
        """
        return self._inner.state

    @state.setter
    def state(self, value: Mapping[torch.Tensor, Any]) -> None:
        if "_inner" in self.__dict__:  # the base class's constructor sets an empty one before
            self._inner.replace_state(value)
            self._corruption.state_changed()
            self._full_state = "the state was replaced after the last consolidation"
            self._has_state = True

    @property
    def optim(self) -> Any:
        """The optimizer of this rank's shards. With several classes, one object for all of them."""
        inners = self._inner.inners
        return inners[0].optimizer if len(inners) == 1 else self._inner

    def __getattr__(self, name: str) -> Any:
        """The attributes of the wrapped class, and its methods ``train`` and ``eval``."""
        inner = self.__dict__.get("_inner")
        if inner is not None and name == ASKED_BY_GRAD_SCALER:
            self._require_usable_scaler()
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        having = [each.optimizer for each in inner.inners if hasattr(each.optimizer, name)]
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
                f"{name} is a method of {self._optimizer_class.__name__} on this rank's shards "
                f"only. If that is what you want, call optimizer.optim.{name}"
            )
        return value

    def _move_parameters(
        self, name: str, optimizers: Sequence[Optimizer], *args: Any, **kwargs: Any
    ) -> None:
        """Call a method of the wrapped class that changes parameters, and all-gather them."""
        self._enter(f"in {name}()")
        self.wait()
        self._follow_changes()
        self._inner.masters.follow_params()
        self._full_state = f"{name}() was called after the last consolidation"
        self._has_state = True
        self._inner.options_in(self.param_groups)
        for optimizer in optimizers:
            getattr(optimizer, name)(*args, **kwargs)
        self._inner.options_out(self.param_groups)
        self._corruption.state_changed()
        self._params.send_all()

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroRedundancyOptimizer:
        """An optimizer of copies of the parameters, in the same process group. Hooks are left
        behind, as by torch, and so is the ``step`` that a scheduler has wrapped."""
        if self._attachment is not None:
            raise RuntimeError("an attached optimizer cannot be copied: call detach() first")
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo[id(self.process_group)] = self.process_group
        left = {"step", "_inner", "_params", "_full_state", "_tracing", "_join"}
        for key, value in self.__dict__.items():
            if key not in left and not is_table_of_hooks(key):
                new.__dict__[key] = copy.deepcopy(value, memo)
        new._inner, registry = copy.deepcopy((self._inner, self._params.registry), memo)
        new._params = self._params.copied(new._inner, registry)
        new._full_state = "this optimizer is a copy that was not consolidated"
        new._gradients_compared = False
        new._tracing = None
        new._join = JoinParticipant(weakref.ref(new), new._rank_group)
        Optimizer.__setstate__(new, {})
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: this rank holds only its share of the "
            "state, and a process group. Save consolidate_state_dict() + state_dict() instead"
        )

    @property
    def _all_params(self) -> list[torch.Tensor]:
        """All parameters, in the order of their groups."""
        return self._params.registry.params
