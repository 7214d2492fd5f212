"""What pages show of experiments, as plain values for a template: every text is cleaned here, the template escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpudiag.model.experiment import Outcome, Pair
from gpudiag.report.escape import clean, joined
from gpudiag.report.experiment import summary, words
from gpudiag.report.experiment.figures import pair_ratios
from gpudiag.report.experiment.rows import row
from gpudiag.units import format_bytes, format_ns

_LONGEST = 1_000
_LONGEST_OUTPUT = 4_000
_MOST_LINES = 60


def context(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Return the values of the part on experiments, None where there are none."""
    if not outcomes:
        return None
    measured, screened, missing = words.groups(outcomes)
    titled = (("", measured), ("Screening: ranks changes, proves nothing", screened), ("Without a result", missing))
    return {
        "groups": [(title, [_row(found) for found in group]) for title, group in titled if group],
        "details": [made for group in (measured, screened, missing) for found in group if (made := _details(found))],
        "legend": [_prose(said) for said in summary.legend(outcomes)],
        "as_is": summary.AS_IS,
    }


def _row(found: Outcome) -> dict[str, str]:
    """Return the cells of one change."""
    made = row(found)
    texts = {key: _prose(getattr(made, key)) for key in ("verdict", "ratio", "told", "parity", "memory", "pays_back", "promised")}
    return {**texts, "name": clean(made.name), "tone": made.tone}


def _details(found: Outcome) -> dict[str, Any] | None:
    """Return what stands behind a change: evidence, notes in full, its pairs; None where there is nothing."""
    made = row(found)
    energy = words.energy(found)
    more = [f"In effect: {said}" for said in found.evidence] + ([energy] if energy else [])
    printed = [_output(note) for note in found.notes if "\n" in note.strip()]
    plain = [note for note in found.notes if "\n" not in note.strip()]
    pairs = _pairs(found)
    if not more and not found.notes and not pairs:
        return None
    lines = [_prose(said) for said in (*more, *plain)]
    return {"name": clean(made.name), "lines": lines, "printed": printed, "pairs": pairs, "unit": found.unit}


def _output(note: str) -> str:
    """Return what a program printed, line by line and harmless; of much its end."""
    lines = [clean(line, _LONGEST) for line in note[-_LONGEST_OUTPUT:].splitlines()]
    return "\n".join(lines[-_MOST_LINES:])


def _pairs(found: Outcome) -> list[tuple[str, ...]]:
    """Return (number, ratio, steps, starts, peaks) of each pair that was measured."""
    made: list[tuple[str, ...]] = []
    for number, pair in enumerate(found.measured, 1):
        ratio = pair_ratios([pair])
        made.append((str(number), words.ratio_text(ratio[0], None) if ratio else "?", *_both(pair)))
    return made


def _both(pair: Pair) -> tuple[str, str, str]:
    steps = _arrow(format_ns(pair.first_step_ns), format_ns(pair.second_step_ns)) if pair.first_step_ns and pair.second_step_ns else "?"
    starts = _arrow(f"{pair.first_start_s:.1f} s", f"{pair.second_start_s:.1f} s") if pair.first_start_s and pair.second_start_s else "?"
    known = pair.first_peak_bytes is not None and pair.second_peak_bytes is not None
    return steps, starts, _arrow(format_bytes(pair.first_peak_bytes), format_bytes(pair.second_peak_bytes)) if known else "?"


def _arrow(before: str, after: str) -> str:
    return f"{before} \u2192 {after}"


def _prose(text: str) -> str:
    return joined(clean(text, _LONGEST))
