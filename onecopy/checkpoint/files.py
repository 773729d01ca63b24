"""The data files of a checkpoint: their format, written and read.

A data file is a row of *entries*, each a tensor or a plain value as ``torch.save`` writes it: a zip
archive of uncompressed files,

    archive/data.pkl                      the value, or how a tensor is rebuilt from its storage
    archive/byteorder, archive/version
    archive/data/0                        the bytes of the storage

``.metadata`` says where each entry is. Files that are read are not trusted: checksums are compared,
and pickles are read by ``safe_pickle``. Read in this order: the table of storages,
``DataFileWriter``, ``DataFileReader``, ``progress``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import math
import mmap
import os
import pickle
import struct
import sys
import time
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onecopy.checkpoint.metadata import METADATA, Entry, Place, Stored, open_inside
from onecopy.checkpoint.safe_pickle import (
    DamagedCheckpoint,
    Inert,
    SafeUnpickler,
    as_count,
    as_sizes,
    as_text,
    called,
    is_key,
    plain_value,
    reading,
)
from onecopy.planning.layout import Chunk, is_dense
from onecopy.planning.text import shown
from onecopy.torch_private import REBUILD_TENSOR, rebuild_tensor

# The dtypes of storages, by the names of their classes in pickles.
_DTYPES = {
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
}
_STORAGES = {dtype: getattr(torch, name) for name, dtype in _DTYPES.items()}

# -------------------------------------------------------------------------- writing

_ZIP_LIMIT = 2**32 - 2**20  # bytes; a larger archive needs longer fields
_ALIGNMENT = 64
_EPOCH = (1 << 5) | 1  # 1 January 1980, where the dates of zip archives begin
_BUFFER_BYTES = 8 * 2**20


class DataFileWriter:
    """A new data file, written from start to end. A context manager; durable when it is left.

    It is written past the page cache where the file system allows it, which is up to twice as fast
    and leaves the memory to others.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._name = name
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # begins at a page, as direct writes must
        self._filled = 0
        self._flushed = 0
        self._handle = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._write_directly(True)

    def __enter__(self) -> DataFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self._write_directly(False)  # what is left is no whole number of blocks
                self._write_buffer()
                os.fsync(self._handle)
        finally:
            os.close(self._handle)

    def append(self, value: Any) -> Place:
        """A tensor, or any plain value."""
        offset = self._flushed + self._filled
        file: Any = self
        if not isinstance(value, torch.Tensor):
            torch.save(value, file)
        elif value.dtype not in _STORAGES or value.nbytes >= _ZIP_LIMIT:
            torch.save(value.detach().cpu().clone(), file)
        else:
            self._append_tensor(value.detach().cpu(), offset)
        return Place(self._name, offset, self._flushed + self._filled - offset)

    def _append_tensor(self, tensor: torch.Tensor, offset: int) -> None:
        """The bytes from where they are, without a copy, as ``torch.save`` would write them.

        Why not ``torch.save``: it writes all of the storage of which a chunk is a view, and takes a
        third of a millisecond for a scalar.
        """
        tensor = tensor if is_dense(tensor) else tensor.contiguous()
        described = io.BytesIO()
        _TensorPickler(described, protocol=2).dump(tensor)
        memory = ctypes.c_ubyte * tensor.nbytes
        files = {
            b"archive/data.pkl": described.getvalue(),
            b"archive/byteorder": sys.byteorder.encode(),
            b"archive/version": b"3\n",
            b"archive/data/0": memory.from_address(tensor.data_ptr()) if tensor.nbytes else b"",
        }
        for part in _archived(files, offset):
            self.write(part)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            room = min(_BUFFER_BYTES - self._filled, len(view) - done)
            self._buffer[self._filled : self._filled + room] = view[done : done + room]
            self._filled += room
            done += room
            if self._filled == _BUFFER_BYTES:
                self._write_buffer()
        return done

    def flush(self) -> None:
        """For ``torch.save``: blocks are written when they are full, the last one at the end."""

    def _write_buffer(self) -> None:
        done = 0
        with memoryview(self._buffer) as view:
            while done < self._filled:
                try:
                    done += os.write(self._handle, view[done : self._filled])
                except OSError:
                    # Some file systems allow direct writes and then refuse them, and so does any
                    # after a write that ended within a block.
                    if not self._is_direct:
                        raise
                    self._write_directly(False)
        self._flushed += self._filled
        self._filled = 0

    def _write_directly(self, is_direct: bool) -> None:
        """Past the page cache or through it, where there is a choice."""
        self._is_direct = False  # whatever happens: who falls back on the cache tries that once
        with contextlib.suppress(ImportError, AttributeError, OSError):
            import fcntl

            flags = fcntl.fcntl(self._handle, fcntl.F_GETFL) & ~os.O_DIRECT
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | is_direct * os.O_DIRECT)
            self._is_direct = is_direct


