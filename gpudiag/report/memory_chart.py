"""Memory over the recording as a plain plotly figure: what was in use by category, one above the other, with the peak marked."""

from __future__ import annotations

import html
from typing import Any

from gpudiag.model.memory import MemoryTimeline
from gpudiag.report.console import clean
from gpudiag.report.labels import format_site
from gpudiag.units import format_bytes

Figure = dict[str, Any]

CHART = "memory-timeline"
CHART_LABEL = "Memory in use over the recording by what it was for; the peak stands in the table below"

COLOURS = {
    "parameters": "#2f7fc1",
    "gradients": "#c77700",
    "optimizer_state": "#bb6a97",
    "buffers": "#2494c4",
    "activations": "#1a9270",
    "forward_held": "#8d8070",
    "inputs": "#a97c10",
    "temporary": "#b06a45",
    "before_recording": "#7468c4",
    "unknown": "#808080",
}
"""As the swatches `held-...` of the style sheet."""

_LINE, _GRID = "#7a7a7a", "rgba(128,128,128,0.3)"
_HEIGHT = 340
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))


def name_swatch(category: str) -> str:
    """Return the class of the swatch of a category."""
    return f"held-{category.replace('_', '-')}"


def list_held_places(found: MemoryTimeline, point: int) -> dict[str, tuple[int, str]]:
    """Return category -> (bytes, place that holds most of it, '' where that is not known) at one point, the largest first."""
    rows = {}
    for kind, values in found.by_category.items():
        place = found.largest.get(kind, ())
        known = point < len(place) and 0 <= place[point] < len(found.places)
        rows[kind] = (values[point], found.places[place[point]] if known else "")
    return dict(sorted(rows.items(), key=lambda row: -row[1][0]))


def draw_memory_timeline(found: MemoryTimeline, names: dict[str, str]) -> Figure:
    """Return the figure; `names`: of the categories."""
    totals = [sum(values) for values in zip(*found.by_category.values(), strict=True)]
    most = max([*totals, *found.reserved_bytes, 1])
    factor, unit = next((factor, unit) for factor, unit in _UNITS if most >= factor)
    span = max(found.t_ns[-1], 1)
    each_ns, time = next((factor, unit) for factor, unit in _TIMES if span >= factor)
    x = [round(t / each_ns, 4) for t in found.t_ns]
    traces = []
    drawn = {"type": "scatter", "mode": "lines", "x": x, "showlegend": False, "hovertemplate": "%{text}<extra></extra>"}
    for kind, values in found.by_category.items():
        texts = []
        for point, value in enumerate(values):
            place = list_held_places(found, point)[kind][1]
            by = f": {_escape(place)}" if place and value else ""
            texts.append(f"{kind.replace('_', ' ')} {format_bytes(value)}{by}")
        traces.append(
            {
                **drawn, "y": [round(value / factor, 4) for value in values], "name": names.get(kind, kind), "text": texts,
                "stackgroup": "used", "line": {"width": 0.5, "color": COLOURS[kind], "shape": "hv"}, "fillcolor": f"{COLOURS[kind]}d0",
            }
        )  # fmt: skip
    traces.append(
        {
            **drawn, "y": [round(value / factor, 4) for value in totals], "name": "in use", "line": {"width": 0},
            "text": [f"<b>{format_bytes(total)} in use</b>" for total in totals],
        }
    )  # fmt: skip
    if found.reserved_bytes:
        traces.append(
            {
                **drawn, "y": [round(value / factor, 4) for value in found.reserved_bytes], "name": "reserved",
                "line": {"width": 1.5, "color": _LINE, "dash": "dash", "shape": "hv"},
                "text": [f"{format_bytes(value)} reserved by the allocator" for value in found.reserved_bytes],
            }
        )  # fmt: skip
    return {"data": traces, "layout": _build_layout(found, x, most / factor, totals, (unit, time, each_ns))}


def _escape(place: str) -> str:
    return html.escape(clean(format_site(place), 36))


def _build_layout(found: MemoryTimeline, x: list[float], top: float, totals: list[int], units: tuple[str, str, float]) -> Figure:
    unit, time, each_ns = units
    steps = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": start / each_ns, "x1": start / each_ns, "y0": 0, "y1": 1, "layer": "below",
         "line": {"color": _GRID, "width": 1}}
        for start in found.step_starts_ns[:200]
    ]  # fmt: skip
    at = x[found.peak]
    left = at > x[-1] / 2
    return {
        "xaxis": {"title": {"text": f"time since the recording began ({time})"}, "gridcolor": _GRID, "zeroline": False,
                  "hoverformat": ",.4~g", "unifiedhovertitle": {"text": f"%{{x}} {time}"}},
        "yaxis": {"title": {"text": f"in use ({unit})"}, "range": [0, top * 1.15], "gridcolor": _GRID, "zeroline": False},
        "shapes": [*steps, {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1,
                            "line": {"color": "#d2600f", "width": 1.5, "dash": "dot"}}],
        "annotations": [{"x": at, "xref": "x", "y": 1, "yref": "paper", "yanchor": "top", "xanchor": "right" if left else "left",
                         "text": f" peak {format_bytes(totals[found.peak])} ", "showarrow": False, "font": {"size": 12}}],
        "hovermode": "x unified", "hoverlabel": {"align": "left"}, "showlegend": False,
        "margin": {"l": 64, "r": 16, "t": 12, "b": 48}, "height": _HEIGHT,
    }  # fmt: skip


def explain_timeline(found: MemoryTimeline) -> str:
    """Return what a reader of the figure has to know."""
    reserved = " The dashed line is what the allocator had reserved." if found.reserved_bytes else ""
    steps = " Thin vertical lines are beginnings of steps." if found.step_starts_ns else ""
    return f"Each point is the highest of its short time.{reserved}{steps}"
