"""Arguments that are plain values: of the right type and in range, or an error that names them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from onecopy.words import shown


def check_environment(environment: Mapping[str, str]) -> None:
    asked = environment.get("ONECOPY_SHARED_MEMORY", "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"ONECOPY_SHARED_MEMORY={asked}: expected 0, 1, or nothing")


def forces_c10d(environment: Mapping[str, str]) -> bool:
    """Whether all communication uses the process group's own collectives, also on gloo."""
    asked = environment.get("ONECOPY_COMM", "")
    if asked not in ("", "auto", "c10d"):
        raise ValueError(f'ONECOPY_COMM={asked}: expected "auto", "c10d", or nothing')
    return asked == "c10d"


def checks_steps(environment: Mapping[str, str]) -> bool:
    """Whether all ranks are compared in every step."""
    asked = environment.get("ONECOPY_CHECK", "")
    if asked not in ("", "step"):
        raise ValueError(f'ONECOPY_CHECK={asked}: expected "step", or nothing')
    return asked == "step"


def check_options(check_every: Any, master_dtype: Any) -> None:
    if check_every is not None:
        if isinstance(check_every, bool) or not isinstance(check_every, int):
            raise TypeError(f"check_every must be a number of steps, got {shown(check_every)}")
        if check_every < 1:
            raise ValueError(
                f"check_every must be a positive number of steps, got {shown(check_every)}"
            )
    if not (master_dtype is None or master_dtype is torch.float32 or master_dtype is torch.float64):
        raise ValueError(
            f"master_dtype must be torch.float32, torch.float64 or None, got {shown(master_dtype)}"
        )


_MOST_MIB = 2**40  # an exbibyte


def check_bucket_mb(bucket_mb: Any) -> None:
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)):
        raise TypeError(f"bucket_mb must be a number of MiB, got {shown(bucket_mb)}")
    if not 0 < bucket_mb <= _MOST_MIB:
        raise ValueError(
            "bucket_mb must be a positive number of MiB, and no more than any machine has: got "
            f"{shown(bucket_mb)}"
        )


def check_switches(**switches: Any) -> None:
    """Why: the text "false" of some configuration would count as true."""
    for name, value in switches.items():
        if not isinstance(value, int):  # a bool is one
            raise TypeError(f"{name} must be True or False, got {shown(value)}")


def as_number(name: str, value: Any) -> float:
    """A number, or a tensor that holds one."""
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta
    if not isinstance(value, Real) and not is_scalar:
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    try:
        return float(value)
    except (OverflowError, RuntimeError, TypeError):  # too large, or a complex scalar
        raise ValueError(f"{name} must be a real number in range, got {shown(value)}") from None


def is_on(name: str, options: Mapping[str, Any]) -> bool:
    """Whether an option of the optimizer class that switches something is given, and on."""
    value = options.get(name)
    if value is not None:
        check_switches(**{name: value})
    return bool(value)


def check_names(names: Any, count: int) -> None:
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) != count:
        raise ValueError(
            f'"param_names" of a group must list a name for each of its {count} parameters, got '
            f"{shown(names)}"
        )
