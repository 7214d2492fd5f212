"""Formatting: worked numbers, and what holds for every number."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag import units

NS_PER = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "unknown"),
        (0, "0 ns"),
        (7, "7 ns"),
        (0.5, "0.50 ns"),
        (999, "999 ns"),
        (999.9999, "1.00 us"),
        (1_500, "1.50 us"),
        (9_996, "10.0 us"),
        (99_960, "100 us"),
        (12_345_678, "12.3 ms"),
        (2_500_000_000, "2.50 s"),
        (86_400_000_000_000, "86400 s"),
        (-1_500, "-1.50 us"),
    ],
)
def test_durations(ns: float | None, text: str) -> None:
    assert units.format_ns(ns) == text


def test_sizes_work_and_rates() -> None:
    assert units.format_bytes(512) == "512 B"
    assert units.format_bytes(1.5e9) == "1.50 GB"
    assert units.format_flop(137e9) == "137 GFLOP"
    assert units.format_rate(3.35e12, "B") == "3.35 TB/s"  # H100 SXM memory
    assert units.format_rate(989.4e12, "FLOP") == "989 TFLOP/s"  # H100 SXM bf16
    assert [units.format_bytes(None), units.format_flop(None), units.format_rate(None, "B")] == ["unknown"] * 3


def test_shares() -> None:
    assert units.format_share(0.4249) == "42 %"
    assert units.format_share(0.4249, 1) == "42.5 %"
    assert units.format_share(None) == "unknown"


@given(st.floats(min_value=1, max_value=9e11))
def test_a_duration_reads_back_within_half_a_percent_with_three_digits(ns: float) -> None:
    match = re.fullmatch(r"([0-9.]+) (ns|us|ms|s)", units.format_ns(ns))
    assert match is not None
    assert float(match[1]) * NS_PER[match[2]] == pytest.approx(ns, rel=0.0051)
    assert len(match[1].replace(".", "")) <= 3


def test_counts_have_no_decimals_where_they_are_whole_and_one_else() -> None:
    assert [units.format_count(value) for value in (0, 1, 2.5, 14.0, 13.97, 99.94, 292.3, 1242)] == [
        "0", "1", "2.5", "14", "14", "99.9", "292", "1,242",
    ]  # fmt: skip
