"""Rank status in the store, the report of missing ranks, and the end of a failed group."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onecopy.comm.agreement import RanksDisagree, StoreChannel
from onecopy.comm.waiting import (
    NoAnswer,
    ask_store,
    is_interruption,
    is_silent,
    never_destroy,
    wait_interruptibly,
)
from onecopy.planning.text import name_ranks
from onecopy.torch_private import is_process_group_alive, process_group_timeout, store_of


class _Place(NamedTuple):
    """What a rank did, and when, counted per optimizer."""

    optimizer: int
    number: int  # of the note among those of this optimizer
    text: str
    is_joined: bool  # the rank has no inputs left and follows the others under another name


@dataclass(slots=True)
class RankStatus:
    """Where each rank was last seen, kept in the store of the user's group."""

    store: Any
    lobby: Lobby
    rank: int
    world_size: int
    count: int = 0
    place: str = ""  # what the rank is doing
    places: list[str] = field(default_factory=list)  # the last ones, this one included, as JSON
    counts: dict[int, int] = field(default_factory=dict)  # by optimizer; the last one used is last
    last: str = ""  # the same, maybe in more detail
    failure: str = ""  # why the group is of no use any more
    writes_errors_only: bool = False  # the store would grow with every step
    has_written_error: bool = False  # which is there until it is erased
    clock: str = ""  # when the last note was made

    def write(
        self,
        text: str,
        same_place: bool = False,
        is_error: bool = False,
        optimizer: int = 0,
        is_joined: bool = False,
    ) -> None:
        """``same_place`` only adds detail: the rank is no further than before. ``is_error``: this
        rank raises, and others may wait for it. ``is_joined``: other ranks write another text."""
        if not same_place:
            self.count += 1
            self.place = text
            number = self.counts[optimizer] = self.counts.pop(optimizer, 0) + 1
            place = json.dumps([optimizer, number, text, is_joined])  # once: notes are frequent
            self.places = [*self.places[1 - _REMEMBERED :], place]
        self.last = text
        self.clock = time.strftime("%H:%M:%S")
        if self.world_size == 1:
            return
        if is_error or not self.writes_errors_only:
            _tell(self.store, self._key(self.rank), self._as_text())
            self.has_written_error = is_error
        elif self.has_written_error:  # the rank goes on
            _tell(self.store, self._key(self.rank), "")
            self.has_written_error = False

    def _as_text(self) -> str:
        counts = list(itertools.islice(reversed(self.counts.items()), _COUNTED))
        return "\n".join([json.dumps([self.count, self.clock, self.last, counts]), *self.places])

    def building(self, is_over: bool = False) -> None:
        """An optimizer is built: tell ranks of other process groups, too, which may wait for this
        one by mistake."""
        if self.world_size > 1:
            self.lobby.write("" if is_over else self.lobby.group)

    def take_back(self, text: str) -> None:
        """What the last note has said did not come to pass."""
        self.count -= 1
        self.counts[_Place(*json.loads(self.places.pop())).optimizer] -= 1
        self.write(text, same_place=True, is_error=True)

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
            report = ask_store(self.store, functools.partial(self._agreed, ended), REPORT_WITHIN)
        except NoAnswer as error:
            return f"{self._without_store(ended)}; {error}"
        assert isinstance(report, str)
        return report

    def _agreed(self, ended: Sequence[int]) -> str:
        with contextlib.suppress(RuntimeError):
            self.store.set(_answer_of(self.rank), "here")
            if self.store.check([_REPORT]):
                return str(self.store.get(_REPORT).decode())
            if self.writes_errors_only:
                self.store.set(self._key(self.rank), self._as_text())
                self._await_notes()
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
        reason = "; where the others are is not known: their process group has no store"
        is_alone = self.store is not None or self.world_size == 1
        return f"a collective failed on rank {self.rank}: {self.last}{'' if is_alone else reason}"

    def _await_notes(self) -> None:
        """Until all ranks have written where they are, or one of them why it does not come. Those
        that wait for a lost rank learn of it at about the same time."""
        patience = time.monotonic() + ANSWER_WITHIN
        while time.monotonic() < patience:
            seen = [self._read_one(self._key(rank)) for rank in range(self.world_size)]
            received = [note for note in seen if note is not _NOT_KNOWN]
            if len(received) == len(seen):
                return
            if any(note.number < self.count for note in received):
                patience = min(patience, time.monotonic() + _GRACE)
            time.sleep(0.05)

    def _describe(self, seen: Sequence[_Status], ended: Sequence[int]) -> str:
        not_known = [rank for rank, note in enumerate(seen) if note is _NOT_KNOWN]
        missing = _ranks_behind(seen)
        places: dict[tuple[int, str], list[int]] = {}
        for rank, note in enumerate(seen):
            places.setdefault((note.number, note.text), []).append(rank)
        views = "".join(
            f"\n  {name_ranks(ranks)}: {text}{seen[ranks[0]].since}"
            for (_, text), ranks in places.items()
        )
        elsewhere = [rank for rank in missing if seen[rank].is_elsewhere]
        advice = ""
        if elsewhere:
            who = "the ranks build optimizers for different process groups"
        elif ended:  # living ranks that wait for these may have done less, or something else
            has = "did not arrive" if set(ended) <= set(missing) else "ended"
            who = f"{name_ranks(ended)} {has}"
        elif difference := _first_difference(seen):
            who, advice = difference, _ADVICE
        elif missing:
            who = f"{name_ranks(missing)} did not arrive"
        elif not_known:
            who = _no_answer_from(not_known)
        elif difference := _difference_in_order(seen):
            who, advice = difference, _ADVICE
        elif len(places) == 1:
            who = self._call_the_roll()
        else:
            who = "the ranks are doing different things, or one was lost"
        return f"a collective failed: {who}. Last seen:{views}{advice}"

    def _call_the_roll(self) -> str:
        """Who has not come to the same end as this rank, if all were at the same place. Those that
        wait for a lost rank learn of it at about the same time."""
        answers = [_answer_of(rank) for rank in range(self.world_size)]
        patience = time.monotonic() + ANSWER_WITHIN
        try:
            while not self.store.check(answers):
                if time.monotonic() > patience:
                    silent = [r for r, key in enumerate(answers) if not self.store.check([key])]
                    return _no_answer_from(silent)
                time.sleep(0.05)
        except RuntimeError:  # it goes down with the rank that hosts it
            return "one was lost, and with it the store that would tell which"
        return "all ranks are there, so the connection was lost, or they send different things"

    def _read(self) -> list[_Status] | None:
        """The notes of all ranks, if the store is still there."""
        try:
            seen = [self._read_one(self._key(rank)) for rank in range(self.world_size)]
            if _NEVER_SEEN not in seen and _NOT_KNOWN not in seen:
                return seen
            return [
                self.lobby.read(rank) or note if note.number <= 1 else note
                for rank, note in enumerate(seen)
            ]
        except RuntimeError:  # it went down with the rank that hosts it
            return None

    def _read_one(self, key: str) -> _Status:
        found = self.store.get(key).decode() if self.store.check([key]) else ""
        if not found:
            return _NOT_KNOWN if self.writes_errors_only else _NEVER_SEEN
        head, *lines = found.split("\n")
        number, clock, text, counts = json.loads(head)
        places = [_Place(*json.loads(line)) for line in lines]
        return _Status(number, text, f", since {clock}", places=places, counts=dict(counts))

    def _key(self, rank: int) -> str:
        return f"onecopy/{rank}"


