"""Any state dict may be handed to `load_state_dict`: it is loaded, or refused with the optimizer
and its parameters as they were, to the bit."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzzing import Tally, alone, bits, cases, junk, tally  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onecopy import ZeroRedundancyOptimizer

pytestmark = pytest.mark.usefixtures("alone")

Tree = dict[str, Any]

# ------------------------------------------------------------------------------- dicts that fit


CLASSES: dict[str, tuple[Any, Tree]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "masters": (torch.optim.Adam, {"lr": 0.1, "master_dtype": torch.float32}),
}


class Live:
    """An optimizer that has stepped; every seed gives other values."""

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        if name == "masters":
            self.model.bfloat16()
        first, *rest = self.model.parameters()
        cls, options = CLASSES[name]
        groups = [{"params": [first], "weight_decay": 0.01}, {"params": rest}]
        self.opt = ZeroRedundancyOptimizer(groups, cls, **options)
        self.step()

    def step(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.opt.step()

    def full(self) -> Tree:
        self.opt.consolidate_state_dict()
        return copy.deepcopy(self.opt.state_dict())

    def picture(self) -> Any:
        return (
            bits([dict(state) for state in self.opt.state.values()]),
            bits([dict(group) for group in self.opt.param_groups]),
            bits([dict(group) for group in self.opt.optim.param_groups]),
            self.opt._plan.digest,
            bits(list(self.model.parameters())),
        )


# ------------------------------------------------------------------------------- damage


class Labelled(torch.Tensor):
    """A subclass that does nothing."""


CHANGED_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nan": lambda t: torch.full_like(t, float("nan")),
    "double": lambda t: t.double(),
    "half": lambda t: t.half(),
    "integers": lambda t: t.long(),
    "complex": lambda t: t.to(torch.complex64),
    "flags": lambda t: t > 0,
    "longer": lambda t: torch.cat([t.flatten(), t.flatten()]),
    "flat": lambda t: t.flatten(),
    "one more dimension": lambda t: t[None],
    "empty": lambda t: t.flatten()[:0],
    "transposed": lambda t: t.t() if t.dim() == 2 else t,
    "scalar": lambda t: t.flatten()[0],
    "huge": lambda t: t.new_ones(()).expand(2**20, 2**20),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse() if t.dim() else t,
    "labelled": lambda t: t.as_subclass(Labelled),
    "a parameter": lambda t: nn.Parameter(t.float()),
    "not a leaf": lambda t: nn.Parameter(t.float()) * 2,
    "expanded": lambda t: t.flatten()[0].expand(t.shape),
    "list": lambda t: t.tolist(),
    "array": lambda t: t.float().numpy(),
}


def paths_in(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(tree, (dict, list)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            found += paths_in(value, (*path, key))
    return found


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def changed(draw: st.DrawFn, value: Any, root: Tree, full: Tree) -> Any:
    """Another value for a place in the dict `root`, which was `full`."""
    if isinstance(value, torch.Tensor) and draw(st.integers(0, 3)):
        return CHANGED_TENSORS[draw(st.sampled_from(sorted(CHANGED_TENSORS)))](value)
    if isinstance(value, int) and draw(st.booleans()):
        return draw(st.sampled_from([-1, -(2**63), 2**63, value + 1, 99, float(value), str(value)]))
    if isinstance(value, dict) and draw(st.booleans()):
        kind = draw(st.sampled_from([collections.OrderedDict, list, tuple, str, frozenset]))
        return kind(value)
    if draw(st.integers(0, 4)) == 0:
        return root  # which now holds itself
    if draw(st.booleans()):
        return at(full, draw(st.sampled_from(paths_in(full))))
    return draw(junk)


@st.composite
def state_dicts(draw: st.DrawFn, full: Tree, others: list[Tree]) -> Any:
    """`full` with one to three things wrong, or something else altogether."""
    if draw(st.integers(0, 15)) == 0:
        return draw(junk)
    if draw(st.integers(0, 7)) == 0:
        return copy.deepcopy(draw(st.sampled_from(others)))
    found: Any = copy.deepcopy(full)
    paths = draw(st.lists(st.sampled_from(paths_in(full)[1:]), min_size=1, max_size=3, unique=True))
    for *above, key in paths:
        try:
            parent = at(found, tuple(above))
            value = parent[key]
        except (LookupError, TypeError):
            continue  # gone with something above it
        what = draw(st.integers(0, 9))
        if not isinstance(parent, (dict, list)):
            continue
        if what == 0:
            del parent[key]
        elif what == 1 and isinstance(parent, dict):
            strange = st.sampled_from([-1, 99, "extra", None, 1.5, ("a",), "exp_avg"])
            parent[draw(strange)] = draw(junk)
        elif what == 2 and isinstance(parent, list):
            parent.append(value)
        else:
            parent[key] = changed(draw, value, found, full)
    return found


# ------------------------------------------------------------------------------- the test


@pytest.fixture(scope="module")
def full_dicts(alone: None) -> dict[str, Tree]:  # noqa: F811
    return {name: Live(name, seed=2).full() for name in CLASSES}


@pytest.mark.parametrize("name", CLASSES)
@given(data=st.data())
@cases(100)
def test_fuzz_load_state_dict(
    tally: Tally,  # noqa: F811
    full_dicts: dict[str, Tree],
    name: str,
    data: st.DataObject,
) -> None:
    live, full = Live(name, seed=1), full_dicts[name]
    bad = data.draw(state_dicts(full, list(full_dicts.values())))
    before = live.picture()
    if not tally.attempt(lambda: live.opt.load_state_dict(bad)):
        assert live.picture() == before
    live.opt.load_state_dict(full)  # whatever came before, this works
    assert bits(live.full()) == bits(full)
    live.step()
