"""Intervals of experiments drawn: bars of ASCII characters, and a plain plotly figure."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from gpudiag.model.experiment import Outcome, Pair, compute_pair_log_ratio
from gpudiag.report.console import clean
from gpudiag.report.experiment import verdicts
from gpudiag.report.experiment.verdicts import choose_tone

LEAST_CELLS, MOST_CELLS = 16, 48
_NARROWEST_BAR_AXIS = 1.02
"""The axis shows 2 % to both sides of 1 at least: smaller effects should look small."""
_WIDEST_BAR_AXIS = 4.0
"""A first interval can reach far; what lies beyond is cut, and the bar ends in < or >."""


class Axis:
    """A logarithmic axis of `cells` characters that holds the intervals of `outcomes` and 1."""

    def __init__(self, outcomes: Sequence[Outcome], cells: int) -> None:
        ends = [
            end
            for found in outcomes
            if verdicts.format_throughput(found)
            for end in (found.ratio, *(found.interval or ()))
            if end and end > 0
        ]
        low = max(min([*ends, 1 / _NARROWEST_BAR_AXIS]), 1 / _WIDEST_BAR_AXIS)
        high = min(max([*ends, _NARROWEST_BAR_AXIS]), _WIDEST_BAR_AXIS)
        self.cells = max(cells, LEAST_CELLS)
        self._low, self._span = math.log(low), math.log(high) - math.log(low)

    def bar(self, outcome: Outcome) -> str:
        """Return a row: '|' at x1, '(==o==)' for an interval with its middle; '' where there is no ratio."""
        if not verdicts.format_throughput(outcome) or outcome.ratio is None:
            return ""
        ends = outcome.interval or (outcome.ratio, outcome.ratio)
        places = [math.log(value) - self._low if value > 0 else -math.inf for value in (*ends, outcome.ratio, 1.0)]
        # What lies beyond the axis stands in the cell of its nearer end
        first, last, middle, one = (round(min(max(place / self._span, 0.0), 1.0) * (self.cells - 1)) for place in places)
        beyond = [not -1e-9 <= place <= self._span + 1e-9 for place in places]
        row = [" "] * self.cells
        for cell in range(first, last + 1):
            row[cell] = "="
        row[one] = "|"
        if last > first:
            row[first] = "<" if beyond[0] else "("
            row[last] = ">" if beyond[1] else ")"
        row[middle] = "o"
        return "".join(row)


Figure = dict[str, Any]

# Okabe and Ito's colour-blind-safe set, 3:1 against white and against near-black; each verdict has a shape too.
_COLOURS = {"good": "#1a9270", "bad": "#bb6a97", "slower": "#c77700", "weak": "#808080"}
_SYMBOLS = {"good": "triangle-right", "bad": "x", "slower": "triangle-left", "weak": "circle"}
_CALLED = {"good": "proved faster", "bad": "parity differs", "slower": "slower", "weak": "nothing proved"}
_LINE = "#7a7a7a"
_AT_ONE = {"type": "line", "xref": "x", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "line": {"color": _LINE, "width": 1.5}}
_ROW, _FRAME = 34, 150
_LEAST = math.log(1.02)
"""The axis shows 2 % to both sides of 1 at least."""
_BEYOND = math.log(1.5)
_FAR_BEYOND = math.log(3)
"""Ends of intervals and promises are cut if more than 1.5 times beyond the largest effect, or than the effect itself, 3 at most."""
_WIDEST = math.log(1000)
"""The axis ends at a thousandfold: no change of a training comes near, and a file of unknown origin may claim any ratio."""
_STEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
_LONGEST = 60
MOST_ROWS = 60


def draw_intervals(outcomes: Sequence[Outcome]) -> Figure | None:
    """Return the chart: each change's throughput ratio with its interval, its pairs, and what was promised; None where none has a ratio."""
    drawn = [found for group in verdicts.group_outcomes(outcomes)[:2] for found in group if found.ratio and found.ratio > 0][:MOST_ROWS]
    if not drawn:
        return None
    places = {id(found): len(drawn) - index for index, found in enumerate(drawn)}  # the first row on top
    data = []
    if points := [(ratio, places[id(found)] - 0.28) for found in drawn for ratio in compute_pair_ratios(found.measured)]:
        data.append(_draw_markers("each process pair", points, {"color": _LINE, "size": 5, "opacity": 0.6}))
    kinds = ((kind, [found for found in drawn if choose_tone(found) == kind]) for kind in _COLOURS)
    data += [_draw_ratios_of_kind(kind, chosen, places) for kind, chosen in kinds if chosen]
    # Where each change would stand if it gave all that its finding promised: 1 / (1 - share)
    promised = [(found.ceiling_share, found) for found in drawn if found.ceiling_share is not None and found.ceiling_share < 1]
    if points := [(1 / (1 - share), float(places[id(found)])) for share, found in promised]:
        marker = {"color": _LINE, "size": 13, "symbol": "line-ns-open", "line": {"width": 2}}
        data.append(_draw_markers("upper bound", points, marker))
    return {"data": data, "layout": _build_layout(drawn, places)}