class _Status(NamedTuple):
    number: int  # how many notes the rank has written
    text: str
    since: str
    is_elsewhere: bool = False  # it builds an optimizer for another process group
    places: Sequence[_Place] = ()  # what the rank did last
    counts: Mapping[int, int] = {}  # how many notes it has written, by optimizer

    def is_behind(self, other: _Status) -> bool:
        """Whether the other rank is further in at least one optimizer and this one in none."""
        return self.number < other.number and all(
            number <= other.count_of(optimizer) for optimizer, number in self.counts.items()
        )

    def count_of(self, optimizer: int) -> float:
        """Infinite if it is not known: the optimizer was not among the last ones used."""
        return self.counts.get(optimizer, 0 if len(self.counts) < _COUNTED else math.inf)


def _ranks_behind(seen: Sequence[_Status]) -> list[int]:
    """Those that have done less than another rank, and nothing that this one has not done."""
    distinct = {(note.number, *sorted(note.counts.items())): note for note in seen}.values()
    return [
        rank
        for rank, note in enumerate(seen)
        if note is not _NOT_KNOWN and any(note.is_behind(other) for other in distinct)
    ]


def _first_difference(seen: Sequence[_Status]) -> str:
    """Where the ranks first did different things with an optimizer, unless all of them have done
    the same thing afterwards.

    Why: after that the numbers of notes say nothing. A rank that has written fewer may be right.
    """
    for optimizer in sorted({place.optimizer for note in seen for place in note.places}):
        places_at: dict[int, dict[int, _Place]] = {}  # by number and rank
        ranks = set()
        for rank, note in enumerate(seen):
            for place in note.places:
                if place.optimizer == optimizer:
                    places_at.setdefault(place.number, {})[rank] = place
                    ranks.add(rank)
        difference = ""
        for _, places in sorted(places_at.items()):
            differs_here = _difference_between(places)
            unjoined = [place for place in places.values() if not place.is_joined]
            if not differs_here and len(places) == len(ranks) and len(unjoined) > 1:
                difference = ""
            difference = difference or differs_here
        if difference:
            return difference
    return ""


