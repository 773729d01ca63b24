"""A traced run in numbers: heads and rows of tables, for the terminal and for the page."""

from __future__ import annotations

from statistics import mean

from onecopy.recorded import Run
from onecopy.words import in_bytes, in_seconds

Table = tuple[list[str], list[list[str]]]  # head and rows

_US = 1e-6  # the times of a trace are in microseconds


def rank_table(run: Run) -> Table:
    """Time of a step, and what of it is communication, by rank."""
    head = ["rank", "time of a step"]
    for phase in run.phases:
        head += [f"{phase} exposed", f"{phase} hidden"]
    rows = []
    for trace in run.traces:
        row = [str(trace.rank), in_seconds(trace.step_time * _US)]
        for phase in run.phases:
            cost = trace.cost(phase)
            row += [in_seconds(cost.exposed * _US), in_seconds(cost.hidden * _US)]
        rows.append(row)
    return head, rows


def memory_table(run: Run) -> Table:
    """What each rank holds."""
    head = ["rank", "parameters", "gradients", "state", "master copies", "staging"]
    rows = []
    for trace in run.traces:
        memory = trace.memory
        state = sum(memory.state.values())
        sizes = [memory.parameters, memory.gradients, state, memory.master_copies, memory.staging]
        rows.append([str(trace.rank), *map(in_bytes, (*sizes, memory.ddp_buckets, memory.total))])
    return [*head, "DDP's buckets", "total"], rows


def bucket_table(run: Run) -> Table:
    """What each bucket sends, and what it costs, by phase."""
    head = ["bucket", "sent by the busiest rank", "exposed", "hidden"]
    rows = []
    sent = [trace.sent() for trace in run.traces]
    for bucket in run.bucket_numbers:
        for phase in run.phases:
            costs = [trace.cost(phase, bucket) for trace in run.traces]
            rows.append(
                [
                    f"{phase} {bucket}",
                    in_bytes(max(each.get((phase, bucket), 0) for each in sent)),
                    in_seconds(mean(cost.exposed for cost in costs) * _US),
                    in_seconds(mean(cost.hidden for cost in costs) * _US),
                ]
            )
    return head, rows
