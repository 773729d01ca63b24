"""Any command line, configuration and trace: a result, or one line that says what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzing import Refused, Tally, Wrong, cases, memory_limited, tally  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from test_cli import TINY
from test_run_page import trace_of

from onecopy.tools.cli import main

# Errors of the interpreter or of a library, shown to somebody who cannot know what they are about.
ACCIDENTS = re.compile(
    r"(Key|Index|Attribute|Assertion|Recursion|Memory|Overflow|ZeroDivision|Name|UnboundLocal)Error"
    r"|Traceback"
)


@pytest.fixture(autouse=True, scope="module")
def limited() -> Iterator[None]:
    with memory_limited():
        yield


def run(*argv: str) -> None:
    """The command; `Refused` in place of the one line with which it refuses."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as exit_:  # argparse leaves by itself
            code = exit_.code
    said = err.getvalue()
    if code == 0:
        if said or not out.getvalue():
            raise Wrong(f"{argv}: exit code 0, {said!r}")
        return
    ours = said.partition("cannot be read")[0]  # what follows is the reason
    is_one_line = said.startswith("onecopy") and said.count("\n") == 1 and said.endswith("\n")
    if code not in (1, 2) or not is_one_line or out.getvalue() or ACCIDENTS.search(ours):
        raise Wrong(f"{argv}: exit code {code}, {said!r}")
    raise Refused(said)


numbers = st.sampled_from(
    [
        *("0", "1", "2", "8", "-1", "x", "1e9", "nan", "inf", "-inf", "1e-300", "0.0001", "٣"),
        *("", "0x10", "1_0", "4096", "9" * 9, "9" * 30, "9" * 5000),
    ]
)
words = st.sampled_from(
    ["", "-", "--", "\ud800", "a\nb", "\0", "~", "../..", "*", "%s", "{0}", "é"]
)
models = st.sampled_from(
    [TINY, TINY, TINY, "gpt2", "test_cli:broken", "test_cli:nothing", "os:sep"]
)
optimizers = st.sampled_from(
    [
        *(
            "adamw",
            "sgd",
            "muon+adamw",
            "lbfgs",
            "+",
            "adam+",
            "test_cli:OnlyCuda",
            "torch.optim:Adam",
        ),
        *("os:sep", "builtins:exit", "json:loads"),
    ]
)
options = st.one_of(
    st.sampled_from(["lr=0.1", "lr=", "=", "lr", "momentum=0.9", "foreach=None", "betas=(1,2)"]),
    st.sampled_from(["lr=" + "(" * 10_000, "lr=" + "9" * 5000, "nonsense=1", "lr=1j", "lr=nan"]),
    words,
)
dtypes = st.sampled_from(["fp32", "bf16", "fp16", "fp64", "int8", "float32", "x", ""])
rates = st.sampled_from(
    ["400Gbit/s", "0", "1e400GB", "-1GB", "GB", "1", "9" * 400 + "GB", "1e-9MB"]
)


with_values = st.one_of(
    st.tuples(st.just("--world"), numbers),
    st.tuples(st.just("--optimizer"), optimizers),
    st.tuples(st.just("--option"), options),
    st.tuples(st.sampled_from(["--dtype", "--master", "--reduce-dtype"]), dtypes),
    st.tuples(st.just("--bucket-mb"), numbers),
    st.tuples(st.sampled_from(["--partition", "--backend", "--nonsense"]), words),
    st.tuples(st.sampled_from(["--bandwidth", "--latency"]), rates),
    st.tuples(st.just("--partition"), st.sampled_from(["auto", "whole", "elementwise"])),
    st.tuples(st.just("--backend"), st.sampled_from(["gloo", "nccl"])),
)
switches = st.sampled_from(
    ["--json", "--attached", "--under-ddp", "--lazy-gather", "--bucket-view", "--all", "--help"]
).map(lambda switch: (switch,))
shards = st.one_of(with_values, with_values, switches, words.map(lambda word: (word,)))


@given(data=st.data())
@cases(150)
def test_fuzz_command_lines(tally: Tally, data: st.DataObject) -> None:  # noqa: F811
    command = data.draw(st.sampled_from(["estimate", "plan", "plan", "report", "", "nonsense"]))
    model = data.draw(st.one_of(models, models, models, words))
    rest = [word for shard in data.draw(st.lists(shards, max_size=4)) for word in shard]
    world = ["--world", "2"] if command == "plan" else []
    with tally.case():
        tally.attempt(lambda: run(command, model, *world, *rest))


# ------------------------------------------------------------------------------- files


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**63, 10**400, 1e308, -1e308, 0.5, "x", "", "\ud800", "NaN"]),
    st.sampled_from([float("nan"), float("inf")]),
)
trees = st.recursive(
    plain,
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=3), of, max_size=3),
)
raw = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"", b"[" * 100_000, b'{"a":' * 100_000, b"\xef\xbb\xbf{}", b"null", b"9" * 5000]
    ),
)


@given(
    content=st.one_of(raw, trees.map(lambda tree: json.dumps(tree).encode())), named=st.booleans()
)
@cases(60)
def test_fuzz_configurations(
    tally: Tally,  # noqa: F811
    tmp_path_factory: Any,
    content: bytes,
    named: bool,
) -> None:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_bytes(content)
    where = directory / "config.json" if named else directory
    with tally.case():
        tally.attempt(lambda: run("estimate", str(where)))


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            found += places(value, (*path, key))
    return found


@given(data=st.data())
@cases(200)
def test_fuzz_traces(tally: Tally, tmp_path_factory: Any, data: st.DataObject) -> None:  # noqa: F811
    directory = tmp_path_factory.mktemp("traces")
    traces = [trace_of(rank) for rank in range(2)]
    trace = data.draw(st.sampled_from(traces))
    for *above, key in data.draw(st.lists(st.sampled_from(places(trace)), min_size=1, max_size=2)):
        with contextlib.suppress(LookupError, TypeError):
            parent: Any = trace
            for step in above:
                parent = parent[step]
            if data.draw(st.integers(0, 3)) == 0:
                del parent[key]
            else:
                parent[key] = data.draw(trees)
    for rank, each in enumerate(traces):
        (directory / f"rank-{rank}.json").write_text(json.dumps(each))
    if data.draw(st.integers(0, 5)) == 0:
        (directory / "rank-1.json").write_bytes(data.draw(raw))
    page = directory / "page.html"
    with tally.case():
        tally.attempt(lambda: run("report", str(directory)))
        tally.attempt(lambda: run("report", str(directory), "--html", str(page)))


def test_a_word_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(Path("\udcff"))]) == 2
    assert capsys.readouterr().err.count("\n") == 1
