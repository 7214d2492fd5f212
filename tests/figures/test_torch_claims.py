"""Claims about numbers in 16 bit that torch on a CPU can check."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

VALUES = 20_000


def test_A_23_ranges_of_16_bit_types() -> None:
    assert torch.finfo(torch.float16).max == 65504
    assert torch.finfo(torch.bfloat16).max == pytest.approx(3.39e38, rel=1e-3)
    assert torch.finfo(torch.bfloat16).max / torch.finfo(torch.float32).max == pytest.approx(1, abs=0.01)


def _one_by_one(values: torch.Tensor) -> float:
    """Return the sum as a loop adds it, every partial sum rounded to the type of `values`."""
    total = torch.zeros((), dtype=values.dtype)
    for value in values:
        total += value
    return float(total)


def _pairwise(values: torch.Tensor) -> float:
    while len(values) > 1:
        if len(values) % 2:
            values = torch.cat([values, values.new_zeros(1)])
        values = values[::2] + values[1::2]
    return float(values)


@pytest.mark.parametrize(("dtype", "stall"), [("float16", 2048), ("bfloat16", 256)])
def test_A_24_adding_one_by_one_stalls_sorted_or_not(dtype: str, stall: int) -> None:
    """A sum stops growing where half of its last digit exceeds what is added; pairs, or an accumulator in fp32, do not stall."""
    values = torch.rand(VALUES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact, low = float(values.sum()), values.to(getattr(torch, dtype))
    assert _one_by_one(low) == stall
    assert _one_by_one(low.sort().values) == stall
    assert exact > 4 * stall
    digits = {"float16": 2e-3, "bfloat16": 1e-2}[dtype]
    assert float(low.sum()) == pytest.approx(exact, rel=digits)
    assert _pairwise(low) == pytest.approx(exact, rel=digits)


def test_A_25_what_autocast_runs_in_which_type() -> None:
    """The lists of torch.amp for the CPU: products and convolutions in bf16, losses in fp32 (torch.amp documentation)."""
    x, w, image = torch.rand(4, 8), torch.rand(8, 8), torch.rand(1, 3, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = [x @ w, torch.nn.functional.linear(x, w), torch.nn.functional.conv2d(image, torch.rand(4, 3, 3, 3))]
        kept = [torch.nn.functional.mse_loss(x, x), torch.nn.functional.binary_cross_entropy_with_logits(x, x)]
    assert {value.dtype for value in low} == {torch.bfloat16}
    assert {value.dtype for value in kept} == {torch.float32}
