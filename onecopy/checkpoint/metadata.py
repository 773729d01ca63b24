"""``.metadata`` of a checkpoint: read without trust, written in one instant."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from onecopy.checkpoint.safe_pickle import (
    DamagedCheckpoint,
    Inert,
    Record,
    Refused,
    SafeUnpickler,
    as_count,
    as_sizes,
    as_text,
)
from onecopy.planning.text import in_bytes, shown
from onecopy.torch_private import GET_LAYOUT, MEMORY_FORMAT, STORAGE_INFO, storage_info

METADATA = ".metadata"
_LARGEST_METADATA = 2**32  # bytes; far more than an entry for each shard of a large job takes
_LONGEST_NAME = 2**14  # characters
_DEEPEST_PATH = 64  # steps; also the most that an extension of DCP may have done to an entry


# -------------------------------------------------------------------------- what a checkpoint holds


class Place(NamedTuple):
    """Where an entry lies. It travels as JSON."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()  # what an extension of DCP did to its bytes


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A rectangle of a tensor that was saved as one entry."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True)
class ValueEntry:
    place: Place


@dataclass(frozen=True, slots=True)
class Metadata:
    """All entries of a checkpoint by their keys."""

    entries: Mapping[str, TensorEntry | ValueEntry]
    paths: Mapping[str, tuple[str | int, ...]]  # the nesting that a key stands for


# -------------------------------------------------------------------------- reading the metadata


class _Index(Record):
    """A key of the storage table."""

    fqn: str
    offset: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        # Of text: nobody can know which texts have the same hash, as of numbers anybody can.
        offset = None if self.offset is None else as_sizes(self.offset)
        return hash(f"{as_text(self.fqn)} {offset}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


_RECORDS = {
    ("torch.distributed.checkpoint.metadata", "Metadata"): Record,
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): Record,
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"): Record,
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"): Record,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): Record,
    ("torch.distributed.checkpoint.metadata", "StorageMeta"): Record,
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): _Index,
    STORAGE_INFO: Record,
}


