"""Small models with rank-distinct data, and a plain optimizer to train against.

Every model's `forward` returns a loss, and `batch(seed)` makes an input for it. `Twins` trains two
copies of a model side by side under DDP, one with the plain optimizer, one with ours:

    twins = Twins(world, Mlp(), torch.optim.AdamW, lr=0.1)
    twins.train(3)                                        # compares bit for bit after every step
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from harness import World
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onecopy import ZeroRedundancyOptimizer

# About 130 float32 elements: the models below then have several buckets, and parameters span them.
SMALL_BUCKETS = 0.0005


# ---------------------------------------- data ----------------------------------------


def generator(*seeds: int) -> torch.Generator:
    """Random numbers that differ for any two lists of (small) seeds."""
    return torch.Generator().manual_seed(sum(s * 1009**i for i, s in enumerate(seeds, start=1)))


def noise(*shape: int, seed: Iterable[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator(*seed), dtype=dtype)


def seed_of(world: World, step: int) -> tuple[int, int]:
    """Another batch on every rank and in every step."""
    return (world.rank + 1, step + 1)


# ---------------------------------------- models ----------------------------------------


class Mlp(nn.Module):
    """328 elements by default, in sizes that neither ranks nor vector lengths divide."""

    def __init__(self, width: int = 17) -> None:
        super().__init__()
        self.first = nn.Linear(11, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))).square().mean()

    def batch(self, seed: Iterable[int]) -> torch.Tensor:
        return noise(6, 11, seed=seed, dtype=self.first.weight.dtype)


class ConvNet(nn.Module):
    """Two convolutions, channels_last by default, and a linear layer."""

    def __init__(self, memory_format: torch.memory_format = torch.channels_last) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 7, 3, padding=1)
        self.second = nn.Conv2d(7, 5, 3)
        self.last = nn.Linear(5, 2)
        self.to(memory_format=memory_format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(x.mean((2, 3))).square().mean()

    def batch(self, seed: Iterable[int]) -> torch.Tensor:
        return noise(2, 3, 6, 6, seed=seed)


class TiedNet(nn.Module):
    """A little language model: its output layer is its embedding."""

    def __init__(self, vocabulary: int = 29, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.mix(x).chunk(3, dim=-1)
        x = x + self.project(torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v)
        logits = self.head(x[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def batch(self, seed: Iterable[int]) -> torch.Tensor:
        vocabulary = self.embedding.num_embeddings
        return torch.randint(vocabulary, (2, 7), generator=generator(*seed))


class MixedNet(nn.Module):
    """float32, bfloat16 and float64 in one model, with gradients large enough for bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.Linear(9, 13)
        self.narrow = nn.Linear(13, 21, dtype=torch.bfloat16)
        self.wide = nn.Linear(21, 7, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.usual(x)).bfloat16()
        return self.wide(torch.tanh(self.narrow(x)).double()).square().sum()

    def batch(self, seed: Iterable[int]) -> torch.Tensor:
        return noise(6, 9, seed=seed)


class BranchNet(nn.Module):
    """Two branches. A batch takes those that `takes(seed)` says; nothing ever uses `idle`."""

    def __init__(self, takes: Callable[[Iterable[int]], tuple[bool, bool]]) -> None:
        super().__init__()
        self.takes = takes
        self.trunk = nn.Linear(5, 9)
        self.left = nn.Linear(9, 7)
        self.right = nn.Linear(9, 7)
        self.idle = nn.Linear(3, 11)

    def forward(self, x: torch.Tensor, left: bool, right: bool) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        loss = x.square().mean()
        if left:
            loss = loss + self.left(x).square().mean()
        if right:
            loss = loss + self.right(x).square().mean()
        return loss

    def batch(self, seed: Iterable[int]) -> tuple[torch.Tensor, bool, bool]:
        return (noise(4, 5, seed=seed), *self.takes(seed))


# ---------------------------------------- comparing ----------------------------------------


def assert_same_parameters(model: nn.Module, expected: nn.Module) -> None:
    """Bit for bit, strides included; names the first parameter that differs."""
    pairs = list(zip(model.named_parameters(), expected.named_parameters(), strict=True))
    for (name, param), (expected_name, other) in pairs:
        assert name == expected_name
        assert param.stride() == other.stride(), name
        assert_bit_equal(param, other, name)


def assert_bit_equal(tensor: torch.Tensor, expected: torch.Tensor, name: str = "tensor") -> None:
    assert tensor.dtype == expected.dtype, name
    if not torch.equal(tensor, expected):
        assert tensor.shape == expected.shape, name
        wrong = (tensor != expected).flatten().nonzero().flatten().tolist()
        raise AssertionError(f"{name}: {len(wrong)} of {tensor.numel()} differ, first {wrong[:5]}")


