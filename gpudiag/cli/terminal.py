"""What the commands write to: results on stdout, everything else on stderr; neither breaks on a closed pipe or an ASCII locale."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import typer

from gpudiag.errors import InputError
from gpudiag.report.escape import clean, for_encoding

PIPED_COLUMNS = 100
WIDEST_COLUMNS = 120
"""Longer lines are hard to read, however wide the window."""
WIDEST_TABLE = 200
"""Columns from which a table has all that it can show."""

_CLOSED_PIPE = 141  # 128 + SIGPIPE, as for a program that the signal ends


def out(text: str) -> None:
    """Write a result to stdout; where the reader has gone (`| head`), end quietly. Raises InputError where the disk behind it is full."""
    stream = _opened(sys.stdout)
    if stream is None:
        return
    try:
        stream.write(for_encoding(text, stream.encoding))
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # else the interpreter fails again when it flushes at exit
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(_CLOSED_PIPE) from None
        raise InputError(f"cannot write to the standard output: {error.strerror}", "write to another place") from None


def say(line: str) -> None:
    """Write one line to stderr, without control characters; nowhere where stderr is closed or full."""
    stream = _opened(sys.stderr)
    if stream is not None:
        with suppress(OSError):
            stream.write(for_encoding(f"{clean(line, 2_000)}\n", stream.encoding))
            stream.flush()


def aside(text: str) -> None:
    """Write a text of several lines to stderr, where stdout belongs to another program; nowhere where stderr is closed or full."""
    stream = _opened(sys.stderr)
    if stream is not None:
        with suppress(OSError):
            stream.write(for_encoding(text, stream.encoding))
            stream.flush()


def _opened(stream: TextIO | None) -> TextIO | None:
    """Return a standard stream; None where the command was started with it closed (`>&-`): Python then has none."""
    return stream


def _on_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def columns() -> int:
    """Return the width of the text to write."""
    return min(shutil.get_terminal_size().columns, WIDEST_COLUMNS) if _on_terminal(sys.stdout) else PIPED_COLUMNS


def table_columns() -> int:
    """Return the width of a table to write: of a wide terminal more than prose should take."""
    return min(shutil.get_terminal_size().columns, WIDEST_TABLE) if _on_terminal(sys.stdout) else PIPED_COLUMNS


def coloured() -> bool:
    """Return whether stdout is a terminal that wants colours (https://no-color.org)."""
    return _on_terminal(sys.stdout) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done on stderr; silent where stderr is no terminal."""
    if not _on_terminal(sys.stderr):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status(escape(clean(first))) as status:
        yield lambda text: status.update(escape(clean(text)))
