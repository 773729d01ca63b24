"""``onecopy estimate | plan | report``.

Each command has a function that returns what it prints. Errors are one line on standard error: exit
code 2 for a command that cannot be understood, 1 for one that cannot be done.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import getfullargspec
from pathlib import Path
from typing import Any, NoReturn

import torch

from onecopy.planning.text import in_bytes, in_seconds, plural, table
from onecopy.planning.traits import PARTITIONS
from onecopy.tools.baselines import Baseline
from onecopy.tools.estimate import BACKENDS, Estimate, Table, estimate
from onecopy.tools.models import PRESETS, BadArgument, Failure, load_model, load_optimizer
from onecopy.tools.pages.plan_page import plan_page
from onecopy.tools.pages.run_page import bucket_table, memory_table, rank_table, read_run, run_page
from onecopy.version import __version__

_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_DTYPES: dict[str, torch.dtype] = {
    **{short: getattr(torch, name) for short, name in _SHORT.items()},
    **{name: getattr(torch, name) for name in _SHORT.values()},
}
_BANDWIDTHS = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "gb": 1e9, "mb": 1e6, "tb": 1e12}
_LATENCIES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_MOST_RANKS = 1_000_000
_SHOWN_ROWS = 16  # of a table, unless all are asked for

_DESCRIPTION = """\
Sharded optimizer state for PyTorch: what it takes, and who owns what, before the run; when it
communicated and waited, after it.

examples:
  onecopy estimate llama-3-8b --world 1 8 64 --dtype bf16 --master fp32
  onecopy plan gpt2 --world 8 --html plan.html
  onecopy report traces --html report.html
"""
_ESTIMATE_DETAILS = """\
What training takes of each rank's memory and of the wire, before the run. The numbers come from the
plan that the optimizer would make and from steps of the class itself, so they are right for any
class. Beside them: DDP, torch's ZeroRedundancyOptimizer, ZeRO-2 and ZeRO-3.

examples:
  onecopy estimate llama-3-8b --world 1 8 64 --dtype bf16 --master fp32 --attached
  onecopy estimate gpt2-xl --world 8 --optimizer muon+adamw
  onecopy estimate my.package:make_model --world 16 --optimizer sgd --option momentum=0.9
  onecopy estimate ./config.json --world 8 --bandwidth 400Gbit/s --latency 10us
"""
_PLAN_DETAILS = """\
Who owns what: the plan that the optimizer would make, with the bytes that each rank holds.

examples:
  onecopy plan gpt2 --world 8
  onecopy plan llama-3-8b --world 64 --dtype bf16 --html plan.html
  onecopy plan my.package:make_model --world 4 --optimizer muon+adamw --all
  onecopy plan gpt2 --world 8 --json > plan.json
"""
_REPORT_DETAILS = """\
What a run has recorded: memory of each rank, bytes of each bucket, and how much of the
communication was exposed (training stood still) and hidden (it went on meanwhile). Record first:

  ONECOPY_TRACE=traces torchrun --nproc-per-node 2 train.py

examples:
  onecopy report traces
  onecopy report traces --html report.html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        print(arguments.run(arguments))
        sys.stdout.flush()
        return 0
    except BadArgument as error:
        return _complain(error, 2)
    except BrokenPipeError:  # `| head` has read enough
        # Why: else the interpreter flushes the output at exit, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Failure, ValueError, OSError) as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # of the model or the optimizer class, which are not ours
        what = getattr(arguments, "optimizer", None)
        tried = f"trying {arguments.model} with {what} and its options: " if what else ""
        return _complain(f"{tried}{type(error).__name__}: {error}", 1)


def _complain(error: Exception | str, code: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"onecopy: {text}", file=sys.stderr)
    return code


