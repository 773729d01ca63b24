"""Train one GPT under several optimizers side by side: same losses, less state.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/demo.py

Every contender starts from the same seed and sees the same batches, so all of them must end at the
same loss, to the last digit. They are trained in turns, a few steps each, and another one begins
each round:

    round 1   A A A  B B B  C C C
    round 2   B B B  C C C  A A A
    round 3   C C C  A A A  B B B

A machine that is busy for a while then slows all of them alike. Times are compared within a round
and the median over the rounds is reported. Takes about two minutes on two cores.

Afterwards a few steps are recorded (`ONECOPY_TRACE`), which would have slowed what was measured,
and shown on a page: when gradients and parameters travelled, and who waited for them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.optim
from gpt import GPT, GPTConfig
from text import draw_batch, standard_library
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Optimizer

from onecopy import ZeroRedundancyOptimizer
from onecopy.tools.cli import main as onecopy_command

SEED = 0
TEXT_BYTES = 2_000_000
BATCH_SIZE = 4  # on each rank
MODEL = GPTConfig()
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}


# Contenders #


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table: a name, and what a user writes to train `model` that way."""

    name: str
    build: Callable[[nn.Module], tuple[nn.Module, Optimizer]]
    # Largest relative difference from the first contender's loss; 0 means equal to the last bit.
    tolerance: float = 0.0


