"""Memory that ranks of one host share, and the mailboxes that say what lies in it."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
import torch
from test_local_ranks import mappings, open_files

from onecopy.comm.gloo.shared_memory import (
    Address,
    Desk,
    Inbox,
    MappedMemory,
    Outbox,
    Semaphore,
    SharedMemory,
    memory_of,
)

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
    other = MappedMemory(memory_of(os.getpid(), memory.fd), world_size=4)
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
        borrowed = MappedMemory(memory_of(os.getpid(), memory.fd), 2)
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
