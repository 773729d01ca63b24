"""Whatever has happened to a checkpoint on disk: `load` takes what was saved, or refuses, and the
optimizer is as it was.

`test_files.py` flips and cuts at random. Here the classes of damage are named, so that each of
them is met: lengths at which a file was cut, files that are something else, metadata that lies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
import torch.distributed.checkpoint as dcp
from fuzzing import Tally, alone, bits, cases, judge, tally  # noqa: F401
from harness import World, run_on_ranks
from hypothesis import given
from hypothesis import strategies as st
from inside import plan_of
from test_files import TRAPS, flip, put_in_every_entry, small_optimizer
from torch.distributed.checkpoint import metadata as torch_metadata

from onecopy import ZeroRedundancyOptimizer
from onecopy.checkpoint.metadata import METADATA

pytestmark = pytest.mark.usefixtures("alone")


Damage = Callable[[Path, Path, random.Random], Any]  # file, another checkpoint, chance


# ------------------------------------------------------------------------------- the file itself


HUGE = 1 << 30  # bytes


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
    local_rank = chance.choice([each for each in sorted(file.parent.iterdir()) if each != file])
    spare = file.with_name("spare")
    file.rename(spare)
    local_rank.rename(file)
    spare.rename(local_rank)


def noise(data: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(len(data))


def shuffled(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(1, len(data))
    return data[at:] + data[:at]


CUTS: dict[str, Damage] = {
    "cut to nothing": cut_to(lambda _: 0),
    "cut to a byte": cut_to(lambda _: 1),
    "cut in the header": cut_to(lambda _: 20),
    "cut in the middle": cut_to(lambda size: size // 2),
    "cut before the last byte": cut_to(lambda size: size - 1),
}
FILES: dict[str, Damage] = {
    **CUTS,
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


# ------------------------------------------------------------------------------- the forms


def save_flat(opt: ZeroRedundancyOptimizer, path: Path) -> None:
    opt.save(path, flatten_optimizer_state_dict=True)


def save_by_dcp(opt: ZeroRedundancyOptimizer, path: Path) -> None:
    dcp.save({"optim": opt.sharded()}, checkpoint_id=path)


def save_flat_by_dcp(opt: ZeroRedundancyOptimizer, path: Path) -> None:
    dcp.save({"optim": opt.sharded(flatten_optimizer_state_dict=True)}, checkpoint_id=path)


def save_full_by_dcp(opt: ZeroRedundancyOptimizer, path: Path) -> None:
    """What somebody writes who knows nothing of `sharded`."""
    for to in range(opt.world_size):
        opt.consolidate_state_dict(to)
        if opt.rank == to:
            full = opt.state_dict()
    dcp.save({"optim": full}, checkpoint_id=path)


# All that `load` reads. Ours know the digest of everything; those of DCP know of no checksums, so
# that a number that was changed is another number.
FORMS: dict[str, Callable[[ZeroRedundancyOptimizer, Path], None]] = {
    "ours": ZeroRedundancyOptimizer.save,
    "ours, flat": save_flat,
    "dcp": save_by_dcp,
    "dcp, flat": save_flat_by_dcp,
    "dcp, full": save_full_by_dcp,
}
SEEDS = {"mine": 1, "other": 3}


# ------------------------------------------------------------------------------- one rank


@pytest.fixture(scope="module")
def saved(alone: None, tmp_path_factory: Any) -> Path:  # noqa: F811
    """In each form two checkpoints, `mine` and `other`."""
    directory = tmp_path_factory.mktemp("checkpoints")
    for form, save in FORMS.items():
        for name, seed in SEEDS.items():
            (directory / form).mkdir(exist_ok=True)
            save(small_optimizer(seed), directory / form / name)
    return directory


def picture(opt: ZeroRedundancyOptimizer) -> Any:
    return (
        bits([dict(state) for state in opt.state.values()]),
        bits([dict(group) for group in opt.param_groups]),
        plan_of(opt).digest,
    )


def outline(tree: Any) -> Any:
    """What is left of a picture without the numbers: keys, dtypes and shapes."""
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tuple(tree.shape)
    if isinstance(tree, dict):
        return {key: outline(value) for key, value in tree.items() if key != "params"}
    return type(tree)


def outline_of(opt: ZeroRedundancyOptimizer) -> Any:
    options = [outline(dict(group)) for group in opt.param_groups]
    for group in options:  # an option may be 0 or 0.0
        group.update({key: float for key, kind in group.items() if kind is int})
    return [*(outline(dict(each)) for each in opt.state.values()), *options]


def is_plain(path: Path) -> bool:
    """Not a pipe, for which one would wait, and not too much to be read."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < HUGE


def loaded(directory: Path) -> Any:
    """State and options of an optimizer that has loaded it."""
    opt = small_optimizer(seed=2)
    opt.load(directory)
    return picture(opt)


expected = functools.cache(loaded)


def copied(of: Path, name: str = "damaged") -> Path:
    directory = of.parent / name
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(of, directory)
    return directory


