"""Jobs that save and jobs that load: what the tests of checkpoints share.

A `Case` is a model with an optimizer class. It makes `Run`s: the plain class, or ours on the first
so many ranks of the world. All runs of a test get the same gradients, the average of data that
differ on every rank, so that whoever resumes a checkpoint must go on like the plain run that was
never interrupted:

    crews = Crews(world)
    plain, saver = case.plain(), case.ours(crews[3])
    train([plain, saver], range(2))
    save(saver, path, "own")
    loader = resumed(case.ours(crews[2]), plain, path, "dcp")
    train([plain, loader], range(2, 4))
    assert_like(loader, plain)
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World
from models import ConvNet, TiedNet
from states import assert_same, assorted, matrices, parameter, set_gradients, tensors_in
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from onecopy import ZeroRedundancyOptimizer

SMALL_BUCKETS = 0.0005  # MiB: 131 float32
ALL_SIZES = (1, 2, 3, 4)
WAYS = ("dcp", "own")  # dcp.save and dcp.load with opt.sharded(), or opt.save and opt.load

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


# ---------------------------------------- who takes part ----------------------------------------


@dataclass(frozen=True)
class Crew:
    """The first ranks of the world, as a process group; the others look on."""

    size: int
    group: Any
    is_member: bool


class Crews(dict[int, Crew]):
    """A crew of each size up to the world's. To be made on all ranks."""

    def __init__(self, world: World) -> None:
        for size in range(1, world.size + 1):
            group = dist.new_group(list(range(size)))
            self[size] = Crew(size, group, world.rank < size)


# ---------------------------------------- models ----------------------------------------


