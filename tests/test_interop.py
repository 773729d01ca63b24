"""State dicts travel: between world sizes, to and from the plain class and torch's sharded class.

Gradients are set by hand and are the same function of the step on every rank, so that a run does
not depend on the world size and must continue, bit for bit, where another one stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World, distributed, run_on_ranks

from onecopy import ZeroRedundancyOptimizer

WORLDS = (1, 2, 3, 4)
LEG = 3  # steps before the state dict is carried over, and as many after

CLASSES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.1},
    "NAdam": {"lr": 0.01},
    "ASGD": {"lr": 0.1, "t0": 2.0},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "Adafactor": {"lr": 0.01},
    "Muon": {"lr": 0.02},
}
if not hasattr(torch.optim, "Muon"):
    del CLASSES["Muon"]
MIXED = [name for name in ("Muon", "Adafactor", "SGD") if name in CLASSES]
SHAPES = [(13, 7), (1, 5), (40, 9), (3, 3), (21, 2)]

Params = list[torch.nn.Parameter]


def start() -> Params:
    source = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(shape, generator=source)) for shape in SHAPES]


def groups_of(params: Params) -> list[dict[str, Any]]:
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}]


def train(optimizer: Any, params: Params, first: int, count: int) -> None:
    """Steps `first`, `first + 1`, ..., with gradients and learning rates that depend on them."""
    for step in range(first, first + count):
        source = torch.Generator().manual_seed(100 + step)
        for number, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=source)
            late = number == 3 and step == 0  # one parameter has its first gradient later
            param.grad = None if late else gradient
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()


def unbroken(name: str) -> tuple[Params, dict[str, Any]]:
    """Parameters and state of the plain class after all steps."""
    params = start()
    plain = getattr(torch.optim, name)(groups_of(params), **CLASSES[name])
    train(plain, params, 0, 2 * LEG)
    return params, plain.state_dict()


def ours(params: Params, name: str) -> ZeroRedundancyOptimizer:
    cls = getattr(torch.optim, name)
    return ZeroRedundancyOptimizer(groups_of(params), cls, bucket_mb=0.0005, **CLASSES[name])


def mixture(params: Params, name: str) -> ZeroRedundancyOptimizer:
    """Two classes in one object: `name` for some tensors, AdamW for the others."""
    own = {"optimizer_class": getattr(torch.optim, name), **CLASSES[name]}
    return ZeroRedundancyOptimizer(
        [{"params": params[::2], **own}, {"params": params[1::2], "weight_decay": 0.1}],
        torch.optim.AdamW,
        bucket_mb=0.0005,
        lr=0.01,
    )


def torchs(params: Params, name: str) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it compiles what torch itself calls deprecated
        from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

    return Torchs(groups_of(params), getattr(torch.optim, name), **CLASSES[name])


def plain(params: Params, name: str) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(groups_of(params), **CLASSES[name])


Build = Callable[[Params, str], torch.optim.Optimizer]
BUILDERS: dict[str, Build] = {"ours": ours, "plain": plain, "torchs": torchs, "mixture": mixture}


def run_leg(
    world: World, kind: str, names: list[str], source: Path | None, target: Path, first: int
) -> None:
    """Build, load what the leg before has saved, train on, save. In one file per class."""
    for name in names:
        params = start()
        optimizer = BUILDERS[kind](params, name)
        if source is not None:
            saved = torch.load(source / name, weights_only=True)
            for param, values in zip(params, saved["params"], strict=True):
                param.data.copy_(values)
            optimizer.load_state_dict(saved["optimizer"])
        train(optimizer, params, first, LEG)
        writer = (first + len(name)) % world.size  # not always rank 0
        if hasattr(optimizer, "consolidate_state_dict"):
            optimizer.consolidate_state_dict(to=writer)
        if world.rank == writer:
            target.mkdir(exist_ok=True)
            values = [param.detach() for param in params]
            torch.save({"params": values, "optimizer": optimizer.state_dict()}, target / name)


def assert_as_unbroken(path: Path, names: list[str]) -> None:
    """What the last leg has saved is what a plain run would have after as many steps."""
    for name in names:
        saved = torch.load(path / name, weights_only=True)
        params, expected = unbroken(name)
        for number, (values, param) in enumerate(zip(saved["params"], params, strict=True)):
            assert torch.equal(values, param), f"{name}: parameter {number}"
        assert_equal_state(saved["optimizer"], expected, name)


def assert_equal_state(state_dict: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    assert state_dict["param_groups"] == expected["param_groups"], name
    assert set(state_dict["state"]) == set(expected["state"]), name
    for number, state in expected["state"].items():
        assert list(state_dict["state"][number]) == list(state), f"{name}: {number}"
        for key, value in state.items():
            other = state_dict["state"][number][key]
            assert type(other) is type(value), f"{name}: {number} {key}"
            equal = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert equal(other, value), f"{name}: {number} {key}"


@pytest.fixture(scope="module")
def first_legs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The first steps of every class at every world size."""
    root = tmp_path_factory.mktemp("legs")
    for size in WORLDS:
        run_on_ranks(size, run_leg, "ours", list(CLASSES), None, root / str(size), 0)
    return {size: root / str(size) for size in WORLDS}


@pytest.mark.parametrize("after", WORLDS)
@pytest.mark.parametrize("before", WORLDS)
def test_a_run_continues_at_any_other_world_size(
    before: int, after: int, first_legs: dict[int, Path], tmp_path: Path
) -> None:
    names = list(CLASSES)
    run_on_ranks(after, run_leg, "ours", names, first_legs[before], tmp_path / "end", LEG)
    assert_as_unbroken(tmp_path / "end", names)


