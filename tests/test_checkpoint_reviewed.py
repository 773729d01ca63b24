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
    before, plan = tensors_of(opt), opt._plan
    interrupted = mock.patch("onecopy.loading._read", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), interrupted:
        opt.load(tmp_path)
    assert opt._plan is plan
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


@distributed(1, 2)
def test_groups_that_were_merged_keep_their_options_when_not_strict(
    world: World, tmp_path: Path
) -> None:
    model = Mlp()
    first, *rest = model.named_parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": rest, "lr": 0.25}]
    ZeroRedundancyOptimizer(groups, AdamW).save(tmp_path)
    opt = made(AdamW, model=model)
    with pytest.raises(ValueError, match="different options"):
        opt.load(tmp_path)
    opt.load(tmp_path, strict=False)
    assert opt.param_groups[0]["lr"] == 0.1


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
