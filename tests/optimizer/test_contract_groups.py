"""The contract with torch's class: groups, freezing, options, process groups, memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract import SMALL, Halving, Refusing, averaged_gradients, make_net, options, train_both
from harness import World, distributed
from inside import plan_of
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW

import onecopy
from onecopy import ZeroRedundancyOptimizer

pytestmark = pytest.mark.also_c10d


# ------------------------------------------------------------------ 3. partition


def elements(opt: ZeroRedundancyOptimizer) -> list[int]:
    return [sum(p.numel() for p in group["params"]) for group in opt.optim.param_groups]


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("plain", [False, True], ids=["parameters", "plain tensors"])
def test_element_counts_are_balanced_over_groups(world: World, plain: bool) -> None:
    def form(*shape: int) -> torch.Tensor:
        return torch.rand(shape) if plain else Parameter(torch.rand(shape))

    sizes = [9, 7, 5, 3]
    opt = ZeroRedundancyOptimizer([form(n, 1) for n in sizes * world.size], SGD, lr=0.1)
    assert elements(opt) == [24]

    params = [form(n, 1) for n in sizes * world.size][:-1]
    opt = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    assert len(opt.param_groups) == len(opt.optim.param_groups) == 1
    opt.add_param_group({"params": [form(3, 1)]})
    assert len(opt.param_groups) == len(opt.optim.param_groups) == 2
    assert sum(elements(opt)) == 24


@distributed(1)
def test_on_one_rank_the_state_is_keyed_by_the_original_parameters(world: World) -> None:
    net = make_net()
    opt = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1, momentum=0.9, **SMALL)
    inner = opt.optim.param_groups[0]["params"]
    assert {id(p) for p in inner} == {id(p) for p in net.parameters()}
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    for param in net.parameters():
        assert torch.equal(opt.optim.state[param]["momentum_buffer"], param.grad)
        assert torch.equal(opt.state[param]["momentum_buffer"], param.grad)


# ------------------------------------------------------------------ 4. add_param_group


@distributed(1, 2, 3, 4)
def test_add_param_group_keeps_owners_and_trains_on(world: World) -> None:
    net, twin = make_net(), make_net()
    first, second = list(net[0].parameters()), list(net[2].parameters())
    twin_first, twin_second = list(twin[0].parameters()), list(twin[2].parameters())
    ours = ZeroRedundancyOptimizer(first, SGD, lr=0.1, momentum=0.9, **SMALL)
    plain = SGD(twin_first, lr=0.1, momentum=0.9)
    train_both(ours, first, plain, twin_first, world, range(2))
    ours.consolidate_state_dict()
    before = [id(p) for p in ours.optim.param_groups[0]["params"]]
    for opt, params in ((ours, second), (plain, twin_second)):
        opt.add_param_group({"params": params, "lr": 0.01})
    assert [id(p) for p in ours.optim.param_groups[0]["params"]] == before
    assert options(ours.param_groups[1]) == options(plain.param_groups[1])
    assert [id(p) for p in ours._all_params] == [id(p) for p in (*first, *second)]
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        ours.state_dict()
    train_both(ours, first + second, plain, twin_first + twin_second, world, range(2, 5))


@distributed(1, 2)
def test_add_param_group_keeps_what_a_scheduler_has_set(world: World) -> None:
    p, q = Parameter(torch.ones(5)), Parameter(torch.ones(6))
    opt = ZeroRedundancyOptimizer([p], SGD, lr=1.0)
    opt.param_groups[0].update(lr=0.5, mine="kept")
    opt.add_param_group({"params": [q], "lr": 0.25})
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.25]
    assert opt.param_groups[0]["mine"] == "kept"
    p.grad, q.grad = torch.ones(5), torch.ones(6)
    opt.step()
    assert p.tolist() == [0.5] * 5
    assert q.tolist() == [0.75] * 6


@distributed(1, 2, 3)
def test_a_refused_group_changes_nothing(world: World) -> None:
    net, twin = make_net(), make_net()
    ours = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=0.1, **SMALL)
    plain = AdamW(twin.parameters(), lr=0.1)
    train_both(ours, net.parameters(), plain, twin.parameters(), world, range(2))
    ours.consolidate_state_dict(to=0)
    present, new = next(net.parameters()), Parameter(torch.ones(4))
    bad: list[tuple[Any, type[Exception]]] = [
        ([new], TypeError),
        (new, TypeError),
        (None, TypeError),
        ({"params": [present]}, ValueError),
        ({"params": [new, present]}, ValueError),
        ({"params": [new], "optimizer_class": torch.optim.LBFGS}, ValueError),
        ({"params": [new], "optimizer_class": "SGD"}, TypeError),
        ({"params": [new], "optimizer_class": Refusing, "partition": "whole"}, ValueError),
        ({"params": [new], "partition": "halves"}, ValueError),
        ({"params": [new, 1]}, TypeError),
        ({"params": {new}}, TypeError),
        ({"params": [new * 2]}, ValueError),
        ({"params": [torch.eye(2).to_sparse()]}, ValueError),
        ({"lr": 0.1}, ValueError),
    ]
    plan, groups = plan_of(ours), [dict(group) for group in ours.param_groups]
    everything = [id(p) for p in ours._all_params]
    inner = [[id(p) for p in group["params"]] for group in ours.optim.param_groups]
    saved = ours.state_dict()["state"] if world.rank == 0 else None
    for group, expected in bad:
        with pytest.raises(expected) as caught:
            ours.add_param_group(group)
        builtin = next(cls for cls in type(caught.value).__mro__ if cls.__module__ == "builtins")
        assert builtin is expected, group
        assert plan_of(ours) == plan
        assert [id(p) for p in ours._all_params] == everything
        assert len(ours.param_groups) == len(groups) == 1
        assert options(ours.param_groups[0]) == options(groups[0])
        assert [[id(p) for p in g["params"]] for g in ours.optim.param_groups] == inner
    if world.rank == 0:  # what was consolidated is still good
        again = ours.state_dict()["state"]
        assert all(torch.equal(again[i]["exp_avg"], saved[i]["exp_avg"]) for i in saved)
    train_both(ours, net.parameters(), plain, twin.parameters(), world, range(2, 4))
    ours.add_param_group({"params": [new]})
    plain.add_param_group({"params": [twin_new := Parameter(torch.ones(4))]})
    mine, theirs = [*net.parameters(), new], [*twin.parameters(), twin_new]
    train_both(ours, mine, plain, theirs, world, range(4, 6))


# ------------------------------------------------------------------ 5. freezing and unfreezing


@distributed(1, 2, 3)
@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
def test_parameters_may_be_frozen_and_unfrozen_at_any_time(world: World, view: bool) -> None:
    net, twin = make_net(), make_net()
    mine, theirs = list(net.parameters()), list(twin.parameters())
    mine[1].requires_grad_(False)  # frozen from the start
    extra = {"parameters_as_bucket_view": view, **SMALL}
    ours = ZeroRedundancyOptimizer(mine, Adam, lr=0.1, **extra)
    plain = Adam(theirs, lr=0.1)
    masks = ["1011", "1111", "0111", "0100", "1111", "1011"]
    for seed, mask in enumerate(masks):
        averaged_gradients(mine, seed, world)
        for a, b, bit in zip(mine, theirs, mask, strict=True):
            a.requires_grad_(bit == "1")
            if bit == "0":
                a.grad = None
            b.grad = None if a.grad is None else a.grad.clone()
        ours.step()
        plain.step()
        assert all(map(torch.equal, mine, theirs)), mask
    assert [id(p) for p in ours._all_params] == [id(p) for p in mine]


# ------------------------------------------------------------------ 6. option sync


@distributed(1, 2, 3)
def test_options_travel_in_and_out(world: World) -> None:
    p, q = Parameter(torch.ones(5)), Parameter(torch.ones(6))
    opt = ZeroRedundancyOptimizer(
        [{"params": [p]}, {"params": [q], "lr": 0.25}], Halving, partition="elementwise", lr=0.5
    )
    p.grad, q.grad = torch.ones(5), torch.ones(6)
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.25]
    opt.step()
    assert [group["steps_seen"] for group in opt.param_groups] == [1, 1]  # invented inside
    opt.param_groups[0]["steps_seen"] = 10
    opt.param_groups[0]["lr"] = 0.125
    opt.param_groups[1]["mine"] = marker = object()
    opt.step()
    assert [group["steps_seen"] for group in opt.param_groups] == [11, 2]
    assert p.tolist() == [0.375] * 5
    assert q.tolist() == [0.5] * 6
    assert opt.optim.param_groups[1]["mine"] is marker  # by reference
    del opt.param_groups[0]["lr"]
    opt.step()
    assert opt.param_groups[0]["lr"] == 0.125  # deleted keys come back
    assert p.tolist() == [0.25] * 5
    torch.optim.lr_scheduler.StepLR(opt, 1)
    opt.step()
    assert opt.optim.param_groups[0]["initial_lr"] == 0.125


@distributed(1, 2)
def test_groups_changed_by_hand_are_refused_and_nothing_is_updated(world: World) -> None:
    """Torch's class ignores a parameter that was appended, and asserts on an appended group."""
    p, appended = Parameter(torch.ones(5)), Parameter(torch.ones(5))
    opt = ZeroRedundancyOptimizer([p], SGD, lr=0.5)
    p.grad, appended.grad = torch.ones(5), torch.ones(5)
    opt.param_groups[0]["params"].append(appended)
    with pytest.raises(AssertionError, match="add_param_group"):
        opt.step()
    opt.param_groups[0]["params"].pop()
    opt.param_groups.append({"params": [appended], "lr": 0.1})
    with pytest.raises(AssertionError, match="add_param_group"):
        opt.step()
    opt.param_groups.pop()
    assert p.tolist() == appended.tolist() == [1.0] * 5
    opt.step()
    assert p.tolist() == [0.5] * 5


