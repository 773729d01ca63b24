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
    MAILBOX_BYTES,
    Address,
    Mailbox,
    MappedMemory,
    Semaphore,
    SharedMemory,
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


def test_what_was_shared_is_unread_until_every_reader_has_marked_it() -> None:
    memory = SharedMemory(100, world_size=4)
    assert memory.unread() == {}
    sequence = memory.share(memory.data, [1, 3]).sequence
    assert memory.unread() == {1: 0, 3: 0}
    assert not memory.wait_until_read(0)
    other = MappedMemory(os.getpid(), memory.fd, world_size=4)
    other.mark_read(3, sequence)
    assert memory.unread() == {1: 0}
    assert not memory.wait_until_read(0)
    other.mark_read(1, sequence)
    assert memory.unread() == {}
    assert memory.wait_until_read(0)
    memory.share(memory.data, [3])
    assert memory.unread() == {3: sequence}  # it has read before, and what is mapped stays


def test_memory_of_inference_mode_is_posted_to_outside_of_it() -> None:
    with torch.inference_mode():
        memory = SharedMemory(100, world_size=2)
        mapped = MappedMemory(os.getpid(), memory.fd, 2)
    memory.data.fill_(1)
    mapped.data.add_(1)
    memory.share(memory.data, [1])
    mapped.mark_read(1, 1)
    assert memory.unread() == {}
    assert set(memory.data.tolist()) == {2}


# ------------------------------------------------------------------ messages, without processes


def mailbox() -> tuple[Mailbox, Mailbox]:
    """Both ends of a mailbox, in this process."""
    memory = SharedMemory(3 * MAILBOX_BYTES, world_size=2)
    outboxes = [Mailbox(memory.data, number, posts=True) for number in range(3)]
    mapped = MappedMemory(os.getpid(), memory.fd, world_size=2)
    return outboxes[2], Mailbox(mapped.data, 2, posts=False)


def found(inbox: Mailbox, message: tuple[int, int], seconds: float = 0) -> Address | None:
    return inbox.take(message) if inbox.has(message, seconds) else None


def test_messages_with_a_tag_are_meant_in_the_order_in_which_they_were_posted() -> None:
    outbox, inbox = mailbox()
    first, second, other = inbox.expect(7), inbox.expect(7), inbox.expect(8)
    for tag, number in ((7, 1), (8, 2), (7, 3)):
        assert outbox.post(tag, Address(number, 0, 0, 0, 0), 0)
    assert found(inbox, second) == Address(3, 0, 0, 0, 0)
    assert found(inbox, other) == Address(2, 0, 0, 0, 0)
    assert found(inbox, first) == Address(1, 0, 0, 0, 0)


def test_a_message_that_was_not_posted_is_not_found() -> None:
    outbox, inbox = mailbox()
    message = inbox.expect(1)
    assert found(inbox, message, 0.01) is None
    outbox.post(2, Address(1, 2, 3, 4, 5), 0)
    assert found(inbox, message, 0.01) is None
    outbox.post(1, Address(5, 4, 3, 2, 1), 0)
    assert found(inbox, message) == Address(5, 4, 3, 2, 1)


def test_a_full_mailbox_takes_no_more_until_messages_were_taken() -> None:
    outbox, inbox = mailbox()
    posted = 0
    while outbox.post(0, Address(posted, 0, 0, 0, 0), 0):
        posted += 1
    assert posted >= 1000
    inbox.make_room()
    for more in range(posted, 3 * posted):  # the ring is used again and again
        assert outbox.post(0, Address(more, 0, 0, 0, 0), 0)
        inbox.make_room()
    messages = [inbox.expect(0) for _ in range(3 * posted)]
    addresses = [found(inbox, message) for message in messages]
    assert [address and address.fd for address in addresses] == list(range(3 * posted))


def test_a_wait_for_a_semaphore_ends_with_its_time_and_with_a_signal() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    semaphore = Semaphore(memory, 0)
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
