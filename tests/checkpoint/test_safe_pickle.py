"""Checkpoints with bombs in them are refused, wherever the bomb is, and quickly."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bombs import ALL, BOMBS, PRIME, doubled, doubled_tuple, each_refused, text
from fuzzing import bits
from harness import World, distributed
from test_files import small_optimizer, spring_places
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from onecopy.checkpoint.files import DataFileReader
from onecopy.checkpoint.metadata import (
    METADATA,
    Place,
    Stored,
    parse_metadata,
)
from onecopy.checkpoint.safe_pickle import DamagedCheckpoint
from onecopy.planning.layout import Chunk

# ------------------------------------------------------------------------------- the metadata


HERE = "HERE"


def metadata_places() -> dict[str, Any]:
    """Metadata with a text in each place where a bomb could be."""
    make, index = torch_metadata.Metadata, torch_metadata.MetadataIndex
    value = {"optim.x": torch_metadata.BytesStorageMetadata()}
    info = {index("optim.x"): _StorageInfo("a", 0, 1)}

    def transformed(descriptors: Any) -> Any:
        found = _StorageInfo("a", 0, 1)
        found.transform_descriptors = descriptors  # torch 2.6 has no such field
        return found

    def at(offset: Any) -> Any:
        found = index("optim.x")
        object.__setattr__(found, "offset", offset)
        return found

    def tensor(size: Any = (1,), offsets: Any = (0,), sizes: Any = (1,), dtype: Any = None) -> Any:
        chunks = [torch_metadata.ChunkStorageMetadata(offsets, sizes)]
        properties = torch_metadata.TensorProperties(dtype=torch.float32)
        made = torch_metadata.TensorStorageMetadata(properties, size, chunks)
        made.properties = properties if dtype is None else dtype
        return make({"optim.x": made}, None, {index("optim.x", (0,)): _StorageInfo("a", 0, 1)})

    return {
        **spring_places(HERE),
        "a name": make({HERE: torch_metadata.BytesStorageMetadata()}, None, info),
        "a name in the table": make(value, None, {index(HERE): _StorageInfo("a", 0, 1)}),
        "an offset in the table": make(value, None, {at(HERE): _StorageInfo("a", 0, 1)}),
        "a file": make(value, None, {index("optim.x"): _StorageInfo(HERE, 0, 1)}),
        "an offset": make(value, None, {index("optim.x"): _StorageInfo("a", HERE, 1)}),
        "a length": make(value, None, {index("optim.x"): _StorageInfo("a", 0, HERE)}),
        "transforms": make(value, None, {index("optim.x"): transformed(HERE)}),
        "a transform": make(value, None, {index("optim.x"): transformed((HERE,))}),
        "a path": make(value, {"optim.x": HERE}, info),
        "a step of a path": make(value, {"optim.x": ("optim", HERE)}, info),
        "offsets of a chunk": tensor(offsets=HERE),
        "an offset of a chunk": tensor(offsets=(HERE,)),
        "sizes of a chunk": tensor(sizes=HERE),
        "a size of a chunk": tensor(sizes=(HERE,)),
        "a size": tensor(size=(HERE,)),
        "properties": tensor(dtype=HERE),
    }


def planted(data: bytes, bomb: bytes) -> bytes:
    assert text(HERE) in data
    return data.replace(text(HERE), bomb, 1)


PLACES = {name: pickle.dumps(found, protocol=2) for name, found in metadata_places().items()}


def test_the_places_are_right() -> None:
    """Without a bomb most of them are read to the end; and the bombs are pickles."""
    read = parse_metadata(planted(PLACES["a name"], text("optim.x")))
    assert list(read) == ["optim.x"]
    nested = pickle.loads(b"\x80\x02" + doubled_tuple(3) + b".")
    assert nested == ((((), ()), ((), ())), (((), ()), ((), ())))
    lists = pickle.loads(b"\x80\x02" + doubled(b"]", lambda x: b"(" + x + x + b"e", 3) + b".")
    assert lists[-1] == [[[], []], [[], []]]


@pytest.mark.parametrize("name", ALL)
def test_a_bomb_in_metadata_is_refused_wherever_it_is(name: str) -> None:
    everywhere = name in ("a doubled tuple", "a deep tuple", "a list in itself", "doubled dicts")
    places = PLACES if everywhere else ("instead of everything", "a size", "a path", "a file")
    each_refused(
        {
            place: lambda place=place: parse_metadata(planted(PLACES[place], ALL[name]))
            for place in places
        },
        may_pass=True,
    )


def many_names(count: int, chunks: int) -> bytes:
    """All of them with the same long list of parts."""
    index = torch_metadata.MetadataIndex
    part = torch_metadata.ChunkStorageMetadata(torch.Size((0,)), torch.Size((1,)))
    described = torch_metadata.TensorStorageMetadata(
        torch_metadata.TensorProperties(dtype=torch.float32), torch.Size((1,)), [part] * chunks
    )
    names = [f"optim.{i}" for i in range(count)]
    info = _StorageInfo("a", 0, 1)
    return pickle.dumps(
        torch_metadata.Metadata(
            dict.fromkeys(names, described), None, {index(name, (0,)): info for name in names}
        )
    )


def of_one_hash(count: int) -> bytes:
    """Keys of the table whose offsets are multiples of a prime."""
    steps = [tuple(PRIME * ((k >> 2 * dim) % 4) for dim in range(9)) for k in range(count)]
    info = _StorageInfo("a", 0, 1)
    table = {torch_metadata.MetadataIndex(f"optim.{k}"): info for k in range(count)}
    for key, offset in zip(table, steps, strict=True):
        object.__setattr__(key, "fqn", "optim.x")
        object.__setattr__(key, "offset", offset)
    return pickle.dumps(torch_metadata.Metadata({"optim.x": None}, None, table))


def test_lists_that_all_entries_share_do_not_multiply() -> None:
    data = many_names(20_000, 20_000)
    each_refused({"chunks": lambda: parse_metadata(data)})


def test_keys_that_would_all_have_the_same_hash_do_not() -> None:
    data = of_one_hash(20_000)
    each_refused({"hashes": lambda: parse_metadata(data)}, may_pass=True)


# ------------------------------------------------------------------------------- the entries


def entry_of(pickled: bytes, directory: Path, nbytes: int = 4) -> Place:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", bytes(nbytes))
    (directory / "data").write_bytes(buffer.getvalue())
    return Place("data", 0, len(buffer.getvalue()))


def read_value(pickled: bytes, directory: Path) -> Any:
    with DataFileReader(directory) as reader:
        return reader.value(Stored("x", ("x",), entry_of(pickled, directory)))


def in_a_value(bomb: bytes) -> dict[str, bytes]:
    return {
        "itself": bomb,
        "in a set": b"c__builtin__\nset\n](" + bomb + b"e\x85R",
        "called": bomb + b")R",
        "in an attribute": b"ccollections\nOrderedDict\n)R" + b"}" + text("a") + bomb + b"sb",
        "as an id": bomb + b"Q",
    }


@pytest.mark.parametrize("name", ALL)
def test_a_bomb_in_a_value_is_refused(tmp_path: Path, name: str) -> None:
    each_refused(
        {
            place: lambda data=b"\x80\x02" + data + b".": read_value(data, tmp_path)
            for place, data in in_a_value(ALL[name]).items()
        }
    )


VALUES = (
    *({"a": [1, 2.5, None, True, "x"], 3: (), (1, "b"): {}}, [[[[]]]], {1, 2}, 1j, 2**70, -5, "ü"),
    *(
        torch.ones(3),
        [torch.ones(2)] * 3,
        torch.float32,
        torch.Size((2,)),
        b"\xff",
        bytearray(b"a"),
    ),
    *([(0.9, 0.999)] * 1000, {"names": [f"layer.{i}.weight" for i in range(1000)]}),
)


@pytest.mark.parametrize("at", range(len(VALUES)))
def test_values_are_read_as_they_were(tmp_path: Path, at: int) -> None:
    file = io.BytesIO()
    torch.save(VALUES[at], file)
    (tmp_path / "data").write_bytes(file.getvalue())
    with DataFileReader(tmp_path) as reader:
        found = reader.value(Stored("x", ("x",), Place("data", 0, len(file.getvalue()))))
    assert type(found) is type(VALUES[at])
    assert bits(found) == bits(VALUES[at])


def description(key: bytes, offset: bytes, size: bytes, stride: bytes, rest: bytes) -> bytes:
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + key + text("cpu") + b"K\x01tQ"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + size + stride + rest + b"tR"
    return b"\x80\x02" + call + b"."


GOOD = (text("0"), b"K\x00", b"K\x01\x85", b"K\x01\x85", b"\x89ccollections\nOrderedDict\n)R")


def read_tensor(pickled: bytes, directory: Path) -> torch.Tensor:
    target = torch.ones(1)
    place = entry_of(pickled, directory)
    entry = [Stored("x", ("x",), place, "float32", (1,), (0,), (1,))]
    with DataFileReader(directory) as reader:
        reader.fill(Chunk((0,), (1,), 0, 0), target, entry)
    return target


def in_a_tensor(bomb: bytes) -> dict[str, bytes]:
    places = {
        name: description(*GOOD[:at], bomb, *GOOD[at + 1 :])
        for at, name in enumerate(("the key", "the offset", "the size", "the stride"))
    }
    dtype = b"ctorch\nfloat32\n"
    alike = b"\x80\x02(" + dtype + bomb + b"K\x00K\x01\x85K\x01\x85t."
    hooks = b"\x89ccollections\nOrderedDict\n](" + bomb + b"e\x85R"
    return {**places, "alike": alike, "in hooks": description(*GOOD[:4], hooks)}


@pytest.mark.parametrize("name", ALL)
def test_a_bomb_in_a_tensor_is_refused_or_not_looked_at(tmp_path: Path, name: str) -> None:
    assert torch.equal(read_tensor(description(*GOOD), tmp_path), torch.zeros(1))
    each_refused(
        {
            place: lambda data=data: read_tensor(data, tmp_path)
            for place, data in in_a_tensor(ALL[name]).items()
        },
        may_pass=True,
    )


def test_the_same_bytes_under_many_names_are_refused(tmp_path: Path) -> None:
    """A directory of an archive may name its files as often as it likes."""
    place = entry_of(b"\x80\x02N.", tmp_path, nbytes=10**6)
    data = (tmp_path / "data").read_bytes()
    start, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    listing, tail, times = data[start:end], bytearray(data[end:]), 100
    tail[8:12] = (4 * times).to_bytes(2, "little") * 2
    tail[12:16] = (len(listing) * times).to_bytes(4, "little")
    many = data[:start] + listing * times + tail
    (tmp_path / "many").write_bytes(many)
    with DataFileReader(tmp_path) as reader:
        assert reader.value(Stored("x", ("x",), place)) is None
        with pytest.raises(DamagedCheckpoint, match="not where they should be"):
            reader.value(Stored("x", ("x",), Place("many", 0, len(many))))


# ------------------------------------------------------------------------------- load and save


def with_bomb(directory: Path, name: str, where: str) -> None:
    """A good checkpoint, with this in its metadata, or in place of an option."""
    if where == "metadata":
        (directory / METADATA).write_bytes(b"\x80\x02}" + BOMBS[name] + b"Ns.")
        return
    place = entry_of(b"\x80\x02}" + BOMBS[name] + b"Ns.", directory)
    (directory / "data").rename(directory / "__9_0123456789ab.distcp")
    read = pickle.loads((directory / METADATA).read_bytes())
    index = torch_metadata.MetadataIndex("optim.param_groups.1.lr")
    read.storage_data[index] = _StorageInfo("__9_0123456789ab.distcp", 0, place.length)
    (directory / METADATA).write_bytes(pickle.dumps(read))


@distributed(1, 2, 3)
@pytest.mark.parametrize("where", ["metadata", "an option"])
@pytest.mark.parametrize("name", ["a doubled tuple", "a deep tuple"])
def test_loading_a_bomb_is_refused_on_all_ranks_and_changes_nothing(
    world: World, tmp_path: Path, name: str, where: str
) -> None:
    small_optimizer(seed=1).save(tmp_path)
    dist.barrier()
    if world.rank == 0:
        with_bomb(tmp_path, name, where)
    dist.barrier()
    opt = small_optimizer(seed=2)
    before = bits([dict(state) for state in opt.state.values()]), bits(opt.param_groups)
    for strict in (True, False):
        with pytest.raises(
            ValueError, match=r"(is damaged|cannot be read): a pickle that .*: refused"
        ):
            opt.load(tmp_path, strict=strict)
    assert (bits([dict(state) for state in opt.state.values()]), bits(opt.param_groups)) == before
    if where == "metadata":
        with pytest.raises(
            ValueError, match=r"(is damaged|cannot be read): a pickle that .*: refused"
        ):
            opt.save(tmp_path)
    dist.barrier()
    opt.save(tmp_path / "other")
