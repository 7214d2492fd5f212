"""Ranks drawn: bars of their steps, and the traffic between them.

The colours are those of the style sheet, in which the parts of the step have theirs too.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from gpudiag.model.job import Job, RankRow
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import BUCKETS, IDLE_BUCKETS
from gpudiag.report import labels, ranks
from gpudiag.report.console import clean
from gpudiag.report.ranks import format_ranges, format_sentence, select_read_ranks
from gpudiag.units import format_bytes, format_ns, format_share

Figure = dict[str, Any]

MOST_LYING = 16
"""Ranks up to which each has a line with its name; of more the bars stand side by side."""

MOST_BARS = 64
"""Bars beside each other that can be told apart; where there are more ranks, one stands for several that take about as long."""

OTHER = "other"

WAITS = "waiting"
"""The part of exposed communication before the last rank has arrived."""

COLOURS = {
    "compute": "#2f7fc1",
    "memory": "#1a9270",
    "overhead": "#c77700",
    "unknown": "#808080",
    "exposed_communication": "#bb6a97",
    WAITS: "#bb6a97",
    "exposed_copy": "#2494c4",
    "outside_recording": "#808080",
    "idle_data": "#b06a45",
    "idle_sync": "#a97c10",
    "idle_allocation": "#b8487e",
    "idle_compile": "#b8487e",
    "idle_init": "#7468c4",
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
_SHAPES = {
    "idle_data": "\\",
    "idle_init": "-",
    "idle_gc": ".",
    "idle_profiler": "|",
    "idle_sync": "-",
    "idle_allocation": "|",
    "idle_io": "|",
    "idle_dependency": "\\",
    "idle_unexplained": ".",
}
_ROW_PX, _FRAME_PX, _STANDING_PX = 30, 70, 380
_CELL_PX, _LEAST_PX, _MOST_PX = 34, 240, 520
_MOST_NAMES = 16
_SCALE = [[0, "#8295a8"], [0.5, "#b57f52"], [1, "#d2500f"]]
"""Grey blue to orange, for every kind of colour blindness; 3:1 against white and against near-black."""


class BarPart(NamedTuple):
    """One part of the step: its name in model.timeline, 'waiting' or 'other', and as people read it."""

    name: str
    label: str

    @property
    def css(self) -> str:
        """Return the classes by which the style sheet colours it."""
        return labels.name_css_classes(self.name)


class RankBar(NamedTuple):
    """One rank, or several that take about as long: their mean."""

    ranks: tuple[int, ...]
    label: str
    parts: dict[str, float]


def draw_rank_bars(report: ReportData) -> Figure | None:
    """Return the mean step of each rank, its parts one behind the other, waiting for other ranks last; None where there is nothing to draw.

    Beyond MOST_BARS ranks they stand in the order of their own time, and one bar is the mean of several.
    """
    bars, parts = build_bars(report), select_bar_parts(report)
    if len(bars) < 2:
        return None
    lying = len(bars) <= MOST_LYING
    wholes = [sum(bar.parts.values()) for bar in bars]
    unit = format_ns(max(wholes)).split()[1]
    factor = {"ns": 1.0, "us": 1e-3, "ms": 1e-6}.get(unit, 1e-9)
    places, drawn = list(range(len(bars))), {part.name for part in parts}
    data = []
    for part in parts:
        if part.name == OTHER:  # what all parts that are not drawn by themselves come to
            values = [sum(ns for name, ns in bar.parts.items() if name not in drawn) for bar in bars]
        else:
            values = [bar.parts[part.name] for bar in bars]
        texts = []  # words of ours and numbers alone
        for bar, value, whole in zip(bars, values, wholes, strict=True):
            mean = f" (mean of {len(bar.ranks)} ranks)" if len(bar.ranks) > 1 else ""
            share = format_share(value / whole if whole else None, 1)
            texts.append(f"<b>{bar.label}</b>{mean}<br>{part.label}<br>{format_ns(value)} ({share}) of {format_ns(whole)}")
        # The hatching: waiting and idle are told from work without colour too
        pattern: Figure = {"shape": ""}
        if part.name in IDLE_BUCKETS or part.name in (WAITS, "outside_recording"):
            pattern = {"shape": _SHAPES.get(part.name, "/"), "fgcolor": _HATCH, "fillmode": "overlay", "size": 7, "solidity": 0.35}
        lengths = [round(value * factor, 4) for value in values]
        data.append({
            "type": "bar", "orientation": "h" if lying else "v", "name": part.label, "x": lengths if lying else places,
            "y": places if lying else lengths, "text": texts, "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": COLOURS.get(part.name, _IDLE), "pattern": pattern, "line": {"width": 0}},
        })  # fmt: skip
    return {"data": data, "layout": _build_bars_layout(bars, unit, factor, report.job)}


def build_bars(report: ReportData) -> list[RankBar]:
    """Return the bars in their order: by rank, or where one stands for several by own time, the fastest and the slowest rank alone."""
    job = report.job
    rows = [] if job is None else [row for row in select_read_ranks(job) if row.buckets_ns is not None]
    if job is None or not rows:
        return []
    if len(rows) <= MOST_BARS:
        known = ranks.find_rank_roles(job)
        groups = [(ranks.name_rank(row, known), [row]) for row in rows]
    else:  # MOST_BARS groups: the first and the last row alone, the others in equal parts
        ordered = sorted(rows, key=lambda row: (row.own_ns or row.wall_ns or 0, row.rank))
        inner, count = ordered[1:-1], MOST_BARS - 2
        edges = [round(k * len(inner) / count) for k in range(count + 1)]
        between = [inner[low:high] for low, high in pairwise(edges) if low < high]
        groups = [(f"ranks {format_ranges(row.rank for row in group)}", group) for group in (ordered[:1], *between, ordered[-1:])]
    bars = []
    for label, group in groups:
        found = [parts for row in group if (parts := split_waits(row)) is not None]
        means = {name: statistics.fmean(parts[name] for parts in found) for name in found[0]}
        bars.append(RankBar(tuple(row.rank for row in group), label, means))
    return bars


def select_bar_parts(report: ReportData) -> list[BarPart]:
    """Return the parts that are drawn, busy before idle, those too small to be seen as one, waiting for other ranks last."""
    made = build_bars(report)
    sums = {name: sum(bar.parts[name] for bar in made) for name in (*BUCKETS, WAITS)} if made else {}
    least = 0.004 * sum(sums.values())  # parts below this share of the step, on all ranks together, are drawn as one: nobody can see them
    large = [name for name in BUCKETS if sums.get(name, 0) > least]
    parts = [BarPart(name, labels.name_bucket(name, report)) for name in large]
    if any(0 < sums[name] <= least for name in sums if name != WAITS):
        parts.append(BarPart(OTHER, "smaller parts"))
    return [*parts, BarPart(WAITS, "exposed communication: wait for other ranks")] if sums.get(WAITS) else parts


def _build_bars_layout(bars: Sequence[RankBar], unit: str, factor: float, job: Job | None) -> Figure:
    layout = {"barmode": "stack", "bargap": 0.18, "showlegend": False, "hovermode": "closest", "hoverlabel": {"align": "left"}}
    times = {"title": {"text": f"mean step ({unit})"}, "rangemode": "tozero", "zeroline": False, "fixedrange": True}
    if len(bars) <= MOST_LYING:
        names = {
            "tickvals": list(range(len(bars))), "ticktext": [bar.label for bar in bars], "autorange": "reversed", "automargin": True,
            "ticks": "outside", "ticklen": 6, "tickcolor": "rgba(0,0,0,0)",
            "showgrid": False, "zeroline": False, "fixedrange": True,
        }  # fmt: skip
        size = {"margin": {"l": 40, "r": 20, "t": 10, "b": 50}, "height": _FRAME_PX + _ROW_PX * len(bars)}
        return {**layout, "xaxis": times, "yaxis": names, **size}
    single = all(len(bar.ranks) == 1 for bar in bars)
    # at most 16 of the standing bars have their number below
    places = list(range(0, len(bars), -(-len(bars) // 16))) if single else [0, len(bars) - 1]
    texts = [str(bars[place].ranks[0]) for place in places] if single else ["fastest", "slowest"]
    title = "rank" if single else f"{sum(len(bar.ranks) for bar in bars):,} ranks by their own time"
    axis = {"title": {"text": title}, "tickvals": places, "ticktext": texts, "showgrid": False, "zeroline": False, "fixedrange": True}
    marked = [(job.straggler.rank, "late")] if job and job.straggler else []
    marks: list[Figure] = []
    for rank, word in (*marked, (job.shown_rank, "shown")) if job else ():
        place = next((k for k, bar in enumerate(bars) if rank in bar.ranks), None)
        if place is not None:
            top = sum(bars[place].parts.values()) * factor
            anchor = "right" if place > 0.8 * len(bars) else "left" if place < 0.2 * len(bars) else "center"
            marks.append({"x": place, "y": top, "text": f"rank {rank}: {word}", "xanchor": anchor, "yanchor": "bottom", "showarrow": False})
    size = {"margin": {"l": 60, "r": 20, "t": 40, "b": 55}, "height": _STANDING_PX}
    return {**layout, "xaxis": axis, "yaxis": times, "annotations": marks, **size}


def draw_traffic(job: Job | None) -> Figure | None:
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


def format_traffic(job: Job | None) -> str:
    """Return the largest traffic between two ranks in words, how it was counted, and what is missing; '' where none is known."""
    found = None if job is None else job.traffic
    if found is None:
        return ""
    pairs = [(count, found.ranks[i], found.ranks[j]) for i, row in enumerate(found.bytes) for j, count in enumerate(row) if i != j]
    most, source, target = max(pairs, key=lambda pair: pair[0], default=(0, "", ""))
    word = "ranks" if any("-" in name for name in found.ranks) else "rank"
    said = f"Most between two: {format_bytes(most)} a step from {word} {source} to {word} {target}. " if most else ""
    return f"{said}{labels.capitalize(format_sentence(found.note)) if found.note else ''}".strip()


def format_bars_note(report: ReportData) -> str:
    """Return how the bars are read."""
    several = report.job is not None and len(ranks.select_read_ranks(report.job)) > MOST_BARS
    waits = any(part.name == WAITS for part in select_bar_parts(report))
    said = ["Each bar between the fastest and the slowest rank is the mean of several that take about as long."] if several else []
    end = "The hatched end in the colour of communication is wait time for ranks that arrive later; what stands before it is own time."
    said += [end] if waits else []
    return " ".join(said)


def split_waits(row: RankRow) -> dict[str, int] | None:
    """Return the parts of a rank's mean step in ns, exposed communication without WAITS, which is a part of its own; None: not known."""
    if row.buckets_ns is None:
        return None
    parts: dict[str, int] = msgspec.structs.asdict(row.buckets_ns)
    communication = parts["exposed_communication"]
    waits = 0 if row.exposed_waiting_ns is None else min(row.exposed_waiting_ns, communication)
    return {**parts, "exposed_communication": communication - waits, WAITS: waits}


BARS_LABEL = "Mean step of each rank by its parts; the same times stand in the table of ranks"
TRAFFIC_LABEL = "Bytes a step from each rank to each other"
