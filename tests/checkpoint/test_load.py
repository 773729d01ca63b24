"""`optimizer.load` of what does not fit: one error with all the names, and nothing is changed.

A `Live` optimizer has a twin that never meets a checkpoint: after a refused load both must hold the
same tensors as before and take the same steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, distributed
from inside import READ_CHECKPOINT, READ_METADATA, plan_of
from models import Mlp, noise
from test_round_trip import made, tensors_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Adam, AdamW, RAdam

from onecopy import ZeroRedundancyOptimizer
from onecopy.checkpoint.metadata import only_writer

Tree = dict[str, Any]


def set_gradients(model: nn.Module, step: int) -> None:
    for number, param in enumerate(model.parameters()):
        param.grad = noise(*param.shape, seed=(step + 1, number + 1))


def trained(
    cls: Any = Adam, model: nn.Module | None = None, steps: int = 2, **options: Any
) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(1)
    model = model or Mlp()
    opt = ZeroRedundancyOptimizer(
        model.named_parameters(), cls, lr=0.1, bucket_mb=0.0005, **options
    )
    for step in range(steps):
        set_gradients(model, step)
        opt.step()
    return model, opt


class Live:
    """An optimizer to load into, and an undisturbed twin."""

    def __init__(self, cls: Any = Adam, **options: Any) -> None:
        self.model, self.opt = trained(cls, **options)
        self.twin_model, self.twin = trained(cls, **options)
        self.remember()

    def remember(self) -> None:
        self.tensors = {param: dict(state) for param, state in self.opt.state.items()}
        self.values = copy.deepcopy(list(self.tensors.values()))
        self.options = self.current_options()

    def current_options(self) -> list[Tree]:
        groups = self.opt.param_groups
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    def assert_unchanged(self) -> None:
        state = self.opt.state
        assert list(state) == list(self.tensors)
        for (param, before), values in zip(self.tensors.items(), self.values, strict=True):
            assert state[param].keys() == before.keys()
            for key, tensor in before.items():
                assert state[param][key] is tensor
                assert torch.equal(tensor, values[key])
        assert self.current_options() == self.options
        self.assert_steps_like_the_twin()

    def assert_steps_like_the_twin(self) -> None:
        for step in (10, 11):
            for model, opt in ((self.model, self.opt), (self.twin_model, self.twin)):
                set_gradients(model, step)
                opt.step()
            for mine, its in zip(
                self.model.parameters(), self.twin_model.parameters(), strict=True
            ):
                assert torch.equal(mine, its)

    def assert_refuses(self, path: Path, *texts: str, error: Any = ValueError, **how: Any) -> None:
        """The same error on all ranks, with these texts, and nothing is changed."""
        self.remember()
        dist.barrier()
        with pytest.raises(error) as caught:
            self.opt.load(path, **how)
        raised: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(raised, (type(caught.value).__name__, str(caught.value)))
        assert len(set(raised)) == 1, raised
        for text in texts:
            assert text in str(caught.value)
        self.assert_unchanged()


# ------------------------------------------------------------------------------- files that lie


def plain_tree(cls: Any = Adam, model: nn.Module | None = None, **options: Any) -> Tree:
    """What torch's own functions write of an unsharded optimizer."""
    torch.manual_seed(3)
    model = model or Mlp()
    optimizer = cls(model.parameters(), lr=0.5, **options)
    for step in (5, 6):
        set_gradients(model, step)
        optimizer.step()
    return get_optimizer_state_dict(model, optimizer)


def save_on_rank_0(tree: Tree, directory: Path) -> None:
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        dcp.save(tree, checkpoint_id=str(directory), process_group=alone)
    dist.barrier()


def without_a_key(tree: Tree) -> None:
    del tree["state"]["first.weight"]["exp_avg"]
    del tree["state"]["norm.bias"]["step"]


def with_another_key(tree: Tree) -> None:
    tree["state"]["second.weight"]["extra"] = torch.zeros(5, 17)
    tree["state"]["first.bias"]["note"] = "hello"


def of_another_shape(tree: Tree) -> None:
    tree["state"]["first.weight"]["exp_avg"] = torch.zeros(11, 17)
    tree["state"]["second.bias"]["step"] = torch.zeros(1)


def of_another_dtype(tree: Tree) -> None:
    tree["state"]["norm.weight"]["exp_avg_sq"] = torch.zeros(17, dtype=torch.float64)


