"""The user's optimizer class, unmodified, on what this rank owns.

For each class there is one inner optimizer. Its parameters are this rank's pieces: 1-D views of
the real parameters, or the user's own parameter object where a piece is all of it, so that with
one rank the inner optimizer is exactly the plain one. A piece has a gradient only while a step
runs; where the parameter has none, the piece has none, and the class skips it as ever.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.buffers import flat_range, in_layout_of
from onecopy.intake import options_of
from onecopy.kinds import step_without_hooks
from onecopy.plan import Piece, Plan


@dataclass(slots=True, eq=False)
class OwnedPiece:
    """A piece of this rank, and the tensor by which the inner optimizer knows it."""

    piece: Piece
    param: torch.Tensor  # the user's
    tensor: torch.Tensor  # `param` itself, or a 1-D view of it

    @property
    def is_whole(self) -> bool:
        return self.tensor is self.param

    @classmethod
    def of(cls, piece: Piece, param: torch.Tensor, cut: bool) -> OwnedPiece:
        return cls(piece, param, _view(param, piece) if cut else param)

    def rebind(self) -> None:
        """Follow the parameter to the memory it has now."""
        if not self.is_whole:
            self.tensor.data = flat_range(self.param.detach(), self.piece.start, self.piece.stop)


def _view(param: torch.Tensor, piece: Piece) -> torch.nn.Parameter:
    view = torch.nn.Parameter(flat_range(param.detach(), piece.start, piece.stop))
    if grad_dtype(param) != view.dtype:
        view.grad_dtype = grad_dtype(param)
    return view


def grad_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient; recent releases let it be another than its own."""
    found: torch.dtype | None = getattr(param, "grad_dtype", None)
    return param.dtype if found is None else found


class Holdings:
    """This rank's pieces: in the order of the plan, and by parameter."""

    def __init__(self, pieces: Iterable[OwnedPiece] = ()) -> None:
        self.pieces: list[OwnedPiece] = []
        self.of: dict[torch.Tensor, list[OwnedPiece]] = {}
        self.of_cut: dict[torch.Tensor, list[OwnedPiece]] = {}  # no more than a few per bucket
        for owned in pieces:
            self.add(owned)

    def add(self, owned: OwnedPiece) -> None:
        self.pieces.append(owned)
        self.of.setdefault(owned.param, []).append(owned)
        if not owned.is_whole:
            self.of_cut.setdefault(owned.param, []).append(owned)


@dataclass(slots=True)
class Inner:
    """One optimizer class on this rank, and the numbers of the groups that it serves."""

    optimizer: Optimizer
    groups: list[int]


@dataclass(slots=True)
class _InnerBefore:
    """What an inner optimizer was, to go back to."""

    inner: Inner
    groups: list[int]
    state: MutableMapping[Any, Any]
    state_entries: dict[Any, Any]
    param_groups: list[tuple[dict[str, Any], dict[str, Any]]]  # each with a copy of it

    @classmethod
    def of(cls, inner: Inner) -> _InnerBefore:
        state = inner.optimizer.state
        param_groups = [(group, dict(group)) for group in inner.optimizer.param_groups]
        return cls(inner, list(inner.groups), state, dict(state), param_groups)

    def restore(self) -> None:
        self.state.clear()
        self.state.update(self.state_entries)
        for group, before in self.param_groups:
            group.clear()
            group.update(before)
        self.inner.groups = self.groups
        self.inner.optimizer.state = self.state  # type: ignore[assignment]
        self.inner.optimizer.param_groups = [group for group, _ in self.param_groups]


