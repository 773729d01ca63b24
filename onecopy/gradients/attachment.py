"""Attached mode: an optimizer bound to the module whose gradients it reduces itself.

Made by ``optimizer.attach(module)``. While it lasts, the gradients of the module's parameters are
averaged during backward, each rank keeps those of its own shards, and ``param.grad`` is None.

A backward, and the calls that follow it::

    hooks  ->  _begin  ->  reducer  ->  judge  ->  norms or gradients  ->  used_up
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm.group import Part, RankGroup
from onecopy.comm.monitor import do_nothing
from onecopy.gradients.hooks import (
    DDPHooks,
    LazyGather,
    ModuleHooks,
    PatchedMethod,
    require_attachable_ddp,
)
from onecopy.gradients.join import JoinParticipant, JoinRound, Turn
from onecopy.gradients.reducer import GradientReducer
from onecopy.planning.layout import flat_range, is_dense
from onecopy.planning.param_groups import check_reduce_dtype, check_switches
from onecopy.planning.plan import Plan
from onecopy.sharding.engine import SendBuffers
from onecopy.sharding.inner import GradientsOf
from onecopy.sharding.sharded_params import ShardedParams, names_in
from onecopy.torch_private import is_compiled


class Attachment:
    """What an attached optimizer has in addition: the hooks on a module, and a reducer."""

    # ------------------------------------------------------------------ attaching

    def __init__(
        self,
        module: torch.nn.Module,
        sharded_params: ShardedParams,
        join: JoinParticipant,
        reduce_dtype: torch.dtype | None,
        lazy_gather: bool,
        steps: int,
    ) -> None:
        """``steps`` have been taken. Takes no memory yet: ``ShardedParams.rebuild`` does."""
        self._rank_group = rank_group = join.rank_group
        self._sharded_params = sharded_params
        self._join = join
        self._steps = steps
        self.divides_by_all = True  # also by ranks that have joined
        master_dtype, name_of = sharded_params.inner.master_dtype, sharded_params.name_in_module
        self.reducer = GradientReducer(rank_group, reduce_dtype, master_dtype, name_of)
        self.hooks: ModuleHooks | DDPHooks
        if isinstance(module, DistributedDataParallel):
            self.hooks = DDPHooks(module, self.reducer, join, self._enter, self.zero_grad)
            modules = [module, module.module]
        else:
            self.hooks = ModuleHooks(module, self.reducer, self._begin, self.zero_grad)
            modules = [module]
        self._patches = [PatchedMethod(m, "zero_grad", self._zero_grad_of) for m in modules]
        self.reducer.when_dropped = rank_group.monitor.when_disagreeing = self.hooks.start_over
        self._lazy = LazyGather(module, sharded_params.all_gathers.queue) if lazy_gather else None
        sharded_params.gathers_lazily = lazy_gather
        sharded_params.follower = self.follow

    def follow(self, plan: Plan, params: Sequence[torch.Tensor]) -> SendBuffers:
        """The plan, or the memory of the parameters, is another one. From which memory gradients
        are sent."""
        self.reducer.prepare(plan, params)
        self.hooks.follow()
        if self._lazy is not None:
            buckets_of = self.reducer.prepared.buckets_of
            self._lazy.follow({params[index]: buckets_of[index] for index in buckets_of})
        return self.reducer.send_buffer

    def detach(self) -> None:
        """Undo everything, even if a collective fails; then that is raised. If a collective of
        this process group has failed before, nothing is waited for."""
        sharded_params = self._sharded_params
        sharded_params.follower, sharded_params.gathers_lazily = None, False
        self._rank_group.monitor.when_disagreeing = do_nothing
        if self._rank_group.monitor.refusal is not None:
            sharded_params.all_gathers.queue.discard()
        with contextlib.ExitStack() as undoing:  # in reverse order
            undoing.callback(self.reducer.queue.release_unused)
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
        self._begin_averaging(self._join.announce(Turn.BACKWARD) if self._join.is_active else None)

    def follow_backward(self, join_round: JoinRound) -> None:
        """On a joined rank: a backward of the others, of which this rank has no gradients."""
        self._begin_averaging(join_round)
        self.reducer.end()

    def _begin_averaging(self, join_round: JoinRound | None) -> None:
        self.judge()  # on joined ranks, too: it may be a second round
        self._enter()
        world = self._rank_group.world_size
        if join_round is not None and not self.divides_by_all:
            world -= len(join_round.joined)
        self.reducer.share = 1 / world
        self.reducer.begin()

    def _enter(self) -> None:
        """A backward begins, on all ranks."""
        number = self.reducer.backwards + 1
        self._rank_group.monitor.enter(f"in backward {number} after step {self._steps}")

    def judge(self) -> None:
        """Raise if the last backward has raised on any rank; its gradients are then dropped on
        all ranks. Collective, before any other collective that follows a backward."""
        self.finish_raised()
        self.reducer.judge()

    def finish_raised(self) -> None:
        """If the last backward has raised on this rank, send zeros for what it has not sent: the
        other ranks wait for that. Before any other collective."""
        if self.hooks.has_raised and self._rank_group.monitor.refusal is None:
            self.reducer.give_up()
            self.hooks.reset()

    def zero_grad(self) -> None:
        """The user drops the gradients. Joined ranks drop them, too."""
        self.finish_raised()
        refused = self._rank_group.monitor.refusal is not None
        if self._join.is_active and self.reducer.holds_anything and not refused:
            self._join.announce(Turn.SKIP)
        self.drop()

    def _zero_grad_of(
        self, module_zero_grad: Callable[[bool], None], set_to_none: bool = True
    ) -> None:
        """``module.zero_grad`` that reaches this rank's part of the gradients, too."""
        module_zero_grad(set_to_none)
        self.zero_grad()

    def drop(self) -> None:
        """Forget all gradients."""
        self.finish_raised()
        self.reducer.drop()
        self.hooks.reset()

    # ------------------------------------------------------------------ using gradients

    def require_averaged(self) -> None:
        """Raise if a gradient is of this rank alone."""
        local = self.reducer.not_reduced()
        if not local:
            return
        name, hooks = self._sharded_params.name_in_module(local[0]), self.hooks
        if hooks.is_inside_ddp:
            raise RuntimeError(
                f"{name} has a gradient that DistributedDataParallel averaged: the optimizer is "
                "attached to the module inside a DDP module, and both reduce the gradients. Attach "
                "to the DDP module, optimizer.attach(ddp), or call the module without DDP"
            )
        if hooks.has_unsynced:
            raise RuntimeError(
                f"{name} has a gradient that was not averaged, because the last backward was "
                "inside no_sync(). Do the last backward before step() outside of no_sync()"
            )
        if hooks.reduces_nothing:
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

    def used_up(self, steps: int) -> None:
        """A step, the last of ``steps``, has used the gradients."""
        self._steps = steps
        self.reducer.clear()
        if self._lazy is not None:
            self._lazy.stepped()


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
    check_reduce_dtype(reduce_dtype)
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
    if isinstance(module.__dict__.get("zero_grad"), PatchedMethod):
        raise ValueError("another optimizer is attached to this module: call its detach() first")
    if isinstance(module, DistributedDataParallel):
        complex_ones = [name for param, name in names.items() if param.is_complex()]
        if complex_ones:
            raise ValueError(
                f"DDP hands over the gradients of complex parameters ({_listed(complex_ones)}) in "
                "parts only: attach to the bare module"
            )
        require_attachable_ddp(module, rank_group.user_group)
    check_switches(lazy_gather=lazy_gather)
    if lazy_gather and any(map(is_compiled, module.modules())):
        raise ValueError(
            "lazy_gather=True needs hooks, which compiled modules may ignore: leave it out, or "
            "attach before torch.compile(...)"
        )
    sharded_params.require_same_form()


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' * (len(names) > 5)}"


@torch.no_grad()
def broadcast_module(rank_group: RankGroup, module: torch.nn.Module) -> None:
    """Send parameters and buffers of rank 0 to all ranks, as DDP does."""
    tensors = [*names_in(module), *module.buffers()]
    for tensor in {id(t): t.detach() for t in tensors}.values():
        dense = is_dense(tensor)
        sent = flat_range(tensor, 0, tensor.numel()) if dense else tensor.contiguous()
        rank_group.broadcast_tensors([Part(0, sent)]).wait()
        if not dense:
            tensor.copy_(sent)
    torch.autograd.graph.increment_version(list(tensors))