def assert_same_on_all_ranks(model: nn.Module, group: Any = None) -> None:
    """All ranks of the group hold the same bits."""
    for name, param in model.named_parameters():
        mine = param.detach().contiguous()
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        for rank, theirs in enumerate(everyone):
            assert torch.equal(mine, theirs), f"{name} is another on rank {rank}"


# ---------------------------------------- training ----------------------------------------


def average_gradients(tensors: Iterable[torch.Tensor], group: Any = None) -> None:
    """What DDP does, for tensors that it does not know."""
    for tensor in tensors:
        if tensor.grad is not None:
            grad = torch.view_as_real(tensor.grad) if tensor.is_complex() else tensor.grad
            total = grad.contiguous()
            dist.all_reduce(total, group=group)
            grad.copy_(total / dist.get_world_size(group))


def hooks(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch, whichever form the model's batches have."""
    return model(*batch) if isinstance(batch, tuple) else model(batch)


class Twins:
    """One model twice under DDP: with the plain optimizer, and with ours.

    `groups(model)` makes what both optimizers get as parameters, by default all of them in one
    group. `ddp` and `zero` are keywords for the two wrappers; all others are the optimizer's. With
    `ddp=False` there is no DDP, and gradients are averaged one by one: for what it cannot follow.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        groups: Callable[[nn.Module], Any] = nn.Module.parameters,
        ddp: dict[str, Any] | bool = True,
        zero: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.world = world
        model = model.to(world.device)
        self.start = copy.deepcopy(model)
        self.plain_model, self.model = model, copy.deepcopy(model)
        self.by_hand = ddp is False
        keywords = ddp if isinstance(ddp, dict) else {}
        self.plain_ddp, self.ddp = (
            m if self.by_hand else DistributedDataParallel(m, **keywords)
            for m in (self.plain_model, self.model)
        )
        zero = {"bucket_mb": SMALL_BUCKETS, **(zero or {})}
        self.plain = optimizer_class(groups(self.plain_model), **copy.deepcopy(options))
        self.optimizer = ZeroRedundancyOptimizer(
            groups(self.model), optimizer_class, **zero, **options
        )
        self.steps = 0

    def both(self) -> Iterator[tuple[nn.Module, nn.Module, torch.optim.Optimizer]]:
        """(model, its DDP, its optimizer) of the plain twin, then of the sharded one."""
        yield self.plain_model, self.plain_ddp, self.plain
        yield self.model, self.ddp, self.optimizer

    def batch(self) -> Any:
        made = self.model.batch(seed_of(self.world, self.steps))
        move = self.world.device
        if isinstance(made, tuple):
            return tuple(m.to(move) if isinstance(m, torch.Tensor) else m for m in made)
        return made.to(move)

    def backward(self, set_to_none: bool = True) -> None:
        """Gradients of the next batch, for both."""
        batch = self.batch()
        for _, ddp, _ in self.both():
            ddp.zero_grad(set_to_none=set_to_none)
            hooks(ddp, batch).backward()
            if self.by_hand:
                average_gradients(ddp.parameters())

    def train(self, steps: int, check: bool = True) -> None:
        for _ in range(steps):
            self.backward()
            self.step()
            if check:
                self.assert_equal()

    def step(self) -> None:
        for _, _, optimizer in self.both():
            optimizer.step()
        self.steps += 1

    def assert_equal(self) -> None:
        assert_same_parameters(self.model, self.plain_model)

    def assert_moved(self) -> None:
        """Training has changed every parameter that the optimizer has and that has a gradient."""
        before = dict(self.start.named_parameters())
        optimized = {p for group in self.optimizer.param_groups for p in group["params"]}
        moving = [(n, p) for n, p in self.model.named_parameters() if p in optimized]
        assert moving
        for name, param in moving:
            if param.grad is not None and param.numel():
                assert not torch.equal(param, before[name]), f"{name} did not move"


# ---------------------------------------- bare parameters ----------------------------------------


def random_parameter(*shape: int) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(*shape))


def params_of_shapes(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(noise(*shape, seed=(i + 1,))) for i, shape in enumerate(shapes)]


def train_on_constants(
    opt: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 2
) -> None:
    for step in range(steps):
        for param in params:
            param.grad = torch.full_like(param, 0.1 + step)
        opt.step()


def give_equal_gradients(step: int, *replicas: list[nn.Parameter]) -> None:
    for params in replicas:
        for i, param in enumerate(params):
            param.grad = (
                noise(*param.shape, seed=(step + 1, i + 1)) if param.requires_grad else None
            )


def assert_equal_params(ours: list[nn.Parameter], plain: list[nn.Parameter]) -> None:
    for number, (mine, its) in enumerate(zip(ours, plain, strict=True)):
        assert torch.equal(mine, its), f"parameter {number}"
