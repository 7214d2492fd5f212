"""What the samples of telemetry say of the steps and of the run in slices for a chart, and the energy of the device per step.

A sample holds until the next one, not across a hole.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Bools, Floats, Ints
from gpudiag.attribution import intervals
from gpudiag.model import trace
from gpudiag.model.bundle import NO_CUDA_USED, TelemetryInfo
from gpudiag.model.hardware import CLOCK_EVENTS, ClockEvent, ColumnRange, Energy, Telemetry, TelemetryStrip
from gpudiag.model.notices import NoticeCode
from gpudiag.model.trace import MAX_PLAUSIBLE
from gpudiag.timeline.history import SETTLED_AFTER

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


SEVERAL = 4
"""Without samples for this many times its resolution a curve has a hole (and never within what a sample holds)."""

MOST_UNCERTAIN = 0.2
"""Above this share of uncertainty no figure is given: the counter moves too seldom for so short a time."""

NO_RAPL = "the energy of CPUs is not read (RAPL needs root)"


AVERAGED_NS = 1e9
"""Over which nvmlDeviceGetPowerUsage averages on newer boards (NVML API reference): when within it energy was spent is not told."""

MOST_WATTS = MAX_PLAUSIBLE["power_w"]
OVER_LIMIT = 2
"""Boards exceed their power limit for moments, and a sample comes late: a counter that moves this many times faster jumped."""

CONTRADICTED = 2
"""Counter and power may differ by this factor over a piece of the run: power is sampled, and may be averaged."""

PIECES = 16
"""The run is compared in so many parts: a counter that stops half way is right on average only until then."""

STILL_FOR = 20
"""A counter of a device that is powered moves at its own interval; after this many of them without moving it stands still."""

_TOUCHING_NS = 5_000_000
"""Steps follow one another where less than this lies between them: Unix time and the steps' own clock are read one after the other."""


class _Curve(NamedTuple):
    """Joules since some moment over Unix time, and how long the device needs to move it."""

    t_ns: Ints
    joules: Floats
    resolution_ns: float
    provenance: Literal["counter", "power"]

    def unknown(self, starts: Ints, ends: Ints) -> Bools:
        """Return which [start, end) need what no sample tells: power all along, a counter only at both ends."""
        holes = np.diff(self.t_ns) > np.maximum(estimate_hold_ns(self.t_ns)[:-1], SEVERAL * self.resolution_ns)
        first = np.clip(np.searchsorted(self.t_ns, starts, side="right") - 1, 0, holes.size - 1)
        last = np.clip(np.searchsorted(self.t_ns, ends, side="left") - 1, 0, holes.size - 1)
        if self.provenance == "counter":
            return np.asarray(holes[first] | holes[last])
        before = np.concatenate(([0], np.cumsum(holes)))
        return np.asarray(before[last + 1] > before[first])

    def slack_ns(self, moments: Ints) -> Floats:
        """Return how long the device needed to move the curve around each moment."""
        gaps = np.diff(self.t_ns).astype(np.float64)
        around = gaps[np.clip(np.searchsorted(self.t_ns, moments, side="right") - 1, 0, gaps.size - 1)]
        return np.asarray(np.maximum(around, self.resolution_ns), dtype=np.float64)

    def at(self, moments: Ints) -> Floats:
        begin = int(self.t_ns[0])  # float64 holds Unix time in steps of 256 ns only
        return np.interp((moments - begin).astype(np.float64), (self.t_ns - begin).astype(np.float64), self.joules)


def measure_energy(info: TelemetryInfo | None, telemetry: pl.DataFrame, records: pl.DataFrame, analysed: pl.DataFrame) -> Energy | None:
    """Return the energy of the unprofiled steps, where they are too short of the analysed ones; None: nothing was sampled.

    `records`: table step_records; `analysed`: start_unix_ns, wall_ns of the analysed steps, empty where their Unix time is not known.
    """
    if info is None and telemetry.is_empty():
        return None
    codes = () if info is None else [notice.code for notice in info.notices]
    # The integral of the power over time: trapezoids between samples
    known, power = _read_known(telemetry, "power_w").filter(pl.col("power_w").is_between(0, MOST_WATTS)), None
    if known.height > 2:
        t_ns, watts = known["t_ns"].to_numpy(), known["power_w"].to_numpy()
        gaps = np.diff(t_ns)
        joules = np.concatenate(([0.0], np.cumsum(gaps / 1e9 * (watts[1:] + watts[:-1]) / 2)))
        averaged_ns = AVERAGED_NS if NoticeCode.POWER_AVERAGED in codes else 0.0
        power = _Curve(t_ns, joules, max(float(np.median(gaps)), averaged_ns), "power")
    limit = MOST_WATTS if info is None else find_plausible_limits(info).get("power_limit_w", 0.0)
    counter = _read_counter(telemetry, OVER_LIMIT * (limit or MOST_WATTS))
    curve = power if counter is None or (power is not None and _contradicts(counter, power)) else counter
    if curve is None and telemetry["energy_mj"].count():
        return Energy(reason="the device's energy counter stands still, jumps or was read too seldom, and it does not tell its power")
    if curve is None:
        missing = "" if info is None else info.missing.get("power_w", "")
        if info is not None and info.source == "psutil":
            return Energy(reason=NO_RAPL if not missing or NO_CUDA_USED in missing else missing)
        return Energy(reason=f"the device does not tell its power ({missing})" if missing else "no sample holds energy or power")
    note = info.notes.get("energy_mj", "") if info is not None and NoticeCode.BOARD_SHARED in codes else ""
    records, analysed = (frame.drop_nulls(["start_unix_ns", "wall_ns"]) for frame in (records, analysed))
    plain = records.filter((pl.col("window") == "plain") & (pl.col("step") >= SETTLED_AFTER))
    found = _measure_steps(curve, plain, "unprofiled steps") or _measure_steps(curve, analysed.sort("start_unix_ns"), "analysed steps")
    if found is None:
        return Energy(reason=f"the steps with samples on end are too short: energy is known every {curve.resolution_ns / 1e6:.0f} ms only")
    return Energy(**found, note=note)  # type: ignore[arg-type]  # the fields that _measure_steps names


