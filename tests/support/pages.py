"""What tests of pages share: markup that is looked at, and a real browser that shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium")


class Nesting(HTMLParser):
    """Every tag is closed, in order."""

    VOID = frozenset({"meta", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, _: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        """Closed at once, as in SVG."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tips(html: str) -> list[str]:
    return [unescape(tip) for tip in re.findall(r'data-tip="([^"]*)"', html)]


def in_browser(html: str, script: str, tmp_path: Path, *flags: str) -> Any:
    """What a script finds out on a page. Returns the JSON of its result."""
    file = tmp_path / "page.html"
    report = f"<script>document.title = JSON.stringify((() => {{ {script} }})());</script>"
    file.write_text(html.replace("</body>", f"{report}</body>"), encoding="utf-8")
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"),
            *(f"--user-data-dir={tmp_path}/profile", *flags, "--dump-dom", file.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title, done.stderr[-2000:]
    return json.loads(unescape(title[1]))


def widths_on_a_phone(html: str, tmp_path: Path) -> tuple[int, int]:
    """(shown, needed) pixels, in a frame of 375: a headless window cannot be that narrow."""
    frame = f'<iframe style="width:375px;height:900px" srcdoc="{escape(html)}"></iframe>'
    script = """
    const inner = document.querySelector("iframe").contentDocument.documentElement;
    return [inner.clientWidth, inner.scrollWidth];
    """
    outer = f"<!doctype html><title></title><body>{frame}</body>"
    waiting = f"onload = () => document.title = JSON.stringify((() => {{ {script} }})()); return 0;"
    shown, needed = in_browser(outer, waiting, tmp_path)
    return shown, needed
