"""Telemetry over the run in slices of equal length: what a chart draws, small enough to stand in a report."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.capture.telemetry.readings import MOST
from gpudiag.model.telemetry import CLOCK_EVENTS, TelemetryStrip

SLICES = 120
"""Slices of the run: a chart of a page's width has some pixels for each."""

COLUMNS = ("sm_clock_mhz", "power_w", "temperature_c", "gpu_util_pct", "mem_used_bytes", "cpu_util_pct", "system_cpu_util_pct", "rss_bytes")
_REASONS = "clock_event_reasons"

Times = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]
Slices = tuple[float | None, ...]
Holds = Callable[[Times], Values]
"""How long each sample of a column may hold, in ns, from their times."""


def strip(telemetry: pl.DataFrame, analysed: intervals.Spans, every: intervals.Spans, holds: Holds) -> TelemetryStrip | None:
    """Return the samples of the run in slices, None where they span no time. `analysed`, `every`: Unix times of these steps."""
    times = telemetry["t_ns"].drop_nulls().to_numpy()
    if times.size < 2:
        return None
    begin, end = _ends(times, every)
    if end <= begin:
        return None
    columns = {name: means for name in COLUMNS if (means := _means(*_known(telemetry, name), (begin, end), holds))}
    spans = np.clip(analysed, begin, end) - begin
    return TelemetryStrip(
        span_ns=end - begin,
        columns=columns,
        lowered=_lowered(*_known(telemetry, _REASONS), (begin, end), holds),
        analysed_ns=tuple((int(start), int(stop)) for start, stop in spans.tolist() if stop > start),
    )


def _ends(times: Times, every: intervals.Spans) -> tuple[int, int]:
    """Return begin and end: those of the steps, where samples fall into them, else of the samples."""
    first, last = int(times.min()), int(times.max())
    if not len(every):
        return first, last
    begin, end = int(every[:, 0].min()), int(every[:, 1].max())
    return (begin, end) if first < end and last > begin else (first, last)


def _known(telemetry: pl.DataFrame, name: str) -> tuple[Times, Values]:
    """Return (time, value) of each sample of a column that is there and can be, in order of time."""
    if name not in telemetry.columns:
        return np.empty(0, np.int64), np.empty(0)
    known = telemetry.select("t_ns", value=pl.col(name).cast(pl.Float64)).drop_nulls().sort("t_ns")
    known = known.filter(pl.col("value").is_finite() & pl.col("value").is_between(0, MOST.get(name, float("inf"))))
    return known["t_ns"].to_numpy(), known["value"].to_numpy()


def _means(times: Times, values: Values, ends: tuple[int, int], holds: Holds) -> Slices:
    """Return the mean of each slice over the time for which a sample holds in it; None where none does, () where none ever does."""
    if not times.size:
        return ()
    following = np.append(times[1:], np.iinfo(np.int64).max).astype(np.float64)
    begins = (times - ends[0]).astype(np.float64)
    lasting = np.minimum(following - times, holds(times))
    marks = np.linspace(0, ends[1] - ends[0], SLICES + 1)
    sums, weights = (_within(marks, begins, lasting, worth) for worth in (values, np.ones_like(values)))
    means = tuple(float(f"{total / weight:.4g}") if weight > 0 else None for total, weight in zip(sums, weights, strict=True))
    return means if any(mean is not None for mean in means) else ()


def _within(marks: Values, begins: Values, lasting: Values, worth: Values) -> Values:
    """Return the integral over each slice of what samples are worth while they hold."""
    knots = np.stack((begins, begins + lasting), axis=1).ravel()
    grown = np.stack((np.zeros_like(worth), worth * lasting), axis=1).ravel().cumsum()
    integral: Values = np.diff(np.interp(marks, knots, grown))
    return integral


def _lowered(times: Times, values: Values, ends: tuple[int, int], holds: Holds) -> dict[str, Slices]:
    """Return, for each reason that lowered the clocks, the share of each slice in which it held."""
    masks = values.astype(np.int64)
    found = {name: (masks & bit) != 0 for bit, (name, lowers) in CLOCK_EVENTS.items() if lowers}
    return {name: _means(times, held.astype(np.float64), ends, holds) for name, held in found.items() if held.any()}
