"""Hand-made jobs of ranks with known answers: `planted(own)` makes summaries, matched messages and rows of ranks that wait for each other.

`own` is what each rank takes for itself (steps x ranks, ms). Each step ends with one all-reduce of 1 ms that all ranks enter and leave
together, so that each waits for the latest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.job.message_matching import MATCHED
from gpudiag.model import trace
from gpudiag.model.analysis import RANK_MESSAGES, RANK_OPS, RANK_STEPS, RankSummary
from gpudiag.model.job import RankRow
from gpudiag.model.timeline import BUCKETS
from gpudiag.model.trace import Column

MS = 1_000_000
TRANSFER = 1
"""Length of the all-reduce at the end of each planted step, in ms."""

Floats = npt.NDArray[np.float64]
Job = tuple[list[RankSummary], pl.DataFrame, list[RankRow]]


def frame(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]] = ()) -> pl.DataFrame:
    """Return `rows` in the schema of `columns`; what is not given is null."""
    schema = {column.name: column.dtype for column in columns}
    return pl.DataFrame([dict.fromkeys(schema) | dict(row) for row in rows], schema=schema, orient="row")


def steps(
    walls: Sequence[float],
    buckets: Sequence[Mapping[str, float]],
    *,
    first: int | None = None,
    flops: Sequence[float] | None = None,
) -> pl.DataFrame:
    """Return steps of these lengths with these buckets (ms), one after the other, numbered from `first`."""
    ends = np.cumsum(walls)
    rows: list[dict[str, Any]] = []
    for index, (wall, parts) in enumerate(zip(walls, buckets, strict=True)):
        row: dict[str, Any] = {"name": f"step {index}", "start_ns": round((ends[index] - wall) * MS), "end_ns": round(ends[index] * MS)}
        row |= {"number": None if first is None else first + index, "matrix_flops": None if flops is None else flops[index]}
        rows.append(row | {bucket: round(parts.get(bucket, 0) * MS) for bucket in BUCKETS})
    return frame(RANK_STEPS, rows)


def ops(times: Mapping[str, float], count: int, calls: Mapping[str, int] | None = None) -> pl.DataFrame:
    """Return operators with their time a step in ms, over `count` steps."""
    calls = calls or {}
    rows = [{"name": name, "count": calls.get(name, 10) * count, "kernel_ns": round(ms * MS) * count} for name, ms in times.items()]
    return frame(RANK_OPS, rows)


def summary(rank: int, **given: Any) -> RankSummary:
    """Return the summary of `rank`; what is not given is empty."""
    empty: dict[str, Any] = {
        "path": f"rank{rank}.json",
        "messages": frame(RANK_MESSAGES),
        "steps": frame(RANK_STEPS),
        "ops": frame(RANK_OPS),
    }
    return RankSummary(rank=rank, **(empty | given))


def planted(own: Floats, parts: Mapping[int, Mapping[str, Any]] | None = None, **every: Any) -> Job:
    """Return the job whose ranks take `own` ms of each step for themselves: compute, but for what `parts` says of a rank.

    parts[rank] may hold 'buckets' (ms a step, taken from its compute) and fields of its summary; `every` holds fields of all summaries.
    """
    count, ranks = own.shape
    summaries, rows, matched = [], [], []
    walls = own.max(axis=1) + TRANSFER
    starts = np.concatenate(([0.0], np.cumsum(walls)[:-1]))
    for rank in range(ranks):
        given = {**every, **(parts or {}).get(rank, {})}
        special, flops, first = given.pop("buckets", {}), given.pop("flops", None), given.pop("first", 100)
        waits = own.max(axis=1) - own[:, rank]
        compute = own[:, rank] - sum(special.values())
        buckets = [{"compute": compute[step], "exposed_communication": waits[step] + TRANSFER, **special} for step in range(count)]
        given.setdefault("ops", ops({"aten::mm": float(compute.mean())}, count))
        table = steps(walls.tolist(), buckets, first=first, flops=None if flops is None else [flops] * count)
        summaries.append(summary(rank, steps=table, wall_ns=round(float(walls.sum()) * MS), **given))
        rows.append(RankRow(rank=rank, wall_ns=round(float(walls.mean()) * MS), exposed_waiting_ns=round(float(waits.mean()) * MS)))
        matched += [
            {
                "call": step, "rank": rank, "row": step, "step": step, "kind": "all_reduce", "size": ranks,
                "arrival_ns": round((starts[step] + own[step, rank]) * MS), "end_ns": round((starts[step] + walls[step]) * MS),
                "wait_ns": round(waits[step] * MS), "exposed_wait_ns": round(waits[step] * MS), "transfer_ns": TRANSFER * MS,
            }
            for step in range(count)
        ]  # fmt: skip
    return summaries, frame(MATCHED, matched), rows


def record_frames(own: Floats, columns: Mapping[str, Floats] | None = None) -> list[pl.DataFrame]:
    """Return the step records of each rank: own times (ms, steps x ranks) whose waits lie in the backward pass, which takes 20 ms itself.

    `columns`: others, in ms or counts.
    """
    schema = trace.build_table_schema("step_records")
    wall = np.broadcast_to(own.max(axis=1, keepdims=True), own.shape)
    given = {"wall_ns": wall, "backward_ns": 20 + wall - own, **(columns or {})}
    made = []
    for rank in range(own.shape[1]):
        values = {name: np.round(array[:, rank] * (MS if name.endswith("_ns") else 1)).astype(np.int64) for name, array in given.items()}
        table = pl.DataFrame({"step": np.arange(own.shape[0]), **values}).with_columns(window=pl.lit("plain"))
        missing = [pl.lit(None, dtype=kind).alias(name) for name, kind in schema.items() if name not in table.columns]
        made.append(table.with_columns(missing).select(pl.col(name).cast(kind) for name, kind in schema.items()))
    return made
