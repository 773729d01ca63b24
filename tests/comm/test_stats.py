"""What communication costs, as it is counted and as `comm_stats` reports it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from harness import World, distributed
from inside import plan_of, traffic_of
from models import SMALL_BUCKETS, Mlp, seed_of
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from onecopy import ZeroRedundancyOptimizer
from onecopy.comm.stats import CommStats, Phase, Traffic

ELEMENTS = 328  # of an Mlp
STEPS = 3


# ------------------------------------------------------------------ pure


def test_traffic_counts_what_is_sent() -> None:
    traffic = Traffic()
    traffic.add(torch.zeros(3, dtype=torch.float64), copies=2)
    traffic.add(torch.zeros(0))
    assert traffic == Traffic(messages=2, bytes=48)


def test_a_transfer_is_exposed_at_its_ends_and_hidden_between_them() -> None:
    traffic = Traffic()
    with traffic.launching(Phase.ALL_GATHER, 1):
        traffic.add(torch.zeros(10))
        time.sleep(0.01)
    time.sleep(0.03)
    with traffic.waiting(Phase.ALL_GATHER, 1):
        time.sleep(0.02)
    (found,) = traffic.stats(steps=1).buckets
    assert (found.phase, found.bucket, found.times) == ("all_gather", 1, 1)
    assert (found.messages, found.bytes) == (1, 40)
    assert found.exposed >= 0.03
    assert found.hidden >= 0.03


def test_what_others_send_meanwhile_is_not_on_the_account() -> None:
    traffic = Traffic()
    traffic.add(torch.zeros(10))
    with traffic.launching(Phase.REDUCE_SCATTER, 0):
        traffic.add(torch.zeros(5))
    traffic.add(torch.zeros(10))
    stats = traffic.stats(steps=1)
    assert [each.bytes for each in stats.buckets] == [20]
    assert (stats.bytes, stats.messages) == (100, 3)
    assert stats.buckets[0].hidden == 0  # nobody has waited for it yet


def test_a_launch_that_fails_is_not_counted() -> None:
    traffic = Traffic()
    with pytest.raises(ZeroDivisionError), traffic.launching(Phase.REDUCE_SCATTER, 0):
        _ = 1 / 0
    assert [each.times for each in traffic.stats(steps=1).buckets] == [0]


def test_before_the_first_step_there_is_nothing_to_tell() -> None:
    stats = Traffic().stats(steps=0)
    assert stats == CommStats(0, 0, 0, ())
    assert stats.as_dict() == {"steps": 0, "messages": 0, "bytes": 0}
    assert "0 steps" in str(stats)


# ------------------------------------------------------------------ on ranks


def trained(world: World, kind: str, **options: Any) -> ZeroRedundancyOptimizer:
    model = Mlp()
    module = DistributedDataParallel(model) if "ddp" in kind else model
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), AdamW, lr=0.1, bucket_mb=SMALL_BUCKETS, **options
    )
    if "attached" in kind:
        optimizer.attach(module, lazy_gather="lazy" in kind)
    for step in range(STEPS):
        optimizer.zero_grad()
        module(model.batch(seed_of(world, step))).backward()
        optimizer.step()
    optimizer.wait()
    return optimizer


def owned_bytes(optimizer: ZeroRedundancyOptimizer) -> int:
    return sum(shard.numel for shard in plan_of(optimizer).shards(optimizer.rank)) * 4


@pytest.mark.parametrize(
    "kind", ["drop-in", "ddp", "attached", "attached ddp", "attached lazy", "attached ddp lazy"]
)
@distributed(1, 2, 3, 4)
def test_every_bucket_is_counted_in_every_step(world: World, kind: str) -> None:
    optimizer = trained(world, kind)
    stats = optimizer.comm_stats()
    buckets = range(len(plan_of(optimizer).buckets))
    assert len(buckets) > 2 or world.size == 1
    phases = (["all_gather"] if world.size > 1 else []) + (
        ["reduce_scatter"] if "attached" in kind else []
    )
    assert [(b.phase, b.bucket) for b in stats.buckets] == [(p, b) for p in phases for b in buckets]
    assert {each.times for each in stats.buckets} <= {STEPS}
    assert stats.steps == STEPS
    assert all(each.exposed >= 0 <= each.hidden for each in stats.buckets)
    assert all(each.exposed > 0 for each in stats.buckets)

    sent = stats.as_dict()
    others = world.size - 1
    assert sent.get("all_gather/bytes", 0) == STEPS * owned_bytes(optimizer) * others
    if "attached" in kind:
        assert sent["reduce_scatter/bytes"] == STEPS * (ELEMENTS * 4 - owned_bytes(optimizer))
    in_buckets = sum(each.bytes for each in stats.buckets)
    traffic = traffic_of(optimizer)
    assert (stats.bytes, stats.messages) == (traffic.bytes, traffic.messages)
    if "attached" in kind and world.size > 1:
        # What else travels: the values at `attach`, and which parameters had a gradient.
        assert in_buckets < stats.bytes < in_buckets + ELEMENTS * 4 * world.size + STEPS * 200
    else:
        assert in_buckets == stats.bytes
        assert sum(each.messages for each in stats.buckets) == stats.messages


@distributed(2)
def test_it_prints_as_a_table_and_flattens_for_loggers(world: World) -> None:
    stats = trained(world, "attached").comm_stats()
    head, *lines, total = str(stats).splitlines()
    assert head.split() == ["times", "messages", "MB", "sent", "exposed", "hidden"]
    assert [line.split()[:3] for line in lines] == [
        [each.phase, str(each.bucket), str(STEPS)] for each in stats.buckets
    ]
    assert total.startswith(f"{STEPS} steps")
    flat = stats.as_dict()
    for name in (
        "times",
        "messages",
        "bytes",
        "exposed",
        "hidden",
    ):  # as releases before named them
        assert flat[f"reduce/{name}"] == flat[f"reduce_scatter/{name}"]
        assert flat[f"gather/{name}"] == flat[f"all_gather/{name}"]
    assert all(isinstance(value, int | float) for value in flat.values())
    assert flat["reduce_scatter/times"] == STEPS * sum(
        each.phase == "reduce_scatter" for each in stats.buckets
    )
    assert flat["all_gather/exposed"] == pytest.approx(
        sum(each.exposed for each in stats.buckets if each.phase == "all_gather")
    )


@distributed(2)
def test_consolidating_is_counted_as_a_whole_only(world: World) -> None:
    optimizer = trained(world, "drop-in")
    before = optimizer.comm_stats()
    optimizer.consolidate_state_dict(to=0)
    after = optimizer.comm_stats()
    assert after.buckets == before.buckets
    assert (after.bytes > before.bytes) == (world.rank == 1)