def _archived(files: Mapping[bytes, Any], offset: int) -> Iterator[Any]:
    """A zip archive of these files, part by part. It begins at ``offset`` in the data file, where
    the content of its last file begins at a multiple of 64 bytes."""
    listings, at = b"", 0
    for number, (name, content) in enumerate(files.items(), start=1):
        extra = b""
        if number == len(files):
            padding = -(offset + at + 30 + len(name) + 4) % _ALIGNMENT
            extra = b"FB" + struct.pack("<H", padding) + bytes(padding)
        # version, flags, method, time, date, checksum, size twice, length of the name
        fields = (20, 0, 0, 0, _EPOCH, zlib.crc32(content), *[len(content)] * 2, len(name))
        header = struct.pack("<4s5H3IHH", b"PK\3\4", *fields, len(extra)) + name + extra
        listings += struct.pack("<4sH5H3I5H2I", b"PK\1\2", 20, *fields, 0, 0, 0, 0, 0, at) + name
        yield header
        yield content
        at += len(header) + len(content)
    count = len(files)
    yield listings + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(listings), at, 0)


class _TensorPickler(pickle.Pickler):
    """Writes a tensor as ``torch.save`` does: a call that rebuilds it from its storage, file 0."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        self._id = ("storage", _STORAGES[obj.dtype], "0", "cpu", obj.numel())
        hooks: OrderedDict[str, Any] = OrderedDict()
        arguments = obj.untyped_storage(), 0, tuple(obj.shape), obj.stride(), False, hooks
        return rebuild_tensor(), arguments

    def persistent_id(self, obj: Any) -> Any:
        return self._id if isinstance(obj, torch.UntypedStorage) else None


# -------------------------------------------------------------------------- reading

_LARGEST_DESCRIPTION = 2**16  # bytes; a tensor's takes some hundred


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype | None
    key: str  # its file is data/<key>


class _StoredTensor:
    """How a tensor is rebuilt from a storage. Stands in for the function that does it."""

    def __init__(self, storage: _Storage, offset: int, size: Any, stride: Any, *rest: Any) -> None:
        # Beside an untyped storage there is a dtype.
        dtype = next((item for item in rest if isinstance(item, torch.dtype)), storage.dtype)
        if dtype is None:
            raise ValueError("a pickle of a tensor without a dtype: refused")
        self.dtype, self.key, self.offset = dtype, storage.key, as_count(offset)
        self.size, self.stride = as_sizes(size), as_sizes(stride)

    def over(self, raw: Any) -> torch.Tensor:
        """The tensor, which shares memory with the bytes of its storage."""
        steps = ((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        reach = self.offset if 0 in self.size else self.offset + sum(steps) + 1
        if reach * self.dtype.itemsize > len(raw):
            raise ValueError("its shape does not fit its bytes")
        if 0 in self.size:
            return torch.empty(self.size, dtype=self.dtype, device="cpu")
        flat = torch.frombuffer(raw, dtype=self.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


class _NewOrderedDict(Inert):
    """Its items follow."""

    __slots__ = ()

    def __new__(cls) -> Any:
        return OrderedDict()


def _as_bytes(text: Any = "", encoding: Any = "latin1") -> bytes:
    """As protocol 2 writes bytes: as text of which each character is a byte."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("a pickle of bytes in another encoding than latin1: refused")
    return text if isinstance(text, bytes) else as_text(text).encode("latin1")


def _as_set(items: list[Any]) -> set[Any]:
    if not all(map(is_key, items)):
        raise ValueError("a pickle that has items of its own in a set: refused")
    return set(items)


_BUILTINS: dict[str, Any] = {
    "bytes": _as_bytes,
    "bytearray": lambda *args: bytearray(_as_bytes(*args)),
    "complex": complex,
    "set": _as_set,
}
_STAND_INS: dict[tuple[str, str], Any] = {
    **dict.fromkeys(REBUILD_TENSOR, _StoredTensor),
    **{
        (module, name): dtype
        for module in ("torch", "torch.storage")
        for name, dtype in (*_DTYPES.items(), ("UntypedStorage", None))
    },
    **{
        (module, name): called(make)
        for module in ("builtins", "__builtin__")
        for name, make in _BUILTINS.items()
    },
    ("collections", "OrderedDict"): _NewOrderedDict,
    ("torch", "Size"): called(lambda sizes: torch.Size(as_sizes(sizes))),
    ("_codecs", "encode"): called(_as_bytes),
}


