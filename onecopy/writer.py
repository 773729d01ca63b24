"""Data files and metadata of a checkpoint, as ``torch.distributed.checkpoint`` writes them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onecopy.archive import METADATA, Place


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
        self._file = (directory / name).open("xb")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: Any) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def append(self, value: Any) -> Place:
        """A tensor, or any plain value."""
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            if value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone()  # torch.save would write all that it is a view of
        offset = self._file.tell()
        torch.save(value, self._file)
        return Place(self._name, offset, self._file.tell() - offset)


def write_metadata(directory: Path, entries: Iterable[Written]) -> None:
    """Make what was written the contents of the directory, in one instant."""
    data = pickle.dumps(_as_torch_metadata(entries))
    draft = directory / f"{METADATA}.draft"
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(directory / METADATA)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Names in a directory are durable only once the directory is."""
    with contextlib.suppress(OSError):  # some file systems have no such thing
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _as_torch_metadata(entries: Iterable[Written]) -> Any:
    # Here, because it brings half of torch.distributed, which training does not need.
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    paths: dict[str, Any] = {}
    for key, path, place, dtype, shape, offsets, sizes in entries:
        info = _StorageInfo(place.file, place.offset, place.length)
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
