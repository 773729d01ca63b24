"""`optimizer.save`: whole or not at all, whenever a process dies, and only into its own directory.

The optimizers here hold one number everywhere, in every element of the state and in the options:
a checkpoint that mixes two saves shows two numbers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, distributed, run_on_ranks
from models import Mlp
from test_archive import read
from torch import nn
from torch.optim import Adam

from onecopy import ZeroRedundancyOptimizer
from onecopy.archive import METADATA
from onecopy.writer import Writer

# ------------------------------------------------------------------------------- of one number


def optimizer_of(number: float, model: nn.Module | None = None) -> ZeroRedundancyOptimizer:
    params = [(f"p{i}", nn.Parameter(torch.zeros(n, 7))) for i, n in enumerate((31, 2, 50))]
    named = params if model is None else list(model.named_parameters())
    opt = ZeroRedundancyOptimizer(named, Adam, lr=1.0, bucket_mb=0.001)
    for _, param in named:
        param.grad = torch.zeros_like(param)
    opt.step()
    become(opt, number)
    return opt


def become(opt: ZeroRedundancyOptimizer, number: float) -> None:
    for state in opt.state.values():
        for value in state.values():
            value.fill_(number)
    opt.param_groups[0]["lr"] = float(number)


def number_of(opt: ZeroRedundancyOptimizer) -> float:
    """The one number that it holds on this rank."""
    values = {
        v for state in opt.state.values() for t in state.values() for v in t.unique().tolist()
    }
    (number,) = values | {opt.param_groups[0]["lr"]}
    return number


def number_in(directory: Path) -> float:
    """The one number that a checkpoint holds, seen without an optimizer."""
    found = read(directory)
    states = [value for key, value in found.items() if key.startswith("optim.state.")]
    assert len(states) == 9
    values = {v for tensor in states for v in tensor.unique().tolist()}
    (number,) = values | {found["optim.param_groups.0.lr"]}
    return number


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def assert_tidy(directory: Path, ranks: int) -> None:
    """One file per rank, a small one that says what is in the others, and the metadata."""
    files = files_in(directory)
    assert len(files) == ranks + 2, files
    assert METADATA in files
    assert all(f"__{rank}_" in " ".join(files) for rank in range(ranks))


def on_all_ranks(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


# ------------------------------------------------------------------------------- killing


def save_for_ever(world: World, directory: Path) -> None:
    opt = optimizer_of(1)
    number = 1
    while True:
        number += 1
        become(opt, number)
        opt.save(directory)


def save_once(world: World, directory: Path, number: float) -> None:
    optimizer_of(number).save(directory)


def load_and_save_again(world: World, directory: Path, number: float) -> float:
    """What a job does that is started after the crash; what it found."""
    opt = optimizer_of(-1)
    opt.load(directory)
    found = number_of(opt)
    assert set(on_all_ranks(found)) == {found}
    become(opt, number)
    opt.save(directory)
    return found


@contextlib.contextmanager
def under_way(size: int, job: Any) -> Iterator[harness.Pool]:
    """Processes that are busy with a job, until they are killed."""
    pool = harness.Pool(size, may_leave=True)
    start = harness._job(harness._nothing, (), {}, harness.START_TIMEOUT)
    pool.run(start, harness.START_TIMEOUT)

    def run() -> None:
        with contextlib.suppress(harness.RankFailure, OSError, ValueError):
            pool.run(job, 100.0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield pool
    finally:
        for process in pool.processes:
            process.kill()
        thread.join()
        pool.kill()


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def crash_at_a_random_moment(directory: Path, victims: str, random_: random.Random) -> float:
    """Kill a job that saves for ever; the number that it left."""
    shutil.rmtree(directory, ignore_errors=True)
    run_on_ranks(2, save_once, directory, 1.0)
    first = (directory / METADATA).stat().st_ino
    job = harness._job(save_for_ever, (directory,), {}, 60.0)
    with under_way(2, job) as pool:
        wait_until(lambda: (directory / METADATA).stat().st_ino != first)
        time.sleep(random_.uniform(0, 0.15))
        chosen = {"all": [0, 1], "rank 0": [0], "rank 1": [1]}[victims]
        for rank in chosen:
            os.kill(pool.processes[rank].pid, signal.SIGKILL)
        time.sleep(random_.uniform(0, 0.05))  # the survivors go on until they wait for the dead
    return number_in(directory)


def assert_usable_after_a_crash(directory: Path, number: float) -> None:
    assert number >= 1
    assert run_on_ranks(2, load_and_save_again, directory, -5.0) == [number] * 2
    assert number_in(directory) == -5.0
    assert_tidy(directory, 2)  # what the dead left behind is gone


@pytest.mark.parametrize("victims", ["all", "rank 0", "rank 1"])
def test_a_job_killed_while_it_saves_leaves_one_whole_checkpoint(
    tmp_path: Path, victims: str
) -> None:
    random_ = random.Random(victims)
    for _ in range(3):
        number = crash_at_a_random_moment(tmp_path / "c", victims, random_)
        assert_usable_after_a_crash(tmp_path / "c", number)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(17))
@pytest.mark.parametrize("victims", ["all", "rank 0", "rank 1"])
def test_jobs_killed_while_they_save_leave_one_whole_checkpoint(
    tmp_path: Path, victims: str, seed: int
) -> None:
    number = crash_at_a_random_moment(tmp_path / "c", victims, random.Random(1000 + seed))
    assert_usable_after_a_crash(tmp_path / "c", number)


POINTS = ["data file opened", "data file synced", "draft synced", "replaced", "first removed"]


def die_at(point: str, directory: Path) -> contextlib.AbstractContextManager[Any]:
    """Kill this process in the middle of a save, just after something has happened."""

    def fatal(function: Any, when: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if when(*args):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return called

    draft = directory / f"{METADATA}.draft"
    fsync, drafted = os.fsync, lambda *_: draft.exists()
    return {
        "data file opened": mock.patch(
            "os.open", fatal(os.open, lambda path, *_: Path(path).suffix == ".distcp")
        ),
        "data file synced": mock.patch("os.fsync", fatal(fsync, lambda *_: not drafted())),
        "draft synced": mock.patch("os.fsync", fatal(fsync, drafted)),
        "replaced": mock.patch.object(Path, "replace", fatal(Path.replace, lambda *_: True)),
        "first removed": mock.patch.object(
            Path, "unlink", fatal(Path.unlink, lambda path, *_: path.suffix == ".distcp")
        ),
    }[point]


def save_and_die(world: World, directory: Path, point: str, victim: int) -> None:
    opt = optimizer_of(2)
    if world.rank == victim:
        with die_at(point, directory):
            opt.save(directory)
    elif point == "first removed":  # the others have their answer already
        opt.save(directory)
    else:
        with pytest.raises(RuntimeError, match=f"no sign of life from rank {victim}"):
            opt.save(directory)


def crash_at(point: str, victim: int, directory: Path) -> float:
    """The number in a directory that held 1, after a save of 2 died there on one rank and the
    other rank has given up."""
    run_on_ranks(2, save_once, directory, 1.0)
    with pytest.raises(harness.RankFailure, match=f"rank {victim} died with exit code -9"):
        run_on_ranks(2, save_and_die, directory, point, victim, fresh=True, pg_timeout=1.5)
    return number_in(directory)


@pytest.mark.parametrize(
    ("point", "victim"),
    [*((point, 0) for point in POINTS[:3]), *((point, 1) for point in POINTS[:2])],
)
def test_a_rank_that_dies_before_the_metadata_is_replaced_leaves_the_old_checkpoint(
    tmp_path: Path, point: str, victim: int
) -> None:
    assert crash_at(point, victim, tmp_path) == 1
    assert_usable_after_a_crash(tmp_path, 1)


@pytest.mark.parametrize(
    "point",
    POINTS[3:],
)
def test_a_rank_0_that_dies_once_the_metadata_is_replaced_leaves_the_new_checkpoint(
    tmp_path: Path, point: str
) -> None:
    """The survivors do not know that the save is complete, and must not remove their files."""
    assert crash_at(point, 0, tmp_path) == 2
    assert_usable_after_a_crash(tmp_path, 2)


# ------------------------------------------------------------------------------- a full disk


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def failing_at(call: int, function: Any) -> Any:
    """The function, with a full disk at one of its calls, counted from 1."""
    calls = iter(range(1, 10**6))

    def called(*args: Any, **kwargs: Any) -> Any:
        return full() if next(calls) == call else function(*args, **kwargs)

    return called


FAULTS: dict[str, Any] = {
    "syncing the data": lambda: mock.patch("os.fsync", failing_at(1, os.fsync)),
    "appending": lambda: mock.patch.object(Writer, "append", failing_at(3, Writer.append)),
    "saving a value": lambda: mock.patch("torch.save", full),
    "opening": lambda: mock.patch("os.open", full),
}
OF_RANK_0: dict[str, Any] = {
    "syncing the metadata": lambda: mock.patch("os.fsync", failing_at(3, os.fsync)),
    "replacing the metadata": lambda: mock.patch.object(Path, "replace", full),
}


def save_with(world: World, directory: Path, fault: Any, culprit: int) -> None:
    """A save that fails leaves everything as it was, and says the same on all ranks."""
    optimizer_of(1).save(directory)
    opt = optimizer_of(2)
    dist.barrier()
    before = files_in(directory)
    broken = fault() if world.rank == culprit else contextlib.nullcontext()
    with broken, pytest.raises(OSError, match="No space left on device") as caught:
        opt.save(directory)
    raised = type(caught.value), str(caught.value)
    assert len(set(on_all_ranks(raised))) == 1
    assert files_in(directory) == before
    assert number_in(directory) == 1
    dist.barrier()
    assert number_of(opt) == 2  # the live state is as it was
    opt.save(directory)  # and the next save works
    dist.barrier()
    assert number_in(directory) == 2
    assert_tidy(directory, world.size)


@distributed(2)
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "saving a value"])
def test_a_full_disk_on_the_last_rank_leaves_the_old_checkpoint_and_nothing_else(
    world: World, tmp_path: Path, name: str
) -> None:
    save_with(world, tmp_path, FAULTS[name], culprit=world.size - 1)


@distributed(1, 2)
def test_a_full_disk_while_rank_0_writes_options_leaves_the_old_checkpoint(
    world: World, tmp_path: Path
) -> None:
    save_with(world, tmp_path, FAULTS["saving a value"], culprit=0)


@distributed(1, 2)
@pytest.mark.parametrize("name", OF_RANK_0)
def test_a_full_disk_while_rank_0_completes_the_save_leaves_the_old_checkpoint(
    world: World, tmp_path: Path, name: str
) -> None:
    save_with(world, tmp_path, OF_RANK_0[name], culprit=0)


# ------------------------------------------------------------------------------- the directory


@distributed(1, 2, 3)
def test_saving_again_leaves_nothing_of_the_checkpoint_before(world: World, tmp_path: Path) -> None:
    opt = optimizer_of(1)
    for number in (1, 2, 3):
        become(opt, number)
        opt.save(tmp_path / "new" / "deep")
        dist.barrier()  # each rank removes some of the older files
        assert_tidy(tmp_path / "new" / "deep", world.size)
        assert number_in(tmp_path / "new" / "deep") == number
        dist.barrier()


@distributed(1, 2)
def test_saving_keeps_files_that_are_not_of_a_checkpoint(world: World, tmp_path: Path) -> None:
    others = ["notes.txt", "__0_mine.distcp", "x__0_0123456789ab.distcp", "sub"]
    leftovers = ["__0_0123456789ab.distcp", "__7_ffffffffffff.distcp"]
    if world.rank == 0:
        for name in (*others[:-1], *leftovers):
            (tmp_path / name).write_text("x")
        (tmp_path / "sub").mkdir()
    dist.barrier()
    optimizer_of(1).save(tmp_path)
    dist.barrier()
    assert set(others) <= set(files_in(tmp_path))
    assert not set(leftovers) & set(files_in(tmp_path))


@distributed(1, 2)
def test_a_checkpoint_of_an_optimizer_alone_by_torch_is_replaced(
    world: World, tmp_path: Path
) -> None:
    opt = optimizer_of(1)
    dcp.save({"optim": opt.sharded()}, checkpoint_id=str(tmp_path))
    become(opt, 2)
    opt.save(tmp_path)
    dist.barrier()
    assert number_in(tmp_path) == 2
    assert_tidy(tmp_path, world.size)


@distributed(1, 2, 3)
def test_a_directory_that_holds_a_model_too_is_refused_on_all_ranks(
    world: World, tmp_path: Path
) -> None:
    model = Mlp()
    opt = optimizer_of(1, model)
    dcp.save({"model": model.state_dict(), "optim": opt.sharded()}, checkpoint_id=str(tmp_path))
    dist.barrier()
    before = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    become(opt, 2)
    with pytest.raises(ValueError, match=r"something else than save\(\) writes \(model\."):
        opt.save(tmp_path)
    dist.barrier()
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == before
    opt.load(tmp_path)
    assert number_of(opt) == 1


@distributed(1, 2)
def test_a_damaged_checkpoint_in_the_way_is_told_and_not_replaced(
    world: World, tmp_path: Path
) -> None:
    if world.rank == 0:
        (tmp_path / METADATA).write_bytes(b"who knows what this was")
    dist.barrier()
    with pytest.raises(ValueError, match=r"damaged"):
        optimizer_of(1).save(tmp_path)
    assert (tmp_path / METADATA).read_bytes() == b"who knows what this was"


@contextlib.contextmanager
def working_in(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@distributed(2, 3)
@pytest.mark.parametrize("exists", [True, False])
def test_directories_that_the_ranks_do_not_share_are_told_on_all_ranks(
    world: World, tmp_path: Path, exists: bool
) -> None:
    """The same relative path in a directory of its own on every rank."""
    own = tmp_path / f"host {world.rank}"
    (own / "c" if exists else own).mkdir(parents=True)
    with working_in(own):
        with pytest.raises(OSError, match=r"share|No such file") as caught:
            optimizer_of(1).save("c")
        raised = type(caught.value), str(caught.value)
    assert len(set(on_all_ranks(raised))) == 1
    assert not exists or "a file system that all ranks share" in str(caught.value)
    assert not (own / "c").exists() or files_in(own / "c") == []


@distributed(2, 3)
def test_ranks_that_name_different_directories_disagree(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"disagree.*(?s:.*)rank 1: to .*/one"):
        optimizer_of(1).save(tmp_path / ("one" if world.rank == 1 else "other"))


@distributed(2, 3)
@pytest.mark.parametrize("path", ["file", "file/inside"])
def test_a_directory_that_cannot_be_made_is_the_same_error_on_all_ranks(
    world: World, tmp_path: Path, path: str
) -> None:
    if world.rank == 0:
        (tmp_path / "file").write_text("mine")
    dist.barrier()
    opt = optimizer_of(1)
    with pytest.raises((OSError, ValueError), match=r"file|/proc") as caught:
        opt.save(tmp_path / path)
    assert on_all_ranks(isinstance(caught.value, OSError)) == [True] * world.size
    assert (tmp_path / "file").read_text() == "mine"
    opt.save(tmp_path / "good")


@distributed(1, 2, 3)
def test_a_directory_that_one_rank_may_not_write_to_is_the_same_error_on_all_ranks(
    world: World, tmp_path: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    opt = optimizer_of(1)
    opt.save(tmp_path)
    become(opt, 2)
    closed: Any = contextlib.nullcontext()
    if world.rank == world.size - 1:
        closed = mock.patch.object(Writer, "__init__", refuse)
    with closed, pytest.raises(PermissionError, match="Permission denied") as caught:
        opt.save(tmp_path)
    assert len(set(on_all_ranks(str(caught.value)))) == 1
    assert_tidy(tmp_path, world.size)
    assert number_in(tmp_path) == 1
