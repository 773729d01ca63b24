"""How evenly the state of well-known models is spread: largest shard / ideal shard.

Ours comes from the planner, torch's from its own class on a fake process group and meta tensors.

    make bench-balance
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from onecopy import ParamSpec, make_plan
from onecopy.presets import PRESETS, Shapes, numels

MODELS = ("gpt2", "llama-3-8b", "llama-3.2-1b", "resnet-50")  # of the published comparison
RANKS = (2, 4, 8, 16, 64)


def our_largest_shard(shapes: Shapes, world: int) -> int:
    specs = [ParamSpec(i, numel, "float32", 4) for i, numel in enumerate(numels(shapes))]
    plan = make_plan(specs, world)
    return max(plan.load(rank) for rank in range(world))


def torchs_largest_shard(shapes: Shapes, world: int) -> int:
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes.values()]
    return max(_torchs_shard(params, rank, world) for rank in range(world))


def _torchs_shard(params: list[torch.nn.Parameter], rank: int, world: int) -> int:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        return sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])
    finally:
        dist.destroy_process_group()


def main() -> None:
    warnings.simplefilter("ignore")
    print("largest shard / ideal shard\n")
    print(f"{'model':<14}{'':<9}" + "".join(f"{f'N={world}':>9}" for world in RANKS))
    for name in MODELS:
        shapes = PRESETS[name]()
        total = sum(numels(shapes))
        for who, largest_shard in (("torch", torchs_largest_shard), ("onecopy", our_largest_shard)):
            ratios = [largest_shard(shapes, world) * world / total for world in RANKS]
            print(f"{name:<14}{who:<9}" + "".join(f"{ratio:9.3f}" for ratio in ratios), flush=True)


if __name__ == "__main__":
    main()
