"""Experiments for a terminal: what came out first, then each change with its figures, the recipe, the program as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpudiag.model.experiment import ExperimentData, Outcome
from gpudiag.report.console import QUIET, cells, finished, heading, line, new_console, new_table, print_table, unbroken
from gpudiag.report.escape import clean
from gpudiag.report.experiment import summary, words
from gpudiag.report.experiment.bars import LEAST_CELLS, MOST_CELLS, Axis
from gpudiag.report.experiment.rows import tone

if TYPE_CHECKING:
    from rich.console import Console

_INDENT = 3
_LONGEST_NAME = 34
"""Columns up to which names are padded, so that figures stand below each other; a longer name pushes its own row."""
_LONGEST_NOTE = 600
_DEEPEST = 20
"""Columns that a line of code is indented at most."""
_STYLES = {"good": "bold green", "bad": "bold red", "slower": "bold yellow", "weak": "yellow"}
"""Of a verdict; its words say the same without a colour."""
SCREENED = "Screening (ranks changes, proves nothing)"
MISSING = "Without a result"


def text(data: ExperimentData, width: int = 100, color: bool = False, *, bundle: str = "") -> str:
    """Return the experiments as text of at most `width` columns; `color`: with ANSI colours; `bundle`: where they lie, if known."""
    console, sink = new_console(width, color)
    device = data.baseline.device if data.baseline else ""
    line(console, f"gpudiag ab{f' on {clean(device, 80)}' if device else ''}", QUIET)
    console.print()
    line(console, summary.headline(data), "bold")
    for said in summary.leads(data, bundle):
        line(console, clean(said, _LONGEST_NOTE))
    _outcomes(console, data.experiments)
    _recipe(console, data, bundle)
    _baseline(console, data)
    meanings = summary.legend(data.experiments)
    if meanings:
        console.print()
    for meaning in meanings:
        line(console, meaning, QUIET)
    return finished(sink)


def section(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print the experiments of a report, nothing where there are none."""
    if not outcomes:
        return
    _outcomes(console, outcomes)
    for meaning in summary.legend(outcomes):
        line(console, meaning, QUIET)


def _outcomes(console: Console, outcomes: Sequence[Outcome]) -> None:
    measured, screened, missing = words.groups(outcomes)
    columns = _Columns(console.width, outcomes)
    for title, found, brief in (
        (f"Experiments: changes measured against {summary.AS_IS}", measured, False),
        (SCREENED, screened, True),
        (MISSING, missing, False),
    ):
        if found:
            heading(console, title)
        for outcome in found:
            _outcome(console, outcome, columns, brief)


class _Columns:
    """The widths of the row of a change, and the axis of its bar where there is room for one."""

    def __init__(self, width: int, outcomes: Sequence[Outcome]) -> None:
        names = [len(clean(words.name(found))) for found in outcomes]
        self.name = min(max(names, default=0), _LONGEST_NAME)
        self.verdict = max((len(words.verdict(found)) for found in outcomes if not words.missing(found)), default=0)
        self.figure = max((len(words.throughput(found)) for found in outcomes), default=0)
        if self.name + self.verdict + self.figure + 4 > width:  # nothing is padded then, and figures stand below their names
            self.name = self.verdict = self.figure = 0
        room = width - self.name - self.verdict - self.figure - 6
        fits = self.figure > 0 and room >= LEAST_CELLS and max(names, default=0) <= _LONGEST_NAME
        self.axis = Axis(outcomes, min(room, MOST_CELLS)) if fits else None


def _outcome(console: Console, outcome: Outcome, columns: _Columns, brief: bool) -> None:
    """Print a change: name, verdict, figure and bar in one row, then what else is known of it."""
    from rich.text import Text

    row = Text()
    row.append(unbroken(words.name(outcome)).ljust(columns.name), style="bold")
    row.append("  ")
    row.append(words.verdict(outcome).ljust(columns.verdict), style=_STYLES[tone(outcome)])
    figure = words.throughput(outcome)
    if figure and columns.figure:
        row.append(f"  {unbroken(figure).ljust(columns.figure)}")
        if columns.axis is not None:
            row.append(f"  {columns.axis.bar(outcome)}", style=QUIET)
    console.print(row)
    if figure and not columns.figure:  # too narrow for one row
        line(console, figure, indent=_INDENT)
    for said, style in _details(outcome, brief):
        line(console, clean(said, _LONGEST_NOTE), style, _INDENT)


def _details(outcome: Outcome, brief: bool) -> list[tuple[str, str]]:
    """Return (sentence, style) of what else is known of a change; `brief`: only what its figure rests on."""
    if words.missing(outcome):
        more = [words.promised(outcome), *words.notes(outcome)]
        return [(words.why(outcome), ""), *((said, QUIET) for said in more if said)]
    measured = "; ".join(text for text in (words.basis(outcome), *([] if brief else words.effects(outcome))) if text)
    found = [(measured, "red" if words.differs(outcome) else ""), (words.why(outcome), "")]
    if not brief:
        found.append((words.promised(outcome), ""))
        found += [(f"In effect: {said}", QUIET) for said in outcome.evidence]
        found += [(said, QUIET) for said in words.notes(outcome)]
    return [(said, style) for said, style in found if said]


def _recipe(console: Console, data: ExperimentData, bundle: str) -> None:
    recipe = data.recipe
    if not recipe.fixes and not recipe.changes:
        return
    heading(console, "Recipe" if recipe.proved else "Recipe (not proved)")
    for change in summary.changes(recipe):
        line(console, f"{change.fix}{f': {change.title}' if change.title else ''}", indent=_INDENT)
        _code(console, change.code)
    for change_text in summary.further(recipe):
        _code(console, change_text)
    if said := summary.as_it_is(data, bundle):
        line(console, said, QUIET, _INDENT)


def _code(console: Console, code: str) -> None:
    """Print a change of the code, line by line: indentation is kept, a diff stays one."""
    from rich.padding import Padding
    from rich.text import Text

    for row in summary.code_lines(code):
        bare = row.lstrip(" ")
        indent = min(len(row) - len(bare), _DEEPEST)
        console.print(Padding(Text(bare, style="cyan"), (0, 0, 0, _INDENT + 2 + indent)))


def _baseline(console: Console, data: ExperimentData) -> None:
    rows = summary.baseline_rows(data.baseline)
    if not rows:
        return
    heading(console, summary.AS_IS[:1].upper() + summary.AS_IS[1:])
    table = new_table((("", "left"), ("", "wrapped")))
    for topic, said in rows:
        table.add_row(*cells(topic, unbroken(clean(said, _LONGEST_NOTE))))
    print_table(console, table)
