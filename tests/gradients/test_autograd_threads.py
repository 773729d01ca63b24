"""Autograd runs one thread per device: gradients arrive in several threads.

Two devices are not needed for that: here a second thread delivers gradients at the very instant in
which the first is inside the part that only one may enter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import World, distributed
from inside import (
    begin_backward,
    deliver,
    end_backward,
    lanes_of,
    next_bucket,
    params_of,
    phase_of,
    plan_of,
    reducer_of,
    watch_begin,
)
from torch import nn
from torch.optim import SGD

from onecopy import ZeroRedundancyOptimizer
from onecopy.sharding.engine import BucketQueue

PARAMS = 8


def attached() -> tuple[nn.ParameterList, Any]:
    """A module of eight parameters, each in a bucket of its own: the last one leaves first."""
    params = nn.ParameterList(torch.zeros(8) for _ in range(PARAMS))
    optimizer = ZeroRedundancyOptimizer(params.parameters(), SGD, lr=1.0, bucket_mb=32 / 2**20)
    optimizer.attach(params)
    assert len(plan_of(optimizer).buckets) == (PARAMS if optimizer.world_size > 1 else 1)
    return params, optimizer


def in_thread(work: Callable[[], None], seconds: float = 20.0) -> threading.Thread:
    """Run it in another thread, until it is over or seems to wait for this one."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return thread


def gradients(world: World, params: nn.ParameterList) -> None:
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, float(index + world.rank))


def assert_averaged(world: World, optimizer: Any) -> None:
    for index, param in enumerate(params_of(optimizer)):
        average = index + (world.size - 1) / 2
        assert torch.equal(optimizer.full_grad(param), torch.full((8,), average))


@distributed(2, 4)
@pytest.mark.parametrize("at", [0, 3])
def test_a_bucket_that_is_being_launched_is_launched_by_nobody_else(world: World, at: int) -> None:
    params, optimizer = attached()
    reducer = reducer_of(optimizer)
    launched: list[tuple[int, str]] = []
    launch = BucketQueue.launch

    def interrupted(queue: BucketQueue, number: int, *args: Any) -> None:
        launched.append((number, "begins"))
        if number == at and launched.count((at, "begins")) == 1:
            rest = in_thread(lambda: [reducer.arrived(i) for i in range(PARAMS - 1 - at)] and None)
            assert not rest.is_alive()  # it leaves the launching to this thread, and goes on
        launch(queue, number, *args)
        launched.append((number, "ends"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketQueue, "launch", interrupted)
        begin_backward(optimizer)
        gradients(world, params)
        for index in reversed(range(PARAMS - 1 - at, PARAMS)):
            reducer.arrived(index)
        assert launched == [(b, what) for b in range(PARAMS) for what in ("begins", "ends")]
        reducer.end()
    assert_averaged(world, optimizer)


@distributed(2)
def test_a_bucket_that_could_not_be_launched_is_the_next_one_again(world: World) -> None:
    """Whoever claimed it raised: the backward is given up, with zeros for this bucket, too."""
    params, optimizer = attached()
    reducer = reducer_of(optimizer)
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_: Any) -> None:
            raise MemoryError("no room")

        begin_backward(optimizer)
        gradients(world, params)
        reducer.arrived(PARAMS - 1)
        patch.setattr(BucketQueue, "launch", fail)
        with pytest.raises(MemoryError):
            reducer.arrived(PARAMS - 2)
    assert next_bucket(optimizer) == 1
    assert phase_of(optimizer).launcher is None
    optimizer.zero_grad()
    begin_backward(optimizer)
    gradients(world, params)
    for index in reversed(range(PARAMS)):
        reducer.arrived(index)
    reducer.end()
    assert_averaged(world, optimizer)


@distributed(2)
def test_a_backward_begins_once(world: World) -> None:
    """The first gradients of two devices arrive together: the second waits for the beginning."""
    params, optimizer = attached()
    begun, threads = [], []

    def interrupted(begin: Callable[[], None]) -> None:
        begun.append(threading.current_thread())
        if len(begun) == 1:
            arrive = lambda: deliver(optimizer, PARAMS - 2, params[PARAMS - 2])  # noqa: E731
            threads.append(in_thread(arrive, seconds=0.5))
        begin()

    watch_begin(optimizer, interrupted)
    gradients(world, params)
    for index in (PARAMS - 1, *range(PARAMS - 2)):
        deliver(optimizer, index, params[index])
    threads[0].join(20)
    assert not threads[0].is_alive()
    assert begun == [threading.main_thread()]
    assert reducer_of(optimizer).backwards == 1
    end_backward(optimizer)
    assert_averaged(world, optimizer)


