"""Peaks measured on a real GPU against its data sheet, and a trace of known work against those peaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpudiag
from gpudiag.hardware import calibration
from gpudiag.hardware.calibration import observe_device
from gpudiag.hardware.device_peaks import resolve_device
from gpudiag.model.hardware import Device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA/HIP GPU here (torch {torch.__version__} sees none)"),
]

RECORD = Path(__file__).resolve().parents[2] / "samples" / "gpu" / "record.py"


@pytest.fixture(scope="module")
def table() -> Device:
    device = resolve_device(observe_device(torch, torch.cuda.get_device_properties(torch.cuda.current_device()))).device
    if device is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is not in the device table")
    return device


@pytest.fixture(scope="module")
def measured() -> Device:
    return calibration.measure_in_child("cuda")


def test_no_measured_peak_is_above_the_data_sheet(measured: Device, table: Device) -> None:
    assert measured.provenance == "measured"
    wrong = [note for note in measured.notes if "entry" in note]
    assert not wrong, wrong
    assert 0.5 <= measured.peaks["bf16"] / table.peaks["bf16"] <= 1.03


def test_bandwidths_are_those_of_dram_cache_and_link(measured: Device, table: Device) -> None:
    assert measured.bandwidth_byte_per_s is not None
    assert table.bandwidth_byte_per_s is not None
    assert 0.6 <= measured.bandwidth_byte_per_s / table.bandwidth_byte_per_s <= 1.03
    assert measured.cache_bandwidth_byte_per_s is not None
    assert measured.cache_bandwidth_byte_per_s > measured.bandwidth_byte_per_s
    host = measured.host_copy_byte_per_s
    assert host["h2d pinned"] > 0.8 * host["h2d pageable"]
    assert measured.pcie_byte_per_s == max(host.values())


def test_the_launch_floor_is_that_of_a_gpu(measured: Device) -> None:
    assert measured.launch_floor_ns is not None
    assert 300 < measured.launch_floor_ns < 20_000
    assert measured.key is not None


@pytest.mark.parametrize(("allowed", "engines"), [(False, {"fp32", "fp32_tensor"}), (True, {"tf32"})])
def test_fp32_products_are_judged_by_the_engine_that_ran_them(tmp_path: Path, *, allowed: bool, engines: set[str]) -> None:
    if allowed and (torch.version.hip or torch.cuda.get_device_capability() < (8, 0)):
        pytest.skip("this device has no TF32")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        left, right = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
        with gpudiag.profile(str(tmp_path / "run")) as prof:
            for _ in prof.steps(range(22)):
                left @ right
                torch.cuda.synchronize()
    finally:
        torch.set_float32_matmul_precision(before)
    rows = [row for row in gpudiag.diagnose(str(tmp_path / "run")).data.ops if row.name == "aten::mm"]
    assert {row.engine for row in rows} <= engines
    for row in rows:
        assert row.flops == row.count * 2 * 4096**3
        assert row.efficiency is not None
        assert 0.3 < row.efficiency <= 1.03


@pytest.mark.slow
def test_the_samples_are_modelled_and_below_their_roofs(tmp_path: Path) -> None:
    command = [sys.executable, str(RECORD), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") > 5][1:]
    assert len(lines) == 10
    for name, _, modelled, *_ in lines:
        assert float(modelled.rstrip("%")) >= 95, (name, modelled)