@pytest.mark.parametrize("size", WORLDS)
def test_the_plain_class_continues_what_we_began(
    size: int, first_legs: dict[int, Path], tmp_path: Path
) -> None:
    run_on_ranks(1, run_leg, "plain", list(CLASSES), first_legs[size], tmp_path / "end", LEG)
    assert_as_unbroken(tmp_path / "end", list(CLASSES))


@pytest.mark.parametrize("size", WORLDS)
def test_we_continue_what_the_plain_class_began(size: int, tmp_path: Path) -> None:
    names = list(CLASSES)
    run_on_ranks(1, run_leg, "plain", names, None, tmp_path / "middle", 0)
    run_on_ranks(size, run_leg, "ours", names, tmp_path / "middle", tmp_path / "end", LEG)
    assert_as_unbroken(tmp_path / "end", names)


@pytest.mark.parametrize("size", WORLDS)
def test_torchs_own_sharded_class_continues_what_we_began(
    size: int, first_legs: dict[int, Path], tmp_path: Path
) -> None:
    names = list(CLASSES)
    run_on_ranks(size, run_leg, "torchs", names, first_legs[5 - size], tmp_path / "end", LEG)
    assert_as_unbroken(tmp_path / "end", names)


@pytest.mark.parametrize("size", WORLDS)
def test_we_continue_what_torchs_own_sharded_class_began(size: int, tmp_path: Path) -> None:
    names = list(CLASSES)
    run_on_ranks(5 - size, run_leg, "torchs", names, None, tmp_path / "middle", 0)
    run_on_ranks(size, run_leg, "ours", names, tmp_path / "middle", tmp_path / "end", LEG)
    assert_as_unbroken(tmp_path / "end", names)


@pytest.mark.parametrize("after", WORLDS)
@pytest.mark.parametrize("before", WORLDS)
def test_two_classes_in_one_object_continue_at_any_other_world_size(
    before: int, after: int, tmp_path: Path
) -> None:
    """Against two plain optimizers: there is no plain class whose dict would be the same."""
    run_on_ranks(before, run_leg, "mixture", MIXED, None, tmp_path / "middle", 0)
    run_on_ranks(after, run_leg, "mixture", MIXED, tmp_path / "middle", tmp_path / "end", LEG)
    for name in MIXED:
        params = start()
        two = TwoPlain(params, name)
        train(two, params, 0, 2 * LEG)
        saved = torch.load(tmp_path / "end" / name, weights_only=True)
        for values, param in zip(saved["params"], params, strict=True):
            assert torch.equal(values, param), name
        assert_equal_state(saved["optimizer"], two.state_dict(), name)


class TwoPlain:
    """The same mixture as two plain optimizers, seen as one."""

    def __init__(self, params: Params, name: str) -> None:
        self.optimizers = [
            getattr(torch.optim, name)(params[::2], **CLASSES[name]),
            torch.optim.AdamW(params[1::2], lr=0.01, weight_decay=0.1),
        ]
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        """Numbered through, in the order of the groups."""
        first, second = (each.state_dict() for each in self.optimizers)
        (group,), (other,) = first["param_groups"], second["param_groups"]
        shift = len(group["params"])
        return {
            "state": first["state"] | {shift + i: state for i, state in second["state"].items()},
            "param_groups": [group, {**other, "params": [shift + i for i in other["params"]]}],
        }


@distributed(*WORLDS)
def test_two_classes_in_one_object_train_as_two_plain_optimizers_do(world: World) -> None:
    for name in MIXED:
        params, plain_params = start(), start()
        optimizer, two = mixture(params, name), TwoPlain(plain_params, name)
        train(optimizer, params, 0, 2 * LEG)
        train(two, plain_params, 0, 2 * LEG)
        for ours, theirs in zip(params, plain_params, strict=True):
            assert torch.equal(ours, theirs), name
        optimizer.consolidate_state_dict(to=world.size - 1)
        if world.rank == world.size - 1:
            assert_equal_state(optimizer.state_dict(), two.state_dict(), name)


def run_chain_leg(world: World, source: Path | None, target: Path, bucket_view: bool) -> None:
    """Two steps on from where the file says, and into another file."""
    params = start()
    opt = ZeroRedundancyOptimizer(
        groups_of(params),
        torch.optim.AdamW,
        parameters_as_bucket_view=bucket_view,
        bucket_mb=0.0005,
        lr=0.01,
    )
    first = 0
    if source is not None:
        saved = torch.load(source, weights_only=True)
        first = saved["steps"]
        for param, values in zip(params, saved["params"], strict=True):
            param.data.copy_(values)
        opt.load_state_dict(saved["optimizer"])
    train(opt, params, first, 2)
    opt.consolidate_state_dict()
    if world.rank == 0:
        values = [param.detach().clone() for param in params]
        torch.save(
            {"params": values, "optimizer": opt.state_dict(), "steps": first + 2},
            target,
        )


def test_a_chain_of_world_sizes_ends_where_the_unbroken_run_ends(tmp_path: Path) -> None:
    source = None
    for number, (size, bucket_view) in enumerate([(2, False), (4, True), (1, False), (3, True)]):
        target = tmp_path / str(number)
        run_on_ranks(size, run_chain_leg, source, target, bucket_view)
        source = target
    end = torch.load(source, weights_only=True)
    params = start()
    reference = torch.optim.AdamW(groups_of(params), lr=0.01)
    train(reference, params, 0, 8)
    for values, param in zip(end["params"], params, strict=True):
        assert torch.equal(values, param)
    assert_equal_state(end["optimizer"], reference.state_dict(), "AdamW")
