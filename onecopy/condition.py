"""What state an optimizer is in: ready, in a step, or torn by something that failed in the middle.

A step that raises before it has changed anything leaves a ready optimizer: it can be called again.
One that raises later leaves parameters of two ages, of which nothing good can come: the optimizer
says so at every use, until state is loaded. So does a load that was interrupted when there was no
way back.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator


class State(enum.Enum):
    READY = "ready"
    STEPPING = "stepping"  # and nothing has changed yet
    CHANGING = "changing"  # this rank's parameters, or what it holds of the others'
    TORN = "torn"  # a step has failed while it changed them, or a load at its end


class Condition:
    """The state, and the reason why an optimizer cannot be used."""

    def __init__(self) -> None:
        self.state = State.READY
        self._step = 0
        self._updated = self._buckets = 0
        self._refusal = ""

    @contextlib.contextmanager
    def stepping(self, step: int, buckets: int) -> Iterator[None]:
        """Around a step; ``changes`` and ``updated`` are to be called in it."""
        self.state, self._step, self._updated, self._buckets = State.STEPPING, step, 0, buckets
        try:
            yield
        except BaseException as error:
            if self.state is State.CHANGING:
                self._tear(
                    f"step {self._step} failed after {self._updated} of {self._buckets} buckets "
                    f"({_in_a_line(error)}): a part of the parameters and of the state is updated, "
                    "another is not. Load a checkpoint of the model and of the optimizer, on all "
                    "ranks"
                )
            else:
                self.state = State.READY
            raise
        self.state = State.READY

    def changes(self) -> None:
        """From here on there is no way back."""
        self.state = State.CHANGING

    def updated(self) -> None:
        """Another bucket has been updated."""
        self.state = State.CHANGING
        self._updated += 1

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around the end of a load, from which there is no way back. Then all is well again."""
        try:
            yield
        except BaseException as error:
            self._tear(
                f"loading has failed in the middle ({_in_a_line(error)}): a part of the state is "
                "the new one, another is not. Load again, on all ranks"
            )
            raise
        self.state = State.READY

    def _tear(self, refusal: str) -> None:
        self.state, self._refusal = State.TORN, refusal

    @property
    def refusal(self) -> str | None:
        """Why the optimizer cannot be used, and what helps."""
        return self._refusal if self.state is State.TORN else None

    def require_whole(self) -> None:
        """Raise if something has failed in the middle."""
        refusal = self.refusal
        if refusal is not None:
            raise RuntimeError(refusal)


def _in_a_line(error: BaseException) -> str:
    summary, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {summary}"
