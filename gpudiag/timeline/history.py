"""The history of a run from the records of all its steps: pace, phases, drift, slow steps, and what the profiler cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.model.history import Drift, PhaseTimes, ProfilerCost, SlowPart, SlowStep, StepHistory

SETTLED_AFTER = 2
"""The first steps of a run are slow for other reasons (allocation, autotuning): they say nothing of its pace."""

SLOW = 1.5
"""A plain step above this many times the median is slow (heuristic: beyond what batches of varied length usually make)."""

MOST_SLOW = 5

MIN_FOR_PACE = 3
"""Fewer plain steps than this have no median worth telling."""

MIN_FOR_DRIFT = 200
"""Fewer plain steps than this are not judged: a block of a quarter would have so few that neighbours which are alike look like drift."""

BLOCKS = 6
"""Blocks of a quarter. Neighbouring steps are alike, so that blocks and not steps are the unit of the test."""

T_99 = 4.032
"""Two-sided 99 % quantile of Student's t with BLOCKS - 1 = 5 degrees of freedom: the fewest that Welch's test can have here."""

BETWEEN = 0.25
"""The second and third quarter lie between the first and the last, give or take this part of the change: else the pace wanders."""

WORTH_DRIFT = 0.03
"""A change of pace below this is not called drift: clocks and neighbours move a machine as much."""

EXPLAINS = 0.1
"""Share of a slow step's excess from which a part of it is named."""

_PHASES = ("h2d_ns", "forward_ns", "backward_ns", "optimizer_ns")
_PARTS = ("loader_wait_ns", *_PHASES)
_LABELS = ("warm", "timing", "sites", "export")


def history(records: pl.DataFrame, marks: pl.DataFrame | None = None) -> StepHistory | None:
    """Return the history of a run from its step_records and host_marks; None where no step was recorded."""
    if not records.height:
        return None
    records = records.with_columns(rest_ns=(pl.col("wall_ns") - pl.sum_horizontal(*_PARTS)).clip(lower_bound=0))
    plain = records.filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain"))
    known = plain.height >= MIN_FOR_PACE
    slow = plain.filter(pl.col("wall_ns") > SLOW * pl.col("wall_ns").median()) if known else plain.clear()
    return StepHistory(
        steps=records.height,
        profiled=records.filter(pl.col("window").is_in(["timing", "sites"])).height,
        plain=plain.height,
        wall_ns=int(records["wall_ns"].sum()),
        first_ns=next(iter(records.filter(pl.col("step") == 0)["wall_ns"]), None),
        median_ns=_median(plain["wall_ns"]) if known else None,
        p95_ns=_rounded(plain["wall_ns"].quantile(0.95, "linear")) if known else None,
        phases=_phase_times(plain) if known else None,
        padded_share=padded_share(records),
        drift=drift(plain["wall_ns"].to_numpy()),
        slow_steps=slow.height,
        slow_share=_excess_share(slow, plain) if known else None,
        slowest=tuple(_slow_step(row, plain, marks) for row in slow.sort("wall_ns", descending=True).head(MOST_SLOW).iter_rows(named=True)),
        profiler=_profiler(records, plain) if known else (),
    )


def padded_share(records: pl.DataFrame) -> float | None:
    """Return padding over positions of all batches whose padding is known; None where none is."""
    known = records.filter(pl.col("padded_elements").is_not_null() & (pl.col("batch_elements") > 0))
    return int(known["padded_elements"].sum()) / int(known["batch_elements"].sum()) if known.height else None


def drift(walls: npt.NDArray[Any]) -> Drift | None:
    """Return how the last quarter of `walls` (ns, in their order) compares with the first; None where they are too few.

    Welch's t interval on the logarithms of the block medians (Welch 1947, Biometrika 34), with the fewest degrees of freedom that it can
    have: wide enough for steps that resemble their neighbours.
    """
    if len(walls) < MIN_FOR_DRIFT or walls.min() <= 0:
        return None
    quarter = len(walls) // 4
    quarters = (walls[:quarter], walls[quarter : 2 * quarter], walls[-2 * quarter : -quarter], walls[-quarter:])
    blocks = [np.log(_block_medians(part)) for part in quarters]
    first, last = blocks[0], blocks[3]
    change = float(last.mean() - first.mean())
    error = T_99 * math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / BLOCKS)
    low, share, high = (math.expm1(min(value, 700.0)) for value in (change - error, change, change + error))
    return Drift(
        first_ns=round(float(np.median(quarters[0]))),
        last_ns=round(float(np.median(quarters[3]))),
        share=share,
        low_share=low,
        high_share=high,
        real=(low > 0 or high < 0)
        and abs(share) >= WORTH_DRIFT
        and _holds(change, [float(part.mean() - first.mean()) for part in blocks[1:3]]),
    )


