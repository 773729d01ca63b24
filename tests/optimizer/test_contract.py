"""The contract of torch's class: names, arguments, results and exceptions that existing code uses.

Where onecopy differs on purpose (mixed dtypes, named parameters, full defaults, ...) the test says
so. Overlap with DDP's backward is not available in this version.
"""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract import (
    SMALL,
    Halving,
    Recording,
    averaged_gradients,
    make_net,
    options,
    parameters_of,
    train_both,
)
from harness import World, distributed
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

import onecopy
from onecopy import RanksDisagree, ZeroRedundancyOptimizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that torch.jit.script is deprecated, by importing torch's own
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    from torch.distributed.optim.functional_adam import _FunctionalAdam


# Gradients are averaged in these tests: a warning that they were not is a false alarm.
pytestmark = [pytest.mark.also_c10d, pytest.mark.filterwarnings("error:the gradient of")]


# ------------------------------------------------------------------ 1. class and constructor


def test_the_constructor_takes_torchs_arguments_in_torchs_order() -> None:
    ours = parameters_of(ZeroRedundancyOptimizer.__init__)
    theirs = parameters_of(TorchZero.__init__)
    extra = [p for p in ours if p[1] is inspect.Parameter.KEYWORD_ONLY]
    assert [p for p in ours if p not in extra] == theirs
    assert all(default is not inspect.Parameter.empty for _, _, default in extra)


@pytest.mark.parametrize(
    "method",
    [
        *("step", "zero_grad", "add_param_group", "consolidate_state_dict"),
        *("state_dict", "load_state_dict", "join_hook"),
    ],
)
def test_a_method_takes_torchs_arguments(method: str) -> None:
    ours = parameters_of(getattr(ZeroRedundancyOptimizer, method))
    assert ours == parameters_of(getattr(TorchZero, method))


def test_every_public_name_of_torchs_class_is_there() -> None:
    public = {name for name in dir(TorchZero) if not name.startswith("_")}
    assert public <= set(dir(ZeroRedundancyOptimizer)) | {"optim"}
    assert set(onecopy.__all__) <= set(dir(onecopy))
    theirs = inspect.signature(
        sys.modules[TorchZero.__module__]._broadcast_object  # a name that existing code imports
    )
    assert list(inspect.signature(onecopy._broadcast_object).parameters) == list(theirs.parameters)


def test_it_is_an_optimizer_and_a_joinable() -> None:
    from torch.distributed.algorithms.join import Joinable

    assert issubclass(ZeroRedundancyOptimizer, Optimizer)
    assert issubclass(ZeroRedundancyOptimizer, Joinable)


def bad_parameters() -> dict[str, tuple[Any, type[Exception]]]:
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(2))
    sparse = torch.eye(3).to_sparse()
    return {
        "a tensor": (p, TypeError),
        "a float": (3.5, TypeError),
        "None": (None, TypeError),
        "an empty list": ([], ValueError),
        "an empty generator": ((x for x in ()), ValueError),
        "tensors and dicts": ([p, {"params": [q]}], TypeError),
        "dicts and tensors": ([{"params": [q]}, p], TypeError),
        "an int": ([1], TypeError),
        "an int among tensors": ([p, 1], TypeError),
        "a str": ("abc", TypeError),
        "a bare dict": ({"params": [p]}, TypeError),
        "an int in a group": ([{"params": [p, 1]}], TypeError),
        "a set in a group": ([{"params": {p, q}}], TypeError),
        "a frozenset in a group": ([{"params": frozenset({p, q})}], TypeError),
        "a set": ({p, q}, TypeError),
        "a frozenset": (frozenset({p, q}), TypeError),
        "a group without params": ([{"lr": 0.1}], ValueError),
        "an empty group": ([{"params": []}], ValueError),
        "a sparse tensor": ([sparse], ValueError),
        "a sparse tensor later": ([p, sparse], ValueError),
        "a non-leaf": ([p * 2], ValueError),
        "the same in two groups": ([{"params": [p]}, {"params": [p, q]}], ValueError),
        "two device types": ([p, torch.ones(3, device="meta")], ValueError),
    }


