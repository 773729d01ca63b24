"""Loading a full state dict: ours, the plain class's, torch's, and bad ones."""

from __future__ import annotations

import collections
import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed, run_on_ranks
from inside import plan_of, traffic_of
from models import assert_equal_params, give_equal_gradients, params_of_shapes
from states import (
    ALL_SIZES,
    ELEMENTWISE,
    SMALL_BUCKETS,
    WHOLE,
    LiveBytes,
    Twins,
    adam,
    assert_same,
    assorted,
    class_named,
    consolidated_everywhere,
    matrices,
    one_group,
    own_tensors,
    parameter,
    set_gradients,
    tensors_in,
    two_groups,
)
from torch.optim import SGD, Adagrad, Adam

from onecopy import ZeroRedundancyOptimizer

# ------------------------------------------------------------------------------- loading


def assert_untouched_by(twins: Twins, full: dict[str, Any]) -> None:
    """The caller's dict stays as it was, and shares no memory with the optimizer."""
    snapshot = copy.deepcopy(full)
    twins.opt.load_state_dict(full)
    twins.plain.load_state_dict(copy.deepcopy(full))
    assert_same(full, snapshot)
    live = {t.untyped_storage().data_ptr() for t in own_tensors(twins.opt) if t.numel()}
    given = {t.untyped_storage().data_ptr() for t in tensors_in(full) if t.numel()}
    assert live.isdisjoint(given)
    twins.step(2)
    assert_same(full, snapshot)
    for tensor in tensors_in(full):
        tensor.fill_(-3)
    full["param_groups"][0]["lr"] = 1e9
    full["param_groups"][0]["betas"] = None
    twins.step(1)


@distributed(*ALL_SIZES)
def test_w16_loading_neither_changes_nor_keeps_the_callers_dict(world: World) -> None:
    twins = Twins(assorted, two_groups, torch.optim.Adam, lr=0.01, amsgrad=True).step(2)
    full = twins.consolidated()
    again = copy.deepcopy(full)
    twins.step()
    assert_untouched_by(twins, full)
    # The same dict a second time, and still good for the plain class.
    twins.opt.load_state_dict(again)
    twins.opt.load_state_dict(again)
    twins.plain.load_state_dict(again)
    twins.step(2)


@distributed(*ALL_SIZES)
def test_a_learning_rate_in_a_tensor_is_copied_too(world: World) -> None:
    def groups(params: list[torch.Tensor]) -> list[dict[str, Any]]:
        return [{"params": params, "lr": torch.tensor(0.01)}]

    twins = Twins(matrices, groups, torch.optim.Adam, foreach=False).step(2)
    full = copy.deepcopy(twins.consolidated())
    assert_same(full, twins.plain.state_dict())
    twins.opt.load_state_dict(full)
    twins.plain.load_state_dict(copy.deepcopy(full))
    assert twins.opt.param_groups[0]["lr"] is not full["param_groups"][0]["lr"]
    full["param_groups"][0]["lr"].fill_(1e9)
    twins.step(2)


@distributed(*ALL_SIZES)
def test_a_dict_taken_from_this_optimizer_loads_into_it(world: World) -> None:
    """On the target, `state_dict()` hands out tensors that the optimizer itself may still hold."""
    twins = adam(world).step(2)
    for _ in range(2):
        full = twins.consolidated()
        twins.opt.load_state_dict(full)
        twins.plain.load_state_dict(copy.deepcopy(full))
        twins.step()


class Refusals:
    """Dicts that do not fit, and what must be raised."""

    @staticmethod
    def one_group_less(full: dict[str, Any]) -> Any:
        return {**full, "param_groups": full["param_groups"][:1]}

    @staticmethod
    def one_group_more(full: dict[str, Any]) -> Any:
        return {**full, "param_groups": [*full["param_groups"], full["param_groups"][0]]}

    @staticmethod
    def a_parameter_less(full: dict[str, Any]) -> Any:
        first, second = full["param_groups"]
        return {**full, "param_groups": [first, {**second, "params": second["params"][:-1]}]}

    @staticmethod
    def an_unknown_number(full: dict[str, Any]) -> Any:
        return {**full, "state": {**full["state"], 99: full["state"][0]}}

    @staticmethod
    def no_state(full: dict[str, Any]) -> Any:
        return {"param_groups": full["param_groups"]}

    @staticmethod
    def no_groups(full: dict[str, Any]) -> Any:
        return {"state": full["state"]}

    @staticmethod
    def a_group_without_params(full: dict[str, Any]) -> Any:
        first, second = full["param_groups"]
        return {**full, "param_groups": [first, {"lr": second["lr"]}]}

    @staticmethod
    def not_a_mapping(full: dict[str, Any]) -> Any:
        return [full]

    @staticmethod
    def nothing(_full: dict[str, Any]) -> Any:
        return None

    @staticmethod
    def state_that_is_no_mapping(full: dict[str, Any]) -> Any:
        return {**full, "state": 3}

    @staticmethod
    def an_entry_that_is_none(full: dict[str, Any]) -> Any:
        return {**full, "state": {**full["state"], 4: None}}  # as torch's own class leaves it


