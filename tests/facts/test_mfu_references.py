"""Published utilisations: each from figures that multiply out, shown only where device and type compare."""

from __future__ import annotations

import msgspec
import pytest
from factories import A100, CPU

from gpudiag.facts.mfu_references import MAX_REFERENCES, PUBLISHED, references
from gpudiag.hardware.table import load_table

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
    (found,) = [item for item in PUBLISHED if what in item.what]
    assert found.flop_per_s == pytest.approx(flop_per_s, rel=2e-3)
    assert found.share == pytest.approx(share, abs=6e-3)


def test_every_figure_can_occur_and_names_denominator_and_source() -> None:
    known = {row.chip.compute_capability for row in load_table().devices}
    for item in PUBLISHED:
        assert item.compute_capability in known
        assert 0 < item.share < 1
        assert "TFLOP/s" in item.peak
        assert "arXiv:" in item.source
        assert f"{item.peak_flop_per_s / 1e12:g}" in item.peak


def test_only_figures_of_the_same_hardware_and_type_are_shown() -> None:
    a100 = msgspec.structs.replace(A100, compute_capability="8.0")
    assert [item.denominator for item in references(a100, "bf16")] == ["312 TFLOP/s (A100 fp16 dense)"]
    assert references(a100, "tf32") == ()
    assert references(CPU, "bf16") == ()
    l4 = msgspec.structs.replace(A100, compute_capability="8.9", name="L4")
    assert references(l4, "fp16") == ()
    assert len(references(msgspec.structs.replace(l4, name="GeForce RTX 4090"), "fp16")) == 2
    hopper = msgspec.structs.replace(A100, compute_capability="9.0")
    assert len(references(hopper, "bf16")) == MAX_REFERENCES
