"""Any state dict may be handed to `load_state_dict`: it is loaded, or refused with the optimizer
and its parameters as they were, to the bit; on all ranks alike, also where parameters are cut over
them, and in all of its classes, if it has several."""

from __future__ import annotations

import collections
import copy
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzzing import TIMES, Tally, alone, bits, cases, judge, junk, memory_limited, tally  # noqa: F401
from harness import World, run_on_ranks
from hypothesis import given, seed
from hypothesis import strategies as st
from inside import plan_of
from models import SMALL_BUCKETS
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
    "two classes": (torch.optim.Adam, {"lr": 0.1}),
}
SECOND_CLASS = {"optimizer_class": torch.optim.SGD, "lr": 0.2, "momentum": 0.9}


class Live:
    """An optimizer that has stepped; every seed gives other values."""

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        if name == "masters":
            self.model.bfloat16()
        first, *rest = self.model.parameters()
        cls, options = CLASSES[name]
        second = SECOND_CLASS if name == "two classes" else {}
        groups = [{"params": [first], "weight_decay": 0.01}, {"params": rest, **second}]
        self.opt = ZeroRedundancyOptimizer(groups, cls, bucket_mb=SMALL_BUCKETS, **options)
        self.step()

    def step(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.opt.step()

    def full(self) -> Tree:
        """On every rank."""
        for to in range(dist.get_world_size()):
            self.opt.consolidate_state_dict(to)
            if dist.get_rank() == to:
                found = copy.deepcopy(self.opt.state_dict())
        return found

    def picture(self) -> Any:
        return (
            bits([dict(state) for state in self.opt.state.values()]),
            bits([dict(group) for group in self.opt.param_groups]),
            bits([dict(group) for group in self.opt.optim.param_groups]),
            plan_of(self.opt).digest,
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
        return copy.deepcopy(at(full, draw(st.sampled_from(paths_in(full)))))
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
    with tally.case():
        try_to_load(tally, live, bad, full)


def try_to_load(tally: Tally, live: Live, bad: Any, full: Tree) -> bool:  # noqa: F811
    """Whether it was accepted."""
    before = live.picture()
    is_accepted = tally.attempt(lambda: live.opt.load_state_dict(bad))
    if not is_accepted:
        assert live.picture() == before
    live.opt.load_state_dict(full)  # whatever came before, this works
    assert bits(live.full()) == bits(full)
    live.step()
    return is_accepted


# ------------------------------------------------------------------------------- two ranks


def load_on_all(world: World, name: str, number: int, count: int) -> list[int]:
    """All ranks draw the same dicts, as long as they do the same with them."""
    full_dicts = {each: Live(each, seed=2).full() for each in CLASSES}
    full, others = full_dicts[name], list(full_dicts.values())
    tally = Tally()  # noqa: F811

    @seed(number)
    @given(data=st.data())
    @cases(count, shrinks=False)
    def load(data: st.DataObject) -> None:
        live = Live(name, seed=1)
        bad = data.draw(state_dicts(full, others))
        with tally.case():
            is_accepted = try_to_load(tally, live, bad, full)
            verdicts = [False] * world.size
            dist.all_gather_object(verdicts, is_accepted)
            assert verdicts == [is_accepted] * world.size, f"seed {number}"

    with memory_limited():
        load()
    return tally.counts


@pytest.mark.parametrize("name", CLASSES)
def test_fuzz_load_state_dict_of_cut_parameters(tally: Tally, name: str) -> None:  # noqa: F811
    number = 1 if TIMES == 1 else secrets.randbelow(2**32)
    ranks = run_on_ranks(2, load_on_all, name, number, 25, timeout=600.0 * TIMES)
    assert ranks[0] == ranks[1]
    tally.add(ranks[0])


def load_what_is_broken_where_one_rank_owns_it(world: World) -> None:
    live = Live("Adam", seed=1)
    bad = live.full()
    del bad["state"][3]["step"]  # which is not cut: one rank has it
    before = live.picture()
    with pytest.raises(ValueError, match="cannot load the state dict") as error:
        live.opt.load_state_dict(bad)
    judge(error.value, class_may_refuse=False)
    assert live.picture() == before


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_a_class_of_torch_misses_in_one_parameter_all_ranks_refuse(ranks: int) -> None:
    run_on_ranks(ranks, load_what_is_broken_where_one_rank_owns_it)


# ------------------------------------------------------------------------------- several classes


class Picky(torch.optim.SGD):
    """Refuses, after it has begun to load."""

    def load_state_dict(self, state_dict: Tree) -> None:
        super().load_state_dict(state_dict)
        if any(group["lr"] > 1 for group in self.param_groups):
            raise KeyError("lr")


def test_if_one_class_refuses_all_are_as_before(alone: None) -> None:  # noqa: F811
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "optimizer_class": Picky, "lr": 0.1, "momentum": 0.9},
        {"params": params[2:], "optimizer_class": torch.optim.Adagrad, "lr": 0.1},
    ]
    opt = ZeroRedundancyOptimizer(groups, torch.optim.Adam, lr=0.1)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones(3)
        opt.step()
    opt.consolidate_state_dict()
    bad = copy.deepcopy(opt.state_dict())
    bad["param_groups"][0]["lr"] = 0.3
    bad["param_groups"][1]["lr"] = 2.0
    bad["state"][0]["exp_avg"] += 1
    bad["state"][2]["sum"] += 1
    before = bits([dict(state) for state in opt.state.values()]), bits(opt.param_groups)
    with pytest.raises(KeyError) as refusal:
        opt.load_state_dict(bad)
    judge(refusal.value, class_may_refuse=True)
    assert (bits([dict(state) for state in opt.state.values()]), bits(opt.param_groups)) == before
    bad["param_groups"][1]["lr"] = 0.5
    opt.load_state_dict(bad)
    assert [group["lr"] for group in opt.param_groups] == [0.3, 0.5, 0.1]
