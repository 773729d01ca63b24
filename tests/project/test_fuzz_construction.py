"""Anything may be handed to the constructor, to `add_param_group`, `attach` and the clipping: it is
accepted, or refused on purpose with everything as it was."""

from __future__ import annotations

import abc
import functools
import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from fuzzing import Tally, alone, bits, cases, deep, judge, junk, tally  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from inside import is_attached, params_of, plan_of
from torch import nn
from torch.optim import Optimizer

from onecopy import ZeroRedundancyOptimizer

pytestmark = pytest.mark.usefixtures("alone")


# ------------------------------------------------------------------------------- parameters


def parameter(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).reshape(shape).to(**options))


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Labelled(torch.Tensor):
    """A subclass that does nothing."""


GOOD: dict[str, Callable[[], Any]] = {
    "matrix": lambda: parameter(3, 2),
    "vector": lambda: parameter(5),
    "scalar": lambda: nn.Parameter(torch.tensor(2.0)),
    "float64": lambda: parameter(4, dtype=torch.float64),
    "bfloat16": lambda: parameter(4, dtype=torch.bfloat16),
    "complex": lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)),
}
ODD: dict[str, Callable[[], Any]] = {
    "frozen": lambda: nn.Parameter(torch.ones(3), requires_grad=False),
    "plain": lambda: torch.ones(3),
    "empty": lambda: nn.Parameter(torch.empty(0, 3)),
    "float8": lambda: nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn)),
    "integers": lambda: torch.arange(4),
    "booleans": lambda: torch.ones(3, dtype=torch.bool),
    "not a leaf": lambda: parameter(3) * 2,
    "a view": lambda: parameter(4, 4)[1:3, ::2],
    "expanded": lambda: torch.ones(1).expand(7),
    "huge": lambda: torch.ones(1).expand(2**40),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": quantized,
    "nested": nested,
    "meta": lambda: nn.Parameter(torch.empty(3, device="meta")),
    "uninitialized": nn.UninitializedParameter,
    "labelled": lambda: torch.ones(3).as_subclass(Labelled),
    "array": lambda: numpy.ones(3),
}
tensors = st.one_of(
    st.sampled_from(sorted(GOOD)).map(lambda name: GOOD[name]()),
    st.sampled_from(sorted(GOOD)).map(lambda name: GOOD[name]()),
    st.sampled_from(sorted(ODD)).map(lambda name: ODD[name]()),
)


def failing(items: list[Any]) -> Any:
    yield from items
    raise OSError("the caller's generator failed")


@st.composite
def iterables(draw: st.DrawFn) -> Any:
    """Parameters in any form, sometimes twice, sometimes with something else among them."""
    items = draw(st.lists(tensors, max_size=4))
    if items and draw(st.integers(0, 5)) == 0:
        items.append(items[0])
    if draw(st.integers(0, 5)) == 0:
        items.insert(draw(st.integers(0, len(items))), draw(junk))
    form = draw(st.integers(0, 9))
    if form == 1:
        return (item for item in items)
    if form == 2:
        return [(f"name {number}", item) for number, item in enumerate(items)]
    if form == 3:
        return [(draw(junk), item) for item in items]
    if form == 4:
        return failing(items)
    if form == 5:
        return [items, items]
    if form == 6:
        return {f"name {number}": item for number, item in enumerate(items)}
    return items


names_of_options = st.sampled_from(
    [
        *("lr", "betas", "momentum", "weight_decay", "eps", "foreach", "fused", "maximize"),
        *("differentiable", "capturable", "amsgrad", "partition", "optimizer_class", "nonsense"),
        *("param_names", "initial_lr"),
    ]
)


@st.composite
def groups(draw: st.DrawFn) -> Any:
    found: dict[Any, Any] = {"params": draw(st.one_of(iterables(), tensors, junk))}
    found.update(draw(st.dictionaries(names_of_options, st.one_of(junk, classes), max_size=2)))
    if draw(st.integers(0, 9)) == 0:
        del found["params"]
    if draw(st.integers(0, 9)) == 0:
        found[3] = 4
    return found


