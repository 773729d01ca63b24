"""What planning costs on one machine: time, and peak memory of Python objects.

A plan is made for all ranks; pieces are listed for one of them, as every rank does for itself.

    make bench-plan
    .venv/bin/python benchmarks/plan.py --json costs.json
"""

from __future__ import annotations

import argparse
import time
import tracemalloc

from costs import Cost, report

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="append the table to the list in FILE")
    args = parser.parse_args()
    rows = []
    for name in MODELS:
        shapes = PRESETS[name]()
        for world in RANKS:
            buckets, pieces, to_plan, to_list = plan(shapes, world)
            peak = peak_memory(shapes, world) / 2**20
            counts = (world, len(shapes), buckets, pieces)
            seconds = (f"{to_plan:.2f} s", f"{to_list:.2f} s")
            rows.append((name, *(f"{count:,}" for count in counts), *seconds, f"{peak:.1f} MB"))
    columns = ("model", "ranks", "tensors", "buckets", "pieces", "to plan", "to list", "memory")
    report(
        Cost("Planning for all ranks, and listing the pieces of one", columns, tuple(rows)), args
    )


if __name__ == "__main__":
    main()
