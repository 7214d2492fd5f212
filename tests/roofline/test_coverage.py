"""Shares of the kernel time: what is linked, what has a cost."""

from __future__ import annotations

from factories import A100
from handmade import call, costed, kernel, op, steps

from gpudiag.roofline.coverage import coverage


def test_shares_of_the_kernel_time() -> None:
    events = [
        op("aten::mm", 0, 10, [[8, 8], [8, 8]]), call(5, 1), kernel(1000, 1400, 1),  # 400 modelled
        op("my::op", 10, 20, [[100]]), call(15, 2), kernel(1400, 1500, 2),  # 100 generic
        op("my::other", 20, 30, []), call(25, 3), kernel(1500, 1600, 3),  # 100 with shapes of nothing: unknown
        op("aten::relu", 30, 40), call(35, 4), kernel(1600, 1700, 4),  # 100 without shapes
        call(45, 5), kernel(1700, 1750, 5),  # 50 outside every op
        kernel(900, 1000, 77),  # 100 launched before the window
        call(50, 6, api="cudaGraphLaunch"), kernel(1750, 1800, 6),  # 50 replayed (outside every op too)
        op("aten::copy_", 60, 70, [[8], [8]]), call(65, 7), kernel(1800, 1900, 7, "Memcpy DtoD (Device -> Device)", bytes=32),  # 100
    ]  # fmt: skip
    found = coverage(costed(*steps(0, 2000), *events, device=A100))
    assert (found.kernels, found.kernel_ns, found.attributable_ns) == (8, 1_000_000, 600_000)
    assert found.modelled_share == 400 / 600
    assert found.generic_share == 100 / 600
    assert found.unknown_share == 100 / 600
    assert found.modelled_share_of_all == 0.4
    assert found.linked_share == 0.8
    assert found.without_launch_share == 0.1
    assert found.outside_ops_share == 0.1
    assert found.without_shapes_share == 0.1
    assert found.replay_share == 0.05


def test_no_kernels_no_shares() -> None:
    found = coverage(costed(*steps(0, 10), op("aten::mm", 0, 5), device=None))
    assert (found.kernels, found.kernel_ns, found.linked_share, found.modelled_share, found.modelled_share_of_all) == (
        0,
        0,
        None,
        None,
        None,
    )
