"""Every block of Python in docs/checkpoints.md runs, on two processes, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World, distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onecopy import ZeroRedundancyOptimizer

PAGE = Path(__file__).parent.parent / "docs" / "checkpoints.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def surroundings(world: World, path: str) -> dict[str, Any]:
    """The names that the page says its blocks know."""
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    source = torch.Generator().manual_seed(world.rank)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 7, generator=source)).backward()
            optimizer.step()

    names = {"torch": torch, "model": model, "optimizer": optimizer, "train": train}
    return {**names, "Net": Net, "path": path}


def test_the_page_has_its_blocks() -> None:
    assert len(BLOCKS) >= 9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
@distributed(2)
def test_a_block_of_the_page_runs(world: World, number: int, tmp_path: Path) -> None:
    names = surroundings(world, f"{tmp_path}/checkpoint")
    names["train"](steps=2)
    exec(compile(BLOCKS[number], f"{PAGE.name}, block {number}", "exec"), names)
    names["train"](steps=1)
    names["optimizer"].assert_replicas_equal()
