"""State of odd forms in the full state dict, and hooks on it."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from harness import World, distributed
from states import (
    ALL_SIZES,
    Twins,
    adam,
    assert_same,
    consolidated_everywhere,
    matrices,
    one_group,
    parameter,
    set_gradients,
    small_parcels,
    tensors_in,
)

from onecopy import ZeroRedundancyOptimizer

# ------------------------------------------------------------------------------- odd states


class Hoarder(torch.optim.Optimizer):
    """Whole tensors, and state of every kind that a class may think of."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.fill(self.state[param], param)
                    change = param.grad.sum() * self.state[param]["rows"][:, None]
                    param.sub_(group["lr"] * change)

    def fill(self, state: dict[Any, Any], param: torch.Tensor) -> None:
        grad = param.grad
        if not state:
            state.update({"rows": torch.zeros(param.shape[0]), "count": 0, "history": []})
        state["count"] += 1
        state["rows"] += grad.sum(1)
        state["history"].append(float(grad.sum()))
        state["pair"] = (grad.mean(0), [grad.amax(), None, {"deep": grad[:1].clone(), 3: -1.5}])
        state["bfloat16"] = grad.to(torch.bfloat16)
        state["long"] = (grad * 1000).long()
        state["tiny"] = (grad * 10).to(torch.int8)
        state["mask"] = grad > 0
        state["complex"] = torch.complex(grad, -grad)
        state["double"] = grad.double()
        state["transposed"] = grad.t().contiguous().t()
        state["every other"] = grad.repeat(1, 2)[:, ::2]
        state["broadcast"] = grad[:, :1].expand(-1, 4)
        state["cube"] = grad.flatten()[:6].clone().view(1, 2, 3)
        state["empty"] = grad.new_empty(0, 4)
        state["flag"] = True
        state["nothing"] = None
        state["infinite"] = float("inf")
        state["large"] = 2**70
        state["word"] = 'a "quoted" \u00e9 \n line'
        state[17] = "keys may be numbers"
        state["nested"] = {"list": [1, [2, (3,)]], "empty": {}, "none": [], "pair": ()}


def big_enough() -> list[torch.Tensor]:
    return [parameter((4, 3), 1), parameter((2, 7), 2), parameter((9, 5), 3)]


@distributed(*ALL_SIZES)
@pytest.mark.parametrize("in_small_parcels", [False, True])
def test_state_of_any_shape_arrives_as_it_was(world: World, in_small_parcels: bool) -> None:
    ours = {"partition": "whole"}
    twins = Twins(big_enough, two_groups_of_lr, Hoarder, ours).step(2)
    with small_parcels(100, 50, 30) if in_small_parcels else contextlib.nullcontext():
        full = twins.consolidated(to=world.size - 1)
    theirs = copy.deepcopy(twins.plain.state_dict())
    for state in theirs["state"].values():  # gaps in memory do not travel
        state["every other"] = state["every other"].contiguous()
        state["broadcast"] = state["broadcast"].contiguous()
    assert_same(full, theirs)
    assert not any(t.requires_grad for t in tensors_in(full))
    file = io.BytesIO()
    torch.save(full, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), theirs)


def two_groups_of_lr(params: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]


@distributed(*ALL_SIZES)
def test_odd_state_loads_as_the_plain_class_loads_it(world: World) -> None:
    twins = Twins(big_enough, two_groups_of_lr, Hoarder, {"partition": "whole"}).step(2)
    full = twins.consolidated()
    for state in full["state"].values():
        del state["word"], state[17]  # torch's own load makes nonsense of strings,
        del state["complex"]  # and real numbers of complex ones, with a warning
    snapshot = copy.deepcopy(full)
    twins.step()
    twins.opt.load_state_dict(full)
    twins.plain.load_state_dict(copy.deepcopy(full))
    assert_same(full, snapshot)
    assert_same(twins.consolidated(), twins.plain.state_dict(), ordered=False)
    twins.step(2)
    assert_same(full, snapshot)  # `history` is appended to in a copy


class ViewHoarder(Hoarder):
    """Keeps views that share memory in unusual ways."""

    def fill(self, state: dict[Any, Any], param: torch.Tensor) -> None:
        grad = param.grad
        state["rows"] = grad.sum(1)
        state["conjugate"] = torch.complex(grad, grad * 2).conj()
        state["negative"] = torch.complex(grad, grad * 2).conj().imag
        state["shared"] = [grad, grad[1:]]
        state["tracked"] = torch.nn.Parameter(grad * 3)


@distributed(*ALL_SIZES)
def test_lazy_views_in_the_state_arrive_with_their_values(world: World) -> None:
    twins = Twins(big_enough, one_group, ViewHoarder, {"partition": "whole"}).step()
    full = twins.consolidated()
    for number, state in twins.plain.state_dict()["state"].items():
        ours = full["state"][number]
        assert torch.equal(ours["conjugate"].resolve_conj(), state["conjugate"].resolve_conj())
        assert torch.equal(ours["negative"].resolve_neg(), state["negative"].resolve_neg())
        assert torch.equal(ours["shared"][1], state["shared"][1])
        assert torch.equal(ours["tracked"], state["tracked"])