class Shelf(nn.Module):
    """A list of parameters, with names: `shelf.3.weight`."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.shelf = nn.ModuleList()
        for param in params:
            self.shelf.append(nn.Module())
            self.shelf[-1].register_parameter("weight", param)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.05, "weight_decay": 0.1}]


def tied() -> nn.Module:
    torch.manual_seed(1)
    return TiedNet()


def convolutions() -> nn.Module:
    torch.manual_seed(2)
    return ConvNet()


def matrices_and_vectors() -> nn.Module:
    return Shelf([*matrices(), *(parameter((n,), 20 + n) for n in (5, 40, 1))])


# ---------------------------------------- runs ----------------------------------------


@dataclass
class Run:
    """A model and what trains it. One who only looks on has no optimizer."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    crew: Crew | None = None  # None if plain

    @property
    def params(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    @property
    def opt(self) -> ZeroRedundancyOptimizer:
        (opt,) = self.optimizers
        return opt

    @property
    def is_mine(self) -> bool:
        """Whether this rank takes part."""
        return bool(self.optimizers)


def train(runs: Sequence[Run], steps: Iterable[int], unused: Sequence[int] = ()) -> None:
    """The same gradients for all. `unused` parameters, by position, get none."""
    for step in steps:
        set_gradients([run.params for run in runs], step, unused)
        for run in runs:
            for optimizer in run.optimizers:
                optimizer.step()


def slow_down(runs: Sequence[Run]) -> None:
    """Other options than those of the constructor, as a scheduler leaves them."""
    for run in runs:
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5


def freeze(runs: Sequence[Run], numbers: Sequence[int], frozen: bool = True) -> None:
    for run in runs:
        for number in numbers:
            run.params[number].requires_grad_(not frozen)


def copy_parameters(to: Run, source: Run) -> None:
    with torch.no_grad():
        for mine, theirs in zip(to.params, source.params, strict=True):
            mine.copy_(theirs)


# ---------------------------------------- saving and loading ----------------------------------


def save(run: Run, path: Path, way: str, **options: Any) -> None:
    """By those who take part; nobody goes on before it is done."""
    if run.is_mine and way == "own":
        run.opt.save(path, run.model, **options)
    elif run.is_mine:
        what = {"optim": run.opt.sharded(run.model, **options)}
        dcp.save(what, checkpoint_id=path, process_group=run.crew.group)
    dist.barrier()


def load(run: Run, path: Path, way: str, **options: Any) -> None:
    if run.is_mine and way == "own":
        run.opt.load(path, run.model)
    elif run.is_mine:
        what = {"optim": run.opt.sharded(run.model, **options)}
        dcp.load(what, checkpoint_id=path, process_group=run.crew.group)


def resumed(run: Run, plain: Run, path: Path, way: str, **options: Any) -> Run:
    """`run` with the state of a checkpoint, and the parameters of the plain run."""
    load(run, path, way, **options)
    copy_parameters(run, plain)
    return run


# ---------------------------------------- the plain class ----------------------------------------


@contextlib.contextmanager
def _alone() -> Iterator[bool]:
    """DCP in one process of several: whether this release has an argument for it. That warns of
    what it was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield "no_dist" in inspect.signature(dcp.load).parameters


def torch_form(run: Run, flat: bool) -> dict[str, Any]:
    """What torch's helpers make of a plain optimizer."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_optimizer_state_dict(run.model, run.optimizers[0], options=options)


def read_plain(run: Run, path: Path, flat: bool) -> None:
    """As one process without a process group does it."""
    form = {"optim": torch_form(run, flat)}
    with _alone() as can_say_so:
        if can_say_so:
            dcp.load(form, checkpoint_id=path, no_dist=True)
        else:
            _load_state_dict(form, dcp.FileSystemReader(path), no_dist=True)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(run.model, run.optimizers[0], form["optim"], options=options)


def write_plain(world: World, run: Run, path: Path, flat: bool) -> None:
    """By one process; the others wait until it is done."""
    if world.rank == 0:
        form = {"optim": torch_form(run, flat)}
        with _alone() as can_say_so:
            if can_say_so:
                dcp.save(form, checkpoint_id=path, no_dist=True)
            else:
                _save_state_dict(form, dcp.FileSystemWriter(path), no_dist=True)
    dist.barrier()


# ---------------------------------------- comparing ----------------------------------------


def assert_like(run: Run, plain: Run) -> None:
    """Parameters on every rank, and the consolidated state on one, bit for bit."""
    if not run.is_mine:
        return
    for name, mine, theirs in zip(names(plain), run.params, plain.params, strict=True):
        assert mine.stride() == theirs.stride(), name
        assert torch.equal(mine, theirs), name
    assert_same_state(run, plain)


def assert_same_state(run: Run, plain: Run) -> None:
    if run.is_mine:
        to = run.opt.world_size - 1
        run.opt.consolidate_state_dict(to)
        if run.opt.rank == to:
            assert_same(by_name(run), by_name(plain), ordered=False)


def by_name(run: Run) -> dict[str, Any]:
    """State and options of all optimizers of a run; groups go by their first parameter."""
    state: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    called = dict(zip(run.params, names(run), strict=True))
    for optimizer in run.optimizers:
        full = optimizer.state_dict()
        of_number = {}
        for group, saved in zip(optimizer.param_groups, full["param_groups"], strict=True):
            of_number.update(zip(saved["params"], group["params"], strict=True))
        state.update({called[of_number[n]]: s for n, s in full["state"].items()})
        for saved in full["param_groups"]:
            listed = [called[of_number[n]] for n in saved["params"]]
            groups[listed[0]] = {**saved, "params": listed}
    return {"state": state, "groups": groups}


def names(run: Run) -> list[str]:
    return [name for name, _ in run.model.named_parameters()]


def assert_one_copy(run: Run) -> None:
    """Every state tensor has memory of its own, and none that it does not use."""
    tensors = tensors_in([dict(state) for state in run.opt.state.values()]) if run.is_mine else []
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    with_elements = [t for t in tensors if t.numel()]
    storages.pop(0, None)
    assert len(storages) == len(with_elements)
    assert sum(storages.values()) == sum(t.nbytes for t in tensors)


# ---------------------------------------- cases ----------------------------------------


@dataclass(frozen=True)
class Case:
    """A model with an optimizer class, to be trained plain or sharded."""

    model: Callable[[], nn.Module]
    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]
    groups: Callable[[nn.Module], Any] = two_groups
    zero: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> Run:
        model = self.model()
        return Run(model, [self.optimizer_class(self.groups(model), **self._options())])

    def ours(self, crew: Crew) -> Run:
        model = self.model()
        if not crew.is_member:
            return Run(model, [], crew)
        zero = {"bucket_mb": SMALL_BUCKETS, **self.zero}
        optimizer = ZeroRedundancyOptimizer(
            self.groups(model), self.optimizer_class, crew.group, **zero, **self._options()
        )
        return Run(model, [optimizer], crew)

    def _options(self) -> dict[str, Any]:
        return copy.deepcopy(self.options)


def used_before(case: Case, crews: Crews, size: int) -> Run:
    """An optimizer with state of its own, which a load has to replace."""
    run = case.ours(crews[size])
    train([run], [100])
    return run


class Mixture(Case):
    """Muon for matrices, AdamW for vectors: one optimizer of ours, two plain ones."""

    def plain(self) -> Run:
        model = self.model()
        first, weights, last = self.groups(model)
        weights = {k: v for k, v in weights.items() if k != "optimizer_class"}
        return Run(
            model,
            [torch.optim.AdamW([first, last], **self._options()), torch.optim.Muon([weights])],
        )