# ------------------------------------------------------------------ 8. process groups


@distributed(3, 4)
def test_a_subgroup_has_ranks_of_its_own(world: World) -> None:
    members = [world.size - 1 - i for i in (2, 0)]  # group rank differs from global rank
    group = dist.new_group(members)
    if world.rank not in members:
        return
    net, twin = make_net(), make_net()
    opt = ZeroRedundancyOptimizer(net.parameters(), AdamW, process_group=group, lr=0.1, **SMALL)
    assert opt.process_group is group
    assert opt.join_process_group is group
    assert (opt.world_size, opt.rank) == (2, members.index(world.rank))
    assert opt.global_rank == world.rank
    plain = AdamW(twin.parameters(), lr=0.1)
    for seed in range(3):
        source = torch.Generator().manual_seed(10 * seed + world.rank)
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=source) / 2
            dist.all_reduce(a.grad, group=group)
            b.grad = a.grad.clone()
        opt.step()
        plain.step()
    assert all(map(torch.equal, net.parameters(), twin.parameters()))
    opt.consolidate_state_dict(to=1)  # a rank of the group
    if opt.rank == 1:
        saved, expected = opt.state_dict(), plain.state_dict()
        assert saved["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            assert torch.equal(saved["state"][number]["exp_avg"], state["exp_avg"])
    else:
        with pytest.raises(RuntimeError, match="rank 0"):
            opt.state_dict()
    for to in (2, -1, "0", None):
        with pytest.raises(ValueError, match="0 to 1"):
            opt.consolidate_state_dict(to=to)
    everywhere = onecopy._broadcast_object(
        {"from": world.rank}, src_rank=members[1], group=group, device=torch.device("cpu")
    )
    assert everywhere == {"from": members[1]}


# ------------------------------------------------------------------ 9. bucket view


@distributed(1, 2, 3)
def test_a_bucket_view_keeps_objects_values_and_strides(world: World) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(5, 6)).to(memory_format=torch.channels_last)
    net[1].weight.data = net[1].weight.detach().t().contiguous().t()
    frozen = Parameter(torch.rand(4), requires_grad=False)
    params = [*net.parameters(), frozen]
    objects, strides = [id(p) for p in params], [p.stride() for p in params]
    values = [p.detach().clone() for p in params]
    opt = ZeroRedundancyOptimizer(params, SGD, parameters_as_bucket_view=True, lr=0.5)
    assert [id(p) for p in net.parameters()] == objects[:-1]
    assert [id(p) for p in opt._all_params] == objects
    assert [p.stride() for p in params] == strides
    assert all(map(torch.equal, params, values))
    storages = {p.untyped_storage().data_ptr() for p in net.parameters()}
    assert len(storages) == 1
    averaged_gradients(params, 0, world)
    expected = [(v - 0.5 * p.grad) for v, p in zip(values[:-1], params, strict=False)]
    frozen.grad = None
    opt.step()
    assert all(torch.equal(p, e) for p, e in zip(params, expected, strict=False))
    assert torch.equal(frozen, values[-1])
    assert [p.stride() for p in params] == strides
    opt.add_param_group({"params": [late := Parameter(torch.ones(3))]})
    assert late.tolist() == [1, 1, 1]
    assert [p.stride() for p in params] == strides
    assert all(torch.equal(p, e) for p, e in zip(params, expected, strict=False))


