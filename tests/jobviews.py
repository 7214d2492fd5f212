"""Hand-made jobs of any number of ranks for the renderers' tests. `from jobviews import job, with_job`."""

from __future__ import annotations

import random
import statistics
from typing import Any

import msgspec
from noticewords import texts

from gpudiag.model.job import (
    Balance,
    Clocks,
    Difference,
    Experts,
    Job,
    MessageRow,
    Pipeline,
    RankRow,
    Spread,
    Straggler,
    Traffic,
)
from gpudiag.model.notices import NoticeCode, make_notice
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import BucketsNs

US, MS = 1_000, 1_000_000

LATE_NS = 21 * MS
"""What the late rank's loader takes beyond that of the others."""


def job(count: int = 8, *, late: int | None = -1, **changes: Any) -> Job:
    """Return a data-parallel job of `count` ranks on one or more machines of 8; `late`: the rank whose loader is slow (-1: the last)."""
    late = count - 1 if late == -1 else late
    rng = random.Random(7)
    loader = [(1 + rng.random()) * MS + (LATE_NS if rank == late else 0) for rank in range(count)]
    computed = [(80 + 3 * rng.random()) * MS for _ in range(count)]
    rows = [
        _row(rank, round(loader[rank]), round(computed[rank]), max(map(sum, zip(loader, computed, strict=True)))) for rank in range(count)
    ]
    if late is not None:
        rows = [msgspec.structs.replace(row, arrived_last_share=0.91 if row.rank == late else 0.09 / max(1, count - 1)) for row in rows]
    by_own = sorted(rows, key=lambda row: row.own_ns or 0)
    shown = by_own[(count - 1) // 2].rank
    made = Job(
        ranks=tuple(rows),
        world_size=count,
        shown_rank=shown,
        shown_reason="its own time is the median of the ranks'",
        wall=_spread(rows, "wall_ns"),
        own=_spread(rows, "own_ns"),
        exposed_communication=_spread(rows, "exposed_communication_ns"),
        clocks=Clocks(method="messages", matched=1_240, error_ns=14 * US),
        messages=messages(count, late),
        straggler=None if late is None else straggler(late, statistics.median(row.own_ns or 0 for row in rows)),
        no_straggler="" if late is not None else "the ranks take turns in arriving last",
        traffic=traffic(count),
    )
    return msgspec.structs.replace(made, **changes)


def _row(rank: int, loader_ns: int, compute_ns: int, slowest_ns: float) -> RankRow:
    memory, transfer, launch = 22 * MS, 9 * MS, 4 * MS
    wait = round(slowest_ns) - loader_ns - compute_ns
    buckets = BucketsNs(
        compute=compute_ns,
        memory=memory,
        exposed_communication=transfer + wait,
        idle_data=loader_ns,
        idle_launch=launch,
        idle_dependency=MS,
    )
    wall = sum(msgspec.structs.astuple(buckets))
    return RankRow(
        rank=rank, device="NVIDIA H100 80GB HBM3", host=f"node{rank // 8:02d}", steps=6, wall_ns=wall, own_ns=wall - wait,
        waiting_ns=wait + MS, exposed_waiting_ns=wait, transfer_ns=2 * transfer, exposed_communication_ns=transfer + wait,
        buckets_ns=buckets, arrived_last_share=0.1, clock_offset_ns=rank * 3 * US,
    )  # fmt: skip


def _spread(rows: list[RankRow], field: str) -> Spread:
    values = {row.rank: getattr(row, field) for row in rows}
    least, most = min(values, key=lambda rank: values[rank]), max(values, key=lambda rank: values[rank])
    return Spread(median=statistics.median_low(values.values()), least=values[least], most=values[most], least_rank=least, most_rank=most)


def straggler(rank: int, median_ns: float) -> Straggler:
    """Return a rank with a slow loader since step 420."""
    return Straggler(
        rank=rank,
        excess_ns=LATE_NS,
        excess_share=LATE_NS / median_ns,
        last_share=0.91,
        since_step=420,
        cause="loader",
        reason="it waits 22.4 ms a step for its batches, the median rank 1.50 ms",
        differences=(
            Difference(what="idle_data", own=22.4 * MS, median=1.5 * MS),
            Difference(what="op aten::copy_", own=3.1 * MS, median=2.0 * MS),
            Difference(what="sm_clock_mhz", own=1410, median=1755, unit="MHz"),
        ),
        whole_run=True,
    )


def messages(count: int, late: int | None) -> tuple[MessageRow, ...]:
    """Return three kinds of messages of all ranks."""
    members = tuple(range(count))
    last = {"last_rank": late, "last_share": 0.91} if late is not None else {}
    small = MessageRow(
        kind="broadcast", group="default_pg", members=members, count=12, bytes=48, skew_ns=12 * US, skew_p95_ns=40 * US, waiting_ns=6 * US,
        transfer_ns=9 * US, unmatched=3,
    )  # fmt: skip
    large = [
        MessageRow(
            kind="all_reduce", name="ncclDevKernel_AllReduce_Sum_bf16_RING_LL", group="default_pg", members=members, count=calls,
            bytes=size, skew_ns=14 * MS, skew_p95_ns=22 * MS, waiting_ns=11 * MS, transfer_ns=round(size / 200), algbw_byte_per_s=200e9,
            busbw_byte_per_s=350e9, link_share=0.78, **last,
        )
        for calls, size in ((24, 52_428_800), (6, 8_400_000))
    ]  # fmt: skip
    return (small, *large)


def traffic(count: int) -> Traffic:
    """Return the traffic of a ring over the ranks; beyond 64 of them over ranges of ranks."""
    size = -(-count // 64)
    names = tuple(f"{k}" if size == 1 else f"{k}-{min(k + size, count) - 1}" for k in range(0, count, size))
    square = [[0] * len(names) for _ in names]
    for k in range(len(names)):
        square[k][(k + 1) % len(names)] += 750_000_000
        square[k][k] += 0 if size == 1 else 5_250_000_000
    return Traffic(ranks=names, bytes=tuple(map(tuple, square)), note="Collectives are shared out as a ring sends them.")


def shapes() -> dict[str, Any]:
    """Return a pipeline, experts and unequal batches, as fields of a Job."""
    return {
        "pipeline": Pipeline(
            stages=4, micro_batches=8, bubble_share=0.36, ideal_share=3 / 11, slowest_stage_rank=2, imbalance_share=0.12
        ),
        "experts": Experts(
            all_to_all_share=0.18, waiting_share=0.07, imbalance_share=0.22,
            received=Spread(median=1_200_000, least=900_000, most=1_600_000, least_rank=1, most_rank=3),
        ),
        "balance": Balance(
            measure="positions", per_rank=Spread(median=3_500, least=3_100, most=4_000, least_rank=0, most_rank=5), imbalance_share=0.12,
            saved_ns=8 * MS, saved_share=0.06,
        ),
    }  # fmt: skip


def partly(count: int = 8) -> Job:
    """Return a job of which one rank could not be read and two were not given, without matched messages."""
    found = job(count, late=None)
    unknown = {"waiting_ns": None, "exposed_waiting_ns": None, "transfer_ns": None, "arrived_last_share": None, "own_ns": None}
    rows = [msgspec.structs.replace(row, **unknown) for row in found.ranks]
    rows[3] = RankRow(rank=3, unread="trace-rank3.json.gz: the file ends in the middle of an event")
    return msgspec.structs.replace(
        found, ranks=tuple(rows), world_size=count + 2, own=None, messages=(), clocks=Clocks(method="none"), traffic=None,
        no_straggler="no message could be matched", notice=make_notice(NoticeCode.STRAGGLER_UNKNOWN, text="no message could be matched"),
        warnings=("rank 3 could not be read",), notices=texts("rank 3 could not be read"),
    )  # fmt: skip


def with_job(report: ReportData, found: Job) -> ReportData:
    """Return a report of the rank that `found` shows."""
    return msgspec.structs.replace(report, job=found, ranks=found.ranks)
