"""A progress bar on a terminal, for work that takes long. Silent everywhere else."""

from __future__ import annotations

import sys
import time

_PATIENCE_SECONDS = 2.0
_INTERVAL_SECONDS = 0.2
_WIDTH = 30


class Progress:
    """Bytes done of a total. A context manager; shows itself only if there is somebody to look."""

    def __init__(self, title: str, total: int, visible: bool = True) -> None:
        self._title = title
        self._total = max(total, 1)
        self._done = 0
        self._visible = visible and sys.stderr is not None and sys.stderr.isatty()
        self._next = time.monotonic() + _PATIENCE_SECONDS
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r" + " " * 79 + "\r", end="", file=sys.stderr, flush=True)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if self._visible and now >= self._next:
            self._next = now + _INTERVAL_SECONDS
            self._shown = True
            share = min(self._done / self._total, 1.0)
            bar = "#" * round(share * _WIDTH)
            text = f"{self._title} [{bar:<{_WIDTH}}] {share:4.0%} of {self._total / 1e6:.0f} MB"
            print(f"\r{text[:78]}", end="", file=sys.stderr, flush=True)
