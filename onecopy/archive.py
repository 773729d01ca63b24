"""What a checkpoint directory of ``torch.distributed.checkpoint`` holds, read without running it.

A directory holds data files and ``.metadata``, a pickle that says which part of which tensor lies
where. It is read by an unpickler that knows a handful of names and turns them into inert records:
none of torch's classes is made, and no other name is looked up.
"""

from __future__ import annotations

import io
import os
import pickle
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from onecopy.words import in_bytes, shown

METADATA = ".metadata"
_LARGEST_METADATA = 2**32  # bytes; far more than an entry for each piece of a large job takes


class DamagedCheckpoint(ValueError):
    """A checkpoint that cannot be read, and why."""


# -------------------------------------------------------------------------- what a checkpoint holds


class Place(NamedTuple):
    """Where an entry lies. It travels as JSON."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()  # what an extension of DCP did to its bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor that was saved as one entry."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class ValueEntry:
    place: Place


@dataclass(frozen=True, slots=True)
class Contents:
    """All entries of a checkpoint by their keys."""

    entries: Mapping[str, TensorEntry | ValueEntry]
    paths: Mapping[str, tuple[str | int, ...]]  # the nesting that a key stands for


# -------------------------------------------------------------------------- reading the metadata


class _Record:
    """Stands in for any class of the metadata: keeps what was pickled, does nothing."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Index(_Record):
    """A key of the storage table."""

    fqn: str
    offset: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


_RECORDS = {
    ("torch.distributed.checkpoint.metadata", "Metadata"): _Record,
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): _Record,
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"): _Record,
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"): _Record,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _Record,
    ("torch.distributed.checkpoint.metadata", "StorageMeta"): _Record,
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): _Index,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
}


class Inert:
    """Stands in for a function of the metadata: gives back what it is called with."""

    __slots__ = ()

    def __new__(cls, *args: Any) -> Any:
        return args[0] if len(args) == 1 else args

    def __setstate__(self, state: Any) -> None:
        raise DamagedCheckpoint("a pickle that changes what it is read with: refused")


_INERT = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): Inert,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): Inert,
    **{
        (module, name): Inert
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


# The one in Python: that in C reserves memory for as many objects as a damaged file may claim.
SafeUnpickler: Any = pickle._Unpickler


class _MetadataUnpickler(SafeUnpickler):  # type: ignore[misc]
    def find_class(self, module: str, name: str) -> Any:
        found: Any = _RECORDS.get((module, name)) or _INERT.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, (torch.dtype, torch.layout)) else None
        if found is None:
            raise DamagedCheckpoint(
                f"{METADATA} names {module}.{name}, which no checkpoint needs: refused, and not "
                "run. Do not trust this file"
            )
        return found


def open_inside(directory: Path, name: str) -> BinaryIO:
    """A file of the checkpoint, to be read: a regular file in its directory, or an error.

    Why: a fifo would wait for a writer for ever, a device may have no end, and a link may lead to
    a file that whoever made the checkpoint has no business with.
    """
    try:
        path = (directory / name).resolve()
        is_inside = path.is_relative_to(directory.resolve())
    except (ValueError, RuntimeError) as error:  # a zero byte; links that go round in circles
        raise DamagedCheckpoint(f"{shown(name)} cannot be read: {error}") from None
    if not is_inside:
        raise DamagedCheckpoint(f"{name} points out of the checkpoint, to {path}: refused")
    # The path is resolved: a link that has come there since is not followed.
    flags = ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY")
    handle = os.open(path, sum((getattr(os, flag, 0) for flag in flags), os.O_RDONLY))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedCheckpoint(f"{name} is no regular file: refused")
    return os.fdopen(handle, "rb")


def read_metadata(directory: Path) -> bytes:
    """The raw bytes of a directory's metadata."""
    try:
        with open_inside(directory, METADATA) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _LARGEST_METADATA:
                raise DamagedCheckpoint(f"{METADATA} is too large to be true: {in_bytes(size)}")
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        what = (
            f"has no {METADATA} file"
            if directory.is_dir()
            else "is a file"
            if directory.exists()
            else "does not exist"
        )
        raise FileNotFoundError(
            f"{directory} {what}: not a checkpoint, or one that was never completed"
        ) from None


def parse_metadata(data: bytes) -> Contents:
    """What a checkpoint holds. Runs no code from it."""
    try:
        return _contents(_MetadataUnpickler(io.BytesIO(data)).load())
    except DamagedCheckpoint:
        raise
    except Exception as error:  # whatever a damaged pickle may lead to
        raise DamagedCheckpoint(f"{METADATA} is damaged: {error!r}") from None


def _contents(read: Any) -> Contents:
    places = {
        index: Place(
            str(info.relative_path),
            int(info.offset),
            int(info.length),
            tuple(map(str, getattr(info, "transform_descriptors", None) or ())),
        )
        for index, info in read.storage_data.items()
    }
    entries: dict[str, TensorEntry | ValueEntry] = {}
    for key, described in read.state_dict_metadata.items():
        if not isinstance(key, str):
            raise DamagedCheckpoint(f"{METADATA} has {key!r} in place of a name")
        if hasattr(described, "chunks"):
            entries[key] = _tensor_entry(key, described, places)
        elif (place := places.get(_index(key, None))) is not None:
            entries[key] = ValueEntry(place)
    paths = read.planner_data or {key: (key,) for key in entries}  # none: nothing was nested
    for key in entries:
        path = paths.get(key)
        if not isinstance(path, tuple) or ".".join(map(str, path)) != key:
            raise DamagedCheckpoint(f"{METADATA} has {path!r} in place of the path of {key}")
    return Contents(entries, {key: paths[key] for key in entries})


def _index(key: str, offset: tuple[int, ...] | None) -> _Index:
    index = _Index()
    index.fqn, index.offset = key, offset
    return index


def _tensor_entry(key: str, described: Any, places: Mapping[_Index, Place]) -> TensorEntry:
    shape = as_sizes(described.size)
    chunks = []
    for chunk in described.chunks:
        offsets, sizes = as_sizes(chunk.offsets), as_sizes(chunk.sizes)
        place = places.get(_index(key, offsets))
        if place is None:
            raise DamagedCheckpoint(f"{METADATA} does not say where {key} at {offsets} is")
        if not len(offsets) == len(sizes) == len(shape):
            raise DamagedCheckpoint(f"{METADATA} has a part of {key} with other dimensions")
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
            raise DamagedCheckpoint(f"{METADATA} has a part of {key} that reaches beyond it")
        chunks.append(Chunk(offsets, sizes, place))
    # TensorProperties pickles as a tuple that begins with the dtype.
    properties = described.properties
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(f"{METADATA} has no dtype for {key}")
    return TensorEntry(dtype, shape, tuple(chunks))


def as_sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise DamagedCheckpoint(f"{METADATA} has {sizes} in place of sizes")
    return sizes
