"""Bus bandwidth of collectives: op_costs section 14's worked examples and the names that torch, NCCL and c10d write."""

from __future__ import annotations

import pytest

from gpudiag.trace.collectives import compute_bandwidths, find_bus_factor

EXAMPLES = [
    ("all_reduce", 1_073_741_824, 8, 5_000, 214.748, 375.81),
    ("all_gather", 1_073_741_824, 8, 2_500, 429.497, 375.81),
    ("reduce_scatter", 2_147_483_648, 16, 20_000, 107.374, 100.663),
]


@pytest.mark.parametrize(("name", "moved", "ranks", "time_us", "algorithm", "bus"), EXAMPLES)
def test_worked_examples(name: str, moved: int, ranks: int, time_us: int, algorithm: float, bus: float) -> None:
    found = compute_bandwidths(name, moved, ranks, time_us * 1000)
    assert found is not None
    assert found[0] / 1e9 == pytest.approx(algorithm, rel=1e-5)
    assert found[1] / 1e9 == pytest.approx(bus, rel=1e-5)


def test_least_time_of_a_gradient_all_reduce_and_of_a_sharded_step() -> None:
    """28 GB of fp32 gradients over 8 ranks at 450 GB/s: 108.89 ms. FSDP: two bf16 gathers and an fp32 reduce-scatter: 49 GB."""
    reduce, part = find_bus_factor("allreduce", 8), find_bus_factor("_allgather_base", 8)
    assert reduce is not None
    assert part is not None
    assert 28e9 * reduce / 450e9 * 1e3 == pytest.approx(108.89, rel=1e-4)
    assert part * (2 * 2 + 4) * 7e9 == 49e9


@pytest.mark.parametrize(
    ("names", "factor"),
    [
        (("allreduce", "all_reduce", "allreduce_coalesced", "nccl:all_reduce", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), 2 * 3 / 4),
        (("_allgather_base", "all_gather_into_tensor_coalesced", "allgather", "ncclDevKernel_AllGather_RING_LL"), 3 / 4),
        (("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "ncclDevKernel_ReduceScatter_Sum_f32"), 3 / 4),
        (("all_to_all", "all_to_allv", "alltoall_base"), 3 / 4),
        (("broadcast", "_broadcast_oop", "reduce", "gather", "scatter", "send", "recv", "ncclDevKernel_SendRecv"), 1.0),
    ],
)
def test_spellings(names: tuple[str, ...], factor: float) -> None:
    assert {name: find_bus_factor(name, 4) for name in names} == dict.fromkeys(names, factor)


def test_what_is_not_known_is_not_a_number() -> None:
    assert find_bus_factor("barrier", 8) is None
    assert find_bus_factor("all_reduce", 0) is None
    assert find_bus_factor("all_reduce", 1) == 0.0  # nothing leaves the rank
    assert compute_bandwidths("all_reduce", None, 8, 10) is None
    assert compute_bandwidths("all_reduce", 10, None, 10) is None
    assert compute_bandwidths("all_reduce", 10, 8, 0) is None
