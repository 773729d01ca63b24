"""Whole training steps: DDP, torch's class and ours in both modes, side by side.

A GPT of 36 million parameters, 8 of them in the embedding and 8 in the head, which are not tied;
the same fused AdamW everywhere. (`--model tiny`: a thousand small tensors instead.)

Methods take turns, another one begins each round, and ratios are taken within a round; the table
shows medians, with the middle half of the rounds. A round ends when all parameters have arrived.
All methods see the same batches, so the loss in the last column must be nearly the same.

Ranks talk over the loopback device, as fast as it goes, or with `--gbit` from two hosts over a
cable of that speed (hosts.py). Bytes are what the kernel counts on the device in use: on loopback
those of all ranks, shown per rank; on the cable what leaves a host, without what its ranks send
each other. The raw speed of the wire is that of one all_reduce of 40 MB in each round.

    make bench-step
    .venv/bin/python benchmarks/step.py --ranks 2 4 --rounds 7 --batch 2 --tokens 64
    .venv/bin/python benchmarks/step.py --ranks 2 --gbit 1 --json steps.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hosts import CABLE, HOSTS, LOOPBACK, NoHosts, Wire, on_hosts
from measuring import MB, arguments, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from onecopy import ZeroRedundancyOptimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}
FLAT: dict[str, Any] = {"parameters_as_bucket_view": True, **ADAMW}
DDP, TORCHS = "DDP + AdamW", "torch"
VOCABULARY = 16384
RAW_BYTES = 40 * MB


@dataclass(slots=True)
class Timings:
    """Of one thing that takes its turn in every round, as one rank sees it."""

    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)  # bytes through the wire from this rank's host


@dataclass(slots=True)
class Contender:
    module: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None] = lambda: None  # what `step` leaves under way
    batches: torch.Generator = field(default_factory=torch.Generator)
    timings: Timings = field(default_factory=Timings)
    loss: float = 0.0

    def train(self, args: argparse.Namespace) -> None:
        for _ in range(args.steps):
            loss = self.module(*batch(args, self.batches))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.finish()
        self.loss = loss.item()


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    name: str
    seconds: float  # of a step
    of_ddp: tuple[float, float, float]  # time: quartiles
    of_torch: tuple[float, float, float]
    sent: float  # bytes of a step: per rank on loopback, per host on the cable
    sent_of_ddp: float
    loss: float


# ---------------------------------------------------------------------- models


class Tiny(nn.Module):
    """A thousand tensors of 256 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(1000))

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x.square().mean()


def build_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if args.model == "tiny":
        return Tiny()
    return GPT(GPTConfig(VOCABULARY, args.tokens, width=512, heads=8, layers=6, tied=False))


def batch(args: argparse.Namespace, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    if args.model == "tiny":
        return torch.randn(args.batch, 16, generator=source), torch.zeros(())
    tokens = torch.randint(VOCABULARY, (args.batch, args.tokens + 1), generator=source)
    return tokens[:, :-1], tokens[:, 1:]


# ---------------------------------------------------------------------- contenders


def contenders(args: argparse.Namespace) -> dict[str, Contender]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs
    ours = ZeroRedundancyOptimizer
    found = {
        DDP: under_ddp(args, lambda params: AdamW(params, **ADAMW)),
        TORCHS: under_ddp(args, lambda params: Torchs(params, AdamW, **FLAT)),
        "onecopy": under_ddp(args, lambda params: ours(params, AdamW, **FLAT)),
        "onecopy attached to DDP": attached(DistributedDataParallel(build_model(args))),
        "onecopy attached": attached(build_model(args)),
        "onecopy attached, lazy gather": attached(build_model(args), lazy_gather=True),
        "onecopy attached, bf16 wire": attached(build_model(args), reduce_dtype=torch.bfloat16),
    }
    for contender in found.values():
        contender.batches.manual_seed(dist.get_rank())
    return found


def under_ddp(args: argparse.Namespace, build: Callable[[Any], torch.optim.Optimizer]) -> Contender:
    ddp = DistributedDataParallel(build_model(args))
    return Contender(ddp, build(ddp.parameters()))


def attached(module: nn.Module, **options: Any) -> Contender:
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, **FLAT)
    optimizer.attach(module, **options)
    return Contender(module, optimizer, optimizer.wait)


# ---------------------------------------------------------------------- one rank