REFUSALS = {
    "one_group_less": ValueError,
    "one_group_more": ValueError,
    "a_parameter_less": ValueError,
    "an_unknown_number": IndexError,
    "no_state": KeyError,
    "no_groups": KeyError,
    "a_group_without_params": KeyError,
    "not_a_mapping": (TypeError, ValueError),
    "nothing": TypeError,
    "state_that_is_no_mapping": TypeError,
    "an_entry_that_is_none": TypeError,
}


def expect_refusal(twins: Twins, bad: Any, error: Any) -> None:
    """`bad` is refused on every rank, and afterwards all is as if it had never been given."""
    before = copy.deepcopy(twins.plain.state_dict())
    options = copy.deepcopy([{**g, "params": None} for g in twins.opt.param_groups])
    held = [(id(t), t.clone()) for t in own_tensors(twins.opt)]
    with pytest.raises(error):
        twins.opt.load_state_dict(bad)
    assert [{**g, "params": None} for g in twins.opt.param_groups] == options
    now = own_tensors(twins.opt)
    assert [id(t) for t in now] == [number for number, _ in held]
    assert all(torch.equal(t, kept) for t, (_, kept) in zip(now, held, strict=True))
    assert_same(twins.consolidated(), before)


@distributed(*ALL_SIZES)
@pytest.mark.parametrize("name", REFUSALS)
def test_w16_a_refused_load_changes_nothing(world: World, name: str) -> None:
    twins = adam(world).step(2)
    full = copy.deepcopy(twins.consolidated())
    for tensor in tensors_in(full):
        tensor.fill_(50.0)
    full["param_groups"][0]["lr"] = 50.0
    bad = getattr(Refusals, name)(full)
    expect_refusal(twins, bad, REFUSALS[name])
    twins.step(2)


@distributed(2, 3, 4)
@pytest.mark.parametrize("which", [0, 2, 4])
def test_state_of_another_shape_is_refused_on_every_rank(world: World, which: int) -> None:
    """Also on ranks that own nothing of that parameter: else the ranks would part."""
    twins = adam(world).step(2)
    full = copy.deepcopy(twins.consolidated())
    full["state"][which]["exp_avg"] = torch.full((3, 4), 50.0)
    expect_refusal(twins, full, ValueError)
    twins.step(2)


@distributed(2, 3, 4)
def test_a_dict_of_another_class_is_refused_and_changes_nothing(world: World) -> None:
    factored = torch.optim.Adafactor(params := matrices(), lr=0.01)
    set_gradients([params], 1)
    factored.step()
    twins = Twins(matrices, one_group, torch.optim.SGD, lr=0.1, momentum=0.9).step(2)
    expect_refusal(twins, factored.state_dict(), ValueError)
    twins.step(2)