def _holds(change: float, between: list[float]) -> bool:
    """Return whether the quarters in between are on the way: a run that wanders comes back."""
    return all(-BETWEEN <= part / change <= 1 + BETWEEN for part in between)


def _block_medians(walls: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.asarray([np.median(block) for block in np.array_split(walls, BLOCKS)])


def _median(values: pl.Series) -> int | None:
    return _rounded(values.median())


def _rounded(value: Any) -> int | None:
    return None if value is None else round(value)


def _phase_times(plain: pl.DataFrame) -> PhaseTimes | None:
    """Return the means over the middle fifth of the plain steps in which phases were seen, by the clock of most of them."""
    clocks = plain["phase_clock"].drop_nulls()
    if clocks.is_empty():
        return None
    clock = "device" if 2 * (clocks == "device").sum() > len(clocks) else "host"
    seen = plain.filter(pl.col("phase_clock") == clock).sort("wall_ns")
    typical = seen.slice(2 * seen.height // 5, max(1, seen.height // 5))
    means = {
        name: None if typical[name].null_count() == typical.height else _rounded(typical[name].fill_null(0).mean())
        for name in (*_PARTS, "rest_ns")
    }
    return PhaseTimes(clock=clock, **means)  # type: ignore[arg-type]


def _excess_share(slow: pl.DataFrame, plain: pl.DataFrame) -> float:
    median, total = plain["wall_ns"].median(), plain["wall_ns"].sum()
    return float((slow["wall_ns"] - median).sum() / total) if slow.height and total else 0.0


def _slow_step(row: dict[str, Any], plain: pl.DataFrame, marks: pl.DataFrame | None) -> SlowStep:
    """Return a slow step with what it had: marks, waiting, and phases that grew, as far as they explain its excess."""
    least = EXPLAINS * (row["wall_ns"] - float(plain["wall_ns"].median() or 0))  # type: ignore[arg-type]
    names = {"loader_wait_ns": "loader", **{name: name.removesuffix("_ns") for name in (*_PHASES, "rest_ns")}}
    grown = [
        SlowPart(what, round(row[name] - float(plain[name].median() or 0)))  # type: ignore[arg-type]
        for name, what in names.items()
        if row[name] is not None
    ]
    found = _marked(row["step"], marks) + grown
    told = [part for part in found if part.ns >= least]
    if not any(part.name for part in told):  # a file written is named where nothing else is known of the time
        told += [part for part in found if part.what == "file_write"][:1]
    return SlowStep(row["step"], row["wall_ns"], tuple(sorted(told, key=lambda part: -part.ns)))


def _marked(step: int, marks: pl.DataFrame | None) -> list[SlowPart]:
    """Return collections, saves and files written in a step, those of one name as one."""
    if marks is None:
        return []
    found = marks.filter((pl.col("step") == step) & pl.col("kind").is_in(["gc", "save", "file_write"]))
    sums = found.group_by("kind", "name", maintain_order=True).agg(pl.col("duration_ns").sum())
    return [SlowPart(kind, int(ns), name) for kind, name, ns in sums.iter_rows()]


def _profiler(records: pl.DataFrame, plain: pl.DataFrame) -> tuple[ProfilerCost, ...]:
    """Return what each kind of profiled step took beyond plain ones."""
    usual = float(plain["wall_ns"].median() or 0)  # type: ignore[arg-type]
    walls = ((label, records.filter(pl.col("window") == label)["wall_ns"]) for label in _LABELS)
    return tuple(
        ProfilerCost(label, len(found), _median(found) or 0, round(float(found.sum()) - len(found) * usual))  # type: ignore[arg-type]
        for label, found in walls
        if len(found)
    )
