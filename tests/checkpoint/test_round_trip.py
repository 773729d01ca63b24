"""Sharded checkpoints of ours, read by ours: any number of ranks to any other, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import (
    ALL_SIZES,
    CASES,
    EVERY_CASE,
    EVERY_WAY,
    SMALL_BUCKETS,
    WAYS,
    Case,
    Crews,
    Run,
    Shelf,
    assert_like,
    assert_one_copy,
    copy_parameters,
    freeze,
    large,
    load,
    save,
    shelf_of,
    slow_down,
    tied,
    train,
    used_before,
    write_plain,
)
from harness import World, distributed
from models import Mlp
from states import matrices, parameter, set_gradients
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer

# ---------------------------------------- any ranks to any ranks ----------------------------------


def resume(
    case: Case, crews: Crews, path: Path, saved: int, loads: Sequence[tuple[int, str, str]]
) -> None:
    """Save on `saved` ranks; load on (size, saved in which way, loaded in which way), go on."""
    plain, saver = case.plain(), case.ours(crews[saved])
    train([plain, saver], range(2))
    slow_down([plain, saver])
    for way in {source: None for _, source, _ in loads}:
        save(saver, path / way, way)
    for size, source, way in loads:
        print(f"saved on {saved} ranks by {source}, loaded on {size} by {way}")
        loader, reference = used_before(case, crews, size), copy.deepcopy(plain)
        load(loader, path / source, way)
        copy_parameters(loader, reference)
        assert_like(loader, reference)
        assert_one_copy(loader)
        train([reference, loader], range(2, 4))
        assert_like(loader, reference)
    train([plain, saver], range(2, 4))
    assert_like(saver, plain)


@distributed(4)
@EVERY_CASE
def test_a_checkpoint_is_read_by_another_number_of_ranks(
    world: World, name: str, tmp_path: Path
) -> None:
    """Two of sixteen pairs and of four ways for each case; all of them in the next test."""
    number = list(CASES).index(name)
    saved, first, second = (n % 4 + 1 for n in (1 + number // 4, number, 2 + number))
    way, other = WAYS[number % 2], WAYS[1 - number % 2]
    loads = [(first, way, way), (second, way, other)]
    resume(CASES[name], Crews(world), tmp_path, saved, loads)


@pytest.mark.slow
@pytest.mark.parametrize("saved", ALL_SIZES)
@distributed(4, timeout=180)
@EVERY_CASE
def test_a_checkpoint_of_any_number_of_ranks_is_read_by_any_other(
    world: World, name: str, saved: int, tmp_path: Path
) -> None:
    loads = list(itertools.product(ALL_SIZES, WAYS, WAYS))
    resume(CASES[name], Crews(world), tmp_path, saved, loads)


# ---------------------------------------- state that does not exist ----------------------------


def read_back(case: Case, crews: Crews, path: Path, saver: Run, plain: Run) -> Iterator[Run]:
    """Loaders on another number of ranks, in all ways, some with state of their own before."""
    for source in WAYS:
        save(saver, path / source, source)
    for source, way in itertools.product(WAYS, WAYS):
        print(f"saved by {source}, loaded by {way}")
        is_used = source == way
        loader = used_before(case, crews, 3) if is_used else case.ours(crews[3])
        load(loader, path / source, way)
        copy_parameters(loader, plain)
        yield loader


TELLING = {"AdamW", "dampening", "NAdam", "Muon", "opaque"}
TELLING_CASES = pytest.mark.parametrize(
    "name", [n if n in TELLING else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)


@distributed(3)
@TELLING_CASES
def test_what_is_saved_before_the_first_step_gives_the_same_first_step(
    world: World, name: str, tmp_path: Path
) -> None:
    case, crews = CASES[name], Crews(world)
    start = case.plain()
    for loader in read_back(case, crews, tmp_path, case.ours(crews[2]), start):
        plain = copy.deepcopy(start)
        assert_like(loader, plain)
        train([plain, loader], range(2))
        assert_like(loader, plain)


@distributed(3)
@TELLING_CASES
def test_a_parameter_without_gradients_until_now_begins_after_the_load(
    world: World, name: str, tmp_path: Path
) -> None:
    case, crews = CASES[name], Crews(world)
    start, saver = case.plain(), case.ours(crews[2])
    train([start, saver], range(2), unused=[0, 2])
    for loader in read_back(case, crews, tmp_path, saver, start):
        plain = copy.deepcopy(start)
        assert_like(loader, plain)
        train([plain, loader], [2], unused=[0])
        train([plain, loader], [3])
        assert_like(loader, plain)


@distributed(2)
@pytest.mark.parametrize(
    ("way", "zeros"),
    [
        ("own", "all of a parameter"),
        ("own", "the end of a parameter"),
        ("dcp", "the end of a parameter"),
        pytest.param(
            "dcp",
            "all of a parameter",
            marks=pytest.mark.xfail(
                strict=True, reason="DCP has no place to say that state does not exist"
            ),
        ),
    ],
)
def test_negative_zeros_in_a_momentum_are_state_like_any_other(
    world: World, way: str, zeros: str, tmp_path: Path
) -> None:
    """`maximize` makes them of all gradients that are zero."""
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}
    case = Case(shelf_of(matrices), torch.optim.SGD, options, Shelf.parameters)
    crews = Crews(world)
    plain, saver = case.plain(), case.ours(crews[world.size])
    set_gradients([plain.params, saver.params], 1)
    for run in (plain, saver):
        run.params[2].grad[0 if zeros == "all of a parameter" else 15 :].zero_()
        run.optimizers[0].step()
    save(saver, tmp_path / "there", way)
    loader = case.ours(crews[2])
    load(loader, tmp_path / "there", way)
    copy_parameters(loader, plain)
    assert_like(loader, plain)
    train([plain, loader], range(2, 4))
    assert_like(loader, plain)


# ---------------------------------------- frozen and unfrozen ----------------------------------


FROZEN_CASES = pytest.mark.parametrize(
    "name", [n for n in ("AdamW", "dampening", "Adagrad", "Muon", "opaque", "whole") if n in CASES]
)


def frozen_from_the_start(case: Case, numbers: Sequence[int]) -> Case:
    def model() -> nn.Module:
        made = case.model()
        for number in numbers:
            list(made.parameters())[number].requires_grad_(False)
        return made

    return dataclasses.replace(case, model=model)


@distributed(3)
@FROZEN_CASES
def test_what_was_frozen_when_it_was_saved_can_be_trained_after_the_load(
    world: World, name: str, tmp_path: Path
) -> None:
    frozen, crews = frozen_from_the_start(CASES[name], [1, 2]), Crews(world)
    plain, saver = frozen.plain(), frozen.ours(crews[2])
    train([plain, saver], range(2))
    for source in WAYS:
        save(saver, tmp_path / source, source)
        resumed_plain = copy.deepcopy(plain)
        loader = CASES[name].ours(crews[3])
        load(loader, tmp_path / source, "own")
        copy_parameters(loader, plain)
        freeze([resumed_plain], [1, 2], frozen=False)
        assert_like(loader, resumed_plain)
        train([resumed_plain, loader], range(2, 4))
        assert_like(loader, resumed_plain)


@distributed(3)
@EVERY_WAY
@FROZEN_CASES
def test_frozen_on_both_sides_and_trained_later(
    world: World, name: str, way: str, tmp_path: Path
) -> None:
    frozen, crews = frozen_from_the_start(CASES[name], [1, 2]), Crews(world)
    plain, saver = frozen.plain(), frozen.ours(crews[2])
    train([plain, saver], range(2))
    save(saver, tmp_path / "there", way)
    loader = used_before(frozen, crews, 3)
    load(loader, tmp_path / "there", way)
    copy_parameters(loader, plain)
    train([plain, loader], [2])
    assert_like(loader, plain)
    freeze([plain, loader], [1], frozen=False)
    train([plain, loader], range(3, 5))
    assert_like(loader, plain)


@distributed(3)
@EVERY_WAY
@FROZEN_CASES
def test_state_of_what_is_frozen_now_is_kept_for_later(
    world: World, name: str, way: str, tmp_path: Path
) -> None:
    """Trained, frozen, saved; loaded where it was never trainable; unfrozen there."""
    case, crews = CASES[name], Crews(world)
    plain, saver = case.plain(), case.ours(crews[2])
    train([plain, saver], range(2))
    freeze([plain, saver], [0, 2])
    train([plain, saver], [2])
    save(saver, tmp_path / "there", way)
    loader = frozen_from_the_start(case, [0, 2]).ours(crews[3])
    load(loader, tmp_path / "there", "own")
    copy_parameters(loader, plain)
    assert_like(loader, plain)
    train([plain, loader], [3])
    assert_like(loader, plain)
    freeze([plain, loader], [0, 2], frozen=False)
    train([plain, loader], range(4, 6))
    assert_like(loader, plain)


# ---------------------------------------- names ----------------------------------------


def sharded_names(opt: ZeroRedundancyOptimizer, module: nn.Module | None = None) -> set[str]:
    """Names of the state and of the groups, which must be the same, over all ranks."""
    shown = opt.sharded(module).state_dict()
    states: list[Any] = [None] * opt.world_size
    dist.all_gather_object(states, set(shown["state"]))
    listed = {name for group in shown["param_groups"] for name in group["params"]}
    assert set().union(*states) == listed
    return listed


def stepped(params: Any, model: nn.Module) -> ZeroRedundancyOptimizer:
    opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW, bucket_mb=SMALL_BUCKETS, lr=0.01)
    set_gradients([list(model.parameters())], 1)
    opt.step()
    return opt


@distributed(1, 2, 3)
def test_wrappers_leave_no_trace_in_the_names(world: World) -> None:
    model = Mlp()
    expected = {name for name, _ in model.named_parameters()}
    opt = stepped(model.parameters(), model)
    compiled = torch.compile(model, backend="eager")
    assert sharded_names(opt, model) == expected
    assert sharded_names(opt, DistributedDataParallel(model)) == expected
    assert sharded_names(opt, compiled) == expected
    assert sharded_names(opt, DistributedDataParallel(compiled)) == expected
    model.first = checkpoint_wrapper(model.first)
    assert "_checkpoint_wrapped_module" in dict(model.first.named_children())
    assert sharded_names(opt, model) == expected
    assert (
        sharded_names(opt, torch.compile(DistributedDataParallel(model), backend="eager"))
        == expected
    )
    model.zero_grad()
    theirs = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    assert set(theirs["state"]) == expected


@distributed(1, 2, 3)
def test_names_given_at_construction_are_those_of_the_module(world: World) -> None:
    model = Mlp()
    expected = {name for name, _ in model.named_parameters()}
    wrapped = DistributedDataParallel(torch.compile(model, backend="eager"))
    assert "module._orig_mod.first.weight" in dict(wrapped.named_parameters())
    for named in (
        model,
        DistributedDataParallel(model),
        torch.compile(model, backend="eager"),
        wrapped,
    ):
        opt = stepped(named.named_parameters(), model)
        assert sharded_names(opt) == expected
        assert sharded_names(opt, model) == expected
    groups = [{"params": list(m.named_parameters(n))} for n, m in model.named_children()]
    opt = stepped(groups, model)
    assert sharded_names(opt) == expected


@distributed(1, 2, 3)
def test_a_module_whose_own_child_is_called_module_keeps_its_name(world: World) -> None:
    model = nn.Sequential()
    model.module = Mlp()
    opt = stepped(model.parameters(), model)
    assert sharded_names(opt, model) == {name for name, _ in model.named_parameters()}


@distributed(1, 2, 3)
def test_a_tied_weight_is_saved_once_under_its_first_name(world: World) -> None:
    model = tied()
    opt = stepped(model.parameters(), model)
    expected = {name for name, _ in model.named_parameters()}
    assert "embedding.weight" in expected
    assert sharded_names(opt, model) == expected


@distributed(1, 2, 3)
def test_a_module_without_our_parameters_is_refused_on_all_ranks(
    world: World, tmp_path: Path
) -> None:
    model = Mlp()
    opt = stepped(model.parameters(), model)
    for act in (opt.save, opt.load):
        with pytest.raises(ValueError, match="not in the module"):
            act(tmp_path / "there", Mlp())
    with pytest.raises(ValueError, match="not in the module"):
        opt.sharded(Mlp()).state_dict()
    assert not (tmp_path / "there").exists()


@pytest.mark.smoke
@distributed(2, 3)
def test_without_names_parameters_are_known_by_position(world: World, tmp_path: Path) -> None:
    case, crews = CASES["AdamW"], Crews(world)
    plain, saver = case.plain(), case.ours(crews[world.size])
    train([plain, saver], range(2))
    numbers = range(len(saver.params))
    assert sharded_names(saver.opt) == {f"by_index.{number}" for number in numbers}
    saver.opt.save(tmp_path / "own")
    dcp.save({"optim": saver.opt.sharded()}, checkpoint_id=tmp_path / "dcp")
    for source, way in itertools.product(WAYS, WAYS):
        loader = used_before(case, crews, 2)
        if loader.is_mine and way == "own":
            loader.opt.load(tmp_path / source)
        elif loader.is_mine:
            what = {"optim": loader.opt.sharded()}
            dcp.load(what, checkpoint_id=tmp_path / source, process_group=loader.crew.group)
        copy_parameters(loader, plain)
        reference = copy.deepcopy(plain)
        assert_like(loader, reference)
        train([reference, loader], range(2, 4))
        assert_like(loader, reference)


@distributed(2, 3)
def test_positions_are_read_by_a_job_that_has_names(world: World, tmp_path: Path) -> None:
    case, crews = CASES["AdamW"], Crews(world)
    plain, saver = case.plain(), case.ours(crews[world.size])
    train([plain, saver], range(2))
    saver.opt.save(tmp_path / "there")
    loader = used_before(case, crews, 2)
    load(loader, tmp_path / "there", "own")
    copy_parameters(loader, plain)
    train([plain, loader], range(2, 4))
    assert_like(loader, plain)


@distributed(1, 2, 3)
@EVERY_WAY
def test_names_in_the_file_and_none_here_is_an_error_that_says_what_to_do(
    world: World, way: str, tmp_path: Path
) -> None:
    case, crews = CASES["AdamW"], Crews(world)
    plain, saver = case.plain(), case.ours(crews[world.size])
    train([plain, saver], range(2))
    save(saver, tmp_path / "there", way)
    train([plain, saver], [2])
    with pytest.raises(ValueError, match=r"load\(path, module\)"):
        saver.opt.load(tmp_path / "there")
    assert_like(saver, plain)
    train([plain, saver], [3])
    assert_like(saver, plain)


# ---------------------------------------- fused ----------------------------------------


@distributed(4)
@EVERY_WAY
def test_a_file_of_a_fused_optimizer_makes_another_plan(
    world: World, way: str, tmp_path: Path
) -> None:
    fused = Case(shelf_of(large), torch.optim.AdamW, {"lr": 0.01, "fused": True})
    usual = dataclasses.replace(fused, options={"lr": 0.01})
    crews = Crews(world)
    start, saver = fused.plain(), fused.ours(crews[3])
    train([start, saver], range(2))
    save(saver, tmp_path / "there", way)
    for size in ALL_SIZES:
        plain, loader = copy.deepcopy(start), used_before(usual, crews, size)
        load(loader, tmp_path / "there", "own")
        copy_parameters(loader, plain)
        assert_like(loader, plain)
        assert_one_copy(loader)
        if loader.is_mine:
            assert loader.opt.param_groups[0]["fused"] is True
        train([plain, loader], range(2, 5))
        assert_like(loader, plain)


@distributed(2, 3)
@EVERY_WAY
def test_dcp_cannot_make_another_plan_and_says_what_to_do(
    world: World, way: str, tmp_path: Path
) -> None:
    fused = Case(shelf_of(large), torch.optim.AdamW, {"lr": 0.01, "fused": True})
    usual = dataclasses.replace(fused, options={"lr": 0.01})
    crews = Crews(world)
    saver = used_before(fused, crews, world.size)
    save(saver, tmp_path / "there", way)
    plain, loader = usual.plain(), usual.ours(crews[world.size])
    train([plain, loader], range(2))
    with pytest.raises(Exception, match=r"fused is on.*[Gg]ive the constructor"):
        load(loader, tmp_path / "there", "dcp")
    assert_like(loader, plain)
    train([plain, loader], range(2, 4))
    assert_like(loader, plain)


# ------------------------------------------------------------------ state that changes its form


class Changing(torch.optim.Optimizer):
    """Needs whole tensors. Its state has another form after every step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group["lr"])

    def _update(self, param: torch.Tensor, lr: float) -> None:
        state, grad = self.state[param], param.grad
        if not state:
            state["count"] = 0
            state["mean"] = torch.zeros_like(grad)
            state["before"] = None
            state["history"] = ()
            state["nothing"] = {}
            state["norms"] = grad.new_zeros(0)
        state["count"] += 1
        assert state["nothing"] == {}
        state["mean"].lerp_(grad, 0.5)
        state["norms"] = torch.cat([state["norms"], grad.norm()[None]])
        if state["before"] is not None:
            state.setdefault("late", {})[f"after {state['count']}"] = grad - state["before"]
        state["before"] = grad.clone()
        state["history"] = (*state["history"], grad.mean() + state["count"])
        change = state["mean"] * sum(state["history"]) + state["norms"].sum()
        for difference in state.get("late", {}).values():
            change = change + 0.1 * difference
        param.sub_(lr * change)


