"""Checkpoint directories: exchanged with torch in both directions, and safe to read.

The fuzzing saves a small optimizer, damages the files, and loads into another optimizer: either
the load raises, or everything is as it was saved.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import errno
import functools
import gc
import io
import math
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World, distributed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import write_past_the_cache
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Adam

from onecopy import ZeroRedundancyOptimizer
from onecopy.checkpoint.files import DataFileReader, DataFileWriter
from onecopy.checkpoint.metadata import (
    METADATA,
    Metadata,
    Place,
    Stored,
    parse_metadata,
    read_metadata,
    write_metadata,
)
from onecopy.checkpoint.safe_pickle import DamagedCheckpoint
from onecopy.planning.layout import Chunk

BUSY = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


# ------------------------------------------------------------------------------- samples


def samples() -> dict[str, torch.Tensor]:
    """Every kind of tensor that state may be."""
    torch.manual_seed(3)
    base = torch.randn(6, 5, 4)
    bits = torch.randn(4, 3)
    dtypes = {
        "fp64": torch.float64,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "complex64": torch.complex64,
    }
    return {
        "fp32": base.clone(),
        **{name: (10 * bits).to(dtype) for name, dtype in dtypes.items()},
        "int64": torch.arange(-5, 7).view(3, 4),
        "bool": bits > 0,
        "permuted": base.permute(2, 0, 1),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "with gaps": base[::2, 1:, ::3],
        "scalar": torch.tensor(7.5),
        "scalar of ints": torch.tensor(3),
        "one element": torch.tensor([2.0]),
        "empty": torch.empty(0, 3),
    }


VALUES = {"number": 0.25, "text": "ü", "nothing": None, "pair": (0.9, 0.999), "list": [1, [2]]}


def halves(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The tensor in two boxes, if it can be cut."""
    zeros = (0,) * tensor.dim()
    if tensor.dim() == 0 or tensor.shape[0] < 2:
        return [(zeros, tensor)]
    cut = (tensor.shape[0] + 1) // 2
    return [(zeros, tensor[:cut]), ((cut, *zeros[1:]), tensor[cut:])]


def write(directory: Path, tree: dict[str, Any], cut: bool = True) -> None:
    """As several ranks would: tensors in two files, values in the first."""
    entries = []
    with (
        DataFileWriter(directory, "__0_a.distcp") as first,
        DataFileWriter(directory, "__1_a.distcp") as second,
    ):
        for key, value in tree.items():
            path = ("optim", key)
            if not isinstance(value, torch.Tensor):
                entries.append(Stored(f"optim.{key}", path, first.append(value)))
                continue
            boxes = halves(value) if cut else [((0,) * value.dim(), value)]
            for writer, (offsets, part) in zip((first, second), boxes, strict=False):
                dtype = str(value.dtype).removeprefix("torch.")
                place = writer.append(part)
                shape, sizes = tuple(value.shape), tuple(part.shape)
                entries.append(Stored(f"optim.{key}", path, place, dtype, shape, offsets, sizes))
    write_metadata(directory, entries)


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch's functions warn that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def contents_of(directory: Path) -> Metadata:
    return parse_metadata(read_metadata(directory))


def read(directory: Path) -> dict[str, Any]:
    """Everything in a checkpoint, by its key, with our reader."""
    with DataFileReader(directory) as reader:
        return {key: reader.read(entry) for key, entry in contents_of(directory).items()}


def whole(shape: tuple[int, ...]) -> Chunk:
    return Chunk((0,) * len(shape), tuple(shape), 0, 0)


def assert_equal(found: Any, expected: Any, key: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), key
        assert torch.equal(found, expected), key
    else:
        assert found == expected, key


# ------------------------------------------------------------------------------- torch reads ours


@pytest.mark.parametrize("cut", [False, True])
def test_torch_loads_what_we_write(tmp_path: Path, cut: bool) -> None:
    tree = {**samples(), **VALUES}
    write(tmp_path, tree, cut)
    empty = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for k, v in tree.items()}
    target = {"optim": empty}
    quietly(dcp.load, target, checkpoint_id=str(tmp_path))
    for key, expected in tree.items():
        assert_equal(target["optim"][key], expected, key)


