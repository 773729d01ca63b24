"""Time and memory of writing and reading a checkpoint of AdamW's state, on gloo and this machine.

Side by side: the disk itself (a plain write of as many bytes through the page cache, and fsync, by
one process; `optimizer.save` writes past the cache), ours
sharded (`optimizer.save`, and `dcp.save` with `optimizer.sharded()`), ours and torch's own class
consolidated to one rank and written with `torch.save`, and an unsharded optimizer on one rank.
All of them end with fsync. For `dcp.async_save` the part that blocks training is shown next to a
copy of the shard in memory, which is the least it could do.

Methods take turns, and medians are shown; times are those of the slowest rank; memory is the
largest growth of a process during a call. What is read is in the page cache.

    make bench-checkpoint
    .venv/bin/python benchmarks/checkpoint.py --mb 500 --rounds 5 --ranks 2 4 --no-torch
"""

from __future__ import annotations

import argparse
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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

DISK = "disk: write and fsync, in place"
NEW = "disk: the same, to a new file"
COPY = "copy of the shard in memory"
ASYNC = "dcp.async_save, blocking part"
OURS = "onecopy: optimizer.save"
TORCHS = "torch's class: consolidate, torch.save"
READ = "onecopy: optimizer.load"


class Method(NamedTuple):
    call: Callable[[], object]
    after: Callable[[], object] = lambda: None  # not measured
    rounds: int | None = None