class Picky(torch.optim.SGD):
    """Refuses in its own `load_state_dict`, as third-party classes may."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if any(group["lr"] > 1 for group in self.param_groups):
            raise ArithmeticError("a learning rate above one")


@distributed(*ALL_SIZES)
def test_a_load_that_the_inner_class_refuses_changes_nothing(world: World) -> None:
    params, plain_params = matrices(), matrices()
    groups = [{"params": p} for p in (params[:2], params[2:])]
    groups[1].update(optimizer_class=Picky, lr=0.1, momentum=0.5, partition="elementwise")
    opt = ZeroRedundancyOptimizer(
        groups, torch.optim.SGD, lr=0.1, momentum=0.9, bucket_mb=SMALL_BUCKETS
    )
    plain = torch.optim.SGD(
        [{"params": plain_params[:2]}, {"params": plain_params[2:], "momentum": 0.5}],
        lr=0.1,
        momentum=0.9,
    )
    for step in range(4):
        set_gradients([params, plain_params], step)
        opt.step()
        plain.step()
        full = copy.deepcopy(consolidated_everywhere(opt))
        assert_same(full["state"], plain.state_dict()["state"])
        for group in full["param_groups"]:
            group["lr"] = 5.0
        for tensor in tensors_in(full):
            tensor.fill_(50.0)
        with pytest.raises(ArithmeticError):
            opt.load_state_dict(full)
        assert [group["lr"] for group in opt.param_groups] == [0.1, 0.1]
    for ours, theirs in zip(params, plain_params, strict=True):
        assert torch.equal(ours, theirs)


@distributed(*ALL_SIZES)
def test_w17_loading_an_empty_state_clears_momentum(world: World) -> None:
    twins = Twins(matrices, two_groups, torch.optim.SGD, lr=0.1, momentum=0.9).step(3)
    empty = {"state": {}, "param_groups": copy.deepcopy(twins.plain.state_dict()["param_groups"])}
    twins.opt.load_state_dict(empty)
    twins.plain.load_state_dict(copy.deepcopy(empty))
    assert len(twins.opt.state) == 0
    assert twins.consolidated()["state"] == {}
    twins.step(2).assert_equal_dicts()


@distributed(*ALL_SIZES)
def test_loading_a_part_of_the_state_leaves_nothing_old(world: World) -> None:
    twins = Twins(matrices, two_groups, torch.optim.SGD, lr=0.1, momentum=0.9).step(3)
    part = copy.deepcopy(twins.consolidated())
    for number in (0, 3):
        del part["state"][number]
    twins.step()
    twins.opt.load_state_dict(part)
    twins.plain.load_state_dict(copy.deepcopy(part))
    assert list(twins.consolidated()["state"]) == [1, 2, 4]
    twins.step(2)


@distributed(*ALL_SIZES)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize("fused", [False, True])
def test_w17_loaded_state_is_cast_as_the_plain_class_casts_it(
    world: World, source: torch.dtype, target: torch.dtype, fused: bool
) -> None:
    def made_of(dtype: torch.dtype) -> Callable[[], list[torch.Tensor]]:
        return lambda: [parameter((31, 9), 1, dtype), parameter((77,), 2, dtype)]

    full = Twins(made_of(source), one_group, torch.optim.Adam, lr=0.01).step(2).consolidated()
    for state in full["state"].values():
        state["step"] = state["step"].double()
    full["param_groups"][0]["fused"] = fused
    twins = Twins(made_of(target), one_group, torch.optim.Adam, lr=0.01, fused=fused).step(1)
    twins.opt.load_state_dict(full)
    twins.plain.load_state_dict(copy.deepcopy(full))
    for state in twins.opt.state.values():
        assert state["exp_avg"].dtype == target
        assert state["step"].dtype == (torch.float32 if fused else torch.float64)
    assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
    if not fused or twins.opt.state:
        twins.step(2)


@distributed(*ALL_SIZES)
def test_w31_scalar_state_follows_the_rules_of_the_class(world: World) -> None:
    """Not one rule for everything of dimension zero: a `step` is kept, anything else is cast."""
    twins = Twins(lambda: [parameter((31, 9), 1)], one_group, torch.optim.NAdam, lr=0.01).step(2)
    full = twins.consolidated()
    for state in full["state"].values():
        state["step"] = state["step"].double()
        state["mu_product"] = state["mu_product"].double()
    for flag, step_dtype in (("fused", torch.float32), ("capturable", torch.float32), (None, None)):
        given = copy.deepcopy(full)
        if flag:
            given["param_groups"][0][flag] = True
        twins.opt.load_state_dict(given)
        twins.plain.load_state_dict(copy.deepcopy(given))
        for state in twins.opt.state.values():
            assert state["step"].dtype == (step_dtype or torch.float64)
            assert state["mu_product"].dtype == torch.float32
            assert state["step"].dim() == state["mu_product"].dim() == 0
        assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
    twins.step(2)


@distributed(*ALL_SIZES)
def test_w30_after_loading_there_is_one_copy_of_the_shard(world: World) -> None:
    twins = Twins(assorted, two_groups, torch.optim.Adam, lr=0.01).step(2)
    full = twins.consolidated()
    for state in full["state"].values():  # a copy has to be made: a stand-in for cpu to gpu
        state.update({k: v.double() for k, v in state.items() if k != "step"})
    with LiveBytes() as memory:
        twins.opt.load_state_dict(full)
    owned = sum(t.untyped_storage().nbytes() for t in own_tensors(twins.opt))
    needed = sum(t.numel() * t.element_size() for t in own_tensors(twins.opt))
    assert memory.now == owned == needed
    assert {id(t) for t in twins.opt.state} == {id(t) for t in twins.opt.optim.state}
    for tensor, state in twins.opt.optim.state.items():
        assert twins.opt.state[tensor] is state


@distributed(*ALL_SIZES)
def test_flags_of_the_implementation_are_loaded(world: World) -> None:
    full = Twins(matrices, one_group, torch.optim.Adam, lr=0.01).step(2).consolidated()
    for flags in ({"foreach": True}, {"foreach": False}):
        given = copy.deepcopy(full)
        given["param_groups"][0].update(flags, lr=0.5, betas=(0.5, 0.6))
        twins = Twins(matrices, one_group, torch.optim.Adam, lr=0.01)
        twins.opt.load_state_dict(given)
        twins.plain.load_state_dict(copy.deepcopy(given))
        for group in (*twins.opt.param_groups, *twins.opt.optim.param_groups):
            assert {key: group[key] for key in flags} == flags
            assert (group["lr"], group["betas"]) == (0.5, (0.5, 0.6))
        twins.step(2)
        assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
    for flag in ("capturable", "fused"):
        given = copy.deepcopy(full)
        given["param_groups"][0][flag] = True
        twins.opt.load_state_dict(given)
        assert twins.opt.param_groups[0][flag] is True
        assert twins.opt.optim.param_groups[0][flag] is True


@pytest.mark.parametrize("bucket_view", [False, True])
@distributed(*ALL_SIZES)
def test_fused_from_a_loaded_dict_gives_the_same_bits(world: World, bucket_view: bool) -> None:
    full = Twins(matrices, one_group, torch.optim.Adam, lr=0.01, fused=True).step(2).consolidated()
    full["param_groups"][0].update(lr=0.5, betas=(0.5, 0.6))
    twins = Twins(
        matrices, one_group, torch.optim.Adam, {"parameters_as_bucket_view": bucket_view}, lr=0.01
    ).step(3)
    twins.opt.load_state_dict(full)
    twins.plain.load_state_dict(copy.deepcopy(full))
    twins.step(4)
    assert twins.opt.optim.param_groups[0]["fused"] is True
    assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
    twins.opt.assert_replicas_equal()


class RefusingAdam(torch.optim.Adam):
    """Loads nothing that is fused, and says so late."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.param_groups[0]["fused"]:
            raise ValueError("not fused")


