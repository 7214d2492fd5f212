"""The steps of a trace: ProfilerStep marks, else one window over the whole trace, and it says which."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.model import tables
from gpudiag.model.trace import Trace
from gpudiag.trace import kernel_names

KEEP_AT_LEAST = 5
"""The first and the last step are dropped only where this many remain (architecture.md section 3)."""

FROM_MARKS = "ProfilerStep marks"
WHOLE_TRACE = "no step marks: one window over the whole trace"


class Steps(NamedTuple):
    """The rows of `steps`, how they were found, and what to know about them."""

    table: pl.DataFrame
    source: str
    warnings: tuple[str, ...]


def find_steps(trace: Trace) -> Steps:
    """Return the steps of `trace`: half-open host intervals from mark to mark."""
    marks = _marks(trace)
    if not marks.height:
        return Steps(
            _table([("whole trace", *_extent(trace))]), WHOLE_TRACE, ("no ProfilerStep marks: the whole trace counts as one step",)
        )
    rows = list(marks.select("name", "number", "start_ns", "end_ns").iter_rows())
    steps = []
    for (name, number, start, end), following in zip(rows, [*rows[1:], None], strict=True):
        follows = following is not None and following[1] == number + 1
        steps.append((name, start, following[2] if follows and following is not None else end))
    table = _table(steps)
    return Steps(table, FROM_MARKS, _edge_warning(table))


def _marks(trace: Trace) -> pl.DataFrame:
    """Return the ProfilerStep marks in time order, without those that begin inside another (a second profiler's)."""
    name = pl.col("name").cast(pl.String)
    found = trace.marks.filter((pl.col("category") == "annotation") & name.str.contains(kernel_names.STEP_MARK))
    found = found.with_columns(name.str.extract(kernel_names.STEP_MARK, 1).cast(pl.Int64, strict=False).fill_null(-2).alias("number"))
    found = found.with_columns(name).sort("start_ns", "id")
    return found.filter(pl.Series(_apart(found["start_ns"].to_list(), found["end_ns"].to_list()), dtype=pl.Boolean))


def _apart(starts: list[int], ends: list[int]) -> list[bool]:
    """Return which spans (in time order) begin when the last one that was kept is over; those left out end nothing."""
    kept, reached = [], None
    for start, end in zip(starts, ends, strict=True):
        kept.append(reached is None or start >= reached)
        reached = end if kept[-1] else reached
    return kept


def _table(steps: list[tuple[str, int, int]]) -> pl.DataFrame:
    drop_edges = len(steps) - 2 >= KEEP_AT_LEAST
    rows = [(row, name, start, end, not (drop_edges and row in (0, len(steps) - 1))) for row, (name, start, end) in enumerate(steps)]
    return pl.DataFrame(rows, schema=tables.schema("steps"), orient="row")


def _edge_warning(table: pl.DataFrame) -> tuple[str, ...]:
    if table["analysed"].all() and table.height < KEEP_AT_LEAST + 2:
        one = table.height == 1
        return ("only 1 complete step" if one else f"only {table.height} complete steps: the first and the last one count too",)
    return ()


def _extent(trace: Trace) -> tuple[int, int]:
    """Return first start and last end of ops, runtime calls and device work."""
    frames = [frame for frame in (trace.ops, trace.launches, trace.kernels) if frame.height] or [trace.marks, trace.frames]
    starts = [frame["start_ns"].min() for frame in frames if frame.height]
    ends = [frame["end_ns"].max() for frame in frames if frame.height]
    return (min(starts), max(ends)) if starts else (0, 0)  # type: ignore[type-var, return-value]


def step_of(steps: pl.DataFrame, times: npt.NDArray[np.int64]) -> pl.Series:
    """Return the row of `steps` that holds each moment, null outside every step."""
    starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    row = np.searchsorted(starts, times, side="right") - 1
    inside = (row >= 0) & (times < ends[np.maximum(row, 0)]) if len(starts) else np.zeros(len(times), dtype=bool)
    found: pl.Series = pl.Series("step", np.where(inside, row, -1), dtype=pl.Int64).replace(-1, None)
    return found
