"""Pickles that nobody trusts: read without running anything, in time and memory of their size.

A pickle is a program. Besides code that it may name, a few bytes of it build what takes for ever to
hash, to compare or to print: a tuple of the same tuple twice, sixty times over, or one a million
deep. So ``SafeUnpickler`` follows only the instructions that a checkpoint needs; a key is text, a
number or a few of them; a name stands for a class that keeps what it is given; and ``plain_value``
makes of the result what it stands for, up to limits on depth and on sharing.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from onecopy.planning.text import shown

_DEEPEST = 100
_SHARING = 16  # how often on average what is written once may be used
_LIGHT = 2**16  # bytes; what is less than this may be used as often as it likes
_MOST_ARGUMENTS = 64  # of a call, attributes of a record, numbers in a key
_LARGEST_KEY = 2**60  # beyond, many integers have the same hash
_LONGEST = 1000  # characters of an error


class DamagedCheckpoint(ValueError):
    """A checkpoint that cannot be read, and why."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Around reading a file: what a damaged one may lead to becomes ``DamagedCheckpoint``."""
    try:
        yield
    except DamagedCheckpoint:
        raise
    except Exception as error:
        why = str(error) if isinstance(error, ValueError) else shown(error, _LONGEST)
        raise DamagedCheckpoint(f"{what} is damaged: {why[:_LONGEST]}") from None


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
        raise ValueError(
            f"a pickle that does what no checkpoint needs (instruction {code:#x}): refused"
        )


# The one in Python: that in C reserves memory for as many objects as a damaged file may claim.
_Unpickler: Any = pickle._Unpickler


def _instruction(name: str) -> Any:
    """What follows an instruction, once it is checked what that would be done to."""
    follow = _Unpickler.dispatch[getattr(pickle, name)[0]]

    def require_keys(unpickler: SafeUnpickler) -> None:
        stack = unpickler.stack
        for key in stack[-2:-1] if name == "SETITEM" else stack[::2]:
            if not isinstance(key, Record) and not is_key(key):
                what = type(key).__name__
                raise ValueError(f"a pickle that has a {what} of its own for a key: refused")
        follow(unpickler)

    def require_call(unpickler: SafeUnpickler) -> None:
        function, args = unpickler.stack[-2:]
        if not isinstance(function, type):
            raise ValueError("a pickle that calls what cannot be called: refused")
        if type(args) is not tuple or len(args) > _MOST_ARGUMENTS:
            raise ValueError("a pickle that makes a call with too much: refused")
        follow(unpickler)

    def require_record(unpickler: SafeUnpickler) -> None:
        if not isinstance(unpickler.stack[-2], Record):
            raise ValueError("a pickle that changes what it is read with: refused")
        follow(unpickler)

    checked = {"SETITEM": require_keys, "SETITEMS": require_keys, "BUILD": require_record}
    checked.update({"REDUCE": require_call, "NEWOBJ": require_call})
    return checked.get(name, follow)


class SafeUnpickler(_Unpickler):  # type: ignore[misc]
    """Follows the instructions that ``pickle`` and ``torch.save`` write for plain data. A name
    stands for one of ``stand_ins``: classes only, which keep what they are given; or for a dtype
    or layout of torch's."""

    dispatch = _Instructions({getattr(pickle, name)[0]: _instruction(name) for name in _NEEDED})

    def __init__(self, pickled: bytes, stand_ins: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._stand_ins = stand_ins

    def find_class(self, module: str, name: str) -> Any:
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, (torch.dtype, torch.layout)):
            return found
        if (module, name) not in self._stand_ins:
            raise ValueError(
                f"a pickle names {shown(f'{module}.{name}')}, which no checkpoint needs: refused, "
                "and not run. Do not trust this file"
            )
        return self._stand_ins[module, name]


def is_key(key: Any) -> bool:
    """Whether a plain value is hashed at once, and as others are not."""
    if type(key) is tuple:
        return len(key) <= _MOST_ARGUMENTS and all(type(k) is not tuple and is_key(k) for k in key)
    if type(key) is int:
        return -_LARGEST_KEY < key < _LARGEST_KEY
    return key is None or type(key) in (str, float, bool)


class Record:
    """Stands in for any class: keeps what was pickled, does nothing. As a key it equals no other,
    so that a file cannot give many the same hash."""

    def __setstate__(self, state: Any) -> None:
        state = state if isinstance(state, dict) else {"state": state}
        if len(state) > _MOST_ARGUMENTS:
            raise ValueError("a pickle of an object with too many attributes: refused")
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
        left -= 1
        if isinstance(tree, (str, bytes)):
            left -= len(tree) // 8
        elif isinstance(tree, int):
            left -= tree.bit_length() // 8
        if left < 0:
            raise ValueError(f"a pickle of {nbytes} bytes that grows when it is looked at: refused")
        if depth > _DEEPEST:
            raise ValueError(f"a pickle that is nested more than {_DEEPEST} deep: refused")
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


# -------------------------------------------------------------------------- what is expected


def expect(is_right: bool, found: Any, what: str) -> None:
    """Raise if something else was found in the place of ``what``."""
    if not is_right:
        is_short = type(found) in (int, float, str)
        text = shown(found) if is_short else f"a {type(found).__name__}"
        raise ValueError(f"a pickle has {text} in place of {what}")


def as_sizes(values: Any) -> tuple[int, ...]:
    """A shape, offsets or strides."""
    expect(type(values) in (tuple, list) and len(values) <= _MOST_ARGUMENTS, values, "sizes")
    return tuple(map(as_count, values))


def as_count(value: Any) -> int:
    """A size, an offset or a length."""
    expect(type(value) is int and 0 <= value < 2**63, value, "a size")
    return int(value)


def as_text(value: Any) -> str:
    """A name."""
    expect(type(value) is str, value, "a name")
    return str(value)
