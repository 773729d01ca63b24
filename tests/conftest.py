"""Settings of the whole test session."""

from __future__ import annotations

import harness


def pytest_sessionfinish() -> None:
    harness.shutdown()
