"""The benchmark of all peers: what it draws from its samples, and a short run of processes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import xml.etree.ElementTree as ET

import pytest
from hosts import LOOPBACK, NoHosts, two_hosts
from hypothesis import given
from hypothesis import strategies as st
from measure import (
    REFERENCES,
    Entry,
    MethodFailed,
    Setup,
    alternate,
    measure_groups,
    start_workers,
)
from methods import DDP, METHODS, TORCHS
from page import COLUMNS, as_markdown, as_text, cells, changes, picture, summary
from results import (
    ATTACHED,
    TCP,
    Measurement,
    Memory,
    Row,
    Samples,
    Spread,
    Table,
    goal_results,
    row_of,
    table_from_json,
    to_json,
)
from workloads import WORKLOADS

BRIEF = dataclasses.replace(WORKLOADS["tiny"], steps=2)


def samples(*seconds: float, sent: float = 0.0, state: int = 8, peak: int = 100) -> Samples:
    """Of two ranks, of which the second is slower."""
    rounds = [
        [
            Measurement(s / 2, 0.1, 0.2, 0.3, sent, 1.0),
            Measurement(s, 0.1, 0.2, 0.4, sent, 2.0),
        ]
        for s in seconds
    ]
    return Samples(rounds, [Memory(state, 4, peak), Memory(state - 1, 5, peak - 1)], 0.5)


def table(*rows: Row, workload: str = "gpt", wire: str = "loopback") -> Table:
    return Table(workload, "a model", 2, wire, 3, 8, rows)


def row(method: str, ratio: float, **more: int) -> Row:
    own = samples(ratio, ratio, ratio, **more)
    return row_of(method, own, samples(1.0, 1.0, 1.0), samples(2.0, 2.0, 2.0), hosts=1)


# ------------------------------------------------------------------ numbers


def test_ratios_are_taken_within_rounds_and_the_slowest_rank_counts() -> None:
    found = row_of("x", samples(1.0, 20.0, 4.0), samples(1.0, 10.0, 2.0), samples(1, 1, 1), hosts=1)
    assert found.of_ddp == Spread(1.0, 2.0, 2.0)  # too few for quartiles
    assert found.seconds is not None
    assert found.seconds.middle == 4.0
    assert found.phases is not None
    assert found.phases.step == 0.4
    assert (found.loss, found.state, found.gradients, found.peak) == (1.5, 8, 5, 100)


def test_bytes_are_per_rank_of_one_host_and_per_host_of_two() -> None:
    own = samples(1.0, sent=10.0)  # both ranks of a host read the same counter
    assert own.sent(hosts=1) == 5.0
    assert own.sent(hosts=2) == 10.0


def test_a_method_that_failed_has_its_error_and_no_ratio_to_a_reference_that_failed() -> None:
    failed = Samples(error="no such module")
    assert row_of("x", failed, samples(1.0), samples(1.0), hosts=1) == Row("x", "no such module")
    assert row_of("x", samples(1.0), failed, samples(1.0), hosts=1).of_ddp is None


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_quartiles_are_in_order_and_within_the_values(values: list[float]) -> None:
    spread = Spread.of(values)
    assert min(values) <= spread.low <= spread.middle <= spread.high <= max(values)


def test_tables_come_back_from_json() -> None:
    made = table(row(DDP, 1.0), Row("DeepSpeed ZeRO-1", error="it said so"))
    assert table_from_json(json.loads(json.dumps(to_json(made)))) == made


# ------------------------------------------------------------------ text and pictures


def test_every_line_of_a_table_has_all_columns_and_errors_are_told() -> None:
    made = table(row(DDP, 1.0), row("onecopy", 0.9), Row("fairscale OSS", error="it said so"))
    assert {len(cells(each)) for each in made.rows} == {len(COLUMNS)}
    for text in (as_text(made), as_markdown(made)):
        assert "fairscale OSS: it said so" in text
        assert "0.90" in text


def test_a_table_that_was_skipped_says_why() -> None:
    skipped = Table("gpt", "a model", 2, "two hosts, 1 Gbit/s", 0, 0, skipped="this is not root")
    assert "this is not root" in as_text(skipped)
    assert "this is not root" in as_markdown(skipped)


def test_changes_are_those_beyond_the_quartiles_of_both_runs() -> None:
    before = table(row(DDP, 1.0), row("onecopy", 1.0), row("onecopy attached", 0.9))
    after = table(row(DDP, 1.0), row("onecopy", 1.2), row("onecopy attached", 0.91))
    (line,) = changes([before], [after])
    assert "onecopy: 1.00 -> 1.20 of DDP" in line
    assert changes([], [after]) == []


def test_a_picture_is_svg_with_a_bar_in_each_panel_for_every_method_that_ran() -> None:
    made = table(row(DDP, 1.0), row("onecopy <&>", 0.9), Row("FSDP2", error="no"))
    root = ET.fromstring(picture(made))
    bars = [each for each in root.iter() if each.tag.endswith("rect")]
    assert len(bars) == 4
    assert picture(made) == picture(made)


def test_goals_are_judged_where_the_table_can_tell() -> None:
    made = table(
        row(DDP, 1.0, state=16, peak=200), row(TORCHS, 2.0, peak=150), row("onecopy", 2.2),
        row("onecopy attached", 0.8, peak=90), row("FSDP2", 2.0),
    )  # fmt: skip
    found = {result.claim: result for result in goal_results([made])}
    assert found["onecopy attached / DDP"].holds
    assert not found["onecopy / torch's class"].holds
    assert not found["onecopy / FSDP2, the fastest of 1 peers"].holds
    peak = f"onecopy attached peak memory / {TORCHS}, the lowest of 2 that keep whole parameters"
    assert found[peak].measured == 90 / 150
    assert found["onecopy state of the fullest rank / ideal"].measured == 1.0
    assert goal_results([table(row(DDP, 1.0), wire="two hosts, 10 Gbit/s")]) == []


def test_a_peer_that_trains_something_else_is_marked_and_no_goal_is_judged_by_it() -> None:
    fast = dataclasses.replace(row("FSDP2", 0.1), loss=1.6)
    made = table(row(DDP, 1.0), row(TORCHS, 2.0), fast, row("onecopy", 1.1))
    assert "1.6000 !" in as_text(made)
    assert not [v for v in goal_results([made]) if "FSDP2" in v.claim]


def test_a_goal_within_the_spread_is_close() -> None:
    wide = dataclasses.replace(row("onecopy attached", 0.9), of_ddp=Spread(0.8, 0.9, 1.1))
    found = {v.claim: v for v in goal_results([table(row(DDP, 1.0), row(TORCHS, 2.0), wide)])}
    assert found["onecopy attached / DDP"].holds
    assert found["onecopy attached / DDP"].is_close
    assert not found["onecopy attached / torch's class"].is_close


def test_without_ddp_nobody_is_said_to_train_something_else() -> None:
    made = table(Row(DDP, error="it crashed"), row(TORCHS, 2.0), row("onecopy", 1.1))
    assert "!" not in as_text(made)


def test_the_readme_shows_the_methods_that_are_in_all_its_tables() -> None:
    one = table(row(DDP, 1.0), row("onecopy", 0.9), row("DDP, bucket views", 1.0))
    other = table(row(DDP, 1.0), row("onecopy", 0.8), workload="tiny")
    lines = summary([one, other]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| DDP", "| onecopy"]
    assert " | 0.90 | 0.80 | " in lines[3]


def test_a_mode_that_did_not_run_has_missed_its_goals() -> None:
    made = table(row(DDP, 1.0), row(TORCHS, 2.0), Row("onecopy attached", error="it crashed"))
    found = {result.claim: result for result in goal_results([made])}
    assert not found["onecopy attached / DDP"].holds
    assert found["onecopy attached / DDP"].measured is None


# ------------------------------------------------------------------ groups and workers


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_every_method_is_in_one_group_and_the_references_in_all(ranks: int) -> None:
    entries = [Entry(name, name) for name in METHODS]
    groups = Setup(WORKLOADS["gpt"], ranks, LOOPBACK, "loopback", 3).groups(entries)
    others = [e.name for group in groups for e in group if e.name not in REFERENCES]
    assert sorted(others) == sorted(set(METHODS) - set(REFERENCES))
    assert all(set(REFERENCES) <= {entry.name for entry in group} for group in groups)


def test_methods_train_to_the_same_loss_and_one_that_cannot_run_is_listed() -> None:
    lent, sent = "onecopy attached, lazy gather", "onecopy attached, all through TCP"
    names = [DDP, TORCHS, "DeepSpeed ZeRO-1", "onecopy", sent, lent]
    setup = Setup(BRIEF, 2, LOOPBACK, "loopback", rounds=1)
    entries = [Entry(name, name) for name in names]
    ticks: list[str] = []
    made = measure_groups(setup, [entries], ticks.append)
    assert len(ticks) == setup.ticks([entries])
    ran = [each for each in made.rows if each.error is None]
    assert {round(each.loss, 5) for each in ran} == {round(ran[0].loss, 5)}
    failed = [each for each in made.rows if each.error is not None]
    assert [each.method for each in failed] in ([], ["DeepSpeed ZeRO-1"])  # if not installed
    assert all("deepspeed" in str(each.error) for each in failed)
    drop_in, attached, through_tcp = made.row("onecopy"), made.row(lent), made.row(sent)
    ddp = made.row(DDP)
    assert drop_in is not None
    assert attached is not None
    assert ddp is not None
    assert through_tcp is not None
    # Whatever else uses the loopback device counts, too: there is no upper bound.
    assert through_tcp.sent > 1_000_000
    assert drop_in.state <= 0.51 * ddp.state
    assert attached.gradients <= 0.51 * ddp.gradients


def test_a_method_whose_rank_dies_says_so() -> None:
    with start_workers(DDP, WORKLOADS["tiny"], 2) as found:
        os.kill(found.processes[1].pid, 9)
        with pytest.raises(MethodFailed, match=r"rank 1 ended with exit code -9"):
            found.answers(timeout=60)


def test_a_method_that_does_not_answer_is_left_out() -> None:
    with (
        start_workers(DDP, WORKLOADS["tiny"], 2) as found,
        pytest.raises(MethodFailed, match="within 1 s"),
    ):
        found.answers(timeout=1)


def between_two_hosts(ranks: int, *methods: str) -> dict[str, float]:
    """Bytes that a host sends in a step, by method, in parameters of the model."""
    if os.geteuid() != 0 or shutil.which("tc") is None:
        pytest.skip("network namespaces need root, and iproute2")
    try:
        with two_hosts(gbit=1) as wire:
            setup = Setup(BRIEF, ranks, wire, "two hosts", rounds=1)
            entries = [Entry(name, name) for name in methods]
            found = alternate(setup, entries, lambda _: None)
    except NoHosts as reason:
        pytest.skip(str(reason))
    assert {name: each.error for name, each in found.items() if each.error} == {}
    parameters = 1000 * 256 * 4
    return {name: each.sent(hosts=2) / parameters for name, each in found.items()}


def test_between_two_hosts_all_bytes_pass_the_cable() -> None:
    assert 1.0 < between_two_hosts(2, DDP)[DDP] < 1.2  # and headers


def test_between_two_hosts_of_two_ranks_no_byte_of_ours_passes_the_cable_twice() -> None:
    found = between_two_hosts(4, DDP, ATTACHED, TCP)
    assert 1.0 < found[ATTACHED] < 1.2
    assert 1.5 < found[DDP] < 1.8  # a ring passes it in both halves of every round
    assert 2.0 < found[TCP] < 2.4  # all send to all
