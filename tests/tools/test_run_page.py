"""`onecopy report`: traces read and refused, and the page of a run, also in a real browser."""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import pytest
from pages import Nesting, in_a_browser, in_browser, tips, widths_on_a_phone

from onecopy.planning.sizes import MemoryReport
from onecopy.tools.cli import main
from onecopy.tools.models import Failure
from onecopy.tools.pages.charts import Mark, Row, in_subrows, merged_marks, timeline
from onecopy.tools.pages.run_page import Run, read_run, run_page

MS = 1000.0  # microseconds


def trace_of(rank: int, world: int = 2, buckets: int = 2, **facts: Any) -> dict[str, Any]:
    """Steps 3 and 4 of 100 ms each, the optimizer's part 10 ms of it, on a rank that starts its
    trace `rank` ms later than rank 0."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]

    def add(name: str, start: float, stop: float) -> None:
        times = {"ts": (start + rank) * MS, "dur": (stop - start) * MS}
        events.append({"ph": "X", "name": name, **times})

    add("PyTorch Profiler (0)", 0, 200)
    for number, begin in ((3, 0), (4, 100)):
        width = 5 / buckets
        add(f"onecopy::optimizer step {number}", begin + 90, begin + 100)
        for b in range(buckets):
            at = begin + 50 + b * width
            add(f"onecopy::reduce_scatter {b}", at, at + width / 2)
            wait = begin + 90 + b * width / 10
            add(f"onecopy::wait for reduce_scatter {b}", wait, wait + width / 10)
            at = begin + 94 + b * width
            add(f"onecopy::step {b}", at, at + width / 4)
            add(f"onecopy::all_gather {b}", at + width / 4, at + width / 2)
            add(f"onecopy::wait for all_gather {b}", begin + 99.2, begin + 99.4)
    memory = MemoryReport(4000, 2000, {"exp_avg": 2000, "exp_avg_sq": 2000}, 0, 500, 0)
    return {
        "traceEvents": events,
        "baseTimeNanoseconds": 10**18,
        "distributedInfo": {"backend": "gloo"},
        "onecopy": {
            "rank": rank,
            "world_size": world,
            "is_attached": True,
            "classes": ["AdamW"],
            "memory": memory.as_dict(),
            "buckets": [
                {"phase": phase, "bucket": b, "times": 4, "messages": 4, "bytes": 4_000_000 + b}
                | {"exposed": 0.1, "hidden": 0.2}
                for phase in ("all_gather", "reduce_scatter")
                for b in range(buckets)
            ],
            **facts,
        },
    }


def record(directory: Path, *traces: dict[str, Any]) -> Path:
    for trace in traces:
        (directory / f"rank-{trace['onecopy']['rank']}.json").write_text(json.dumps(trace))
    return directory


@cache
def recorded(root: Path, world: int = 2, buckets: int = 2) -> Run:
    root.mkdir(exist_ok=True)
    return read_run(record(root, *(trace_of(rank, world, buckets) for rank in range(world))))


# ------------------------------------------------------------------ reading


def test_what_was_written_is_read(tmp_path: Path) -> None:
    record(tmp_path, trace_of(1), trace_of(0))
    (tmp_path / "rank-0.123.draft.json").write_text("{")
    (tmp_path / "notes.txt").write_text("mine")
    run = read_run(tmp_path)
    assert [trace.rank for trace in run.traces] == [0, 1]
    assert (run.world_size, run.bucket_numbers) == (2, (0, 1))
    assert [step.number for step in run.traces[0].timeline.steps] == [3, 4]
    assert run.phases == ("reduce_scatter", "all_gather")
    assert (run.title, run.in_words()) == ("Steps 3 to 4 on 2 ranks", "AdamW, attached, gloo")
    first = run.traces[0]
    assert first.memory.total == 10_500
    assert first.step_time == pytest.approx(100 * MS)
    assert first.sent["reduce_scatter", 1] == 1_000_000.25
    assert sum(first.sent.values()) == 4_000_000.5
    cost = first.cost("reduce_scatter")
    assert cost.exposed == pytest.approx(2 * 1.25 * MS + 0.5 * MS)
    assert cost.hidden == pytest.approx((90 - 51.25 - 1.25) * MS)


def test_a_memory_report_survives_its_dict() -> None:
    report = MemoryReport(1, 2, {"a/b": 3, "step": 4}, 5, 6, 7)
    assert MemoryReport.from_dict(report.as_dict()) == report


def test_ranks_of_one_host_share_a_clock_and_others_do_not(tmp_path: Path) -> None:
    run = recorded(tmp_path / "one")
    assert run.origins() == (0, 0)
    other = trace_of(1)
    other["baseTimeNanoseconds"] = 10**18 + 10**12
    apart = read_run(record(tmp_path, trace_of(0), other))
    assert apart.origins() == (0, 1 * MS)


def test_ranks_that_wrote_nothing_are_missed(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, trace_of(1, world=4)))
    assert run.in_words().endswith("traces of 1 rank")


NOT_OURS = [
    "[]",
    "3",
    "null",
    '"x"',
    "{}",
    '{"traceEvents": []}',
    '{"onecopy": 1, "traceEvents": []}',
    '{"onecopy": {}, "traceEvents": []}',
    json.dumps({**trace_of(0), "traceEvents": 3}),
    json.dumps({**trace_of(0), "traceEvents": [{"ph": "X", "name": "onecopy::step 1"}]}),
    json.dumps(trace_of(0, memory={"parameters": 1})),
    json.dumps(trace_of(0, buckets_=0) | {"onecopy": {"rank": "x"}}),
    json.dumps(trace_of(0, memory=[1])),
]


@pytest.mark.parametrize("content", NOT_OURS)
def test_json_that_is_something_else(tmp_path: Path, content: str) -> None:
    (tmp_path / "rank-0.json").write_text(content)
    with pytest.raises(Failure, match=r"rank-0.json is no trace that onecopy has written: record"):
        read_run(tmp_path)


def test_bad_input_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(directory: Path, message: str) -> None:
        assert main(["report", str(directory)]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert message in captured.err

    fails(tmp_path / "none", "is no directory of traces: record one with ONECOPY_TRACE=DIR torchr")
    fails(tmp_path, "holds no traces (rank-0.json, ...): record one with ONECOPY_TRACE=DIR torchru")
    (tmp_path / "rank-0.json").write_text("{")
    fails(tmp_path, "remove it, and record again")
    (tmp_path / "rank-0.json").write_bytes(b"\xff\xfe\x00")
    fails(tmp_path, "remove it, and record again")
    record(tmp_path, trace_of(0, 2), trace_of(1, 4))
    fails(tmp_path, "holds traces of 2 and 4 ranks: empty it, and record one run")
    early = trace_of(1)
    early["traceEvents"] = [e for e in early["traceEvents"] if not e["name"].endswith("step 4")]
    record(tmp_path, trace_of(0), early)
    fails(tmp_path, "holds traces of different steps: empty it, and record one run")
    record(tmp_path, {**trace_of(0), "traceEvents": []})
    fails(tmp_path, "holds no whole step: let the run take the steps in ONECOPY_TRACE_STEPS")


# ------------------------------------------------------------------ as text


def test_as_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, trace_of(0), trace_of(1))
    assert main(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    title, memory, ranks, buckets, note = captured.out.split("\n\n")
    assert title == "Steps 3 to 4 on 2 ranks: AdamW, attached, gloo"
    assert memory.splitlines()[1].split("   ")[-1].strip() == "10.5 kB"
    assert ranks.splitlines()[1].split()[:3] == ["0", "100.0", "ms"]
    assert [line.split()[:4] for line in buckets.splitlines()[1:]] == [
        [phase, str(bucket), "1.00", "MB"]
        for bucket in (0, 1)
        for phase in ("reduce_scatter", "all_gather")
    ]
    assert "upper bounds" in note
    assert captured.err == ""


def test_long_tables_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, *(trace_of(rank, 20, 20) for rank in range(20)))
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count("... and 4 more: --all") == 2
    assert text.count("... and 24 more: --all") == 1
    assert main(["report", str(tmp_path), "--all"]) == 0
    assert "more: --all" not in capsys.readouterr().out


# ------------------------------------------------------------------ as a page


def test_the_page_is_written_and_its_path_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, trace_of(0), trace_of(1))
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text() == run_page(read_run(tmp_path))


def test_every_phase_is_on_the_timeline(tmp_path: Path) -> None:
    found = tips(run_page(recorded(tmp_path / "traces")))
    for rank in (0, 1):
        for text in (
            "step 3, forward and backward · 90.0 ms",
            "step 4, optimizer.step() · 10.0 ms",
            "step of bucket 1 · 625.0 us",
            "reduce_scatter 0, launched · 1.2 ms",
            "all_gather 1, launched · 625.0 us",
            "reduce_scatter 0 under way, hidden · 38.8 ms",
            "waited for all_gather 1 · 200.0 us",
        ):
            assert f"rank {rank} · {text}" in found
    state = "optimizer state 4.00 kB (exp_avg 2.00 kB, exp_avg_sq 2.00 kB), 38% of its memory"
    assert f"rank 0: {state}" in found


def test_the_charts_of_a_section_share_one_line_of_details(tmp_path: Path) -> None:
    for part in run_page(recorded(tmp_path / "traces")).split("<section")[1:]:
        section, _, _ = part.partition("</section>")
        assert section.count('<output class="detail"') == ('role="application"' in section)


def test_drop_in_and_one_rank_have_fewer_rows(tmp_path: Path) -> None:
    trace = trace_of(0, 1)
    for event in list(trace["traceEvents"]):
        if "reduce_scatter" in event["name"] or "all_gather" in event["name"]:
            trace["traceEvents"].remove(event)
    trace["onecopy"]["buckets"] = []
    html = run_page(read_run(record(tmp_path, trace)))
    assert ">compute<" in html
    assert ">wait<" not in html
    assert "Exposed and hidden" not in html
    assert "Steps 3 to 4 on 1 rank<" in html


@pytest.mark.parametrize(("world", "buckets"), [(2, 2), (64, 40), (1, 400)])
def test_a_page_stays_small_and_needs_nothing_else(
    tmp_path: Path, world: int, buckets: int
) -> None:
    html = run_page(recorded(tmp_path / "traces", world, buckets))
    parser = Nesting()
    parser.feed(html)
    assert parser.open == []
    assert len(html) < 900_000
    assert html.count("data-tip=") < 4000
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#|data:)", html)
    shown = {tip.split(" · ")[0] for tip in tips(html) if " · step 3, forward" in tip}
    assert len(shown) == min(world, 8)


def test_names_are_text_whatever_they_are(tmp_path: Path) -> None:
    trace = trace_of(0, 1, classes=["<script>alert(1)</script>"])
    html = run_page(read_run(record(tmp_path, trace)))
    assert html.count("<script>") == 1
    assert escape("<script>alert(1)</script>") in html


# ------------------------------------------------------------------ the kit


def test_marks_that_overlap_stand_below_each_other() -> None:
    marks = [Mark(0, 4, "a"), Mark(1, 2, "b"), Mark(3, 5, "c"), Mark(4, 6, "d")]
    assert [[mark.tip for mark in row] for row in in_subrows(marks)] == [["a", "d"], ["b", "c"]]
    assert [[m.tip for m in row] for row in in_subrows(marks, limit=1)] == [["a", "b", "c", "d"]]


def test_too_many_marks_are_merged() -> None:
    marks = [Mark(i, i + 0.5, f"e{i}", role=0) for i in range(10)]
    assert merged_marks(marks, limit=10) == marks
    three = merged_marks(marks, limit=3)
    assert len(three) == 3
    assert (three[0].start, three[-1].stop) == (0, 9.5)
    assert three[0].tip == "e0 … e3: 4 together, 2.0 s in all"
    pause = [*marks[:5], *(Mark(i + 50, i + 50.5, "late", role=0) for i in range(5))]
    assert all(mark.stop - mark.start < 5 for mark in merged_marks(pause, limit=3))
    mixed = [Mark(0, 9, "outer", role=0, opacity=0.4), *marks]
    assert merged_marks(mixed, limit=3)[0] == mixed[0]


def test_timelines_are_drawn_to_scale() -> None:
    rows = [Row("a", [Mark(1, 2, "x & y", role=3)]), Row("b", [], overlaps=True)]
    html = timeline("Label.", rows, length=4, edges=[2], names=[])
    assert 'class="mark c3" x="250.00" y="1.00" width="250.00"' in html
    assert 'data-tip="x &amp; y"' in html
    assert '<line class="edge" x1="500.00"' in html
    assert "<span>4.0 s</span>" in html


# ------------------------------------------------------------------ in a real browser


@in_a_browser
def test_keys_and_clicks_show_what_a_mark_says(tmp_path: Path) -> None:
    script = """
    const timeline = document.querySelectorAll(".timeline")[1];
    const detail = timeline.closest("section").querySelector(".detail");
    const press = key => {
      timeline.dispatchEvent(new KeyboardEvent("keydown", {key}));
      return detail.textContent;
    };
    timeline.focus();
    const found = {first: press("ArrowRight"), right: press("ArrowRight")};
    found.down = press("ArrowDown");
    found.end = press("End");
    const mark = document.querySelector(".timeline [fill-opacity]");
    mark.dispatchEvent(new MouseEvent("click", {bubbles: true}));
    found.clicked = detail.textContent;
    found.width = [document.documentElement.scrollWidth, innerWidth];
    return found;
    """
    found = in_browser(run_page(recorded(tmp_path / "traces")), script, tmp_path)
    assert found["first"] == "rank 1 · step 3, forward and backward · 90.0 ms"
    assert found["right"] == "rank 1 · step 4, forward and backward · 90.0 ms"
    assert found["down"].startswith("rank 1 · step")
    assert found["end"].startswith("rank 1 · step of bucket 1")
    assert found["clicked"] == "rank 0 · step 3, optimizer.step() · 10.0 ms"
    assert found["width"][0] <= found["width"][1]


@in_a_browser
def test_it_fits_a_phone(tmp_path: Path) -> None:
    html = run_page(recorded(tmp_path / "traces", 64, 40))
    shown, needed = widths_on_a_phone(html, tmp_path)
    assert needed <= shown <= 375
