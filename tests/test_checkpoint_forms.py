"""Classes whose state changes its form as they train: the checkpoint knows how far they have come.

Keys that come later, lists and tensors that grow, a None that becomes a tensor.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import (
    EVERY_WAY,
    Case,
    Crews,
    Shelf,
    assert_like,
    resumed,
    save,
    shelf_of,
    train,
    used_before,
    write_plain,
)
from harness import World, distributed
from states import matrices, parameter


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
@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
def test_the_form_of_the_state_comes_from_the_checkpoint(
    world: World, way: str, is_used: bool, tmp_path: Path
) -> None:
    crews, fewer = Crews(world), max(1, world.size - 1)
    plain, saver = CASE.plain(), CASE.ours(crews[world.size])
    train([plain, saver], range(3))
    save(saver, tmp_path / "there", way)
    loader = used_before(CASE, crews, fewer) if is_used else CASE.ours(crews[fewer])
    resumed(loader, plain, tmp_path / "there", "own")
    assert_like(loader, plain)
    train([plain, loader], range(3, 5))
    assert_like(loader, plain)


@distributed(1, 2)
def test_the_form_comes_from_the_plain_class_too(world: World, tmp_path: Path) -> None:
    plain, crews = CASE.plain(), Crews(world)
    train([plain], range(3))
    write_plain(world, plain, tmp_path / "there", flat=False)
    loader = CASE.ours(crews[world.size])
    resumed(loader, plain, tmp_path / "there", "own")
    assert_like(loader, plain)
    train([plain, loader], range(3, 5))
    assert_like(loader, plain)


@distributed(1, 2, 3)
def test_dcp_load_refuses_a_class_of_which_it_would_leave_state_behind(
    world: World, tmp_path: Path
) -> None:
    crews = Crews(world)
    saver, loader = CASE.ours(crews[world.size]), CASE.ours(crews[world.size])
    twin = CASE.plain()
    train([saver], range(3))
    save(saver, tmp_path / "there", "dcp")
    # Where a tensor has grown, torch itself refuses; where there is only more, it would not.
    with pytest.raises((ValueError, dist.checkpoint.CheckpointException)):
        resumed(loader, twin, tmp_path / "there", "dcp")
    form = loader.opt.sharded(loader.model).state_dict()
    with pytest.raises(ValueError, match=r"Changing changes the form.*optimizer\.load\(path"):
        loader.opt.sharded(loader.model).load_state_dict(form)
    train([twin, loader], range(2))
    assert_like(loader, twin)


@distributed(2)
def test_another_model_is_refused_all_the_same(world: World, tmp_path: Path) -> None:
    crews = Crews(world)
    saver = CASE.ours(crews[2])
    train([saver], range(3))
    save(saver, tmp_path / "there", "own")
    taller = shelf_of(lambda: [parameter((p.shape[0] + 1, *p.shape[1:]), 3) for p in matrices()])
    wider = replace(CASE, model=taller)
    loader, twin = wider.ours(crews[2]), wider.plain()
    with pytest.raises(ValueError, match=r"mismatched: state\.shelf\.0\.weight\.before"):
        loader.opt.load(tmp_path / "there", loader.model)
    train([twin, loader], range(2))
    assert_like(loader, twin)


@distributed(2)
def test_another_class_is_refused_all_the_same(world: World, tmp_path: Path) -> None:
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
