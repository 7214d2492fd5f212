"""Elementary functions have a roof of their own: the bound is the roof that is nearest."""

from __future__ import annotations

import pytest

from gpudiag.hardware.device_peaks import resolve_device
from gpudiag.model.hardware import ObservedDevice
from gpudiag.model.ops import Input, Signature
from gpudiag.roofline.costs import estimate_cost

X = Signature((Input(dtype="fp32", shape=(1 << 20,)),))


def _special(name: str) -> int:
    cost = estimate_cost(name, X)
    assert hasattr(cost, "special")
    return int(cost.special)


def test_an_elementary_function_is_counted_once_an_element() -> None:
    assert [_special(f"aten::{name}") for name in ("gelu", "exp_", "tanh")] == 3 * [1 << 20]
    assert [_special(f"aten::{name}") for name in ("relu", "hardswish", "abs", "tanh_backward")] == 4 * [0]


def test_units_of_gpus() -> None:
    """H100: 16 a clock on 132 SMs at 1.83 to 1.98 GHz, 3.9 to 4.2 T/s (3.9 in the FlashAttention-3 paper); of 16 SMs their part."""
    device = resolve_device(ObservedDevice(name="NVIDIA H100 80GB HBM3", sm_count=132, compute_capability="9.0")).device
    assert device is not None
    assert device.special_per_s == pytest.approx(3.9e12, rel=0.08)
    part = resolve_device(ObservedDevice(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", sm_count=16, compute_capability="9.0")).device
    assert part is not None
    assert part.special_per_s == pytest.approx(device.special_per_s * 16 / 132)
