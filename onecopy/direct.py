"""A file that is written past the page cache, where the system can.

A checkpoint is written once and hardly ever read by the machine that wrote it. Through the cache it
costs memory for as long as it is dirty, drives out what the data loader needs, and is slow when
that memory has to be found first. Directly, blocks go from one small buffer to the disk.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Any

_BUFFER_BYTES = 8 * 2**20
_BLOCK_BYTES = 4096  # what direct writes must be multiples of, in length, place and memory


class DirectFile:
    """A new file, written from start to end. A context manager; durable when it is left."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # begins at a page
        self._filled = 0
        self._flushed = 0
        self._is_direct = hasattr(os, "O_DIRECT")
        try:
            self._handle = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError:
            if path.exists() and path.stat().st_size:
                raise
            path.unlink(missing_ok=True)  # some systems make the file before they refuse
            self._handle = os.open(path, flags, 0o666)
            self._is_direct = False

    def tell(self) -> int:
        return self._flushed + self._filled

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            room = min(_BUFFER_BYTES - self._filled, len(view) - done)
            self._buffer[self._filled : self._filled + room] = view[done : done + room]
            self._filled += room
            done += room
            if self._filled == _BUFFER_BYTES:
                self._flush_buffer(_BUFFER_BYTES)
        return done

    def flush(self) -> None:
        """Nothing: blocks are written when they are full, the last when the file is closed."""

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                length = self.tell()
                self._flush_buffer(-(-self._filled // _BLOCK_BYTES) * _BLOCK_BYTES)
                os.ftruncate(self._handle, length)
                os.fsync(self._handle)
        finally:
            os.close(self._handle)

    def _flush_buffer(self, nbytes: int) -> None:
        done = 0
        with memoryview(self._buffer) as view:
            while done < nbytes:
                done += self._write_some(view[done:nbytes])
        self._flushed += self._filled
        self._filled = 0

    def _write_some(self, view: memoryview) -> int:
        try:
            return os.write(self._handle, view)
        except OSError:
            if not self._is_direct:
                raise
            self._go_on_through_the_cache()
            return os.write(self._handle, view)

    def _go_on_through_the_cache(self) -> None:
        """For file systems that open a file for direct writes and then refuse them, and for what
        is left after a write that ended within a block."""
        import fcntl

        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_direct = False
