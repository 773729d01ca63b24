"""What we want of our own modes, and whether a run has shown it.

A goal is a ratio that must not be exceeded, on tables that it names. What no table of a run can
tell is left out, so a short run judges fewer goals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from methods import DDP, METHODS, OURS, TORCHS
from results import Row, Table

ATTACHED = "onecopy attached"
LAZY = "onecopy attached, lazy gather"
DROP_IN = "onecopy"
_PEERS = [m.name for m in METHODS.values() if m.project in ("deepspeed", "fairscale")]
PEERS = [*_PEERS, "FSDP2", "FSDP2, no resharding"]


@dataclass(frozen=True, slots=True)
class Verdict:
    claim: str
    where: str
    limit: float
    measured: float

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit


def verdicts(tables: Sequence[Table]) -> list[Verdict]:
    return [verdict for table in tables if table.rows for verdict in _of_table(table)]


def _of_table(table: Table) -> list[Verdict]:
    where = f"{table.workload}, {table.ranks} ranks, {table.wire}"
    found: list[Verdict] = []

    def judge(claim: str, limit: float, measured: float | None) -> None:
        if measured is not None:
            found.append(Verdict(claim, where, limit, measured))

    def of_ddp(method: str) -> float | None:
        row = table.row(method)
        return row.of_ddp.middle if row is not None and row.of_ddp is not None else None

    def of_torch(method: str) -> float | None:
        row = table.row(method)
        return row.of_torch.middle if row is not None and row.of_torch is not None else None

    on_loopback = table.wire == "loopback"
    if on_loopback:
        lopsided = (_lopsidedness(table) or 1.0) > 1.1
        judge("drop-in / torch's class", 0.95 if lopsided else 1.0, of_torch(DROP_IN))
    if table.workload in ("gpt", "gpt-short"):
        limit = {"gpt": 0.93, "gpt-short": 0.85}[table.workload] if on_loopback else 0.70
        if on_loopback or table.wire.endswith(" 1 Gbit/s"):
            for method in (ATTACHED, LAZY):
                judge(f"{method} / DDP", 1.0, of_ddp(method))
                judge(f"{method} / torch's class", limit, of_torch(method))
    if table.workload == "tiny":
        judge(f"{ATTACHED} / DDP", 1.1, of_ddp(ATTACHED))
    judge("our slowest mode / the fastest of FSDP2, DeepSpeed, fairscale", 1.0, _to_peers(table))
    judge("our lowest peak memory / the lowest of others with whole parameters", 1.0, _peak(table))
    if table.workload != "muon":  # whose tensors stay whole
        judge("drop-in, state of the fullest rank / ideal", 1.001, _state(table))
    return found


def _ran(table: Table, wanted: Callable[[Row], bool]) -> list[Row]:
    return [row for row in table.rows if row.error is None and wanted(row)]


def _to_peers(table: Table) -> float | None:
    peers = [row.of_ddp.middle for row in _ran(table, _is_peer) if row.of_ddp is not None]
    ours = [row.of_ddp.middle for row in _ran(table, _is_ours) if row.of_ddp is not None]
    return max(ours) / min(peers) if peers and ours else None


def _peak(table: Table) -> float | None:
    def keeps_whole(row: Row) -> bool:
        return not _is_ours(row) and METHODS[row.method].keeps_whole_parameters

    peers = [row.peak for row in _ran(table, keeps_whole)]
    ours = [row.peak for row in _ran(table, _is_ours)]
    return min(ours) / min(peers) if peers and ours else None


def _state(table: Table) -> float | None:
    ddp, ours = table.row(DDP), table.row(DROP_IN)
    if ddp is None or ours is None or not ddp.state or ours.error is not None:
        return None
    return ours.state / (ddp.state / table.ranks)


def _lopsidedness(table: Table) -> float | None:
    """State of the fullest rank over the ideal, of torch's class."""
    ddp, torchs = table.row(DDP), table.row(TORCHS)
    if ddp is None or torchs is None or not ddp.state or torchs.error is not None:
        return None
    return torchs.state / (ddp.state / table.ranks)


def _is_peer(row: Row) -> bool:
    return row.method in PEERS


def _is_ours(row: Row) -> bool:
    return row.method in {method.name for method in OURS}