@distributed(2, 4)
@pytest.mark.parametrize("at", [0, 3])
def test_giving_up_waits_for_the_thread_that_launches(world: World, at: int) -> None:
    """backward() has raised in this thread while another one launches a bucket."""
    params, optimizer = attached()
    reducer = reducer_of(optimizer)
    launched: list[tuple[int, str]] = []
    threads: list[threading.Thread] = []
    is_inside, goes_on = threading.Event(), threading.Event()
    launch = BucketQueue.launch

    def slow(queue: BucketQueue, number: int, *args: Any) -> None:
        launched.append((number, "begins"))
        threads.append(threading.current_thread())
        if number == at:
            is_inside.set()
            goes_on.wait(0.5)  # it comes late: nobody sets it
        launch(queue, number, *args)
        launched.append((number, "ends"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketQueue, "launch", slow)
        begin_backward(optimizer)
        gradients(world, params)
        other = in_thread(lambda: [reducer.arrived(i) for i in range(PARAMS)] and None, 0)
        reducer.arrived(PARAMS - 1)
        assert is_inside.wait(20)
        optimizer.zero_grad()
    other.join(20)
    assert not other.is_alive()
    assert launched == [(b, what) for b in range(PARAMS) for what in ("begins", "ends")]
    assert set(threads[at + 1 :]) == {threading.current_thread()}  # the other one claims no more
    begin_backward(optimizer)
    gradients(world, params)
    for index in reversed(range(PARAMS)):
        reducer.arrived(index)
    reducer.end()
    assert_averaged(world, optimizer)


@distributed(1, pg_timeout=1, fresh=True)
def test_giving_up_does_not_wait_for_ever(world: World) -> None:
    params, optimizer = attached()
    reducer, is_inside, goes_on = reducer_of(optimizer), threading.Event(), threading.Event()

    def stuck(*_: Any) -> None:
        is_inside.set()
        goes_on.wait(20)
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketQueue, "launch", stuck)
        begin_backward(optimizer)
        gradients(world, params)
        other = in_thread(lambda: [reducer.arrived(i) for i in range(PARAMS)] and None, 0)
        assert is_inside.wait(20)
        with pytest.raises(RuntimeError, match="has not finished sending a bucket"):
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="waiting for a thread that sends gradients"):
            optimizer.step()
        patch.setattr(threading, "excepthook", lambda _: None)
        goes_on.set()
        other.join(20)


@distributed(2)
def test_a_thread_launches_buckets_of_its_own_device_only(world: World) -> None:
    """Buckets 1 and 2 pretend to be on another device. Its own thread launches them, or the end of
    backward, for which autograd lets the streams of all devices wait."""
    params, optimizer = attached()
    reducer, lanes = reducer_of(optimizer), lanes_of(optimizer)
    begin_backward(optimizer)
    gradients(world, params)
    wires = [lane.wire for lane in lanes]
    for lane in lanes[1:3]:
        lane.wire = lane.wire.to("meta")
    for bucket in (1, 0):
        reducer.arrived(PARAMS - 1 - bucket)
    assert next_bucket(optimizer) == 1
    lanes[1].wire = wires[1]
    reducer.arrived(PARAMS - 1 - 3)
    assert next_bucket(optimizer) == 2
    for bucket in (2, 4, 5, 6, 7):
        reducer.arrived(PARAMS - 1 - bucket)
    assert next_bucket(optimizer) == 2
    lanes[2].wire = wires[2]
    reducer.end()
    assert_averaged(world, optimizer)


class Switching(set[int]):
    """A set in which another thread comes before the first number is crossed off."""

    def __init__(self, numbers: set[int], meanwhile: Callable[[], None]) -> None:
        super().__init__(numbers)
        self._meanwhile: Callable[[], None] | None = meanwhile
        self.threads: list[threading.Thread] = []

    def discard(self, number: int) -> None:
        if self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            self.threads.append(in_thread(meanwhile, seconds=0.5))
        super().discard(number)


@distributed(1)
def test_no_arrival_is_lost(world: World) -> None:
    params, optimizer = attached()
    reducer = reducer_of(optimizer)
    begin_backward(optimizer)
    gradients(world, params)
    phase = phase_of(optimizer)
    missing = Switching(phase.missing[0], lambda: reducer.arrived(1))
    phase.missing[0] = missing
    reducer.arrived(0)
    missing.threads[0].join(20)
    assert missing == set(range(2, PARAMS))
