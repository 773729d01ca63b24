"""The plan, the owned shards and their memory, which change together or not at all.

`ShardedParams.rebuild` is the one place that prepares memory and all-gathers for the plan as it is.
It is reached from construction, growth, loads, moved parameters and ``attach``. `StepStatus` knows
whether a step or a load has failed in the middle.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from onecopy.comm.group import RankGroup
from onecopy.planning.param_groups import GroupPolicy, ParamRegistry
from onecopy.planning.plan import Plan
from onecopy.sharding.engine import AllGathers, FlatStorage, SendBuffers
from onecopy.sharding.inner import InnerOptimizers
from onecopy.sharding.parameter_changes import MemoryWatch, ModuleWatch
from onecopy.sharding.parameter_names import require_same_order


class StepStatus:
    """Whether a step or a load has failed in the middle: then the optimizer cannot be used."""

    def __init__(self) -> None:
        self.refusal: str | None = None  # why it cannot be used, and what to do
        self._is_changing = False  # parameters or state, in the present step
        self._updated = 0  # buckets

    @contextlib.contextmanager
    def stepping(self, step: int, buckets: int) -> Iterator[None]:
        """Around a step, which calls ``changes`` and ``updated``. If the step raises before it has
        changed anything, the optimizer stays usable."""
        self._is_changing, self._updated = False, 0
        try:
            yield
        except BaseException as error:
            if self._is_changing:
                self._tear(
                    f"step {step} failed after {self._updated} of {buckets} buckets "
                    f"({_in_a_line(error)}): a part of the parameters and of the state is updated, "
                    "another is not. Load a checkpoint of the model and of the optimizer, on all "
                    "ranks"
                )
            raise

    def changes(self) -> None:
        """Parameters or state are about to change: from here on the step cannot be undone."""
        self._is_changing = True

    def updated(self) -> None:
        """Another bucket was updated and is being gathered."""
        self._is_changing = True  # also if this rank owns nothing of it
        self._updated += 1

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around the end of a load, which cannot be undone. After it the optimizer is usable."""
        try:
            yield
        except BaseException as error:
            self._tear(
                f"loading has failed in the middle ({_in_a_line(error)}): a part of the state is "
                "the new one, another is not. Load again, on all ranks"
            )
            raise
        self.refusal = None

    def _tear(self, refusal: str) -> None:
        self.refusal = refusal

    def require_whole(self) -> None:
        """Raise if a step or a load has failed in the middle."""
        if self.refusal is not None:
            raise RuntimeError(self.refusal)


def _in_a_line(error: BaseException) -> str:
    summary, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {summary}"


Groups = Sequence[Mapping[str, Any]]  # the user's param_groups


class GradientBuffers(Protocol):
    """What is rebuilt with every change of the plan or of the memory."""

    def follow(self, plan: Plan, params: Sequence[torch.Tensor]) -> None: ...
    @property
    def send_buffers(self) -> SendBuffers: ...


