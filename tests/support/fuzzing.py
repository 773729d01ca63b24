"""Bad input by the thousand: what the fuzzing tests share.

A case hands over something drawn by hypothesis. It must be accepted, or refused as `judge` demands:

- with a documented class of exception: ValueError, TypeError, RuntimeError, OSError, or ours;
- on purpose: the innermost frame is a `raise` in the package. An error that the interpreter or
  torch raised somewhere below is an accident, whatever its class: its message cannot say which
  argument was wrong. Where `class_may_refuse`, because what is given is meant for the optimizer
  class that the caller chose, its own errors are as good: unsharded, it would raise the same;
- within `PATIENCE` seconds, and with no more than `MEMORY` bytes;
- with everything as it was: what to compare is the test's.

`make test` draws few cases, the same ones every time; `make fuzz` draws `ONECOPY_FUZZ` times as
many, others each time. Each test counts its cases in a `Tally`, each of them once, and the session
prints the sum.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import functools
import gc
import linecache
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from inside import TRIES_A_STEP

import onecopy

TIMES = int(os.environ.get("ONECOPY_FUZZ", "1"))
PATIENCE = 60  # seconds; a case takes milliseconds, but the machine may be busy
MEMORY = 2**31
COUNTS = "fuzzed cases"  # under which a test reports what it counted

PACKAGE = str(Path(onecopy.__file__).parent)
TESTS = str(Path(__file__).parents[1])
# The caller's choice runs here: the same arguments raise the same error unsharded.
OF_THE_CLASS = (str(Path(torch.optim.__file__).parent), TESTS)
# Refuses, on purpose, for us: with `error_if_nonfinite` an infinite norm.
OF_TORCH = (str(Path(torch.nn.utils.__file__).parent),)
DOCUMENTED = (ValueError, TypeError, RuntimeError, OSError)
ACCIDENTS = (LookupError, AttributeError, AssertionError, MemoryError, RecursionError)


def cases(count: int, shrinks: bool = True) -> Callable[[Any], Any]:
    """So many cases in `make test`."""
    return settings(
        max_examples=count * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, *[Phase.shrink] * shrinks),
        verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck),
    )


# ---------------------------------------- verdicts ----------------------------------------


class Wrong(AssertionError):
    """Neither accepted nor properly refused."""


class Refused(Exception):
    """Properly: the test has seen to that itself."""


@dataclass
class Tally:
    """What became of the cases of a test. It ends with its first wrong one: what hypothesis tries
    after that, to find a smaller one, does not count."""

    accepted: int = 0
    refused: int = 0
    wrong: int = 0
    stderr: int = 2  # where to tell of a hang
    _attempts: list[bool] = field(default_factory=list)  # of this case: whether it was accepted

    @contextlib.contextmanager
    def case(self) -> Iterator[None]:
        """All that belongs to one case, with what is asserted about it."""
        self._attempts = []
        try:
            yield
        except BaseException:
            self.wrong = 1
            raise
        if not self.wrong:
            self.accepted += all(self._attempts)
            self.refused += not all(self._attempts)

    def attempt(self, action: Callable[[], Any], *, class_may_refuse: bool = False) -> bool:
        """Whether it was accepted; `Wrong` if it was refused in a way that helps nobody."""
        try:
            with patience(stderr=self.stderr):
                action()
        except Wrong:
            raise
        except Refused:
            self._attempts.append(False)
        except Exception as error:
            judge(error, class_may_refuse=class_may_refuse)
            self._attempts.append(False)
        else:
            self._attempts.append(True)
        return self._attempts[-1]

    def tell(self, accepted: bool) -> None:
        """What another process has found, of this case."""
        self._attempts.append(accepted)

    def add(self, counts: list[int]) -> None:
        """Of cases that were tried in other processes."""
        self.accepted += counts[0]
        self.refused += counts[1]

    @property
    def counts(self) -> list[int]:
        return [self.accepted, self.refused, self.wrong]


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    # Why: pytest captures what goes to 2, and keeps another way out for faulthandler.
    found = Tally(stderr=request.config.stash.get(fault_handler_stderr_fd_key, 2))
    yield found
    request.node.user_properties.append((COUNTS, found.counts))


def summary(reports: list[Any]) -> str | None:
    """One line for a session; None if nothing was fuzzed."""
    # When a test has counted all; not of tests that were left out.
    done = [r for r in reports if getattr(r, "when", None) == "teardown"]
    counted = {r.nodeid: value for r in done for key, value in r.user_properties if key == COUNTS}
    if not counted:
        return None
    accepted, refused, wrong = (sum(column) for column in zip(*counted.values(), strict=True))
    failed = {r.nodeid for r in reports if getattr(r, "failed", False) and "test_fuzz" in r.nodeid}
    # Of a test that failed elsewhere than in a case; or with its process, which cannot count.
    wrong += sum(counted.get(each, [0, 0, 0])[2] == 0 for each in failed)
    total = f"{accepted + refused + wrong:,} cases"
    return f"fuzz: {total}: {accepted:,} accepted, {refused:,} refused, {wrong:,} wrong"


def judge(error: BaseException, *, class_may_refuse: bool) -> None:
    """Raise `Wrong` unless the error was raised on purpose, in a documented class."""
    frames = traceback.extract_tb(error.__traceback__)
    innermost = frames[-1]
    shown = f"{type(error).__name__}: {error}\n  at {innermost.filename}:{innermost.lineno}"
    is_of_class = _was_called(OF_THE_CLASS, frames) or innermost.name == "construct"
    if class_may_refuse and is_of_class:
        return  # the class itself, a call that it does not take, or the caller's own code
    if not isinstance(error, DOCUMENTED) or _is_accident(error):
        raise Wrong(f"not a documented exception: {shown}") from error
    if isinstance(error, OSError) and error.filename is not None:
        return  # an error of the file system that names the file
    ours = innermost.filename.startswith((PACKAGE, *OF_TORCH))
    if not ours or innermost.lineno not in _raises(innermost.filename):
        raise Wrong(f"raised by accident: {shown}") from error
    if isinstance(error.__cause__, Exception) and type(error) is RuntimeError:
        # Carried from another rank or thread.
        judge(error.__cause__, class_may_refuse=class_may_refuse)
    elif isinstance(error.__cause__, Exception) and innermost.name == TRIES_A_STEP:
        judge(error.__cause__, class_may_refuse=True)  # ours only in words


def _was_called(directories: tuple[str, ...], frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether code in these directories was, by the package: itself, or on the way to the error."""
    ours = [at for at, frame in enumerate(frames) if frame.filename.startswith(PACKAGE)]
    below = frames[ours[-1] + 1 :] if ours else frames[-1:]
    return any(frame.filename.startswith(directories) for frame in below)


