"""Who is killed when: a function of the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

KILLS_A_JOB = 5
STEPS, SAVE_EVERY = 48, 4
MODES = ("drop-in", "attached", "attached DDP")
SIZES = ((3, 2), (2,), (3,), (2, 1))  # ranks, and to what they shrink
PHASES = ("backward", "step", "gather", "save", "load", "any")


@dataclass(frozen=True, slots=True)
class Plan:
    """All that happens in a job; a function of its seed and of the number of kills."""

    seed: int
    mode: str
    launches: tuple[tuple[int, int], ...]  # (ranks, kills); the last one goes on to the end
    kills: dict[str, dict[str, Any]]  # by life
    on_machines: bool = False  # one for each rank

    def __str__(self) -> str:
        sizes = " then ".join(str(ranks) for ranks, _ in self.launches)
        where = ", a machine lost" if self.on_machines else ""
        return f"seed {self.seed}, {self.mode}, {sizes} ranks{where}"


def make_plan(seed: int, kills: int = KILLS_A_JOB) -> Plan:
    rng = random.Random(seed)
    ranks, *fewer = SIZES[seed % len(SIZES)]
    before = rng.randint(1, max(1, kills - 1)) if fewer else kills
    launches = ((ranks, before), *((size, kills - before) for size in fewer))
    phases = [PHASES[(seed * KILLS_A_JOB + i) % len(PHASES)] for i in range(kills)]
    rng.shuffle(phases)
    if phases[0] == "load":  # there is nothing to load yet
        phases = [*phases[1:], "load"]
    names = [f"{n}.{restart}" for n, (_, k) in enumerate(launches) for restart in range(k)]
    sizes = [size for size, k in launches for _ in range(k)]
    orders = {
        name: _order(rng, phase, size, is_first=name == "0.0")
        for name, phase, size in zip(names, phases, sizes, strict=True)
    }
    return Plan(seed, MODES[seed % len(MODES)], launches, orders)


def lost_machine(seed: int) -> Plan:
    """The second machine goes, every other time while the first waits for its part of a save."""
    rng = random.Random(seed)
    phase = "save" if seed % 2 == 0 else rng.choice(("backward", "step", "gather"))
    order = {**_order(rng, phase, 2, is_first=True), "announcer": 1, "victim": 1}
    kills = {"0.0": {**order, "with_agent": True}}
    return Plan(seed, MODES[seed % len(MODES)], ((2, 1),), kills, on_machines=True)


def _order(rng: random.Random, phase: str, ranks: int, is_first: bool) -> dict[str, Any]:
    """The first kill comes when there is a checkpoint."""
    visits = {"load": 1, "save": rng.randint(1, 2) + is_first}
    return {
        "phase": phase,
        "visit": visits.get(phase, rng.randint(1, 8) + SAVE_EVERY * is_first),
        "site": rng.random(),
        "delay": rng.uniform(0, 0.3),
        "announcer": rng.randrange(ranks),
        "victim": rng.randrange(ranks),
    }


def make_plans(trials: int, machines: int, seed: int) -> list[Plan]:
    sizes = [min(KILLS_A_JOB, trials - done) for done in range(0, trials, KILLS_A_JOB)]
    return [
        *(make_plan(seed + number, kills) for number, kills in enumerate(sizes)),
        *(lost_machine(seed + number) for number in range(machines)),
    ]
