"""Where each rank was last seen, kept in the c10d store for the error messages of the others.

A note costs microseconds and no collective. When a collective fails because a rank is missing,
every rank that waited reads the notes and raises the same error: who was where. If all were at the
same place, the notes do not tell who is missing: then the ranks on which it failed answer a roll
call, and whoever does not is lost, or stopped, or still waits.

The process that hosts the store may be the one that is lost. If it has ended, the store says so; if
it is stopped, or its machine is, the store says nothing at all, so a report has a deadline.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from onecopy.agreement import name_ranks
from onecopy.waiting import NoAnswer, ask, is_silent


@dataclass(slots=True)
class Notes:
    """Where each rank was last seen, kept in the store of the user's group."""

    store: Any
    lobby: Lobby
    rank: int
    world_size: int
    count: int = 0
    place: str = ""  # what the rank is doing
    last: str = ""  # the same, maybe in more detail
    failure: str = ""  # why the group is of no use any more

    def write(self, text: str, same_place: bool = False) -> None:
        """``same_place`` only adds detail: the rank is no further than before."""
        if not same_place:
            self.count += 1
            self.place = text
        self.last = text
        if self.world_size > 1:
            clock = time.strftime("%H:%M:%S")
            _tell(self.store, self._key(self.rank), f"{self.count}|{clock}|{text}")

    def building(self, is_over: bool = False) -> None:
        """An optimizer is built: tell ranks of other process groups, too, which may wait for this
        one by mistake."""
        if self.world_size > 1:
            self.lobby.write("" if is_over else self.lobby.group)

    def take_back(self, text: str) -> None:
        """What the last note has said did not come to pass."""
        self.count -= 1
        self.write(text, same_place=True)

    def report(self, ended: Sequence[int] = ()) -> str:
        """Who is missing, and where everybody was; without a store, where this rank was, and which
        of those that it can see have ended.

        The first rank to ask writes it down for all: what the others do afterwards, or when they
        come to ask, changes nothing, and every rank shows the same. A group in which a collective
        has failed is of no use any more, so there is one report for all times.
        """
        if self.store is None or self.world_size == 1:
            return self._without_store(ended)
        try:
            report = ask(self.store, functools.partial(self._agreed, ended), REPORT_WITHIN)
        except NoAnswer as error:
            return f"{self._without_store(ended)}; {error}"
        assert isinstance(report, str)
        return report

    def _agreed(self, ended: Sequence[int]) -> str:
        with contextlib.suppress(RuntimeError):
            self.store.set(_answer_of(self.rank), "here")
            if self.store.check([_REPORT]):
                return str(self.store.get(_REPORT).decode())
        seen = self._read()
        found = self._without_store(ended) if seen is None else self._describe(seen, ended)
        try:
            kept: str = self.store.compare_set(_REPORT, "", found).decode()
        except (RuntimeError, NotImplementedError):  # it went down with the rank that hosts it
            return found
        return kept

    def _without_store(self, ended: Sequence[int]) -> str:
        if ended:
            return f"a collective failed: {name_ranks(ended)} ended. This one was last {self.last}"
        return f"a collective failed on rank {self.rank}: {self.last}"

    def _describe(self, seen: Sequence[_Note], ended: Sequence[int]) -> str:
        furthest = max(note.number for note in seen)
        missing = [rank for rank, note in enumerate(seen) if note.number < furthest]
        places: dict[tuple[int, str], list[int]] = {}
        for rank, note in enumerate(seen):
            places.setdefault((note.number, note.text), []).append(rank)
        views = "".join(
            f"\n  {name_ranks(ranks)}: {text}{seen[ranks[0]].since}"
            for (_, text), ranks in places.items()
        )
        strayed = [rank for rank in missing if seen[rank].is_elsewhere]
        if strayed:
            who = "the ranks build optimizers for different process groups"
        elif missing:
            who = f"{name_ranks(missing)} did not arrive"
        elif ended:
            who = f"{name_ranks(ended)} ended"
        elif len(places) == 1:
            who = self._call_the_roll()
        else:
            who = "the ranks are doing different things, or one was lost"
        return f"a collective failed: {who}. Last seen:{views}"

    def _call_the_roll(self) -> str:
        """Who has not come to the same end as this rank, if all were at the same place. Those that
        wait for a lost rank learn of it at about the same time."""
        answers = [_answer_of(rank) for rank in range(self.world_size)]
        patience = time.monotonic() + ANSWER_WITHIN
        try:
            while not self.store.check(answers):
                if time.monotonic() > patience:
                    silent = [r for r, key in enumerate(answers) if not self.store.check([key])]
                    return f"{name_ranks(silent)} did not answer: lost, stopped, or still waiting"
                time.sleep(0.05)
        except RuntimeError:  # it goes down with the rank that hosts it
            return "one was lost, and with it the store that would tell which"
        return "all ranks are there, so the connection was lost, or they send different things"

    def _read(self) -> list[_Note] | None:
        """The notes of all ranks, if the store is still there."""
        try:
            seen = [self._read_one(self._key(rank)) for rank in range(self.world_size)]
            if _NEVER_SEEN not in seen:
                return seen
            return [
                self.lobby.read(rank) or note if note.number <= 1 else note
                for rank, note in enumerate(seen)
            ]
        except RuntimeError:  # it went down with the rank that hosts it
            return None

    def _read_one(self, key: str) -> _Note:
        if not self.store.check([key]):
            return _NEVER_SEEN
        number, clock, text = self.store.get(key).decode().split("|", 2)
        return _Note(int(number), text, f", since {clock}")

    def _key(self, rank: int) -> str:
        return f"onecopy/{rank}"


