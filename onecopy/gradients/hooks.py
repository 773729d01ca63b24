"""Hooks on the user's module, by which gradients come to the reducer while backward runs.

``ModuleHooks`` (of a bare module) and ``DDPHooks`` have the same methods: they call
``GradientReducer.begin``, ``arrived`` for every gradient and ``end``, each once per backward.
``LazyGather`` waits for parameters before forwards. ``hook_with_zero_step`` steps inside backward.

All hooks hold the optimizer weakly, and hooks of copied modules do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm.group import average_as_ddp
from onecopy.gradients.join import JoinCallbacks, JoinParticipant
from onecopy.gradients.reducer import GradientReducer
from onecopy.planning.layout import is_dense
from onecopy.sharding.engine import BucketQueue
from onecopy.torch_private import (
    disable_dynamo,
    divides_by_all_ranks,
    has_comm_hook,
    in_backward,
    is_in_forward_of_ddp,
    is_unfinished,
    queue_callback,
    reduced_parameters,
    restart_reducer,
)


class _NotCopied:
    """Hooks of one module. Those of a copied or pickled module do nothing."""

    _is_copy = False

    def __reduce__(self) -> Any:
        return object.__new__, (type(self),), {"_is_copy": True}


class PatchedMethod:
    """A method of one module, instead of that of its class, which ``call`` gets first."""

    def __init__(self, module: torch.nn.Module, name: str, call: Callable[..., Any]) -> None:
        self._module, self._name, self._call = weakref.ref(module), name, call
        module.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            return None
        method = functools.partial(getattr(type(module), self._name), module)
        return self._call(method, *args, **kwargs)

    def remove(self) -> None:
        module = self._module()
        if module is not None and module.__dict__.get(self._name) is self:
            del module.__dict__[self._name]

    def __reduce__(self) -> Any:  # copied and pickled modules have the method of their class
        module = self._module()
        return functools.partial, (getattr(type(module), self._name), module)


def _hook_trained(
    params: Iterable[torch.Tensor],
    hooked: dict[int, Any],
    hook: Callable[[int, torch.Tensor], None],
) -> None:
    """Call ``hook`` with the index and the parameter when ``param.grad`` has been computed, also of
    parameters that are trained now and were not before."""
    for index, param in enumerate(params):
        if param.requires_grad and index not in hooked:
            register: Any = param.register_post_accumulate_grad_hook
            hooked[index] = register(functools.partial(hook, index))


# -------------------------------------------------------------------------- a bare module


class ModuleHooks(_NotCopied):
    """Hooks on the parameters and the output of a bare module.

    The end of backward is queued when the gradient of the module's output is computed, which is
    first of all. Why not from the hook of a parameter: inside a checkpointed part that would be the
    end of that part only. It is the second choice, for a loss that is not made of the output.
    """

    reduces_nothing = False
    ddp_bytes = 0

    def __init__(
        self,
        module: torch.nn.Module,
        reducer: GradientReducer,
        begin: Callable[[], None],
        drop: Callable[[], None],
    ) -> None:
        """``begin`` is called when the first gradient of a backward arrives, ``drop`` at a forward
        that follows a backward that has raised."""
        self._reducer = reducer
        self._begin = begin
        self._drop = drop
        self._syncs = True
        # Whether gradients of a backward inside no_sync() came after the last backward outside.
        self.has_unsynced = False
        self.is_inside_ddp = False  # as of the last forward
        self._is_queued = False  # the end of the backward
        self._begin_lock = threading.RLock()  # one thread per device may see the first gradient
        self._hooked: dict[int, Any] = {}  # handles of hooks, by parameter
        self._handle = module.register_forward_hook(self._after_forward)

    def follow(self) -> None:
        """Pass on the gradients of the reducer's parameters, by their position."""
        _hook_trained(self._reducer.prepared.params, self._hooked, self._arrived)

    # Why: traced by torch.compile it ends in a warning of torch's about the output's `.grad`.
    @disable_dynamo
    def _after_forward(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        if self._is_copy:
            return
        if not in_backward() and (self._is_queued or self._reducer.is_active):
            self._drop()  # the last backward has raised and never came to its end
        if torch.is_grad_enabled():
            self.is_inside_ddp = is_in_forward_of_ddp()
            for tensor in _tensors(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    register: Any = tensor.register_hook
                    register(self._begins)

    def _begins(self, _: torch.Tensor) -> None:
        if self._syncs and not self._is_queued:
            with self._begin_lock:
                if not self._is_queued:  # no other thread was first
                    queue_callback(self._ended)
                    self._is_queued = True

    def _arrived(self, index: int, param: torch.Tensor) -> None:
        if not self._syncs:
            self.has_unsynced = True
            if self._reducer.accumulates:
                self._reducer.accumulate(index, param)
            return
        if not self._is_queued:
            self._begins(param)
        if not self._reducer.is_active:
            if index not in self._reducer.prepared.buckets_of:
                return  # until the next step, which plans it
            with self._begin_lock:
                if not self._reducer.is_active:
                    self.has_unsynced = False
                    self._begin()
        self._reducer.arrived(index)

    def _ended(self) -> None:
        self._is_queued = False
        # A backward that reached none of the parameters, as of a gradient penalty, is none.
        if self._reducer.is_active:
            self._reducer.end()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context gradients stay on this rank, and accumulate."""
        if self._reducer.accumulates:  # also those of parameters that the next step plans
            self.follow()
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @property
    def has_raised(self) -> bool:
        """Whether a backward has begun and not ended, of which the other ranks send gradients."""
        return self._reducer.is_active and not in_backward()

    def reset(self) -> None:
        """The gradients of all backwards so far are dropped."""
        self._is_queued = self.has_unsynced = False

    def start_over(self) -> None:
        """A backward has raised on some rank: forget it, on all ranks."""
        self._is_queued = False

    def remove(self) -> None:
        for handle in (self._handle, *self._hooked.values()):
            handle.remove()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif hasattr(tree, "__dataclass_fields__"):
        yield from _tensors([getattr(tree, name, None) for name in tree.__dataclass_fields__])


# -------------------------------------------------------------------------- DDP

# DDP looks at the annotations of a communication hook, and wants the classes themselves.
_ANNOTATIONS = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}


class _CommHook:
    """The communication hook of a DDP module, which can never be removed. It passes buckets to the
    hooks of the optimizer that is attached; without one it averages them as DDP itself does."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.hooks: DDPHooks | None = None
        self._group = ddp.process_group
        ddp.register_comm_hook(None, self._hook)

    def _hook(self, _: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.hooks is None:
            return average_as_ddp(bucket.buffer(), self._group)
        self.hooks.take(bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    _hook.__annotations__.update(_ANNOTATIONS)


_comm_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, _CommHook] = (
    weakref.WeakKeyDictionary()
)


def require_attachable_ddp(ddp: DistributedDataParallel, user_group: Any) -> None:
    """Raise if ``DDPHooks`` cannot work with this module."""
    if has_comm_hook(ddp) and ddp not in _comm_hooks:
        raise ValueError(
            "the DDP module has a communication hook already, and can have only one. Attach "
            "before, or instead of, register_comm_hook(...)"
        )
    require_finalization(ddp)
    require_same_ranks(ddp, user_group)


def require_finalization(ddp: Any) -> None:
    """Raise if DDP does not end a backward by itself (an option of torch 2.15 and later)."""
    if getattr(ddp, "require_manual_backward_finalization", False):
        raise ValueError(
            "the DDP module has require_manual_backward_finalization=True: it writes gradients "
            "when finalize_backward() is called and not when backward ends, which is when an "
            "attached optimizer takes them. Set it to False, or leave out attach(...)"
        )


def require_same_ranks(ddp: Any, user_group: Any) -> None:
    """Raise if DDP averages over other ranks than those of the optimizer's group."""
    ranks, ours = map(dist.get_process_group_ranks, (ddp.process_group, user_group))
    if ranks != ours:
        raise ValueError(
            f"the DDP module averages over ranks {ranks}, the optimizer is sharded over {ours}: "
            "give both the same process_group"
        )


def after_ddp(callback: Callable[[], None]) -> None:
    """To be called by a communication hook: run when DDP has put the gradients back into
    ``param.grad``. DDP does that in a callback that is queued after this one: what a callback
    queues in its turn comes last."""
    queue_callback(lambda: queue_callback(callback))


def after_joined(ddp: DistributedDataParallel, then: Callable[[], None]) -> PatchedMethod:
    """Inside ``Join``: call ``then`` after what DDP does on a joined rank, and before the next
    joinable has its turn."""

    def join_hook(of_ddp: Callable[..., JoinHook], **kwargs: Any) -> JoinHook:
        hook = of_ddp(**kwargs)

        def take_part() -> None:
            hook.main_hook()
            then()

        return JoinCallbacks(take_part, hook.post_hook)

    return PatchedMethod(ddp, "join_hook", join_hook)


class DDPHooks:
    """DDP's communication hook.

    DDP puts the gradients back into ``param.grad`` when backward has ended, and only then can one
    tell which were unused anywhere.
    """

    is_inside_ddp = False

    def __init__(
        self,
        ddp: DistributedDataParallel,
        reducer: GradientReducer,
        join: JoinParticipant,
        enter: Callable[[], None],
        drop: Callable[[], None],
    ) -> None:
        """``enter`` is called when a backward begins, on all ranks, and ``drop`` at a forward that
        follows a backward that has raised."""
        if ddp not in _comm_hooks:
            _comm_hooks[ddp] = _CommHook(ddp)
        self._of_ddp: Callable[[], Any] = weakref.ref(ddp)  # which holds on to this by its hook
        self._comm_hook = _comm_hooks[ddp]
        self._comm_hook.hooks = self
        self._reducer = reducer
        self._join = join
        self._enter = enter
        self._drop = drop
        self._index: dict[torch.Tensor, int] = {}
        self._accumulating: dict[int, Any] = {}  # handles of hooks, by parameter
        self._is_queued = False  # the end of the backward
        self._must_start_over = False
        self._has_ended = True  # the backward of the last forward
        # When the optimizer was attached, for errors.
        self._trained = [param for param in ddp.parameters() if param.requires_grad]
        self.has_unsynced = False  # a forward inside no_sync came after the last backward outside
        self._handle = ddp.register_forward_pre_hook(self._before_forward)
        self._join_hook = after_joined(ddp, self._end_joined)

    def follow(self) -> None:
        self._index = {param: index for index, param in enumerate(self._reducer.prepared.params)}

    def _before_forward(self, *_: Any) -> None:
        if self.has_raised or (self._must_start_over and not in_backward()):
            self._drop()
        self._has_ended = False
        ddp = self._of_ddp()
        require_finalization(ddp)  # it may have been set since
        if torch.is_grad_enabled() and not ddp.require_backward_grad_sync:
            self.has_unsynced = True
            if self._reducer.accumulates:
                params = self._reducer.prepared.params
                _hook_trained(params, self._accumulating, self._accumulate)

    def _accumulate(self, index: int, param: torch.Tensor) -> None:
        ddp = self._of_ddp()
        # DDP averages a backward if its forward was outside of no_sync(). If the forward is taken
        # for one inside, nothing is lost: DDP delivers a zero, to which this is added.
        if ddp is not None and not ddp.require_forward_param_sync:
            self._reducer.accumulate(index, param)

    def take(self, bucket: GradBucket) -> None:
        """A bucket of DDP is full."""
        if not self._reducer.is_active:
            self._begin()
        for param, shown in zip(bucket.parameters(), bucket.gradients(), strict=True):
            index, stride, grad = self._index.get(param), param.stride(), shown
            if grad.stride() != stride and is_dense(param):
                # DDP lays it out as its parameter is, and shows it as if it were contiguous.
                grad = grad.as_strided(param.shape, stride, grad.storage_offset())
            if index is not None:  # DDP also has what was frozen and is not ours
                self._reducer.arrived(index, grad)
        if bucket.is_last() and not self._waits_for_joined():
            self._end_joined()

    def _begin(self) -> None:
        """The first bucket of a backward is full."""
        self.has_unsynced = False
        try:
            after_ddp(self._ended)
            self._is_queued = True
        except RuntimeError:  # no backward: this rank has joined
            self._is_queued = False
        self._enter()
        rank_group = self._reducer.rank_group
        world = rank_group.world_size
        if not divides_by_all_ranks(self._of_ddp()):
            active = torch.tensor([int(self._is_queued)], device=rank_group.control_device)
            rank_group.total(active).wait()
            world = int(active)
        self._reducer.share = 1 / world
        self._reducer.begin(keeps_back=self._waits_for_joined())

    def _waits_for_joined(self) -> bool:
        """Whether DDP's own end of a backward waits for joined ranks.

        Why that matters: to find unused parameters DDP asks all ranks, and joined ranks answer
        when the hook has returned. If the hook waited for a bucket of a rank that waits for DDP,
        neither would ever go on. So buckets are sent when DDP has finished.
        """
        return bool(self._of_ddp().find_unused_parameters and self._join.is_active)

    def _end_joined(self) -> None:
        """On a joined rank: a backward of the others has come to its end."""
        if self._reducer.is_active and not self._is_queued:
            self._reducer.end(present=set())

    def _ended(self) -> None:
        self._is_queued, self._has_ended = False, True
        present = self._reducer.left_in_params()  # what is not planned keeps what it has
        self._reducer.end(present)
        for index in present:
            self._reducer.prepared.params[index].grad = None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        context: contextlib.AbstractContextManager[None] = self._of_ddp().no_sync()
        return context

    @property
    def has_raised(self) -> bool:
        """Whether a backward has begun and not ended, even if no bucket of DDP was full."""
        if in_backward():
            return False
        ddp = self._of_ddp()
        return self._reducer.is_active or (
            not self._has_ended and ddp is not None and is_unfinished(ddp)
        )

    def reset(self) -> None:
        self._is_queued, self._has_ended, self.has_unsynced = False, True, False
        if self._must_start_over:
            self.start_over()

    def start_over(self) -> None:
        """After a backward that raised DDP goes on if its reducer starts over. It then orders its
        buckets anew, which is collective: hence on all ranks."""
        self._is_queued, self._has_ended = False, True
        # Inside a backward DDP's reducer is locked: it has to wait.
        self._must_start_over = in_backward()
        ddp = self._of_ddp()
        if ddp is not None and not self._must_start_over:
            restart_reducer(ddp)

    @property
    def reduces_nothing(self) -> bool:
        """Whether no parameter whose gradients come here is trained."""
        reduced = reduced_parameters(self._of_ddp()) or self._trained
        return not any(param.requires_grad for param in reduced)

    @property
    def ddp_bytes(self) -> int:
        """Memory of DDP's buckets, which it keeps unless it allocates them for each backward (an
        option of torch 2.15 and later)."""
        if getattr(self._of_ddp(), "lazy_bucket_allocation", False) and not in_backward():
            return 0
        trained = [param for param in self._reducer.prepared.params if param.requires_grad]
        return sum(param.numel() * param.element_size() for param in trained)

    def remove(self) -> None:
        for handle in (self._handle, self._join_hook, *self._accumulating.values()):
            handle.remove()
        self._accumulating = {}
        if self._comm_hook.hooks is self:
            self._comm_hook.hooks = None


# -------------------------------------------------------------------------- lazy all-gathers


class LazyGather(_NotCopied):
    """Hooks on a module and its children that wait for all-gathers before a forward.

    The first forward is observed: a module whose own hook did not run in it is waited for by the
    modules around it. Until then, and outside of training, every module waits for all buckets.
    """

    def __init__(self, module: torch.nn.Module, all_gathers: BucketQueue) -> None:
        self._root, self._all_gathers = module, all_gathers
        self._buckets: dict[torch.nn.Module, list[int]] = {}  # that each module waits for
        # Those that did not run in the first forward, for ever. A dict, because torch 2.6 cannot
        # trace `in` of a set.
        self._not_fired: dict[torch.nn.Module, None] = {}
        self.follow({})
        self._handles: list[Any] = [module.register_forward_hook(self._after_all, always_call=True)]
        each: Any
        for each in module.modules():
            self._handles += [
                each.register_forward_pre_hook(self._before, prepend=True),
                each.register_state_dict_pre_hook(self._before_state_dict),
                each.register_load_state_dict_pre_hook(self._before_state_dict),
            ]

    def follow(self, buckets_of: Mapping[torch.Tensor, Sequence[int]]) -> None:
        """Learn which module needs which buckets."""
        self._own = {  # buckets of each module's own parameters
            module: {b for p in module.parameters(recurse=False) for b in buckets_of.get(p, ())}
            for module in self._root.modules()
        }
        self._knows = False  # which modules' forwards are called
        self._fired: set[torch.nn.Module] = set()  # in the first forward, uncompiled
        self.stepped()

    def stepped(self) -> None:
        """All-gathers are in flight again."""
        self._root_has_waited = False  # for its buckets

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        # A wait inside compiled code breaks its graph. So the root waits for modules that are
        # compiled, unless one was called uncompiled before: the root then leaves it to the module.
        if self._is_copy or (
            torch.compiler.is_compiling()
            and self._root_has_waited
            and module is not self._root
            and (not self._knows or module in self._not_fired)
        ):
            return
        self._await(module)

    # Not traced, so that ``_fired`` has uncompiled modules only: since torch 2.15 dynamo carries
    # out what a traced hook adds to a set, and before it does not.
    @disable_dynamo
    def _await(self, module: torch.nn.Module) -> None:
        if not self._knows:
            self._fired.add(module)
        trains = self._knows and module.training and torch.is_grad_enabled()
        self._all_gathers.wait(self._buckets.get(module) if trains else None)
        if module is self._root:
            self._root_has_waited = True

    @disable_dynamo
    def _after_all(self, *_: Any) -> None:
        if not self._is_copy and not self._knows:
            # A module that was not called once may be compiled: it never waits for itself.
            self._not_fired |= dict.fromkeys(self._own.keys() - self._fired)
            self._buckets = {
                module: sorted(
                    self._own[module].union(
                        *(self._own[m] for m in module.modules() if m in self._not_fired)
                    )
                )
                for module in self._own
            }
            self._knows = True

    def _before_state_dict(self, *_: Any) -> None:
        if not self._is_copy:
            self._all_gathers.wait()

    def __reduce__(self) -> Any:
        self._all_gathers.wait()
        return super().__reduce__()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._all_gathers.wait()


# -------------------------------------------------------------------------- steps inside backward

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: Any,
    shard_buckets: bool = False,
) -> Hook:
    """Return a DDP communication hook that averages with ``hook`` and then steps ``zero``.

    The step happens at the end of backward, when DDP has averaged all gradients. ``zero.step()``
    does nothing.

    Args:
        hook (Callable): a communication hook that averages a bucket, for example torch's
            ``allreduce_hook``.
        ddp (DistributedDataParallel): the module to register the returned hook with.
        zero (ZeroRedundancyOptimizer): built on the parameters of ``ddp``, with
            ``overlap_with_ddp=True``.
        shard_buckets (bool): accepted for compatibility. Shards are even either way.

    Raises:
        ValueError: if ``zero`` was built without ``overlap_with_ddp=True``, or for other ranks
            than ``ddp``.

    Example::

        zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    """
    del shard_buckets
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"ddp must be a DistributedDataParallel, got {type(ddp).__name__}")
    if not hasattr(zero, "_overlaps_with_ddp"):
        raise TypeError(f"zero must be onecopy's optimizer, got {type(zero).__name__}")
    if not zero._overlaps_with_ddp:
        raise ValueError(
            "the optimizer does not step inside backward: build it with overlap_with_ddp=True"
        )
    require_same_ranks(ddp, zero.process_group)
    after_joined(ddp, zero._run_joined)

    def step_after(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        # A joined rank is in no backward: it steps when DDP has finished.
        if bucket.is_last() and in_backward():
            after_ddp(zero._step_in_backward)
        return future

    step_after.__annotations__.update(_ANNOTATIONS)
    return step_after


# Its all-gathers overlap the update already.
hook_with_zero_step_interleaved = hook_with_zero_step
