"""Laws of convolutions, and what can still be said where arguments were not recorded."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs import estimate_cost

CostOf = Callable[..., Cost]
SMALL = st.integers(1, 6)


@given(n=SMALL, c=SMALL, k=SMALL, r=SMALL, groups=st.integers(1, 4), stride=SMALL, pad=st.integers(0, 3), dilation=st.integers(1, 3))
def test_a_grouped_convolution_is_the_sum_of_its_groups(
    cost: CostOf, n: int, c: int, k: int, r: int, groups: int, stride: int, pad: int, dilation: int
) -> None:
    size = dilation * (r - 1) + 4
    rest = ([stride] * 2, [pad] * 2, [dilation] * 2, False, [0, 0])
    one = cost("aten::convolution", ("fp32", (n, c, size, size)), ("fp32", (k, c, r, r)), None, *rest, 1)
    wide = cost("aten::convolution", ("fp32", (n, groups * c, size, size)), ("fp32", (groups * k, c, r, r)), None, *rest, groups)
    assert (wide.matrix_flops, wide.bytes) == (groups * one.matrix_flops, groups * one.bytes)


@given(n=SMALL, c=SMALL, k=SMALL, h=st.integers(3, 9), r=st.integers(1, 3), stride=st.integers(1, 3))
def test_a_transposed_convolution_is_the_input_gradient(cost: CostOf, n: int, c: int, k: int, h: int, r: int, stride: int) -> None:
    """ConvTranspose of y equals the input gradient of the convolution that gives y: same FLOPs."""
    width = (h - 1) * stride + r
    x, y, weight = ("bf16", (n, c, width, width)), ("bf16", (n, k, h, h)), ("bf16", (k, c, r, r))
    rest = ([stride] * 2, [0, 0], [1, 1])
    forward = cost("aten::convolution", x, weight, None, *rest, False, [0, 0], 1)
    transposed = cost("aten::convolution", y, weight, None, *rest, True, [0, 0], 1)
    gradient = cost("aten::convolution_backward", y, x, weight, None, *rest, False, [0, 0], 1, [True, False, False])
    assert transposed == gradient
    assert transposed.matrix_flops == forward.matrix_flops


def test_channels_last_changes_nothing(cost: CostOf) -> None:
    weight, rest = ("fp16", (8, 4, 3, 3)), (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    plain = cost("aten::convolution", ("fp16", (2, 4, 6, 6)), weight, *rest)
    assert plain == cost("aten::convolution", ("fp16", (2, 4, 6, 6), (144, 1, 24, 4)), weight, *rest)


def test_a_pointwise_convolution_is_a_matrix_product(cost: CostOf) -> None:
    conv = cost("aten::convolution", ("bf16", (2, 64, 8, 8)), ("bf16", (32, 64, 1, 1)), None, [1], [0], [1], False, [0], 1)
    assert conv == cost("aten::mm", ("bf16", (128, 64)), ("bf16", (64, 32)))


def test_same_padding_of_an_even_kernel_is_uneven(cost: CostOf) -> None:
    """padding='same' keeps the size: of three padded columns one stands before, two behind."""
    found = cost("aten::conv2d", ("fp32", (1, 2, 9, 7)), ("fp32", (3, 2, 4, 2)), None, [1, 1], "same", [1, 1], 1)
    assert found.matrix_flops == 2 * 3 * 9 * 7 * 2 * 4 * 2


def test_bias_gradient_adds_only_its_bytes(cost: CostOf) -> None:
    grad, x, weight = ("fp32", (2, 8, 6, 6)), ("fp32", (2, 4, 6, 6)), ("fp32", (8, 4, 3, 3))
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    with_bias = cost("aten::convolution_backward", grad, x, weight, [8], *rest, [True, True, True])
    without = cost("aten::convolution_backward", grad, x, weight, [8], *rest, [True, True, False])
    assert (with_bias.matrix_flops, with_bias.bytes - without.bytes) == (without.matrix_flops, 8 * 4)


def test_forward_without_arguments_has_no_cost(recorded: Callable[..., Signature]) -> None:
    """Old traces have no 'Concrete Inputs': the output's size is unknown, and a guess by sizes would call it memory bound."""
    signature = recorded(("fp32", (2, 3, 8, 8)), ("fp32", (4, 3, 3, 3)), None, None, None, None, None, None, None, concrete=False)
    found = estimate_cost("aten::cudnn_convolution", signature)
    assert isinstance(found, Missing)
    assert "Concrete Inputs" in found.reason


def test_backward_without_arguments_comes_from_the_gradient(cost: CostOf, recorded: Callable[..., Signature]) -> None:
    """torch 1.9: the sizes of gradient, input and weight settle the FLOPs; only the mask is assumed."""
    x, grad, weight = ("fp32", (32, 256, 14, 14)), ("fp32", (32, 1024, 14, 14)), ("fp32", (1024, 256, 1, 1))
    known = cost("aten::convolution_backward", grad, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    old = cost("aten::cudnn_convolution_backward", x, grad, weight, *[None] * 8, concrete=False)
    assert (old.matrix_flops, old.bytes, old.provenance) == (known.matrix_flops, known.bytes, "derived")
    half = cost("aten::cudnn_convolution_backward_input", None, grad, weight, *[None] * 7, concrete=False)
    assert (2 * half.matrix_flops, half.provenance) == (known.matrix_flops, "derived")
    other = estimate_cost("aten::cudnn_convolution_backward_weight", recorded(None, grad, x, *[None] * 7, concrete=False))
    assert isinstance(other, Missing)
    sized = cost("aten::cudnn_convolution_backward_weight", [1024, 256, 1, 1], grad, x, [0, 0], [1, 1], [1, 1], 1, False, False, True)
    assert (sized.matrix_flops, sized.provenance) == (half.matrix_flops, "exact")


def test_transposed_is_recognised_by_channels(cost: CostOf, recorded: Callable[..., Signature]) -> None:
    small, large = ("fp32", (2, 8, 5, 5)), ("fp32", (2, 4, 10, 10))
    up = cost("aten::convolution_backward", large, small, ("fp32", (8, 4, 2, 2)), *[None] * 8, concrete=False)
    assert up.matrix_flops == 2 * 2 * (2 * 8 * 25) * 4 * 4
    down = cost("aten::convolution_backward", small, large, ("fp32", (8, 4, 2, 2)), *[None] * 8, concrete=False)
    assert down.matrix_flops == up.matrix_flops
    both = recorded(("fp32", (2, 8, 10, 10)), small, ("fp32", (8, 8, 2, 2)), *[None] * 8, concrete=False)
    assert isinstance(estimate_cost("aten::convolution_backward", both), Missing)
