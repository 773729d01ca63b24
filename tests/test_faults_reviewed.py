"""Faults that reviews have found where one thing meets another: lending, Join, two optimizers."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed
from inside import ddps_around, plan_of, share_memory_from, was_read
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import onecopy.neighbours
import onecopy.transport
from onecopy import RanksDisagree, ZeroRedundancyOptimizer


class Products(nn.Module):
    """A sum of products: the gradient of each parameter is its factor."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.slow: int | None = None  # the parameter before whose gradient backward sleeps

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for index, (weight, factor) in enumerate(zip(self.weights, factors, strict=False)):
            product = weight * factor
            if index == self.slow:
                product.register_hook(lambda _: time.sleep(0.3))
            total = total + product.sum()
        return total

    def factors(self, rank: int) -> list[torch.Tensor]:
        source = torch.Generator().manual_seed(rank)
        return [torch.randn(weight.shape, generator=source) for weight in self.weights]


class Broken(Exception):
    pass


def breaks(_: torch.Tensor) -> None:
    raise Broken


def assert_averaged(world: World, model: Products, optimizer: ZeroRedundancyOptimizer) -> None:
    for index, weight in enumerate(model.weights):
        expected = torch.zeros_like(weight)
        for rank in range(world.size):
            expected += model.factors(rank)[index] / world.size
        torch.testing.assert_close(optimizer.full_grad(weight), expected)


# ------------------------------------------------------------------ memory that is lent


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
from inside import transport_of
from onecopy import ZeroRedundancyOptimizer
from onecopy.transfers import Transfer

rank, port = map(int, sys.argv[1:])
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", port, 2, rank == 1)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
param = torch.nn.Parameter(torch.zeros(200_000))
optimizer = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0)
assert transport_of(optimizer).neighbours
if rank == 1:
    arrive = Transfer.arrive
    Transfer.arrive = lambda self, journey: (time.sleep(1.0), arrive(self, journey))
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
    transport = onecopy.transport.Transport()
    loans, pending = transport.borrow(transport.others, 0)
    memory = transport.memory_to_lend(100)
    transport.lend(memory, dict.fromkeys(transport.others, memory.data), 0)
    dist.barrier()
    if world.rank == 1:
        os._exit(0)  # as killed: nothing is cleaned up
    time.sleep(0.5)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="a collective failed"):
        pending.wait()
    assert time.monotonic() - start < 20
    del loans


@distributed(2, fresh=True, pg_timeout=40)
def test_a_lender_that_is_killed_before_it_has_lent_is_noticed_at_once(world: World) -> None:
    transport = onecopy.transport.Transport()
    _, pending = transport.borrow(transport.others, 0)
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
    transport = onecopy.transport.Transport()
    memory = transport.memory_to_lend(8)
    memory.data.fill_(7 + world.rank)
    for _ in range(2):
        (loan,), pending = transport.borrow(transport.others, 0)
        transport.wait_until_read(memory)
        transport.lend(memory, dict.fromkeys(transport.others, memory.data), 0)
        pending.wait()
        assert loan.tensor(torch.uint8).tolist() == [8 - world.rank] * 8
        loan.give_back()
        loan.give_back()
    transport.wait_until_read(memory)
    assert not was_read(memory)


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


@contextlib.contextmanager
def without_file_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@distributed(2)
@pytest.mark.parametrize("lazy", [False, True])
def test_attaching_without_memory_on_one_rank_is_refused_on_all_and_undone(
    world: World, lazy: bool
) -> None:
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Linear(10, 2))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=1.0)
    starved = without_file_descriptors() if world.rank == 0 else contextlib.nullcontext()
    with pytest.raises((OSError, RuntimeError), match="Too many open files"), starved:
        optimizer.attach(module, lazy_gather=lazy)
    module(torch.full((1, 10), float(world.rank))).sum().backward()
    weight = module.module.weight
    assert weight.grad.unique().tolist() == [0.5]
    before = weight.detach().clone()
    if world.rank == 0:
        with pytest.raises((OSError, RuntimeError), match="Too many"), without_file_descriptors():
            optimizer.step()
    assert torch.equal(weight, before)
    optimizer.step()
    torch.testing.assert_close(weight, before - 0.5)
    optimizer.assert_replicas_equal()


# ------------------------------------------------------------------ two in one backward


@distributed(2, 3)
def test_two_attached_optimizers_in_one_backward_do_not_mix_their_gradients(world: World) -> None:
    """Rank 0 does not use a parameter of the first, so its buckets leave in another order."""
    first, second = Products(50, 50), Products(50, 50)
    optimizers = []
    for model in (first, second):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
        optimizer.attach(model)
        optimizers.append(optimizer)
    ones, tens = torch.ones(50), torch.full((50,), 10.0)
    of_second = second([tens, tens])
    (first([ones] if world.rank == 0 else [ones, ones]) + of_second).backward()
    found = [
        [float(optimizer.full_grad(weight).mean()) for weight in model.weights]
        for optimizer, model in zip(optimizers, (first, second), strict=True)
    ]
    partly = (world.size - 1) / world.size
    torch.testing.assert_close(found, [[1.0, partly], [10.0, 10.0]])


# ------------------------------------------------------------------ called again


