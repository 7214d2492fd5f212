"""Jobs of ranks whose true clocks, arrivals and transfers are known, as the summaries that the ranks would send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.model.analysis import RANK_MESSAGES, RANK_OPS, RANK_STEPS, RankSummary
from gpudiag.model.timeline import BUCKETS

US, MS, S = 1_000, 1_000_000, 1_000_000_000
BEGIN = 1_700_000_000 * S
"""Unix time at which planted jobs begin."""

Ints = npt.NDArray[np.int64]


def table(columns: Sequence[Any], given: Mapping[str, Any], height: int) -> pl.DataFrame:
    """Return a table of this schema; a column that is not given is null, a single value stands in all rows."""
    made = []
    for column in columns:
        value = given.get(column.name)
        many = isinstance(value, (list, np.ndarray, pl.Series))
        made.append(pl.Series(column.name, value if many else [value] * height, dtype=column.dtype))
    return pl.DataFrame(made)


def summary(
    rank: int,
    messages: Mapping[str, Any] | None = None,
    steps: Sequence[tuple[int, int]] = ((0, 100 * MS),),
    first: int | None = 10,
    **fields: Any,
) -> RankSummary:
    """Return the summary of a rank: its messages as columns, its steps as (start, end), numbered from `first` (None: no numbers)."""
    messages = messages or {}
    height = len(messages["start_ns"]) if messages else 0
    walls = np.array([end - start for start, end in steps], dtype=np.int64)
    given = {
        "name": [f"ProfilerStep#{row}" for row in range(len(steps))],
        "number": None if first is None else np.arange(len(steps)) + first,
        "start_ns": np.array([start for start, _ in steps]),
        "end_ns": np.array([end for _, end in steps]),
        **{bucket: np.zeros(len(steps), dtype=np.int64) for bucket in BUCKETS},
    }
    given["compute"], given["exposed_communication"] = walls // 2, walls - walls // 2
    return RankSummary(
        rank=rank,
        path=f"rank{rank}.json",
        **{
            "messages": table(RANK_MESSAGES, messages, height),
            "steps": table(RANK_STEPS, given, len(steps)),
            "ops": table(RANK_OPS, {}, 0),
            "wall_ns": int(walls.sum()),
            "clock": "unix",
            **fields,
        },
    )


class Calls:
    """Calls of one group in true time: arrivals (calls x ranks) and the moment at which all leave."""

    def __init__(self, ranks: Sequence[int], arrivals: Ints, transfer: Ints | int, **fields: Any) -> None:
        self.ranks = list(ranks)
        self.arrivals = arrivals
        self.transfer = np.broadcast_to(np.asarray(transfer), len(arrivals))
        self.fields = {"kind": "all_reduce", "bytes": 4096, "group": "0", **fields}

    @property
    def ends(self) -> Ints:
        """Return the true end of each call."""
        return np.asarray(self.arrivals.max(axis=1) + self.transfer)

    def of(self, rank: int) -> dict[str, Ints | Any]:
        """Return the columns of one member, in true time."""
        own = self.arrivals[:, self.ranks.index(rank)]
        fields = {key: value[rank] if isinstance(value, dict) else value for key, value in self.fields.items()}
        return {"start_ns": own, "end_ns": self.ends, "exposed_ns": self.ends - own, **fields}


def job(
    calls: Sequence[Calls],
    *,
    offsets: Mapping[int, int] | None = None,
    drifts: Mapping[int, float] | None = None,
    step_ns: int = 100 * MS,
    steps: Mapping[int, range] | None = None,
    jitter_ns: int = 0,
    numbers: bool = True,
    **fields: Any,
) -> list[RankSummary]:
    """Return the summaries of all members of `calls`, whose clocks run `offsets` ahead and fast by `drifts`.

    Steps of step_ns begin at BEGIN; `steps`: the steps that a rank recorded (default: as many as hold all calls). jitter_ns: how much later
    than the true end a rank may leave. numbers=False: steps bear no numbers.
    """
    ranks = sorted({rank for each in calls for rank in each.ranks})
    last = max(int(each.ends.max()) for each in calls)
    every = range((last - BEGIN) // step_ns + 1)
    random = np.random.default_rng(7)
    made = []
    for rank in ranks:
        seen = (steps or {}).get(rank, every)
        parts = [_frame(each.of(rank)) for each in calls if rank in each.ranks]
        rows = pl.concat(parts, how="diagonal_relaxed").sort("start_ns")
        step = (rows["start_ns"] - BEGIN) // step_ns
        rows = rows.with_columns(step.alias("number")).filter(pl.col("number").is_between(seen.start, seen.stop - 1))
        rows = rows.with_columns(
            (pl.col("number") - seen.start).alias("step"), pl.col("end_ns") + pl.Series(random.integers(0, jitter_ns + 1, rows.height))
        )

        def clock(t: Any, rank: int = rank) -> Any:
            ahead = (np.asarray(t) - BEGIN) * (drifts or {}).get(rank, 0.0)
            return np.asarray(t) + (offsets or {}).get(rank, 0) + np.round(ahead).astype(np.int64)

        columns = {name: rows[name] for name in rows.columns if name != "number"}
        columns |= {name: clock(rows[name].to_numpy()) for name in ("start_ns", "end_ns")}
        bounds = clock(BEGIN + np.arange(seen.start, seen.stop + 1) * step_ns)
        given = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
        own = {key: value[rank] if isinstance(value, dict) else value for key, value in fields.items()}
        made.append(summary(rank, columns, given, first=seen.start if numbers else None, **own))
    return made


def _frame(columns: Mapping[str, Any]) -> pl.DataFrame:
    height = len(columns["start_ns"])
    return pl.DataFrame({name: value if isinstance(value, (np.ndarray, list)) else [value] * height for name, value in columns.items()})
