"""Figures of a job as plain plotly figures (dicts of data and layout): the mean step of each rank by its parts, and traffic between them.

The colours are those of the style sheet, in which the parts of the step have theirs too.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from gpudiag.model.breakdown import BUCKETS, IDLE_BUCKETS
from gpudiag.model.job import Job, RankRow
from gpudiag.model.report import ReportData
from gpudiag.report import ranktables, words
from gpudiag.report.escape import clean
from gpudiag.report.ranks import capital, ranges, read_ranks, sentence
from gpudiag.units import format_bytes, format_ns, format_share

Figure = dict[str, Any]

MOST_LYING = 16
"""Ranks up to which each has a line with its name; of more the bars stand side by side."""

MOST_BARS = 64
"""Bars beside each other that can be told apart; where there are more ranks, one stands for several that take about as long."""

WAITS = "waiting"
"""The part of exposed communication before the last rank has arrived."""

OTHER = "other"

_LEAST_SHARE = 0.004
"""Parts below this share of the step, on all ranks together, are drawn as one: nobody can see them."""

COLOURS = {
    "compute": "#2f7fc1",
    "memory": "#1a9270",
    "overhead": "#c77700",
    "unknown": "#808080",
    "exposed_communication": "#bb6a97",
    WAITS: "#bb6a97",
    "exposed_copy": "#2494c4",
    "idle_data": "#b06a45",
    "idle_sync": "#a97c10",
    "idle_allocation": "#b8487e",
    "idle_compile": "#b8487e",
    "idle_gc": "#7468c4",
    "idle_io": "#7468c4",
    "idle_dependency": "#8d8070",
    "idle_profiler": "#808080",
    "idle_unexplained": "#808080",
    OTHER: "#6b7580",
}
"""As in report.css, where what is missing here is --idle."""

_IDLE = "#d2600f"
_HATCH = "rgba(255,255,255,0.5)"
_SHAPES = {"idle_data": "\\", "idle_sync": "-", "idle_allocation": "|", "idle_io": "|", "idle_dependency": "\\", "idle_unexplained": "."}
_ROW_PX, _FRAME_PX, _STANDING_PX = 30, 70, 380
_CELL_PX, _LEAST_PX, _MOST_PX = 34, 240, 520
_MOST_NAMES = 16
"""Names along one side of the map."""
_SCALE = [[0, "#8295a8"], [0.5, "#b57f52"], [1, "#d2500f"]]
"""Grey blue to orange, for every kind of colour blindness; 3:1 against white and against near-black."""
_LABELLED = 16
"""Standing bars that have their number below."""


class Part(NamedTuple):
    """One part of the step: its name in model.breakdown, 'waiting' or 'other', and as people read it."""

    name: str
    label: str

    @property
    def css(self) -> str:
        """Return the classes by which the style sheet colours it."""
        return f"{'idle ' if self.name.startswith('idle') else ''}{self.name.replace('_', '-')}"


class Bar(NamedTuple):
    """One rank, or several that take about as long: their mean."""

    ranks: tuple[int, ...]
    label: str
    parts: dict[str, float]


def bars(report: ReportData) -> Figure | None:
    """Return the mean step of each rank, its parts one behind the other, waiting for other ranks last; None where there is nothing to draw.

    Beyond MOST_BARS ranks they stand in the order of their own time, and one bar is the mean of several.
    """
    made, parts = drawn(report), shown_parts(report)
    if len(made) < 2:
        return None
    lying = len(made) <= MOST_LYING
    unit, factor = _unit(max(sum(bar.parts.values()) for bar in made))
    data = [_trace(part, made, _times(part, made, parts), factor, lying=lying) for part in parts]
    return {"data": data, "layout": _lying(made, unit) if lying else _standing(made, unit, factor, report)}


def drawn(report: ReportData) -> list[Bar]:
    """Return the bars in their order: by rank, or where one stands for several by own time, the fastest and the slowest rank alone."""
    job = report.job
    rows = [] if job is None else [row for row in read_ranks(job) if row.buckets_ns is not None]
    if job is None or not rows:
        return []
    known = ranktables.roles(job)
    if len(rows) <= MOST_BARS:
        return [_bar([row], ranktables.rank_name(row, known)) for row in rows]
    ordered = sorted(rows, key=lambda row: (row.own_ns or row.wall_ns or 0, row.rank))
    return [_bar(group, f"ranks {ranges(row.rank for row in group)}") for group in _groups(ordered)]


def _groups(ordered: list[RankRow]) -> list[list[RankRow]]:
    """Return MOST_BARS groups: the first and the last row alone, the others in equal parts."""
    inner, count = ordered[1:-1], MOST_BARS - 2
    edges = [round(k * len(inner) / count) for k in range(count + 1)]
    between = [inner[low:high] for low, high in pairwise(edges) if low < high]
    return [ordered[:1], *between, ordered[-1:]]


def _bar(rows: Sequence[RankRow], label: str) -> Bar:
    found = [_parts(row) for row in rows]
    means = {name: statistics.fmean(parts[name] for parts in found) for name in found[0]}
    return Bar(tuple(row.rank for row in rows), label, means)


def _parts(row: RankRow) -> dict[str, int]:
    """Return the parts of a rank's mean step in ns, waiting for others apart from the other exposed communication."""
    return {**(ranktables.without_waits(row) or {}), WAITS: ranktables.exposed_wait_ns(row)}


