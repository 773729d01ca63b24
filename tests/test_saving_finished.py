"""An error at any moment of the last step of a save: the old checkpoint or the new one is there.

The last step is what rank 0 does alone: it replaces `.metadata`. A handler of a signal may raise at
any line of it, and a file system may report that something failed which it has done.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import pytest
import torch.distributed as dist
from harness import World, distributed, run_on_ranks
from inside import SAVING_READS_METADATA
from test_saving import (
    assert_tidy,
    become,
    files_in,
    load_and_save_again,
    number_in,
    number_of,
    on_all_ranks,
    optimizer_of,
    save_once,
)

from onecopy import saving, writer

STEPS = {
    "complete": saving.__file__,
    "write_metadata": writer.__file__,
    "sync_directory": writer.__file__,
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
