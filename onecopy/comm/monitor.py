"""Rank status in the store, the report of missing ranks, and the end of a failed group."""

from __future__ import annotations

import contextlib
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

from onecopy.comm.agreement import Channel, RanksDisagree, StoreChannel, same_outcome
from onecopy.comm.waiting import (
    NoAnswer,
    ask_store,
    is_interruption,
    is_silent,
    never_destroy,
    root_of,
    wait_interruptibly,
)
from onecopy.planning.text import name_ranks
from onecopy.torch_private import is_process_group_alive, set_timeout, store_of, timeout_of

ANSWER_WITHIN = 5.0  # seconds
REPORT_WITHIN = 10.0  # seconds, with the roll call
_GRACE = 0.5  # seconds that ranks get to answer once it is known who has raised
_REMEMBERED = 8  # places: ranks that do different things fail before they have got so far
_COUNTED = 32  # optimizers, those used last: a note stays short, however many there are
_ADVICE = (
    "\nAll ranks must call the same methods in the same order. Set ONECOPY_CHECK=step to find the "
    "first difference at once, without waiting for a timeout"
)
_ALL_ANSWERED = "all ranks are there, so the connection was lost, or they send different things"
_REPORT = "onecopy/report"


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
    rank: int
    world_size: int
    optimizers: int = 0  # built so far: the same on all ranks
    attachments: int = 0  # of optimizers, so far: the same on all ranks
    failure: str = ""  # why the group is of no use any more
    timeout: timedelta | None = None  # of our own group; None if it is not known
    count: int = 0  # of notes
    place: str = ""  # what the rank is doing
    last: str = ""  # the same, maybe in more detail
    clock: str = ""  # when the last note was made
    places: list[str] = field(default_factory=list)  # the last ones, this one included, as JSON
    counts: dict[int, int] = field(default_factory=dict)  # by optimizer; the last one used is last
    has_written_error: bool = False  # which is there until it is erased
    writes_errors_only: bool = field(init=False)

    def __post_init__(self) -> None:
        # A file keeps everything that was ever written to it: it would grow with every step.
        self.writes_errors_only = type(root_of(self.store)).__name__ == "FileStore"

    def write(
        self,
        text: str,
        same_place: bool = False,
        is_error: bool = False,
        optimizer: int = 0,
        is_joined: bool = False,
    ) -> None:
        """``same_place`` only adds detail: the rank is no further than before. ``is_error``: this
        rank raises, and others may wait for it. ``is_joined``: other ranks write another text.

        Many times a step, so by the thread that calls, though a store may be stopped. Why that is
        no wait: a store is written to without an answer. If nobody reads, that goes on until the
        buffers of the connection are full, thousands of notes later; a group to which the process
        that hosts the store belongs has come to the timeout of a collective long before. (Of a
        group to which it does not belong, a rank might come to wait here.) Only an open question
        keeps the connection from others; then there is nobody to tell.
        """
        if not same_place:
            self.count += 1
            self.place = text
            number = self.counts[optimizer] = self.counts.pop(optimizer, 0) + 1
            place = json.dumps([optimizer, number, text, is_joined])  # once: notes are frequent
            self.places = [*self.places[1 - _REMEMBERED :], place]
        self.last = text
        self.clock = time.strftime("%H:%M:%S")
        if self.store is None or self.world_size == 1 or is_silent(self.store):
            return
        if is_error or not self.writes_errors_only:
            written = self._as_text()
        elif self.has_written_error:
            written = ""  # the rank goes on
        else:
            return
        self.has_written_error = is_error
        with contextlib.suppress(RuntimeError):  # without a store, training goes on
            self.store.set(self._key(self.rank), written)

    def _as_text(self) -> str:
        counts = list(itertools.islice(reversed(self.counts.items()), _COUNTED))
        return "\n".join([json.dumps([self.count, self.clock, self.last, counts]), *self.places])

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
        alone = self._seen_from_here(ended)
        if self.store is None or self.world_size == 1:
            return alone
        try:
            report: str = ask_store(self.store, lambda: self._agreed(ended, alone), REPORT_WITHIN)
        except NoAnswer as error:
            return f"{alone}; {error}"
        return report

    def _seen_from_here(self, ended: Sequence[int]) -> str:
        if ended:
            return f"a collective failed: {name_ranks(ended)} ended. This one was last {self.last}"
        reason = "; where the others are is not known: their process group has no store"
        is_known = self.store is not None or self.world_size == 1
        return f"a collective failed on rank {self.rank}: {self.last}{'' if is_known else reason}"

    def _agreed(self, ended: Sequence[int], found: str) -> str:
        """The report of the first rank; ``found`` if the store goes down with its host."""
        with contextlib.suppress(RuntimeError, NotImplementedError):
            if self.writes_errors_only:
                self.store.set(self._key(self.rank), self._as_text())
            self.store.set(_answer_of(self.rank), "here")
            if not self.store.check([_REPORT]):
                if self.writes_errors_only:
                    self._await_answers()
                found = self._describe([*map(self._read, range(self.world_size))], ended)
                self.store.compare_set(_REPORT, "", found)
            found = self.store.get(_REPORT).decode()
        return found

    def _await_answers(self) -> list[int]:
        """Wait until all ranks have come to the same end as this one: those that wait for a lost
        rank learn of it at about the same time. The ranks that have not."""
        until = time.monotonic() + ANSWER_WITHIN
        answers = [_answer_of(rank) for rank in range(self.world_size)]
        while not self.store.check(answers):
            silent = [rank for rank, key in enumerate(answers) if not self.store.check([key])]
            now = time.monotonic()
            if now > until:
                return silent
            if self.writes_errors_only and any(self._read(r) is not _NOT_KNOWN for r in silent):
                until = min(until, now + _GRACE)
            time.sleep(0.05)
        return []

    def _describe(self, seen: Sequence[_Status], ended: Sequence[int]) -> str:
        not_known = [rank for rank, status in enumerate(seen) if status is _NOT_KNOWN]
        missing = _ranks_behind(seen)
        places: dict[tuple[int, str], list[int]] = {}
        for rank, status in enumerate(seen):
            places.setdefault((status.number, status.text), []).append(rank)
        views = "".join(
            f"\n  {name_ranks(ranks)}: {text}{seen[ranks[0]].since}"
            for (_, text), ranks in places.items()
        )
        advice = ""
        if ended:  # living ranks that wait for these may have done less, or something else
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
            try:
                silent = self._await_answers()
                who = _no_answer_from(silent) if silent else _ALL_ANSWERED
            except RuntimeError:  # it goes down with the rank that hosts it
                who = "one was lost, and with it the store that would tell which"
        else:
            who = "the ranks are doing different things, or one was lost"
        return f"a collective failed: {who}. Last seen:{views}{advice}"

    def _read(self, rank: int) -> _Status:
        key = self._key(rank)
        found = self.store.get(key).decode() if self.store.check([key]) else ""
        if not found:
            return _NOT_KNOWN if self.writes_errors_only else _NEVER_SEEN
        head, *lines = found.split("\n")
        number, clock, text, counts = json.loads(head)
        places = [_Place(*json.loads(line)) for line in lines]
        return _Status(number, text, f", since {clock}", places, dict(counts))

    def _key(self, rank: int) -> str:
        return f"onecopy/{rank}"