_INERT = {
    ("torch", "Size"): Inert,
    GET_LAYOUT: Inert,
    MEMORY_FORMAT: Inert,
    **{
        (module, name): Inert
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class _MetadataUnpickler(SafeUnpickler):
    keys = (_Index,)

    def find_class(self, module: str, name: str) -> Any:
        found: Any = _RECORDS.get((module, name)) or _INERT.get((module, name))
        if found is None and module == "torch":
            found = vars(torch).get(name)
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


def parse_metadata(data: bytes) -> Metadata:
    """What a checkpoint holds. Runs no code from it."""
    try:
        return _contents(_MetadataUnpickler(io.BytesIO(data)).load(), most_chunks=len(data) // 16)
    except DamagedCheckpoint:
        raise
    except Refused as error:
        raise DamagedCheckpoint(f"{METADATA} is damaged: {error}") from None
    except Exception as error:  # whatever a damaged pickle may lead to
        raise DamagedCheckpoint(f"{METADATA} is damaged: {shown(error, 300)}") from None


def _contents(read: Any, most_chunks: int) -> Metadata:
    """Everything is looked at only once its type is known: it may be deep, or contain itself."""
    places = {
        index: Place(
            as_text(info.relative_path),
            as_count(info.offset),
            as_count(info.length),
            _as_transforms(getattr(info, "transform_descriptors", None) or ()),
        )
        for index, info in _items(read.storage_data)
    }
    entries: dict[str, TensorEntry | ValueEntry] = {}
    for key, described in _items(read.state_dict_metadata):
        if len(as_text(key)) > _LONGEST_NAME:
            raise DamagedCheckpoint(f"{METADATA} has {shown(key)} in place of a name")
        if hasattr(described, "chunks"):
            entries[key] = tensor = _tensor_entry(key, described, places, most_chunks)
            most_chunks -= len(tensor.chunks)
        elif (place := places.get(_index(key, None))) is not None:
            entries[key] = ValueEntry(place)
    paths = read.planner_data or {key: (key,) for key in entries}  # none: nothing was nested
    _items(paths)  # or an error
    for key in entries:
        path = paths.get(key)
        if not _is_path_of(path, key):
            raise DamagedCheckpoint(
                f"{METADATA} has a {type(path).__name__} in place of the path of {key}"
            )
    return Metadata(entries, {key: paths[key] for key in entries})


def _items(table: Any) -> Any:
    if type(table) is not dict:
        raise DamagedCheckpoint(f"{METADATA} has a {type(table).__name__} in place of a table")
    return table.items()


def _as_transforms(values: Any) -> tuple[str, ...]:
    if type(values) not in (tuple, list) or len(values) > _DEEPEST_PATH:
        raise DamagedCheckpoint(f"{METADATA} has a {type(values).__name__} in place of names")
    return tuple(map(as_text, values))


def _is_path_of(path: Any, key: str) -> bool:
    if type(path) is not tuple or len(path) > _DEEPEST_PATH:
        return False
    if not all(type(step) is str or (type(step) is int and 0 <= step < 2**63) for step in path):
        return False
    # Before they are joined: a long step may be there many times.
    return all(len(str(step)) <= len(key) for step in path) and ".".join(map(str, path)) == key


def _index(key: str, offset: tuple[int, ...] | None) -> _Index:
    index = _Index()
    index.fqn, index.offset = key, offset
    return index


def _tensor_entry(
    key: str, described: Any, places: Mapping[_Index, Place], most_chunks: int
) -> TensorEntry:
    shape = as_sizes(described.size)
    chunks = []
    # Why a limit: each takes some bytes to write down, so that there are not more than these. In a
    # lie all entries may have the same long list.
    if type(described.chunks) is not list or len(described.chunks) > most_chunks:
        raise DamagedCheckpoint(f"{METADATA} has no list of the parts of {key}, or one too long")
    for chunk in described.chunks:
        offsets, sizes = as_sizes(chunk.offsets), as_sizes(chunk.sizes)
        place = places.get(_index(key, offsets))
        if place is None:
            raise DamagedCheckpoint(f"{METADATA} does not say where {key} at {offsets} is")
        if not len(offsets) == len(sizes) == len(shape):
            raise DamagedCheckpoint(f"{METADATA} has a part of {key} with other dimensions")
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
            raise DamagedCheckpoint(f"{METADATA} has a part of {key} that reaches beyond it")
        chunks.append(StoredChunk(offsets, sizes, place))
    # TensorProperties pickles as a tuple that begins with the dtype.
    properties = described.properties
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(f"{METADATA} has no dtype for {key}")
    return TensorEntry(dtype, shape, tuple(chunks))


class Written(NamedTuple):
    """An entry that a rank has written, as it is reported to the rank that writes the metadata."""

    key: str
    path: tuple[str | int, ...]
    place: Place
    dtype: str = ""  # empty for a value that is no tensor
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@contextlib.contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Keep others from saving to a directory at the same time. A process that dies lets go."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"another save is writing to {directory}: replicas of an optimizer that saves by "
                "process subgroups need a directory each, or one of them saves"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


def write_metadata(directory: Path, entries: Iterable[Written]) -> None:
    """Make what was written the contents of the directory, in one instant."""
    data = _pickled(_as_torch_metadata(entries))
    draft = directory / f"{METADATA}.draft"
    try:
        draft.unlink(missing_ok=True)  # of a save that was killed
        # Made by us, or an error: through a link that somebody has put there, this would write to
        # whatever it leads to.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(directory / METADATA)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Names in a directory are durable only once the directory is."""
    with contextlib.suppress(OSError):  # some file systems have no such thing
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class _MetadataPickler(pickle.Pickler):
    """Writes what every release of torch reads."""

    def reducer_override(self, obj: Any) -> Any:
        # Why: since torch 2.15 it has a sixth field, the strides, and older releases read five.
        if type(obj).__name__ == "TensorProperties":
            make, arguments, state, *_ = obj.__reduce_ex__(self._PROTOCOL)
            return make, arguments, state[:5]
        return NotImplemented

    _PROTOCOL = 4


def _pickled(metadata: Any) -> bytes:
    file = io.BytesIO()
    _MetadataPickler(file, protocol=_MetadataPickler._PROTOCOL).dump(metadata)
    return file.getvalue()


def _as_torch_metadata(entries: Iterable[Written]) -> Any:
    # Here, because it brings half of torch.distributed, which training does not need.
    from torch.distributed.checkpoint import metadata

    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    paths: dict[str, Any] = {}
    for key, path, place, dtype, shape, offsets, sizes in entries:
        info = storage_info(place.file, place.offset, place.length)
        paths[key] = path
        if not dtype:
            described[key] = metadata.BytesStorageMetadata()
            storage[metadata.MetadataIndex(key)] = info
            continue
        tensor = described.setdefault(
            key,
            metadata.TensorStorageMetadata(
                metadata.TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), []
            ),
        )
        chunk = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        storage[metadata.MetadataIndex(key, offsets, len(tensor.chunks))] = info
        tensor.chunks.append(chunk)
    made = metadata.Metadata(described, planner_data=paths, storage_data=storage)
    if "version" in {field.name for field in dataclasses.fields(made)}:
        made.version = "1.0.0"
    return made