# ------------------------------------------------------------------------------- classes


class RaisesWhenBuilt(Optimizer):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise KeyError("the caller's class")


class RaisesInStep(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, *_: Any) -> None:
        raise ZeroDivisionError("the caller's class")


class Forgetful(Optimizer):
    """Does not call the constructor of its base."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.lr = 0.1


class TakesNothing(Optimizer):
    def __init__(self) -> None:
        super().__init__([torch.ones(1)], {})


class Abstract(Optimizer, abc.ABC):
    @abc.abstractmethod
    def direction(self) -> None: ...


class Impostor(Optimizer):
    """Makes something else than an optimizer."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return "optimizer"


class LosesGroups(torch.optim.SGD):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.param_groups = []


CLASSES: dict[str, Any] = {
    **{name: getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "Adagrad", "LBFGS")},
    **{name: getattr(torch.optim, name) for name in ("SparseAdam", "Adafactor", "ASGD", "Rprop")},
    "base": Optimizer,
    **{cls.__name__: cls for cls in (*(RaisesWhenBuilt, RaisesInStep, TakesNothing, Abstract),)},
    "partial": functools.partial(torch.optim.Adam, lr=0.1),
    "function": lambda params, **_: torch.optim.SGD(params, lr=0.1),
    "an instance": torch.optim.SGD([torch.ones(1)], lr=0.1),
    "a module": nn.Linear,
    "a name": "Adam",
    "our own": ZeroRedundancyOptimizer,
}
usual_classes = st.sampled_from(["SGD", "Adam", "AdamW"]).map(CLASSES.__getitem__)
classes = st.one_of(usual_classes, st.sampled_from(sorted(CLASSES)).map(CLASSES.__getitem__))
names_of_arguments = st.one_of(
    names_of_options,
    st.sampled_from(
        [
            *("process_group", "parameters_as_bucket_view", "overlap_with_ddp"),
            *("bucket_mb", "master_dtype", "check_every"),
        ]
    ),
)


# ------------------------------------------------------------------------------- the tests


def tensors_in(tree: Any, depth: int = 4) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return tensors_in(list(tree.values()), depth)
    if isinstance(tree, (list, tuple)) and depth:
        return [tensor for item in tree for tensor in tensors_in(item, depth - 1)]
    return []


def picture(tensors: list[torch.Tensor]) -> Any:
    usual = [t for t in tensors if not isinstance(t, nn.UninitializedParameter) and not t.is_nested]
    return [(bits(t), bits(t.grad) if t.is_leaf else None) for t in usual]


