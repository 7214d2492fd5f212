"""How far a step of a run that goes on is from the recorded one: the host may run ahead of the device, or wait for what was left to do."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.model.replay import ReplayedStep
from gpudiag.units import format_ns

WORTH_WORDS = 0.05
"""A step that differs by less than this share from the recorded one needs no words."""


def steadiness(steps: Sequence[ReplayedStep]) -> tuple[float | None, float | None, str]:
    """Return steady_error_share, drift_share and note of a ReplayTrust; None, None and '' where the times between marks are not known."""
    errors, drifts = [], []
    for step in steps:
        if step.marks_ns and step.steady_ns is not None:
            grown = (step.backlog_end_ns or 0) - (step.backlog_begin_ns or 0)
            drifts.append((abs(step.steady_ns - step.marks_ns) / step.marks_ns, step.name, step))
            errors.append(min(abs(step.steady_ns - step.marks_ns), abs(step.steady_ns - step.marks_ns - grown)) / step.marks_ns)
    if not drifts:
        return None, None, ""
    drift, _, worst = max(drifts, key=lambda row: row[:2])
    return max(errors), drift, _words(worst) if drift > WORTH_WORDS else ""


def _words(step: ReplayedStep) -> str:
    """Return why the step, or the steps of a run, last otherwise in a run that goes on like it."""
    like = "where every step is like it, one takes" if step.role != "run" else "in a run that goes on they take"
    marks, steady = format_ns(step.marks_ns or 0), format_ns(step.steady_ns or 0)
    begin, end = step.backlog_begin_ns or 0, step.backlog_end_ns or 0
    behind = f"the device was {format_ns(begin)} behind the host when it began and {format_ns(end)} when it ended"
    if begin != end:
        ahead = "the host ran ahead" if end > begin else "the device caught up"
        return f"{step.name} took {marks} from mark to mark while {ahead} ({behind}); {like} {steady}"
    return f"{step.name} took {marks} from mark to mark; {like} {steady}, for they overlap"
