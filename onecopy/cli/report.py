"""``onecopy report``: what a run has recorded with ``ONECOPY_TRACE``, as tables or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from onecopy.cli.arguments import add_command, more
from onecopy.recorded import read_run
from onecopy.report.run_page import run_page
from onecopy.report.run_tables import bucket_table, memory_table, rank_table
from onecopy.words import table

_DETAILS = """\
What a run has recorded: memory of each rank, bytes of each bucket, and how much of the
communication was exposed (training stood still) and hidden (it went on meanwhile). Record first:

  ONECOPY_TRACE=traces torchrun --nproc-per-node 2 train.py

examples:
  onecopy report traces
  onecopy report traces --html report.html
"""
_SHOWN = 16  # rows of a table, unless all are asked for


def add_to(commands: Any) -> None:
    parser = add_command(commands, "report", "what a run has recorded", _DETAILS)
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="what ONECOPY_TRACE named: rank-0.json, ...")
    add("--all", action="store_true", help="all rows, not only the first of each table")
    add("--html", type=Path, metavar="FILE", help="write one self-contained page, and its path")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    found = read_run(arguments.directory)
    if arguments.html:
        arguments.html.write_text(run_page(found), encoding="utf-8")
        return str(arguments.html)
    shown = None if arguments.all else _SHOWN
    blocks = [f"{found.title}: {found.in_words()}"]
    for head, rows in (memory_table(found), rank_table(found), bucket_table(found)):
        if rows:
            blocks.append(table([head, *rows[:shown]]) + more(len(rows), shown))
    blocks.append(
        "Times are of one step, under the profiler; of a bucket in the mean over the ranks.\n"
        "Hidden times are upper bounds. On accelerators look at the traces themselves."
        + ("" if found.is_attached else "\nDDP's all-reduce is not ours, and not counted.")
    )
    return "\n\n".join(blocks)
