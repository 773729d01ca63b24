"""Pickles that nobody trusts: read without running anything, in time and memory of their size.

A pickle is a program. Besides code that it may name, a few bytes of it build what takes for ever to
hash, to compare or to print: a tuple of the same tuple twice, sixty times over, or one a million
deep. So only those of its instructions are followed that a checkpoint needs; a key is text, a
number or a few of them; and what is handed to others is weighed first.
"""

from __future__ import annotations

import io
import pickle
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


class SafeUnpickler(_Unpickler):  # type: ignore[misc]
    """Follows the instructions that ``pickle`` and ``torch.save`` write for plain data. What a name
    stands for is said by the subclass: classes only, which keep what they are given."""

    dispatch = _Instructions(
        {code: _Unpickler.dispatch[code] for code in (getattr(pickle, n)[0] for n in _NEEDED)}
    )
    keys: tuple[type, ...] = ()  # classes of keys, beside plain values

    def _load_setitem(self) -> None:
        self._require_keys(self.stack[-2:-1])
        _Unpickler.load_setitem(self)

    def _load_setitems(self) -> None:
        self._require_keys(self.stack[::2])
        _Unpickler.load_setitems(self)

    def _load_reduce(self) -> None:
        self._require_call()
        _Unpickler.load_reduce(self)

    def _load_newobj(self) -> None:
        self._require_call()
        _Unpickler.load_newobj(self)

    def _require_keys(self, keys: list[Any]) -> None:
        for key in keys:
            if type(key) is not str and not isinstance(key, self.keys) and not _is_key(key):
                what = type(key).__name__
                raise Refused(f"a pickle that has a {what} of its own for a key: refused")

    def _require_call(self) -> None:
        function, args = self.stack[-2:]
        if not isinstance(function, type):
            raise Refused("a pickle that calls what cannot be called: refused")
        if type(args) is not tuple or len(args) > _MOST_ARGUMENTS:
            raise Refused("a pickle that makes a call with too much: refused")

    dispatch.update(
        {
            pickle.SETITEM[0]: _load_setitem,
            pickle.SETITEMS[0]: _load_setitems,
            pickle.REDUCE[0]: _load_reduce,
            pickle.NEWOBJ[0]: _load_newobj,
        }
    )


def _is_key(key: Any) -> bool:
    """Whether a plain value is hashed at once, and as others are not."""
    if type(key) is tuple:
        return len(key) <= _MOST_ARGUMENTS and all(type(k) is not tuple and _is_key(k) for k in key)
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

    def __setstate__(self, state: Any) -> None:
        raise DamagedCheckpoint("a pickle that changes what it is read with: refused")


# -------------------------------------------------------------------------- weighing


class _Called(dict[Any, Any]):
    """Stands in for anything, to be weighed with what it was made from."""

    def __new__(cls, *args: Any) -> Any:
        made = super().__new__(cls)
        made.parts = [args]
        return made

    def __init__(self, *args: Any) -> None:
        """Not as a dict does, which would take the items of its argument."""

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    parts: list[Any]


class _Allocating(_Called):
    """Stands in for what makes memory of any size from a number."""

    def __new__(cls, *args: Any) -> Any:
        if not all(type(arg) in (str, _Called) for arg in args):  # _Called: bytes, from a text
            raise Refused("a pickle that asks for memory: refused")
        return super().__new__(cls, *args)


class _Outline(SafeUnpickler):
    def find_class(self, _: str, name: str) -> Any:
        return _Allocating if name.endswith(("bytearray", "Tensor", "Storage")) else _Called

    def persistent_load(self, pid: Any) -> Any:
        return _Called(pid)


def require_harmless(pickled: bytes) -> None:
    """Raise if others, which unpickle this and look at what comes of it, might not come back.

    For ``torch.load(weights_only=True)``: it runs no code, but hashes any key, and prints whatever
    is wrong. An outline of what it would make is made, of the same form, and weighed.
    """
    outline = _Outline(io.BytesIO(pickled)).load()
    weight, _ = _weighed(outline, 0, {})
    if weight > _LIGHT + _SHARING * len(pickled):
        raise Refused(f"a pickle of {len(pickled)} bytes that grows when it is looked at: refused")


def _weighed(tree: Any, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """About how many bytes it would take if nothing in it were shared, and how deep it is."""
    if not isinstance(tree, (dict, list, tuple)):
        return 1 + _length(tree) // 8, 0
    found = known.get(id(tree))
    if found is None and depth <= _DEEPEST:
        weight, height = 1, 0
        for part in _parts(tree):
            its_weight, its_height = _weighed(part, depth + 1, known)
            weight, height = weight + its_weight, max(height, its_height + 1)
        found = known[id(tree)] = weight, height
    if found is None or depth + found[1] > _DEEPEST:
        raise Refused(f"a pickle that is nested more than {_DEEPEST} deep: refused")
    return found


def _parts(tree: Any) -> Any:
    if isinstance(tree, dict):
        return [*tree, *tree.values(), *getattr(tree, "parts", ())]
    return tree


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
