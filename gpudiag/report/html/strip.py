"""The telemetry of a run as a strip of small charts over one time axis, as plain values for the template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpudiag.model.report import ReportData
from gpudiag.model.telemetry import ClockEvent, Telemetry
from gpudiag.report import telemetry
from gpudiag.report.escape import clean
from gpudiag.units import format_ns, format_share

WIDTH, HEIGHT = 720, 44
"""Size of one chart in its own units."""

_MARGIN = 3
_LEAST_RANGE = 0.05
"""A chart spans at least this share of its highest value: noise of a constant is no mountain."""
_FAINTEST = 0.25
"""Opacity of the least share that is drawn."""

Slices = Sequence[float | None]


def context(report: ReportData) -> dict[str, Any] | None:
    """Return the charts, the reasons that lowered the clocks, and the axis; None where nothing was sampled."""
    found = report.telemetry
    if found is None or not (found.columns or found.clock_events):
        return None
    strip = found.strip
    return {
        "caption": telemetry.caption(report),
        "lines": [clean(text, 600) for _, text in telemetry.lines(report)],
        "charts": _charts(found),
        "reasons": _reasons(found),
        "untold": _untold(found),
        "span": format_ns(strip.span_ns) if strip else "",
        "analysed": _spans(strip.analysed_ns, strip.span_ns) if strip else [],
        "width": WIDTH,
        "height": HEIGHT,
    }


def _charts(found: Telemetry) -> list[dict[str, Any]]:
    """Return a chart for each column that the strip holds; text beside it says lowest, median and highest in the steps."""
    ranges = {row.label: row for row in telemetry.rows_of(found)}
    strip = found.strip
    made = []
    for name, label in telemetry.LABELS.items():
        values = strip.columns.get(name, ()) if strip else ()
        row = ranges.get(label)
        if row is not None and any(value is not None for value in values):
            figures = {"low": row.low, "median": row.median, "high": row.high}
            made.append({"label": label, "lines": _polylines(values), **figures})
    return made


def _polylines(values: Slices) -> list[str]:
    """Return the curve as lines of points, one for each stretch without a hole; a lone slice is a short line."""
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    low = max(0.0, min(low, high - _LEAST_RANGE * high))
    height, step = (high - low) or 1.0, WIDTH / len(values)
    lines: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            lines.append([])
            continue
        y = HEIGHT - _MARGIN - (value - low) / height * (HEIGHT - 2 * _MARGIN)
        lines[-1] += [f"{(index + part) * step:.1f},{y:.1f}" for part in (0, 1)]
    return [" ".join(points) for points in lines if points]


def _reasons(found: Telemetry) -> list[dict[str, Any]]:
    """Return each reason for the clocks: how long it held, whether it lowers them, and when, where the strip tells."""
    lowered = found.strip.lowered if found.strip else {}
    return [_reason(event, lowered.get(event.reason, ())) for event in found.clock_events]


def _reason(event: ClockEvent, values: Slices) -> dict[str, Any]:
    step = WIDTH / len(values) if values else 0.0
    held = [
        (f"{index * step:.1f}", f"{step:.1f}", f"{_FAINTEST + (1 - _FAINTEST) * min(1.0, value):.2f}")
        for index, value in enumerate(values)
        if value
    ]
    share = "<1 %" if 0 < event.share < 0.005 else format_share(event.share)
    return {"name": clean(event.reason, 60), "share": share, "lowers": event.lowers, "held": held}


def _untold(found: Telemetry) -> str:
    """Return that nothing is known of what lowered the clocks, '' where it is, or where no GPU was sampled."""
    if found.source != "nvml" or found.throttle_share is not None:
        return ""
    why = found.missing.get("clock_event_reasons", "")
    return f"What lowered the clocks is not known{f': {clean(why, 200)}' if why else ''}."


def _spans(spans: Sequence[tuple[int, int]], whole_ns: int) -> list[tuple[str, str]]:
    """Return (x, width) of the analysed steps on the axis; the narrowest are a pixel wide."""
    scale = WIDTH / max(1, whole_ns)
    return [(f"{start * scale:.1f}", f"{max(1.0, (end - start) * scale):.1f}") for start, end in spans[:200]]
