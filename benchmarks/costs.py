"""What else users wait for: planning, collecting the full state, writing and reading a checkpoint.

Each has a program of its own in this directory, which says how it measures; here they are run with
``--json``, and their lines are put together.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_PATIENCE = 1800  # seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """A small table: what was done, and for each way to do it some numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def measure(full: bool) -> list[Cost]:
    """All of them; ``full`` takes larger states and more rounds."""
    of_state = ["--mb", "128" if full else "32", "--rounds", "5" if full else "3", "--ranks", "2"]
    found = []
    for program, options in (
        ("plan.py", []),
        ("consolidate.py", of_state),
        ("checkpoint.py", of_state),
    ):
        found += [
            Cost(cost["title"], tuple(cost["columns"]), tuple(map(tuple, cost["rows"])))
            for cost in _run(program, options)
        ]
    return found


def _run(program: str, options: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory, "results.json")
        command = [sys.executable, str(_HERE / program), *options, "--json", str(results)]
        print(f"measuring {program}", file=sys.stderr, flush=True)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_PATIENCE
            )
        except subprocess.TimeoutExpired:
            return [_failure(program, f"did not end within {_PATIENCE} s")]
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return [_failure(program, said[-1])]
        if not results.exists():
            return [_failure(program, "it has said nothing")]
        found: list[dict[str, Any]] = json.loads(results.read_text())
        return found


def _failure(program: str, said: str) -> dict[str, Any]:
    return {"title": program, "columns": ["did not run"], "rows": [[said]]}


def report(cost: Cost, args: argparse.Namespace) -> None:
    """Print it, and append it to the list in the file ``args.json``, if there is to be one."""
    print(as_text(cost), flush=True)
    if args.json is None:
        return
    file = Path(args.json)
    known = json.loads(file.read_text()) if file.exists() else []
    known.append({"title": cost.title, "columns": cost.columns, "rows": cost.rows})
    file.write_text(json.dumps(known, indent=1) + "\n")


def as_text(cost: Cost) -> str:
    lines = [cost.columns, *cost.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(cost.columns))]
    text = [f"\n{cost.title}"]
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        text.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(text)


def as_markdown(cost: Cost) -> str:
    rule = "|---|" + "--:|" * (len(cost.columns) - 1)
    lines = ["| " + " | ".join(line) + " |" for line in (cost.columns, *cost.rows)]
    return "\n".join([lines[0], rule, *lines[1:]])
