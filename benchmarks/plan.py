"""What planning costs on one machine: time, and peak memory of Python objects.

A plan is made for all ranks; pieces are listed for one of them, as every rank does for itself.

    make bench-plan
"""

from __future__ import annotations

import time
import tracemalloc

from onecopy import ParamSpec, make_plan
from onecopy.presets import PRESETS, Shapes, numels

MODELS = ("llama-3-8b", "llama-3-70b", "llama-3-405b")
RANKS = (8, 64, 1024, 16384)


def plan(shapes: Shapes, world: int) -> tuple[int, int, float, float]:
    """(buckets, pieces of the last rank, seconds to plan, seconds to list those pieces)."""
    specs = [ParamSpec(i, numel, "float32", 4) for i, numel in enumerate(numels(shapes))]
    start = time.perf_counter()
    made = make_plan(specs, world)
    planned = time.perf_counter()
    pieces = list(made.pieces(world - 1))
    return len(made.buckets), len(pieces), planned - start, time.perf_counter() - planned


def peak_memory(shapes: Shapes, world: int) -> int:
    """Bytes. Measured in a run of its own, because it slows down the clock."""
    tracemalloc.start()
    try:
        plan(shapes, world)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main() -> None:
    print(
        f"{'model':<14}{'ranks':>7}{'tensors':>9}{'buckets':>9}{'pieces':>8}"
        f"{'to plan':>10}{'to list':>10}{'memory':>10}"
    )
    for name in MODELS:
        shapes = PRESETS[name]()
        for world in RANKS:
            buckets, pieces, to_plan, to_list = plan(shapes, world)
            peak = peak_memory(shapes, world) / 2**20
            print(
                f"{name:<14}{world:>7}{len(shapes):>9}{buckets:>9}{pieces:>8}"
                f"{to_plan:>8.2f} s{to_list:>8.2f} s{peak:>7.1f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
