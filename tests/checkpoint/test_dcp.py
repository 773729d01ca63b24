"""Sharded checkpoints of ours read by the plain class and by FSDP2, and theirs read by ours."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import (
    CASES,
    EVERY_WAY,
    SMALL_BUCKETS,
    WAYS,
    Case,
    Crew,
    Crews,
    Run,
    assert_like,
    assert_one_copy,
    assert_same_state,
    by_name,
    copy_parameters,
    load,
    read_plain,
    save,
    slow_down,
    torch_form,
    train,
    used_before,
    write_plain,
)
from harness import World, distributed
from models import Mlp
from states import assert_same
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from onecopy import ZeroRedundancyOptimizer

INTEROP = ["AdamW", "amsgrad", "momentum", "Adagrad", "Rprop", "Adafactor", "tied", "large"]
INTEROP += ["Muon"] if "Muon" in CASES else []  # older releases of torch have none
QUICK = {"AdamW", "momentum", "Adagrad", "Muon"}
INTEROP_CASES = pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in INTEROP]
)
needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="fully_shard of this torch does not run on the CPU",
)
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])


# ---------------------------------------- the plain class ----------------------------------------


@distributed(3)
@FLAT
@INTEROP_CASES
def test_the_plain_class_reads_ours(world: World, name: str, flat: bool, tmp_path: Path) -> None:
    case, crews = CASES[name], Crews(world)
    plain, saver = case.plain(), case.ours(crews[3])
    train([plain, saver], range(2))
    slow_down([plain, saver])
    readers = []
    for way in WAYS:
        save(saver, tmp_path / way, way, flatten_optimizer_state_dict=flat)
        reader = case.plain()
        read_plain(reader, tmp_path / way, flat)
        copy_parameters(reader, plain)
        assert_same(by_name(reader), by_name(plain), ordered=False)
        readers.append(reader)
    train([plain, *readers], range(2, 5))
    for reader in readers:
        for mine, theirs in zip(reader.params, plain.params, strict=True):
            assert torch.equal(mine, theirs)
        assert_same(by_name(reader), by_name(plain), ordered=False)


@distributed(3)
@FLAT
@INTEROP_CASES
def test_ours_reads_the_plain_class(world: World, name: str, flat: bool, tmp_path: Path) -> None:
    case, crews = CASES[name], Crews(world)
    start = case.plain()
    train([start], range(2))
    slow_down([start])
    write_plain(world, start, tmp_path / "there", flat)
    for way in WAYS:
        plain, loader = copy.deepcopy(start), used_before(case, crews, 3)
        options = {"flatten_optimizer_state_dict": flat} if way == "dcp" else {}
        load(loader, tmp_path / "there", way, **options)
        copy_parameters(loader, plain)
        assert_like(loader, plain)
        assert_one_copy(loader)
        train([plain, loader], range(2, 4))
        assert_like(loader, plain)


@distributed(2)
@pytest.mark.parametrize("name", ["AdamW", "momentum", "Adagrad", "NAdam", "Rprop", "ASGD"])
def test_the_plain_class_begins_with_ours_from_before_the_first_step(
    world: World, name: str, tmp_path: Path
) -> None:
    case, crews = CASES[name], Crews(world)
    saver = case.ours(crews[2])
    for way in WAYS:
        save(saver, tmp_path / way, way)
        plain, reader = case.plain(), case.plain()
        read_plain(reader, tmp_path / way, flat=False)
        copy_parameters(reader, plain)
        train([plain, reader], range(3))
        for mine, theirs in zip(reader.params, plain.params, strict=True):
            assert torch.equal(mine, theirs)


@distributed(3)
@EVERY_WAY
@FLAT
def test_a_whole_job_goes_there_and_back(
    world: World, way: str, flat: bool, tmp_path: Path
) -> None:
    """Ours on 3 ranks, plain on one, ours on 2, with steps in between."""
    case, crews = CASES["AdamW"], Crews(world)
    plain, first = case.plain(), case.ours(crews[3])
    train([plain, first], range(2))
    save(first, tmp_path / "first", way, flatten_optimizer_state_dict=flat)
    second = case.plain()
    read_plain(second, tmp_path / "first", flat)
    copy_parameters(second, first)
    train([plain, second], range(2, 4))
    write_plain(world, second, tmp_path / "second", flat)
    third = case.ours(crews[2])
    options = {"flatten_optimizer_state_dict": flat} if way == "dcp" else {}
    load(third, tmp_path / "second", way, **options)
    copy_parameters(third, second)
    train([plain, third], range(4, 6))
    assert_like(third, plain)


@distributed(3)
@EVERY_WAY
@pytest.mark.parametrize("name", ["AdamW", "tied", "channels_last"])
def test_a_converted_checkpoint_is_a_dict_for_the_plain_class(
    world: World, name: str, way: str, tmp_path: Path
) -> None:
    case, crews = CASES[name], Crews(world)
    plain, saver = case.plain(), case.ours(crews[3])
    train([plain, saver], range(2))
    slow_down([plain, saver])
    save(saver, tmp_path / "there", way)
    if world.rank == 0:
        dcp_to_torch_save(tmp_path / "there", tmp_path / "plain.pt")
    dist.barrier()
    read = torch.load(tmp_path / "plain.pt", weights_only=True)["optim"]
    reader = case.plain()
    number = {n: i for i, n in enumerate(n for g in read["param_groups"] for n in g["params"])}
    state = {number[n]: s for n, s in read["state"].items()}
    groups = [{**g, "params": [number[n] for n in g["params"]]} for g in read["param_groups"]]
    reader.optimizers[0].load_state_dict({"state": state, "param_groups": groups})
    copy_parameters(reader, plain)
    train([plain, reader], range(2, 4))
    for mine, theirs in zip(reader.params, plain.params, strict=True):
        assert torch.equal(mine, theirs)


# ---------------------------------------- FSDP2 ----------------------------------------


FSDP_CASES = pytest.mark.parametrize("name", ["AdamW", "amsgrad", "momentum", "Adagrad"])
OF_FSDP = {name: (CASES[name].optimizer_class, CASES[name].options) for name in CASES}


def mlp() -> nn.Module:
    torch.manual_seed(4)
    return Mlp()


def mlp_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.children()
    rest = [param for child in others for param in child.parameters()]
    return [{"params": list(first.parameters())}, {"params": rest, "lr": 0.05}]


def fsdp_case(name: str) -> Case:
    cls, options = OF_FSDP[name]
    return Case(mlp, cls, options, mlp_groups)


def sharded_run(world: World, case: Case) -> Run:
    """The same job with FSDP2."""
    model = case.model()
    mesh = init_device_mesh("cpu", (world.size,))
    for child in model.children():
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    options = {**case.options, "foreach": False}
    return Run(model, [case.optimizer_class(case.groups(model), **options)])


def train_fsdp(world: World, run: Run, steps: int) -> None:
    for step in range(steps):
        run.model.zero_grad()
        run.model(run.model.batch((world.rank + 1, step + 1))).backward()
        run.optimizers[0].step()


def full_state(run: Run) -> dict[str, Any]:
    """State by name, whole."""
    found = {}
    called = {param: name for name, param in run.model.named_parameters()}
    for param, state in run.optimizers[0].state.items():
        found[called[param]] = {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in state.items()
        }
    return found


@needs_fsdp2
@distributed(2, 3)
@EVERY_WAY
@FLAT
@FSDP_CASES
def test_fsdp2_reads_ours(world: World, name: str, way: str, flat: bool, tmp_path: Path) -> None:
    case, crews = fsdp_case(name), Crews(world)
    plain, saver = case.plain(), case.ours(crews[2])
    train([plain, saver], range(2))
    slow_down([plain, saver])
    save(saver, tmp_path / "there", way, flatten_optimizer_state_dict=flat)
    reader = sharded_run(world, case)
    form = {"optim": torch_form(reader, flat)}
    dcp.load(form, checkpoint_id=tmp_path / "there")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(reader.model, reader.optimizers[0], form["optim"], options=options)
    assert_same(full_state(reader), by_name(plain)["state"], ordered=False)
    lrs = [group["lr"] for group in reader.optimizers[0].param_groups]
    assert lrs == [group["lr"] for group in plain.optimizers[0].param_groups]
    train_fsdp(world, reader, 1)


@needs_fsdp2
@distributed(2, 3)
@FLAT
@FSDP_CASES
def test_ours_reads_fsdp2(world: World, name: str, flat: bool, tmp_path: Path) -> None:
    case, crews = fsdp_case(name), Crews(world)
    writer = sharded_run(world, case)
    train_fsdp(world, writer, 2)
    slow_down([writer])
    dcp.save({"optim": torch_form(writer, flat)}, checkpoint_id=tmp_path / "there")
    expected, params = full_state(writer), [p.full_tensor() for p in writer.params]
    options = {"flatten_optimizer_state_dict": flat}
    for way in WAYS:
        loader = used_before(case, crews, 2)
        load(loader, tmp_path / "there", way, **(options if way == "dcp" else {}))
        assert_one_copy(loader)
        reference = case.plain()
        numbers = {n: i for i, (n, _) in enumerate(reference.model.named_parameters())}
        as_dict = reference.optimizers[0].state_dict()
        as_dict["state"] = {numbers[n]: s for n, s in copy.deepcopy(expected).items()}
        for group, saved in zip(
            as_dict["param_groups"], writer.optimizers[0].param_groups, strict=True
        ):
            group.update({key: value for key, value in saved.items() if key != "params"})
        reference.optimizers[0].load_state_dict(as_dict)
        with torch.no_grad():
            for run in (reference, loader):
                for mine, theirs in zip(run.params, params, strict=True):
                    mine.copy_(theirs)
        assert_like(loader, reference)
        train([reference, loader], range(2, 4))
        assert_like(loader, reference)


@distributed(2, 3)
def test_ours_to_fsdp2_and_back_is_the_same_state(world: World, tmp_path: Path) -> None:
    case, crews = fsdp_case("AdamW"), Crews(world)
    plain, saver = case.plain(), case.ours(crews[world.size])
    train([plain, saver], range(2))
    save(saver, tmp_path / "ours", "dcp")
    between = sharded_run(world, case)
    form = {"optim": torch_form(between, flat=False)}
    dcp.load(form, checkpoint_id=tmp_path / "ours")
    set_optimizer_state_dict(between.model, between.optimizers[0], form["optim"])
    dcp.save({"optim": torch_form(between, flat=False)}, checkpoint_id=tmp_path / "theirs")
    for way in WAYS:
        loader = used_before(case, crews, 2)
        load(loader, tmp_path / "theirs", way)
        assert_same_state(loader, plain)


# ---------------------------------------- asynchronously ----------------------------------------


@contextlib.contextmanager
def writing_after() -> Iterator[threading.Event]:
    """DCP writes no file before the event is set."""
    may_write, write_data = threading.Event(), dcp.FileSystemWriter.write_data

    def write_late(*args: Any) -> Any:
        assert may_write.wait(timeout=30)
        return write_data(*args)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", write_late):
        yield may_write


@distributed(1, 2, 3)
@EVERY_WAY
def test_async_save_saves_the_moment_of_the_call(world: World, way: str, tmp_path: Path) -> None:
    """DDP goes on at once, on the default group; the save has a group of its own."""
    torch.manual_seed(0)
    model = Mlp()
    ddp = DistributedDataParallel(model)
    opt = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, bucket_mb=SMALL_BUCKETS, lr=0.05
    )
    plain_model = copy.deepcopy(model)
    plain_ddp = DistributedDataParallel(plain_model)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.05)
    ours, theirs = (
        Run(model, [opt], Crew(world.size, dist.group.WORLD, True)),
        Run(plain_model, [plain]),
    )
    group = dist.new_group(backend="gloo")

    def ddp_step(step: int) -> None:
        for module, optimizer in ((ddp, opt), (plain_ddp, plain)):
            module.zero_grad()
            module(model.batch((world.rank + 1, step + 1))).backward()
            optimizer.step()

    for step in range(2):
        ddp_step(step)
    then = copy.deepcopy(theirs.model.state_dict()), copy.deepcopy(plain.state_dict())
    # A copy of the model's: torch 2.6 takes none of tensors that are on the CPU.
    what = {"model": copy.deepcopy(model.state_dict()), "optim": opt.sharded(ddp)}
    with writing_after() as may_write:
        pending = dcp.async_save(what, checkpoint_id=tmp_path / "there", process_group=group)
        for step in range(2, 5):
            ddp_step(step)
        may_write.set()
        pending.result()
    assert_like(ours, theirs)
    dist.barrier()

    weights = copy.deepcopy(model.state_dict())
    if way == "dcp":
        what = {"model": weights, "optim": opt.sharded(ddp)}
        dcp.load(what, checkpoint_id=tmp_path / "there")
    else:
        opt.load(tmp_path / "there", ddp)
        dcp.load({"model": weights}, checkpoint_id=tmp_path / "there")
    model.load_state_dict(weights)
    plain_model.load_state_dict(then[0])
    plain.load_state_dict(then[1])
    assert_like(ours, theirs)
    for step in range(2, 4):
        ddp_step(step)
    assert_like(ours, theirs)


@distributed(1)
def test_async_save_works_with_a_storage_writer_of_the_users(world: World, tmp_path: Path) -> None:
    case, crews = CASES["AdamW"], Crews(world)
    plain, saver = case.plain(), case.ours(crews[1])
    train([plain, saver], range(2))
    what = {"optim": saver.opt.sharded(saver.model)}
    dcp.async_save(what, storage_writer=dcp.FileSystemWriter(tmp_path / "there")).result()
    loader = used_before(case, crews, 1)
    load(loader, tmp_path / "there", "own")
    assert_same_state(loader, plain)


# ---------------------------------------- torch's helpers on ours --------------------------------


@distributed(1, 2, 3)
@pytest.mark.parametrize("steps", [0, 2])
def test_torchs_helpers_on_ours_point_to_sharded_and_change_nothing(
    world: World, steps: int
) -> None:
    case, crews = CASES["AdamW"], Crews(world)
    plain, run = case.plain(), case.ours(crews[world.size])
    train([plain, run], range(steps))
    for run_ in (plain, run):
        for param in run_.params:
            param.grad = None
    if steps:
        with pytest.raises(RuntimeError, match=r"optimizer\.sharded\(\)"):
            get_optimizer_state_dict(run.model, run.opt)
    else:  # there is nothing to collect yet
        assert not get_optimizer_state_dict(run.model, run.opt)["state"]
    assert all(param.grad is None for param in run.params)
    assert_like(run, plain)
    train([plain, run], range(steps, steps + 2))
    assert_like(run, plain)


@distributed(1, 2, 3)
def test_torchs_way_of_setting_the_state_works_on_all_ranks_or_names_ours(world: World) -> None:
    case, crews = CASES["AdamW"], Crews(world)
    plain, ours = case.plain(), case.ours(crews[world.size])
    train([plain], range(2))
    copy_parameters(ours, plain)
    full = get_optimizer_state_dict(plain.model, plain.optimizers[0])
    set_optimizer_state_dict(ours.model, ours.opt, copy.deepcopy(full))
    assert_like(ours, plain)
    train([plain, ours], range(2, 4))
    with pytest.raises(RuntimeError, match=r"optimizer\.sharded\(\)"):
        set_optimizer_state_dict(
            ours.model, ours.opt, full, options=StateDictOptions(full_state_dict=True)
        )
    assert_like(ours, plain)