def a_value_for_a_tensor(tree: Tree) -> None:
    tree["state"]["norm.weight"]["exp_avg"] = 0.5


def of_a_larger_model(tree: Tree) -> None:
    tree["state"]["third.weight"] = dict(tree["state"]["first.weight"])
    tree["param_groups"][0]["params"].append("third.weight")


def of_a_smaller_model(tree: Tree) -> None:
    del tree["state"]["second.bias"]
    tree["param_groups"][0]["params"].remove("second.bias")


def everything_at_once(tree: Tree) -> None:
    del tree["state"]["first.weight"]["exp_avg"]
    of_another_dtype(tree)
    with_another_key(tree)


MISFITS: dict[Callable[[Tree], None], tuple[str, ...]] = {
    without_a_key: ("missing: state.first.weight.exp_avg, state.norm.bias.step",),
    with_another_key: ("unexpected: state.first.bias.note, state.second.weight.extra",),
    of_another_shape: (
        "mismatched: state.first.weight.exp_avg (shape (11, 17) in the checkpoint, (17, 11) here)",
        "state.second.bias.step (shape (1,) in the checkpoint, () here)",
    ),
    of_another_dtype: (
        "mismatched: state.norm.weight.exp_avg_sq (torch.float64 in the checkpoint, "
        "torch.float32 here)",
    ),
    a_value_for_a_tensor: ("mismatched: state.norm.weight.exp_avg (a tensor on one side",),
    of_a_larger_model: (
        "unexpected: param_groups: third.weight, state.third.weight.exp_avg, "
        "state.third.weight.exp_avg_sq, state.third.weight.step",
    ),
    of_a_smaller_model: ("missing: param_groups: second.bias",),
    everything_at_once: (
        "missing: state.first.weight.exp_avg\n",
        "unexpected: state.first.bias.note, state.second.weight.extra\n",
        "mismatched: state.norm.weight.exp_avg_sq (",
    ),
}


@distributed(1, 2, 3)
@pytest.mark.parametrize("damage", MISFITS, ids=lambda damage: damage.__name__)
def test_a_checkpoint_that_does_not_fit_is_refused_with_all_the_names(
    world: World, tmp_path: Path, damage: Callable[[Tree], None]
) -> None:
    live, tree = Live(), plain_tree()
    save_on_rank_0({"optim": tree}, tmp_path / "good")
    damage(tree)
    save_on_rank_0({"optim": tree}, tmp_path / "bad")
    live.assert_refuses(tmp_path / "bad", "nothing was changed", *MISFITS[damage])
    assert not any(live.opt.load(tmp_path / "good"))  # the same file undamaged does fit
    assert live.opt.param_groups[0]["lr"] == 0.5


@distributed(1, 2)
def test_options_are_taken_over_as_torch_does(world: World, tmp_path: Path) -> None:
    """A release may have options that another lacks, and schedulers add some of their own."""
    live, tree = Live(), plain_tree()
    eps = live.opt.param_groups[0]["eps"]
    del tree["param_groups"][0]["eps"]
    tree["param_groups"][0]["initial_lr"] = 0.25
    save_on_rank_0({"optim": tree}, tmp_path)
    assert not any(live.opt.load(tmp_path))
    assert live.opt.param_groups[0]["eps"] == eps
    assert live.opt.param_groups[0]["initial_lr"] == 0.25


class LateRefuser(Adam):
    """Has loaded everything when it says no, on the last rank only."""

    def load_state_dict(self, state_dict: Tree) -> None:
        super().load_state_dict(state_dict)
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("changed my mind")


@distributed(1, 2, 3)
@pytest.mark.parametrize("fused", [False, True], ids=["the same plan", "another plan"])
def test_a_class_that_refuses_late_on_one_rank_changes_nothing_on_any(
    world: World, tmp_path: Path, fused: bool
) -> None:
    live = Live(LateRefuser)
    _, saver = trained(Adam, steps=4, fused=fused)
    saver.save(tmp_path)
    live.remember()
    with pytest.raises(ValueError, match="changed my mind"):
        live.opt.load(tmp_path)
    live.assert_unchanged()


