"""Which rank of a job is killed at which call: a function of the seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

KILLS_A_JOB = 5
STEPS, SAVE_EVERY = 48, 4
MODES = ("drop-in", "attached", "attached DDP", "lazy", "masters")
# Gradients in 16 bits are rounded before they are added up: on another number of ranks the losses
# are not close enough to be compared.
KEEPS_ITS_RANKS = ("masters",)
SIZES = ((3, 2), (2,), (3,), (2, 1))  # ranks, and to what they shrink
# How a job saves and loads: the phases in which it does.
WAYS = {
    "own": ("save", "load"),
    "full": ("full save", "full load"),
    "dcp": ("dcp save", "dcp load"),
}
SAVES, LOADS = zip(*WAYS.values(), strict=True)


class KillPoint(NamedTuple):
    """A moment in a phase of training: just before or after a call."""

    phase: str
    when: str
    path: str  # of the function: "module:Class.method" or "module:function"
    calls: int = 1  # the kill is at one of the first so many
    only_rank_0: bool = False
    not_rank_0: bool = False
    needs_others: bool = False  # is never met on one rank
    only_at_first: bool = False  # is met for certain in the first step of a life only

    @property
    def function(self) -> str:
        """As the kill is named: "Class.method" or "module.function"."""
        module, _, name = self.path.partition(":")
        return name if "." in name else f"{module.rpartition('.')[2]}.{name}"

    def __str__(self) -> str:
        return f"{self.when} {self.function}"


class Gradients:
    """chaos_worker.py calls `arrive` for each gradient."""

    @staticmethod
    def arrive(_: object) -> None: ...


def _sharing(when: str, path: str, only_at_first: bool = False) -> KillPoint:
    return KillPoint("sharing", when, path, 6, needs_others=True, only_at_first=only_at_first)


DCP = "torch.distributed.checkpoint"
ANY = KillPoint("any", "some time after", "elastic:my_samples")
KILL_POINTS = (
    KillPoint("backward", "after", "chaos_plan:Gradients.arrive", calls=6),
    KillPoint("step", "before", "torch.optim:AdamW.step", calls=6),
    KillPoint("step", "after", "torch.optim:AdamW.step", calls=6),
    KillPoint("gather", "before", "onecopy.sharding.engine:AllGathers.launch", calls=6),
    KillPoint("gather", "after", "onecopy.sharding.engine:AllGathers.launch", calls=6),
    KillPoint(
        "gather", "before", "onecopy.sharding.sharded_params:ShardedParams.finish_step", calls=2
    ),
    _sharing("before", "onecopy.comm.gloo.comm:SharedBuffer.wait_until_read"),
    _sharing("after", "onecopy.comm.gloo.comm:GlooComm.share"),
    _sharing("before", "onecopy.comm.gloo.local_ranks:SharedRead.arrive"),
    _sharing("after", "onecopy.comm.gloo.local_ranks:SharedRead.arrive"),
    # An all-gather reads from the same address in later steps.
    _sharing("before", "onecopy.comm.gloo.local_ranks:SharedRead.tensor", only_at_first=True),
    _sharing("after", "onecopy.comm.gloo.local_ranks:SharedRead.tensor", only_at_first=True),
    _sharing("before", "onecopy.comm.gloo.local_ranks:SharedRead.release"),
    _sharing("after", "onecopy.comm.gloo.local_ranks:SharedRead.release"),
    KillPoint("save", "before", "torch:save", only_rank_0=True),
    KillPoint("save", "after", "onecopy.checkpoint.files:DataFileWriter.append", calls=6),
    KillPoint("save", "before", "os:fsync", calls=3),
    KillPoint("save", "before", "onecopy.comm.agreement:StoreChannel.gather"),
    KillPoint("save", "before", "onecopy.comm.agreement:StoreChannel.answer"),
    KillPoint("save", "before", "onecopy.checkpoint.save:write_metadata", only_rank_0=True),
    KillPoint("save", "after", "onecopy.checkpoint.save:write_metadata", only_rank_0=True),
    KillPoint("save", "before", "pathlib:Path.rename", calls=2, only_rank_0=True),
    KillPoint("save", "after", "pathlib:Path.rename", calls=2, only_rank_0=True),
    KillPoint("save", "before", "os:rmdir", calls=2, only_rank_0=True),
    KillPoint("load", "before", "onecopy.checkpoint.files:DataFileReader.value"),
    KillPoint("load", "after", "onecopy.checkpoint.files:DataFileReader.value"),
    KillPoint("load", "after", "onecopy.checkpoint.files:DataFileReader.fill", calls=6),
    KillPoint("load", "before", "onecopy.comm.agreement:StoreChannel.gather"),
    KillPoint("load", "before", "onecopy.comm.agreement:StoreChannel.answer"),
    KillPoint("load", "before", "onecopy.checkpoint.load:adopt"),
    KillPoint("load", "after", "onecopy.checkpoint.load:adopt"),
    KillPoint("full save", "before", "onecopy.optimizer:consolidate"),
    KillPoint(
        "full save",
        "before",
        "onecopy.checkpoint.full_state:send_tensors",
        2,
        not_rank_0=True,
        needs_others=True,
    ),
    KillPoint(
        "full save",
        "after",
        "onecopy.checkpoint.full_state:receive_tensors",
        calls=2,
        only_rank_0=True,
    ),
    KillPoint("full save", "after", "onecopy.optimizer:consolidate"),
    KillPoint("full save", "before", "torch:save", only_rank_0=True),
    KillPoint("full save", "after", "torch:save", only_rank_0=True),
    KillPoint("full save", "before", "pathlib:Path.rename", calls=2, only_rank_0=True),
    KillPoint("full save", "after", "pathlib:Path.rename", calls=2, only_rank_0=True),
    KillPoint("full load", "after", "torch:load"),
    KillPoint("full load", "after", "onecopy.optimizer:adopt_state"),
    KillPoint("dcp save", "before", f"{DCP}:DefaultSavePlanner.create_local_plan"),
    KillPoint(
        "dcp save", "before", f"{DCP}:DefaultSavePlanner.create_global_plan", only_rank_0=True
    ),
    KillPoint("dcp save", "before", f"{DCP}:FileSystemWriter.write_data"),
    KillPoint("dcp save", "after", f"{DCP}:FileSystemWriter.write_data"),
    KillPoint("dcp save", "before", f"{DCP}:FileSystemWriter.finish", only_rank_0=True),
    # The first call of a save renames the metadata.
    KillPoint("dcp save", "before", "pathlib:Path.rename", calls=3, only_rank_0=True),
    KillPoint("dcp save", "after", "pathlib:Path.rename", calls=3, only_rank_0=True),
    KillPoint("dcp load", "before", f"{DCP}:FileSystemReader.read_data"),
    KillPoint("dcp load", "before", "onecopy.checkpoint.dcp:ShardedState.load_state_dict"),
    KillPoint("dcp load", "after", "onecopy.optimizer:adopt_state"),
    ANY,
    ANY,
    ANY,
)
PHASES = tuple(dict.fromkeys(point.phase for point in KILL_POINTS))


class JobPoints(NamedTuple):
    """How a job saves and loads, and the points at which its ranks are killed."""

    way: str
    points: tuple[KillPoint, ...]


JOBS_OF_WAY = {"own": 5, "full": 3, "dcp": 3}


def _distribute() -> tuple[JobPoints, ...]:
    """All points, five to a job: those of a way to jobs that save so, the others where jobs
    have room. Jobs of one way are as far from one another as possible."""
    of_ways = {way: [s for s in KILL_POINTS if s.phase in phases] for way, phases in WAYS.items()}
    others = itertools.cycle(s for s in KILL_POINTS if s.phase not in (*SAVES, *LOADS))
    jobs = []
    for way, count in JOBS_OF_WAY.items():
        room = count * KILLS_A_JOB - len(of_ways[way])
        points = _spread([*of_ways[way], *itertools.islice(others, room)])
        for number in range(count):
            job = JobPoints(way, points[number * KILLS_A_JOB : (number + 1) * KILLS_A_JOB])
            jobs.append(((number + 0.5) / count, job))
    return tuple(job for _, job in sorted(jobs, key=lambda place: place[0]))


def _spread(points: Sequence[KillPoint]) -> tuple[KillPoint, ...]:
    """The same points, with those of a phase as far from one another as possible."""
    of_phase = {p: [point for point in points if point.phase == p] for p in PHASES}
    places = [
        ((n + 0.5) / len(of), point) for of in of_phase.values() for n, point in enumerate(of)
    ]
    return tuple(point for _, point in sorted(places, key=lambda place: place[0]))


# Job after job takes the next ones, and then the first ones again. Their number has no divisor in
# common with those of modes and sizes, so that other seeds give other combinations.
POINTS_OF_JOBS = _distribute()

_WHILE_RANK_0_WAITS = {"DataFileWriter.append", "os.fsync", "StoreChannel.gather"}
assert {point.function for point in KILL_POINTS if point.phase == "save"} >= _WHILE_RANK_0_WAITS
# Where the second machine is lost, by trial.
MACHINE_POINTS: tuple[tuple[KillPoint, ...], ...] = (
    tuple(s for s in KILL_POINTS if s.phase == "save" and s.function in _WHILE_RANK_0_WAITS),
    tuple(s for s in KILL_POINTS if s.phase == "sharing" and not s.only_at_first),
    tuple(s for s in KILL_POINTS if s.phase in ("backward", "step", "gather")),
    tuple(
        s
        for s in KILL_POINTS
        if s.phase == "full save" and s.when == "before" and not s.only_rank_0
    ),
    tuple(s for s in KILL_POINTS if s.phase == "dcp save" and not s.only_rank_0),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """All settings of a job; a function of its seed and of the number of kills."""

    seed: int
    mode: str
    launches: tuple[tuple[int, int], ...]  # (ranks, kills); the last one goes on to the end
    kills: dict[str, dict[str, Any]]  # by attempt
    on_machines: bool = False  # one for each rank
    way: str = "own"  # to save and to load
    shares_memory: bool = (
        True  # ranks read in each other's memory. Two "machines" can do so, too: they are
    )
    # one, and notice a loss by themselves, while torchrun tells the ranks of one agent

    def __str__(self) -> str:
        sizes = " then ".join(str(ranks) for ranks, _ in self.launches)
        where = ", a machine lost" if self.on_machines else ""
        return f"seed {self.seed}, {self.mode}, saved {self.way}, {sizes} ranks{where}"


def make_plan(seed: int, kills: int = KILLS_A_JOB) -> Plan:
    rng = random.Random(seed)
    mode = MODES[seed % len(MODES)]
    ranks, *fewer = SIZES[seed % len(SIZES)]
    ends_alone = fewer == [1]
    way, job = POINTS_OF_JOBS[seed % len(POINTS_OF_JOBS)]
    points = list(job[:kills])
    rng.shuffle(points)
    points.sort(key=lambda point: ends_alone and not point.needs_others)
    first = next((number for number, point in enumerate(points) if _may_come_first(point)), None)
    points.insert(0, ANY if first is None else points.pop(first))
    del points[kills:]
    with_others = max(n for n, point in enumerate(points, 1) if n == 1 or point.needs_others)
    least = with_others if ends_alone else 1
    if mode in KEEPS_ITS_RANKS or least >= kills:
        fewer = []
    before = rng.randint(least, kills - 1) if fewer else kills
    launches = ((ranks, before), *((size, kills - before) for size in fewer))
    names = [f"{n}.{restart}" for n, (_, k) in enumerate(launches) for restart in range(k)]
    sizes = [size for size, k in launches for _ in range(k)]
    orders = {
        name: _order(rng, point, size, is_first=name == "0.0")
        for name, point, size in zip(names, points, sizes, strict=True)
    }
    return Plan(seed, mode, launches, orders, way=way)


def _may_come_first(point: KillPoint) -> bool:
    """The first kill of a job comes when there is a checkpoint, and nothing has been loaded."""
    return point.phase not in LOADS and not point.only_at_first


def lost_machine(seed: int) -> Plan:
    """A job whose second machine is lost, of which nobody tells the first."""
    rng = random.Random(seed)
    points = MACHINE_POINTS[seed % len(MACHINE_POINTS)]
    turn = seed // len(MACHINE_POINTS)
    point = points[turn % len(points)]
    # In drop-in mode rank 0 may wait in DDP, whose errors name no rank; in a save it does not.
    others = () if point.phase in SAVES else ("drop-in",)
    modes = [mode for mode in MODES if mode not in (*KEEPS_ITS_RANKS, *others)]
    order = {**_order(rng, point, 2, is_first=True), "announcer": 1, "victim": 1}
    return Plan(
        seed,
        modes[(turn + seed % len(MACHINE_POINTS)) % len(modes)],
        ((2, 1),),
        {"0.0": {**order, "with_agent": True}},
        on_machines=True,
        way=next((way for way, phases in WAYS.items() if point.phase in phases), "own"),
        shares_memory=point.phase == "sharing",
    )


def _order(rng: random.Random, point: KillPoint, ranks: int, is_first: bool) -> dict[str, Any]:
    """The kill is at the `call`-th call of the point, counted from the `visit`-th beginning of its
    phase; in the phase "any", `delay` steps after that beginning."""
    of_saves, of_steps = rng.randint(1, 2) + is_first, rng.randint(2, 8) + SAVE_EVERY * is_first
    visit = of_saves if point.phase in SAVES else 1 if point.phase in LOADS else of_steps
    return {
        "phase": point.phase,
        "point": str(point),
        "visit": 1 if point.only_at_first else visit,
        "call": rng.randint(1, point.calls),
        "delay": rng.uniform(0, 3),
        "announcer": 0 if point.only_rank_0 else rng.randrange(point.not_rank_0, ranks),
        "victim": 0 if point.only_rank_0 else rng.randrange(ranks),
    }


def make_plans(trials: int, machines: int, seed: int) -> list[Plan]:
    sizes = [min(KILLS_A_JOB, trials - done) for done in range(0, trials, KILLS_A_JOB)]
    return [
        *(make_plan(seed + number, kills) for number, kills in enumerate(sizes)),
        *(lost_machine(seed + number) for number in range(machines)),
    ]
