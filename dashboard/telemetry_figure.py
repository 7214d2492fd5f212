"""The strips of a run, one above the other on one axis, as a plain plotly figure: a pure function of what was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from gpudiag.recordings.live import RecordedSoFar
from gpudiag.report import telemetry_chart
from gpudiag.units import format_bytes, format_ns, format_share

Figure = dict[str, Any]

WAITING, PROFILED_STEP = "of it waiting for a batch", "step with the profiler"
LINE, WAIT, PROFILED, LIMIT, HELD = "#2f7fc1", "#c77700", "#bb6a97", "#7a7a7a", "#c77700"
"""Okabe and Ito's colour-blind-safe set, 3:1 against white and against near-black, as in the reports; every line has its name too."""

_GRID = "rgba(128,128,128,0.3)"
_TITLE_PX, _STRIP_PX, _REASON_PX, _FOOT_PX, _GAP_PX = 24, 84, 12, 56, 10
_ALONE_PX = 180
"""Of a strip that has no other beside it."""
_UNITS_OF_STEPS = ((10_000.0, 1_000.0, "s"), (0.0, 1.0, "ms"))
"""From which highest step time (ms), what a time is divided by, unit."""
_NEAR = 1.4
"""A limit is drawn where it is at most this many times the highest sample; one far above would press the line to the ground."""
_BEYOND = 4.0
"""Steps of more than this many times the median are cut off, and counted: the first step would press all others to the ground."""
_DIGITS = 4
"""Decimals that are sent: more than a screen shows, and half as long as all of them."""
_UNITS_OF_TIME = ((7_200.0, 3_600.0, "h"), (600.0, 60.0, "min"), (0.0, 1.0, "s"))


class Strip(NamedTuple):
    """One column of the table telemetry: its title, the unit that is shown, and the name of its limit in the manifest."""

    column: str
    title: str
    unit: str
    limit: str = ""


STRIPS = (
    Strip("sm_clock_mhz", "SM clock", "MHz", "max_sm_clock_mhz"),
    Strip("power_w", "Power", "W", "power_limit_w"),
    Strip("temperature_c", "GPU temperature", "\u00b0C", "slowdown_temperature_c"),
    Strip("gpu_util_pct", "GPU in use (a kernel ran, however small)", "%"),
    Strip("mem_used_bytes", "Device memory in use", "B", "memory_bytes"),
    Strip("torch_reserved_bytes", "Held by PyTorch's allocator", "B", "memory_bytes"),
    Strip("torch_allocated_bytes", "In tensors of this process, when sampled", "B", "memory_bytes"),
    Strip("mem_util_pct", "Device memory read or written", "%"),
    Strip("mem_clock_mhz", "Memory clock", "MHz", "max_mem_clock_mhz"),
    Strip("pcie_rx_bytes_per_s", "PCIe received", "B/s"),
    Strip("pcie_tx_bytes_per_s", "PCIe sent", "B/s"),
    Strip("cpu_util_pct", "CPU of the process (100 % = one core)", "%"),
    Strip("system_cpu_util_pct", "CPU of the machine", "%"),
    Strip("cpu_freq_mhz", "CPU frequency", "MHz", "max_cpu_freq_mhz"),
    Strip("rss_bytes", "Resident memory of the process", "B", "host_memory_bytes"),
)
MEMORY_STRIPS = tuple(strip for strip in STRIPS if strip.unit == "B")


class StripFigure(NamedTuple):
    """A figure, and what has to be said of it. `figure` None: there is nothing to draw."""

    figure: Figure | None
    height: int
    notes: tuple[str, ...]
    reasons: tuple[telemetry_chart.ClockReason, ...] = ()
    key: tuple[tuple[str, str], ...] = ()
    """What its lines and colours stand for: (class of the swatch, name)."""


