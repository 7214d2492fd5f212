"""The comparison of ranks on a real job of 8 ranks, against figures of another program."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kept
import numpy as np
import polars as pl
import pytest
from realtraces import SHARED

from gpudiag.job import rank_summary
from gpudiag.job.job import compare_rank_summaries
from gpudiag.job.message_matching import match_messages
from gpudiag.job.messages import build_matched
from gpudiag.job.rank_summary import summarise_rank
from gpudiag.model.analysis import RankSummary
from gpudiag.model.timeline import BUCKETS

US = 1_000
CLOCK_US = 3
"""The trace has whole microseconds, and the reference takes what the kernels' clocks differ by as skew."""

Reference = dict[str, Any]


@cache
def _summaries() -> tuple[RankSummary, ...]:
    folder = SHARED / "traces" / "v100_dlrm_train_8ranks"
    if not folder.is_dir():
        pytest.skip(f"no traces in {folder}")
    return tuple(_summary(folder / f"rank{rank}.json.gz", rank) for rank in range(8))


def _summary(path: Path, rank: int) -> RankSummary:
    return rank_summary.decode_summary(rank_summary.encode_summary(summarise_rank(kept.analysis(path), rank=rank, path=str(path))))


@pytest.fixture
def reference() -> Reference:
    path = SHARED / "traces" / "reference" / "v100_dlrm_train_8ranks__multirank.json"
    if not path.is_file():
        pytest.skip(f"no reference {path}")
    loaded: Reference = json.loads(path.read_text())
    return loaded


def _by_call(read: Callable[[pl.DataFrame], pl.Expr]) -> np.ndarray:
    """Return a figure of each call (in the order of their ends) on each rank, in us."""
    summaries = _summaries()
    table = build_matched(summaries, match_messages(summaries))
    order = table.group_by("call").agg(pl.col("end_ns").min()).sort("end_ns")["call"].to_list()
    place = pl.col("call").replace_strict(order, list(range(len(order))))
    found = table.with_columns(place.alias("place"), read(table).alias("read")).sort("place", "rank")
    return np.asarray(found["read"].to_numpy()).reshape(-1, 8) / US


def test_every_wait_and_duration_is_that_of_the_reference(reference: Reference) -> None:
    waits = _by_call(lambda _: pl.col("wait_ns"))
    durations = _by_call(lambda _: pl.col("end_ns") - pl.col("arrival_ns"))
    assert waits.shape == (8, 8)
    assert np.abs(waits - np.array([each["wait_us"] for each in reference["collectives"]])).max() <= CLOCK_US
    assert (durations == np.array([each["dur_us"] for each in reference["collectives"]])).all()


def test_waits_of_each_rank_and_who_came_last(reference: Reference) -> None:
    job = compare_rank_summaries(_summaries(), {})
    told = {each["rank"]: each for each in reference["per_rank"]}
    waits = _by_call(lambda _: pl.col("wait_ns")).sum(axis=0)
    for row in job.ranks:
        assert abs(waits[row.rank] - told[row.rank]["total_wait_time_us"]) <= 8 * CLOCK_US
        assert row.arrived_last_share is not None
        assert round(row.arrived_last_share * 8) == told[row.rank]["times_arrived_last"]


def test_the_job_is_told_in_whole() -> None:
    job = compare_rank_summaries(_summaries(), {})
    assert (len(job.ranks), job.world_size, job.clocks.method, job.clocks.matched) == (8, 8, "unix", 8)
    assert sum(row.count for row in job.messages) == 8
    assert {row.kind for row in job.messages} == {"all_to_all", "all_reduce"}
    assert not any(row.unmatched for row in job.messages)
    assert all(row.own_ns is not None and row.wall_ns is not None and 0 < row.own_ns <= row.wall_ns for row in job.ranks)
    owns = sorted((row.own_ns or 0, row.rank) for row in job.ranks)
    assert job.shown_rank == owns[3][1]  # the lower of the two in the middle


def test_steps_of_a_summary_hold_their_breakdown_exactly() -> None:
    for summary in _summaries():
        walls = summary.steps["end_ns"] - summary.steps["start_ns"]
        assert (summary.steps.select(pl.sum_horizontal(BUCKETS))["compute"] == walls).all()
        assert {name: summary.steps[name].sum() for name in BUCKETS} == {name: getattr(summary.buckets_ns, name) for name in BUCKETS}


def test_a_rank_that_is_not_read_is_named_and_the_others_are_compared() -> None:
    job = compare_rank_summaries(_summaries()[:7], {7: "the file breaks off"})
    assert job.ranks[7].unread == "the file breaks off"
    assert job.ranks[7].wall_ns is None
    assert any("rank 7 was not read" in warning for warning in job.warnings)
    assert sum(row.count for row in job.messages) == 8
