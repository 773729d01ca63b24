"""The user's optimizer class, unmodified, on the shards that this rank owns.

A shard is known by a tensor: the user's own parameter where the shard is all of it, a 1-D view of
it where it is a part, or a *master copy* of either in a wider dtype (``master_dtype``).
`InnerOptimizers` holds one optimizer per class and shows them as one, with the user's groups in
their order. `Update` is one step of all of them. Read `OwnedShard`, `InnerOptimizers.build`, then
`Update`.

Invariant: the parameters are the truth, and master copies add digits to them. If somebody else
writes into a parameter (``module.load_state_dict``, ``clamp_``), its master copy follows.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.comm.interface import CopyList
from onecopy.comm.stats import Phase, named
from onecopy.planning.layout import flat_range, in_layout_of
from onecopy.planning.param_groups import MASTER, grad_dtype, update_dtype
from onecopy.planning.plan import Plan, Shard
from onecopy.planning.traits import NOT_OPTIONS, class_name, is_torch_class, options_of
from onecopy.torch_private import step_hooks, step_without_hooks, version_of

# -------------------------------------------------------------------------- owned shards


@dataclass(slots=True, eq=False)
class OwnedShard:
    """A shard of this rank, and the tensor by which the inner optimizer knows it."""

    shard: Shard
    param: torch.Tensor  # the user's
    tensor: torch.Tensor  # `param` itself, a 1-D view of it, or a master copy
    is_cut: bool  # the tensor is 1-D; else it has the parameter's shape
    # Of a master copy: the version of the parameter that it last followed, and whether it was
    # loaded after the last step; the parameter itself may be loaded next.
    followed: int | None = None
    is_loaded: bool = False

    @classmethod
    def of(
        cls, shard: Shard, param: torch.Tensor, cut: bool, master_dtype: torch.dtype | None
    ) -> OwnedShard:
        tensor = param
        if cut:
            tensor = torch.nn.Parameter(flat_range(param.detach(), shard.start, shard.stop))
        dtype = update_dtype(param.dtype, master_dtype)
        if dtype != param.dtype:
            tensor = torch.nn.Parameter(tensor.detach().to(dtype))
        elif cut and grad_dtype(param) != tensor.dtype:
            tensor.grad_dtype = grad_dtype(param)
        return cls(shard, param, tensor, cut)

    @property
    def is_whole(self) -> bool:
        return not self.is_cut

    @property
    def has_master(self) -> bool:
        return self.tensor.dtype != self.param.dtype

    def values(self) -> torch.Tensor:
        """The elements in the memory of the parameter, not tracked by autograd."""
        memory = self.param.data
        return flat_range(memory, self.shard.start, self.shard.stop) if self.is_cut else memory

    def rebind(self) -> None:
        """Follow the parameter to the memory that it has now."""
        if self.has_master:
            self.tensor.data = self.tensor.data.to(self.param.device)
        elif self.is_cut:
            self.tensor.data = flat_range(self.param.detach(), self.shard.start, self.shard.stop)

    def gradient_from(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The tensor's gradient, from that of the whole parameter; a view of it if possible."""
        if grad is not None and self.is_cut:
            laid_out = in_layout_of(self.param, grad)
            grad = flat_range(laid_out, self.shard.start, self.shard.stop)
        return self.in_own_dtype(grad)

    def in_own_dtype(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient of the shard in the dtype that the tensor takes."""
        return grad.to(self.tensor.dtype) if grad is not None and self.has_master else grad

    @property
    def is_ahead(self) -> bool:
        """Whether it has a master copy with digits that the parameter lacks."""
        return self.has_master and not torch.equal(
            self.tensor.detach(), self.values().to(self.tensor.dtype)
        )

    @property
    def is_behind(self) -> bool:
        """Whether the parameter may have been written to since its master copy followed it."""
        return self.followed != version_of(self.param)

    @torch.no_grad()
    def follow_param(self) -> None:
        """Copy what was written into the parameter; elsewhere the master copy keeps its digits."""
        values = self.values()
        changed = self.tensor.to(values.dtype) != values
        # Why no `if changed.any()`: it would synchronise with the device.
        self.tensor.copy_(torch.where(changed, values.to(self.tensor.dtype), self.tensor))
        self.mark_followed()

    def mark_followed(self) -> None:
        """The parameter holds the values of the master copy."""
        self.followed, self.is_loaded = version_of(self.param), False

    @torch.no_grad()
    def load_master(self, saved: torch.Tensor | None) -> None:
        """Copy a master copy that was loaded; None: the values of the parameter."""
        self.tensor.copy_(self.values() if saved is None else saved)
        self.followed, self.is_loaded = version_of(self.param), True

    def copied_to(self, param: torch.Tensor) -> OwnedShard:
        """The same for a copy of the parameter. Why: a copied view would not alias the copy."""
        master_dtype = self.tensor.dtype if self.has_master else None
        new = OwnedShard.of(self.shard, param, self.is_cut, master_dtype)
        if self.has_master:
            new.tensor.data.copy_(self.tensor.data)
            new.followed = None if self.is_behind else version_of(param)
            new.is_loaded = self.is_loaded
        return new


class OwnedShards:
    """The shards of this rank: in the order of the plan, by parameter and by bucket."""

    def __init__(self, shards: Iterable[OwnedShard] = ()) -> None:
        self.shards: list[OwnedShard] = []
        self.of: dict[torch.Tensor, list[OwnedShard]] = {}
        self.in_bucket: dict[int, list[OwnedShard]] = {}
        # By bucket: those that are not the user's own parameters. Without master copies there are
        # only a few in a bucket.
        self.needing_gradients: dict[int, list[OwnedShard]] = {}
        self.masters: list[OwnedShard] = []
        for owned in shards:
            self.add(owned)

    def add(self, owned: OwnedShard) -> None:
        bucket = owned.shard.bucket
        self.shards.append(owned)
        self.of.setdefault(owned.param, []).append(owned)
        self.in_bucket.setdefault(bucket, []).append(owned)
        if owned.tensor is not owned.param:
            self.needing_gradients.setdefault(bucket, []).append(owned)
        if owned.has_master:
            self.masters.append(owned)


class MasterCopies:
    """The master copies of this rank."""

    def __init__(self, owned_shards: OwnedShards) -> None:
        self._shards = owned_shards.masters
        self._copies: dict[int, CopyList] = {}
        for owned in self._shards:
            copies = self._copies.setdefault(owned.shard.bucket, CopyList())
            copies.add(owned.values(), owned.tensor.detach())

    def write_back(self, bucket: int) -> None:
        """Round the master copies of a bucket into the parameters."""
        if bucket in self._copies:
            self._copies[bucket].run()

    def remember(self) -> None:
        """The parameters hold the values of the master copies."""
        for owned in self._shards:
            owned.mark_followed()

    def forget(self) -> None:
        """The parameters have other memory, with unknown values in it."""
        for owned in self._shards:
            owned.followed = None

    def load(self, saved: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Load master copies, by the tensors of their shards; the others follow the parameters."""
        for owned in self._shards:
            owned.load_master(saved.get(owned.tensor))

    def follow_writes(self) -> bool:
        """Before master copies are saved: follow what was written into the parameters. Return
        whether there may have been anything.

        A master copy that was loaded stays until its parameter is written to, since the parameter
        may be loaded next.
        """
        behind = [owned for owned in self._shards if owned.is_behind]
        for owned in behind:
            owned.follow_param()
        return bool(behind)

    def are_behind(self) -> bool:
        """Whether ``follow_params`` would change one."""
        return any(owned.is_loaded or owned.is_behind for owned in self._shards)

    def follow_params(self) -> None:
        """Before an update: follow all parameters, also with master copies that were loaded."""
        for owned in self._shards:
            if owned.is_loaded or owned.is_behind:
                owned.follow_param()

    def tell_autograd(self) -> None:
        """Tell autograd that ``write_back`` has changed the parameters."""
        torch.autograd.graph.increment_version([owned.param for owned in self._shards])


# -------------------------------------------------------------------------- inner optimizers


@dataclass(slots=True)
class Inner:
    """One optimizer class on this rank, and the numbers of the groups that it serves."""

    optimizer: Optimizer
    groups: list[int]
    # Whether it may step on a part of its parameters at a time: a class of torch, which keeps all
    # its state by parameter. Other classes may count their steps. So may hooks of the instance.
    steps_by_bucket: bool = field(init=False)

    def __post_init__(self) -> None:
        self.steps_by_bucket = is_torch_class(class_name(type(self.optimizer)))

    def step_on(self, params: Mapping[int, list[torch.Tensor]]) -> None:
        """Step on these parameters alone, which are given by the positions of their groups."""
        groups = self.optimizer.param_groups
        before = [(groups[position], groups[position]["params"]) for position in params]
        for (group, _), some in zip(before, params.values(), strict=True):
            group["params"] = some
        self.optimizer.param_groups = [group for group, _ in before]
        try:
            step_without_hooks(self.optimizer)()
        finally:
            self.optimizer.param_groups = groups
            for group, everything in before:
                group["params"] = everything

    def snapshot(self) -> Callable[[], None]:
        """A function that undoes whatever happens to groups and state after this."""
        optimizer, numbers = self.optimizer, list(self.groups)
        state, state_entries = optimizer.state, dict(optimizer.state)
        param_groups = [(group, dict(group)) for group in optimizer.param_groups]

        def undo() -> None:
            state.clear()
            state.update(state_entries)
            for group, before in param_groups:
                group.clear()
                group.update(before)
            self.groups = numbers
            optimizer.state = state
            optimizer.param_groups = [group for group, _ in param_groups]

        return undo


class OwnedState(MutableMapping[torch.Tensor, Any]):
    """The state of what this rank owns, keyed by the tensors of the inner optimizers.

    True even when empty. Why: torch's checkpoint helpers take a false ``state`` for one that does
    not exist yet, and make it by stepping the live optimizer.
    """

    def __init__(self, inners: Callable[[], Sequence[Inner]]) -> None:
        self._inners = inners

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, tensor: torch.Tensor) -> Any:
        return self._holder(tensor)[tensor]

    def __setitem__(self, tensor: torch.Tensor, value: Any) -> None:
        self._holder(tensor)[tensor] = value

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._holder(tensor)[tensor]

    def _holder(self, tensor: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        for inner in self._inners():
            if tensor in inner.optimizer.state:
                return inner.optimizer.state
        raise KeyError(
            "this rank holds no state under that tensor: no step has made any yet, or it is not "
            'one of its tensors, which are in optimizer.optim.param_groups[i]["params"], since a '
            "parameter may be cut over the ranks"
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        for inner in self._inners():
            yield from inner.optimizer.state

    def __len__(self) -> int:
        return sum(len(inner.optimizer.state) for inner in self._inners())


class RunClosure:
    """A closure that has been run. It gives its loss to each inner optimizer once.

    Why not the closure itself: each class on each rank would run it, as often as it likes, and all
    ranks must take part in every backward.
    """

    def __init__(self, closure: Callable[[], Any]) -> None:
        with torch.enable_grad():
            self.loss = closure()

    def once(self) -> Callable[[], Any]:
        """The closure for one inner optimizer, which may call it once."""
        calls = 0

        def loss() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RuntimeError(
                    "this optimizer class evaluates its closure more than once per step. Sharded, "
                    "that cannot work: in between, each rank has moved only its own parameters"
                )
            return self.loss

        return loss


def flags_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What may decide how groups are sharded: class, partition, and options that switch something.
    Why no numbers: schedulers change them in every step."""
    return [
        {key: v for key, v in group.items() if v is None or isinstance(v, (bool, str, type))}
        for group in groups
    ]


# The gradients of this rank's shards in a bucket; None: those of the parameters themselves.
GradientsOf = Callable[[int], Sequence[torch.Tensor | None] | None]


def of_the_parameters(_: int) -> None:
    """The ``GradientsOf`` of drop-in mode."""


# What an inner optimizer has in a bucket, by the positions of its groups.
Portion = tuple[Inner, dict[int, list[torch.Tensor]]]


class InnerOptimizers:
    """All inner optimizers as one: ``param_groups`` and ``state`` as a plain optimizer has them."""

    def __init__(
        self,
        default_class: type[Optimizer],
        defaults: Mapping[str, Any],
        master_dtype: torch.dtype | None = None,
    ) -> None:
        self.master_dtype = master_dtype
        self._owned = OwnedShards()
        self.masters = MasterCopies(self._owned)
        self.portions: dict[int, list[Portion]] = {}  # by bucket
        self._inners: dict[type[Optimizer], Inner] = {}
        self._default_class = default_class
        self._defaults = dict(defaults)
        self.state = OwnedState(lambda: self.inners)

    # ------------------------------------------------------------------ parameters and groups

    @property
    def shards(self) -> list[OwnedShard]:
        """The shards of this rank, in the order of the plan."""
        return self._owned.shards

    def shards_in(self, bucket: int) -> list[OwnedShard]:
        """The shards of this rank in a bucket."""
        return self._owned.in_bucket.get(bucket, [])

    def of(self, param: torch.Tensor) -> list[OwnedShard]:
        """The shards of this rank of a parameter."""
        return self._owned.of.get(param, [])

    def add_shards(self, plan: Plan, rank: int, params: Sequence[torch.Tensor]) -> None:
        """Own this rank's shards of the parameters that the plan gained."""
        known = {owned.shard.param for owned in self.shards}
        for shard in plan.shards(rank):
            if shard.param not in known:
                cut = shard.param in plan.cut_params
                self._owned.add(OwnedShard.of(shard, params[shard.param], cut, self.master_dtype))

    def remove_shards(self) -> None:
        """Remove all shards and their state, to own those of another plan."""
        self._owned = OwnedShards()
        for inner in self._inners.values():
            for key in [key for key in inner.optimizer.state if isinstance(key, torch.Tensor)]:
                del inner.optimizer.state[key]

    def build(
        self, groups: Sequence[Mapping[str, Any]], classes: Sequence[type[Optimizer]]
    ) -> None:
        """Construct one inner optimizer per class, on its groups.

        The constructor's keywords go to the groups of the constructor's class; groups with a
        class of their own bring their own options.
        """
        if self._defaults and self._default_class not in classes:
            raise ValueError(
                f"{', '.join(self._defaults)} would have no effect: they are options for "
                f"{self._default_class.__name__}, and every group has an optimizer_class of its "
                "own. Put them into the groups"
            )
        for cls in dict.fromkeys(classes):
            numbers = [i for i, of_group in enumerate(classes) if of_group is cls]
            optimizer = self.construct(cls, [self._inner_group(groups[i]) for i in numbers])
            self._inners[cls] = Inner(optimizer, numbers)

    def add_group(self, number: int, group: Mapping[str, Any], cls: type[Optimizer]) -> None:
        inner = self._inners.get(cls)
        inner_group = self._inner_group(group)
        if inner is None:
            self._inners[cls] = Inner(self.construct(cls, [inner_group]), [number])
        else:
            inner.optimizer.add_param_group(inner_group)
            inner.groups.append(number)
            self._complete_state(inner.optimizer, inner_group, inner_group["params"])

    def refill_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """List newly owned shards in the groups of their parameters."""
        for inner in self._inners.values():
            for number, inner_group in zip(inner.groups, inner.optimizer.param_groups, strict=True):
                known = set(inner_group["params"])
                inner_group["params"] = self._inner_group(groups[number])["params"]
                new = [tensor for tensor in inner_group["params"] if tensor not in known]
                self._complete_state(inner.optimizer, inner_group, new)

    def construct(self, cls: type[Optimizer], groups: list[dict[str, Any]]) -> Optimizer:
        made = cls(groups, **(self._defaults if cls is self._default_class else {}))
        if not isinstance(made, Optimizer) or len(getattr(made, "param_groups", ())) != len(groups):
            raise TypeError(
                f"{cls.__name__}(...) has not made an optimizer with the groups that it was given: "
                "does its __init__ call that of torch.optim.Optimizer?"
            )
        return made

    def _complete_state(
        self, optimizer: Optimizer, group: Mapping[str, Any], new: Sequence[torch.Tensor]
    ) -> None:
        """Give parameters added later the state that some classes make only in the constructor."""
        for tensor, state in self.constructor_state(type(optimizer), group, new).items():
            optimizer.state.setdefault(tensor, state)

    def constructor_state(
        self, cls: type[Optimizer], group: Mapping[str, Any], params: Sequence[torch.Tensor]
    ) -> dict[torch.Tensor, Any]:
        """The state that ``cls`` makes in its constructor, as Adagrad does; mostly nothing."""
        if not params:
            return {}
        toy = torch.nn.Parameter(torch.zeros(2, 2))
        options = options_of(group)
        try:
            if not self.construct(cls, [{"params": [toy], **options}]).state:
                return {}
        except Exception:  # a class that refuses such a parameter makes no state in its constructor
            return {}
        like = {p: self._in_master_dtype(p) for p in params}
        made = self.construct(cls, [{"params": list(like.values()), **options}]).state
        return {param: made[tensor] for param, tensor in like.items() if tensor in made}

    def _in_master_dtype(self, param: torch.Tensor) -> torch.Tensor:
        """A parameter as its inner optimizer would see it."""
        dtype = update_dtype(param.dtype, self.master_dtype)
        return param if dtype == param.dtype else torch.nn.Parameter(param.detach().to(dtype))

    def _inner_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter that the user listed twice is listed, and stepped, twice, as in torch."""
        tensors = [owned.tensor for param in group["params"] for owned in self.of(param)]
        return {"params": tensors, **options_of(group)}

    def snapshot(self) -> Callable[[], None]:
        """A function that undoes whatever happens to shards, groups and state after this.

        Containers are remembered, not copies of tensors: only a step changes those.
        """
        shards, inners = list(self.shards), dict(self._inners)
        undo_inners = [inner.snapshot() for inner in inners.values()]

        def undo() -> None:
            self._owned, self._inners = OwnedShards(shards), inners
            for undo_inner in undo_inners:
                undo_inner()
            self.rebind()

        return undo

    def rebind(self) -> None:
        """Follow changes of shards, of groups, or of the memory of the parameters."""
        for owned in self.shards:
            owned.rebind()
        self.masters = MasterCopies(self._owned)
        self.portions = {}
        bucket_of = {owned.tensor: owned.shard.bucket for owned in self.shards}
        for inner in self._inners.values():
            of_inner: dict[int, dict[int, list[torch.Tensor]]] = {}
            for position, group in enumerate(inner.optimizer.param_groups):
                for tensor in group["params"]:
                    groups = of_inner.setdefault(bucket_of[tensor], {})
                    groups.setdefault(position, []).append(tensor)
            for bucket, params in of_inner.items():
                self.portions.setdefault(bucket, []).append((inner, params))

    # ------------------------------------------------------------------ as one optimizer

    @property
    def inners(self) -> list[Inner]:
        return list(self._inners.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner groups, in the order of the user's."""
        numbered = {
            number: group
            for inner in self._inners.values()
            for number, group in zip(inner.groups, inner.optimizer.param_groups, strict=True)
        }
        return [numbered[number] for number in sorted(numbered)]

    @property
    def defaults(self) -> dict[str, Any]:
        """The full defaults of the constructor's class, as it completed them."""
        inner = self._inners.get(self._default_class)
        return dict(self._defaults) if inner is None else inner.optimizer.defaults

    def replace_state(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Replace all state by this one, which is keyed by the tensors of our shards."""
        holders = {
            tensor: inner.optimizer.state
            for inner in self._inners.values()
            for group in inner.optimizer.param_groups
            for tensor in group["params"]
        }
        entries = dict(state)  # it may be a view of what is about to be forgotten
        unknown = [key for key in entries if key not in holders]
        if unknown:
            raise KeyError(
                "the new state has keys that are not tensors of this rank's shards, which are in "
                'optimizer.optim.param_groups[i]["params"]'
            )
        for inner in self._inners.values():
            inner.optimizer.state.clear()
        for tensor, value in entries.items():
            holders[tensor][tensor] = value

    def options_in(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """The user's options, as a scheduler may have changed them, to the inner optimizers."""
        for inner_group, group in zip(self.param_groups, groups, strict=True):
            inner_group.update((key, group[key]) for key in group if key not in NOT_OPTIONS)

    def options_out(self, groups: Sequence[MutableMapping[str, Any]]) -> None:
        """The inner options, defaults and new ones included, to the user's groups."""
        for inner_group, group in zip(self.param_groups, groups, strict=True):
            group.update((key, inner_group[key]) for key in inner_group if key not in NOT_OPTIONS)

    # ------------------------------------------------------------------ step

    @contextlib.contextmanager
    def bound(self, buckets: Sequence[int], gradients: GradientsOf) -> Iterator[None]:
        """In the block the shards of these buckets have gradients; then the user's come back."""
        bound: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        owned_shards = self._owned
        try:
            for bucket in buckets:
                given = gradients(bucket)
                if given is None:
                    for owned in owned_shards.needing_gradients.get(bucket, ()):
                        tensor = owned.tensor
                        bound.append((tensor, tensor.grad))
                        tensor.grad = owned.gradient_from(owned.param.grad)
                else:
                    for owned, grad in zip(self.shards_in(bucket), given, strict=True):
                        tensor = owned.tensor
                        bound.append((tensor, tensor.grad))
                        tensor.grad = owned.in_own_dtype(grad) if owned_shards.masters else grad
            yield
        finally:
            for tensor, grad in bound:
                tensor.grad = grad

    @contextlib.contextmanager
    def kept_in_place(self) -> Iterator[None]:
        """Why: a class may give its parameters other memory (``p.data = ...``). Its values are
        copied back."""
        memories = [(owned.tensor, owned.tensor.data) for owned in self.shards]
        try:
            yield
        finally:
            for tensor, memory in memories:
                if tensor.data_ptr() != memory.data_ptr():
                    memory.copy_(tensor.data)
                    tensor.data = memory

    def by_bucket(
        self, gradients: Sequence[torch.Tensor | None]
    ) -> dict[int, list[torch.Tensor | None]]:
        """Gradients of all shards, in the order of the plan, by their buckets."""
        found: dict[int, list[torch.Tensor | None]] = collections.defaultdict(list)
        for owned, grad in zip(self.shards, gradients, strict=True):
            found[owned.shard.bucket].append(grad)
        return found

    # ------------------------------------------------------------------ master copies

    def state_to_save(self, owned: OwnedShard) -> Mapping[str, Any] | None:
        """The state of a shard as it is saved, with its master copy.

        Why not always with it: a class would take a lone master copy for state that is complete.
        """
        state: Mapping[str, Any] | None = self.state.get(owned.tensor)
        if owned.has_master and (state or owned.is_ahead):
            return {**(state or {}), MASTER: owned.tensor.detach()}
        return state

    # ------------------------------------------------------------------ copying

    def __deepcopy__(self, memo: dict[int, Any]) -> InnerOptimizers:
        """With shards of the copied parameters."""
        defaults = copy.deepcopy(self._defaults, memo)
        new = type(self)(self._default_class, defaults, self.master_dtype)
        memo[id(self)] = new
        for owned in self.shards:
            copied = owned.copied_to(copy.deepcopy(owned.param, memo))
            memo[id(owned.tensor)] = copied.tensor
            new._owned.add(copied)
        new._inners = {
            cls: Inner(copy.deepcopy(inner.optimizer, memo), list(inner.groups))
            for cls, inner in self._inners.items()
        }
        return new


class Update:
    """One step of all inner optimizers.

    A class that keeps its state by parameter steps bucket by bucket: a bucket is gathered while the
    next one is computed. Any other class steps on all parameters at once.
    """

    def __init__(
        self,
        inner: InnerOptimizers,
        closure: Any,
        kwargs: Mapping[str, Any],
        gradients: GradientsOf,
        changing: Callable[[], None],
    ) -> None:
        """``changing`` is called right before a class changes parameters or state."""
        self._inner = inner
        self._closure = closure
        self._kwargs = kwargs
        self._gradients = gradients
        self._changing = changing
        self.result = closure.loss if isinstance(closure, RunClosure) else None
        is_plain = not kwargs and (closure is None or isinstance(closure, RunClosure))
        self._by_bucket = [
            i
            for i in inner.inners
            if is_plain and i.steps_by_bucket and not any(step_hooks(i.optimizer))
        ]
        self.steps_at_once = len(self._by_bucket) < len(inner.inners)

    def update_at_once(self, order: Sequence[int]) -> None:
        """Step the classes that do not step by bucket. The result is that of the first class."""
        closure = self._closure
        for number, inner in enumerate(self._inner.inners):
            if inner in self._by_bucket:
                continue
            given = dict(self._kwargs)
            if closure is not None:
                given["closure"] = closure.once() if isinstance(closure, RunClosure) else closure
            with self._inner.bound(order, self._gradients), self._inner.kept_in_place():
                self._changing()
                result = step_without_hooks(inner.optimizer)(**given)
            self.result = result if number == 0 else self.result

    def update_bucket(self, bucket: int) -> None:
        """Step the other classes on what they have in this bucket."""
        portions = self._inner.portions.get(bucket, ())
        portions = [portion for portion in portions if portion[0] in self._by_bucket]
        if portions:
            with self._inner.bound([bucket], self._gradients), named(Phase.STEP, bucket):
                self._changing()
                for inner, params in portions:
                    inner.step_on(params)
