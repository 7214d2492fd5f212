"""Exchanges of experts with known loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest
from jobs import MS, frame, ops, steps, summary
from msgspec.structs import replace

from gpudiag.job.message_matching import EMPTY_MATCHED, MATCHED
from gpudiag.job.parallelism import find_experts
from gpudiag.model.analysis import RANK_MESSAGES, RankSummary

STEPS = 2


def exchanges(loads: Sequence[int], *, named: str = "aten::_grouped_mm", splits: bool = True) -> list[RankSummary]:
    """Return ranks of 100 tokens whose experts receive `loads` in each of two layers, and send them back; each exchange takes 2 ms."""
    made, tokens, exposed = [], 100, 2.0
    for rank, load in enumerate(loads):
        there: dict[str, Any] = {"kind": "all_to_all", "sent": tokens, "received": load, "exposed_ns": round(exposed * MS)}
        if splits:
            there["in_splits"] = "50,50"
        back = there | {"sent": load, "received": tokens}
        rows = [row | {"step": step, "start_ns": 0, "end_ns": MS} for step in range(STEPS) for row in (there, back, there, back)]
        table = steps([40.0] * STEPS, [{"compute": 40.0 - 4 * exposed, "exposed_communication": 4 * exposed}] * STEPS)
        operators = ops({named: 20.0}, STEPS)
        made.append(summary(rank, steps=table, wall_ns=80 * MS, messages=frame(RANK_MESSAGES, rows), ops=operators))
    return made


def test_the_loads_of_the_experts() -> None:
    found = find_experts(exchanges([40, 160, 100, 100]), EMPTY_MATCHED)
    assert found is not None
    assert found.all_to_all_share == pytest.approx(8 / 40)
    assert found.received is not None
    assert (found.received.least, found.received.median, found.received.most) == (80, 200, 320)
    assert (found.received.least_rank, found.received.most_rank) == (0, 1)
    assert found.imbalance_share == pytest.approx(1 - 100 / 160)
    assert found.waiting_share is None


def test_even_experts_have_no_imbalance() -> None:
    found = find_experts(exchanges([100, 100]), EMPTY_MATCHED)
    assert found is not None
    assert found.imbalance_share == 0.0


def test_waits_before_the_last_rank_are_a_part() -> None:
    waits = [{"call": step, "rank": 0, "step": step, "kind": "all_to_all", "exposed_wait_ns": 6 * MS} for step in range(STEPS)]
    found = find_experts(exchanges([100, 100]), frame(MATCHED, waits))
    assert found is not None
    assert found.waiting_share == pytest.approx(6 / 40 / 2)  # rank 1 waits for nobody


def test_rows_of_embedding_tables_are_no_tokens() -> None:
    assert find_experts(exchanges([40, 160], named="aten::embedding_bag"), EMPTY_MATCHED) is None


def test_even_exchanges_without_a_sign_of_experts_are_not_theirs() -> None:
    assert find_experts(exchanges([100, 100], named="aten::mm", splits=False), EMPTY_MATCHED) is None
    assert find_experts(exchanges([40, 160], named="aten::mm"), EMPTY_MATCHED) is not None


def test_sizes_that_were_not_recorded_leave_the_loads_unknown() -> None:
    unknown = pl.lit(None, dtype=pl.Int64).alias("received")
    blind = [replace(made, messages=made.messages.with_columns(unknown)) for made in exchanges([40, 160])]
    found = find_experts(blind, EMPTY_MATCHED)
    assert found is not None
    assert found.received is None
    assert found.imbalance_share is None


def test_no_exchange_no_experts() -> None:
    assert find_experts([summary(0), summary(1)], EMPTY_MATCHED) is None