def _difference_in_order(seen: Sequence[_Status]) -> str:
    """What the ranks do that not all have done yet, if they differ: they have called several
    optimizers in different orders, or one of them on some ranks only."""
    everywhere = {
        optimizer: min(note.count_of(optimizer) for note in seen)
        for optimizer in {place.optimizer for note in seen for place in note.places}
    }
    places = {}
    for rank, note in enumerate(seen):
        ahead = (place for place in note.places if place.number > everywhere[place.optimizer])
        place = next(ahead, None)
        if place is not None:
            places[rank] = place
    return _difference_between(places)


def _difference_between(places: Mapping[int, _Place]) -> str:
    """Between what these ranks did."""
    ranks_at: dict[str, list[int]] = {}
    for rank, place in places.items():
        if not place.is_joined:
            ranks_at.setdefault(place.text, []).append(rank)
    if len(ranks_at) < 2:
        return ""
    # The fewest are most probably wrong; of two equally many, those that took a step.
    (odd, ranks), *others = sorted(
        ranks_at.items(), key=lambda at: (len(at[1]), not at[0].startswith("in step"))
    )
    they = name_ranks(rank for _, who in others for rank in who)
    rest = " or ".join(f'"{place}"' for place, _ in others)
    return f'{name_ranks(ranks)} did something else than {they} ("{odd}", not {rest})'


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
        store = None if everybody is None else store_of(everybody)
        return cls(store, name, members)

    def write(self, group: str) -> None:
        _tell(self.store, self._key(dist.get_rank()), f"{time.strftime('%H:%M:%S')}|{group}")

    def read(self, rank: int) -> _Status | None:
        """Of a rank of this group."""
        key = self._key(self.members[rank])
        if self.store is None or not self.store.check([key]):
            return None
        clock, group = self.store.get(key).decode().split("|", 1)
        if not group:
            return None
        text = f"building an optimizer for process group {group}"
        is_elsewhere = group != self.group
        return _Status(0 if is_elsewhere else 1, text, f", since {clock}", is_elsewhere)

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


_REMEMBERED = 8  # places: ranks that do different things fail before they have got so far
_COUNTED = 32  # optimizers, those used last: a note stays short, however many there are
_ADVICE = (
    "\nAll ranks must call the same methods in the same order. Set ONECOPY_CHECK=step to find the "
    "first difference at once, without waiting for a timeout"
)
ANSWER_WITHIN = 5.0  # seconds
_GRACE = 0.5  # seconds that ranks get to answer once it is known who has raised
REPORT_WITHIN = 10.0  # seconds, with the roll call
_REPORT = "onecopy/report"
_NEVER_SEEN = _Status(0, "never seen", "")
_NOT_WRITTEN = "not known: with a file store ranks say where they are only if they raise"
_NOT_KNOWN = _Status(0, _NOT_WRITTEN, "")


def _no_answer_from(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} did not answer: lost, stopped, or still waiting"


def _answer_of(rank: int) -> str:
    return f"onecopy/failed/{rank}"


# Shared by all optimizers of a group.
_statuses: weakref.WeakKeyDictionary[Any, RankStatus] = weakref.WeakKeyDictionary()


def rank_status_of(group: Any) -> RankStatus:
    notes = _statuses.get(group)
    if notes is None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        store = store_of(group)
        notes = RankStatus(
            store, Lobby.of(group), rank, world_size, writes_errors_only=_grows(store)
        )
        _statuses[group] = notes
    return notes