@distributed(2, 3)
def test_gradients_about_which_the_ranks_disagree_are_dropped_on_all(world: World) -> None:
    model = Products(100)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
    optimizer.attach(model)
    model([torch.ones(100)]).backward()
    if world.rank == 1:
        optimizer.zero_grad()
    model([torch.ones(100)]).backward()
    with pytest.raises(RanksDisagree, match="backward"):
        optimizer.step()
    optimizer.step()
    assert not model.weights[0].any()
    model([torch.ones(100)]).backward()
    optimizer.step()
    assert (model.weights[0] == -1).all()


@distributed(2, 3)
@pytest.mark.parametrize("check_every", [1, 2])
def test_a_step_that_was_refused_on_one_rank_is_called_again_while_replicas_are_watched(
    world: World, check_every: int
) -> None:
    param = nn.Parameter(torch.ones(100, 10))
    optimizer = ZeroRedundancyOptimizer([param], SGD, lr=1.0, check_every=check_every)
    if world.rank == 0:
        param.grad = torch.ones(100, 10).to_sparse()
        with pytest.raises(RuntimeError, match="sparse gradient"):
            optimizer.step()
    param.grad = torch.ones(100, 10)
    for _ in range(3):
        optimizer.step()
    assert (param == -2).all()


@distributed(2)
def test_a_gradient_that_is_sparse_on_one_rank_is_found_if_every_step_is_compared(
    world: World,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONECOPY_CHECK", "step")
        param = nn.Parameter(torch.ones(100, 10))
        optimizer = ZeroRedundancyOptimizer([param], SGD, lr=1.0)
    gradient = torch.ones(100, 10)
    param.grad = gradient.to_sparse() if world.rank == 0 else gradient
    with pytest.raises(RanksDisagree, match=r"rank 0: .*a sparse gradient"):
        optimizer.step()
    param.grad = gradient
    optimizer.step()
    assert not param.any()


@distributed(2, 3)
def test_ddp_goes_on_after_the_ranks_have_disagreed_in_backward(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONECOPY_CHECK", "step")
        torch.manual_seed(0)
        module = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
        optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1)
        optimizer.attach(module)
    inputs = torch.ones(2, 8)
    module(inputs).sum().backward()
    if world.rank == 1:
        optimizer.zero_grad()
    with pytest.raises(RanksDisagree, match="in backward 2"):
        module(inputs).sum().backward()
    optimizer.zero_grad()
    for _ in range(2):
        module(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.assert_replicas_equal()


@distributed(2)
def test_ddp_is_still_watched_after_an_attached_optimizer_has_mended_it(world: World) -> None:
    module = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=1e-5
    )
    optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1)
    optimizer.attach(module)
    inner: Any = module.module[0]
    with inner.register_forward_hook(lambda _, __, out: out.register_hook(breaks) and None):
        out = module(torch.ones(1, 4))
    with contextlib.suppress(Broken):
        out.sum().backward()
    optimizer.zero_grad()
    assert len(ddps_around(optimizer)) == 1


@distributed(2)
def test_a_frozen_parameter_may_be_ddps_and_not_the_optimizers(world: World) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module = DistributedDataParallel(net, find_unused_parameters=True)
    net[0].requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer(net[1].parameters(), SGD, lr=0.1)
    optimizer.attach(module)
    before = net[1].weight.detach().clone()
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(net[1].weight, before)


# ------------------------------------------------------------------ inside Join


@distributed(2, 3)
def test_a_backward_that_raised_ends_a_look_at_gradients_on_joined_ranks_too(
    world: World,
) -> None:
    model = Products(10, 10)
    ones = [torch.ones(10), torch.ones(10)]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)
    optimizer.attach(model)
    dropped = 0
    with Join([optimizer]):
        for batch in range(3 if world.rank == 0 else 1):
            early = model.weights[0] * 1.0  # so that backward comes there last
            loss = model(ones) + early.sum()
            if batch == 1:
                early.register_hook(breaks)
            with contextlib.suppress(Broken):
                loss.backward()
            try:
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
            except RuntimeError:
                dropped += 1
            optimizer.zero_grad()
    assert dropped == (world.rank == 0)


class Shared(nn.Module):
    """A weight that is used in two checkpointed parts: its gradient comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(lambda h: h * self.weight, x, use_reentrant=True)
        return x.sum()


@distributed(2, 3)
def test_a_second_round_between_two_backwards_waits_for_nobody_who_has_joined(
    world: World,
) -> None:
    model = Shared()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    with Join([optimizer]):
        for _ in range(2 if world.rank == 0 else 1):
            for _ in range(2):
                model(torch.ones(10, requires_grad=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.assert_replicas_equal()
    assert (model.weight < 1).all()


@distributed(2, fresh=True, pg_timeout=30)
def test_a_wait_inside_join_ends_with_a_signal(world: World) -> None:
    param = nn.Parameter(torch.zeros(10))
    optimizer = ZeroRedundancyOptimizer([param], SGD, lr=1.0)
    if world.rank == 1:
        time.sleep(4)
        os._exit(0)
    param.grad = torch.ones(10)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt), Join([optimizer]):
        optimizer.step()
    assert time.monotonic() - start < 3
