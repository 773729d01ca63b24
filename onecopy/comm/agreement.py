"""One protocol by which ranks agree: ``same_outcome`` returns the same on all ranks, or raises.

Ranks compare lines through a :class:`Channel` of collectives; or, while no collective may be open,
rank 0 decides from all results, which travel through a c10d store: :class:`StoreChannel`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

from onecopy.comm.waiting import ask_store, is_interruption, is_silent
from onecopy.planning.text import name_ranks

# The length of the first message of anything that ranks do together. Why one length: gloo ends the
# process when messages of different lengths meet, and then nobody can tell what was wrong.
DIGEST_BYTES = 32
ADVICE = "Every rank must do the same here."


class Channel(Protocol):
    """Collectives of small messages."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def whose(self) -> str: ...  # names the optimizer, if a process group has several
    def all_gather_bytes(self, payload: bytes) -> list[bytes]: ...  # of one length on all ranks
    def broadcast_bytes(self, payload: bytes | None, source: int) -> bytes: ...


class RanksDisagree(ValueError):
    """Raised on every rank when the ranks were given different things.

    If that is because one rank raised, it is of that rank's class of exception, too.
    """

    def __init__(self, message: str, views: Sequence[str] = (), line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.views = views  # the different lines
        self.line = line  # the number of the first line that differs, if all ranks do the same

    def __str__(self) -> str:  # a KeyError, which this may be too, would print the repr
        return self.message


@overload
def same_outcome(channel: Channel, doing: str, work: Callable[[], Sequence[str]]) -> None: ...
@overload
def same_outcome(
    channel: StoreChannel,
    doing: str,
    work: Callable[[], Any],
    decide: Callable[[list[Any]], Any],
) -> Any: ...
def same_outcome(channel: Any, doing: str, work: Callable[[], Any], decide: Any = None) -> Any:
    """Run ``work`` on every rank; every rank returns the same, or every rank raises.

    ``work`` must not communicate. Without ``decide`` it returns lines that must be equal on all
    ranks. A rank on which it raised raises its own exception, the others :class:`RanksDisagree`.
    With ``decide``, rank 0 gets the results of all ranks, and what it decides is returned by all.
    Results and decisions travel as JSON. If anything raises anywhere, every rank raises the same.
    """
    if decide is None:
        value, error = _tried(work)
        if error is None:
            lines = ["prepared without an error", *value]
        else:
            lines = [f"raised {_builtin_class(error).__name__}: {error}"]
        try:
            _require_equal(channel, doing, lines)
        except RanksDisagree as disagreement:
            if error is None:
                raise _in_the_class_raised(disagreement) from None
        if error is not None:
            raise error
        return None
    with channel.signs_of_life():
        value, error = _tried(work)
        try:
            reports = channel.gather(json.dumps([value, _described(error)]))
        except StoreLost:
            raise
        except RuntimeError as silence:  # rank 0 gives a rank up, and tells the others
            if channel.rank == 0 and not is_interruption(silence):
                channel.answer(json.dumps([None, _described(silence)]))
            raise
        decision = None
        if reports is not None:
            results, errors = zip(*map(json.loads, reports), strict=True)
            if any(errors):
                decision = json.dumps([None, _together(errors, doing)])
            else:
                decided, error = _tried(lambda: decide(list(results)))
                decision = json.dumps([decided, _described(error)])
        decided, failure = json.loads(channel.answer(decision))
    if failure is not None:
        name, message = failure
        raise _BUILTIN_CLASSES[name](message) from error
    return decided


# ------------------------------------------------------------------ errors of other ranks

_BUILTIN_CLASSES: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        *(TypeError, ValueError, KeyError, IndexError, NotImplementedError, RuntimeError),
        *(FileNotFoundError, PermissionError, OSError),
    )
}


