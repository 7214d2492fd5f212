"""Rows of messages: skew, waits, bandwidth and who comes last, with worked numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plantedjobs import BEGIN, MS, US, Calls, job

from gpudiag.job.message_matching import match_messages
from gpudiag.job.messages import build_calls, build_matched, build_message_rows
from gpudiag.model.analysis import RankSummary
from gpudiag.model.job import MessageRow

MIB = 1 << 20


def rows(summaries: list[RankSummary]) -> tuple[MessageRow, ...]:
    matches = match_messages(summaries)
    return build_message_rows(summaries, matches, build_calls(build_matched(summaries, matches)))[0]


def reductions(late_ms: list[list[float]], transfer_ms: float = 2.0, **fields: Any) -> Calls:
    at = BEGIN + np.arange(len(late_ms))[:, None] * 100 * MS + 10 * MS + np.round(np.array(late_ms) * MS).astype(np.int64)
    fields = {"members": "0,1", "size": 2, "bytes": 200 * MIB, "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", **fields}
    return Calls(range(at.shape[1]), at, round(transfer_ms * MS), **fields)


def test_a_kind_of_message_in_figures() -> None:
    (row,) = rows(job([reductions([[0, 4], [0, 6], [2, 0], [0, 8]])], link_byte_per_s=450e9, host="node 0"))
    assert (row.kind, row.group, row.members, row.count, row.unmatched) == ("all_reduce", "0,1", (0, 1), 4, 0)
    assert (row.skew_ns, row.skew_p95_ns) == (5 * MS, 8 * MS)
    assert row.waiting_ns == round((4 + 6 + 2 + 8) / 8 * MS)
    assert row.transfer_ns == 2 * MS
    assert (row.last_rank, row.last_share) == (1, 0.75)
    assert row.bytes == 200 * MIB
    assert row.name.startswith("ncclDevKernel")
    algorithm = 200 * MIB / 2e-3
    assert row.algbw_byte_per_s == pytest.approx(algorithm)
    assert row.busbw_byte_per_s == pytest.approx(algorithm)  # 2(n-1)/n = 1 for two ranks
    assert row.link_share == pytest.approx(algorithm / 450e9)


@pytest.mark.parametrize(
    ("fields", "calls"),
    [({"link_byte_per_s": 450e9, "host": {0: "node 0", 1: "node 1"}}, {}), ({}, {}), ({"link_byte_per_s": {0: 450e9, 1: None}}, {})],
)
def test_the_link_is_known_within_one_machine_only(fields: dict[str, Any], calls: dict[str, Any]) -> None:
    (row,) = rows(job([reductions([[0, 4]] * 3, **calls)], **fields))
    assert row.busbw_byte_per_s is not None
    assert row.link_share is None


def test_a_transfer_within_the_clocks_error_tells_no_bandwidth() -> None:
    late = [[0.0, 4.0]] * 60
    (sure,) = rows(job([reductions(late, transfer_ms=2)], jitter_ns=100 * US, clock="file"))
    assert sure.busbw_byte_per_s is not None
    (unsure,) = rows(job([reductions(late, transfer_ms=0.2)], jitter_ns=100 * US, clock="file"))
    assert unsure.algbw_byte_per_s is None
    assert unsure.busbw_byte_per_s is None
    assert unsure.transfer_ns > 0


def test_no_bandwidth_without_bytes_or_with_a_rank_that_was_not_read() -> None:
    (row,) = rows(job([reductions([[0, 4]] * 3, bytes=None)]))
    assert row.bytes is None
    assert row.algbw_byte_per_s is None
    calls = reductions([[0, 4, 2]] * 3, members="0,1,2", size=3)
    (row,) = rows(job([calls])[:2])
    assert row.count == 3
    assert row.busbw_byte_per_s is None


def test_calls_without_a_partner_are_counted() -> None:
    first, second = job([reductions([[0, 4]] * 5)])
    short = {name: getattr(second, name) for name in second.__struct_fields__} | {"messages": second.messages[:3]}
    (row,) = rows([first, RankSummary(**short)])
    assert (row.count, row.unmatched) == (3, 2)


def test_kinds_that_take_most_time_come_first() -> None:
    late = [[0.0, 4.0]] * 3
    gather = reductions([[20.0, 21.0]] * 3, kind="all_gather", bytes=MIB)
    assert [row.kind for row in rows(job([gather, reductions(late)]))] == ["all_reduce", "all_gather"]