@distributed(1, 2, 3)
def test_a_checkpoint_of_another_class_is_refused(world: World, tmp_path: Path) -> None:
    _, sgd = trained(SGD, momentum=0.9)
    sgd.save(tmp_path)
    names = (
        "missing: state.first.bias.exp_avg, ",
        "unexpected: state.first.bias.momentum_buffer, ",
    )
    Live().assert_refuses(tmp_path, *names)
    _, adam = trained()
    adam.save(tmp_path / "adam")
    Live(SGD, momentum=0.9).assert_refuses(tmp_path / "adam", "momentum_buffer", "exp_avg")


@distributed(1, 2, 3)
def test_a_checkpoint_of_another_model_is_refused(world: World, tmp_path: Path) -> None:
    _, other = trained(model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
    other.save(tmp_path / "names")
    missing = "missing: param_groups: first.bias, param_groups: first.weight, "
    Live().assert_refuses(tmp_path / "names", missing, "unexpected: param_groups: 0.bias, ")
    _, wide = trained(model=Mlp(width=19))
    wide.save(tmp_path / "shapes")
    shapes = "state.norm.bias.exp_avg (shape (19,) in the checkpoint, (17,) here)"
    Live().assert_refuses(tmp_path / "shapes", "mismatched: ", shapes)


@distributed(1, 2, 3)
def test_a_checkpoint_whose_data_file_is_missing_is_refused(world: World, tmp_path: Path) -> None:
    _, saver = trained()
    saver.save(tmp_path)
    dist.barrier()
    if world.rank == 0:
        last = max(tmp_path.glob(f"__{world.size - 1}_*"))
        last.unlink()
    Live().assert_refuses(tmp_path, f"__{world.size - 1}_", "missing")


@distributed(1, 2, 3)
@pytest.mark.parametrize("what", ["an empty directory", "nothing", "a file", "in a file"])
def test_a_path_that_is_no_checkpoint_is_refused(world: World, tmp_path: Path, what: str) -> None:
    if world.rank == 0:
        (tmp_path / "an empty directory").mkdir()
        (tmp_path / "a file").write_text("mine")
    path = tmp_path / ("a file/inside" if what == "in a file" else what)
    Live().assert_refuses(path, str(path), error=OSError)


@distributed(1, 2, 3)
def test_a_checkpoint_of_a_model_alone_is_refused(world: World, tmp_path: Path) -> None:
    save_on_rank_0({"model": Mlp().state_dict()}, tmp_path)
    Live().assert_refuses(tmp_path, "no optimizer state")


@distributed(1, 2, 3)
def test_two_optimizers_in_one_checkpoint_need_a_key(world: World, tmp_path: Path) -> None:
    first, second = plain_tree(), plain_tree(SGD, momentum=0.9)
    save_on_rank_0({"one": first, "two": second, "model": Mlp().state_dict()}, tmp_path)
    live = Live()
    live.assert_refuses(tmp_path, "several optimizers", "'one', 'two'", "key=")
    live.assert_refuses(tmp_path, "'three'", "'one', 'two'", key="three")
    live.assert_refuses(tmp_path, "momentum_buffer", key="two")
    assert not any(live.opt.load(tmp_path, key="one"))
    assert live.opt.param_groups[0]["lr"] == 0.5


@distributed(2, 3)
def test_a_damaged_file_of_one_rank_is_an_error_on_all(world: World, tmp_path: Path) -> None:
    _, saver = trained()
    saver.save(tmp_path)
    dist.barrier()
    if world.rank == 0:
        last = max(tmp_path.glob(f"__{world.size - 1}_*"))
        data = bytearray(last.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        last.write_bytes(bytes(data))
    Live().assert_refuses(tmp_path, "damaged")


# ------------------------------------------------------------------------------- what fits


def states_of(opt: ZeroRedundancyOptimizer) -> dict[int, Any]:
    """The full state by number, on all ranks."""
    opt.consolidate_state_dict()
    box = [opt.state_dict()["state"] if opt.rank == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def assert_same_state(mine: Tree, its: Tree) -> None:
    assert mine.keys() == its.keys()
    for key in mine:
        assert torch.equal(mine[key], its[key]), key


NAMES = [name for name, _ in Mlp().named_parameters()]


@distributed(1, 2)
@pytest.mark.parametrize("damage", MISFITS, ids=lambda damage: damage.__name__)
def test_not_strict_loads_what_fits_and_returns_what_does_not(
    world: World, tmp_path: Path, damage: Callable[[Tree], None]
) -> None:
    live, tree = Live(), plain_tree()
    before, expected = states_of(live.opt), copy.deepcopy(tree["state"])
    damage(tree)
    save_on_rank_0({"optim": tree}, tmp_path)
    report = live.opt.load(tmp_path, strict=False)
    reports: list[Any] = [None] * world.size
    dist.all_gather_object(reports, tuple(report))
    assert len(set(reports)) == 1
    told = "\n".join(f"{title}: {', '.join(names)}" for title, names in report._asdict().items())
    for text in MISFITS[damage]:
        assert text.strip() in told
    unfit = {name for name in NAMES if any(f".{name}." in f"{text}." for text in sum(report, ()))}
    after = states_of(live.opt)
    for number, name in enumerate(NAMES):
        if damage is of_a_smaller_model and name == "second.bias":
            continue  # a test below
        loaded = after[number]
        assert_same_state(loaded, before[number] if name in unfit else expected[name])
    if damage not in (of_a_larger_model, of_a_smaller_model):
        assert unfit
    assert live.opt.param_groups[0]["lr"] == 0.5
    set_gradients(live.model, 20)
    live.opt.step()
    live.opt.assert_replicas_equal()


@distributed(1, 2)
def test_not_strict_leaves_a_parameter_that_the_checkpoint_lacks_its_state(
    world: World, tmp_path: Path
) -> None:
    live, tree = Live(), plain_tree()
    before = states_of(live.opt)
    of_a_smaller_model(tree)
    save_on_rank_0({"optim": tree}, tmp_path)
    assert live.opt.load(tmp_path, strict=False).missing == ("param_groups: second.bias",)
    number, after = NAMES.index("second.bias"), states_of(live.opt)
    assert number in after
    assert_same_state(after[number], before[number])


@distributed(1, 2, 3)
def test_what_fits_entirely_gives_an_empty_report(world: World, tmp_path: Path) -> None:
    _, saver = trained(steps=4)
    saver.save(tmp_path)
    for strict in (True, False):
        live = Live()
        report = live.opt.load(tmp_path, strict=strict)
        assert report == ((), (), (), ())
        assert str(report).strip() == "everything fits"
        for number, state in states_of(saver).items():
            assert_same_state(states_of(live.opt)[number], state)


@distributed(2, 3)
def test_rank_0_reads_the_metadata_once_for_all_ranks(world: World, tmp_path: Path) -> None:
    """Another checkpoint may replace this one between two reads."""
    model, opt = trained()
    path = tmp_path / "checkpoint"
    opt.save(path, model)
    read = mock.Mock(wraps=getattr(*READ_METADATA))
    with mock.patch.object(*READ_METADATA, read):
        opt.load(path, model)
    assert read.call_count == (world.rank == 0)


# ------------------------------------------------------------------ names, groups and options


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


class Dotted(torch.optim.Optimizer):
    """Elementwise, with a dot in a key of its state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("sum.of", torch.zeros_like(param)).add_(param.grad)
                    param.sub_(group["lr"] * state["sum.of"])


@distributed(1, 2)
def test_a_flattened_file_of_positions_is_read_by_names_whatever_its_keys(
    world: World, tmp_path: Path
) -> None:
    optimizers = []
    for names in (None, ("a", "b")):
        params = [torch.ones(7), torch.ones(5)]
        given = params if names is None else list(zip(names, params, strict=True))
        optimizers.append(ZeroRedundancyOptimizer(given, Dotted, lr=0.1))
        for number, param in enumerate(params):
            param.grad = torch.arange(float(len(param))) + number + len(optimizers)
        optimizers[-1].step()
    saver, loader = optimizers
    saver.save(tmp_path / "there", flatten_optimizer_state_dict=True)
    loader.load(tmp_path / "there")
    for optimizer in optimizers:
        optimizer.consolidate_state_dict()
    if world.rank == 0:
        saved, found = (optimizer.state_dict()["state"] for optimizer in optimizers)
        assert all(torch.equal(saved[i]["sum.of"], found[i]["sum.of"]) for i in range(2))


@distributed(1, 2)
def test_named_and_by_position_over_each_other(world: World, tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
    opt.save(tmp_path, model)
    opt.save(tmp_path)
    opt.save(tmp_path, model)
    opt.load(tmp_path, model)
