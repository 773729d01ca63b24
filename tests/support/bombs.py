"""Pickles of a few bytes that take for ever to hash, to print or to free, or all of the memory; and
processes of their own in which they go off, for tests/checkpoint/test_safe_pickle.py.

Such a process may neither take long nor much: a loop in C can be ended by nothing else.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzzing import MEMORY

from onecopy.checkpoint.safe_pickle import DamagedCheckpoint

PATIENCE = 15  # seconds; what is refused takes some milliseconds, but may be a million deep
PRIME = 2**61 - 1  # whose multiples all have the same hash


# ------------------------------------------------------------------------------- the bombs
# Instructions that leave one object on the stack.


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data


def put(at: int) -> bytes:
    return b"r" + (10**6 + at).to_bytes(4, "little")


def get(at: int) -> bytes:
    return b"j" + (10**6 + at).to_bytes(4, "little")


def doubled_tuple(times: int = 60) -> bytes:
    return b")" + b"".join(put(i) + get(i) + b"\x86" for i in range(times))


def doubled(empty: bytes, fill: Callable[[bytes], bytes], times: int = 60) -> bytes:
    """Lists or dicts, each of which has the one before twice; in a tuple."""
    levels = (empty + put(i) + fill(get(i - 1)) for i in range(1, times))
    return b"(" + empty + put(0) + b"".join(levels) + b"t"


DEEP = 100_000
BOMBS: dict[str, bytes] = {
    "a doubled tuple": doubled_tuple(),
    "a tuple doubled by DUP": b")" + b"2\x86" * 60,
    "a deep tuple": b")" + b"\x85" * DEEP,
    "a deep list": b"]" * DEEP + b"a" * (DEEP - 1),
    "a deep dict": (b"}" + text("a")) * DEEP + b"N" + b"s" * DEEP,
    "doubled lists": doubled(b"]", lambda x: b"(" + x + x + b"e"),
    "doubled dicts": doubled(b"}", lambda x: b"(" + text("a") + x + text("b") + x + b"u"),
    "a list in itself": b"]" + put(0) + get(0) + b"a",
    "a list twice in itself": b"]" + put(0) + b"(" + get(0) + get(0) + b"e",
    "a dict in itself": b"}" + put(0) + text("a") + get(0) + b"s",
    "a text of 2**60 bytes": b"\x8d" + (2**60).to_bytes(8, "little") + b"abc",
    "bytes of 2**40": b"\x8e" + (2**40).to_bytes(8, "little") + b"abc",
    "a bytearray of 2**40": b"\x96" + (2**40).to_bytes(8, "little") + b"abc",
    "a number of 2**31 bytes": b"\x8b" + (2**31 - 1).to_bytes(4, "little") + b"abc",
    "a number of a megabyte": b"\x8b" + (2**20).to_bytes(4, "little") + b"\x7f" * 2**20,
    "a number of a million digits": b"L" + b"9" * 10**6 + b"L\n",
    "numbers of one hash": b"}("
    + b"".join(number(k * PRIME) + b"N" for k in range(100_000))
    + b"u",
    "a long text many times": text("x" * 10**6) + put(0) + b"(" + get(0) * 10**5 + b"t\x86",
    "bytes by the terabyte": b"cbuiltins\nbytearray\n" + number(2**40) + b"\x85R",
    "a tensor of a terabyte": b"ctorch\nFloatTensor\n" + number(2**38) + b"\x85R",
    "many copies of a long list": b"ctorch\nSize\n"
    + put(0)
    + b"]("
    + b"N" * 30_000
    + b"e"
    + put(1)
    + b"("
    + (get(0) + get(1) + b"\x85R") * 30_000
    + b"t",
    "many objects with many attributes": b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    + put(0)
    + b"}("
    + b"".join(text(f"a{i}") + b"N" for i in range(10**4))
    + b"u"
    + put(1)
    + b"("
    + (get(0) + b")R" + get(1) + b"b") * 30_000
    + b"t",
}
AS_KEY = {
    f"{name}, as a key": b"}" + bomb + b"Ns"
    for name, bomb in BOMBS.items()
    if name.startswith(("a doubled", "a deep", "a list", "a number of a megabyte", "a long"))
}
ALL = {**BOMBS, **AS_KEY}


# ------------------------------------------------------------------------------- apart


@contextlib.contextmanager
def limited() -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PATIENCE)
    yield


def refused_apart(action: Callable[[], Any]) -> str:
    """What a process of its own says that tries it: that it was refused, or what became of it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(read)
            with limited():
                try:
                    action()
                    said = "accepted"
                except DamagedCheckpoint as error:
                    said = "refused" if len(str(error)) < 5000 else "refused with a long message"
                except BaseException as error:
                    said = f"{type(error).__name__}: {str(error)[:200]}"
                os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        said = answer.read().decode()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return said if code == 0 else f"ended by {signal.Signals(-code).name} after {said!r}"


def each_refused(actions: dict[str, Callable[[], Any]], *, may_pass: bool = False) -> None:
    start = time.monotonic()
    found = {name: refused_apart(action) for name, action in actions.items()}
    fine = {"refused", "accepted"} if may_pass else {"refused"}
    wrong = {name: said for name, said in found.items() if said not in fine}
    assert not wrong
    assert time.monotonic() - start < 10 * PATIENCE
