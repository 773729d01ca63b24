"""What is trained: models, batches, and which optimizer updates which parameters.

Every method gets the same model (same seed), the same batches (a seed per rank) and the same
options, so that after as many steps the losses must agree.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}
MUON: dict[str, Any] = {"lr": 1e-3}

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and how it is fed.

    ``units`` are the parts that a method which communicates by modules (FSDP) treats as one, and
    ``is_matrix`` tells the parameters that Muon updates; AdamW has the others.
    """

    name: str
    title: str
    steps: int  # in a round
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    units: Callable[[nn.Module], Sequence[nn.Module]] = lambda _: ()
    is_matrix: Callable[[str, Tensor], bool] = lambda _name, _param: False

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ValueError("a round has at least two steps, so that one can run into the next")

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def split(self, module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(Muon's, AdamW's) parameters."""
        named = list(module.named_parameters())
        matrices = [param for name, param in named if self.is_matrix(name, param)]
        rest = [param for name, param in named if not self.is_matrix(name, param)]
        return matrices, rest

    def numel(self) -> int:
        with torch.device("meta"):
            return sum(param.numel() for param in self.build().parameters())


# ---------------------------------------------------------------------- language model


def _gpt(config: GPTConfig) -> Callable[[], nn.Module]:
    return lambda: GPT(config)


def _tokens(config: GPTConfig, batch: int) -> Callable[[torch.Generator], Batch]:
    def draw(source: torch.Generator) -> Batch:
        shape = (batch, config.context + 1)
        tokens = torch.randint(config.vocabulary, shape, generator=source)
        return tokens[:, :-1], tokens[:, 1:]

    return draw


def _blocks(module: nn.Module) -> Sequence[nn.Module]:
    return list(module.get_submodule("blocks").children())


def _parts_of_gpt(module: nn.Module) -> Sequence[nn.Module]:
    return [module.get_submodule("embedding"), *_blocks(module), module.get_submodule("head")]


def _gpt_workload(
    name: str, what: str, config: GPTConfig, *, batch: int, steps: int, **more: Any
) -> Workload:
    with torch.device("meta"):
        millions = sum(param.numel() for param in GPT(config).parameters()) / 1e6
    title = f"GPT, {millions:.0f} M parameters, {batch} x {config.context} tokens: {what}"
    batches = _tokens(config, batch)
    return Workload(name, title, steps, _gpt(config), batches, units=_parts_of_gpt, **more)


def _large(context: int) -> GPTConfig:
    """Two thirds of the parameters are in the embedding and in the head, which are not tied."""
    return GPTConfig(32768, context, width=384, heads=6, layers=8, tied=False)


# ---------------------------------------------------------------------- convolutions


class Residual(nn.Module):
    """Two convolutions beside a shortcut; the first may halve the resolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Eight residual blocks on images of 32 x 32, as for CIFAR."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        pairs = list(itertools.pairwise(widths))
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*(Residual(a, b, 1 + (a != b)) for a, b in pairs))
        self.head = nn.Linear(widths[-1], 100)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(features), labels)


def _images(source: torch.Generator) -> Batch:
    images = torch.randn(4, 3, 32, 32, generator=source)
    return images, torch.randint(100, (4,), generator=source)


# ---------------------------------------------------------------------- many small tensors


class Tiny(nn.Module):
    """A thousand tensors of 256 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(1000))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x.square().mean()


def _vectors(source: torch.Generator) -> Batch:
    return torch.randn(2, 16, generator=source), torch.zeros(())


# ---------------------------------------------------------------------- all of them


def _is_matrix_of_a_block(name: str, param: Tensor) -> bool:
    return "blocks." in name and param.dim() == 2


# Small: without instructions for bfloat16, a processor takes seconds for Muon's products.
_SMALL = GPTConfig(8192, 64, width=128, heads=4, layers=4, tied=False)

WORKLOADS = {
    workload.name: workload
    for workload in (
        _gpt_workload("gpt", "computes more than it sends", _large(64), batch=2, steps=2),
        _gpt_workload("gpt-short", "sends more than it computes", _large(16), batch=1, steps=3),
        Workload("tiny", "1,000 tensors of 256 elements", 8, Tiny, _vectors),
        Workload("conv", "ResNet, 11 M parameters, 4 images", 3, ResNet, _images, units=_blocks),
        _gpt_workload(
            "muon", "Muon + AdamW", _SMALL, batch=2, steps=2, is_matrix=_is_matrix_of_a_block
        ),
    )
}