def test_torchs_metadata_reader_sees_the_shapes_and_places_that_we_wrote(tmp_path: Path) -> None:
    tree = {**samples(), **VALUES}
    write(tmp_path, tree)
    seen = dcp.FileSystemReader(str(tmp_path)).read_metadata()
    assert seen.state_dict_metadata.keys() == {f"optim.{key}" for key in tree}
    for key, tensor in samples().items():
        described = seen.state_dict_metadata[f"optim.{key}"]
        assert described.size == tensor.shape
        assert described.properties.dtype == tensor.dtype
        assert sum(math.prod(chunk.sizes) for chunk in described.chunks) == tensor.numel()
    assert seen.planner_data["optim.fp32"] == ("optim", "fp32")


def test_every_entry_is_a_file_of_torch_save_as_large_as_its_values(tmp_path: Path) -> None:
    tree = {**samples(), **VALUES}
    with DataFileWriter(tmp_path, "data") as writer:
        places = {key: writer.append(value) for key, value in tree.items()}
    data = (tmp_path / "data").read_bytes()
    for key, place in places.items():
        entry = io.BytesIO(data[place.offset : place.offset + place.length])
        assert_equal(torch.load(entry, weights_only=True), tree[key], key)
        assert place.length < 4000, "a view must not bring all of its storage"


def test_torch_converts_what_we_write_to_a_plain_file(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    write(tmp_path / "", {**samples(), **VALUES})
    quietly(dcp_to_torch_save, str(tmp_path), str(tmp_path / "plain.pt"))
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    for key, expected in {**samples(), **VALUES}.items():
        assert_equal(plain["optim"][key], expected, key)


def test_a_write_that_fails_past_the_cache_and_through_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    refused = OSError(errno.EINVAL, "refused")
    writer = DataFileWriter(tmp_path, "data")
    writer.append(torch.ones(3))
    write_past_the_cache(writer)
    # What was switched on cannot be switched off.
    monkeypatch.setattr(fcntl, "fcntl", mock.Mock(side_effect=refused))
    again = AssertionError("it tries for ever")
    monkeypatch.setattr(os, "write", mock.Mock(side_effect=[refused, refused, again]))
    with pytest.raises(OSError, match="refused"), writer:
        pass


def test_a_data_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        DataFileWriter(tmp_path, "data")
    assert (tmp_path / "data").read_bytes() == b"mine"


# ------------------------------------------------------------------------------- we read torch's


def save_with_torch(directory: Path, tree: dict[str, Any]) -> None:
    quietly(dcp.save, {"optim": tree}, checkpoint_id=str(directory))


def test_we_read_what_torch_saves(tmp_path: Path) -> None:
    tree = {**samples(), **VALUES}
    save_with_torch(tmp_path, tree)
    found = read(tmp_path)
    for key in samples():
        assert_equal(found[f"optim.{key}"], tree[key], key)
    assert contents_of(tmp_path)["optim.fp32"][0].path == ("optim", "fp32")
    for key in ("number", "text", "nothing"):
        assert_equal(found[f"optim.{key}"], tree[key], key)


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=BUSY)
def test_any_box_of_any_tensor_can_be_read_alone(saved_samples: Path, data: st.DataObject) -> None:
    directory = saved_samples
    key = data.draw(st.sampled_from(list(samples())))
    tensor = samples()[key]
    offsets, sizes = [], []
    for size in tensor.shape:
        offsets.append(data.draw(st.integers(0, size)))
        sizes.append(data.draw(st.integers(0, size - offsets[-1])))
    expected = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    target = torch.full_like(expected.contiguous(), 1)
    entry = contents_of(directory)[f"optim.{key}"]
    with DataFileReader(directory) as reader:
        reader.fill(Chunk(tuple(offsets), tuple(sizes), 0, 0), target, entry)
    assert torch.equal(target, expected)


