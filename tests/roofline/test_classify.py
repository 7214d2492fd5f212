"""Bounds and roofline times of single kernels, worked by hand on an A100 (19.5 TFLOP/s fp32, 156 TF32, 312 bf16; 2.039 TB/s; 108 SMs)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from factories import A100, CPU
from handmade import call, costed, kernel, mark, op, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from tracecheck import check_trace

from gpudiag.model.hardware import Device

CUBE = [[4096, 4096], [4096, 4096]]
CUBE_FLOP = 2 * 4096**3
V100 = msgspec.structs.replace(A100, name="V100", peaks={"fp32": 15.7e12, "fp16": 125e12}, bandwidth_byte_per_s=900e9, sm_count=80)


def one(*events: dict[str, Any], device: Device | None = A100, on_cpu: bool = False) -> dict[str, Any]:
    """Return the last kernel row of a step of 100 ms."""
    trace = costed(*steps(0, 100_000), *events, device=device, on_cpu=on_cpu)
    check_trace(trace, "cost")
    return trace.kernels.row(-1, named=True)


def launched(
    name: str, shapes: list[Any], length: float, *, dtype: str = "float", kernel_name: str = "k", device: Device | None = A100, **args: Any
) -> dict[str, Any]:
    """Return the row of one kernel that was queued behind another, so that no gap is before it."""
    before = [call(0, 1), kernel(0, 50, 1, "ncclDevKernel_before")]
    return one(*before, op(name, 5, 30, shapes, dtype=dtype), call(10, 2), kernel(50, 50 + length, 2, kernel_name, **args), device=device)


def test_compute_bound_by_the_peak_of_its_type() -> None:
    row = launched("aten::mm", CUBE, 1000, dtype="c10::BFloat16")
    assert row["t_roof_ns"] == pytest.approx(CUBE_FLOP / 312e12 * 1e9)
    assert (row["bound"], row["provenance"], row["flops"]) == ("compute", "exact", CUBE_FLOP)
    assert row["efficiency"] == pytest.approx(0.4405, abs=1e-4)


def test_memory_bound() -> None:
    row = launched("aten::add", [[10_000_000], [10_000_000], []], 100)
    assert row["bytes_moved"] == 120e6
    assert row["t_roof_ns"] == pytest.approx(120e6 / 2.039e12 * 1e9)  # 58.9 us
    assert row["bound"] == "memory"


def test_inefficient_but_long_and_large_is_no_overhead() -> None:
    row = launched("aten::add", [[1_000_000], [1_000_000], []], 100)
    assert row["efficiency"] < 0.3
    assert row["bound"] == "memory"


def test_an_elementary_function_is_bound_by_the_roof_that_is_nearest() -> None:
    """10^7 GELUs move 80 MB, 39 us of DRAM; at 10^11 functions a second they need 100 us: compute-bound, not 6 % of the memory roof."""
    slow = msgspec.structs.replace(A100, special_per_s=1e11)
    row = launched("aten::gelu", [[10_000_000]], 650, device=slow)
    assert (row["bound"], row["t_roof_ns"]) == ("compute", pytest.approx(1e5))
    assert launched("aten::relu", [[10_000_000]], 650, device=slow)["bound"] == "memory"
    row = launched("aten::gelu", [[10_000_000]], 650)  # where the rate is not known the memory roof stands alone
    assert (row["bound"], row["t_roof_ns"]) == ("memory", pytest.approx(80e6 / 2.039e12 * 1e9))


def test_overhead_of_a_short_or_small_kernel_below_the_roof() -> None:
    shapes = [[10_000], [10_000], []]
    assert launched("aten::add", shapes, 9.999)["bound"] == "overhead"
    assert launched("aten::add", shapes, 10)["bound"] == "memory"
    assert launched("aten::add", shapes, 100, grid=[107, 1, 1])["bound"] == "overhead"
    assert launched("aten::add", shapes, 100, grid=[108, 1, 1])["bound"] == "memory"
    # the floor of the device, where it was measured, moves the limit: 2 x 8 us
    slow = msgspec.structs.replace(A100, launch_floor_ns=8000.0)
    assert launched("aten::add", shapes, 15, device=slow)["bound"] == "overhead"


def test_a_short_kernel_near_its_roof_is_no_overhead() -> None:
    row = launched("aten::add", [[1_000_000], [1_000_000], []], 9)  # 12 MB in 9 us: 65 % of the roof
    assert row["efficiency"] == pytest.approx(0.654, abs=1e-3)
    assert row["bound"] == "memory"


WAITED = [op("aten::add", 60, 90, [[1_000_000], [1_000_000], []]), call(80, 2), kernel(100, 115, 2)]
BEFORE = [call(0, 1), kernel(0, 50, 1, "ncclDevKernel_before")]


def test_a_host_wait_longer_than_the_kernel_makes_it_overhead() -> None:
    assert one(*BEFORE, *WAITED)["bound"] == "overhead"  # idle from 50 to 100, ran 15 us
    queued = [op("aten::add", 10, 90, [[1_000_000], [1_000_000], []]), call(20, 2), kernel(100, 115, 2)]
    assert one(*BEFORE, *queued)["bound"] == "memory"  # issued at 20: the host was in time
    short_wait = [op("aten::add", 50, 56, [[1_000_000], [1_000_000], []]), call(51, 2), kernel(60, 75, 2)]
    assert one(*BEFORE, *short_wait)["bound"] == "memory"  # waited 10 us, ran 15 us
    long_kernel = [op("aten::add", 60, 90, [[1_000_000], [1_000_000], []]), call(80, 2), kernel(200, 250, 2)]
    assert one(*BEFORE, *long_kernel)["bound"] == "memory"  # 50 us and more: not judged by the gap


@pytest.mark.parametrize(
    "reason",
    [
        mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 60, 70, tid=3),
        call(60, None, api="cudaStreamSynchronize", end=70),
        call(60, None, api="hipDeviceSynchronize", end=70),
        call(60, None, api="cudaMalloc", end=70),
        call(60, None, api="cuMemMap", end=70),
        mark("_compile.compile_inner (dynamo_timed)", 60, 70, tid=3),
    ],
    ids=["loader", "sync", "hip sync", "malloc", "driver alloc", "compile"],
)
def test_a_wait_with_another_reason_is_no_overhead(reason: dict[str, Any]) -> None:
    assert one(*BEFORE, *WAITED, reason)["bound"] == "memory"
    elsewhere = reason | {"ts": 10}  # over before the device fell idle
    assert one(*BEFORE, *WAITED, elsewhere)["bound"] == "overhead"


@pytest.mark.parametrize(
    ("name", "bound", "moved", "nanoseconds"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "copy", 32e6, 1e6),
        ("Memcpy HtoD (Pinned -> Device)", "copy", 32e6, 1e6),
        ("Memcpy DtoH (Device -> Pageable)", "copy", 32e6, 1e6),
        ("Memcpy DtoH (Device -> Host)", "copy", 32e6, 1e6),
        ("CopyHostToDevice", "copy", 32e6, 1e6),
        ("CopyDeviceToHost", "copy", 32e6, 1e6),
        ("Memcpy PtoP (Device -> Device)", "copy", 32e6, 1e6),
        ("Memcpy DtoD (Device -> Device)", "memory", 64e6, 64e6 / 2.039e12 * 1e9),
        ("CopyDeviceToDevice", "memory", 64e6, 64e6 / 2.039e12 * 1e9),
        ("Memset (Device)", "memory", 32e6, 32e6 / 2.039e12 * 1e9),
    ],
)
def test_copies_and_memsets_by_name(name: str, bound: str, moved: float, nanoseconds: float) -> None:
    row = one(*BEFORE, call(10, 2), kernel(50, 2000, 2, name, bytes=32_000_000))
    assert (row["bound"], row["bytes_moved"], row["provenance"]) == (bound, moved, "exact")
    assert row["t_roof_ns"] == pytest.approx(nanoseconds)


def test_a_copy_between_devices_is_judged_by_the_link_between_them() -> None:
    device = msgspec.structs.replace(A100, link_byte_per_s=300e9)
    row = one(*BEFORE, call(10, 2), kernel(50, 2000, 2, "Memcpy PtoP (Device -> Device)", bytes=30_000_000), device=device)
    assert row["t_roof_ns"] == pytest.approx(1e5)


def test_a_copy_of_unknown_size_has_no_roof() -> None:
    row = one(*BEFORE, call(10, 2), kernel(50, 60, 2, "Memcpy HtoD (Pageable -> Device)"))
    assert (row["bound"], row["bytes_moved"], row["t_roof_ns"], row["efficiency"]) == ("copy", None, None, None)


def test_a_collective_is_communication_however_short() -> None:
    assert one(*BEFORE, call(80, 2), kernel(100, 102, 2, "ncclDevKernel_AllGather_RING_LL"))["bound"] == "communication"


def test_no_cost_is_unknown() -> None:
    row = launched("my::op", [], 100)
    assert (row["bound"], row["provenance"], row["flops"], row["t_roof_ns"]) == ("unknown", "none", None, None)


def test_without_a_device_or_its_bandwidth_bounds_are_unknown_but_work_is_counted() -> None:
    for device in (None, msgspec.structs.replace(A100, bandwidth_byte_per_s=None)):
        row = launched("aten::mm", CUBE, 1000, dtype="c10::BFloat16", device=device)
        assert (row["bound"], row["t_roof_ns"], row["flops"]) == ("unknown", None, CUBE_FLOP)


TF32_NAMES = [
    "ampere_s1688gemm_tf32_128x128_ldg8_f2f_stages_32x5_tn",
    "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16",
    "cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4",
]


@pytest.mark.parametrize("name", TF32_NAMES)
def test_tf32_by_kernel_name(name: str) -> None:
    assert launched("aten::mm", CUBE, 20_000, kernel_name=name)["t_roof_ns"] == pytest.approx(CUBE_FLOP / 156e12 * 1e9)


def test_fp32_by_name_or_when_nothing_tells() -> None:
    for name in ("ampere_sgemm_128x64_nn", "cutlass_80_simt_sgemm_128x128_8x4_nn_align1", "k"):
        assert launched("aten::mm", CUBE, 20_000, kernel_name=name)["t_roof_ns"] == pytest.approx(CUBE_FLOP / 19.5e12 * 1e9)


def test_tf32_by_a_rate_that_vector_units_cannot_reach() -> None:
    # 137.4 GFLOP in 1.3 ms are 106 TFLOP/s
    assert launched("aten::mm", CUBE, 1300)["t_roof_ns"] == pytest.approx(CUBE_FLOP / 156e12 * 1e9)
    assert launched("aten::mm", CUBE, 1300, device=V100)["t_roof_ns"] == pytest.approx(CUBE_FLOP / 15.7e12 * 1e9)  # has no TF32


def test_a_type_without_matrix_units_runs_at_the_fp32_rate_and_fp64_at_its_own() -> None:
    assert launched("aten::mm", CUBE, 20_000, dtype="c10::BFloat16", device=V100)["t_roof_ns"] == pytest.approx(CUBE_FLOP / 15.7e12 * 1e9)
    row = launched("aten::mm", CUBE, 20_000, dtype="double")
    assert (row["t_roof_ns"], row["bound"], row["flops"]) == (None, "unknown", CUBE_FLOP)
    known = msgspec.structs.replace(A100, peaks=A100.peaks | {"fp64": 9.7e12, "fp64_tensor": 19.5e12})
    assert launched("aten::mm", CUBE, 20_000, dtype="double", device=known)["t_roof_ns"] == pytest.approx(CUBE_FLOP / 19.5e12 * 1e9)


def test_what_fits_the_cache_is_judged_against_its_measured_bandwidth() -> None:
    shapes = [[1_000_000], [1_000_000], []]  # 12 MB
    device = msgspec.structs.replace(A100, cache_bytes=40_000_000, cache_bandwidth_byte_per_s=6e12)
    row = launched("aten::add", shapes, 20, device=device)
    assert (row["cache_resident"], row["t_roof_ns"]) == (True, pytest.approx(12e6 / 6e12 * 1e9))
    for other in (
        msgspec.structs.replace(device, cache_bytes=11_000_000),
        msgspec.structs.replace(device, cache_bandwidth_byte_per_s=None),
    ):
        row = launched("aten::add", shapes, 20, device=other)
        assert (row["cache_resident"], row["t_roof_ns"]) == (False, pytest.approx(12e6 / 2.039e12 * 1e9))


def test_work_without_length_has_no_efficiency() -> None:
    row = launched("aten::add", [[1000], [1000], []], 0)
    assert row["efficiency"] is None
    assert row["t_roof_ns"] > 0


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=6))
def test_the_cost_of_a_call_is_shared_by_its_kernels_to_the_last_flop(lengths: list[int]) -> None:
    events, now = [op("aten::mm", 5, 30, CUBE)], 50
    for row, length in enumerate(lengths):
        events += [call(10 + row, 2 + row), kernel(now, now + length, 2 + row)]
        now += length
    kernels = costed(*steps(0, 100_000), *events, device=A100).kernels
    assert kernels["flops"].sum() == pytest.approx(CUBE_FLOP, rel=1e-12)
    assert kernels["bytes_moved"].sum() == pytest.approx(3 * 4096 * 4096 * 4, rel=1e-12)
    ratios = kernels.drop_nulls("efficiency")["efficiency"].to_list()
    assert not ratios or max(ratios) == pytest.approx(min(ratios))


def test_dispatch_on_a_cpu_is_overhead_however_long() -> None:
    trace = costed(
        *steps(0, 1000),
        op("aten::linear", 0, 900, [[64, 32], [16, 32], []]),
        op("aten::mm", 100, 200, [[64, 32], [32, 16]]),
        device=CPU,
        on_cpu=True,
    )
    assert trace.kernels["bound"].to_list()[0] == "overhead"
    assert trace.kernels["flops"].to_list() == [0.0, 2 * 64 * 32 * 16]


@pytest.mark.parametrize(("shapes", "bound"), [([[64, 64], [64, 16]], "overhead"), ([[128, 64], [64, 32]], "compute")])
def test_a_product_of_a_cpu_does_its_flops_and_is_set_up(shapes: list[list[int]], bound: str) -> None:
    """Of 300 us the first needs 1.3 us at 100 GFLOP/s: no arithmetic fills the rest. The second needs 5.2 us, and may be a slow kernel."""
    assert one(op("aten::mm", 0, 300, shapes), device=CPU, on_cpu=True)["bound"] == bound
