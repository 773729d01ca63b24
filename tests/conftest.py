"""Settings of the whole test session."""

from __future__ import annotations

import inspect
import sys
import zlib
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import fuzzing
import harness
import pytest

# A test with more cases than this, its world sizes counted, is thinned out for the quick run.
MANY_CASES = 4

TESTS = Path(__file__).parent
OURS = tuple(str(TESTS.parent / name) for name in ("tests", "trials", "benchmarks", "examples"))
STARTS_PROCESSES = frozenset(["fork", "multiprocessing", "run_on_ranks", "subprocess"])

# Test modules use one another's helpers and import them by bare name. The workers of `harness.py`,
# which import test modules in the same way, have the search path of the process that starts them.
FOLDERS = sorted({str(file.parent) for file in TESTS.rglob("test_*.py")})
sys.path.extend(folder for folder in FOLDERS if folder not in sys.path)


def pytest_generate_tests(metafunc: Any) -> None:
    """Bodies marked `also_c10d` run a second time with ONECOPY_COMM=c10d: through the collectives
    of the backend, which NCCL would take, instead of messages and shared memory. The backend
    chooses the order of a sum. Tolerances are those of the run with messages: results are equal
    bit for bit on one and two ranks; on more, `AttachedTwins` allows 100 eps of the dtype, relative
    and absolute."""
    of_messages = metafunc.definition.get_closest_marker("of_messages") is not None
    also_c10d = metafunc.definition.get_closest_marker("also_c10d") is not None
    if also_c10d and hasattr(metafunc.function, "body") and not of_messages:
        metafunc.parametrize("comm", ["auto", "c10d"], indirect=True)


@pytest.fixture(autouse=True)
def comm(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONECOPY_COMM for the ranks of a test: `harness.py` passes it on."""
    if getattr(request, "param", "auto") != "auto":
        monkeypatch.setenv("ONECOPY_COMM", request.param)


def _is_native(item: Any) -> bool:
    return getattr(getattr(item, "callspec", None), "params", {}).get("comm") == "c10d"


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if _starts_processes(item):
            item.add_marker(pytest.mark.processes)
    _thin_out_native(list(filter(_is_native, items)))
    _thin_out_many_cases([item for item in items if not _is_native(item)])


def _starts_processes(item: Any) -> bool:
    """Whether the test, its fixtures or the functions that they call start other processes."""
    if hasattr(item.function, "body"):
        return True
    fixtures = [one.func for found in item._fixtureinfo.name2fixturedefs.values() for one in found]
    known: set[Any] = set()
    todo = [item.function, *fixtures]
    while todo:
        function = inspect.unwrap(todo.pop())
        function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
        if isinstance(function, FunctionType) and function not in known:
            known.add(function)
            if STARTS_PROCESSES & _names_in(function.__code__):
                return True
            todo.extend(_called_by(function))
    return False


@cache
def _names_in(code: CodeType) -> frozenset[str]:
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return frozenset(code.co_names).union(*inner)


@cache
def _called_by(function: FunctionType) -> list[FunctionType]:
    """Functions of tests, trials, benchmarks and examples, and methods of their classes, that it
    mentions."""
    names = _names_in(function.__code__)
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    for module in [value for value in found if isinstance(value, ModuleType)]:
        if str(getattr(module, "__file__", None)).startswith(OURS):
            found += [vars(module)[name] for name in names if name in vars(module)]
    for cls in [value for value in found if isinstance(value, type)]:
        found += vars(cls).values()
    return [
        value
        for value in map(inspect.unwrap, filter(callable, found))
        if isinstance(value, FunctionType) and value.__code__.co_filename.startswith(OURS)
    ]


def _thin_out_native(items: list[Any]) -> None:
    """The quick run takes one case of every body, on one world size. Which one depends on the name
    of the body only, so that it is the same whatever else was collected."""
    families: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        families[item.path, item.originalname].append(item)
    for (_, name), family in families.items():
        number = zlib.crc32(name.encode())
        quick = [item for item in family if not item.get_closest_marker("slow")]
        sizes = sorted({item.callspec.params["ranks"] for item in quick} - {1}, reverse=True)
        size = sizes[number % len(sizes)] if sizes else None
        cases = [item for item in quick if item.callspec.params["ranks"] == size]
        for item in family:
            if not cases or item is not cases[number % len(cases)]:
                item.add_marker(pytest.mark.slow)


def _thin_out_many_cases(items: list[Any]) -> None:
    """Of a test with many cases, each on several world sizes, the quick run takes every case on one
    size: the largest for the first, the next smaller one for the second, and so on in turn.
    `make test-all` takes all."""
    families: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        if "ranks" in getattr(getattr(item, "callspec", None), "params", ()):
            families[item.path, item.originalname].append(item)
    for family in families.values():
        quick = [item for item in family if not item.get_closest_marker("slow")]
        if len(quick) > MANY_CASES:
            _thin_out(quick)


def _thin_out(family: list[Any]) -> None:
    cases: dict[str, list[Any]] = defaultdict(list)
    for item in family:
        others = [part for part in item.callspec.id.split("-") if not part.startswith("ranks=")]
        cases["-".join(others)].append(item)
    for number, sizes in enumerate(cases.values()):
        for item in sizes:
            if item is not sizes[-1 - number % len(sizes)]:
                item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for group in terminalreporter.stats.values() for r in group]
    line = fuzzing.summary([r for r in reports if hasattr(r, "user_properties")])
    if line:
        terminalreporter.write_line(line)


def pytest_sessionfinish() -> None:
    harness.shutdown()