@pytest.fixture(scope="module", params=["ours", "torch's"])
def saved_samples(request: Any, tmp_path_factory: Any) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    (write if request.param == "ours" else save_with_torch)(directory, samples())
    return directory


@distributed(2, 3)
def test_we_read_what_torch_saves_of_distributed_tensors(world: World, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    torch.manual_seed(0)
    full = torch.randn(7, 5)
    tree = {f"along {dim}": distribute_tensor(full, mesh, [Shard(dim)]) for dim in (0, 1)}
    assert all(isinstance(tensor, DTensor) for tensor in tree.values())
    dcp.save({"optim": tree}, checkpoint_id=str(tmp_path))
    entries = contents_of(tmp_path)
    with DataFileReader(tmp_path) as reader:
        for key in tree:
            entry = entries[f"optim.{key}"]
            assert entry[0].dtype
            assert len(entry) == world.size
            for top in range(7):
                for left in range(5):
                    target = torch.zeros(7 - top, 5 - left)
                    box = Chunk((top, left), (7 - top, 5 - left), 0, 0)
                    reader.fill(box, target, entry)
                    assert torch.equal(target, full[top:, left:])


def test_a_tensor_with_a_part_missing_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"x": torch.randn(6, 2)})
    entry = contents_of(tmp_path)["optim.x"]
    for kept in entry:
        with (
            DataFileReader(tmp_path) as reader,
            pytest.raises(DamagedCheckpoint, match=r"not complete.*"),
        ):
            reader.fill(whole((6, 2)), torch.empty(6, 2), [kept])


def test_a_tensor_with_a_part_that_is_there_twice_in_place_of_another_is_refused(
    tmp_path: Path,
) -> None:
    write(tmp_path, {"x": torch.randn(6, 2)})
    entry = contents_of(tmp_path)["optim.x"]
    doubled = [entry[0], entry[0]]
    with DataFileReader(tmp_path) as reader, pytest.raises(DamagedCheckpoint):
        reader.fill(whole((6, 2)), torch.empty(6, 2), doubled)


def test_a_tensor_that_is_said_to_be_smaller_than_its_parts_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"x": torch.randn(6, 2)})
    file = tmp_path / METADATA
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["optim.x"].size = torch.Size((6, 1))
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpoint, match=r"optim\.x that reaches beyond"):
        contents_of(tmp_path)


def test_a_key_without_a_path_is_refused_where_the_others_have_one(tmp_path: Path) -> None:
    """Else an option would be taken for something else's, and left at what it was."""
    write(tmp_path, {"x": torch.randn(6, 2), "eps": 0.5})
    file = tmp_path / METADATA
    metadata = pickle.loads(file.read_bytes())
    del metadata.planner_data["optim.eps"]
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpoint, match=r"path of optim\.eps"):
        contents_of(tmp_path)


# ------------------------------------------------------------------------------- booby traps


class Trap:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def mark(marker: Path) -> Trap:
    return Trap(os.mkdir, str(marker))


TRAPS: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda marker: Trap(os.system, f"touch {marker}"),
    "os.mkdir": mark,
    "open": lambda marker: Trap(builtins.open, str(marker), "w"),
    "eval": lambda marker: Trap(eval, f"__import__('os').mkdir({str(marker)!r})"),
    "exec": lambda marker: Trap(exec, f"__import__('os').mkdir({str(marker)!r})"),
    "getattr": lambda _: Trap(getattr, Trap(__import__, "os"), "system"),
    "copyreg": lambda _: Trap(copyreg._reconstructor, Path, object, None),
    "partial": lambda marker: Trap(functools.partial, os.system, f"touch {marker}"),
    "subprocess": lambda marker: Trap(subprocess.call, ["touch", str(marker)]),
    "torch.load": lambda marker: Trap(torch.load, str(marker)),
    "torch.save": lambda marker: Trap(torch.save, 1, str(marker)),
    "torch.hub": lambda marker: Trap(torch.hub.load, str(marker.parent), "x"),
    "torch._utils": lambda _: Trap(torch._utils._import_dotted_name, "os.system"),
    "nested": lambda marker: {"a": [({"b": mark(marker)},)]},
    "in a set": lambda marker: Trap(set, [Trap(os.mkdir, str(marker))]),
    "map": lambda marker: Trap(list, Trap(map, os.mkdir, [str(marker)])),
}


