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
        stream.write(writable(text, stream))
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
            stream.write(writable(f"{clean(line, 2_000)}\n", stream))
            stream.flush()


def aside(text: str) -> None:
    """Write a text of several lines to stderr, where stdout belongs to another program; nowhere where stderr is closed or full."""
    stream = _opened(sys.stderr)
    if stream is not None:
        with suppress(OSError):
            stream.write(writable(text, stream))
            stream.flush()


def writable(text: str, stream: TextIO) -> str:
    """Return `text` with what the stream, or the locale that its reader asked for, cannot show replaced: bars by '#'."""
    return for_encoding(text, "ascii" if _plain_locale() else stream.encoding)


def ascii_only(stream: TextIO) -> bool:
    """Return whether `stream`, or the locale that its reader asked for, shows nothing but ASCII."""
    return writable("\u2588", stream) != "\u2588"


def _plain_locale() -> bool:
    """Return whether LC_ALL asks for ASCII (C, POSIX). Python itself writes UTF-8 then (PEP 540), unless told otherwise.

    LANG=C, or none at all, is what a container has that nobody has set up: Python takes UTF-8 there (PEP 538), and so do terminals.
    """
    asked = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8") == "1"
    return not asked and os.environ.get("LC_ALL", "").upper() in {"C", "POSIX"}


def _opened(stream: TextIO | None) -> TextIO | None:
    """Return a standard stream; None where the command was started with it closed (`>&-`): Python then has none."""
    return stream


def _on_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def drawable(stream: TextIO | None) -> bool:
    """Return whether lines can be drawn anew on `stream`: a terminal that moves its cursor."""
    return _on_terminal(stream) and os.environ.get("TERM") != "dumb"


def columns() -> int:
    """Return the width of the text to write."""
    return min(table_columns(), WIDEST_COLUMNS)


def table_columns(stream: TextIO | None = None) -> int:
    """Return the width of a table on `stream` (default: stdout): of a wide terminal more than prose should take.

    In a pipe it is as COLUMNS says, where that is exported.
    """
    stream = sys.stdout if stream is None else stream
    if _on_terminal(stream):
        return min(_terminal_columns(stream), WIDEST_TABLE)
    asked = os.environ.get("COLUMNS", "")
    return min(int(asked), WIDEST_TABLE) if asked.isdecimal() and asked.isascii() and int(asked) > 0 else PIPED_COLUMNS


def _terminal_columns(stream: TextIO) -> int:
    """Return the columns of the terminal behind `stream`, which need not be that of stdout; COLUMNS is asked first, as shutil does."""
    if stream is not sys.stdout and not os.environ.get("COLUMNS"):
        with suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns or shutil.get_terminal_size().columns
    return shutil.get_terminal_size().columns


def coloured(stream: TextIO | None = None) -> bool:
    """Return whether `stream` (default: stdout) takes colours.

    NO_COLOR forbids them, FORCE_COLOR wants them in a pipe too (no-color.org, force-color.org).
    """
    if os.environ.get("NO_COLOR"):
        return False
    if forced := os.environ.get("FORCE_COLOR"):
        return forced != "0"
    return drawable(sys.stdout if stream is None else stream)


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done on stderr; silent where stderr is no terminal. Gone afterwards."""
    if not drawable(sys.stderr):
        yield lambda _: None
        return
    from gpudiag.cli.progress import drawn

    with drawn(first) as tell:
        yield tell