CASE = Case(shelf_of(matrices), Changing, {"lr": 0.01}, Shelf.parameters, {"partition": "whole"})


@distributed(1, 2, 3)
@EVERY_WAY
def test_state_that_has_changed_its_form_is_refused_and_a_full_state_dict_carries_it(
    world: World, way: str, tmp_path: Path
) -> None:
    crews = Crews(world)
    plain, saver, loader = CASE.plain(), CASE.ours(crews[world.size]), CASE.ours(crews[world.size])
    train([plain, saver], range(3))
    with pytest.raises(Exception, match=r"Changing changes the form.*consolidate_state_dict"):
        save(saver, tmp_path / "there", way)
    assert_like(saver, plain)
    saver.opt.consolidate_state_dict()
    state_dict = [saver.opt.state_dict() if world.rank == 0 else None]
    dist.broadcast_object_list(state_dict)
    loader.opt.load_state_dict(state_dict[0])
    loader.model.load_state_dict(saver.model.state_dict())
    assert_like(loader, plain)
    train([plain, loader], range(3, 5))
    assert_like(loader, plain)


@distributed(1, 2)
def test_a_form_to_which_the_plain_class_has_come_is_refused(world: World, tmp_path: Path) -> None:
    plain, twin, loader = CASE.plain(), CASE.plain(), CASE.ours(Crews(world)[world.size])
    train([plain], range(3))
    write_plain(world, plain, tmp_path / "there", flat=False)
    with pytest.raises(ValueError, match=r"(?s)does not fit.*unexpected: .*weight\.late"):
        loader.opt.load(tmp_path / "there", loader.model)
    train([twin, loader], range(2))
    assert_like(loader, twin)