@pytest.mark.parametrize(
    "name", [name for name in TRAPS if name not in ("torch.load", "torch.hub")]
)
def test_the_traps_work_where_nobody_looks(tmp_path: Path, name: str) -> None:
    """Those that leave a mark do, with a plain unpickler: else the tests below prove nothing."""
    marker = tmp_path / "marker"
    silent = {"getattr", "copyreg", "partial", "torch._utils"}  # they only fetch something
    with warnings.catch_warnings(), contextlib.suppress(TypeError):  # "map" runs in the pickler
        warnings.simplefilter("ignore")  # a file that nobody closes
        pickle.loads(pickle.dumps(TRAPS[name](marker)))
        gc.collect()
    assert marker.exists() == (name not in silent)


def spring_places(payload: Any) -> dict[str, Any]:
    """A metadata object with the payload in each place where one could be."""
    index = torch_metadata.MetadataIndex("optim.x")
    info = {index: payload}
    described = {"optim.x": torch_metadata.BytesStorageMetadata()}
    make = torch_metadata.Metadata
    return {
        "instead of everything": payload,
        "as an entry": make({"optim.x": payload}, None, {}),
        "as the planner's data": make(described, payload, {}),
        "as a place": make(described, None, info),
        "in a chunk": make(
            {
                "optim.x": torch_metadata.TensorStorageMetadata(
                    torch_metadata.TensorProperties(dtype=torch.float32), payload, []
                )
            },
            None,
            {},
        ),
        "as an attribute nobody reads": make(described, None, {}, storage_meta=payload),
    }


@pytest.mark.parametrize("place", spring_places(None))
@pytest.mark.parametrize("name", TRAPS)
def test_a_booby_trapped_metadata_file_is_refused_and_not_run(
    tmp_path: Path, name: str, place: str
) -> None:
    marker = tmp_path / "marker"
    data = pickle.dumps(spring_places(TRAPS[name](marker))[place])
    with pytest.raises(DamagedCheckpoint, match="refused, and not run"):
        parse_metadata(data)
    assert not marker.exists()


def by_hand(*lines: bytes) -> bytes:
    """Text is written V...\\n, and becomes what a pickle of today has in its place."""

    def text(found: re.Match[bytes]) -> bytes:
        return b"X" + len(found[1]).to_bytes(4, "little") + found[1]

    return b"\x80\x04" + re.sub(rb"V(.*)\n", text, b"".join(lines)) + b"."


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cos\nsystem\n(Vtouch {marker}\ntR",
        b"(cos\nsystem\nVtouch {marker}\no",  # OBJ
        b"(Vtouch {marker}\nios\nsystem\n",  # INST
        b"c__builtin__\neval\n(Vopen('{marker}','w')\ntR",
        b"cposix\nsystem\n(Vtouch {marker}\ntR",
        b"ctorch\nos.system\n(Vtouch {marker}\ntR",  # a dotted name
        b"ctorch\nSize.__class__\n.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__\n.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n(Vtouch {marker}\ntR",
        b"ctorch\nfloat32.__class__\n.",
        b"\x82\x01",  # EXT1, the extension registry
        b"P1\n",  # a persistent id
    ],
)
def test_pickles_made_by_hand_are_refused_and_not_run(tmp_path: Path, opcodes: bytes) -> None:
    marker = tmp_path / "marker"
    data = by_hand(opcodes.replace(b"{marker}", str(marker).encode()))
    with pytest.raises(DamagedCheckpoint):
        parse_metadata(data)
    assert not marker.exists()


