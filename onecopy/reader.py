"""Tensors and values from the data files of a checkpoint, only the ranges that are needed.

Every entry of a data file is what ``torch.save`` writes: a zip archive with the bytes of a tensor,
or a plain value. Nothing is unpickled that could run: the description of a tensor is read by an
unpickler that knows tensors only, values by ``torch.load(weights_only=True)``. Checksums are
verified.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import mmap
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onecopy.archive import (
    METADATA,
    Chunk,
    Place,
    TensorEntry,
    ValueEntry,
    open_inside,
)
from onecopy.boxes import Box
from onecopy.pickles import (
    DamagedCheckpoint,
    Inert,
    SafeUnpickler,
    as_count,
    as_sizes,
    as_text,
    require_harmless,
)
from onecopy.torch_private import REBUILD_TENSOR
from onecopy.words import shown

_LONGEST = 1000  # characters of an error of torch
_LARGEST_DESCRIPTION = 2**16  # bytes; a tensor's takes some hundred


class _StoredTensor(NamedTuple):
    """How a tensor lies in an entry."""

    dtype: torch.dtype
    storage_offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # of its bytes in the file
    nbytes: int
    checksum: int

    @property
    def reach(self) -> int:
        """Elements of the storage, from its beginning, that the tensor needs."""
        if 0 in self.size:
            return self.storage_offset
        steps = ((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.storage_offset + sum(steps) + 1


class _Storage(NamedTuple):
    dtype: torch.dtype | None
    key: str


class _Description(NamedTuple):
    dtype: Any
    key: str  # of its storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Rebuilt(Inert):
    """Stands in for the function that rebuilds a tensor: keeps what describes it."""

    __slots__ = ()

    def __new__(cls, storage: _Storage, offset: int, size: Any, stride: Any, *rest: Any) -> Any:
        dtype = next((item for item in rest if isinstance(item, torch.dtype)), storage.dtype)
        sizes = as_sizes(size), as_sizes(stride)
        return _Description(dtype, storage.key, as_count(offset), *sizes)


# A dtype as torch.save writes it down; an untyped storage comes with a dtype beside it.
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": None,
}


class _TensorUnpickler(SafeUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in REBUILD_TENSOR:
            return _Rebuilt
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return Inert  # hooks, of which there are none
        raise DamagedCheckpoint(
            f"an entry names {module}.{name}, which no tensor needs: refused, and not run"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return _Storage(dtype if isinstance(dtype, torch.dtype) else None, as_text(key))


class _Window(io.RawIOBase):
    """A part of a mapped file, as a file."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        chunk = self._data[self._at : self._at + len(buffer)]
        buffer[: len(chunk)] = chunk
        self._at += len(chunk)
        return len(chunk)


