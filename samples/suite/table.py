"""The table of scores, and the file that keeps one for each device."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

import msgspec

from suite.gain import Gain
from suite.judged import Judged

MEDIAN_LIMIT, WORST_LIMIT = 1.5, 3.0
"""A ceiling may promise this much more than the twin gains: in the median, and at worst."""

HEAD = ("sample", "first finding", "false alarms", "bound", "gain", "bound/gain", "seconds")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one sample."""

    name: str
    wanted: str
    runs: tuple[Judged, ...] = ()
    gain: Gain | None = None
    note: str = ""
    """Why something is not known, or where it comes from."""
    failed: str = ""
    """Why the sample was not judged though it should have been."""
    seconds: float = 0.0
    proof_wanted: bool = False
    """Whether a gain was to be measured: of a planted sample, unless asked not to."""

    @property
    def right(self) -> bool:
        """Return whether the first finding was right in every run."""
        return bool(self.runs) and all(run.right for run in self.runs)

    @property
    def fine(self) -> bool:
        """Return whether nothing is wrong."""
        return bool(self.runs) and not self.failed and all(run.fine for run in self.runs)

    @property
    def false_alarms(self) -> tuple[str, ...]:
        """Return what was a false alarm in any run, by id."""
        return tuple(sorted({rule for run in self.runs for rule in run.false_alarms}))

    @property
    def ceiling(self) -> float | None:
        """Return the median ceiling of the runs whose first finding was right, as a share of the step."""
        shares = [run.ceiling_share for run in self.runs if run.right and run.ceiling_share is not None]
        return statistics.median(shares) if shares else None

    @property
    def promise(self) -> float | None:
        """Return ceiling / gain; None where either is not known, or nothing was gained."""
        if self.ceiling is None or self.gain is None or self.gain.share <= 0:
            return None
        return self.ceiling / self.gain.share

    @property
    def below(self) -> bool:
        """Return whether the ceiling is lower than what was gained for certain."""
        return self.ceiling is not None and self.gain is not None and self.ceiling < self.gain.low

    @property
    def unproved(self) -> bool:
        """Return whether the twin was to show a gain, and did not, or the finding promises none that it could be held against."""
        return self.proof_wanted and bool(self.wanted) and self.promise is None


class Totals(msgspec.Struct, frozen=True):
    """The sums of a suite."""

    scored: int
    right: int
    false_alarms: int
    below: int
    unmet: int
    """Samples that failed, lack a finding that must be there, or have one that must not."""
    unproved: int
    """Samples whose twin gained nothing or was not measured, or whose finding has no ceiling."""
    promises: tuple[float, ...]

    @property
    def fine(self) -> bool:
        """Return whether nothing is wrong."""
        empty = bool(self.promises) and (statistics.median(self.promises) > MEDIAN_LIMIT or max(self.promises) > WORST_LIMIT)
        return (
            self.scored > 0 and self.right == self.scored and not (self.false_alarms or self.below or self.unmet or self.unproved or empty)
        )

    def lines(self) -> list[str]:
        """Return the totals in words; the last line is the hit rate."""
        spread = f"median {statistics.median(self.promises):.2f}, worst {max(self.promises):.2f}" if self.promises else "not measured"
        lines = [f"bound/gain: {spread}; bounds below the gain: {self.below}"]
        if self.unproved:
            lines.insert(0, f"samples without a ceiling, or whose twin showed no gain: {self.unproved}")
        if self.unmet:
            lines.insert(0, f"samples that failed, lack a finding or have a forbidden one: {self.unmet}")
        return [*lines, f"first finding right: {self.right} of {self.scored}; false alarms: {self.false_alarms}"]


def totals(rows: Sequence[Row]) -> Totals:
    """Return the sums over all rows."""
    return Totals(
        len(rows),
        sum(row.right for row in rows),
        sum(len(row.false_alarms) for row in rows),
        sum(row.below for row in rows),
        sum(bool(row.failed) or any(run.missing or run.forbidden for run in row.runs) for row in rows),
        sum(row.unproved for row in rows),
        tuple(row.promise for row in rows if row.promise is not None),
    )


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row."""
    gain = "-"
    if row.gain is not None:
        per = " per step" if row.gain.unit == "steps" else ""
        gain = f"{row.gain.share:.0%} [{row.gain.low:.0%}, {row.gain.high:.0%}]{per}"
    ceiling = "-" if row.ceiling is None else f"{row.ceiling:.0%}{' BELOW' if row.below else ''}"
    promise = "-" if row.promise is None else f"{row.promise:.2f}"
    return row.name, _first(row), ", ".join(row.false_alarms) or "none", ceiling, gain, promise, f"{row.seconds:.0f}"


def _first(row: Row) -> str:
    if row.failed:
        return "FAILED (see below)"
    right = sum(run.right for run in row.runs)
    if right == len(row.runs):
        text = f"{row.wanted or 'nothing'} ok"
    else:
        got = ", ".join(sorted({run.first or "nothing" for run in row.runs if not run.right}))
        text = f"{row.wanted or 'nothing'} WRONG: got {got}" + (f" in {len(row.runs) - right} of {len(row.runs)}" if right else "")
    missing = sorted({rule for run in row.runs for rule in run.missing})
    forbidden = sorted({rule for run in row.runs for rule in run.forbidden})
    text += f"; MISSING {', '.join(missing)}" if missing else ""
    return text + (f"; FORBIDDEN {', '.join(forbidden)}" if forbidden else "")


def text_table(rows: Sequence[Row]) -> str:
    """Return the table for a terminal."""
    table = [HEAD, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table)


def section(device: str, about: str, rows: Sequence[Row], skipped: Sequence[tuple[str, str]]) -> str:
    """Return the part of SCORE.md of one device. `skipped`: samples that were not scored, with the reason."""
    lines = [f"## {device}", "", about, "", f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in cells(row))} |" for row in rows]
    lines += ["", *(f"{line}  " for line in totals(rows).lines())]
    notes = [f"* {row.name}: {note}" for row in rows for note in (row.failed, row.note) if note]
    notes += [f"* {name}: not scored, {reason}" for name, reason in skipped]
    return "\n".join([*lines, *(["", *notes] if notes else []), ""])


TOP = """# Scores of the rules

Each sample trains with one planted bottleneck. The finding that names it must come first, nothing else may be above info that is not
allowed, and in the healthy controls nothing at all. The gain is that of the repaired twin, measured by two live processes that take turns;
the bound is the upper bound of the finding, both as shares of the step. `make score` writes the section of the device that is there.
"""


def with_section(text: str, device: str, new: str) -> str:
    """Return the file `text` with the section of `device` replaced or added; the other sections stay."""
    parts = re.split(r"(?m)^(?=## )", text)[1:] if text else []
    kept = [part.rstrip() + "\n" for part in parts if part.partition("\n")[0] != f"## {device}"]
    return "\n".join([TOP, *sorted([*kept, new])])
