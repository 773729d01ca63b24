"""``onecopy estimate``: memory and traffic of every rank, over world sizes, beside its peers."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from onecopy.cli.arguments import (
    add_command,
    add_training,
    bandwidth,
    check_training,
    estimate_of,
    latency,
    ranks,
    subject_of,
)
from onecopy.estimating import Estimate
from onecopy.models import BadArgument
from onecopy.overview import notes_on_peers, training_in_words
from onecopy.peers import Peer
from onecopy.words import counted, in_bytes, in_seconds, part_in_words, table

_DETAILS = """\
What training takes of each rank's memory and of the wire, before the run. The numbers come from the
plan that the optimizer would make and from steps of the class itself, so they are right for any
class. Beside them: DDP, torch's ZeroRedundancyOptimizer, ZeRO-2 and ZeRO-3.

examples:
  onecopy estimate llama-3-8b --world 1 8 64 --dtype bf16 --master fp32 --attached
  onecopy estimate gpt2-xl --world 8 --optimizer muon+adamw
  onecopy estimate my.package:make_model --world 16 --optimizer sgd --option momentum=0.9
  onecopy estimate ./config.json --world 8 --bandwidth 400Gbit/s --latency 10us
"""
Columns = Sequence[Estimate]


def add_to(commands: Any) -> None:
    parser = add_command(commands, "estimate", "memory and traffic before the run", _DETAILS)
    add_training(parser)
    add = parser.add_argument
    add(
        "--world", type=ranks, nargs="+", default=[1, 2, 4, 8], metavar="N", help="numbers of ranks"
    )
    add("--bandwidth", type=bandwidth, metavar="RATE", help="of a rank, e.g. 400Gbit/s or 50GB/s")
    add("--latency", type=latency, metavar="TIME", help="of a message, e.g. 10us")
    add("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    check_training(arguments)
    if arguments.latency and not arguments.bandwidth:
        raise BadArgument("--latency needs --bandwidth, e.g. --bandwidth 400Gbit/s")
    subject = subject_of(arguments)
    columns = [estimate_of(subject, arguments, world) for world in arguments.world]
    if arguments.json:
        return json.dumps([_with_time(each, arguments) for each in columns], indent=1)
    blocks = [
        f"{arguments.model}: {training_in_words(columns[0])}",
        _memory(columns),
        _others(columns),
        _wires(columns),
    ]
    if arguments.bandwidth:
        blocks.append(_times(columns, arguments.bandwidth, arguments.latency or 0.0))
    notes = _notes(columns[0], timed=bool(arguments.bandwidth))
    return "\n\n".join([*blocks, _balance(columns), notes])


def _head(title: str, columns: Columns) -> list[str]:
    return [title, *(counted(each.world_size, "rank") for each in columns)]


def _memory(columns: Columns) -> str:
    parts = [{**each.fullest.as_dict(), "total": each.fullest.total} for each in columns]
    rows = [_head("memory of the fullest rank", columns)]
    for name in dict.fromkeys(name for part in parts for name in part):
        counts = [part.get(name, 0) for part in parts]
        if any(counts):
            rows.append([f"  {part_in_words(name)}", *map(in_bytes, counts)])
    return table(rows)


def _others(columns: Columns) -> str:
    return _compared("total beside others", columns, lambda each: in_bytes(each.memory.total))


def _wires(columns: Columns) -> str:
    title = "sent or received per step by the busiest rank"
    return _compared(title, columns, lambda each: in_bytes(each.wire.numbytes))


def _times(columns: Columns, rate: float, delay: float) -> str:
    title = f"its time at {in_bytes(rate)}/s and {in_seconds(delay)}"
    return _compared(title, columns, lambda each: in_seconds(each.wire.seconds(rate, delay)))


def _compared(title: str, columns: Columns, cell: Callable[[Peer], str]) -> str:
    """A row for us and one for each peer."""
    rows = [_head(title, columns)]
    contenders = [[Peer("onecopy", each.fullest, each.wire), *each.peers] for each in columns]
    for same in zip(*contenders, strict=True):
        rows.append([f"  {same[0].name}", *map(cell, same)])
    return table(rows)


def _balance(columns: Columns) -> str:
    rows = [_head("elements on the fullest rank / even share", columns)]
    rows.append(["  onecopy", *(f"{each.imbalance:.3f}" for each in columns)])
    if len(columns[0].subject.classes) == 1:
        rows.append(["  torch's class", *(f"{each.torchs_imbalance:.3f}" for each in columns)])
    return table(rows)


def _notes(estimate: Estimate, timed: bool) -> str:
    notes = ["Activations are not counted.", *notes_on_peers(estimate)]
    if len(estimate.subject.classes) > 1:
        notes.append("torch's class can run one optimizer class only.")
    if timed:
        notes.append(
            "Times are those of the alpha-beta model: log2(ranks) latencies for each collective "
            "and the bytes at full bandwidth, with nothing hidden behind computation."
        )
    return textwrap.fill(" ".join(notes), 86)


def _with_time(estimate: Estimate, arguments: argparse.Namespace) -> dict[str, Any]:
    found = estimate.as_dict()
    if arguments.bandwidth:
        delay = arguments.latency or 0.0
        found["seconds"] = estimate.wire.seconds(arguments.bandwidth, delay)
        for peer in estimate.peers:
            seconds = peer.wire.seconds(arguments.bandwidth, delay)
            found["peers"][peer.name]["seconds"] = seconds
    return {"model": arguments.model, **found}