# ------------------------------------------------------------------ arguments


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        text = " ".join(message.split())  # an argument may have lines
        print(f"{self.prog}: {text}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="onecopy", description=_DESCRIPTION, formatter_class=layout)
    parser.add_argument("--version", action="version", version=f"onecopy {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )

    def command(name: str, summary: str, details: str, run: Any) -> Callable[..., Any]:
        found = commands.add_parser(name, help=summary, description=details, formatter_class=layout)
        found.set_defaults(run=run)
        if name != "report":
            _add_training(found)
        return found.add_argument

    add = command("estimate", "memory and traffic before the run", _ESTIMATE_DETAILS, run_estimate)
    worlds = [1, 2, 4, 8]
    add("--world", type=_ranks, nargs="+", default=worlds, metavar="N", help="numbers of ranks")
    bandwidth = partial(_quantity, units=_BANDWIDTHS, example="400Gbit/s or 50GB/s")
    add("--bandwidth", type=bandwidth, metavar="RATE", help="of a rank, e.g. 400Gbit/s or 50GB/s")
    latency = partial(_quantity, units=_LATENCIES, example="10us or 0.5ms")
    add("--latency", type=latency, metavar="TIME", help="of a message, e.g. 10us")
    add("--json", action="store_true", help="print JSON instead of tables")

    add = command("plan", "who owns what", _PLAN_DETAILS, run_plan)
    add("--world", type=_ranks, required=True, metavar="N", help="number of ranks")
    add("--json", action="store_true", help="print JSON instead of tables")

    add = command("report", "what a run has recorded", _REPORT_DETAILS, run_report)
    add("directory", type=Path, metavar="DIR", help="what ONECOPY_TRACE named: rank-0.json, ...")
    for name in ("plan", "report"):
        add = commands.choices[name].add_argument
        add("--all", action="store_true", help="all rows, not only the first of each table")
        add("--html", type=Path, metavar="FILE", help="write one self-contained page, and its path")
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    """MODEL, and how it is trained."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a preset ({', '.join(PRESETS)}), package.module:factory, or a Hugging Face "
        "config.json",
    )
    add = parser.add_argument_group("how it is trained").add_argument
    add(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="a class of torch.optim, package.module:Class, or two as muon+adamw: matrices by the "
        "first (default: adamw)",
    )
    add(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="an option of the class (of two: the second), e.g. momentum=0.9; may be repeated",
    )
    add("--dtype", type=_dtype, help="of the parameters: fp32, bf16, fp16 (default: the model's)")
    add(
        "--master",
        type=_dtype,
        metavar="MASTER",
        dest="master_dtype",
        help="keep sharded master copies, e.g. fp32",
    )
    add("--attached", action="store_true", help="with optimizer.attach(module)")
    add("--under-ddp", action="store_true", help="attached to a DDP module, not to a bare one")
    add("--lazy-gather", action="store_true", help="attach(..., lazy_gather=True)")
    add("--no-sync", action="store_true", help="gradients are accumulated inside no_sync()")
    add("--reduce-dtype", type=_dtype, help="attach(..., reduce_dtype=...)")
    view = "parameters_as_bucket_view"
    add("--bucket-view", action="store_true", dest=view, help="parameters_as_bucket_view=True")
    add("--bucket-mb", type=float, metavar="MB", help="size of a bucket (default: 25 or less)")
    add("--partition", choices=PARTITIONS, default="auto", help="(default: auto)")
    add("--backend", choices=BACKENDS, default="nccl", help="(default: nccl)")


def _ranks(text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(_MOST_RANKS)) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number of ranks, got {text[:80]!r}")
    if int(text) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected at most {_MOST_RANKS:,} ranks, got {text}")
    return int(text)


def _dtype(text: str) -> torch.dtype:
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_DTYPES)}, got {text!r}")
    return _DTYPES[text]


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, e.g. momentum=0.9, got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # of brackets without end
        return key, value


def _quantity(text: str, units: dict[str, float], example: str) -> float:
    found = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*([a-z]+?)(?:/s)?", text.strip().lower())
    number, unit = found.groups() if found else ("", "")
    with contextlib.suppress(ValueError, KeyError):
        if 0 < (quantity := float(number) * units[unit]) < math.inf:
            return quantity
    raise argparse.ArgumentTypeError(f"expected a quantity such as {example}, got {text!r}")


# ------------------------------------------------------------------ commands


def _estimates(arguments: argparse.Namespace, world_sizes: Sequence[int]) -> list[Estimate]:
    for name in ("under_ddp", "lazy_gather", "reduce_dtype", "no_sync"):
        if getattr(arguments, name) and not arguments.attached:
            raise BadArgument(f"--{name.replace('_', '-')} needs --attached")
    if arguments.bucket_mb is not None and not 0 < arguments.bucket_mb < math.inf:
        raise BadArgument(f"--bucket-mb must be positive, got {arguments.bucket_mb:g}")
    if arguments.master_dtype not in (None, torch.float32, torch.float64):
        raise BadArgument("--master must be fp32 or fp64")
    model, optimizer_class = load_optimizer(arguments.optimizer, load_model(arguments.model))
    how = {name: getattr(arguments, name) for name in getfullargspec(estimate).kwonlyargs}
    options = dict(arguments.option)
    return [estimate(model, optimizer_class, size, **how, **options) for size in world_sizes]


def run_estimate(arguments: argparse.Namespace) -> str:
    if arguments.latency and not arguments.bandwidth:
        raise BadArgument("--latency needs --bandwidth, e.g. --bandwidth 400Gbit/s")
    columns = _estimates(arguments, arguments.world)
    rate, delay = arguments.bandwidth, arguments.latency or 0.0
    if arguments.json:
        found = [each.as_dict(rate, delay) for each in columns]
        return json.dumps([{"model": arguments.model, **each} for each in found], indent=1)

    def block(title: str, rows: Iterable[tuple[str, Iterable[str]]]) -> str:
        """A table with a column for each estimate."""
        head = [title, *(plural(each.world_size, "rank") for each in columns)]
        return table([head, *([f"  {name}", *cells] for name, cells in rows)])

    def compared(title: str, cell: Callable[[Baseline], str]) -> str:
        """A row for us and one for each of the others."""
        ways = zip(*(each.ways for each in columns), strict=True)
        return block(title, [(same[0].name, map(cell, same)) for same in ways])

    first = columns[0]
    sent = "sent or received per step by the busiest rank"
    memory = []
    parts = [{**each.fullest.as_dict(), "total": each.fullest.total} for each in columns]
    for name in dict.fromkeys(name for part in parts for name in part):
        counts = [part.get(name, 0) for part in parts]
        if any(counts):
            text = name.replace("_copies", " copies").replace("state/", "state: ")
            text = text.replace("ddp_buckets", "DDP's buckets")
            memory.append((text, map(in_bytes, counts)))
    blocks = [
        f"{arguments.model}: {first.in_words()}",
        block("memory of the fullest rank", memory),
        compared("total beside others", lambda each: in_bytes(each.memory.total)),
        compared(sent, lambda each: in_bytes(each.wire.numbytes)),
    ]
    balance = [("onecopy", [f"{each.imbalance:.3f}" for each in columns])]
    remarks = ["Activations are not counted.", *first.remarks()]
    if len(first.spec.classes) == 1:
        balance.append(("torch's class", [f"{each.torchs_imbalance:.3f}" for each in columns]))
    else:
        remarks.append("torch's class can run one optimizer class only.")
    if rate:
        title = f"its time at {in_bytes(rate)}/s and {in_seconds(delay)}"
        blocks.append(compared(title, lambda each: in_seconds(each.wire.seconds(rate, delay))))
        remarks.append(
            "Times are those of the alpha-beta model: log2(ranks) latencies for each collective "
            "and the bytes at full bandwidth, with nothing hidden behind computation."
        )
    blocks.append(block("elements on the fullest rank / even share", balance))
    return "\n\n".join([*blocks, textwrap.fill(" ".join(remarks), 86)])


def run_plan(arguments: argparse.Namespace) -> str:
    if arguments.json and arguments.html:
        raise BadArgument("--json and --html are two forms of the same: choose one")
    (found,) = _estimates(arguments, [arguments.world])
    if arguments.json:
        return json.dumps(found.plan_as_dict(arguments.model), indent=1)
    if arguments.html:
        arguments.html.write_text(plan_page(found, arguments.model), encoding="utf-8")
        return str(arguments.html)
    torchs = ""
    if len(found.spec.classes) == 1:  # torch's class can run one class only
        torchs = f" (torch's class: {found.torchs_imbalance:.3f})"
    return "\n\n".join(
        [
            f"{arguments.model}: {found.in_words()}",
            f"{plural(len(found.plan.buckets), 'bucket')} of at most "
            f"{in_bytes(found.plan.bucket_bytes)}, {plural(sum(found.shards), 'shard')}\n"
            f"elements on the fullest rank / even share: {found.imbalance:.3f}{torchs}",
            _first_rows(found.rank_table(), arguments.all),
            _first_rows(found.param_table(), arguments.all, left=4),
        ]
    )


def run_report(arguments: argparse.Namespace) -> str:
    found = read_run(arguments.directory)
    if arguments.html:
        arguments.html.write_text(run_page(found), encoding="utf-8")
        return str(arguments.html)
    tables = (memory_table(found), rank_table(found), bucket_table(found))
    remark = (
        "Times are of one step, under the profiler; of a bucket in the mean over the ranks.\n"
        "Hidden times are upper bounds. On accelerators look at the traces themselves."
    )
    if not found.traces[0].is_attached:
        remark += "\nDDP's all-reduce is not ours, and not counted."
    shown = [_first_rows(each, arguments.all) for each in tables if each[1]]
    return "\n\n".join([f"{found.title}: {found.in_words()}", *shown, remark])


def _first_rows(content: Table, shows_all: bool, left: int = 1) -> str:
    """A table, and how many of its rows are not shown."""
    head, rows = content
    shown = rows if shows_all else rows[:_SHOWN_ROWS]
    hidden = len(rows) - len(shown)
    return table([head, *shown], left) + (f"\n... and {hidden:,} more: --all" if hidden else "")