def _grows(store: Any) -> bool:
    """Whether the store keeps everything that was ever written to it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return type(store).__name__ == "FileStore"


def timeout(group: Any) -> timedelta | None:
    """The group's own timeout; None, torch's default, where the backend does not tell."""
    device = dist.get_backend_config(group).partition(":")[0]
    return process_group_timeout(group, torch.device(device))


_attachments: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by group
_optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by group


class GroupMonitor:
    """The members of the user's process group, and the group of our own in which they meet."""

    def __init__(self, user_group: Any, waits_on_cpu: bool = True) -> None:
        """``waits_on_cpu``: to wait blocks the thread."""
        self.user_group = user_group
        self.rank = dist.get_rank(user_group)
        self.world_size = dist.get_world_size(user_group)
        self.number = _optimizers.get(user_group, 0)  # of the optimizer: the same on all ranks
        self._waits_on_cpu = waits_on_cpu
        self._notes = rank_status_of(user_group)
        self.note("building an optimizer")
        self._notes.building()
        # Of memory that local ranks share, if they do: which of them have ended, and to let it go.
        self.ended_local_ranks: Callable[[], list[int]] = list
        self.abandon_shared_memory: Callable[[], object] = list
        self.group = user_group  # as long as there is no private group

    def meet(self) -> None:
        """All ranks have come."""
        self._notes.building(is_over=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupMonitor:
        return self

    # ------------------------------------------------------------------ which optimizer it is

    @property
    def whose(self) -> str:
        """Which optimizer of the process group this is; of the first, nothing is said."""
        return f" (optimizer {self.number + 1} of the process group)" if self.number else ""

    def count_optimizer(self) -> None:
        """An optimizer was built, and all ranks know of it."""
        _optimizers[self.user_group] = self.number + 1

    @property
    def attachments(self) -> int:
        """How many optimizers of this group were attached so far: the same on all ranks."""
        return _attachments.get(self.user_group, 0)

    def count_attachment(self) -> None:
        _attachments[self.user_group] = self.attachments + 1

    # ------------------------------------------------------------------ who is where

    def note(
        self,
        text: str,
        same_place: bool = False,
        is_error: bool = False,
        is_joined: bool = False,
    ) -> None:
        """Tell the store where this rank is, for the error message of a rank that waits for it."""
        text = text if same_place else f"{text}{self.whose}"
        self._notes.write(text, same_place, is_error, self.number, is_joined)

    def add_to_note(self, detail: str) -> None:
        """Where exactly in it this rank is."""
        self.note(f"{self._notes.place}: {detail}", same_place=True)

    def take_back(self, text: str) -> None:
        """The last note was of something that did not come to pass."""
        self._notes.take_back(text)

    @contextlib.contextmanager
    def noting_errors(self, where: str = "") -> Iterator[None]:
        """An exception of this rank alone: the others will wait for it, and are told why."""
        try:
            yield
        except RanksDisagree:
            raise
        except Exception as error:
            if not self._notes.failure:
                place = where or self._notes.place
                text = f"{place} raised {type(error).__name__}: {error}"
                self.note(text, same_place=True, is_error=True)
            raise

    def exchange(self, token: str, what: str) -> StoreChannel:
        """A round of reports through the store, outside of collectives. If the store is lost, that
        is as a collective that fails: nobody can tell how the round ends."""
        self.note(what)
        store = store_of(self.user_group)
        size, patience = self.world_size, self.patience()
        return StoreChannel(store, self.rank, size, token, patience, what, self._report)

    # ------------------------------------------------------------------ waiting for them

    def patience(self) -> float:
        """Seconds that a collective waits; the user may change them at any time."""
        return (timeout(self.user_group) or timedelta(minutes=30)).total_seconds()

    def wait_for(self, works: Sequence[Any]) -> None:
        with self.naming_absentees():
            if self._waits_on_cpu:
                wait_interruptibly(works)
            else:
                for work in works:
                    work.wait()

    @contextlib.contextmanager
    def naming_absentees(self) -> Iterator[None]:
        """Around whatever needs the others: if it fails, all ranks raise who was where."""
        if self._notes.failure:  # each of many operations would wait for its own timeout
            self.require_working()
        try:
            yield
        except torch.OutOfMemoryError:
            raise  # says what it is, and the others have nothing to do with it
        except BaseException as error:
            if is_interruption(error) or not isinstance(error, Exception):
                self._give_up(_interrupted(error))  # what was under way is abandoned
            elif isinstance(error, RuntimeError):
                raise RuntimeError(self._report()) from error
            raise

    def _report(self) -> str:
        """Who was where; the last thing that this group does."""
        try:
            report = self._notes.report(self.ended_local_ranks())
        except BaseException as error:  # of a signal handler: to ask may take some seconds
            self._give_up(_interrupted(error))
            raise
        self._give_up(report)
        return report

    @contextlib.contextmanager
    def or_give_up(self, doing: str) -> Iterator[None]:
        """Around what the others count on, and what cannot be done a second time: if it is
        interrupted, this rank can never be level with them again."""
        try:
            yield
        except BaseException as error:
            if not self._notes.failure:
                self._give_up(f"{type(error).__name__} came while this rank was {doing}: {error}")
            raise

    def _give_up(self, reason: str) -> None:
        self._notes.failure = reason
        self.abandon_shared_memory()
        never_destroy(self.group)

    @property
    def refusal(self) -> str | None:
        """Why there can be no communication, if so."""
        if self._notes.failure:
            return (
                f"the process group is of no use any more, because {self._notes.failure}\nStart "
                "the job again from a checkpoint; or destroy_process_group(), "
                "init_process_group(...) and build the optimizer anew"
            )
        if not is_process_group_alive(self.group) or not is_process_group_alive(self.user_group):
            return (
                "the process group of this optimizer was destroyed. Destroy it when training is "
                "over, or build another optimizer with the new one"
            )
        return None

    def require_working(self) -> None:
        refusal = self.refusal
        if refusal is not None:
            raise RuntimeError(refusal)


def _interrupted(by: BaseException) -> str:
    return f"{type(by).__name__} came while this rank waited for the others"
