"""Nothing is left behind: threads, files, hooks, groups, memory."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing_jobs import ATTACHED, MODES, Job
from harness import World, distributed
from inside import forget_lent_memory, private_groups
from models import SMALL_BUCKETS, Mlp
from torch import nn
from torch.optim import AdamW

import onecopy.planning.sizes
from onecopy import ZeroRedundancyOptimizer

# ---------------------------------------- what is counted ----------------------------------------


def threads() -> int:
    """Those of C++ too."""
    return len(os.listdir("/proc/self/task"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_kilobytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def mappings_of_lent_memory() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:onecopy" in line for line in file)


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def tensors() -> int:
    return sum(isinstance(obj, torch.Tensor) for obj in gc.get_objects())


def hooks_on(module: nn.Module) -> int:
    """Of all kinds, on the module, everything in it and its parameters."""
    found = 0
    for each in module.modules():
        found += sum(len(each.__dict__[name]) for name in MODULE_HOOKS)
        found += "zero_grad" in each.__dict__
    for param in module.parameters():
        found += len(param._backward_hooks or ())
        found += len(getattr(param, "_post_accumulate_grad_hooks", None) or ())
    return found


MODULE_HOOKS = [name for name in vars(nn.Linear(1, 1)) if name.endswith("_hooks")]


def census() -> dict[str, int]:
    gc.collect()  # some are in cycles
    if dist.get_world_size() > 1:
        dist.barrier()  # what a rank has lent, it keeps until the others have read it
        forget_lent_memory()
    return {"threads": threads(), "files": open_files(), "groups": groups(), "tensors": tensors()}


# ---------------------------------------- one optimizer ----------------------------------------


@distributed(1, 2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["after a step", "after a backward", "after one that raised"])
def test_optimizer_module_and_parameters_die(world: World, mode: str, when: str) -> None:
    job = Job(world, mode)
    job.train(1)
    if when == "after a backward":
        job.compute(2)
    elif when == "after one that raised" and mode in ATTACHED:
        job.arm("autograd function")
        with pytest.raises(Exception, match="autograd function"):
            job.compute(2)
    others = [job.module, *job.model.parameters()]
    watched = [weakref.ref(job.optimizer), *map(weakref.ref, others)]
    del others, job
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


@distributed(1, 2)
@pytest.mark.parametrize("mode", ["module", "lazy", "ddp"])
def test_detaching_and_deleting_take_all_hooks_away(world: World, mode: str) -> None:
    job = Job(world, "drop-in" if mode == "ddp" else "module")
    if mode != "ddp":
        job.optimizer.detach()
    before = hooks_on(job.module)
    job.optimizer.attach(job.module, lazy_gather=mode == "lazy")
    assert hooks_on(job.module) > before
    job.train(1)
    job.optimizer.detach()
    assert hooks_on(job.module) == before

    job.optimizer.attach(job.module, lazy_gather=mode == "lazy")
    job.train(2)
    del job.optimizer
    gc.collect()
    assert hooks_on(job.module) == before


# ---------------------------------------- many of them ----------------------------------------


def live_once(world: World, mode: str) -> None:
    job = Job(world, mode)
    job.train(1)
    if mode in ATTACHED:
        job.optimizer.detach()


def use_a_group_once(world: World, _: str) -> None:
    group = dist.new_group(list(range(world.size)))
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), AdamW, process_group=group, bucket_mb=SMALL_BUCKETS
    )
    optimizer.attach(model)
    model(model.batch((world.rank, 1))).backward()
    optimizer.step()
    optimizer.detach()
    dist.destroy_process_group(group)


def attach_once(model: Any, optimizer: Any, lazy: bool) -> None:
    optimizer.attach(model, lazy_gather=lazy)
    model(model.batch((1, 1))).backward()
    optimizer.step()
    optimizer.detach()


def assert_flat(life: Callable[[], None], times: int) -> None:
    for _ in range(3):  # threads and buffers that live as long as the process
        life()
    before = census()
    for _ in range(times):
        life()
    assert census() == before


@distributed(2, timeout=240.0)
@pytest.mark.parametrize("mode", MODES)
def test_building_and_deleting_is_flat(world: World, mode: str) -> None:
    assert_flat(lambda: live_once(world, mode), 10)


@pytest.mark.slow
@distributed(1, 2, 3, timeout=900.0)
@pytest.mark.parametrize("mode", MODES)
def test_building_and_deleting_a_hundred_times_is_flat(world: World, mode: str) -> None:
    assert_flat(lambda: live_once(world, mode), 100)


@distributed(2, timeout=120.0)
@pytest.mark.parametrize("lazy", [False, True])
def test_attaching_and_detaching_a_hundred_times_is_flat(world: World, lazy: bool) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, bucket_mb=SMALL_BUCKETS)
    hooks = hooks_on(model)
    assert_flat(lambda: attach_once(model, optimizer, lazy), 100)
    assert hooks_on(model) == hooks


@distributed(2, 3, timeout=120.0)
def test_our_group_goes_with_the_users(world: World) -> None:
    gc.collect()
    known = len(private_groups())  # of tests before, whose groups were broken
    assert_flat(lambda: use_a_group_once(world, ""), 8)
    assert len(private_groups()) <= known


# What neighbours may keep of one optimizer that is gone, until the next one prepares its gathers:
# the buffers of gathers and of reductions, this rank's and those of the other.
KEPT_OF_ONE_OPTIMIZER = 2 * (
    onecopy.planning.sizes.SHARED_BUFFERS + onecopy.planning.sizes.SHARED_BUFFERS
)


@distributed(2, timeout=240.0)
@pytest.mark.parametrize("mode", MODES)
def test_lent_memory_goes_by_itself(world: World, mode: str) -> None:
    """As in a user's job, where nobody calls ``forget``."""
    gc.collect()
    files, mappings = open_files(), mappings_of_lent_memory()  # of tests before
    for _ in range(12):
        live_once(world, mode)
    assert mappings_of_lent_memory() > 0
    gc.collect()
    dist.barrier()
    desks = world.size  # with letters, for as long as there is the group
    assert mappings_of_lent_memory() - mappings <= desks + KEPT_OF_ONE_OPTIMIZER
    assert open_files() - files <= desks + KEPT_OF_ONE_OPTIMIZER


