"""``ZeroRedundancyOptimizer``: wires planning, the local step, the gather and the state dict.

One step, in drop-in mode (gradients are complete and averaged when ``step`` is called)::

    options in  ->  gradients to my pieces  ->  my optimizer steps  ->  options out  ->  gather
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from onecopy.agreement import agree
from onecopy.attaching import Attaches
from onecopy.checking import Checks
from onecopy.checks import check_environment, check_options, check_switches, checks_steps
from onecopy.condition import Condition
from onecopy.full_state import FullState
from onecopy.growing import Grows
from onecopy.inner import OwnedState, Replay
from onecopy.intake import (
    first_device,
    take_in,
)
from onecopy.join import Party, Turn, lend_gradients
from onecopy.joining import Joins
from onecopy.keeping import KeepsState
from onecopy.local import GradientsOf, LocalOptimizer, of_the_parameters
from onecopy.policies import Policies
from onecopy.reporting import Reports
from onecopy.roster import plan_to_extend
from onecopy.shards import Shards
from onecopy.tally import in_one_line
from onecopy.torch_private import is_table_of_hooks, join_config
from onecopy.tracing import Traced, Tracing
from onecopy.transport import Transport
from onecopy.version import __version__

logger = logging.getLogger("onecopy")

# Methods of an optimizer class that move the parameters themselves, as schedule-free ones do.
_MOVES_PARAMETERS = ("train", "eval")


class ZeroRedundancyOptimizer(KeepsState, Attaches, Grows, Joins, Checks, Reports):
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
        overlap_with_ddp: step inside backward, from a DDP communication hook made by
            ``onecopy.hook_with_zero_step``. ``step()`` then does nothing.
        partition: ``"auto"`` (by what the class needs), ``"elementwise"`` or ``"whole"``.
        bucket_mb: how much is gathered at once, in MiB; by default 25, and less for small models.
        master_dtype: keep a copy in this dtype, float32 as a rule, of every parameter of a narrower
            one, and update that. The copies are sharded, and part of the state; parameters are
            gathered in their own dtype.
        check_every: look for bits that change between steps, in the parameters and in the state,
            and tell all ranks of it every so many steps; compare what the ranks hold then, too.
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
        bucket_mb: float | None = None,
        master_dtype: torch.dtype | None = None,
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
        self._watch_with(check_every)
        self._steps = 0
        self._policies = Policies(
            optimizer_class, partition, self.world_size > 1, defaults, master_dtype
        )
        self._full_state = FullState()
        self._loaded = []
        self._attachment = None
        self._condition = Condition()
        self._steps_in_backward = False

        def prepare() -> list[str]:
            if refusal is not None:
                raise refusal
            check_options(check_every, master_dtype)
            check_environment(os.environ)
            check_switches(
                parameters_as_bucket_view=parameters_as_bucket_view,
                overlap_with_ddp=overlap_with_ddp,
            )
            self._steps_in_backward = bool(overlap_with_ddp)
            self._check_steps = checks_steps(os.environ)
            self._trace_order = self._take_trace_order()
            Joinable.__init__(self)
            Optimizer.__init__(self, groups, {})
            local = LocalOptimizer(optimizer_class, defaults, master_dtype)
            plan = plan_to_extend(self.param_groups, self.world_size, bucket_mb)
            self._shards = Shards(self._transport, local, plan, parameters_as_bucket_view)
            policies = [self._policies.of(group, defaults) for group in self.param_groups]
            self._shards.admit(self.param_groups, policies)
            local.build(self.param_groups, [policy.optimizer_class for policy in policies])
            local.options_out(self.param_groups)
            self._shards.look_for_modules()
            return self._description()

        agree(self._transport, "building the optimizer", prepare)
        self._shards.require_same_order("building the optimizer")
        self._company.count_optimizer()
        self._transport.compares_phases = self._check_steps
        self.defaults = self._local.defaults
        self._policies.remember_flags(self._roster.policies, self.param_groups)
        self._shards.settle()
        traced = Traced(self.wait, self._facts)
        self._tracing = Tracing.of(self._trace_order, self.global_rank, traced)
        self._company.note("optimizer built")
        if self.rank == 0 and logger.isEnabledFor(logging.INFO):
            classes = [policy.optimizer_class for policy in self._roster.policies]
            logger.info(in_one_line(self._plan, classes))
        self.initialized = True

    # ------------------------------------------------------------------ what it holds

    @property  # type: ignore[override]
    def state(self) -> OwnedState:
        """The state of what this rank owns."""
        return self._local.state

    @state.setter
    def state(self, value: Mapping[torch.Tensor, Any]) -> None:
        if "_shards" in self.__dict__:  # the base class's constructor sets an empty one before
            self._local.replace_state(value)
            self._state_has_changed()
            self._full_state.forget("the state was replaced after the last consolidation")

    def _description(self) -> list[str]:
        """What all ranks must hold alike."""
        return [
            f"onecopy {__version__}, torch {torch.__version__}, {self.world_size} ranks, "
            f"{self._steps} steps taken",
            f"check_every={self._check_every}, ONECOPY_CHECK={'step' * self._check_steps}, "
            f"overlap_with_ddp={self._steps_in_backward}",
            *self._shards.description(self.param_groups),
        ]

    # ------------------------------------------------------------------ step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters on all ranks. Keywords go to the optimizer class's ``step``.

        A closure is run once, on every rank; its result, this rank's loss, is returned.
        """
        if self._steps_in_backward:
            return None
        self._require_usable()
        with self._company.noting_errors(f"the closure of step {self._steps + 1}"):
            replay = Replay(closure) if callable(closure) else closure
        if self._attachment is not None:
            self._attachment.give_up_raised()
        if not self._check_steps:  # else all ranks are told of it
            # Before anything is done together: so that this rank can call it again.
            with self._company.noting_errors(f"in step {self._steps + 1}{self._mode}"):
                self._require_usable_gradients()
        return self._step(replay, kwargs, self._announce(Turn.STEP))

    def _step_in_backward(self) -> None:
        """Called by a DDP communication hook when all gradients have arrived."""
        self._require_usable()
        self._step(None, {}, self._announce(Turn.STEP))

    def _step(self, closure: Any, kwargs: Mapping[str, Any], party: Party | None) -> Any:
        with self._in_next_step():
            if self._attachment is not None:
                self._attachment.judge()
            self.wait()
            self._follow_changes(party)
            self._look_for_damage()
            self._local.masters.follow_params()
            if self._check_steps:
                self._compare_step(closure, kwargs, party)
            self._compare_gradients()
            gradients = self._gradients(party)
            self._local.options_in(self.param_groups)
            self._full_state.forget("the optimizer has stepped since the last consolidation")
            with torch.profiler.record_function(f"onecopy::optimizer step {self._steps}"):
                result = self._shards.step(
                    closure, kwargs, gradients, self._condition, self._sentry
                )
            self._local.options_out(self.param_groups)
            if self._attachment is not None:
                self._attachment.used_up(self._steps)
        with self._company.noting_errors():
            if join_config(self).enable:
                self.wait()  # DDP may send its parameters around when the context ends
        self._company.note(f"step {self._steps} finished")
        if self._tracing is not None:
            self._tracing.step_finished(self._steps)
        return result

    @contextlib.contextmanager
    def _in_next_step(self) -> Iterator[None]:
        """Count a step, unless it raises before it has changed anything."""
        self._steps += 1
        where = f"in step {self._steps}{self._mode}"
        try:
            self._transport.enter(where)
            with self._condition.stepping(self._steps, len(self._plan.buckets)):
                yield
        except BaseException as error:
            # The other ranks may wait for this one's parameters: tell them why they wait.
            refusal = self._condition.refusal
            if refusal is not None:
                self._company.note(refusal, same_place=True, is_error=True)
                self._finish_looking()
            else:
                self._company.take_back(f"{where} raised {type(error).__name__}: {error}")
                self._steps -= 1
            raise

    def _gradients(self, party: Party | None) -> GradientsOf:
        """Where this step finds the gradients of the pieces in a bucket."""
        if self._attachment is not None:
            return self._attachment.gradients()
        borrowed = None
        if party is not None:
            borrowed = lend_gradients(self._transport, party, self._plan, self._roster.params)
        if borrowed is not None:
            return self._local.by_bucket(borrowed).__getitem__
        self._require_usable_gradients()  # once more, of what was unfrozen just now
        return of_the_parameters

    def _require_usable_gradients(self) -> None:
        if self._attachment is not None:
            self._attachment.require_averaged()
            return
        self._shards.require_finished_backward()
        for index in self._plan.cut_params:
            grad = self._roster.params[index].grad
            if grad is not None and grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{self._roster.names[index]} has a sparse gradient, and its state is cut over "
                    f"the ranks. Keep it whole: put it into a group of its own with "
                    f'"partition": "whole", or pass partition="whole"'
                )

    # ------------------------------------------------------------------ as torch's class has it

    @property
    def optim(self) -> Any:
        """The optimizer on this rank's pieces; with several classes, all of them as one."""
        inners = self._local.inners
        return inners[0].optimizer if len(inners) == 1 else self._local

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
        self._require_usable()
        self._transport.enter(f"in {name}()")
        self.wait()
        self._follow_changes()
        self._local.masters.follow_params()
        self._full_state.forget(f"{name}() was called after the last consolidation")
        self._local.options_in(self.param_groups)
        for optimizer in optimizers:
            getattr(optimizer, name)(*args, **kwargs)
        self._local.options_out(self.param_groups)
        self._state_has_changed()
        self._shards.send_all()

    # ------------------------------------------------------------------ copying

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroRedundancyOptimizer:
        """A working optimizer on copies of the parameters, in the same process group."""
        if self._attachment is not None:
            raise RuntimeError("an attached optimizer cannot be copied: call detach() first")
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo[id(self.process_group)] = self.process_group
        # Hooks are left behind, as torch does, and so is the `step` that a scheduler has wrapped.
        left = {"step", "_shards", "_full_state", "_tracing"}
        for key, value in self.__dict__.items():
            if key not in left and not is_table_of_hooks(key):
                new.__dict__[key] = copy.deepcopy(value, memo)
        local, roster = copy.deepcopy((self._local, self._roster), memo)
        new._shards = self._shards.copied(local, roster)
        new._full_state = FullState("this optimizer is a copy that was not consolidated")
        new._tracing = None
        Optimizer.__setstate__(new, {})
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: this rank holds only its share of the "
            "state, and a process group. Save consolidate_state_dict() + state_dict() instead"
        )
