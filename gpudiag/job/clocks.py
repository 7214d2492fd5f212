"""The clocks of the ranks on one time line, by the ends of matched messages: all ranks of a synchronising collective leave it together.

For each group and rank the median, over the calls, of its end less the call's median end; a path through groups that share ranks joins all
(each step of the path adds a median). Over long recordings a straight line takes up the drift of the clocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Floats
from gpudiag.job.message_table import CODES
from gpudiag.model.analysis import RankSummary
from gpudiag.model.job import Clocks
from gpudiag.units import format_ns

SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Kinds that no rank can leave before all have arrived. The root of a broadcast and the sender of a small message can."""

RESOLUTION_NS = 2_000
"""Times of older traces have whole microseconds."""


class ClockCorrection(msgspec.Struct, frozen=True):
    """What is added to a rank's time t: offset_ns + slope * (t - pivot_ns)."""

    offset_ns: int = 0
    slope: float = 0.0
    pivot_ns: int = 0


class AlignedClocks(msgspec.Struct, frozen=True):
    """The corrections of the ranks that can be compared, and how they were told."""

    corrections: dict[int, ClockCorrection]
    clocks: Clocks

    def common(self, rows: pl.DataFrame, *columns: str) -> pl.DataFrame:
        """Return `rows` (with rank) with `columns` put on the clock of the job's first rank; null for ranks that cannot be compared."""
        table = pl.DataFrame(
            [(rank, one.offset_ns, one.slope, one.pivot_ns) for rank, one in self.corrections.items()],
            schema={"rank": rows.schema["rank"], "_offset": pl.Int64, "_slope": pl.Float64, "_pivot": pl.Int64},
            orient="row",
        )
        drift = [((pl.col(name) - pl.col("_pivot")) * pl.col("_slope")).round().cast(pl.Int64) for name in columns]
        moved = [(pl.col(name) + pl.col("_offset") + by).alias(name) for name, by in zip(columns, drift, strict=True)]
        return rows.join(table, on="rank", how="left", maintain_order="left").with_columns(moved).drop("_offset", "_slope", "_pivot")


def align_rank_clocks(called: pl.DataFrame, summaries: Sequence[RankSummary]) -> AlignedClocks:
    """Return the clocks told by the rows of `called` (see Matches.rows) that have a call of a synchronising kind.

    Without any: the clocks as they are where all ranks ran on one machine; else none can be compared with another.
    """
    on_unix = {summary.clock for summary in summaries} == {"unix"}
    codes = [CODES[kind] for kind in SYNCHRONISING]
    rows = called.filter(pl.col("call").is_not_null() & pl.col("kind").is_in(codes)).select("call", "rank", "group", "end")
    if not rows.height:
        machines = {summary.host for summary in summaries}
        unmatched = "no message that all ranks leave together was matched"
        if on_unix and len(machines) == 1 and "" not in machines:
            kept = {summary.rank: ClockCorrection() for summary in summaries}
            return AlignedClocks(kept, Clocks(method="unix", note=f"{unmatched}: Unix time of one machine"))
        return AlignedClocks({}, Clocks(method="none", note=f"{unmatched}, so that times of different ranks cannot be compared"))
    first = rows.group_by("rank").agg(pl.col("end").min().alias("zero"))
    rows = rows.join(first, on="rank", how="left").with_columns(t=(pl.col("end") - pl.col("zero")).cast(pl.Float64))
    zeros = dict(first.iter_rows())
    found = _solve_corrections(rows, zeros)
    # ranks that no message joins, but that share machine and clock with one that is joined
    hosts: dict[str, ClockCorrection] = {}
    for summary in summaries:
        if summary.rank in found and summary.host and summary.clock == "unix":
            hosts.setdefault(summary.host, found[summary.rank])
    found = {each.rank: hosts[each.host] for each in summaries if each.clock == "unix" and each.host in hosts} | found
    calls = int(rows["call"].n_unique())
    error = _measure_error_ns(AlignedClocks(found, Clocks(method="messages")).common(rows, "end"))
    # no correction is larger than what is left after all: the clocks need none
    small = not any(one.slope for one in found.values()) and max(abs(one.offset_ns) for one in found.values()) <= max(error, RESOLUTION_NS)
    if on_unix and small and len(found) >= len(zeros):
        error = _measure_error_ns(rows)
        note = f"the ends of matched messages agree within {format_ns(error)}"
        clocks = Clocks(method="unix", matched=calls, error_ns=error, note=note)
        return AlignedClocks({rank: ClockCorrection() for rank in found}, clocks)
    missing = sorted({summary.rank for summary in summaries} - set(found))
    note = f"no message joins rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:8]))} with the others" if missing else ""
    return AlignedClocks(found, Clocks(method="messages", matched=calls, error_ns=error, note=note))


