"""Published utilisations: each from figures that multiply out, shown where the type compares, and marked where the device is another."""

from __future__ import annotations

from typing import Any

import pytest
from factories import CPU

from gpudiag.facts.efficiency import MAX_REFERENCES, PUBLISHED_MFUS, list_mfu_references
from gpudiag.hardware.device_peaks import resolve_device
from gpudiag.hardware.device_table import load_table
from gpudiag.model.hardware import Device, ObservedDevice

FLOP_PER_TOKEN = 6 * 8_030_261_248 + 12 * 32 * 32 * 128 * 8192
"""Llama-3.1-8B at 8192 tokens: 6N + 12LHQT."""


@pytest.mark.parametrize(
    ("what", "flop_per_s", "share"),
    [
        ("FSDP, eager", 5762 * FLOP_PER_TOKEN, 0.356),
        ("torch.compile", 6667 * FLOP_PER_TOKEN, 0.412),
        ("Megatron-LM", 502e15 / 3072, 0.52),
        ("ZeRO-Infinity on 512", 25e15 / 512, 0.39),
        ("22B on Frontier", 73.5e12, 0.3838),
        ("175B on Frontier", 69.2e12, 0.3614),
        ("1T on Frontier", 61.2e12, 0.3196),
        ("Fuyou", 156e12, 0.472),
    ],
)
def test_figures_multiply_out(what: str, flop_per_s: float, share: float) -> None:
    (found,) = [item for item in PUBLISHED_MFUS if what in item.what]
    assert found.flop_per_s == pytest.approx(flop_per_s, rel=2e-3)
    assert found.share == pytest.approx(share, abs=6e-3)


def test_every_figure_names_a_device_of_the_table_its_denominator_and_source() -> None:
    known = {row.id for row in load_table().devices}
    for item in PUBLISHED_MFUS:
        assert item.device in known
        assert 0 < item.share < 1
        assert item.source
        assert item.peak.startswith(f"{item.peak_flop_per_s / 1e12:g} TFLOP/s (")


def _observed(name: str, **facts: Any) -> Device:
    device = resolve_device(ObservedDevice(index=0, name=name, **facts)).device
    assert device is not None
    return device


@pytest.mark.parametrize(
    ("name", "count"),
    [("NVIDIA H100 80GB HBM3", MAX_REFERENCES), ("NVIDIA A100-SXM4-80GB", 1), ("Tesla V100-SXM3-32GB", 3), ("NVIDIA GeForce RTX 4090", 2)],
)
def test_figures_of_the_very_device_need_no_caution(name: str, count: int) -> None:
    found = list_mfu_references(_observed(name), "bf16")
    assert [item.another_device for item in found] == [False] * count


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NVIDIA H20", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 SXM"),
        ("NVIDIA H200", "H100 SXM"),
        ("NVIDIA A30", "A100 SXM"),
        ("Tesla V100-PCIE-16GB", "V100 of a DGX-2"),
        ("NVIDIA L4", "RTX 4090"),
        ("AMD Instinct MI210", "MI250X"),
    ],
)
def test_a_device_that_only_shares_the_architecture_is_told_so(name: str, said: str) -> None:
    found = list_mfu_references(_observed(name), "bf16")
    assert found
    assert all(item.another_device and said in item.denominator for item in found)


def test_a_partition_is_another_device() -> None:
    whole, part = (_observed("NVIDIA A100-SXM4-80GB", sm_count=count, compute_capability="8.0") for count in (108, 42))
    assert [item.another_device for item in (*list_mfu_references(whole, "fp16"), *list_mfu_references(part, "fp16"))] == [False, True]


def test_nothing_is_shown_for_other_architectures_and_types() -> None:
    assert list_mfu_references(CPU, "bf16") == ()
    assert list_mfu_references(_observed("NVIDIA A100-SXM4-80GB"), "tf32") == ()
    assert list_mfu_references(_observed("AMD Instinct MI300X"), "bf16") == ()
    assert list_mfu_references(_observed("NVIDIA A10G"), "fp16") == ()
