"""Energy of the device per step, from its energy counter or, where it has none, from its power."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.model.bundle import TelemetryInfo
from gpudiag.model.telemetry import Energy

SETTLED_AFTER = 2
"""The first steps of a run allocate and tune: they are no yardstick."""

MOST_UNCERTAIN = 0.2
"""Above this share of uncertainty no figure is given: the counter moves too seldom for so short a time."""

NO_RAPL = "the energy of CPUs is not read (RAPL needs root)"

_Numbers = npt.NDArray[np.float64]


class _Curve(NamedTuple):
    """Joules since some moment over Unix time, and how long the device needs to move it."""

    t_ns: npt.NDArray[np.int64]
    joules: _Numbers
    resolution_ns: float
    provenance: Literal["counter", "power"]

    def at(self, moments: npt.NDArray[np.int64]) -> _Numbers:
        begin = int(self.t_ns[0])  # float64 holds Unix time in steps of 256 ns only
        return np.interp((moments - begin).astype(np.float64), (self.t_ns - begin).astype(np.float64), self.joules)


def energy(info: TelemetryInfo | None, telemetry: pl.DataFrame, records: pl.DataFrame, analysed: pl.DataFrame) -> Energy | None:
    """Return the energy of the unprofiled steps, where they are too short of the analysed ones; None: nothing was sampled.

    `records`: table step_records; `analysed`: start_unix_ns, wall_ns of the analysed steps, empty where their Unix time is not known.
    """
    if info is None and telemetry.is_empty():
        return None
    curve = _counter(telemetry) or _power(telemetry)
    if curve is None:
        return Energy(reason=_why(info))
    note = "" if info is None else _shared(info)
    records, analysed = (frame.drop_nulls(["start_unix_ns", "wall_ns"]) for frame in (records, analysed))
    plain = records.filter((pl.col("window") == "plain") & (pl.col("step") >= SETTLED_AFTER))
    found = _of(curve, plain, "unprofiled steps") or _of(curve, analysed.sort("start_unix_ns"), "analysed steps")
    if found is None:
        return Energy(reason=f"the steps with samples are too short: energy is known every {curve.resolution_ns / 1e6:.0f} ms only")
    return Energy(**found, note=note)  # type: ignore[arg-type]  # the fields that _of names


def _why(info: TelemetryInfo | None) -> str:
    if info is not None and info.source == "psutil":
        told = info.missing.get("power_w", "")
        return NO_RAPL if not told or "no CUDA device" in told else told
    told = "" if info is None else info.missing.get("power_w", "")
    return f"the device does not tell its power ({told})" if told else "no sample holds energy or power"


def _shared(info: TelemetryInfo) -> str:
    note = info.notes.get("energy_mj", "")
    return note if "whole board" in note else ""


def _known(telemetry: pl.DataFrame, column: str) -> pl.DataFrame:
    return telemetry.select("t_ns", column).drop_nulls().sort("t_ns").unique("t_ns", keep="first", maintain_order=True)


def _counter(telemetry: pl.DataFrame) -> _Curve | None:
    """Return the energy counter (mJ since the driver was loaded); None where it is not there, never moves, or went back."""
    known = _known(telemetry, "energy_mj")
    t_ns, joules = known["t_ns"].to_numpy(), known["energy_mj"].to_numpy() / 1e3
    moved = np.flatnonzero(np.diff(joules) != 0)
    if moved.size < 2 or bool((np.diff(joules) < 0).any()):
        return None
    return _Curve(t_ns, joules, float(np.median(np.diff(t_ns[moved + 1]))), "counter")


def _power(telemetry: pl.DataFrame) -> _Curve | None:
    """Return the integral of the power over time: trapezoids between samples."""
    known = _known(telemetry, "power_w").filter(pl.col("power_w").is_finite())
    if known.height < 3:
        return None
    t_ns, watts = known["t_ns"].to_numpy(), known["power_w"].to_numpy()
    gaps = np.diff(t_ns)
    pieces = gaps / 1e9 * (watts[1:] + watts[:-1]) / 2
    return _Curve(t_ns, np.concatenate(([0.0], np.cumsum(pieces))), float(np.median(gaps)), "power")


def _of(curve: _Curve, steps: pl.DataFrame, of: str) -> dict[str, object] | None:
    """Return the figures of those `steps` that the curve covers; None where they are too short for it."""
    starts = steps["start_unix_ns"].to_numpy().astype(np.int64)
    ends = starts + steps["wall_ns"].to_numpy().astype(np.int64)
    inside = (starts >= curve.t_ns[0]) & (ends <= curve.t_ns[-1]) & (ends > starts)
    covered = int(inside.sum())
    duration = int((ends - starts)[inside].sum())
    if not covered or not duration:
        return None
    uncertain = _runs(inside, starts, ends) * curve.resolution_ns / duration
    if uncertain > MOST_UNCERTAIN:
        return None
    joules = float((curve.at(ends[inside]) - curve.at(starts[inside])).sum())
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


_TOUCHING_NS = 5_000_000
"""Steps follow one another where less than this lies between them: Unix time and the steps' own clock are read one after the other."""


def _runs(inside: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> int:
    """Return how many runs of consecutive steps there are: each has two ends at which the curve must be guessed."""
    first, last = starts[inside], ends[inside]
    return 1 + int((first[1:] - last[:-1] > _TOUCHING_NS).sum())