class Generators(Hoarder):
    """Keeps what cannot be written down, for one parameter only."""

    def fill(self, state: dict[Any, Any], param: torch.Tensor) -> None:
        state["rows"] = param.grad.sum(1)
        if param.shape == (2, 7):
            state["random"] = {"source": torch.Generator()}


@distributed(*ALL_SIZES)
def test_state_that_cannot_be_carried_is_named_on_all_ranks(world: World) -> None:
    params = big_enough()
    opt = ZeroRedundancyOptimizer(params, Generators, partition="whole")
    set_gradients([params], 1)
    opt.step()
    with pytest.raises(TypeError, match=r"parameter 1 .*Generator"):
        opt.consolidate_state_dict()
    with pytest.raises(RuntimeError, match=rf"rank {world.rank}\b"):
        opt.state_dict()
    for state in opt.state.values():
        state.pop("random", None)
    assert list(consolidated_everywhere(opt)["state"]) == [0, 1, 2]


class Counting(torch.optim.Optimizer):
    """Keeps a counter that belongs to no parameter, as some classes do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        self.state["common"] = {"count": self.state.get("common", {"count": 0})["count"] + 1}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    sum_ = self.state[param].setdefault("sum", torch.zeros_like(param))
                    sum_ += param.grad
                    param.sub_(group["lr"] / self.state["common"]["count"] * sum_)


@distributed(*ALL_SIZES)
def test_state_that_belongs_to_no_parameter_is_kept(world: World) -> None:
    twins = Twins(matrices, one_group, Counting).step(3)
    full = twins.consolidated()
    assert_same(full, twins.plain.state_dict(), ordered=False)
    fresh = Twins(matrices, one_group, Counting)
    fresh.opt.load_state_dict(full)
    fresh.plain.load_state_dict(copy.deepcopy(full))
    fresh.step(2)


# ------------------------------------------------------------------------------- hooks


@distributed(*ALL_SIZES)
def test_w25_state_dict_hooks_see_and_change_the_real_dict(world: World) -> None:
    twins = adam(world).step(2)
    calls: list[tuple[str, Any]] = []

    def before(optimizer: torch.optim.Optimizer) -> None:
        calls.append(("before", optimizer))
        optimizer.param_groups[0]["note"] = "from the hook"

    def after(optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> dict[str, Any]:
        calls.append(("after", optimizer))
        states = full["state"]
        assert len(states) == len(twins.params)
        first = {**states[0], "exp_avg": states[0]["exp_avg"] + 1}
        return {**full, "state": {**states, 0: first}, "extra": 5}

    for optimizer in (twins.plain, twins.opt):
        optimizer.register_state_dict_pre_hook(before)
        handle = optimizer.register_state_dict_post_hook(after)
        optimizer.register_state_dict_post_hook(lambda _, full: full.update(more=6))
    theirs = twins.plain.state_dict()
    calls.clear()
    twins.opt.consolidate_state_dict()
    if world.rank == 0:
        ours = twins.opt.state_dict()
        assert (ours["extra"], ours["more"]) == (5, 6)
        assert_same(ours, theirs)
        assert calls == [("before", twins.opt), ("after", twins.opt)]
        handle.remove()
        assert "extra" not in twins.opt.state_dict()
    twins.step()


@distributed(*ALL_SIZES)
def test_w25_load_hooks_change_the_live_state_and_not_the_callers_dict(world: World) -> None:
    twins = adam(world).step(2)
    full = twins.consolidated()
    snapshot = copy.deepcopy(full)
    seen = []

    def replace(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        seen.append(("replace", set(given) == {"state", "param_groups"}))
        changed = copy.deepcopy(given)
        for state in changed["state"].values():
            state["exp_avg"].fill_(7.0)
        changed["param_groups"][0]["lr"] = 0.25
        return changed

    def in_place(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
        given["param_groups"] = [{**g, "eps": 1e-3} for g in given["param_groups"]]

    for optimizer in (twins.plain, twins.opt):
        optimizer.register_load_state_dict_pre_hook(replace)
        optimizer.register_load_state_dict_pre_hook(in_place)
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("after", o)))
        optimizer.load_state_dict(full)
    assert seen == [
        ("replace", True),
        ("after", twins.plain),
        ("replace", True),
        ("after", twins.opt),
    ]
    assert_same(full, snapshot)
    for state in twins.opt.state.values():
        assert torch.equal(state["exp_avg"], torch.full_like(state["exp_avg"], 7.0))
    assert [g["lr"] for g in twins.opt.param_groups] == [0.25, 0.05]
    assert [g["eps"] for g in twins.opt.param_groups] == [1e-3, 1e-3]
    twins.step(2)
