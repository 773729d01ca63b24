"""The harness itself: what a body sees, and what a failure looks like."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, World, distributed, run_on_ranks

# ------------------------------------------- bodies -------------------------------------------


def pid_of_worker(world: World) -> int:
    return os.getpid()


def describe(world: World, factor: int, *, offset: int) -> tuple[int, int, int]:
    return world.rank, world.size, factor * world.rank + offset


def rank_1_raises(world: World) -> None:
    print(f"hello from {world.rank}")
    expected = [1, 2, 3]
    if world.rank == 1:
        assert [1, 2, world.rank] == expected
    dist.barrier()


def rank_0_sleeps(world: World) -> None:
    if world.rank == 0:
        time.sleep(60)


def rank_1_exits(world: World, code: int) -> None:
    if world.rank == 1:
        os._exit(code)


def rank_0_is_killed(world: World) -> None:
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def returns_something_that_cannot_be_pickled(world: World) -> object:
    return lambda: world


def leaves_things_behind(world: World) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.rand(3)
    os.environ["ONECOPY_LEFTOVER"] = "1"
    dist.new_group(list(range(world.size)))
    dist.new_group(list(range(world.size)), use_local_synchronization=True)


def look_around(world: World) -> tuple[object, ...]:
    groups = len(dist.distributed_c10d._world.pg_map)
    leftover = os.environ.get("ONECOPY_LEFTOVER")
    return torch.get_default_dtype(), torch.is_grad_enabled(), leftover, groups, torch.rand(3)


def comm_asked_for(world: World) -> str | None:
    return os.environ.get("ONECOPY_COMM")


def warns(world: World) -> None:
    warnings.warn("this is old", DeprecationWarning, stacklevel=1)


def where_this_module_is(world: World) -> tuple[str, str]:
    return __name__, __file__


def skips(world: World) -> None:
    pytest.skip(f"not on {world.device}")


def rank_1_misses_the_barrier(world: World) -> None:
    if world.rank == 0:
        dist.barrier()


def failure_of(size: int, fn: object, *args: object, **options: float) -> str:
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(size, fn, *args, **options)
    return str(caught.value)


# --------------------------------------- bodies that pass ---------------------------------------


@distributed(1, 2, 3, 4)
def test_body_runs_on_every_rank_and_ranks_can_talk(world: World) -> None:
    assert (world.rank, world.size) == (dist.get_rank(), dist.get_world_size())
    assert torch.get_num_threads() == 1
    total = torch.tensor(world.rank + 1, device=world.device)
    dist.all_reduce(total)
    assert total == world.size * (world.size + 1) // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(1, 2)
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_parametrize_and_fixtures_compose(
    world: World, dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    assert torch.zeros(shape, dtype=dtype).dtype is dtype
    (tmp_path / str(world.rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world.size


@distributed(2)
def test_result_of_a_test_body_is_ignored(world: World) -> object:
    return lambda: world


@distributed(1)
@pytest.mark.filterwarnings("ignore:this is old")
def test_filterwarnings_mark_reaches_the_ranks(world: World) -> None:
    warns(world)


def test_a_body_in_a_folder_is_found_by_the_bare_name_of_its_module() -> None:
    assert Path(__file__).parents[1].name == "tests"
    assert run_on_ranks(2, where_this_module_is) == [("test_harness", __file__)] * 2


def test_skip_in_a_body_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not on"):
        run_on_ranks(2, skips)


def test_results_come_back_in_the_order_of_the_ranks() -> None:
    assert run_on_ranks(3, describe, 10, offset=1) == [(0, 3, 1), (1, 3, 11), (2, 3, 21)]


def test_pool_is_reused_and_fresh_processes_are_not() -> None:
    first = run_on_ranks(2, pid_of_worker)
    assert run_on_ranks(2, pid_of_worker) == first
    fresh = run_on_ranks(2, pid_of_worker, fresh=True)
    assert not set(first) & set(fresh)
    assert not [pid for pid in fresh if Path(f"/proc/{pid}").exists()]
    assert run_on_ranks(2, pid_of_worker) == first


def test_body_finds_nothing_that_an_earlier_one_left() -> None:
    before = run_on_ranks(2, look_around)
    run_on_ranks(2, leaves_things_behind)
    for old, new in zip(before, run_on_ranks(2, look_around), strict=True):
        assert old[:-1] == new[:-1] == (torch.float32, True, None, 1)
        torch.testing.assert_close(old[-1], new[-1], rtol=0, atol=0)


def test_what_a_test_sets_for_its_ranks_does_not_reach_those_of_the_next() -> None:
    """Although it is the one that has started the server from which all of them are forked."""
    usual = run_on_ranks(1, comm_asked_for)
    harness.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONECOPY_COMM", "c10d")
        assert run_on_ranks(1, comm_asked_for) == ["c10d"]
    assert run_on_ranks(1, comm_asked_for) == usual
    assert run_on_ranks(1, comm_asked_for, fresh=True) == usual


def test_what_ranks_print_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    run_on_ranks(1, print)
    assert "World(rank=0, size=1" in capsys.readouterr().out


# --------------------------------------- bodies that fail ---------------------------------------


def test_failing_rank_shows_its_traceback_and_blocked_ranks_their_stacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "GRACE", 2.0)
    pids = run_on_ranks(3, pid_of_worker)
    report = failure_of(3, rank_1_raises)
    assert "test_harness.rank_1_raises: 3 of 3 ranks failed" in report
    assert "==== rank 1 raised ====\nTraceback" in report
    assert "assert [1, 2, 1] == [1, 2, 3]" in report
    assert "==== rank 0 did not finish within 2 s after the first failure ====" in report
    assert report.index("==== rank 1") < report.index("==== rank 0")
    assert "---- rank 2 printed ----\nhello from 2" in report
    assert "in barrier" in report
    assert "/harness.py" not in report.split("====")[2], "frames of the harness are noise"
    assert not set(pids) & set(run_on_ranks(3, pid_of_worker)), "the pool was not rebuilt"


def test_hang_ends_within_the_time_limit_and_shows_where() -> None:
    run_on_ranks(2, pid_of_worker)
    start = time.monotonic()
    report = failure_of(2, rank_0_sleeps, timeout=3.0)
    assert time.monotonic() - start < 20
    assert "1 of 2 ranks failed" in report
    assert "==== rank 0 did not finish within 3 s ====" in report
    assert "in rank_0_sleeps" in report


@pytest.mark.parametrize("code", [0, 3])
def test_rank_that_exits_is_reported(code: int) -> None:
    assert f"==== rank 1 died with exit code {code} ====" in failure_of(2, rank_1_exits, code)


def test_rank_that_is_killed_is_reported_and_its_peers_do_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "GRACE", 2.0)
    assert "==== rank 0 died with exit code -9 ====" in failure_of(2, rank_0_is_killed)


def test_fresh_rank_may_leave_with_exit_code_zero_only() -> None:
    assert run_on_ranks(2, rank_1_exits, 0, fresh=True) == [None, None]
    assert "rank 1 died with exit code 3" in failure_of(2, rank_1_exits, 3, fresh=True)


def test_process_group_has_the_timeout_that_was_asked_for() -> None:
    report = failure_of(2, rank_1_misses_the_barrier, pg_timeout=3.0)
    assert "==== rank 0 raised ====" in report
    assert "1 of 2 ranks failed" in report


def test_warnings_are_errors_on_the_ranks_too() -> None:
    assert "DeprecationWarning: this is old" in failure_of(1, warns)


def test_result_that_cannot_be_pickled_is_an_error() -> None:
    assert "pickle" in failure_of(1, returns_something_that_cannot_be_pickled)


def test_body_without_a_name_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"move .*<lambda> to the top of its module"):
        run_on_ranks(1, lambda world: world)


def test_body_must_take_the_world_first() -> None:
    with pytest.raises(TypeError, match="expected first parameter `world`, got `lr`"):
        distributed(1)(lambda lr: lr)