def test_setting_attributes_of_what_the_metadata_may_name_reaches_nothing_outside() -> None:
    """BUILD on a function or a class that is handed out would change it for everybody."""
    for module, name in (
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ):
        code = f"c{module}\n{name}\n}}Vpoisoned\nVyes\nsb".encode()
        with pytest.raises(DamagedCheckpoint):
            parse_metadata(by_hand(code))
    from onecopy.checkpoint import safe_pickle

    for handed_out in (safe_pickle.Record, safe_pickle.Inert):
        assert not hasattr(handed_out, "poisoned")


def entry_with(payload: Any, directory: Path) -> Place:
    """A data file whose one entry has this for its description, with checksums that are right."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(payload, protocol=2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", bytes(4))
    (directory / "data").write_bytes(buffer.getvalue())
    return Place("data", 0, len(buffer.getvalue()))


@pytest.mark.parametrize("name", TRAPS)
def test_a_booby_trapped_tensor_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    place = entry_with(TRAPS[name](marker), tmp_path)
    entry = [Stored("x", ("x",), place, "float32", (1,), (0,), (1,))]
    with DataFileReader(tmp_path) as reader, pytest.raises(DamagedCheckpoint):
        reader.fill(whole((1,)), torch.zeros(1), entry)
    assert not marker.exists()


@pytest.mark.parametrize("name", TRAPS)
def test_a_booby_trapped_value_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    place = entry_with(TRAPS[name](marker), tmp_path)
    with DataFileReader(tmp_path) as reader, pytest.raises(DamagedCheckpoint):
        reader.value(Stored("x", ("x",), place))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["os.system", "open", "eval"])
def test_a_booby_trapped_value_in_the_old_format_of_torch_save_is_refused(
    tmp_path: Path, name: str
) -> None:
    marker = tmp_path / "marker"
    torch.save(TRAPS[name](marker), tmp_path / "data", _use_new_zipfile_serialization=False)
    place = Place("data", 0, (tmp_path / "data").stat().st_size)
    with DataFileReader(tmp_path) as reader, pytest.raises(DamagedCheckpoint):
        reader.value(Stored("x", ("x",), place))
    assert not marker.exists()


@distributed(1, 2)
@pytest.mark.parametrize("where", ["metadata", "data"])
def test_loading_a_booby_trapped_checkpoint_raises_on_all_ranks_and_runs_nothing(
    world: World, tmp_path: Path, where: str
) -> None:
    opt = small_optimizer(seed=1)
    opt.save(tmp_path / "c")
    marker = tmp_path / "marker"
    if world.rank == 0:
        trap = pickle.dumps(mark(marker), protocol=2)
        if where == "metadata":
            (tmp_path / "c" / METADATA).write_bytes(trap)
        else:
            for file in (tmp_path / "c").glob("*.distcp"):
                put_in_every_entry(file, trap)
    dist.barrier()
    with pytest.raises(ValueError, match=r"not.run|cannot be read|damaged"):
        opt.load(tmp_path / "c")
    assert not marker.exists()


def put_in_every_entry(file: Path, payload: bytes) -> None:
    """Replace the beginning of each pickle, and its checksums, without moving anything."""
    import zlib

    data = bytearray(file.read_bytes())
    for info_at, local in pickles_in(bytes(data)):
        size = int.from_bytes(data[info_at + 24 : info_at + 28], "little")
        name, extra = (int.from_bytes(data[local + i : local + i + 2], "little") for i in (26, 28))
        start = local + 30 + name + extra
        if len(payload) > size:
            continue
        data[start : start + size] = payload.ljust(size, b".")
        checksum = zlib.crc32(data[start : start + size]).to_bytes(4, "little")
        data[info_at + 16 : info_at + 20] = checksum
    file.write_bytes(bytes(data))


def pickles_in(data: bytes) -> list[tuple[int, int]]:
    """(central record, local record) of each data.pkl in a file of many archives."""
    found, locals_, at = [], [], -1
    while (at := data.find(b"PK\x03\x04", at + 1)) >= 0:
        length = int.from_bytes(data[at + 26 : at + 28], "little")
        if data[at + 30 : at + 30 + length].endswith(b"data.pkl"):
            locals_.append(at)
    while (at := data.find(b"PK\x01\x02", at + 1)) >= 0:
        length = int.from_bytes(data[at + 28 : at + 30], "little")
        if data[at + 46 : at + 46 + length].endswith(b"data.pkl"):
            found.append(at)
    return list(zip(found, locals_, strict=True))


# ------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "link", "sub/../../outside"])
def test_a_place_outside_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "checkpoint"
    (inside / "sub").mkdir(parents=True)
    with DataFileWriter(tmp_path, "outside") as writer:
        place = writer.append(1)
    (inside / "link").symlink_to(tmp_path / "outside")
    with (
        DataFileReader(inside) as reader,
        pytest.raises(DamagedCheckpoint, match="out of the checkpoint"),
    ):
        reader.value(Stored("x", ("x",), Place(name, 0, place.length)))
    with DataFileReader(tmp_path) as reader:  # where it is inside
        assert reader.value(Stored("x", ("x",), place)) == 1


def test_a_checkpoint_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write(tmp_path / "real", {"x": torch.ones(3)})
    (tmp_path / "link").symlink_to("real")
    assert torch.equal(read(tmp_path / "link")["optim.x"], torch.ones(3))


@pytest.mark.parametrize("place", [(-1, 10), (0, -1), (0, 10**9), (10**18, 1), (0, 2**63), (5, 0)])
def test_a_place_beyond_the_file_is_refused(tmp_path: Path, place: tuple[int, int]) -> None:
    with DataFileWriter(tmp_path, "data") as writer:
        writer.append(1)
    with DataFileReader(tmp_path) as reader, pytest.raises(DamagedCheckpoint):
        reader.value(Stored("x", ("x",), Place("data", *place)))


@pytest.mark.parametrize("name", ["", ".", "sub", "missing", "a\0b", "x" * 5000])
def test_a_place_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "sub").mkdir()
    with DataFileReader(tmp_path) as reader, pytest.raises((ValueError, OSError)):
        reader.value(Stored("x", ("x",), Place(name, 0, 10)))


def test_a_metadata_file_that_claims_much_memory_does_not_get_it() -> None:
    """The C unpickler makes room for as many memos as the highest number that is named."""
    limit = 300e6
    script = (
        "import resource\n"
        "from onecopy.checkpoint.metadata import parse_metadata, DamagedCheckpoint\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: parse_metadata(b'\\x80\\x04Nr' + (2**26).to_bytes(4, 'little') + b'.')\n"
        "except DamagedCheckpoint: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    grown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert grown.returncode == 0, grown.stderr
    assert int(grown.stdout) * 1024 < limit


# ------------------------------------------------------------------------------- fuzzing


def small_optimizer(seed: int, steps: int = 1) -> ZeroRedundancyOptimizer:
    """Different for every seed in state and in all options; a tensor among them."""
    torch.manual_seed(seed)
    named = [
        ("a.w", torch.nn.Parameter(torch.randn(4, 3))),
        ("b", torch.nn.Parameter(torch.ones(5))),
    ]
    groups = [
        {"params": [named[0]], "lr": torch.tensor(0.1 * seed), "weight_decay": 0.01 * seed},
        {"params": [named[1]], "lr": 0.2 * seed, "betas": (0.5, 1 - 0.1 * seed)},
    ]
    opt = ZeroRedundancyOptimizer(groups, Adam, eps=1e-8 * seed, amsgrad=True, foreach=False)
    for _ in range(steps):
        for _, param in named:
            param.grad = torch.randn(param.shape)
        opt.step()
    return opt


def everything(opt: ZeroRedundancyOptimizer) -> bytes:
    """State and options as bytes that are equal if and only if those are."""
    opt.consolidate_state_dict()
    return repr(bits(opt.state_dict())).encode() if opt.rank == 0 else b""


def bits(tree: Any) -> Any:
    if isinstance(tree, dict):
        return sorted((str(key), bits(value)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return [bits(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        flat = tree.contiguous().view(-1).view(torch.uint8)
        return str(tree.dtype), tuple(tree.shape), flat.tolist()
    return tree


def flip(data: bytes, random_: random.Random) -> bytes:
    """One to three bits, or all of a byte."""
    changed = bytearray(data)
    for _ in range(random_.choice([1, 1, 1, 2, 3])):
        at = random_.randrange(len(changed))
        changed[at] ^= 255 if random_.random() < 0.1 else 1 << random_.randrange(8)
    return bytes(changed)


def truncate(data: bytes, random_: random.Random) -> bytes:
    return data[: random_.randrange(len(data))]


def limit_memory(extra: int = 2**32) -> None:
    """So that what a damaged file makes us allocate cannot hurt the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def fuzz(
    world: World, directory: Path, damages: list[tuple[str, bytes]]
) -> tuple[int, int, list[str]]:
    """Load after each damage, (file, its new content); (refusals, loads, what went wrong)."""
    source = small_optimizer(seed=1)
    expected = everything(source)
    target = small_optimizer(seed=2)
    start = everything(target)
    assert world.rank != 0 or start != expected
    undo = directory.parent / "start"
    target.save(undo)
    refused, loaded, wrong = 0, 0, []
    for number, (name, data) in enumerate(damages):
        original = (directory / name).read_bytes()
        dist.barrier()
        if world.rank == 0:
            (directory / name).write_bytes(data)
        dist.barrier()
        try:
            target.load(directory)
            loaded += 1
            if everything(target) != expected:
                wrong.append(f"{number} {name}: silently other values")
            target.load(undo)
        except (ValueError, OSError):
            refused += 1
            if number % 20 == 0 and everything(target) != start:
                wrong.append(f"{number} {name}: refused, but something was changed")
        except Exception as error:
            wrong.append(f"{number} {name}: {error!r}"[:300])
        dist.barrier()
        if world.rank == 0:
            (directory / name).write_bytes(original)
        dist.barrier()
    return refused, loaded, wrong


