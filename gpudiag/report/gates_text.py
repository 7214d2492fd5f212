"""A check for a terminal."""

from __future__ import annotations

from gpudiag.model.gates import CheckData, GateOutcome, GateResult
from gpudiag.report.console import QUIET, finished, item, line, new_console
from gpudiag.report.words import plural

WORDS: dict[GateOutcome, str] = {"passed": "ok", "within_noise": "noise", "failed": "FAIL", "unknown": "unknown"}
_STYLES: dict[GateOutcome, str] = {"passed": "green", "within_noise": "yellow", "failed": "bold red", "unknown": "yellow"}
_ORDER: tuple[GateOutcome, ...] = ("failed", "unknown", "within_noise", "passed")


def headline(found: CheckData) -> str:
    """Return the answer in one sentence, such as 'FAILED: 2 of 5 gates'."""
    failing = [result for result in found.results if result.fails]
    count = f"{len(found.results)} {plural(len(found.results), 'gate')}"
    if failing:
        return f"FAILED: {len(failing)} of {count}, on {found.path}"
    kinds = (("within_noise", "within noise"), ("unknown", "not known and not required"))
    counted = [(sum(result.outcome == outcome for result in found.results), word) for outcome, word in kinds]
    noted = ", ".join(f"{number} {word}" for number, word in counted if number)
    return f"passed: {count}{f' ({noted})' if noted else ''}, on {found.path}"


def render(found: CheckData, *, width: int = 100, color: bool = False) -> str:
    """Return the check for a terminal of `width` columns: what failed first."""
    console, sink = new_console(width, color)
    line(console, headline(found), "bold" if found.passed else "bold red")
    against = [f"gates of {found.budget}"] if found.budget else []
    against += [f"baseline {found.baseline}"] if found.baseline else []
    line(console, f"against {' and '.join(against)}", QUIET)
    for said in found.warnings:
        item(console, "! ", said, "yellow")
    console.print()
    for result in sorted(found.results, key=lambda result: _ORDER.index(result.outcome)):
        item(console, f"{WORDS[result.outcome]:<8}", f"{result.name}: {told(result)}", _STYLES[result.outcome])
    if any(result.low is not None for result in found.results):
        console.print()
        line(
            console, "Intervals are of 95 %, over batches of consecutive steps: the variance within the run; another run may differ.", QUIET
        )
    return finished(sink)


def told(result: GateResult) -> str:
    """Return what was decided of a gate; of one that is not known also whether that fails."""
    if result.outcome != "unknown":
        return result.message
    consequence = "fails: what is not known is not passed; required = false lets it" if result.required else "not required"
    return f"{result.message} ({consequence})"