@distributed(2)
def test_another_model_is_refused(world: World, tmp_path: Path) -> None:
    crews = Crews(world)
    saver = CASE.ours(crews[2])
    train([saver], range(1))
    save(saver, tmp_path / "there", "own")
    taller = shelf_of(lambda: [parameter((p.shape[0] + 1, *p.shape[1:]), 3) for p in matrices()])
    wider = dataclasses.replace(CASE, model=taller)
    loader, twin = wider.ours(crews[2]), wider.plain()
    with pytest.raises(ValueError, match=r"mismatched: state\.shelf\.0\.weight\.before"):
        loader.opt.load(tmp_path / "there", loader.model)
    train([twin, loader], range(2))
    assert_like(loader, twin)


@distributed(2)
def test_another_class_is_refused(world: World, tmp_path: Path) -> None:
    crews = Crews(world)
    muon = Case(CASE.model, torch.optim.Adafactor, {"lr": 0.01}, Shelf.parameters)
    saver, loader = muon.ours(crews[2]), CASE.ours(crews[2])
    train([saver], range(3))
    save(saver, tmp_path / "there", "own")
    with pytest.raises(ValueError, match=r"missing: state\.shelf\.0\.weight\.before"):
        loader.opt.load(tmp_path / "there", loader.model)
    twin = CASE.plain()
    train([twin, loader], range(2))
    assert_like(loader, twin)


