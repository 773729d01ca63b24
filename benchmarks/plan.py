"""What plans are like: how long planning takes, how evenly plans load ranks, where they may cut.

    make bench-plan
    make bench-balance
    make bench-cuts
    .venv/bin/python benchmarks/plan.py time --json costs.json
    .venv/bin/python benchmarks/plan.py cuts --threads 2

**time**: a plan is made for all ranks, and shards are listed for one, as each rank does for itself.
Shown are the time and the peak memory of Python objects.

**balance**: the largest shard of well-known models divided by the ideal shard. Ours comes from the
planner, torch's from its own class on a fake process group and meta tensors.

**cuts**: every elementwise class of torch.optim steps a tensor in one part, and the same tensor in
parts cut at multiples of a unit. Shown is the smallest unit that gave the same bits at all places
that were tried, on this machine. A vectorised loop and its scalar tail may round differently; then
only a multiple of the vector length will do. `make_plan` cuts at multiples of the units in the last
two lines. There is one thread by default, as torchrun sets it. Several threads share a long tensor
at places of their own choice, which depend on its length: in 16 bits no cut is then sure to keep
the bits, as indeed the unsharded update changes them with the number of threads (`--threads 2`).
"""

from __future__ import annotations

import argparse
import math
import platform
import time
import tracemalloc
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from costs import Cost, report

from onecopy import ParamSpec, is_elementwise, make_plan
from onecopy.tools.models import PRESETS, Shapes


def numels(shapes: Shapes) -> list[int]:
    return [math.prod(shape) for shape in shapes.values()]


def specs_of(shapes: Shapes) -> list[ParamSpec]:
    return [ParamSpec(i, numel, "float32", 4) for i, numel in enumerate(numels(shapes))]


# ---------------------------------------------------------------------- time

TIMED_MODELS = ("llama-3-8b", "llama-3-70b", "llama-3-405b")
TIMED_RANKS = (8, 64, 1024, 16384)


def timed_plan(shapes: Shapes, world: int) -> tuple[int, int, float, float]:
    """Return (buckets, shards of the last rank, seconds to plan, seconds to list those shards)."""
    specs = specs_of(shapes)
    start = time.perf_counter()
    made = make_plan(specs, world)
    planned = time.perf_counter()
    shards = list(made.shards(world - 1))
    return len(made.buckets), len(shards), planned - start, time.perf_counter() - planned


def peak_memory(shapes: Shapes, world: int) -> int:
    """In bytes. Measured in a run of its own, because tracing takes time."""
    tracemalloc.start()
    try:
        timed_plan(shapes, world)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def show_time(file: str | None) -> None:
    rows = []
    for name in TIMED_MODELS:
        shapes = PRESETS[name]()
        for world in TIMED_RANKS:
            buckets, shards, to_plan, to_list = timed_plan(shapes, world)
            peak = peak_memory(shapes, world) / 2**20
            counts = (world, len(shapes), buckets, shards)
            seconds = (f"{to_plan:.2f} s", f"{to_list:.2f} s")
            rows.append((name, *(f"{count:,}" for count in counts), *seconds, f"{peak:.1f} MB"))
    columns = ("model", "ranks", "tensors", "buckets", "shards", "to plan", "to list", "memory")
    report(
        Cost("Planning for all ranks, and listing the shards of one", columns, tuple(rows)), file
    )


# ---------------------------------------------------------------------- balance

BALANCED_MODELS = ("gpt2", "llama-3-8b", "llama-3.2-1b", "resnet-50")  # of the published comparison
BALANCED_RANKS = (2, 4, 8, 16, 64)


def our_largest_shard(shapes: Shapes, world: int) -> int:
    plan = make_plan(specs_of(shapes), world)
    return max(plan.load(rank) for rank in range(world))


def torchs_largest_shard(shapes: Shapes, world: int) -> int:
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes.values()]
    return max(_torchs_shard(params, rank, world) for rank in range(world))


def _torchs_shard(params: list[torch.nn.Parameter], rank: int, world: int) -> int:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        return sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])
    finally:
        dist.destroy_process_group()


def show_balance() -> None:
    warnings.simplefilter("ignore")
    print("largest shard / ideal shard\n")
    print(f"{'model':<14}{'':<9}" + "".join(f"{f'N={world}':>9}" for world in BALANCED_RANKS))
    for name in BALANCED_MODELS:
        shapes = PRESETS[name]()
        total = sum(numels(shapes))
        for who, largest_shard in (("torch", torchs_largest_shard), ("onecopy", our_largest_shard)):
            ratios = [largest_shard(shapes, world) * world / total for world in BALANCED_RANKS]
            print(f"{name:<14}{who:<9}" + "".join(f"{ratio:9.3f}" for ratio in ratios), flush=True)