def muon_for_matrices(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    weights = [p for p in params if p.dim() == 2]
    vectors = [p for p in params if p.dim() != 2]
    muon = {"optimizer_class": torch.optim.Muon, "lr": 0.02}
    return [
        {"params": vectors[:2]},
        {"params": weights, **muon},
        {"params": vectors[2:], "lr": 0.5},
    ]


class Opaque(torch.optim.Optimizer):
    """Somebody's class that needs whole tensors, with state of every form."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "shape": (1, "a", None)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The base class makes floating point numbers of everything."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["seen"], state["flags"] = state["seen"].long(), state["flags"].bool()

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[param], param.grad + group["weight_decay"] * param
        rows = grad.flatten(1) if grad.dim() > 1 else grad.reshape(-1, 1)
        if not state:
            state["count"], state["size"], state["nothing"] = 0, 0.5, None
            state["norms"] = (rows.new_zeros(rows.shape[0]), rows.new_zeros(2, 1, 3))
            state["nested"] = {7: {0: torch.zeros_like(rows.t()), "n": 1}, 11: [rows.new_zeros(())]}
            state["seen"] = torch.zeros(3, rows.shape[1], dtype=torch.int64, device=grad.device)
            state["flags"] = torch.zeros(rows.shape[0], dtype=torch.bool, device=grad.device)
        state["count"] += 1
        state["size"] = state["size"] * 0.5 + state["count"]
        by_row, odd = state["norms"]
        by_row.mul_(0.5).add_(rows.norm(dim=1))
        odd.add_(by_row.mean())
        inner = state["nested"][7]
        inner[0].lerp_(rows.t(), 0.25)
        inner["n"] += 2
        state["nested"][11][0].add_(rows.square().mean())
        state["seen"].add_(inner["n"])
        state["flags"].logical_not_()
        direction = inner[0].t() / (by_row[:, None] + state["nested"][11][0] + 1)
        direction = torch.where(state["flags"][:, None], direction, direction * state["size"])
        direction = direction + odd.sum() * 0.001 + state["seen"].sum() * 1e-6
        param.sub_(direction.reshape(param.shape) * group["lr"])


def shelf_of(make: Callable[[], list[torch.Tensor]]) -> Callable[[], nn.Module]:
    return lambda: Shelf(make())


def large() -> list[torch.Tensor]:
    """Several buckets each, of SMALL_BUCKETS."""
    return [parameter((37, 29), 1), parameter((3, 5, 7, 11), 2), parameter((2, 1), 3)]


def _cases() -> dict[str, Case]:
    optim, mixed, plain = torch.optim, shelf_of(assorted), shelf_of(matrices)
    single = shelf_of(lambda: [p for p in assorted() if p.dtype == torch.float32])
    momentum = {"lr": 0.1, "momentum": 0.9}
    cases = {
        "AdamW": Case(mixed, optim.AdamW, {"lr": 0.01}),
        "amsgrad": Case(mixed, optim.AdamW, {"lr": 0.01, "amsgrad": True, "foreach": True}),
        "SGD": Case(mixed, optim.SGD, {"lr": 0.1}),
        "momentum": Case(mixed, optim.SGD, {**momentum, "nesterov": True}),
        "dampening": Case(mixed, optim.SGD, {**momentum, "dampening": 0.3}),
        "Adagrad": Case(mixed, optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
        "NAdam": Case(single, optim.NAdam, {"lr": 0.01}),
        "Rprop": Case(mixed, optim.Rprop, {"lr": 0.01}, Shelf.parameters),
        "ASGD": Case(single, optim.ASGD, {"lr": 0.1, "t0": 1.0}),
        "RMSprop": Case(mixed, optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
        "Adafactor": Case(plain, optim.Adafactor, {"lr": 0.01}),
        "tied": Case(tied, optim.AdamW, {"lr": 0.01}),
        "channels_last": Case(convolutions, optim.AdamW, {"lr": 0.01}),
        "large": Case(
            shelf_of(large), optim.AdamW, {"lr": 0.01}, zero={"bucket_mb": 0.0001}
        ),
        "bucket view": Case(
            mixed, optim.AdamW, {"lr": 0.01}, zero={"parameters_as_bucket_view": True}
        ),
        "whole": Case(mixed, optim.AdamW, {"lr": 0.01}, zero={"partition": "whole"}),
        "tensor lr": Case(plain, optim.AdamW, {"lr": torch.tensor(0.01)}, Shelf.parameters),
        "opaque": Case(plain, Opaque, {"lr": 0.1}, zero={"partition": "whole"}),
    }  # fmt: skip
    if hasattr(optim, "Muon"):
        cases["Muon"] = Case(plain, optim.Muon, {"lr": 0.02})
        cases["Muon + AdamW"] = Mixture(
            matrices_and_vectors, optim.AdamW, {"lr": 0.01}, muon_for_matrices
        )
    return cases


CASES = _cases()
EVERY_CASE = pytest.mark.parametrize("name", CASES)
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
