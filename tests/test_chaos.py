"""A real job under torchrun whose ranks are killed; `make chaos` does this fifty times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chaos
import pytest
import torch
from chaos_job import Life
from chaos_plan import MODES, PHASES, SAVE_EVERY, SIZES, STEPS, Plan, make_plan, make_plans
from harness import World, distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def kill(phase: str, announcer: int, victim: int, visit: int, site: float) -> dict[str, Any]:
    order = {"phase": phase, "visit": visit, "site": site, "delay": 0.0}
    return {**order, "announcer": announcer, "victim": victim}


def test_a_job_killed_in_a_save_and_in_a_load_goes_on_as_if_nothing_had_been() -> None:
    in_save = kill("save", announcer=0, victim=0, visit=2, site=0.5)  # before the metadata
    in_load = kill("load", announcer=1, victim=0, visit=1, site=0.9)
    tally = chaos.Tally()
    chaos.run(Plan(0, "attached", ((2, 2),), {"0.0": in_save, "0.1": in_load}), tally)
    assert dict(tally.kills) == {"save": 1, "load": 1}
    assert tally.failures == 0
    assert tally.resumed == 2
    assert tally.lost_steps == SAVE_EVERY
    # Both ranks, before and after the kills; with the repetition and with a job never killed.
    assert tally.compared == 2 * 2 * (STEPS + SAVE_EVERY)


def life(**what: Any) -> Life:
    return Life(**{"name": "0.1", "ranks": 2, "joined": 2, "resumed": 8, **what})


@pytest.mark.parametrize(
    ("lives", "expected"),
    [
        ([life(name="0.0", saved=12), life()], "resumed at 8, 12 was complete"),
        ([life(name="0.0", resumed=None, errors=["why"]), life()], "0.0 did not load:\nwhy"),
        ([life(name="0.0", errors=["why"]), life()], "0.0 ended by itself:\nwhy"),
        ([life(name="0.0"), life(done=1)], "0.1 did not come to its end"),
        ([life(name="0.0")], "1 lives, torchrun ended with 1"),
    ],
)
def test_what_goes_wrong_in_a_job_is_told(tmp_path: Path, lives: list[Life], expected: str) -> None:
    tally = chaos.Tally()
    job = chaos.Job(Plan(0, "attached", ((2, 1),), {"0.0": {}}), tmp_path, tally)
    job._judge_lives(lives, code=1)
    assert any(expected in fault for fault in job.faults), job.faults
    assert tally.failures == len(job.faults)


def test_losses_that_differ_in_the_last_bit_are_told(tmp_path: Path) -> None:
    one, next_to_one = (1.0).hex(), (1.0 + 2**-52).hex()
    tally = chaos.Tally()
    job = chaos.Job(make_plan(0), tmp_path, tally)
    job._compare(life(curves={0: {1: one, 2: one}}), life(curves={0: {1: one, 2: next_to_one}}))
    assert (tally.compared, tally.differing) == (2, 1)
    assert "first at step 2" in job.faults[0]


def test_plans_follow_from_the_seed_and_reach_every_phase_and_mode() -> None:
    plans = make_plans(50, machines=2, seed=0)
    assert plans == make_plans(50, machines=2, seed=0)
    *of_ranks, first, second = plans
    phases = [order["phase"] for plan in of_ranks for order in plan.kills.values()]
    assert len(phases) == 50
    assert min(phases.count(phase) for phase in PHASES) >= 8
    assert {plan.mode for plan in of_ranks} == set(MODES)
    assert {tuple(ranks for ranks, _ in plan.launches) for plan in of_ranks} == set(SIZES)
    assert all(plan.kills["0.0"]["phase"] != "load" for plan in plans)
    assert first.on_machines
    assert second.on_machines
    assert first.kills["0.0"]["phase"] == "save"


def losses_of_plain_ddp(
    world: World, wrapped_anew_at: tuple[int, ...], **options: Any
) -> list[str]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 96), nn.Linear(96, 1))
    model, optimizer = DDP(net, **options), torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []
    for step in range(24):
        if step in wrapped_anew_at:
            model = DDP(net, **options)
        torch.manual_seed(step * world.size + world.rank)
        loss = model(torch.randn(16, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


@distributed(3)
def test_on_three_ranks_ddp_itself_changes_bits_after_a_restart(world: World) -> None:
    """Why a job in drop-in mode is compared with one that resumed from the same checkpoint: DDP
    lays its buckets out anew after the first step (but not with `find_unused_parameters`)."""
    restarts = (8, 16)
    for options, is_equal in (({}, False), ({"find_unused_parameters": True}, True)):
        straight = losses_of_plain_ddp(world, (), **options)
        restarted = losses_of_plain_ddp(world, restarts, **options)
        assert straight[:8] == restarted[:8]
        assert (straight == restarted) == is_equal, options