class ShardedParams:
    """The parameters of an optimizer: registry, plan, owned shards, flat storage, all-gathers."""

    def __init__(
        self, rank_group: RankGroup, inner: InnerOptimizers, plan: Plan, bucket_view: bool
    ) -> None:
        self.inner = inner
        self.plan = plan  # at first of nothing
        self.registry = ParamRegistry()
        self.is_confirmed = True  # all ranks are known to hold the same plan
        self._rank_group = rank_group
        self._flat = FlatStorage() if bucket_view else None
        self.all_gathers = AllGathers(rank_group)
        self.gathers_lazily = False  # whoever uses the parameters waits
        self._memory = MemoryWatch()
        self.modules = ModuleWatch(())
        self._unplanned: list[torch.Tensor] = []  # frozen parameters
        self.follower: GradientBuffers | None = None  # in attached mode
        self.status = StepStatus()
        self._unsent: list[int] = []  # buckets, of the present step

    # ------------------------------------------------------------------ changing

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """If the block raises, registry, plan, shards and state are as before."""
        registry, plan, confirmed = self.registry, self.plan, self.is_confirmed
        modules = self.modules
        undo_inner = self.inner.snapshot()
        try:
            yield
        except BaseException:  # an interrupted load, too, leaves everything as it was
            self.registry, self.plan, self.is_confirmed = registry, plan, confirmed
            self.modules = modules
            undo_inner()
            raise

    def admit(self, groups: Groups, policies: Sequence[GroupPolicy]) -> None:
        """Add groups, and own this rank's shards of the trainable parameters in them."""
        for group, policy in zip(groups, policies, strict=True):
            self.registry = self.registry.with_group(group, policy)
        self._own(self.registry.extend(self.plan, self.registry.to_plan(self.plan)))

    def extend(self, groups: Groups, new: Sequence[int]) -> None:
        """Plan parameters that are not planned yet."""
        self._own(self.registry.extend(self.plan, new))
        self.inner.refill_groups(groups)

    def make_room_for(
        self, groups: Groups, with_state: Container[torch.Tensor], policies: Sequence[GroupPolicy]
    ) -> None:
        """Change the plan as the state and the policies that are to be loaded require.

        A frozen parameter that has state is planned, or its state would be lost. If a policy
        forbids the cuts of the plan, another plan is made. Loading is not collective: whether all
        ranks were given the same is compared in the next step.
        """
        before = self.plan
        late = [i for i in self.registry.unplanned(before) if self.registry.params[i] in with_state]
        fitting = self.registry.with_policies(policies) if before.world_size > 1 else self.registry
        if fitting is not self.registry:
            self.registry, self.plan = fitting, Plan(before.world_size, before.bucket_bytes)
            self.inner.remove_shards()
            self.extend(groups, [*sorted(before.params), *late])
        elif late:
            self.extend(groups, late)
        self.is_confirmed = False

    def frozen_with_constructor_state(
        self, groups: Groups, states: Mapping[torch.Tensor, Any]
    ) -> set[torch.Tensor]:
        """Frozen parameters whose state is what the class makes in its constructor."""
        found = set()
        for index in self.registry.unplanned(self.plan):
            entry = self.registry.entries[index]
            cls = self.registry.policies[entry.group].optimizer_class
            made = self.inner.constructor_state(cls, groups[entry.group], [entry.param])
            state, initial = states.get(entry.param), made.get(entry.param)
            if state is not None and initial is not None and _same(state, initial):
                found.add(entry.param)
        return found

    def _own(self, plan: Plan) -> None:
        self.plan = plan
        self.inner.add_shards(plan, self._rank_group.rank, self.registry.params)

    def rebuild(self) -> None:
        """Prepare memory and all-gathers for the plan as it is now."""
        if self._memory.has_moved():  # by others, with unknown values in the new memory
            self.inner.masters.forget()
        if self._flat is not None:
            self._flat.adopt(self.plan, self.registry.params)
        self.inner.rebind()
        self.all_gathers.release_staging()
        send_buffers = None
        if self.follower is not None:
            self.follower.follow(self.plan, self.registry.params)
            send_buffers = self.follower.send_buffers
        self.all_gathers.prepare(
            self.plan, self.registry.params, self._flat, self.gathers_lazily, send_buffers
        )
        self._memory.remember(self.registry.planned(self.plan))
        self._unplanned = [self.registry.params[i] for i in self.registry.unplanned(self.plan)]

    def find_modules(self) -> None:
        """Find the modules that use the parameters, to notice when they no longer do."""
        self.modules = ModuleWatch(self.registry.entries)

    def require_same_order(self, doing: str, first: int = 0) -> None:
        """Raise on all ranks if their parameters from ``first`` on are in different orders.
        Collective."""
        names = self.modules.names
        require_same_order(self._rank_group, doing, self.registry, names, first)

    def name_in_module(self, index: int) -> str:
        """The name of a parameter, with the one that its module gives it if it has no other."""
        title, name = self.registry.names[index], self.modules.names.of[index]
        return f"{title} ({name})" if name and "(" not in title else title

    # ------------------------------------------------------------------ every step

    def require_same_form(self) -> None:
        """Raise if a parameter was converted after it was planned and cannot be followed."""
        if (
            self._rank_group.world_size > 1
            or self._flat is not None
            or self.inner.master_dtype is not None
        ):
            self._memory.require_same_form()

    def require_untouched(self, groups: Groups) -> None:
        """Raise if the user has changed what cannot be followed."""
        self.registry.require_same_groups(groups)
        self.modules.require_in_place()

    def unfrozen(self) -> list[int]:
        """The parameters that the plan left out and that have become trainable."""
        left = self._unplanned
        if not any(map(_requires_grad, left)) and all(map(operator.is_, map(_grad, left), _NONE)):
            return []
        return self.registry.to_plan(self.plan)

    def follow_memory(self) -> None:
        """Rebuild if parameters have other memory. Raise if their form has changed, too."""
        if self._memory.has_moved():
            self.require_same_form()
            self.rebuild()
        elif not self.all_gathers.is_prepared:  # a rebuild failed, or the optimizer was detached
            self.rebuild()

    def begin_sending(self) -> Sequence[int]:
        """The buckets of a step, in the order in which ``all_gather`` sends them."""
        self._unsent = list(self.all_gathers.order)
        return self.all_gathers.order

    def all_gather(self, bucket: int) -> None:
        """This rank's part of the bucket is updated: start to exchange it."""
        self.all_gathers.mark_updated(bucket)
        self.inner.masters.write_back(bucket)
        self.all_gathers.launch(bucket)
        self._unsent.remove(bucket)

    def finish_step(self) -> None:
        """Wait for the all-gathers, unless they are lazy."""
        self.all_gathers.finish()
        if self._rank_group.world_size == 1:
            self.inner.masters.tell_autograd()
        self.inner.masters.remember()

    def send_all(self) -> None:
        """Every rank's part of every bucket is updated: exchange them."""
        for bucket in self.begin_sending():
            self.all_gather(bucket)
        self.finish_step()

    def send_remaining(self) -> None:
        """Send what a step has not sent because it failed: other ranks may be further."""
        for bucket in list(self._unsent):
            self.all_gather(bucket)

    # ------------------------------------------------------------------ describing, copying

    def description(self, groups: Groups) -> list[str]:
        """What all ranks must have alike, as lines to compare."""
        return [
            f"bucket_mb={self.plan.bucket_bytes / 2**20:g}, "
            f"parameters_as_bucket_view={self._flat is not None}, "
            f"master_dtype={self.inner.master_dtype}",
            *self.registry.description(groups, self.plan, with_storage=self._flat is not None),
        ]

    def copied(self, inner: InnerOptimizers, registry: ParamRegistry) -> ShardedParams:
        """The same for copies of the parameters."""
        new = ShardedParams(self._rank_group, inner, self.plan, bucket_view=self._flat is not None)
        new.registry, new.is_confirmed = registry, self.is_confirmed
        new.status = copy.deepcopy(self.status)
        new.find_modules()
        new.rebuild()
        return new


_requires_grad, _grad = operator.attrgetter("requires_grad"), operator.attrgetter("grad")
_NONE = itertools.repeat(None)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    for key, value in a.items():
        other = b[key]
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            if value.shape != other.shape or not torch.equal(value.cpu(), other.cpu()):
                return False
        elif value != other:
            return False
    return True
