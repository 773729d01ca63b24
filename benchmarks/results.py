"""What a benchmark found: records, and the ratios that are drawn from them. No processes here.

Times are compared within a round, in which every method has had its turn on the same machine in the
same minute; the median of these ratios and their quartiles are what is shown.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ENOUGH_FOR_QUARTILES = 5


class Turn(NamedTuple):
    """A turn of one rank: means over its steps."""

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
    """One method on one workload, or why there is nothing to tell."""

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
    """What one method has done so far, by round and rank."""

    rounds: list[list[Turn]] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    construction: float = 0.0
    error: str | None = None

    def add(self, other: Samples) -> None:
        """The same method in another heat. Memory and construction are of one heat, as of others:
        else the references alone would have the worst of several."""
        self.rounds += other.rounds
        self.memory = self.memory or other.memory
        self.construction = self.construction or other.construction
        self.error = self.error or other.error

    def seconds(self) -> list[float]:
        return [max(turn.seconds for turn in ranks) for ranks in self.rounds]

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
        loss=statistics.mean(turn.loss for turn in last),
        state=max(memory.state for memory in own.memory),
        gradients=max(memory.gradients for memory in own.memory),
        peak=max(memory.peak for memory in own.memory),
        construction=own.construction,
    )


def ratios(own: Samples, other: Samples) -> Spread | None:
    """Of the times of a step, round by round."""
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