def random_damages(directory: Path, count: int, seed: int) -> list[tuple[str, bytes]]:
    """The same on every rank; files in turn, so that each has its share."""
    random_ = random.Random(seed)
    files = sorted(path.name for path in directory.iterdir())
    made = []
    for number in range(count):
        name = files[number % len(files)]
        change = random_.choice([flip, flip, flip, truncate])
        made.append((name, change((directory / name).read_bytes(), random_)))
    return made


def saved_small_optimizer(world: World, tmp_path: Path) -> Path:
    small_optimizer(seed=1).save(tmp_path / "saved")
    dist.barrier()
    return tmp_path / "saved"


@distributed(1, 2, fresh=True, timeout=170)
def test_a_damaged_file_is_refused_or_loads_what_was_saved(world: World, tmp_path: Path) -> None:
    limit_memory()
    directory = saved_small_optimizer(world, tmp_path)
    damages = random_damages(directory, {1: 200, 2: 50}[world.size], seed=7)
    refused, loaded, wrong = fuzz(world, directory, damages)
    print(f"{refused} damaged checkpoints were refused, {loaded} loaded")
    assert wrong == []
    assert refused > 0.6 * len(damages)


@distributed(1, 2)
@pytest.mark.parametrize("option", [b"eps", b"weight_decay", b"param_groups", b"lr"])
def test_a_changed_letter_in_a_name_of_an_option_is_noticed(
    world: World, tmp_path: Path, option: bytes
) -> None:
    """Wherever in the metadata the name is; names have no checksum there."""
    directory = saved_small_optimizer(world, tmp_path)
    data = (directory / METADATA).read_bytes()
    damages, at = [], -1
    while (at := data.find(option, at + 1)) >= 0:
        changed = bytearray(data)
        changed[at + len(option) - 1] ^= 1
        damages.append((METADATA, bytes(changed)))
    assert damages
    _, _, wrong = fuzz(world, directory, damages)
    assert wrong == []


