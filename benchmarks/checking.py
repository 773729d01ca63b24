"""What `check_every` costs: a share of the time of a step.

A GPT is trained with AdamW on gloo processes of this machine, attached and drop-in. The same
optimizer takes steps without a sentry, with one that looks at all buckets in every step
(`watching`), and with one whose findings the ranks also compare in every step (`comparing`), in
turns. The last counts as with check_every=100. Medians of what `step()` took, of the slowest rank;
the ranks call it together. How large the share is depends on how much is computed for each
parameter: that is the number of tokens.

    make bench-checking
    .venv/bin/python benchmarks/checking.py --ranks 2 --rounds 11
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import arguments, on_ranks
from torch.nn.parallel import DistributedDataParallel
from workloads import GPT, GPTConfig

from onecopy import ZeroRedundancyOptimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from inside import corruption_check_of, set_corruption_check

EVERY = 100
NEVER = 1 << 40
TURN = 4  # steps; the first of a turn is not counted: it finds another's traces in the cache
GOAL = 0.01

MODELS = {
    "small": GPTConfig(8192, 128, width=320, heads=5, layers=5, tied=False),
    "large": GPTConfig(32768, 128, width=384, heads=6, layers=8, tied=False),
}
BATCHES = (4, 16, 32)  # sequences of 128 tokens


def measured(config: GPTConfig, batch: int, mode: str, rounds: int) -> dict[str, float]:
    """Seconds: of a step with forward and backward, and what else it took."""
    torch.manual_seed(0)
    model = GPT(config)
    module = model if mode == "attached" else DistributedDataParallel(model)
    optimizer: Any = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, check_every=NEVER
    )
    if mode == "attached":
        optimizer.attach(module)
    sentry = corruption_check_of(optimizer)
    ways = {"plain": (None, NEVER), "watched": (sentry, NEVER), "compared": (sentry, 1)}
    stepping: dict[str, list[float]] = {way: [] for way in ways}
    whole = []
    for turn in range(len(ways) * rounds):
        way = list(ways)[turn % len(ways)]
        sentry.unseal()
        set_corruption_check(optimizer, *ways[way])
        for step in range(TURN):
            tokens = torch.randint(config.vocabulary, (batch, config.context + 1))
            dist.barrier()
            start = time.perf_counter()
            module(tokens[:, :-1], tokens[:, 1:]).backward()
            computed = time.perf_counter() - start
            dist.barrier()
            start = time.perf_counter()
            optimizer.step()
            if step:
                stepping[way].append(time.perf_counter() - start)
            optimizer.zero_grad()
            if step and way == "plain":
                whole.append(computed + stepping[way][-1])
    by_hand = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        optimizer.assert_replicas_equal()
        by_hand.append(time.perf_counter() - start)
    took = {way: statistics.median(seconds) for way, seconds in stepping.items()}
    return {
        "step": statistics.median(whole),
        "watching": max(0.0, took["watched"] - took["plain"]),
        "comparing": max(0.0, took["compared"] - took["watched"]),
        "by hand": statistics.median(by_hand),
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
    parser = arguments(__doc__, rounds=6, ranks=(2,))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    args = parser.parse_args()
    for world in args.ranks:
        on_ranks(world, run_rank, args)


if __name__ == "__main__":
    main()
