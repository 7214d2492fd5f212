"""Energy of the device per step, from its energy counter or, where it has none, from its power."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Bools, Floats, Ints
from gpudiag.capture.telemetry.readings import MAX_PLAUSIBLE
from gpudiag.model.bundle import NO_CUDA_USED, TelemetryInfo
from gpudiag.model.hardware import Energy
from gpudiag.model.notices import NoticeCode
from gpudiag.timeline.telemetry import estimate_hold_ns, find_plausible_limits

SETTLED_AFTER = 2
"""The first steps of a run allocate and tune: they are no yardstick."""

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
    return Energy(**found, note=note)  # type: ignore[arg-type]  # the fields that _of names


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
