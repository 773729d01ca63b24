"""Attached mode: an optimizer bound to the module whose gradients it reduces itself.

Made by ``optimizer.attach(module)``. While it lasts, the gradients of the module's parameters are
averaged during backward, each rank keeps those of its own shards, and ``param.grad`` is None.

A backward, and the calls that follow it::

    hooks  ->  _begin  ->  reducer  ->  judge  ->  averaged_gradients or gradients  ->  used_up
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm.group import Part, RankGroup
from onecopy.comm.monitor import do_nothing
from onecopy.gradients.hooks import (
    DDPHooks,
    LazyGather,
    Local,
    ModuleHooks,
    ZeroGrad,
    has_foreign_hook,
    require_finalization,
    require_hookable,
)
from onecopy.gradients.join import JoinParticipant, JoinRound, Turn
from onecopy.gradients.norms import AveragedGradients
from onecopy.gradients.reducer import GradientReducer
from onecopy.planning.layout import flat_range, is_dense
from onecopy.planning.param_groups import check_switches
from onecopy.planning.plan import Plan
from onecopy.planning.text import shown
from onecopy.sharding.engine import SendBuffers
from onecopy.sharding.inner import GradientsOf
from onecopy.sharding.sharded_params import ShardedParams, names_in


class Attachment:
    """What an attached optimizer has in addition: the hooks on a module, and a reducer."""

    # ------------------------------------------------------------------ attaching

    def __init__(
        self,
        module: torch.nn.Module,
        rank_group: RankGroup,
        sharded_params: ShardedParams,
        join: JoinParticipant,
        reduce_dtype: torch.dtype | None,
        lazy_gather: bool,
        steps: int,
    ) -> None:
        """``steps`` have been taken. Takes no memory yet: ``ShardedParams.rebuild`` does."""
        self._rank_group = rank_group
        self._monitor = rank_group.monitor
        self._sharded_params = sharded_params
        self._join = join
        self._steps = steps
        self._is_scaled = False  # while a step is taken by our scaler
        self._reduced = len(sharded_params.plan.buckets)  # those that no backward can have missed
        self.divides_by_all = True  # also by ranks that have joined
        self.reducer = GradientReducer(rank_group, reduce_dtype, sharded_params.inner.master_dtype)
        self.hooks: ModuleHooks | DDPHooks
        if isinstance(module, DistributedDataParallel):
            self.hooks = DDPHooks(
                module, self.reducer, rank_group, join, self._enter, self.zero_grad
            )
            modules = [module, module.module]
        else:
            self.hooks = ModuleHooks(module, self.reducer, self._begin, self.zero_grad)
            modules = [module]
        self._patches = [ZeroGrad(each, self.zero_grad) for each in modules]
        self.reducer.when_dropped = self._monitor.when_disagreeing = self.hooks.start_over
        self._lazy = LazyGather(module, sharded_params.all_gathers.queue) if lazy_gather else None
        sharded_params.gathers_lazily = lazy_gather
        sharded_params.follower = self.follow

    def follow(self, plan: Plan, params: Sequence[torch.Tensor]) -> SendBuffers:
        """The plan, or the memory of the parameters, is another one."""
        self.reducer.prepare(plan, params)
        self.hooks.follow(params)
        if self._lazy is not None:
            self._lazy.follow(plan, params)
        return self.reducer.send_buffer

    def detach(self) -> None:
        """Undo everything, even if a collective fails; then that is raised. If a collective of
        this process group has failed before, nothing is waited for."""
        sharded_params = self._sharded_params
        sharded_params.follower, sharded_params.gathers_lazily = None, False
        self._monitor.when_disagreeing = do_nothing
        if self._monitor.refusal is not None:
            sharded_params.all_gathers.queue.discard()
        with contextlib.ExitStack() as undoing:  # in reverse order
            undoing.callback(self.reducer.release_unused)
            undoing.callback(sharded_params.all_gathers.release_staging)  # it may be the reducer's
            if self._lazy is not None:
                undoing.callback(self._lazy.remove)
            for patch in self._patches:
                undoing.callback(patch.remove)
            undoing.callback(self.hooks.remove)
            undoing.callback(self.drop)

    # ------------------------------------------------------------------ backward

    def _begin(self) -> None:
        """A backward of the bare module begins."""
        if self._rank_group.world_size == 1:
            self._sharded_params.follow_memory()  # one rank alone may have converted the module
        join_round = self._join.announce(Turn.BACKWARD) if self._join.is_active else None
        self.reducer.judge()  # on joined ranks, too: it may be a second round
        self._begin_averaging(join_round)

    def follow_backward(self, join_round: JoinRound) -> None:
        """On a joined rank: a backward of the others, of which this rank has no gradients."""
        self.judge()
        self._begin_averaging(join_round)
        self.reducer.end()

    def _begin_averaging(self, join_round: JoinRound | None) -> None:
        self._enter()
        world = self._rank_group.world_size
        if join_round is not None and not self.divides_by_all:
            world -= len(join_round.joined)
        self.reducer.share = 1 / world
        self.reducer.begin()

    def _enter(self) -> None:
        """A backward begins, on all ranks."""
        number = self.reducer.backwards + 1
        self._monitor.enter(f"in backward {number} after step {self._steps}")

    def judge(self) -> None:
        """Raise if the last backward has raised on any rank; its gradients are then dropped on
        all ranks. Collective, before any other collective that follows a backward."""
        self.finish_raised()
        self.reducer.judge()

    def finish_raised(self) -> None:
        """If the last backward has raised on this rank, send zeros for what it has not sent: the
        other ranks wait for that. Before any other collective."""
        if self.hooks.has_raised:
            if not self.reducer.is_active:
                self.reducer.begin()
            self.reducer.give_up()
            self.hooks.reset()

    def zero_grad(self) -> None:
        """The user drops the gradients. Joined ranks drop them, too."""
        if self._monitor.refusal is None:
            self.finish_raised()
            if self.reducer.holds_anything and self._join.is_active:
                self._join.announce(Turn.SKIP)
        self.drop()

    def drop(self) -> None:
        """Forget all gradients."""
        if self._monitor.refusal is None:
            self.finish_raised()
        self.reducer.drop()
        self.hooks.reset()

    # ------------------------------------------------------------------ using gradients

    def catch_up(self) -> None:
        """Parameters were added to the plan, on all ranks; their gradients are still local."""
        first, self._reduced = self._reduced, len(self._sharded_params.plan.buckets)
        if first < self._reduced:
            self.reducer.catch_up(first)

    def require_averaged(self) -> None:
        """Raise if a gradient is of this rank alone."""
        local = self.reducer.not_reduced()
        if not local:
            return
        name, why = self._sharded_params.name_in_module(local[0]), self.hooks.why_local
        if why is Local.INSIDE_DDP:
            raise RuntimeError(
                f"{name} has a gradient that DistributedDataParallel averaged: the optimizer is "
                "attached to the module inside a DDP module, and both reduce the gradients. Attach "
                "to the DDP module, optimizer.attach(ddp), or call the module without DDP"
            )
        if why is Local.NO_SYNC:
            raise RuntimeError(
                f"{name} has a gradient that was not averaged, because the last backward was "
                "inside no_sync(). Do the last backward before step() outside of no_sync()"
            )
        if why is Local.NOT_IN_DDP:
            raise RuntimeError(
                f"{name} has a gradient that was not averaged, because none of the parameters that "
                "DDP was built with is trained any more. Wrap the module again, "
                "DistributedDataParallel(model), and attach to that"
            )
        raise RuntimeError(
            f"{name} has a gradient that no backward since attach(...) has computed: param.grad "
            "was written by hand, or is left from before attach(...). An attached optimizer takes "
            "gradients from backward() only. Set param.grad to None; to change gradients, use "
            "optimizer.full_grad() and tensor hooks; to write them, detach() the optimizer"
        )

    def gradients(self) -> GradientsOf:
        """The gradients of this rank's shards for a step, each bucket's as it is needed."""
        self.require_averaged()
        self.reducer.judge()  # of what was unfrozen just now
        return self.reducer.gradients_in

    def averaged_gradients(self) -> AveragedGradients:
        """The gradients of this rank's shards, all of which have arrived."""
        self.judge()
        self.reducer.wait()
        return AveragedGradients(
            self._rank_group,
            self._sharded_params.plan,
            self._sharded_params.registry.params,
            self._sharded_params.inner.master_dtype,
            self.reducer.present,
            [owned.shard for owned in self._sharded_params.inner.shards],
            self.reducer.gradients(),
        )

    def used_up(self, steps: int) -> None:
        """A step, the last of ``steps``, has used the gradients."""
        self._steps = steps
        self.reducer.clear()
        if self._lazy is not None:
            self._lazy.stepped()

    @contextlib.contextmanager
    def scaled(self) -> Iterator[None]:
        """A step that ``onecopy.GradScaler`` takes."""
        self._is_scaled = True
        try:
            yield
        finally:
            self._is_scaled = False

    def require_our_scaler(self) -> None:
        """Raise if a step is taken by another scaler."""
        if not self._is_scaled:
            raise RuntimeError(
                "torch.amp.GradScaler looks at param.grad, which is None while the optimizer is "
                "attached. Use onecopy.GradScaler, which is the same otherwise"
            )

    @property
    def gradient_bytes(self) -> int:
        """Memory of this rank's gradients, besides ``param.grad``."""
        return self.reducer.slot_bytes + self.reducer.accumulated_bytes


