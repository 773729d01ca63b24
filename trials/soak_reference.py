"""The model of a soak, what it is trained with, and its reference: the same training, unsharded.

The model has parameters that are hard to shard: an embedding that is also the output layer and far
larger than all else, convolutions in channels_last, a scalar, sizes that no number of ranks
divides, branches that a batch may skip, and spare blocks that are added while the job runs.

Every rank has a whole reference: a model of its own, computed on this rank's batches, and plain
torch optimizers. Gradients are averaged as the mode of the job promises, so that results are equal
bit for bit:

    attached          each rank's gradient times 1/W, added up in the order of the ranks
    drop-in, by hand  the same, rounded to the parameter's dtype
    drop-in, DDP      by a DDP around the reference's model

In attached mode, gradients inside no_sync() are accumulated on the rank first: in float32 where
there is a master copy, else in the dtype of the gradient.

The reference never reads what the job has computed, with one exception: the norm by which attached
gradients are clipped, which is defined up to rounding only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, INNER = 601, 28, 37
BRANCHES, SPARES = 3, 3
ALWAYS_TRAINED = "trunk.weight"  # so that every backward reaches something on every rank
FROZEN_AT_FIRST = ("conv.", "branches.2.")  # never planned, until they are unfrozen


class SoakNet(nn.Module):
    """The forward returns a loss."""

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
        """A batch that depends on all seeds."""
        number = sum(seed * 1_000_003**place for place, seed in enumerate(seeds, start=1))
        generator = torch.Generator().manual_seed(number % 2**63)
        tokens = torch.randint(VOCABULARY, (2, 7), generator=generator)
        branches = torch.randint(2, (BRANCHES,), generator=generator).bool().tolist()
        return cls(tokens, tuple(branches))


# ---------------------------------------- optimizer classes ------------------------------------


@dataclass(frozen=True)
class Case:
    """The optimizer class, its options, and the dtypes of a training run."""

    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype | None = None
    for_matrices: dict[str, Any] = field(default_factory=dict)  # a class and options of their own

    def first_groups(self, net: SoakNet) -> list[Group]:
        """The groups with which the optimizer is built: all but the spare blocks."""
        named = [(n, p) for n, p in net.named_parameters() if not n.startswith("spares.")]
        inner = ("trunk.weight", "branches.", "back.weight")
        matrices = [n for n, p in named if p.ndim == 2 and n.startswith(inner)]
        rest = [n for n, _ in named if n not in matrices]
        return [Group(rest, {"weight_decay": 0.05}), Group(matrices, self._of_matrices())]

    def groups_of_spare(self, number: int) -> list[Group]:
        """The groups that are added with a spare block."""
        weight = Group([f"spares.{number}.weight"], self._of_matrices())
        return [weight, Group([f"spares.{number}.bias"], {"weight_decay": 0.0})]

    def _of_matrices(self) -> dict[str, Any]:
        return copy.copy(self.for_matrices) or {"weight_decay": 0.2}


@dataclass(frozen=True)
class Group:
    """A parameter group: names of parameters, and options."""

    names: list[str]
    options: dict[str, Any]

    @property
    def own_class(self) -> type[torch.optim.Optimizer] | None:
        return self.options.get("optimizer_class")

    def with_params(self, net: SoakNet) -> dict[str, Any]:
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


# ---------------------------------------- the reference ----------------------------------------


def _contribution(param: torch.Tensor, grad: torch.Tensor | None, share: float) -> torch.Tensor:
    """A rank's part of the average, rounded as it is sent."""
    if grad is None:
        return torch.zeros(param.numel())
    return (grad * share).to(param.dtype).float().flatten()


