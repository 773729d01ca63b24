"""The shape of the package: what may import what, and who may talk to other processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# A module may import only what stands before it. `__init__` comes last: nothing imports it.
ORDER = (
    "torch_private",
    "version",
    "words",
    "checks",
    "kinds",
    "plan",
    "presets",
    "tally",
    "boxes",
    "agreement",
    "waiting",
    "notes",
    "exchange",
    "condition",
    "ledger",
    "semaphores",
    "hosts",
    "lending",
    "neighbours",
    "timeline",
    "tracing",
    "groups",
    "company",
    "pending",
    "transport",
    "parcels",
    "buffers",
    "pieces",
    "intake",
    "policies",
    "roster",
    "naming",
    "watch",
    "fingerprints",
    "replicas",
    "inner",
    "local",
    "sentry",
    "transfers",
    "gatherer",
    "lanes",
    "roadway",
    "flights",
    "verdict",
    "reducer",
    "shards",
    "state",
    "full_state",
    "restore",
    "join",
    "patches",
    "feeds",
    "norm",
    "lazy",
    "attachment",
    "scaler",
    "blueprint",
    "memory",
    "recipes",
    "subject",
    "demand",
    "wire",
    "peers",
    "estimating",
    "overview",
    "models",
    "recorded",
    "report",
    "cli",
    "__main__",
    "fragments",
    "portrait",
    "beginnings",
    "options",
    "stateful",
    "progress",
    "pickles",
    "archive",
    "reader",
    "zipped",
    "direct",
    "writer",
    "saving",
    "saved",
    "comparing",
    "loading",
    "parts",
    "reporting",
    "checking",
    "keeping",
    "attaching",
    "growing",
    "joining",
    "optimizer",
    "ddp_hooks",
    "__init__",
)
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
PACKAGE = Path(__file__).parents[2] / "onecopy"
FILES = sorted(PACKAGE.rglob("*.py"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))


def module_of(file: Path) -> str:
    """The name in ORDER: `plan` for plan.py, `report` for everything below report/."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


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


@each_file
def test_module_has_its_place_in_the_order(file: Path) -> None:
    assert module_of(file) in ORDER, (
        f"{module_of(file)} is new: put it into ORDER at the top of {Path(__file__).name}, after "
        "all modules that it imports and before those that import it"
    )


@each_file
def test_module_imports_only_what_stands_before_it(file: Path) -> None:
    me = module_of(file)
    if me not in ORDER:
        pytest.skip("has no place in the order yet")
    modules = {module_of(other) for other in FILES}
    for _, name, line in imported_names(file):
        root, *rest = name.split(".")
        if root != "onecopy" or rest[:1] == [me]:
            continue
        what = rest[0] if rest and rest[0] in modules else "__init__"
        late = ORDER[ORDER.index(me) :]
        assert what not in late, f"{file}:{line}: {me} may not import {name}"


@each_file
def test_module_imports_only_torch_and_the_standard_library(file: Path) -> None:
    for _, name, line in imported_names(file):
        root = name.partition(".")[0]
        assert root in {"torch", "onecopy", *sys.stdlib_module_names}, f"{file}:{line}: {name}"


@each_file
def test_only_transport_calls_collectives(file: Path) -> None:
    if module_of(file) == "transport":
        return
    for name, line in referenced_names(file):
        if name.startswith("torch.distributed."):
            assert name.rpartition(".")[2] not in COLLECTIVES, (
                f"{file}:{line}: {name} belongs into transport.py"
            )


# Subclasses that admit a handful of names, and the metadata file that torch wants to be a pickle.
PICKLE_USED = {
    "pickles": {
        *(
            "pickle._Unpickler",
            "pickle.SETITEM",
            "pickle.SETITEMS",
            "pickle.REDUCE",
            "pickle.NEWOBJ",
        ),
    },
    "writer": {"pickle.Pickler"},
    "zipped": {"pickle.Pickler"},
}


@each_file
def test_nothing_is_unpickled_that_could_run(file: Path) -> None:
    used = PICKLE_USED.get(module_of(file), set())
    allowed = {"pickle", *used} if used else used
    for name, line in referenced_names(file):
        root = name.partition(".")[0]
        if root in {"pickle", "_pickle", "cloudpickle", "dill"}:
            assert name in allowed, f"{file}:{line}: {name}"
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert options.get("weights_only") == "True", f"{file}:{node.lineno}"


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
        cwd=PACKAGE.parent,
    )
    assert (done.returncode, done.stderr) == (0, "")
    new = done.stdout.split()
    assert all(name.split(".")[0] in {"onecopy", "torch", *sys.stdlib_module_names} for name in new)
    assert not [name for name in new if "zero_redundancy" in name]
