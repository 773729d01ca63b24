"""What an optimizer class does with a tensor: how it may be cut, and which state it makes.

Classes of torch are known. Any other class is *probed* once per class and options: it steps on
small tensors, alone, together and cut, and its kind follows from what changes. Read `traits_of`,
`partition_kind`, then `StateTemplate`, which steps on stand-ins to see the state of a group.
"""

from __future__ import annotations

import copy
import enum
import inspect
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.planning.text import shown
from onecopy.torch_private import step_without_hooks

# Keys of a parameter group that are ours or torch's, not options of the optimizer class.
OUR_KEYS = frozenset({"optimizer_class", "partition"})
NOT_OPTIONS = OUR_KEYS | {"params", "param_names"}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the optimizer class in a parameter group."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


logger = logging.getLogger("onecopy")


class Kind(enum.Enum):
    """What the update of an element depends on."""

    ELEMENTWISE = "elementwise"  # that element: a tensor may be cut
    WHOLE = "whole"  # its tensor: each tensor has one owner
    GLOBAL = "global"  # other tensors, too: cannot be sharded


PARTITIONS = ("auto", Kind.ELEMENTWISE.value, Kind.WHOLE.value)


@dataclass(frozen=True, slots=True)
class Traits:
    """The kind of a class, and why."""

    kind: Kind
    reason: str


_ELEMENTWISE = Traits(Kind.ELEMENTWISE, "every element is updated by itself")
_RANDOM = Traits(Kind.GLOBAL, "it draws random numbers, and every rank would draw others")
_TRAITS_BY_NAME = {
    **dict.fromkeys(("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax"), _ELEMENTWISE),
    **dict.fromkeys(("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"), _ELEMENTWISE),
    "Muon": Traits(Kind.WHOLE, "it orthogonalises whole matrices"),
    "Adafactor": Traits(Kind.WHOLE, "it keeps statistics of rows, columns and whole tensors"),
    "SparseAdam": Traits(Kind.WHOLE, "its sparse gradients index the rows of a whole tensor"),
    "LBFGS": Traits(
        Kind.GLOBAL,
        "it treats all parameters as one vector and evaluates its closure as often as a line "
        "search over that vector asks",
    ),
}
# Why getattr: the older releases that we support lack some of the classes.
_KNOWN: dict[type[Optimizer], Traits] = {
    cls: traits
    for name, traits in _TRAITS_BY_NAME.items()
    if (cls := getattr(torch.optim, name, None)) is not None
}

# Options that choose between implementations of the same arithmetic. Some need an accelerator, and
# the probe is on the CPU.
_IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


def traits_of(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    dtypes: Iterable[torch.dtype] = (torch.float32,),
) -> Traits:
    """The kind of a class with these constructor options on such parameters: known, or probed."""
    known = _KNOWN.get(optimizer_class)
    return known if known is not None else _probe(optimizer_class, options, dtypes)


def is_elementwise(optimizer_class: type[Optimizer], **options: Any) -> bool:
    """Whether the class updates every element by itself, so that its state can be cut evenly.

    >>> is_elementwise(torch.optim.AdamW, lr=1e-3)
    True
    """
    return traits_of(optimizer_class, options).kind is Kind.ELEMENTWISE


def partition_kind(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    partition: str,
    dtypes: Iterable[torch.dtype] = (torch.float32,),
) -> Kind:
    """ELEMENTWISE or WHOLE for a parameter group, or a ``ValueError`` with the reason."""
    name = optimizer_class.__name__
    if not isinstance(partition, str) or partition not in PARTITIONS:
        raise ValueError(f"partition must be one of {PARTITIONS}, got {shown(partition)}")
    known = _KNOWN.get(optimizer_class)
    if partition != "auto" and known is None:
        return Kind(partition)
    found = traits_of(optimizer_class, options, dtypes)
    if found.kind is Kind.GLOBAL:
        advice = (
            f"Train it unsharded: {name}(model.parameters(), ...)."
            if known is not None
            else 'If that is acceptable, say partition="whole": every rank then runs it on its '
            "own parameters, which is not the unsharded algorithm."
        )
        raise ValueError(f"{name} cannot be sharded: {found.reason}. {advice}")
    if partition == Kind.ELEMENTWISE.value and found.kind is Kind.WHOLE:
        raise ValueError(
            f'partition="elementwise" would cut tensors that {name} needs whole: {found.reason}. '
            'Leave partition="auto", or say "whole".'
        )
    return Kind.WHOLE if partition == Kind.WHOLE.value else found.kind


