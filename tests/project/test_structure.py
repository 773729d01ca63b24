"""The shape of the package: what may import what, and who may talk to other processes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# A module imports only its own folder, folders to the left of it, and these.
FOLDERS = (
    "planning",
    "comm",
    "sharding",
    "gradients",
    "checkpoint",
    "checks",
    "optimizer",
    "tools",
)
EVERYWHERE = {"torch_private", "version"}
# Of `Comm`.
IMPLEMENTATIONS = {"comm.c10d", "comm.gloo.comm"}
# These import `tools`, and nothing imports them.
ENTRANCES = {"__init__", "__main__"}
COLLECTIVES = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
}
ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").exists())
PACKAGE = ROOT / "onecopy"
FILES = sorted(PACKAGE.rglob("*.py"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))


def name_of(file: Path) -> str:
    """Dotted, below the package: `comm.group`; of a folder's `__init__`, the folder."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def folder_of(name: str) -> str:
    return name.partition(".")[0]


MODULES = {name_of(file) for file in FILES}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def imported_names(file: Path) -> Iterator[tuple[str, str, int]]:
    """(local name, absolute dotted name, line) of every import, in whichever form it is written."""
    package = ("onecopy", *file.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname or alias.name.partition(".")[0], alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            origin = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield (alias.asname or alias.name, f"{origin}.{alias.name}", node.lineno)


def referenced_names(file: Path) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of every import and of every `a.b.c` that begins with one."""
    origins = {}
    for local, name, line in imported_names(file):
        yield name, line
        plain_import = name.partition(".")[0] == local  # `import a.b` binds `a`, not `a.b`
        origins[local] = local if plain_import else name
    for node in ast.walk(tree_of(file)):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in origins:
            yield ".".join([origins[inner.id], *reversed(parts)]), node.lineno


def imported_modules(file: Path) -> Iterator[tuple[str, int]]:
    """(dotted name below the package, line) of the package's modules that a file imports."""
    for _, name, line in imported_names(file):
        root, _, rest = name.partition(".")
        if root == "onecopy":
            while rest and rest not in MODULES:
                rest = rest.rpartition(".")[0]
            yield rest or "__init__", line


def test_there_are_at_most_nine_names_at_the_top_level() -> None:
    top = {folder_of(name) for name in MODULES} - {"__init__", "__main__", "version"}
    assert top <= {*FOLDERS, "torch_private"}


@each_file
def test_module_imports_only_folders_to_the_left(file: Path) -> None:
    me = folder_of(name_of(file))
    if me in ENTRANCES:
        return
    allowed = FOLDERS[: FOLDERS.index(me) + 1] if me in FOLDERS else ()
    for name, line in imported_modules(file):
        assert folder_of(name) in {*allowed, *EVERYWHERE}, f"{file}:{line}: {me} imports {name}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    edges = {name_of(f): {n for n, _ in imported_modules(f)} for f in FILES}
    edges["comm.interface"] -= IMPLEMENTATIONS  # of `make_comm`: when it is called
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for other in sorted(edges[name] - {name}):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


@each_file
def test_folders_say_what_they_are_for_and_how_they_are_read(file: Path) -> None:
    if file.name != "__init__.py" or file.parent == PACKAGE:
        return
    text = ast.get_docstring(tree_of(file)) or ""
    assert len(tree_of(file).body) == 1, f"{file} holds more than a docstring"
    words = {word.strip(".,;`:") for word in text.split()}
    unnamed = [f.stem for f in file.parent.glob("*.py") if f != file and f.stem not in words]
    assert not unnamed, f"{file} does not say when to read {', '.join(unnamed)}"


@each_file
def test_module_imports_only_torch_and_the_standard_library(file: Path) -> None:
    for _, name, line in imported_names(file):
        root = name.partition(".")[0]
        assert root in {"torch", "onecopy", *sys.stdlib_module_names}, f"{file}:{line}: {name}"


@each_file
def test_planning_knows_no_process_group(file: Path) -> None:
    if folder_of(name_of(file)) == "planning":
        for name, line in referenced_names(file):
            assert not name.startswith("torch.distributed"), f"{file}:{line}: {name}"


@each_file
def test_only_three_files_call_collectives(file: Path) -> None:
    if name_of(file) in ("comm.group", "comm.c10d", "comm.gloo.comm"):
        return
    for name, line in referenced_names(file):
        if name.startswith("torch.distributed."):
            assert name.rpartition(".")[2] not in COLLECTIVES, f"{file}:{line}: {name}"


def test_implementations_are_chosen_in_one_place() -> None:
    """`make_comm` alone knows that there is more than one."""
    importing = {
        (name_of(file), name, line)
        for file in FILES
        if not name_of(file).startswith("comm.gloo")
        for name, line in imported_modules(file)
        if name == "comm.c10d" or name.startswith("comm.gloo")
    }
    assert {(file, name) for file, name, _ in importing} == {
        ("comm.interface", name) for name in IMPLEMENTATIONS
    }
    tree = tree_of(PACKAGE / "comm" / "interface.py")
    (function,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "make_comm"
    )
    within = {getattr(node, "lineno", 0) for node in ast.walk(function)}
    assert {line for _, _, line in importing} <= within


@each_file
def test_dcp_is_imported_when_it_is_used(file: Path) -> None:
    """Importing it takes longer than importing the package."""
    inside = {
        node
        for function in ast.walk(tree_of(file))
        if isinstance(function, (ast.FunctionDef, ast.If))  # `if TYPE_CHECKING` does not run
        for node in ast.walk(function)
    }
    for node in ast.walk(tree_of(file)):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node not in inside:
            assert "torch.distributed.checkpoint" not in ast.unparse(node), f"{file}:{node.lineno}"


# Words that are no part of an identifier, and what the package says instead.
METAPHORS = {
    "absentee absentees": "missing ranks",
    "zipped": "file format",
    "beginning beginnings blueprint recipe recipes": "state template",
    "borrow borrowed borrower borrowers borrowing borrowings borrows": "shared read",
    "box boxes": "chunk",
    "carried carrier carriers carries carry carrying porter porters": "relay",
    "company": "group monitor",
    "course": "update",
    "desk desks letter letters": "mailbox",
    "errand errands": "task",
    "exchange": "store channel",
    "feed feeds": "gradient hooks",
    "flights": "queue, in flight",
    "fragment fragments parcel parcels portrait portraits": "state shard",
    "gatherer": "queue of all-gathers",
    "guard guards seal sealed sealing seals sentry": "corruption check, checksum",
    "holdings piece pieces": "shards",
    "home homes": "flat storage",
    "intake roster": "param groups, parameter registry",
    "journey route site sites": "all-gather",
    "lane lanes roadway": "gradient bucket, reducer",
    "lend lendable lender lenders lending lends lent loan loans": "shared memory",
    "lobby note noted notes noting": "rank status",
    "look looked looking looks": "check, inspect",
    "neighbour neighbourhood neighbours": "local ranks",
    "party parties": "join round",
    "settle settled settles settling": "rebuild",
    "subject": "model spec",
    "ticket tickets": "sequence",
    "verdict verdicts": "traits, used-parameter bitmap",
}
INSTEAD = {word: right for words, right in METAPHORS.items() for word in words.split()}
# Still in use.
NOT_YET: set[str] = {
    "absentees",
    "beginnings",
    "box",
    "boxes",
    "exchange",
    "fragment",
    "look",
    "looks",
    "note",
    "notes",
    "noting",
    "piece",
    "pieces",
    "settle",
    "settling",
    "take_back",
    "verdict",
}
# An alias of `shards` for one release; a word of Linux.
EXCEPTIONS = {("planning.plan", "pieces"), ("comm.gloo.shared_memory", "_SEALS")}
PHRASES = {
    "bring_level": "send_remaining",
    "take_back": "undo",
    "take_stock": "collect",
    "watch_with": "check",
}


def own_identifiers(file: Path) -> Iterator[tuple[str, int]]:
    """(identifier, line) of what a file gives a name to: itself, classes, functions, parameters,
    attributes and variables. Those that it only uses may be torch's."""
    yield from ((part, 0) for part in name_of(file).split("."))
    for node in ast.walk(tree_of(file)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


@each_file
def test_no_identifier_is_a_metaphor(file: Path) -> None:
    for name, line in own_identifiers(file):
        if (name_of(file), name) in EXCEPTIONS:
            continue
        words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
        for word in (word for word in words if word not in NOT_YET):
            assert word not in INSTEAD, f"{file}:{line}: {name}: not {word}, but {INSTEAD[word]}"
        for phrase, right in PHRASES.items():
            if phrase in NOT_YET:
                continue
            assert f"_{phrase}_" not in f"_{'_'.join(words)}_", f"{file}:{line}: {name}: {right}"
        bare = [word for at, word in enumerate(words) if word == "flight" and words[at - 1] != "in"]
        assert "flight" in NOT_YET or not bare, f"{file}:{line}: {name}: a flight is a collective"


def test_a_metaphor_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "NOT_YET", set())
    for text in (
        "class GradLane: ...",
        "def carry(): ...",
        "def f(*, letters): ...",
        "self.sealed_at = 1",
        "async_flight = 1",
        "def takeBack_take_back(): ...",
    ):
        file = tmp_path / f"m{abs(hash(text))}.py"
        file.write_text(text)
        with pytest.raises(AssertionError, match=file.name):
            test_no_identifier_is_a_metaphor(file)
    fine = tmp_path / "fine.py"
    fine.write_text("in_flight = torch.guard.look(flat=IN_FLIGHT_LIMIT)")
    test_no_identifier_is_a_metaphor(fine)


# Subclasses that admit a handful of names, and the metadata file that torch wants to be a pickle.
PICKLE_USED = {
    "checkpoint.safe_pickle": {"pickle._Unpickler"},
    "checkpoint.metadata": {"pickle.Pickler"},
    "checkpoint.files": {"pickle.Pickler"},
}


@each_file
def test_nothing_is_unpickled_that_could_run(file: Path) -> None:
    used = PICKLE_USED.get(name_of(file), set())
    allowed = {"pickle", *used} if used else used
    for name, line in referenced_names(file):
        root = name.partition(".")[0]
        if root in {"pickle", "_pickle", "cloudpickle", "dill"}:
            assert name in allowed, f"{file}:{line}: {name}"
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert options.get("weights_only") == "True", f"{file}:{node.lineno}"
            assert folder_of(name_of(file)) != "checkpoint", f"{file}:{node.lineno}: safe_pickle"


def test_import_is_silent_and_brings_nothing_but_torch() -> None:
    program = (
        "import sys, torch, torch.distributed; before = set(sys.modules); import onecopy; "
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    new = done.stdout.split()
    assert all(name.split(".")[0] in {"onecopy", "torch", *sys.stdlib_module_names} for name in new)
    assert not [name for name in new if "zero_redundancy" in name]