class _Note(NamedTuple):
    number: int  # how many notes the rank has written: the same on ranks that are level
    text: str
    since: str
    is_elsewhere: bool = False  # it builds an optimizer for another process group


@dataclass(frozen=True, slots=True)
class Lobby:
    """For which process group each rank of the job builds an optimizer: in the store of the
    default group, where ranks of all groups look."""

    store: Any
    group: str  # this one, as others know it
    members: Sequence[int]  # its ranks in the job

    @classmethod
    def of(cls, group: Any) -> Lobby:
        members = dist.get_process_group_ranks(group)
        name = f"{group.group_name} of {name_ranks(members)} of the job"
        everybody = dist.group.WORLD
        store = None if everybody is None else _store_for_notes(everybody)
        return cls(store, name, members)

    def write(self, group: str) -> None:
        _tell(self.store, self._key(dist.get_rank()), f"{time.strftime('%H:%M:%S')}|{group}")

    def read(self, rank: int) -> _Note | None:
        """Of a rank of this group."""
        key = self._key(self.members[rank])
        if self.store is None or not self.store.check([key]):
            return None
        clock, group = self.store.get(key).decode().split("|", 1)
        if not group:
            return None
        text = f"building an optimizer for process group {group}"
        is_elsewhere = group != self.group
        return _Note(0 if is_elsewhere else 1, text, f", since {clock}", is_elsewhere)

    @staticmethod
    def _key(member: int) -> str:
        return f"onecopy/building/{member}"


def _tell(store: Any, key: str, text: str) -> None:
    """Many times a step, so by the thread that calls, though a store may be stopped.

    Why that is no wait: a store is written to without an answer. If nobody reads, that goes on
    until the buffers of the connection are full, thousands of notes later; a group to which the
    process that hosts the store belongs has come to the timeout of a collective long before. (Of a
    group to which it does not belong, a rank might come to wait here.) Only an open question keeps
    the connection from others; then there is nobody to tell.
    """
    if store is not None and not is_silent(store):
        # A note is for diagnosis: without a store, training goes on.
        with contextlib.suppress(RuntimeError):
            store.set(key, text)


ANSWER_WITHIN = 5.0  # seconds
REPORT_WITHIN = 10.0  # seconds, with the roll call
_REPORT = "onecopy/report"
_NEVER_SEEN = _Note(0, "never seen", "")


def _answer_of(rank: int) -> str:
    return f"onecopy/failed/{rank}"


# Shared by all optimizers of a group: the order of their steps is part of being level.
_notes: weakref.WeakKeyDictionary[Any, Notes] = weakref.WeakKeyDictionary()


def notes_of(group: Any) -> Notes:
    notes = _notes.get(group)
    if notes is None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        notes = Notes(_store_for_notes(group), Lobby.of(group), rank, world_size)
        _notes[group] = notes
    return notes


def store_of(group: Any) -> Any:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    # Releases before 2.7 keep the store beside the group.
    return dist.distributed_c10d._world.pg_map.get(group, (None, None))[1]


def _store_for_notes(group: Any) -> Any:
    store = underlying = store_of(group)
    while hasattr(underlying, "underlying_store"):
        underlying = underlying.underlying_store
    # A file store only ever grows.
    return None if type(underlying).__name__ == "FileStore" else store
