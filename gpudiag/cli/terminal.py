"""What the commands write to: results on stdout, notes and progress on stderr; neither breaks on a closed pipe or an ASCII locale."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

import typer

from gpudiag.errors import InputError
from gpudiag.report.console import clean, replace_unencodable
from gpudiag.units import CountedProgress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from gpudiag.report.blocks import Document

PIPED_COLUMNS = 100
WIDEST_COLUMNS = 120
"""Longer lines are hard to read, however wide the window."""
WIDEST_TABLE = 200


def write_result(text: str) -> None:
    """Write a result to stdout; where the reader has gone (`| head`), end quietly. Raises InputError where the disk behind it is full."""
    stream = sys.stdout
    if stream is None:
        return
    try:
        stream.write(make_writable(text, stream))
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # else the interpreter fails again when it flushes at exit
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(141) from None  # 128 + SIGPIPE, as for a program that the signal ends
        raise InputError(f"cannot write to the standard output: {error.strerror}", "write to another place") from None


def write_document(document: Document, *, wide: bool = False) -> None:
    """Write a document to stdout; `wide`: its tables may take more than prose should."""
    from gpudiag.report.render_text import render_text

    write_result(render_text(document, width=measure_table_columns() if wide else measure_columns(), color=is_coloured()))


def write_note(line: str) -> None:
    """Write one line to stderr, without control characters; nowhere where stderr is closed or full."""
    write_aside(f"{clean(line, 2_000)}\n")


def format_json(data: Any) -> str:
    """Format a struct, or what else JSON can hold, as indented JSON."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n"


def write_aside(text: str) -> None:
    """Write a text of several lines to stderr, where stdout belongs to another program; nowhere where stderr is closed or full."""
    stream = sys.stderr
    if stream is not None:
        with suppress(OSError):
            stream.write(make_writable(text, stream))
            stream.flush()


def make_writable(text: str, stream: TextIO) -> str:
    """Return `text` with what the stream, or the locale that its reader asked for, cannot show replaced: bars by '#'."""
    # Whether LC_ALL asks for ASCII (C, POSIX). Python itself writes UTF-8 then (PEP 540), unless told otherwise. LANG=C, or none at all,
    # is what a container has that nobody has set up: Python takes UTF-8 there (PEP 538), and so do terminals
    asked = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8") == "1"
    return replace_unencodable(text, "ascii" if (not asked and os.environ.get("LC_ALL", "").upper() in {"C", "POSIX"}) else stream.encoding)


def is_drawable(stream: TextIO | None) -> bool:
    """Return whether lines can be drawn anew on `stream`: a terminal that moves its cursor."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def measure_columns() -> int:
    """Return the width of the text to write."""
    return min(measure_table_columns(), WIDEST_COLUMNS)


def measure_table_columns(stream: TextIO | None = None) -> int:
    """Return the width of a table on `stream` (default: stdout): of a wide terminal more than prose should take.

    In a pipe it is as COLUMNS says, where that is exported.
    """
    stream = sys.stdout if stream is None else stream
    asked = os.environ.get("COLUMNS", "")
    if stream is None or not stream.isatty():
        return min(int(asked), WIDEST_TABLE) if asked.isdecimal() and asked.isascii() and int(asked) > 0 else PIPED_COLUMNS
    columns = 0
    if stream is not sys.stdout and not asked:  # a terminal that need not be that of stdout
        with suppress(OSError, ValueError):
            columns = os.get_terminal_size(stream.fileno()).columns
    return min(columns or shutil.get_terminal_size().columns, WIDEST_TABLE)


def is_coloured(stream: TextIO | None = None) -> bool:
    """Return whether `stream` (default: stdout) takes colours.

    NO_COLOR forbids them, FORCE_COLOR wants them in a pipe too (no-color.org, force-color.org).
    """
    if os.environ.get("NO_COLOR"):
        return False
    if forced := os.environ.get("FORCE_COLOR"):
        return forced != "0"
    return is_drawable(sys.stdout if stream is None else stream)


@contextmanager
def show_progress(first: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done on stderr; silent where stderr is no terminal. Gone afterwards."""
    if not is_drawable(sys.stderr):
        yield lambda _: None
        return

    with draw_progress(first) as tell:
        yield tell


READING = "reading"

_STAGE_ENDS = {READING: 0.25, "linking": 0.3, "costing": 0.4, "replaying": 0.65, "judging": 0.98}
"""Stage -> share of the time of an analysis after which it ends: the middle of three traces of 1 to 3 MB; reading is told by the file."""

_BAR_CELLS = 24
_MAX_STAGE_TEXT = 60


@contextmanager
def draw_progress(first: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done, on a terminal behind stderr; taken away afterwards.

    A stage of an analysis moves the bar, and so does 'ranks 3/64', before the rank that is shown is analysed. Anything else leaves it where
    it is, and where no stage was told of it runs to and fro.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from gpudiag.trace.decompression import watch_reading

    plain = make_writable("\u2588", sys.stderr) != "\u2588"  # ASCII alone: a share in digits stands instead of a bar
    columns = (
        SpinnerColumn("line" if plain else "dots"),
        TextColumn("{task.description}", markup=False),
        TaskProgressColumn() if plain else BarColumn(bar_width=_BAR_CELLS),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        stages = _Stages(shown, shown.add_task(clean(first, _MAX_STAGE_TEXT), total=None))
        stages.tell(first)
        with watch_reading(stages.read):
            yield stages.tell


class _Stages:
    def __init__(self, shown: Progress, task: TaskID) -> None:
        self._shown, self._task, self._stage = shown, task, ""

    def tell(self, text: str) -> None:
        self._stage = text
        self._shown.update(self._task, description=make_writable(clean(text, _MAX_STAGE_TEXT), sys.stderr))
        if text in _STAGE_ENDS:
            self._shown.update(
                self._task, total=1.0, completed=max((end for end in _STAGE_ENDS.values() if end < _STAGE_ENDS[text]), default=0.0)
            )
        elif isinstance(text, CountedProgress):
            self._shown.update(self._task, total=1.0, completed=text.done / max(1, text.total))

    def read(self, share: float) -> None:
        """Hear how much of a file was read, 0..1. A file that is read later, such as a window with stacks, leaves the bar where it is."""
        if self._stage == READING:
            self._shown.update(self._task, completed=_STAGE_ENDS[READING] * share)