@distributed(1, 2, 3)
def test_bad_parameters_raise_torchs_exceptions_and_leave_the_group_usable(world: World) -> None:
    for what, (params, expected) in bad_parameters().items():
        with pytest.raises(expected) as caught:
            ZeroRedundancyOptimizer(params, SGD, lr=0.1)
        assert not isinstance(caught.value, RanksDisagree), what
        assert str(caught.value), what
    with pytest.raises(TypeError) as caught:
        ZeroRedundancyOptimizer(3.5, SGD, lr=0.1)
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(ValueError, match="parameter group"):
        ZeroRedundancyOptimizer([{"params": []}], SGD, lr=0.1)

    net, twin = make_net(), make_net()
    ours = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1, **SMALL)
    plain = SGD(twin.parameters(), lr=0.1)
    train_both(ours, net.parameters(), plain, twin.parameters(), world, range(2))


# Where torch's class raises something else: by accident, or because it takes one dtype only.
RAISES_OTHERWISE = {
    "an empty group": IndexError,
    "an int in a group": ValueError,
    # It takes whatever order the set has on a rank.
    "a frozenset in a group": None,
    "a set": None,
    "a frozenset": None,
}


@distributed(1)
def test_torchs_class_raises_the_same_for_bad_parameters(world: World) -> None:
    """So that the table above stays the contract."""
    raised = {what: error_of(TorchZero, params) for what, (params, _) in bad_parameters().items()}
    expected = {what: error for what, (_, error) in bad_parameters().items()}
    assert raised == {**expected, **RAISES_OTHERWISE}


def error_of(cls: Callable[..., Any], params: Any) -> type[Exception] | None:
    try:
        cls(params, SGD, lr=0.1)
    except Exception as error:
        return type(error)
    return None


@distributed(1, 2)
def test_bad_classes_and_options_raise_what_torch_raises(world: World) -> None:
    def build(cls: Any = SGD, **options: Any) -> None:
        ZeroRedundancyOptimizer([Parameter(torch.ones(3))], cls, **options)

    with pytest.raises(ValueError, match="functional"):
        build(_FunctionalAdam, lr=0.1)
    with pytest.raises(TypeError, match="optimizer_class"):
        build("SGD", lr=0.1)
    with pytest.raises(TypeError, match="optimizer_class"):
        build(lambda params: SGD(params, lr=0.1))
    with pytest.raises(TypeError, match="no_such_option"):
        build(SGD, lr=0.1, no_such_option=3)
    with pytest.raises(ValueError, match="learning rate"):
        build(SGD, lr=-1.0)
    with pytest.raises(ValueError, match=r"LBFGS.*vector"):
        build(torch.optim.LBFGS)
    with pytest.raises(ValueError, match="partition"):
        build(SGD, partition="halves", lr=0.1)
    with pytest.raises(ValueError, match="bucket_mb"):
        build(SGD, bucket_mb=0, lr=0.1)
    with pytest.raises(ValueError, match="check_every"):
        build(SGD, check_every=0, lr=0.1)
    if world.size > 1:
        with pytest.raises(ValueError, match="differentiable"):
            build(SGD, differentiable=True, lr=0.1)


