"""What the commands write to: results on stdout, everything else on stderr; neither breaks on a closed pipe or an ASCII locale."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from gpudiag.report.escape import clean, for_encoding

PIPED_COLUMNS = 100
WIDEST_COLUMNS = 120
"""Longer lines are hard to read, however wide the window."""

_CLOSED_PIPE = 141  # 128 + SIGPIPE, as for a program that the signal ends


def out(text: str) -> None:
    """Write a result to stdout; where the reader has gone (`| head`), end quietly."""
    try:
        sys.stdout.write(for_encoding(text, sys.stdout.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter fails again when it flushes at exit
        raise typer.Exit(_CLOSED_PIPE) from None


def say(line: str) -> None:
    """Write one line to stderr, without control characters."""
    sys.stderr.write(for_encoding(f"{clean(line, 2_000)}\n", sys.stderr.encoding))
    sys.stderr.flush()


def columns() -> int:
    """Return the width of the text to write."""
    return min(shutil.get_terminal_size().columns, WIDEST_COLUMNS) if sys.stdout.isatty() else PIPED_COLUMNS


def coloured() -> bool:
    """Return whether stdout is a terminal that wants colours (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done on stderr; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status(escape(clean(first))) as status:
        yield lambda text: status.update(escape(clean(text)))
