"""Regressions of a review of the checkpoint code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, distributed
from inside import READ_CHECKPOINT, plan_of
from models import Mlp
from torch import nn
from torch.optim import SGD, AdamW, RAdam

from onecopy import ZeroRedundancyOptimizer
from onecopy.writer import only_writer


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
@pytest.mark.parametrize(
    ("saved", "live"), [(SGD, AdamW), (AdamW, SGD), (RAdam, AdamW)], ids=lambda c: c.__name__
)
def test_a_checkpoint_of_another_class_is_refused_whatever_its_keys(
    world: World, tmp_path: Path, saved: Any, live: Any
) -> None:
    made(saved, steps=2).save(tmp_path)
    opt = made(live, steps=1)
    before = tensors_of(opt)
    with pytest.raises(ValueError, match="does not fit"):
        opt.load(tmp_path)
    assert all(a is b for a, b in zip(tensors_of(opt), before, strict=True))
    assert opt.param_groups[0]["lr"] == 0.1


@distributed(1, 2)
def test_an_interrupted_load_leaves_everything_as_it_was(world: World, tmp_path: Path) -> None:
    made(AdamW, steps=2, fused=True).save(tmp_path)
    opt = made(AdamW, steps=1)
    before, plan = tensors_of(opt), plan_of(opt)
    interrupted = mock.patch.object(*READ_CHECKPOINT, side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), interrupted:
        opt.load(tmp_path)
    assert plan_of(opt) is plan
    assert all(a is b for a, b in zip(tensors_of(opt), before, strict=True))


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


@distributed(1)
def test_two_saves_to_one_directory_at_once_are_refused(world: World, tmp_path: Path) -> None:
    opt = made(AdamW, steps=1)
    with only_writer(tmp_path), pytest.raises(RuntimeError, match="another save is writing"):
        opt.save(tmp_path)
    opt.save(tmp_path)
    opt.load(tmp_path)


@distributed(2, pg_timeout=600.0, timeout=20.0)
@pytest.mark.parametrize("doing", ["save", "load"])
def test_a_wrong_module_on_one_rank_is_told_at_once(
    world: World, tmp_path: Path, doing: str
) -> None:
    model = Mlp()
    opt = made(AdamW, steps=1, model=model)
    opt.save(tmp_path, model)
    with pytest.raises(ValueError, match="not in the module"):
        getattr(opt, doing)(tmp_path, model if world.rank == 0 else Mlp())


@distributed(1, 2)
def test_numbers_with_names_beside_them_are_matched_by_name(world: World, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
    plain = AdamW(reversed(list(model.named_parameters())), lr=0.1)
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, number + 1.0)
    plain.step()
    dcp.save({"optim": plain.state_dict()}, checkpoint_id=tmp_path)
    opt = made(AdamW, model=model)
    opt.load(tmp_path)
    opt.consolidate_state_dict(0)
    if world.rank == 0:
        state = opt.state_dict()["state"]
        for number, param in enumerate(model.parameters()):
            assert torch.equal(state[number]["exp_avg"], plain.state[param]["exp_avg"])
    dist.barrier()


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 4)


@distributed(1, 2)
def test_a_module_that_is_called_module_keeps_its_checkpoints(world: World, tmp_path: Path) -> None:
    model = Wrapped()
    opt = made(AdamW, steps=1, model=model)
    opt.save(tmp_path / "given")
    opt.save(tmp_path / "module", model)
    for name in ("given", "module"):
        assert not any(opt.load(tmp_path / name, model))
        assert not any(opt.load(tmp_path / name))


def grouped(model: nn.Module, *groups: tuple[str, float], named: bool = True) -> Any:
    """AdamW on groups, each given by the places of its parameters and its weight_decay."""
    listed = list(model.named_parameters()) if named else list(model.parameters())
    return ZeroRedundancyOptimizer(
        [{"params": [listed[int(n)] for n in places], "weight_decay": w} for places, w in groups],
        AdamW,
        lr=0.1,
    )


def decay(opt: ZeroRedundancyOptimizer) -> list[float]:
    return [group["weight_decay"] for group in opt.param_groups]


@distributed(1, 2, 3)
def test_parameters_that_are_grouped_otherwise_are_refused(world: World, tmp_path: Path) -> None:
    model = Mlp()
    names = [name for name, _ in model.named_parameters()]
    one, two = [("0123", 0.01)], [("02", 0.01), ("13", 0.0)]
    for way, groups in {"one": one, "two": two}.items():
        saver = grouped(model, *groups)
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, number + world.rank + 1.0)
        saver.step()
        saver.save(tmp_path / way)
        saver.save(tmp_path / f"{way}, flat", flatten_optimizer_state_dict=True)

    def refuses(way: str, *groups: tuple[str, float], moved: str, where: str) -> None:
        opt = grouped(model, *groups)
        for form in (way, f"{way}, flat"):
            with pytest.raises(ValueError, match="nothing was changed") as caught:
                opt.load(tmp_path / form)
            for place in moved:
                assert f"param_groups: {names[int(place)]} ({where}" in str(caught.value)
            assert str(caught.value).count("param_groups: ") == len(moved)
            assert "the groups that it had when it was saved" in str(caught.value)
            assert not len(opt.state)
            assert decay(opt) == [weight_decay for _, weight_decay in groups]
            report = opt.load(tmp_path / form, strict=False)  # state by name, options are kept
            assert len(report.mismatched) == len(moved)
            assert not report.missing
            assert decay(opt) == [weight_decay for _, weight_decay in groups]
            assert len(opt.state) == len(saver.state)
            opt = grouped(model, *groups)

    refuses("one", *two, moved="13", where="in group 0 of the checkpoint, in group 1 here")
    refuses("two", *one, moved="13", where="in group 1 of the checkpoint, in group 0 here")
    where = "in group 1 of the checkpoint, in group 0 here with"
    refuses("two", ("023", 0.01), ("1", 0.0), moved="3", where=where)
    same = "in group 1 of the checkpoint, in group 2 here, without"
    refuses("two", ("02", 0.01), ("1", 0.5), ("3", 0.25), moved="3", where=same)
    # By name, groups may be in any order; their options are those of the checkpoint.
    for form in ("two", "two, flat"):
        turned = grouped(model, ("31", 0.5), ("20", 0.25))
        assert turned.load(tmp_path / form).fits
        assert decay(turned) == [0.0, 0.01]
    # Other writers flatten without telling the groups: each parameter has options of its own.
    dcp.save(
        {"optim": saver.sharded(flatten_optimizer_state_dict=True)}, checkpoint_id=tmp_path / "dcp"
    )
    merged = grouped(model, *one)
    with pytest.raises(ValueError, match="different options"):
        merged.load(tmp_path / "dcp")
    merged.load(tmp_path / "dcp", strict=False)
    assert decay(merged) == [0.01]


@distributed(1, 2)
def test_parameters_that_are_grouped_otherwise_are_refused_without_names_and_by_dcp(
    world: World, tmp_path: Path
) -> None:
    model = Mlp()
    saver = grouped(model, ("02", 0.01), ("13", 0.0), named=False)
    saver.save(tmp_path / "own")
    # Another number of parameters in a group, so that positions would mean other parameters.
    opt = grouped(model, ("0", 0.01), ("213", 0.0), named=False)
    with pytest.raises(ValueError, match=r"by_index\.1 \(in group 0 of the checkpoint, in group 1"):
        opt.load(tmp_path / "own")
    equal = grouped(model, ("02", 0.01), ("13", 0.01))
    dcp.save({"optim": equal.sharded()}, checkpoint_id=tmp_path / "dcp")
    opt = grouped(model, ("0", 0.25), ("213", 0.5))
    with pytest.raises((ValueError, dcp.api.CheckpointException), match="grouped otherwise than"):
        dcp.load({"optim": opt.sharded()}, checkpoint_id=tmp_path / "dcp")
    assert decay(opt) == [0.25, 0.5]


@distributed(1, 2)
def test_a_path_that_is_a_file_says_so(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="is a file"):
        made(AdamW).load(tmp_path / "file")


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


@distributed(1, 2)
def test_a_second_optimizer_does_not_replace_the_checkpoint_of_the_first(
    world: World, tmp_path: Path
) -> None:
    first, second = made(AdamW, steps=1), made(AdamW, steps=1, model=nn.Sequential(nn.Linear(3, 4)))
    first.save(tmp_path)
    with pytest.raises(ValueError, match=r"state of another optimizer \(optim\.state\."):
        second.save(tmp_path)
    first.save(tmp_path)
    first.load(tmp_path)


@distributed(1, 2)
def test_a_checkpoint_written_with_an_extension_of_dcp_is_refused_with_the_reason(
    world: World, tmp_path: Path
) -> None:
    extension = pytest.importorskip("torch.distributed.checkpoint._extension")

    class Same(extension.StreamTransformExtension):
        registry_name = staticmethod(lambda: "stream.same")
        from_descriptor = classmethod(lambda cls, _: cls())

        def get_descriptor(self) -> str:
            return f"{self.registry_name()}/1"

        def transform_to(self, output: Any) -> Any:
            return output

        def transform_from(self, source: Any) -> Any:
            return source

    opt = made(AdamW, steps=1)
    writer = dcp.FileSystemWriter(tmp_path, _extensions=[Same()])
    dcp.save({"optim": opt.sharded()}, storage_writer=writer)
    with pytest.raises(ValueError, match=r"was written with stream\.same/1.*dcp\.load"):
        opt.load(tmp_path)


# ------------------------------------------------------------------ a second review


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
    saver, loader = made(Late, steps=4), made(Late)
    saver.save(tmp_path)
    loader.load(tmp_path)
    saver.load(tmp_path)
    for mine, theirs in zip(tensors_of(loader), tensors_of(saver), strict=True):
        assert mine == theirs if isinstance(mine, int) else torch.equal(mine, theirs)
    assert any("slow" in state for state in loader.state.values())
    with pytest.raises(ValueError, match=r"Late changes the form.*optimizer\.load"):
        dcp.load({"optim": made(Late).sharded()}, checkpoint_id=tmp_path)


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


@distributed(1, 2)
def test_not_strict_keeps_the_state_and_options_of_another_class(
    world: World, tmp_path: Path
) -> None:
    made(SGD, steps=2, momentum=0.5, lr=10.0).save(tmp_path / "sgd")
    made(AdamW, steps=2, lr=10.0).save(tmp_path / "adamw")
    for name, cls in (("sgd", AdamW), ("adamw", torch.optim.Adam)):
        opt = made(cls, steps=1)
        before, options = tensors_of(opt), dict(opt.param_groups[0])
        report = opt.load(tmp_path / name, strict=False)
        assert len(report.mismatched) >= 6
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(opt), before, strict=True))
        assert opt.param_groups[0] == options


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
def test_a_load_of_some_keys_of_a_parameter_is_refused(world: World, tmp_path: Path) -> None:
    planner = dcp.default_planner.DefaultLoadPlanner(allow_partial_load=True)
    tree = made(AdamW, steps=1).sharded().state_dict()
    for state in tree["state"].values():
        del state["exp_avg_sq"]
    dcp.save({"optim": tree}, checkpoint_id=tmp_path)
    opt = made(AdamW)
    with pytest.raises(ValueError, match="does not cover the state"):
        dcp.load({"optim": opt.sharded()}, checkpoint_id=tmp_path, planner=planner)


@distributed(1, 2)
def test_a_subclass_begins_as_its_parent_does(world: World, tmp_path: Path) -> None:
    class Mine(torch.optim.NAdam):
        pass

    made(Mine).save(tmp_path)
    keys = [k for k in _read_all(tmp_path) if k.endswith("mu_product")]
    assert keys
    assert all(_read_all(tmp_path)[key] == 1.0 for key in keys)


def _read_all(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = {}
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for key, entry in metadata.items():
        if hasattr(entry, "size"):
            read[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(read, checkpoint_id=path)
    return read


@distributed(1, 2)
def test_options_of_a_group_without_parameters_are_loaded(world: World, tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    groups = [{"params": list(model.parameters())}, {"params": [], "lr": 0.7}]
    opt = ZeroRedundancyOptimizer(groups, AdamW, lr=0.1)
    opt.save(tmp_path, model)
    opt.param_groups[1]["lr"] = 0.3
    opt.load(tmp_path, model)
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.7]


@distributed(1, 2)
def test_a_module_may_be_called_param_groups(world: World, tmp_path: Path) -> None:
    model = nn.ModuleDict({"param_groups": nn.Linear(3, 2), "state": nn.Linear(2, 2)})
    opt = made(AdamW, steps=1, model=model)
    what = {"model": {"inner": dict(model["param_groups"].state_dict())}, "optim": opt.sharded()}
    what["model"]["param_groups"] = {"0": {"weight": torch.ones(2)}}
    dcp.save(what, checkpoint_id=tmp_path)
    opt.load(tmp_path)


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


@distributed(1, 2)
def test_named_and_by_position_over_each_other(world: World, tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
    opt.save(tmp_path, model)
    opt.save(tmp_path)
    opt.save(tmp_path, model)
    opt.load(tmp_path, model)
