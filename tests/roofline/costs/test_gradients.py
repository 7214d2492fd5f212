"""The backward from the forward's inputs equals what the backward op's own record says, for every family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs.gradients import FUSED_ATTENTION, MATRIX_PRODUCTS
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS

CostOf = Callable[..., Cost]
Recorded = Callable[..., Signature]
SMALL = st.integers(1, 6)
REST = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
"""stride, padding, dilation, transposed, output_padding, groups of aten::convolution."""


def test_products_have_two_gradients_over_the_same_tensors(cost: CostOf, recorded: Recorded) -> None:
    a, b, grad = ("bf16", (64, 32)), ("bf16", (32, 16)), ("bf16", (64, 16))
    found = BACKWARD_FORMULAS["aten::mm"](recorded(a, b))
    left, right = cost("aten::mm", grad, ("bf16", (16, 32))), cost("aten::mm", ("bf16", (32, 64)), grad)
    assert (found.matrix_flops, found.bytes) == (left.matrix_flops + right.matrix_flops, left.bytes + right.bytes)
    assert (found.dtype, found.provenance) == ("bf16", "derived")


def test_a_convolution_has_the_gradients_of_its_backward_op(cost: CostOf, recorded: Recorded) -> None:
    x, weight, grad = ("fp16", (2, 8, 14, 14)), ("fp16", (16, 8, 3, 3)), ("fp16", (2, 16, 7, 7))
    found = BACKWARD_FORMULAS["aten::convolution"](recorded(x, weight, None, *REST))
    told = cost("aten::convolution_backward", grad, x, weight, None, *REST, [True, True, False])
    assert (found.matrix_flops, found.bytes, found.dtype) == (told.matrix_flops, told.bytes, told.dtype)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=SMALL, heads=SMALL, queries=st.integers(1, 40), keys=st.integers(1, 40), width=SMALL, value=SMALL, causal=st.booleans())
def test_fused_attention_forms_five_products(
    cost: CostOf, recorded: Recorded, batch: int, heads: int, queries: int, keys: int, width: int, value: int, causal: bool
) -> None:
    q, k, v = ("bf16", (batch, heads, queries, width)), ("bf16", (batch, heads, keys, width)), ("bf16", (batch, heads, keys, value))
    out, lse = ("bf16", (batch, heads, queries, value)), ("fp32", (batch, heads, queries))
    found = BACKWARD_FORMULAS["aten::_scaled_dot_product_efficient_attention"](recorded(q, k, v, None, True, 0.0, causal))
    name = "aten::_scaled_dot_product_efficient_attention_backward"
    told = cost(name, out, q, k, v, None, out, lse, None, None, 0.0, [True] * 4, causal)
    assert found.matrix_flops == pytest.approx(told.matrix_flops, abs=2)
    assert found.recompute_flops == pytest.approx(told.recompute_flops, abs=2)
    assert found.bytes == pytest.approx(told.bytes, abs=4 * batch * heads * queries)  # the log-sum-exp, read once
    if width == value:
        assert told.matrix_flops == 5 * told.recompute_flops  # the scores again are one of five products


def test_every_matrix_op_has_a_backward() -> None:
    assert set(MATRIX_PRODUCTS) | set(FUSED_ATTENTION) | {"aten::conv2d", "aten::cudnn_convolution", "aten::conv_transpose1d"} <= set(
        BACKWARD_FORMULAS
    )
