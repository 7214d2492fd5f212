"""Waits and transfers of planted messages: parts that sum, on one clock, exposed where nothing else ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plantedjobs import BEGIN, MS, US, Calls, S, job

from gpudiag.job.message_matching import match_messages
from gpudiag.job.messages import build_matched
from gpudiag.job.rank_summary import measure_exposed_until
from gpudiag.model.analysis import RankSummary


def table(summaries: Sequence[RankSummary]) -> pl.DataFrame:
    return build_matched(summaries, match_messages(summaries)).sort("call", "rank")


def one_call(arrivals_ms: Sequence[float], transfer_ms: float, **fields: Any) -> Calls:
    at = BEGIN + np.round(np.array([arrivals_ms]) * MS).astype(np.int64)
    ranks = range(len(arrivals_ms))
    fields = {"members": ",".join(map(str, ranks)), "size": len(arrivals_ms), **fields}
    return Calls(ranks, at, round(transfer_ms * MS), **fields)


def test_each_waits_for_the_last_and_the_rest_is_transfer() -> None:
    found = table(job([one_call([10, 12.5, 11], 3)]))
    assert found["wait_ns"].to_list() == [2_500_000, 0, 1_500_000]
    assert found["transfer_ns"].to_list() == [3 * MS] * 3
    assert found["exposed_wait_ns"].to_list() == [2_500_000, 0, 1_500_000]  # nothing else ran


@pytest.mark.parametrize(
    ("kind", "root", "waits"),
    [
        ("broadcast", 1, [2.5, 0, 1.5]),
        ("broadcast", 0, [0, 0, 0]),
        ("reduce", 0, [2.5, 0, 0]),
        ("gather", 1, [0, 0, 0]),
        ("scatter", 2, [1, 0, 0]),
    ],
)
def test_rooted_kinds_wait_for_the_root_or_the_root_for_all(kind: str, root: int, waits: list[float]) -> None:
    everyone = one_call([1, 1, 1], 1, seq=np.array([0]))
    found = table(job([everyone, one_call([10, 12.5, 11], 3, kind=kind, source=root, seq=np.array([1]))]))
    assert found.filter(pl.col("kind") == kind)["wait_ns"].to_list() == [round(wait * MS) for wait in waits]


@settings(max_examples=25, deadline=None)
@given(
    own=st.lists(st.lists(st.integers(0, 20 * MS), min_size=3, max_size=3), min_size=1, max_size=8),
    transfer=st.integers(0, 5 * MS),
    offsets=st.lists(st.integers(-100 * S, 100 * S), min_size=3, max_size=3),
    jitter=st.sampled_from([0, 100 * US]),
)
def test_wait_and_transfer_sum_to_the_time_in_the_message(own: list[list[int]], transfer: int, offsets: list[int], jitter: int) -> None:
    at = BEGIN + np.arange(len(own))[:, None] * 100 * MS + np.array(own)
    summaries = job(
        [Calls(range(3), at, transfer, members="0,1,2", size=3)], offsets=dict(enumerate(offsets)), clock="file", jitter_ns=jitter
    )
    found = table(summaries)
    assert found.height == 3 * len(own)
    assert (found["wait_ns"] + found["transfer_ns"] == found["end_ns"] - found["arrival_ns"]).all()
    assert (found["wait_ns"] >= 0).all()
    assert (found["transfer_ns"] >= 0).all()
    assert (found["exposed_wait_ns"] <= found["wait_ns"]).all()
    assert (found["exposed_wait_ns"] >= 0).all()
    last = at.max(axis=1)
    true = (last[:, None] - at).reshape(-1)
    order = found.sort("arrival_ns", "rank")  # calls lie 100 ms apart
    assert sorted(true.tolist()) == pytest.approx(sorted(order["wait_ns"].to_list()), abs=3 * jitter + 2)


def test_waits_in_two_messages_at_once_count_once() -> None:
    """Rank 0 waits from 10 to 30 in one message and from 15 to 35 in another: 25 ms of its time."""
    first = one_call([10, 30], 10, seq=np.array([0]), bytes=1)
    second = one_call([15, 35], 10, seq=np.array([1]), bytes=2)
    found = table(job([first, second])).filter(pl.col("rank") == 0)
    assert found["wait_ns"].to_list() == [20 * MS, 20 * MS]
    assert found["exposed_wait_ns"].sum() == 25 * MS


def exposed(row: dict[str, Any], length: int) -> int:
    frame = pl.DataFrame([row], schema_overrides={"exposed_by": pl.List(pl.UInt8)})
    return int(frame.select(measure_exposed_until(frame, pl.lit(length))).item())


def test_exposed_part_of_a_wait_by_the_pieces_of_the_message() -> None:
    whole = {"start_ns": 0, "end_ns": 1600, "exposed_ns": 1600, "exposed_by": None}
    assert [exposed(whole, length) for length in (0, 100, 1600)] == [0, 100, 1600]
    none = whole | {"exposed_ns": 0}
    assert exposed(none, 1000) == 0
    first_half = whole | {"exposed_ns": 800, "exposed_by": [round(min(piece / 8, 1) * 255) for piece in range(1, 16)]}
    assert exposed(first_half, 400) == pytest.approx(400, abs=4)
    assert exposed(first_half, 1200) == 800
    last_half = whole | {"exposed_ns": 800, "exposed_by": [round(max(piece / 8 - 1, 0) * 255) for piece in range(1, 16)]}
    assert exposed(last_half, 700) == 0
    assert exposed(last_half, 1200) == pytest.approx(400, abs=4)


def test_where_the_pieces_are_not_told_the_exposed_part_is_the_last_one() -> None:
    row = {"start_ns": 0, "end_ns": 1600, "exposed_ns": 600, "exposed_by": None}
    assert [exposed(row, length) for length in (900, 1000, 1300, 1600)] == [0, 0, 300, 600]
