"""The ranks of a process group as one optimizer counts on them: where each is, and what if one does
not come.

Each rank keeps a note of where it is in the c10d store. Whatever waits for other ranks does so in
``naming_absentees``: when a collective fails because a rank is missing, every other rank reads the
notes and raises the same error: who was where. From then on the group is of no use, and everything
that needs it refuses at once with the same words, instead of waiting for a timeout of its own.

What is said here goes through the store. Collectives are in ``transport.py``; but to make the group
of our own is one, too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from onecopy.agreement import RanksDisagree
from onecopy.exchange import Exchange
from onecopy.groups import DEFAULT_PATIENCE, private_group, timeout
from onecopy.hosts import Hosts
from onecopy.neighbours import Neighbourhood
from onecopy.notes import notes_of
from onecopy.torch_private import is_process_group_alive, store_of
from onecopy.waiting import is_interruption, keep_for_ever, wait_interruptibly

_attachments: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by group
_optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by group


class Company:
    """The members of the user's process group, and the group of our own in which they meet."""

    def __init__(
        self, user_group: Any, greatest: Callable[[int], int], waits_on_cpu: bool = True
    ) -> None:
        """Collective: ``greatest`` tells the greatest number of all ranks. ``waits_on_cpu``: to
        wait blocks the thread. It is complete when the neighbours are found: see ``meet``."""
        self.user_group = user_group
        self.rank = dist.get_rank(user_group)
        self.world_size = dist.get_world_size(user_group)
        self.number = _optimizers.get(user_group, 0)  # of the optimizer: the same on all ranks
        self._waits_on_cpu = waits_on_cpu
        self._notes = notes_of(user_group)
        self.note("building an optimizer")
        self._notes.building()
        # None are known yet.
        self.neighbours = Neighbourhood(self.rank, Hosts.apart(self.world_size))
        self.group = user_group  # as long as there is no other
        with self.naming_absentees():
            self.group = private_group(user_group, greatest)

    def meet(self, neighbours: Neighbourhood) -> None:
        """All ranks have come, and know who is on the same host."""
        self.neighbours = neighbours
        self._notes.building(is_over=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Company:
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

    def exchange(self, token: str, what: str) -> Exchange:
        """A round of reports through the store, outside of collectives. If the store is lost, that
        is as a collective that fails: nobody can tell how the round ends."""
        self.note(what)
        store = store_of(self.user_group)
        size, patience = self.world_size, self.patience()
        return Exchange(store, self.rank, size, token, patience, what, self._report)

    # ------------------------------------------------------------------ waiting for them

    def patience(self) -> float:
        """Seconds that a collective waits; the user may change them at any time."""
        return (timeout(self.user_group) or DEFAULT_PATIENCE).total_seconds()

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
            report = self._notes.report(self.neighbours.ended())
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
        self.neighbours.abandon()
        keep_for_ever(self.group)

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
