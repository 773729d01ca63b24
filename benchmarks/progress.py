"""A long program's manners: it shows how far it is, and cleans up however it ends."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from types import TracebackType

_WIDTH = 24


@contextlib.contextmanager
def ends_by_exception() -> Iterator[None]:
    """Let `kill` and a closed terminal end the program as Ctrl-C does: it cleans up behind it."""

    def stop(*_: object) -> None:
        sys.exit("terminated")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Progress:
    """A bar on a terminal; a line per job elsewhere, so that logs stay readable.

    ``tick(text)`` is called before each of ``total`` pieces of work.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._start = time.monotonic()
        self._is_live = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        if not self._is_live:
            print(f"measuring {self._name}", file=sys.stderr, flush=True)
        return self

    def tick(self, text: str) -> None:
        if self._is_live:
            full = _WIDTH * self._done // max(1, self._total)
            seconds = time.monotonic() - self._start
            bar = "#" * full + "." * (_WIDTH - full)
            line = f"[{bar}] {self._name}, {seconds:.0f} s: {text}"
            print(f"\r\x1b[2K{line[:118]}", end="", file=sys.stderr, flush=True)
        self._done += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
