"""Products with packed, quantised, sparse or grouped operands (op_costs section 1): scales and packed weights at their own widths."""

from __future__ import annotations

from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Shape, Signature
from gpudiag.roofline.costs.arguments import integer, ints, present, scalar_type, tensor
from gpudiag.roofline.costs.gemm import MISFIT, linear_product, matrix_cost, packed_values, product
from gpudiag.roofline.costs.registry import NotModelledError, costs, require
from gpudiag.roofline.costs.shapes import read_bytes, size_of


@costs("aten::_weight_int8pack_mm", generic=False)
def weight_int8pack_mm(signature: Signature) -> Cost:
    """Return the cost of a weight-only int8 linear layer: computed in the input's dtype, weights read as int8, plus scales."""
    return linear_product(signature)


def _packed_weight(signature: Signature, columns: int, others: tuple[int, ...]) -> Cost:
    """Return the cost of x [*, k] times a weight that is stored in a packed form for `columns` outputs."""
    x = tensor(signature, 0, "self")
    require(bool(x.shape) and x.shape[-1] > 0 and columns >= 0, MISFIT)
    rows = x.numel // x.shape[-1]
    moved = read_bytes((x, *present(signature, *others))) + size_of(rows * columns, x.dtype)
    return matrix_cost(rows * x.shape[-1] * columns, x.dtype, moved)


@costs("aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu", "aten::_weight_int4pack_mm_with_scales_and_zeros", generic=False)
def weight_int4pack_mm(signature: Signature) -> Cost:
    """Return the cost of a weight-only int4 product: packed weight 1; scales (3) are [groups, outputs, ...]."""
    scales = tensor(signature, 3, "scales")
    require(len(scales.shape) >= 2, MISFIT)
    return _packed_weight(signature, scales.shape[1], (1, 3, 4))


@costs("aten::_dyn_quant_matmul_4bit", generic=False)
def dyn_quant_matmul_4bit(signature: Signature) -> Cost:
    """Return the cost of a 4-bit product with dynamically quantised rows (packed weight 1, out_features 4)."""
    return _packed_weight(signature, integer(signature, 4, "out_features"), (1,))


@costs("mkl::_mkl_linear", generic=False)
def mkl_linear(signature: Signature) -> Cost:
    """Return the cost of a prepacked linear layer: the original weight (2) is [n, k]; the packed one is read."""
    x, weight = tensor(signature, 0, "X"), tensor(signature, 2, "ORI_W")
    multiply_adds, elements = product(x.shape, weight.shape[::-1])
    return matrix_cost(multiply_adds, x.dtype, read_bytes((x, weight, *present(signature, 3))) + size_of(elements, x.dtype))


@costs("onednn::qlinear_pointwise", generic=False)
def qlinear_pointwise(signature: Signature) -> Cost:
    """Return the cost of a quantised linear layer: qx 0, prepacked qw 3 as [k, n], scales 4-5; result dtype is the ScalarType argument."""
    x, weight = tensor(signature, 0, "qx"), tensor(signature, 3, "qw")
    multiply_adds, elements = product(x.shape, weight.shape)
    types = (scalar_type(signature, index, "") for index in (9, 10))
    moved = read_bytes((x, weight, *present(signature, 4, 5, 6, 7))) + size_of(elements, next(filter(None, types), x.dtype or ""))
    return matrix_cost(multiply_adds, x.dtype, moved)


@costs("aten::_scaled_mm_v2", generic=False)
def scaled_mm_v2(signature: Signature) -> Cost:
    """Return the cost of an fp8 or fp4 product with lists of scales (2 and 5; fp32 assumed), bias 8, out_dtype 9."""
    a, b = tensor(signature, 0, "self"), tensor(signature, 1, "mat2")
    multiply_adds, elements = product(a.shape, b.shape)
    moved = read_bytes((a, b, *present(signature, 8))) + size_of(elements, scalar_type(signature, 9, a.dtype or ""))
    return matrix_cost(multiply_adds * packed_values(a), a.dtype, moved, "derived")


@costs("aten::_scaled_addmm", "aten::_scaled_addmm_", generic=False)
def scaled_addmm(signature: Signature) -> Cost:
    """Return the cost of self (0) + an fp8 or fp4 product of 1 and 2 with lists of scales; the result has the dtype of self."""
    added, a, b = tensor(signature, 0, "self"), tensor(signature, 1, "mat1"), tensor(signature, 2, "mat2")
    multiply_adds, elements = product(a.shape, b.shape)
    moved = read_bytes((added, a, b)) + size_of(elements, added.dtype)
    return matrix_cost(multiply_adds * packed_values(a), a.dtype, moved, "derived")


# 2:4 sparse weights keep half of their values: half of the dense multiply-adds are done, judged against the dense peak.
def _half_sparse(signature: Signature, sparse: int, dense: int, others: tuple[int, ...], transposed: bool) -> Cost:
    weight, x = tensor(signature, sparse, "sparse operand"), tensor(signature, dense, "dense operand")
    require(len(weight.shape) == 2 and len(x.shape) >= 1, MISFIT)
    k = x.shape[-1] if transposed else x.shape[0]
    require(2 * weight.shape[1] == k and k > 0, MISFIT)
    elements = x.numel // k * weight.shape[0]
    moved = read_bytes((weight, x, *present(signature, *others))) + size_of(elements, x.dtype)
    return matrix_cost(elements * weight.shape[1], x.dtype, moved, "derived")


