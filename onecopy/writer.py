"""Data files and metadata of a checkpoint, as ``torch.distributed.checkpoint`` writes them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import os
import pickle
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onecopy.archive import METADATA, Place
from onecopy.buffers import is_dense
from onecopy.direct import DirectFile
from onecopy.torch_private import storage_info
from onecopy.zipped import WRITTEN_HERE, ZipEntry, describe_tensor, zip_directory

_ZIP_LIMIT = 2**32 - 2**20  # beyond, a zip archive needs longer fields


class Written(NamedTuple):
    """An entry that a rank has written, as it is reported to the rank that writes the metadata."""

    key: str
    path: tuple[str | int, ...]
    place: Place
    dtype: str = ""  # empty for a value that is no tensor
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class Writer:
    """Appends entries to a data file of its own. A context manager; durable when it is left."""

    def __init__(self, directory: Path, name: str) -> None:
        self._name = name
        self._file = DirectFile(directory / name)

    def __enter__(self) -> Writer:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def append(self, value: Any) -> Place:
        """A tensor, or any plain value."""
        offset = self._file.tell()
        if _is_simple(value):
            self._append_tensor(value.detach().cpu(), offset)
        else:
            is_tensor = isinstance(value, torch.Tensor)
            file: Any = self._file
            torch.save(value.detach().cpu().clone() if is_tensor else value, file)
        return Place(self._name, offset, self._file.tell() - offset)

    def _append_tensor(self, tensor: torch.Tensor, offset: int) -> None:
        """The bytes from where they are, without a copy, as ``torch.save`` would write them.

        Why not ``torch.save``: it writes all of the storage of which a box is a view, and takes a
        third of a millisecond for a scalar.
        """
        tensor = tensor if is_dense(tensor) else tensor.contiguous()
        run = _bytes_of(tensor)
        data = ZipEntry("archive/data/0", tensor.nbytes, zlib.crc32(run))
        small = [
            ("archive/data.pkl", describe_tensor(tensor)),
            ("archive/byteorder", sys.byteorder.encode()),
            ("archive/version", b"3\n"),
        ]
        entries, at = [], 0
        for name, content in small:
            entry = ZipEntry(name, len(content), zlib.crc32(content), at)
            entries.append(entry)
            at += self._file.write(entry.header()) + self._file.write(content)
        data = replace(data, offset=at)
        at += self._file.write(data.header(align=offset)) + tensor.nbytes
        self._file.write(run)
        self._file.write(zip_directory([*entries, data], at))


def _is_simple(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.dtype in WRITTEN_HERE and value.nbytes < _ZIP_LIMIT


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a dense tensor, as a buffer."""
    return (ctypes.c_ubyte * tensor.nbytes).from_address(
        tensor.data_ptr() or ctypes.addressof(_NIL)
    )


_NIL = ctypes.c_ubyte()


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
