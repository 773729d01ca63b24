"""Where each rank was last seen."""

from __future__ import annotations

from onecopy.notes import Lobby, Notes


def test_without_a_store_the_report_is_about_this_rank_alone() -> None:
    notes = Notes(None, Lobby(None, "0", [0, 1]), rank=1, world_size=2)
    notes.write("in step 3")
    assert notes.report() == "a collective failed on rank 1: in step 3"
    expected = "a collective failed: ranks 0, 2 ended. This one was last in step 3"
    assert notes.report(ended=[0, 2]) == expected