def _tried(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _builtin_class(error: Exception) -> type:
    """The nearest class of an error that exists on every rank."""
    known = _BUILTIN_CLASSES.values()
    return next((cls for cls in type(error).__mro__ if cls in known), type(error))


def _described(error: Exception | None) -> list[str] | None:
    """The class that is raised on all ranks, and the message."""
    if error is None:
        return None
    name = _builtin_class(error).__name__
    if name in _BUILTIN_CLASSES and name != "KeyError":  # which would show the repr of a message
        return [name, str(error)]
    return ["RuntimeError", f"{type(error).__name__}: {error}"]


def _together(errors: Sequence[list[str] | None], doing: str) -> list[str]:
    """One error for the errors of the ranks."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, described in enumerate(errors):
        if described is not None:
            ranks_of.setdefault((described[0], described[1]), []).append(rank)
    (name, message), ranks = next(iter(ranks_of.items()))
    if len(ranks) == len(errors):
        return [name, message]
    lines = [f"{name_ranks(ranks)}: {text}" for (_, text), ranks in ranks_of.items()]
    return [name, f"{doing} failed. " + "\n".join(lines)]


def _in_the_class_raised(disagreement: RanksDisagree) -> RanksDisagree:
    """So that ``except TypeError`` works on all ranks if a TypeError was raised on one."""
    for name, base in _BUILTIN_CLASSES.items():
        if any(view.startswith(f"raised {name}:") for view in disagreement.views):
            if base is ValueError:  # it is one
                return disagreement
            both = type(RanksDisagree.__name__, (RanksDisagree, base), {})
            found: RanksDisagree = both(str(disagreement), disagreement.views)
            return found
    return disagreement


# ------------------------------------------------------------------ comparing lines


def _require_equal(channel: Channel, doing: str, lines: Sequence[str]) -> None:
    mine = [_as_text(line) for line in (f"{doing}{channel.whose}", *lines)]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if len(set(channel.all_gather_bytes(digest))) > 1:
        raise difference(channel, mine)


def difference(channel: Channel, mine: Sequence[str], advice: str = ADVICE) -> RanksDisagree:
    """The error for all ranks when their messages of ``DIGEST_BYTES`` differ. Collective. The
    first line says what this rank is doing."""
    text = "\n".join(mine).encode() if channel.rank == 0 else None
    base = channel.broadcast_bytes(text, source=0).decode().split("\n")
    longest = max(len(mine), len(base))
    differing = (i for i in range(longest) if mine[i : i + 1] != base[i : i + 1])
    index = next(differing, _NOWHERE)
    lines = [*map(_Line.unpack, channel.all_gather_bytes(_packed_line(mine, index)))]
    first = min(place for place, *_ in lines)
    of_base = _Line.unpack(_packed_line(base, first))
    holders: dict[tuple[bytes, str], list[int]] = {}
    for rank, line in enumerate(lines):
        # A rank whose first difference comes later holds here what rank 0 holds.
        _, length, digest, shortened = line if line[0] == first else of_base
        holders.setdefault((digest, shortened[:length].decode()), []).append(rank)
    views = "".join(f"\n  {name_ranks(ranks)}: {text}" for (_, text), ranks in holders.items())
    about = f"while {base[0]}" if first > 0 else "about what to do next"
    return RanksDisagree(
        f"the ranks disagree {about}:{views}\n{advice}",
        [text for _, text in holders],
        first - 2 if first > 1 else None,
    )


def _as_text(line: str) -> str:
    """One line that can be sent, whatever is in it: a name may hold what no encoding knows."""
    return line.replace("\n", " ").encode(errors="backslashreplace").decode()


_TEXT_BYTES = 400
_NOWHERE = 2**31 - 1  # the lines are the same
# One line: its number, the length of its text in bytes, its digest and its text, shortened.
_Line = struct.Struct(f"<iH32s{_TEXT_BYTES}s")


def _packed_line(lines: Sequence[str], index: int) -> bytes:
    line = lines[index].encode() if index < len(lines) else b"nothing more"
    digest = hashlib.sha256(line).digest() if index < len(lines) else bytes(32)
    if len(line) > _TEXT_BYTES:
        line = (line[: _TEXT_BYTES - 3].decode(errors="ignore") + "...").encode()
    return _Line.pack(index, len(line), digest, line)


# ------------------------------------------------------------------ through the store

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
    doing: str
    explain_loss: Callable[[], str] | None = None  # what to raise if the store is lost
    is_decided: bool = False  # rank 0 has answered
    _beats: int = 0
    _last_beat: float = field(default_factory=time.monotonic)
    _pulse: threading.Thread | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)

    def beat(self) -> None:
        """A sign of life. Cheap: call it often. ``set`` does not wait for an answer, so a store
        that is stopped does not hold this up."""
        now = time.monotonic()
        if self.world_size > 1 and now - self._last_beat > _BEAT_SECONDS:
            self._last_beat = now
            self._beats += 1
            self.store.set(self._key("beat", self.rank), str(self._beats))

    @contextlib.contextmanager
    def signs_of_life(self) -> Iterator[None]:
        """Around a round. A thread counts in the store for as long as the process lives."""
        if self.world_size > 1:
            self._pulse = threading.Thread(target=self._count, name="onecopy-pulse", daemon=True)
            self._pulse.start()
        try:
            yield
        except StoreLost as error:
            if self.explain_loss is None:
                raise
            raise RuntimeError(self.explain_loss()) from error
        finally:
            self._end_pulse()

    def _count(self) -> None:
        number = 0
        # A store that is gone is found by whoever waits for something in it.
        with contextlib.suppress(RuntimeError):
            while not self._is_over.wait(_BEAT_SECONDS):
                number += 1
                self.store.set(self._key("pulse", self.rank), str(number))

    def _end_pulse(self) -> None:
        self._is_over.set()
        if self._pulse is not None and not is_silent(self.store):  # or it may wait there for ever
            self._pulse.join(_DEAD_SECONDS)
        self._pulse = None

    def gather(self, text: str) -> list[str] | None:
        """Rank 0 gets the texts of all ranks, in order; the others get None and go on."""
        if self.rank != 0:
            self._ask(self.store.set, self._key("report", self.rank), text)
            return None
        keys = {rank: self._key("report", rank) for rank in range(1, self.world_size)}
        self._wait_for(keys)
        return [text, *(self._ask(self._take, key) for key in keys.values())]

    def answer(self, text: str | None) -> str:
        """The text that rank 0 passes, on all ranks."""
        key = self._key("answer", 0)
        if self.rank != 0:
            self._wait_for({0: key})
        self._end_pulse()  # before the answer: its key must not come back after it was deleted
        if self.rank != 0:
            text = self._ask(self._take_answer, key)
        elif self.world_size > 1:
            self._ask(self.store.set, key, text)
        self.is_decided = True
        assert text is not None
        return text

    def _take_answer(self, key: str) -> str:
        found: str = self.store.get(key).decode()
        # The last rank to read it deletes all keys.
        if self.store.add(self._key("read", 0), 1) == self.world_size - 1:
            self.store.delete_key(key)
            self.store.delete_key(self._key("read", 0))
            for rank in range(self.world_size):
                self.store.delete_key(self._key("beat", rank))
                self.store.delete_key(self._key("pulse", rank))
        return found

    def _wait_for(self, keys: dict[int, str]) -> None:
        """Until each of these ranks has written its key."""
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
        """Note each sign of life of these ranks, and since when it has been what it is."""
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
                who = name_ranks(silent)
                raise RuntimeError(
                    f"no sign of life from {who} for {limit:.0f} s while {self.doing}"
                )

    def _ask(self, question: Callable[..., Any], *about: Any) -> Any:
        """Ask the store, which may be gone."""
        try:
            patience = max(self._limits["pulse"], _ANSWER_SECONDS)
            return ask_store(self.store, lambda: question(*about), patience)
        except RuntimeError as error:
            if is_interruption(error):
                raise
            raise StoreLost(f"{self.doing}: {error}") from error

    def _take(self, key: str) -> str:
        text: str = self.store.get(key).decode()
        self.store.delete_key(key)
        return text

    def _key(self, kind: str, rank: int) -> str:
        return f"onecopy/{self.token}/{kind}/{rank}"
