"""The roofline as a plain plotly figure, a pure function of the report."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from gpudiag.model.ops import BOUNDS, Bound
from gpudiag.model.report import OpRow, ReportData, ReportDevice
from gpudiag.report import data_quality
from gpudiag.report.console import clean
from gpudiag.report.labels import (
    OVER_ROOF,
    ROUNDS_TO_ZERO,
    capitalize,
    compute_intensity,
    compute_over_roof,
    compute_rate,
    format_number,
    format_site,
    pluralize,
    sum_op_ns,
)
from gpudiag.report.op_table import sort_ops_by_time
from gpudiag.units import format_bytes, format_flop, format_ns, format_rate, format_share

Figure = dict[str, Any]

# Okabe and Ito's colour-blind-safe set, darkened or lightened to 3:1 against white and against near-black; each bound has a shape too.
COLOURS: dict[Bound, str] = {
    "compute": "#2f7fc1",
    "memory": "#1a9270",
    "overhead": "#c77700",
    "communication": "#bb6a97",
    "copy": "#2494c4",
    "unknown": "#808080",
}
SYMBOLS: dict[Bound, str] = {
    "compute": "circle",
    "memory": "square",
    "overhead": "diamond",
    "communication": "triangle-up",
    "copy": "triangle-down",
    "unknown": "x",
}
_LEAST, _MOST = 7.0, 34.0
"""Diameter of a point in pixels; its area grows with the op's time."""
_DUST_SHARE = 0.01
"""Share of the op time below which an overhead-bound op says nothing by itself: many such ops are one mark."""
DUST = -1
"""What that mark carries in place of the place of an op."""
_HEIGHT, _ABOVE, _BELOW, _LABEL = 500, 40, 90, 14
"""Pixels: of the figure, above and below its axes, and of a label."""


def draw_roofline(report: ReportData) -> Figure | None:
    """Return the roofline (log-log, FLOP/byte against FLOP/s) or None where there is nothing to judge or to judge against.

    Roofs: bandwidth x intensity, and the dense peak of each engine that an op was judged by (Williams, Waterman and Patterson, 2009).
    Overhead-bound ops of next to no time are one mark, where all of them together stand.
    """
    rows = select_roofline_rows(report)
    device = report.device
    if not rows or device is None or not device.peaks:
        return None
    total = sum_op_ns(report.ops)
    engines = find_used_peaks(device, rows, report.mfu.dtype if report.mfu else "")
    alone, dust = _fold_dust(rows, total)
    places = {id(row): index for index, row in enumerate(sort_ops_by_time(report))}
    by_bound = [(bound, [row for row in alone if row.bound == bound]) for bound in BOUNDS]
    largest = max(sum_op_ns(dust), max((row.kernel_ns for row in alone), default=0))
    points = [_draw_points(bound, chosen, largest, total, [places[id(row)] for row in chosen]) for bound, chosen in by_bound if chosen]
    points += [_draw_dust(dust, largest, total)] if dust else []
    x = _find_ends([value for trace in points for value in trace["x"]], max(engines.values()), device)
    roofs = _draw_roofs(engines, device, x)
    rates = [rate for trace in (*roofs, *points) for rate in trace["y"]]
    return {"data": [*roofs, *points], "layout": _build_layout(x, (min(rates) / 2, max(rates) * 3), engines, device)}


def _fold_dust(rows: Sequence[OpRow], total_ns: int) -> tuple[list[OpRow], list[OpRow]]:
    """Return the ops that are drawn one by one, and the overhead-bound ones that are one mark."""
    dust = [row for row in rows if row.bound == "overhead" and row.kernel_ns < _DUST_SHARE * total_ns]
    if len(dust) < 2:
        return list(rows), []
    folded = {id(row) for row in dust}
    return [row for row in rows if id(row) not in folded], dust


def _find_ends(intensities: Sequence[float], top: float, device: ReportDevice) -> tuple[float, float]:
    """Return both ends of the axis of intensities: around all points, and the ridge below the highest roof."""
    ridge = top / device.bandwidth_byte_per_s if device.bandwidth_byte_per_s else 1.0
    return min(*intensities, ridge) / 3, max(*intensities, ridge) * 4


