"""What-ifs as text for a terminal: how far to trust them, then a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpudiag.model.replay import ReplayTrust, WhatIf
from gpudiag.report.console import QUIET, cells, finished, heading, line, new_console, new_table, snug, unbroken
from gpudiag.units import format_ns, format_share

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MUCH = 0.1
"""Two durations that differ by less are one to the reader."""
_ROUNDS_TO = 0.001
_LISTED_STEPS = 1
"""One what-if alone is told step by step."""


def render(what_ifs: Sequence[WhatIf], trust: ReplayTrust | None, *, reason: str = "", width: int = 100, color: bool = False) -> str:
    """Return trust, step time now and then, gain and assumption of each of `what_ifs`; `reason`: why there is no replay."""
    console, sink = new_console(width, color)
    if reason:
        line(console, f"No what-ifs: {reason}.")
        return finished(sink)
    for text in trust_lines(trust):
        line(console, text)
    if not what_ifs:
        line(console, "No standard what-if applies to these steps.")
        return finished(sink)
    heading(console, f"A step takes {format_ns(what_ifs[0].step_ns)} in a run that repeats these{_recorded(trust, what_ifs[0].step_ns)}")
    error = None if trust is None else trust.error_share
    table = new_table([("what if", "name"), ("step", "right"), ("gain", "right")])
    what_ifs = sorted(what_ifs, key=lambda found: found.name.startswith("batch="))  # its gain is per sample, not of the step
    for found in what_ifs:
        table.add_row(*cells(unbroken(found.name), format_ns(found.changed_ns), gain(found, error)))
    _print_rows(console, table, [_detail(found) for found in what_ifs])
    if len(what_ifs) == _LISTED_STEPS:
        for name, before, after in what_ifs[0].per_step_ns:
            line(console, f"{name}: {format_ns(before)} -> {format_ns(after)}", indent=2)
    return finished(sink)


def _print_rows(console: Console, table: Table, details: Sequence[str]) -> None:
    """Print a table whose rows take one line each, with the whole of its detail under each row."""
    from rich.text import Text

    snug(console, table)
    for row, detail in zip(console.render_lines(table, pad=False), ("", *details), strict=True):
        console.print(Text.assemble(*((segment.text, segment.style or "") for segment in row)), no_wrap=True, overflow="crop")
        if detail:
            line(console, detail, QUIET, indent=2)


def trust_lines(trust: ReplayTrust | None) -> list[str]:
    """Return which steps are replayed and how far the replay can be trusted, in words."""
    if trust is None:
        return ["Replay: how well it reproduces these steps is not known."]
    steps = ", ".join(f"{step.name} ({step.role})" for step in trust.steps)
    return [
        f"Replay of {len(trust.steps)} representative step{'s' if len(trust.steps) > 1 else ''}: {steps}.",
        *([f"Gains are those of the recorded run, {trust.run.name}, replayed in its order."] if trust.run else []),
        f"With nothing changed it is off by at most {_error(trust.error_share)} of a step; "
        f"up to {_error(trust.free_share)} of a step are waits that no dependency explains, which every what-if keeps.",
        *([f"{trust.note}."] if trust.note else []),
    ]


def _recorded(trust: ReplayTrust | None, step_ns: float) -> str:
    """Return how long the steps take with the work that earlier steps left on the device, where that makes them much longer."""
    if trust is None or not trust.steps:
        return ""
    least, most = min(step.measured_ns for step in trust.steps), max(step.measured_ns for step in trust.steps)
    if most <= (1 + _MUCH) * step_ns:
        return ""
    span = format_ns(least) if format_ns(least) == format_ns(most) else f"{format_ns(least)} to {format_ns(most)}"
    return f"; alone, with work that earlier steps left on the device: {span}"


def gain(what_if: WhatIf, error_share: float | None) -> str:
    """Return the gain in words, with the error of the replay where it is known."""
    share = format_share(what_if.share, 1)
    return share if error_share is None else f"{share} \u00b1 {_error(error_share)}"


def _error(share: float) -> str:
    """Return the error of the replay; no replay is exact, so what rounds to nothing reads '<0.1 %'."""
    return f"<{format_share(_ROUNDS_TO, 1)}" if share < _ROUNDS_TO / 2 else format_share(share, 1)


def _detail(what_if: WhatIf) -> str:
    return "; ".join((what_if.words, *what_if.notes))
