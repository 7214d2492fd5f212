"""A live table of experiments while they are measured."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from gpudiag.model.experiment import Comparison, Outcome, make_outcome
from gpudiag.report.console import clean, replace_unencodable
from gpudiag.report.experiment import verdicts
from gpudiag.report.experiment.intervals import LEAST_CELLS, MOST_CELLS, Axis
from gpudiag.units import CountedProgress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live as RichLive

_COLUMNS, _GAP = 3, 2
"""Name, verdict and figure, and the space after each; a bar needs what is left."""
_PAIR_CELLS = 20


class Live:
    """Shows experiments as they are measured. A context manager; without it nothing is shown in a terminal.

    It draws only when it is told something, and has no thread: one that redraws would take its processor time from the arm that is
    being measured. What it has drawn is taken away in the end; the report follows.
    """

    def __init__(self, stream: TextIO | None = None, *, console: Console | None = None) -> None:
        """Show on `stream` (default: stderr); `console`: one of rich in its place, drawn on whatever it is."""
        self._stream = stream or sys.stderr
        self._given = console
        self._rows: dict[str, tuple[Outcome, bool]] = {}
        self._seen: list[Outcome] = []  # also what was shown before: on an axis of the last intervals alone none would shrink
        self._doing, self._measured, self._most = "", 0, 0
        self._live: RichLive | None = None

    def __enter__(self) -> Live:
        if self._given is not None or (self._stream is not None and self._stream.isatty()):
            from rich.console import Console
            from rich.live import Live as RichLive

            console = self._given or Console(file=self._stream, highlight=False, markup=False, emoji=False)
            picture = self._picture(console.width)
            self._live = RichLive(
                picture, console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    def tell(self, text: str) -> None:
        """Say what is being done; nothing where there is no terminal."""
        self._doing = clean(text)
        self._measured, self._most = (text.done, text.total) if isinstance(text, CountedProgress) else (0, 0)
        self._draw()

    def pair(self, fix: str, found: Comparison, *, screening: bool = False) -> None:
        """Show what the pairs of a change say so far, after each of them: figures, never a verdict."""
        outcome = make_outcome(fix, found, screening=screening)
        figures = ", ".join(text for text in (verdicts.format_throughput(outcome), verdicts.format_basis(outcome)) if text)
        so_far = figures or f"{verdicts.format_outcome_verdict(outcome)}: {verdicts.explain_no_result(outcome)}"
        self._show(outcome, f"{verdicts.name_outcome(outcome)}: {so_far}", over=False)

    def done(self, outcome: Outcome) -> None:
        """Show the verdict on a change."""
        self._show(outcome, verdicts.format_outcome_sentence(outcome), over=True)

    def _show(self, outcome: Outcome, text: str, *, over: bool) -> None:
        called = "+".join(text for text in (outcome.fix, outcome.variant) if text)  # as the arm of a variant is called while it runs
        self._rows.pop(called, None)
        self._rows[verdicts.name_outcome(outcome)] = (outcome, over)
        self._seen.append(outcome)
        if self._live is None:
            self._write(text)
        self._draw()

    def warn(self, text: str) -> None:
        """Write a line that stays."""
        if self._live is not None:
            with suppress(OSError):
                self._live.console.print(f"gpudiag: {clean(text, 2_000)}", markup=False, highlight=False)
        else:
            self._write(f"gpudiag: {text}")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.write(replace_unencodable(f"{clean(text, 2_000)}\n", self._stream.encoding))
                self._stream.flush()

    def _draw(self) -> None:
        if self._live is not None:
            with suppress(OSError):  # a terminal that was closed
                self._live.update(self._picture(self._live.console.width), refresh=True)

    def _picture(self, width: int) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        rows = []
        for found, over in list(self._rows.values())[-16:]:  # no verdict before the last pair
            verdict = verdicts.format_outcome_verdict(found) if over else f"pair {found.pairs}"
            name = clean(verdicts.name_outcome(found), 28)
            rows.append(((name, verdict, verdicts.format_throughput(found) or "-"), found, over))
        parts: list[RenderableType] = []
        if rows:
            room = width - sum(max(len(cells[column]) for cells, _, _ in rows) + _GAP for column in range(_COLUMNS))
            axis = Axis(self._seen, min(room, MOST_CELLS)) if room >= LEAST_CELLS else None
            table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=False)
            for _ in range(_COLUMNS + (axis is not None)):
                table.add_column(overflow="ellipsis", no_wrap=True)
            for cells, found, over in rows:
                drawn = [*cells, *([axis.bar(found)] if axis else [])]
                table.add_row(*(Text(cell, style="" if over else "bright_black") for cell in drawn))
            parts.append(table)
        bar = ""
        if 0 <= self._measured < self._most:
            done = _PAIR_CELLS * self._measured // self._most
            bar = f"[{'=' * done}{'.' * (_PAIR_CELLS - done)}] "
        return Group(*parts, Text(f"{bar}{self._doing}", style="bright_black"))
