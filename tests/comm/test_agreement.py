"""All ranks raise the same error, and it names the first difference and who holds what; so do
reports through the store, which leave nothing behind."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from inside import (
    STORE_ANSWER_SECONDS,
    STORE_BEAT_SECONDS,
    STORE_DEAD_SECONDS,
    STORE_LONGEST_NAP,
)

from onecopy.comm import agreement
from onecopy.comm.agreement import RanksDisagree, StoreChannel, same_outcome
from onecopy.planning import text
from onecopy.planning.text import name_ranks

BUSY = [HealthCheck.too_slow]  # a busy machine is no fault of a test
TIMEOUT = 20.0


class Wire:
    """What connects the fake channels of one world: a table that everybody fills and reads."""

    def __init__(self, size: int) -> None:
        self.table: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)


class MemoryChannel:
    """One rank of a world of threads, with the strictness of real collectives."""

    whose = ""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire = wire
        self.rank = rank
        self.world_size = len(wire.table)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        gathered = self._exchange(("all_gather", payload))
        assert {name for name, _ in gathered} == {"all_gather"}
        payloads = [payload for _, payload in gathered]
        assert len({len(payload) for payload in payloads}) == 1, "an all-gather needs equal sizes"
        return payloads

    def broadcast_bytes(self, payload: bytes | None, source: int) -> bytes:
        assert (payload is not None) == (self.rank == source)
        gathered = self._exchange((f"broadcast from {source}", payload))
        assert {name for name, _ in gathered} == {f"broadcast from {source}"}
        return gathered[source][1]

    def _exchange(self, message: tuple[str, Any]) -> list[Any]:
        self.wire.table[self.rank] = message
        self.wire.barrier.wait()
        gathered = list(self.wire.table)
        self.wire.barrier.wait()
        return gathered


def on_ranks(size: int, body: Callable[[MemoryChannel], Any]) -> list[BaseException | None]:
    """What each rank raised."""
    wire = Wire(size)

    def run(rank: int) -> BaseException | None:
        try:
            body(MemoryChannel(wire, rank))
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def compare(lines: Sequence[Sequence[str]], subject: str = "testing") -> str | None:
    """The message of the error that all ranks raised, or None if they agreed."""
    raised = on_ranks(len(lines), lambda ch: same_outcome(ch, subject, lambda: lines[ch.rank]))
    if all(error is None for error in raised):
        return None
    assert {type(error) for error in raised} == {RanksDisagree}
    (message,) = {str(error) for error in raised}  # the same one everywhere
    return message


def views(message: str) -> dict[str, str]:
    """The ranks named in a message, and what they hold."""
    _, *lines, advice = message.split("\n")
    assert advice == "Every rank must do the same here."
    return dict(re.fullmatch(r"  (ranks? [\d, -]+): (.*)", line).groups() for line in lines)  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_that_hold_the_same_agree(size: int) -> None:
    assert compare([["a", "b", "c"]] * size) is None
    assert compare([[]] * size) is None


def test_agreement_costs_32_bytes_of_each_rank() -> None:
    class Counting(MemoryChannel):
        def all_gather_bytes(self, payload: bytes) -> list[bytes]:
            calls.append(len(payload))
            return super().all_gather_bytes(payload)

        def broadcast_bytes(self, *_: Any) -> bytes:
            raise AssertionError("no lines are exchanged between ranks that agree")

    calls: list[int] = []
    lines = [f"line {i}" for i in range(1000)]

    def body(channel: MemoryChannel) -> None:
        same_outcome(Counting(channel.wire, channel.rank), "counting", lambda: lines)

    assert on_ranks(3, body) == [None] * 3
    assert calls == [32] * 3


def test_the_first_difference_and_its_holders_are_named() -> None:
    message = compare(
        [
            ["class AdamW", "lr = 0.1", "shape (3,)"],
            ["class AdamW", "lr = 0.2", "shape (4,)"],
            ["class AdamW", "lr = 0.1", "shape (5,)"],
            ["class AdamW", "lr = 0.2", "shape (3,)"],
        ],
        subject="building the optimizer",
    )
    assert message is not None
    assert message.startswith("the ranks disagree while building the optimizer:\n")
    assert views(message) == {"ranks 0, 2": "lr = 0.1", "ranks 1, 3": "lr = 0.2"}


def test_a_rank_that_holds_less_or_more_is_named() -> None:
    message = compare([["a", "b"], ["a"], ["a", "b", "c"]])
    assert message is not None
    assert views(message) == {"ranks 0, 2": "b", "rank 1": "nothing more"}
    message = compare([["a"], ["a", "b"], ["a", "b"]])
    assert message is not None
    assert views(message) == {"rank 0": "nothing more", "ranks 1-2": "b"}


def test_a_rank_that_holds_nothing_is_named() -> None:
    message = compare([[], ["a"], []])
    assert message is not None
    assert views(message) == {"ranks 0, 2": "nothing more", "rank 1": "a"}


def test_a_line_break_does_not_make_two_lines() -> None:
    assert compare([["a\nb", "c"], ["a b", "c"]]) is None
    message = compare([["a\nb", "c"], ["a\nb", "d"]])
    assert message is not None
    assert views(message) == {"rank 0": "c", "rank 1": "d"}


def test_lines_that_differ_only_late_are_told_apart() -> None:
    long = "x" * 5000
    message = compare([[long + "a"], [long + "b"], [long + "c"], [long + "b"]])
    assert message is not None
    assert list(views(message)) == ["rank 0", "ranks 1, 3", "rank 2"]


def test_long_lines_are_shortened_in_the_message() -> None:
    message = compare([["a" * 10000], ["b" * 10000]])
    assert message is not None
    assert len(message) < 3000


LINES = st.lists(
    st.sampled_from(["a", "b", "", "ä 漢 🙂", "a: b", "nothing more", "z" * 399 + "é"])
    | st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=6),
    min_size=1,
    max_size=5,
)


@given(st.lists(LINES, min_size=1, max_size=4))
@example([["a"], ["a\0"]])
@example([["a", ""], ["a"]])
@settings(deadline=None, max_examples=100, suppress_health_check=BUSY)
def test_for_any_lines_the_first_difference_splits_the_ranks_rightly(
    held: list[list[str]],
) -> None:
    message = compare(held)
    if all(lines == held[0] for lines in held):
        assert message is None
        return
    assert message is not None
    depth = max(map(len, held))
    first = next(
        i for i in range(depth) if len({lines[i] if i < len(lines) else None for lines in held}) > 1
    )
    holders: dict[str | None, list[int]] = {}
    for rank, lines in enumerate(held):
        holders.setdefault(lines[first] if first < len(lines) else None, []).append(rank)
    for ranks in holders.values():
        assert f"\n  {name_ranks(ranks)}: " in message
    assert message.count("\n  rank") >= len(holders)


# ------------------------------------------------------------------ preparing, with failures


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_prepare_and_agree(size: int) -> None:
    prepared = []

    def body(channel: MemoryChannel) -> None:
        same_outcome(channel, "trying", lambda: prepared.append(channel.rank) or ["same"])

    assert on_ranks(size, body) == [None] * size
    assert sorted(prepared) == list(range(size))


def test_ranks_that_prepared_different_things_all_raise() -> None:
    raised = on_ranks(3, lambda ch: same_outcome(ch, "trying", lambda: [f"lr = {ch.rank // 2}"]))
    assert {type(error) for error in raised} == {RanksDisagree}
    (message,) = {str(error) for error in raised}
    assert views(message) == {"ranks 0-1": "lr = 0", "rank 2": "lr = 1"}


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize(
    "failure", [TypeError, ValueError, KeyError, IndexError, RuntimeError, OSError]
)
def test_a_failure_on_one_rank_is_raised_there_and_told_to_the_others(
    failing: int, failure: type[Exception]
) -> None:
    raised_there = failure("no such\nthing")

    def body(channel: MemoryChannel) -> None:
        def prepare() -> list[str]:
            if channel.rank == failing:
                raise raised_there
            return ["fine"]

        same_outcome(channel, "trying", prepare)

    raised = on_ranks(3, body)
    assert raised[failing] is raised_there
    others = [error for rank, error in enumerate(raised) if rank != failing]
    assert all(isinstance(error, RanksDisagree) for error in others)
    if failure is not OSError:  # what constructors and methods are documented to raise
        assert all(isinstance(error, failure) for error in others)
    (message,) = {str(error) for error in others}
    held = views(message)
    assert held.pop(f"rank {failing}").startswith(f"raised {failure.__name__}: ")
    assert list(held.values()) == ["prepared without an error"]


def test_a_failure_on_every_rank_is_raised_as_it_is() -> None:
    def body(channel: MemoryChannel) -> None:
        def prepare() -> list[str]:
            raise TypeError("not an optimizer")

        same_outcome(channel, "trying", prepare)

    assert [(type(e), str(e)) for e in on_ranks(3, body)] == [(TypeError, "not an optimizer")] * 3


def test_different_failures_are_each_raised_where_they_happened() -> None:
    def body(channel: MemoryChannel) -> None:
        def prepare() -> list[str]:
            if channel.rank == 2:
                return ["fine"]
            raise [ValueError, TypeError][channel.rank](f"on {channel.rank}")

        same_outcome(channel, "trying", prepare)

    first, second, third = on_ranks(3, body)
    assert (type(first), str(first)) == (ValueError, "on 0")
    assert (type(second), str(second)) == (TypeError, "on 1")
    assert isinstance(third, RanksDisagree)
    assert "rank 0: raised ValueError: on 0" in str(third)
    assert "rank 1: raised TypeError: on 1" in str(third)


def test_a_disagreement_is_a_value_error() -> None:
    assert issubclass(RanksDisagree, ValueError)


# ------------------------------------------------------------------ names of ranks


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([2, 0], "ranks 0, 2"),
        ([5, 2, 1, 0], "ranks 0-2, 5"),
        (iter([7, 8, 9, 11, 13, 14]), "ranks 7-9, 11, 13-14"),
        (range(16384), "ranks 0-16383"),
    ],
)
def test_ranks_are_named_in_runs(ranks: Any, name: str) -> None:
    assert name_ranks(ranks) == name


@given(st.sets(st.integers(0, 40), min_size=1))
def test_the_name_of_ranks_can_be_read_back(ranks: set[int]) -> None:
    word, numbers = name_ranks(ranks).split(" ", 1)
    assert word == ("rank" if len(ranks) == 1 else "ranks")
    found: list[int] = []
    for run in numbers.split(", "):
        first, *last = map(int, run.split("-"))
        found += range(first, (last or [first])[0] + 1)
    assert found == sorted(ranks)


# ------------------------------------------------------------------ through the store


SIZES = [1, 2, 3, 5]
PATIENT = 60.0


class Ranks:
    """Threads that run one body each, on one store."""

    def __init__(self, size: int, patience: float = PATIENT) -> None:
        self.store = dist.HashStore()
        self.channels = [
            StoreChannel(self.store, rank, size, "token", patience, "testing")
            for rank in range(size)
        ]

    def run(self, body: Callable[[StoreChannel], Any]) -> list[Any]:
        """What each returned or raised."""
        outcomes: list[Any] = [None] * len(self.channels)

        def perform(round_: StoreChannel) -> None:
            try:
                outcomes[round_.rank] = body(round_)
            except Exception as error:
                outcomes[round_.rank] = error

        threads = [threading.Thread(target=perform, args=(e,), daemon=True) for e in self.channels]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=PATIENT)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
        return outcomes


def decided(channel: StoreChannel, work: Callable[[], Any], decide: Callable[..., Any]) -> Any:
    return same_outcome(channel, channel.doing, work, decide)


def number_of_keys(store: dist.HashStore) -> int:
    return store.num_keys()


def the_one_error(outcomes: list[Any]) -> Exception:
    """All ranks raised the same."""
    assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    assert len({(type(outcome), str(outcome)) for outcome in outcomes}) == 1, outcomes
    return outcomes[0]


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_what_rank_0_decided_from_all_results(size: int) -> None:
    ranks = Ranks(size)
    deciders = []

    def body(round_: StoreChannel) -> Any:
        def decide(results: list[Any]) -> Any:
            deciders.append(round_.rank)
            return {"all": results}

        return decided(round_, lambda: [round_.rank, "x" * round_.rank, None], decide)

    decision = {"all": [[rank, "x" * rank, None] for rank in range(size)]}
    assert ranks.run(body) == [decision] * size
    assert deciders == [0]
    assert number_of_keys(ranks.store) == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("error", [ValueError, TypeError, OSError, PermissionError, RuntimeError])
def test_an_error_on_one_rank_is_raised_on_all(size: int, error: type[Exception]) -> None:
    ranks = Ranks(size)
    culprit = size - 1

    def body(round_: StoreChannel) -> Any:
        def work() -> None:
            if round_.rank == culprit:
                raise error("no luck")

        return decided(round_, work, lambda _: pytest.fail("there is nothing to decide"))

    raised = the_one_error(ranks.run(body))
    assert type(raised) is error
    assert "no luck" in str(raised)
    assert size == 1 or f"rank {culprit}" in str(raised)
    assert number_of_keys(ranks.store) == 0


def test_different_errors_on_several_ranks_are_all_told_on_all() -> None:
    ranks = Ranks(5)
    texts = {1: "first", 3: "second", 4: "first"}

    def body(round_: StoreChannel) -> Any:
        def work() -> None:
            if round_.rank in texts:
                raise ValueError(texts[round_.rank])

        return decided(round_, work, lambda _: None)

    raised = the_one_error(ranks.run(body))
    assert type(raised) is ValueError
    assert "ranks 1, 4: first" in str(raised)
    assert "rank 3: second" in str(raised)
    assert number_of_keys(ranks.store) == 0


def test_the_same_error_on_all_ranks_is_told_once() -> None:
    def body(round_: StoreChannel) -> Any:
        def work() -> None:
            raise FileNotFoundError("the one text")

        return decided(round_, work, lambda _: None)

    raised = the_one_error(Ranks(3).run(body))
    assert type(raised) is FileNotFoundError
    assert str(raised) == "the one text"


@pytest.mark.parametrize("size", SIZES)
def test_an_error_in_the_decision_is_raised_on_all_ranks(size: int) -> None:
    ranks = Ranks(size)

    def body(round_: StoreChannel) -> Any:
        def decide(results: list[Any]) -> None:
            raise ValueError(f"{len(results)} results do not fit")

        return decided(round_, lambda: 0, decide)

    raised = the_one_error(ranks.run(body))
    assert (type(raised), str(raised)) == (ValueError, f"{size} results do not fit")
    assert number_of_keys(ranks.store) == 0


class Odd(KeyError):
    """A class that no other rank may know."""


def test_a_class_that_others_may_not_know_is_raised_as_the_nearest_that_they_do() -> None:
    class Closer(PermissionError):
        pass

    for own, expected in ((Odd, RuntimeError), (Closer, PermissionError)):
        ranks = Ranks(2)

        def body(round_: StoreChannel, own: type[Exception] = own) -> Any:
            def work() -> None:
                if round_.rank == 1:
                    raise own("why")

            return decided(round_, work, lambda _: None)

        raised = the_one_error(ranks.run(body))
        assert type(raised) is expected
        assert "why" in str(raised)


def test_the_rank_that_raised_keeps_its_own_exception_as_the_cause() -> None:
    def body(round_: StoreChannel) -> Any:
        def work() -> None:
            if round_.rank == 1:
                raise Odd("mine")

        return decided(round_, work, lambda _: None)

    outcomes = Ranks(2).run(body)
    assert isinstance(outcomes[1].__cause__, Odd)


@pytest.mark.parametrize("silent", [[0], [1], [2, 4]])
def test_ranks_that_show_no_sign_of_life_are_named(silent: list[int]) -> None:
    ranks = Ranks(5, patience=0.3)

    def body(round_: StoreChannel) -> Any:
        return None if round_.rank in silent else decided(round_, lambda: 0, lambda _: 0)

    outcomes = ranks.run(body)
    # Rank 0 sees who is missing; the others lose rank 0, which has given up.
    judge = 1 if 0 in silent else 0
    assert type(outcomes[judge]) is RuntimeError
    named = "rank 0" if 0 in silent else text.name_ranks(silent)
    assert f"no sign of life from {named} " in str(outcomes[judge])
    assert "testing" in str(outcomes[judge])
    active = [outcomes[rank] for rank in range(5) if rank not in silent]
    assert all(type(outcome) is RuntimeError for outcome in active)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_is_named_long_before_patience_ends(dead: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(*STORE_BEAT_SECONDS, 0.05)
    monkeypatch.setattr(*STORE_DEAD_SECONDS, 2.0)
    ranks = Ranks(3, patience=1000.0)

    def body(round_: StoreChannel) -> Any:
        return None if round_.rank == dead else decided(round_, lambda: 0, lambda _: 0)

    outcomes = ranks.run(body)
    judge = 1 if dead == 0 else 0
    assert f"no sign of life from rank {dead} for 2 s while testing" in str(outcomes[judge])
    assert type(outcomes[2]) is RuntimeError
    assert not any(thread.name == "onecopy-pulse" for thread in threading.enumerate())


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_lives_is_waited_for_though_its_disk_is_slow(
    slow: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(*STORE_BEAT_SECONDS, 0.02)
    monkeypatch.setattr(*STORE_DEAD_SECONDS, 1.0)
    ranks = Ranks(3)
    pause = threading.Event()

    def body(round_: StoreChannel) -> Any:
        def work() -> int:
            pause.wait(3.0 if round_.rank == slow else 0.0)  # in one call, without a beat
            return round_.rank

        return decided(round_, work, sum)

    assert ranks.run(body) == [3, 3, 3]
    assert number_of_keys(ranks.store) == 0


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_that_beats_is_waited_for(slow: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(*STORE_BEAT_SECONDS, 0.02)
    monkeypatch.setattr(*STORE_LONGEST_NAP, 0.05)
    ranks = Ranks(3, patience=0.5)
    pause = threading.Event()

    def body(round_: StoreChannel) -> Any:
        def work() -> int:
            for _ in range(60 if round_.rank == slow else 0):  # three times as long as patience
                pause.wait(0.025)
                round_.beat()
            return round_.rank

        return decided(round_, work, sum)

    assert ranks.run(body) == [3, 3, 3]
    assert number_of_keys(ranks.store) == 0


def test_a_slow_decision_is_not_mistaken_for_a_silent_rank(monkeypatch: Any) -> None:
    monkeypatch.setattr(*STORE_BEAT_SECONDS, 0.02)
    monkeypatch.setattr(*STORE_LONGEST_NAP, 0.05)
    ranks = Ranks(3, patience=0.5)
    pause = threading.Event()

    def body(round_: StoreChannel) -> Any:
        def decide(results: list[Any]) -> int:
            for _ in range(60):
                pause.wait(0.025)
                round_.beat()
            return sum(results)

        return decided(round_, lambda: round_.rank, decide)

    assert ranks.run(body) == [3, 3, 3]
    assert number_of_keys(ranks.store) == 0


def test_rounds_on_one_store_do_not_meet() -> None:
    store = dist.HashStore()
    for number in range(3):
        ranks = Ranks(3)
        ranks.store = store
        ranks.channels = [
            StoreChannel(store, r, 3, f"round {number}", PATIENT, "x") for r in range(3)
        ]
        assert (
            ranks.run(lambda e, n=number: decided(e, lambda: [n, e.rank], json.dumps))
            == [json.dumps([[number, rank] for rank in range(3)])] * 3
        )
    assert number_of_keys(store) == 0


def test_one_rank_needs_no_store() -> None:
    alone = StoreChannel(None, 0, 1, "token", PATIENT, "testing")
    alone.beat()
    assert decided(alone, lambda: [1], lambda results: results) == [[1]]


class Stopped(dist.HashStore):
    """A store whose host is stopped."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        return super().check(keys)


class Gone(dist.HashStore):
    """A store whose host has ended."""

    def check(self, _: list[str]) -> bool:
        raise dist.DistNetworkError("connection reset")


@pytest.mark.parametrize("store", [Stopped, Gone])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_lost_is_explained(rank: int, store: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(*STORE_ANSWER_SECONDS, 0.2)
    alone = StoreChannel(store(), rank, 2, "token", 0.2, "testing", lambda: "who was where")
    with pytest.raises(RuntimeError, match="who was where") as caught:
        decided(alone, lambda: 0, lambda _: 0)
    assert isinstance(caught.value.__cause__, agreement.StoreLost)
    assert not alone.is_decided
