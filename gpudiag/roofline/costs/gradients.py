"""What the backward of a matrix op costs, from its forward's recorded inputs: for autograd nodes whose own calls record no shapes.

A product or convolution has two gradients (both inputs are taken to need one), each of the forward's FLOPs over the same three tensors
(op_costs sections 1 and 2). A fused attention backward forms five products where the forward forms two: 2.5 x at equal head dimensions,
one of them the scores again (op_costs section 3; FlashAttention-2, arXiv:2307.08691, section 3.1.2). Provenance `derived`.
"""

from __future__ import annotations

import msgspec

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs.arguments import tensor
from gpudiag.roofline.costs.convolution import LAYOUTS
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS, FORMULAS, Formula, backward_costs, words

PRODUCTS = words("aten::mm aten::bmm aten::matmul aten::mv aten::dot aten::addmm aten::baddbmm aten::addmv aten::addbmm aten::linear")

FUSED_ATTENTION = words(
    """
    aten::_scaled_dot_product_flash_attention aten::_scaled_dot_product_flash_attention_for_cpu
    aten::_scaled_dot_product_efficient_attention aten::_scaled_dot_product_cudnn_attention
    aten::_scaled_dot_product_fused_attention_overrideable aten::_flash_attention_forward aten::_efficient_attention_forward
    aten::_cudnn_attention_forward flash_attn::_flash_attn_forward
    """
)


def twice(forward: Formula) -> Formula:
    """Return the formula of two gradients of an op with the formula `forward`."""

    def formula(signature: Signature) -> Cost:
        cost = forward(signature)
        return msgspec.structs.replace(cost, matrix_flops=2 * cost.matrix_flops, bytes=2 * cost.bytes, provenance="derived")

    return formula


def fused_attention(forward: Formula) -> Formula:
    """Return the formula of the backward of a fused attention with the formula `forward` (query 0, value 2).

    Bytes: the forward moved q, k, v and the result; the backward reads them and the result's gradient, and writes three gradients.
    """

    def formula(signature: Signature) -> Cost:
        cost = forward(signature)
        width, value_width = (tensor(signature, index, "query and value").shape[-1] for index in (0, 2))
        both = max(width + value_width, 1)
        return msgspec.structs.replace(
            cost,
            matrix_flops=cost.matrix_flops * (3 * width + 2 * value_width) // both,
            bytes=2 * cost.bytes,
            provenance="generic" if cost.provenance == "generic" else "derived",
            recompute_flops=cost.matrix_flops * width // both,
        )

    return formula


def _register() -> None:
    for name in (*PRODUCTS, *LAYOUTS):
        if name not in BACKWARD_FORMULAS:
            backward_costs(name)(twice(FORMULAS[name]))
    for name in FUSED_ATTENTION:
        if name not in BACKWARD_FORMULAS:
            backward_costs(name)(fused_attention(FORMULAS[name]))


_register()