class Reader:
    """Reads entries of one checkpoint. A context manager: it keeps files open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):  # an exception under way may hold on to a view
                mapped.close()

    def value(self, entry: ValueEntry, key: str) -> Any:
        """A plain value. Tensors and containers are admitted, code is not."""
        with self._entry(entry.place, key) as data:
            raw = bytes(data)
        try:
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                _require_stored(archive, len(raw))
                damaged = archive.testzip()
                if damaged is not None:
                    raise DamagedCheckpoint(f"{key} is damaged: the checksum of {damaged} is wrong")
                files = _files_in(archive)
            require_harmless(files["data.pkl"])
            return torch.load(_zipped(files), map_location="cpu", weights_only=True)
        except DamagedCheckpoint:
            raise
        except Exception as error:
            raise DamagedCheckpoint(f"{key} cannot be read: {str(error)[:_LONGEST]}") from None

    def require_bytes(self, entry: TensorEntry, key: str) -> None:
        """Raise if there is less in the files than the tensor takes, before memory is given to what
        may be a lie."""
        there = sum(len(self._entry(chunk.place, key)) for chunk in entry.chunks)
        if math.prod(entry.shape) * entry.dtype.itemsize > there:
            raise DamagedCheckpoint(f"{key} is not complete: it has shape {shown(entry.shape)}")

    def fill(self, box: Box, target: torch.Tensor, entry: TensorEntry, key: str) -> None:
        """Copy a box of a saved tensor into ``target``. Reads no more than that, save for the
        checksum of an entry whose first element is in the box: so each is verified once."""
        filled: list[Box] = []
        for chunk in entry.chunks:
            common = box.overlap(chunk.offsets, chunk.sizes)
            if common is None:
                continue
            if any(common.overlap(other.offsets, other.sizes) for other in filled):
                raise DamagedCheckpoint(f"{key} has parts that overlap, at {common.offsets}")
            verify = common.offsets == chunk.offsets
            self._copy(chunk, common, box, target, key, verify)
            filled.append(common)
        found = sum(common.numel for common in filled)
        if found != box.numel:
            raise DamagedCheckpoint(
                f"{key} is not complete: {found} of {box.numel} elements at {box.offsets} are in "
                "the checkpoint"
            )

    def _copy(
        self, chunk: Chunk, common: Box, box: Box, target: torch.Tensor, key: str, verify: bool
    ) -> None:
        with self._entry(chunk.place, key) as data:
            stored = _find_tensor(data, key)
            if stored.size != chunk.sizes:
                raise DamagedCheckpoint(
                    f"{key} at {chunk.offsets} has shape {stored.size}, {METADATA} says "
                    f"{chunk.sizes}"
                )
            raw = data[stored.start : stored.start + stored.nbytes]
            if verify and zlib.crc32(raw) != stored.checksum:
                raise DamagedCheckpoint(
                    f"{key} at {chunk.offsets} is damaged: the checksum in {chunk.place.file} is "
                    "wrong"
                )
            source = torch.frombuffer(raw, dtype=stored.dtype).as_strided(
                stored.size, stored.stride, stored.storage_offset
            )
            for dim, length in enumerate(common.sizes):
                first = common.offsets[dim]
                source = source.narrow(dim, first - chunk.offsets[dim], length)
                target = target.narrow(dim, first - box.offsets[dim], length)
            target.copy_(source)
            del source, raw
        self._let_go(chunk.place)

    def _let_go(self, place: Place) -> None:
        """Pages that were read count as this process's memory until they are given back."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = place.offset // mmap.PAGESIZE * mmap.PAGESIZE
            length = place.offset + place.length - start
            self._maps[place.file].madvise(mmap.MADV_DONTNEED, start, length)

    def _entry(self, place: Place, key: str) -> memoryview:
        if place.transforms:
            raise ValueError(
                f"{key} was written with {', '.join(place.transforms)}, an extension of DCP that "
                "this reader does not have: read it with dcp.load and optimizer.sharded()"
            )
        mapped = self._maps.get(place.file)
        if mapped is None:
            mapped = self._maps[place.file] = self._open(place.file, key)
        if place.offset < 0 or place.length < 0 or place.offset + place.length > len(mapped):
            raise DamagedCheckpoint(
                f"{place.file} is too short: {key} would end at byte "
                f"{place.offset + place.length}, the file at {len(mapped)}"
            )
        return memoryview(mapped)[place.offset : place.offset + place.length]

    def _open(self, name: str, key: str) -> mmap.mmap:
        try:
            with open_inside(self._directory, name) as file:
                # Copy on write: torch wants memory that could be written to, and nobody does.
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"the file {name}, which holds {key}, is missing") from None
        except DamagedCheckpoint:
            raise
        except ValueError:
            raise DamagedCheckpoint(f"the file {name}, which holds {key}, is empty") from None
        except OSError as error:  # too large to be mapped, no permission, no such name
            raise DamagedCheckpoint(f"{shown(name)} cannot be read: {error.strerror}") from None


@functools.lru_cache(maxsize=1024)  # boxes of one shape are described by the same bytes
def _described_by(pickled: bytes) -> _Description:
    found = _TensorUnpickler(io.BytesIO(pickled)).load()
    if not isinstance(found, _Description) or not isinstance(found.dtype, torch.dtype):
        raise ValueError("it is no tensor")
    return found


def _require_stored(archive: zipfile.ZipFile, nbytes: int) -> None:
    """Why: ``torch.save`` compresses nothing, and what is compressed, or stands for the same bytes
    many times, may become any size."""
    if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
        raise ValueError("its bytes are compressed")
    if sum(info.file_size for info in archive.infolist()) > nbytes:
        raise ValueError("its bytes are not where they should be")


def _files_in(archive: zipfile.ZipFile) -> dict[str, bytes]:
    return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def _zipped(files: dict[str, bytes]) -> io.BytesIO:
    """An archive with these files. Why not the one that they come from: torch, which reads zip
    archives in a way of its own, might find another pickle in it than the one that was weighed."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"archive/{name}", content)
    file.seek(0)
    return file


def _find_tensor(data: memoryview, key: str) -> _StoredTensor:
    """Where the bytes of a tensor are in what ``torch.save`` wrote."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(data))) as archive:
            _require_stored(archive, len(data))
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            if archive.getinfo(names["data.pkl"]).file_size > _LARGEST_DESCRIPTION:
                raise ValueError("its description is too long")
            pickled = archive.read(names["data.pkl"])
            dtype, storage, offset, size, stride = _described_by(pickled)
            info = archive.getinfo(names[f"data/{storage}"])
        name_length, extra_length = struct.unpack_from("<HH", data, info.header_offset + 26)
        start = info.header_offset + 30 + name_length + extra_length
        stored = _StoredTensor(dtype, offset, size, stride, start, info.file_size, info.CRC)
        if start + info.file_size > len(data):
            raise ValueError("its bytes are not where they should be")
        if stored.reach * dtype.itemsize > info.file_size:
            raise ValueError("its shape does not fit its bytes")
        return stored
    except DamagedCheckpoint:
        raise
    except Exception as error:  # whatever a damaged archive may lead to
        raise DamagedCheckpoint(f"{key} is damaged: {error}") from None
