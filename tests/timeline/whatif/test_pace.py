"""What faster kernels give at the pace of the run without the profiler, worked by hand (times in us)."""

from __future__ import annotations

import numpy as np
import pytest
import smallgraphs as small

from gpudiag.timeline.whatif.base import WhatIfContext
from gpudiag.timeline.whatif.study import Study, adjust_to_plain_pace


def study(kernel: float) -> Study:
    """A recorded step of 100 us that the host fills, with one kernel."""
    nodes = [small.node("host", 0, 80), small.node("launch", 80, 100, launch=0), small.node("kernel", 100, 100 + kernel, kernel=0)]
    edges = [small.edge(0, 1), small.edge(1, 2), small.edge(2, 3, "launch")]
    trace = small.trace(kernels=[{"name": "gemm", "busy_ns": round(kernel * 1000)}])
    return Study([small.graph(nodes, edges, end=100, last_host=2)], {}, WhatIfContext(trace, on_cpu=False))


def halved(of: Study, kernel: float) -> float:
    return of.share_with_kernels(np.array([kernel * 500.0]))


def test_in_a_step_that_the_slowed_host_fills_faster_kernels_give_nothing() -> None:
    assert study(62).mean_ns == 100_000
    assert halved(study(62), 62) == 0


def test_where_the_device_fills_the_plain_step_they_do() -> None:
    # 100 / 1.6 = 62.5 us, of which the kernel fills 62: the host may take as little as 0.5 / 1.6 of its 100 us
    plain = adjust_to_plain_pace(study(62), 1.6)
    assert plain.mean_ns == pytest.approx(62_000)
    assert halved(plain, 62) == pytest.approx(1 - 31.25 / 62)


def test_where_the_host_fills_the_plain_step_too_they_do_not() -> None:
    plain = adjust_to_plain_pace(study(40), 1.6)
    assert plain.mean_ns == pytest.approx(62_500, rel=0.03)
    assert halved(plain, 40) == 0


def test_a_plain_step_between_the_two_bounds_the_host_by_what_it_is_longer_than_the_device() -> None:
    # 80 us: a host of 78.4 to 80 us and nothing else explains them
    assert 78_400 <= adjust_to_plain_pace(study(62), 1.25).mean_ns <= 80_000
