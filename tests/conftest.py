"""Settings of the whole test session."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import fuzzing
import harness
import pytest

# A test with more cases than this, its world sizes counted, is thinned out for the quick run.
MANY_CASES = 4


def pytest_collection_modifyitems(items: list[Any]) -> None:
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
