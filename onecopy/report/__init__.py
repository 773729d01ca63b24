"""Pages that explain a plan or a run: one file each, that needs nothing else.

    page.py         the skeleton: head, style, script, sections
    charts.py       pictures and tables as pure functions from numbers to markup
    lanes.py        what went on when: lanes along a time axis
    grouping.py     ranks that are put together where there are many
    memory_bars.py  memory reports as bars
    plan_page.py    the page of a plan
    plan_map.py     its map of who owns what
    run_page.py     the page of a traced run
    run_lanes.py    its timeline
    run_tables.py   its tables

Colours are roles (``c0`` to ``c7``) that the style sheet fills in, for light, dark and print. What
a mark means is in its ``data-tip``; the script shows it on hover, on click and by keyboard.
"""
