"""Attached mode: an optimizer bound to the module whose gradients it reduces itself.

Made by ``optimizer.attach(module)``. While it lasts, the gradients of the module's parameters are
summed over the ranks during backward, each rank its own share, and ``param.grad`` is None.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm.group import Part, RankGroup, do_nothing
from onecopy.gradients.hooks import (
    DDPHooks,
    GradientHooks,
    LazyGather,
    Local,
    ModuleHooks,
    ZeroGrad,
    has_foreign_hook,
    require_finalization,
)
from onecopy.gradients.join import JoinRound, Turn
from onecopy.gradients.norms import clip_coefficient, total_norm
from onecopy.gradients.reducer import GradientReducer
from onecopy.planning.layout import flat_range, is_dense
from onecopy.planning.param_groups import ParamRegistry, gradient_dtype
from onecopy.planning.plan import Plan, Shard
from onecopy.planning.text import shown
from onecopy.sharding.all_gather import StagingLender
from onecopy.sharding.inner import GradientsOf
from onecopy.sharding.parameter_names import names_in
from onecopy.sharding.sharded_params import ShardedParams
from onecopy.torch_private import foreach_mul_, foreach_unscale_


class Attachment:
    """What an attached optimizer has in addition."""

    def __init__(
        self,
        module: torch.nn.Module,
        rank_group: RankGroup,
        sharded_params: ShardedParams,
        reduce_dtype: torch.dtype | None,
        lazy_gather: bool,
        announce: Callable[[Turn], JoinRound | None],
        is_in_join: Callable[[], bool],
        steps: int,
    ) -> None:
        """``announce`` tells ranks that have joined (see ``Join``) what comes; ``is_in_join`` tells
        whether there may be any; so many ``steps`` have been taken."""
        self._rank_group = rank_group
        self._monitor = rank_group.monitor
        self._steps = steps
        self._is_scaled = False  # while a step is taken by our scaler
        self._sharded_params = sharded_params
        self._announce = weakref.WeakMethod(announce)
        self._reduced = len(sharded_params.plan.buckets)  # those that no backward can have missed
        self.divides_by_all = True  # also by ranks that have joined
        self.reducer = GradientReducer(rank_group, reduce_dtype, sharded_params.inner.master_dtype)
        if isinstance(module, DistributedDataParallel):
            self.hooks: GradientHooks = DDPHooks(
                module, self.reducer, rank_group, self.zero_grad, self._enter, is_in_join
            )
            modules = [module, module.module]
        else:
            self.hooks = ModuleHooks(module, self.reducer, self._begin, self.zero_grad)
            modules = [module]
        self._patches = [ZeroGrad(each, self.zero_grad) for each in modules]
        self.reducer.when_dropped = rank_group.when_disagreeing = self.hooks.start_over
        self._lazy = LazyGather(module, sharded_params.all_gathers) if lazy_gather else None
        sharded_params.gathers_lazily = lazy_gather
        sharded_params.follower = self

    def prepare(self) -> None:
        """Take memory. If that fails, ``detach`` undoes what has been done."""
        self._sharded_params.rebuild()

    def _begin(self) -> None:
        """A backward of the bare module begins."""
        if self._rank_group.world_size == 1:
            self._sharded_params.follow_memory()  # one rank alone may have converted the module
        join_round = self._tell_joined(Turn.BACKWARD)
        self.reducer.judge()  # on ranks that have joined, too: it may be a second round
        self._enter()
        self._take_share(join_round)
        self.reducer.begin()

    def _enter(self) -> None:
        """A backward begins, on all ranks."""
        number = self.reducer.backwards + 1
        self._rank_group.enter(f"in backward {number} after step {self._steps}")

    def used_up(self, steps: int) -> None:
        """The gradients were used by a step, the last of so many."""
        self._steps = steps
        self.reducer.clear()
        if self._lazy is not None:
            self._lazy.stepped()

    def _tell_joined(self, turn: Turn) -> JoinRound | None:
        announce = self._announce()
        return announce(turn) if announce is not None else None

    def shadow_backward(self, join_round: JoinRound) -> None:
        """A backward of the others, on a rank that has joined."""
        self.judge()
        self._enter()
        self._take_share(join_round)
        self.reducer.begin()
        self.reducer.end()

    def _take_share(self, join_round: JoinRound | None) -> None:
        world = self._rank_group.world_size
        joined = (
            len(join_round.borrowers) if join_round is not None and not self.divides_by_all else 0
        )
        self.reducer.share = 1 / (world - joined)

    def follow(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        """The plan, or the memory of the parameters, is another one."""
        self.reducer.prepare(plan, params)
        self.hooks.follow(params)
        if self._lazy is not None:
            self._lazy.follow(plan, params)

    @property
    def lender(self) -> StagingLender:
        """Gradients have left its memory when parameters are gathered."""
        return self.reducer

    def catch_up(self) -> None:
        """Parameters were added to the plan, on all ranks; their gradients are still local."""
        first, self._reduced = self._reduced, len(self._sharded_params.plan.buckets)
        if first < self._reduced:
            self.reducer.catch_up(first)

    def gradients(self) -> GradientsOf:
        """Those of this rank's pieces, bucket by bucket as they are needed, for a step."""
        self.require_averaged()
        self.reducer.judge()  # of what was unfrozen just now
        return self.reducer.gradients_in

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

    def judge(self) -> None:
        """Raise if the last backward has raised, on this rank or another; the gradients are then
        dropped, and the ranks level. To be called on all ranks, before anything else together."""
        self.give_up_raised()
        self.reducer.judge()

    def give_up_raised(self) -> None:
        """If the last backward has raised on this rank, finish it, since the others have, before
        anything else is done together."""
        if self.hooks.has_raised:
            if not self.reducer.is_active:
                self.reducer.begin()
            self.reducer.give_up()
            self.hooks.reset()

    def zero_grad(self) -> None:
        """The user drops the gradients: ranks that have joined do, too."""
        if self._monitor.refusal is None:
            self.give_up_raised()
        if self.reducer.holds_anything and self._monitor.refusal is None:
            self._tell_joined(Turn.SKIP)
        self.drop()

    def drop(self) -> None:
        """Forget all gradients."""
        if self._monitor.refusal is None:
            self.give_up_raised()
        self.reducer.drop()
        self.hooks.reset()

    def detach(self) -> None:
        """Everything is undone even if a collective fails; then that is raised. If that has
        happened before, nothing is waited for."""
        sharded_params = self._sharded_params
        sharded_params.follower, sharded_params.gathers_lazily = None, False
        self._rank_group.when_disagreeing = do_nothing
        if self._monitor.refusal is not None:
            sharded_params.all_gathers.forget()
        with contextlib.ExitStack() as undoing:  # in reverse order
            undoing.callback(self._rank_group.local_ranks.forget)
            undoing.callback(sharded_params.all_gathers.give_up_staging)  # it may be the reducer's
            if self._lazy is not None:
                undoing.callback(self._lazy.remove)
            for patch in self._patches:
                undoing.callback(patch.remove)
            undoing.callback(self.hooks.remove)
            undoing.callback(self.drop)

    # ------------------------------------------------------------------ looking at gradients

    def _settle(self) -> None:
        """Before looking at gradients: until all are here."""
        self.judge()
        self.reducer.settle()

    def _held_in(self, index: int) -> torch.dtype:
        """The dtype of a parameter's gradient, as the ranks hold it."""
        param = self._sharded_params.registry.params[index]
        return gradient_dtype(param, self._sharded_params.inner.master_dtype)

    def norm(self, norm_type: float) -> torch.Tensor:
        self._settle()
        shards = [owned.shard for owned in self._sharded_params.inner.shards]
        gradients, present = self.reducer.gradients(), self.reducer.present
        dtypes = {self._held_in(index).to_real() for index in present}
        # A narrow norm, as torch's of narrow gradients, would cost digits for nothing.
        dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        return total_norm(self._rank_group, shards, gradients, present, norm_type).to(dtype)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        norm = self.norm(norm_type)
        coefficient = clip_coefficient(norm, max_norm, error_if_nonfinite)
        self.scale(coefficient)
        return norm

    @torch.no_grad()
    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients, which have been settled."""
        for gradients in self._alike():
            foreach_mul_(gradients, factor.to(gradients[0].device))

    def _alike(self) -> Iterable[list[torch.Tensor]]:
        """The gradients of this rank, in lists of one device and dtype. Complex numbers are pairs
        of real ones: torch's kernels for scaling know those only."""
        lists: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for grad in self.reducer.gradients():
            if grad is not None and grad.numel():
                real = torch.view_as_real(grad) if grad.is_complex() else grad
                lists.setdefault((real.device, real.dtype), []).append(real)
        return lists.values()

    @torch.no_grad()
    def unscale(self, inv_scale: torch.Tensor | float, allow_fp16: bool) -> torch.Tensor:
        """Undo the scaling of the loss; 1.0 if any rank has found an infinity or NaN."""
        self._settle()
        held_in = {self._held_in(index).to_real() for index in self.reducer.present}
        if torch.float16 in held_in and not allow_fp16:
            raise ValueError(
                "gradients of float16 parameters cannot be unscaled, as with torch's scaler: build "
                "the optimizer with master_dtype=torch.float32, or keep the parameters in float32 "
                "and use torch.autocast"
            )
        verdict = torch.zeros(1, device=self._rank_group.control_device)
        for gradients in self._alike():
            found = torch.zeros(1, device=gradients[0].device)
            inverse = torch.as_tensor(inv_scale, dtype=torch.float32, device=found.device)
            foreach_unscale_(gradients, found, inverse)
            verdict = torch.maximum(verdict, found.to(verdict.device))
        self._rank_group.maximum(verdict).wait()
        return verdict

    @contextlib.contextmanager
    def scaled(self) -> Iterator[None]:
        """A step that ``onecopy.GradScaler`` takes."""
        self._is_scaled = True
        try:
            yield
        finally:
            self._is_scaled = False

    def require_our_scaler(self) -> None:
        if not self._is_scaled:
            raise RuntimeError(
                "torch.amp.GradScaler looks at param.grad, which is None while the optimizer is "
                "attached. Use onecopy.GradScaler, which is the same otherwise"
            )

    @torch.no_grad()
    def full_gradient(self, index: int) -> torch.Tensor | None:
        """The averaged gradient of a parameter, on all ranks. Collective."""
        self._settle()
        if index not in self.reducer.present:
            return None
        plan, param = self._sharded_params.plan, self._sharded_params.registry.params[index]
        whole = torch.empty_like(param, dtype=self._held_in(index))
        whole = whole if is_dense(param) else whole.contiguous()
        gradients = self.reducer.gradients()
        for owned, grad in zip(self._sharded_params.inner.shards, gradients, strict=True):
            if owned.shard.param == index and grad is not None:
                flat = flat_range(whole, owned.shard.start, owned.shard.stop)
                flat.copy_(flat_range(grad, 0, grad.numel()))
        self._rank_group.share(
            [
                Part(shard.rank, flat_range(whole, shard.start, shard.stop))
                for shard in _pieces_of(plan, index)
            ]
        ).wait()
        return whole


