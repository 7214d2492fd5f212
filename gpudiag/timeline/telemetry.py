"""What the samples of telemetry say of the steps, and the run in slices for a chart. A sample holds until the next one, not across a
hole."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Floats, Ints
from gpudiag.attribution import intervals
from gpudiag.capture.telemetry.readings import MAX_PLAUSIBLE
from gpudiag.model import trace
from gpudiag.model.bundle import TelemetryInfo
from gpudiag.model.hardware import CLOCK_EVENTS, ClockEvent, ColumnRange, Telemetry, TelemetryStrip

SLICES = 120
"""Slices of the run: a chart of a page's width has some pixels for each."""

STRIP_COLUMNS = (
    "sm_clock_mhz",
    "power_w",
    "temperature_c",
    "gpu_util_pct",
    "mem_used_bytes",
    "cpu_util_pct",
    "system_cpu_util_pct",
    "rss_bytes",
)
_REASONS = "clock_event_reasons"

Slices = tuple[float | None, ...]


def build_strip(telemetry: pl.DataFrame, analysed: intervals.Spans, every: intervals.Spans) -> TelemetryStrip | None:
    """Return the samples of the run in slices, None where they span no time. `analysed`, `every`: Unix times of these steps."""
    times = telemetry["t_ns"].drop_nulls().to_numpy()
    if times.size < 2:
        return None
    # From begin to end of the steps, where samples fall into them, else of the samples
    first, last = int(times.min()), int(times.max())
    begin, end = (int(every[:, 0].min()), int(every[:, 1].max())) if len(every) else (first, last)
    if not (first < end and last > begin):
        begin, end = first, last
    if end <= begin:
        return None
    columns = {name: means for name in STRIP_COLUMNS if (means := _measure_means(*_read_samples(telemetry, name), (begin, end)))}
    # For each reason that lowered the clocks the share of each slice in which it held
    times, reasons = _read_samples(telemetry, _REASONS)
    masks = {name: (reasons.astype(np.int64) & bit) != 0 for bit, (name, lowers) in CLOCK_EVENTS.items() if lowers}
    lowered = {name: _measure_means(times, held.astype(np.float64), (begin, end)) for name, held in masks.items() if held.any()}
    spans = np.clip(analysed, begin, end) - begin
    return TelemetryStrip(
        span_ns=end - begin,
        columns=columns,
        lowered=lowered,
        analysed_ns=tuple((int(start), int(stop)) for start, stop in spans.tolist() if stop > start),
    )


def _read_samples(telemetry: pl.DataFrame, name: str) -> tuple[Ints, Floats]:
    if name not in telemetry.columns:
        return np.empty(0, np.int64), np.empty(0)
    known = telemetry.select("t_ns", value=pl.col(name).cast(pl.Float64)).drop_nulls().sort("t_ns")
    known = known.filter(pl.col("value").is_finite() & pl.col("value").is_between(0, MAX_PLAUSIBLE.get(name, float("inf"))))
    return known["t_ns"].to_numpy(), known["value"].to_numpy()


def _measure_means(times: Ints, values: Floats, ends: tuple[int, int]) -> Slices:
    """Return the mean of each slice over the time for which a sample holds in it; None where none does, () where none ever does."""
    if not times.size:
        return ()
    following = np.append(times[1:], np.iinfo(np.int64).max).astype(np.float64)
    begins = (times - ends[0]).astype(np.float64)
    lasting = np.minimum(following - times, estimate_hold_ns(times))
    marks = np.linspace(0, ends[1] - ends[0], SLICES + 1)
    knots = np.stack((begins, begins + lasting), axis=1).ravel()
    # The integrals over each slice of what samples are worth while they hold, and of the time for which they hold
    grown = (np.stack((np.zeros_like(worth), worth * lasting), axis=1).ravel().cumsum() for worth in (values, np.ones_like(values)))
    sums, weights = (np.diff(np.interp(marks, knots, integral)) for integral in grown)
    means = tuple(float(f"{total / weight:.4g}") if weight > 0 else None for total, weight in zip(sums, weights, strict=True))
    return means if any(mean is not None for mean in means) else ()


LEAST_SAMPLES = 10
"""Samples in the analysed steps from which those are judged alone; they are half a second at 20 Hz."""

GROWTH_FROM_S = 60.0
"""A process that is younger still loads and caches: how its memory grows says nothing."""

GROWTH_SAMPLES = 20

_COUNTERS = {"nvlink_rx_bytes": "nvlink_rx_bytes_per_s", "nvlink_tx_bytes": "nvlink_tx_bytes_per_s"}
_SINCE_LOADED = {"ecc_uncorrected"}
_LEFT_OUT = {"row", "t_ns", "energy_mj", "clock_event_reasons", *_COUNTERS}
_UNITS = {column.name: column.unit for column in trace.TABLES["telemetry"]}

HOLDS_INTERVALS = 4
"""A sample holds for this many intervals of its column: one that came late is no hole, a driver that stopped answering is."""

LONE_HOLDS_NS = 10 * 10**9
"""A sample without another one to tell the interval holds as long as the slowest column's."""

_SAME_BOUNDS = {
    "max_sm_clock_mhz": "sm_clock_mhz", "max_mem_clock_mhz": "mem_clock_mhz", "power_limit_w": "power_w",
    "max_pcie_link_gen": "pcie_link_gen", "max_pcie_link_width": "pcie_link_width", "memory_bytes": "mem_used_bytes",
    "slowdown_temperature_c": "temperature_c", "host_memory_bytes": "rss_bytes", "max_cpu_freq_mhz": "cpu_freq_mhz",
}  # fmt: skip
_MOST_LIMITS = {name: MAX_PLAUSIBLE[column] for name, column in _SAME_BOUNDS.items()} | {"cpus": 1e5}