def _is_accident(error: BaseException) -> bool:
    """Ours may inherit from KeyError and the like, because torch's class raises these."""
    is_ours = type(error).__module__.startswith("onecopy")
    return isinstance(error, ACCIDENTS) and not (is_ours and isinstance(error, DOCUMENTED))


@functools.cache
def _raises(filename: str) -> set[int]:
    """The lines of the statements that raise."""
    tree = ast.parse("".join(linecache.getlines(filename)))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}


@contextlib.contextmanager
def patience(seconds: int = PATIENCE, stderr: int = 2) -> Iterator[None]:
    """A hang is `Wrong`, with the stack where it hung. Interrupts a system call, too; a loop in C,
    which nothing interrupts, ends with its process."""

    def give_up(_: int, frame: Any) -> None:
        raise Wrong(f"no answer within {seconds} s:\n" + "".join(traceback.format_stack(frame)))

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------- surroundings ----------------------------------------


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of one in this process, and a limit to its memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Why: the first optimizer of a process imports what takes seconds and many objects.
    onecopy.ZeroRedundancyOptimizer([torch.ones(1)], torch.optim.SGD, lr=0.1).step()
    gc.collect()
    gc.freeze()  # a new optimizer looks for modules among all objects that are not frozen
    with memory_limited():
        yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    dist.destroy_process_group()


@contextlib.contextmanager
def memory_limited() -> Iterator[None]:
    """What a lie makes us allocate fails, and does not hurt the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def bits(tree: Any) -> Any:
    """Equal if and only if the trees are, to the bit; a tensor's memory and flags count, too."""
    if isinstance(tree, dict):
        return [(str(key), bits(value)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [bits(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return bits_of_tensor(tree)
    return repr(tree)


def bits_of_tensor(tensor: torch.Tensor) -> Any:
    form = str(tensor.dtype), tuple(tensor.shape), str(tensor.device), tensor.requires_grad
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return form
    resolved = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() > 2**20:
        return form, tensor.data_ptr()
    return form, tensor.stride(), resolved.contiguous().view(-1).view(torch.uint8).tolist()


# ---------------------------------------- junk ----------------------------------------


class Hostile:
    """An object that cannot be shown or compared."""

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no comparison")

    __hash__ = object.__hash__


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def deep(depth: int = 100_000) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


# Made when drawn, since a case may change what it is given.
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "0.5": lambda: 0.5,
    "-0.5": lambda: -0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1e308": lambda: 1e308,
    "2**70": lambda: 2**70,
    "-2**70": lambda: -(2**70),
    "10**5000": lambda: 10**5000,
    "complex": lambda: 1j,
    "text": lambda: "weights",
    "no text": lambda: "\ud800",
    "lines": lambda: "a\nb\0",
    "bytes": lambda: b"\xff",
    "list": list,
    "pair": lambda: (0.9, 0.999),
    "single": lambda: (0.9,),
    "dict": dict,
    "set": lambda: {1, 2},
    "function": lambda: print,
    "class": lambda: int,
    "dtype": lambda: torch.float32,
    "int dtype": lambda: torch.int32,
    "device": lambda: torch.device("cpu"),
    "scalar tensor": lambda: torch.tensor(0.1),
    "vector": lambda: torch.tensor([0.1, 0.2]),
    "meta tensor": lambda: torch.empty((), device="meta"),
    "Hostile": Hostile,
    "cyclic": cyclic,
    "deep": deep,
}
junk = st.sampled_from(sorted(VALUES)).map(lambda name: VALUES[name]())