def _pieces_of(plan: Plan, index: int) -> list[Shard]:
    """The pieces of a parameter, of all ranks."""
    return [
        shard
        for bucket in range(len(plan.buckets))
        if any(segment.param == index for segment in plan.segments(bucket))
        for rank in range(plan.world_size)
        for shard in plan.shards_in(bucket, rank)
        if shard.param == index and shard.numel
    ]


def require_attachable(
    module: Any, registry: ParamRegistry, plan: Plan, user_group: Any, reduce_dtype: Any
) -> None:
    """Raise if a module cannot be attached to, with the reason."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"attach(...) takes a module, got {type(module).__name__}")
    if reduce_dtype is not None and not (
        isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point
    ):
        raise TypeError(
            f"reduce_dtype must be a floating point dtype or None, got {shown(reduce_dtype)}"
        )
    ours = set(registry.params)
    theirs = names_in(module)
    foreign = [n for p, n in theirs.items() if p.requires_grad and p not in ours]
    if foreign:
        raise ValueError(
            f"the module has trainable parameters that this optimizer does not have: "
            f"{_some(foreign)}. Nobody would average their gradients: build the optimizer on all "
            "parameters of the module, or freeze them"
        )
    outside = [entry.name for entry in registry.planned(plan) if entry.param not in theirs]
    if outside:
        raise ValueError(
            f"the optimizer has parameters that are not in the module: {_some(outside)}. Attach it "
            "to a module that holds all of them"
        )
    if ZeroGrad.is_on(module):
        raise ValueError("another optimizer is attached to this module: call its detach() first")
    if isinstance(module, DistributedDataParallel):
        complex_ones = [n for p, n in theirs.items() if p.is_complex()]
        if complex_ones:
            raise ValueError(
                f"DDP hands over the gradients of complex parameters ({_some(complex_ones)}) in "
                "parts only: attach to the bare module"
            )
        if has_foreign_hook(module):
            raise ValueError(
                "the DDP module has a communication hook already, and can have only one. Attach "
                "before, or instead of, register_comm_hook(...)"
            )
        require_finalization(module)
        ranks = dist.get_process_group_ranks(module.process_group)
        if ranks != dist.get_process_group_ranks(user_group):
            raise ValueError(
                f"the DDP module averages over ranks {ranks}, the optimizer is sharded over "
                f"{dist.get_process_group_ranks(user_group)}: give both the same process_group"
            )


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' * (len(names) > 5)}"


@torch.no_grad()
def send_from_first_rank(rank_group: RankGroup, module: torch.nn.Module) -> None:
    """Parameters and buffers of rank 0 to all ranks, as DDP does it."""
    tensors = [*names_in(module), *module.buffers()]
    for tensor in {id(t): t for t in tensors}.values():
        memory = tensor.detach()
        if is_dense(memory):
            memory = flat_range(memory, 0, memory.numel())
            rank_group.share([Part(0, memory)]).wait()
        else:
            sent = memory.contiguous()
            rank_group.share([Part(0, sent)]).wait()
            memory.copy_(sent)
    torch.autograd.graph.increment_version(list(tensors))
