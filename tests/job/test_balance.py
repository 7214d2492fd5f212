"""Batches of unequal work with known gains, by positions and by matrix FLOP."""

from __future__ import annotations

import numpy as np
import pytest
from jobs import MS, Floats, frame, record_frames, steps, summary

from gpudiag.job.parallelism import find_balance
from gpudiag.model.analysis import RANK_MESSAGES, RankSummary


def lengths(ranks: int = 4, count: int = 42) -> Floats:
    return np.random.default_rng(0).integers(100, 1000, (count, ranks)).astype(float)


def with_records(positions: Floats, forward: Floats) -> list[RankSummary]:
    """Return ranks whose backward passes take twice their forward passes, and which wait in them for the longest."""
    columns = {"forward_ns": forward, "batch_elements": positions}
    columns["wall_ns"] = np.broadcast_to(3 * forward.max(axis=1, keepdims=True), forward.shape)
    columns["backward_ns"] = columns["wall_ns"] - forward
    return [summary(rank, records=table) for rank, table in enumerate(record_frames(forward, columns))]


def test_lengths_that_decide_the_time() -> None:
    positions = lengths()
    found = find_balance(with_records(positions, positions / 10))
    assert found is not None
    assert found.measure == "positions"
    used = positions[2:]
    assert found.imbalance_share == pytest.approx(float((1 - used.mean(axis=1) / used.max(axis=1)).mean()))
    assert found.correlation == pytest.approx(1.0)
    gain = (used.max(axis=1) - used.mean(axis=1)).sum() / used.max(axis=1).sum()
    assert found.saved_share == pytest.approx(gain, rel=0.02)
    assert found.saved_ns == pytest.approx(gain * 3 * used.max(axis=1).mean() / 10 * MS, rel=0.02)
    means = used.mean(axis=0)
    assert (found.per_rank.least, found.per_rank.most) == pytest.approx((means.min(), means.max()))
    assert found.per_rank.most_rank == int(means.argmax())


def test_equal_lengths_save_nothing() -> None:
    found = find_balance(with_records(np.full((42, 4), 500.0), np.full((42, 4), 50.0)))
    assert found is not None
    assert (found.imbalance_share, found.saved_ns, found.correlation) == (0.0, 0, None)


def by_flops(work: Floats, busy: Floats) -> list[RankSummary]:
    """Return ranks that compute `work` FLOP a step in `busy` ms and wait for the longest."""
    walls = busy.max(axis=1)
    made = []
    for rank in range(work.shape[1]):
        parts = [{"compute": own, "exposed_communication": wall - own} for own, wall in zip(busy[:, rank], walls, strict=True)]
        made.append(summary(rank, steps=steps(walls.tolist(), parts, flops=work[:, rank].tolist()), messages=frame(RANK_MESSAGES)))
    return made


def test_without_positions_the_matrix_flop_tell() -> None:
    work = lengths(4, 6) * 1e9
    found = find_balance(by_flops(work, work / 1e10))
    assert found is not None
    assert found.measure == "matrix FLOP"
    assert found.imbalance_share == pytest.approx(float((1 - work.mean(axis=1) / work.max(axis=1)).mean()))
    assert found.correlation == pytest.approx(1.0)
    assert found.saved_share == pytest.approx((work.max(axis=1) - work.mean(axis=1)).sum() / work.max(axis=1).sum())


def test_flop_that_do_not_decide_the_time_save_nothing() -> None:
    work = lengths(4, 6) * 1e9
    found = find_balance(by_flops(work, np.full(work.shape, 50.0)))
    assert found is not None
    assert found.imbalance_share > 0.1
    assert (found.saved_ns, found.correlation) == (0, None)


def test_two_ranks_in_one_step_correlate_with_anything_so_nothing_is_told() -> None:
    """As two recordings that have nothing to do with each other, in one folder."""
    work = np.array([[1e9, 2e9]])
    found = find_balance(by_flops(work, np.array([[4.0, 383.0]])))
    assert found is not None
    assert found.correlation is None


def test_no_measure_of_work_no_balance() -> None:
    blind = [summary(rank, steps=steps([10.0], [{"compute": 10.0}])) for rank in range(2)]
    assert find_balance(blind) is None
    assert find_balance(with_records(lengths(1), lengths(1))) is None