def ddp_adamw(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    ddp = DDP(model)
    return ddp, AdamW(ddp.parameters(), **ADAMW)


def torch_zero(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    ddp = DDP(model)
    return ddp, torch.distributed.optim.ZeroRedundancyOptimizer(
        ddp.parameters(), AdamW, parameters_as_bucket_view=True, **ADAMW
    )


def onecopy(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    ddp = DDP(model)
    return ddp, ZeroRedundancyOptimizer(
        ddp.parameters(), AdamW, parameters_as_bucket_view=True, **ADAMW
    )


def onecopy_attached(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), AdamW, parameters_as_bucket_view=True, **ADAMW
    )
    optimizer.attach(model)
    return model, optimizer


# The first one is what the others are compared with.
CONTENDERS = (
    Contender("DDP + AdamW", ddp_adamw),
    Contender("torch's ZeroRedundancyOptimizer", torch_zero),
    Contender("onecopy", onecopy),
    # With more than two ranks gradients are summed in another order.
    Contender("onecopy, attached (no DDP)", onecopy_attached, tolerance=0.01),
)


# Training #


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has come to. The same on every rank but for the times, which are its own."""

    contender: Contender
    loss: float  # of the last step, mean over the ranks
    state_bytes: int  # on the rank that holds most
    seconds: Tensor  # for one step, one entry per round


class Run:
    """One contender in training: its model, its optimizer, its batches and its times."""

    def __init__(self, contender: Contender, text: Tensor) -> None:
        torch.manual_seed(SEED)
        self.contender = contender
        self.model, self.optimizer = contender.build(GPT(MODEL))
        self.text = text
        self.generator = torch.Generator().manual_seed(SEED + dist.get_rank())
        self.loss = torch.tensor(float("nan"))
        self.seconds: list[float] = []

    def train(self, steps: int) -> None:
        """Train for `steps` steps, timed from all ranks ready to all ranks done."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            inputs, targets = draw_batch(self.text, BATCH_SIZE, MODEL.context, self.generator)
            self.optimizer.zero_grad()
            loss = self.model(inputs, targets)
            loss.backward()
            self.optimizer.step()
        dist.barrier()
        self.seconds.append((time.perf_counter() - start) / steps)
        self.loss = loss.detach()

    def result(self) -> Result:
        """Bring the ranks' results together. A collective."""
        loss = self.loss.double()
        dist.all_reduce(loss)
        state_bytes = torch.tensor(local_state_bytes(self.optimizer))
        dist.all_reduce(state_bytes, op=dist.ReduceOp.MAX)
        return Result(
            contender=self.contender,
            loss=loss.item() / dist.get_world_size(),
            state_bytes=int(state_bytes),
            seconds=torch.tensor(self.seconds),
        )


def local_state_bytes(optimizer: Optimizer) -> int:
    """Add up the state tensors on this rank; a sharded optimizer keeps them in `.optim`."""
    local = getattr(optimizer, "optim", optimizer)
    values = chain.from_iterable(entry.values() for entry in local.state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def train_in_turns(runs: list[Run], rounds: int, steps: int) -> None:
    """Train all runs for `rounds` times `steps` steps, each round begun by another one."""
    progress = Progress(rounds * len(runs))
    for first in range(rounds):
        for turn in range(len(runs)):
            run = runs[(first + turn) % len(runs)]
            run.train(steps)
            progress.advance(f"round {first + 1} of {rounds}, loss {run.loss.item():.2f}")


class Progress:
    """A bar on standard error; four plain lines if that is no terminal. Rank 0 only."""

    WIDTH = 40

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0

    def advance(self, note: str) -> None:
        """Count one turn as done and show `note` beside the bar."""
        before, self.done = self.done, self.done + 1
        if dist.get_rank() != 0:
            return
        if sys.stderr.isatty():
            bar = "#" * (self.WIDTH * self.done // self.total)
            end = "\n" if self.done == self.total else ""
            print(f"\r[{bar:.<{self.WIDTH}}] {note}\033[K", end=end, file=sys.stderr, flush=True)
        elif 4 * before // self.total < 4 * self.done // self.total:
            print(f"{100 * self.done // self.total:3}%  {note}", file=sys.stderr, flush=True)


# Report #


def row(result: Result, baseline: Result) -> str:
    """Return one line of the table, relative to `baseline`."""
    share = result.state_bytes / baseline.state_bytes
    milliseconds = 1e3 * result.seconds.quantile(0.5)
    ratios = result.seconds / baseline.seconds
    low, middle, high = (ratios.quantile(q) for q in (0.25, 0.5, 0.75))
    return (
        f"{result.contender.name:<31}  {result.loss:.9f}"
        f"  {result.state_bytes / 1e6:6.2f} MB {share:8.1%}"
        f"  {milliseconds:5.0f} ms {middle:8.2f} ({low:.2f} to {high:.2f})"
    )


def agrees(result: Result, baseline: Result) -> bool:
    """Tell whether the loss is as near to the baseline's as the contender promises."""
    return abs(result.loss - baseline.loss) <= result.contender.tolerance * abs(baseline.loss)


HEADER = f"""
{"":<31}  {"":<11}  {"state per rank":<18}  time of a step
{"contender":<31}  {"final loss":<11}  {"":9} {"of DDP's":>8}  {"":8} of DDP's (half of rounds)"""

HOW_TO_READ = """
What is saved is the state: AdamW's two moments, counted on the rank that holds most of them.
Equal losses mean that the training itself is unchanged.
The times (whole steps, medians over the rounds, each compared with DDP's in the same round) show
what handing out the updated parameters costs through loopback, on a machine with memory to spare.
"""


def report(results: list[Result]) -> bool:
    """Print the table on rank 0; return whether all losses agree with the first one's."""
    baseline, *others = results
    strays = [result for result in others if not agrees(result, baseline)]
    if dist.get_rank() == 0:
        print(HEADER, *(row(result, baseline) for result in results), HOW_TO_READ, sep="\n", end="")
        for stray in strays:
            print(
                f"The losses differ: {stray.contender.name} ended at {stray.loss!r},"
                f" {baseline.contender.name} at {baseline.loss!r}."
            )
    return not strays


# Recording #

TRACED_STEPS = 3, 5  # the first ones allocate buffers


def onecopy_in_small_buckets(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    """Attached, with a forward that begins before the parameters have arrived. By default
    this small model would have two buckets."""
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), AdamW, parameters_as_bucket_view=True, bucket_mb=1, **ADAMW
    )
    optimizer.attach(model, lazy_gather=True)
    return model, optimizer


def record(directory: Path, text: Tensor) -> None:
    """Train a few steps under the profiler, and write a page about them."""
    page = directory / "report.html"
    if dist.get_rank() == 0:
        for old in (*directory.glob("rank-*.json"), *directory.glob(page.name)):
            old.unlink()
    dist.barrier()
    os.environ["ONECOPY_TRACE"] = str(directory)
    os.environ["ONECOPY_TRACE_STEPS"] = "{}-{}".format(*TRACED_STEPS)
    Run(Contender("recorded", onecopy_in_small_buckets), text).train(TRACED_STEPS[-1])
    if dist.get_rank() == 0:
        print("\nWhen it communicated and waited, on one page:", flush=True)
        onecopy_command(["report", str(directory), "--html", str(page)])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=18, help="number of rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="steps of each in a round (default: %(default)s)"
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("demo-report"),
        metavar="DIR",
        help="where the recorded steps and their page go (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error(f"expected at least 1 round and 1 step, got {arguments}")
    if not dist.is_torchelastic_launched():
        parser.error("expected to be started by torchrun, as shown by --help")
    return arguments


def main() -> int:
    """Train all contenders and return the exit code: 0 if they end at the same loss."""
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    text = standard_library(TEXT_BYTES)
    runs = [Run(contender, text) for contender in CONTENDERS]
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in runs[0].model.parameters())
        print(
            f"GPT of {parameters / 1e6:.1f} M parameters on {dist.get_world_size()} processes,"
            f" {arguments.rounds} rounds of {arguments.steps} steps for each of {len(runs)} runs",
            flush=True,
        )
    train_in_turns(runs, arguments.rounds, arguments.steps)
    agree = report([run.result() for run in runs])
    runs.clear()
    record(arguments.report, text)
    dist.destroy_process_group()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