@torch.no_grad()
def averages_in_rank_order(
    params: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The average over the ranks of each parameter's gradient, in float32. It is None where no rank
    has a gradient; where only some have one, the others contribute zeros."""
    world = dist.get_world_size()
    share = 1 / world
    parts = [_contribution(p, grad, share) for p, grad in zip(params, gradients, strict=True)]
    has = torch.tensor([float(grad is not None) for grad in gradients])
    mine = torch.cat([*parts, has])
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    total = everyone[0]
    for other in everyone[1:]:
        total = total + other
    *sums, anywhere = total.split([*(p.numel() for p in params), len(params)])
    return [
        torch.empty_like(param, dtype=torch.float32).copy_(each.view(param.shape)) if any_ else None
        for param, each, any_ in zip(params, sums, anywhere.tolist(), strict=True)
    ]


class Reference:
    """A model and its plain optimizers, one for each class."""

    def __init__(self, case: Case, groups: Sequence[Group]) -> None:
        self.case = case
        self.net = SoakNet(case.dtype)
        self.module: nn.Module = self.net  # or a DDP around it, which averages gradients
        self.groups: list[Group] = []
        self.params = dict(self.net.named_parameters())
        self._tensors = {name: self._stepped(param) for name, param in self.params.items()}
        self._optimizers: dict[Any, torch.optim.Optimizer] = {}
        self._sums: dict[str, torch.Tensor] = {}  # attached: the averaged gradients
        self._accumulated: dict[str, torch.Tensor] = {}  # attached: in no_sync(), with masters
        for group in groups:
            self.add(group)

    def _stepped(self, param: nn.Parameter) -> nn.Parameter:
        """The tensor that the optimizer steps: the parameter itself, or its master copy."""
        dtype = self.case.master_dtype
        if dtype is None or param.dtype == dtype:
            return param
        return nn.Parameter(param.detach().to(dtype))

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        return {n: t for n, t in self._tensors.items() if t is not self.params[n]}

    def add(self, group: Group) -> None:
        options = {k: v for k, v in group.options.items() if k != "optimizer_class"}
        given = {**options, "params": [self._tensors[name] for name in group.names]}
        self.groups.append(group)
        cls = group.own_class or self.case.optimizer_class
        if cls in self._optimizers:
            self._optimizers[cls].add_param_group(given)
        else:
            defaults = {} if group.own_class else self.case.options
            self._optimizers[cls] = cls([given], **defaults)

    @property
    def options(self) -> list[dict[str, Any]]:
        """The plain optimizers' groups, in the order in which they were added."""
        left = {cls: iter(each.param_groups) for cls, each in self._optimizers.items()}
        return [next(left[group.own_class or self.case.optimizer_class]) for group in self.groups]

    def state(self, name: str) -> dict[str, Any]:
        """The optimizer state of one parameter."""
        tensor = self._tensors[name]
        return next((o.state[tensor] for o in self._optimizers.values() if tensor in o.state), {})

    # ------------------------------------------------------------------ training

    def accumulate(self) -> None:
        """Add the gradients of a backward inside ``no_sync()`` of attached mode in float32."""
        for name in self.masters:
            grad = self.params[name].grad
            if grad is not None:
                self._accumulated[name] = self._accumulated.get(name, 0) + grad.float()
                self.params[name].grad = None

    def reduce(self) -> None:
        """Average as attached mode does, and add the averages to those of earlier backwards."""
        mine = {name: param.grad for name, param in self.params.items()}
        for name, total in self._accumulated.items():
            grad = mine[name]
            mine[name] = total if grad is None else total + grad.float()
        self._accumulated = {}
        averages = averages_in_rank_order(list(self.params.values()), list(mine.values()))
        for (name, param), average in zip(self.params.items(), averages, strict=True):
            if average is not None:
                held = self._sums.get(name)
                self._sums[name] = average if held is None else held + average
            param.grad = None

    def gradient(self, name: str) -> torch.Tensor | None:
        """The gradient with which the next step updates a parameter."""
        return self._sums.get(name, self.params[name].grad)

    def gradients(self) -> list[torch.Tensor]:
        """All gradients that exist, in the order of the optimizer's groups."""
        names = [name for group in self.groups for name in group.names]
        return [g for g in map(self.gradient, names) if g is not None]

    def step(self) -> None:
        kept = {name: param.grad for name, param in self.params.items()}
        for name, tensor in self._tensors.items():
            grad = self.gradient(name)
            tensor.grad = None if grad is None else grad.to(tensor.dtype)
        for optimizer in self._optimizers.values():
            optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.params[name].copy_(master)
                master.grad = None
        for name, param in self.params.items():
            param.grad = kept[name]
        self._sums = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.net.zero_grad(set_to_none)
        self._sums, self._accumulated = {}, {}

    # ------------------------------------------------------------------ snapshots

    def snapshot(self) -> dict[str, Any]:
        """A copy of the reference, which ``torch.save`` can write."""
        return copy.deepcopy(
            {
                "net": self.net.state_dict(),
                "masters": {name: master.detach() for name, master in self.masters.items()},
                "optimizers": [each.state_dict() for each in self._optimizers.values()],
                "trained": [name for name, p in self.params.items() if p.requires_grad],
                "grown": self.net.grown,
            }
        )

    def restore(self, kept: dict[str, Any]) -> None:
        """Load a snapshot with the same groups. Which parameters are frozen does not change."""
        self.net.load_state_dict(kept["net"])
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(kept["masters"][name])
        for optimizer, state in zip(self._optimizers.values(), kept["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))

    @classmethod
    def resumed(cls, case: Case, kept: dict[str, Any]) -> Reference:
        """A reference made from a snapshot, in a new process."""
        reference = cls(case, case.first_groups(SoakNet(case.dtype)))
        for number in range(kept["grown"]):
            for group in case.groups_of_spare(number):
                reference.add(group)
        reference.net.grown = kept["grown"]
        reference.restore(kept)
        for name, param in reference.params.items():
            param.requires_grad_(name in kept["trained"])
        return reference


def average_by_hand(net: nn.Module) -> None:
    """Average gradients as a user does who has neither DDP nor attached mode."""
    params = list(net.parameters())
    averages = averages_in_rank_order(params, [param.grad for param in params])
    for param, average in zip(params, averages, strict=True):
        param.grad = None if average is None else average.to(param.dtype)


def ddp(net: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(net, find_unused_parameters=True)