@distributed(1, 2)
def test_the_same_parameter_twice_in_a_group_warns_and_is_accepted(world: World) -> None:
    p, q = (Parameter(torch.arange(5.0)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate"):
        plain = SGD([q, q], lr=0.1)
    with pytest.warns(UserWarning, match="duplicate"):
        ours = ZeroRedundancyOptimizer([p, p], SGD, lr=0.1)
    p.grad, q.grad = torch.ones(5), torch.ones(5)
    ours.step()
    plain.step()
    assert torch.equal(p, q)


def test_without_a_process_group_the_constructor_says_how_to_get_one() -> None:
    assert not dist.is_initialized()  # this process is no worker
    params = [Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="init_process_group"):
        ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    with pytest.raises(TypeError, match="iterable of Tensors"):  # bad parameters are reported first
        ZeroRedundancyOptimizer(params[0], SGD, lr=0.1)
    with pytest.raises(ValueError):  # noqa: PT011  torch's message is torch's
        TorchZero(params, SGD, lr=0.1)


@distributed(2, 3)
def test_a_rank_outside_of_the_group_is_refused_and_the_members_train(world: World) -> None:
    group = dist.new_group([0])
    p = Parameter(torch.ones(3))
    if world.rank == 0:
        opt = ZeroRedundancyOptimizer([p], SGD, process_group=group, lr=1.0)
        p.grad = torch.ones(3)
        opt.step()
        assert p.tolist() == [0, 0, 0]
    else:
        with pytest.raises(ValueError, match="not a member"):
            ZeroRedundancyOptimizer([p], SGD, process_group=group, lr=1.0)


@distributed(1, 2)
@pytest.mark.parametrize("wrong", ["world", 3, [0, 1], torch.ones(1)], ids=str)
def test_a_wrong_process_group_is_a_type_error_and_an_attribute_error(
    world: World, wrong: Any
) -> None:
    for expected in (TypeError, AttributeError):
        with pytest.raises(expected, match="process_group"):
            ZeroRedundancyOptimizer([Parameter(torch.ones(3))], SGD, process_group=wrong, lr=1.0)


@distributed(1, 2, 3, 4)
def test_attributes_are_those_of_torchs_class(world: World) -> None:
    net = make_net()
    opt = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=0.1, **SMALL)
    assert isinstance(opt, Optimizer)
    assert opt.process_group is dist.group.WORLD
    assert (opt.world_size, opt.rank, opt.global_rank) == (world.size, world.rank, world.rank)
    assert opt.parameters_as_bucket_view is False
    assert opt.initialized is True
    assert isinstance(opt._all_params, list)
    assert [id(p) for p in opt._all_params] == [id(p) for p in net.parameters()]
    plain = AdamW(make_net().parameters(), lr=0.1)
    assert opt.defaults == plain.defaults  # torch's class: only {"lr": 0.1}
    assert options(opt.param_groups[0]) == options(plain.param_groups[0])
    assert options(opt.optim.param_groups[0]) == options(plain.param_groups[0])
    assert [id(p) for p in opt.param_groups[0]["params"]] == [id(p) for p in net.parameters()]
    assert isinstance(opt.optim, AdamW)
    assert isinstance(opt.state, Mapping)
    assert opt.state  # true even before the first step
    assert len(opt.state) == len(opt.optim.state) == 0
    averaged_gradients(net.parameters(), 0, world)
    opt.step()
    held = {id(p) for group in opt.optim.param_groups for p in group["params"]}
    assert held == {id(p) for p in opt.state} == {id(p) for p in opt.optim.state}
    for param in opt.state:
        assert opt.state[param] is opt.optim.state[param]
    opt._join_grad_info = opt.anything = "free assignment"
    assert opt.anything == opt._join_grad_info == "free assignment"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = opt.no_such_thing
    assert not hasattr(opt, "_no_such_thing")
    assert "ZeroRedundancyOptimizer" in repr(opt)


@distributed(1, 2, 3)
def test_all_arguments_may_be_given_by_position(world: World) -> None:
    p = Parameter(torch.ones(3))
    opt = ZeroRedundancyOptimizer([p], SGD, dist.group.WORLD, True, False, lr=0.5)
    assert opt.parameters_as_bucket_view is True
    p.grad = torch.ones(3)
    opt.step()
    assert p.tolist() == [0.5, 0.5, 0.5]


@distributed(2, 3)
def test_the_constructor_synchronises_no_parameter_and_the_first_step_all(world: World) -> None:
    for view in (False, True):
        p = Parameter(torch.full((10,), float(world.rank)))
        opt = ZeroRedundancyOptimizer([p], SGD, parameters_as_bucket_view=view, lr=1.0)
        assert torch.equal(p, torch.full((10,), float(world.rank)))
        opt.step()  # no gradients: owners' values go to everybody as they are
        everyone = [torch.empty(10) for _ in range(world.size)]
        dist.all_gather(everyone, p.detach())
        assert all(torch.equal(theirs, p) for theirs in everyone)
        assert set(p.tolist()) == {float(r) for r in range(world.size)}


@distributed(1, 2, 3, 4)
def test_frozen_leaves_and_plain_tensors_are_accepted(world: World) -> None:
    frozen = Parameter(torch.ones(4), requires_grad=False)
    plain, trained = torch.ones(7), Parameter(torch.ones(3))
    opt = ZeroRedundancyOptimizer([frozen, plain, trained], SGD, lr=1.0)
    plain.grad, trained.grad = torch.arange(7.0), torch.ones(3)
    opt.step()
    assert frozen.tolist() == [1, 1, 1, 1]
    assert torch.equal(plain, 1 - torch.arange(7.0))
    assert trained.tolist() == [0, 0, 0]


@distributed(1, 2, 3)
def test_named_parameters_and_mixed_dtypes_are_accepted_unlike_in_torchs_class(
    world: World,
) -> None:
    net, twin = make_net(), make_net()
    net[2].double()
    twin[2].double()
    ours = ZeroRedundancyOptimizer(net.named_parameters(), AdamW, lr=0.1, **SMALL)
    plain = AdamW(twin.named_parameters(), lr=0.1)
    assert ours.param_groups[0]["param_names"] == plain.param_groups[0]["param_names"]
    train_both(ours, net.parameters(), plain, twin.parameters(), world, range(3))
    with pytest.raises(ValueError, match="name"):  # a mix
        ZeroRedundancyOptimizer([("a", Parameter(torch.ones(1))), Parameter(torch.ones(1))], SGD)
    with pytest.raises(ValueError):  # noqa: PT011  torch's message is torch's
        TorchZero(net.parameters(), AdamW, lr=0.1)
    with pytest.raises(TypeError):
        TorchZero(net.named_parameters(), AdamW, lr=0.1)


@distributed(1, 2)
def test_the_callers_groups_are_not_changed(world: World) -> None:
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(4))
    first, second = {"params": [p], "lr": 0.2}, {"params": (q,), "weight_decay": 0.1}
    given = [first, second]
    opt = ZeroRedundancyOptimizer(given, SGD, lr=0.1)
    later = {"params": [Parameter(torch.ones(5))], "momentum": 0.5}
    opt.add_param_group(later)
    for group in opt.param_groups:
        group["lr"] = 7.0
    opt.step()
    assert given == [first, second]
    assert first == {"params": [p], "lr": 0.2}
    assert set(second) == {"params", "weight_decay"}
    assert isinstance(second["params"], tuple)
    assert set(later) == {"params", "momentum"}