def shown_parts(report: ReportData) -> list[Part]:
    """Return the parts that are drawn, busy before idle, those too small to be seen as one, waiting for other ranks last."""
    made = drawn(report)
    sums = {name: sum(bar.parts[name] for bar in made) for name in (*BUCKETS, WAITS)} if made else {}
    least = _LEAST_SHARE * sum(sums.values())
    large = [name for name in BUCKETS if sums.get(name, 0) > least]
    parts = [Part(name, words.bucket_label(name, report)) for name in large]
    if any(0 < sums[name] <= least for name in sums if name != WAITS):
        parts.append(Part(OTHER, "smaller parts"))
    return [*parts, Part(WAITS, "exposed communication: waiting for other ranks")] if sums.get(WAITS) else parts


def _times(part: Part, made: Sequence[Bar], parts: Sequence[Part]) -> list[float]:
    """Return the time of a part on each bar in ns; of the smaller ones what all that are not drawn by themselves come to."""
    if part.name != OTHER:
        return [bar.parts[part.name] for bar in made]
    told = {known.name for known in parts}
    return [sum(ns for name, ns in bar.parts.items() if name not in told) for bar in made]


def _trace(part: Part, made: Sequence[Bar], values: Sequence[float], factor: float, *, lying: bool) -> Figure:
    texts = [_hover(part, bar, value) for bar, value in zip(made, values, strict=True)]
    lengths, places = [round(value * factor, 4) for value in values], list(range(len(made)))
    return {
        "type": "bar",
        "orientation": "h" if lying else "v",
        "name": part.label,
        "x": lengths if lying else places,
        "y": places if lying else lengths,
        "text": texts,
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": COLOURS.get(part.name, _IDLE), "pattern": _pattern(part.name), "line": {"width": 0}},
    }


def _pattern(name: str) -> Figure:
    """Return the hatching: waiting and idle are told from work without colour too."""
    if name not in IDLE_BUCKETS and name != WAITS:
        return {"shape": ""}
    return {"shape": _SHAPES.get(name, "/"), "fgcolor": _HATCH, "fillmode": "overlay", "size": 7, "solidity": 0.35}


def _hover(part: Part, bar: Bar, value: float) -> str:
    """Return the hover text: words of ours and numbers alone."""
    whole = sum(bar.parts.values())
    mean = f" (mean of {len(bar.ranks)} ranks)" if len(bar.ranks) > 1 else ""
    share = format_share(value / whole if whole else None, 1)
    return f"<b>{bar.label}</b>{mean}<br>{part.label}<br>{format_ns(value)} ({share}) of {format_ns(whole)}"


def _unit(longest_ns: float) -> tuple[str, float]:
    """Return the unit of the axis and its factor from ns."""
    name = format_ns(longest_ns).split()[1]
    return name, {"ns": 1.0, "us": 1e-3, "ms": 1e-6}.get(name, 1e-9)


def _axis(unit: str) -> Figure:
    return {"title": {"text": f"mean step ({unit})"}, "rangemode": "tozero", "zeroline": False, "fixedrange": True}


def _lying(made: Sequence[Bar], unit: str) -> Figure:
    names = {
        "tickvals": list(range(len(made))), "ticktext": [bar.label for bar in made], "autorange": "reversed", "automargin": True,
        "showgrid": False, "zeroline": False, "fixedrange": True,
    }  # fmt: skip
    margin = {"l": 40, "r": 20, "t": 10, "b": 50}
    height = _FRAME_PX + _ROW_PX * len(made)
    return {**_common(), "xaxis": _axis(unit), "yaxis": names, "margin": margin, "height": height}