def run_rank(_: Path, wire: Wire, args: argparse.Namespace) -> None:
    found = contenders(args)
    names = list(found)
    raw, message = Timings(), torch.zeros(RAW_BYTES // 4)
    for number in range(args.rounds + 1):
        for turn in range(len(names)):
            contender = found[names[(number + turn) % len(names)]]
            measure(partial(contender.train, args), contender.timings, wire)
        measure(partial(dist.all_reduce, message), raw, wire)
    rows = summary(found, args.steps, wire)
    (raw_sent,) = sent_in_total([raw], wire)
    if dist.get_rank() == 0:
        numel = sum(param.numel() for param in found[DDP].module.parameters())
        heading = title(numel, wire, args)
        print_table(rows, heading)
        print(raw_speed(raw, raw_sent, wire), flush=True)
        if args.json:
            all_reduce = {"bytes": RAW_BYTES, "seconds": raw.seconds[1:]}
            results = {"all_reduce": all_reduce, "rows": [asdict(row) for row in rows]}
            options = {"title": heading, "machine": machine(), **vars(args)}
            options["ranks"] = dist.get_world_size()  # of those on the command line
            add_to_json(Path(args.json), options | results)


def measure(call: Callable[[], object], timings: Timings, wire: Wire) -> None:
    dist.barrier()
    sent, start = wire.bytes_sent(), time.perf_counter()
    call()
    dist.barrier()
    timings.seconds.append(time.perf_counter() - start)
    timings.sent.append(wire.bytes_sent() - sent)


def sent_in_total(timings: Sequence[Timings], wire: Wire) -> list[float]:
    """Median over the rounds of the bytes that all hosts have sent. Collective."""
    mine = [each.sent[1:] for each in timings]  # the first round warms up
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    hosts = everyone[:: len(everyone) // wire.hosts]  # ranks of one host read the same counter
    by_thing = zip(*hosts, strict=True)
    return [statistics.median(map(sum, zip(*thing, strict=True))) for thing in by_thing]


# ---------------------------------------------------------------------- the table


def summary(found: dict[str, Contender], steps: int, wire: Wire) -> list[Row]:
    """Medians and quartiles over the rounds. Collective."""

    def ratios(contender: Contender, other: Contender) -> tuple[float, float, float]:
        pairs = zip(contender.timings.seconds[1:], other.timings.seconds[1:], strict=True)
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        return low, middle, high

    totals = sent_in_total([contender.timings for contender in found.values()], wire)
    senders = senders_of(wire)
    return [
        Row(
            name,
            seconds=statistics.median(contender.timings.seconds[1:]) / steps,
            of_ddp=ratios(contender, found[DDP]),
            of_torch=ratios(contender, found[TORCHS]),
            sent=total / steps / senders,
            sent_of_ddp=total / totals[0],
            loss=contender.loss,
        )
        for (name, contender), total in zip(found.items(), totals, strict=True)
    ]


def senders_of(wire: Wire) -> int:
    return dist.get_world_size() if wire == LOOPBACK else wire.hosts


def title(numel: int, wire: Wire, args: argparse.Namespace) -> str:
    what = f"{args.batch} x {args.tokens} tokens" if args.model == "gpt" else "1000 tensors"
    where = "loopback" if wire == LOOPBACK else f"{wire.hosts} hosts, {args.gbit:g} Gbit/s"
    return f"{dist.get_world_size()} ranks, {where}, {numel / 1e6:.1f} M parameters, {what}"


def print_table(rows: Sequence[Row], heading: str) -> None:
    print(f"\n{heading}")
    print(
        f"{'':30}{'ms':>8}{'of DDP':>8}{'':>15}{'of torch':>10}{'':>15}"
        f"{'MB sent':>9}{'of DDP':>8}{'loss':>8}"
    )
    for row in rows:
        print(
            f"{row.name:30}{row.seconds * 1e3:8.1f}{_spread(row.of_ddp, 8)}"
            f"{_spread(row.of_torch, 10)}{row.sent / MB:9.2f}{row.sent_of_ddp:8.3f}{row.loss:8.3f}"
        )


def _spread(quartiles: tuple[float, float, float], width: int) -> str:
    low, middle, high = quartiles
    return f"{middle:{width}.2f}{f'({low:.2f}-{high:.2f})':>15}"


def raw_speed(raw: Timings, sent: float, wire: Wire) -> str:
    low, middle, high = statistics.quantiles(raw.seconds[1:], n=4)
    speed = 8 * sent / senders_of(wire) / middle / 1e9
    return (
        f"raw wire: all_reduce of {RAW_BYTES // MB} MB in {middle * 1e3:.0f} ms "
        f"({low * 1e3:.0f} to {high * 1e3:.0f}), {speed:.2f} Gbit/s each way"
    )


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"


def add_to_json(path: Path, record: dict[str, Any]) -> None:
    """Append to the list in the file: a table per call, and several calls may share a file."""
    records = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*records, record], indent=1) + "\n")


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--steps", type=int, default=3, help="of each in a round")
    parser.add_argument("--model", choices=["gpt", "tiny"], default="gpt")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--gbit", type=float, nargs="?", const=1.0, help="speed of the cable between two hosts"
    )
    parser.add_argument("--json", metavar="FILE", help="append the tables to the list in FILE")
    args = parser.parse_args()
    if args.gbit and any(world % HOSTS for world in args.ranks):
        parser.error(f"with --gbit the ranks are spread over {HOSTS} hosts: give even --ranks")
    print(machine(), "before the run", flush=True)
    for world in args.ranks:
        if not args.gbit:
            on_ranks(world, run_rank, LOOPBACK, args)
            continue
        try:
            on_hosts(world, args.gbit, run_rank, CABLE, args)
        except NoHosts as reason:
            print(f"skipped, two hosts cannot be emulated here: {reason}")
            return


if __name__ == "__main__":
    main()