def _answer_of(rank: int) -> str:
    return f"onecopy/failed/{rank}"


def _no_answer_from(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} did not answer: lost, stopped, or still waiting"


# ------------------------------------------------------------------ comparing what ranks did


class _Status(NamedTuple):
    number: int  # how many notes the rank has written
    text: str
    since: str = ""
    places: Sequence[_Place] = ()  # what the rank did last
    counts: Mapping[int, int] = {}  # how many notes it has written, by optimizer

    def count_of(self, optimizer: int) -> float:
        """Infinite if it is not known: the optimizer was not among the last ones used."""
        return self.counts.get(optimizer, 0 if len(self.counts) < _COUNTED else math.inf)


_NEVER_SEEN = _Status(0, "never seen")
_NOT_KNOWN = _Status(0, "not known: with a file store ranks say where they are only if they raise")


def _ranks_behind(seen: Sequence[_Status]) -> list[int]:
    """Those that have done less than another rank with at least one optimizer, and not more with
    any."""
    distinct = {(each.number, *sorted(each.counts.items())): each for each in seen}.values()
    return [
        rank
        for rank, status in enumerate(seen)
        if status is not _NOT_KNOWN
        and any(
            status.number < other.number
            and all(number <= other.count_of(each) for each, number in status.counts.items())
            for other in distinct
        )
    ]


def _first_difference(seen: Sequence[_Status]) -> str:
    """Where the ranks first did different things with an optimizer, unless all of them have done
    the same thing afterwards.

    Why: after that the numbers of notes say nothing. A rank that has written fewer may be right.
    """
    places_of: dict[int, dict[int, dict[int, _Place]]] = {}  # by optimizer, number and rank
    for rank, status in enumerate(seen):
        for place in status.places:
            places_at = places_of.setdefault(place.optimizer, {})
            places_at.setdefault(place.number, {})[rank] = place
    for _, places_at in sorted(places_of.items()):
        ranks = {rank for places in places_at.values() for rank in places}
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
        optimizer: min(status.count_of(optimizer) for status in seen)
        for optimizer in {place.optimizer for status in seen for place in status.places}
    }
    places: dict[int, _Place] = {}
    for rank, status in enumerate(seen):
        for place in status.places:
            if place.number > everywhere[place.optimizer]:
                places.setdefault(rank, place)
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


# ------------------------------------------------------------------ the monitor of an optimizer

