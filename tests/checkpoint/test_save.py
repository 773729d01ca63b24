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
import sys
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
from attached import EVERY_FEED, AttachedTwins
from harness import World, distributed, run_on_ranks
from inside import SAVING_READS_METADATA
from models import BranchNet, Mlp
from test_files import read
from test_reducer import everyones
from torch import nn
from torch.optim import Adam, AdamW

from onecopy import ZeroRedundancyOptimizer
from onecopy.checkpoint import metadata, save
from onecopy.checkpoint.files import DataFileWriter
from onecopy.checkpoint.metadata import METADATA

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


def wait_until(status: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not status():
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
    "appending": lambda: mock.patch.object(
        DataFileWriter, "append", failing_at(3, DataFileWriter.append)
    ),
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


@pytest.mark.smoke
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
        closed = mock.patch.object(DataFileWriter, "__init__", refuse)
    with closed, pytest.raises(PermissionError, match="Permission denied") as caught:
        opt.save(tmp_path)
    assert len(set(on_all_ranks(str(caught.value)))) == 1
    assert_tidy(tmp_path, world.size)
    assert number_in(tmp_path) == 1


# ------------------------------------------------------------------ the last step of a save


STEPS = {
    "complete": save.__file__,
    "write_metadata": metadata.__file__,
    "sync_directory": metadata.__file__,
}


class Deadline(Exception):
    """Raised by a handler that the user has installed."""


@contextlib.contextmanager
def raising_at(line: int, error: type[BaseException]) -> Iterator[list[str]]:
    """Raise before the given line of the last step, counted as they are run; where that was."""
    raised: list[str] = []
    count = 0
    inside = 0  # how many of the frames under way are of `complete`

    def local(frame: Any, event: str, _: Any) -> Any:
        nonlocal count, inside
        if event == "return" and frame.f_code.co_name == "complete":
            inside -= 1
        if event == "line" and not raised:
            count += 1
            if count == line:
                raised.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
                raise error("time is up")
        return local

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal inside
        name = frame.f_code.co_name
        if STEPS.get(name) != frame.f_code.co_filename:
            return None
        if name == "complete":
            inside += 1
        return local if inside else None  # a rank syncs its own file, too

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.settrace(before)


def raised_by(opt: Any, directory: Path) -> tuple[str, str]:
    """The class and the message of what a save raises; empty if nothing."""
    try:
        opt.save(directory)
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""


def interrupted(
    opt: Any, directory: Path, line: int, error: type[BaseException]
) -> tuple[tuple[str, str], list[str]]:
    """A save of 2 over one of 1, which raises at this line: what it raised then, and where."""
    become(opt, 1)
    opt.save(directory)
    become(opt, 2)
    with raising_at(line, error) as where:
        raised = raised_by(opt, directory)
    return raised, where


def check(world: World, directory: Path, raised: tuple[str, str]) -> float:
    """What is in the directory: one number, which every rank loads."""
    dist.barrier()
    found = number_in(directory)
    opt = optimizer_of(-1)
    opt.load(directory)
    assert number_of(opt) == found
    assert len(set(on_all_ranks(raised))) == 1
    if raised[0]:
        assert ("holds the new checkpoint, and it is complete" in raised[1]) == (found == 2)
        assert "time is up" in raised[1]
    assert_tidy(directory, world.size)
    dist.barrier()
    return found


@distributed(1, 2, 3)
@pytest.mark.parametrize("error", [Deadline, TimeoutError, ValueError])
def test_whatever_line_of_the_last_step_is_interrupted_a_checkpoint_is_there(
    world: World, tmp_path: Path, error: type[BaseException]
) -> None:
    opt = optimizer_of(1)
    outcomes = []
    for line in range(1, 200):
        raised, where = interrupted(opt, tmp_path, line if world.rank == 0 else 0, error)
        outcomes.append(check(world, tmp_path, raised))
        if on_all_ranks(where)[0] == []:
            assert raised == ("", "")
            break
    assert len(outcomes) > 25
    assert outcomes == sorted(outcomes)
    assert outcomes[0] == 1
    assert outcomes[-5:] == [2] * 5  # the lines that follow the instant


@distributed(1)
def test_whatever_line_is_interrupted_by_ctrl_c_a_checkpoint_is_there(
    world: World, tmp_path: Path
) -> None:
    opt = optimizer_of(1)
    outcomes = []
    for line in range(1, 200):
        raised, where = interrupted(opt, tmp_path, line, KeyboardInterrupt)
        outcomes.append(number_in(tmp_path))
        if not where:
            break
        assert raised == ("KeyboardInterrupt", "time is up")
    assert len(outcomes) > 25
    assert outcomes == sorted(outcomes)
    assert {*outcomes} == {1, 2}
    opt.save(tmp_path)
    assert_tidy(tmp_path, 1)


def interrupted_at_the_end(world: World, directory: Path) -> None:
    """Ctrl-C on rank 0 alone, as soon as the new checkpoint is there."""
    opt = optimizer_of(2)

    def replaced(path: Path, target: Path) -> None:
        real(path, target)
        raise KeyboardInterrupt

    real = Path.replace
    if world.rank == 0:
        with mock.patch.object(Path, "replace", replaced), pytest.raises(KeyboardInterrupt):
            opt.save(directory)
    else:
        with pytest.raises(RuntimeError, match="no sign of life from rank 0"):
            opt.save(directory)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ctrl_c_on_rank_0_when_the_checkpoint_is_there_leaves_it(
    tmp_path: Path, ranks: int
) -> None:
    run_on_ranks(ranks, save_once, tmp_path, 1.0)
    with contextlib.suppress(harness.RankFailure):
        run_on_ranks(ranks, interrupted_at_the_end, tmp_path, fresh=True, pg_timeout=1.5)
    assert number_in(tmp_path) == 2
    assert run_on_ranks(ranks, load_and_save_again, tmp_path, 3.0) == [2] * ranks
    assert number_in(tmp_path) == 3
    assert_tidy(tmp_path, ranks)


# ------------------------------------------------------------------------------- the file system


@distributed(1, 2, 3)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("happened", [True, False])
def test_a_rename_that_is_said_to_have_failed(
    world: World, tmp_path: Path, number: int, happened: bool
) -> None:
    """As on a network file system, whose answer was lost."""
    optimizer_of(1).save(tmp_path)
    opt = optimizer_of(2)
    dist.barrier()
    before = files_in(tmp_path)
    real = Path.replace

    def replaced(path: Path, target: Path) -> None:
        if happened:
            real(path, target)
        raise OSError(number, "the server has gone")

    with mock.patch.object(Path, "replace", replaced):
        raised = raised_by(opt, tmp_path)
    dist.barrier()
    assert len(set(on_all_ranks(raised))) == 1
    assert number_in(tmp_path) == (2 if happened else 1)
    assert_tidy(tmp_path, world.size)
    assert raised[0] == ("" if happened else "OSError")
    assert happened or files_in(tmp_path) == before


@distributed(1, 2, 3)
def test_a_draft_that_cannot_be_removed_destroys_nothing(world: World, tmp_path: Path) -> None:
    optimizer_of(1).save(tmp_path)
    opt = optimizer_of(2)
    dist.barrier()
    real, calls = Path.unlink, iter(range(100))

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".draft" and next(calls):  # not the first, which clears the way
            raise OSError(errno.EIO, "Input/output error")
        real(path, missing_ok=missing_ok)

    with mock.patch.object(Path, "unlink", unlink):
        assert raised_by(opt, tmp_path) == ("", "")
    dist.barrier()
    assert number_in(tmp_path) == 2
    assert_tidy(tmp_path, world.size)


@distributed(1, 2, 3)
def test_files_stay_where_nobody_can_tell_which_checkpoint_is_there(
    world: World, tmp_path: Path
) -> None:
    """`.metadata` was replaced, something was raised, and then the directory cannot be read."""
    optimizer_of(1).save(tmp_path)
    opt = optimizer_of(2)
    dist.barrier()
    is_gone = False
    real, really_read = Path.replace, getattr(*SAVING_READS_METADATA)

    def replaced(path: Path, target: Path) -> None:
        nonlocal is_gone
        real(path, target)
        is_gone = True
        raise Deadline("time is up")

    def read_metadata(directory: Path) -> bytes:
        if is_gone:
            raise OSError(errno.ESTALE, "Stale file handle")
        return really_read(directory)

    with (
        mock.patch.object(Path, "replace", replaced),
        mock.patch.object(*SAVING_READS_METADATA, read_metadata),
    ):
        raised = raised_by(opt, tmp_path)
    assert set(on_all_ranks(raised)) == {("RuntimeError", "Deadline: time is up")}
    assert number_in(tmp_path) == 2
    opt.save(tmp_path)
    dist.barrier()
    assert_tidy(tmp_path, world.size)


# ---------------------------------------- state that only some ranks have


def rank_0_goes_left(seed: Any) -> tuple[bool, bool]:
    rank, step = seed
    return rank == 1, step > 3  # seeds begin with one


@distributed(1, 2, 3, timeout=30)
@EVERY_FEED
def test_state_made_lazily_gives_ranks_other_keys_and_a_save_hangs(
    world: World, hooks: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    twins = AttachedTwins(
        *(world, BranchNet(rank_0_goes_left), AdamW, hooks),
        ddp={"find_unused_parameters": True},
        lr=0.01,
    )
    for step in range(3):  # before any; with `left` on rank 0 alone; with `right` too
        if step:
            twins.backward()
            twins.step()
        path = tmp_path / str(step)
        sharded = twins.optimizer.sharded(twins.model)
        keys = everyones(sorted(sharded.state_dict()))
        assert keys.count(keys[0]) == world.size
        dcp.save({"optim": sharded}, checkpoint_id=path)
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        for name, param in twins.model.named_parameters():
            assert saved[f"optim.state.{name}.exp_avg"].size == param.shape
            assert saved[f"optim.state.{name}.step"].size == ()  # and is not cut
    other = ZeroRedundancyOptimizer(twins.model.parameters(), AdamW, lr=0.5)
    dcp.load({"optim": other.sharded(twins.model)}, checkpoint_id=path)
    for optimizer in (twins.optimizer, other):
        optimizer.consolidate_state_dict(to=0)
    if world.rank == 0:
        loaded, expected = other.state_dict()["state"], twins.plain.state_dict()["state"]
        for number, state in expected.items():
            assert loaded[number]["step"].shape == ()
            assert loaded[number]["step"] == state["step"]
        assert loaded.keys() == twins.optimizer.state_dict()["state"].keys()