@distributed(2, 3)
def test_a_refused_load_that_turns_fused_on_changes_nothing(world: World) -> None:
    twins = Twins(matrices, one_group, RefusingAdam, lr=0.01).step(2)
    bad = copy.deepcopy(twins.consolidated())
    for tensor in tensors_in(bad):
        tensor.fill_(50.0)
    bad["param_groups"][0].update(fused=True, lr=50.0)
    expect_refusal(twins, bad, ValueError)
    twins.step(2)


@distributed(*ALL_SIZES)
def test_fused_switched_on_by_hand_is_refused_where_tensors_are_cut(world: World) -> None:
    twins = Twins(matrices, one_group, torch.optim.Adam, lr=0.01).step(2)
    for optimizer in (twins.plain, twins.opt):
        optimizer.param_groups[0]["fused"] = True
    if world.size == 1:
        twins.step(2)
        return
    with pytest.raises(RuntimeError, match="fused is on"):
        twins.opt.step()
    for optimizer in (twins.plain, twins.opt):
        optimizer.param_groups[0]["fused"] = None
    twins.step(2)


@distributed(*ALL_SIZES)
def test_options_that_the_class_does_not_know_come_back(world: World) -> None:
    twins = adam(world)
    for optimizer in (twins.plain, twins.opt):
        optimizer.param_groups[0]["mine"] = {"a": [1, 2]}
        optimizer.param_groups[1]["initial_lr"] = 0.7
    twins.step()
    full = copy.deepcopy(twins.consolidated())
    assert_same(full, twins.plain.state_dict(), ordered=False)
    fresh = adam(world)
    for optimizer in (fresh.plain, fresh.opt):
        optimizer.param_groups[0]["gone"] = 1
        optimizer.load_state_dict(copy.deepcopy(full))
    assert fresh.opt.param_groups[0]["mine"] == {"a": [1, 2]}
    assert "gone" not in fresh.opt.param_groups[0]
    fresh.step()
    assert_same(fresh.consolidated(), fresh.plain.state_dict(), ordered=False)


