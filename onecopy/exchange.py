"""Reports among ranks through the c10d store, for work during which no collective may be open.

Writing or reading a checkpoint takes as long as the disk does, and ranks finish at different times.
A rank that waited for the others in a collective would be at the mercy of its timeout, and would
occupy the device. So reports go through the store. While a rank works or waits it shows signs of
life; one that shows none for as long as a collective would have waited is reported as lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from onecopy.agreement import name_ranks

_BEAT_SECONDS = 1.0
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.5
_NAP_SHARE = 0.02  # of the time waited so far: what a nap may add to it


@dataclass(slots=True)
class Exchange:
    """One round: every rank reports to rank 0, and rank 0 answers all."""

    store: Any
    rank: int
    world_size: int
    token: str  # the same on all ranks, and new for each round
    patience: float  # seconds without a sign of life until a rank is given up
    what: str  # what is being done, for errors
    is_decided: bool = False  # rank 0 has said how it ended
    _beats: int = 0
    _last_beat: float = field(default_factory=time.monotonic)

    def beat(self) -> None:
        """A sign of life. Cheap: call it often."""
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
        except RuntimeError as error:
            if self.rank == 0:
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
            self.store.set(self._key("report", self.rank), text)
            return None
        others = range(1, self.world_size)
        self._wait_for({rank: self._key("report", rank) for rank in others})
        return [text, *(self._take(self._key("report", rank)) for rank in others)]

    def answer(self, text: str | None) -> str:
        """The text that rank 0 passes, on all ranks."""
        key = self._key("answer", 0)
        if self.rank == 0:
            assert text is not None
            if self.world_size > 1:
                self.store.set(key, text)
            return text
        self._wait_for({0: key})
        found: str = self.store.get(key).decode()
        # The last to read it clears the table.
        if self.store.add(self._key("read", 0), 1) == self.world_size - 1:
            self.store.delete_key(key)
            self.store.delete_key(self._key("read", 0))
            for rank in range(self.world_size):
                self.store.delete_key(self._key("beat", rank))
        return found

    def _wait_for(self, keys: dict[int, str]) -> None:
        seen: dict[int, tuple[str, float]] = {}
        start = next_look = time.monotonic()
        while True:
            keys = {rank: key for rank, key in keys.items() if not self.store.check([key])}
            if not keys:
                return
            now = time.monotonic()
            if now >= next_look:
                self._require_signs_of_life(keys, seen)
                next_look = now + _BEAT_SECONDS
            self.beat()
            time.sleep(min(max(_SHORTEST_NAP, _NAP_SHARE * (now - start)), _LONGEST_NAP))

    def _require_signs_of_life(
        self, keys: dict[int, str], seen: dict[int, tuple[str, float]]
    ) -> None:
        now = time.monotonic()
        for rank in keys:
            key = self._key("beat", rank)
            beat = self.store.get(key).decode() if self.store.check([key]) else ""
            if rank not in seen or seen[rank][0] != beat:
                seen[rank] = (beat, now)
        silent = [rank for rank in keys if now - seen[rank][1] > self.patience]
        if silent:
            raise RuntimeError(
                f"no sign of life from {name_ranks(silent)} for {self.patience:.0f} s while "
                f"{self.what}"
            )

    def _take(self, key: str) -> str:
        text: str = self.store.get(key).decode()
        self.store.delete_key(key)
        return text

    def _key(self, kind: str, rank: int) -> str:
        return f"onecopy/{self.token}/{kind}/{rank}"


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
