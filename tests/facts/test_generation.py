"""Facts about inference: decoding is told from prompts and from training."""

from __future__ import annotations

import msgspec
import pytest
from factories import A100, Work, analysis, kernel

from gpudiag.facts import Facts
from gpudiag.model.finding import Missing

MB = 1 << 20


def product(rows: int, start: float, dtype: str = "fp16", phase: str = "forward", bound: str = "memory") -> Work:
    """A product with 32 MB of weights."""
    shapes = [[rows, 4096], [4096, 4096]]
    flops, moved = 2.0 * rows * 4096 * 4096, 32.0 * MB
    return kernel("aten::mm", start, start + 100, shapes=shapes, dtype=dtype, flops=flops, bytes_moved=moved, phase=phase, bound=bound)


def test_a_decoding_step() -> None:
    found = Facts(analysis([product(4, 0), product(4, 100), product(64, 200), kernel("aten::silu", 300, 350, bytes_moved=16.0 * MB)]))
    assert found.value("trains") is False
    assert found.value("decode_product_share") == pytest.approx(0.2)
    assert found.value("decode_rows") == 4
    assert found.value("wide_weight_byte_share") == pytest.approx(64 / 112)
    assert found.value("eight_bit_saving_ns") == pytest.approx(100_000)
    # 128 rows are 32 times as many; the ridge of an A100 (153 FLOP/B) is farther than 32 x 4 FLOP/B
    assert found.value("decode_batching_saving_ns") == pytest.approx(200_000 * (1 - 1 / 32))
    assert found.errors == {}


def test_the_ridge_ends_the_gain_of_batching() -> None:
    found = Facts(analysis([product(16, 0)], device=msgspec.structs.replace(A100, peaks={"fp16": 2 * 16 * A100.bandwidth_byte_per_s})))
    assert found.value("decode_batching_saving_ns") == pytest.approx(50_000)  # at 16 FLOP/B, half of the ridge: once more at most


def test_prompts_are_not_decoding() -> None:
    found = Facts(analysis([product(512, 0, bound="compute")]))
    assert found.value("decode_product_share") == 0
    assert isinstance(found.value("decode_rows"), Missing)


def test_a_backward_pass_is_training() -> None:
    assert Facts(analysis([product(4, 0), product(4, 100, phase="backward")])).value("trains") is True


def test_weights_of_32_bit_and_devices_without_8_bit_units() -> None:
    assert Facts(analysis([product(4, 0, "fp32")])).value("wide_weight_byte_share") == 0
    assert Facts(analysis([product(4, 0)])).value("has_eight_bit_path") is False
    eight = msgspec.structs.replace(A100, peaks={**A100.peaks, "int8": 624e12})
    assert Facts(analysis([product(4, 0)], device=eight)).value("has_eight_bit_path") is True