@costs("aten::_sparse_semi_structured_linear", generic=False)
def semi_structured_linear(signature: Signature) -> Cost:
    """Return the cost of a linear layer with a 2:4 sparse weight (input 0, weight 1, metadata 2, bias 3)."""
    return _half_sparse(signature, 1, 0, (2, 3), transposed=True)


@costs("aten::_sparse_semi_structured_mm", generic=False)
def semi_structured_mm(signature: Signature) -> Cost:
    """Return the cost of a product whose first operand is 2:4 sparse (metadata 1, mat2 2)."""
    return _half_sparse(signature, 0, 2, (1,), transposed=False)


@costs("aten::_sparse_semi_structured_addmm", generic=False)
def semi_structured_addmm(signature: Signature) -> Cost:
    """Return the cost of input + a product whose first operand is 2:4 sparse (input 0, mat1 1, metadata 2, mat2 3)."""
    return _half_sparse(signature, 1, 3, (0, 2), transposed=False)


def _grouped(a: Shape, b: Shape, groups: int) -> tuple[int, int]:
    """Return (multiply-adds, result elements) of torch._grouped_mm: a 2-d operand holds its groups one after the other."""
    require(2 <= len(a) <= 3 and 2 <= len(b) <= 3 and (a[-1] == b[-2]), MISFIT)
    results = groups if len(a) == 2 and len(b) == 2 else a[0] if len(a) == 3 and len(b) == 3 else 1
    elements = results * a[-2] * b[-1]
    # groups that split k share it: every k slice is used by one group only
    multiply_adds = a[-2] * b[-1] * a[-1] * (a[0] if len(a) == 3 and len(b) == 3 else 1)
    return multiply_adds, elements


@costs("aten::_grouped_mm", generic=False)
def grouped_mm(signature: Signature) -> Cost:
    """Return the cost of a grouped product (mixture of experts), as if every row belongs to a group and every group is touched."""
    return _grouped_cost(signature, offsets=2, out_dtype=4)


@costs("aten::_scaled_grouped_mm", generic=False)
def scaled_grouped_mm(signature: Signature) -> Cost:
    """Return the cost of an fp8 grouped product; the result is bf16 unless the arguments say otherwise."""
    return _grouped_cost(signature, offsets=4, out_dtype=7, default="bf16")


def _grouped_cost(signature: Signature, offsets: int, out_dtype: int, default: str = "") -> Cost:
    a, b = tensor(signature, 0, "self"), tensor(signature, 1, "mat2")
    ends = signature.tensor(offsets)
    multiply_adds, elements = _grouped(a.shape, b.shape, ends.numel if ends is not None else 1)
    moved = read_bytes((a, b, *present(signature, *range(2, len(signature.inputs)))))
    moved += size_of(elements, scalar_type(signature, out_dtype, default or a.dtype or ""))
    return matrix_cost(multiply_adds * packed_values(a), a.dtype, moved, "derived")


@costs("aten::_scaled_grouped_mm_v2", generic=False)
def scaled_grouped_mm_v2(signature: Signature) -> Cost:
    """Return the cost of the same with lists of scales (offs 8, bias 9, out_dtype 10)."""
    return _grouped_cost(signature, offsets=8, out_dtype=10, default="bf16")


# torch/ao/nn/quantized; the packed weight is an object whose sizes torch does not record. FBGEMM, QNNPACK and oneDNN keep int8 weights.
PACKED_LINEAR = {
    "quantized::linear": 1,
    "quantized::linear_relu": 1,
    "quantized::linear_dynamic": 1,
    "quantized::linear_relu_dynamic": 1,
    "quantized::linear_dynamic_fp16": 2,
    "quantized::linear_relu_dynamic_fp16": 2,
}
"""Linear layers with a packed weight -> bytes per weight."""

_PACKED_CONVOLUTIONS = (
    *(f"quantized::conv{rank}d{tail}" for rank in (1, 2, 3) for tail in ("", "_relu", "_dynamic")),
    *(f"quantized::conv_transpose{rank}d{tail}" for rank in (1, 2, 3) for tail in ("", "_dynamic")),
)


@costs(*PACKED_LINEAR, *_PACKED_CONVOLUTIONS, generic=False)
def packed_weight(signature: Signature) -> Cost:
    """Return nothing: raises NotModelledError, since the call's own record does not tell the outputs (see packed_linear)."""
    raise NotModelledError("the packed weight's sizes are not recorded")


def packed_linear(name: str, own: Signature, result: Signature) -> Cost:
    """Return the cost of a quantised linear layer by the aten::empty inside it, which makes its result: size 0, dtype 1 (`derived`).

    The input is read at its own width (quantised: a byte), the weight once; products are int8 (fp16 weights: widened to fp32).
    """
    x = own.inputs[0] if own.inputs else None
    size = ints(result, 0, "size of the result (Concrete Inputs)")
    if x is None or not x.shape or not size or size[:-1] != x.shape[:-1]:
        raise NotModelledError("no result of the input's rows is made inside the call")
    weight, rows, k = PACKED_LINEAR[name], prod(size[:-1]), x.shape[-1]
    moved = x.numel * (x.item_bytes or 1) + weight * k * size[-1] + size_of(prod(size), scalar_type(result, 1, "int8"))
    return matrix_cost(rows * k * size[-1], "int8" if weight == 1 else "fp32", moved, "derived")
