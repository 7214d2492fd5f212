"""The history of a run from the records of all its steps: pace, phases, drift, slow steps, the profiler's cost; ranks side by side."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Floats, Ints
from gpudiag.model.timeline import Drift, PhaseTimes, ProfilerCost, SlowPart, SlowStep, StepHistory

SETTLED_AFTER = 2
"""The first steps of a run are slow for other reasons (allocation, autotuning): they say nothing of its pace."""

SLOW_FACTOR = 1.5
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

BETWEEN_SHARE = 0.25
"""The second and third quarter lie between the first and the last, give or take this part of the change: else the pace wanders."""

WORTH_DRIFT = 0.03
"""A change of pace below this is not called drift: clocks and neighbours move a machine as much."""

EXPLAINED_SHARE = 0.1
"""Share of a slow step's excess from which a part of it is named."""

_PHASES = ("h2d_ns", "forward_ns", "backward_ns", "optimizer_ns")
_PARTS = ("loader_wait_ns", *_PHASES)
_LABELS = ("warm", "timing", "sites", "export")


def build_history(records: pl.DataFrame, marks: pl.DataFrame | None = None) -> StepHistory | None:
    """Return the history of a run from its step_records and host_marks; None where no step was recorded."""
    if not records.height:
        return None
    records = records.with_columns(rest_ns=(pl.col("wall_ns") - pl.sum_horizontal(*_PARTS)).clip(lower_bound=0))
    plain = records.filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain"))
    known = plain.height >= MIN_FOR_PACE
    usual, total = float(plain["wall_ns"].median() or 0), plain["wall_ns"].sum()  # type: ignore[arg-type]
    slow = plain.filter(pl.col("wall_ns") > SLOW_FACTOR * usual) if known else plain.clear()
    slowest = slow.sort("wall_ns", descending=True).head(MOST_SLOW)
    padded = records.filter(pl.col("padded_elements").is_not_null() & (pl.col("batch_elements") > 0))
    padded = padded if 2 * padded.height >= records["samples"].count() else padded.clear()  # a few say nothing of the others
    # What each kind of profiled step took beyond plain ones
    profiler = []
    for label in _LABELS if known else ():
        walls = records.filter(pl.col("window") == label)["wall_ns"]
        if len(walls):
            beyond = round(float(walls.sum()) - len(walls) * usual)
            profiler.append(ProfilerCost(label, len(walls), _round(walls.median()) or 0, beyond))  # type: ignore[arg-type]
    return StepHistory(
        steps=records.height,
        profiled=records.filter(pl.col("window").is_in(["timing", "sites"])).height,
        plain=plain.height,
        wall_ns=int(records["wall_ns"].sum()),
        first_ns=next(iter(records.filter(pl.col("step") == 0)["wall_ns"]), None),
        median_ns=_round(plain["wall_ns"].median()) if known else None,
        p95_ns=_round(plain["wall_ns"].quantile(0.95, "linear")) if known else None,
        phases=_measure_phases(plain) if known else None,
        padded_share=int(padded["padded_elements"].sum()) / int(padded["batch_elements"].sum()) if padded.height else None,
        drift=measure_drift(plain["wall_ns"].to_numpy()),
        slow_steps=slow.height,
        slow_share=(float((slow["wall_ns"] - usual).sum() / total) if slow.height and total else 0.0) if known else None,
        slowest=tuple(_build_slow_step(row, plain, marks) for row in slowest.iter_rows(named=True)),
        profiler=tuple(profiler),
    )


def measure_drift(walls: npt.NDArray[Any]) -> Drift | None:
    """Return how the last quarter of `walls` (ns, in their order) compares with the first; None where they are too few.

    Welch's t interval on the logarithms of the block medians (Welch 1947, Biometrika 34), with the fewest degrees of freedom that it can
    have: wide enough for steps that resemble their neighbours.
    """
    if len(walls) < MIN_FOR_DRIFT or walls.min() <= 0:
        return None
    quarter = len(walls) // 4
    quarters = (walls[:quarter], walls[quarter : 2 * quarter], walls[-2 * quarter : -quarter], walls[-quarter:])
    blocks = [np.log(np.asarray([np.median(block) for block in np.array_split(part, BLOCKS)])) for part in quarters]
    first, last = blocks[0], blocks[3]
    change = float(last.mean() - first.mean())
    error = T_99 * math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / BLOCKS)
    low, share, high = (math.expm1(min(value, 700.0)) for value in (change - error, change, change + error))
    real = (low > 0 or high < 0) and abs(share) >= WORTH_DRIFT
    # The quarters in between are on the way: a run that wanders comes back
    real = real and all(-BETWEEN_SHARE <= float(part.mean() - first.mean()) / change <= 1 + BETWEEN_SHARE for part in blocks[1:3])
    return Drift(
        first_ns=round(float(np.median(quarters[0]))),
        last_ns=round(float(np.median(quarters[3]))),
        share=share,
        low_share=low,
        high_share=high,
        real=real,
    )