# ---------------------------------------- many steps ----------------------------------------


LONG_RUN_MODES = ("drop-in", "module", "lazy", "ddp")


SECOND_HALF = "kilobytes of the second half"


def growth_of(job: Job, steps: int) -> dict[str, int]:
    """What `steps` more add to, after all buffers have been made."""
    job.train(*range(1, 51))
    before, memory = census(), [resident_kilobytes()]
    for half in (range(steps // 2), range(steps // 2, steps)):
        for number in half:
            job.train(number)
        gc.collect()  # no census, after which buffers are made anew
        memory.append(resident_kilobytes())
    grown = {name: count - before[name] for name, count in census().items()}
    first, middle, last = memory
    return {**grown, "kilobytes": last - first, SECOND_HALF: last - middle}


def assert_no_growth(grown: dict[str, int], kilobytes: int, of_second_half: int) -> None:
    memory, later = grown.pop("kilobytes"), grown.pop(SECOND_HALF)
    assert not any(grown.values()), grown
    assert memory < kilobytes, f"{memory} kB more"
    assert later < of_second_half, f"{later} kB more in the second half"


@distributed(2, timeout=240.0)
@pytest.mark.parametrize("mode", LONG_RUN_MODES)
def test_500_steps_leave_nothing_behind(world: World, mode: str) -> None:
    """So few that allocators have not come to rest."""
    assert_no_growth(growth_of(Job(world, mode), 500), kilobytes=2000, of_second_half=1500)


@pytest.mark.slow
@distributed(2, timeout=3600.0)
@pytest.mark.parametrize("mode", LONG_RUN_MODES)
def test_10000_steps_leave_nothing_behind(world: World, mode: str) -> None:
    grown = growth_of(Job(world, mode), 10_000)
    print(f"{mode}, rank {world.rank}: 10,000 steps, {grown}")
    assert_no_growth(grown, kilobytes=4000, of_second_half=300)  # it levels off


@distributed(1)
def test_the_check_of_growth_can_fail(world: World) -> None:
    job, kept = Job(world, "drop-in"), []
    job.optimizer.register_step_post_hook(lambda *_: kept.append(torch.zeros(2500)))
    grown = growth_of(job, 500)
    with pytest.raises(AssertionError):
        assert_no_growth(dict(grown), kilobytes=2000, of_second_half=1500)
    assert grown["tensors"] >= 500
    assert grown["kilobytes"] > 2000
    assert grown[SECOND_HALF] > 1500


@pytest.mark.slow
@distributed(1, timeout=600.0)
def test_a_hundred_bytes_a_step_are_found_in_the_second_half(world: World) -> None:
    job, kept = Job(world, "drop-in"), []
    job.optimizer.register_step_post_hook(lambda *_: kept.append(bytes(100)))
    with pytest.raises(AssertionError, match="kB more in the second half"):
        assert_no_growth(growth_of(job, 10_000), kilobytes=4000, of_second_half=300)
