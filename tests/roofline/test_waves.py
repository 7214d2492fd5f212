"""Waves and occupancy, worked by hand on an A100 (108 SMs, 2048 threads an SM)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from factories import A100
from handmade import call, costed, kernel, op, steps

from gpudiag.attribution.steps import find_steps
from gpudiag.roofline.op_table import build_op_table


def waves(grid: int, block: int, occupancy: float | None, **changes: Any) -> float | None:
    args = {} if occupancy is None else {"est. achieved occupancy %": occupancy}
    events = [*steps(0, 1000), call(5, 1), kernel(10, 20, 1, grid=[grid, 1, 1], block=[block, 1, 1], **args)]
    return costed(*events, device=msgspec.structs.replace(A100, **changes)).kernels["waves"][0]


def test_waves_are_blocks_over_what_fits_at_once() -> None:
    # 50 % of 2048 threads are 4 blocks of 256 an SM: 432 blocks at once
    assert waves(4320, 256, 50) == pytest.approx(10)
    assert waves(432, 256, 50) == pytest.approx(1)
    # a grid that fits at once: libkineto's occupancy is that of the blocks that there are (2 an SM: 25 %)
    assert waves(216, 256, 25) == pytest.approx(1)


def test_whole_percents_are_read_as_whole_blocks() -> None:
    assert waves(147, 128, 9) == pytest.approx(1)  # 147 / 108 = 1.36 blocks an SM are 8.5 %
    assert waves(1080, 64, 6) == pytest.approx(5)  # 2 blocks of 64 are 6.25 %


def test_fewer_blocks_than_sms_are_part_of_a_wave() -> None:
    assert waves(27, 256, 3) == pytest.approx(0.25)


def test_smaller_sms_hold_fewer_threads() -> None:
    assert waves(4320, 256, 50, compute_capability="8.6") == pytest.approx(4320 / 108 / 3)  # 1536 threads: 3 blocks


def test_unknown_where_it_was_not_recorded() -> None:
    assert waves(4320, 256, None) is None
    assert waves(4320, 256, 0) is None  # written where it could not be computed
    assert waves(4320, 256, 50, sm_count=None) is None
    assert waves(4320, 256, 50, vendor="amd") is None


def test_rows_hold_means_over_the_time_with_a_record() -> None:
    lengths = {1: (100, 50), 2: (300, 100), 3: (500, None)}
    events = [*steps(0, 5000), op("aten::relu", 0, 50, [[1000]])]
    for number, (length, occupancy) in lengths.items():
        args = {} if occupancy is None else {"est. achieved occupancy %": occupancy}
        events += [
            call(5 + number, number),
            kernel(1000 * number, 1000 * number + length, number, block=[256, 1, 1], grid=[4320, 1, 1], **args),
        ]
    trace = costed(*events, device=A100)
    row = build_op_table(trace, find_steps(trace).table).row(0, named=True)
    assert row["occupancy"] == pytest.approx((100 * 0.5 + 300 * 1.0) / 400)
    assert row["waves"] == pytest.approx((100 * 10 + 300 * 5) / 400)
