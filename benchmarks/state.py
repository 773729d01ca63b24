"""Time and memory of moving AdamW's state, on gloo and this machine: to one rank, and to the disk.

    make bench-consolidate
    make bench-checkpoint
    .venv/bin/python benchmarks/state.py consolidate --mb 256 --rounds 5 --ranks 2 4 --no-torch
    .venv/bin/python benchmarks/state.py checkpoint --mb 500 --rounds 5 --ranks 2 4 --no-torch

**consolidate** gathers the full state to one rank. It is compared with a raw `dist.gather` of as
many bytes, every rank's share into a tensor that was allocated and touched before. A consolidation
allocates its result and pays for fresh pages, so the raw gather into fresh tensors is shown as
well. (On gloo a gather has a buffer of its own, as large as the result.)

**checkpoint** writes and reads a checkpoint: with `optimizer.save`, with `dcp.save` of
`optimizer.sharded()`, consolidated to one rank by ours and by torch's own class and written with
`torch.save`, and from an unsharded optimizer on one rank. They are compared with the disk itself, a
plain write of as many bytes through the page cache, and fsync, by one process (`optimizer.save`
writes past the cache). All of them end with fsync. For `dcp.async_save` the part that blocks
training is shown next to a copy of the shard in memory, which is the least it could do. What is
read is in the page cache.

Methods alternate, and medians are shown; times are those of the slowest rank; memory is the largest
growth of a process during a call.
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
from costs import (
    MB,
    Cost,
    Samples,
    add_arguments,
    gathered,
    growths,
    measure,
    on_ranks,
    report,
    slowest,
)

from onecopy import ZeroRedundancyOptimizer

RAW, FRESH = "raw gather", "raw gather, fresh memory"
OURS, TORCHS = "onecopy", "torch"
DISK = "disk: write and fsync, in place"
NEW = "disk: the same, to a new file"
COPY = "copy of the shard in memory"
ASYNC = "dcp.async_save, blocking part"
READ = "onecopy: optimizer.load"


class Method(NamedTuple):
    call: Callable[[], object]
    after: Callable[[], object] = lambda: None  # not measured
    rounds: int | None = None  # if other than those of all methods; then there is no warm-up


def alternate(methods: dict[str, Method], rounds: int) -> list[Samples]:
    """Call the methods one after the other, round by round. Return the samples of all ranks."""
    for method in methods.values():  # connections, first use of code, space on the disk
        if method.rounds is None:
            method.call()
            dist.barrier()
            method.after()
    samples: Samples = {name: [] for name in methods}
    for number in range(rounds):
        for name, method in methods.items():
            if number < (rounds if method.rounds is None else method.rounds):
                samples[name].append(measure(method.call))
                dist.barrier()
                method.after()
    return gathered(samples)


def table(title: str, memory: tuple[str, str], everyone: list[Samples], mb: int, unit: str) -> Cost:
    """A row for each method; the method `unit` has speed 1. `memory`: columns of rank 0 and of the
    other ranks."""
    rows = []
    for name in everyone[0]:
        seconds, growth = slowest(everyone, name), growths(everyone, name)
        speed = slowest(everyone, unit) / seconds
        numbers = (f"{seconds:.3f}", f"{mb / seconds:.0f}", f"{speed:.3g}")
        rows.append((name, *numbers, f"{growth[0]:+.0f} MB", f"{max(growth[1:]):+.0f} MB"))
    return Cost(title, ("", "seconds", "MB/s", "speed", *memory), tuple(rows))


# ---------------------------------------------------------------------- the state


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


def with_state(optimizer: Any, params: list[torch.nn.Parameter]) -> Any:
    """The optimizer, after a step."""
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def sharded(params: list[torch.nn.Parameter]) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.0)


def torchs(params: list[torch.nn.Parameter]) -> Any:
    """Torch's own class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs
    return Torchs(params, torch.optim.AdamW, lr=0.0)


# ---------------------------------------------------------------------- consolidate


