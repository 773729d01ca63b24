"""Pickles that nobody trusts: read without running anything, in time and memory of their size.

A pickle is a program. Besides code that it may name, a few bytes of it build what takes for ever to
hash, to compare or to print: a tuple of the same tuple twice, sixty times over, or one a million
deep. So ``SafeUnpickler`` follows only the instructions that a checkpoint needs; a key is text, a
number or a few of them; a name stands for a class that keeps what it is given; and ``plain_value``
makes of the result what it stands for, up to limits on depth and on sharing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from onecopy.planning.text import shown

_DEEPEST = 100
_SHARING = 16  # how often on average what is written once may be used
_LIGHT = 2**16  # bytes; what is less than this may be used as often as it likes
_MOST_ARGUMENTS = 64  # of a call, attributes of a record, numbers in a key
_LARGEST_KEY = 2**60  # beyond, many integers have the same hash


class DamagedCheckpoint(ValueError):
    """A checkpoint that cannot be read, and why."""


class Refused(ValueError):
    """What is wrong with a pickle. Whoever reads it says where it is."""


_NEEDED = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
)


class _Instructions(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise Refused(
            f"a pickle that does what no checkpoint needs (instruction {code:#x}): refused"
        )


# The one in Python: that in C reserves memory for as many objects as a damaged file may claim.
_Unpickler: Any = pickle._Unpickler


def _instruction(name: str) -> Any:
    """What follows an instruction: a check of what it is about to be done to, if it has one."""
    follow, check = _Unpickler.dispatch[getattr(pickle, name)[0]], _CHECKS.get(name)
    if check is None:
        return follow

    def checked(unpickler: SafeUnpickler) -> None:
        check(unpickler)
        follow(unpickler)

    return checked


def _require_keys(keys: list[Any], classes: tuple[type, ...]) -> None:
    for key in keys:
        if not isinstance(key, classes) and not is_key(key):
            what = type(key).__name__
            raise Refused(f"a pickle that has a {what} of its own for a key: refused")


def _require_call(unpickler: SafeUnpickler) -> None:
    function, args = unpickler.stack[-2:]
    if not isinstance(function, type):
        raise Refused("a pickle that calls what cannot be called: refused")
    if type(args) is not tuple or len(args) > _MOST_ARGUMENTS:
        raise Refused("a pickle that makes a call with too much: refused")


def _require_record(unpickler: SafeUnpickler) -> None:
    if not isinstance(unpickler.stack[-2], Record):
        raise DamagedCheckpoint("a pickle that changes what it is read with: refused")


_CHECKS: dict[str, Callable[[SafeUnpickler], None]] = {
    "SETITEM": lambda unpickler: _require_keys(unpickler.stack[-2:-1], unpickler.keys),
    "SETITEMS": lambda unpickler: _require_keys(unpickler.stack[::2], unpickler.keys),
    "REDUCE": _require_call,
    "NEWOBJ": _require_call,
    "BUILD": _require_record,
}


class SafeUnpickler(_Unpickler):  # type: ignore[misc]
    """Follows the instructions that ``pickle`` and ``torch.save`` write for plain data. What a name
    stands for is said by the subclass: classes only, which keep what they are given."""

    dispatch = _Instructions({getattr(pickle, name)[0]: _instruction(name) for name in _NEEDED})
    keys: tuple[type, ...] = ()  # classes of keys, beside plain values


def is_key(key: Any) -> bool:
    """Whether a plain value is hashed at once, and as others are not."""
    if type(key) is tuple:
        return len(key) <= _MOST_ARGUMENTS and all(type(k) is not tuple and is_key(k) for k in key)
    if type(key) is int:
        return -_LARGEST_KEY < key < _LARGEST_KEY
    return key is None or type(key) in (str, float, bool)


class Record:
    """Stands in for any class: keeps what was pickled, does nothing."""

    def __setstate__(self, state: Any) -> None:
        state = state if isinstance(state, dict) else {"state": state}
        if len(state) > _MOST_ARGUMENTS:
            raise Refused("a pickle of an object with too many attributes: refused")
        self.__dict__.update(state)


class Inert:
    """Stands in for a function: gives back what it is called with."""

    __slots__ = ()

    def __new__(cls, *args: Any) -> Any:
        return args[0] if len(args) == 1 else args


class Called(tuple[Any, ...]):
    """Stands in for a function that makes a value: keeps the arguments for ``plain_value``."""

    make: Callable[..., Any]

    def __new__(cls, *args: Any) -> Called:
        return super().__new__(cls, args)


def called(make: Callable[..., Any]) -> type[Called]:
    return type("Called", (Called,), {"make": staticmethod(make)})


def plain_value(tree: Any, nbytes: int, leaf: Callable[[Any], Any]) -> Any:
    """What a pickle of so many bytes stands for. ``leaf`` makes a value of what is not plain.

    Why limits: whoever hashes, compares or prints the value looks at all of it, as often as it is
    used, and in as many calls as it is deep.
    """
    left = _LIGHT + _SHARING * nbytes

    def made(tree: Any, depth: int) -> Any:
        nonlocal left
        left -= 1 + _length(tree) // 8
        if left < 0:
            raise Refused(f"a pickle of {nbytes} bytes that grows when it is looked at: refused")
        if depth > _DEEPEST:
            raise Refused(f"a pickle that is nested more than {_DEEPEST} deep: refused")
        if isinstance(tree, dict):
            pairs = ((made(k, depth + 1), made(v, depth + 1)) for k, v in tree.items())
            return type(tree)(pairs)
        if isinstance(tree, (list, tuple)):
            parts = [made(part, depth + 1) for part in tree]
            if isinstance(tree, Called):
                return tree.make(*parts)
            return tuple(parts) if isinstance(tree, tuple) else parts
        plain = tree is None or type(tree) in (bool, int, float, str, bytes)
        return tree if plain else leaf(tree)

    return made(tree, 0)


def _length(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return value.bit_length() if isinstance(value, int) else 0


# -------------------------------------------------------------------------- what is expected


def as_sizes(values: Any) -> tuple[int, ...]:
    """A shape, offsets or strides."""
    if type(values) not in (tuple, list) or len(values) > _MOST_ARGUMENTS:
        raise Refused(f"a pickle has a {type(values).__name__} in place of sizes")
    return tuple(as_count(size) for size in values)


def as_count(value: Any) -> int:
    """A size, an offset or a length."""
    if type(value) is not int or not 0 <= value < 2**63:
        what = shown(value) if type(value) in (int, float, str) else type(value).__name__
        raise Refused(f"a pickle has {what} in place of a size")
    return value


def as_text(value: Any) -> str:
    """A name."""
    if type(value) is not str:
        raise Refused(f"a pickle has a {type(value).__name__} in place of a name")
    return value
