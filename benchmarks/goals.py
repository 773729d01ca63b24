"""What we want of our own modes, and whether a run has shown it.

A goal is a ratio that must not be exceeded, on tables that it names. What no table of a run can
tell is left out, so a short run judges fewer goals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from methods import DDP, METHODS, TORCHS
from results import Row, Spread, Table

ATTACHED = "onecopy attached"
LAZY = "onecopy attached, lazy gather"
DROP_IN = "onecopy"
TO_DDP = "onecopy attached to DDP"
NARROW = "onecopy attached, bf16 wire"
TCP = "onecopy attached, all through TCP"
_PEERS = [m.name for m in METHODS.values() if m.project in ("deepspeed", "fairscale")]
PEERS = [*_PEERS, "FSDP2", "FSDP2, no resharding"]


@dataclass(frozen=True, slots=True)
class Verdict:
    claim: str
    where: str
    limit: float
    measured: float | None  # None: our mode did not run
    spread: Spread | None = None  # of the measured one, if it is a ratio of times

    @property
    def holds(self) -> bool:
        return self.measured is not None and self.measured <= self.limit

    @property
    def is_close(self) -> bool:
        """Whether the limit is within the spread, so that another run may say otherwise."""
        return self.spread is not None and self.spread.low <= self.limit < self.spread.high


def verdicts(tables: Sequence[Table]) -> list[Verdict]:
    return [verdict for table in tables if table.rows for verdict in _Judge(table).all()]


@dataclass(slots=True)
class _Judge:
    table: Table
    found: list[Verdict] = field(default_factory=list)

    def all(self) -> list[Verdict]:
        table = self.table
        on_loopback = table.wire == "loopback"
        if on_loopback:
            lopsided = (_lopsidedness(table) or 1.0) > 1.1
            self.judge(DROP_IN, "/ torch's class", 0.95 if lopsided else 1.0, _of_torch)
        if table.workload in ("gpt", "gpt-short"):
            limit = {"gpt": 0.93, "gpt-short": 0.85}[table.workload] if on_loopback else 0.70
            if on_loopback or table.wire.endswith(" 1 Gbit/s"):
                for method in (ATTACHED, LAZY):
                    self.judge(method, "/ DDP", 1.0, _of_ddp)
                    self.judge(method, "/ torch's class", limit, _of_torch)
        if table.workload == "tiny":
            for method in (DROP_IN, ATTACHED, LAZY, TO_DDP):
                self.judge(method, "/ DDP", 1.1, _of_ddp)
        peers = [row for row in table.rows if row.method in PEERS and table.trains_alike(row)]
        times = {row.method: row.of_ddp.middle for row in peers if row.of_ddp is not None}
        if times:
            fastest = min(times, key=times.__getitem__)
            for method in (DROP_IN, ATTACHED, LAZY, TO_DDP):
                what = f"/ {fastest}, the fastest of {len(times)} peers"
                self.judge(method, what, 1.0, lambda row: _relative(row, times[fastest]))
        peaks = {row.method: row.peak for row in table.rows if self._keeps_whole(row)}
        if peaks:
            leanest = min(peaks, key=peaks.__getitem__)
            what = f"peak memory / {leanest}, the lowest of {len(peaks)} that keep whole parameters"
            self.judge(ATTACHED, what, 1.0, lambda row: row.peak / peaks[leanest])
        ddp = table.row(DDP)
        # Muon's tensors stay whole, so there an even share cannot be had.
        if ddp is not None and ddp.state and table.workload != "muon":
            ideal = ddp.state / table.ranks
            for method in (DROP_IN, ATTACHED):
                what = "state of the fullest rank / ideal"
                self.judge(method, what, 1.001, lambda row: row.state / ideal)
        return self.found

    def _keeps_whole(self, row: Row) -> bool:
        """Whether it is another project's, and comparable with those of ours that do."""
        method = METHODS[row.method]
        is_other = method.keeps_whole_parameters and method.project != "onecopy"
        return is_other and row.error is None and self.table.trains_alike(row)

    def judge(
        self,
        method: str,
        what: str,
        limit: float,
        measure: Callable[[Row], float | Spread | None],
    ) -> None:
        """A mode that did not run has missed its goal; one that was left out has none."""
        table, row = self.table, self.table.row(method)
        if row is None:
            return
        measured = measure(row) if row.error is None else None
        if row.error is not None or measured is not None:
            where = f"{table.workload}, {table.ranks} ranks, {table.wire}"
            spread = measured if isinstance(measured, Spread) else None
            middle = measured.middle if isinstance(measured, Spread) else measured
            self.found.append(Verdict(f"{method} {what}", where, limit, middle, spread))


def _of_ddp(row: Row) -> Spread | None:
    return row.of_ddp


def _of_torch(row: Row) -> Spread | None:
    return row.of_torch


def _relative(row: Row, other: float) -> Spread | None:
    """The times of a method, by those of one that has this ratio to DDP."""
    return None if row.of_ddp is None else Spread(*(each / other for each in row.of_ddp))


def _lopsidedness(table: Table) -> float | None:
    """State of the fullest rank over the ideal, of torch's class."""
    ddp, torchs = table.row(DDP), table.row(TORCHS)
    if ddp is None or torchs is None or not ddp.state or torchs.error is not None:
        return None
    return torchs.state / (ddp.state / table.ranks)