def draw_strips(
    now: RecordedSoFar, kind: telemetry_chart.AxisKind, limits: Mapping[str, float], chosen: tuple[Strip, ...] = STRIPS
) -> StripFigure:
    """Return the strips of what a bundle holds: with STRIPS step times, each column that was sampled, and what held the clocks.

    `limits`: what the device allows, by the names of the manifest.
    """
    axis = telemetry_chart.ChartAxis(kind, now.telemetry, now.steps)
    begin, end = axis.span(now.telemetry)
    factor, unit = next((factor, unit) for least, factor, unit in _UNITS_OF_TIME if end >= least) if axis.kind == "time" else (1.0, "")
    board = _Board(factor)
    whole = chosen is STRIPS
    if whole:
        board.add_steps(now.steps, axis)
    edges, reasons = telemetry_chart.measure_clock_reasons(now.telemetry, axis) if whole else ([], [])
    for strip in chosen:
        board.add_samples(strip, now.telemetry, axis, limits.get(strip.limit))
        for reason in reasons if strip.column == "sm_clock_mhz" else ():  # below what they hold down
            board.add_reason(reason, edges)
    if not board.traces:
        return StripFigure(None, 0, ())
    title = "step" if axis.kind == "step" else f"time since the run began ({unit})"
    shades = telemetry_chart.list_profiled_spans(now.steps, axis)[:100]
    figure = board.build(title, (begin / factor, end / factor), [(low / factor, high / factor) for low, high, _ in shades])
    notes = list(board.notes)
    if shades:
        notes.append("Shaded: steps that were recorded; the profiler makes them slower.")
    if board.thinned:
        notes.append("A point of a line is the mean of the samples around it; the band reaches from the lowest to the highest.")
    key = _list_key(board, reasons, whole=whole, shaded=bool(shades))
    return StripFigure(figure, figure["layout"]["height"], tuple(notes), tuple(reasons), key)


def _list_key(board: _Board, reasons: Sequence[telemetry_chart.ClockReason], *, whole: bool, shaded: bool) -> tuple[tuple[str, str], ...]:
    drawn = {trace.get("name") for trace in board.traces}
    known = (
        ("strip-line", "step time, or what was sampled" if whole else "what was sampled", True),
        ("strip-wait", WAITING, WAITING in drawn),
        ("strip-profiled", PROFILED_STEP, PROFILED_STEP in drawn),
        ("strip-band", "lowest to highest", board.thinned),
        ("strip-limit", "limit of the device", board.limited),
        ("strip-held", "clocks held down, the darker the longer", any(reason.lowers for reason in reasons)),
        ("strip-shade", "steps that were recorded", shaded),
    )
    return tuple((css, name) for css, name, present in known if present)


