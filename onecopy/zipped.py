"""The zip archive in which ``torch.save`` puts a tensor, for a tensor whose bytes are at hand.

Four files, stored without compression: a pickle that describes the tensor, its bytes, the order of
bytes in a number, and the version of the format. ``torch.load`` reads it.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onecopy.torch_private import rebuild_tensor

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
