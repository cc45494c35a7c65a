"""The command line: ``autopart inspect | plan | show | simulate | emit | verify | validate | calibrate | …``.

Results go to stdout, progress and errors to stderr. Exit status: 0; 1 when ``verify`` or ``rules`` finds a
difference; 2 when a command could not do its work, with one line that says why. What a command needs is imported when
it runs, so that ``autopart --help`` is there at once.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import gc
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from autopart.cli import (
    calibrating,
    checkpoints,
    comparing,
    emitting,
    explaining,
    inspecting,
    planning,
    rules,
    showing,
    simulating,
    supposing,
    trading,
    validating,
    verifying,
)
from autopart.collection import seldom_collected

_COMMANDS = (
    *(inspecting, planning, showing, explaining, comparing, supposing, trading, simulating, emitting, verifying),
    *(validating, calibrating, rules, checkpoints),
)
FAILED = 2
INTERRUPTED = 130
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

atexit.register(gc.freeze)  # what a large plan leaves behind takes a second to search for cycles when the process ends


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        self.exit(FAILED, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="autopart",
        description="Plans and emits the distributed program that trains an unmodified PyTorch model on a cluster.",
        epilog="example: autopart plan hf:gpt2 --cluster 8xH100",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in _COMMANDS:
        sub = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=f"example: {command.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    _spell()
    try:
        arguments, unknown = build_parser().parse_known_args(argv)
        if unknown:
            arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as end:  # argparse leaves by itself, also after --help
        return end.code if isinstance(end.code, int) else FAILED
    # What transformers warns of (token ids beyond a vocabulary that was made small) is no news about the plan.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with _caching(arguments), seldom_collected():
            status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of stdout has seen enough, as with "| head"
        _silence()
        return 0
    except KeyboardInterrupt:
        _failed(arguments.command, "interrupted")
        return INTERRUPTED
    except Exception as error:
        if _is_full(error):
            _silence()
        return _failed(arguments.command, _message(error))


def _spell() -> None:
    """Lets what a terminal has no letters for, such as … where it takes ASCII, be printed as ? instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _caching(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Of captured programs, solved strategies and plans, as the command was told."""
    if not getattr(arguments, "no_cache", False):
        return contextlib.nullcontext()
    from autopart import cache

    return cache.used(False)


def _silence() -> None:
    """Lets what is still to be printed go nowhere, as it would fail again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_full(error: Exception) -> bool:
    """Whether there was no room for what was printed: writers of files name theirs."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM and not error.filename


def _message(error: Exception) -> str:
    """What the user is told; before it, on stderr, what the failing processes said, or where autopart itself broke."""
    from autopart.runtime.errors import AutopartError  # loads torch

    if isinstance(error, AutopartError):
        if details := getattr(error, "details", ""):
            print(details, file=sys.stderr)
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}{_advice(error)}"
    if isinstance(error, OSError) and _is_full(error):
        return f"cannot write its output: {error.strerror}{_advice(error)}"
    traceback.print_exception(error)
    return "a defect of autopart, not of what it was given; the lines above say where"


def _advice(error: OSError) -> str:
    return "; make room, or name another place" if error.errno in _NO_ROOM else ""


def _failed(command: str, message: str) -> int:
    line = "; ".join(part.strip().rstrip(";") for part in message.splitlines() if part.strip())
    print(f"autopart {command}: {line}", file=sys.stderr)
    return FAILED