# ------------------------------------------------------------------ 2. step


@distributed(1, 2, 3, 4)
def test_step_runs_the_closure_once_everywhere_and_returns_this_ranks_loss(world: World) -> None:
    net, twin = make_net(), make_net()
    calls = 0
    ours = ZeroRedundancyOptimizer(net.parameters(), Adam, lr=0.1, **SMALL)
    plain = Adam(twin.parameters(), lr=0.1)
    for seed in range(3):

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            assert torch.is_grad_enabled()
            averaged_gradients(net.parameters(), seed, world)
            return torch.tensor(100.0 * seed + world.rank)

        loss = ours.step(closure)
        assert calls == seed + 1
        assert loss == 100.0 * seed + world.rank
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            b.grad = a.grad.clone()
        plain.step()
        assert all(map(torch.equal, net.parameters(), twin.parameters()))
    assert ours.step() is None
    assert ours.step(closure=None) is None


@distributed(2, 4)
def test_the_closure_runs_on_ranks_that_own_nothing(world: World) -> None:
    p = Parameter(torch.ones(1))
    opt = ZeroRedundancyOptimizer([p], SGD, lr=0.5)

    def closure() -> float:
        p.grad = torch.ones(1)
        return float(world.rank)

    assert opt.step(closure) == world.rank
    assert p.tolist() == [0.5]
    owned = torch.tensor(sum(q.numel() for q in opt.optim.param_groups[0]["params"]))
    dist.all_reduce(owned)
    assert owned == 1


@distributed(1, 2)
def test_keywords_and_the_result_of_step_are_the_local_optimizers(world: World) -> None:
    p = Parameter(torch.ones(6))
    p.grad = torch.ones(6)
    opt = ZeroRedundancyOptimizer([p], Halving, partition="elementwise", lr=0.5)
    assert opt.step() == "stepped"  # its step takes no closure, and is given none
    assert p.tolist() == [0.5] * 6
    assert opt.step(factor=2.0) == "stepped"
    assert p.tolist() == [-0.5] * 6
    with pytest.raises(TypeError, match="closure"):
        opt.step(lambda: None)

    opt = ZeroRedundancyOptimizer([p], Recording, partition="elementwise", lr=0.5)
    assert opt.step(0, kwarg=3) == ("result", 0)  # anything but None counts as a closure
    assert opt.optim.given == (0, {"kwarg": 3})
    opt.step(kwarg=4)
    assert opt.optim.given == (None, {"kwarg": 4})


@distributed(1, 2)
def test_step_hooks_fire_once_and_the_profiler_sees_the_step(world: World) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    p = Parameter(torch.ones(6))
    p.grad = torch.ones(6)
    opt = ZeroRedundancyOptimizer([p], SGD, lr=0.5)
    fired: list[str] = []
    opt.register_step_pre_hook(lambda *_: fired.append("pre"))
    opt.register_step_post_hook(lambda *_: fired.append("post"))
    handle = register_optimizer_step_post_hook(lambda *_: fired.append("global"))
    try:
        with torch.profiler.profile() as profile:
            opt.step()
    finally:
        handle.remove()
    assert sorted(fired) == ["global", "post", "pre"]
    assert fired[0] == "pre"
    names = {event.name for event in profile.events()}
    assert "Optimizer.step#ZeroRedundancyOptimizer.step" in names