def set_gradients(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if type(tensor) is nn.Parameter and tensor.requires_grad and tensor.is_floating_point():
            tensor.grad = torch.ones_like(tensor)


@given(data=st.data())
@cases(200)
def test_fuzz_constructor(tally: Tally, data: st.DataObject) -> None:  # noqa: F811
    params = data.draw(st.one_of(iterables(), iterables(), st.lists(groups(), max_size=3), junk))
    cls = data.draw(classes)
    arguments = st.dictionaries(names_of_arguments, junk, max_size=2)
    options = {"lr": 0.1, **data.draw(arguments)}
    given_tensors = tensors_in(params)
    before = picture(given_tensors)
    callers = [dict(group) for group in params] if is_groups(params) else None
    made: list[ZeroRedundancyOptimizer] = []

    def build() -> None:
        made.append(ZeroRedundancyOptimizer(params, cls, **options))

    with tally.case():
        if tally.attempt(build, class_may_refuse=True):
            set_gradients(given_tensors)
            tally.attempt(made[0].step, class_may_refuse=True)
        else:
            assert picture(given_tensors) == before
        if callers is not None:
            assert [list(group) for group in params] == [list(group) for group in callers]
            assert all(g[k] is c[k] for g, c in zip(params, callers, strict=True) for k in c)


@pytest.mark.parametrize("cls", [Forgetful, Impostor, LosesGroups])
def test_a_class_that_makes_no_optimizer_is_refused_on_purpose(cls: Any) -> None:
    with pytest.raises(Exception, match=cls.__name__) as refusal:
        ZeroRedundancyOptimizer([parameter(2)], cls, lr=0.1)
    judge(refusal.value, class_may_refuse=True)


def is_groups(params: Any) -> bool:
    return isinstance(params, list) and all(isinstance(item, dict) for item in params)


class Live:
    """A trained optimizer, and what it holds."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        params = list(self.module.parameters())
        self.opt = ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.1, **options)
        self.step()

    def step(self) -> None:
        for param in self.module.parameters():
            param.grad = torch.full_like(param, 0.5)
        self.opt.step()

    def picture(self) -> Any:
        opt = self.opt
        return (
            bits([dict(state) for state in opt.state.values()]),
            bits([dict(group) for group in opt.param_groups]),
            bits([dict(group) for group in opt.optim.param_groups]),
            (plan_of(opt).digest, len(params_of(opt)), not is_attached(opt)),
            picture(list(self.module.parameters())),
        )


@given(data=st.data())
@cases(100)
def test_fuzz_add_param_group(tally: Tally, data: st.DataObject) -> None:  # noqa: F811
    live = Live()
    group = data.draw(st.one_of(groups(), groups(), groups(), junk))
    before, tensors = live.picture(), tensors_in(group)
    of_group = picture(tensors)
    with tally.case():
        if not tally.attempt(lambda: live.opt.add_param_group(group), class_may_refuse=True):
            assert live.picture() == before
            assert picture(tensors) == of_group
            live.step()  # it works as if nothing had been given


@given(data=st.data())
@cases(50)
def test_fuzz_attach(tally: Tally, data: st.DataObject) -> None:  # noqa: F811
    live = Live()
    own, another = live.module, nn.Linear(2, 2)
    larger = nn.Sequential(own, nn.Linear(2, 2))
    scripted = nn.ModuleList([own])
    modules = st.sampled_from([own, own, own, own[0], another, larger, scripted, nn.Module])
    module = data.draw(st.one_of(modules, junk))
    options = st.dictionaries(st.sampled_from(["reduce_dtype", "lazy_gather"]), junk, max_size=2)
    how = data.draw(options)
    before = live.picture()
    with tally.case():
        if tally.attempt(lambda: live.opt.attach(module, **how)):
            own(torch.ones(1, 3)).sum().backward()
            live.opt.step()
            live.opt.detach()
        else:
            assert live.picture() == before
            assert not any(m._forward_pre_hooks or m._forward_hooks for m in own.modules())
            live.step()


@pytest.mark.parametrize(
    ("how", "message"),
    [({"lazy_gather": 10**5000}, None), ({"reduce_dtype": deep()}, "reduce_dtype must be")],
)
def test_attach_can_say_what_it_was_given(how: dict[str, Any], message: str | None) -> None:
    live = Live()
    if message is None:
        live.opt.attach(live.module, **how)
        live.opt.detach()
    else:
        with pytest.raises(TypeError, match=message):
            live.opt.attach(live.module, **how)


@given(data=st.data())
@cases(80)
def test_fuzz_clipping(tally: Tally, data: st.DataObject) -> None:  # noqa: F811
    live = Live()
    attached = data.draw(st.booleans())
    if attached:
        live.opt.attach(live.module)
        live.module(torch.ones(1, 3)).sum().backward()
    arguments = data.draw(st.lists(junk, min_size=1, max_size=4))
    method = data.draw(st.sampled_from(["clip_grad_norm_", "grad_norm", "full_grad"]))
    if method != "clip_grad_norm_":
        del arguments[1:]
    with tally.case():
        tally.attempt(lambda: getattr(live.opt, method)(*arguments))
        live.opt.step()


def test_no_file_descriptors_are_left_behind() -> None:
    def build() -> int:
        for _ in range(20):
            with pytest.raises(ValueError, match="positive"):
                ZeroRedundancyOptimizer([parameter(2)], torch.optim.SGD, lr=0.1, check_every=-1)
        return len(os.listdir("/proc/self/fd"))

    assert build() == build()
