"""Tracks of work by its bound for the overlay: one a stream of a device, or one a thread of a CPU, more where pieces of one overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.model.analysis import Analysis
from gpudiag.model.trace import Trace
from gpudiag.report.escape import clean

Ints = npt.NDArray[np.int64]
Row = tuple[int, int, str, dict[str, Any]]
"""Start and end in ns from the trace's base, name, arguments."""

FIRST_TRACK = 10
"""Number of the first of these tracks; those below are the overlay's fixed ones."""

_LONGEST = 60
"""Characters of a thread's name in the name of its track."""


class Track(NamedTuple):
    """One line of the time line."""

    number: int
    name: str
    rows: pl.DataFrame

    def slices(self) -> Iterator[Row]:
        """Yield its pieces by start, each named by its bound."""
        for row in self.rows.iter_rows(named=True):
            args = {
                "op": row["op_name"],
                "work": row["name"],
                "efficiency_share": _rounded(row["efficiency"]),
                "roofline_time_ns": _rounded(row["t_roof_ns"], 1),
                "flop": row["flops"],
                "moved_bytes": row["bytes_moved"],
                "cost": row["provenance"],
            }
            yield row["start_ns"], row["end_ns"], row["bound"] or "unknown", args


def tracks(analysis: Analysis) -> Iterator[Track]:
    """Yield the tracks of the work of the analysed device, in the order of streams or threads."""
    rows, number = _rows(analysis.trace), FIRST_TRACK
    for (line,), group in rows.group_by("line", maintain_order=True):
        name = _name(analysis.trace, line, on_cpu=analysis.device_index is None)
        group = group.sort("start_ns", -pl.col("end_ns"))
        lanes = nested_lanes(group["start_ns"].to_numpy(), group["end_ns"].to_numpy())
        for lane in range(int(lanes.max(initial=0)) + 1):
            more = f" ({lane + 1})" if lane else ""
            yield Track(number, f"bound: {name}{more}", group.filter(pl.Series(lanes == lane)))
            number += 1


def _rows(trace: Trace) -> pl.DataFrame:
    """Return the work with the name of its op and `line`: its stream, for work of a CPU its thread."""
    ops = trace.ops.select(pl.col("id").alias("op"), pl.col("name").cast(pl.String).alias("op_name"), "thread")
    wanted = (
        "start_ns",
        "end_ns",
        "name",
        "bound",
        "efficiency",
        "t_roof_ns",
        "flops",
        "bytes_moved",
        "provenance",
        "op",
        "stream",
        "kind",
    )
    joined = trace.kernels.select(wanted).with_columns(pl.col("name").cast(pl.String)).join(ops, on="op", how="left", maintain_order="left")
    line = pl.when(pl.col("kind") == "cpu").then(pl.col("thread")).otherwise(pl.col("stream"))
    return joined.with_columns(line=line).sort("line", maintain_order=True, nulls_last=True)


def _name(trace: Trace, line: object, *, on_cpu: bool) -> str:
    if not isinstance(line, int):
        return "thread not known" if on_cpu else "stream not known"
    if not on_cpu:
        return f"stream {line}"
    thread = trace.meta.threads[line] if 0 <= line < len(trace.meta.threads) else None
    return f"thread {clean(thread.name or thread.tid, _LONGEST)}" if thread else f"thread {line}"


def nested_lanes(starts: Ints, ends: Ints) -> Ints:
    """Return a lane for each piece, so that two pieces of one lane are apart or one holds the other, as viewers draw them.

    The pieces come by start, of those that start together the longest first. The first lane that takes a piece gets it.
    """
    found = np.zeros(len(starts), dtype=np.int64)
    if len(starts) < 2 or bool((starts[1:] >= ends[:-1]).all()):
        return found
    open_ends: list[list[int]] = []
    for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        found[place] = _lane(open_ends, start, end)
    return found


def _lane(open_ends: list[list[int]], start: int, end: int) -> int:
    """Return the lane that takes a piece, and put it there; `open_ends`: of each lane the ends of the pieces that are open, inner last."""
    for lane, ends in enumerate(open_ends):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or end <= ends[-1]:
            ends.append(end)
            return lane
    open_ends.append([end])
    return len(open_ends) - 1


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