class _Board:
    """Collects rows from top to bottom; `factor`: what the axis is divided by."""

    def __init__(self, factor: float) -> None:
        self.traces: list[Figure] = []
        self.notes: list[str] = []
        self.thinned = self.limited = False
        self._rows: list[tuple[str, int, Figure]] = []  # title, pixels, axis
        self._shapes: list[Figure] = []
        self._factor = factor

    def add_steps(self, steps: pl.DataFrame, axis: telemetry_chart.ChartAxis) -> None:
        """Add the time of each step, what of it waited for a batch, and the steps that the profiler touched."""
        plain, touched = steps.filter(pl.col("window") == "plain"), steps.filter(pl.col("window") != "plain")
        parts = (("wall_ns", "step time", LINE), ("loader_wait_ns", WAITING, WAIT))
        lines = [(telemetry_chart.build_step_line(plain, column, axis), name, colour) for column, name, colour in parts]
        dots = telemetry_chart.build_step_line(touched, "wall_ns", axis)
        tops = [value for line in (*(line for line, *_ in lines), dots) if line is not None for value in line.high if value is not None]
        if not tops:
            return
        # The axis ends where few steps are longer: those are cut off, and noted
        walls = steps["wall_ns"] / 1e6
        most = _BEYOND * float(walls.median() or 0)  # type: ignore[arg-type]
        if 0 < most < max(tops):
            beyond = int((walls > most).sum())
            longest = format_ns(float(walls.max() or 0) * 1e6)  # type: ignore[arg-type]
            took = f"{beyond:,} step{'' if beyond == 1 else 's'} took longer than the axis of step times shows"
            self.notes.append(f"{took}, the longest {longest}: zoom out to see {'it' if beyond == 1 else 'them'}.")
        else:
            most = max(tops)
        factor, unit = next((factor, unit) for least, factor, unit in _UNITS_OF_STEPS if most >= least)
        yaxis = self._add_row(f"Time of a step ({unit})", _STRIP_PX, {"range": [0, most * 1.05 / factor]})
        for line, name, colour in lines:
            if line is not None:
                self._add_line(line, name, colour, yaxis, unit, factor, ",.2~f")
        if dots is not None:
            marker = {"mode": "markers", "marker": {"color": PROFILED, "size": 5, "symbol": "diamond"}}
            self.traces.append({**self._trace(dots, PROFILED_STEP, PROFILED, yaxis, unit, factor, ",.2~f"), **marker})

    def add_samples(self, strip: Strip, telemetry: pl.DataFrame, axis: telemetry_chart.ChartAxis, limit: float | None) -> None:
        line = telemetry_chart.build_sample_line(telemetry, strip.column, axis)
        if line is None:
            return
        lowest, highest = (pick(value for value in row if value is not None) for pick, row in ((min, line.low), (max, line.high)))
        factor, unit = 1.0, strip.unit
        if unit in ("B", "B/s"):  # in the unit that format_bytes would take
            prefixed = format_bytes(highest).rpartition(" ")[2]
            factor, unit = 1000.0 ** ("B", "kB", "MB", "GB", "TB", "PB").index(prefixed), prefixed + unit.removeprefix("B")
        title = strip.title if strip.unit in strip.title else f"{strip.title} ({unit})"
        if limit is not None:
            whole = limit >= 100 or limit == round(limit)
            title += f", limit {format_bytes(limit) if strip.unit == 'B' else f'{limit:,.{0 if whole else 1}f} {strip.unit}'}"
        near = limit if limit is not None and 0 < limit <= _NEAR * highest else None
        # Shares whole, amounts from zero, and what is never near zero close up: a fifth of it at least
        top = highest if near is None else max(highest, near)
        ends = (0.0, top * 1.08 or 1.0)
        if strip.unit == "%":
            ends = (0.0, max(105.0, top * 1.05))
        elif strip.unit in ("MHz", "W", "\u00b0C"):
            low = max(0.0, min(lowest, 0.8 * top))
            margin = 0.08 * (top - low) or 1.0
            ends = (low - margin if low else 0.0, top + margin)
        yaxis = self._add_row(title, _STRIP_PX, {"range": [end / factor for end in ends]})
        self._add_line(line, strip.title.partition(" (")[0], LINE, yaxis, unit, factor, ",.1~f")
        if near is not None:
            dashes = {"color": LIMIT, "width": 1.2, "dash": "dash"}
            place = {"xref": "paper", "x0": 0, "x1": 1, "yref": yaxis, "y0": near / factor, "y1": near / factor}
            self._shapes.append({"type": "line", **place, "line": dashes})
            self.limited = True

    def add_reason(self, reason: telemetry_chart.ClockReason, edges: list[float]) -> None:
        """Add how much of the time a reason held, as a band that is the darker the more of it did."""
        effect = "lowers the clocks" if reason.lowers else "lowers nothing under load"
        held = format_share(reason.share) if reason.share >= 0.005 else "<1 %"
        yaxis = self._add_row(f"{reason.name} {held} of the time: {effect}", _REASON_PX, {"visible": False, "fixedrange": True})
        self.traces.append(
            {
                "type": "heatmap",
                "x": [edge / self._factor for edge in edges],
                "y": [0, 1],
                "z": [reason.shares],
                "zmin": 0,
                "zmax": 1,
                "showscale": False,
                "colorscale": [[0, "rgba(128,128,128,0.18)"], [0.001, "rgba(199,119,0,0.35)"], [1, HELD if reason.lowers else LINE]],
                "hovertemplate": f"{reason.name}: held %{{z:.0%}} of this time<extra></extra>",
                "yaxis": yaxis,
                "name": reason.name,
            }
        )

    def _add_row(self, title: str, pixels: int, axis: Figure) -> str:
        self._rows.append((title, pixels, axis))
        return "y" if len(self._rows) == 1 else f"y{len(self._rows)}"

    def _add_line(self, line: telemetry_chart.ChartLine, name: str, colour: str, yaxis: str, unit: str, factor: float, form: str) -> None:
        if line.thinned:
            self.thinned = True
            # The band from the lowest to the highest sample: one outline for each stretch without a hole, there above and back below
            x: list[float | None] = []
            y: list[float | None] = []
            start = 0
            for end in (*(place for place, value in enumerate(line.mean) if value is None), len(line.mean)):
                if end > start:
                    x += [*line.x[start:end], *reversed(line.x[start:end]), None]
                    y += [*line.high[start:end], *reversed(line.low[start:end]), None]
                start = end + 1
            red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
            band = {
                "mode": "lines",
                "line": {"width": 0},
                "hoverinfo": "skip",
                "fill": "toself",
                "fillcolor": f"rgba({red},{green},{blue},0.22)",
            }
            self.traces.append({**self._points(x[:-1], y[:-1], yaxis, factor), **band})
        self.traces.append(self._trace(line, name, colour, yaxis, unit, factor, form))

    def _trace(self, line: telemetry_chart.ChartLine, name: str, colour: str, yaxis: str, unit: str, factor: float, form: str) -> Figure:
        ends = [
            [round(low / factor, _DIGITS), round(high / factor, _DIGITS)] if low is not None and high is not None else [None, None]
            for low, high in zip(line.low, line.high, strict=True)
        ]
        spread = f" (%{{customdata[0]:{form}}} to %{{customdata[1]:{form}}})" if line.thinned else ""
        return {
            **self._points(line.x, line.mean, yaxis, factor),
            "mode": "lines" if len(line.x) > 1 else "markers",
            "name": name,
            "line": {"color": colour, "width": 1.6},
            "connectgaps": False,
            "hovertemplate": f"{name}: %{{y:{form}}} {unit}{spread}<extra></extra>",
            **({"customdata": ends} if line.thinned else {}),
        }

    def _points(self, x: Sequence[float | None], values: Sequence[float | None], yaxis: str, factor: float) -> Figure:
        places = [None if place is None else round(place / self._factor, _DIGITS) for place in x]
        scaled = [None if value is None else round(value / factor, _DIGITS) for value in values]
        return {"type": "scatter", "x": places, "y": scaled, "yaxis": yaxis, "xaxis": "x", "showlegend": False}

    def build(self, title: str, ends: tuple[float, float], shades: list[tuple[float, float]]) -> Figure:
        """Return the figure; `title` and `ends` of the axis that all strips share, `shades`: stretches behind all strips."""
        width, by_step = ends[1] - ends[0] or 1.0, title == "step"
        if len(self._rows) == 1:
            self._rows = [(self._rows[0][0], _ALONE_PX, self._rows[0][2])]
        drawn = top = sum(_TITLE_PX + pixels + _GAP_PX for _, pixels, _ in self._rows)
        behind = {"yref": "paper", "y0": 0, "y1": 1, "fillcolor": "rgba(128,128,128,0.16)", "line": {"width": 0}, "layer": "below"}
        layout: Figure = {
            "xaxis": {
                "title": {"text": title}, "anchor": "y" if len(self._rows) == 1 else f"y{len(self._rows)}",
                "range": [ends[0], ends[0] + width], "gridcolor": _GRID, "zeroline": False,
                "hoverformat": ",.0f" if by_step else ",.2f", "tickformat": ",d" if by_step and width >= 5 else "",
                "showspikes": True, "spikemode": "across", "spikethickness": 1, "spikedash": "dot",
            },
            "annotations": [],
            "shapes": [*self._shapes, *({"type": "rect", "xref": "x", "x0": low, "x1": high, **behind} for low, high in shades)],
            "hovermode": "x", "hoversubplots": "axis", "showlegend": False, "uirevision": title,
            "margin": {"l": 52, "r": 12, "t": 0, "b": _FOOT_PX}, "height": drawn + _FOOT_PX,
            "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        }  # fmt: skip
        for number, (row_title, pixels, axis) in enumerate(self._rows, 1):
            high, low = top - _TITLE_PX, top - _TITLE_PX - pixels
            frame = {"anchor": "x", "gridcolor": _GRID, "zeroline": False, "nticks": 4, **axis}
            layout["yaxis" if number == 1 else f"yaxis{number}"] = {"domain": [max(0.0, low / drawn), high / drawn], **frame}
            place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": high / drawn, "yanchor": "bottom"}
            layout["annotations"].append({**place, "text": row_title, "showarrow": False, "font": {"size": 12}})
            top = low - _GAP_PX
        return {"data": self.traces, "layout": layout}
