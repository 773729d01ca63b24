"""Whole training steps: DDP, torch's class and ours in both modes, side by side.

A GPT of 36 million parameters, half of them in the embedding, the same fused AdamW everywhere.
Methods take turns, another one begins each round, and the ratio to DDP is taken within a round; the
table shows medians, with the middle half of the rounds. Bytes are what the kernel counts on the
loopback device, per rank and step.

    make bench-step
    .venv/bin/python benchmarks/step.py --ranks 2 4 --rounds 9 --batch 2 --tokens 64
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import MB, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from onecopy import ZeroRedundancyOptimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}
DDP = "DDP + AdamW"
VOCABULARY = 32768


@dataclass(slots=True)
class Contender:
    module: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)  # of a step, per round
    sent: list[int] = field(default_factory=list)  # bytes of all ranks in a step
    loss: float = 0.0


class Tiny(nn.Module):
    """A thousand tensors of 256 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(1000))

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x.square().mean()


def build_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if args.model == "tiny":
        return Tiny()
    return GPT(GPTConfig(vocabulary=VOCABULARY, context=args.tokens, layers=6, heads=8, width=512))


def batch(args: argparse.Namespace, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    if args.model == "tiny":
        return torch.randn(args.batch, 16, generator=source), torch.zeros(())
    tokens = torch.randint(VOCABULARY, (args.batch, args.tokens + 1), generator=source)
    return tokens[:, :-1], tokens[:, 1:]


def contenders(args: argparse.Namespace) -> dict[str, Contender]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

    def under_ddp(build: Callable[[Any], torch.optim.Optimizer]) -> Contender:
        ddp = DistributedDataParallel(build_model(args))
        return Contender(ddp, build(ddp.parameters()))

    def attached(bare: bool) -> Contender:
        module = build_model(args)
        module = module if bare else DistributedDataParallel(module)
        optimizer = ZeroRedundancyOptimizer(
            module.parameters(), AdamW, parameters_as_bucket_view=True, **ADAMW
        )
        optimizer.attach(module)
        return Contender(module, optimizer)

    flat = {"parameters_as_bucket_view": True, **ADAMW}
    return {
        DDP: under_ddp(lambda params: AdamW(params, **ADAMW)),
        "torch": under_ddp(lambda params: Torchs(params, AdamW, **flat)),
        "onecopy": under_ddp(lambda params: ZeroRedundancyOptimizer(params, AdamW, **flat)),
        "onecopy attached to DDP": attached(bare=False),
        "onecopy attached": attached(bare=True),
    }


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("there is no loopback device in /proc/net/dev")


def run_rank(_: Path, args: argparse.Namespace) -> None:
    source = torch.Generator().manual_seed(dist.get_rank())
    found = contenders(args)
    names = list(found)
    for number in range(args.rounds + 1):
        for turn in range(len(names)):
            contender = found[names[(number + turn) % len(names)]]
            dist.barrier()
            sent, start = loopback_bytes(), time.perf_counter()
            for _step in range(args.steps):
                loss = contender.module(*batch(args, source))
                loss.backward()
                contender.optimizer.step()
                contender.optimizer.zero_grad()
            dist.barrier()
            if number > 0:  # the first round warms up
                contender.seconds.append((time.perf_counter() - start) / args.steps)
                contender.sent.append((loopback_bytes() - sent) // args.steps)
            contender.loss = float(loss.detach())
    if dist.get_rank() == 0:
        print_table(found, args)


def print_table(found: dict[str, Contender], args: argparse.Namespace) -> None:
    world = dist.get_world_size()
    numel = sum(param.numel() for param in found[DDP].module.parameters())
    what = f"{args.batch} x {args.tokens} tokens" if args.model == "gpt" else "1000 tensors"
    print(f"\n{world} ranks, {numel / 1e6:.1f} M parameters, {what}")
    print(f"{'':26}{'ms':>8}{'of DDP':>9}{'':16}{'of torch':>9}{'MB sent':>10}{'of DDP':>8}")
    wire = statistics.median(found[DDP].sent)
    for name, contender in found.items():
        ratios = [a / b for a, b in zip(contender.seconds, found[DDP].seconds, strict=True)]
        to_torch = [a / b for a, b in zip(contender.seconds, found["torch"].seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        sent = statistics.median(contender.sent)
        print(
            f"{name:26}{statistics.median(contender.seconds) * 1e3:8.1f}{middle:9.2f}"
            f"{f'({low:.2f} to {high:.2f})':>16}{statistics.median(to_torch):9.2f}"
            f"{sent / world / MB:10.2f}{sent / wire:8.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each in a round")
    parser.add_argument("--model", choices=["gpt", "tiny"], default="gpt")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    for world in args.ranks:
        on_ranks(world, run_rank, args)


if __name__ == "__main__":
    main()
