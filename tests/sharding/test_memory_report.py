"""`memory_report`: what is on this rank, by hand and as reported."""

from __future__ import annotations

import pytest
import torch
from harness import World, distributed
from models import Mlp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer

ELEMENTS = 328  # of an Mlp


@distributed(1, 2, 4)
def test_drop_in(world: World) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
    before = optimizer.memory_report()
    assert (before.parameters, before.gradients, before.state) == (ELEMENTS * 4, 0, {})
    model(model.batch((1, 1))).backward()
    optimizer.step()
    report = optimizer.memory_report()
    assert report.gradients == ELEMENTS * 4
    assert set(report.state) == {"exp_avg", "exp_avg_sq", "step"}
    assert report.state["exp_avg"] == report.state["exp_avg_sq"] == ELEMENTS * 4 // world.size
    assert report.master_copies == report.ddp_buckets == 0
    assert report.total == sum(report.as_dict().values())
    assert report.as_dict()["state/exp_avg"] == report.state["exp_avg"]
    assert "exp_avg_sq" in str(report)
    assert str(report).splitlines()[-1].startswith("total")


@distributed(1, 2)
def test_master_copies(world: World) -> None:
    model = Mlp().to(torch.bfloat16)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, master_dtype=torch.float32, lr=0.1)
    report = optimizer.memory_report()
    assert report.parameters == ELEMENTS * 2
    assert report.master_copies == pytest.approx(ELEMENTS * 4 / world.size, abs=64 * 4)


@distributed(1, 2, 4)
@pytest.mark.parametrize("under_ddp", [False, True], ids=["bare", "ddp"])
def test_attached(world: World, under_ddp: bool) -> None:
    """A rank keeps its share of the gradients; DDP keeps all of them besides."""
    model = Mlp()
    module = DistributedDataParallel(model) if under_ddp else model
    optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1)
    optimizer.attach(module)
    module(model.batch((world.rank + 1, 1))).backward()
    optimizer.step()
    report = optimizer.memory_report()
    assert report.gradients == ELEMENTS * 4 // world.size
    assert report.ddp_buckets == (ELEMENTS * 4 if under_ddp else 0)
    assert report.staging >= ELEMENTS * 4