# Shared by all optimizers of a group.
_statuses: weakref.WeakKeyDictionary[Any, RankStatus] = weakref.WeakKeyDictionary()


def do_nothing() -> None:
    """A callback for which nothing is registered."""


class GroupMonitor:
    """The members of the user's process group, and the group of our own in which they meet."""

    def __init__(self, user_group: Any, waits_on_cpu: bool = True) -> None:
        """``waits_on_cpu``: to wait blocks the thread."""
        self.user_group = self.group = user_group  # as long as there is no private group
        self.rank = dist.get_rank(user_group)
        self.world_size = dist.get_world_size(user_group)
        self._waits_on_cpu = waits_on_cpu
        status = _statuses.get(user_group)
        if status is None:
            status = RankStatus(store_of(user_group), self.rank, self.world_size)
            _statuses[user_group] = status
        self.status = status
        self.number = status.optimizers  # of this optimizer: the same on all ranks
        # Which optimizer of the process group this is; of the first, nothing is said.
        self.whose = f" (optimizer {self.number + 1} of the process group)" * (self.number > 0)
        self.compares_in: Channel | None = None  # ONECOPY_CHECK=step
        self.when_disagreeing: Callable[[], None] = do_nothing
        # Of memory that local ranks share, if they do: which of them have ended, and to let it go.
        self.ended_local_ranks: Callable[[], list[int]] = list
        self.abandon_shared_memory: Callable[[], object] = list
        self.note("building an optimizer")

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupMonitor:
        return self

    # ------------------------------------------------------------------ who is where

    def enter(self, what: str) -> None:
        """Something begins that all ranks do together: a note of it, and with
        ``ONECOPY_CHECK=step`` a comparison of what the ranks are about to do."""
        self.note(what)
        if self.compares_in is not None:
            try:
                same_outcome(self.compares_in, what, list)
            except RanksDisagree:
                self.when_disagreeing()  # on all ranks
                raise

    def note(
        self,
        text: str,
        same_place: bool = False,
        is_error: bool = False,
        is_joined: bool = False,
    ) -> None:
        """Tell the store where this rank is, for the error message of a rank that waits for it."""
        if not same_place:
            text = f"{text}{self.whose}"
            self._follow_timeout()
        self.status.write(text, same_place, is_error, self.number, is_joined)

    def _follow_timeout(self) -> None:
        """Give our own group the timeout that the user has set on theirs in the meantime."""
        if self.group is self.user_group or not is_process_group_alive(self.user_group):
            return
        timeout = timeout_of(self.user_group)
        if timeout is not None and timeout != self.status.timeout:
            set_timeout(self.group, timeout)
            self.status.timeout = timeout

    def add_to_note(self, detail: str) -> None:
        """Where exactly in it this rank is."""
        self.note(f"{self.status.place}: {detail}", same_place=True)

    @contextlib.contextmanager
    def noting_errors(self, where: str = "") -> Iterator[None]:
        """An exception of this rank alone: the others will wait for it, and are told why."""
        try:
            yield
        except RanksDisagree:
            raise
        except Exception as error:
            if not self.status.failure:
                place = where or self.status.place
                text = f"{place} raised {type(error).__name__}: {error}"
                self.note(text, same_place=True, is_error=True)
            raise

    def exchange(self, token: str, what: str) -> StoreChannel:
        """A round of reports through the store, outside of collectives. If the store is lost, that
        is as a collective that fails: nobody can tell how the round ends."""
        self.note(what)
        store, size = store_of(self.user_group), self.world_size
        return StoreChannel(store, self.rank, size, token, self.patience(), what, self._report)

    # ------------------------------------------------------------------ waiting for them

    def patience(self) -> float:
        """Seconds that a collective waits; the user may change them at any time."""
        return (timeout_of(self.user_group) or timedelta(minutes=30)).total_seconds()

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
        if self.status.failure:  # each of many operations would wait for its own timeout
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
            report = self.status.report(self.ended_local_ranks())
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
            if not self.status.failure:
                self._give_up(f"{type(error).__name__} came while this rank was {doing}: {error}")
            raise

    def _give_up(self, reason: str) -> None:
        self.status.failure = reason
        self.abandon_shared_memory()
        never_destroy(self.group)

    @property
    def refusal(self) -> str | None:
        """Why there can be no communication, if so."""
        if self.status.failure:
            return (
                f"the process group is of no use any more, because {self.status.failure}\nStart "
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


class Handle:
    """Communication in flight. It holds its tensors, so that their memory is not reused before."""

    def __init__(self, monitor: GroupMonitor, works: Sequence[Any], tensors: Sequence[object]):
        self._monitor, self._works, self._tensors = monitor, works, tensors

    def wait(self) -> None:
        """Return once the tensors may be read and written (on accelerators: in stream order)."""
        self._monitor.wait_for(self._works)
        self._works = self._tensors = ()
