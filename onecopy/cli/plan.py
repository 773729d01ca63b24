"""``onecopy plan``: who owns what, as a table, as JSON, or as a page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from onecopy.cli.arguments import (
    add_command,
    add_training,
    check_training,
    estimate_of,
    more,
    ranks,
    subject_of,
)
from onecopy.estimating import Estimate
from onecopy.models import BadArgument
from onecopy.overview import as_json, param_rows, rank_rows, training_in_words
from onecopy.report.plan_page import plan_page
from onecopy.words import counted, in_bytes, ranks_in_words, table

_DETAILS = """\
Who owns what: the plan that the optimizer would make, with the bytes that each rank holds.

examples:
  onecopy plan gpt2 --world 8
  onecopy plan llama-3-8b --world 64 --dtype bf16 --html plan.html
  onecopy plan my.package:make_model --world 4 --optimizer muon+adamw --all
  onecopy plan gpt2 --world 8 --json > plan.json
"""
_SHOWN = 16  # rows of a table, unless all are asked for


def add_to(commands: Any) -> None:
    parser = add_command(commands, "plan", "who owns what", _DETAILS)
    add_training(parser)
    add = parser.add_argument
    add("--world", type=ranks, required=True, metavar="N", help="number of ranks")
    add("--all", action="store_true", help="all rows, not only the first of each table")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--html", type=Path, metavar="FILE", help="write one self-contained page, and its path")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    check_training(arguments)
    if arguments.json and arguments.html:
        raise BadArgument("--json and --html are two forms of the same: choose one")
    estimate = estimate_of(subject_of(arguments), arguments, arguments.world)
    if arguments.json:
        return json.dumps(as_json(estimate, arguments.model), indent=1)
    if arguments.html:
        arguments.html.write_text(plan_page(estimate, arguments.model), encoding="utf-8")
        return str(arguments.html)
    shown = None if arguments.all else _SHOWN
    blocks = [
        f"{arguments.model}: {training_in_words(estimate)}",
        _balance(estimate),
        _ranks(estimate, shown),
        _parameters(estimate, shown),
    ]
    return "\n\n".join(blocks)


def _balance(estimate: Estimate) -> str:
    plan, torchs = estimate.plan, ""
    if len(estimate.subject.classes) == 1:  # it can run one class only
        torchs = f" (torch's class: {estimate.torchs_imbalance:.3f})"
    return (
        f"{counted(len(plan.buckets), 'bucket')} of at most {in_bytes(plan.bucket_bytes)}, "
        f"{counted(sum(estimate.pieces), 'piece')}\n"
        f"elements on the fullest rank / even share: {estimate.imbalance:.3f}{torchs}"
    )


def _ranks(estimate: Estimate, shown: int | None) -> str:
    rows = [["rank", "elements", "pieces", "holds in all"]]
    found = rank_rows(estimate)
    for row in found[:shown]:
        rows.append([row.ranks, f"{row.elements:,}", f"{row.pieces:,}", in_bytes(row.total)])
    return table(rows) + more(len(found), shown)


def _parameters(estimate: Estimate, shown: int | None) -> str:
    rows = [["parameter", "shape", "dtype", "kind", "bytes", "owners", "buckets"]]
    found = param_rows(estimate)
    for row in found[:shown]:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        owners = ranks_in_words(row.owners, estimate.world_size)
        size, buckets = in_bytes(row.nbytes), str(row.buckets)
        rows.append([row.name, shape, row.dtype, row.kind.value, size, owners, buckets])
    return table(rows, left=4) + more(len(found), shown)
