"""Signals and exits: prompt, and without noise, whatever is under way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from onecopy.comm.monitor import ANSWER_WITHIN, REPORT_WITHIN
from onecopy.comm.waiting import Task

SCRIPT = Path(__file__).parents[1] / "support" / "interrupted.py"
PATIENCE = 90.0  # seconds to start and to come to a place, on a busy machine
PROMPT = 30.0  # seconds to exit; the group's timeout is ten minutes
STOPPED_TIMEOUT = 4.0  # the group's, where a rank is stopped
SLOW = pytest.mark.slow
CRASHES = ("terminate called", "Fatal Python error", "Segmentation", "core dumped", "Exception ign")


class Ranks:
    """Two processes of tests/support/interrupted.py."""

    def __init__(
        self, scenario: str, directory: Path, how: str = "send", **environment: str
    ) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = self.store.port, directory, how
        self.processes = [
            subprocess.Popen(
                [sys.executable, *map(str, (SCRIPT, scenario, rank, *common))],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "KINETO_LOG_LEVEL": "99", **environment},
            )
            for rank in range(2)
        ]

    def until_it_waits(self, rank: int = 0) -> str:
        """Until the rank says so; in which file."""
        process = self.processes[rank]
        watchdog = threading.Timer(PATIENCE, process.kill)
        watchdog.start()
        said = process.stdout.readline()
        watchdog.cancel()
        assert said.startswith("waiting in "), process.stderr.read()
        return said.removeprefix("waiting in ").strip()

    def end_of(self, rank: int, limit: float) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        process = self.processes[rank]
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"rank {rank} did not exit within {limit:g} s")
        assert not any(crash in errors for crash in CRASHES), errors
        return process.returncode, output, errors


@contextlib.contextmanager
def two_ranks(
    scenario: str, directory: Path, how: str = "send", **environment: str
) -> Iterator[Ranks]:
    ranks = Ranks(scenario, directory, how, **environment)
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


BUILDING = ["building", "building_in_a_subgroup", "building_another"]
SENT = ["in_backward", "in_gather", "in_reduce", "in_forward", "in_save", *BUILDING]
LENT = ["in_gather", "in_backward", "in_forward"]  # where the letter of a neighbour is awaited
PLACES = [("send", place) for place in SENT] + [("lend", place) for place in LENT]
QUICK = [("send", SENT[0]), ("send", BUILDING[0]), ("lend", LENT[0])]


@pytest.mark.parametrize(
    ("how", "place"),
    [each if each in QUICK else pytest.param(*each, marks=SLOW) for each in PLACES],
)
def test_ctrl_c_ends_a_rank_that_waits_for_the_others(how: str, place: str, tmp_path: Path) -> None:
    with two_ranks(place, tmp_path, how) as ranks:
        assert (ranks.until_it_waits() == "shared_memory.py") == (how == "lend")
        ranks.processes[0].send_signal(signal.SIGINT)
        code, output, errors = ranks.end_of(0, PROMPT)
        assert code in (1, -signal.SIGINT), errors
        assert "KeyboardInterrupt" in errors
        assert "end" not in output


@pytest.mark.parametrize(
    ("how", "place"),
    [each if each in QUICK else pytest.param(*each, marks=SLOW) for each in PLACES],
)
def test_sigterm_ends_a_rank_that_waits_for_the_others(
    how: str, place: str, tmp_path: Path
) -> None:
    """As torchrun sends it."""
    with two_ranks(place, tmp_path, how) as ranks:
        ranks.until_it_waits()
        ranks.processes[0].send_signal(signal.SIGTERM)
        code, _, errors = ranks.end_of(0, PROMPT)
        assert code == -signal.SIGTERM, errors
        assert not errors


@pytest.mark.parametrize("how", ["send", "lend"])
@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        ("stopped_before_a_step", "rank 1 did not arrive"),
        ("stopped_before_a_backward", "rank 1 did not arrive"),
        ("stopped_in_a_step", "rank 1 did not answer: lost, stopped, or still waiting"),
    ],
)
def test_a_rank_that_is_stopped_and_not_dead_is_named_within_the_timeout(
    scenario: str, says: str, how: str, tmp_path: Path
) -> None:
    """As a machine that is without power: nothing resets connections."""
    with two_ranks(scenario, tmp_path, how) as ranks:
        code, output, errors = ranks.end_of(0, PATIENCE + PROMPT)
        assert (code, errors) == (0, "")
        seconds, _, said = output.partition(" s: ")
        assert STOPPED_TIMEOUT - 1 < float(seconds) < STOPPED_TIMEOUT + ANSWER_WITHIN + 10
        assert says in said
        assert said.endswith("end\n")


UNANSWERED = "; the store does not answer: the process that hosts it is lost or stopped"


@pytest.mark.parametrize(
    "scenario",
    [
        "stopped_host_before_a_step",
        pytest.param("stopped_host_in_a_step", marks=SLOW),
        pytest.param("stopped_host_in_a_save", marks=SLOW),
    ],
)
def test_a_rank_that_is_stopped_and_hosts_the_store_keeps_nobody(
    scenario: str, tmp_path: Path
) -> None:
    with two_ranks(scenario, tmp_path) as ranks:
        code, output, errors = ranks.end_of(1, PATIENCE + PROMPT)
        assert (code, errors) == (0, "")
        seconds, _, said = output.partition(" s: ")
        assert STOPPED_TIMEOUT - 1 < float(seconds) < STOPPED_TIMEOUT + REPORT_WITHIN + 5
        first, *more, end = said.splitlines()
        assert first.startswith("a collective failed on rank 1: ")
        assert first.endswith(UNANSWERED)
        assert end == "end"
        if scenario == "stopped_host_before_a_step":
            assert any(line.startswith("again: the process group is of no use") for line in more)
            assert "all True" in more


def test_ctrl_c_ends_a_rank_that_waits_for_a_store_whose_host_is_stopped(tmp_path: Path) -> None:
    with two_ranks("host_stopped_in_a_save", tmp_path) as ranks:
        ranks.until_it_waits(1)
        ranks.processes[1].send_signal(signal.SIGINT)
        code, _, errors = ranks.end_of(1, PROMPT)
        assert code in (1, -signal.SIGINT), errors
        assert "KeyboardInterrupt" in errors


def test_a_rank_that_ends_in_a_save_and_hosts_the_store_is_named(tmp_path: Path) -> None:
    with two_ranks("killed_host_in_a_save", tmp_path) as ranks:
        code, output, errors = ranks.end_of(1, PATIENCE + PROMPT)
        assert code == 0, errors  # torch logs that the connection was reset
        first, *_ = output.splitlines()
        assert "a collective failed: rank 0 ended. This one was last saving to " in first
        assert "again: the process group is of no use any more, because a collective" in output


@pytest.mark.parametrize("how", ["send", "lend"])
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGALRM, "TimeoutError"), (signal.SIGUSR1, "RuntimeError")]
)
def test_what_a_signal_handler_raises_is_raised_and_ends_the_use_of_the_group(
    number: int, name: str, how: str, tmp_path: Path
) -> None:
    with two_ranks("handled", tmp_path, how) as ranks:
        ranks.until_it_waits()
        ranks.processes[0].send_signal(number)
        code, output, errors = ranks.end_of(0, PROMPT)
        assert (code, errors) == (0, "")
        first, second, *_ = output.splitlines()
        assert first == f"{name}: a second is over"
        assert f"of no use any more, because {name} came while this rank waited" in second


@pytest.mark.parametrize("how", ["send", "lend"])
def test_a_rank_that_catches_ctrl_c_can_tidy_up_and_exit(how: str, tmp_path: Path) -> None:
    with two_ranks("caught", tmp_path, how) as ranks:
        ranks.until_it_waits()
        ranks.processes[0].send_signal(signal.SIGINT)
        code, output, errors = ranks.end_of(0, PROMPT)
        assert (code, errors) == (0, "")
        assert "refused: the process group is of no use any more, because KeyboardInter" in output
        assert output.endswith("tidy\nend\n")


BOTH_EXIT = ["exit_with_gathers_under_way", "exit_after_destroying", "exit_with_all_alive"]


@pytest.mark.parametrize("how", ["send", "lend"])
@pytest.mark.parametrize(
    "scenario", [BOTH_EXIT[0], *(pytest.param(s, marks=SLOW) for s in BOTH_EXIT[1:])]
)
def test_exit_is_silent(scenario: str, how: str, tmp_path: Path) -> None:
    with two_ranks(scenario, tmp_path, how) as ranks:
        for rank in range(2):
            assert ranks.end_of(rank, PATIENCE + PROMPT) == (0, "end\n", "")


@SLOW
def test_exit_is_silent_while_a_trace_is_taken(tmp_path: Path) -> None:
    trace: dict[str, Any] = {"ONECOPY_TRACE": str(tmp_path), "ONECOPY_TRACE_STEPS": "1-9"}
    with two_ranks("exit_while_traced", tmp_path / "unused", **trace) as ranks:
        for rank in range(2):
            assert ranks.end_of(rank, PATIENCE + PROMPT) == (0, "end\n", "")
    assert {file.name for file in tmp_path.iterdir()} == {"rank-0.json", "rank-1.json"}


@pytest.mark.skipif(
    not hasattr(os, "SCHED_IDLE") or len(os.sched_getaffinity(0)) < 2,
    reason="threads are held up by the scheduler of Linux, on two processors",
)
def test_exit_waits_for_threads_that_have_not_let_go_of_what_was_sent() -> None:
    """Without `onecopy` about every second of these processes aborts."""
    script = SCRIPT.with_name("late_thread.py")
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, script], check=False, capture_output=True, text=True, timeout=PATIENCE
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "scenario",
    [
        "exit_with_reduces_under_way",
        pytest.param("exit_with_reduces_of_ddp_under_way", marks=SLOW),
    ],
)
def test_exit_does_not_wait_for_a_rank_that_stays_away(scenario: str, tmp_path: Path) -> None:
    with two_ranks(scenario, tmp_path) as ranks:
        assert ranks.end_of(0, PATIENCE + PROMPT) == (0, "end\n", "")


@SLOW
def test_an_exception_in_backward_ends_the_process_though_buckets_are_under_way(
    tmp_path: Path,
) -> None:
    with two_ranks("exit_by_an_exception", tmp_path) as ranks:
        code, _, errors = ranks.end_of(0, PATIENCE + PROMPT)
        assert code == 1
        assert errors.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_task_that_has_ended_is_not_running_whoever_asks_at_the_same_time() -> None:
    task = Task(lambda: None)
    assert task.is_running()
    task.run()
    before, wrong = sys.getswitchinterval(), []

    def ask() -> None:
        wrong.extend(n for n in range(20_000) if task.is_running())

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
