"""Experiments in a terminal: the results, and a live table while they are measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from gpudiag.model.experiment import Comparison, ExperimentData, Outcome, make_outcome
from gpudiag.report.console import (
    QUIET,
    clean,
    clean_unbroken,
    collect_text,
    create_console,
    print_heading,
    print_line,
    print_topics,
    replace_unencodable,
)
from gpudiag.report.experiment import summary, verdicts
from gpudiag.report.experiment.intervals import LEAST_CELLS, MOST_CELLS, Axis
from gpudiag.report.experiment.verdicts import choose_tone
from gpudiag.units import CountedProgress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live as RichLive

_INDENT = 3
_LONGEST_NAME = 34
"""Columns up to which names are padded, so that figures stand below each other; a longer name pushes its own row."""
_LONGEST_NOTE = 600
_DEEPEST = 20
_STYLES = {"good": "bold green", "bad": "bold red", "slower": "bold yellow", "weak": "yellow"}
"""Of a verdict; its words say the same without a colour."""
SCREENED_TITLE = "Screening (ranks variants, proves nothing)"
MISSING_TITLE = "Without a result"


def render_experiments_text(data: ExperimentData, width: int = 100, color: bool = False, *, bundle: str = "") -> str:
    """Return the experiments as text of at most `width` columns; `color`: with ANSI colours; `bundle`: where they lie, if known."""
    console, sink = create_console(width, color)
    device = data.baseline.device if data.baseline else ""
    print_line(console, f"gpudiag ab{f' on {clean(device, 80)}' if device else ''}", QUIET)
    console.print()
    print_line(console, summary.format_experiments_headline(data), "bold")
    for said in summary.list_leads(data, bundle):
        print_line(console, clean(said, _LONGEST_NOTE))
    print_outcomes(console, data.experiments)
    _print_recipe(console, data, bundle)
    if rows := summary.build_baseline_rows(data.baseline):
        print_heading(console, "Baseline")
        print_topics(console, [(topic, clean(said, _LONGEST_NOTE)) for topic, said in rows])
    meanings = summary.format_experiments_legend(data.experiments)
    if meanings:
        console.print()
    for meaning in meanings:
        print_line(console, meaning, QUIET)
    return collect_text(sink)


def print_outcomes(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print each change under the title of its group, nothing where there are none."""
    measured, screened, missing = verdicts.group_outcomes(outcomes)
    columns = _OutcomeColumns(console.width, outcomes)
    for title, found, brief in (
        (f"Experiments: variants against {summary.AS_IS}", measured, False),
        (SCREENED_TITLE, screened, True),
        (MISSING_TITLE, missing, False),
    ):
        if found:
            print_heading(console, title)
        for outcome in found:
            _print_outcome(console, outcome, columns, brief)


class _OutcomeColumns:
    def __init__(self, width: int, outcomes: Sequence[Outcome]) -> None:
        names = [len(clean(verdicts.name_outcome(found))) for found in outcomes]
        self.name = min(max(names, default=0), _LONGEST_NAME)
        self.verdict = max(
            (len(verdicts.format_outcome_verdict(found)) for found in outcomes if not verdicts.has_no_result(found)), default=0
        )
        self.figure = max((len(verdicts.format_throughput(found)) for found in outcomes), default=0)
        if self.name + self.verdict + self.figure + 4 > width:  # nothing is padded then, and figures stand below their names
            self.name = self.verdict = self.figure = 0
        room = width - self.name - self.verdict - self.figure - 6
        fits = self.figure > 0 and room >= LEAST_CELLS and max(names, default=0) <= _LONGEST_NAME
        self.axis = Axis(outcomes, min(room, MOST_CELLS)) if fits else None


def _print_outcome(console: Console, outcome: Outcome, columns: _OutcomeColumns, brief: bool) -> None:
    """Print a change: name, verdict, figure and bar in one row, then what else is known; `brief`: only what its figure rests on."""
    from rich.text import Text

    row = Text()
    row.append(clean_unbroken(verdicts.name_outcome(outcome)).ljust(columns.name), style="bold")
    row.append("  ")
    row.append(verdicts.format_outcome_verdict(outcome).ljust(columns.verdict), style=_STYLES[choose_tone(outcome)])
    figure = verdicts.format_throughput(outcome)
    if figure and columns.figure:
        row.append(f"  {clean_unbroken(figure).ljust(columns.figure)}")
        if columns.axis is not None:
            row.append(f"  {columns.axis.bar(outcome)}", style=QUIET)
    console.print(row)
    if figure and not columns.figure:  # too narrow for one row
        print_line(console, figure, indent=_INDENT)
    reason, promise = (verdicts.explain_no_result(outcome), ""), verdicts.format_promise(outcome)
    notes = [(said, QUIET) for said in verdicts.list_outcome_notes(outcome)]
    if verdicts.has_no_result(outcome):
        details = [reason, (promise, QUIET), *notes]
    else:
        measured = (verdicts.format_basis(outcome), *([] if brief else verdicts.format_effects(outcome)))
        details = [("; ".join(text for text in measured if text), "red" if verdicts.trains_differently(outcome) else ""), reason]
        if not brief:
            details += [(promise, ""), *((f"In effect: {said}", QUIET) for said in outcome.evidence), *notes]
    for said, style in details:
        if said:
            print_line(console, clean(said, _LONGEST_NOTE), style, _INDENT)


def _print_recipe(console: Console, data: ExperimentData, bundle: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    recipe = data.recipe
    if not recipe.fixes and not recipe.changes:
        return
    print_heading(console, "Recipe" if recipe.proved else "Recipe (not proved)")
    named = [(f"{change.fix}{f': {change.title}' if change.title else ''}", change.code) for change in summary.list_recipe_changes(recipe)]
    for title, code in (*named, *(("", text) for text in summary.list_variant_changes(recipe))):
        if title:
            print_line(console, title, indent=_INDENT)
        for row in summary.split_code_lines(code):  # indentation is kept, a diff stays one
            bare = row.lstrip(" ")
            indent = min(len(row) - len(bare), _DEEPEST)
            console.print(Padding(Text(bare, style="cyan"), (0, 0, 0, _INDENT + 2 + indent)))
    if said := summary.build_recipe_command(data, bundle):
        print_line(console, said, QUIET, _INDENT)


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
        """Draw the rows again; without a terminal write `text` on a line, nowhere where stderr is closed or full."""
        called = "+".join(text for text in (outcome.fix, outcome.variant) if text)  # as the arm of a variant is called while it runs
        self._rows.pop(called, None)
        self._rows[verdicts.name_outcome(outcome)] = (outcome, over)
        self._seen.append(outcome)
        if self._live is None and self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.write(replace_unencodable(f"{clean(text, 2_000)}\n", self._stream.encoding))
                self._stream.flush()
        self._draw()

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
