"""What plan.py, step.py and state.py share: ranks on this machine, time and memory of a call, and
small tables, which bench.py collects."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

MB = 10**6


class Sample(NamedTuple):
    """One call of one method on one rank."""

    seconds: float
    growth: float  # the largest growth of resident memory during the call, in bytes


Samples = dict[str, list[Sample]]  # by method


def resident(field: str) -> int:
    """VmRSS, or VmHWM, the most that was resident since the last reset, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system does not tell {field} in /proc/self/status")


def measure(call: Callable[[], object]) -> Sample:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else the next call finds the pages of the last one
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    dist.barrier()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return Sample(seconds, resident("VmHWM") - before)


def gathered(samples: Samples) -> list[Samples]:
    """The samples of all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, samples)
    return everyone


def slowest(everyone: Sequence[Samples], name: str) -> float:
    """The median over the rounds of the slowest rank's time."""
    rounds = zip(*(samples[name] for samples in everyone), strict=True)
    return statistics.median(max(sample.seconds for sample in ranks) for ranks in rounds)


def growths(everyone: Sequence[Samples], name: str) -> list[float]:
    """The largest growth of each rank, in MB."""
    return [max(sample.growth for sample in samples[name]) / MB for samples in everyone]


def on_ranks(world: int, body: Callable[..., None], *args: Any) -> None:
    """Run ``body(directory, *args)`` on so many gloo processes, with a temporary directory."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(_run_rank, (world, directory, body, args), nprocs=world)


def _run_rank(rank: int, world: int, directory: str, body: Callable[..., None], args: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    body(Path(directory), *args)
    dist.destroy_process_group()


def add_arguments(
    parser: argparse.ArgumentParser, rounds: int, ranks: Sequence[int] = (2, 4)
) -> None:
    """The options of every benchmark in which methods alternate on several ranks."""
    parser.add_argument("--ranks", type=int, nargs="+", default=list(ranks))
    parser.add_argument("--rounds", type=int, default=rounds)


# ---------------------------------------------------------------------- tables


@dataclass(frozen=True, slots=True)
class Cost:
    """A small table: for each method, some numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def report(cost: Cost, file: str | None) -> None:
    """Print a table, and append it to the JSON list in the file, if one is given."""
    print(cost_as_text(cost), flush=True)
    if file is None:
        return
    path = Path(file)
    known = json.loads(path.read_text()) if path.exists() else []
    known.append({"title": cost.title, "columns": cost.columns, "rows": cost.rows})
    path.write_text(json.dumps(known, indent=1) + "\n")


def cost_as_text(cost: Cost) -> str:
    lines = [cost.columns, *cost.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(cost.columns))]
    text = [f"\n{cost.title}"]
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        text.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(text)
