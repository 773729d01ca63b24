"""Reports among ranks through the c10d store, for work during which no collective may be open.

Writing or reading a checkpoint takes as long as the disk does, and ranks finish at different times.
A rank that waited for the others in a collective would be at the mercy of its timeout, and would
occupy the device. So reports go through the store. While a rank works or waits it shows signs of
life; one that shows none for as long as a collective would have waited is reported as lost.

A collective fails at once if a process dies, because its connections do. The store has no such
signal: a thread of each rank has a pulse there, and a rank without one is lost within a minute,
however long a disk may take. The store itself may be lost or stopped, with the process that hosts
it: a question that it does not answer ends as soon as a wait for a rank without a pulse would.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from onecopy.agreement import name_ranks
from onecopy.waiting import ask, is_interruption, is_silent

_BEAT_SECONDS = 1.0
_DEAD_SECONDS = 60.0  # without a pulse
_ANSWER_SECONDS = 10.0  # that a store may take, at least: the machine may be busy
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.5
_NAP_SHARE = 0.02  # of the time waited so far: what a nap may add to it


class StoreLost(RuntimeError):
    """The store is gone, or does not answer."""


@dataclass(slots=True)
class Exchange:
    """One round: every rank reports to rank 0, and rank 0 answers all."""

    store: Any
    rank: int
    world_size: int
    token: str  # the same on all ranks, and new for each round
    patience: float  # seconds without a sign of life until a rank is given up
    what: str  # what is being done, for errors
    explain_loss: Callable[[], str] | None = None  # what to raise if the store is lost
    is_decided: bool = False  # rank 0 has said how it ended
    _beats: int = 0
    _last_beat: float = field(default_factory=time.monotonic)
    _pulse: _Pulse | None = None

    def beat(self) -> None:
        """A sign of life. Cheap: call it often. The store is told, and asked nothing, which does
        not wait, though it may be stopped."""
        now = time.monotonic()
        if self.world_size > 1 and now - self._last_beat > _BEAT_SECONDS:
            self._last_beat = now
            self._beats += 1
            self.store.set(self._key("beat", self.rank), str(self._beats))

    def run(self, work: Callable[[], Any], decide: Callable[[list[Any]], Any]) -> Any:
        """Do ``work`` on every rank, and ``decide`` on rank 0 what follows from all results.

        Every rank gets the decision. If anything raises anywhere, every rank raises the same.
        Results and decisions travel as JSON.
        """
        if self.world_size > 1:
            self._pulse = _Pulse(self.store, self._key("pulse", self.rank))
        try:
            return self._run(work, decide)
        except StoreLost as error:
            if self.explain_loss is None:
                raise
            raise RuntimeError(self.explain_loss()) from error
        finally:
            self._end_pulse()

    def _run(self, work: Callable[[], Any], decide: Callable[[list[Any]], Any]) -> Any:
        result, error = _tried(work)
        said = self._all_reports(json.dumps([result, _described(error)]))
        decision = None
        if said is not None:
            results, errors = zip(*map(json.loads, said), strict=True)
            failed = {rank: described for rank, described in enumerate(errors) if described}
            if failed:
                decision = json.dumps([None, self._together(failed)])
            else:
                decided, refusal = _tried(lambda: decide(list(results)))
                decision = json.dumps([decided, _described(refusal)])
                error = refusal
        answer, reason = json.loads(self.answer(decision))
        self.is_decided = True
        if reason is not None:
            raise _as_exception(*reason) from error
        return answer

    def _all_reports(self, text: str) -> list[str] | None:
        """As ``report``; if rank 0 gives somebody up, it tells the others before it raises."""
        try:
            return self.report(text)
        except StoreLost:
            raise
        except RuntimeError as error:
            if self.rank == 0 and not is_interruption(error):
                self.answer(json.dumps([None, _described(error)]))
                self.is_decided = True
            raise

    def _together(self, failed: dict[int, list[str]]) -> list[str]:
        """One error for what failed on these ranks."""
        of_reason: dict[tuple[str, ...], list[int]] = {}
        for rank, described in failed.items():
            of_reason.setdefault(tuple(described), []).append(rank)
        if len(of_reason) == 1 and len(failed) == self.world_size:
            return next(iter(failed.values()))
        lines = [f"{name_ranks(ranks)}: {text}" for (_, text), ranks in of_reason.items()]
        return [next(iter(of_reason))[0], f"{self.what} failed. " + "\n".join(lines)]

    def report(self, text: str) -> list[str] | None:
        """Rank 0 gets the texts of all ranks, in order; the others get None and go on."""
        if self.rank != 0:
            self._ask(self.store.set, self._key("report", self.rank), text)
            return None
        others = range(1, self.world_size)
        self._wait_for({rank: self._key("report", rank) for rank in others})
        return [text, *(self._ask(self._take, self._key("report", rank)) for rank in others)]

    def answer(self, text: str | None) -> str:
        """The text that rank 0 passes, on all ranks."""
        key = self._key("answer", 0)
        if self.rank == 0:
            assert text is not None
            self._end_pulse()  # or it might come back after the table is cleared
            if self.world_size > 1:
                self._ask(self.store.set, key, text)
            return text
        self._wait_for({0: key})
        self._end_pulse()
        return str(self._ask(self._take_answer, key))

    def _take_answer(self, key: str) -> str:
        found: str = self.store.get(key).decode()
        # The last to read it clears the table.
        if self.store.add(self._key("read", 0), 1) == self.world_size - 1:
            self.store.delete_key(key)
            self.store.delete_key(self._key("read", 0))
            for rank in range(self.world_size):
                self.store.delete_key(self._key("beat", rank))
                self.store.delete_key(self._key("pulse", rank))
        return found

    def _wait_for(self, keys: dict[int, str]) -> None:
        seen: dict[str, tuple[str, float]] = {}
        start = next_look = time.monotonic()
        while True:
            keys = self._ask(self._missing, keys)
            if not keys:
                return
            now = time.monotonic()
            if now >= next_look:
                self._ask(self._look, keys, seen)
                self._require_signs_of_life(keys, seen)
                next_look = now + _BEAT_SECONDS
            self.beat()
            time.sleep(min(max(_SHORTEST_NAP, _NAP_SHARE * (now - start)), _LONGEST_NAP))

    def _missing(self, keys: dict[int, str]) -> dict[int, str]:
        return {rank: key for rank, key in keys.items() if not self.store.check([key])}

    def _look(self, ranks: Iterable[int], seen: dict[str, tuple[str, float]]) -> None:
        """Since when each sign of life of these ranks has been what it is, as far as was seen."""
        for key in [self._key(kind, rank) for kind in self._limits for rank in ranks]:
            value = self.store.get(key).decode() if self.store.check([key]) else ""
            if key not in seen or seen[key][0] != value:
                seen[key] = (value, time.monotonic())

    @property
    def _limits(self) -> dict[str, float]:
        return {"beat": self.patience, "pulse": min(self.patience, _DEAD_SECONDS)}

    def _require_signs_of_life(
        self, ranks: Iterable[int], seen: dict[str, tuple[str, float]]
    ) -> None:
        now = time.monotonic()
        for kind, limit in self._limits.items():
            silent = [rank for rank in ranks if now - seen[self._key(kind, rank)][1] > limit]
            if silent:
                raise RuntimeError(
                    f"no sign of life from {name_ranks(silent)} for {limit:.0f} s while {self.what}"
                )

    def _ask(self, question: Callable[..., Any], *about: Any) -> Any:
        """A question to the store, which may not be there any more."""
        try:
            patience = max(self._limits["pulse"], _ANSWER_SECONDS)
            return ask(self.store, lambda: question(*about), patience)
        except RuntimeError as error:
            if is_interruption(error):
                raise
            raise StoreLost(f"{self.what}: {error}") from error

    def _end_pulse(self) -> None:
        if self._pulse is not None:
            self._pulse.end()
            self._pulse = None

    def _take(self, key: str) -> str:
        text: str = self.store.get(key).decode()
        self.store.delete_key(key)
        return text

    def _key(self, kind: str, rank: int) -> str:
        return f"onecopy/{self.token}/{kind}/{rank}"


class _Pulse:
    """A thread that counts in the store for as long as the process lives."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="onecopy-pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        number = 0
        # A store that is gone is found by whoever waits for something in it.
        with contextlib.suppress(RuntimeError):
            while not self._is_over.wait(_BEAT_SECONDS):
                number += 1
                self._store.set(self._key, str(number))

    def end(self) -> None:
        self._is_over.set()
        if not is_silent(self._store):  # or it may wait there for ever
            self._thread.join(_DEAD_SECONDS)


_CLASSES = {
    cls.__name__: cls
    for cls in (FileNotFoundError, PermissionError, OSError, TypeError, ValueError, RuntimeError)
}


def _tried(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _described(error: Exception | None) -> list[str] | None:
    """The nearest class that can be raised elsewhere too, and the message."""
    if error is None:
        return None
    names = (cls.__name__ for cls in type(error).__mro__)
    name = next((name for name in names if name in _CLASSES), None)
    if name is None:
        return ["RuntimeError", f"{type(error).__name__}: {error}"]
    return [name, str(error)]


def _as_exception(name: str, message: str) -> Exception:
    return _CLASSES[name](message)
