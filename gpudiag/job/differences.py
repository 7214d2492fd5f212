"""What a mean step of one rank takes beyond that of the median rank: by bucket, by part of the step, by operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np
import polars as pl

from gpudiag.model.breakdown import BUCKETS
from gpudiag.model.job import Difference, RankRow
from gpudiag.model.rank import RankSummary
from gpudiag.timeline.rank_steps import PARTS, Floats, RankSteps

COMMUNICATION = "exposed_communication"


def against(what: str, values: Mapping[int, float], rank: int, unit: str = "ns") -> Difference | None:
    """Return the difference of `rank` from the median of the others in `values` (rank -> figure); None where either is not known."""
    others = [value for other, value in values.items() if other != rank]
    if rank not in values or not others:
        return None
    return Difference(what=what, own=float(values[rank]), median=float(median(others)), unit=unit)


def excess(difference: Difference) -> float:
    """Return how much more the rank has than the median rank, in the unit of the difference."""
    return difference.own - difference.median


def of_buckets(summaries: Sequence[RankSummary], rows: Sequence[RankRow], rank: int) -> list[Difference]:
    """Return the differences by bucket of the mean step, in ns.

    Exposed communication without the waits for other ranks: those are what a late rank makes the others do.
    """
    means = {summary.rank: summary.steps.select(pl.col(BUCKETS).mean()).row(0, named=True) for summary in summaries if summary.steps.height}
    waits = {row.rank: row.exposed_waiting_ns for row in rows}
    found = []
    for bucket in BUCKETS:
        values = {other: float(mean[bucket] or 0.0) for other, mean in means.items()}
        if bucket == COMMUNICATION:
            values = {other: max(0.0, value - wait) for other, value in values.items() if (wait := waits.get(other)) is not None}
        found.append(against(bucket, values, rank))
    return [difference for difference in found if difference is not None]


def of_parts(steps: RankSteps, column: int, begin: int) -> list[Difference]:
    """Return the differences by part of the step, in ns: medians over the unprofiled steps from row `begin` on.

    Backward passes cannot be compared: they hold the waits for the late rank. rest_ns: what lies outside the parts that were seen.
    """
    parts = {column_name: steps.part(name) for name, column_name in PARTS.items()} | {"rest_ns": np.clip(steps.rest, 0, None)}
    found = (against(name, _medians(steps, values[begin:]), steps.ranks[column]) for name, values in parts.items())
    return [difference for difference in found if difference is not None]


def _medians(steps: RankSteps, values: Floats) -> dict[int, float]:
    return dict(zip(steps.ranks, np.median(values, axis=0).tolist(), strict=True))


def of_work(summaries: Sequence[RankSummary], steps: RankSteps | None, rank: int, begin: int) -> list[Difference]:
    """Return the differences in the work of a step: positions or samples of the batches, matrix FLOP, calls of operators; what is known."""
    found: list[Difference | None] = []
    if steps is not None:
        for name, unit in (("batch_elements", "positions"), ("samples", "samples")):
            values = steps.column(name)[begin:]
            if not np.isnan(values).any():
                found.append(against("batch", dict(zip(steps.ranks, values.mean(axis=0).tolist(), strict=True)), rank, unit))
                break
    flops = {summary.rank: _mean(summary.steps["matrix_flops"]) for summary in summaries}
    calls = {summary.rank: float(summary.ops["count"].sum()) / summary.steps.height for summary in summaries if summary.steps.height}
    found.append(against("matrix_flops", {other: value for other, value in flops.items() if value}, rank, "FLOP"))
    found.append(against("calls", {other: value for other, value in calls.items() if value}, rank, "calls"))
    return [difference for difference in found if difference is not None]


def of_writing(steps: RankSteps | None, rank: int, begin: int) -> Difference | None:
    """Return the difference in what the processes write to files, in MB of a mean step; None where it is not known."""
    written = None if steps is None else steps.column("written_bytes")[begin:].mean(axis=0) / 1e6
    if steps is None or written is None or np.isnan(written).any():
        return None
    return against("written", dict(zip(steps.ranks, written.tolist(), strict=True)), rank, "MB")


def _mean(values: pl.Series) -> float | None:
    """Return the mean; None where a value is not known."""
    return None if not values.len() or values.null_count() else float(values.sum()) / values.len()


def of_ops(summaries: Iterable[RankSummary], rank: int) -> list[Difference]:
    """Return the differences by operator and pass in ns of a mean step, those that take the median rank longest first."""
    frames = [
        summary.ops.group_by("name").agg(pl.col("kernel_ns").sum() / summary.steps.height).with_columns(rank=pl.lit(summary.rank))
        for summary in summaries
        if summary.steps.height and summary.ops.height
    ]
    if not frames:
        return []
    every = pl.concat(frames)
    own = every.filter(pl.col("rank") == rank).select("name", own="kernel_ns")
    others = every.filter(pl.col("rank") != rank).group_by("name").agg(pl.col("kernel_ns").median().alias("median"))
    joined = own.join(others, on="name").sort("median", "name", descending=[True, False])
    return [Difference(what=f"op {name}", own=own_ns, median=usual) for name, own_ns, usual in joined.iter_rows()]


def of_telemetry(summaries: Sequence[RankSummary], rank: int) -> list[Difference]:
    """Return the differences of what was sampled beside the steps: clock, temperature, power; what is known."""
    fields = (("sm_clock_mhz", "MHz"), ("temperature_c", "C"), ("power_w", "W"))
    found = (
        against(name, {summary.rank: value for summary in summaries if (value := getattr(summary, name)) is not None}, rank, unit)
        for name, unit in fields
    )
    return [difference for difference in found if difference is not None]
