"""Whatever one rank does differently, all ranks raise the same clear error: a table.

The rows are in `disagreements.py` and `absences.py`; `together.py` runs and judges them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from absences import ELSEWHERE, SILENT
from disagreements import BUILDING, CHANGING
from harness import World, distributed
from together import PATIENCE, Found, judge

ROWS = (*BUILDING, *CHANGING, *ELSEWHERE, *SILENT)
LOST = [row for row in ROWS if row.found is Found.IN_TIME]
AT_ONCE = [row for row in ROWS if row.found is Found.AT_ONCE]
ASKED = [row for row in ROWS if row.found is not row.asked]
BATCHES = 6
PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"


def test_the_table_is_long_and_its_rows_have_names_of_their_own() -> None:
    assert len(ROWS) >= 40
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_the_page_says_how_many_rows_there_are() -> None:
    assert re.findall(r"a table of (\d+) rows", PAGE.read_text()) == [str(len(ROWS))]


@distributed(2, 3, timeout=240, pg_timeout=PATIENCE)
@pytest.mark.parametrize("start", [0, 1])
def test_what_is_made_or_changed_together_is_compared_at_once(
    world: World, start: int, tmp_path: Path
) -> None:
    judge(world, AT_ONCE[start::2], "found", tmp_path)


@distributed(2, 3, timeout=240, pg_timeout=PATIENCE)
@pytest.mark.parametrize("start", [0, 1])
def test_in_every_step_everything_is_compared_if_asked_for(
    world: World, start: int, tmp_path: Path
) -> None:
    judge(world, ASKED[start::2], "asked", tmp_path, checks=True)


@distributed(2, 3, timeout=240, pg_timeout=PATIENCE)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_rank_that_is_elsewhere_is_found_within_the_timeout(
    world: World, batch: int, tmp_path: Path
) -> None:
    judge(world, LOST[batch::BATCHES], "found", tmp_path)


@distributed(2, 3, timeout=240, pg_timeout=PATIENCE)
def test_values_that_nobody_waits_for_are_found_only_if_asked_for(
    world: World, tmp_path: Path
) -> None:
    judge(world, SILENT, "found", tmp_path)