# ---------------------------------------- classes and options of all kinds


def made(cls: Any, steps: int = 0, model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = model or Mlp()
    opt = ZeroRedundancyOptimizer(model.named_parameters(), cls, **{"lr": 0.1, **options})
    for step in range(steps):
        for number, param in enumerate(model.parameters()):
            source = torch.Generator().manual_seed(100 * step + number)
            param.grad = torch.randn(param.shape, generator=source)
        opt.step()
    return opt


def tensors_of(opt: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    return [value for state in opt.state.values() for value in state.values()]


@distributed(1, 2)
@pytest.mark.parametrize("flat", [False, True])
def test_options_come_back_in_their_containers(world: World, tmp_path: Path, flat: bool) -> None:
    opt = made(AdamW, betas=(torch.tensor(0.5), torch.tensor(0.75)), foreach=False)
    for group in opt.param_groups:
        group.update(mine={1: [2, 3]}, limit=math.nan)
    opt.save(tmp_path, flatten_optimizer_state_dict=flat)
    other = made(AdamW, betas=(torch.tensor(0.1), torch.tensor(0.2)), foreach=False)
    other.param_groups[0].update(mine={1: [0, 0]})
    other.load(tmp_path)
    group = other.param_groups[0]
    assert isinstance(group["betas"], tuple)
    assert [float(beta) for beta in group["betas"]] == [0.5, 0.75]
    assert group["mine"] == {1: [2, 3]}
    assert math.isnan(group["limit"])


@distributed(1, 2)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_options_and_state_may_have_dots_in_their_keys(
    world: World, tmp_path: Path, flat: bool
) -> None:
    saver, loader = made(Dotted, steps=2), made(Dotted)
    saver.param_groups[0]["a.b"] = 7
    saver.save(tmp_path, flatten_optimizer_state_dict=flat)
    loader.load(tmp_path)
    assert loader.param_groups[0]["a.b"] == 7
    for mine, theirs in zip(tensors_of(loader), tensors_of(saver), strict=True):
        assert torch.equal(mine, theirs)


class Dotted(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "a.b": 1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                mean = self.state[param].setdefault("mean.of.all", torch.zeros_like(param))
                mean.lerp_(param.grad, 0.5)
                param.sub_(mean, alpha=group["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """Looks for its state before there is any, and steps in its train mode only."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "train_mode": False})

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True
            for param in group["params"]:
                assert "z" not in self.state[param] or self.state[param]["z"] is not None

    def eval(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = False

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.clone())
                z.sub_(param.grad, alpha=group["lr"])
                param.lerp_(z, 0.5)


def schedule_free(steps: int) -> Any:
    opt = made(ScheduleFree)
    opt.train()
    for step in range(steps):
        grow(opt, step)
        opt.step()
    return opt


def grow(opt: ZeroRedundancyOptimizer, step: int) -> None:
    for number, param in enumerate(opt.param_groups[0]["params"]):
        source = torch.Generator().manual_seed(100 * step + number)
        param.grad = torch.randn(param.shape, generator=source)


def load_by(way: str, opt: ZeroRedundancyOptimizer, path: Path) -> None:
    if way == "own":
        opt.load(path)
    else:
        dcp.load({"optim": opt.sharded()}, checkpoint_id=path)


@distributed(1, 2)
@pytest.mark.parametrize("way", ["own", "dcp"])
@pytest.mark.parametrize("steps", [0, 2])
def test_schedule_free_classes_in_either_mode(
    world: World, tmp_path: Path, way: str, steps: int
) -> None:
    saver, loader = schedule_free(steps), schedule_free(0)
    saver.eval()
    if way == "own":
        saver.save(tmp_path)
    else:
        dcp.save({"optim": saver.sharded()}, checkpoint_id=tmp_path)
    load_by(way, loader, tmp_path)
    for mine, theirs in zip(tensors_of(loader), tensors_of(saver), strict=True):
        assert torch.equal(mine, theirs)
    assert bool(tensors_of(loader)) == bool(steps)
    assert loader.param_groups[0]["train_mode"] is False


class Late(torch.optim.Optimizer):
    """Elementwise, with a state that comes in the third step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                if state["count"] >= 3:
                    state.setdefault("slow", torch.zeros_like(param)).lerp_(param.grad, 0.5)
                    param.sub_(state["slow"], alpha=group["lr"])
                param.sub_(param.grad, alpha=group["lr"])


@distributed(1, 2, 3)
def test_state_that_an_elementwise_class_makes_late(world: World, tmp_path: Path) -> None:
    early, late, loader = made(Late, steps=2), made(Late, steps=4), made(Late)
    early.save(tmp_path)
    loader.load(tmp_path)
    assert [*loader.state.values()] == [*early.state.values()]
    assert any("slow" in state for state in late.state.values())
    with pytest.raises(ValueError, match=r"Late changes the form.*\(slow of .*consolidate"):
        late.save(tmp_path)


@distributed(1, 2)
@pytest.mark.parametrize("way", ["own", "dcp"])
def test_a_parameter_that_was_unfrozen_since_the_last_step(
    world: World, tmp_path: Path, way: str
) -> None:
    opt = made(AdamW)
    params = opt.param_groups[0]["params"]
    params[0].requires_grad_(False)
    frozen = ZeroRedundancyOptimizer(
        zip(opt.param_groups[0]["param_names"], params, strict=True), AdamW, lr=0.1
    )
    grow(frozen, 0)
    params[0].grad = None
    frozen.step()
    params[0].requires_grad_(True)
    if way == "own":
        frozen.save(tmp_path)
    else:
        dcp.save({"optim": frozen.sharded()}, checkpoint_id=tmp_path)
    plain = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert f"optim.state.{opt.param_groups[0]['param_names'][0]}.exp_avg" in plain
    dcp.load({"optim": opt.sharded()}, checkpoint_id=tmp_path)


@distributed(2)
def test_state_that_another_plan_could_not_keep_is_not_lost(world: World, tmp_path: Path) -> None:
    made(AdamW, steps=1, fused=True, model=nn.Sequential(nn.Linear(3, 4))).save(tmp_path)
    opt = made(AdamW, steps=1, model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)))
    before = tensors_of(opt)
    with pytest.raises(ValueError, match=r"state of 1\.bias, 1\.weight.*could not be kept"):
        opt.load(tmp_path, strict=False)
    assert all(a is b for a, b in zip(tensors_of(opt), before, strict=True))


@distributed(1, 2)
@pytest.mark.parametrize("way", ["own", "dcp"])
def test_sparse_adam(world: World, tmp_path: Path, way: str) -> None:
    torch.manual_seed(0)
    opts = []
    for _ in range(2):
        model = nn.Embedding(9, 4, sparse=True)
        opt = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.SparseAdam, lr=0.1)
        opts.append((model, opt))
    (model, saver), (_, loader) = opts
    model(torch.tensor([1, 2, 1])).sum().backward()
    saver.step()
    saver.save(tmp_path)
    load_by(way, loader, tmp_path)
    for mine, theirs in zip(tensors_of(loader), tensors_of(saver), strict=True):
        assert mine == theirs if isinstance(mine, int) else torch.equal(mine, theirs)


@distributed(2)
def test_state_that_cannot_be_shown_on_one_rank_is_told_on_all(
    world: World, tmp_path: Path
) -> None:
    opt = made(SGD, steps=1, momentum=0.9)
    if world.rank == 1:
        next(iter(opt.state.values()))["odd"] = object()
    with pytest.raises((TypeError, RuntimeError), match="which a checkpoint cannot carry"):
        dcp.save({"optim": opt.sharded()}, checkpoint_id=tmp_path)


@distributed(1, 2)
def test_plain_tensors_are_not_taken_for_parts(world: World) -> None:
    opt = made(AdamW, steps=1)
    before = tensors_of(opt)
    full = {name: {"step": torch.ones(())} for name in opt.param_groups[0]["param_names"]}
    with pytest.raises(ValueError, match=r"plain tensors.*load_state_dict"):
        opt.sharded().load_state_dict({"state": full, "param_groups": []})
    assert all(a is b for a, b in zip(tensors_of(opt), before, strict=True))


@distributed(1, 2)
def test_loading_in_inference_mode_makes_state_that_can_be_stepped(
    world: World, tmp_path: Path
) -> None:
    opt = made(AdamW, steps=1)
    opt.save(tmp_path)
    with torch.inference_mode():
        opt.load(tmp_path)
    grow(opt, 1)
    opt.step()
