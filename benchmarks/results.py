"""Results of a benchmark: records of measurements, ratios of times, and goals.

Times are compared within a round, in which every method trains on the same machine in the same
minute. Shown are the median of these ratios and their quartiles. A goal is a ratio that our modes
must not exceed, in tables that it names; a short run, which has fewer tables, checks fewer goals.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from methods import DDP, METHODS, TORCHS

ENOUGH_FOR_QUARTILES = 5


class Measurement(NamedTuple):
    """A round of one rank: means over its steps."""

    seconds: float
    forward: float
    backward: float
    step: float
    sent: float  # bytes through the wire from this rank's host
    loss: float  # of the last step


class Memory(NamedTuple):
    """Bytes of one rank."""

    state: int
    gradients: int
    peak: int  # growth of the process during a step, once warm; model included


class Spread(NamedTuple):
    """The median between the quartiles, or between the extremes where there are few values."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < ENOUGH_FOR_QUARTILES:
            return cls(min(values), statistics.median(values), max(values))
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a step, medians; the slowest rank counts."""

    forward: float
    backward: float
    step: float


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one workload, or the error for which it did not run."""

    method: str
    error: str | None = None
    seconds: Spread | None = None  # of a step
    of_ddp: Spread | None = None  # ratios of such times
    of_torch: Spread | None = None
    phases: Phases | None = None
    sent: float = 0.0  # bytes of a step: per rank on loopback, per host on a cable
    loss: float = 0.0  # mean over the ranks, after the last step
    state: int = 0  # bytes on the fullest rank
    gradients: int = 0
    peak: int = 0
    construction: float = 0.0  # seconds


@dataclass(frozen=True, slots=True)
class Table:
    """All methods on one workload, world size and wire."""

    workload: str
    title: str
    ranks: int
    wire: str
    rounds: int
    steps: int  # behind each loss
    rows: tuple[Row, ...] = ()
    skipped: str | None = None  # why there are no rows

    def trains_alike(self, row: Row) -> bool:
        """Whether a method's loss is DDP's, but for the order of sums: else it does other work."""
        ddp = self.row("DDP")
        return (
            ddp is None or ddp.error is not None or abs(row.loss - ddp.loss) <= 5e-5 * abs(ddp.loss)
        )

    @property
    def heading(self) -> str:
        return f"{self.title}; {self.ranks} ranks, {self.wire}"

    def row(self, method: str) -> Row | None:
        return next((row for row in self.rows if row.method == method), None)


