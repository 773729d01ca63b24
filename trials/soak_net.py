"""The model of a soak, and the optimizer classes it is trained with.

The model has what is hard to shard: an embedding that is also the output layer and far larger than
all else, a convolution in channels_last, a number, sizes that no number of ranks divides, branches
that a batch may skip, and blocks that are added while the job runs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, INNER = 601, 28, 37
BRANCHES, SPARES = 3, 3
ALWAYS_TRAINED = "trunk.weight"  # so that every backward reaches something on every rank
FROZEN_AT_FIRST = ("conv.", "branches.2.")  # never planned, until they are unfrozen


class SoakNet(nn.Module):
    """Forward returns a loss."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.conv = nn.Conv2d(1, 6, 3).to(memory_format=torch.channels_last)
        self.mix = nn.Conv2d(6, 5, 2).to(memory_format=torch.channels_last)
        self.trunk = nn.Linear(WIDTH, INNER)
        self.norm = nn.LayerNorm(INNER)
        self.factor = nn.Parameter(torch.ones(()))
        self.branches = nn.ModuleList(nn.Linear(INNER, 13) for _ in range(BRANCHES))
        self.spares = nn.ModuleList(nn.Linear(INNER, INNER) for _ in range(SPARES))
        self.back = nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)
        self.norm.float()  # one wide layer among narrow ones
        self.grown = 0  # spare blocks in use
        for name, param in self.named_parameters():
            param.requires_grad_(not name.startswith((*FROZEN_AT_FIRST, "spares.")))

    def forward(self, tokens: torch.Tensor, branches: Sequence[bool]) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        picture = self.mix(torch.tanh(self.conv(x[:, None])))
        loss = picture.float().square().mean()
        x = self.trunk(x)
        x = torch.tanh(self.norm(x.float())).to(x.dtype)
        for spare in self.spares[: self.grown]:
            x = x + torch.tanh(spare(x))
        for is_taken, branch in zip(branches, self.branches, strict=True):
            if is_taken:
                loss = loss + branch(x).float().square().mean()
        logits = self.head(torch.tanh(self.back(x))) * self.factor
        return loss + F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor
    branches: tuple[bool, ...]

    @classmethod
    def drawn(cls, *seeds: int) -> Batch:
        """Another one for any two lists of seeds."""
        number = sum(seed * 1_000_003**place for place, seed in enumerate(seeds, start=1))
        generator = torch.Generator().manual_seed(number % 2**63)
        tokens = torch.randint(VOCABULARY, (2, 7), generator=generator)
        branches = torch.randint(2, (BRANCHES,), generator=generator).bool().tolist()
        return cls(tokens, tuple(branches))


# ---------------------------------------- optimizer classes ------------------------------------


@dataclass(frozen=True)
class Case:
    """What the model is trained with."""

    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype | None = None
    for_matrices: dict[str, Any] = field(default_factory=dict)  # a class and options of their own

    def first_groups(self, net: SoakNet) -> list[Group]:
        """What the optimizer is built with: all but the spare blocks."""
        named = [(n, p) for n, p in net.named_parameters() if not n.startswith("spares.")]
        inner = ("trunk.weight", "branches.", "back.weight")
        matrices = [n for n, p in named if p.ndim == 2 and n.startswith(inner)]
        rest = [n for n, _ in named if n not in matrices]
        return [Group(rest, {"weight_decay": 0.05}), Group(matrices, self._of_matrices())]

    def groups_of_spare(self, number: int) -> list[Group]:
        """What is added with a spare block."""
        weight = Group([f"spares.{number}.weight"], self._of_matrices())
        return [weight, Group([f"spares.{number}.bias"], {"weight_decay": 0.0})]

    def _of_matrices(self) -> dict[str, Any]:
        return copy.copy(self.for_matrices) or {"weight_decay": 0.2}


@dataclass(frozen=True)
class Group:
    """Of parameters, by their names."""

    names: list[str]
    options: dict[str, Any]

    @property
    def own_class(self) -> type[torch.optim.Optimizer] | None:
        return self.options.get("optimizer_class")

    def on(self, net: SoakNet) -> dict[str, Any]:
        params = dict(net.named_parameters())
        return {**self.options, "params": [params[name] for name in self.names]}


def _cases() -> dict[str, Case]:
    optim = torch.optim
    adamw = {"lr": 0.01, "betas": (0.8, 0.9)}
    cases = {
        "AdamW": Case(optim.AdamW, adamw),
        "momentum": Case(optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        "masters": Case(optim.AdamW, adamw, torch.bfloat16, torch.float32),
        "fused": Case(optim.AdamW, {**adamw, "amsgrad": True, "fused": True}),
    }
    if hasattr(optim, "Muon"):  # since torch 2.9
        muon = {"optimizer_class": optim.Muon, "lr": 0.02, "weight_decay": 0.1}
        cases["mixture"] = Case(optim.AdamW, adamw, for_matrices=muon)
    return cases


CASES = _cases()