@distributed(*ALL_SIZES)
def test_names_are_loaded_as_the_plain_class_loads_them(world: World) -> None:
    def named(params: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        return [(f"layer{i}", param) for i, param in enumerate(params)]

    with_names = Twins(matrices, named, torch.optim.Adam, lr=0.01).step()
    without = Twins(matrices, one_group, torch.optim.Adam, lr=0.01).step()
    other = copy.deepcopy(with_names.consolidated())
    other["param_groups"][0]["param_names"] = [f"other{i}" for i in range(len(matrices()))]
    for twins, full in (
        (with_names, without.consolidated()),
        (without, other),
        (with_names, other),
    ):
        twins.opt.load_state_dict(full)
        twins.plain.load_state_dict(copy.deepcopy(full))
        assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
        twins.step()


@distributed(*ALL_SIZES)
def test_saved_numbers_need_not_be_those_of_this_optimizer(world: World) -> None:
    """As in torch, parameters are matched by their position in the groups."""
    twins = adam(world).step(2)
    full = twins.consolidated()
    renumbered = {
        "state": {100 - number: state for number, state in full["state"].items()},
        "param_groups": [
            {**group, "params": [100 - number for number in group["params"]]}
            for group in full["param_groups"]
        ],
    }
    twins.step()
    twins.opt.load_state_dict(renumbered)
    twins.plain.load_state_dict(copy.deepcopy(full))
    twins.assert_equal_parameters()
    assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)


@distributed(*ALL_SIZES)
def test_state_of_other_strides_is_matched_by_element(world: World) -> None:
    """A contiguous checkpoint of a channels_last model, and the other way round."""

    def contiguous() -> list[torch.Tensor]:
        return [torch.nn.Parameter(p.detach().contiguous()) for p in assorted()]

    for source, target in ((contiguous, assorted), (assorted, contiguous)):
        full = Twins(source, two_groups, torch.optim.Adam, lr=0.01).step(2).consolidated()
        twins = Twins(target, two_groups, torch.optim.Adam, lr=0.01)
        twins.opt.load_state_dict(full)
        twins.plain.load_state_dict(copy.deepcopy(full))
        twins.step(2)


@distributed(*ALL_SIZES)
def test_state_of_a_parameter_that_is_frozen_now_is_not_lost(world: World) -> None:
    full = adam(world).step(2).consolidated()
    twins = adam(world)
    for params in (twins.plain_params, twins.params):
        params[0].requires_grad_(False)
    frozen = Twins(lambda: frozen_first(matrices()), two_groups, torch.optim.Adam, lr=0.01)
    for each in (twins, frozen):
        each.opt.load_state_dict(full)
        each.plain.load_state_dict(copy.deepcopy(full))
        each.step()
        assert list(each.consolidated()["state"]) == [0, 1, 2, 3, 4]
        for params in (each.plain_params, each.params):
            params[0].requires_grad_(True)
        each.step(2)
        assert_same(each.consolidated(), each.plain.state_dict(), ordered=False)


def frozen_first(params: list[torch.Tensor]) -> list[torch.Tensor]:
    params[0].requires_grad_(False)
    return params


@distributed(*ALL_SIZES)
def test_w23_there_is_a_state_before_the_first_step(world: World) -> None:
    for name, options in {**ELEMENTWISE, **WHOLE}.items():
        twins = Twins(matrices, two_groups, class_named(name), **options)
        for to in range(world.size):
            twins.opt.consolidate_state_dict(to)
            if world.rank == to:
                assert_same(twins.opt.state_dict(), twins.plain.state_dict())
                torch.save(twins.opt.state_dict(), io.BytesIO())
        fresh = twins.consolidated()
        twins.step(1)
        twins.opt.load_state_dict(fresh)
        twins.plain.load_state_dict(copy.deepcopy(fresh))
        twins.step(2)


