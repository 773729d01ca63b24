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


class Site(NamedTuple):
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


def _lending(when: str, path: str, only_at_first: bool = False) -> Site:
    return Site("lending", when, path, 6, needs_others=True, only_at_first=only_at_first)


DCP = "torch.distributed.checkpoint"
ANY = Site("any", "some time after", "elastic:my_samples")
SITES = (
    Site("backward", "after", "chaos_plan:Gradients.arrive", calls=6),
    Site("step", "before", "torch.optim:AdamW.step", calls=6),
    Site("step", "after", "torch.optim:AdamW.step", calls=6),
    Site("gather", "before", "onecopy.sharding.engine:AllGathers.launch", calls=6),
    Site("gather", "after", "onecopy.sharding.engine:AllGathers.launch", calls=6),
    Site("gather", "before", "onecopy.sharding.engine:AllGathers.wait", calls=6),
    _lending("before", "onecopy.comm.gloo.comm:SharedBuffer.wait_until_read"),
    _lending("after", "onecopy.comm.gloo.comm:GlooComm.share"),
    _lending("before", "onecopy.comm.gloo.local_ranks:SharedRead.arrive"),
    _lending("after", "onecopy.comm.gloo.local_ranks:SharedRead.arrive"),
    # An all-gather reads from the same address in later steps.
    _lending("before", "onecopy.comm.gloo.local_ranks:SharedRead.tensor", only_at_first=True),
    _lending("after", "onecopy.comm.gloo.local_ranks:SharedRead.tensor", only_at_first=True),
    _lending("before", "onecopy.comm.gloo.local_ranks:SharedRead.release"),
    _lending("after", "onecopy.comm.gloo.local_ranks:SharedRead.release"),
    Site("save", "before", "torch:save", only_rank_0=True),
    Site("save", "after", "onecopy.checkpoint.files:DataFileWriter.append", calls=6),
    Site("save", "before", "os:fsync", calls=3),
    Site("save", "before", "onecopy.comm.agreement:StoreChannel.gather"),
    Site("save", "before", "onecopy.comm.agreement:StoreChannel.answer"),
    Site("save", "before", "onecopy.checkpoint.save:write_metadata", only_rank_0=True),
    Site("save", "after", "onecopy.checkpoint.save:write_metadata", only_rank_0=True),
    Site("save", "before", "pathlib:Path.rename", calls=2, only_rank_0=True),
    Site("save", "after", "pathlib:Path.rename", calls=2, only_rank_0=True),
    Site("save", "before", "os:rmdir", calls=2, only_rank_0=True),
    Site("load", "before", "onecopy.checkpoint.files:DataFileReader.value"),
    Site("load", "after", "onecopy.checkpoint.files:DataFileReader.value"),
    Site("load", "after", "onecopy.checkpoint.files:DataFileReader.fill", calls=6),
    Site("load", "before", "onecopy.comm.agreement:StoreChannel.gather"),
    Site("load", "before", "onecopy.comm.agreement:StoreChannel.answer"),
    Site("load", "before", "onecopy.checkpoint.load:adopt"),
    Site("load", "after", "onecopy.checkpoint.load:adopt"),
    Site("full save", "before", "onecopy.checkpoint.full_state:consolidate"),
    Site(
        "full save",
        "before",
        "onecopy.checkpoint.full_state:send_tensors",
        2,
        not_rank_0=True,
        needs_others=True,
    ),
    Site(
        "full save",
        "after",
        "onecopy.checkpoint.full_state:receive_tensors",
        calls=2,
        only_rank_0=True,
    ),
    Site("full save", "after", "onecopy.checkpoint.full_state:consolidate"),
    Site("full save", "before", "torch:save", only_rank_0=True),
    Site("full save", "after", "torch:save", only_rank_0=True),
    Site("full save", "before", "pathlib:Path.rename", calls=2, only_rank_0=True),
    Site("full save", "after", "pathlib:Path.rename", calls=2, only_rank_0=True),
    Site("full load", "after", "torch:load"),
    Site("full load", "after", "onecopy.optimizer:adopt_state"),
    Site("dcp save", "before", f"{DCP}:DefaultSavePlanner.create_local_plan"),
    Site("dcp save", "before", f"{DCP}:DefaultSavePlanner.create_global_plan", only_rank_0=True),
    Site("dcp save", "before", f"{DCP}:FileSystemWriter.write_data"),
    Site("dcp save", "after", f"{DCP}:FileSystemWriter.write_data"),
    Site("dcp save", "before", f"{DCP}:FileSystemWriter.finish", only_rank_0=True),
    # The first call of a save renames the metadata.
    Site("dcp save", "before", "pathlib:Path.rename", calls=3, only_rank_0=True),
    Site("dcp save", "after", "pathlib:Path.rename", calls=3, only_rank_0=True),
    Site("dcp load", "before", f"{DCP}:FileSystemReader.read_data"),
    Site("dcp load", "before", "onecopy.checkpoint.dcp:ShardedState.load_state_dict"),
    Site("dcp load", "after", "onecopy.optimizer:adopt_state"),
    ANY,
    ANY,
    ANY,
)
PHASES = tuple(dict.fromkeys(site.phase for site in SITES))


class JobSites(NamedTuple):
    """How a job saves and loads, and the sites at which its ranks are killed."""

    way: str
    sites: tuple[Site, ...]


JOBS_OF_WAY = {"own": 5, "full": 3, "dcp": 3}