@distributed(1, 2, 3)
def test_zero_grad_covers_all_parameters_and_none_is_skipped(world: World) -> None:
    net, twin = make_net(), make_net()
    ours = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1, momentum=0.9, **SMALL)
    plain = SGD(twin.parameters(), lr=0.1, momentum=0.9)
    mine, theirs = list(net.parameters()), list(twin.parameters())
    train_both(ours, mine, plain, theirs, world, [0])
    ours.zero_grad(set_to_none=False)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in mine)
    ours.zero_grad()
    assert all(p.grad is None for p in mine)
    before = [p.detach().clone() for p in mine]
    ours.step()
    assert all(map(torch.equal, mine, before))
    plain.zero_grad()
    mine[2].grad, theirs[2].grad = torch.ones_like(mine[2]), torch.ones_like(mine[2])
    ours.step()
    plain.step()
    assert all(map(torch.equal, mine, theirs))
    assert not torch.equal(mine[2], before[2])


# ------------------------------------------------------------------ 13. _broadcast_object


class Bomb:
    """Leaves a mark wherever it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.mark,))


@distributed(1, 2, 3)
def test_broadcast_object_carries_tensors_and_plain_containers(world: World) -> None:
    for source in range(world.size):
        mine = {"t": torch.arange(5.0) + world.rank, "l": [world.rank, "x", None], 3: (1, 2.5)}
        device = torch.device("cpu")
        got = onecopy._broadcast_object(
            mine, src_rank=source, group=dist.group.WORLD, device=device
        )
        assert torch.equal(got["t"], torch.arange(5.0) + source)
        assert got["l"] == [source, "x", None]
        assert got[3] == (1, 2.5)
    assert onecopy._broadcast_object(world.rank, 0) == 0


@distributed(2, 3)
def test_broadcast_object_never_runs_what_it_receives(world: World, tmp_path: Path) -> None:
    mark = tmp_path / f"rank {world.rank}"
    for harmful in (Bomb(str(tmp_path / "mark")), {"deep": [Bomb(str(tmp_path / "mark"))]}):
        if world.rank == 0:
            onecopy._broadcast_object(harmful, src_rank=0)
        else:
            with pytest.raises(pickle.UnpicklingError):
                onecopy._broadcast_object(None, src_rank=0)
        dist.barrier()
        assert list(tmp_path.iterdir()) == []
    assert not mark.exists()
    assert onecopy._broadcast_object(world.rank, 1) == 1  # and the group is still good


# ------------------------------------------------------------------ the whole


SCRIPT = """
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
ddp = DDP(net)
opt = ZeroRedundancyOptimizer(
    [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters()), "lr": 0.003}],
    optimizer_class=torch.optim.Adam,
    parameters_as_bucket_view=True,
    lr=0.01,
)
scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.5)
extra = torch.nn.Parameter(torch.zeros(1))
saved = None
for epoch in range(12):
    torch.manual_seed(100 * epoch + rank)
    x = torch.randn(16, 8)
    opt.zero_grad()
    loss = (ddp(x) + extra - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if extra.grad is not None:
        dist.all_reduce(extra.grad)
    opt.step()
    scheduler.step()
    if epoch == 3:
        opt.add_param_group({"params": [extra], "lr": 0.1})
    if epoch == 7:
        opt.consolidate_state_dict(to=1)
        box = [opt.state_dict() if rank == 1 else None]
        dist.broadcast_object_list(box, src=1)
        opt.load_state_dict(box[0])
    lr = opt.param_groups[0]["lr"]
    print(f"LOSS {rank} {epoch} {loss.item()!r} {extra.item()!r} {lr!r}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def run_under_torchrun(script: Path) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error:the gradient of"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("LOSS"))


def test_a_script_for_torchs_class_runs_with_only_the_import_line_changed(tmp_path: Path) -> None:
    line = "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
    assert SCRIPT.count(line) == 1
    theirs, ours = tmp_path / "theirs.py", tmp_path / "ours.py"
    theirs.write_text(SCRIPT)
    ours.write_text(SCRIPT.replace(line, "from onecopy import ZeroRedundancyOptimizer\n"))
    printed = run_under_torchrun(ours)
    assert len(printed) == 2 * 12
    assert printed == run_under_torchrun(theirs)
