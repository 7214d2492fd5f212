"""Ranks beside one another: mean steps, who stands for all, and what is said where something is not known."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from plantedjobs import BEGIN, MS, Calls, S, job, summary

from gpudiag.errors import InputError
from gpudiag.job.job import choose_shown_rank, compare_rank_summaries
from gpudiag.model.job import Job, RankRow
from gpudiag.model.timeline import BUCKETS


def late_by(late_ms: Sequence[float], steps: int = 6, transfer_ms: float = 1.0) -> Calls:
    """Return one all-reduce a step (100 ms) in which rank r arrives late_ms[r] after 10 ms."""
    at = BEGIN + np.arange(steps)[:, None] * 100 * MS + 10 * MS + np.round(np.array([late_ms]) * MS).astype(np.int64)
    members = ",".join(map(str, range(len(late_ms))))
    return Calls(range(len(late_ms)), at, round(transfer_ms * MS), members=members, size=len(late_ms), bytes=1 << 20)


def planted(late_ms: Sequence[float], unread: dict[int, str] | None = None) -> Job:
    return compare_rank_summaries(job([late_by(late_ms)], world_size=len(late_ms)), unread or {})


def test_means_of_a_step() -> None:
    found = planted([0, 30, 10, 20])
    assert [row.waiting_ns for row in found.ranks] == [30 * MS, 0, 20 * MS, 10 * MS]
    assert [row.exposed_waiting_ns for row in found.ranks] == [30 * MS, 0, 20 * MS, 10 * MS]
    assert [row.own_ns for row in found.ranks] == [70 * MS, 100 * MS, 80 * MS, 90 * MS]
    assert [row.arrived_last_share for row in found.ranks] == [0, 1, 0, 0]
    assert all(row.transfer_ns == MS and row.wall_ns == 100 * MS and row.steps == 6 for row in found.ranks)
    for row in found.ranks:
        assert row.buckets_ns is not None
        assert sum(getattr(row.buckets_ns, name) for name in BUCKETS) == row.wall_ns
    assert found.own is not None
    assert (found.own.median, found.own.least_rank, found.own.most_rank) == (85 * MS, 0, 1)


@pytest.mark.parametrize(("late", "shown"), [([0, 30, 10, 20], 2), ([0, 30, 10], 2), ([5, 5, 5, 5], 1), ([0, 9], 0)])
def test_the_rank_of_the_median_own_time_is_shown(late: list[float], shown: int) -> None:
    found = planted(late)
    assert found.shown_rank == shown
    assert "median of" in found.shown_reason
    assert "ms" in found.shown_reason


def test_messages_cover_no_more_than_the_exposed_communication_of_the_steps() -> None:
    """A planted step exposes 50 ms of communication: a wait of 80 ms cannot have held more of it back."""
    (row, _) = planted([0, 80]).ranks
    assert (row.waiting_ns, row.exposed_waiting_ns, row.own_ns) == (80 * MS, 50 * MS, 50 * MS)


def test_unread_ranks_have_a_row_and_a_reason() -> None:
    found = planted([0, 30, 10, 20], {4: "not on worker b"})
    assert [row.rank for row in found.ranks] == [0, 1, 2, 3, 4]
    assert found.ranks[4] == RankRow(rank=4, unread="not on worker b")


def test_without_matched_messages_nothing_is_known_of_waits() -> None:
    found = compare_rank_summaries([summary(rank, steps=[(0, (rank + 1) * 100 * MS)], clock="file") for rank in range(3)], {})
    assert found.clocks.method == "none"
    assert found.own is None
    assert all(row.own_ns is None and row.waiting_ns is None and row.clock_offset_ns is None for row in found.ranks)
    assert found.shown_rank == 1
    assert found.messages == ()
    assert found.straggler is None
    assert found.no_straggler


def test_offsets_are_those_of_the_clocks() -> None:
    found = compare_rank_summaries(job([late_by([0, 5])], offsets={1: 3 * S}, clock="file"), {})
    assert [row.clock_offset_ns for row in found.ranks] == [0, -3 * S]


def test_bad_jobs_are_told_in_one_line() -> None:
    with pytest.raises(InputError, match="no rank could be read"):
        compare_rank_summaries([], {0: "gone"})
    with pytest.raises(InputError, match="rank 2 comes twice"):
        compare_rank_summaries([summary(2), summary(2)], {})
    with pytest.raises(InputError, match="no rank holds a complete step"):
        compare_rank_summaries([summary(0, steps=[])], {})


def test_ranks_without_a_step_are_told_and_left_out() -> None:
    found = compare_rank_summaries([*job([late_by([0, 5])]), summary(2, steps=[])], {})
    assert found.ranks[2].unread == "no complete step was recorded"
    assert found.wall.most_rank in (0, 1)


def test_limits_of_the_comparison_are_warnings() -> None:
    ranks = [msgspec.structs.replace(each, world_size=size) for each, size in zip(job([late_by([0, 5, 9])]), (4, 4, 3), strict=True)]
    found = compare_rank_summaries(ranks, {})
    assert any("jobs of 3 and 4 ranks" in warning for warning in found.warnings)
    assert any(warning.startswith("rank 3 was not read") for warning in found.warnings)


def test_no_rank_is_typical_where_none_was_read() -> None:
    with pytest.raises(ValueError, match="no rank was read"):
        choose_shown_rank([RankRow(rank=0, unread="gone")])