class LocalOptimizer:
    """All inner optimizers as one: ``param_groups`` and ``state`` as a plain optimizer has them."""

    def __init__(self, default_class: type[Optimizer], defaults: Mapping[str, Any]) -> None:
        self._held = Holdings()
        self._inners: dict[type[Optimizer], Inner] = {}
        self._default_class = default_class
        self._defaults = dict(defaults)
        self.state = OwnedState(self)

    # ------------------------------------------------------------------ parameters and groups

    @property
    def pieces(self) -> list[OwnedPiece]:
        """This rank's pieces, in the order of the plan."""
        return self._held.pieces

    def own(self, plan: Plan, rank: int, params: Sequence[torch.Tensor]) -> None:
        """Take over this rank's pieces of the parameters that the plan gained."""
        known = {owned.piece.param for owned in self.pieces}
        for piece in plan.pieces(rank):
            if piece.param not in known:
                param = params[piece.param]
                self._held.add(OwnedPiece.of(piece, param, cut=piece.param in plan.cut_params))

    def disown(self) -> None:
        """Let go of all pieces and of their state, to own those of another plan."""
        self._held = Holdings()
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
        """List newly owned pieces in the groups of their parameters."""
        for inner in self._inners.values():
            for number, inner_group in zip(inner.groups, inner.optimizer.param_groups, strict=True):
                known = set(inner_group["params"])
                inner_group["params"] = self._inner_group(groups[number])["params"]
                new = [tensor for tensor in inner_group["params"] if tensor not in known]
                self._complete_state(inner.optimizer, inner_group, new)

    def construct(self, cls: type[Optimizer], groups: list[dict[str, Any]]) -> Optimizer:
        return cls(groups, **(self._defaults if cls is self._default_class else {}))

    def _complete_state(
        self, optimizer: Optimizer, group: Mapping[str, Any], new: Sequence[torch.Tensor]
    ) -> None:
        """Give late-comers the state that some classes make only in the constructor."""
        for tensor, state in self.state_made_at_once(type(optimizer), group, new).items():
            optimizer.state.setdefault(tensor, state)

    def state_made_at_once(
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
        except Exception:  # a class that takes no such toy is not one that makes state at once
            return {}
        return dict(self.construct(cls, [{"params": list(params), **options}]).state)

    def _inner_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter that the user listed twice is listed, and stepped, twice, as in torch."""
        tensors = [owned.tensor for param in group["params"] for owned in self.of(param)]
        return {"params": tensors, **options_of(group)}

    def snapshot(self) -> Callable[[], None]:
        """A function that undoes whatever happens to pieces, groups and state after this.

        Containers are remembered, not copied tensors: only a step changes those.
        """
        pieces = list(self.pieces)
        inners = dict(self._inners)
        before = [_InnerBefore.of(inner) for inner in inners.values()]

        def undo() -> None:
            self._held, self._inners = Holdings(pieces), inners
            for inner in before:
                inner.restore()

        return undo

    def of(self, param: torch.Tensor) -> list[OwnedPiece]:
        """This rank's pieces of a parameter."""
        return self._held.of.get(param, [])

    def rebind(self) -> None:
        for owned in self.pieces:
            owned.rebind()

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
        """Forget all state; take over this, which is keyed by our tensors."""
        homes = {
            tensor: inner.optimizer.state
            for inner in self._inners.values()
            for group in inner.optimizer.param_groups
            for tensor in group["params"]
        }
        unknown = [key for key in state if key not in homes]
        if unknown:
            raise KeyError(
                "the new state has keys that are not tensors of this rank's pieces, which are in "
                'optimizer.optim.param_groups[i]["params"]'
            )
        for inner in self._inners.values():
            inner.optimizer.state.clear()
        for tensor, value in state.items():
            homes[tensor][tensor] = value

    def options_in(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """The user's options, as a scheduler may have changed them, to the inner optimizers."""
        for inner_group, group in zip(self.param_groups, groups, strict=True):
            inner_group.update(options_of(group))

    def options_out(self, groups: Sequence[MutableMapping[str, Any]]) -> None:
        """The inner options, defaults and new ones included, to the user's groups."""
        for inner_group, group in zip(self.param_groups, groups, strict=True):
            group.update(options_of(inner_group))

    # ------------------------------------------------------------------ step

    def step(self, closure: Any, kwargs: Mapping[str, Any]) -> Any:
        """Step every inner optimizer once, on the gradients bound to it; the first one's result."""
        results = []
        for inner in self._inners.values():
            given = dict(kwargs)
            if closure is not None:
                given["closure"] = closure.once() if isinstance(closure, Replay) else closure
            results.append(step_without_hooks(inner.optimizer)(**given))
        return results[0]

    @contextlib.contextmanager
    def gradients_bound(self) -> Iterator[None]:
        """Pieces have their parts of the parameters' gradients, without a copy."""
        for param, pieces in self._held.of_cut.items():
            if param.grad is not None:
                grad = in_layout_of(param, param.grad)  # once for all its pieces
                for owned in pieces:
                    owned.tensor.grad = flat_range(grad, owned.piece.start, owned.piece.stop)
        try:
            yield
        finally:
            for pieces in self._held.of_cut.values():
                for owned in pieces:
                    owned.tensor.grad = None

    @contextlib.contextmanager
    def gradients_borrowed(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Pieces have gradients from elsewhere; those of the user's parameters come back after."""
        own = [owned.tensor.grad for owned in self.pieces]
        for owned, gradient in zip(self.pieces, gradients, strict=True):
            owned.tensor.grad = gradient
        try:
            yield
        finally:
            for owned, gradient in zip(self.pieces, own, strict=True):
                owned.tensor.grad = gradient

    # ------------------------------------------------------------------ copying

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalOptimizer:
        """Pieces become views of the copied parameters: a copied view would alias nothing."""
        new = type(self)(self._default_class, copy.deepcopy(self._defaults, memo))
        memo[id(self)] = new
        for owned in self.pieces:
            param = copy.deepcopy(owned.param, memo)
            tensor = param if owned.is_whole else _view(param, owned.piece)
            memo[id(owned.tensor)] = tensor
            new._held.add(OwnedPiece(owned.piece, param, tensor))
        new._inners = {
            cls: Inner(copy.deepcopy(inner.optimizer, memo), list(inner.groups))
            for cls, inner in self._inners.items()
        }
        return new


class OwnedState(MutableMapping[torch.Tensor, Any]):
    """The state of what this rank owns, keyed by the tensors of the inner optimizers.

    True even when empty. Why: torch's checkpoint helpers take a false ``state`` for one that has
    yet to be made, and make it by stepping the live optimizer.
    """

    def __init__(self, local: LocalOptimizer) -> None:
        self._local = local

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, tensor: torch.Tensor) -> Any:
        return self._holder(tensor)[tensor]

    def __setitem__(self, tensor: torch.Tensor, value: Any) -> None:
        self._holder(tensor)[tensor] = value

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._holder(tensor)[tensor]

    def _holder(self, tensor: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        for inner in self._local.inners:
            if tensor in inner.optimizer.state:
                return inner.optimizer.state
        raise KeyError(
            "this rank holds no state under that tensor: no step has made any yet, or it is not "
            'one of its tensors, which are in optimizer.optim.param_groups[i]["params"], since a '
            "parameter may be cut over the ranks"
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        for inner in self._local.inners:
            yield from inner.optimizer.state

    def __len__(self) -> int:
        return sum(len(inner.optimizer.state) for inner in self._local.inners)


class Replay:
    """A closure that has been run: gives its loss to the inner optimizers, once to each.

    Why not the closure itself: it would run once per class and per rank as its optimizer pleases,
    and every run is a backward in which all ranks must take part.
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