@dataclass(slots=True)
class Samples:
    """What was measured of one method, by round and rank."""

    rounds: list[list[Measurement]] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    construction: float = 0.0
    error: str | None = None

    def add(self, other: Samples) -> None:
        """Add the same method in another group. Memory and construction stay those of one group, as
        for other methods: else only the references would have the worst of several."""
        self.rounds += other.rounds
        self.memory = self.memory or other.memory
        self.construction = self.construction or other.construction
        self.error = self.error or other.error

    def seconds(self) -> list[float]:
        return [max(measured.seconds for measured in ranks) for ranks in self.rounds]

    def phases(self) -> Phases:
        def slowest(name: str) -> float:
            return statistics.median(max(getattr(t, name) for t in ranks) for ranks in self.rounds)

        return Phases(slowest("forward"), slowest("backward"), slowest("step"))

    def sent(self, hosts: int) -> float:
        """Per rank of a single host, and per host of several; ranks of a host read one counter."""
        world = len(self.rounds[0])
        firsts = range(0, world, world // hosts)
        senders = world if hosts == 1 else hosts
        totals = [sum(ranks[first].sent for first in firsts) for ranks in self.rounds]
        return statistics.median(totals) / senders


def row_of(method: str, own: Samples, ddp: Samples, torchs: Samples, hosts: int) -> Row:
    if own.error is not None:
        return Row(method, error=own.error)
    last = own.rounds[-1]
    return Row(
        method,
        seconds=Spread.of(own.seconds()),
        of_ddp=ratios(own, ddp),
        of_torch=ratios(own, torchs),
        phases=own.phases(),
        sent=own.sent(hosts),
        loss=statistics.mean(measured.loss for measured in last),
        state=max(memory.state for memory in own.memory),
        gradients=max(memory.gradients for memory in own.memory),
        peak=max(memory.peak for memory in own.memory),
        construction=own.construction,
    )


def ratios(own: Samples, other: Samples) -> Spread | None:
    """The ratios of the times of a step, round by round."""
    if other.error is not None:
        return None
    pairs = zip(own.seconds(), other.seconds(), strict=True)
    return Spread.of([mine / theirs for mine, theirs in pairs])


# ---------------------------------------------------------------------- as JSON


def to_json(value: Any) -> Any:
    """Records as dicts of plain values, numbers to seven digits: enough, and they fit a line."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_json(each) for name, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return value


def table_from_json(record: Mapping[str, Any]) -> Table:
    rows = tuple(_row_from_json(row) for row in record["rows"])
    return Table(**{"rounds": 0, **record, "rows": rows})


def _row_from_json(record: Mapping[str, Any]) -> Row:
    def spread(name: str) -> Spread | None:
        return None if record[name] is None else Spread(**record[name])

    phases = None if record["phases"] is None else Phases(**record["phases"])
    spreads = {name: spread(name) for name in ("seconds", "of_ddp", "of_torch")}
    return Row(**{**record, **spreads, "phases": phases})


# ---------------------------------------------------------------------- goals

ATTACHED = "onecopy attached"
LAZY = "onecopy attached, lazy gather"
DROP_IN = "onecopy"
TO_DDP = "onecopy attached to DDP"
NARROW = "onecopy attached, bf16 wire"
TCP = "onecopy attached, all through TCP"
_PEERS = [m.name for m in METHODS.values() if m.project in ("deepspeed", "fairscale")]
PEERS = [*_PEERS, "FSDP2", "FSDP2, no resharding"]


@dataclass(frozen=True, slots=True)
class GoalResult:
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


def goal_results(tables: Sequence[Table]) -> list[GoalResult]:
    return [result for table in tables if table.rows for result in _Goals(table).all()]


@dataclass(slots=True)
class _Goals:
    table: Table
    found: list[GoalResult] = field(default_factory=list)

    def all(self) -> list[GoalResult]:
        table = self.table
        on_loopback = table.wire == "loopback"
        if on_loopback:
            is_imbalanced = (_imbalance(table) or 1.0) > 1.1
            self.check(DROP_IN, "/ torch's class", 0.95 if is_imbalanced else 1.0, _of_torch)
        if table.workload in ("gpt", "gpt-short"):
            limit = {"gpt": 0.93, "gpt-short": 0.85}[table.workload] if on_loopback else 0.70
            if on_loopback or table.wire.endswith(" 1 Gbit/s"):
                for method in (ATTACHED, LAZY):
                    self.check(method, "/ DDP", 1.0, _of_ddp)
                    self.check(method, "/ torch's class", limit, _of_torch)
        if table.workload == "tiny":
            for method in (DROP_IN, ATTACHED, LAZY, TO_DDP):
                self.check(method, "/ DDP", 1.1, _of_ddp)
        peers = [row for row in table.rows if row.method in PEERS and table.trains_alike(row)]
        times = {row.method: row.of_ddp.middle for row in peers if row.of_ddp is not None}
        if times:
            fastest = min(times, key=times.__getitem__)
            for method in (DROP_IN, ATTACHED, LAZY, TO_DDP):
                what = f"/ {fastest}, the fastest of {len(times)} peers"
                self.check(method, what, 1.0, lambda row: _relative(row, times[fastest]))
        peaks = {row.method: row.peak for row in table.rows if self._keeps_whole(row)}
        if peaks:
            leanest = min(peaks, key=peaks.__getitem__)
            what = f"peak memory / {leanest}, the lowest of {len(peaks)} that keep whole parameters"
            self.check(ATTACHED, what, 1.0, lambda row: row.peak / peaks[leanest])
        ddp = table.row(DDP)
        # Muon's tensors stay whole, so there an even share cannot be had.
        if ddp is not None and ddp.state and table.workload != "muon":
            ideal = ddp.state / table.ranks
            for method in (DROP_IN, ATTACHED):
                what = "state of the fullest rank / ideal"
                self.check(method, what, 1.001, lambda row: row.state / ideal)
        return self.found

    def _keeps_whole(self, row: Row) -> bool:
        """Whether it is another project's, and comparable with those of ours that do."""
        method = METHODS[row.method]
        is_other = method.keeps_whole_parameters and method.project != "onecopy"
        return is_other and row.error is None and self.table.trains_alike(row)

    def check(
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
            self.found.append(GoalResult(f"{method} {what}", where, limit, middle, spread))


def _of_ddp(row: Row) -> Spread | None:
    return row.of_ddp


def _of_torch(row: Row) -> Spread | None:
    return row.of_torch


def _relative(row: Row, other: float) -> Spread | None:
    """The times of a method, by those of one that has this ratio to DDP."""
    return None if row.of_ddp is None else Spread(*(each / other for each in row.of_ddp))


def _imbalance(table: Table) -> float | None:
    """State of the fullest rank over the ideal, of torch's class."""
    ddp, torchs = table.row(DDP), table.row(TORCHS)
    if ddp is None or torchs is None or not ddp.state or torchs.error is not None:
        return None
    return torchs.state / (ddp.state / table.ranks)
