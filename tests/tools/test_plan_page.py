"""The page of a plan: what is on it, that it stays small, and how it behaves in a real browser."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import CHROMIUM, Nesting, in_a_browser, in_browser, tips, widths_on_a_phone
from torch.optim import SGD, AdamW

import onecopy.tools.pages.plan_page
from onecopy import estimate
from onecopy.planning.text import in_bytes
from onecopy.tools.models import PRESETS
from onecopy.tools.pages.charts import (
    Bar,
    column_chart,
    folded_table,
    page,
    stacked_bars,
    strip,
)
from onecopy.tools.pages.plan_page import plan_page

REPORT = Path(onecopy.tools.pages.plan_page.__file__).parent


@cache
def gpt2_page() -> str:
    return plan_page(estimate(PRESETS["gpt2"](), AdamW, 8, bucket_mb=25), "gpt2")


@cache
def huge_page() -> str:
    found = estimate(
        PRESETS["llama-3-405b"](), AdamW, 16384, dtype=torch.bfloat16, bucket_mb=400, attached=True
    )
    return plan_page(found, "llama-3-405b")


# ------------------------------------------------------------------ what is on it


def test_every_shard_of_a_small_plan_is_on_the_map() -> None:
    found = estimate(PRESETS["gpt2"](), AdamW, 8, bucket_mb=25)
    shards = [tip for tip in tips(gpt2_page()) if "bucket" in tip]
    assert len(shards) == sum(found.shards) == 299
    assert any(re.match(r"rank 3 · wte\.weight · elements [\d,]+ to [\d,]+ of", p) for p in shards)
    assert any(re.match(r"rank 7 · h\.0\.ln_1\.weight · all of it · 3\.07 kB", p) for p in shards)


def test_memory_balance_and_peers_are_on_it() -> None:
    text = gpt2_page()
    assert "gpt2 on 8 ranks" in text
    for name in ("DDP", "torch&#x27;s class", "ZeRO-2", "ZeRO-3", "rank 7"):
        assert f">{name}</span>" in text
    assert "fullest 1.000" in text
    assert "fullest 2.481" in text
    states = [tip for tip in tips(text) if tip.startswith("rank 0: optimizer state 124 MB")]
    assert "exp_avg 62.2 MB, exp_avg_sq 62.2 MB" in states[0]


@pytest.mark.parametrize("make", [gpt2_page, huge_page])
def test_a_page_stays_small_and_needs_nothing_else(make: Any) -> None:
    html = make()
    assert len(html) < 300_000
    assert html.count("data-tip=") < 2000
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#|data:)", html)
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_the_charts_of_a_section_share_one_line_of_details() -> None:
    for part in gpt2_page().split("<section")[1:]:
        section, _, _ = part.partition("</section>")
        assert section.count('<output class="detail"') == ('role="application"' in section)


def test_a_huge_plan_is_drawn_in_groups() -> None:
    groups = [tip for tip in tips(huge_page()) if tip.startswith("ranks 0-1023 ·")]
    assert 30 <= len(groups) <= 80
    assert all("of it (even would be 6.2%)" in tip for tip in groups if " · " in tip)
    assert "model.embed_tokens.weight" in groups[0]
    assert "lm_head.weight" in groups[-1]


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '" onload="x', "a & b", "déjà.0.w"])
@pytest.mark.parametrize("world", [1, 3, 70])
def test_names_are_text_whatever_they_are(name: str, world: int) -> None:
    html = plan_page(estimate({name: (300, 7), f"{name}2": ()}, SGD, world, lr=0.1), name)
    parser = Nesting()
    parser.feed(html)
    assert parser.open == []
    assert html.count("<script>") == 1
    assert escape(name) in html


def test_pages_do_not_depend_on_when_they_are_written() -> None:
    found = estimate([(30, 7)], SGD, 2, lr=0.1)
    assert plan_page(found, "m") == plan_page(found, "m")


# ------------------------------------------------------------------ the kit


def test_bars_share_a_scale() -> None:
    bars = [
        Bar("a", [(1, 0, "t"), (0, 1, "none")], "1"),
        Bar("b", [(4, 0, "t")], "4"),
    ]
    html = stacked_bars("Label.", bars, in_bytes)
    assert "<span>0</span><span>4 B</span>" in html
    assert "width:25.000%" in html
    assert "width:100.000%" in html
    assert "none" not in html  # an empty part cannot be pointed at


def test_columns_have_a_line_at_one() -> None:
    html = column_chart("t", "f", [(2, "x")], top=4, role=0, ends=("a", "b"))
    assert 'y1="75.00"' in html
    assert 'y="50.00" width="996.00" height="50.00"' in html


def test_a_strip_names_what_there_is_room_for() -> None:
    html = strip([("a long name", 0.01), ("short", 0.99)])
    assert "a long name" not in html
    assert ">short<" in html


def test_tables_and_pages_escape_their_text() -> None:
    assert '<td class="name">&lt;b&gt;</td>' in folded_table("c", (["h"], [["<b>"]]), ())
    assert "<h1>&lt;b&gt;</h1>" in page("<b>", "", [])


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_stand_out(theme: str) -> None:
    """WCAG AA: 4.5 for text, 3 for graphics."""
    light, dark = (REPORT / "style.css").read_text().split("@media (prefers-color-scheme: dark)")
    block = light if theme == "light" else dark.partition("}")[0]
    colour = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    for ground in ("ground", "card"):
        for text in ("ink", "soft", "accent"):
            assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)
    for role in range(6):
        assert contrast(colour[f"c{role}"], colour["card"]) >= 3 - 0.1, role
    assert contrast(colour["tip"], colour["tip-ink"]) >= 4.5


# ------------------------------------------------------------------ in a real browser


@in_a_browser
def test_keys_clicks_and_the_pointer_show_what_a_mark_says(tmp_path: Path) -> None:
    script = """
    const map = document.querySelector(".map");
    const line = chart => chart.closest("section").querySelector(".detail");
    const detail = line(map);
    const press = key => {
      map.dispatchEvent(new KeyboardEvent("keydown", {key}));
      return detail.textContent;
    };
    const tip = document.getElementById("tip");
    map.focus();
    const found = {focused: document.activeElement === map, first: press("ArrowRight")};
    found.right = press("ArrowRight");
    found.down = press("ArrowDown");
    found.end = press("End");
    found.on = [...document.querySelectorAll(".on")].map(mark => mark.dataset.tip);
    press("Escape");
    found.left = document.querySelectorAll(".on").length;
    const mark = document.querySelector(".bars .mark");
    mark.dispatchEvent(new MouseEvent("click", {bubbles: true}));
    found.clicked = line(mark).textContent;
    mark.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 50, clientY: 50}));
    found.hovered = [tip.hidden, tip.textContent];
    found.unlabelled = [...document.querySelectorAll("[role=application]")]
      .filter(each => !each.getAttribute("aria-label") || each.tabIndex !== 0).length;
    found.live = detail.getAttribute("aria-live");
    return found;
    """
    found = in_browser(gpt2_page(), script, tmp_path)
    assert found["focused"]
    assert found["first"].startswith("rank 0 · wte.weight · elements")
    assert found["right"].startswith("rank 0 · wte.weight")
    assert found["right"] != found["first"]
    assert found["down"].startswith("rank 1 · wte.weight")
    assert found["end"].startswith("rank 1 · ")
    assert found["on"] == [found["end"]]
    assert found["left"] == 0
    assert found["clicked"].startswith("rank 0: parameters 498 MB")
    assert found["hovered"] == [False, found["clicked"]]
    assert (found["unlabelled"], found["live"]) == (0, "polite")


@in_a_browser
@pytest.mark.parametrize("make", [gpt2_page, huge_page])
def test_it_fits_a_phone(make: Any, tmp_path: Path) -> None:
    shown, needed = widths_on_a_phone(make(), tmp_path)
    assert needed <= shown <= 375


@in_a_browser
def test_it_follows_the_system_into_the_dark(tmp_path: Path) -> None:
    script = "return getComputedStyle(document.body).backgroundColor;"
    light = in_browser(gpt2_page(), script, tmp_path, "--blink-settings=preferredColorScheme=1")
    dark = in_browser(gpt2_page(), script, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert (light, dark) == ("rgb(251, 250, 248)", "rgb(19, 21, 26)")


@in_a_browser
def test_it_can_be_printed(tmp_path: Path) -> None:
    file, pdf = tmp_path / "page.html", tmp_path / "page.pdf"
    file.write_text(gpt2_page(), encoding="utf-8")
    subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"),
            *(f"--user-data-dir={tmp_path}/profile", f"--print-to-pdf={pdf}", file.as_uri()),
        ],
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert 1 <= pdf.read_bytes().count(b"/Type /Page\n") <= 5
