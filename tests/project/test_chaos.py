"""A real job under torchrun whose ranks are killed; `make chaos` does this 55 times."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import chaos
import pytest
import torch
import torch.distributed as dist
from chaos import Attempt, read_attempts
from chaos_plan import (
    KEEPS_ITS_RANKS,
    KILL_POINTS,
    MODES,
    POINTS_OF_JOBS,
    SAVE_EVERY,
    SIZES,
    STEPS,
    WAYS,
    Plan,
    make_plan,
    make_plans,
)
from harness import World, distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from onecopy import ZeroRedundancyOptimizer


def kill(phase: str, point: str, announcer: int, victim: int, visit: int) -> dict[str, Any]:
    assert (phase, point) in {(each.phase, str(each)) for each in KILL_POINTS}
    order = {"phase": phase, "point": point, "visit": visit, "call": 1, "delay": 0.0}
    return {**order, "announcer": announcer, "victim": victim}


def test_a_job_killed_in_a_save_and_in_a_load_goes_on_as_if_nothing_had_been() -> None:
    in_save = kill("save", "before save.write_metadata", announcer=0, victim=0, visit=2)
    in_load = kill("load", "after load.adopt", announcer=1, victim=0, visit=1)
    tally = chaos.Tally()
    chaos.run(Plan(0, "attached", ((2, 2),), {"0.0": in_save, "0.1": in_load}), tally)
    assert dict(tally.kills) == {"save": 1, "load": 1}
    assert dict(tally.places) == {
        "save: before save.write_metadata": 1,
        "load: after load.adopt": 1,
    }
    assert tally.failures == 0
    assert tally.resumed == 2
    assert tally.lost_steps == SAVE_EVERY
    # Both ranks, before and after the kills; with the repetition and with a job never killed.
    assert tally.compared == 2 * 2 * (STEPS + SAVE_EVERY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "point", "announcer"),
    [("full", "before full_state.send_tensors", 1), ("dcp", "before FileSystemWriter.finish", 0)],
)
def test_a_job_that_saves_in_another_way_is_killed_in_its_save_and_goes_on_too(
    way: str, point: str, announcer: int
) -> None:
    phase, _ = WAYS[way]
    order = kill(phase, point, announcer, victim=0, visit=2)
    tally = chaos.Tally()
    chaos.run(Plan(0, "attached", ((2, 1),), {"0.0": order}, way=way), tally)
    assert dict(tally.places) == {f"{phase}: {point}": 1}
    assert (tally.failures, tally.resumed, tally.lost_steps) == (0, 1, SAVE_EVERY)
    assert tally.compared == 2 * 2 * (STEPS + SAVE_EVERY)


@distributed(2)
@pytest.mark.parametrize("way", list(WAYS))
def test_every_site_of_a_way_is_met_where_the_plan_expects_it_and_what_was_saved_is_loaded(
    world: World, way: str, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(world.rank))  # torchrun sets it
        from chaos_worker import SAVE_AND_LOAD, elastic, hook_kill_points, owner_of

        points = [point for point in KILL_POINTS if point.phase in WAYS[way]]
        for point in points:
            owner, name = owner_of(point)
            patch.setattr(owner, name, getattr(owner, name))  # is put back
        for name, act in zip(("write", "read"), SAVE_AND_LOAD[way], strict=True):
            patch.setattr(elastic, name, act)
        met: set[tuple[str, str]] = set()
        hook_kill_points(points, lambda phase, point: met.add((phase, point)))

        net, optimizer = trained(world)
        elastic.save(tmp_path, 1, net, optimizer)
        dist.barrier()
        other, its_optimizer = trained(world, steps=0)
        assert elastic.resume(tmp_path, other, its_optimizer) == 1
    for each, its in ((net, optimizer), (other, its_optimizer)):
        train(world, each, its, step=2)
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    here = [s for s in points if not (s.only_rank_0 if world.rank else s.not_rank_0)]
    assert {(point.phase, str(point)) for point in here} <= met


def trained(world: World, steps: int = 1) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(steps)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
    optimizer.attach(net)
    for step in range(1, steps + 1):
        train(world, net, optimizer, step)
    return net, optimizer


def train(world: World, net: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> None:
    torch.manual_seed(step * world.size + world.rank)
    optimizer.zero_grad()
    net(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


def attempt(**what: Any) -> Attempt:
    return Attempt(**{"name": "0.1", "ranks": 2, "joined": 2, "resumed": 8, **what})


LOST_PORT: dict[str, Any] = {"joined": 0, "resumed": None, "errors": {0: "EADDRINUSE"}}
KILLED: dict[str, Any] = {
    "kill": {"killed": 1, "phase": "save", "where": "here", "begun": 1, "time": 0.0}
}


def judged(directory: Path, attempts: list[Attempt], code: int | None, **plan: Any) -> chaos.Job:
    order = kill("save", "before torch.save", announcer=0, victim=1, visit=1)
    job = chaos.Job(
        Plan(0, "attached", ((2, 1),), {"0.0": order}, **plan), directory, chaos.Tally()
    )
    job._check_attempts(attempts, code)
    return job


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([attempt(name="0.0", saved=12), attempt()], "resumed at 8, 12 was complete"),
        (
            [attempt(name="0.0", resumed=None, errors={1: "why"}), attempt()],
            "did not load:\nrank 1: why",
        ),
        ([attempt(name="0.0", errors={0: "why"}), attempt()], "0.0 ended by itself:\nrank 0: why"),
        ([attempt(name="0.0", done=2), attempt()], "0.0 never came to a kill before torch.save"),
        ([attempt(name="0.0"), attempt(done=1)], "0.1 did not come to its end"),
        (
            [attempt(name="0.0"), attempt(resumed=None, errors={1: "why"})],
            "0.1 did not load:\nrank 1: why",
        ),
        ([attempt(name="0.0")], "1 attempts, torchrun ended with 1"),
        ([], "0 attempts, torchrun ended with 1"),
    ],
)
def test_what_goes_wrong_in_a_job_is_told(
    tmp_path: Path, attempts: list[Attempt], expected: str
) -> None:
    job = judged(tmp_path, attempts, code=1)
    assert any(expected in fault for fault in job.faults), job.faults
    assert job.tally.missed == 1
    assert job.tally.failures == len(job.faults) + 1


def test_a_job_that_has_lost_its_port_is_still_judged(tmp_path: Path) -> None:
    lost = attempt(name="0.0", **LOST_PORT)
    assert not judged(tmp_path, [lost, attempt()], code=None).faults
    earlier = attempt(name="0.-1", saved=12)
    assert judged(tmp_path, [earlier, lost, attempt()], code=None).faults == [
        "0.1 resumed at 8, 12 was complete"
    ]


def test_a_port_that_is_always_taken_ends_with_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: chaos.Job) -> list[str]:
        raise chaos.PortTaken

    monkeypatch.setattr(chaos.Job, "run", run)
    tally = chaos.Tally()
    chaos.run(make_plan(0), tally)
    assert (tally.begun_again, tally.missed, tally.failures) == (3, 5, 5)
    assert str(tally).startswith("chaos: 0 of 5 kills")


def judged_survivor(directory: Path, said: str, phase: str = "save") -> chaos.Job:
    killed = {"kill": {**KILLED["kill"], "phase": phase}}
    first = attempt(name="0.0", errors={0: said} if said else {}, **killed)
    last = attempt(done=2, started=1.0, curves={0: {STEPS: (1.0).hex()}})
    return judged(directory, [first, last], code=0, on_machines=True)


@pytest.mark.parametrize(
    ("said", "is_enough"),
    [
        ("a collective failed: rank 1 did not arrive", True),
        ("a collective failed: rank 1 did not answer: lost, stopped, or still waiting", True),
        ("a collective failed: rank 0 did not answer: lost, stopped, or still waiting", False),
        ("one of the ranks [1] has not shared what it should", True),
        ("no sign of life from rank 1 for 60 s", True),
        ("no sign of life from rank 10 for 60 s", False),
        ("or one was lost. Last seen:\n  rank 1: in step 10", False),
        ("", False),
    ],
)
def test_the_survivor_of_a_machine_must_name_the_lost_rank(
    tmp_path: Path, said: str, is_enough: bool
) -> None:
    job = judged_survivor(tmp_path, said)
    assert (not job.faults) == is_enough, job.faults
    assert job.tally.missed == 0


OF_GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
IN_DCP = f"""Traceback (most recent call last):
  File "/point-packages/torch/distributed/checkpoint/state_dict_saver.py", line 196, in save
    return _save_state_dict(
  File "/point-packages/torch/distributed/distributed_c10d.py", line 4287, in all_gather
    work.wait()
RuntimeError: {OF_GLOO} [127.0.0.1]:21209. This is typically caused by a remote worker crashing.
"""


@pytest.mark.parametrize(
    ("said", "phase", "is_enough"),
    [
        (IN_DCP, "dcp save", True),
        (IN_DCP.replace("Connection closed by peer", "Read error"), "dcp save", True),
        (IN_DCP, "full save", False),
        (IN_DCP, "save", False),
        (IN_DCP, "step", False),
        (IN_DCP.replace("state_dict_saver", "state_dict_loader"), "dcp save", False),
        (IN_DCP.replace("Connection closed by peer", "Timed out waiting"), "dcp save", False),
        (IN_DCP + "ValueError: and then something else\n", "dcp save", False),
        (f"RuntimeError: {OF_GLOO} [127.0.0.1]:21209.", "dcp save", False),
    ],
)
def test_torchs_error_is_enough_out_of_dcps_save_alone_and_counted_apart(
    tmp_path: Path, said: str, phase: str, is_enough: bool
) -> None:
    job = judged_survivor(tmp_path, said, phase)
    assert (not job.faults, job.tally.told_by_torch) == (is_enough, is_enough), job.faults
    assert f"{job.tally.told_by_torch} told by torch alone" in str(job.tally)


def test_a_checkpoint_is_complete_when_rank_0_says_so(tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    for rank, step in ((0, 4), (1, 8)):
        (tmp_path / "attempts" / f"0.0-{rank}.jsonl").write_text(f'{{"saved": {step}}}\n')
    assert read_attempts(tmp_path)["0.0"].saved == 4


def test_losses_that_differ_in_the_last_bit_are_told(tmp_path: Path) -> None:
    one, next_to_one = (1.0).hex(), (1.0 + 2**-52).hex()
    tally = chaos.Tally()
    job = chaos.Job(make_plan(0), tmp_path, tally)
    job._compare(
        attempt(curves={0: {1: one, 2: one}}), attempt(curves={0: {1: one, 2: next_to_one}})
    )
    assert (tally.compared, tally.differing) == (2, 1)
    assert "first at step 2" in job.faults[0]


def test_losses_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    tally = chaos.Tally()
    job = chaos.Job(make_plan(0), tmp_path, tally)
    broken, sound = attempt(curves={0: {1: "nan"}}), attempt(curves={0: {1: (1.0).hex()}})
    job._compare(broken, broken)
    assert (tally.compared, tally.differing) == (1, 1)
    for ours, theirs in ((broken, sound), (sound, broken), (broken, broken), (sound, attempt())):
        job._compare_means(ours, theirs)
    assert (tally.means, tally.differing) == (4, 5)
    job._compare_means(sound, sound)
    assert (tally.means, tally.differing, tally.widest) == (5, 5, 0.0)


@pytest.mark.parametrize("seed", range(0, 100, 9))
def test_plans_follow_from_the_seed_and_reach_every_site_and_mode(seed: int) -> None:
    plans = make_plans(55, machines=5, seed=seed)
    assert plans == make_plans(55, machines=5, seed=seed)
    of_ranks, of_machines = plans[:11], plans[11:]
    kills = [order for plan in of_ranks for order in plan.kills.values()]
    assert len(kills) == 55
    assert {(order["phase"], order["point"]) for order in kills} == {
        (point.phase, str(point)) for point in KILL_POINTS
    }
    assert {plan.mode for plan in of_ranks} == set(MODES)
    whole = {size[0] for size in SIZES}
    assert {plan.launches[0][0] for plan in of_ranks} == whole
    for plan in of_ranks:
        sizes = tuple(ranks for ranks, _ in plan.launches)
        assert sizes in SIZES or sizes[0] in whole
        assert len(sizes) == 1 or plan.mode not in KEEPS_ITS_RANKS
        assert sum(count for _, count in plan.launches) == len(plan.kills)
        assert not plan.kills["0.0"]["phase"].endswith("load")
        assert not {order["phase"] for order in plan.kills.values()} & phases_of_others(plan.way)
        alone = [f"{n}." for n, (ranks, _) in enumerate(plan.launches) if ranks == 1]
        of_one = [
            o["phase"] for attempt, o in plan.kills.items() if attempt.startswith(tuple(alone))
        ]
        assert "sharing" not in of_one
    assert all(plan.on_machines for plan in of_machines)
    lost_in = {plan.kills["0.0"]["phase"]: plan.way for plan in of_machines}
    of_saves = {phases[0]: way for way, phases in WAYS.items()}
    assert lost_in.items() >= {**of_saves, "sharing": "own"}.items()
    assert len(lost_in) == 5
    assert all(
        plan.shares_memory == (plan.kills["0.0"]["phase"] == "sharing") for plan in of_machines
    )


@pytest.mark.parametrize("kills", range(1, 5))
def test_a_job_with_few_kills_has_a_plan(kills: int) -> None:
    for seed in range(100):
        plan = make_plan(seed, kills)
        assert len(plan.kills) == kills
        assert not plan.kills["0.0"]["phase"].endswith("load")
        assert not {order["phase"] for order in plan.kills.values()} & phases_of_others(plan.way)


def test_five_kills_with_a_new_seed_meet_a_save_and_other_sites_each_time() -> None:
    met: set[Any] = set()
    for seed in range(len(POINTS_OF_JOBS)):
        (plan,) = make_plans(5, machines=0, seed=seed)
        orders = list(plan.kills.values())
        phases = {order["phase"] for order in orders}
        assert len(orders) == 5
        assert len(phases) > 1
        assert WAYS[plan.way][0] in phases
        met |= {(order["phase"], order["point"]) for order in orders}
    assert met == {(point.phase, str(point)) for point in KILL_POINTS}


def phases_of_others(way: str) -> set[str]:
    return {phase for other, phases in WAYS.items() if other != way for phase in phases}


def test_every_job_of_a_row_may_be_in_every_mode_and_size() -> None:
    assert (
        math.gcd(len(POINTS_OF_JOBS), len(MODES)) == math.gcd(len(POINTS_OF_JOBS), len(SIZES)) == 1
    )


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
