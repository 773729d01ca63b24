"""What this rank holds, and where: the plan, its pieces, and the memory of the parameters.

These change together: a group is added, a parameter is unfrozen, a state dict is loaded. Each such
change happens inside ``all_or_nothing``, and then ``settle`` prepares memory and transfers for it.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from onecopy.buffers import FlatHomes
from onecopy.condition import Condition
from onecopy.gatherer import Gatherer, Lender
from onecopy.intake import GroupPolicy
from onecopy.local import GradientsOf, LocalOptimizer
from onecopy.plan import Plan
from onecopy.replicas import require_same_order
from onecopy.roster import Roster
from onecopy.sentry import Sentry
from onecopy.transport import Transport
from onecopy.watch import HomeWatch, MemoryWatch

Groups = Sequence[Mapping[str, Any]]  # the user's param_groups


class Follower(Protocol):
    """Somebody who must know of every change of the plan or of the memory."""

    def follow(self, plan: Plan, params: Sequence[torch.Tensor]) -> None: ...
    @property
    def lender(self) -> Lender: ...


class Shards:
    def __init__(
        self, transport: Transport, local: LocalOptimizer, plan: Plan, bucket_view: bool
    ) -> None:
        self.local = local
        self.plan = plan  # of nothing, at first
        self.roster = Roster()
        self.is_confirmed = True  # all ranks are known to hold the same plan
        self._transport = transport
        self._homes = FlatHomes() if bucket_view else None
        self.gatherer = Gatherer(transport)
        self.gathers_lazily = False  # leave the waiting to who uses the parameters
        self._memory = MemoryWatch()
        self._in_modules = HomeWatch(())
        self._left_out: list[torch.Tensor] = []  # not in the plan: frozen
        self.follower: Follower | None = None  # in attached mode
        self._unsent: list[int] = []  # buckets, of the present step

    # ------------------------------------------------------------------ changing

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """If the block raises, roster, plan, pieces and state are as before."""
        roster, plan, confirmed = self.roster, self.plan, self.is_confirmed
        in_modules = self._in_modules
        undo_local = self.local.snapshot()
        try:
            yield
        except BaseException:  # an interrupted load, too, leaves everything as it was
            self.roster, self.plan, self.is_confirmed = roster, plan, confirmed
            self._in_modules = in_modules
            undo_local()
            raise

    def admit(self, groups: Groups, policies: Sequence[GroupPolicy]) -> None:
        """Take in new groups, and own this rank's pieces of what is trainable in them."""
        for group, policy in zip(groups, policies, strict=True):
            self.roster = self.roster.with_group(group, policy)
        self._own(self.roster.extend(self.plan, self.roster.to_plan(self.plan)))

    def extend(self, groups: Groups, new: Sequence[int]) -> None:
        """Plan parameters that were left out so far."""
        self._own(self.roster.extend(self.plan, new))
        self.local.refill_groups(groups)

    def make_room_for(
        self, groups: Groups, with_state: Container[torch.Tensor], policies: Sequence[GroupPolicy]
    ) -> None:
        """Change the plan as state and policies demand that are to replace the present ones.

        A frozen parameter that has state is planned: it would be lost otherwise. Where a policy
        forbids the cuts of the plan, another is made. Loading is not collective; whether all ranks
        were given the same is compared in the next step.
        """
        before = self.plan
        late = [i for i in self.roster.unplanned(before) if self.roster.params[i] in with_state]
        fitting = self.roster.with_policies(policies) if before.world_size > 1 else self.roster
        if fitting is not self.roster:
            self.roster, self.plan = fitting, before.emptied()
            self.local.disown()
            self.extend(groups, [*sorted(before.params), *late])
        elif late:
            self.extend(groups, late)
        self.is_confirmed = False

    def made_anew(self, groups: Groups, states: Mapping[torch.Tensor, Any]) -> set[torch.Tensor]:
        """Frozen parameters whose state is just what the class makes in its constructor."""
        found = set()
        for index in self.roster.unplanned(self.plan):
            entry = self.roster.entries[index]
            cls = self.roster.policies[entry.group].optimizer_class
            made = self.local.state_made_at_once(cls, groups[entry.group], [entry.param])
            state, anew = states.get(entry.param), made.get(entry.param)
            if state is not None and anew is not None and _same(state, anew):
                found.add(entry.param)
        return found

    def _own(self, plan: Plan) -> None:
        self.plan = plan
        self.local.own(plan, self._transport.rank, self.roster.params)

    def settle(self) -> None:
        """Prepare memory and transfers for the plan as it is now."""
        if self._memory.has_moved():  # by others: what is in the new memory may be anything
            self.local.masters.forget()
        if self._homes is not None:
            self._homes.adopt(self.plan, self.roster.params)
        self.local.rebind()
        self.gatherer.give_up_staging()
        lender = None
        if self.follower is not None:
            self.follower.follow(self.plan, self.roster.params)
            lender = self.follower.lender
        self.gatherer.prepare(
            self.plan, self.roster.params, self._homes, self.gathers_lazily, lender
        )
        self._memory.remember(self.roster.planned(self.plan))
        self._left_out = [self.roster.params[i] for i in self.roster.unplanned(self.plan)]

    def look_for_modules(self) -> None:
        """Find out which modules use the parameters, to notice when they no longer do."""
        self._in_modules = HomeWatch(self.roster.entries)

    def require_same_order(self, subject: str, first: int = 0) -> None:
        """Raise on all ranks if their parameters from ``first`` on are in different orders.
        Collective."""
        names = self._in_modules.names
        require_same_order(self._transport, subject, self.roster, names, first)

    def name_in_module(self, index: int) -> str:
        """The name of a parameter, with that which its module gives it, if it has no other."""
        title, name = self.roster.names[index], self._in_modules.names.of[index]
        return f"{title} ({name})" if name and "(" not in title else title

    # ------------------------------------------------------------------ every step

    def require_same_form(self) -> None:
        """Raise if a parameter was converted since it was planned and cannot be followed."""
        if (
            self._transport.world_size > 1
            or self._homes is not None
            or self.local.master_dtype is not None
        ):
            self._memory.require_same_form()

    def require_untouched(self, groups: Groups) -> None:
        """Raise if the user has changed what cannot be followed."""
        self.roster.require_same_groups(groups)
        self._in_modules.require_in_place()

    def require_finished_backward(self) -> None:
        """Raise if DDP has averaged the gradients only in part."""
        self._in_modules.require_finished_backward()

    def forgive_backward(self) -> None:
        """The gradients were dropped."""
        self._in_modules.forgive_backward()

    def unfrozen(self) -> list[int]:
        """The parameters that the plan left out and that have become trainable."""
        left = self._left_out
        if not any(map(_requires_grad, left)) and all(map(operator.is_, map(_grad, left), _NONE)):
            return []
        return self.roster.to_plan(self.plan)

    def follow_memory(self) -> None:
        """Parameters that were given new memory keep their pieces, if they look the same."""
        if self._memory.has_moved():
            self.require_same_form()
            self.settle()
        elif not self.gatherer.is_prepared:  # that has failed, or the optimizer was detached
            self.settle()

    def step(
        self,
        closure: Any,
        kwargs: Mapping[str, Any],
        gradients: GradientsOf,
        condition: Condition,
        sentry: Sentry | None,
    ) -> Any:
        """Update this rank's pieces, and bring all ranks' to all; what the class's step returns."""
        order = self.gatherer.order
        self._unsent = list(order)
        course = _Course(self._send, condition, sentry)
        result = self.local.step(closure, kwargs, gradients, order, course)
        self._finish_sending()
        return result

    def send_all(self) -> None:
        """This rank's pieces were updated: bring all ranks' to all."""
        self._unsent = list(self.gatherer.order)
        self.bring_level()
        self._finish_sending()

    def bring_level(self) -> None:
        """Send what a step has not sent because it failed: other ranks may be further."""
        for bucket in list(self._unsent):
            self._send(bucket)

    def _send(self, bucket: int) -> None:
        self.local.masters.write_back(bucket)
        self.gatherer.start(bucket)
        self._unsent.remove(bucket)

    def _finish_sending(self) -> None:
        self.gatherer.finish()
        if self._transport.world_size == 1:
            self.local.masters.tell_autograd()
        self.local.masters.remember()

    # ------------------------------------------------------------------ telling, copying

    def description(self, groups: Groups) -> list[str]:
        """What all ranks must hold alike."""
        return [
            f"bucket_mb={self.plan.bucket_bytes / 2**20:g}, "
            f"parameters_as_bucket_view={self._homes is not None}, "
            f"master_dtype={self.local.master_dtype}",
            *self.roster.description(groups, self.plan, with_storage=self._homes is not None),
        ]

    def copied(self, local: LocalOptimizer, roster: Roster) -> Shards:
        """The same on copies of the parameters."""
        new = Shards(self._transport, local, self.plan, bucket_view=self._homes is not None)
        new.roster, new.is_confirmed = roster, self.is_confirmed
        new.look_for_modules()
        new.settle()
        return new


class _Course(NamedTuple):
    """What happens around the update of a bucket."""

    send: Callable[[int], None]
    condition: Condition
    sentry: Sentry | None

    def before(self, bucket: int) -> None:
        if self.sentry is not None:
            self.sentry.look(bucket)

    def changing(self) -> None:
        self.condition.changes()

    def after(self, bucket: int) -> None:
        if self.sentry is not None:
            self.sentry.seal(bucket)  # while its state is in the cache
        self.send(bucket)
        self.condition.updated()


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
