"""Whatever has happened to a checkpoint on disk: `load` takes what was saved, or refuses, and the
optimizer is as it was.

`test_archive.py` flips and cuts at random. Here the classes of damage are named, so that each of
them is met: lengths at which a file was cut, files that are something else, metadata that lies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzzing import Tally, alone, bits, cases, tally  # noqa: F401
from harness import World, run_on_ranks
from hypothesis import given
from hypothesis import strategies as st
from test_archive import TRAPS, flip, put_in_every_entry, small_optimizer
from torch.distributed.checkpoint import metadata as torch_metadata

from onecopy import ZeroRedundancyOptimizer
from onecopy.archive import METADATA

pytestmark = pytest.mark.usefixtures("alone")

Damage = Callable[[Path, Path, random.Random], Any]  # file, another checkpoint, chance

# ------------------------------------------------------------------------------- the file itself


def cut_to(length: Callable[[int], int]) -> Damage:
    def damage(file: Path, _: Path, __: random.Random) -> None:
        os.truncate(file, length(file.stat().st_size))

    return damage


def rewritten(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    def damage(file: Path, _: Path, chance: random.Random) -> None:
        file.write_bytes(change(file.read_bytes(), chance))

    return damage


def in_its_place(make: Callable[[Path, Path], Any]) -> Damage:
    def damage(file: Path, other: Path, _: random.Random) -> None:
        file.unlink()
        make(file, other)

    return damage


def make_socket(file: Path, _: Path) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as made:  # a path too long
        made.bind(str(file))


def make_sparse(file: Path, _: Path) -> None:
    file.touch()
    os.truncate(file, 2**40)


def swap(file: Path, _: Path, chance: random.Random) -> None:
    """Names exchanged within the checkpoint."""
    neighbour = chance.choice([each for each in sorted(file.parent.iterdir()) if each != file])
    spare = file.with_name("spare")
    file.rename(spare)
    neighbour.rename(file)
    spare.rename(neighbour)


def noise(data: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(len(data))


def shuffled(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(1, len(data))
    return data[at:] + data[:at]


FILES: dict[str, Damage] = {
    "cut to nothing": cut_to(lambda _: 0),
    "cut to a byte": cut_to(lambda _: 1),
    "cut in the header": cut_to(lambda _: 20),
    "cut in the middle": cut_to(lambda size: size // 2),
    "cut before the last byte": cut_to(lambda size: size - 1),
    "longer": cut_to(lambda size: size + 4096),
    "flipped": rewritten(flip),
    "noise": rewritten(noise),
    "zeros": rewritten(lambda data, _: bytes(len(data))),
    "twice": rewritten(lambda data, _: data + data),
    "shuffled": rewritten(shuffled),
    "missing": in_its_place(lambda *_: None),
    "of another checkpoint": lambda file, other, _: shutil.copy(next(other.glob("*.distcp")), file),
    "swapped": swap,
    "a directory": in_its_place(lambda file, _: file.mkdir()),
    "a fifo": in_its_place(lambda file, _: os.mkfifo(file)),
    "a socket": in_its_place(make_socket),
    "a loop": in_its_place(lambda file, _: file.symlink_to(file.name)),
    "a link to nothing": in_its_place(lambda file, _: file.symlink_to("nothing")),
    "a link outside": in_its_place(lambda file, other: file.symlink_to(other / file.name)),
    "a link to endless zeros": in_its_place(lambda file, _: file.symlink_to("/dev/zero")),
    "a link to /dev/null": in_its_place(lambda file, _: file.symlink_to("/dev/null")),
    "a terabyte": in_its_place(make_sparse),
}

# ------------------------------------------------------------------------------- metadata that lies

NUMBERS = (-1, 0, 1, 2**31, 2**62, 2**63, 2**70, -(2**63), 10**5000)
ODD_VALUES = (None, "x", 1.5, True, float("nan"), (), [], {}, b"", torch.float32, (2**40, 2**40))


def unfrozen(obj: Any, name: str, value: Any) -> None:
    object.__setattr__(obj, name, value)


def lie_about_a_place(read: Any, chance: random.Random) -> None:
    index = chance.choice(sorted(read.storage_data, key=repr))
    name = chance.choice(["relative_path", "offset", "length", "transform_descriptors"])
    paths = ("../x", "/etc/passwd", ".", "", "a\0b", METADATA, "x" * 5000, "\ud800", "/dev/zero")
    value = chance.choice(paths if name == "relative_path" else (*NUMBERS, *ODD_VALUES))
    unfrozen(read.storage_data[index], name, value)


def lie_about_a_tensor(read: Any, chance: random.Random) -> None:
    tensors = [e for e in read.state_dict_metadata.values() if hasattr(e, "chunks")]
    entry = chance.choice(tensors)
    sizes = tuple(chance.choice(NUMBERS) for _ in range(chance.randrange(4)))
    kind = chance.randrange(5)
    if kind == 0:
        entry.size = chance.choice((sizes, *ODD_VALUES))
    elif kind == 1:
        entry.properties.dtype = chance.choice((torch.float64, torch.complex128, *ODD_VALUES))
    elif kind == 2:
        entry.chunks = chance.choice(([], entry.chunks * 2, entry.chunks * 1000, *ODD_VALUES))
    else:
        chunk = chance.choice(entry.chunks)
        unfrozen(chunk, chance.choice(["offsets", "sizes"]), chance.choice((sizes, *ODD_VALUES)))


def lie_about_names(read: Any, chance: random.Random) -> None:
    key = chance.choice(sorted(read.state_dict_metadata))
    other = chance.choice(sorted(read.state_dict_metadata))
    kind = chance.randrange(6)
    if kind == 0:
        del read.state_dict_metadata[key]
    elif kind == 1:
        read.state_dict_metadata[key] = read.state_dict_metadata[other]
    elif kind == 2:
        read.planner_data[key] = chance.choice((read.planner_data[other], *ODD_VALUES))
    elif kind == 3:
        read.state_dict_metadata[chance.choice(ODD_VALUES[:4])] = read.state_dict_metadata[key]
    elif kind == 4:
        read.planner_data = chance.choice(ODD_VALUES)
    else:
        indices = sorted(read.storage_data, key=repr)
        a, b = chance.choice(indices), chance.choice(indices)
        read.storage_data[a], read.storage_data[b] = read.storage_data[b], read.storage_data[a]


def lie_about_everything(read: Any, chance: random.Random) -> None:
    field = chance.choice(dataclasses.fields(torch_metadata.Metadata)).name
    setattr(read, field, chance.choice(ODD_VALUES))


def lying(lie: Callable[[Any, random.Random], None]) -> Damage:
    """Metadata that is a sound pickle of the right classes, and says something else."""

    def damage(file: Path, other: Path, chance: random.Random) -> None:
        read = pickle.loads((other.parent / "mine" / METADATA).read_bytes())
        lie(read, chance)
        (file.parent / METADATA).write_bytes(pickle.dumps(read))

    return damage


LIES: dict[str, Damage] = {
    "places": lying(lie_about_a_place),
    "tensors": lying(lie_about_a_tensor),
    "names": lying(lie_about_names),
    "everything": lying(lie_about_everything),
    "metadata of another": lambda file, other, _: shutil.copy(other / METADATA, file.parent),
}

# ------------------------------------------------------------------------------- hostile pickles


def trapped(name: str) -> Damage:
    def damage(file: Path, other: Path, chance: random.Random) -> None:
        payload = pickle.dumps(TRAPS[name](other.parent / "marker"), protocol=2)
        if file.name == METADATA or chance.random() < 0.3:
            file.write_bytes(payload)
        else:
            put_in_every_entry(file, payload)

    return damage


HOSTILE = {f"trap: {name}": trapped(name) for name in TRAPS}
DAMAGES = {**FILES, **LIES, **HOSTILE}


# ------------------------------------------------------------------------------- one rank


@pytest.fixture(scope="module")
def saved(alone: None, tmp_path_factory: Any) -> Path:  # noqa: F811
    """Two checkpoints, `mine` and `other`."""
    directory = tmp_path_factory.mktemp("checkpoints")
    small_optimizer(seed=1).save(directory / "mine")
    small_optimizer(seed=3).save(directory / "other")
    return directory


def picture(opt: ZeroRedundancyOptimizer) -> Any:
    return (
        bits([dict(state) for state in opt.state.values()]),
        bits([dict(group) for group in opt.param_groups]),
        opt._plan.digest,
    )


def is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def loaded(directory: Path) -> Any:
    opt = small_optimizer(seed=2)
    opt.load(directory)
    return bits([dict(state) for state in opt.state.values()])


@given(data=st.data())
@cases(300)
def test_fuzz_load(tally: Tally, saved: Path, data: st.DataObject) -> None:  # noqa: F811
    directory = saved / "damaged"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(saved / "mine", directory)
    names = data.draw(st.lists(st.sampled_from(sorted(DAMAGES)), min_size=1, max_size=2))
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    for name in names:
        files = sorted(path for path in directory.iterdir() if is_plain(path))
        with contextlib.suppress(OSError, ValueError, pickle.UnpicklingError, EOFError):
            DAMAGES[name](chance.choice(files), saved / "other", chance)
    opt = small_optimizer(seed=2)
    before = picture(opt)
    if tally.attempt(lambda: opt.load(directory)):
        state = bits([dict(state) for state in opt.state.values()])
        assert state in (loaded(saved / "mine"), loaded(saved / "other"))
    else:
        assert picture(opt) == before
    assert not (saved / "marker").exists()


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_fuzz_saving_over_what_is_damaged(tally: Tally, saved: Path, name: str) -> None:  # noqa: F811
    """It is replaced or refused; nothing outside of the directory is touched."""
    outside = {file: file.read_bytes() for file in (saved / "other").iterdir()}
    opt = small_optimizer(seed=1)
    for seed in range(3):
        directory = saved / "damaged"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(saved / "mine", directory)
        files = sorted(path for path in directory.iterdir() if path.is_file())
        DAMAGES[name](files[seed % len(files)], saved / "other", random.Random(seed))
        if tally.attempt(lambda: opt.save(directory)):
            assert loaded(directory) == loaded(saved / "mine")
        assert {file: file.read_bytes() for file in (saved / "other").iterdir()} == outside
        assert not (saved / "marker").exists()


# ------------------------------------------------------------------------------- two ranks


def load_on_both(world: World, directory: Path) -> tuple[str, bool]:
    opt = small_optimizer(seed=2)
    before = picture(opt)
    raised = ""
    try:
        opt.load(directory)
    except (ValueError, TypeError, OSError) as error:
        raised = f"{type(error).__name__}: {error}"
        assert picture(opt) == before
    dist.barrier()
    return raised, picture(opt) == before


def save_on_both(world: World, directory: Path, seed: int) -> None:
    small_optimizer(seed).save(directory)


@pytest.mark.parametrize("name", sorted({**FILES, **LIES}))
def test_fuzz_both_ranks_refuse_or_load_alike(
    tally: Tally,  # noqa: F811
    tmp_path: Path,
    name: str,
) -> None:
    for number, seed in (("mine", 1), ("other", 3)):
        run_on_ranks(2, save_on_both, tmp_path / number, seed)
    for seed in range(2):
        directory = tmp_path / f"damaged {seed}"
        shutil.copytree(tmp_path / "mine", directory)
        files = sorted(path for path in directory.iterdir() if path.is_file())
        DAMAGES[name](files[-1 - seed], tmp_path / "other", random.Random(seed))
        (first, kept), (second, also) = run_on_ranks(2, load_on_both, directory)
        assert (first, kept) == (second, also)
        tally.refused += bool(first)
        tally.accepted += not first
