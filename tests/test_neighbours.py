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
from inside import CAN_READ, lanes_of, plan_of, share_memory_from, transfers_of, wait_for_readers
from models import Mlp
from torch import nn
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer
from onecopy.lending import Address, Borrowed, Desk, Inbox, Outbox, SharedMemory, memory_of
from onecopy.neighbours import Loan
from onecopy.semaphores import Semaphore
from onecopy.transport import Transport

BUCKET_MB = 128 / 2**20


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:onecopy" in line for line in maps)


# ------------------------------------------------------------------ memory, without processes


def test_memory_starts_with_zeros_and_is_as_large_as_asked_for() -> None:
    memory = SharedMemory(1000, world_size=3)
    assert memory.data.numel() == 1000
    assert not memory.data.any()
    assert memory.data.data_ptr() % 64 == 0


def test_memory_and_its_file_go_with_the_last_reference() -> None:
    gc.collect()
    before = open_files(), mappings()
    memory = SharedMemory(1000, 2)
    part = memory.data[10:]
    del memory
    gc.collect()
    assert open_files() == before[0]
    part.fill_(1)  # the memory itself lives as long as a tensor needs it
    del part
    assert mappings() == before[1]


def test_memory_cannot_be_truncated_under_its_readers() -> None:
    memory = SharedMemory(1000, 2)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 10)


def test_what_was_lent_is_unread_until_every_reader_has_noted_it() -> None:
    memory = SharedMemory(100, world_size=4)
    assert memory.unread() == []
    memory.lend([1, 3])
    assert memory.unread() == [1, 3]
    assert not memory.wait_until_read(0)
    ticket = memory.address(memory.data).ticket
    other = Borrowed(memory_of(os.getpid(), memory.fd), world_size=4)
    other.give_back(3, ticket)
    assert memory.unread() == memory.unmapped() == [1]
    assert not memory.wait_until_read(0)
    other.give_back(1, ticket)
    assert memory.unread() == []
    assert memory.wait_until_read(0)
    memory.lend([3])
    assert memory.unread() == [3]
    assert memory.unmapped() == []  # it has read before, and what is mapped stays


def test_memory_of_inference_mode_is_written_to_outside_of_it() -> None:
    with torch.inference_mode():
        memory = SharedMemory(100, world_size=2)
        borrowed = Borrowed(memory_of(os.getpid(), memory.fd), 2)
    memory.data.fill_(1)
    borrowed.data.add_(1)
    memory.lend([1])
    borrowed.give_back(1, 1)
    assert memory.unread() == []
    assert set(memory.data.tolist()) == {2}


# ------------------------------------------------------------------ letters, without processes


def boxes() -> tuple[Outbox, Inbox]:
    """Both ends of a box, in this process."""
    desk = Desk.make(3)
    inbox = Desk.inbox(memory_of(os.getpid(), desk.fd), 2)
    os.close(desk.fd)
    return desk.outboxes[2], inbox


def found(inbox: Inbox, letter: tuple[int, int], seconds: float = 0) -> Address | None:
    return inbox.take_out(letter) if inbox.has(letter, seconds) else None


def test_letters_with_a_tag_are_meant_in_the_order_in_which_they_were_written() -> None:
    outbox, inbox = boxes()
    first, second, other = inbox.expect(7), inbox.expect(7), inbox.expect(8)
    for tag, number in ((7, 1), (8, 2), (7, 3)):
        assert outbox.write(tag, Address(number, 0, 0, 0, 0), 0)
    assert found(inbox, second) == Address(3, 0, 0, 0, 0)
    assert found(inbox, other) == Address(2, 0, 0, 0, 0)
    assert found(inbox, first) == Address(1, 0, 0, 0, 0)


def test_a_letter_that_was_not_written_is_not_found() -> None:
    outbox, inbox = boxes()
    letter = inbox.expect(1)
    assert found(inbox, letter, 0.01) is None
    outbox.write(2, Address(1, 2, 3, 4, 5), 0)
    assert found(inbox, letter, 0.01) is None
    outbox.write(1, Address(5, 4, 3, 2, 1), 0)
    assert found(inbox, letter) == Address(5, 4, 3, 2, 1)


def test_a_full_box_takes_no_more_until_letters_were_taken() -> None:
    outbox, inbox = boxes()
    written = 0
    while outbox.write(0, Address(written, 0, 0, 0, 0), 0):
        written += 1
    assert written >= 1000
    inbox.make_room()
    for more in range(written, 3 * written):  # the ring is used again and again
        assert outbox.write(0, Address(more, 0, 0, 0, 0), 0)
        inbox.make_room()
    letters = [inbox.expect(0) for _ in range(3 * written)]
    addresses = [found(inbox, letter) for letter in letters]
    assert [address and address.fd for address in addresses] == list(range(3 * written))


def test_a_wait_for_a_semaphore_ends_with_its_time_and_with_a_signal() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    semaphore = Semaphore.make(memory)
    start = time.monotonic()
    assert not semaphore.wait(0.05)
    assert 0.04 < time.monotonic() - start < 5
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        assert not semaphore.wait(30)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 20
    semaphore.post()
    assert semaphore.wait(0)
    assert not semaphore.take()


