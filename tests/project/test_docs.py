"""Every block of Python in the docs runs, on two processes, as it stands there; a diff as it reads
afterwards. What is quoted from an example, which needs a trainer, is quoted to the letter."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World, distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onecopy import ZeroRedundancyOptimizer
from onecopy.tools.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md"]
EXAMPLES = [path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))]


def fenced(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(python|diff)\n(.*?)^```", page.read_text(), re.M | re.S)


def blocks_of(page: Path) -> list[str]:
    return [one_side(text, "+") if kind == "diff" else text for kind, text in fenced(page)]


def one_side(diff: str, sign: str) -> str:
    """How a diff reads before ("-") or afterwards ("+")."""
    lines = [line for line in diff.splitlines() if line[:1] in ("", " ", sign)]
    return "\n".join(line[1:] for line in lines) + "\n"


def is_quoted(block: str) -> bool:
    """Whether a block is a part of an example, at any depth."""
    return any(
        textwrap.indent(block, " " * depth) in example
        for example in EXAMPLES
        for depth in (0, 4, 8)
    )


BLOCKS = [
    pytest.param(page.name, number, block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks_of(page))
    if not is_quoted(block)
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def surroundings(world: World, path: str) -> dict[str, Any]:
    """The names that the pages say their blocks know."""
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    source = torch.Generator().manual_seed(world.rank)
    loader = [torch.randn(4, 7, generator=source) for _ in range(3)]
    names: dict[str, Any] = {"torch": torch, "DDP": DistributedDataParallel, "Net": Net}
    names |= {"model": model, "optimizer": optimizer, "loader": loader}
    names |= {"path": path, "rank": world.rank}
    names["matrices"] = [p for p in model.parameters() if p.ndim == 2]
    names["the_rest"] = [p for p in model.parameters() if p.ndim != 2]

    def train(steps: int) -> None:
        for _ in range(steps):
            names["optimizer"].zero_grad()
            names["model"](torch.randn(4, 7, generator=source)).backward()
            names["optimizer"].step()

    names["train"] = train
    return names


def test_the_pages_have_their_blocks() -> None:
    assert len(BLOCKS) >= 35


def test_only_what_needs_a_trainer_is_quoted() -> None:
    quoted = [page.name for page in PAGES for block in blocks_of(page) if is_quoted(block)]
    assert quoted == ["integrations.md"] * 5


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link


def anchors(page: Path) -> list[str]:
    """Of the headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+?) *$", prose, re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_to_headings_lead_somewhere(page: Path) -> None:
    for file, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        assert anchor in anchors(page.parent / file if file else page), f"{file}#{anchor}"


def test_the_readme_links_to_all_pages() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"](docs/{page.name})" not in readme] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "number", "block"), BLOCKS)
@distributed(2)
def test_a_block_of_a_page_runs(
    world: World, page: str, number: int, block: str, tmp_path: Path
) -> None:
    if "Muon" in block and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    names = surroundings(world, f"{tmp_path}/checkpoint")
    model = names["model"]
    names["train"](steps=2)
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    finally:
        os.chdir(before)
    if names["model"] is model:
        names["train"](steps=1)
    names["optimizer"].assert_replicas_equal()


@pytest.mark.filterwarnings("ignore")
@distributed(2)
def test_the_diff_from_torchs_class_leads_to_the_same_parameters(world: World) -> None:
    _, diff = fenced(ROOT / "docs" / "migrating.md")[0]
    ends = []
    for sign in "-+":
        names = surroundings(world, "")
        exec(one_side(diff, sign), names)
        ends.append((names["optimizer"], list(names["model"].parameters())))
    (theirs, before), (ours, after) = ends
    assert type(theirs) is not type(ours)
    assert all(map(torch.equal, before, after))


COMMANDS = re.findall(
    r"^```sh\n(onecopy .*?)^```(?:\n\n```text\n(.*?)^```)?",
    (ROOT / "docs" / "estimating.md").read_text(),
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


PACKAGE = ROOT / "onecopy"
WITH_EXAMPLES = [p for p in sorted(PACKAGE.rglob("*.py")) if ">>>" in p.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_examples_in_docstrings_are_right(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0 == found.failed


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_names_that_a_page_for_developers_mentions_exist(page: str) -> None:
    """Names with an underscore or two capitals, and files; blocks and URLs aside."""
    files = [
        f
        for d in ("onecopy", "tests", "trials", "benchmarks", "docs")
        for f in (ROOT / d).rglob("*")
    ]
    files.append(ROOT / "Makefile")
    source = "\n".join(f.read_text() for f in files if f.suffix == ".py" or f.name == "Makefile")
    known = {f.name for f in files} | {"ddp_zero_hook.py", "zero_redundancy_optimizer.py"}
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    codes = [code for code in re.findall(r"`([^`\n]+)`", text) if "://" not in code]
    names = [name for code in codes for name in code.split()]
    assert len(names) > 50
    for name in names:
        for word in re.findall(r"[\w.]+\.(?:py|md)|\w*_\w+|[A-Z]\w*[A-Z]\w*", name):
            found = (
                word in known
                if word.endswith((".py", ".md"))
                else re.search(rf"\b{word}\b", source)
            )
            assert found or (ROOT / word).exists(), f"{page}: {word} in `{name}`"