def _distribute() -> tuple[JobSites, ...]:
    """All sites, five to a job: those of a way to jobs that save in that way, the others where jobs
    have room. Jobs of one way are as far from one another as possible."""
    of_ways = {way: [s for s in SITES if s.phase in phases] for way, phases in WAYS.items()}
    others = itertools.cycle(s for s in SITES if s.phase not in (*SAVES, *LOADS))
    jobs = []
    for way, count in JOBS_OF_WAY.items():
        room = count * KILLS_A_JOB - len(of_ways[way])
        sites = _spread([*of_ways[way], *itertools.islice(others, room)])
        for number in range(count):
            job = JobSites(way, sites[number * KILLS_A_JOB : (number + 1) * KILLS_A_JOB])
            jobs.append(((number + 0.5) / count, job))
    return tuple(job for _, job in sorted(jobs, key=lambda place: place[0]))


def _spread(sites: Sequence[Site]) -> tuple[Site, ...]:
    """The same sites, with those of a phase as far from one another as possible."""
    of_phase = {p: [site for site in sites if site.phase == p] for p in PHASES}
    places = [((n + 0.5) / len(of), site) for of in of_phase.values() for n, site in enumerate(of)]
    return tuple(site for _, site in sorted(places, key=lambda place: place[0]))


# Job after job takes the next ones, and then the first ones again. Their number has no divisor in
# common with those of modes and sizes, so that other seeds give other combinations.
SITES_OF_JOBS = _distribute()

_WHILE_RANK_0_WAITS = {"DataFileWriter.append", "os.fsync", "StoreChannel.gather"}
assert {site.function for site in SITES if site.phase == "save"} >= _WHILE_RANK_0_WAITS
# Where the second machine is lost, by trial.
MACHINE_SITES: tuple[tuple[Site, ...], ...] = (
    tuple(s for s in SITES if s.phase == "save" and s.function in _WHILE_RANK_0_WAITS),
    tuple(s for s in SITES if s.phase == "lending" and not s.only_at_first),
    tuple(s for s in SITES if s.phase in ("backward", "step", "gather")),
    tuple(s for s in SITES if s.phase == "full save" and s.when == "before" and not s.only_rank_0),
    tuple(s for s in SITES if s.phase == "dcp save" and not s.only_rank_0),
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
    lends: bool = True  # ranks read in each other's memory. Two "machines" can do so, too: they are
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
    way, job = SITES_OF_JOBS[seed % len(SITES_OF_JOBS)]
    sites = list(job[:kills])
    rng.shuffle(sites)
    sites.sort(key=lambda site: ends_alone and not site.needs_others)
    first = next((number for number, site in enumerate(sites) if _may_come_first(site)), None)
    sites.insert(0, ANY if first is None else sites.pop(first))
    del sites[kills:]
    with_others = max(n for n, site in enumerate(sites, 1) if n == 1 or site.needs_others)
    least = with_others if ends_alone else 1
    if mode in KEEPS_ITS_RANKS or least >= kills:
        fewer = []
    before = rng.randint(least, kills - 1) if fewer else kills
    launches = ((ranks, before), *((size, kills - before) for size in fewer))
    names = [f"{n}.{restart}" for n, (_, k) in enumerate(launches) for restart in range(k)]
    sizes = [size for size, k in launches for _ in range(k)]
    orders = {
        name: _order(rng, site, size, is_first=name == "0.0")
        for name, site, size in zip(names, sites, sizes, strict=True)
    }
    return Plan(seed, mode, launches, orders, way=way)


def _may_come_first(site: Site) -> bool:
    """The first kill of a job comes when there is a checkpoint, and nothing has been loaded."""
    return site.phase not in LOADS and not site.only_at_first


def lost_machine(seed: int) -> Plan:
    """A job whose second machine is lost, of which nobody tells the first."""
    rng = random.Random(seed)
    sites = MACHINE_SITES[seed % len(MACHINE_SITES)]
    turn = seed // len(MACHINE_SITES)
    site = sites[turn % len(sites)]
    # In drop-in mode rank 0 may wait in DDP, whose errors name no rank; in a save it does not.
    others = () if site.phase in SAVES else ("drop-in",)
    modes = [mode for mode in MODES if mode not in (*KEEPS_ITS_RANKS, *others)]
    order = {**_order(rng, site, 2, is_first=True), "announcer": 1, "victim": 1}
    return Plan(
        seed,
        modes[(turn + seed % len(MACHINE_SITES)) % len(modes)],
        ((2, 1),),
        {"0.0": {**order, "with_agent": True}},
        on_machines=True,
        way=next((way for way, phases in WAYS.items() if site.phase in phases), "own"),
        lends=site.phase == "lending",
    )


def _order(rng: random.Random, site: Site, ranks: int, is_first: bool) -> dict[str, Any]:
    """The kill is at the `call`-th call of the site, counted from the `visit`-th beginning of its
    phase; in the phase "any", `delay` steps after that beginning."""
    of_saves, of_steps = rng.randint(1, 2) + is_first, rng.randint(2, 8) + SAVE_EVERY * is_first
    visit = of_saves if site.phase in SAVES else 1 if site.phase in LOADS else of_steps
    return {
        "phase": site.phase,
        "site": str(site),
        "visit": 1 if site.only_at_first else visit,
        "call": rng.randint(1, site.calls),
        "delay": rng.uniform(0, 3),
        "announcer": 0 if site.only_rank_0 else rng.randrange(site.not_rank_0, ranks),
        "victim": 0 if site.only_rank_0 else rng.randrange(ranks),
    }


def make_plans(trials: int, machines: int, seed: int) -> list[Plan]:
    sizes = [min(KILLS_A_JOB, trials - done) for done in range(0, trials, KILLS_A_JOB)]
    return [
        *(make_plan(seed + number, kills) for number, kills in enumerate(sizes)),
        *(lost_machine(seed + number) for number in range(machines)),
    ]
