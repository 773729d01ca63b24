"""What the subcommands have in common: how a training is described on the command line."""

from __future__ import annotations

import argparse
import ast
import math
import re
import sys
from typing import Any, NoReturn

import torch

from onecopy.estimating import BACKENDS, Estimate, Setting
from onecopy.kinds import PARTITIONS
from onecopy.models import BadArgument, load_model, load_optimizer
from onecopy.subject import Subject

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_MOST_RANKS = 1_000_000
_DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        text = " ".join(message.split())  # an argument may have lines
        print(f"{self.prog}: {text}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def add_command(commands: Any, name: str, summary: str, details: str) -> argparse.ArgumentParser:
    found: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return found


def add_training(parser: argparse.ArgumentParser) -> None:
    """MODEL, and how it is trained."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a preset (gpt2, gpt2-xl, llama-3.2-1b, llama-3-8b, llama-3-70b, llama-3-405b, "
        "resnet-50), package.module:factory, or a Hugging Face config.json",
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
    add("--dtype", type=dtype_of, help="of the parameters: fp32, bf16, fp16 (default: the model's)")
    add("--master", type=dtype_of, help="keep sharded master copies, e.g. fp32")
    add("--attached", action="store_true", help="with optimizer.attach(module)")
    add("--under-ddp", action="store_true", help="attached to a DDP module, not to a bare one")
    add("--lazy-gather", action="store_true", help="attach(..., lazy_gather=True)")
    add("--no-sync", action="store_true", help="gradients are accumulated inside no_sync()")
    add("--reduce-dtype", type=dtype_of, help="attach(..., reduce_dtype=...)")
    add("--bucket-view", action="store_true", help="parameters_as_bucket_view=True")
    add("--bucket-mb", type=float, metavar="MB", help="size of a bucket (default: 25 or less)")
    add("--partition", choices=PARTITIONS, default="auto", help="(default: auto)")
    add("--backend", choices=BACKENDS, default="nccl", help="(default: nccl)")


def subject_of(arguments: argparse.Namespace) -> Subject:
    model, optimizer_class = load_optimizer(arguments.optimizer, load_model(arguments.model))
    return Subject.of(
        model,
        optimizer_class,
        dtype=arguments.dtype,
        partition=arguments.partition,
        master_dtype=arguments.master,
        defaults=dict(arguments.option),
    )


def estimate_of(subject: Subject, arguments: argparse.Namespace, world_size: int) -> Estimate:
    setting = Setting(
        attached=arguments.attached,
        under_ddp=arguments.under_ddp,
        lazy_gather=arguments.lazy_gather,
        reduce_dtype=arguments.reduce_dtype,
        parameters_as_bucket_view=arguments.bucket_view,
        backend=arguments.backend,
        no_sync=arguments.no_sync,
    )
    return Estimate(subject, subject.plan(world_size, arguments.bucket_mb), setting)


def check_training(arguments: argparse.Namespace) -> None:
    """What argparse cannot see: options that need another."""
    for name in ("under_ddp", "lazy_gather", "reduce_dtype", "no_sync"):
        if getattr(arguments, name) and not arguments.attached:
            raise BadArgument(f"--{name.replace('_', '-')} needs --attached")
    if arguments.bucket_mb is not None and not 0 < arguments.bucket_mb < math.inf:
        raise BadArgument(f"--bucket-mb must be positive, got {arguments.bucket_mb:g}")
    if arguments.master not in (None, torch.float32, torch.float64):
        raise BadArgument("--master must be fp32 or fp64")


def ranks(text: str) -> int:
    """A number of ranks."""
    if not text.isdecimal() or len(text) > len(str(_MOST_RANKS)) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number of ranks, got {text[:80]!r}")
    if int(text) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected at most {_MOST_RANKS:,} ranks, got {text}")
    return int(text)


def dtype_of(text: str) -> torch.dtype:
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


_BANDWIDTHS = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "gb": 1e9, "mb": 1e6, "tb": 1e12}
_LATENCIES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def bandwidth(text: str) -> float:
    """Bytes per second.

    >>> bandwidth("400Gbit/s"), bandwidth("50GB")
    (50000000000.0, 50000000000.0)
    """
    return _quantity(text, _BANDWIDTHS, "400Gbit/s or 50GB/s")


def latency(text: str) -> float:
    """Seconds."""
    return _quantity(text, _LATENCIES, "10us or 0.5ms")


def _quantity(text: str, units: dict[str, float], example: str) -> float:
    found = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*([a-z]+?)(?:/s)?", text.strip().lower())
    unit = units.get(found[2]) if found else None
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if unit is None or not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a quantity such as {example}, got {text!r}")
    return number * unit


def more(rows: int, shown: int | None) -> str:
    """What stands below a table of which the first rows are shown, or all (None)."""
    hidden = rows - shown if shown is not None else 0
    return f"\n... and {hidden:,} more: --all" if hidden > 0 else ""