def update_cost(optimizer_class: type[Optimizer], shape: Sequence[int]) -> int:
    """Work of updating one whole tensor, to balance owners by.

    Muon's Newton-Schulz iteration multiplies a matrix with its Gram matrix on the shorter side;
    for everything else the number of elements is as good as any guess. Only the balance, never
    the result, depends on it, so recognising Muon's relatives by name is good enough.
    """
    numel = math.prod(shape)
    if "muon" in optimizer_class.__name__.lower() and len(shape) >= 2 and numel:
        short = min(shape[0], numel // shape[0])
        return numel * short
    return numel


# ---------------------------------------------------------------------------- the probe


class _CallsClosureAgain(Exception):
    """The probed class evaluated its closure a second time within one step."""


# Enough for classes that couple parameters only after some progress: DAdaptLion needs 25 to 40.
_PROBE_STEPS = 64
# More elements, and longer rows, than the thresholds from which classes quantise or factorise.
_LARGE_SHAPE = (144, 150)


_Toy = Sequence[torch.Tensor]  # a parameter at its start, and its gradients
_Make = Callable[[list[torch.nn.Parameter]], Optimizer]  # of the probed class, with its options

# By class and options: a hundred groups of an unknown class cost one probe, and one warning.
_probed: weakref.WeakKeyDictionary[type[Optimizer], dict[str, Traits]] = weakref.WeakKeyDictionary()


def _probe(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    dtypes: Iterable[torch.dtype] = (torch.float32,),
) -> Traits:
    floating = {str(dtype): dtype for dtype in dtypes if dtype.is_floating_point}
    options = {k: v for k, v in options.items() if k not in _IMPLEMENTATION_OPTIONS}
    # No class changes its kind with the learning rate, but one of zero, or a huge one, shows none.
    if "lr" in options:
        lr = options["lr"]
        options["lr"] = torch.full_like(lr, 0.01) if isinstance(lr, torch.Tensor) else 0.01
    options.pop("initial_lr", None)  # written by schedulers
    known = _probed.setdefault(optimizer_class, {})
    try:
        signature = repr([sorted(floating), sorted((key, str(v)) for key, v in options.items())])
    except Exception:  # options whose text cannot be taken are not remembered
        known, signature = {}, ""
    if signature not in known:
        known[signature] = _try_out(
            optimizer_class.__name__,
            lambda params: optimizer_class(params, **copy.deepcopy(options)),
            floating.values(),
        )
    return known[signature]


def _try_out(name: str, make: _Make, dtypes: Iterable[torch.dtype]) -> Traits:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = _probe_small(make)
            for dtype in dtypes:
                if found.kind is Kind.ELEMENTWISE:
                    # Some classes treat large tensors, or narrow dtypes, unlike small float32 ones.
                    # At a multiple of 64 a cut does not change the bits of a vectorised loop.
                    toy = _toy(_LARGE_SHAPE, seed=3, steps=3, dtype=dtype)
                    large = f" of a large {dtype} tensor"
                    found = _probe_cut(make, toy, at=64 * 101, what=large)
            return found
        except _CallsClosureAgain:
            return Traits(
                Kind.GLOBAL,
                "it evaluates its closure more than once per step, on parameters of which every "
                "rank has moved only its own",
            )
        except Exception as error:  # the class may need anything: a device, an argument of step()
            logger.warning(
                "%s could not be tried out on toy tensors (%s: %s), so its tensors are kept whole. "
                "If its update of a tensor depends on that tensor alone, this is right: say "
                'partition="whole" to confirm it.',
                *(name, type(error).__name__, error),
            )
            return Traits(Kind.WHOLE, "it could not be tried out on toy tensors")


def _probe_small(make: _Make) -> Traits:
    first, second = _toy((4, 6), seed=1), _toy((5, 3), seed=2)
    alone = _run(make, [first])
    if not alone.values[0].isfinite().all() or torch.equal(alone.values[0], first[0]):
        raise ValueError("with these options its steps lead nowhere, so they show nothing")
    together = _run(make, [first, second])
    second_alone = _run(make, [second])
    found = _probe_cut(make, first, at=7)
    are_equal = map(torch.equal, [*alone.values, *second_alone.values], together.values)
    if found is not _RANDOM and not all(are_equal):
        return Traits(Kind.GLOBAL, "its update of one parameter depends on the other parameters")
    return found


def _probe_cut(make: _Make, toy: _Toy, at: int, what: str = "") -> Traits:
    """The kind of the class, if a tensor that is cut there tells all."""
    alone = _run(make, [toy])
    if alone.drew_random_numbers:
        return _RANDOM
    parts = zip(*(tensor.flatten().tensor_split([at]) for tensor in toy), strict=True)
    try:
        cut = _run(make, list(parts))
    except Exception:
        return Traits(Kind.WHOLE, "it does not accept one-dimensional shards")
    if not (alone.state_is_parameter_shaped and cut.state_is_parameter_shaped):
        return Traits(Kind.WHOLE, f"its state{what} is not shaped like the parameter")
    if not torch.equal(torch.cat(cut.values), alone.values[0].flatten()):
        return Traits(
            Kind.WHOLE, f"its update of an element{what} depends on the rest of the tensor"
        )
    return _ELEMENTWISE


def _toy(
    shape: tuple[int, ...],
    seed: int,
    steps: int = _PROBE_STEPS,
    dtype: torch.dtype = torch.float32,
) -> _Toy:
    """The start of a small parameter, and its gradients.

    Why of very unequal size: any coupling of elements changes bits then. Why of a constant
    direction: classes that estimate a step size from progress act only if there is some.
    """
    source = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 1, math.prod(shape), dtype=torch.float32).reshape(shape)
    start, *noise = (
        torch.randn(shape, generator=source, dtype=torch.float32) for _ in range(1 + steps)
    )
    return [start.to(dtype), *(((1 + each / 4) * scale).to(dtype) for each in noise)]