# -------------------------------------------------------------------------- before attaching


def require_attachable(
    module: Any,
    sharded_params: ShardedParams,
    rank_group: RankGroup,
    reduce_dtype: Any,
    lazy_gather: Any,
) -> None:
    """Raise if ``attach`` cannot work with these arguments, with the reason."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"attach(...) takes a module, got {type(module).__name__}")
    if reduce_dtype is not None and not (
        isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point
    ):
        raise TypeError(
            f"reduce_dtype must be a floating point dtype or None, got {shown(reduce_dtype)}"
        )
    registry = sharded_params.registry
    ours = set(registry.params)
    names = names_in(module)
    foreign = [name for p, name in names.items() if p.requires_grad and p not in ours]
    if foreign:
        raise ValueError(
            f"the module has trainable parameters that this optimizer does not have: "
            f"{_listed(foreign)}. Nobody would average their gradients: build the optimizer on all "
            "parameters of the module, or freeze them"
        )
    outside = [e.name for e in registry.planned(sharded_params.plan) if e.param not in names]
    if outside:
        raise ValueError(
            f"the optimizer has parameters that are not in the module: {_listed(outside)}. Attach "
            "it to a module that holds all of them"
        )
    if ZeroGrad.is_on(module):
        raise ValueError("another optimizer is attached to this module: call its detach() first")
    if isinstance(module, DistributedDataParallel):
        _require_attachable_ddp(module, names, rank_group.user_group)
    check_switches(lazy_gather=lazy_gather)
    if lazy_gather:
        require_hookable(module)
    sharded_params.require_same_form()


def _require_attachable_ddp(
    ddp: DistributedDataParallel, names: dict[torch.Tensor, str], user_group: Any
) -> None:
    complex_ones = [name for param, name in names.items() if param.is_complex()]
    if complex_ones:
        raise ValueError(
            f"DDP hands over the gradients of complex parameters ({_listed(complex_ones)}) in "
            "parts only: attach to the bare module"
        )
    if has_foreign_hook(ddp):
        raise ValueError(
            "the DDP module has a communication hook already, and can have only one. Attach "
            "before, or instead of, register_comm_hook(...)"
        )
    require_finalization(ddp)
    ranks, ours = map(dist.get_process_group_ranks, (ddp.process_group, user_group))
    if ranks != ours:
        raise ValueError(
            f"the DDP module averages over ranks {ranks}, the optimizer is sharded over {ours}: "
            "give both the same process_group"
        )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' * (len(names) > 5)}"


@torch.no_grad()
def broadcast_module(rank_group: RankGroup, module: torch.nn.Module) -> None:
    """Send parameters and buffers of rank 0 to all ranks, as DDP does."""
    tensors = [*names_in(module), *module.buffers()]
    for tensor in {id(t): t for t in tensors}.values():
        memory = tensor.detach()
        if is_dense(memory):
            memory = flat_range(memory, 0, memory.numel())
            rank_group.broadcast_tensors([Part(0, memory)]).wait()
        else:
            sent = memory.contiguous()
            rank_group.broadcast_tensors([Part(0, sent)]).wait()
            memory.copy_(sent)
    torch.autograd.graph.increment_version(list(tensors))