# ------------------------------------------------------------------ 11. Join


@distributed(1, 2)
def test_the_joinable_protocol_is_torchs(world: World) -> None:
    from torch.distributed.algorithms.join import JoinHook, _JoinConfig

    opt = ZeroRedundancyOptimizer([Parameter(torch.ones(3))], SGD, lr=0.5)
    assert isinstance(opt.join_hook(), JoinHook)
    assert isinstance(opt.join_hook(anything=1, divide_by_initial_world_size=False), JoinHook)
    assert opt.join_device == torch.device("cpu")
    assert opt.join_process_group is dist.group.WORLD
    assert isinstance(opt._join_config, _JoinConfig)
    assert opt._join_config.enable is False


# ------------------------------------------------------------------ 12. empty shards, logging


@distributed(2, 3, 4)
@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
def test_more_ranks_than_elements_work(world: World, view: bool) -> None:
    p, q = Parameter(torch.ones(1)), Parameter(torch.ones(1))
    opt = ZeroRedundancyOptimizer([p], Adam, parameters_as_bucket_view=view, lr=0.1)
    plain = Adam([q], lr=0.1)
    train_both(opt, [p], plain, [q], world, range(3))
    opt.consolidate_state_dict(to=world.size - 1)
    if world.rank == world.size - 1:
        saved = opt.state_dict()
        assert torch.equal(saved["state"][0]["exp_avg"], plain.state_dict()["state"][0]["exp_avg"])
    opt.load_state_dict(plain.state_dict())
    train_both(opt, [p], plain, [q], world, range(3, 5))


@distributed(1)
def test_messages_go_to_the_logger_of_the_package(world: World) -> None:
    class Unwilling(SGD):
        """Cannot be tried out on toy tensors."""

        def step(self, closure: Any = None) -> Any:  # noqa: ARG002
            raise OSError("not on toys")

    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    logging.getLogger("onecopy").addHandler(handler)
    try:
        ZeroRedundancyOptimizer([Parameter(torch.ones(3))], Unwilling, lr=0.1)
    finally:
        logging.getLogger("onecopy").removeHandler(handler)
    assert [record.name for record in seen] == ["onecopy"]
