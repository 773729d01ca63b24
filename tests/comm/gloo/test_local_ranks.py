"""Ranks on one host that read one another's memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed, lend_nothing, pretend_hosts
from inside import (
    CAN_READ,
    lanes_of,
    pending_reads,
    plan_of,
    routes_of,
    share_memory_from,
    transfers_of,
    wait_for_readers,
)
from models import Mlp
from torch import nn
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer
from onecopy.comm.gloo.comm import GlooComm, SharedBuffer
from onecopy.comm.gloo.local_ranks import SharedRead
from onecopy.comm.gloo.shared_memory import MappedMemory, SharedMemory
from onecopy.comm.group import RankGroup

BUCKET_MB = 128 / 2**20


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:onecopy" in line for line in maps)


# ------------------------------------------------------------------ as collectives do


def comm_of_all() -> GlooComm:
    return GlooComm(RankGroup())


def shared_buffer(comm: GlooComm, numbytes: int) -> SharedBuffer:
    return SharedBuffer(comm, numbytes, torch.empty(0, dtype=torch.uint8))


def share(comm: GlooComm, buffer: SharedBuffer, tag: int = 0, readers: Any = None) -> None:
    """All of a buffer, with all local ranks."""
    with comm.group.monitor.naming_absentees():
        to = comm.peers if readers is None else readers
        comm.share(buffer, buffer.tensor, to, tag)


# ------------------------------------------------------------------ who is one


@distributed(1, 2, 3, 4)
def test_ranks_of_one_host_are_neighbours(world: World) -> None:
    pretend_hosts(world)
    assert set(comm_of_all().local_ranks.pids) == set(range(world.size)) - {world.rank}


@distributed(2, 3)
def test_the_switch_on_one_rank_concerns_that_rank(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setenv("ONECOPY_SHARED_MEMORY", "0")
        local_ranks = set(comm_of_all().local_ranks.pids)
    expected = set() if world.rank == 0 else set(range(1, world.size)) - {world.rank}
    assert local_ranks == expected


@distributed(2, 3)
def test_one_rank_that_cannot_read_the_others_makes_all_send(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == world.size - 1:
            patch.setattr(*CAN_READ, lambda *_: None)
        assert not comm_of_all().peers


@distributed(2)
def test_a_switch_without_meaning_is_refused_on_all_ranks(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setenv("ONECOPY_SHARED_MEMORY", "yes")
        with pytest.raises((ValueError, RuntimeError), match="ONECOPY_SHARED_MEMORY=yes"):
            ZeroRedundancyOptimizer(Mlp().parameters(), SGD, lr=0.1)


# ------------------------------------------------------------------ training


def trained(
    world: World, attached: bool, lazy: bool, views: bool, all_are_lent: bool = True
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), AdamW, parameters_as_bucket_view=views, bucket_mb=BUCKET_MB, lr=0.1
    )
    assert len(plan_of(optimizer).buckets) > 4  # more than there is staging for
    if attached:
        optimizer.attach(model, lazy_gather=lazy)
        if not all_are_lent:
            lanes = lanes_of(optimizer)
            assert {len(routes_of(lane).read_by) for lane in lanes} == {0, world.size - 1}
    for step in range(6):
        optimizer.zero_grad()
        model(model.batch((world.rank, step))).backward()
        if not attached:
            for param in model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
        if step % 3 == world.rank % 3:
            time.sleep(0.01)  # ranks are not level
        optimizer.step()
    optimizer.wait()
    return [param.detach().clone() for param in model.parameters()]


MODES = [(False, False), (True, False), (True, True)]


@distributed(2, 3, 4)
@pytest.mark.parametrize("views", [False, True], ids=["own-storage", "bucket-view"])
@pytest.mark.parametrize("mode", MODES, ids=["drop-in", "attached", "lazy"])
def test_what_is_read_in_place_is_what_would_have_been_sent(
    world: World, mode: tuple[bool, bool], views: bool
) -> None:
    pretend_hosts(world)
    share_memory_from(1)
    lent = trained(world, *mode, views)
    lend_nothing()
    sent = trained(world, *mode, views)
    assert all(map(torch.equal, lent, sent))


@distributed(4)
def test_only_large_parts_are_lent(world: World) -> None:
    pretend_hosts(world)
    share_memory_from(4096)
    params = [nn.Parameter(torch.zeros(4 * 1024)), nn.Parameter(torch.zeros(16))]
    for numel_lent, given in [(1024, params[:1]), (0, params[1:])]:
        optimizer = ZeroRedundancyOptimizer(given, SGD, lr=1.0)
        (transfer,) = transfers_of(optimizer)
        if numel_lent:
            assert transfer.shared is not None
            assert transfer.shared.numel() == numel_lent
            assert not transfer.parts
        else:
            assert transfer.shared is None
            assert not transfer.reads


@distributed(2, 4)
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("all_are_lent", [True, False], ids=["all lent", "remainders sent"])
def test_memory_is_not_filled_again_before_a_slow_neighbour_has_read_it(
    world: World, all_are_lent: bool, slow: int
) -> None:
    """A rank reads late, in every bucket: nobody may overwrite what it has not read, not even
    with a bucket that is itself too small to be lent."""
    read = SharedRead.tensor

    def slowly(self: Any, dtype: torch.dtype) -> torch.Tensor:
        time.sleep(0.005)
        return read(self, dtype)

    pretend_hosts(world)
    lend_nothing()
    expected = trained(world, True, False, False)
    share_memory_from(1 if all_are_lent else 128 // world.size)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == slow:
            patch.setattr(SharedRead, "tensor", slowly)
        found = trained(world, True, False, False, all_are_lent)
    assert all(map(torch.equal, found, expected))


@distributed(2, 4)
def test_nothing_stays_mapped_or_open_when_optimizers_are_gone(world: World) -> None:
    def once() -> None:
        trained(world, True, False, False)
        gc.collect()
        dist.barrier()

    once()
    comm_of_all().release_unused()  # all have read by now
    before = open_files(), mappings()
    for _ in range(5):
        once()
    comm_of_all().release_unused()
    assert (open_files(), mappings()) == before


@distributed(2, 3)
def test_ranks_that_lend_more_than_a_box_holds_before_anybody_looks_do_not_hang(
    world: World,
) -> None:
    pretend_hosts(world)
    comm = comm_of_all()
    buffer = shared_buffer(comm, 8)
    reads = []
    for _ in range(1500):
        reads.append(pending_reads(comm, 5))
        share(comm, buffer, 5)
    for pending in reads:
        pending.wait()
        for read in pending.reads:
            read.release()
    buffer.wait_until_read()
    assert not buffer.memory.unread()


def test_a_process_that_ends_leaves_its_readers_time_to_map_the_memory() -> None:
    memory = SharedMemory(100, world_size=2)
    memory.share(memory.data, [1])
    reader = MappedMemory(os.getpid(), memory.fd, world_size=2)
    thread = threading.Timer(0.2, reader.mark_read, (1, 1))
    thread.start()
    start = time.monotonic()
    wait_for_readers({memory}, {1: os.getpid()})
    assert 0.1 < time.monotonic() - start < 4
    memory.share(memory.data, [1])  # it has mapped the memory, and needs nobody any more
    start = time.monotonic()
    wait_for_readers({memory}, {1: os.getpid()})
    assert time.monotonic() - start < 1
    thread.join()


def test_nobody_lingers_for_a_reader_that_has_ended() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    memory = SharedMemory(100, world_size=2)
    memory.share(memory.data, [1])
    start = time.monotonic()
    wait_for_readers({memory}, {1: ended.pid})
    assert time.monotonic() - start < 1


@distributed(2, 3)
def test_memory_is_shared_by_a_step_in_inference_mode(world: World) -> None:
    share_memory_from(1)
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, bucket_mb=BUCKET_MB)
    for step in range(4):
        optimizer.zero_grad()
        model(model.batch((step,))).backward()
        with torch.inference_mode(step == 0):
            optimizer.step()
    optimizer.assert_replicas_equal()


# ------------------------------------------------------------------ neighbours that are lost


@distributed(2, 3, fresh=True, pg_timeout=30)
def test_a_neighbour_that_is_killed_before_it_has_read_is_noticed_at_once(world: World) -> None:
    comm = comm_of_all()
    buffer = shared_buffer(comm, 100)
    dist.barrier()
    if world.rank == 1:
        os._exit(0)
    share(comm, buffer, readers=[1])
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="a collective failed"):
        buffer.wait_until_read()
    assert time.monotonic() - start < 20


@distributed(2, fresh=True, pg_timeout=2)
def test_a_neighbour_that_never_reads_ends_in_the_timeout(world: World) -> None:
    comm = comm_of_all()
    buffer = shared_buffer(comm, 100)
    if world.rank == 0:
        share(comm, buffer, readers=[1])
        with pytest.raises(RuntimeError, match="a collective failed"):
            buffer.wait_until_read()


@distributed(2, fresh=True)
def test_waiting_for_readers_can_be_interrupted(world: World) -> None:
    comm = comm_of_all()
    buffer = shared_buffer(comm, 100)
    if world.rank == 0:
        share(comm, buffer, readers=[1])
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            buffer.wait_until_read()
