"""Bandwidths of collectives in the report: bytes of all calls over their kernel time, where size and ranks were recorded."""

from __future__ import annotations

from pathlib import Path

import kept
import pytest


def test_bandwidths_of_a_real_trace(traces: Path) -> None:
    """The gradient all-reduce of 8 ranks: bus bandwidth is 2 * 7/8 of the algorithm's. A kernel without a recorded message has none."""
    data = kept.report(traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz")
    known = [row for row in data.collectives if row.name == "allreduce"]
    assert known
    for row in known:
        assert row.bytes is not None
        assert row.algbw_byte_per_s == pytest.approx(row.bytes * row.count / row.kernel_ns * 1e9)
        assert row.busbw_byte_per_s == pytest.approx(1.75 * row.algbw_byte_per_s)
    unknown = [row for row in data.collectives if row.bytes is None]
    assert unknown
    assert {(row.algbw_byte_per_s, row.busbw_byte_per_s) for row in unknown} == {(None, None)}
