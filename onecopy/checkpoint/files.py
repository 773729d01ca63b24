"""The data files of a checkpoint: their format, written and read.

A data file is a row of *entries*, each a tensor or a plain value as ``torch.save`` writes it: a zip
archive of uncompressed files,

    archive/data.pkl                      the value, or how a tensor is rebuilt from its storage
    archive/byteorder, archive/version
    archive/data/0                        the bytes of the storage

``.metadata`` says where each entry is. Files that are read are not trusted: checksums are compared,
and pickles are read by ``safe_pickle``. Read in this order: the table of storages,
``DataFileWriter``, ``DataFileReader``, ``Progress``.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onecopy.checkpoint.metadata import (
    METADATA,
    Place,
    StoredChunk,
    TensorEntry,
    ValueEntry,
    open_inside,
)
from onecopy.checkpoint.safe_pickle import (
    DamagedCheckpoint,
    Inert,
    Refused,
    SafeUnpickler,
    as_count,
    as_sizes,
    as_text,
    called,
    is_key,
    plain_value,
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
_BLOCK_BYTES = 4096  # what direct writes must be multiples of, in length, place and memory


class DataFileWriter:
    """A new data file, written from start to end. A context manager; durable when it is left.

    It is written past the page cache where the file system allows it, which is several times as
    fast.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._name = name
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # begins at a page
        self._filled = 0
        self._flushed = 0
        self._is_direct = hasattr(os, "O_DIRECT")
        path, flags = directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self._handle = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError:
            if path.exists() and path.stat().st_size:
                raise
            path.unlink(missing_ok=True)  # some systems make the file before they refuse
            self._handle = os.open(path, flags, 0o666)
            self._is_direct = False

    def __enter__(self) -> DataFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                length = self._flushed + self._filled
                self._write_buffer(-(-self._filled // _BLOCK_BYTES) * _BLOCK_BYTES)
                os.ftruncate(self._handle, length)
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
        address = tensor.data_ptr() or ctypes.addressof(_NIL)
        files = {
            b"archive/data.pkl": _describe(tensor),
            b"archive/byteorder": sys.byteorder.encode(),
            b"archive/version": b"3\n",
            b"archive/data/0": (ctypes.c_ubyte * tensor.nbytes).from_address(address),
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
                self._write_buffer(_BUFFER_BYTES)
        return done

    def flush(self) -> None:
        """For ``torch.save``: blocks are written when they are full, the last one at the end."""

    def _write_buffer(self, nbytes: int) -> None:
        done = 0
        with memoryview(self._buffer) as view:
            while done < nbytes:
                try:
                    done += os.write(self._handle, view[done:nbytes])
                except OSError:
                    if not self._is_direct:
                        raise
                    self._use_page_cache()
        self._flushed += self._filled
        self._filled = 0

    def _use_page_cache(self) -> None:
        """For file systems that open a file for direct writes and then refuse them, and for what
        is left after a write that ended within a block."""
        import fcntl

        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_direct = False


_NIL = ctypes.c_ubyte()


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


def _describe(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    _TensorPickler(file, protocol=2).dump(tensor)
    return file.getvalue()


# -------------------------------------------------------------------------- reading

_LONGEST = 1000  # characters of an error
_LARGEST_DESCRIPTION = 2**16  # bytes; a tensor's takes some hundred


@dataclass(frozen=True, slots=True)
class _StoredStorage:
    dtype: torch.dtype | None
    key: str  # its file is data/<key>


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """How a tensor is rebuilt from a storage."""

    dtype: torch.dtype
    key: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

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


class _RebuiltTensor(Inert):
    """Stands in for the function that rebuilds a tensor: keeps what describes it."""

    __slots__ = ()

    def __new__(
        cls, storage: _StoredStorage, offset: int, size: Any, stride: Any, *rest: Any
    ) -> Any:
        # Beside an untyped storage there is a dtype.
        dtype = next((item for item in rest if isinstance(item, torch.dtype)), storage.dtype)
        if dtype is None:
            raise Refused("a pickle of a tensor without a dtype: refused")
        sizes = as_sizes(size), as_sizes(stride)
        return _StoredTensor(dtype, storage.key, as_count(offset), *sizes)


class _NewOrderedDict(Inert):
    """Its items follow."""

    __slots__ = ()

    def __new__(cls) -> Any:
        return OrderedDict()


def _as_bytes(text: Any = "", encoding: Any = "latin1") -> bytes:
    """As protocol 2 writes bytes: as text of which each character is a byte."""
    if encoding not in ("latin1", "latin-1"):
        raise Refused("a pickle of bytes in another encoding than latin1: refused")
    return text if isinstance(text, bytes) else as_text(text).encode("latin1")


def _as_set(items: list[Any]) -> set[Any]:
    if not all(map(is_key, items)):
        raise Refused("a pickle that has items of its own in a set: refused")
    return set(items)


_STAND_INS = {
    **dict.fromkeys(REBUILD_TENSOR, _RebuiltTensor),
    ("collections", "OrderedDict"): _NewOrderedDict,
    ("torch", "Size"): called(lambda sizes: torch.Size(as_sizes(sizes))),
    ("_codecs", "encode"): called(_as_bytes),
    ("builtins", "bytes"): called(_as_bytes),
    ("builtins", "bytearray"): called(lambda *args: bytearray(_as_bytes(*args))),
    ("builtins", "complex"): called(complex),
    ("builtins", "set"): called(_as_set),
}


class _EntryUnpickler(SafeUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module in ("torch", "torch.storage") and name in (*_DTYPES, "UntypedStorage"):
            return _DTYPES.get(name)
        found = _STAND_INS.get(("builtins" if module == "__builtin__" else module, name))
        if found is None:
            raise DamagedCheckpoint(
                f"an entry names {module}.{name}, which no tensor needs: refused, and not run"
            )
        return found

    def persistent_load(self, pid: Any) -> _StoredStorage:
        _, dtype, key, *_ = pid
        return _StoredStorage(dtype if isinstance(dtype, torch.dtype) else None, as_text(key))


@functools.lru_cache(maxsize=1024)  # chunks of one shape are described by the same bytes
def _described_by(pickled: bytes) -> _StoredTensor:
    found = _EntryUnpickler(io.BytesIO(pickled)).load()
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


@contextlib.contextmanager
def _archive(data: memoryview) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """An entry, and the files in it by their names without the first folder.

    Why it must not be compressed: ``torch.save`` compresses nothing, and what is compressed, or
    stands for the same bytes many times, may become any size.
    """
    with zipfile.ZipFile(io.BufferedReader(_Window(data))) as archive:
        infos = archive.infolist()
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
            raise ValueError("its bytes are compressed")
        if sum(info.file_size for info in infos) > len(data):
            raise ValueError("its bytes are not where they should be")
        yield archive, {info.filename.partition("/")[2]: info for info in infos}


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

    def value(self, entry: ValueEntry, key: str) -> Any:
        """A plain value, which may hold tensors. Code is refused."""
        storages: dict[str, bytearray] = {}  # tensors may share one

        def tensor_of(leaf: Any) -> Any:
            if isinstance(leaf, torch.dtype):
                return leaf
            if not isinstance(leaf, _StoredTensor):
                raise Refused(f"a pickle that has a {type(leaf).__name__} for a value: refused")
            if leaf.key not in storages:
                storages[leaf.key] = bytearray(archive.read(files[f"data/{leaf.key}"]))
            return leaf.over(storages[leaf.key])

        try:
            with self._entry(entry.place, key) as data, _archive(data) as (archive, files):
                damaged = archive.testzip()
                if damaged is not None:
                    raise DamagedCheckpoint(f"{key} is damaged: the checksum of {damaged} is wrong")
                pickled = archive.read(files["data.pkl"])
                tree = _EntryUnpickler(io.BytesIO(pickled)).load()
                return plain_value(tree, len(pickled), tensor_of)
        except DamagedCheckpoint:
            raise
        except Exception as error:  # whatever a damaged entry may lead to
            raise DamagedCheckpoint(f"{key} cannot be read: {str(error)[:_LONGEST]}") from None

    def require_bytes(self, entry: TensorEntry, key: str) -> None:
        """Raise if there is less in the files than the tensor takes, before memory is given to what
        may be a lie."""
        there = sum(len(self._entry(chunk.place, key)) for chunk in entry.chunks)
        if math.prod(entry.shape) * entry.dtype.itemsize > there:
            raise DamagedCheckpoint(f"{key} is not complete: it has shape {shown(entry.shape)}")

    def fill(self, part: Chunk, target: torch.Tensor, entry: TensorEntry, key: str) -> None:
        """Copy a chunk of a saved tensor into ``target``. Reads no more than that, save for the
        checksum of an entry whose first element is in the chunk: so each is verified once."""
        filled: list[Chunk] = []
        for chunk in entry.chunks:
            common = part.overlap(chunk.offsets, chunk.sizes)
            if common is None:
                continue
            if any(common.overlap(other.offsets, other.sizes) for other in filled):
                raise DamagedCheckpoint(f"{key} has parts that overlap, at {common.offsets}")
            self._copy(chunk, common, _part(target, part.offsets, common), key)
            filled.append(common)
        found = sum(common.numel for common in filled)
        if found != part.numel:
            raise DamagedCheckpoint(
                f"{key} is not complete: {found} of {part.numel} elements at {part.offsets} are in "
                "the checkpoint"
            )

    def _copy(self, chunk: StoredChunk, common: Chunk, target: torch.Tensor, key: str) -> None:
        with self._entry(chunk.place, key) as data:
            source, raw, checksum = _tensor_in(data, key)
            if source.shape != chunk.sizes:
                raise DamagedCheckpoint(
                    f"{key} at {chunk.offsets} has shape {tuple(source.shape)}, {METADATA} says "
                    f"{chunk.sizes}"
                )
            if common.offsets == chunk.offsets and zlib.crc32(raw) != checksum:
                raise DamagedCheckpoint(
                    f"{key} at {chunk.offsets} is damaged: the checksum in {chunk.place.file} is "
                    "wrong"
                )
            target.copy_(_part(source, chunk.offsets, common))
            del source, raw
        # Pages that were read count as this process's memory until they are given back.
        if hasattr(mmap, "MADV_DONTNEED"):
            start = chunk.place.offset // mmap.PAGESIZE * mmap.PAGESIZE
            length = chunk.place.offset + chunk.place.length - start
            self._maps[chunk.place.file].madvise(mmap.MADV_DONTNEED, start, length)

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


def _tensor_in(data: memoryview, key: str) -> tuple[torch.Tensor, memoryview, int]:
    """A tensor in the memory of an entry; the bytes of its storage, and their checksum."""
    try:
        with _archive(data) as (archive, files):
            if files["data.pkl"].file_size > _LARGEST_DESCRIPTION:
                raise ValueError("its description is too long")
            stored = _described_by(archive.read(files["data.pkl"]))
            info = files[f"data/{stored.key}"]
        name_length, extra_length = struct.unpack_from("<HH", data, info.header_offset + 26)
        start = info.header_offset + 30 + name_length + extra_length
        if start + info.file_size > len(data):
            raise ValueError("its bytes are not where they should be")
        raw = data[start : start + info.file_size]
        return stored.over(raw), raw, info.CRC
    except DamagedCheckpoint:
        raise
    except Exception as error:  # whatever a damaged archive may lead to
        raise DamagedCheckpoint(f"{key} is damaged: {str(error)[:_LONGEST]}") from None


def _part(tensor: torch.Tensor, offsets: Sequence[int], part: Chunk) -> torch.Tensor:
    """A chunk of what ``tensor`` is a part of, which begins at ``offsets``."""
    for dim, (first, length) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        tensor = tensor.narrow(dim, first - offsets[dim], length)
    return tensor


# -------------------------------------------------------------------------- progress

_PATIENCE_SECONDS = 2.0
_INTERVAL_SECONDS = 0.2
_WIDTH = 30


class Progress:
    """Bytes done of a total. A context manager; shows itself only if there is somebody to look."""

    def __init__(self, title: str, total: int, visible: bool = True) -> None:
        self._title = title
        self._total = max(total, 1)
        self._done = 0
        self._visible = visible and sys.stderr is not None and sys.stderr.isatty()
        self._next = time.monotonic() + _PATIENCE_SECONDS
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r" + " " * 79 + "\r", end="", file=sys.stderr, flush=True)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if self._visible and now >= self._next:
            self._next = now + _INTERVAL_SECONDS
            self._shown = True
            share = min(self._done / self._total, 1.0)
            bar = "#" * round(share * _WIDTH)
            text = f"{self._title} [{bar:<{_WIDTH}}] {share:4.0%} of {self._total / 1e6:.0f} MB"
            print(f"\r{text[:78]}", end="", file=sys.stderr, flush=True)
