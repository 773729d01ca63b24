"""Ranks on several hosts train, and memory that they lend is read before it is filled again."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import FEEDS, AttachedTwins
from harness import World, distributed, is_native, lend_nothing, pretend_hosts
from inside import (
    CAN_READ,
    comm_of,
    lanes_of,
    pending_reads,
    pending_task,
    plan_of,
    routes_of,
    share_memory_from,
    staged_bytes,
    staging_of,
    was_read,
)
from models import Mlp, assert_same_on_all_ranks
from test_local_ranks import MODES, comm_of_all, mappings, open_files, share, shared_buffer, trained
from test_reducer import Products
from torch import nn
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer
from onecopy.comm.gloo.local_ranks import SharedRead
from onecopy.comm.gloo.topology import Topology

LAYOUTS = {3: [(0, 0, 1), (0, 1, 1)], 4: [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2, 1)]}
EVERY_LAYOUT = pytest.mark.parametrize("number", range(4))


def pretend_layout(world: World, number: int) -> Topology:
    """The layout of that number for so many ranks; all parts are lent."""
    layout = LAYOUTS[world.size][number % len(LAYOUTS[world.size])]
    pretend_hosts(world, *layout)
    share_memory_from(1)
    return Topology.by_name(layout)


# ------------------------------------------------------------------ who is where


@distributed(3, 4)
@EVERY_LAYOUT
def test_all_ranks_know_who_shares_a_host(world: World, number: int) -> None:
    expected = pretend_layout(world, number)
    comm = comm_of_all()
    assert comm.topology == expected
    assert set(comm.local_ranks.pids) == set(expected.local_peers(world.rank)) == set(comm.peers)


@distributed(4)
def test_a_host_on_which_memory_cannot_be_read_is_known_to_be_so_on_all_ranks(world: World) -> None:
    pretend_hosts(world, 0, 0, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 3:
            patch.setattr(*CAN_READ, lambda *_: None)
        comm = comm_of_all()
    assert comm.topology == Topology(((0, 1), (2,), (3,)))
    assert bool(comm.peers) == (world.rank < 2)


# ------------------------------------------------------------------ training


@distributed(3, 4)
@pytest.mark.parametrize("views", [False, True], ids=["own-storage", "bucket-view"])
@pytest.mark.parametrize("mode", MODES, ids=["drop-in", "attached", "lazy"])
def test_what_passes_between_hosts_is_what_everybody_would_have_sent(
    world: World, mode: tuple[bool, bool], views: bool
) -> None:
    """With the last rank alone on its host the order of all sums is that of the ranks."""
    pretend_hosts(world, *[0] * (world.size - 1), 1)
    share_memory_from(1)
    carried = trained(world, *mode, views)
    lend_nothing()
    sent = trained(world, *mode, views)
    assert all(map(torch.equal, carried, sent))


@pytest.mark.also_c10d
@distributed(3, 4)
@EVERY_LAYOUT
@pytest.mark.parametrize("hooks", FEEDS)
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_training_on_several_hosts_is_that_of_ddp(
    world: World, number: int, hooks: str, lazy: bool
) -> None:
    hosts = pretend_layout(world, number)
    twins = AttachedTwins(world, Mlp(), AdamW, hooks, attach={"lazy_gather": lazy}, lr=0.1)
    if is_native():  # whatever the hosts are
        hosts = Topology.by_name(range(world.size))
    assert is_native() or comm_of(twins.optimizer).topology == hosts
    lanes = lanes_of(twins.optimizer)
    is_porter = len(hosts.host_of(world.rank)) > 1 and bool(hosts.relayed_by(world.rank))
    assert any(routes_of(lane).relayed for lane in lanes) == is_porter
    twins.train(4)


@pytest.mark.also_c10d
@distributed(4)
@EVERY_LAYOUT
def test_whole_tensors_pass_between_hosts(world: World, number: int) -> None:
    pretend_layout(world, number)
    twins = AttachedTwins(world, Mlp(), AdamW, "module", zero={"partition": "whole"}, lr=0.1)
    twins.train(3)


@distributed(4)
@pytest.mark.parametrize("lent_from", [1, 64])
@pytest.mark.parametrize("masters", [False, True])
def test_no_byte_passes_between_hosts_twice(world: World, lent_from: int, masters: bool) -> None:
    """``comm_stats`` counts what is lent, too; so it is the messages of gloo that are counted."""
    hosts = pretend_layout(world, 0)
    share_memory_from(lent_from)
    numel = 4 * 4 * 64
    model = nn.Linear(numel // 4, 4, bias=False)
    if masters:
        model.to(torch.bfloat16)
    wide = torch.float32 if masters else None
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, master_dtype=wide)
    optimizer.attach(model)
    sent: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        isend = dist.isend

        def counted(tensor: torch.Tensor, to: int, **options: Any) -> Any:
            sent["near" if to in hosts.host_of(world.rank) else "far"] += tensor.nbytes
            return isend(tensor, to, **options)

        patch.setattr(dist, "isend", counted)
        model(torch.ones(2, numel // 4).to(model.weight.dtype)).sum().backward()
        optimizer.step()
    # Of a rank: gradients for its partner on the other host, and its own share of the parameters.
    # Two contributions of 16 bits travel as one sum of 32.
    assert sent == {"far": (4 + (2 if masters else 4)) * numel // 4}
    assert optimizer.memory_report().staging == staged(optimizer)


def staged(optimizer: ZeroRedundancyOptimizer) -> int:
    """Bytes of all buffers that the only bucket passes through."""
    (lane,) = lanes_of(optimizer)
    return sum(tensor.nbytes for tensor in staging_of(lane)) + staged_bytes(optimizer)


@distributed(3, 4)
@EVERY_LAYOUT
@pytest.mark.parametrize("masters", [False, True], ids=["wire", "masters"])
def test_contributions_of_16_bits_are_summed_in_float32_wherever_the_ranks_are(
    world: World, number: int, masters: bool
) -> None:
    """Rounded once for the wire, and summed: over the host, there in rank order, then by the
    owner in the order of the hosts' relays. No other rounding, in any layout."""
    hosts = pretend_layout(world, number)
    torch.manual_seed(0)
    model = nn.Linear(67, 5, bias=False, dtype=torch.bfloat16 if masters else torch.float32)
    options = {"master_dtype": torch.float32} if masters else {}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0, **options)
    optimizer.attach(model, reduce_dtype=None if masters else torch.bfloat16)
    torch.manual_seed(world.rank)
    scale = torch.tensor([10.0 ** (world.rank - 1)])
    x = (torch.randn(1, 67) * scale).to(model.weight.dtype)
    model(x).sum().backward()
    found = optimizer.full_grad(model.weight)
    assert found.dtype == torch.float32
    every = [torch.empty_like(x) for _ in range(world.size)]
    dist.all_gather(every, x)
    shares = [(each * (1 / world.size)).to(torch.bfloat16).float()[0] for each in every]
    plan, expected = plan_of(optimizer), torch.empty(5 * 67)
    column = torch.arange(5 * 67) % 67
    for owner in range(world.size):
        for shard in plan.shards(owner):
            messages = {rank: [rank] for rank in hosts.host_of(owner)}
            messages |= {rank: hosts.host_of(rank) for rank in hosts.relays_of(owner)}
            total = torch.zeros(shard.numel)
            for rank in sorted(messages):
                sums = [shares[each][column[shard.start : shard.stop]] for each in messages[rank]]
                total = total + sum(sums[1:], sums[0])
            expected[shard.start : shard.stop] = total
    assert torch.equal(found.flatten(), expected)


