"""The device table agrees with itself, with the physics of its chips and with the knowledge that it was made from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gpudiag.hardware.device_peaks import build_device
from gpudiag.hardware.device_table import Row, load_table

TABLE = load_table()
ROWS = pytest.mark.parametrize("row", TABLE.devices, ids=lambda row: row.id)

# Data sheets cut these below what the chip's rates give (header of devices.yaml).
CUT = {("h800-sxm", "fp64"), ("h800-sxm", "fp64_tensor"), ("a10g", "int8"), ("l40", "int8")}


def test_ids_are_unique_and_the_table_is_read_once() -> None:
    ids = [row.id for row in TABLE.devices]
    assert len(ids) == len(set(ids)) >= 43
    assert load_table() is TABLE


@ROWS
def test_peaks_are_sms_times_rate_times_clock(row: Row) -> None:
    if row.chip.rates is None:
        assert row.id in {"h20", "h20-3e", "gb300", "p4"}
        return
    for dtype, rate in TABLE.rates[row.chip.rates].items():
        peak = row.peaks_tflop_per_s.get(dtype)
        if peak is None or (row.id, dtype) in CUT:
            continue
        boost, tensor = row.chip.boost_clock_mhz, row.chip.tensor_clock_mhz or row.chip.boost_clock_mhz
        clocks = {"fp32": [boost], "fp64": [boost], "fp64_tensor": [boost, tensor]}.get(dtype, [tensor])  # H100 boosts in fp64_tensor too
        errors = [abs(row.chip.sm_count * rate * mhz / 1e6 / peak - 1) for mhz in clocks]
        assert min(errors) <= 0.035, (dtype, peak, errors)


@ROWS
def test_figures_are_of_a_plausible_size(row: Row) -> None:
    device = build_device(row, TABLE)
    assert device.bandwidth_byte_per_s is not None
    assert 1.9e11 <= device.bandwidth_byte_per_s <= 1e13
    assert device.cache_bytes is None or 2 * 2**20 <= device.cache_bytes <= 2**29
    assert (device.cache_bytes is None) <= (row.provenance.confidence != "datasheet")
    assert device.launch_floor_ns == 2000
    assert device.peaks["fp16"] >= device.peaks["fp32"] >= device.peaks["fp64"]
    assert 17 < device.peaks["fp16"] / device.bandwidth_byte_per_s < 700  # ridge points of op_costs.md 0.1: 37 to 419
    assert device.vendor == row.chip.vendor
    assert device.source.startswith(f"device table, row {row.id}: ")


@ROWS
def test_sources_exist_and_patterns_compile(row: Row) -> None:
    assert row.provenance.sources
    assert set(row.provenance.sources) <= TABLE.sources.keys()
    assert row.chip.rates is None or row.chip.rates in TABLE.rates
    assert re.compile(row.match)
    assert row.names


def test_links_are_one_direction() -> None:
    by_id = {row.id: build_device(row, TABLE) for row in TABLE.devices}
    assert by_id["h100-sxm5-80gb"].link_byte_per_s == 450e9  # NVLink 4: 900 GB/s both directions
    assert by_id["h200-sxm"].pcie_byte_per_s == 63e9  # PCIe 5 x16
    assert by_id["gh200-96gb"].pcie_byte_per_s == 450e9  # NVLink-C2C: 900 GB/s both directions
    assert by_id["gb200"].pcie_byte_per_s is None
    assert by_id["t4"].link_byte_per_s is None


def test_the_last_level_cache_of_cdna3_is_the_infinity_cache() -> None:
    row = next(row for row in TABLE.devices if row.id == "mi300x")
    assert build_device(row, TABLE).cache_bytes == 256 * 2**20


def test_fp32_gemm_peak_of_amd_is_the_matrix_rate() -> None:
    row = next(row for row in TABLE.devices if row.id == "mi210")
    device = build_device(row, TABLE)
    assert (device.matrix_peak("fp32"), device.vector_peak) == (45.3e12, 22.6e12)
    assert device.matrix_peak("fp64") == 45.3e12


def test_types_without_a_matrix_path_run_at_the_vector_rate() -> None:
    row = next(row for row in TABLE.devices if row.id == "v100-sxm2-32gb")
    device = build_device(row, TABLE)
    assert device.matrix_peak("bf16") == device.matrix_peak("tf32") == device.vector_peak == 15.7e12


def test_every_figure_is_that_of_the_knowledge_base(knowledge: Path) -> None:
    known = yaml.safe_load((knowledge / "devices.yaml").read_text())
    rows = {row.id: row for row in TABLE.devices}
    for entry in known["devices"]:
        row = rows[entry["id"]]
        others = {"fp32_tensor": "fp32_matrix"}
        for dtype, tflops in row.peaks_tflop_per_s.items():
            assert tflops == {**entry.get("other_peaks_tflops", {}), **entry["peak_tflops"]}.get(others.get(dtype, dtype)), (row.id, dtype)
        assert {key for key, value in entry["peak_tflops"].items() if value is not None} <= row.peaks_tflop_per_s.keys()
        assert row.memory.gbyte_per_s == entry["memory_bandwidth_gbs"]
        assert row.memory.gib == entry["memory_gb"]
        assert row.chip.sm_count == entry["sm_count"]
        assert row.chip.boost_clock_mhz == entry["boost_clock_mhz"]
        assert row.chip.compute_capability == entry["compute_capability"]
        assert (row.links.peer_gbyte_per_s or 0) * 2 == entry["nvlink_gbs"]
        assert row.provenance.confidence == entry["confidence"]
    for key, rates in known["arch_rates"].items():
        assert TABLE.rates[key] == rates


@pytest.mark.parametrize(
    ("name", "fp32", "fp16"),
    [  # as published: GA102, Ada and RTX Blackwell papers (fp16 with fp32 accumulation); data sheets of the RTX boards, less their sparsity
        ("NVIDIA GeForce RTX 3080", 29.8, 59.5), ("NVIDIA GeForce RTX 3070", 20.3, 40.6), ("NVIDIA GeForce RTX 4080", 48.7, 97.5),
        ("NVIDIA GeForce RTX 5080", 56.3, 112.6), ("NVIDIA GeForce RTX 5070 Ti", 43.9, 87.9), ("NVIDIA RTX A5000", 27.8, 111.1),
        ("NVIDIA RTX 5000 Ada Generation", 65.3, 261.1), ("NVIDIA RTX 4000 Ada Generation", 26.7, 106.9),
        ("NVIDIA RTX 5000 Ada Generation Laptop GPU", 42.6, 170.5),
    ],
)  # fmt: skip
def test_derived_peaks_are_the_published_ones(name: str, fp32: float, fp16: float) -> None:
    row = next(row for row in TABLE.devices if name in row.names)
    assert row.peaks_tflop_per_s["fp32"] == pytest.approx(fp32, rel=0.005)
    assert row.peaks_tflop_per_s["fp16"] == pytest.approx(fp16, rel=0.005)
    assert row.peaks_tflop_per_s["fp64"] == row.peaks_tflop_per_s["fp32"] / 64


def test_a_laptop_states_the_range_of_its_clock() -> None:
    laptops = [row for row in TABLE.devices if row.name.endswith("Laptop")]
    assert len(laptops) >= 20
    for row in laptops:
        assert row.chip.tdp_w is None
        assert "as the laptop's maker sets it" in row.notes[0]
