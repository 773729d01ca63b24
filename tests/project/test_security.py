"""Nobody is let in: nothing that arrives is run, nothing outside of a checkpoint is read or
written, pages show names as text, and what CI installs is pinned.

Booby-trapped checkpoints are in `test_files.py`, and by the thousand in `test_fuzz_files.py`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import pickle
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed
from pages import in_a_browser, in_browser
from test_files import TRAPS, Trap, small_optimizer
from test_run_page import trace_of
from test_structure import FILES, PACKAGE, each_file, referenced_names, tree_of

from onecopy import estimate
from onecopy.checkpoint.files import DataFileReader
from onecopy.checkpoint.metadata import METADATA, Place, Stored
from onecopy.checkpoint.safe_pickle import DamagedCheckpoint
from onecopy.comm.gloo.local_ranks import LocalRanks, SharedRead
from onecopy.comm.gloo.shared_memory import SharedMemory, memory_of
from onecopy.comm.gloo.topology import Topology
from onecopy.comm.group import broadcast_object
from onecopy.tools.cli import main
from onecopy.tools.pages.plan_page import plan_page
from onecopy.tools.pages.run_page import Run, parse_trace, run_page

ROOT = PACKAGE.parent


# ------------------------------------------------------------------------------- what is never used


# Names that run what they are given, in this process or another, or that unpickle.
NEVER = re.compile(
    r"""(_pickle|cloudpickle|dill|marshal|shelve|yaml|jsonpickle|subprocess|pty|code|codeop|runpy)\b
    | pickle\.(load|loads|Unpickler)$
    | os\.(system|popen|exec\w*|spawn\w*|posix_spawn\w*|startfile)$
    | tempfile\b
    | builtins\.(eval|exec|compile|__import__)$
    | (torch\.)?(hub|jit)\.load\w*$ | torch\.package\b | numpy\.load$
    | torch\.distributed\.(\w+\.)*\w*_object\w*$
    | torch\.distributed\.rpc\b
    | torch\.distributed\.checkpoint\.(load|load_state_dict|FileSystemReader|async_save)$
    | torch\.distributed\.checkpoint\.filesystem\.FileSystemReader$
    | torch\.distributed\.checkpoint\.state_dict_loader\b
    """,
    re.VERBOSE,
)
CALLED_NEVER = {"eval", "exec", "compile", "__import__", "input", "breakpoint"}
# Imports the module that the user names on the command line: that is what was asked for.
IMPORTS_BY_NAME = {"models.py"}


def suspects(file: Path) -> Iterator[str]:
    for name, line in referenced_names(file):
        if NEVER.match(name):
            yield f"{file}:{line}: {name}"
        if name == "importlib.import_module" and file.name not in IMPORTS_BY_NAME:
            yield f"{file}:{line}: {name}"
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLED_NEVER or called in ("pickle.loads", "pickle.load"):
                yield f"{file}:{node.lineno}: {called}"


@each_file
def test_nothing_that_runs_what_it_is_given_is_used(file: Path) -> None:
    assert list(suspects(file)) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle; pickle.loads(b'')",
        "from pickle import load",
        "import marshal",
        "import subprocess",
        "import os; os.system('x')",
        "from os import execv",
        "import tempfile; tempfile.mktemp()",
        "eval('1')",
        "exec('1')",
        "__import__('os')",
        "import importlib; importlib.import_module('os')",
        "import torch; torch.hub.load('x', 'y')",
        "import torch.distributed as dist; dist.all_gather_object([], 1)",
        "import torch.distributed as dist; dist.broadcast_object_list([])",
        "import torch.distributed.checkpoint as dcp; dcp.load({})",
        "from torch.distributed.checkpoint import FileSystemReader",
    ],
)
def test_the_search_finds(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_structure.PACKAGE", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(line + "\n")
    assert list(suspects(file))


def test_there_is_something_to_search() -> None:
    assert len(FILES) > 50


# ------------------------------------------------------------------------------- attacks


@distributed(2)
@pytest.mark.parametrize("name", ["os.system", "open", "eval", "subprocess", "torch.save"])
def test_an_object_from_another_rank_is_not_run(world: World, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    obj = {"state": [TRAPS[name](marker)]}
    if world.rank == 0:
        assert broadcast_object(obj, src_rank=0) is obj
    else:
        with pytest.raises(pickle.UnpicklingError):
            broadcast_object(None, src_rank=0)
    dist.barrier()
    assert not marker.exists()


@pytest.mark.parametrize("name", ["os.system", "open", "eval"])
def test_a_pickle_given_to_the_command_is_not_run(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "marker"
    for file in ("config.json", "rank-0.json"):
        (tmp_path / file).write_bytes(pickle.dumps(TRAPS[name](marker)))
    assert main(["estimate", str(tmp_path / "config.json")]) == 1
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("cannot be read") == 2
    assert not marker.exists()


def test_a_file_of_torch_save_is_no_checkpoint_directory(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"state": Trap(os.mkdir, str(marker)), "param_groups": []}, tmp_path / "opt.pt")
    place = Place("opt.pt", 0, (tmp_path / "opt.pt").stat().st_size)
    with DataFileReader(tmp_path) as reader, pytest.raises(DamagedCheckpoint):
        reader.value(Stored("optim", ("optim",), place))
    assert not marker.exists()


def test_what_is_compressed_is_refused_before_it_grows(tmp_path: Path) -> None:
    """A gigabyte of zeros takes a megabyte of a file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**24))
        archive.writestr("archive/version", "3\n")
    (tmp_path / "data").write_bytes(buffer.getvalue())
    place = Place("data", 0, len(buffer.getvalue()))
    with DataFileReader(tmp_path) as reader, pytest.raises(DamagedCheckpoint, match="compressed"):
        reader.value(Stored("optim.lr", ("optim.lr",), place))


