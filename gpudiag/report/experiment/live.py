"""What is measured, while it is: a table on stderr whose intervals shrink pair by pair; plain lines where that is no terminal."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from gpudiag.model.experiment import Comparison, Outcome, outcome_of
from gpudiag.report.escape import clean, for_encoding
from gpudiag.report.experiment import words
from gpudiag.report.experiment.bars import LEAST_CELLS, MOST_CELLS, Axis

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live as RichLive
    from rich.table import Table

_COLUMNS, _GAP = 3, 2
"""Name, verdict and figure, and the space after each; a bar needs what is left."""
_LONGEST_NAME = 28
_PAIR = re.compile(r"pair (\d{1,4}) of (\d{1,4})\b")
"""What the runner tells while it measures (experiment.runner)."""
_PAIR_CELLS = 20
_MOST_ROWS = 16
"""Rows on the screen: the latest ones."""


class Live:
    """Shows experiments as they are measured. A context manager; without it nothing is shown in a terminal.

    >>> with Live() as live:
    ...     live.tell("bf16: pair 3 of 12 at most")
    ...     live.pair("bf16", comparison)
    ...     live.done(outcome)

    It draws only when it is told something, and has no thread: one that redraws would take its processor time from the arm that is
    being measured. What it has drawn is taken away in the end; the report follows.
    """

    def __init__(self, stream: TextIO | None = None, *, console: Console | None = None) -> None:
        """Show on `stream` (default: stderr); `console`: one of rich in its place, drawn on whatever it is."""
        self._stream = stream or sys.stderr
        self._given = console
        self._rows: dict[str, tuple[Outcome, bool]] = {}
        self._seen: list[Outcome] = []  # also what was shown before: on an axis of the last intervals alone none would shrink
        self._doing = ""
        self._live: RichLive | None = None

    def __enter__(self) -> Live:
        if self._given is not None or (self._stream is not None and self._stream.isatty()):
            self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    def tell(self, text: str) -> None:
        """Say what is being done; nothing where there is no terminal."""
        self._doing = clean(text)
        self._draw()

    def pair(self, fix: str, found: Comparison, *, screening: bool = False) -> None:
        """Show what the pairs of a change say so far, after each of them."""
        outcome = outcome_of(fix, found, screening=screening)
        self._add(outcome, over=False)
        if self._live is None:
            self._say(f"{words.name(outcome)}: {_so_far(outcome)}")
        self._draw()

    def done(self, outcome: Outcome) -> None:
        """Show the verdict on a change."""
        self._add(outcome, over=True)
        if self._live is None:
            self._say(words.sentence(outcome))
        self._draw()

    def _add(self, outcome: Outcome, *, over: bool) -> None:
        called = "+".join(text for text in (outcome.fix, outcome.variant) if text)  # as the arm of a variant is called while it runs
        self._rows.pop(called, None)
        self._rows[words.name(outcome)] = (outcome, over)
        self._seen.append(outcome)

    # -- drawing ----------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        console = self._given or Console(file=self._stream, highlight=False, markup=False, emoji=False)
        self._live = RichLive(
            self._picture(console.width), console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def _draw(self) -> None:
        if self._live is not None:
            with suppress(OSError):  # a terminal that was closed
                self._live.update(self._picture(self._live.console.width), refresh=True)

    def _picture(self, width: int) -> RenderableType:
        """Return the table of what was measured so far, and what is being done."""
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [self._table(width)] if self._rows else []
        return Group(*parts, Text(f"{pairs_bar(self._doing)}{self._doing}", style="bright_black"))

    def _table(self, width: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        rows = [(_cells(found, over), found, over) for found, over in list(self._rows.values())[-_MOST_ROWS:]]
        room = width - sum(max(len(cells[column]) for cells, _, _ in rows) + _GAP for column in range(_COLUMNS))
        axis = Axis(self._seen, min(room, MOST_CELLS)) if room >= LEAST_CELLS else None
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=False)
        for _ in range(_COLUMNS + (axis is not None)):
            table.add_column(overflow="ellipsis", no_wrap=True)
        for cells, found, over in rows:
            drawn = [*cells, *([axis.bar(found)] if axis else [])]
            table.add_row(*(Text(cell, style="" if over else "bright_black") for cell in drawn))
        return table

    def _say(self, text: str) -> None:
        """Write a line; nowhere where stderr is closed or full."""
        if self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.write(for_encoding(f"{clean(text, 2_000)}\n", self._stream.encoding))
                self._stream.flush()


def pairs_bar(doing: str) -> str:
    """Return how many of the pairs at most are measured, as a bar of ASCII characters with a space behind it; '' where none is measured."""
    found = _PAIR.search(doing)
    number, most = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < number <= most:
        return ""
    done = _PAIR_CELLS * (number - 1) // most
    return f"[{'=' * done}{'.' * (_PAIR_CELLS - done)}] "


def _cells(outcome: Outcome, over: bool) -> tuple[str, str, str]:
    """Return name, verdict (none before the last pair) and figure of a row."""
    verdict = words.verdict(outcome) if over else f"pair {outcome.pairs}"
    return clean(words.name(outcome), _LONGEST_NAME), verdict, words.throughput(outcome) or "-"


def _so_far(outcome: Outcome) -> str:
    """Return what the pairs of a change say so far: figures, never a verdict."""
    found = [text for text in (words.throughput(outcome), words.basis(outcome)) if text]
    return ", ".join(found) or f"{words.verdict(outcome)}: {words.why(outcome)}"
