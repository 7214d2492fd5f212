"""What the samples of telemetry say of the steps: a sample holds until the next one of its column, but not across a hole."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.capture.telemetry.readings import MOST
from gpudiag.model import tables
from gpudiag.model.bundle import TelemetryInfo
from gpudiag.model.telemetry import CLOCK_EVENTS, ClockEvent, ColumnRange, Telemetry
from gpudiag.timeline.strip import strip

ENOUGH = 10
"""Samples in the analysed steps from which those are judged alone; they are half a second at 20 Hz."""

GROWTH_FROM_S = 60.0
"""A process that is younger still loads and caches: how its memory grows says nothing."""

GROWTH_SAMPLES = 20

_COUNTERS = {"nvlink_rx_bytes": "nvlink_rx_bytes_per_s", "nvlink_tx_bytes": "nvlink_tx_bytes_per_s"}
_SINCE_LOADED = {"ecc_uncorrected"}
_LEFT_OUT = {"t_ns", "energy_mj", "clock_event_reasons", *_COUNTERS}
_UNITS = {column.name: column.unit for column in tables.TABLES["telemetry"]}


HOLDS_INTERVALS = 4
"""A sample holds for this many intervals of its column: one that came late is no hole, a driver that stopped answering is."""

LONE_HOLDS_NS = 10 * 10**9
"""A sample without another one to tell the interval holds as long as the slowest column's."""

_SAME_BOUNDS = {
    "max_sm_clock_mhz": "sm_clock_mhz", "max_mem_clock_mhz": "mem_clock_mhz", "power_limit_w": "power_w",
    "max_pcie_link_gen": "pcie_link_gen", "max_pcie_link_width": "pcie_link_width", "memory_bytes": "mem_used_bytes",
    "slowdown_temperature_c": "temperature_c", "host_memory_bytes": "rss_bytes", "max_cpu_freq_mhz": "cpu_freq_mhz",
}  # fmt: skip
_MOST_LIMITS = {name: MOST[column] for name, column in _SAME_BOUNDS.items()} | {"cpus": 1e5}


class Held(NamedTuple):
    """Samples of one column with the time in ns that each of them holds within the steps (> 0)."""

    values: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    covered_share: float = 0.0
    """Part of the steps' time for which any holds."""


def summary(info: TelemetryInfo | None, telemetry: pl.DataFrame, analysed: intervals.Spans, every: intervals.Spans) -> Telemetry | None:
    """Return what was sampled during the steps; None where nothing was. `analysed`, `every`: Unix times of the analysed, of all steps."""
    if telemetry.is_empty():
        return None if info is None else _frame(info, 0, "all steps")
    times = telemetry["t_ns"].to_numpy()
    within = int(sum(((times >= start) & (times < end)).sum() for start, end in analysed.tolist()))
    over: Literal["analysed steps", "all steps"] = "analysed steps" if within >= ENOUGH or not len(every) else "all steps"
    spans = analysed if over == "analysed steps" else every
    reasons = held(telemetry, "clock_event_reasons", spans)
    events, throttled = _clock_events(reasons)
    return _frame(
        info,
        telemetry.height,
        over,
        columns=_ranges(telemetry, spans),
        clock_events=events,
        throttle_share=throttled,
        throttle_covered_share=reasons.covered_share if throttled is not None else 1.0,
        rss_growth_share=_growth(telemetry, every),
        strip=strip(telemetry, analysed, every, holds_ns),
    )


def _frame(info: TelemetryInfo | None, samples: int, over: Literal["analysed steps", "all steps"], **found: object) -> Telemetry:
    """Return the summary with what the manifest says of the sampling."""
    told = info or TelemetryInfo(source="unknown", interval_ns=0, samples=samples)
    return Telemetry(
        source=told.source,
        interval_ns=told.interval_ns,
        samples=samples,
        over=over,
        limits=plausible_limits(told),
        missing={column: why for column, why in told.missing.items() if column in _UNITS},
        notes={column: note for column, note in told.notes.items() if column in _UNITS},
        **found,  # type: ignore[arg-type]
    )


def plausible_limits(info: TelemetryInfo) -> dict[str, float]:
    """Return the limits that are known by name and can be."""
    return {name: value for name, value in info.limits.items() if 0 <= value <= _MOST_LIMITS.get(name, -1.0)}


