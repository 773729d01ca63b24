"""What a step costs beside the optimizer class itself, for models of many small tensors.

With one rank nothing is sent, and the class does the same work in both: the difference is ours.
With two ranks each steps half of the tensors and receives the other half, in one message.
Methods take turns, and medians are shown.

    make bench-overhead
    .venv/bin/python benchmarks/overhead.py --tensors 200 2000 --rounds 31
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import Sample, Samples, arguments, gathered, on_ranks, slowest

from onecopy import ZeroRedundancyOptimizer

PLAIN, OURS, OURS_FLAT = "unsharded", "onecopy", "onecopy, bucket views"
TORCHS, TORCHS_FLAT = "torch", "torch, bucket views"
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


def methods(tensors: int, name: str) -> dict[str, Callable[[], Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs
    cls, options = CLASSES[name]
    sharded = {
        OURS: (ZeroRedundancyOptimizer, False),
        OURS_FLAT: (ZeroRedundancyOptimizer, True),
        TORCHS: (Torchs, False),
        TORCHS_FLAT: (Torchs, True),
    }
    found: dict[str, Callable[[], Any]] = {PLAIN: cls(with_gradients(tensors), **options).step}
    for title, (wrapper, flat) in sharded.items():
        optimizer = wrapper(with_gradients(tensors), cls, parameters_as_bucket_view=flat, **options)
        found[title] = optimizer.step
    return found


def timed(step: Callable[[], Any]) -> Sample:
    """Of one step, with warm caches: what is measured takes microseconds per tensor."""
    step()
    dist.barrier()
    start = time.perf_counter()
    step()
    return Sample(time.perf_counter() - start, growth=0)


def run_rank(_: Path, args: argparse.Namespace) -> None:
    for name in CLASSES:
        for tensors in args.tensors:
            turns = methods(tensors, name)
            for step in turns.values():
                step()
            samples: Samples = {title: [] for title in turns}
            for _round in range(args.rounds):
                for title, step in turns.items():
                    samples[title].append(timed(step))
            everyone = gathered(samples)
            if dist.get_rank() == 0:
                print_rows(everyone, name, tensors)


def print_rows(everyone: list[Samples], name: str, tensors: int) -> None:
    plain = slowest(everyone, PLAIN)
    print(f"\n{len(everyone)} ranks, {tensors} tensors, {name}")
    print(f"{'':24}{'ms':>8}{'ratio':>8}{'us per tensor beyond':>24}")
    for title in everyone[0]:
        seconds = slowest(everyone, title)
        beyond = (seconds - plain) * 1e6 / tensors
        print(f"{title:24}{seconds * 1e3:8.2f}{seconds / plain:8.2f}{beyond:24.2f}", flush=True)


def main() -> None:
    parser = arguments(__doc__, rounds=21, ranks=(1, 2))
    parser.add_argument("--tensors", type=int, nargs="+", default=[200, 2000])
    args = parser.parse_args()
    for world in args.ranks:
        on_ranks(world, run_rank, args)


if __name__ == "__main__":
    main()
