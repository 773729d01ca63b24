"""A rank that makes no progress says where all its threads are, and ends.

Time limits for a whole job would have to know how busy the machine is; this one starts anew with
every step that is made.
"""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable, Iterator

PATIENCE = 300.0  # seconds for a step of models that take some milliseconds
FOREVER = {"timeout": 7200.0, "pg_timeout": 14400.0}  # seconds: the watchdog comes first


@contextlib.contextmanager
def watchdog(patience: float = PATIENCE) -> Iterator[Callable[[], None]]:
    """Gives what is to be called at every step."""

    def progress() -> None:
        faulthandler.dump_traceback_later(patience, exit=True)

    progress()
    try:
        yield progress
    finally:
        faulthandler.cancel_dump_traceback_later()


def verdict(failure: str) -> str:
    """What went wrong, for a summary: the message of a failed job, or nothing."""
    differs = "Difference:" in failure
    hangs = "Timeout (" in failure and not differs  # what faulthandler prints
    errors = bool(failure) and not differs and not hangs
    return f"{int(differs)} differences, {int(hangs)} hangs, {int(errors)} errors"