# ------------------------------------------------------------------ nobody waits for the busy


@distributed(4)
def test_a_forward_of_one_rank_needs_nothing_of_those_that_wait_for_it(world: World) -> None:
    """A rank uses parameters that another of its host has received for it. That one sits in a
    barrier, and does not come by."""
    pretend_layout(world, 0)
    for busy in range(4):
        torch.manual_seed(0)
        model = Mlp()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, bucket_mb=0.0005)
        optimizer.attach(model, lazy_gather=True)
        for step in range(2):
            model(model.batch((world.rank, step))).backward()
            optimizer.step()
        if world.rank == busy:
            with torch.no_grad():
                model(model.batch((7, 7)))
        dist.barrier()
        optimizer.wait()
        assert_same_on_all_ranks(model)


class Slowly(torch.autograd.Function):
    """A backward that takes its time."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        return grad


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(count)])


@distributed(4, pg_timeout=20)
def test_two_modules_in_one_backward_may_be_reached_in_different_orders(world: World) -> None:
    """The ranks of one host reduce buckets of both in another order than those of the other, and
    what one of them has to carry comes late: nobody waits in a circle."""
    pretend_layout(world, 0)
    torch.manual_seed(0)
    first, rest, other = layers(1), layers(3), layers(5)
    both = nn.ModuleList([first, rest])
    ours = [
        ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.01, bucket_mb=1024 / 2**20)
        for module in (both, other)
    ]
    for optimizer, module in zip(ours, (both, other), strict=True):
        optimizer.attach(module)
    for _ in range(2):
        x = torch.randn(2, 16)
        middle = other(first(x)) if world.rank < 2 else first(other(x))
        x = rest(middle)
        (Slowly.apply(x) if world.rank == 1 else x).sum().backward()
        for optimizer in ours:
            optimizer.step()
    assert_same_on_all_ranks(nn.ModuleList([both, other]))


@pytest.mark.also_c10d
@distributed(4)
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a_rank_that_owns_nothing_in_most_buckets_carries_them_all_the_same(
    world: World, lazy: bool
) -> None:
    pretend_layout(world, 0)
    torch.manual_seed(0)
    model = layers(9)
    options = {"bucket_mb": 1024 / 2**20, "partition": "whole", "check_every": 1}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.01, **options)
    optimizer.attach(model, lazy_gather=lazy)
    for _ in range(2):
        x = model(torch.randn(2, 16))
        (Slowly.apply(x) if world.rank % 2 else x).sum().backward()
        optimizer.step()
    optimizer.wait()
    assert_same_on_all_ranks(model)


@pytest.mark.also_c10d
@distributed(4)
def test_parameters_that_come_later_pass_between_hosts(world: World) -> None:
    pretend_layout(world, 3)
    torch.manual_seed(0)
    model = Mlp()
    model.norm.requires_grad_(False)
    model.second.requires_grad_(False)
    given = [*model.first.parameters(), *model.norm.parameters()]
    optimizer = ZeroRedundancyOptimizer(given, AdamW, lr=0.1, bucket_mb=0.0005)
    for step in range(4):
        if step == 0:
            optimizer.attach(model)
        if step == 1:
            model.norm.requires_grad_(True)
        if step == 2:
            model.second.requires_grad_(True)
            optimizer.add_param_group({"params": model.second.parameters()})
        if step == 3:
            optimizer.detach()
            optimizer.attach(model, lazy_gather=True)
        model(model.batch((world.rank, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    assert_same_on_all_ranks(model)


@pytest.mark.also_c10d
@distributed(4)
def test_a_backward_that_raises_on_one_rank_is_given_up_on_all_hosts(world: World) -> None:
    pretend_layout(world, 0)
    torch.manual_seed(0)
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, bucket_mb=0.0005)
    optimizer.attach(model)
    for raiser in range(4):
        if world.rank == raiser:
            handle = model.first.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(model.batch((world.rank, raiser))).backward()
            handle.remove()
        else:
            model(model.batch((world.rank, raiser))).backward()
        optimizer.zero_grad()
        model(model.batch((world.rank, raiser))).backward()
        optimizer.step()
        assert_same_on_all_ranks(model)


@distributed(4)
def test_memory_of_a_porter_is_not_filled_again_before_all_have_read_it(world: World) -> None:
    pretend_layout(world, 2)
    lend_nothing()
    expected = trained(world, True, False, False)
    share_memory_from(1)
    read = SharedRead.tensor

    def slowly(self: SharedRead, dtype: torch.dtype) -> torch.Tensor:
        time.sleep(0.003)
        return read(self, dtype)

    for slow in range(4):
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == slow:
                patch.setattr(SharedRead, "tensor", slowly)
            found = trained(world, True, False, False)
        assert all(map(torch.equal, found, expected))


@distributed(4)
def test_nothing_stays_open_and_no_thread_stays_when_optimizers_are_gone(world: World) -> None:
    pretend_layout(world, 0)

    def once() -> None:
        for lazy in (False, True):
            trained(world, True, lazy, False)
        gc.collect()
        dist.barrier()

    once()
    comm_of_all().release_unused()
    before = open_files(), mappings()
    for _ in range(3):
        once()
    comm_of_all().release_unused()
    assert (open_files(), mappings()) == before
    until = time.monotonic() + 10
    while threading.active_count() > 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= 4  # this one, and those who wait for it


# ------------------------------------------------------------------ ranks that are lost


LOST_IN_OTHER_WAYS = [(0, False), (3, True), (3, False)]  # each takes the timeout


@pytest.mark.also_c10d
@distributed(4, fresh=True, pg_timeout=12, timeout=90)
@pytest.mark.parametrize(
    ("lost", "lazy"),
    [(0, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in LOST_IN_OTHER_WAYS)],
)
def test_a_porter_that_is_lost_is_named_on_all_hosts(world: World, lost: int, lazy: bool) -> None:
    pretend_layout(world, 0)
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, bucket_mb=0.0005)
    optimizer.attach(model, lazy_gather=lazy)
    model(model.batch((world.rank, 0))).backward()
    dist.barrier()
    if world.rank == lost:
        os._exit(0)

    def step_and_wait() -> None:
        optimizer.step()
        optimizer.wait()

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank {lost}\b"):
        step_and_wait()
    assert time.monotonic() - start < 30
    time.sleep(1)  # a rank that has noticed need not end for the others to notice


@distributed(4, fresh=True, pg_timeout=300, timeout=90)
def test_neighbours_of_a_porter_are_told_that_nothing_will_come(world: World) -> None:
    """Long before the timeout, and though the porter, which has noticed, does not end."""
    pretend_layout(world, 0)
    comm = comm_of_all()
    dist.barrier()
    if world.rank == 2:
        os._exit(0)
    start = time.monotonic()
    if world.rank == 0:
        buffer = shared_buffer(comm, 100)
        task = comm.receive_for_peers([(2, buffer.tensor)], buffer, buffer.tensor)
        pending = pending_task(comm, task)
    else:
        pending = pending_reads(comm, comm.relayed_tag, [0] if world.rank == 1 else [])
    if world.rank < 2:
        with pytest.raises(RuntimeError, match="a collective failed"):
            pending.wait()
    assert time.monotonic() - start < 60


# ------------------------------------------------------------------ memory that is lent


def assert_averaged(world: World, model: Products, optimizer: ZeroRedundancyOptimizer) -> None:
    for index, weight in enumerate(model.weights):
        expected = torch.zeros_like(weight)
        for rank in range(world.size):
            expected += model.factors(rank)[index] / world.size
        torch.testing.assert_close(optimizer.full_grad(weight), expected)


@distributed(2, 3, 4)
def test_a_small_last_bucket_does_not_overwrite_what_a_slow_rank_has_not_read(
    world: World,
) -> None:
    share_memory_from(64 * 1024)
    model = Products(20_000, *[65_536] * 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0, bucket_mb=0.25)
    optimizer.attach(model)
    if world.rank == 0:
        model.slow = 2
    model(model.factors(world.rank)).backward()
    assert_averaged(world, model, optimizer)


@distributed(2, 3, 4)
def test_a_bucket_of_this_ranks_own_does_not_overwrite_what_a_slow_rank_has_not_read(
    world: World,
) -> None:
    share_memory_from(1)
    model = Products(*[4096] * 7)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), SGD, lr=1.0, bucket_mb=1 / 64, partition="whole"
    )
    optimizer.attach(model)
    first, *_ = plan_of(optimizer).streams[0].owners
    if world.rank == first:
        model.slow = 4
    model(model.factors(world.rank)).backward()
    assert_averaged(world, model, optimizer)


def run_ranks(program: str, ranks: int, directory: Path) -> tuple[list[int], list[Any]]:
    """Exit codes and (output, errors) of `program RANK PORT`, each rank a process of its own that
    ends by itself, which those of the harness do not."""
    script = directory / "program.py"
    script.write_text(program)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    started = [
        subprocess.Popen([sys.executable, str(script), str(rank), port], **out)
        for rank in range(ranks)
    ]
    said = [rank.communicate(timeout=60) for rank in started]
    return [rank.returncode for rank in started], said


LEAVES = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
from inside import AFTER_GATHER, comm_of
from onecopy import ZeroRedundancyOptimizer

rank, port = map(int, sys.argv[1:])
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", port, 2, rank == 1)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
param = torch.nn.Parameter(torch.zeros(200_000))
optimizer = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0)
assert comm_of(optimizer).peers
if rank == 1:
    gather, wait = AFTER_GATHER[0], AFTER_GATHER[0].wait
    gather.wait = lambda self: (time.sleep(1.0), wait(self))
param.grad = torch.ones_like(param)
optimizer.step()
assert (param == -1).all()
"""


