"""What a step costs beside the optimizer class itself, and what `check_every` adds to it.

    make bench-overhead
    make bench-checking
    .venv/bin/python benchmarks/step.py overhead --tensors 200 2000 --rounds 31
    .venv/bin/python benchmarks/step.py checking --ranks 2 --rounds 11

**overhead** steps models of many small tensors. With one rank nothing is sent, and the class does
the same work in both: the difference is ours. With two ranks each steps half of the tensors and
receives the other half, in one message. Methods alternate, and medians are shown.

**checking** trains a GPT with AdamW on gloo processes of this machine, attached and drop-in. The
same optimizer takes steps without the corruption check, with one that reads parameters and state
in every step (`watching`), and with one whose findings the ranks also compare in every step
(`comparing`), in turns; the last counts as with check_every=100. Shown are medians of the time of
`step()`, which the ranks call together, on the slowest rank. How large the share is depends on how
much is computed for each parameter: that is the number of tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import torch
import torch.distributed as dist
from costs import Sample, Samples, add_arguments, gathered, on_ranks, slowest
from inside import corruption_check_of, set_corruption_check
from torch.nn.parallel import DistributedDataParallel
from workloads import GPT, GPTConfig

from onecopy import ZeroRedundancyOptimizer

# ---------------------------------------------------------------------- overhead

UNSHARDED = "unsharded"
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD, foreach": (torch.optim.SGD, {"lr": 0.0, "foreach": True}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.0, "foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.0, "fused": True}),
}


def with_gradients(tensors: int) -> torch.nn.ParameterList:
    params = torch.nn.ParameterList(torch.zeros(16) for _ in range(tensors))
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def steps(tensors: int, name: str) -> dict[str, Callable[[], Any]]:
    """The `step` of each method."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs
    cls, options = CLASSES[name]
    found: dict[str, Callable[[], Any]] = {UNSHARDED: cls(with_gradients(tensors), **options).step}
    for title, wrapper in (("onecopy", ZeroRedundancyOptimizer), ("torch", Torchs)):
        for suffix, views in (("", False), (", bucket views", True)):
            params = with_gradients(tensors)
            optimizer = wrapper(params, cls, parameters_as_bucket_view=views, **options)
            found[title + suffix] = optimizer.step
    return found


def timed(step: Callable[[], Any]) -> Sample:
    """Of one step, with warm caches: what is measured takes microseconds per tensor."""
    step()
    dist.barrier()
    start = time.perf_counter()
    step()
    return Sample(time.perf_counter() - start, growth=0)


def run_overhead(_: Path, args: argparse.Namespace) -> None:
    for name in CLASSES:
        for tensors in args.tensors:
            methods = steps(tensors, name)
            for step in methods.values():
                step()
            samples: Samples = {title: [] for title in methods}
            for _round in range(args.rounds):
                for title, step in methods.items():
                    samples[title].append(timed(step))
            everyone = gathered(samples)
            if dist.get_rank() == 0:
                print_overhead(everyone, name, tensors)


def print_overhead(everyone: list[Samples], name: str, tensors: int) -> None:
    unsharded = slowest(everyone, UNSHARDED)
    print(f"\n{len(everyone)} ranks, {tensors} tensors, {name}")
    print(f"{'':24}{'ms':>8}{'ratio':>8}{'us per tensor beyond':>24}")
    for title in everyone[0]:
        seconds = slowest(everyone, title)
        beyond = (seconds - unsharded) * 1e6 / tensors
        ratio = seconds / unsharded
        print(f"{title:24}{seconds * 1e3:8.2f}{ratio:8.2f}{beyond:24.2f}", flush=True)


# ---------------------------------------------------------------------- checking

EVERY = 100
NEVER = 1 << 40
STEPS = 4  # in a row; the first is not counted: its caches are those of other work
GOAL = 0.01
MODELS = {
    "small": GPTConfig(8192, 128, width=320, heads=5, layers=5, tied=False),
    "large": GPTConfig(32768, 128, width=384, heads=6, layers=8, tied=False),
}
BATCHES = (4, 16, 32)  # sequences of 128 tokens


def measured(config: GPTConfig, batch: int, mode: str, rounds: int) -> dict[str, float]:
    """Seconds of a step with forward and backward, and what the parts of the check add to it."""
    torch.manual_seed(0)
    model = GPT(config)
    module = model if mode == "attached" else DistributedDataParallel(model)
    optimizer: Any = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, check_every=NEVER
    )
    if mode == "attached":
        optimizer.attach(module)
    check = corruption_check_of(optimizer)
    ways = {"plain": (None, NEVER), "watched": (check, NEVER), "compared": (check, 1)}
    stepping: dict[str, list[float]] = {way: [] for way in ways}
    whole = []
    for number in range(len(ways) * rounds):
        way = list(ways)[number % len(ways)]
        check.state_changed()
        set_corruption_check(optimizer, *ways[way])
        for step in range(STEPS):
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


def run_checking(_: Path, args: argparse.Namespace) -> None:
    if dist.get_rank() == 0:
        print(f"\n{dist.get_world_size()} ranks; milliseconds, and shares of a step")
        print(
            f"{'parameters':>11}{'tokens':>8}  {'mode':10}{'step':>9}{'watching':>10}"
            f"{'comparing':>11}{'check_every=100':>17}{'by hand, every 100':>20}"
        )
    for name in args.models:
        for batch in args.batches:
            for mode in ("attached", "drop-in"):
                print_row(MODELS[name], batch, mode, args.rounds)


def print_row(config: GPTConfig, batch: int, mode: str, rounds: int) -> None:
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    overhead = commands.add_parser("overhead", help="what a step costs beside the class itself")
    add_arguments(overhead, rounds=21, ranks=(1, 2))
    overhead.add_argument("--tensors", type=int, nargs="+", default=[200, 2000])
    checking = commands.add_parser("checking", help="what check_every costs")
    add_arguments(checking, rounds=6, ranks=(2,))
    checking.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    checking.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    args = parser.parse_args()
    for world in args.ranks:
        on_ranks(world, run_overhead if args.command == "overhead" else run_checking, args)


if __name__ == "__main__":
    main()