@dataclass(frozen=True, slots=True)
class _Run:
    values: list[torch.Tensor]
    state_is_parameter_shaped: bool
    drew_random_numbers: bool


def _run(make: _Make, toys: Sequence[_Toy]) -> _Run:
    # Why not torch.manual_seed: it would reseed accelerators too, whose state is not restored.
    random = torch.default_generator.manual_seed(0).get_state()
    params = [torch.nn.Parameter(start.clone()) for start, *_ in toys]
    optimizer = make(params)
    if hasattr(optimizer, "train"):
        optimizer.train()
    step = step_without_hooks(optimizer)
    takes_closure = "closure" in inspect.signature(type(optimizer).step).parameters
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise _CallsClosureAgain
        return torch.tensor(0.0)

    for gradients in zip(*(toy[1:] for toy in toys), strict=True):
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
        calls = 0
        step(closure=closure) if takes_closure else step()
    shaped = all(
        value.shape in ((), param.shape)
        if type(value) is torch.Tensor
        else not isinstance(value, (torch.Tensor, list, tuple, dict))
        for param in params
        for value in optimizer.state[param].values()
    )
    drew = not torch.equal(random, torch.default_generator.get_state())
    return _Run([param.detach() for param in params], shaped, drew)


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def is_torch_class(name: str) -> bool:
    """Whether a class is one of torch.optim: these keep all their state by parameter, in a form
    that does not change."""
    return name.startswith("torch.optim.")


# ---------------------------------------------------------------------------- state