def _measure_error_ns(rows: pl.DataFrame) -> int:
    ranges = rows.group_by("call").agg(pl.col("end").max() - pl.col("end").min())["end"]
    return int(ranges.quantile(0.95, interpolation="higher") or 0)


def _solve_corrections(rows: pl.DataFrame, zeros: Mapping[int, int]) -> dict[int, ClockCorrection]:
    slopes: dict[int, float] = {}
    offsets: dict[int, float] = {}
    for _ in range(3):  # offsets and drifts are told in turns: with drift taken away the medians are sharper
        slope = pl.col("rank").replace_strict(slopes, default=0.0, return_dtype=pl.Float64) if slopes else pl.lit(0.0)
        level = rows.with_columns(level=pl.col("t") * (1 + slope))
        late = level.with_columns(late=pl.col("level") - pl.col("level").median().over("call"))
        medians = late.group_by("group", "rank").agg(pl.col("late").median(), pl.len().alias("calls")).sort("group", "rank")
        offsets = _join_offsets(medians)
        level = level.filter(pl.col("rank").is_in(list(offsets)))
        level = level.with_columns(level=pl.col("level") + pl.col("rank").replace_strict(offsets, return_dtype=pl.Float64))
        late = level.with_columns(late=pl.col("level") - pl.col("level").median().over("call"))
        drifts = {int(rank): _estimate_slope(frame["t"].to_numpy(), frame["late"].to_numpy()) for (rank,), frame in late.group_by("rank")}
        if not any(drifts.values()):
            break
        slopes = {rank: slopes.get(rank, 0.0) - drifts.get(rank, 0.0) for rank in slopes.keys() | drifts.keys()}
    first = min(offsets)
    bent, found = slopes.get(first, 0.0), {}
    for rank, offset in offsets.items():
        # t_first = zero_first + t_rank + offset_rank - offset_first, and the first rank's own slope is taken back at that time
        back = bent * (offset - offsets[first])
        shift = zeros[first] - zeros[rank] + round(offset - offsets[first] - back)
        found[rank] = ClockCorrection(shift, slopes.get(rank, 0.0) - bent, zeros[rank])
    return found


def _join_offsets(medians: pl.DataFrame) -> dict[int, float]:
    """Find the offset of each rank that a path of groups joins with the lowest one; groups with the most calls are taken first."""
    late: dict[int, dict[int, float]] = {}
    calls: dict[int, int] = {}
    groups_of: dict[int, list[int]] = {}
    for group, rank, value, count in medians.iter_rows():
        late.setdefault(group, {})[rank] = value
        calls[group] = min(calls.get(group, count), count)
        groups_of.setdefault(rank, []).append(group)
    offsets = {min(groups_of): 0.0}
    waiting = [(-calls[group], group) for group in groups_of[min(groups_of)]]
    heapq.heapify(waiting)
    seen = {group for _, group in waiting}
    while waiting:
        _, group = heapq.heappop(waiting)
        middle = float(np.median([offsets[rank] + value for rank, value in late[group].items() if rank in offsets]))
        for rank, value in late[group].items():
            if rank in offsets:
                continue
            offsets[rank] = middle - value
            for other in groups_of[rank]:
                if other not in seen:
                    seen.add(other)
                    heapq.heappush(waiting, (-calls[other], other))
    return offsets


def _estimate_slope(t: Floats, late: Floats) -> float:
    """Estimate the slope of `late` over `t` by the medians of the first and last third; 0 where it may be chance or the time is short."""
    if len(t) < 9 or t.max() - t.min() < 10_000_000_000:  # shorter recordings show no drift: 20 ppm are 200 us in 10 s
        return 0.0
    order = np.argsort(t)
    third = len(t) // 3
    begin, end = order[:third], order[-third:]
    rise, run = float(np.median(late[end]) - np.median(late[begin])), float(np.median(t[end]) - np.median(t[begin]))
    rest = late - rise / run * t
    deviation = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    error = 1.2533 * deviation * np.sqrt(2 / third)
    # A drift counts where it moves the clock by this many standard errors over the recording
    return rise / run if abs(rise) > max(5.0 * error, RESOLUTION_NS) else 0.0
