"""A process of its own that waits somewhere, or exits somehow, for tests/comm/test_waiting.py.

    python interrupted.py <scenario> <rank> <port of the store> <directory> <"send" or "lend">

Rank 0 does what the scenario says. Rank 1 takes part in the beginning, then stays away and alive,
is stopped, or exits, too. (Where the host of the store is lost, that is rank 0, and rank 1 waits.)
The group's timeout is ten minutes: nobody may wait for that, but for somebody who is stopped, where
it is a few seconds. What is lent is awaited in another way than what is sent.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from inside import WRITE_METADATA, share_memory_from
from torch import nn

from onecopy import ZeroRedundancyOptimizer
from onecopy.sharding.engine import AllGathers

# Ignored in what a shell has started in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
SCENARIO, RANK, PORT, DIRECTORY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
share_memory_from(1 if sys.argv[5] == "lend" else sys.maxsize)
torch.set_num_threads(1)
STORE = dist.TCPStore("127.0.0.1", PORT, is_master=False)
TIMEOUT = timedelta(seconds=4) if SCENARIO.startswith("stopped") else timedelta(minutes=10)
HOST = 0 if "host" in SCENARIO else None  # of the store that the group uses
VICTIM = 1 if HOST is None else HOST


def store_of_the_group() -> dist.Store:
    if HOST is None:
        return STORE
    if RANK == HOST:
        hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        STORE.set("port", str(hosted.port))
        return hosted
    return dist.TCPStore("127.0.0.1", int(STORE.get("port")), is_master=False)


dist.init_process_group(
    "gloo", store=store_of_the_group(), rank=RANK, world_size=2, timeout=TIMEOUT
)
MODEL = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))


MANY_BUCKETS, FEW_BUCKETS = 0.001, 0.004  # a backward waits only if there are more than three


def made(
    attach: bool = True, bucket_mb: float = MANY_BUCKETS, **how: Any
) -> ZeroRedundancyOptimizer:
    optimizer = ZeroRedundancyOptimizer(
        MODEL.parameters(), torch.optim.AdamW, lr=0.1, bucket_mb=bucket_mb
    )
    if attach:
        optimizer.attach(MODEL, **how)
        backward()
    else:
        for param in MODEL.parameters():
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def backward() -> None:
    MODEL(torch.full((2, 16), RANK + 1.0)).sum().backward()


LOOKS, BETWEEN_LOOKS = 5, 0.1  # seconds


def say_when_this_thread_waits() -> None:
    """It does when it is seen in the same line again and again."""
    thread = threading.get_ident()

    def place() -> tuple[str, int]:
        frame = sys._current_frames()[thread]
        return frame.f_code.co_filename, frame.f_lineno

    def watch() -> None:
        seen = [place()]
        while len(seen) < LOOKS:
            time.sleep(BETWEEN_LOOKS)
            now = place()
            seen = [*seen, now] if seen[-1] == now else [now]
        say(f"waiting in {Path(seen[0][0]).name}")

    threading.Thread(target=watch, daemon=True).start()


def say(word: str) -> None:
    print(word, flush=True)


def together() -> None:
    """Both ranks are here."""
    STORE.set(f"here {RANK}", "")
    STORE.wait(["here 0", "here 1"])


# ---------------------------------------- waiting ----------------------------------------


def alone(wait: Callable[[], Any]) -> None:
    """Rank 0 waits for rank 1, which never comes."""
    together()
    if RANK == 0:
        say_when_this_thread_waits()
        wait()
    time.sleep(600)


def building() -> None:
    alone(lambda: made(attach=False))


def building_in_a_subgroup() -> None:
    group = dist.new_group([0, 1])
    alone(lambda: ZeroRedundancyOptimizer(MODEL.parameters(), torch.optim.SGD, group, lr=0.1))


def building_another() -> None:
    made(attach=False)
    alone(lambda: made(attach=False))


def in_backward() -> None:
    _ = made()
    alone(backward)


def in_reduce() -> None:
    optimizer = made(bucket_mb=FEW_BUCKETS)
    alone(lambda: (backward(), optimizer.step()))


def in_gather() -> None:
    optimizer = made(attach=False)
    alone(optimizer.step)


def in_forward() -> None:
    optimizer = made(lazy_gather=True)
    optimizer.wait()
    backward()
    if RANK == 1:
        alone(lambda: None)
    alone(lambda: (optimizer.step(), backward()))


def in_save() -> None:
    optimizer = made(attach=False)
    alone(lambda: optimizer.save(DIRECTORY))


def caught() -> None:
    """The user catches it, tidies up and exits."""
    optimizer = made(bucket_mb=FEW_BUCKETS)
    together()
    if RANK == 1:
        time.sleep(600)
    say_when_this_thread_waits()
    try:
        backward()
        optimizer.step()
    except KeyboardInterrupt:
        try:
            optimizer.step()
        except RuntimeError as error:
            say(f"refused: {error}")
        optimizer.zero_grad()
        optimizer.detach()
        dist.destroy_process_group()
        del optimizer
        MODEL.zero_grad()
        gc.collect()  # and nothing waits for what was under way
        say("tidy")


def handled() -> None:
    """A handler of the user's raises an Exception."""

    def late(number: int, _: Any) -> None:
        raise (TimeoutError if number == signal.SIGALRM else RuntimeError)("a second is over")

    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGUSR1, late)
    optimizer = made(attach=False)
    together()
    if RANK == 1:
        time.sleep(600)
    say_when_this_thread_waits()
    for wait in (optimizer.step, made):
        try:
            wait()
        except (TimeoutError, RuntimeError) as error:
            say(f"{type(error).__name__}: {error}")


