"""Who has bytes for whom: sums of each row as nccl-tests counts what a rank sends, and the exact ones where they were recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plantedjobs import MS, summary

from gpudiag.job.messages import find_traffic
from gpudiag.model.analysis import RankSummary
from gpudiag.model.job import Traffic
from gpudiag.trace.collectives import find_bus_factor

KIB = 1024


def told(rank: int, calls: list[dict[str, Any]], steps: int = 1, **fields: Any) -> RankSummary:
    names = sorted({name for call in calls for name in call})
    columns: dict[str, Any] = {name: [call.get(name) for call in calls] for name in names}
    at = np.arange(len(calls)) * MS
    columns |= {"start_ns": at, "end_ns": at + MS, "step": [call.get("step", 0) for call in calls]}
    return summary(rank, columns, [(row * 100 * MS, (row + 1) * 100 * MS) for row in range(steps)], **fields)


def traffic(summaries: list[RankSummary], world: int | None = None) -> Traffic:
    found = find_traffic(summaries, world)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_rows_sum_to_what_nccl_tests_counts(kind: str) -> None:
    size, members = 96 * KIB, "0,1,2,3"
    found = traffic([told(rank, [{"kind": kind, "members": members, "bytes": size}]) for rank in range(4)])
    factor = find_bus_factor(kind, 4)
    assert factor is not None
    for rank, row in enumerate(found.bytes):
        assert sum(row) == round(factor * size)
        assert row[rank] == 0
        assert len({part for other, part in enumerate(row) if other != rank}) == 1


def test_uneven_exchanges_send_what_was_recorded() -> None:
    """Rank 0 has 1, 2 and 5 rows of 1 KiB for the ranks, itself included; bytes is the larger of the two sides."""
    call = {"kind": "all_to_all", "members": "0,1,2", "in_splits": "1,2,5", "sent": 8 * 256, "received": 16 * 256, "bytes": 16 * KIB}
    found = traffic([told(0, [call]), told(1, [{**call, "in_splits": "0,0,0", "sent": 0}]), told(2, [])])
    assert found.bytes == ((0, 2 * KIB, 5 * KIB), (0, 0, 0), (0, 0, 0))


def test_roots_and_pairs() -> None:
    sends = [
        {"kind": "point_to_point", "source": 0, "target": 1, "bytes": 300},
        {"kind": "point_to_point", "source": 2, "target": 0, "bytes": 50},
    ]
    got = [{"kind": "point_to_point", "source": 0, "target": 1, "bytes": 300}]
    rooted = {"kind": "broadcast", "members": "0,1,2", "source": 1, "bytes": 10}
    found = traffic([told(0, [*sends, rooted]), told(1, [*got, rooted])], world=3)
    # rank 2 was not read: what it sent is known from its receiver
    assert found.bytes == ((0, 300, 0), (10, 0, 10), (50, 0, 0))
    assert "1 rank sent that could not be read" in found.note


def test_a_mean_step_and_what_is_missing() -> None:
    calls = [{"kind": "all_reduce", "members": "0,1", "bytes": 1000, "step": step} for step in range(2)]
    calls += [{"kind": "all_reduce", "members": "0,1", "step": 0}, {"kind": "all_reduce", "bytes": 7, "step": 1}]
    outside = {"kind": "all_reduce", "members": "0,1", "bytes": 10**9, "step": None}
    found = traffic([told(0, [*calls, outside], steps=2), told(1, [])])
    assert found.bytes[0] == (0, 1000)
    assert "2 messages without recorded bytes or ranks not counted" in found.note


def test_many_ranks_are_told_in_blocks_that_keep_the_sum() -> None:
    members = ",".join(map(str, range(130)))
    found = traffic([told(rank, [{"kind": "all_reduce", "members": members, "bytes": 130 * 1000}]) for rank in range(130)])
    assert found.ranks[:2] == ("0-3", "4-7")
    assert found.ranks[-1] == "128-129"
    assert len(found.ranks) == 33
    assert sum(map(sum, found.bytes)) == 130 * 129 * 2000
    assert found.bytes[0][0] == 4 * 3 * 2000


def test_no_bytes_no_traffic() -> None:
    assert find_traffic([told(0, [{"kind": "all_reduce", "members": "0,1"}]), told(1, [])], 2) is None
    assert find_traffic([told(0, [{"kind": "barrier", "members": "0,1", "bytes": 4}])], 2) is None
