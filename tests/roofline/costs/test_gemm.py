"""Laws of matrix products, and the arguments that change a product's cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, Signature, parse_signature
from gpudiag.roofline.costs import estimate_cost

CostOf = Callable[..., Cost]
SIZE = st.integers(1, 300)


@given(b=SIZE, m=SIZE, k=SIZE, n=SIZE)
def test_a_batch_is_the_sum_of_its_products(cost: CostOf, b: int, m: int, k: int, n: int) -> None:
    one = cost("aten::mm", ("bf16", (m, k)), ("bf16", (k, n)))
    batch = cost("aten::bmm", ("bf16", (b, m, k)), ("bf16", (b, k, n)))
    assert (batch.matrix_flops, batch.bytes) == (b * one.matrix_flops, b * one.bytes)
    assert one.matrix_flops == 2 * m * n * k


@given(m=SIZE, k=SIZE, n=SIZE)
def test_layouts_do_not_change_the_cost(cost: CostOf, m: int, k: int, n: int) -> None:
    rows = cost("aten::mm", ("fp32", (m, k)), ("fp32", (k, n)))
    columns = cost("aten::mm", ("fp32", (m, k), (1, m)), ("fp32", (k, n), (1, k)))
    assert rows == columns
    assert rows == cost("aten::matmul", ("fp32", (m, k)), ("fp32", (k, n)))


@given(leading=st.lists(SIZE, max_size=3), k=SIZE, n=SIZE)
def test_linear_folds_leading_dimensions(cost: CostOf, leading: list[int], k: int, n: int) -> None:
    m = 1
    for size in leading:
        m *= size
    folded = cost("aten::addmm", ("bf16", (n,)), ("bf16", (m, k)), ("bf16", (k, n), (1, k)), 1, 1)
    assert cost("aten::linear", ("bf16", (*leading, k)), ("bf16", (n, k)), ("bf16", (n,))) == folded


def test_an_expanded_operand_is_read_once(cost: CostOf) -> None:
    shared = cost("aten::bmm", ("fp32", (8, 4, 16)), ("fp32", (8, 16, 32), (0, 32, 1)))
    own = cost("aten::bmm", ("fp32", (8, 4, 16)), ("fp32", (8, 16, 32)))
    assert own.bytes - shared.bytes == 7 * 16 * 32 * 4
    assert own.flops == shared.flops


def test_beta_zero_does_not_read_the_summand(cost: CostOf) -> None:
    c, a, b = ("fp32", (64, 32)), ("fp32", (64, 16)), ("fp32", (16, 32))
    assert cost("aten::addmm", c, a, b, 0, 1) == cost("aten::mm", a, b)
    assert cost("aten::addmm", c, a, b, 1, 1).bytes == cost("aten::mm", a, b).bytes + 64 * 32 * 4
    expanded = ("fp32", (64, 32), (0, 1))
    assert cost("aten::addmm", expanded, a, b, 1, 1).bytes == cost("aten::mm", a, b).bytes + 32 * 4


def test_result_dtypes(cost: CostOf) -> None:
    a, b, elements = ("bf16", (64, 16)), ("bf16", (16, 32)), 64 * 32
    read = (64 * 16 + 16 * 32) * 2
    assert cost("aten::mm", a, b).bytes == read + 2 * elements
    assert cost("aten::mm", a, b, 6).bytes == read + 4 * elements  # out_dtype=float32
    assert cost("aten::mm", a, b, ("fp32", (64, 32))).bytes == read + 4 * elements  # out=
    assert cost("aten::addmm", None, a, b, 6, 1, 1).bytes == read + 4 * elements
    integers = cost("aten::_int_mm", ("int8", (64, 16)), ("int8", (16, 32)))
    assert (integers.bytes, integers.dtype) == (64 * 16 + 16 * 32 + 4 * elements, "int8")


def test_scaled_mm_in_both_schemas(cost: CostOf) -> None:
    """torch before 2.4 had bias and out_dtype before the scales."""
    a, b, scale = ("fp8", (64, 32)), ("fp8", (32, 16), (1, 32)), ("fp32", (1,))
    new = cost("aten::_scaled_mm", a, b, scale, scale, None, None, 15, False)
    old = cost("aten::_scaled_mm", a, b, None, 15, scale, scale, None, False)
    assert new == old == Cost(matrix_flops=2 * 64 * 32 * 16, bytes=64 * 32 + 32 * 16 + 2 * 64 * 16 + 8, dtype="fp8")
    rowwise = cost("aten::_scaled_mm", a, b, ("fp32", (64, 1)), ("fp32", (1, 16)), ("bf16", (16,)), None, 15, True)
    assert rowwise.bytes == new.bytes - 8 + 4 * (64 + 16) + 2 * 16
    given_out = cost("aten::_scaled_mm", a, b, scale, scale, None, None, 15, False, ("bf16", (64, 16)))
    assert given_out == new


def test_grouped_product_counts_each_row_once(cost: CostOf) -> None:
    """Mixture of experts: 4 experts over 96 rows cost as much as one product of 96 rows, but read every expert."""
    tokens, experts, ends = ("bf16", (96, 32)), ("bf16", (4, 32, 64)), ("int32", (4,))
    forward = cost("aten::_grouped_mm", tokens, experts, ends, None, None)
    assert forward.matrix_flops == 2 * 96 * 32 * 64
    assert forward.bytes == 2 * (96 * 32 + 4 * 32 * 64 + 96 * 64) + 16
    weights = cost("aten::_grouped_mm", ("bf16", (32, 96)), ("bf16", (96, 64)), ends, None, None)
    assert weights.matrix_flops == forward.matrix_flops
    assert weights.bytes == forward.bytes
    assert forward.provenance == "derived"


def test_vectors(cost: CostOf) -> None:
    assert cost("aten::dot", ("fp32", (100,)), ("fp32", (100,))) == Cost(matrix_flops=200, bytes=804, dtype="fp32")
    assert cost("aten::mv", ("fp32", (8, 100)), ("fp32", (100,))).matrix_flops == 1600
    assert cost("aten::matmul", ("fp32", (5, 8, 100)), ("fp32", (100,))).matrix_flops == 8000


def test_complex_products_are_four_real_ones() -> None:
    from gpudiag.model.ops import Input

    a = Input(dtype="complex64", shape=(4, 8))
    found = estimate_cost("aten::mm", Signature((a, Input(dtype="complex64", shape=(8, 2)))))
    assert found == Cost(matrix_flops=8 * 4 * 8 * 2, bytes=8 * (32 + 16 + 8), dtype="fp32")


@pytest.mark.parametrize("shapes", [((4, 8), (9, 2)), ((), (8, 2)), ((4, 3, 8), (2, 8, 2))])
def test_operands_that_do_not_fit_have_no_cost(shapes: tuple[tuple[int, ...], ...], recorded: Callable[..., Signature]) -> None:
    found = estimate_cost("aten::bmm", recorded(*(("fp32", shape) for shape in shapes)))
    assert isinstance(found, Missing)
    assert "do not fit" in found.reason


def test_plain_numbers_of_old_torch_are_no_tensors() -> None:
    """torch 1.9 writes "Int" and "Bool" for numbers, other tools "BFloat16" for tensors."""
    parsed = parse_signature("[[4, 8], [], []]", '["BFloat16", "Int", "Bool"]', None, None)
    assert [item.dtype for item in parsed.inputs] == ["bf16", None, None]
