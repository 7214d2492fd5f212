"""The history of a run in words: its pace, its phases, drift, slow steps, padding, and what the profiler cost. Lines for every renderer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpudiag.model.history import Drift, ProfilerCost, SlowPart, SlowStep, StepHistory
from gpudiag.model.report import ReportData
from gpudiag.report import words
from gpudiag.report.console import heading, line
from gpudiag.report.escape import clean, joined, markdown
from gpudiag.units import format_ns, format_share

if TYPE_CHECKING:
    from rich.console import Console

TITLE = "The whole run"
NO_HISTORY = "Only the steps in the trace are known; gpudiag.profile records every step of a run."

MOST_SLOW = 3
"""Slow steps told of in the lines."""

_WORTH_TELLING = 0.01
"""Share of the median step, or of the run, below which a part of it is left out."""

_MANY = 0.1
"""Share of the steps from which slow ones are no exceptions."""

_PHASES = (
    ("forward_ns", "forward"),
    ("backward_ns", "backward"),
    ("optimizer_ns", "optimizer"),
    ("h2d_ns", "copies to the device"),
    ("loader_wait_ns", "waiting for batches"),
    ("rest_ns", "the rest"),
)
_GREW = {
    "loader": "waiting for its batch",
    "gc": "garbage collection",
    "h2d": "more in copies to the device",
    "forward": "more in forward",
    "backward": "more in backward",
    "optimizer": "more in the optimizer",
    "rest": "more outside these phases",
}
_LABELS = {"warm": "warm-up", "timing": "recording", "sites": "recording with stacks", "export": "writing the trace"}


def lines(report: ReportData) -> list[str]:
    """Return what matters of all steps of the run, one sentence or two a line; none where only a trace was read."""
    return [] if report.history is None else told(report.history)


def told(found: StepHistory) -> list[str]:
    """Return the lines of `found`; none where too few steps were left alone to tell the pace of the run."""
    if found.median_ns is None:
        return []
    lines = (_pace(found), _phase_line(found), _padding(found), _drift_line(found.drift), _slow(found), _profiler(found))
    return [text for text in lines if text]


def section(console: Console, report: ReportData) -> None:
    """Print the history of the run on a terminal; nothing where only a trace was read."""
    if found := lines(report):
        heading(console, TITLE)
        for text in found:
            line(console, text)


def as_markdown(report: ReportData) -> str:
    """Return the history of the run as a section of Markdown, '' where only a trace was read."""
    found = lines(report)
    return f"## {TITLE}\n\n" + "\n".join(f"- {markdown(text)}" for text in found) if found else ""


def page_context(report: ReportData) -> dict[str, Any] | None:
    """Return the values of the HTML template's part on the run; None where only a trace was read."""
    found = lines(report)
    if not found or report.history is None:
        return None
    slow = [(f"{step.step:,}", format_ns(step.wall_ns), clean(_had(step, 4))) for step in report.history.slowest]
    return {"title": TITLE, "lines": [joined(clean(text, 2_000)) for text in found], "slow": slow}


def trust_line(report: ReportData) -> str:
    """Return why there is no history of the run, '' where there is one."""
    found = report.history
    if found is None:
        return NO_HISTORY
    if found.median_ns is None:
        return f"{found.plain} of {found.steps} steps were neither profiled nor among the first two: too few to tell the pace of the run."
    return ""


def _pace(found: StepHistory) -> str:
    profiled = f", {found.profiled} of them profiled" if found.profiled else ""
    first = ""
    if found.first_ns is not None and found.median_ns and found.first_ns > 2 * found.median_ns:
        first = f"; the first took {format_ns(found.first_ns)}"
    pace = f"an unprofiled one takes {format_ns(found.median_ns)} (median), 95 % take less than {format_ns(found.p95_ns)}"
    return f"{found.steps:,} {words.plural(found.steps, 'step')}{profiled}: {pace}{first}."


def _phase_line(found: StepHistory) -> str:
    times = found.phases
    if times is None or not found.median_ns:
        return ""
    parts = [(getattr(times, name), label) for name, label in _PHASES]
    told = [f"{label} {format_ns(ns)}" for ns, label in parts if ns is not None and ns >= _WORTH_TELLING * found.median_ns]
    clock = "times of the device" if times.clock == "device" else "by the host's clock"
    return f"Of a typical one ({clock}): {', '.join(told)}." if told else ""


def _padding(found: StepHistory) -> str:
    if found.padded_share is None or found.padded_share < _WORTH_TELLING:
        return ""
    return f"{format_share(found.padded_share)} of the positions in the batches are padding."


def _drift_line(found: Drift | None) -> str:
    if found is None or not found.real:
        return ""
    low, high = sorted((abs(found.low_share), abs(found.high_share)))
    word = "slower" if found.share > 0 else "faster"
    between = f"99 % interval {format_share(low)} to {format_share(high)}"
    times = f"{format_ns(found.first_ns)} to {format_ns(found.last_ns)}"
    return f"The last quarter of the run is {format_share(abs(found.share))} {word} than the first: {times} a step ({between})."


def _slow(found: StepHistory) -> str:
    if not found.slow_steps or not found.slow_share or not found.slowest:
        return ""
    count = found.slow_steps
    cost = f"cost {format_share(found.slow_share, 1)} of the time"
    what = f"{count:,} of {found.plain:,} unprofiled steps took more than 1.5 times the median and {cost}"
    if count > _MANY * found.plain:
        return f"The pace varies widely: {what}. Slowest: {slow_step(found.slowest[0])}."
    return f"{what}. Slowest: {'; '.join(slow_step(step) for step in found.slowest[:MOST_SLOW])}."


def slow_step(step: SlowStep) -> str:
    """Return one slow step with what it had: 'step 731, 2.31 s (2.10 s waiting for its batch)'."""
    return f"step {step.step:,}, {format_ns(step.wall_ns)} ({_had(step, 2)})"


def _had(step: SlowStep, most: int) -> str:
    return ", ".join(_part(part) for part in step.had[:most]) or "nothing recorded tells why"


def _part(part: SlowPart) -> str:
    if part.what == "file_write":
        return f"wrote {part.name or 'a file'}"
    if part.what == "save":
        return f"{format_ns(part.ns)} in {part.name or 'torch.save'}"
    return f"{format_ns(part.ns)} {_GREW[part.what]}"


def _profiler(found: StepHistory) -> str:
    extra = sum(cost.extra_ns for cost in found.profiler)
    if not found.profiler or not found.wall_ns or extra < _WORTH_TELLING * found.wall_ns:
        return ""
    told = ", ".join(_cost(cost, found.median_ns or 1) for cost in found.profiler if cost.median_ns > (found.median_ns or 0))
    return f"Profiling added {format_ns(extra)} to the {format_ns(found.wall_ns)} of all steps: {told}."


def _cost(cost: ProfilerCost, usual_ns: int) -> str:
    took = f"{cost.steps} {words.plural(cost.steps, 'step')} of {cost.median_ns / usual_ns:.1f} x the usual time"
    return f"{_LABELS[cost.label]} ({took})"
