"""The command ``onecopy``: one module for each subcommand, which adds itself and runs.

Results go to standard output, plain, the same in a pipe. An error is one line on standard error
that says what to do; the exit code is 2 if the command was not understood, and 1 if it failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from onecopy.cli import estimate, plan, report
from onecopy.cli.arguments import Parser
from onecopy.models import BadArgument, Failure
from onecopy.version import __version__

_COMMANDS = (estimate, plan, report)

_DESCRIPTION = """\
Sharded optimizer state for PyTorch: what it takes, and who owns what, before the run; when it
communicated and waited, after it.

examples:
  onecopy estimate llama-3-8b --world 1 8 64 --dtype bf16 --master fp32
  onecopy plan gpt2 --world 8 --html plan.html
  onecopy report traces --html report.html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    try:
        arguments = _parser().parse_args(argv)
    except BadArgument as error:
        return _complain(error, 2)
    try:
        print(arguments.run(arguments))
        sys.stdout.flush()
        return 0
    except BadArgument as error:
        return _complain(error, 2)
    except BrokenPipeError:  # `| head` has seen enough
        _abandon_output()
        return 1
    except (Failure, ValueError, OSError) as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # of the model or the optimizer class, which are not ours
        what = getattr(arguments, "optimizer", None)
        tried = f"trying {arguments.model} with {what} and its options: " if what else ""
        return _complain(f"{tried}{type(error).__name__}: {error}", 1)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="onecopy",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"onecopy {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


def _complain(error: Exception | str, code: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"onecopy: {text}", file=sys.stderr)
    return code


def _abandon_output() -> None:
    """Else the interpreter would try to flush it, and complain, when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
