"""Convolutions told by their result or their forward: the same work as by their arguments, and nothing where shapes do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpudiag.model.ops import Cost, NotModelledError, Signature
from gpudiag.roofline.costs.convolution import estimate_forward_from_output, estimate_weight_gradient

CostOf = Callable[..., Cost]
Recorded = Callable[..., Signature]
SMALL = st.integers(1, 6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=SMALL, c=SMALL, k=SMALL, groups=st.integers(1, 3), r=st.integers(1, 3), size=st.integers(5, 9), stride=st.integers(1, 3),
    pad=st.integers(0, 2),
)  # fmt: skip
def test_the_result_tells_the_work_as_well_as_the_arguments(
    cost: CostOf, recorded: Recorded, n: int, c: int, k: int, groups: int, r: int, size: int, stride: int, pad: int
) -> None:
    x, weight, bias = ("fp32", (n, groups * c, size, size)), ("fp32", (groups * k, c, r, r)), ("fp32", (groups * k,))
    out = (size + 2 * pad - r) // stride + 1
    told = cost("aten::conv2d", x, weight, bias, [stride] * 2, [pad] * 2, [1, 1], groups)
    result = recorded(("fp32", (n, groups * k, out, out)))
    found = estimate_forward_from_output("aten::conv2d", recorded(x, weight, bias, concrete=False), result)
    assert (found.matrix_flops, found.bytes) == (told.matrix_flops, told.bytes)
    assert (told.provenance, found.provenance) == ("exact", "derived")


def test_a_transposed_convolution_counts_its_input(cost: CostOf, recorded: Recorded) -> None:
    x, weight = ("fp32", (2, 16, 7, 7)), ("fp32", (16, 8, 4, 4))
    told = cost("aten::conv_transpose2d", x, weight, None, [2, 2], [1, 1], [0, 0], 1, [1, 1])
    found = estimate_forward_from_output("aten::conv_transpose2d", recorded(x, weight, concrete=False), recorded(("fp32", (2, 8, 14, 14))))
    assert found.matrix_flops == told.matrix_flops


@pytest.mark.parametrize(
    ("name", "x", "weight", "out"),
    [
        ("aten::conv2d", (2, 8, 9, 9), (16, 8, 3, 3), (2, 15, 9, 9)),  # channels
        ("aten::conv2d", (2, 8, 9, 9), (16, 8, 3, 3), (3, 16, 9, 9)),  # batch
        ("aten::conv2d", (2, 8, 9, 9), (16, 8, 3, 3), (2, 16, 81)),  # rank
        ("aten::conv2d", (2, 8, 9, 9), (16, 0, 3, 3), (2, 16, 9, 9)),  # no input channels
        ("aten::convolution", (2, 8, 9, 9), (8, 8, 3, 3), (2, 8, 18, 18)),  # plain or transposed: both fit, unequal work
    ],
)
def test_shapes_that_do_not_fit_give_no_cost(recorded: Recorded, name: str, x: Any, weight: Any, out: Any) -> None:
    with pytest.raises(NotModelledError):
        estimate_forward_from_output(name, recorded(("fp32", x), ("fp32", weight), concrete=False), recorded(("fp32", out)))


def test_a_weight_gradient_of_another_layer_is_refused(recorded: Recorded) -> None:
    own = recorded(None, ("fp32", (2, 16, 7, 7)), ("fp32", (2, 8, 14, 14)), concrete=False)
    weight = ("fp32", (16, 8, 3, 3))
    assert estimate_weight_gradient(own, recorded(("fp32", (2, 8, 14, 14)), weight)).matrix_flops == 2 * 2 * 16 * 7 * 7 * 72
    with pytest.raises(NotModelledError):
        estimate_weight_gradient(own, recorded(("fp32", (2, 8, 28, 28)), weight))