# ------------------------------------------------------------------ who is one


@distributed(1, 2, 3, 4)
def test_ranks_of_one_host_are_neighbours(world: World) -> None:
    pretend_hosts(world)
    transport = Transport()
    assert set(transport.neighbours.pids) == set(range(world.size)) - {world.rank}


@distributed(2, 3)
def test_the_switch_on_one_rank_concerns_that_rank(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setenv("ONECOPY_SHARED_MEMORY", "0")
        neighbours = set(Transport().neighbours.pids)
    expected = set() if world.rank == 0 else set(range(1, world.size)) - {world.rank}
    assert neighbours == expected


@distributed(2, 3)
def test_one_rank_that_cannot_read_the_others_makes_all_send(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == world.size - 1:
            patch.setattr(*CAN_READ, lambda *_: False)
        assert not Transport().neighbours


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
            assert {len(lane.passage.readers) for lane in lanes} == {0, world.size - 1}
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
            assert transfer.lending is not None
            assert transfer.lending.part.numel() == numel_lent
            assert not transfer.parts
        else:
            assert transfer.lending is None
            assert not transfer.borrowings


@distributed(2, 4)
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("all_are_lent", [True, False], ids=["all lent", "remainders sent"])
def test_memory_is_not_filled_again_before_a_slow_neighbour_has_read_it(
    world: World, all_are_lent: bool, slow: int
) -> None:
    """A rank reads late, in every bucket: nobody may overwrite what it has not read, not even
    with a bucket that is itself too small to be lent."""
    read = Loan.tensor

    def slowly(self: Any, dtype: torch.dtype) -> torch.Tensor:
        time.sleep(0.005)
        return read(self, dtype)

    pretend_hosts(world)
    lend_nothing()
    expected = trained(world, True, False, False)
    share_memory_from(1 if all_are_lent else 128 // world.size)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == slow:
            patch.setattr(Loan, "tensor", slowly)
        found = trained(world, True, False, False, all_are_lent)
    assert all(map(torch.equal, found, expected))


@distributed(2, 4)
def test_nothing_stays_mapped_or_open_when_optimizers_are_gone(world: World) -> None:
    def once() -> None:
        trained(world, True, False, False)
        gc.collect()
        dist.barrier()

    once()
    Transport().neighbours.forget()  # all have read by now
    before = open_files(), mappings()
    for _ in range(5):
        once()
    Transport().neighbours.forget()
    assert (open_files(), mappings()) == before


@distributed(2, 3)
def test_ranks_that_lend_more_than_a_box_holds_before_anybody_looks_do_not_hang(
    world: World,
) -> None:
    transport = Transport()
    memory = transport.memory_to_lend(8)
    loans = []
    for _ in range(1500):
        lent, pending = transport.borrow(transport.others, 5)
        loans.append((lent, pending))
        transport.lend(memory, dict.fromkeys(transport.others, memory.data), 5)
    for lent, pending in loans:
        pending.wait()
        for loan in lent:
            loan.give_back()
    transport.wait_until_read(memory)
    assert memory.unread() == []


def test_a_process_that_ends_leaves_its_readers_time_to_map_the_memory() -> None:
    memory = SharedMemory(100, world_size=2)
    memory.lend([1])
    reader = Borrowed(memory_of(os.getpid(), memory.fd), world_size=2)
    thread = threading.Timer(0.2, reader.give_back, (1, 1))
    thread.start()
    start = time.monotonic()
    wait_for_readers({memory}, {1: os.getpid()})
    assert 0.1 < time.monotonic() - start < 4
    memory.lend([1])  # it has mapped the memory, and needs nobody any more
    start = time.monotonic()
    wait_for_readers({memory}, {1: os.getpid()})
    assert time.monotonic() - start < 1
    thread.join()


def test_nobody_lingers_for_a_reader_that_has_ended() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    memory = SharedMemory(100, world_size=2)
    memory.lend([1])
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
    transport = Transport()
    memory = transport.memory_to_lend(100)
    dist.barrier()
    if world.rank == 1:
        os._exit(0)
    transport.lend(memory, {1: memory.data}, 0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="a collective failed"):
        transport.wait_until_read(memory)
    assert time.monotonic() - start < 20


@distributed(2, fresh=True, pg_timeout=2)
def test_a_neighbour_that_never_reads_ends_in_the_timeout(world: World) -> None:
    transport = Transport()
    memory = transport.memory_to_lend(100)
    if world.rank == 0:
        transport.lend(memory, {1: memory.data}, 0)
        with pytest.raises(RuntimeError, match="a collective failed"):
            transport.wait_until_read(memory)


@distributed(2, fresh=True)
def test_waiting_for_readers_can_be_interrupted(world: World) -> None:
    transport = Transport()
    memory = transport.memory_to_lend(100)
    if world.rank == 0:
        transport.lend(memory, {1: memory.data}, 0)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            transport.wait_until_read(memory)
