"""The judge of the fuzzing tests: what it lets pass, and how it counts."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzzing import COUNTS, Refused, Tally, Wrong, judge, patience, summary
from harness import RankFailure, World, run_on_ranks

from onecopy.planning.plan import make_plan


def error_of(action: Any) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def load_without_step() -> None:
    """Torch's class finds out by a KeyError, deep inside."""
    adam = torch.optim.Adam([torch.ones(2)])
    saved = adam.state_dict()
    adam.load_state_dict({**saved, "state": {0: {"exp_avg": torch.ones(2)}}})


def test_an_error_deep_inside_of_a_class_passes_only_where_the_class_may_refuse() -> None:
    error = error_of(load_without_step)
    assert isinstance(error, KeyError)
    judge(error, class_may_refuse=True)
    with pytest.raises(Wrong, match="not a documented exception"):
        judge(error, class_may_refuse=False)


def test_a_refusal_of_ours_always_passes() -> None:
    error = error_of(lambda: make_plan([], 1, "x"))
    judge(error, class_may_refuse=False)


def test_an_error_of_the_interpreter_never_passes() -> None:
    error = error_of(lambda: make_plan([], 1, SimpleNamespace().x))
    with pytest.raises(Wrong):
        judge(error, class_may_refuse=False)


def test_each_case_is_counted_once() -> None:
    tally = Tally()

    def refuse() -> None:
        raise Refused

    with tally.case():
        assert tally.attempt(lambda: None)
        assert not tally.attempt(refuse)
    with tally.case():
        tally.attempt(lambda: None)
        tally.attempt(lambda: None)
    assert tally.counts == [1, 1, 0]

    def be_wrong() -> None:
        with tally.case():
            tally.attempt(lambda: None)
            raise AssertionError

    for _ in range(3):  # as hypothesis does, to find a smaller one
        with pytest.raises(AssertionError):
            be_wrong()
    with tally.case():
        tally.attempt(lambda: None)
    assert tally.counts == [1, 1, 1]


def report(name: str, when: str, failed: bool, counts: list[int] | None) -> Any:
    properties = [] if counts is None else [(COUNTS, counts)]
    nodeid = f"tests/test_fuzz_x.py::{name}"
    return SimpleNamespace(nodeid=nodeid, when=when, failed=failed, user_properties=properties)


def test_the_summary_adds_up() -> None:
    reports = [
        report("good", "call", False, None),
        report("good", "teardown", False, [3, 4, 0]),
        report("wrong", "call", True, None),
        report("wrong", "teardown", False, [10, 20, 1]),
        report("crashed with its process", "???", True, None),
    ]
    assert summary(reports) == "fuzz: 39 cases: 13 accepted, 24 refused, 2 wrong"
    assert summary(reports[:1]) is None


def loop_in_c(world: World) -> None:
    with patience(1):
        sum(itertools.repeat(0))


def test_a_loop_that_no_signal_interrupts_ends() -> None:
    with pytest.raises(RankFailure, match="Timeout") as failure:
        run_on_ranks(1, loop_in_c, fresh=True)
    assert "in loop_in_c" in str(failure.value)