def _round(value: Any) -> int | None:
    return None if value is None else round(value)


def _measure_phases(plain: pl.DataFrame) -> PhaseTimes | None:
    """Return the means over the middle fifth of the plain steps in which phases were seen, by the clock of most of them."""
    clocks = plain["phase_clock"].drop_nulls()
    if clocks.is_empty():
        return None
    clock = "device" if 2 * (clocks == "device").sum() > len(clocks) else "host"
    seen = plain.filter(pl.col("phase_clock") == clock).sort("wall_ns")
    typical = seen.slice(2 * seen.height // 5, max(1, seen.height // 5))
    means = {
        name: None if typical[name].null_count() == typical.height else _round(typical[name].fill_null(0).mean())
        for name in (*_PARTS, "rest_ns")
    }
    return PhaseTimes(clock=clock, **means)  # type: ignore[arg-type]


def _build_slow_step(row: dict[str, Any], plain: pl.DataFrame, marks: pl.DataFrame | None) -> SlowStep:
    least = EXPLAINED_SHARE * (row["wall_ns"] - float(plain["wall_ns"].median() or 0))  # type: ignore[arg-type]
    names = {"loader_wait_ns": "loader", **{name: name.removesuffix("_ns") for name in (*_PHASES, "rest_ns")}}
    found = []
    if marks is not None:  # collections, saves and files written, those of one name as one
        held = marks.filter((pl.col("step") == row["step"]) & pl.col("kind").is_in(["gc", "save", "file_write", "preempted"]))
        sums = held.group_by("kind", "name", maintain_order=True).agg(pl.col("duration_ns").sum())
        found = [SlowPart(kind, int(ns), name) for kind, name, ns in sums.iter_rows()]
    found += [
        SlowPart(what, round(row[name] - float(plain[name].median() or 0)))  # type: ignore[arg-type]
        for name, what in names.items()
        if row[name] is not None
    ]
    told = [part for part in found if part.ns >= least]
    if not any(part.name for part in told):  # a file written is named where nothing else is known of the time
        told += [part for part in found if part.what == "file_write"][:1]
    return SlowStep(row["step"], row["wall_ns"], tuple(sorted(told, key=lambda part: -part.ns)))


MIN_STEPS = 10
"""Fewer unprofiled steps that all ranks recorded tell chance from habit badly."""

MOST_CELLS = 1_000_000
"""Steps times ranks that are compared: a figure of each then takes 8 MB. Of longer runs every second, third ... step is taken."""

STEP_PARTS = {"loader": "loader_wait_ns", "host-to-device copies": "h2d_ns", "forward": "forward_ns", "optimizer": "optimizer_ns"}
"""Part of a step as it is told -> column of step_records; what they and the backward pass leave is the rest."""

RECORD_COLUMNS = ("step", "window", "wall_ns", "backward_ns", *STEP_PARTS.values(), "samples", "batch_elements", "written_bytes")
"""Columns of step_records that are compared."""

_LEAST_FREE = 3
"""Differences between ranks, less one in each step, from which a correlation says anything."""


class RankSteps:
    """Step records of several ranks as arrays (steps x ranks) in ns; made by build_rank_steps.

    A rank that comes late to the exchange of gradients waits least in its backward pass, where the others wait for it. Its own time in a
    step is therefore the wall time less what its backward pass took beyond the shortest one.
    """

    def __init__(self, ranks: list[int], records: pl.DataFrame) -> None:
        self.ranks = ranks
        self._records = records

    @cached_property
    def numbers(self) -> Ints:
        """Return the numbers of the compared steps."""
        return np.asarray(self._records["step"].to_numpy()[:: len(self.ranks)], dtype=np.int64)

    def column(self, name: str) -> Floats:
        """Return a column of the step records as (steps x ranks); NaN where it is null."""
        return np.asarray(self._records[name].cast(pl.Float64).fill_null(float("nan")).to_numpy()).reshape(-1, len(self.ranks))

    @cached_property
    def wall(self) -> Floats:
        """Return the wall time of each step on each rank."""
        return self.column("wall_ns")

    @cached_property
    def least_backward(self) -> Floats:
        """Return the shortest backward pass of each step (steps x 1): that of the rank that came last."""
        return np.asarray(self.column("backward_ns").min(axis=1, keepdims=True))

    @cached_property
    def own(self) -> Floats:
        """Return the time that each rank takes for itself."""
        return self.wall - self.column("backward_ns") + self.least_backward

    def part(self, name: str) -> Floats:
        """Return a part of the steps by its name in PARTS; where it was not seen it takes no time."""
        return np.nan_to_num(self.column(STEP_PARTS[name]))

    @property
    def rest(self) -> Floats:
        """Return what the parts and the backward pass leave of each step; below 0 where a GPU's phases exceed the wall time."""
        return np.asarray(self.wall - self.column("backward_ns") - sum(self.part(name) for name in STEP_PARTS))

    @cached_property
    def positions(self) -> Floats | None:
        """Return the positions of each rank's batches, padding included: the device computes on it. None where a batch told none."""
        found = self.column("batch_elements")
        return None if np.isnan(found).any() or not (found.max(axis=1) > 0).all() else found

    @property
    def imbalance(self) -> Floats:
        """Return 1 - mean / max over the ranks of the positions of each step. Raises ValueError where they are not known."""
        if self.positions is None:
            raise ValueError("no positions")
        return measure_imbalance(self.positions)

    @property
    def compute(self) -> Floats:
        """Return the compute of each rank: its forward pass, else its own time."""
        forward = self.column("forward_ns")
        return self.own if np.isnan(forward).any() else forward

    @property
    def follows_positions(self) -> float | None:
        """Return the correlation over steps and ranks of positions with compute; None where one of them does not vary, or is not known."""
        return None if self.positions is None else measure_correlation(self.positions, self.compute)

    @property
    def balanced(self) -> Floats:
        """Return what each step would save in ns were the work of all ranks equal. Raises ValueError where positions are not known.

        Forward pass and shortest backward pass, by max - mean over the ranks (FlexSP, arXiv:2412.01523, balances them so); work is taken by
        positions or by compute, whichever differs more: attention costs more than in proportion to length.
        """
        spent = np.minimum(self.compute.max(axis=1) + self.least_backward[:, 0], self.wall.max(axis=1))
        return np.asarray(np.maximum(self.imbalance, measure_imbalance(self.compute)) * spent)


def build_rank_steps(records: pl.DataFrame) -> RankSteps | str:
    """Return the steps of `records` (step_records and `rank`) that can be compared, or why there are none.

    Unprofiled ones after the first SETTLED_AFTER that all ranks have, of those that `thin_records` leaves.
    """
    records = thin_records(records, records.height).filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain"))
    ranks: list[int] = sorted(records["rank"].unique().to_list())
    if len(ranks) < 2:
        return "only one rank recorded unprofiled steps"
    records = records.filter(pl.len().over("step") == len(ranks)).sort("step", "rank")
    if records.height < MIN_STEPS * len(ranks):
        return f"fewer than {MIN_STEPS} unprofiled steps that all ranks recorded"
    if records["backward_ns"].null_count():
        return "no backward pass was seen in the unprofiled steps of some rank"
    return RankSteps(ranks, records)


def thin_records(records: pl.DataFrame, rows: int) -> pl.DataFrame:
    """Return every n-th step of `records` where all ranks together have `rows` rows: about MOST_CELLS of them, at most."""
    every = -(-rows // MOST_CELLS)
    return records.filter(pl.col("step") % every == 0) if every > 1 else records


def measure_imbalance(work: Floats) -> Floats:
    """Return 1 - mean / max over the ranks of each step of `work` (steps x ranks); 0 where no rank has any."""
    return np.asarray(1 - work.mean(axis=1) / np.maximum(work.max(axis=1), 1.0))


def measure_correlation(work: Floats, time: Floats) -> float | None:
    """Return Pearson's correlation over steps and ranks (arrays of both), each less the mean of its step.

    None where one does not vary, and where there are too few: that of one step of two ranks is always 1 or -1.
    """
    steps, ranks = work.shape
    if steps * (ranks - 1) < _LEAST_FREE:
        return None
    x = work - work.mean(axis=1, keepdims=True)
    y = time - time.mean(axis=1, keepdims=True)
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale > 0 else None