@distributed(*ALL_SIZES)
def test_w23_what_each_rank_took_in_its_turn_stays_with_it(world: World) -> None:
    twins = adam(world).step()
    expected = copy.deepcopy(twins.plain.state_dict())
    mine = None
    for to in range(world.size):
        twins.opt.consolidate_state_dict(to)
        if world.rank == to:
            mine = twins.opt.state_dict()
    assert_same(mine, expected)
    assert_same(twins.opt.state_dict(), expected)  # consolidating elsewhere took nothing away
    twins.step()
    assert_same(mine, expected)
    with pytest.raises(RuntimeError, match="stepped"):
        twins.opt.state_dict()


@distributed(*ALL_SIZES)
def test_every_rank_may_load_a_dict_of_its_own_making(world: World) -> None:
    """Loading is not collective: no rank waits for another, and all end up with the same job."""
    twins = adam(world).step(2)
    full = twins.consolidated()
    before = traffic_of(twins.opt).messages
    with mock.patch.object(dist, "all_gather", side_effect=AssertionError("a collective")):
        twins.opt.load_state_dict(copy.deepcopy(full))
    assert traffic_of(twins.opt).messages == before
    twins.plain.load_state_dict(copy.deepcopy(full))
    twins.step(2)


@distributed(1, 2)
def test_complex_state_of_a_real_parameter_is_refused_on_all_ranks(world: World) -> None:
    optimizer = ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(4))], torch.optim.AdamW)
    found = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))]).state_dict()
    moments = {key: torch.zeros(4, dtype=torch.complex64) for key in ("exp_avg", "exp_avg_sq")}
    found["state"] = {0: {"step": torch.tensor(1.0), **moments}}
    with pytest.raises(ValueError, match="is complex, the parameter is real"):
        optimizer.load_state_dict(found)


@distributed(1, 2)
def test_state_that_would_not_fit_into_memory_is_refused_on_all_ranks(world: World) -> None:
    """Not only by the rank that owns the parameter, and would have to copy it."""
    weights = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = ZeroRedundancyOptimizer(weights, torch.optim.Adafactor)
    found = torch.optim.Adafactor(weights).state_dict()
    found["state"] = {0: {"step": torch.tensor(1.0), "row_var": torch.ones(1).expand(2**40)}}
    with pytest.raises(ValueError, match=r"row_var.* of parameter 0 claims 4,398,046,511,104 byte"):
        optimizer.load_state_dict(found)


# ---------------------------------------- between world sizes and classes


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


# ------------------------------------------------------------------ other dicts


@distributed(1, 2, 3)
def test_a_plain_adagrads_dict_plans_no_frozen_parameter(world: World) -> None:
    plain, ours = (params_of_shapes(*[(64,)] * 4) for _ in range(2))
    for params in (plain, ours):
        for param in params[1:]:
            param.requires_grad_(False)
    a, b = Adagrad(plain, lr=0.1), ZeroRedundancyOptimizer(ours, Adagrad, lr=0.1)
    assert sorted(plan_of(b).params) == [0]
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert sorted(plan_of(b).params) == [0]
    for step in range(2):
        give_equal_gradients(step, plain, ours)
        a.step()
        b.step()
        assert_equal_params(ours, plain)


@distributed(1, 2, 3)
@pytest.mark.parametrize("cls", [Adam, SGD])
def test_an_empty_state_that_is_assigned_starts_anew_as_in_torch(world: World, cls: Any) -> None:
    plain, ours = (params_of_shapes((4, 4), (9,)) for _ in range(2))
    options = {"lr": 0.1, **({"momentum": 0.9} if cls is SGD else {})}
    a, b = cls(plain, **options), ZeroRedundancyOptimizer(ours, cls, **options)
    for step in range(4):
        give_equal_gradients(step, plain, ours)
        a.step()
        b.step()
        assert_equal_params(ours, plain)
        if step == 1:
            a.state = collections.defaultdict(dict)
            b.state = collections.defaultdict(dict)
            assert len(b.state) == 0
    if cls is Adam:
        assert {float(state["step"]) for state in b.state.values()} in ({2.0}, set())
