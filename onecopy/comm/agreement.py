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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from onecopy.comm.waiting import ask_store, is_interruption, is_silent
from onecopy.planning.text import name_ranks

# The length of the first message of anything that ranks do together. Why one length: gloo ends the
# process when messages of different lengths meet, and then nobody can tell what was wrong.
DIGEST_BYTES = 32
ADVICE = "Every rank must do the same here."


class Channel(Protocol):
    """Collectives of small messages."""

    rank: int
    world_size: int
    whose: str  # names the optimizer, if a process group has several

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
            lines = [f"{doing}{channel.whose}", "prepared without an error", *value]
        else:
            lines = [f"{doing}{channel.whose}", f"raised {_builtin_class(error).__name__}: {error}"]
        mine = [_as_text(line) for line in lines]
        digests = channel.all_gather_bytes(hashlib.sha256("\n".join(mine).encode()).digest())
        disagreement = difference(channel, mine) if len(set(digests)) > 1 else None
        if error is not None:
            raise error
        if disagreement is not None:
            raise _in_the_class_raised(disagreement)
        return None
    with channel.signs_of_life():
        value, error = _tried(work)
        try:
            reports = channel.gather(_as_json(value, error))
        except StoreLost:
            raise
        except RuntimeError as silence:  # rank 0 gives a rank up, and tells the others
            if channel.rank == 0 and not is_interruption(silence):
                channel.answer(_as_json(None, silence))
            raise
        decision = None
        if reports is not None:
            decision = _as_json(*_tried(lambda: decide(_results(reports, doing))))
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


def _as_json(value: Any, error: Exception | None) -> str:
    """A result; or the class that is raised on all ranks in its place, and the message."""
    if error is None:
        return json.dumps([value, None])
    name = _builtin_class(error).__name__
    if name in _BUILTIN_CLASSES and name != "KeyError":  # which would show the repr of a message
        return json.dumps([None, [name, str(error)]])
    return json.dumps([None, ["RuntimeError", f"{type(error).__name__}: {error}"]])


def _results(reports: Sequence[str], doing: str) -> list[Any]:
    """The results of all ranks, or one error for the errors of the ranks."""
    results, errors = zip(*map(json.loads, reports), strict=True)
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, error in enumerate(errors):
        if error is not None:
            ranks_of.setdefault((error[0], error[1]), []).append(rank)
    if not ranks_of:
        return list(results)
    (name, message), ranks = next(iter(ranks_of.items()))
    if len(ranks) < len(errors):
        lines = [f"{name_ranks(ranks)}: {text}" for (_, text), ranks in ranks_of.items()]
        message = f"{doing} failed. " + "\n".join(lines)
    raise _BUILTIN_CLASSES[name](message)


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
    _pulse: threading.Thread | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)

    def beat(self) -> None:
        """The main thread goes on. Cheap: call it often."""
        self._beats += 1

    @contextlib.contextmanager
    def signs_of_life(self) -> Iterator[None]:
        """Around a round: a thread tells others that the process lives, and what beats it had."""
        if self.world_size > 1:
            self._pulse = threading.Thread(target=self._tell, name="onecopy-pulse", daemon=True)
            self._pulse.start()
        try:
            yield
        except StoreLost as error:
            if self.explain_loss is None:
                raise
            raise RuntimeError(self.explain_loss()) from error
        finally:
            self._end_pulse()

    def _tell(self) -> None:
        number = 0
        # A store that is gone is found by whoever waits for something in it.
        with contextlib.suppress(RuntimeError):
            while not self._is_over.wait(_BEAT_SECONDS):
                number += 1
                self.store.set(self._key("life", self.rank), f"{number} {self._beats}")

    def _end_pulse(self) -> None:
        self._is_over.set()
        if self._pulse is not None and not is_silent(self.store):  # or it may wait there for ever
            self._pulse.join(_DEAD_SECONDS)
        self._pulse = None

    def gather(self, text: str) -> list[str] | None:
        """Rank 0 gets the texts of all ranks, in order; the others get None and go on."""
        if self.rank != 0:
            self._ask(lambda: self.store.set(self._key("report", self.rank), text))
            return None
        keys = {rank: self._key("report", rank) for rank in range(1, self.world_size)}
        self._wait_for(keys)
        return [text, *self._ask(lambda: [self.store.get(key).decode() for key in keys.values()])]

    def answer(self, text: str | None) -> str:
        """The text that rank 0 passes, on all ranks."""
        key = self._key("answer", 0)
        if self.rank != 0:
            self._wait_for({0: key})
        self._end_pulse()  # before the answer: its key must not come back after it was deleted
        if self.rank != 0:
            text = self._ask(lambda: self._take_answer(key))
        elif self.world_size > 1:
            self._ask(lambda: self.store.set(key, text))
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
                self.store.delete_key(self._key("report", rank))
                self.store.delete_key(self._key("life", rank))
        return found

    def _wait_for(self, keys: dict[int, str]) -> None:
        """Until each of these ranks has written its key."""
        seen: dict[tuple[int, int], tuple[str, float]] = {}  # signs of life, and since when
        start = next_check = time.monotonic()
        while keys and not self._ask(lambda: self.store.check([*keys.values()])):
            now = time.monotonic()
            if now >= next_check:
                self._require_signs_of_life(keys, seen)
                next_check = now + _BEAT_SECONDS
            self.beat()
            time.sleep(min(max(_SHORTEST_NAP, _NAP_SHARE * (now - start)), _LONGEST_NAP))

    def _require_signs_of_life(
        self, keys: dict[int, str], seen: dict[tuple[int, int], tuple[str, float]]
    ) -> None:
        """Of the ranks that have not written their keys. What changes is a sign."""

        def read(rank: int) -> str:
            key = self._key("life", rank)
            return self.store.get(key).decode() if self.store.check([key]) else "0 0"

        lives: dict[int, str] = self._ask(
            lambda: {rank: read(rank) for rank, key in keys.items() if not self.store.check([key])}
        )
        now = time.monotonic()
        for part, limit in enumerate((self._dead_seconds, self.patience)):
            silent = []
            for rank, life in lives.items():
                sign = life.split()[part]
                if seen.setdefault((rank, part), (sign, now))[0] != sign:
                    seen[rank, part] = (sign, now)
                if now - seen[rank, part][1] > limit:
                    silent.append(rank)
            if silent:
                raise RuntimeError(
                    f"no sign of life from {name_ranks(silent)} for {limit:.0f} s while "
                    f"{self.doing}"
                )

    @property
    def _dead_seconds(self) -> float:
        return min(self.patience, _DEAD_SECONDS)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Ask the store, which may be gone."""
        try:
            return ask_store(self.store, question, max(self._dead_seconds, _ANSWER_SECONDS))
        except RuntimeError as error:
            if is_interruption(error):
                raise
            raise StoreLost(f"{self.doing}: {error}") from error

    def _key(self, kind: str, rank: int) -> str:
        return f"onecopy/{self.token}/{kind}/{rank}"
