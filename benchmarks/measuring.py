"""What the benchmarks of this directory share: ranks on this machine, time and memory of a call."""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

MB = 10**6


class Sample(NamedTuple):
    """One call of one method on one rank."""

    seconds: float
    growth: float  # of resident memory, in bytes, at most during the call


Samples = dict[str, list[Sample]]  # by method


def resident(field: str) -> int:
    """VmRSS, or VmHWM: the most that was resident since the last reset. In bytes."""
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


def slowest(everyone: Sequence[Samples], name: str) -> float:
    """Median over the rounds of the slowest rank's time."""
    rounds = zip(*(samples[name] for samples in everyone), strict=True)
    return statistics.median(max(sample.seconds for sample in ranks) for ranks in rounds)


def growths(everyone: Sequence[Samples], name: str) -> list[float]:
    """The largest growth of each rank, in MB."""
    return [max(sample.growth for sample in samples[name]) / MB for samples in everyone]


def on_ranks(world: int, body: Callable[..., None], *args: Any) -> None:
    """Run ``body(directory, *args)`` on so many gloo processes, with a directory of their own."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(as_rank, (world, directory, body, args), nprocs=world)


def as_rank(rank: int, world: int, directory: str, body: Callable[..., None], args: Any) -> None:
    """Be this rank of a gloo group and run ``body(directory, *args)``."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    body(Path(directory), *args)
    dist.destroy_process_group()


def arguments(
    description: str, rounds: int, ranks: Sequence[int] = (2, 4)
) -> argparse.ArgumentParser:
    """The options of every benchmark in which methods take turns on several ranks."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(ranks))
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def arguments_about_state(description: str, mb: int, rounds: int) -> argparse.ArgumentParser:
    """The options of a benchmark that compares ways to move the state of all ranks."""
    parser = arguments(description, rounds)
    parser.add_argument("--mb", type=int, default=mb, help="state of all ranks together")
    parser.add_argument("--torch-rounds", type=int, default=1, help="it takes 10 to 60 s each")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's own class")
    parser.add_argument("--json", metavar="FILE", help="append the tables to the list in FILE")
    return parser


def gathered(samples: Samples) -> list[Samples]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, samples)
    return everyone


def model_of(state_bytes: int) -> list[torch.nn.Parameter]:
    """Matrices and vectors as in a transformer of some four layers or more, so that no tensor is
    most of it; AdamW keeps 8 bytes for each element."""
    elements, shapes = state_bytes // 8, []
    width = 1 << (max(1, elements // 32).bit_length() - 1) // 2  # a layer has 8 * width**2
    while elements > 0:
        for shape in ((width, 4 * width), (4 * width,), (4 * width, width), (width,), (width,)):
            rows = min(shape[0], -(-elements // (shape[1] if len(shape) == 2 else 1)))
            if rows > 0:
                shapes.append((rows, *shape[1:]))
                elements -= torch.Size(shapes[-1]).numel()
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def make_state(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    optimizer.zero_grad()
