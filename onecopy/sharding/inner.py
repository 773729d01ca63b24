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
from onecopy.planning.traits import NOT_OPTIONS, OUR_KEYS, class_name, is_torch_class, options_of
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
        """The shard's gradient, from that of the whole parameter; a view of it if possible."""
        if grad is not None and self.is_cut:
            laid_out = in_layout_of(self.param, grad)
            grad = flat_range(laid_out, self.shard.start, self.shard.stop)
        return grad

    def copied_to(self, param: torch.Tensor) -> OwnedShard:
        """The same for a copy of the parameter. Why: a copied view would not alias the copy."""
        master_dtype = self.tensor.dtype if self.has_master else None
        new = OwnedShard.of(self.shard, param, self.is_cut, master_dtype)
        if self.has_master:
            new.tensor.data.copy_(self.tensor.data)
            is_behind = self.followed != version_of(self.param)
            new.followed = None if is_behind else version_of(param)
            new.is_loaded = self.is_loaded
        return new


class MasterCopies:
    """The master copies of this rank."""

    def __init__(self, shards: Iterable[OwnedShard]) -> None:
        self.shards = [owned for owned in shards if owned.has_master]
        self._copies: dict[int, CopyList] = {}  # into the parameters, by bucket
        for owned in self.shards:
            copies = self._copies.setdefault(owned.shard.bucket, CopyList())
            copies.add(owned.values(), owned.tensor.detach())

    def write_back(self, bucket: int) -> None:
        """Round the master copies of a bucket into the parameters."""
        if bucket in self._copies:
            self._copies[bucket].run()

    def remember(self) -> None:
        """The parameters hold the values of the master copies."""
        for owned in self.shards:
            owned.followed, owned.is_loaded = version_of(owned.param), False

    @torch.no_grad()
    def load(self, saved: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Load master copies, by the tensors of their shards; the others follow the parameters."""
        for owned in self.shards:
            owned.tensor.copy_(saved.get(owned.tensor, owned.values()))
            owned.followed, owned.is_loaded = version_of(owned.param), True

    def behind(self, also_loaded: bool = True) -> list[OwnedShard]:
        """Those whose parameters may have been written to since they followed them.

        ``also_loaded``: and those that were loaded since the last step. They stay until their
        parameter is written to or a step begins, since the parameter may be loaded next.
        """
        return [
            owned
            for owned in self.shards
            if owned.followed != version_of(owned.param) or (also_loaded and owned.is_loaded)
        ]

    @torch.no_grad()
    def follow_params(self, also_loaded: bool = True) -> bool:
        """Copy what was written into the parameters; elsewhere the master copies keep their
        digits. Return whether there may have been anything. Before an update, and before master
        copies are saved (not ``also_loaded``)."""
        behind = self.behind(also_loaded)
        for owned in behind:
            values = owned.values()
            changed = owned.tensor.to(values.dtype) != values
            # Why no `if changed.any()`: it would synchronise with the device.
            owned.tensor.copy_(torch.where(changed, values.to(owned.tensor.dtype), owned.tensor))
            owned.followed, owned.is_loaded = version_of(owned.param), False
        return bool(behind)


# -------------------------------------------------------------------------- inner optimizers


@dataclass(slots=True, eq=False)
class Inner:
    """One optimizer class on this rank, and the numbers of the groups that it serves."""

    cls: type[Optimizer]  # as it was asked for: its constructor may choose a subclass
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


class OwnedState(MutableMapping[torch.Tensor, Any]):
    """The state of what this rank owns, keyed by the tensors of the inner optimizers.

    True even when empty. Why: torch's checkpoint helpers take a false ``state`` for one that does
    not exist yet, and make it by stepping the live optimizer.
    """

    def __init__(self, owner: InnerOptimizers) -> None:
        self._owner = owner

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, tensor: torch.Tensor) -> Any:
        return self._holder(tensor)[tensor]

    def __setitem__(self, tensor: torch.Tensor, value: Any) -> None:
        self._holder(tensor)[tensor] = value

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._holder(tensor)[tensor]

    def _holder(self, tensor: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        for inner in self._owner.inners:
            if tensor in inner.optimizer.state:
                return inner.optimizer.state
        raise KeyError(
            "this rank holds no state under that tensor: no step has made any yet, or it is not "
            'one of its tensors, which are in optimizer.optim.param_groups[i]["params"], since a '
            "parameter may be cut over the ranks"
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        for inner in self._owner.inners:
            yield from inner.optimizer.state

    def __len__(self) -> int:
        return sum(len(inner.optimizer.state) for inner in self._owner.inners)


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
        {k: v for k, v in group.items() if k in OUR_KEYS or v is None or isinstance(v, (bool, str))}
        for group in groups
    ]


# The gradients of this rank's shards in a bucket. None in its place: those of the parameters.
GradientsOf = Callable[[int], Sequence[torch.Tensor | None]]

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
        self.inners: list[Inner] = []
        self.portions: dict[int, list[Portion]] = {}  # by bucket
        self._default_class, self._defaults = default_class, dict(defaults)
        self.state = OwnedState(self)
        self._own(())
        self.masters = MasterCopies(())

    # ------------------------------------------------------------------ parameters and groups

    def _own(self, shards: Iterable[OwnedShard]) -> None:
        """Own these shards, in the order of the plan, and no others."""
        self.shards = list(shards)
        self._of: dict[torch.Tensor, list[OwnedShard]] = {}
        self._in_bucket: dict[int, list[OwnedShard]] = {}
        # By bucket: those that are not the user's own parameters. Without master copies there are
        # only a few in a bucket.
        self._needing_gradients: dict[int, list[OwnedShard]] = {}
        for owned in self.shards:
            self._of.setdefault(owned.param, []).append(owned)
            self._in_bucket.setdefault(owned.shard.bucket, []).append(owned)
            if owned.tensor is not owned.param:
                self._needing_gradients.setdefault(owned.shard.bucket, []).append(owned)

    def shards_in(self, bucket: int) -> list[OwnedShard]:
        """The shards of this rank in a bucket."""
        return self._in_bucket.get(bucket, [])

    def of(self, param: torch.Tensor) -> list[OwnedShard]:
        """The shards of this rank of a parameter."""
        return self._of.get(param, [])

    def add_shards(self, plan: Plan, rank: int, params: Sequence[torch.Tensor]) -> None:
        """Own this rank's shards of the parameters that the plan gained."""
        known = {owned.shard.param for owned in self.shards}
        new = [
            OwnedShard.of(
                shard, params[shard.param], shard.param in plan.cut_params, self.master_dtype
            )
            for shard in plan.shards(rank)
            if shard.param not in known
        ]
        self._own([*self.shards, *new])

    def remove_shards(self) -> None:
        """Remove all shards and their state, to own those of another plan."""
        self._own(())
        for inner in self.inners:
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
            self.inners.append(Inner(cls, optimizer, numbers))

    def add_group(self, number: int, group: Mapping[str, Any], cls: type[Optimizer]) -> None:
        inner = self._inner_of(cls)
        inner_group = self._inner_group(group)
        if inner is None:
            self.inners.append(Inner(cls, self.construct(cls, [inner_group]), [number]))
        else:
            inner.optimizer.add_param_group(inner_group)
            inner.groups.append(number)
            self._complete_state(inner.optimizer, inner_group, inner_group["params"])

    def refill_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """List newly owned shards in the groups of their parameters."""
        for inner in self.inners:
            for number, inner_group in zip(inner.groups, inner.optimizer.param_groups, strict=True):
                known = set(inner_group["params"])
                inner_group["params"] = self._inner_group(groups[number])["params"]
                new = [tensor for tensor in inner_group["params"] if tensor not in known]
                self._complete_state(inner.optimizer, inner_group, new)

    def _inner_of(self, cls: type[Optimizer]) -> Inner | None:
        return next((inner for inner in self.inners if inner.cls is cls), None)

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
        like = {}  # each parameter as its inner optimizer would see it
        for param in params:
            dtype = update_dtype(param.dtype, self.master_dtype)
            is_own = dtype == param.dtype
            like[param] = param if is_own else torch.nn.Parameter(param.detach().to(dtype))
        made = self.construct(cls, [{"params": list(like.values()), **options}]).state
        return {param: made[tensor] for param, tensor in like.items() if tensor in made}

    def _inner_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter that the user listed twice is listed, and stepped, twice, as in torch."""
        tensors = [owned.tensor for param in group["params"] for owned in self.of(param)]
        return {"params": tensors, **options_of(group)}

    def snapshot(self) -> Callable[[], None]:
        """A function that undoes whatever happens to shards, groups and state after this.

        Containers are remembered, not copies of tensors: only a step changes those.
        """
        shards, inners = self.shards, list(self.inners)
        before = []
        for inner in inners:
            optimizer, numbers = inner.optimizer, list(inner.groups)
            groups = [(group, dict(group)) for group in optimizer.param_groups]
            before.append((inner, numbers, groups, optimizer.state, dict(optimizer.state)))

        def undo() -> None:
            self._own(shards)
            self.inners = inners
            for inner, numbers, groups, state, entries in before:
                contents: list[tuple[dict[Any, Any], dict[Any, Any]]] = [(state, entries), *groups]
                for container, content in contents:
                    container.clear()
                    container.update(content)
                inner.groups, inner.optimizer.state = numbers, state
                inner.optimizer.param_groups = [group for group, _ in groups]
            self.rebind()

        return undo

    def rebind(self) -> None:
        """Follow changes of shards, of groups, or of the memory of the parameters."""
        for owned in self.shards:
            owned.rebind()
        self.masters = MasterCopies(self.shards)
        self.portions = {}
        bucket_of = {owned.tensor: owned.shard.bucket for owned in self.shards}
        for inner in self.inners:
            of_inner: dict[int, dict[int, list[torch.Tensor]]] = {}
            for position, group in enumerate(inner.optimizer.param_groups):
                for tensor in group["params"]:
                    groups = of_inner.setdefault(bucket_of[tensor], {})
                    groups.setdefault(position, []).append(tensor)
            for bucket, params in of_inner.items():
                self.portions.setdefault(bucket, []).append((inner, params))

    # ------------------------------------------------------------------ as one optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner groups, in the order of the user's."""
        numbered = {
            number: group
            for inner in self.inners
            for number, group in zip(inner.groups, inner.optimizer.param_groups, strict=True)
        }
        return [numbered[number] for number in sorted(numbered)]

    @property
    def defaults(self) -> dict[str, Any]:
        """The full defaults of the constructor's class, as it completed them."""
        inner = self._inner_of(self._default_class)
        return dict(self._defaults) if inner is None else inner.optimizer.defaults

    def replace_state(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Replace all state by this one, which is keyed by the tensors of our shards."""
        holders = {
            tensor: inner.optimizer.state
            for inner in self.inners
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
        for inner in self.inners:
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
    def bound(self, buckets: Sequence[int], gradients: GradientsOf | None) -> Iterator[None]:
        """In the block the shards of these buckets have gradients; then the user's come back."""
        bound: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        has_masters = bool(self.masters.shards)
        try:
            for bucket in buckets:
                if gradients is None:
                    needing = self._needing_gradients.get(bucket, ())
                    found = [(owned, owned.gradient_from(owned.param.grad)) for owned in needing]
                else:
                    found = list(zip(self.shards_in(bucket), gradients(bucket), strict=True))
                for owned, grad in found:
                    tensor, converts = owned.tensor, has_masters and owned.has_master
                    bound.append((tensor, tensor.grad))
                    tensor.grad = grad.to(tensor.dtype) if converts and grad is not None else grad
            yield
        finally:
            for tensor, grad in bound:
                tensor.grad = grad

    # ------------------------------------------------------------------ master copies

    def state_to_save(self, owned: OwnedShard) -> Mapping[str, Any] | None:
        """The state of a shard as it is saved, with its master copy.

        Why not always with it: a class would take a lone master copy for state that is complete.
        """
        state: Mapping[str, Any] | None = self.state.get(owned.tensor)
        if owned.has_master:
            master = owned.tensor.detach()
            if state or not torch.equal(master, owned.values().to(master.dtype)):
                return {**(state or {}), MASTER: master}
        return state

    # ------------------------------------------------------------------ copying

    def __deepcopy__(self, memo: dict[int, Any]) -> InnerOptimizers:
        """With shards of the copied parameters."""
        defaults = copy.deepcopy(self._defaults, memo)
        new = type(self)(self._default_class, defaults, self.master_dtype)
        memo[id(self)] = new
        new._own([owned.copied_to(copy.deepcopy(owned.param, memo)) for owned in self.shards])
        for owned, copied in zip(self.shards, new.shards, strict=True):
            memo[id(owned.tensor)] = copied.tensor
        for inner in self.inners:
            optimizer = copy.deepcopy(inner.optimizer, memo)
            new.inners.append(Inner(inner.cls, optimizer, list(inner.groups)))
        return new


@dataclass
class Update:
    """One step of all inner optimizers.

    A class that keeps its state by parameter steps bucket by bucket: a bucket is gathered while the
    next one is computed. Any other class steps on all parameters at once.
    """

    inner: InnerOptimizers
    closure: Any
    kwargs: Mapping[str, Any]
    gradients: GradientsOf | None
    changing: Callable[[], None]  # called right before a class changes parameters or state

    def __post_init__(self) -> None:
        closure, kwargs = self.closure, self.kwargs
        self.result = closure.loss if isinstance(closure, RunClosure) else None
        is_plain = not kwargs and (closure is None or isinstance(closure, RunClosure))
        self._by_bucket = [
            i
            for i in self.inner.inners
            if is_plain and i.steps_by_bucket and not any(step_hooks(i.optimizer))
        ]
        self.steps_at_once = len(self._by_bucket) < len(self.inner.inners)

    def update_at_once(self, order: Sequence[int]) -> None:
        """Step the classes that do not step by bucket. The result is that of the first class."""
        for number, inner in enumerate(self.inner.inners):
            if inner in self._by_bucket:
                continue
            given = dict(self.kwargs)
            if self.closure is not None:
                has_run = isinstance(self.closure, RunClosure)
                given["closure"] = self.closure.once() if has_run else self.closure
            with self.inner.bound(order, self.gradients):
                memories = [(owned.tensor, owned.tensor.data) for owned in self.inner.shards]
                self.changing()
                try:
                    result = step_without_hooks(inner.optimizer)(**given)
                finally:
                    # A class may give its parameters other memory (``p.data = ...``).
                    for tensor, memory in memories:
                        if tensor.data_ptr() != memory.data_ptr():
                            memory.copy_(tensor.data)
                            tensor.data = memory
            self.result = result if number == 0 else self.result

    def update_bucket(self, bucket: int) -> None:
        """Step the other classes on what they have in this bucket."""
        portions = self.inner.portions.get(bucket, ())
        portions = [portion for portion in portions if portion[0] in self._by_bucket]
        if portions:
            with self.inner.bound([bucket], self.gradients), named(Phase.STEP, bucket):
                self.changing()
                for inner, params in portions:
                    inner.step_on(params)
