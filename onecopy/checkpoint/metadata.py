"""``.metadata`` of a checkpoint: read without trust, written in one instant."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from onecopy.checkpoint.safe_pickle import (
    DamagedCheckpoint,
    Inert,
    Record,
    SafeUnpickler,
    as_count,
    as_sizes,
    as_text,
    expect,
    reading,
)
from onecopy.planning.text import in_bytes, shown
from onecopy.torch_private import GET_LAYOUT, MEMORY_FORMAT, STORAGE_INFO, storage_info

METADATA = ".metadata"
MARK = "onecopy"  # the value that ``save`` writes beside the state
_LARGEST_METADATA = 2**32  # bytes; far more than an entry for each shard of a large job takes
_LONGEST_NAME = 2**14  # characters
_DEEPEST_PATH = 64  # steps; also the most that an extension of DCP may have done to an entry
_PROTOCOL = 4


class Place(NamedTuple):
    """Where something lies. It travels as JSON."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()  # what an extension of DCP did to its bytes


class Stored(NamedTuple):
    """A rectangular chunk of a tensor, or a plain value. It travels as JSON."""

    key: str
    path: tuple[str | int, ...]  # the nesting that the key stands for
    place: Place
    dtype: str = ""  # empty for a plain value
    shape: tuple[int, ...] = ()  # of the whole tensor
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, key: str, path: Any, place: Any, dtype: str, *sizes: Any) -> Stored:
        return cls(key, tuple(path), Place(*place), dtype, *map(tuple, sizes))


Entry = Sequence[Stored]  # all chunks of a tensor, or one value
Metadata = Mapping[str, Entry]  # by key


def digest(entries: Iterable[Stored]) -> str:
    """A fingerprint of what the metadata says."""
    lines = sorted(json.dumps(entry[1:]) for entry in entries)  # the path has the key
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# -------------------------------------------------------------------------- reading

_DCP = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
)
_STAND_INS: dict[tuple[str, str], type] = {
    **{(_DCP, name): Record for name in _RECORDS},
    STORAGE_INFO: Record,
    **dict.fromkeys((("torch", "Size"), GET_LAYOUT, MEMORY_FORMAT), Inert),
    **{
        (module, name): Inert
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


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
        is_file = "is a file" if directory.exists() else "does not exist"
        what = f"has no {METADATA} file" if directory.is_dir() else is_file
        raise FileNotFoundError(
            f"{directory} {what}: not a checkpoint, or one that was never completed"
        ) from None


def parse_metadata(data: bytes) -> Metadata:
    """What a checkpoint holds. Runs no code from it. Everything is looked at only once its type is
    known: it may be deep, or contain itself."""
    with reading(METADATA):
        read = SafeUnpickler(data, _STAND_INS).load()
        places = {
            _name_of_place(index.fqn, getattr(index, "offset", None)): _place(info)
            for index, info in _items(read.storage_data)
        }
        paths = read.planner_data
        expect(not paths or type(paths) is dict, paths, "a table")
        found: dict[str, Entry] = {}
        # Why a limit: each chunk takes some bytes to write down, so that there are not more than
        # these. In a lie all entries may have the same long list.
        most_chunks = len(data) // 16
        for key, described in _items(read.state_dict_metadata):
            expect(len(as_text(key)) <= _LONGEST_NAME, key, "a name")
            # Without a table of paths nothing was nested.
            path = paths.get(key) if paths else (key,)
            if hasattr(described, "chunks"):
                found[key] = _chunks(key, path, described, places, most_chunks)
                most_chunks -= len(found[key])
            elif (place := places.get(_name_of_place(key, None))) is not None:
                found[key] = [Stored(key, path, place)]
            if key in found:
                expect(_is_path_of(path, key), path, f"the path of {key}")
        return found


def _items(table: Any) -> Any:
    expect(type(table) is dict, table, "a table")
    return table.items()


def _name_of_place(key: Any, offset: Any) -> str:
    # As text: nobody can know which texts have the same hash, as of numbers anybody can.
    return f"{as_text(key)} {None if offset is None else as_sizes(offset)}"


def _place(info: Any) -> Place:
    transforms = getattr(info, "transform_descriptors", None) or ()
    is_right = type(transforms) in (tuple, list) and len(transforms) <= _DEEPEST_PATH
    expect(is_right, transforms, "names")
    numbers = as_count(info.offset), as_count(info.length)
    return Place(as_text(info.relative_path), *numbers, tuple(map(as_text, transforms)))


def _is_path_of(path: Any, key: str) -> bool:
    if type(path) is not tuple or len(path) > _DEEPEST_PATH:
        return False
    if not all(type(step) is str or (type(step) is int and 0 <= step < 2**63) for step in path):
        return False
    # Before they are joined: a long step may be there many times.
    return all(len(str(step)) <= len(key) for step in path) and ".".join(map(str, path)) == key


def _chunks(
    key: str, path: Any, described: Any, places: Mapping[str, Place], most_chunks: int
) -> list[Stored]:
    """The chunks of a tensor."""
    shape, found = as_sizes(described.size), []
    # TensorProperties pickles as a tuple that begins with the dtype.
    properties = described.properties
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(f"{METADATA} has no dtype for {key}")
    if type(described.chunks) is not list or not 0 < len(described.chunks) <= most_chunks:
        raise DamagedCheckpoint(f"{METADATA} has no list of the parts of {key}, or one too long")
    for chunk in described.chunks:
        offsets, sizes = as_sizes(chunk.offsets), as_sizes(chunk.sizes)
        place = places.get(_name_of_place(key, offsets))
        if place is None:
            raise DamagedCheckpoint(f"{METADATA} does not say where {key} at {offsets} is")
        if not len(offsets) == len(sizes) == len(shape):
            raise DamagedCheckpoint(f"{METADATA} has a part of {key} with other dimensions")
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
            raise DamagedCheckpoint(f"{METADATA} has a part of {key} that reaches beyond it")
        name = str(dtype).removeprefix("torch.")
        found.append(Stored(key, path, place, name, shape, offsets, sizes))
    return found


# -------------------------------------------------------------------------- writing


def require_name(directory: Path) -> None:
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise ValueError(f"the path {str(directory)!r} is not valid text: choose another") from None


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


def write_metadata(directory: Path, entries: Iterable[Stored]) -> None:
    """Make what was written the contents of the directory, in one instant."""
    pickled = io.BytesIO()
    _MetadataPickler(pickled, _PROTOCOL).dump(_as_torch_metadata(entries))
    draft = directory / f"{METADATA}.draft"
    try:
        draft.unlink(missing_ok=True)  # of a save that was killed
        # Made by us, or an error: through a link that somebody has put there, this would write to
        # whatever it leads to.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(pickled.getbuffer())
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
            make, arguments, state, *_ = obj.__reduce_ex__(_PROTOCOL)
            return make, arguments, state[:5]
        return NotImplemented


def _as_torch_metadata(entries: Iterable[Stored]) -> Any:
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
        properties = metadata.TensorProperties(dtype=getattr(torch, dtype))
        made = metadata.TensorStorageMetadata(properties, torch.Size(shape), [])
        tensor = described.setdefault(key, made)
        chunk = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        storage[metadata.MetadataIndex(key, offsets, len(tensor.chunks))] = info
        tensor.chunks.append(chunk)
    found = metadata.Metadata(described, planner_data=paths, storage_data=storage)
    if hasattr(found, "version"):
        found.version = "1.0.0"
    return found