# ---------------------------------------- stopped ----------------------------------------


def stop(*_: Any) -> None:
    """As a machine without power does: no connection is closed."""
    os.kill(os.getpid(), signal.SIGSTOP)


def without_the_other(wait: Callable[[], Any], stops_at_once: bool = True) -> None:
    """One rank stops. What the other says."""
    together()
    if RANK == VICTIM and stops_at_once:
        stop()
    start = time.monotonic()
    try:
        wait()
    except RuntimeError as error:
        say(f"{time.monotonic() - start:.1f} s: {error}")


def stopped_before_a_step() -> None:
    optimizer = made(attach=False)
    without_the_other(optimizer.step)


def stopped_before_a_backward() -> None:
    optimizer = made()
    without_the_other(lambda: (backward(), optimizer.step()))


def stopped_in_a_step() -> None:
    """Where the other one is, too."""
    optimizer = made(attach=False)
    if RANK == VICTIM:
        AllGathers.launch = stop  # type: ignore[assignment]
    without_the_other(optimizer.step, stops_at_once=False)


stopped_host_in_a_step = stopped_in_a_step


def stopped_host_before_a_step() -> None:
    """And nobody waits for its store again."""
    optimizer = made(attach=False)
    without_the_other(optimizer.step)
    start = time.monotonic()
    try:
        made()
    except RuntimeError as error:
        say(f"again: {error}")
    say(f"all {time.monotonic() - start < 5}")


def stopped_host_in_a_save() -> None:
    """Where the others wait for its answer."""
    optimizer = made(attach=False)
    if RANK == VICTIM:
        setattr(*WRITE_METADATA, stop)
    without_the_other(lambda: optimizer.save(DIRECTORY), stops_at_once=False)


def killed_host_in_a_save() -> None:
    optimizer = made(attach=False)
    if RANK == VICTIM:
        setattr(*WRITE_METADATA, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    without_the_other(lambda: optimizer.save(DIRECTORY), stops_at_once=False)
    try:
        optimizer.step()
    except RuntimeError as error:
        say(f"again: {error}")


def host_stopped_in_a_save() -> None:
    """As above, with ten minutes until the timeout, and somebody who has no patience."""
    optimizer = made(attach=False)
    if RANK == VICTIM:
        setattr(*WRITE_METADATA, stop)
    together()
    if RANK != VICTIM:
        say_when_this_thread_waits()
    optimizer.save(DIRECTORY)


# ---------------------------------------- exiting ----------------------------------------


def exit_with_all_alive() -> None:
    globals()["kept"] = made()


def exit_after_destroying() -> None:
    globals()["kept"] = made()
    backward()
    dist.destroy_process_group()


def exit_with_gathers_under_way() -> None:
    globals()["kept"] = made(lazy_gather=True)
    together()


def exit_with_reduces_under_way() -> None:
    """Rank 1 is alive and does not take part."""
    globals()["kept"] = made(bucket_mb=FEW_BUCKETS)
    together()
    if RANK == 1:
        time.sleep(600)
    backward()


def exit_with_reduces_of_ddp_under_way() -> None:
    ddp = nn.parallel.DistributedDataParallel(MODEL)
    optimizer = ZeroRedundancyOptimizer(MODEL.parameters(), torch.optim.AdamW, lr=0.1)
    optimizer.attach(ddp)
    globals()["kept"] = optimizer
    together()
    if RANK == 1:
        time.sleep(600)
    ddp.require_forward_param_sync = False  # DDP itself waits for nobody
    ddp(torch.ones(2, 16)).sum().backward()


def exit_by_an_exception() -> None:
    globals()["kept"] = made(bucket_mb=FEW_BUCKETS)
    together()
    if RANK == 1:
        time.sleep(600)
    MODEL[3].weight.register_hook(lambda _: 1 / 0)
    backward()


def exit_while_traced() -> None:
    globals()["kept"] = made(lazy_gather=True)
    together()


if __name__ == "__main__":
    globals()[SCENARIO]()
    say("end")