def _read_known(telemetry: pl.DataFrame, column: str) -> pl.DataFrame:
    return telemetry.select("t_ns", column).drop_nulls().sort("t_ns").unique("t_ns", keep="first", maintain_order=True)


def _read_counter(telemetry: pl.DataFrame, most_watts: float) -> _Curve | None:
    """Return the energy counter (mJ since the driver was loaded); None where it is not there, stands still, went back, or jumped."""
    known = _read_known(telemetry, "energy_mj")
    t_ns, joules = known["t_ns"].to_numpy(), known["energy_mj"].to_numpy() / 1e3
    moved = np.flatnonzero(np.diff(joules) != 0)
    if moved.size < 2 or bool((np.diff(joules) < 0).any()):
        return None
    resolution = float(np.median(np.diff(t_ns[moved + 1])))
    passed = np.diff(t_ns[np.concatenate(([0], moved + 1))]) + resolution
    still = t_ns[np.append(moved, t_ns.size - 1)] - t_ns[np.concatenate(([0], moved + 1))]  # how long samples show it at one value
    if bool((np.diff(joules)[moved] / (passed / 1e9) > most_watts).any()) or bool((still > STILL_FOR * resolution).any()):
        return None
    return _Curve(t_ns, joules, resolution, "counter")


def _contradicts(counter: _Curve, power: _Curve) -> bool:
    """Return whether the counter moves at quite another rate than the power in a part of the time that both tell."""
    begin, end = max(int(counter.t_ns[0]), int(power.t_ns[0])), min(int(counter.t_ns[-1]), int(power.t_ns[-1]))
    slack = 2 * max(counter.resolution_ns, power.resolution_ns)
    pieces = min(PIECES, int((end - begin) / (SEVERAL * slack)))
    if pieces < 1:
        return False
    moments = np.linspace(begin, end, pieces + 1).astype(np.int64)
    told = ~(counter.unknown(moments[:-1], moments[1:]) | power.unknown(moments[:-1], moments[1:]))
    one, other = np.diff(counter.at(moments))[told], np.diff(power.at(moments))[told]
    return bool(((other > 0) & ((one > CONTRADICTED * other) | (other > CONTRADICTED * one))).any())


def _measure_steps(curve: _Curve, steps: pl.DataFrame, of: str) -> dict[str, object] | None:
    """Return the figures of those `steps` that the curve covers without a hole; None where they are too short for it."""
    starts = steps["start_unix_ns"].to_numpy().astype(np.int64)
    ends = starts + steps["wall_ns"].to_numpy().astype(np.int64)
    inside = (starts >= curve.t_ns[0]) & (ends <= curve.t_ns[-1]) & (ends > starts) & ~curve.unknown(starts, ends)
    covered = int(inside.sum())
    duration = int((ends - starts)[inside].sum())
    if not covered or not duration:
        return None
    starts, ends = starts[inside], ends[inside]
    # The curve is guessed for half of what it needs to move, at both ends of each run of consecutive steps
    apart = starts[1:] - ends[:-1] > _TOUCHING_NS
    first, last = starts[np.concatenate(([True], apart))], ends[np.append(apart, True)]
    uncertain = float((curve.slack_ns(first).sum() + curve.slack_ns(last).sum()) / 2) / duration
    if uncertain > MOST_UNCERTAIN:
        return None
    joules = float((curve.at(ends) - curve.at(starts)).sum())
    samples = steps["samples"].filter(pl.Series(inside)) if "samples" in steps.columns else pl.Series([None])
    known = None if samples.null_count() or not samples.sum() else int(samples.sum())
    return {
        "joule_per_step": joules / covered,
        "joule_per_sample": None if known is None else joules / known,
        "mean_power_w": joules / (duration / 1e9),
        "steps": covered,
        "duration_ns": duration,
        "of": of,
        "provenance": curve.provenance,
        "uncertain_share": uncertain,
    }
