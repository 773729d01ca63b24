"""The skeleton of a page: one file with its style and its script in it, that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from onecopy.version import __version__

# A browser will not load anything from elsewhere, whatever a parameter may be called.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    """A whole page. ``parts`` is markup; title and subtitle are text."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="generator" content="onecopy {__version__}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_resource("style.css")}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<main id="content">
<header>
<h1>{escape(title)}</h1>
<p class="soft">{escape(subtitle)}</p>
</header>
{chr(10).join(parts)}
<footer>Written by onecopy {__version__}. This file needs no network.</footer>
</main>
<div id="tip" role="presentation" hidden></div>
<script>
{_resource("script.js")}</script>
</body>
</html>
"""


def section(title: str, *parts: str, long: bool = False) -> str:
    """A titled part of a page; ``long``: it may be broken over printed pages."""
    kind = ' class="long"' if long else ""
    return f"<section{kind}>\n<h2>{escape(title)}</h2>\n{chr(10).join(parts)}\n</section>"


def heading(text: str) -> str:
    """Of a part of a section."""
    return f'<h3 class="part">{escape(text)}</h3>'


def paragraph(text: str, soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f"<p{kind}>{escape(text)}</p>"


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Key figures: what, how much, and what that means."""
    found = [
        f"<li><span>{escape(what)}</span><b>{escape(figure)}</b><span>{escape(note)}</span></li>"
        for what, figure, note in items
    ]
    return f'<ul class="cards">\n{chr(10).join(found)}\n</ul>'


def folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>"


def html_table(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    """A table; the columns in ``numbers`` lean to the right."""

    def cell(tag: str, at: int, text: str) -> str:
        kind = ' class="number"' if at in numbers else ' class="name"' if at == 0 else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{kind}{scope}>{escape(text)}</{tag}>"

    def line(tag: str, row: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, at, text) for at, text in enumerate(row))}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<thead>{line('th', head)}</thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _resource(name: str) -> str:
    return files("onecopy.report").joinpath(name).read_text(encoding="utf-8")