# ---------------------------------------------------------------------- cuts

UNITS = (1, 2, 4, 8, 16, 32, 64)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
IMPLEMENTATIONS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
SIZES = (999, 70_001)  # the longer one would be shared among threads
STEPS = 4
OPTIONS = {  # those that bring every term of the update into play
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.01},
    "Rprop": {},
}


def elementwise_classes() -> list[type[torch.optim.Optimizer]]:
    exported = (getattr(torch.optim, name) for name in sorted(torch.optim.__all__))
    classes = [cls for cls in exported if isinstance(cls, type)]
    left_out = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
    return [cls for cls in classes if cls not in left_out and is_elementwise(cls)]


def bits_after(
    cls: type[torch.optim.Optimizer],
    options: dict[str, object],
    values: torch.Tensor,
    grads: torch.Tensor,
    cuts: list[int],
) -> torch.Tensor:
    """The values after a few steps on parts that end at ``cuts`` and at the end."""
    whole = values.clone()
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    shards = [torch.nn.Parameter(shard) for shard in whole.split(lengths)]
    optimizer = cls(shards, lr=0.01, **options)
    for grad in grads:
        for shard, part in zip(shards, grad.split(lengths), strict=True):
            shard.grad = part
        optimizer.step()
    return whole.view(BITS[whole.itemsize])  # bits, because NaN is not equal to itself


def places(unit: int, size: int) -> Iterator[list[int]]:
    """Ways to cut: near the start, near the end, everywhere, and into thirds."""
    last = (size - 1) // unit * unit
    yield [unit]
    yield [last]
    yield [unit * n for n in (1, 3, 6, 7, 11) if unit * n < size]
    yield [size // 3 // unit * unit or unit, max(2 * size // 3 // unit, 2) * unit]


def smallest_unit(
    cls: type[torch.optim.Optimizer], options: dict[str, object], dtype: torch.dtype, trials: int
) -> int | None:
    unit = 0
    for trial in range(trials):
        source = torch.Generator().manual_seed(trial)
        for size in SIZES:
            values = torch.randn(size, generator=source).to(dtype)
            grads = torch.randn(STEPS, size, generator=source).to(dtype)
            expected = bits_after(cls, options, values, grads, [])
            while unit < len(UNITS) and not all(
                torch.equal(bits_after(cls, options, values, grads, cuts), expected)
                for cuts in places(UNITS[unit], size)
            ):
                unit += 1
    return UNITS[unit] if unit < len(UNITS) else None


def units_of(
    cls: type[torch.optim.Optimizer], implementation: str, trials: int
) -> list[str] | None:
    options = {
        **OPTIONS.get(cls.__name__, {"weight_decay": 0.01}),
        **IMPLEMENTATIONS[implementation],
    }
    cells = []
    for dtype in DTYPES:
        try:
            unit = smallest_unit(cls, options, dtype, trials)
        except (TypeError, RuntimeError):  # the class has no such implementation, or not on CPUs
            return None
        cells.append("none" if unit is None else str(unit))
    return cells


def show_cuts(trials: int, threads: int) -> None:
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {platform.machine()}, {capability}, {threads} thread(s)")
    print("smallest unit, in elements, that gives the bits of the uncut tensor\n")
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    print(f"{'':22}" + "".join(f"{name:>10}" for name in names))
    for cls in elementwise_classes():
        for implementation in IMPLEMENTATIONS:
            cells = units_of(cls, implementation, trials)
            if cells is not None:
                title = f"{cls.__name__} {implementation}"
                print(f"{title:22}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    print()
    for fused in (False, True):
        units = [
            ParamSpec(0, 1, name, dtype.itemsize, fused=fused).unit
            for name, dtype in zip(names, DTYPES, strict=True)
        ]
        title = "the plan, fused" if fused else "the plan"
        print(f"{title:22}" + "".join(f"{unit:>10}" for unit in units))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    timing = commands.add_parser("time", help="how long planning takes")
    timing.add_argument("--json", metavar="FILE", help="append the table to the list in FILE")
    commands.add_parser("balance", help="how evenly plans load the ranks")
    cuts = commands.add_parser("cuts", help="where tensors may be cut without changing bits")
    cuts.add_argument("--trials", type=int, default=3, help="random tensors per cell")
    cuts.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.command == "time":
        show_time(args.json)
    elif args.command == "balance":
        show_balance()
    else:
        show_cuts(args.trials, args.threads)


if __name__ == "__main__":
    main()
