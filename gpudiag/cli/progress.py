"""What is being done, drawn on stderr while it lasts: a bar over the stages of an analysis, with the share of the file that was read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpudiag.cli import terminal
from gpudiag.report.escape import clean

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

READING = "reading"

_ENDS = {READING: 0.25, "linking": 0.3, "costing": 0.4, "replaying": 0.65, "judging": 0.98}
"""Stage -> share of the time of an analysis after which it ends: the middle of three traces of 1 to 3 MB; reading is told by the file."""

_RANKS = re.compile(r"ranks (\d+)/(\d+)")

_CELLS = 24
_LONGEST = 60


@contextmanager
def drawn(first: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done, on a terminal behind stderr; taken away afterwards.

    A stage of an analysis moves the bar, and so does 'ranks 3/64', before the rank that is shown is analysed. Anything else leaves it where
    it is, and where no stage was told of it runs to and fro.
    """
    from rich.console import Console
    from rich.progress import Progress

    from gpudiag.trace.source import watched

    with Progress(*_columns(), console=Console(stderr=True), transient=True) as shown:
        stages = _Stages(shown, shown.add_task(clean(first, _LONGEST), total=None))
        stages.tell(first)
        with watched(stages.read):
            yield stages.tell


class _Stages:
    """Moves one bar by the stages that it is told of."""

    def __init__(self, shown: Progress, task: TaskID) -> None:
        self._shown, self._task, self._stage = shown, task, ""

    def tell(self, text: str) -> None:
        """Show what is being done now."""
        self._stage = text
        self._shown.update(self._task, description=terminal.writable(clean(text, _LONGEST), sys.stderr))
        if text in _ENDS:
            self._shown.update(self._task, total=1.0, completed=_begin(text))
        elif (share := _of_ranks(text)) is not None:
            self._shown.update(self._task, total=1.0, completed=share)

    def read(self, share: float) -> None:
        """Hear how much of a file was read, 0..1. A file that is read later, such as a window with stacks, leaves the bar where it is."""
        if self._stage == READING:
            self._shown.update(self._task, completed=_ENDS[READING] * share)


def _of_ranks(text: str) -> float | None:
    """Return the share of the ranks that have been read; None where the text tells of something else."""
    found = _RANKS.fullmatch(text)
    return int(found[1]) / max(1, int(found[2])) if found else None


def _begin(stage: str) -> float:
    """Return where the bar stands when a stage begins: at the end of the one before."""
    return max((end for end in _ENDS.values() if end < _ENDS[stage]), default=0.0)


def _columns() -> list[ProgressColumn]:
    """Return what is shown from left to right; a share in digits instead of a bar where the terminal gets ASCII alone."""
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    plain = terminal.ascii_only(sys.stderr)
    return [
        SpinnerColumn("line" if plain else "dots"),
        TextColumn("{task.description}", markup=False),
        TaskProgressColumn() if plain else BarColumn(bar_width=_CELLS),
        TimeElapsedColumn(),
    ]