def try_to_load(tally: Tally, directory: Path, strict: bool, is_known: bool) -> None:  # noqa: F811
    """Everything as it was; or as it was saved, if what was done to it can be known."""
    opt = small_optimizer(seed=2)
    before, form = picture(opt), outline_of(opt)
    reports: list[Any] = []
    is_accepted = tally.attempt(lambda: reports.append(opt.load(directory, strict=strict)))
    assert not (directory.parent / "marker").exists()
    if not is_accepted:
        assert picture(opt) == before
        return
    mine, other = (expected(directory.parent / name) for name in SEEDS)
    if not reports[0].fits:
        assert not strict
        kept = zip(*(each[0] for each in (before, mine, other)), strict=True)
        found = picture(opt)[0]
        assert not is_known or all(one in any_ for one, any_ in zip(found, kept, strict=True))
    elif is_known:
        assert picture(opt) in (mine, other)
    else:
        assert outline_of(opt) == form
    opt.load(directory.parent / "mine")  # whatever came before, this works
    assert picture(opt) == mine


@given(data=st.data())
@cases(300)
def test_fuzz_load(tally: Tally, saved: Path, data: st.DataObject) -> None:  # noqa: F811
    form = data.draw(st.sampled_from(sorted(FORMS)))
    names = data.draw(st.lists(st.sampled_from(sorted(DAMAGES)), min_size=1, max_size=2))
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    strict = data.draw(st.booleans())
    directory, other = copied(saved / form / "mine"), saved / form / "other"
    for name in names:
        files = sorted(path for path in directory.iterdir() if is_plain(path))
        index = directory / METADATA  # which several of them write
        if files and (is_plain(index) or not index.exists()):
            with contextlib.suppress(OSError, ValueError, pickle.UnpicklingError, EOFError):
                DAMAGES[name](chance.choice(files), other, chance)
    is_known = form.startswith("ours") or not {*names} - {*CUTS, "missing", "longer"}
    with tally.case():
        try_to_load(tally, directory, strict, is_known)


@pytest.mark.parametrize("form", FORMS)
def test_fuzz_every_file_cut_at_every_length(tally: Tally, saved: Path, form: str) -> None:  # noqa: F811
    mine = saved / form / "mine"
    for file in sorted(mine.iterdir()):
        for cut in CUTS.values():
            for strict in (True, False):
                directory = copied(mine)
                cut(directory / file.name, saved / form / "other", random.Random(0))
                with tally.case():
                    try_to_load(tally, directory, strict, is_known=True)


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_fuzz_saving_over_what_is_damaged(tally: Tally, saved: Path, name: str) -> None:  # noqa: F811
    """It is replaced or refused; nothing outside of the directory is touched."""
    mine, other = saved / "ours" / "mine", saved / "ours" / "other"
    outside = {file: file.read_bytes() for file in other.iterdir()}
    opt = small_optimizer(seed=1)
    for seed in range(3):
        directory = copied(mine)
        files = sorted(path for path in directory.iterdir() if path.is_file())
        DAMAGES[name](files[seed % len(files)], other, random.Random(seed))
        with tally.case():
            if tally.attempt(lambda directory=directory: opt.save(directory)):
                assert loaded(directory) == loaded(mine)
            assert {file: file.read_bytes() for file in other.iterdir()} == outside
            assert not (mine.parent / "marker").exists()


# ------------------------------------------------------------------------------- two ranks


def load_on_both(world: World, directories: list[Path], strict: bool) -> list[tuple[str, bool]]:
    """Of each directory what was raised, and whether the optimizer is as before."""
    found = []
    for directory in directories:
        opt = small_optimizer(seed=2)
        before = picture(opt)
        raised = ""
        try:
            opt.load(directory, strict=strict)
        except Exception as error:
            judge(error, class_may_refuse=False)
            raised = f"{type(error).__name__}: {error}"
            assert picture(opt) == before
        dist.barrier()
        found.append((raised, picture(opt) == before))
    return found


def save_on_both(world: World, directory: Path, form: str) -> None:
    for name, seed in SEEDS.items():
        FORMS[form](small_optimizer(seed), directory / name)


def require_alike(
    tally: Tally,  # noqa: F811
    directories: list[Path],
    strict: bool = True,
) -> None:
    first, second = run_on_ranks(2, load_on_both, directories, strict, timeout=600.0)
    for mine, theirs in zip(first, second, strict=True):
        with tally.case():
            assert mine == theirs
            tally.tell(accepted=not mine[0])


@pytest.mark.parametrize("name", sorted({**FILES, **LIES}))
def test_fuzz_both_ranks_refuse_or_load_alike(
    tally: Tally,  # noqa: F811
    tmp_path: Path,
    name: str,
) -> None:
    run_on_ranks(2, save_on_both, tmp_path, "ours")
    directories = [copied(tmp_path / "mine", f"damaged {seed}") for seed in range(2)]
    for seed, directory in enumerate(directories):
        files = sorted(path for path in directory.iterdir() if path.is_file())
        DAMAGES[name](files[-1 - seed], tmp_path / "other", random.Random(seed))
    require_alike(tally, directories)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_fuzz_both_ranks_meet_every_cut_alike(
    tally: Tally,  # noqa: F811
    tmp_path: Path,
    form: str,
    strict: bool,
) -> None:
    run_on_ranks(2, save_on_both, tmp_path, form)
    directories = []
    for file in sorted((tmp_path / "mine").iterdir()):
        for name, cut in CUTS.items():
            directories.append(copied(tmp_path / "mine", f"{file.name} {name}"))
            cut(directories[-1] / file.name, tmp_path / "other", random.Random(0))
    require_alike(tally, directories, strict)
