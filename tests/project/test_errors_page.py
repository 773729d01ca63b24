"""docs/errors.md lists every message that a user can meet, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from inside import RECORDS_A_REFUSAL

import onecopy

ROOT = Path(__file__).parents[2]
PACKAGE = Path(onecopy.__file__).parent
COMMANDS = (
    PACKAGE / "tools" / "cli.py"
)  # argparse prints their errors below the usage of the command
ROWS = re.findall(r"^\| `(.+?)`[ |]", (ROOT / "docs" / "errors.md").read_text(), re.M)


HOLE = "…"


# Messages that are made in one place, to be raised and noted in others.
MADE_ELSEWHERE = ("a collective failed", "the process group ")


# Caught within the package, or impossible. By the beginning of the message.
NOT_FOR_USERS = (
    "a value of type …",  # part of "... holds a value of type ..., which a state dict ..."
    "a dict with keys other than",  # the same
    "with these options its steps lead nowhere",  # the probe takes it for an answer
    "expected the name of a dtype",  # read as "is damaged"
    "its bytes are not where they should be",  # the same
    "its shape does not fit its bytes",  # the same
    "its bytes are compressed",  # the same
    "its description is too long",  # the same
    "bucket … was not marked as updated",  # the order of calls follows from the plan
    "expected every rank once, in order",  # what ranks tell of their hosts is put in order
    "it is no tensor",  # the same
    "… has no chunk at … on this rank",  # DCP asks for the chunks that it was shown
    "… is not memory that was shared",  # the cause of "the memory of rank … is gone"
    "… could shrink while it is read",  # the same
    "that memory is too small to have been shared",  # the same
    "other memory has its descriptor",  # the same
    "… is no time",  # the cause of "is no trace that onecopy has written"
    "rank … has shared memory that it does not have",  # an attack
    "the buckets do not cover their streams",  # plans check themselves
    "… does not continue its stream",  # the same
    "at the end of backward, bucket … has not left",  # no other thread is in backward then
)


def text_of(node: ast.expr) -> str:
    """A message as it is written in the source, with holes where values go."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return HOLE


def said(node: ast.AST) -> ast.expr | None:
    """The message, if this raises an exception, makes one to be raised, or logs a warning."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return next(iter(node.exc.args), None)
    if isinstance(node, ast.Return) and isinstance(node.value, (ast.JoinedStr, ast.Constant)):
        return node.value if text_of(node.value).startswith(MADE_ELSEWHERE) else None
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
        name = getattr(node.value.func, "id", "")
        return node.value.args[0] if name == "RanksDisagree" else None
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
        "warning",
        "warn",
        RECORDS_A_REFUSAL,
    ):
        return node.args[0]
    return None


def messages() -> Iterator[tuple[str, str]]:
    for path in sorted(set(PACKAGE.rglob("*.py")) - {COMMANDS}):
        for node in ast.walk(ast.parse(path.read_text())):
            message = said(node)
            if message is not None:
                text = re.sub(rf"{HOLE}+", HOLE, re.sub(r"\s+", " ", text_of(message)))
                if re.search(r"\w{3}", text):  # not only holes
                    yield path.name, text


MESSAGES = list(messages())


def begins(message: str, row: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in row.split(HOLE))
    return re.match(pattern, message) is not None


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 100
    assert len(ROWS) > 90


def test_every_message_is_on_the_page() -> None:
    unlisted = [
        f"{name}: {message}"
        for name, message in MESSAGES
        if not any(begins(message, row) for row in (*ROWS, *NOT_FOR_USERS))
    ]
    assert not unlisted, "add to docs/errors.md, or to NOT_FOR_USERS:\n" + "\n".join(unlisted)


def test_every_row_is_a_message() -> None:
    stale = [
        row
        for row in (*ROWS, *NOT_FOR_USERS)
        if not any(begins(message, row) for _, message in MESSAGES)
    ]
    assert not stale, "no longer raised:\n" + "\n".join(stale)


def test_rows_are_no_catch_alls() -> None:
    for row in ROWS:
        assert len(row.replace(HOLE, "").strip()) >= 9, row
