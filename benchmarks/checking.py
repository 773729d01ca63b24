"""What `check_every` costs: a share of the time of a step, both measured in the same steps.

A GPT is trained with AdamW on gloo processes of this machine, attached and drop-in. In every step
the parameters are read once and the state twice (`watching`), every so many steps the ranks compare
what they have seen (`comparing`); the latter is shown as it counts with check_every=100. Medians of
the slowest rank. How large the share is depends on how much a step computes for each parameter:
that is the number of tokens.

    make bench-checking
    .venv/bin/python benchmarks/checking.py --ranks 2 --rounds 11
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import arguments, on_ranks
from torch.nn.parallel import DistributedDataParallel
from workloads import GPT, GPTConfig

from onecopy import ZeroRedundancyOptimizer

EVERY = 100
COMPARED_EVERY = 3  # here, so that there is something to measure; the cost is divided as by EVERY
GOAL = 0.01

MODELS = {
    "small": GPTConfig(8192, 128, width=320, heads=5, layers=5, tied=False),
    "large": GPTConfig(32768, 128, width=384, heads=6, layers=8, tied=False),
}
BATCHES = (4, 16, 32)  # sequences of 128 tokens


class Clock:
    """Seconds spent in calls of a function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.spent: list[float] = []

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        result = self._call(*args)
        self.spent.append(time.perf_counter() - start)
        return result


def measured(config: GPTConfig, batch: int, mode: str, rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = GPT(config)
    module = model if mode == "attached" else DistributedDataParallel(model)
    optimizer: Any = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, check_every=COMPARED_EVERY
    )
    if mode == "attached":
        optimizer.attach(module)
    looking = optimizer._look_for_damage = Clock(optimizer._look_for_damage)
    sealing = optimizer._seal_state = Clock(optimizer._seal_state)
    by_hand, steps = Clock(optimizer.assert_replicas_equal), []
    for _ in range(COMPARED_EVERY * rounds):
        tokens = torch.randint(config.vocabulary, (batch, config.context + 1))
        dist.barrier()
        start = time.perf_counter()
        module(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - start)
    for _ in range(rounds):
        dist.barrier()
        by_hand()
    compares = looking.spent[COMPARED_EVERY - 1 :: COMPARED_EVERY]
    others = [s for i, s in enumerate(looking.spent) if (i + 1) % COMPARED_EVERY]
    watching = statistics.median(others) + statistics.median(sealing.spent)
    return {
        "step": statistics.median(steps) - watching,
        "watching": watching,
        "comparing": max(0.0, statistics.median(compares) - statistics.median(others)),
        "by hand": statistics.median(by_hand.spent),
    }


def run_rank(_: Path, args: argparse.Namespace) -> None:
    if dist.get_rank() == 0:
        print(f"\n{dist.get_world_size()} ranks; milliseconds, and shares of a step")
        print(
            f"{'parameters':>11}{'tokens':>8}  {'mode':10}{'step':>9}{'watching':>10}"
            f"{'comparing':>11}{'check_every=100':>17}{'by hand, every 100':>20}"
        )
    for name in args.models:
        for batch in args.batches:
            for mode in ("attached", "drop-in"):
                row(MODELS[name], batch, mode, args.rounds)


def row(config: GPTConfig, batch: int, mode: str, rounds: int) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, measured(config, batch, mode, rounds))
    worst = {key: max(each[key] for each in everyone) for key in everyone[0]}
    share = (worst["watching"] + worst["comparing"] / EVERY) / worst["step"]
    by_hand = worst["by hand"] / EVERY / worst["step"]
    with torch.device("meta"):
        millions = sum(param.numel() for param in GPT(config).parameters()) / 1e6
    if dist.get_rank() == 0:
        print(
            f"{millions:9.1f} M{batch * config.context:8}  {mode:10}{worst['step'] * 1e3:9.0f}"
            f"{worst['watching'] * 1e3:10.1f}{worst['comparing'] * 1e3:11.1f}{share:16.2%} "
            f"{by_hand:19.3%} {'' if share < GOAL else ' above 1 %'}",
            flush=True,
        )


def main() -> None:
    parser = arguments(__doc__, rounds=4, ranks=(2,))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    args = parser.parse_args()
    for world in args.ranks:
        on_ranks(world, run_rank, args)


if __name__ == "__main__":
    main()