def consolidating(args: argparse.Namespace) -> dict[str, Method]:
    params = model_of(args.mb * MB)
    total = 8 * sum(param.numel() for param in params)
    share = torch.ones(total // dist.get_world_size() // 4)

    def outputs() -> list[torch.Tensor] | None:
        if dist.get_rank() != 0:
            return None
        return [torch.empty_like(share) for _ in range(dist.get_world_size())]

    allocated = outputs()
    for output in allocated or ():
        output.zero_()  # touch its pages

    ours = with_state(sharded(params), params)
    ours.consolidate_state_dict(0)
    if ours.rank == 0:
        entries = ours.state_dict()["state"].values()
        found = sum(t.nbytes for entry in entries for t in entry.values() if t.dim())
        if found != total:
            raise RuntimeError(f"expected {total} bytes of state, got {found}")
    ours.step()  # drops the result

    methods = {
        RAW: Method(lambda: dist.gather(share, allocated, dst=0)),
        FRESH: Method(lambda: dist.gather(share, outputs(), dst=0)),
        OURS: Method(lambda: ours.consolidate_state_dict(0), ours.step),
    }
    if not args.no_torch:
        theirs = with_state(torchs(params), params)
        methods[TORCHS] = Method(lambda: theirs.consolidate_state_dict(0), rounds=args.torch_rounds)
    return methods


def run_consolidate(_: Path, args: argparse.Namespace) -> None:
    everyone = alternate(consolidating(args), args.rounds)
    if dist.get_rank() == 0:
        world = len(everyone)
        title = f"Collecting {args.mb} MB of state on one of {world} ranks"
        title += f", {args.mb // world} MB on each"
        memory = ("memory of the target", "of a bystander")
        report(table(title, memory, everyone, args.mb, RAW), args.json)


# ---------------------------------------------------------------------- checkpoint


def write_synced(path: Path, write: Callable[[Any], None]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


class Checkpoints:
    """The ways to write and read a checkpoint, on one rank."""

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        warnings.simplefilter("ignore")  # DCP says each time that it overwrites
        self.directory, self.args = directory, args
        self.is_first = dist.get_rank() == 0
        self.params = model_of(args.mb * MB)
        self.state_bytes = 8 * sum(param.numel() for param in self.params)
        self.ours = with_state(sharded(self.params), self.params)
        self.async_group = dist.new_group(backend="gloo")
        self.pending: Any = None
        self.copies: list[torch.Tensor] = []
        self.block = torch.ones(16 * MB // 4)

    def write_plain_bytes(self, in_place: bool) -> None:
        """Overwrite a file, or write a new one and rename it."""

        def write(file: Any) -> None:
            block = memoryview(self.block.view(torch.uint8).numpy())
            for start in range(0, self.state_bytes, len(block)):
                file.write(block[: self.state_bytes - start])

        if self.is_first:
            path = self.directory / f"disk-{in_place}.bin"
            new = path if in_place else path.with_suffix(".new")
            write_synced(new, write)
            new.replace(path)

    def write_consolidated(self, optimizer: Any, name: str) -> None:
        optimizer.consolidate_state_dict(0)
        if self.is_first:
            full = optimizer.state_dict()
            write_synced(self.directory / name, lambda file: torch.save(full, file))

    def copy(self) -> None:
        state = self.ours.state.values()
        self.copies[:] = [t.clone() for entry in state for t in entry.values() if t.dim()]

    def async_save(self) -> None:
        self.pending = dcp.async_save(
            {"optim": self.ours.sharded()},
            checkpoint_id=self.directory / "async",
            process_group=self.async_group,
        )

    def wait(self) -> None:
        self.pending.result()

    def writing(self) -> dict[str, Method]:
        plain: Any = None
        if self.is_first:
            params = [torch.nn.Parameter(param.detach()) for param in self.params]
            plain = with_state(torch.optim.AdamW(params, lr=0.0), params)

        def save_plain() -> None:
            if plain is not None:
                full = plain.state_dict()
                write_synced(self.directory / "plain.pt", lambda file: torch.save(full, file))

        def save_by_dcp() -> None:
            dcp.save({"optim": self.ours.sharded()}, checkpoint_id=self.directory / "dcp")

        methods = {
            DISK: Method(lambda: self.write_plain_bytes(in_place=True)),
            NEW: Method(lambda: self.write_plain_bytes(in_place=False)),
            "onecopy: optimizer.save": Method(lambda: self.ours.save(self.directory / "ours")),
            "onecopy: dcp.save, optimizer.sharded": Method(save_by_dcp),
            "onecopy: consolidate, torch.save": Method(
                lambda: self.write_consolidated(self.ours, "ours.pt"), self.ours.step
            ),
            "unsharded on one rank: torch.save": Method(save_plain),
            COPY: Method(self.copy, self.copies.clear),
            ASYNC: Method(self.async_save, self.wait),
        }
        if not self.args.no_torch:
            theirs = with_state(torchs(self.params), self.params)
            methods["torch's class: consolidate, torch.save"] = Method(
                lambda: self.write_consolidated(theirs, "torch.pt"), rounds=self.args.torch_rounds
            )
        return methods

    def reading(self) -> dict[str, Method]:
        fresh: list[Any] = []

        def renew() -> None:
            fresh[:] = [sharded(self.params)]

        def load_full() -> None:
            fresh[0].load_state_dict(torch.load(self.directory / "ours.pt", weights_only=True))

        def load_plain() -> None:
            if self.is_first:
                plain = torch.optim.AdamW(self.params, lr=0.0)
                path = self.directory / "plain.pt"
                plain.load_state_dict(torch.load(path, weights_only=True))

        def load_by_dcp() -> None:
            dcp.load({"optim": fresh[0].sharded()}, checkpoint_id=self.directory / "dcp")

        def load_torchs() -> None:
            found = torch.load(self.directory / "torch.pt", weights_only=True)
            torchs(self.params).load_state_dict(found)

        renew()
        methods = {
            READ: Method(lambda: fresh[0].load(self.directory / "ours"), renew),
            "onecopy: dcp.load, optimizer.sharded": Method(load_by_dcp, renew),
            "onecopy: torch.load on every rank": Method(load_full, renew),
            "unsharded on one rank: torch.load": Method(load_plain),
        }
        if not self.args.no_torch:
            rounds = self.args.torch_rounds
            methods["torch's class: torch.load on every rank"] = Method(load_torchs, rounds=rounds)
        return methods


def run_checkpoint(directory: Path, args: argparse.Namespace) -> None:
    where = Path(args.directory or directory) / "bench-checkpoint"
    world, is_first = dist.get_world_size(), dist.get_rank() == 0
    of = f"a checkpoint of {args.mb} MB, {world} ranks, {args.mb // world} MB on each"
    memory = ("memory of rank 0", "of others")
    if is_first:
        where.mkdir(parents=True)
    dist.barrier()
    try:
        checkpoints = Checkpoints(where, args)
        written = alternate(checkpoints.writing(), args.rounds)
        if is_first:
            report(table(f"Writing {of}", memory, written, args.mb, DISK), args.json)
            blocking = slowest(written, ASYNC) / slowest(written, COPY)
            print(f"async_save blocks for {blocking:.2f} times a copy of the shard")
        read = alternate(checkpoints.reading(), args.rounds)
        if is_first:
            report(table(f"Reading {of}", memory, read, args.mb, READ), args.json)
    finally:
        dist.barrier()
        if is_first:
            shutil.rmtree(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    consolidate = commands.add_parser("consolidate", help="gather the full state to one rank")
    checkpoint = commands.add_parser("checkpoint", help="write and read a checkpoint")
    for command, mb, rounds in ((consolidate, 256, 7), (checkpoint, 500, 5)):
        add_arguments(command, rounds)
        command.add_argument("--mb", type=int, default=mb, help="state of all ranks together")
        command.add_argument("--torch-rounds", type=int, default=1, help="10 to 60 s each")
        command.add_argument("--no-torch", action="store_true", help="leave out torch's own class")
        command.add_argument("--json", metavar="FILE", help="append the tables to the list in FILE")
    checkpoint.add_argument("--directory", help="where to write (a temporary directory)")
    args = parser.parse_args()
    if args.command == "consolidate":
        body = run_consolidate
        unit = "of the raw gather = 1. memory: growth of a process at the peak"
    else:
        body = run_checkpoint
        unit = "of the disk, or of optimizer.load, = 1. rank 0, others: growth of memory at peak"
    print(f"speed: {unit}")
    for world in args.ranks:
        on_ranks(world, body, args)


if __name__ == "__main__":
    main()
