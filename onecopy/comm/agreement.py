"""One protocol by which ranks agree: every rank returns the same outcome, or every rank raises."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from onecopy.comm.waiting import ask_store, is_interruption, is_silent
from onecopy.planning.text import name_ranks

# Of the first message of whatever ranks do together. Why all of one size: gloo ends the process
# when messages of different sizes meet, and then nobody can tell what was wrong.
DIGEST_BYTES = 32
_TEXT_BYTES = 400
ADVICE = "Every rank must do the same here."
_SAME = -1


class Channel(Protocol):
    """The part of ``rank_group.RankGroup`` that agreement needs."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def whose(self) -> str: ...  # added to what a rank is doing: who does it, of several
    def all_gather_bytes(self, payload: bytes) -> list[bytes]: ...
    def broadcast_bytes(self, payload: bytes | None, source: int) -> bytes: ...


class RanksDisagree(ValueError):
    """Raised on every rank when the ranks were given different things.

    If that is because one rank raised, it is of that rank's class of exception, too.
    """

    def __init__(self, message: str, views: Sequence[str] = (), line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.views = views  # what was said, each once
        self.line = line  # the first of the compared lines that differs, if all do the same

    def __str__(self) -> str:  # a KeyError, which this may be too, would print the repr
        return self.message


def require_agreement(channel: Channel, subject: str, lines: Sequence[str]) -> None:
    """Raise :class:`RanksDisagree` on all ranks unless all hold the same lines, and do the same:
    the subject is what a rank is doing, and is compared first."""
    mine = [_as_text(line) for line in (f"{subject}{channel.whose}", *lines)]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if len(set(channel.all_gather_bytes(digest))) > 1:
        raise difference(channel, mine)


def difference(channel: Channel, mine: Sequence[str], advice: str = ADVICE) -> RanksDisagree:
    """The error for all ranks, when their messages of ``DIGEST_BYTES`` were not what they should
    be. Collective. The first line says what this rank is doing."""
    text = "\n".join(mine).encode() if channel.rank == 0 else None
    theirs = channel.broadcast_bytes(text, source=0).decode().split("\n")
    index = _first_difference(mine, theirs)
    answers = channel.all_gather_bytes(_Answer.at(mine, index).to_bytes())
    return _disagreement(theirs, [_Answer.from_bytes(answer) for answer in answers], advice)


def _as_text(line: str) -> str:
    """One line that can be sent, whatever is in it: a name may hold what no encoding knows."""
    return line.replace("\n", " ").encode(errors="backslashreplace").decode()


def same_outcome(channel: Channel, subject: str, prepare: Callable[[], Sequence[str]]) -> None:
    """Run ``prepare`` and compare the lines that it returns; if it raises anywhere, all raise.

    ``prepare`` must not communicate. A rank on which it raised tells the others why, and raises
    its own exception.
    """
    failure: Exception | None = None
    try:
        lines = ["prepared without an error", *prepare()]
    except Exception as error:
        failure = error
        lines = [f"raised {_builtin_class(error).__name__}: {error}"]
    try:
        require_agreement(channel, subject, lines)
    except RanksDisagree as disagreement:
        if failure is None:
            raise _in_the_class_raised(disagreement) from None
    if failure is not None:
        raise failure


_BUILTIN_CLASSES = (
    *(TypeError, KeyError, IndexError, NotImplementedError, RuntimeError),
    *(FileNotFoundError, PermissionError, OSError),
)


def _builtin_class(error: Exception) -> type:
    """The nearest class of an error that exists on every rank."""
    return next((cls for cls in type(error).__mro__ if cls in _BUILTIN_CLASSES), type(error))


def _in_the_class_raised(disagreement: RanksDisagree) -> RanksDisagree:
    """So that ``except TypeError`` works on all ranks if a TypeError was raised on one."""
    for base in _BUILTIN_CLASSES:
        if any(view.startswith(f"raised {base.__name__}:") for view in disagreement.views):
            both = type(RanksDisagree.__name__, (RanksDisagree, base), {})
            found: RanksDisagree = both(str(disagreement), disagreement.views)
            return found
    return disagreement


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> int:
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return i
    return _SAME if len(mine) == len(theirs) else min(len(mine), len(theirs))


class _Answer(NamedTuple):
    """A rank's line where it first differs from rank 0: what it reads, and exactly which it is."""

    place: int
    digest: bytes
    text: str

    @classmethod
    def at(cls, lines: Sequence[str], index: int) -> _Answer:
        if not 0 <= index < len(lines):
            return cls(index, bytes(32), "nothing more")
        line = lines[index]
        return cls(index, hashlib.sha256(line.encode()).digest(), _shortened(line))

    def to_bytes(self) -> bytes:
        text = self.text.encode()
        head = self.place.to_bytes(8, "little", signed=True) + len(text).to_bytes(2, "little")
        return head + self.digest + text.ljust(_TEXT_BYTES, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes) -> _Answer:
        index = int.from_bytes(data[:8], "little", signed=True)
        length = int.from_bytes(data[8:10], "little")
        return cls(index, data[10:42], data[42 : 42 + length].decode())


def _shortened(line: str) -> str:
    """At most ``_TEXT_BYTES`` when encoded."""
    if len(line.encode()) <= _TEXT_BYTES:
        return line
    return line.encode()[: _TEXT_BYTES - 3].decode(errors="ignore") + "..."


def _disagreement(base: Sequence[str], answers: Sequence[_Answer], advice: str) -> RanksDisagree:
    first = min(answer.place for answer in answers if answer.place != _SAME)
    holders: dict[tuple[bytes, str], list[int]] = {}
    for rank, answer in enumerate(answers):
        # A rank whose first difference comes later holds here what rank 0 holds.
        here = answer if answer.place == first else _Answer.at(base, first)
        holders.setdefault((here.digest, here.text), []).append(rank)
    views = "".join(f"\n  {name_ranks(ranks)}: {text}" for (_, text), ranks in holders.items())
    about = f"while {base[0]}" if first > 0 else "about what to do next"
    return RanksDisagree(
        f"the ranks disagree {about}:{views}\n{advice}",
        [text for _, text in holders],
        first - 1 if first > 0 else None,
    )


_BEAT_SECONDS = 1.0
_DEAD_SECONDS = 60.0  # without a pulse
_ANSWER_SECONDS = 10.0  # that a store may take, at least: the machine may be busy
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.5
_NAP_SHARE = 0.02  # of the time waited so far: what a nap may add to it


class StoreLost(RuntimeError):
    """The store is gone, or does not answer."""


@dataclass(slots=True)
class StoreChannel:
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
            return ask_store(self.store, lambda: question(*about), patience)
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
