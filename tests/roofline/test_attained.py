"""What-ifs at a share of the roof promise no more than the device's best products attain within the power limit."""

from __future__ import annotations

import polars as pl
import pytest

from gpudiag.hardware.device_peaks import resolve_device
from gpudiag.model.hardware import Device, ObservedDevice
from gpudiag.roofline.kernel_bounds import estimate_attainable_ns


def _resolve(sms: int) -> Device:
    observed = ObservedDevice(name="AMD Instinct MI300X", sm_count=sms, memory_bytes=192 * 2**30 * sms // 304, compute_capability="9.4")
    device = resolve_device(observed).device
    assert device is not None
    return device


def test_a_product_at_80_percent_of_its_roof_takes_what_the_best_take() -> None:
    """708 GFLOP of bf16: 0.542 ms at the peak of 1,307 TFLOP/s, 0.677 ms at 80 % of it; the best take 1 ms. A copy has its roof alone."""
    device = _resolve(304)
    roof = 708e9 / 1307.4e12 * 1e9
    kernels = pl.DataFrame({"engine": ["bf16", None, "bf16"], "flops": [708e9, 0.0, 708e9], "t_roof_ns": [roof, 100.0, None]})
    assert kernels.select(estimate_attainable_ns(device, 0.8)).to_series().to_list() == [pytest.approx(1e6), 125.0, None]
    assert kernels.select(estimate_attainable_ns(device, 0.25)).to_series()[0] == pytest.approx(roof / 0.25)
    assert kernels.select(estimate_attainable_ns(None, 0.8)).to_series()[0] == pytest.approx(roof / 0.8)


def test_a_partition_attains_its_part() -> None:
    assert _resolve(38).attainable_rate("bf16", 0.8) == pytest.approx(708e12 / 8)
    assert _resolve(304).attainable_rate("fp32_tensor", 0.8) == pytest.approx(0.8 * 163.4e12)  # AMD does not say
    assert _resolve(304).attainable_rate("fp4", 0.8) is None