# ------------------------------------------------------------------------------- paths


@distributed(1, 2)
def test_saving_does_not_write_through_a_planted_link(world: World, tmp_path: Path) -> None:
    directory, outside = tmp_path / "saved", tmp_path / "outside"
    if world.rank == 0:
        outside.write_text("precious")
        directory.mkdir()
        (directory / f"{METADATA}.draft").symlink_to(outside)
    dist.barrier()
    opt = small_optimizer(seed=1)
    opt.save(directory)
    opt.load(directory)
    assert outside.read_text() == "precious"
    assert not (directory / METADATA).is_symlink()


@distributed(1, 2)
def test_saving_over_metadata_that_leads_elsewhere_is_refused(world: World, tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    if world.rank == 0:
        directory.mkdir()
        (directory / METADATA).symlink_to(tmp_path / "nothing")
    dist.barrier()
    with pytest.raises(ValueError, match="points out of the checkpoint"):
        small_optimizer(seed=1).save(directory)
    assert not (tmp_path / "nothing").exists()
    assert [file.name for file in directory.iterdir()] == [METADATA]


@distributed(1, 2)
def test_metadata_that_is_a_link_to_elsewhere_or_a_fifo_is_refused_on_all_ranks(
    world: World, tmp_path: Path
) -> None:
    opt = small_optimizer(seed=1)
    opt.save(tmp_path / "saved")
    metadata = tmp_path / "saved" / METADATA
    for message, plant in (
        ("points out of the checkpoint", lambda: metadata.symlink_to("../elsewhere")),
        ("is no regular file", lambda: os.mkfifo(metadata)),
        ("is no regular file", metadata.mkdir),
    ):
        dist.barrier()
        if world.rank == 0:
            if not (tmp_path / "elsewhere").exists():
                metadata.rename(tmp_path / "elsewhere")
            with contextlib.suppress(FileNotFoundError):
                metadata.unlink()
            plant()
        dist.barrier()
        with pytest.raises(DamagedCheckpoint, match=message):
            opt.load(tmp_path / "saved")


def naming_itself_as_data(directory: Path) -> None:
    """Metadata that names `.metadata` and a stranger's file among its data files."""
    read = pickle.loads((directory / METADATA).read_bytes())
    for info, name in zip(read.storage_data.values(), (METADATA, "notes.txt"), strict=False):
        object.__setattr__(info, "relative_path", name)
    (directory / METADATA).write_bytes(pickle.dumps(read))
    (directory / "notes.txt").write_text("precious")


@distributed(1, 2)
def test_saving_again_deletes_nothing_but_data_files(world: World, tmp_path: Path) -> None:
    """Whatever the metadata that is replaced says."""
    opt = small_optimizer(seed=1)
    opt.save(tmp_path)
    dist.barrier()
    if world.rank == 0:
        naming_itself_as_data(tmp_path)
    dist.barrier()
    opt.save(tmp_path)
    dist.barrier()
    assert (tmp_path / "notes.txt").read_text() == "precious"
    opt.load(tmp_path)


@distributed(1, 2)
@pytest.mark.parametrize("mask", [0o077, 0o022, 0o027])
def test_files_have_the_mode_that_the_umask_leaves(world: World, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        small_optimizer(seed=1).save(tmp_path / "saved")
    finally:
        os.umask(before)
    dist.barrier()
    files = list((tmp_path / "saved").iterdir())
    assert len(files) == world.size + 2
    modes = {stat.S_IMODE(file.stat().st_mode) for file in files}
    assert modes == {0o666 & ~mask}
    assert stat.S_IMODE((tmp_path / "saved").stat().st_mode) == 0o777 & ~mask


# ------------------------------------------------------------------------------- pages


NASTY = (
    "</script><script>document.title = 'owned'</script>"
    "<img src=x onerror=\"document.title = 'owned'\">"
)


def pages_with_nasty_names() -> dict[str, str]:
    shapes = {NASTY: (8, 4), "</title><svg onload=alert(1)>": (4,)}
    trace = trace_of(0, 1, classes=[NASTY]) | {"distributedInfo": {"backend": NASTY}}
    return {
        "plan": plan_page(estimate(shapes, torch.optim.AdamW, world_size=2), NASTY),
        "run": run_page(Run((parse_trace(trace),))),
    }


@pytest.mark.parametrize("page", ["plan", "run"])
def test_a_name_is_text_wherever_it_stands_on_a_page(page: str) -> None:
    html = pages_with_nasty_names()[page]
    assert html.count("<script") == 1
    assert html.count("</script>") == 1
    assert "<img" not in html
    assert "<svg onload" not in html


@in_a_browser
@pytest.mark.parametrize("page", ["plan", "run"])
def test_a_nasty_name_does_not_run_in_a_browser(tmp_path: Path, page: str) -> None:
    html = pages_with_nasty_names()[page]
    # The title of the page contains the name itself, as text.
    assert in_browser(html, "return document.title", tmp_path) != "owned"


# ------------------------------------------------------------------------------- what CI installs


LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
PINNED = re.compile(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.+!-]*( ; python_version (<|>=) \"3\.\d+\")?")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_dependency_is_pinned(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if line and line[0] != "#"]
    assert lines
    assert [line for line in lines if not PINNED.fullmatch(line)] == []


def test_make_installs_from_locks_only() -> None:
    """Besides torch where another release is tried on purpose, and the package itself."""
    recipes = re.findall(r"^\t.*INSTALL.*$", (ROOT / "Makefile").read_text(), re.M)
    assert len(recipes) >= 6
    for recipe in recipes:
        known = ("-r requirements/", "PACKAGE_INSTALL", "torch==$(TORCH)")
        assert any(word in recipe for word in known), recipe


# ------------------------------------------------------------------ memory of other processes


def test_no_file_but_lent_memory_is_mapped(tmp_path: Path) -> None:
    """A message or a number that was used again may name any file that its process has open."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious" * 100)
    foreign = os.memfd_create("somebody", os.MFD_ALLOW_SEALING)
    unsealed = os.memfd_create("onecopy", os.MFD_ALLOW_SEALING)
    for fd in (foreign, unsealed):
        os.ftruncate(fd, 4096)
    reading, writing = os.pipe()
    with precious.open("rb") as file:
        for fd in (file.fileno(), foreign, unsealed, reading, writing):
            with pytest.raises(OSError, match=r"is not memory that was shared|could shrink"):
                memory_of(os.getpid(), fd)
    assert precious.read_bytes() == b"precious" * 100
    for fd in (foreign, unsealed, reading, writing):
        os.close(fd)


def test_memory_that_is_not_the_one_that_was_lent_is_not_written_to() -> None:
    local_ranks = LocalRanks(0, Topology(((0, 1),)), {1: os.getpid()})
    memory = SharedMemory(64, world_size=2)
    right = memory.share(memory.data, [0])
    before = memory_of(os.getpid(), memory.fd).tolist()
    with pytest.raises(RuntimeError, match="the memory of rank 1 is gone"):
        local_ranks.map(1, right._replace(generation=right.generation + 1))
    assert memory_of(os.getpid(), memory.fd).tolist() == before
    assert local_ranks.map(1, right).generation == right.generation
    local_ranks.shared.clear()


@pytest.mark.parametrize(("start", "stop"), [(-8, 8), (8, 0), (0, 65), (2**60, 2**61)])
def test_nothing_outside_of_lent_memory_is_read(start: int, stop: int) -> None:
    local_ranks = LocalRanks(0, Topology(((0, 1),)), {1: os.getpid()})
    memory = SharedMemory(64, world_size=2)
    shared_read = SharedRead(local_ranks, 1, (0, 1))
    shared_read.address = memory.share(memory.data, [])._replace(start=start, stop=stop)
    shared_read.memory = local_ranks.map(1, shared_read.address)
    with pytest.raises(RuntimeError, match="shared memory that it does not have"):
        shared_read.tensor(torch.uint8)
