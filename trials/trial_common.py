"""What soak.py and races.py share: bitwise comparison, a time limit for a step, and the summary."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable, Iterator

import torch

STEP_TIMEOUT = 300.0  # seconds for a step of models that take some milliseconds
# Seconds for a whole job: longer than any run, so that the limit of a step is met first.
JOB_TIMEOUTS = {"timeout": 7200.0, "pg_timeout": 14400.0}


@contextlib.contextmanager
def step_timeout(seconds: float = STEP_TIMEOUT) -> Iterator[Callable[[], None]]:
    """End this process, with the stacks of all its threads, if a step takes longer.

    Gives the function to call at every step, which starts the time anew. A limit for the whole job
    would depend on how busy the machine is."""

    def restart() -> None:
        faulthandler.dump_traceback_later(seconds, exit=True)

    restart()
    try:
        yield restart
    finally:
        faulthandler.cancel_dump_traceback_later()


def count_failures(failure: str) -> str:
    """For a summary: what the message of a failed job reports. It is empty if none failed."""
    differs = "Difference:" in failure
    hangs = "Timeout (" in failure and not differs  # what faulthandler prints
    errors = bool(failure) and not differs and not hangs
    return f"{int(differs)} differences, {int(hangs)} hangs, {int(errors)} errors"


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, element after element."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def have_equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape, device and all bits are equal. ``torch.equal`` differs: to it 0.0
    equals -0.0, and nan does not equal itself."""
    same_form = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
    return same_form and torch.equal(bits_of(a), bits_of(b))


def count_of_different_elements(a: torch.Tensor, b: torch.Tensor) -> int:
    """Of two tensors with the same dtype and shape."""
    differs = (bits_of(a) != bits_of(b)).view(-1, a.element_size())
    return int(differs.any(dim=1).sum())