def write_synced(path: Path, write: Callable[[Any], None]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


class Bench:
    """All methods on one rank."""

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        warnings.simplefilter("ignore")  # DCP says each time that it overwrites
        self.directory, self.args = directory, args
        self.is_first = dist.get_rank() == 0
        self.params = model_of(args.mb * MB)
        self.state_bytes = 8 * sum(param.numel() for param in self.params)
        self.ours = self.sharded(self.params)
        make_state(self.ours, self.params)
        self.saver = dist.new_group(backend="gloo")
        self.pending: Any = None
        self.block = torch.ones(16 * MB // 4)

    def sharded(self, params: list[torch.nn.Parameter]) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.0)

    # ---------------------------------------------------------------- writing

    def disk(self, in_place: bool) -> None:
        """A file that is overwritten, or a new one that replaces the old one when it is written."""

        def write(file: Any) -> None:
            view = memoryview(self.block.view(torch.uint8).numpy())
            for start in range(0, self.state_bytes, len(view)):
                file.write(view[: self.state_bytes - start])

        if self.is_first:
            path = self.directory / f"disk-{in_place}.bin"
            new = path if in_place else path.with_suffix(".new")
            write_synced(new, write)
            new.replace(path)

    def dcp_save(self) -> None:
        dcp.save({"optim": self.ours.sharded()}, checkpoint_id=self.directory / "dcp")

    def consolidated(self, optimizer: Any, name: str) -> None:
        optimizer.consolidate_state_dict(0)
        if self.is_first:
            full = optimizer.state_dict()
            write_synced(self.directory / name, lambda file: torch.save(full, file))

    def copy(self) -> None:
        self.copies = [t.clone() for s in self.ours.state.values() for t in s.values() if t.dim()]

    def drop_copies(self) -> None:
        self.copies = []

    def async_save(self) -> None:
        self.pending = dcp.async_save(
            {"optim": self.ours.sharded()},
            checkpoint_id=self.directory / "async",
            process_group=self.saver,
        )

    def wait(self) -> None:
        self.pending.result()

    def writing(self) -> dict[str, Method]:
        plain = None
        if self.is_first:
            plain = torch.optim.AdamW([torch.nn.Parameter(p.detach()) for p in self.params], lr=0.0)
            make_state(plain, plain.param_groups[0]["params"])

        def save_plain() -> None:
            if plain is not None:
                full = plain.state_dict()
                write_synced(self.directory / "plain.pt", lambda file: torch.save(full, file))

        found = {
            DISK: Method(lambda: self.disk(in_place=True)),
            NEW: Method(lambda: self.disk(in_place=False)),
            OURS: Method(lambda: self.ours.save(self.directory / "ours")),
            "onecopy: dcp.save, optimizer.sharded": Method(self.dcp_save),
            "onecopy: consolidate, torch.save": Method(
                lambda: self.consolidated(self.ours, "ours.pt"), self.ours.step
            ),
            "unsharded on one rank: torch.save": Method(save_plain),
            COPY: Method(self.copy, self.drop_copies),
            ASYNC: Method(self.async_save, self.wait),
        }
        if not self.args.no_torch:
            from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

            torchs = Torchs(self.params, torch.optim.AdamW, lr=0.0)
            make_state(torchs, self.params)
            found[TORCHS] = Method(
                lambda: self.consolidated(torchs, "torch.pt"), rounds=self.args.torch_rounds
            )
        return found

    # ---------------------------------------------------------------- reading

    def reading(self) -> dict[str, Method]:
        fresh: list[Any] = []

        def renew() -> None:
            fresh[:] = [self.sharded(self.params)]

        def load_full(name: str) -> None:
            fresh[0].load_state_dict(torch.load(self.directory / name, weights_only=True))

        def load_plain() -> None:
            if self.is_first:
                plain = torch.optim.AdamW(self.params, lr=0.0)
                path = self.directory / "plain.pt"
                plain.load_state_dict(torch.load(path, weights_only=True))

        def load_dcp() -> None:
            dcp.load({"optim": fresh[0].sharded()}, checkpoint_id=self.directory / "dcp")

        def load_torchs() -> None:
            from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

            torchs = Torchs(self.params, torch.optim.AdamW, lr=0.0)
            torchs.load_state_dict(torch.load(self.directory / "torch.pt", weights_only=True))

        renew()
        found = {
            READ: Method(lambda: fresh[0].load(self.directory / "ours"), renew),
            "onecopy: dcp.load, optimizer.sharded": Method(load_dcp, renew),
            "onecopy: torch.load on every rank": Method(lambda: load_full("ours.pt"), renew),
            "unsharded on one rank: torch.load": Method(load_plain),
        }
        if not self.args.no_torch:
            rounds = self.args.torch_rounds
            found["torch's class: torch.load on every rank"] = Method(load_torchs, rounds=rounds)
        return found


def take_turns(turns: dict[str, Method], rounds: int) -> list[Samples]:
    for method in turns.values():  # connections, first use of code, space on the disk
        if method.rounds is None:
            method.call()
            dist.barrier()
            method.after()
    samples: dict[str, list[Sample]] = {name: [] for name in turns}
    for number in range(rounds):
        for name, method in turns.items():
            if number < (rounds if method.rounds is None else method.rounds):
                samples[name].append(measure(method.call))
                dist.barrier()
                method.after()
    return gathered(samples)


def run_rank(directory: Path, args: argparse.Namespace) -> None:
    where = Path(args.directory or directory) / "bench-checkpoint"
    if dist.get_rank() == 0:
        where.mkdir(parents=True)
    dist.barrier()
    try:
        bench = Bench(where, args)
        written = take_turns(bench.writing(), args.rounds)
        if dist.get_rank() == 0:
            report(table("Writing", written, args.mb, DISK), args)
            blocking = slowest(written, ASYNC) / slowest(written, COPY)
            print(f"async_save blocks for {blocking:.2f} times a copy of the shard")
        read = take_turns(bench.reading(), args.rounds)
        if dist.get_rank() == 0:
            report(table("Reading", read, args.mb, READ), args)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(where)


def table(what: str, everyone: list[Samples], mb: int, unit: str) -> Cost:
    world = len(everyone)
    rows = []
    for name in everyone[0]:
        seconds, growth = slowest(everyone, name), growths(everyone, name)
        speed = slowest(everyone, unit) / seconds
        numbers = (f"{seconds:.3f}", f"{mb / seconds:.0f}", f"{speed:.3g}")
        rows.append((name, *numbers, f"{growth[0]:+.0f} MB", f"{max(growth[1:]):+.0f} MB"))
    title = f"{what} a checkpoint of {mb} MB, {world} ranks, {mb // world} MB on each"
    columns = ("", "seconds", "MB/s", "speed", "memory of rank 0", "of others")
    return Cost(title, columns, tuple(rows))


def main() -> None:
    parser = arguments_about_state(__doc__, mb=500, rounds=5)
    parser.add_argument("--directory", help="where to write, by default a temporary directory")
    args = parser.parse_args()
    print("speed: of the disk, or of optimizer.load, = 1. rank 0, others: growth of memory at peak")
    for world in args.ranks:
        on_ranks(world, run_rank, args)


if __name__ == "__main__":
    main()