def compute_pair_ratios(pairs: Sequence[Pair]) -> list[float]:
    """Return the ratio of each pair, within a thousandfold: the median of its blocks, as in the verdict. Without steps it has none."""
    ratios = (ratio for pair in pairs if (ratio := compute_pair_log_ratio(pair)) is not None)
    return [math.exp(min(max(ratio, -_WIDEST), _WIDEST)) for ratio in ratios]


def _draw_ratios_of_kind(kind: str, chosen: Sequence[Outcome], places: dict[int, int]) -> Figure:
    ratios = [found.ratio or 1.0 for found in chosen]
    ends = [found.interval or (ratio, ratio) for found, ratio in zip(chosen, ratios, strict=True)]
    hovers = []
    for found in chosen:  # plotly reads a subset of HTML, so names are escaped
        figures = (verdicts.format_outcome_verdict(found), verdicts.format_throughput(found), verdicts.format_basis(found))
        lines = [html.escape(clean(text, 120)) for text in (*figures, verdicts.format_parity(found)) if text]
        hovers.append("<br>".join([f"<b>{html.escape(clean(verdicts.name_outcome(found), _LONGEST))}</b>", *lines]))
    return {
        "type": "scatter",
        "mode": "markers",
        "name": _CALLED[kind],
        "x": ratios,
        "y": [places[id(found)] for found in chosen],
        "text": hovers,
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": _COLOURS[kind], "symbol": _SYMBOLS[kind], "size": 12},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, high - ratio) for ratio, (_, high) in zip(ratios, ends, strict=True)],
            "arrayminus": [max(0.0, ratio - low) for ratio, (low, _) in zip(ratios, ends, strict=True)],
            "color": _COLOURS[kind],
            "thickness": 2.5,
            "width": 6,
        },
    }


def _draw_markers(name: str, points: Sequence[tuple[float, float]], marker: Figure) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "hovertemplate": f"{name}: x%{{x:.3f}}<extra></extra>",
        "marker": marker,
    }


def _build_layout(drawn: Sequence[Outcome], places: dict[int, int]) -> Figure:
    # The ends of the axis: it holds all ratios, and of intervals and promises what does not make them small
    middles = [min(max(math.log(found.ratio or 1.0), -_WIDEST), _WIDEST) for found in drawn]
    largest = max(map(abs, middles))
    most = largest + max(_BEYOND, min(largest, _FAR_BEYOND))
    ends = [math.log(end) for found in drawn for end in found.interval or () if end > 0 and math.isfinite(end)]
    promises = [-math.log1p(-found.ceiling_share) for found in drawn if found.ceiling_share is not None and found.ceiling_share < 1]
    values = [*middles, *(min(max(value, -most), most) for value in (*ends, *promises)), _LEAST, -_LEAST]
    margin = 0.05 * (max(values) - min(values))
    low, high = (math.exp(min(values) - margin), math.exp(max(values) + margin))
    at = thin_ticks(choose_ticks(low, high), low, high)
    unit = drawn[0].unit
    return {
        "xaxis": {
            "type": "log",
            "title": {"text": f"{unit}/s, baseline = x1"},
            "range": [math.log10(low), math.log10(high)],
            "tickvals": at,
            "ticktext": [f"x{value:.4g}" for value in at],
            "zeroline": False,
        },
        "yaxis": {
            "range": [0.4, len(drawn) + 0.6],
            "tickvals": [places[id(found)] for found in drawn],
            "ticktext": [_name_row(found) for found in drawn],
            "zeroline": False,
            "showgrid": False,
            "automargin": True,
        },
        "shapes": [_AT_ONE],
        "hovermode": "closest",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"},
        "margin": {"l": 40, "r": 20, "t": 50, "b": 60},
        "height": _FRAME + _ROW * len(drawn),
    }


def _name_row(found: Outcome) -> str:
    """Return the name of a change as plotly shows it; it may stand there twice: screened, and measured."""
    screened = f"<br>({verdicts.SCREENED})" if found.screening else ""
    return f"{html.escape(clean(verdicts.name_outcome(found), _LONGEST))}{screened}"


def choose_ticks(low: float, high: float) -> list[float]:
    """Return round ratios between `low` and `high`, 1 among them: multiples of the smallest step that gives ten or fewer."""
    step = next((step for step in _STEPS if (high - low) / step <= 8), _STEPS[-1])
    found = {round(k * step, 6) for k in range(math.ceil(low / step), math.floor(high / step) + 1) if k > 0}
    return sorted(found | {1.0})


_MOST_TICKS = 5
"""As many labels stand beside each other on a telephone."""


def thin_ticks(ticks: Sequence[float], low: float, high: float) -> list[float]:
    """Return 1 and of `ticks` those that are far enough from each other on a logarithmic axis from `low` to `high`, from 1 outwards."""
    apart = (math.log(high) - math.log(low)) / _MOST_TICKS
    kept = [1.0]
    for tick in sorted(ticks, key=lambda tick: abs(math.log(tick))):
        if all(abs(math.log(tick) - math.log(one)) >= apart for one in kept):
            kept.append(tick)
    return sorted(kept)
