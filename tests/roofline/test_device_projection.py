"""Kernels on another device: worked by hand, and the laws that hold for every pair of devices."""

from __future__ import annotations

from itertools import permutations

import handmade as h
import msgspec
import polars as pl
import pytest

from gpudiag.errors import InputError
from gpudiag.hardware.attained import estimate_dram_share, estimate_product_share, find_named_device
from gpudiag.model.hardware import Device
from gpudiag.model.timeline import PROJECTED_KINDS
from gpudiag.roofline.device_projection import bound_projection, load_projection_errors, project_kernels

A100_MHZ, H100_MHZ = 1410, 1980
CLOCKS = 2820
HBM = 0.872


def named(name: str) -> Device:
    return find_named_device(name).device


def kernels(*, device: str = "a100-sxm4-80gb", dtype: str = "c10::BFloat16") -> pl.DataFrame:
    """Return an addition of 3 x 1 GB, a product of 4096 x 4096 x 4096, an addition of a few bytes and a collective, costed on `device`."""
    million = 1_000_000
    works = [
        ("aten::add", [[500 * million], [500 * million]], 1_800, "vectorized_elementwise_kernel", dtype),
        ("aten::mm", [[4096, 4096], [4096, 4096]], 600, "gemm_kernel", dtype),
        ("aten::add", [[64], [64]], 3, "vectorized_elementwise_kernel", dtype),
        ("c10d::allreduce_", [[64]], 500, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", dtype),
    ]
    events, end = [], 0.0
    for number, (name, shapes, time_us, kernel, kind) in enumerate(works, 1):
        events += [
            h.op(name, end, end + 2, shapes, dtype=kind),
            h.call(end + 0.5, number),
            h.kernel(end + 2, end + 2 + time_us, number, kernel),
        ]
        end += time_us + 4
    return h.costed(*h.steps(0, end), *events, device=named(device)).kernels.sort("start_ns")


def test_factors_are_those_worked_by_hand() -> None:
    found = project_kernels(kernels(), named("a100-sxm4-80gb"), named("H100"))
    floors = [CLOCKS / clock * 1e-6 for clock in (A100_MHZ, H100_MHZ)]
    add = [floor + 3e9 / (rate * 1e9 * HBM) for floor, rate in zip(floors, (2039, 3352), strict=True)]
    flops, moved = 2 * 4096**3, 3 * 4096**2 * 2
    product = [
        floor + ((flops / peak / 1e12) ** 2 + (moved / (rate * 1e9 * HBM)) ** 2) ** 0.5
        for floor, peak, rate in zip(floors, (312 * 0.82, 989.4 * 0.82), (2039, 3352), strict=True)
    ]
    assert found.factor[0] == pytest.approx(add[1] / add[0], rel=1e-3)
    assert found.factor[1] == pytest.approx(product[1] / product[0], rel=1e-3)
    assert found.factor[2] == pytest.approx(A100_MHZ / H100_MHZ, rel=1e-2)  # latency alone: by the clocks
    assert found.factor[3] == pytest.approx(300 / 450)  # NVLink, GB/s one way
    assert [PROJECTED_KINDS[kind] for kind in found.kind] == ["memory", "products", "short", "communication"]


@pytest.mark.parametrize(("source", "target"), list(permutations(("a100-sxm4-80gb", "H200", "MI300X", "t4"), 2)))
def test_there_and_back_is_the_recorded_time(source: str, target: str) -> None:
    there = project_kernels(kernels(device=source, dtype="c10::Half"), named(source), named(target))
    back = project_kernels(kernels(device=target, dtype="c10::Half"), named(target), named(source))
    assert (there.factor * back.factor)[:3] == pytest.approx([1, 1, 1], rel=1e-3)


def test_collectives_go_over_pcie_without_a_link_and_keep_their_time_where_none_tells() -> None:
    source, target = named("a100-sxm4-80gb"), named("H100")
    assert project_kernels(kernels(), source, named("A10")).factor[3] == pytest.approx(300 / 31.5)
    assert project_kernels(kernels(), source, target, across_machines=True).factor[3] == 1
    unknown = msgspec.structs.replace(target, link_byte_per_s=None, pcie_byte_per_s=None)
    assert project_kernels(kernels(), source, unknown).factor[3] == 1


def test_boards_of_little_power_do_not_reach_their_fp32_peak() -> None:
    assert estimate_product_share(named("t4"), "fp32") == pytest.approx(70 / (8.1 * 17), rel=1e-3)
    assert estimate_product_share(named("v100-pcie-32gb"), "fp32") == 1
    assert estimate_product_share(named("H100"), "fp32") == 1  # the energy of a FLOP there is not known
    assert estimate_product_share(named("MI300X"), "bf16") == pytest.approx(708 / 1307.4)  # the device table's attained rate
    assert estimate_dram_share(named("t4")) < estimate_dram_share(named("H100"))


def test_work_that_the_other_device_has_no_units_for_is_told_apart() -> None:
    found = project_kernels(kernels(dtype="c10::Float8_e4m3fn", device="H100"), named("H100"), named("v100-sxm2-32gb"))
    assert PROJECTED_KINDS[found.kind[0]] == "memory"


@pytest.mark.parametrize("target", ["H100", "MI300X"])
def test_the_interval_holds_the_projection(target: str) -> None:
    source, other = named("a100-sxm4-80gb"), named(target)
    found = project_kernels(kernels(), source, other)
    low, high = bound_projection(found, source, other, load_projection_errors(same_maker=source.vendor == other.vendor).errors)
    assert (low <= found.factor).all()
    assert (high >= found.factor).all()
    assert (low < high).all()


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("H200", "h200-sxm"),
        ("h200-sxm", "h200-sxm"),
        ("NVIDIA A10G", "a10g"),
        ("mi300x", "mi300x"),
        ("A100", "a100-sxm4-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
    ],
)
def test_devices_are_found_by_id_name_and_product_line(text: str, row: str) -> None:
    assert named(text).id == row


def test_a_product_line_tells_which_boards_it_may_mean() -> None:
    assert "a100-pcie-40gb" in find_named_device("A100").others
    assert "h100-pcie" in find_named_device("h100").others
    assert find_named_device("a100-pcie-40gb").others == ()


@pytest.mark.parametrize(("text", "meant"), [("MI30X", "MI300X"), ("MI300Y", "MI300X"), ("", ""), ("gpu", ""), ("\x1b[31mH9", "")])
def test_a_device_that_is_in_no_row_is_one_line(text: str, meant: str) -> None:
    with pytest.raises(InputError) as raised:
        find_named_device(text)
    assert meant in str(raised.value)
    assert "\x1b" not in str(raised.value)
