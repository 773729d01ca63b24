"""Time and memory of gathering the full state of AdamW to one rank, on gloo and this machine.

The measure is a raw `dist.gather` of as many bytes, every rank's share into a tensor that was
allocated and touched before. A consolidation allocates its result and pays for fresh pages, so the
raw gather into fresh tensors is shown as well. (On gloo a gather has a buffer of its own, as large
as the result.)

Methods take turns, and medians are shown; memory is the largest growth of a process during a call.

    make bench-consolidate
    .venv/bin/python benchmarks/consolidate.py --mb 256 --rounds 5 --ranks 2 4 --no-torch
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

from onecopy import ZeroRedundancyOptimizer

MB = 10**6
TARGET = 0
WIDTH = 1024

RAW, FRESH = "raw gather", "raw gather, fresh memory"
OURS, TORCHS = "onecopy", "torch"


class Sample(NamedTuple):
    """One call of one method on one rank."""

    seconds: float
    growth: float  # of resident memory, in bytes, at most during the call


class Method(NamedTuple):
    call: Callable[[], None]
    clean_up: Callable[[], None]  # not measured
    rounds: int


# -------------------------------------------------------------------------- one rank


def resident(field: str) -> int:
    """VmRSS, or VmHWM: the most that was resident since the last reset. In bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system does not tell {field} in /proc/self/status")


def measure(call: Callable[[], None]) -> Sample:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else the next call finds the pages of the last one
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    dist.barrier()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return Sample(seconds, resident("VmHWM") - before)


def model_of(state_bytes: int) -> list[torch.nn.Parameter]:
    """Matrices and vectors as in a transformer; AdamW keeps 8 bytes for each element."""
    elements, shapes = state_bytes // 8, []
    while elements > 0:
        for shape in ((WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,), (WIDTH,)):
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


def state_bytes(state: Any) -> int:
    """Tensors of a state dict, without the scalars."""
    tensors = [t for entry in state.values() for t in entry.values() if t.dim()]
    return sum(t.numel() * t.element_size() for t in tensors)


def raw_gather(share: torch.Tensor, rooms: list[torch.Tensor] | None) -> None:
    dist.gather(share, rooms, dst=TARGET)


def rooms_like(share: torch.Tensor) -> list[torch.Tensor] | None:
    if dist.get_rank() != TARGET:
        return None
    return [torch.empty_like(share) for _ in range(dist.get_world_size())]


def methods(args: argparse.Namespace) -> dict[str, Method]:
    params = model_of(args.mb * MB)
    total = 8 * sum(param.numel() for param in params)
    share = torch.ones(total // dist.get_world_size() // 4)
    rooms = rooms_like(share)
    for room in rooms or ():
        room.zero_()  # touch its pages

    ours = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.0)
    make_state(ours, params)
    ours.consolidate_state_dict(TARGET)
    if ours.rank == TARGET:
        gathered = state_bytes(ours.state_dict()["state"])
        if gathered != total:
            raise RuntimeError(f"expected {total} bytes of state, got {gathered}")
    ours.step()  # drops the result

    found = {
        RAW: Method(lambda: raw_gather(share, rooms), lambda: None, args.rounds),
        FRESH: Method(lambda: raw_gather(share, rooms_like(share)), lambda: None, args.rounds),
        OURS: Method(lambda: ours.consolidate_state_dict(TARGET), ours.step, args.rounds),
    }
    if not args.no_torch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs
        torchs = Torchs(params, torch.optim.AdamW, lr=0.0)
        make_state(torchs, params)
        found[TORCHS] = Method(
            lambda: torchs.consolidate_state_dict(TARGET), lambda: None, args.torch_rounds
        )
    return found


def run_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    turns = methods(args)
    for method in turns.values():  # connections, first use of code
        if method.rounds == args.rounds:
            method.call()
            method.clean_up()
    samples: dict[str, list[Sample]] = {name: [] for name in turns}
    for number in range(args.rounds):
        for name, method in turns.items():
            if number < method.rounds:
                samples[name].append(measure(method.call))
                method.clean_up()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, samples)
    if rank == TARGET:
        print_table(everyone, world, args.mb)
    dist.destroy_process_group()


# -------------------------------------------------------------------------- the table


def print_table(everyone: list[dict[str, list[Sample]]], world: int, mb: int) -> None:
    print(f"\n{world} ranks, {mb} MB of state, {mb // world} MB on each")
    print(f"{'':28}{'seconds':>9}{'MB/s':>8}{'speed':>8}{'target':>13}{'bystander':>13}")
    raw = seconds_of(everyone, RAW)
    for name in everyone[TARGET]:
        seconds = seconds_of(everyone, name)
        growth = [max(s.growth for s in samples[name]) / MB for samples in everyone]
        others = max(growth[:TARGET] + growth[TARGET + 1 :])
        print(
            f"{name:28}{seconds:9.3f}{mb / seconds:8.0f}{raw / seconds:8.3g}"
            f"{growth[TARGET]:+10.0f} MB{others:+10.0f} MB",
            flush=True,
        )


def seconds_of(everyone: list[dict[str, list[Sample]]], name: str) -> float:
    """Median over the rounds of the slowest rank's time."""
    rounds = zip(*(samples[name] for samples in everyone), strict=True)
    return statistics.median(max(sample.seconds for sample in ranks) for ranks in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=256, help="state of all ranks together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch-rounds", type=int, default=1, help="it takes 10 to 30 s each")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's own class")
    args = parser.parse_args()
    print("speed: of the raw gather = 1. target, bystander: growth of resident memory at the peak")
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(run_rank, (world, args, directory), nprocs=world)


if __name__ == "__main__":
    main()
