"""Do all ranks hold the same? If not, the same error on every rank, naming the first difference.

What a rank is doing, and what it holds, is described by lines of text. Agreement costs one
all-gather of 32 bytes: the digest of the lines. Only when digests differ are lines exchanged: rank
0 shows all of its own, and every rank answers with the first line in which it differs. No pickle is
involved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

# Of the first message of whatever ranks do together. Why all of one size: gloo ends the process
# when messages of different sizes meet, and then nobody can tell what was wrong.
DIGEST_BYTES = 32
_TEXT_BYTES = 400
ADVICE = "Every rank must do the same here."
_SAME = -1


class Channel(Protocol):
    """The part of ``transport.Transport`` that agreement needs."""

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


def agree(channel: Channel, subject: str, prepare: Callable[[], Sequence[str]]) -> None:
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


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-2, 5".

    >>> name_ranks([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    ordered = sorted(ranks)
    runs = []
    for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        numbers = [rank for _, rank in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(runs)