class HeldSamples(NamedTuple):
    """Samples of one column with the time in ns that each of them holds within the steps (> 0)."""

    values: Floats
    weights: Floats
    covered_share: float = 0.0
    """Part of the steps' time for which any holds."""


def summarise_telemetry(
    info: TelemetryInfo | None, telemetry: pl.DataFrame, analysed: intervals.Spans, every: intervals.Spans
) -> Telemetry | None:
    """Return what was sampled during the steps; None where nothing was. `analysed`, `every`: Unix times of the analysed, of all steps."""
    if telemetry.is_empty():
        return None if info is None else _build_summary(info, 0, "all steps")
    times = telemetry["t_ns"].to_numpy()
    within = int(sum(((times >= start) & (times < end)).sum() for start, end in analysed.tolist()))
    over: Literal["analysed steps", "all steps"] = "analysed steps" if within >= LEAST_SAMPLES or not len(every) else "all steps"
    spans = analysed if over == "analysed steps" else every
    reasons = find_held_samples(telemetry, "clock_event_reasons", spans)
    events, throttled = _sum_clock_events(reasons)
    # Counters of bytes as their increase per second until the next sample that has them; null where they went back
    frame = numbered = telemetry.with_row_index("row")
    for name, rate_name in _COUNTERS.items():
        known = numbered.select("row", "t_ns", name).drop_nulls().sort("t_ns")
        rate = pl.col(name).diff(-1).neg() * 1e9 / pl.col("t_ns").diff(-1).neg()
        rates = known.select("row", rate.alias(rate_name)).filter(pl.col(rate_name) >= 0)
        frame = frame.join(rates, on="row", how="left", maintain_order="left")
    # The ranges of the columns that have samples in the steps
    found = {}
    for name in (name for name in frame.columns if name not in _LEFT_OUT):
        samples = find_held_samples(frame, name, spans)
        values, weights = samples.values, samples.weights
        if not values.size:
            continue
        if name in _SINCE_LOADED:  # a counter that began long before the run: what it held at the beginning is not of the run
            values = values - float(telemetry.select("t_ns", name).drop_nulls()[name].min() or 0)  # type: ignore[arg-type]
        order = np.argsort(values, kind="stable")
        reached = np.cumsum(weights[order])
        median = float(values[order][int(np.searchsorted(reached, reached[-1] / 2))])  # weighted by time
        figures = float(values.min()), median, float(values.max())
        found[name] = ColumnRange(*figures, values.size, _UNITS.get(name, "B/s"), samples.covered_share)
    return _build_summary(
        info,
        telemetry.height,
        over,
        columns=found,
        clock_events=events,
        throttle_share=throttled,
        throttle_covered_share=reasons.covered_share if throttled is not None else 1.0,
        rss_growth_share=_measure_growth(telemetry, every),
        strip=build_strip(telemetry, analysed, every),
    )


def _build_summary(info: TelemetryInfo | None, samples: int, over: Literal["analysed steps", "all steps"], **found: object) -> Telemetry:
    told = info or TelemetryInfo(source="unknown", interval_ns=0, samples=samples)
    return Telemetry(
        source=told.source,
        interval_ns=told.interval_ns,
        samples=samples,
        over=over,
        limits=find_plausible_limits(told),
        missing={column: why for column, why in told.missing.items() if column in _UNITS},
        notes={column: note for column, note in told.notes.items() if column in _UNITS},
        notices=told.notices,
        **found,  # type: ignore[arg-type]
    )


def find_plausible_limits(info: TelemetryInfo) -> dict[str, float]:
    """Return the limits that are known by name and can be."""
    return {name: value for name, value in info.limits.items() if 0 <= value <= _MOST_LIMITS.get(name, -1.0)}


def estimate_hold_ns(times: Ints) -> Floats:
    """Return how long each sample may hold: some intervals of its column, or as many of the one before it where asking went slower.

    `times`: of the samples, ascending. A hole before a sample is no interval: what it adds is bounded.
    """
    gaps = np.diff(times).astype(np.float64)
    if not gaps.size:
        return np.full(times.size, float(LONE_HOLDS_NS))
    usual = HOLDS_INTERVALS * float(np.median(gaps))
    before = np.concatenate(([0.0], np.minimum(HOLDS_INTERVALS * gaps, LONE_HOLDS_NS)))
    return np.maximum(usual, before)


def find_held_samples(telemetry: pl.DataFrame, column: str, spans: intervals.Spans) -> HeldSamples:
    """Return the samples of `column` that hold within `spans` (Unix ns, half-open)."""
    times, values = _read_samples(telemetry, column)
    if not times.size or not len(spans):
        return HeldSamples(values[:0], values[:0])
    following = np.append(times[1:], max(int(times[-1]), int(spans[:, 1].max())))
    ends = times + np.minimum(following - times, estimate_hold_ns(times)).astype(np.int64)
    weights = np.asarray(intervals.measure_covered(spans, times, ends), dtype=np.float64)
    whole = float((spans[:, 1] - spans[:, 0]).sum())
    return HeldSamples(values[weights > 0], weights[weights > 0], float(weights.sum()) / whole if whole else 0.0)


def _sum_clock_events(reasons: HeldSamples) -> tuple[tuple[ClockEvent, ...], float | None]:
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


def _measure_growth(telemetry: pl.DataFrame, every: intervals.Spans) -> float | None:
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