@distributed(1, 2)
def test_a_changed_bit_in_the_elements_of_any_tensor_is_noticed(
    world: World, tmp_path: Path
) -> None:
    """Elements are a small part of such small files: random damage seldom meets them."""
    directory = saved_small_optimizer(world, tmp_path)
    random_ = random.Random(5)
    damages = []
    for key, entry in contents_of(directory).items():
        for chunk in entry if entry[0].dtype else ():
            data = bytearray((directory / chunk.place.file).read_bytes())
            start, stop = elements_of(bytes(data), chunk.place)
            assert stop - start == math.prod(chunk.sizes) * getattr(torch, chunk.dtype).itemsize, (
                key
            )
            data[random_.randrange(start, stop)] ^= 1 << random_.randrange(8)
            damages.append((chunk.place.file, bytes(data)))
    assert len(damages) >= 9
    refused, _, wrong = fuzz(world, directory, damages)
    assert wrong == []
    assert refused == len(damages)


def elements_of(data: bytes, place: Place) -> tuple[int, int]:
    """Where in a file the elements of a tensor are."""
    entry = io.BytesIO(data[place.offset : place.offset + place.length])
    with zipfile.ZipFile(entry) as archive:
        (info,) = (i for i in archive.infolist() if i.filename.endswith("/data/0"))
    at = place.offset + info.header_offset
    name, extra = (int.from_bytes(data[at + i : at + i + 2], "little") for i in (26, 28))
    start = at + 30 + name + extra
    return start, start + info.file_size


