"""Facts about how ranks compare: planted step records with known answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from factories import CPU, analysis, kernel

from gpudiag.facts import Facts
from gpudiag.model import trace
from gpudiag.model.finding import Missing
from gpudiag.timeline import history

MS = 1_000_000


def records(ranks: int, steps: int, row: Callable[[int, int], dict[str, Any]]) -> pl.DataFrame:
    """Return plain step records; `row(step, rank)` gives columns in ms or counts."""
    schema = {**trace.build_table_schema("step_records"), "rank": pl.Int64()}
    rows = []
    for step in range(steps):
        for rank in range(ranks):
            given = {key: value * MS if key.endswith("_ns") else value for key, value in row(step, rank).items()}
            rows.append(dict.fromkeys(schema) | {"step": step, "rank": rank, "window": "plain"} | given)
    return pl.DataFrame(rows, schema=schema, orient="row")


def facts(frame: pl.DataFrame) -> Facts:
    made = analysis([kernel("aten::mm", 0, 500)], device=CPU, wall=1000)
    return Facts(msgspec.structs.replace(made, rank_records=lambda: frame))


def slow_loader(step: int, rank: int) -> dict[str, Any]:
    """Rank 2 of 4 loads for 40 ms, the others for 10; backward is 20 ms and the wait for rank 2."""
    late = rank == 2
    return {"wall_ns": 100, "loader_wait_ns": 40 if late else 10, "forward_ns": 30, "optimizer_ns": 10, "backward_ns": 20 if late else 50}


def test_a_rank_with_a_slow_loader_is_late() -> None:
    found = facts(records(4, 20, slow_loader))
    assert found.value("late_rank") == "2"
    assert found.value("late_rank_phase") == "loader"
    assert found.value("late_rank_own_ns") == 100 * MS
    assert found.value("other_ranks_own_ns") == 70 * MS
    assert found.value("straggler_share") == pytest.approx(30 / 70)
    assert found.value("late_rank_step_share") == 1.0
    assert found.value("late_rank_excess_ns") == pytest.approx(0.3 * 1_000_000)  # of an analysed window of 1 ms


def test_a_slow_device_is_slow_in_both_passes() -> None:
    """Forward 60 instead of 30 ms: the shortest backward pass of 60 ms counts as twice what it could be."""
    frame = records(
        2, 20, lambda _, rank: {"wall_ns": 130, "forward_ns": 60 if rank else 30, "optimizer_ns": 10, "backward_ns": 60 if rank else 90}
    )
    found = facts(frame)
    assert found.value("late_rank") == "1"
    assert found.value("late_rank_phase") == "forward"
    assert found.value("late_rank_excess_ns") == pytest.approx((30 + 30) / 130 * 1_000_000)


def test_ranks_that_take_turns_have_no_habit() -> None:
    def turn(step: int, rank: int) -> dict[str, Any]:
        late = step % 4 == rank
        return {"wall_ns": 100, "forward_ns": 60 if late else 30, "backward_ns": 40 if late else 70}

    found = facts(records(4, 22, turn))
    assert found.value("late_rank_step_share") == pytest.approx(0.25, abs=0.05)
    assert found.value("straggler_share") == pytest.approx(0, abs=1e-9)


def test_uneven_lengths_are_told_from_chance() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(100, 1000, (40, 2))

    def uneven(step: int, rank: int) -> dict[str, Any]:
        forward, longest = lengths[step, rank] / 10, lengths[step].max() / 10
        wall = 3 * longest
        return {"wall_ns": wall, "forward_ns": forward, "backward_ns": wall - forward, "batch_elements": int(lengths[step, rank])}

    found = facts(records(2, 40, uneven))
    assert found.value("length_imbalance_share") == pytest.approx(float((1 - lengths[2:].mean(1) / lengths[2:].max(1)).mean()))
    assert found.value("length_time_correlation") == pytest.approx(1.0)
    gain = float((lengths[2:].max(1) - lengths[2:].mean(1)).sum() / lengths[2:].max(1).sum())
    assert found.value("length_balanced_ns") == pytest.approx(gain * 1_000_000, rel=0.02)
    chance = facts(records(2, 40, lambda s, r: {**uneven(s, r), "forward_ns": 10 + ((s + r) * 7 % 5)}))
    assert abs(float(chance.value("length_time_correlation"))) < 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (records(1, 20, slow_loader), "only one rank"),
        (records(2, 8, slow_loader), "fewer than 10"),
        (records(2, 20, lambda *_: {"wall_ns": 100}), "no backward pass"),
    ],
)
def test_what_cannot_be_compared_says_why(frame: pl.DataFrame, words: str) -> None:
    found = facts(frame).value("straggler_share")
    assert isinstance(found, Missing)
    assert words in found.reason


def test_lengths_that_no_batch_told_are_not_known() -> None:
    found = facts(records(4, 20, slow_loader)).value("length_imbalance_share")
    assert isinstance(found, Missing)
    assert "attention_mask" in found.reason


def test_a_trace_alone_has_no_other_ranks() -> None:
    found = Facts(analysis([kernel("aten::mm", 0, 10)])).value("late_rank")
    assert isinstance(found, Missing)


def test_long_runs_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 rows at most 100 are compared: every fourth step, and the answer stays."""
    monkeypatch.setattr(history, "MOST_CELLS", 100)
    found = history.build_rank_steps(records(4, 100, slow_loader))
    assert isinstance(found, history.RankSteps)
    assert found.numbers.tolist() == list(range(4, 100, 4))
    assert facts(records(4, 100, slow_loader)).value("straggler_share") == pytest.approx(30 / 70)