def test_a_rank_that_ends_after_its_first_step_leaves_its_memory_to_a_slow_one(
    tmp_path: Path,
) -> None:
    codes, said = run_ranks(LEAVES, 2, tmp_path)
    assert codes == [0, 0], said


@distributed(2, fresh=True, pg_timeout=40)
def test_a_lender_that_is_killed_before_its_memory_was_mapped_is_noticed_at_once(
    world: World,
) -> None:
    comm = comm_of_all()
    pending = pending_reads(comm, 0)
    share(comm, shared_buffer(comm, 100))
    dist.barrier()
    if world.rank == 1:
        os._exit(0)  # as killed: nothing is cleaned up
    time.sleep(0.5)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="a collective failed"):
        pending.wait()
    assert time.monotonic() - start < 20


@distributed(2, fresh=True, pg_timeout=40)
def test_a_lender_that_is_killed_before_it_has_lent_is_noticed_at_once(world: World) -> None:
    pending = pending_reads(comm_of_all(), 0)
    dist.barrier()
    if world.rank == 1:
        os._exit(0)  # as killed: nothing is cleaned up
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="a collective failed"):
        pending.wait()
    assert time.monotonic() - start < 20


@distributed(2)
def test_what_was_mapped_can_be_read_when_its_lender_is_gone(world: World) -> None:
    """As long as it was mapped; and giving it back twice is giving it back once."""
    comm = comm_of_all()
    buffer = shared_buffer(comm, 8)
    buffer.tensor.fill_(7 + world.rank)
    for _ in range(2):
        pending = pending_reads(comm, 0)
        (shared_read,) = pending.reads
        buffer.wait_until_read()
        share(comm, buffer)
        pending.wait()
        assert shared_read.tensor(torch.uint8).tolist() == [8 - world.rank] * 8
        shared_read.release()
        shared_read.release()
    buffer.wait_until_read()
    assert not was_read(buffer.memory)


HOSTS_THE_STORE = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from onecopy import ZeroRedundancyOptimizer

rank, port = map(int, sys.argv[1:])
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", port, 3, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
param = torch.nn.Parameter(torch.zeros(200_000))
optimizer = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0)
for step in range(2):
    param.grad = torch.ones_like(param)
    if rank == 0 and step == 1:
        os._exit(3)
    try:
        optimizer.step()
    except RuntimeError as error:
        print(error, flush=True)
        open(f"{sys.argv[0]}.{rank}", "w").close()
        # Else the other one might say that this one has ended, too.
        while not all(os.path.exists(f"{sys.argv[0]}.{each}") for each in (1, 2)):
            time.sleep(0.01)
        os._exit(4)
    dist.barrier()  # nobody is left behind in the first step
"""


def test_the_rank_that_hosts_the_store_is_named_by_those_of_its_host(tmp_path: Path) -> None:
    codes, said = run_ranks(HOSTS_THE_STORE, 3, tmp_path)
    assert codes == [3, 4, 4], said
    expected = "a collective failed: rank 0 ended. This one was last in step 2\n"
    assert [output for output, _ in said[1:]] == [expected, expected]