@pytest.mark.slow
@distributed(1, 2, 3, fresh=True, timeout=900)
@pytest.mark.parametrize("seed", range(3))
def test_many_damaged_files_are_refused_or_load_what_was_saved(
    world: World, tmp_path: Path, seed: int
) -> None:
    limit_memory()
    directory = saved_small_optimizer(world, tmp_path)
    damages = random_damages(directory, 3000 // world.size, seed=100 + seed)
    _, _, wrong = fuzz(world, directory, damages)
    assert wrong == []


@pytest.mark.slow
@distributed(1, fresh=True, timeout=1800)
@pytest.mark.parametrize("quarter", range(4))
def test_every_bit_of_the_metadata_matters_or_does_not(
    world: World, tmp_path: Path, quarter: int
) -> None:
    limit_memory()
    directory = saved_small_optimizer(world, tmp_path)
    data = (directory / METADATA).read_bytes()
    damages = []
    for bit in range(quarter, 8 * len(data), 4):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        damages.append((METADATA, bytes(changed)))
    _, _, wrong = fuzz(world, directory, damages)
    assert wrong == []


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=BUSY)
def test_a_damaged_checkpoint_of_torchs_is_refused_or_read_as_it_was(
    pristine: Path, data: st.DataObject
) -> None:
    """Every kind of tensor and value, with our reader alone."""
    directory = pristine.parent / "damaged"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(pristine, directory)
    name = data.draw(st.sampled_from(sorted(path.name for path in pristine.iterdir())))
    original = (pristine / name).read_bytes()
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, 8 * len(original) - 1))
        changed = bytearray(original)
        changed[at // 8] ^= 1 << at % 8
    else:
        changed = bytearray(original[: data.draw(st.integers(0, len(original) - 1))])
    (directory / name).write_bytes(changed)
    try:
        found = read(directory)
    except (ValueError, OSError):
        return
    expected = read(pristine)
    for key in found.keys() & expected.keys():  # names have no checksum: another one is missing
        assert bits(found[key]) == bits(expected[key]), key


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: Any) -> Path:
    directory = tmp_path_factory.mktemp("fuzz") / "pristine"
    directory.mkdir()
    save_with_torch(directory, {**samples(), **VALUES})
    return directory
