"""The GPU's calibration with a torch whose clock is known: 1 ms for everything that is timed on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpudiag.hardware import benchmarks as bench
from gpudiag.hardware import calibration as cuda
from gpudiag.hardware.device_peaks import resolve_device
from gpudiag.model.hardware import Device

H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "multi_processor_count": 132,
    "total_memory": 85_000_000_000,
    "L2_cache_size": 52_428_800,
    "warp_size": 32,
    "uuid": "GPU-1",
}


class FakeTensor:
    """Takes part in every call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class FakeTorch:
    """As much of torch as the measurements use; remembers the products that it was asked for."""

    __version__ = "2.13.0"

    def __init__(self, hip: str | None = None, without: tuple[str, ...] = (), **properties: Any) -> None:
        self.version = SimpleNamespace(hip=hip)
        self.precision, self.products = "highest", []
        self.without = without
        self.properties = SimpleNamespace(**properties)
        self.cuda = SimpleNamespace(
            current_device=lambda: 0,
            get_device_properties=lambda _: self.properties,
            empty_cache=lambda: None,
            Event=lambda **_: SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 1.0),
        )
        for name in ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz"):
            setattr(self, name, name)

    def get_float32_matmul_precision(self) -> str:
        return self.precision

    def set_float32_matmul_precision(self, precision: str) -> None:
        self.precision = precision

    def empty(self, *_: Any, **__: Any) -> FakeTensor:
        return FakeTensor()

    ones = zeros = empty

    def _product(self, kind: str) -> None:
        if kind in self.without:
            raise RuntimeError(f"no {kind} here")
        self.products.append((kind, self.precision))

    def mm(self, *_: Any, **__: Any) -> None:
        self._product("mm")

    def _int_mm(self, *_: Any) -> None:
        self._product("int8")

    def _scaled_mm(self, *_: Any, **__: Any) -> None:
        self._product("fp8")


@pytest.fixture(autouse=True)
def _floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_cuda_launch_floor_ns", lambda _: 1800.0)


def test_every_type_is_measured_and_the_precision_is_put_back() -> None:
    torch = FakeTorch(major=9, minor=0, **H100)
    device = cuda.calibrate_cuda(torch, 0.05)
    assert {"bf16", "fp16", "fp32", "tf32", "fp64_tensor", "int8", "fp8"} <= device.peaks.keys()
    assert device.peaks["bf16"] == 2 * 4096**3 / (1e-3 / 4)  # four products in 1 ms; larger ones do not fit the budget
    assert ("mm", "high") in torch.products
    assert torch.precision == "highest"
    assert device.provenance == "measured"
    assert device.launch_floor_ns == 1800.0


def test_bandwidths_and_links() -> None:
    device = cuda.calibrate_cuda(FakeTorch(major=9, minor=0, **H100), 0.05)
    assert device.bandwidth_byte_per_s == pytest.approx(12 * (1 << 30) / 8 / 1e-3)  # add_: 2 reads, 1 write of half the working set
    assert device.cache_bandwidth_byte_per_s == pytest.approx(12 * (52_428_800 // 2) / 8 / (1e-3 / 50))  # 50 launches back to back
    assert device.host_copy_byte_per_s.keys() == {"h2d pinned", "d2h pinned", "h2d pageable", "d2h pageable"}
    assert device.pcie_byte_per_s == (1 << 28) / 1e-3


def test_what_cannot_be_measured_is_the_tables_and_said() -> None:
    device = cuda.calibrate_cuda(FakeTorch(major=9, minor=0, without=("fp8", "int8"), **H100), 0.05)
    base = resolve_device(cuda.observe_device(FakeTorch(major=9, minor=0, **H100), SimpleNamespace(major=9, minor=0, **H100))).device
    assert base is not None
    assert device.peaks["fp8"] == base.peaks["fp8"]
    assert "Not measured, from the device table: fp64, fp8, int8." in device.notes


def test_no_tf32_and_no_fp8_where_the_device_has_none() -> None:
    def kinds(**changes: Any) -> set[str]:
        torch = FakeTorch(**changes)
        return {gemm.key for gemm in cuda._list_gemms(torch, torch.properties)}

    assert kinds(major=7, minor=0) == {"bf16", "fp16", "fp32", "fp64", "int8"}
    assert kinds(major=8, minor=0) == {"bf16", "fp16", "fp32", "fp64", "int8", "tf32"}
    assert kinds(major=8, minor=9) == {"bf16", "fp16", "fp32", "fp64", "int8", "tf32", "fp8"}
    assert kinds(major=9, minor=4, hip="6.2") == {"bf16", "fp16", "fp32", "fp64", "int8", "fp8"}


def test_a_figure_above_the_data_sheet_is_reported_as_a_wrong_entry() -> None:
    base = Device(
        id="x", name="X", kind="gpu", provenance="datasheet", source="s", peaks={"bf16": 100e12, "fp16": 100e12}, bandwidth_byte_per_s=1e12
    )
    assert cuda.list_above_table(base, {"bf16": 103e12, "fp16": 110e12, "fp8": 300e12}, 1.02e12) == [
        "Measured fp16 peak 110 TFLOP/s is 10 % above the device table (100 TFLOP/s): the table's entry for X is wrong."
    ]
    assert len(cuda.list_above_table(base, {}, 1.2e12)) == 1
    assert cuda.list_above_table(None, {"bf16": 1e15}, 1e15) == []
    assert cuda.list_above_table(msgspec.structs.replace(base, bandwidth_byte_per_s=None), {}, 1e15) == []


def test_the_device_is_told_from_others_by_its_uuid() -> None:
    keys = {cuda.calibrate_cuda(FakeTorch(major=9, minor=0, **(H100 | {"uuid": uuid})), 0.01).key for uuid in ("GPU-1", "GPU-2")}
    assert len(keys) == 2
    without = {key: value for key, value in H100.items() if key != "uuid"}
    assert cuda.calibrate_cuda(FakeTorch(major=9, minor=0, **without), 0.01).key == "NVIDIA H100 80GB HBM3 #0"
