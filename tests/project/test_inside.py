"""Tests use the private names of the package through inside.py only."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
FILES = sorted(
    file
    for folder in ("tests", "trials", "benchmarks", "examples")
    for file in (ROOT / folder).rglob("*.py")
    if file not in (TESTS / "support" / "inside.py", Path(__file__))
)
# Private names of torch's class on which existing code relies; the contract tests use them.
CONTRACT = frozenset(["_all_params", "_broadcast_object", "_join_config"])
DOTTED = r"onecopy\.([\w.]+\.)?_[a-zA-Z]\w*$"
IN_A_MODULE = r"onecopy(\.\w+){2,}$"
REPLACE = ("setattr", "delattr", "patch", "object", "multiple")  # monkeypatch's, mock's, built in
READ = ("attrgetter", "methodcaller", "__getattribute__")  # a name in quotes


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def private_names() -> frozenset[str]:
    """Of everything that the package defines or assigns: modules' names, classes' and objects'."""
    found = set()
    for file in (ROOT / "onecopy").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(filter(is_private, found))


def root_of(node: ast.AST) -> str:
    """`a` of `a.b.c`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def name_of(function: ast.AST) -> str:
    """`c` of `a.b.c(...)`."""
    return function.attr if isinstance(function, ast.Attribute) else root_of(function)


def is_of_a_module(node: ast.AST, names: Collection[str]) -> bool:
    """Whether a node begins with one of these names of modules, or is a string that names something
    in a module of the package."""
    if isinstance(node, ast.Constant):
        return re.match(IN_A_MODULE, str(node.value)) is not None
    return root_of(node) in names


def private_uses(source: str, private: frozenset[str]) -> Iterator[str]:
    """What reads, imports or patches a private name of the package, and what assigns to a name of
    one of its modules."""
    tree = ast.parse(source)
    ours, others = {"onecopy"}, set()  # names that imports have bound
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            is_ours = (node.module or "").partition(".")[0] == "onecopy"
            for alias in node.names:
                if is_ours and is_private(alias.name):
                    yield f"line {node.lineno}: imports {alias.name}"
                (ours if is_ours else others).add(alias.asname or alias.name)
        elif isinstance(node, ast.Import):
            others.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
    others -= ours
    modules = {name for name in ours if name.islower()}  # not classes
    of_subclasses = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(root_of(base) in ours for base in node.bases)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_class = (
                isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
                and node not in of_subclasses
            )
            if node.attr in private and not of_class and root_of(node) not in others:
                yield f"line {node.lineno}: {ast.unparse(node)}"
            elif isinstance(node.ctx, ast.Store) and root_of(node) in modules:
                yield f"line {node.lineno}: assigns to {ast.unparse(node)}"
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            if node.slice.value in private and root_of(node.value) not in others:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, (ast.Call, ast.Tuple)):  # setattr(owner, "_name", ...)
            values = node.args if isinstance(node, ast.Call) else node.elts
            if len(values) > 1 and not isinstance(values[0], ast.Constant):
                name = values[1].value if isinstance(values[1], ast.Constant) else None
                if name in private and root_of(values[0]) not in others:
                    yield f"line {node.lineno}: {ast.unparse(node)}"
            if isinstance(node, ast.Call) and name_of(node.func) in READ:
                for value in values:
                    parts = str(value.value).split(".") if isinstance(value, ast.Constant) else ()
                    if not private.isdisjoint(parts):
                        yield f"line {node.lineno}: {ast.unparse(node)}"
            replaces = isinstance(node, ast.Call) and name_of(node.func) in REPLACE
            if replaces and values and is_of_a_module(values[0], modules):
                yield f"line {node.lineno}: replaces with {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and re.match(DOTTED, str(node.value)):
            yield f'line {node.lineno}: "{node.value}"'


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_private_names_are_used_in_inside_only(file: Path) -> None:
    private = private_names()
    if file.name.startswith("test_contract"):
        private -= CONTRACT
    uses = [f"{file.relative_to(ROOT)}, {use}" for use in private_uses(file.read_text(), private)]
    assert not uses, "add a function to tests/support/inside.py and use it:\n" + "\n".join(uses)


@pytest.mark.parametrize(
    "line",
    [
        "plan = optimizer._plan",
        "optimizer._steps += 1",
        "run(twins[0].optimizer._params.all_gathers)",
        "from onecopy.planning.traits import _probe",
        "onecopy.planning.sizes.MIN_SHARED_BYTES = 1",
        "from onecopy import neighbours\nneighbours.WORTH_LENDING = 1",
        "monkeypatch.setattr(exchange, '_BEAT_SECONDS', 1)",
        "mock.patch('onecopy.checkpoint.load._read')",
        "getattr(optimizer, '_plan')",
        "FAULTS = [(LazyWaits, '_before', do_nothing)]",
        "import onecopy.sharding.inner\n"
        "patch.setattr(onecopy.sharding.inner, 'step_without_hooks', f)",
        "from onecopy.planning import sizes as n\nmonkeypatch.setattr(n, 'MIN_SHARED_BYTES', 1)",
        "from onecopy.comm import monitor\nmock.patch.object(monitor, 'REPORT_WITHIN', 1)",
        "from onecopy import notes\nmock.patch.object(notes.Notes, 'report', f)",
        "from onecopy import notes\nmonkeypatch.delattr(notes, 'REPORT_WITHIN')",
        "from onecopy import notes\nsetattr(notes, 'REPORT_WITHIN', 1)",
        "mock.patch('onecopy.planning.sizes.MIN_SHARED_BYTES', 1)",
        "monkeypatch.setattr('onecopy.planning.sizes.MIN_SHARED_BYTES', 1)",
        "vars(optimizer)['_plan']",
        "optimizer.__dict__['_plan']",
        "operator.attrgetter('_plan.buckets')(optimizer)",
        "optimizer.__getattribute__('_plan')",
        "import onecopy\nclass Mine(onecopy.ZeroRedundancyOptimizer):\n"
        "    def plan(self):\n        return self._plan",
    ],
)
def test_a_private_use_is_found(line: str) -> None:
    assert list(private_uses(line, private_names()))


@pytest.mark.parametrize(
    "line",
    [
        "self._plan = 1",
        "os._exit(0)",
        "module._forward_pre_hooks",
        "from torch.utils._pytree import tree_leaves",
        "world.onecopy = 1",
        "'see _plan'",
        "import torch\ntorch.distributed._plan",
        "found in ('options', '_plan')",
        "monkeypatch.setattr(torch, 'save', f)",
        "from onecopy.comm.group import Transport\nmock.patch.object(Transport, 'share', f)",
        "mock.patch('torch.save', f)",
        "state['step']",
        "class Mine(Other):\n    def plan(self):\n        return self._plan",
    ],
)
def test_other_uses_are_not(line: str) -> None:
    assert not list(private_uses(line, private_names()))
