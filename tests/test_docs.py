"""Every block of Python in the docs runs, on two processes, as it stands there."""

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
from onecopy.cli import main

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("checkpoints.md", "estimating.md", "modes.md")
BLOCKS = [
    (page, number, block)
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    )
]


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
    loader = [torch.randn(4, 7, generator=source) for _ in range(3)]
    return {**names, "Net": Net, "path": path, "loader": loader}


def test_the_pages_have_their_blocks() -> None:
    assert len(BLOCKS) >= 15


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("page", "number", "block"), [pytest.param(*b, id=f"{b[0]}-{b[1]}") for b in BLOCKS]
)
@distributed(2)
def test_a_block_of_a_page_runs(
    world: World, page: str, number: int, block: str, tmp_path: Path
) -> None:
    names = surroundings(world, f"{tmp_path}/checkpoint")
    names["train"](steps=2)
    exec(compile(block, f"{page}, block {number}", "exec"), names)
    names["train"](steps=1)
    names["optimizer"].assert_replicas_equal()


COMMANDS = re.findall(
    r"^```sh\n(onecopy .*?)^```(?:\n\n```text\n(.*?)^```)?",
    (DOCS / "estimating.md").read_text(),
    re.M | re.S,
)


@pytest.mark.parametrize(("commands", "shown"), COMMANDS)
def test_a_command_of_a_page_prints_what_the_page_shows(
    commands: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in commands.splitlines():
        assert main(command.split()[1:]) == 0
    assert not shown or capsys.readouterr().out == shown


def test_the_page_has_its_commands() -> None:
    assert len(COMMANDS) >= 4
