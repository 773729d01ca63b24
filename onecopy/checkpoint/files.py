"""The data files of a checkpoint: one format, written and read."""

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

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
    SafeUnpickler,
    as_count,
    as_sizes,
    as_text,
    require_harmless,
)
from onecopy.planning.layout import Chunk, is_dense
from onecopy.planning.text import shown
from onecopy.torch_private import REBUILD_TENSOR, rebuild_tensor

_ZIP_LIMIT = 2**32 - 2**20  # beyond, a zip archive needs longer fields


class DataFileWriter:
    """Appends entries to a data file of its own. A context manager; durable when it is left."""

    def __init__(self, directory: Path, name: str) -> None:
        self._name = name
        self._file = DirectFile(directory / name)

    def __enter__(self) -> DataFileWriter:
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

_ALIGNMENT = 64
_EPOCH = (1 << 5) | 1  # 1 January 1980, where the dates of zip archives begin


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """A file in an archive."""

    name: str
    size: int
    checksum: int
    offset: int = 0  # of its header in the archive

    def header(self, align: int | None = None) -> bytes:
        """What precedes its content. ``align`` is where the archive begins in a file: the content
        then begins at a multiple of 64 bytes there."""
        padding = b""
        if align is not None:
            start = align + self.offset + 30 + len(self.name) + 4
            padding = b"FB" + struct.pack("<H", -start % _ALIGNMENT)
            padding += bytes(-start % _ALIGNMENT)
        return (
            struct.pack("<4sHHH", b"PK\3\4", 20, 0, 0)
            + self._facts()
            + struct.pack("<HH", len(self.name), len(padding))
            + self.name.encode()
            + padding
        )

    def listing(self) -> bytes:
        """Its line in the directory of the archive."""
        return (
            struct.pack("<4sHHHH", b"PK\1\2", 20, 20, 0, 0)
            + self._facts()
            + struct.pack("<HHHHHII", len(self.name), 0, 0, 0, 0, 0, self.offset)
            + self.name.encode()
        )

    def _facts(self) -> bytes:
        return struct.pack("<HHIII", 0, _EPOCH, self.checksum, self.size, self.size)


def zip_directory(entries: Sequence[ZipEntry], offset: int) -> bytes:
    """The end of an archive, which begins at ``offset`` in it."""
    listings = b"".join(entry.listing() for entry in entries)
    count = len(entries)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(listings), offset, 0)
    return listings + end


class _Storage:
    """Stands for the bytes of the tensor."""


class _TensorPickler(pickle.Pickler):
    def __init__(self, file: Any, dtype: torch.dtype, numel: int) -> None:
        super().__init__(file, protocol=2)
        self._id = ("storage", _STORAGE_TYPES[dtype], "0", "cpu", numel)

    def persistent_id(self, obj: Any) -> Any:
        return self._id if isinstance(obj, _Storage) else None


class _Tensor:
    """Pickles as the tensor that it describes."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        hooks: OrderedDict[str, Any] = OrderedDict()
        self._arguments = (_Storage(), 0, size, stride, False, hooks)

    def __reduce__(self) -> Any:
        return rebuild_tensor(), self._arguments


def describe_tensor(tensor: torch.Tensor) -> bytes:
    """The pickle by which ``torch.load`` rebuilds a tensor from its bytes."""
    file = io.BytesIO()
    pickler = _TensorPickler(file, tensor.dtype, tensor.numel())
    pickler.dump(_Tensor(tuple(tensor.shape), tensor.stride()))
    return file.getvalue()


_STORAGE_TYPES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.uint8: torch.ByteStorage,
    torch.int8: torch.CharStorage,
    torch.int16: torch.ShortStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}
WRITTEN_HERE = frozenset(_STORAGE_TYPES)

_BUFFER_BYTES = 8 * 2**20
_BLOCK_BYTES = 4096  # what direct writes must be multiples of, in length, place and memory


class DirectFile:
    """A new file, written from start to end. A context manager; durable when it is left."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # begins at a page
        self._filled = 0
        self._flushed = 0
        self._is_direct = hasattr(os, "O_DIRECT")
        try:
            self._handle = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError:
            if path.exists() and path.stat().st_size:
                raise
            path.unlink(missing_ok=True)  # some systems make the file before they refuse
            self._handle = os.open(path, flags, 0o666)
            self._is_direct = False

    def tell(self) -> int:
        return self._flushed + self._filled

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            room = min(_BUFFER_BYTES - self._filled, len(view) - done)
            self._buffer[self._filled : self._filled + room] = view[done : done + room]
            self._filled += room
            done += room
            if self._filled == _BUFFER_BYTES:
                self._flush_buffer(_BUFFER_BYTES)
        return done

    def flush(self) -> None:
        """Nothing: blocks are written when they are full, the last when the file is closed."""

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                length = self.tell()
                self._flush_buffer(-(-self._filled // _BLOCK_BYTES) * _BLOCK_BYTES)
                os.ftruncate(self._handle, length)
                os.fsync(self._handle)
        finally:
            os.close(self._handle)

    def _flush_buffer(self, nbytes: int) -> None:
        done = 0
        with memoryview(self._buffer) as view:
            while done < nbytes:
                done += self._write_some(view[done:nbytes])
        self._flushed += self._filled
        self._filled = 0

    def _write_some(self, view: memoryview) -> int:
        try:
            return os.write(self._handle, view)
        except OSError:
            if not self._is_direct:
                raise
            self._go_on_through_the_cache()
            return os.write(self._handle, view)

    def _go_on_through_the_cache(self) -> None:
        """For file systems that open a file for direct writes and then refuse them, and for what
        is left after a write that ended within a block."""
        import fcntl

        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_direct = False


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


class _StoredStorage(NamedTuple):
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

    def __new__(
        cls, storage: _StoredStorage, offset: int, size: Any, stride: Any, *rest: Any
    ) -> Any:
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

    def persistent_load(self, pid: Any) -> _StoredStorage:
        _, dtype, key, *_ = pid
        return _StoredStorage(dtype if isinstance(dtype, torch.dtype) else None, as_text(key))


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

    def fill(self, box: Chunk, target: torch.Tensor, entry: TensorEntry, key: str) -> None:
        """Copy a box of a saved tensor into ``target``. Reads no more than that, save for the
        checksum of an entry whose first element is in the box: so each is verified once."""
        filled: list[Chunk] = []
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
        self,
        chunk: StoredChunk,
        common: Chunk,
        box: Chunk,
        target: torch.Tensor,
        key: str,
        verify: bool,
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