_TOY_SHAPE = (2, 3)
_LARGE = 128  # classes that factorise do so from about this size on
_PRIMES = (131, 137, 139, 149, 151, 157)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The state of an elementwise class: its keys, with the bytes of an element and of a shard."""

    sizes: tuple[tuple[str, int, int], ...]

    def of(self, elements: int, shards: int) -> dict[str, int]:
        return {key: element * elements + shard * shards for key, element, shard in self.sizes}


@dataclass(frozen=True, slots=True)
class StateTemplate:
    """The state that an optimizer class makes with the options of a group, seen on stand-ins."""

    optimizer_class: type[Optimizer]
    construct: Callable[[torch.Tensor], Optimizer]
    lr: Any

    def for_shard(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """State by key for shards of a cut parameter. A tensor in it is per element
        (``is_per_element``), or one of the shard."""
        return self._step_on(torch.zeros(_TOY_SHAPE, dtype=dtype, device=device))

    def for_tensor(self, param: torch.Tensor) -> dict[str, Any]:
        """State by key for a whole parameter like this one; its tensors may be on "meta"."""
        try:
            return self._step_on(torch.empty_like(param, device="meta"))
        except Exception:  # the class reads values, which a meta tensor has not
            return self._step_on(torch.zeros_like(param))

    def bytes_of_shards(self, dtype: torch.dtype) -> StateBytes:
        sizes = []
        for key, value in self.for_shard(dtype, torch.device("cpu")).items():
            tensors = tensors_in(value)
            element = sum(t.element_size() for t in tensors if is_per_element(t))
            others = (t for t in tensors if not is_per_element(t))
            shard = sum(t.numel() * t.element_size() for t in others)
            sizes.append((str(key), element, shard))
        return StateBytes(tuple(sorted(size for size in sizes if any(size[1:]))))

    def bytes_of_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, int]:
        """Bytes of the state of a whole parameter, by key."""
        originals: dict[int, int] = {}  # by the prime that stands for a large size
        try:
            state = self.for_tensor(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        except Exception:  # the class reads values: a smaller tensor with values takes its place
            primes, small = iter(_PRIMES), []
            for size in shape:
                small.append(size if size < _LARGE else next(primes, size))
                if small[-1] != size:
                    originals[small[-1]] = size
            state = self.for_tensor(torch.zeros(small, dtype=dtype))
        found = {
            str(key): sum(_real_numel(t, originals) * t.element_size() for t in tensors_in(value))
            for key, value in state.items()
        }
        return {key: count for key, count in sorted(found.items()) if count}

    def _step_on(self, values: torch.Tensor) -> dict[str, Any]:
        stand_in = torch.nn.Parameter(values.detach())
        optimizer = self.construct(stand_in)
        if hasattr(optimizer, "train"):  # schedule-free classes step in that mode only
            optimizer.train()
        stand_in.grad = torch.zeros_like(stand_in)
        if isinstance(optimizer, torch.optim.SparseAdam):
            stand_in.grad = torch.ones_like(stand_in).to_sparse()
        try:
            step_without_hooks(optimizer)()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ValueError(
                f"{class_name(self.optimizer_class)} cannot take a step with the options that it "
                f"has: {shown(error, longest=200)}"
            ) from error
        return dict(optimizer.state.get(stand_in, {}))

    def start_of(self, key: str) -> float | None:
        """The value with which a state begins, if the class is known to begin with another than 0.

        >>> StateTemplate(torch.optim.NAdam, ..., lr=0.1).start_of("mu_product")
        1.0
        """
        classes = (cls for cls in self.optimizer_class.__mro__ if cls in _STARTS)
        known = _STARTS.get(next(classes, Optimizer), {}).get(key)
        return float(self.lr) if known is _LR else known


_LR: Any = object()
_STARTS: Mapping[type[Optimizer], Mapping[str, Any]] = {
    torch.optim.NAdam: {"mu_product": 1.0},
    torch.optim.ASGD: {"eta": _LR, "mu": 1.0},
    torch.optim.Rprop: {"step_size": _LR},
}


def is_per_element(value: torch.Tensor) -> bool:
    """Whether a tensor of ``StateTemplate.for_shard`` has an element for each of the shard's."""
    return tuple(value.shape) == _TOY_SHAPE


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    nests = isinstance(value, (dict, list, tuple))
    return [leaf for item in items for leaf in tensors_in(item)] if nests else []


def _real_numel(tensor: torch.Tensor, originals: Mapping[int, int]) -> int:
    """Elements of a state tensor if the parameter had its real size.

    >>> _real_numel(torch.empty(131, 3), {131: 4096})
    12288
    """
    numel, factor = tensor.numel(), 1
    for prime, original in originals.items():
        while numel and numel % prime == 0:
            numel, factor = numel // prime, factor * original
    return numel * factor
