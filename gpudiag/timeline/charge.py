"""Idle time that a blocking call caused: it took the host's lead away, and the gaps after it are the price."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.model.trace import Trace

Ints = npt.NDArray[np.int64]

CHARGEABLE = ("idle_launch", "idle_unexplained")
"""What a more specific cause holds is not the call's doing."""

_MOST_OPEN = 64
"""Calls whose effect is followed at the same time."""


def charged(pieces: pl.DataFrame, bounds: pl.DataFrame, syncs: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Return `pieces` with the host's time, latency of the launch included, charged to the calls of `syncs` that waited for the device.

    Without the call the host would have been earlier by its length at most: so it is charged up to that, from the gap that begins in it or
    next after it, until the host is as far ahead of the device again as the call was long. Another such call that follows before that
    takes its place; of the earlier one stays what it was longer.
    """
    waiting = syncs.filter(pl.col("kernel").is_not_null() & (pl.col("waited_ns") > 0)).sort("start_ns")
    rows = pieces.with_row_index("piece").join(
        bounds.unique("gap", keep="first").select("gap", "kind", "flight_ns", "begun_ns"), on="gap", how="left", maintain_order="left"
    )
    late = pl.col("kind").is_in(["host_wait", "edge"]) & (pl.col("end_ns") <= pl.col("flight_ns"))
    rows = rows.filter(late & pl.col("cause").is_in(CHARGEABLE))
    if not waiting.height or not rows.height:
        return pieces
    taken = _taken(rows, waiting, _regained(rows, trace))
    return _split(pieces.with_row_index("piece"), taken)


def _taken(rows: pl.DataFrame, waiting: pl.DataFrame, regained: Ints) -> pl.DataFrame:
    """Return (piece, by, taken_ns) in order: the calls that each piece is charged to, and for how much of it."""
    calls = list(waiting.select("id", pl.col("start_ns"), pl.col("end_ns") - pl.col("start_ns")).iter_rows())
    found: list[tuple[int, int, int]] = []
    open_calls: list[tuple[int, int, int]] = []  # (call, its length, what is left), the latest last
    following = 0
    columns = (rows["piece"].to_list(), rows["begun_ns"].to_list(), (rows["end_ns"] - rows["start_ns"]).to_list(), regained.tolist())
    for piece, begun, length, ahead in zip(*columns, strict=True):
        open_calls = [call for call in open_calls if ahead < call[1]]
        while following < len(calls) and calls[following][1] <= begun:
            open_calls = _with_call(open_calls, calls[following][0], calls[following][2])
            following += 1
        while length and open_calls:
            call, whole, left = open_calls.pop()
            part = min(left, length)
            found.append((piece, call, part))
            length -= part
            if left > part:
                open_calls.append((call, whole, left - part))
        open_calls = open_calls[-_MOST_OPEN:]
    return pl.DataFrame(found, schema={"piece": pl.UInt32, "by": pl.Int64, "taken_ns": pl.Int64}, orient="row")


def _with_call(open_calls: list[tuple[int, int, int]], call: int, length: int) -> list[tuple[int, int, int]]:
    """Return `open_calls` with one more: the host waits for the device anyway, so earlier calls count only for what they exceed it by."""
    kept = [(earlier, whole, left - length) for earlier, whole, left in open_calls if left > length]
    return [*kept, (call, length, length)]


def _regained(rows: pl.DataFrame, trace: Trace) -> Ints:
    """Return for each row the longest time in ns that work had been issued ahead of its start since the row's gap before it ended."""
    calls = trace.launches.select(pl.col("id").alias("launch"), issued_ns="end_ns")
    work = trace.kernels.select("start_ns", pl.when(~pl.col("replay")).then("launch"))
    work = work.join(calls, on="launch", how="inner").sort("start_ns")
    starts, ahead = work["start_ns"].to_numpy(), (work["start_ns"] - work["issued_ns"]).to_numpy()
    begun, ended = rows["begun_ns"].to_numpy(), rows["start_ns"].to_numpy()
    before = np.concatenate(([np.iinfo(np.int64).min], ended[:-1])) if len(ended) else ended
    first, last = np.searchsorted(starts, before, side="left"), np.searchsorted(starts, begun, side="left")
    found = np.zeros(len(begun), dtype=np.int64)
    some = last > first
    if some.any():
        edges = np.stack((first[some], last[some]), axis=1).reshape(-1)
        padded = np.append(ahead, 0)
        found[some] = np.maximum.reduceat(padded, edges)[::2]
    return found


def _split(pieces: pl.DataFrame, taken: pl.DataFrame) -> pl.DataFrame:
    """Return `pieces` with the parts that are charged cut off at their front."""
    until = pl.col("taken_ns").cum_sum().over("piece")
    parts = pieces.join(taken.with_columns(until=until), on="piece", how="inner", maintain_order="right")
    parts = parts.with_columns(
        end_ns=pl.col("start_ns") + pl.col("until"), start_ns=pl.col("start_ns") + pl.col("until") - pl.col("taken_ns"),
        cause=pl.lit("idle_sync"), sync="by", event=pl.lit(None, dtype=pl.Int64),
    )  # fmt: skip
    sums = taken.group_by("piece").agg(pl.col("taken_ns").sum())
    rest = pieces.join(sums, on="piece", how="left").with_columns(start_ns=pl.col("start_ns") + pl.col("taken_ns").fill_null(0))
    rest = rest.filter(pl.col("start_ns") < pl.col("end_ns"))
    return pl.concat([parts.select(pieces.columns), rest.select(pieces.columns)]).sort("start_ns", "end_ns").drop("piece")


def with_costs(syncs: pl.DataFrame, idle: pl.DataFrame) -> pl.DataFrame:
    """Return `syncs` with cost_ns: the idle time of the device that each call is charged with."""
    sums = idle.drop_nulls("sync").group_by("sync").agg(charged_ns=(pl.col("end_ns") - pl.col("start_ns")).sum())
    found = syncs.join(sums, left_on="id", right_on="sync", how="left", maintain_order="left")
    return found.with_columns(cost_ns=pl.col("charged_ns").fill_null(0)).drop("charged_ns")