def _standing(made: Sequence[Bar], unit: str, factor: float, report: ReportData) -> Figure:
    single = all(len(bar.ranks) == 1 for bar in made)
    places = list(range(0, len(made), -(-len(made) // _LABELLED))) if single else [0, len(made) - 1]
    texts = [str(made[place].ranks[0]) for place in places] if single else ["fastest", "slowest"]
    title = "rank" if single else f"{sum(len(bar.ranks) for bar in made):,} ranks by their own time"
    axis = {"title": {"text": title}, "tickvals": places, "ticktext": texts, "showgrid": False, "zeroline": False, "fixedrange": True}
    margin = {"l": 60, "r": 20, "t": 40, "b": 55}
    marks = _marks(made, factor, report.job) if report.job else []
    return {**_common(), "xaxis": axis, "yaxis": _axis(unit), "annotations": marks, "margin": margin, "height": _STANDING_PX}


def _common() -> Figure:
    return {"barmode": "stack", "bargap": 0.18, "showlegend": False, "hovermode": "closest", "hoverlabel": {"align": "left"}}


def _marks(made: Sequence[Bar], factor: float, job: Job) -> list[Figure]:
    """Return a label above the bar of the rank that the report shows, and above that of the late one."""
    late = [(job.straggler.rank, "late")] if job.straggler else []
    marks = []
    for rank, word in (*late, (job.shown_rank, "shown")):
        place = next((k for k, bar in enumerate(made) if rank in bar.ranks), None)
        if place is not None:
            top = sum(made[place].parts.values()) * factor
            anchor = "right" if place > 0.8 * len(made) else "left" if place < 0.2 * len(made) else "center"
            marks.append({"x": place, "y": top, "text": f"rank {rank}: {word}", "xanchor": anchor, "yanchor": "bottom", "showarrow": False})
    return marks


# -- traffic ------------------------------------------------------------------------------------------------------------------


def traffic(job: Job | None) -> Figure | None:
    """Return the bytes that ranks have for each other in a mean step as a map; None where they are not known or there are none."""
    found = None if job is None else job.traffic
    most = max((count for row in found.bytes for count in row), default=0) if found else 0
    if found is None or not most:
        return None
    names = [html.escape(clean(name, 40)) for name in found.ranks]
    heat = {
        "type": "heatmap",
        "x": names,
        "y": names,
        "z": [[count or None for count in row] for row in found.bytes],  # nothing sent: nothing drawn
        "zmin": 0,
        "zmax": most,
        "colorscale": _SCALE,
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": "from %{y} to %{x}: %{z:.3s}B a step<extra></extra>",
        "colorbar": {
            "thickness": 14, "outlinewidth": 0,
            "tickvals": [most * k / 4 for k in range(5)], "ticktext": ["0", *(format_bytes(most * k / 4) for k in range(1, 5))],
        },
    }  # fmt: skip
    height = min(max(_LEAST_PX, _CELL_PX * len(found.ranks) + 90), _MOST_PX)
    places = list(range(0, len(names), -(-len(names) // _MOST_NAMES)))
    axis = {
        "type": "category", "tickvals": places, "ticktext": [names[place] for place in places], "automargin": True, "showgrid": False,
        "zeroline": False, "fixedrange": True,
    }  # fmt: skip
    layout = {
        "xaxis": {**axis, "title": {"text": "to rank"}},
        "yaxis": {**axis, "title": {"text": "from rank"}, "autorange": "reversed"},
        "margin": {"l": 50, "r": 10, "t": 10, "b": 55},
        "height": height,
    }
    return {"data": [heat], "layout": layout}


def traffic_line(job: Job | None) -> str:
    """Return the largest traffic between two ranks in words, how it was counted, and what is missing; '' where none is known."""
    found = None if job is None else job.traffic
    if found is None:
        return ""
    pairs = [(count, found.ranks[i], found.ranks[j]) for i, row in enumerate(found.bytes) for j, count in enumerate(row) if i != j]
    most, source, target = max(pairs, key=lambda pair: pair[0], default=(0, "", ""))
    word = "ranks" if any("-" in name for name in found.ranks) else "rank"
    said = f"Most between two: {format_bytes(most)} a step from {word} {source} to {word} {target}. " if most else ""
    return f"{said}{capital(sentence(found.note)) if found.note else ''}".strip()