def _draw_roofs(engines: dict[str, float], device: ReportDevice, x: tuple[float, float]) -> list[Figure]:
    (low, high), top, roofs = x, max(engines.values()), []
    for name, rate, dash in (("DRAM", device.bandwidth_byte_per_s, "solid"), ("cache", device.cache_bandwidth_byte_per_s, "dot")):
        if rate:
            roofs.append(_draw_line([low, top / rate], [low * rate, top], f"{name} {format_rate(rate, 'B')}", dash))
    fastest = device.cache_bandwidth_byte_per_s or device.bandwidth_byte_per_s
    for name, peak in engines.items():
        start = max(low, peak / fastest) if fastest else low
        roofs.append(_draw_line([start, high], [peak, peak], f"{name} {format_rate(peak, 'FLOP')}", "solid"))
    return roofs


def select_roofline_rows(report: ReportData) -> list[OpRow]:
    """Return the ops that have a place on the roofline (FLOPs, bytes and time known and not zero), largest first."""
    # Ops drawn, largest first; more are one cloud and slow the page
    return [row for row in sort_ops_by_time(report) if row.flops and row.bytes and row.kernel_ns > 0][:500]


def format_roofline_note(report: ReportData) -> str:
    """Return what the roofline leaves out, or why there is none."""
    rows = select_roofline_rows(report)
    if report.device is None or not report.device.peaks:
        why = data_quality.explain_missing_peaks(report)
        return f"No roofline can be drawn: the peak rates of the device are unavailable. {capitalize(why)}".rstrip()
    if not rows:
        return "No roofline can be drawn: no op has both FLOPs and bytes that are known (were shapes recorded?)."
    total = sum_op_ns(report.ops)
    left_out = 1 - sum_op_ns(rows) / total if total else 0.0
    text = [
        "Each point is one op with its shapes; its area grows with its time, its colour and shape say what bounds it. The distance to the "
        "roof above it is what a better kernel could gain. A click on a point shows the op in the table."
    ]
    if dust := _fold_dust(rows, total)[1]:
        text.append(
            f"{len(dust):,} overhead-bound ops, each below {format_share(_DUST_SHARE)} of the op time, are one mark (the open diamond): "
            f"{format_share(sum_op_ns(dust) / total, 1)} of it."
        )
    if above := sum(compute_over_roof(row) is not None for row in rows):
        text.append(f"{above:,} {pluralize(above, 'op')} ran faster than the roof of the DRAM or of the engine allows; each says why.")
    if left_out >= ROUNDS_TO_ZERO:
        text.append(f"Ops without FLOPs or bytes that are known ({format_share(left_out)} of the op time) are not drawn.")
    return " ".join(text)


def find_used_peaks(device: ReportDevice, rows: Sequence[OpRow], mfu_type: str = "") -> dict[str, float]:
    """Return engine names (those of one rate joined) and peaks in FLOP/s: the vector rate, each engine that `rows` were judged by, and
    the type that MFU is divided by."""
    used = {"fp32", mfu_type} | {row.engine or row.dtype for row in rows}
    by_rate: dict[float, list[str]] = {}
    for name, rate in device.peaks.items():
        if name in used and rate > 0:
            by_rate.setdefault(rate, []).append(name)
    by_rate = by_rate or {max(device.peaks.values()): [max(device.peaks, key=lambda name: device.peaks[name])]}
    return {", ".join(names): rate for rate, names in sorted(by_rate.items())}


def _draw_line(x: list[float], y: list[float], name: str, dash: str) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "name": name,
        "line": {"color": "#7a7a7a", "width": 1.5, "dash": dash},
        "hoverinfo": "name",
        "showlegend": False,
    }


def _draw_points(bound: Bound, rows: Sequence[OpRow], largest_ns: int, total_ns: int, places: list[int]) -> Figure:
    texts = []
    for row in rows:  # plotly reads a subset of HTML, so what comes from the trace is escaped
        site = format_site(row.where)
        place = [html.escape(clean(text, 90)) for text in (row.name, row.module, row.signature, site and f"at {site}") if text]
        share = format_share(row.kernel_ns / total_ns if total_ns else None, 1)
        flop_rate, byte_rate = compute_rate(row.flops, row.kernel_ns), compute_rate(row.bytes, row.kernel_ns)
        resident = " (fits the cache)" if row.cache_resident else ""
        efficiency = OVER_ROOF if compute_over_roof(row) is not None else f"{format_share(row.efficiency)} of roofline"
        lines = [
            f"<b>{place[0]}</b>",
            *place[1:],
            f"{format_ns(row.kernel_ns)} in {row.count:,} calls, {share} of the op time",
            f"{format_rate(flop_rate, 'FLOP')}, {format_rate(byte_rate, 'B')}",
            f"{format_flop(row.flops)}, {format_bytes(row.bytes)}, {format_number(compute_intensity(row))} FLOP/B",
            f"{row.bound}{resident}, {efficiency} ({'a guess: generic' if row.provenance == 'generic' else row.provenance} cost)",
        ]
        texts.append("<br>".join(lines))
    return {
        "type": "scatter",
        "mode": "markers",
        "name": bound,
        "x": [compute_intensity(row) for row in rows],
        "y": [compute_rate(row.flops, row.kernel_ns) for row in rows],
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "color": COLOURS[bound],
            "symbol": SYMBOLS[bound],
            "size": [_scale_point(row.kernel_ns, largest_ns) for row in rows],
            "opacity": 0.75,
            "line": {"width": 1, "color": COLOURS[bound]},
        },
        "customdata": places,
    }


