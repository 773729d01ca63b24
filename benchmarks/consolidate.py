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
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from costs import Cost, report
from measuring import (
    MB,
    Sample,
    Samples,
    arguments_about_state,
    gathered,
    growths,
    make_state,
    measure,
    model_of,
    on_ranks,
    slowest,
)

from onecopy import ZeroRedundancyOptimizer

TARGET = 0

RAW, FRESH = "raw gather", "raw gather, fresh memory"
OURS, TORCHS = "onecopy", "torch"


class Method(NamedTuple):
    call: Callable[[], None]
    clean_up: Callable[[], None]  # not measured
    rounds: int


# -------------------------------------------------------------------------- one rank


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


def run_rank(_: Path, args: argparse.Namespace) -> None:
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
    everyone = gathered(samples)
    if dist.get_rank() == TARGET:
        report(table(everyone, args.mb), args)


# -------------------------------------------------------------------------- the table


def table(everyone: list[Samples], mb: int) -> Cost:
    world = len(everyone)
    raw = slowest(everyone, RAW)
    rows = []
    for name in everyone[TARGET]:
        seconds = slowest(everyone, name)
        growth = growths(everyone, name)
        others = max(growth[:TARGET] + growth[TARGET + 1 :])
        numbers = (f"{seconds:.3f}", f"{mb / seconds:.0f}", f"{raw / seconds:.3g}")
        rows.append((name, *numbers, f"{growth[TARGET]:+.0f} MB", f"{others:+.0f} MB"))
    title = f"Collecting {mb} MB of state on one of {world} ranks, {mb // world} MB on each"
    columns = ("", "seconds", "MB/s", "speed", "memory of the target", "of a bystander")
    return Cost(title, columns, tuple(rows))


def main() -> None:
    parser = arguments_about_state(__doc__, mb=256, rounds=7)
    args = parser.parse_args()
    print("speed: of the raw gather = 1. memory: growth of a process at the peak")
    for world in args.ranks:
        on_ranks(world, run_rank, args)


if __name__ == "__main__":
    main()
