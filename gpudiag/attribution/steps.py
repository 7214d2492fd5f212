"""The steps of a trace: ProfilerStep marks, else the best of the other sources, else one window over the whole trace; it says which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.device import kind_of_run
from gpudiag.attribution.names import text
from gpudiag.attribution.nesting import nulled
from gpudiag.attribution.step_sources import Cuts, by_annotation, by_loader, by_optimizer, by_period
from gpudiag.attribution.step_work import apart, extent
from gpudiag.model import tables
from gpudiag.model.trace import Trace
from gpudiag.trace import kernel_names

KEEP_AT_LEAST = 5
"""The first and the last step are dropped only where this many remain (architecture.md section 3)."""

OUTSIDE_SHARE = 0.2
"""More of the recording than this outside every step is worth a warning."""

FROM_MARKS = "ProfilerStep marks"
WHOLE_TRACE = "no step marks: one window over the whole trace"
NO_STEPS = "no ProfilerStep marks: the whole trace counts as one step"
"""The warning of a trace that shows no other sign of steps either; renderers know it by its text."""


class Steps(NamedTuple):
    """The rows of `steps`, how they were found, and what to know about them."""

    table: pl.DataFrame
    source: str
    warnings: tuple[str, ...]


def find_steps(trace: Trace) -> Steps:
    """Return the steps of `trace`: half-open host intervals, contiguous but for gaps in the numbers of ProfilerStep marks."""
    marks = _marks(trace)
    if marks.height:
        return _from_marks(marks)
    for found in _other_sources(trace):
        if found is not None:
            return _from_cuts(trace, found)
    return Steps(_table([("whole trace", *extent(trace))]), WHOLE_TRACE, (NO_STEPS,))


def _from_marks(marks: pl.DataFrame) -> Steps:
    """Return the steps from mark to mark; where the next number is missing a step ends with its own mark."""
    rows = list(marks.select("name", "number", "start_ns", "end_ns").iter_rows())
    steps = []
    for (name, number, start, end), following in zip(rows, [*rows[1:], None], strict=True):
        follows = following is not None and following[1] == number + 1
        steps.append((name, start, following[2] if follows and following is not None else end))
    table = _table(steps)
    return Steps(table, FROM_MARKS, _edge_warning(table))


def _other_sources(trace: Trace) -> Iterator[Cuts | None]:
    """Yield the steps by each of the other sources, the surest first; None where it has none."""
    yield by_optimizer(trace)
    yield by_loader(trace)
    yield by_annotation(trace)
    yield by_period(trace, on_cpu=kind_of_run(trace).startswith("cpu"))


def _from_cuts(trace: Trace, cuts: Cuts) -> Steps:
    """Return the steps between the cuts. What lies outside may be incomplete and is no step."""
    times = cuts.times.tolist()
    names = cuts.names or tuple(f"#{row}" for row in range(len(times) - 1))
    table = _table(list(zip(names, times[:-1], times[1:], strict=True)))
    first, last = extent(trace)
    outside = 1 - (times[-1] - times[0]) / max(last - first, 1)
    note = f"steps are {cuts.source}; {100 * outside:.0f} % of the recording lies before the first and after the last complete one"
    return Steps(table, cuts.source, (*_edge_warning(table), *((note,) if outside > OUTSIDE_SHARE else ())))


def _marks(trace: Trace) -> pl.DataFrame:
    """Return the ProfilerStep marks in time order, without those that begin inside another (a second profiler's)."""
    name = text("name")
    found = trace.marks.filter((pl.col("category") == "annotation") & name.str.contains(kernel_names.STEP_MARK))
    found = found.with_columns(name.str.extract(kernel_names.STEP_MARK, 1).cast(pl.Int64, strict=False).fill_null(-2).alias("number"))
    return apart(found.with_columns(name))


def _table(steps: list[tuple[str, int, int]]) -> pl.DataFrame:
    drop_edges = len(steps) - 2 >= KEEP_AT_LEAST
    rows = [(row, name, start, end, not (drop_edges and row in (0, len(steps) - 1))) for row, (name, start, end) in enumerate(steps)]
    return pl.DataFrame(rows, schema=tables.schema("steps"), orient="row")


def _edge_warning(table: pl.DataFrame) -> tuple[str, ...]:
    if table["analysed"].all() and table.height < KEEP_AT_LEAST + 2:
        one = table.height == 1
        return ("only 1 complete step" if one else f"only {table.height} complete steps: the first and the last one count too",)
    return ()


def step_of(steps: pl.DataFrame, times: npt.NDArray[np.int64]) -> pl.Series:
    """Return the row of `steps` that holds each moment, null outside every step."""
    starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    row = np.searchsorted(starts, times, side="right") - 1
    inside = (row >= 0) & (times < ends[np.maximum(row, 0)]) if len(starts) else np.zeros(len(times), dtype=bool)
    found: pl.Series = nulled(np.where(inside, row, -1), "step")
    return found