def _draw_dust(rows: Sequence[OpRow], largest_ns: int, total_ns: int) -> Figure:
    """Return the mark of many small ops: the sum of their FLOPs over the sums of their bytes and of their time."""
    flops, moved, time = sum(row.flops or 0.0 for row in rows), sum(row.bytes or 0.0 for row in rows), sum_op_ns(rows)
    count = sum(row.count for row in rows)
    lines = (
        f"<b>{len(rows):,} overhead-bound ops together</b>",
        f"each below {format_share(_DUST_SHARE)} of the op time",
        f"{format_ns(time)} in {count:,} calls, {format_share(time / total_ns if total_ns else None, 1)} of the op time",
        "a click shows them in the table",
    )
    return {
        "type": "scatter", "mode": "markers", "name": "overhead, many small ops", "x": [flops / moved], "y": [flops / time * 1e9],
        "text": ["<br>".join(lines)], "hovertemplate": "%{text}<extra></extra>", "customdata": [DUST],
        "marker": {
            "color": COLOURS["overhead"], "symbol": "diamond-open", "size": [_scale_point(time, largest_ns)],
            "line": {"width": 2.5, "color": COLOURS["overhead"]},
        },
    }  # fmt: skip


def _scale_point(ns: int, largest_ns: int) -> float:
    return round(_LEAST + (_MOST - _LEAST) * math.sqrt(ns / largest_ns), 1)


def _build_layout(x: tuple[float, float], y: tuple[float, float], engines: dict[str, float], device: ReportDevice) -> Figure:
    # Above each roof at its right end, one label higher where the one below would touch it
    pixels = (_HEIGHT - _ABOVE - _BELOW) / math.log10(y[1] / y[0])
    labels, free = [], -math.inf
    for name, peak in engines.items():
        at = math.log10(peak) * pixels
        labels.append(_build_label(x[1], peak, f"{name} {format_rate(peak, 'FLOP')}", "bottom", shift=round(max(0.0, free - at))))
        free = max(at, free) + _LABEL
    # The labels of the slopes on the outer side of both: DRAM below its lower end, the cache above, and below those of all engines
    dram, cache, least = device.bandwidth_byte_per_s, device.cache_bandwidth_byte_per_s, min(engines.values()) / 10
    if dram:
        labels.append(_build_label(x[0] * 1.3, x[0] * dram, f"DRAM {format_rate(dram, 'B')}", "top", "left"))
    if cache:
        labels.append(_build_label(least / cache, least, f"cache {format_rate(cache, 'B')}", "bottom"))
    return {
        "xaxis": _build_axis("arithmetic intensity (FLOP/byte)", x, lambda value: f"{value:g}"),
        "yaxis": _build_axis("achieved rate (FLOP/s)", y, lambda value: format_rate(value, "FLOP").removesuffix("FLOP/s").strip()),
        "annotations": labels,
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "legend": {"orientation": "h", "y": -0.16, "yanchor": "top", "x": 0, "itemsizing": "constant"},
        "margin": {"l": 84, "r": 20, "t": _ABOVE, "b": _BELOW},
        "height": _HEIGHT,
    }


def _build_axis(title: str, ends: tuple[float, float], form: Callable[[float], str]) -> Figure:
    low, high = (math.log10(end) for end in ends)
    ticks = [10.0**k for k in range(math.ceil(low), math.floor(high) + 1)]
    return {
        "type": "log",
        "title": {"text": title},
        "range": [low, high],
        "tickvals": ticks,
        "ticktext": [form(tick) for tick in ticks],
        "zeroline": False,
    }


def _build_label(x: float, y: float, text: str, yanchor: str, xanchor: str = "right", shift: int = 0) -> Figure:
    place = {"x": math.log10(x), "y": math.log10(y), "xref": "x", "yref": "y", "yshift": shift}
    return {**place, "text": text, "showarrow": False, "xanchor": xanchor, "yanchor": yanchor, "font": {"size": 11}}