class _EntryUnpickler(SafeUnpickler):
    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return _Storage(dtype if isinstance(dtype, torch.dtype) else None, as_text(key))


@functools.lru_cache(maxsize=1024)  # chunks of one shape are described by the same bytes
def _described_by(pickled: bytes) -> _StoredTensor:
    found = _EntryUnpickler(pickled, _STAND_INS).load()
    if not isinstance(found, _StoredTensor):
        raise ValueError("it is no tensor")
    return found


class _Window(io.RawIOBase):
    """A part of a mapped file, as a file."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        chunk = self._data[self._at : self._at + len(buffer)]
        buffer[: len(chunk)] = chunk
        self._at += len(chunk)
        return len(chunk)


class DataFileReader:
    """Reads entries of one checkpoint. A context manager: it keeps files open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}

    def __enter__(self) -> DataFileReader:
        return self

    def __exit__(self, *_: Any) -> None:
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):  # an exception under way may hold on to a view
                mapped.close()

    def read(self, entry: Entry) -> Any:
        """All of a tensor, or a value."""
        first = entry[0]
        if not first.dtype:
            return self.value(first)
        # Before memory is given to what may be a lie.
        there = sum(len(self._mapped(stored)) for stored in entry)
        if math.prod(first.shape) * getattr(torch, first.dtype).itemsize > there:
            raise DamagedCheckpoint(
                f"{first.key} is not complete: it has shape {shown(first.shape)}"
            )
        tensor = torch.empty(first.shape, dtype=getattr(torch, first.dtype), device="cpu")
        self.fill(Chunk((0,) * tensor.dim(), first.shape, 0, 0), tensor, entry)
        return tensor

    def value(self, stored: Stored) -> Any:
        """A plain value, which may hold tensors. Code is refused."""
        storages: dict[str, bytearray] = {}  # tensors may share one

        def made(leaf: Any) -> Any:
            if isinstance(leaf, torch.dtype):
                return leaf
            if not isinstance(leaf, _StoredTensor):
                raise ValueError(f"a pickle that has a {type(leaf).__name__} for a value: refused")
            if leaf.key not in storages:
                storages[leaf.key] = bytearray(archive.read(files[f"data/{leaf.key}"]))
            return leaf.over(storages[leaf.key])

        with self._archive(stored) as (_, archive, files):
            pickled = archive.read(files["data.pkl"])  # and compares the checksum
            tree = _EntryUnpickler(pickled, _STAND_INS).load()
            return plain_value(tree, len(pickled), made)

    def fill(self, part: Chunk, target: torch.Tensor, entry: Entry) -> None:
        """Copy a chunk of a saved tensor into ``target``. Reads no more than that, save for the
        checksum of an entry whose first element is in the chunk: so each is verified once."""
        key, filled = entry[0].key, list[Chunk]()
        for stored in entry:
            common = part.overlap(stored.offsets, stored.sizes)
            if common is None:
                continue
            if any(common.overlap(other.offsets, other.sizes) for other in filled):
                raise DamagedCheckpoint(f"{key} has parts that overlap, at {common.offsets}")
            self._copy(stored, common, _part(target, part.offsets, common))
            filled.append(common)
        found = sum(common.numel for common in filled)
        if found != part.numel:
            raise DamagedCheckpoint(
                f"{key} is not complete: {found} of {part.numel} elements at {part.offsets} are in "
                "the checkpoint"
            )

    def _copy(self, stored: Stored, common: Chunk, target: torch.Tensor) -> None:
        key, place = stored.key, stored.place
        with self._archive(stored) as (data, archive, files):
            if files["data.pkl"].file_size > _LARGEST_DESCRIPTION:
                raise ValueError("its description is too long")
            described = _described_by(archive.read(files["data.pkl"]))
            info = files[f"data/{described.key}"]
            name_length, extra_length = struct.unpack_from("<HH", data, info.header_offset + 26)
            start = info.header_offset + 30 + name_length + extra_length
            if start + info.file_size > len(data):
                raise ValueError("its bytes are not where they should be")
            raw = data[start : start + info.file_size]
            source = described.over(raw)
        if source.shape != stored.sizes:
            raise DamagedCheckpoint(
                f"{key} at {stored.offsets} has shape {tuple(source.shape)}, {METADATA} says "
                f"{stored.sizes}"
            )
        if common.offsets == stored.offsets and zlib.crc32(raw) != info.CRC:
            raise DamagedCheckpoint(
                f"{key} at {stored.offsets} is damaged: the checksum in {place.file} is wrong"
            )
        target.copy_(_part(source, stored.offsets, common))
        # Pages that were read count as this process's memory until they are given back.
        if hasattr(mmap, "MADV_DONTNEED"):
            start = place.offset // mmap.PAGESIZE * mmap.PAGESIZE
            length = place.offset + place.length - start
            self._maps[place.file].madvise(mmap.MADV_DONTNEED, start, length)

    @contextlib.contextmanager
    def _archive(
        self, stored: Stored
    ) -> Iterator[tuple[memoryview, zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
        """An entry, and the files in it by their names without the first folder.

        Why it must not be compressed: ``torch.save`` compresses nothing, and what is compressed, or
        stands for the same bytes many times, may become any size.
        """
        data = self._mapped(stored)
        with (
            reading(stored.key),
            zipfile.ZipFile(io.BufferedReader(_Window(data))) as archive,
        ):
            infos = archive.infolist()
            if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
                raise ValueError("its bytes are compressed")
            if sum(info.file_size for info in infos) > len(data):
                raise ValueError("its bytes are not where they should be")
            yield data, archive, {info.filename.partition("/")[2]: info for info in infos}

    def _mapped(self, stored: Stored) -> memoryview:
        key, place = stored.key, stored.place
        if place.transforms:
            raise ValueError(
                f"{key} was written with {', '.join(place.transforms)}, an extension of DCP that "
                "this reader does not have: read it with dcp.load and optimizer.sharded()"
            )
        mapped = self._maps.get(place.file)
        if mapped is None:
            mapped = self._maps[place.file] = self._open(place.file, key)
        end = place.offset + place.length
        if place.offset < 0 or place.length < 0 or end > len(mapped):
            raise DamagedCheckpoint(
                f"{place.file} is too short: {key} would end at byte {end}, the file at "
                f"{len(mapped)}"
            )
        return memoryview(mapped)[place.offset : end]

    def _open(self, name: str, key: str) -> mmap.mmap:
        try:
            with open_inside(self._directory, name) as file:
                if not os.fstat(file.fileno()).st_size:
                    raise DamagedCheckpoint(f"the file {name}, which holds {key}, is empty")
                # Copy on write: torch wants memory that could be written to, and nobody does.
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"the file {name}, which holds {key}, is missing") from None
        except OSError as error:  # too large to be mapped, no permission, no such name
            raise DamagedCheckpoint(f"{shown(name)} cannot be read: {error.strerror}") from None


def _part(tensor: torch.Tensor, offsets: Sequence[int], part: Chunk) -> torch.Tensor:
    """A chunk of what ``tensor`` is a part of, which begins at ``offsets``."""
    for dim, (first, length) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        tensor = tensor.narrow(dim, first - offsets[dim], length)
    return tensor


# -------------------------------------------------------------------------- progress

_PATIENCE_SECONDS = 2.0
_INTERVAL_SECONDS = 0.2
_WIDTH = 30


@contextlib.contextmanager
def progress(title: str, total: int, is_visible: bool) -> Iterator[Callable[[int], None]]:
    """A bar of bytes done, for somebody who looks. Yields the function that adds to them."""
    is_visible = is_visible and sys.stderr is not None and sys.stderr.isatty()
    done, is_shown = 0, False
    due = time.monotonic() + _PATIENCE_SECONDS

    def add(nbytes: int) -> None:
        nonlocal done, is_shown, due
        done += nbytes
        now = time.monotonic()
        if is_visible and now >= due:
            is_shown, due = True, now + _INTERVAL_SECONDS
            share = min(done / max(total, 1), 1.0)
            bar = "#" * round(share * _WIDTH)
            text = f"{title} [{bar:<{_WIDTH}}] {share:4.0%} of {total / 1e6:.0f} MB"
            print(f"\r{text[:78]}", end="", file=sys.stderr, flush=True)

    try:
        yield add
    finally:
        if is_shown:
            print("\r" + " " * 79 + "\r", end="", file=sys.stderr, flush=True)