def holds_ns(times: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return how long each sample may hold: some intervals of its column, or as many of the one before it where asking went slower.

    `times`: of the samples, ascending. A hole before a sample is no interval: what it adds is bounded.
    """
    gaps = np.diff(times).astype(np.float64)
    if not gaps.size:
        return np.full(times.size, float(LONE_HOLDS_NS))
    usual = HOLDS_INTERVALS * float(np.median(gaps))
    before = np.concatenate(([0.0], np.minimum(HOLDS_INTERVALS * gaps, LONE_HOLDS_NS)))
    return np.maximum(usual, before)


def held(telemetry: pl.DataFrame, column: str, spans: intervals.Spans) -> Held:
    """Return the samples of `column` that hold within `spans` (Unix ns, half-open)."""
    known = telemetry.select("t_ns", pl.col(column).cast(pl.Float64)).drop_nulls().sort("t_ns")
    known = known.filter(pl.col(column).is_between(0, MOST.get(column, float("inf"))) & pl.col(column).is_finite())
    times, values = known["t_ns"].to_numpy(), known[column].to_numpy()
    if not times.size or not len(spans):
        return Held(values[:0], values[:0])
    following = np.append(times[1:], max(int(times[-1]), int(spans[:, 1].max())))
    ends = times + np.minimum(following - times, holds_ns(times)).astype(np.int64)
    weights = np.asarray(intervals.covered(spans, times, ends), dtype=np.float64)
    whole = float((spans[:, 1] - spans[:, 0]).sum())
    return Held(values[weights > 0], weights[weights > 0], float(weights.sum()) / whole if whole else 0.0)


def _ranges(telemetry: pl.DataFrame, spans: intervals.Spans) -> dict[str, ColumnRange]:
    """Return the ranges of the columns that have samples in the steps; counters of bytes as rates."""
    frame = telemetry.with_columns(_rate(telemetry, name).alias(rate) for name, rate in _COUNTERS.items())
    found = {}
    for name in (name for name in frame.columns if name not in _LEFT_OUT):
        samples = held(frame, name, spans)
        if samples.values.size:
            values = samples.values
            values = values - _before(telemetry, name) if name in _SINCE_LOADED else values
            unit = _UNITS.get(name, "B/s")
            figures = float(values.min()), _median(samples._replace(values=values)), float(values.max())
            found[name] = ColumnRange(*figures, values.size, unit, samples.covered_share)
    return found


def _before(telemetry: pl.DataFrame, column: str) -> float:
    """Return the lowest value of a counter that began long before the run: what it held at the beginning is not of the run."""
    known = telemetry.select("t_ns", column).drop_nulls().sort("t_ns")[column]
    return float(known.min() or 0)  # type: ignore[arg-type]  # a column of integers


def _rate(telemetry: pl.DataFrame, column: str) -> pl.Series:
    """Return the increase of a counter per second until the next sample that has it; null where it went back."""
    rows = telemetry.with_row_index("row").select("row", "t_ns", column).drop_nulls().sort("t_ns")
    rate = pl.col(column).diff(-1).neg() * 1e9 / pl.col("t_ns").diff(-1).neg()
    rates = rows.select("row", rate.alias("rate")).filter(pl.col("rate") >= 0)
    return telemetry.with_row_index("row").select("row").join(rates, on="row", how="left", maintain_order="left")["rate"]


def _median(samples: Held) -> float:
    """Return the median weighted by time."""
    order = np.argsort(samples.values, kind="stable")
    reached = np.cumsum(samples.weights[order])
    return float(samples.values[order][int(np.searchsorted(reached, reached[-1] / 2))])


def _clock_events(reasons: Held) -> tuple[tuple[ClockEvent, ...], float | None]:
    """Return the reasons for the clocks, longest first, and the share of the time in which any lowered them; None: not sampled."""
    if not reasons.values.size:
        return (), None
    masks, total = reasons.values.astype(np.int64), reasons.weights.sum()
    events = [
        ClockEvent(name, float(reasons.weights[(masks & bit) != 0].sum() / total), lowers) for bit, (name, lowers) in CLOCK_EVENTS.items()
    ]
    lowering = sum(bit for bit, (_, lowers) in CLOCK_EVENTS.items() if lowers)
    throttled = float(reasons.weights[(masks & lowering) != 0].sum() / total)
    return tuple(sorted((event for event in events if event.share > 0), key=lambda event: -event.share)), throttled


def _growth(telemetry: pl.DataFrame, every: intervals.Spans) -> float | None:
    """Return how much the resident memory grew from the second to the last quarter of the steps; None where they are too short."""
    if not len(every) or (length := int(every[:, 1].max() - every[:, 0].min())) < GROWTH_FROM_S * 1e9:
        return None
    begin = int(every[:, 0].min())
    known = telemetry.select("t_ns", "rss_bytes").drop_nulls().with_columns(quarter=(pl.col("t_ns") - begin) * 4 // length)
    before, after = (known.filter(pl.col("quarter") == quarter)["rss_bytes"] for quarter in (1, 3))
    if min(len(before), len(after)) < GROWTH_SAMPLES:
        return None
    first, last = before.median(), after.median()
    return float(last) / float(first) - 1 if first else None  # type: ignore[arg-type]
