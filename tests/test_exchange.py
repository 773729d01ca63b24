"""Reports through the store: one decision or one error on all ranks, and nothing left behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from inside import (
    EXCHANGE_ANSWER_SECONDS,
    EXCHANGE_BEAT_SECONDS,
    EXCHANGE_DEAD_SECONDS,
    EXCHANGE_LONGEST_NAP,
)

from onecopy import exchange
from onecopy.exchange import Exchange

SIZES = [1, 2, 3, 5]
PATIENT = 60.0


class Ranks:
    """Threads that run one body each, on one store."""

    def __init__(self, size: int, patience: float = PATIENT) -> None:
        self.store = dist.HashStore()
        self.exchanges = [
            Exchange(self.store, rank, size, "token", patience, "testing") for rank in range(size)
        ]

    def run(self, body: Callable[[Exchange], Any]) -> list[Any]:
        """What each returned or raised."""
        outcomes: list[Any] = [None] * len(self.exchanges)

        def perform(round_: Exchange) -> None:
            try:
                outcomes[round_.rank] = body(round_)
            except Exception as error:
                outcomes[round_.rank] = error

        threads = [threading.Thread(target=perform, args=(e,), daemon=True) for e in self.exchanges]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=PATIENT)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
        return outcomes


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

    def body(round_: Exchange) -> Any:
        def decide(results: list[Any]) -> Any:
            deciders.append(round_.rank)
            return {"all": results}

        return round_.run(lambda: [round_.rank, "x" * round_.rank, None], decide)

    decision = {"all": [[rank, "x" * rank, None] for rank in range(size)]}
    assert ranks.run(body) == [decision] * size
    assert deciders == [0]
    assert number_of_keys(ranks.store) == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("error", [ValueError, TypeError, OSError, PermissionError, RuntimeError])
def test_an_error_on_one_rank_is_raised_on_all(size: int, error: type[Exception]) -> None:
    ranks = Ranks(size)
    culprit = size - 1

    def body(round_: Exchange) -> Any:
        def work() -> None:
            if round_.rank == culprit:
                raise error("no luck")

        return round_.run(work, lambda _: pytest.fail("there is nothing to decide"))

    raised = the_one_error(ranks.run(body))
    assert type(raised) is error
    assert "no luck" in str(raised)
    assert size == 1 or f"rank {culprit}" in str(raised)
    assert number_of_keys(ranks.store) == 0


def test_different_errors_on_several_ranks_are_all_told_on_all() -> None:
    ranks = Ranks(5)
    texts = {1: "first", 3: "second", 4: "first"}

    def body(round_: Exchange) -> Any:
        def work() -> None:
            if round_.rank in texts:
                raise ValueError(texts[round_.rank])

        return round_.run(work, lambda _: None)

    raised = the_one_error(ranks.run(body))
    assert type(raised) is ValueError
    assert "ranks 1, 4: first" in str(raised)
    assert "rank 3: second" in str(raised)
    assert number_of_keys(ranks.store) == 0


def test_the_same_error_on_all_ranks_is_told_once() -> None:
    def body(round_: Exchange) -> Any:
        def work() -> None:
            raise FileNotFoundError("the one text")

        return round_.run(work, lambda _: None)

    raised = the_one_error(Ranks(3).run(body))
    assert type(raised) is FileNotFoundError
    assert str(raised) == "the one text"


@pytest.mark.parametrize("size", SIZES)
def test_an_error_in_the_decision_is_raised_on_all_ranks(size: int) -> None:
    ranks = Ranks(size)

    def body(round_: Exchange) -> Any:
        def decide(results: list[Any]) -> None:
            raise ValueError(f"{len(results)} results do not fit")

        return round_.run(lambda: 0, decide)

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

        def body(round_: Exchange, own: type[Exception] = own) -> Any:
            def work() -> None:
                if round_.rank == 1:
                    raise own("why")

            return round_.run(work, lambda _: None)

        raised = the_one_error(ranks.run(body))
        assert type(raised) is expected
        assert "why" in str(raised)


def test_the_rank_that_raised_keeps_its_own_exception_as_the_cause() -> None:
    def body(round_: Exchange) -> Any:
        def work() -> None:
            if round_.rank == 1:
                raise Odd("mine")

        return round_.run(work, lambda _: None)

    outcomes = Ranks(2).run(body)
    assert isinstance(outcomes[1].__cause__, Odd)


@pytest.mark.parametrize("silent", [[0], [1], [2, 4]])
def test_ranks_that_show_no_sign_of_life_are_named(silent: list[int]) -> None:
    ranks = Ranks(5, patience=0.3)

    def body(round_: Exchange) -> Any:
        return None if round_.rank in silent else round_.run(lambda: 0, lambda _: 0)

    outcomes = ranks.run(body)
    # Rank 0 sees who is missing; the others lose rank 0, which has given up.
    judge = 1 if 0 in silent else 0
    assert type(outcomes[judge]) is RuntimeError
    named = "rank 0" if 0 in silent else exchange.name_ranks(silent)
    assert f"no sign of life from {named} " in str(outcomes[judge])
    assert "testing" in str(outcomes[judge])
    active = [outcomes[rank] for rank in range(5) if rank not in silent]
    assert all(type(outcome) is RuntimeError for outcome in active)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_is_named_long_before_patience_ends(dead: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(*EXCHANGE_BEAT_SECONDS, 0.05)
    monkeypatch.setattr(*EXCHANGE_DEAD_SECONDS, 2.0)
    ranks = Ranks(3, patience=1000.0)

    def body(round_: Exchange) -> Any:
        return None if round_.rank == dead else round_.run(lambda: 0, lambda _: 0)

    outcomes = ranks.run(body)
    judge = 1 if dead == 0 else 0
    assert f"no sign of life from rank {dead} for 2 s while testing" in str(outcomes[judge])
    assert type(outcomes[2]) is RuntimeError
    assert not any(thread.name == "onecopy-pulse" for thread in threading.enumerate())


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_lives_is_waited_for_though_its_disk_is_slow(
    slow: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(*EXCHANGE_BEAT_SECONDS, 0.02)
    monkeypatch.setattr(*EXCHANGE_DEAD_SECONDS, 1.0)
    ranks = Ranks(3)
    pause = threading.Event()

    def body(round_: Exchange) -> Any:
        def work() -> int:
            pause.wait(3.0 if round_.rank == slow else 0.0)  # in one call, without a beat
            return round_.rank

        return round_.run(work, sum)

    assert ranks.run(body) == [3, 3, 3]
    assert number_of_keys(ranks.store) == 0


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_that_beats_is_waited_for(slow: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(*EXCHANGE_BEAT_SECONDS, 0.02)
    monkeypatch.setattr(*EXCHANGE_LONGEST_NAP, 0.05)
    ranks = Ranks(3, patience=0.5)
    pause = threading.Event()

    def body(round_: Exchange) -> Any:
        def work() -> int:
            for _ in range(60 if round_.rank == slow else 0):  # three times as long as patience
                pause.wait(0.025)
                round_.beat()
            return round_.rank

        return round_.run(work, sum)

    assert ranks.run(body) == [3, 3, 3]
    assert number_of_keys(ranks.store) == 0


def test_a_slow_decision_is_not_mistaken_for_a_silent_rank(monkeypatch: Any) -> None:
    monkeypatch.setattr(*EXCHANGE_BEAT_SECONDS, 0.02)
    monkeypatch.setattr(*EXCHANGE_LONGEST_NAP, 0.05)
    ranks = Ranks(3, patience=0.5)
    pause = threading.Event()

    def body(round_: Exchange) -> Any:
        def decide(results: list[Any]) -> int:
            for _ in range(60):
                pause.wait(0.025)
                round_.beat()
            return sum(results)

        return round_.run(lambda: round_.rank, decide)

    assert ranks.run(body) == [3, 3, 3]
    assert number_of_keys(ranks.store) == 0


def test_rounds_on_one_store_do_not_meet() -> None:
    store = dist.HashStore()
    for number in range(3):
        ranks = Ranks(3)
        ranks.store = store
        ranks.exchanges = [Exchange(store, r, 3, f"round {number}", PATIENT, "x") for r in range(3)]
        assert (
            ranks.run(lambda e, n=number: e.run(lambda: [n, e.rank], json.dumps))
            == [json.dumps([[number, rank] for rank in range(3)])] * 3
        )
    assert number_of_keys(store) == 0


def test_one_rank_needs_no_store() -> None:
    alone = Exchange(None, 0, 1, "token", PATIENT, "testing")
    alone.beat()
    assert alone.run(lambda: [1], lambda results: results) == [[1]]


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
    monkeypatch.setattr(*EXCHANGE_ANSWER_SECONDS, 0.2)
    alone = Exchange(store(), rank, 2, "token", 0.2, "testing", lambda: "who was where")
    with pytest.raises(RuntimeError, match="who was where") as caught:
        alone.run(lambda: 0, lambda _: 0)
    assert isinstance(caught.value.__cause__, exchange.StoreLost)
    assert not alone.is_decided
