"""Dense matrix products: 2 FLOP per multiply-add, each operand and the result moved once (op_costs section 1; NVIDIA Matrix
Multiplication Background guide). Bias FLOPs are not counted, as in torch.utils.flop_counter."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from gpudiag.model.ops import Cost, Input, NotModelledError, Provenance, Shape, Signature
from gpudiag.roofline.costs.registry import broadcast_shapes, costs, count_read_bytes, reject, require, size_of

MISFIT = "operand shapes do not fit a matrix product"


def build_matrix_cost(multiply_adds: int, dtype: str | None, moved: int, provenance: Provenance = "exact") -> Cost:
    """Build the cost of `multiply_adds` on the matrix engine and `moved` bytes. A complex multiply-add is four real ones."""
    real = {"complex64": "fp32", "complex128": "fp64"}.get(dtype or "")
    flops = 2 * multiply_adds * (4 if real else 1)
    return Cost(matrix_flops=flops, bytes=moved, dtype=real or dtype or "", provenance=provenance)


def multiply_shapes(a: Shape, b: Shape) -> tuple[int, int]:
    """Return (multiply-adds, elements of the result) of torch.matmul on these shapes; raises NotModelledError where they do not fit."""
    require(bool(a) and bool(b), MISFIT)
    k, inner = a[-1], b[-2] if len(b) > 1 else b[-1]
    require(k == inner, MISFIT)
    rows, columns = (a[-2] if len(a) > 1 else 1), (b[-1] if len(b) > 1 else 1)
    batch = broadcast_shapes((a[:-2], b[:-2]))
    require(batch is not None, MISFIT)
    elements = prod(batch or ()) * rows * columns
    return elements * k, elements


def count_packed_values(a: Input) -> int:
    """Return the values per stored element of the reduction dimension (torch packs two fp4 values in a byte)."""
    return 2 if a.dtype == "fp4" else 1


def _estimate_product(a: Input, b: Input, others: Sequence[Input], out_dtype: str | None, provenance: Provenance = "exact") -> Cost:
    multiply_adds, elements = multiply_shapes(a.shape, b.shape)
    moved = count_read_bytes((a, b, *others)) + size_of(elements, out_dtype)
    return build_matrix_cost(multiply_adds * count_packed_values(a), a.dtype, moved, provenance)


def estimate_mm(signature: Signature, default: str = "") -> Cost:
    """Return the cost of a product of two tensors: 2*b*m*n*k FLOP. `default`: type of the result where it is not that of the operands."""
    a, b = signature.need_all("self", "mat2")
    # the result's dtype: of the `out=` tensor, or the `out_dtype` argument (one argument more), else that of the operands
    out = signature.tensor(len(signature.inputs) - 1) if len(signature.inputs) > 2 else None
    return _estimate_product(a, b, (), out.dtype if out is not None else signature.scalar_type(2, default or a.dtype or ""))


costs("aten::mm", "aten::bmm", "aten::matmul", "aten::mv", "aten::dot", "aten::vdot", "aten::inner", generic=False)(estimate_mm)
costs("aten::_int_mm", generic=False, default="int32")(estimate_mm)  # int8 operands


@costs("inductor::_mm_plus_mm", generic=False)
def mm_plus_mm(signature: Signature) -> Cost:
    """Return the cost of a @ b + c @ d: two products, one result."""
    a, b, c, d = operands = signature.need_all("a", "b", "c", "d")
    (first, elements), (second, _) = multiply_shapes(a.shape, b.shape), multiply_shapes(c.shape, d.shape)
    return build_matrix_cost(first + second, a.dtype, count_read_bytes(operands) + size_of(elements, a.dtype))


@costs(
    "aten::addmm",
    "aten::addmm_",
    "aten::baddbmm",
    "aten::baddbmm_",
    "aten::addmv",
    "aten::addmv_",
    "aten::_addmm_activation",
    generic=False,
)
def addmm(signature: Signature) -> Cost:
    """Return the cost of beta * self + product: as the product, plus one read of self (as stored, so a bias vector once)."""
    a, b = signature.need(1, "mat1"), signature.need(2, "mat2")
    typed = len(signature.inputs) > 3 and signature.tensor(3) is None and type(signature.value(5)) in (int, float)
    beta = signature.value(4 if typed else 3)
    others = [] if type(beta) in (int, float) and beta == 0 else signature.tensors(0)
    default = a.dtype if not typed else signature.scalar_type(3, a.dtype or "")
    last = signature.tensor(len(signature.inputs) - 1) if len(signature.inputs) > 5 else None
    return _estimate_product(a, b, others, last.dtype if last is not None else default)


@costs("aten::addbmm", "aten::addbmm_", generic=False)
def addbmm(signature: Signature) -> Cost:
    """Return the cost of self + the sum over the batch of products: 2*b*m*n*k FLOP, one result of m x n."""
    bias, a, b = signature.need_all("self", "batch1", "batch2")
    multiply_adds, _ = multiply_shapes(a.shape, b.shape)
    require(len(a.shape) == 3 and len(b.shape) == 3, MISFIT)
    moved = count_read_bytes((bias, a, b)) + size_of(a.shape[1] * b.shape[2], a.dtype)
    return build_matrix_cost(multiply_adds, a.dtype, moved)


# vllm::rocm_unquantized_gemm(x, weight, bias) is torch.nn.functional.linear (vllm/model_executor/layers/utils.py);
# _weight_int8pack_mm(x, int8 weight, scales) computes in the input's dtype.
_LINEAR = ("aten::linear", "aten::mkldnn_linear", "mkldnn::_linear_pointwise", "vllm::rocm_unquantized_gemm", "aten::_weight_int8pack_mm")


def estimate_linear(signature: Signature, weight_at: int = 1) -> Cost:
    """Estimate the cost of input [*, k] (all but k fold into m) times weight [n, k] transposed, plus an optional tensor behind it."""
    x, weight = signature.need(0, "input"), signature.need(weight_at, "weight")
    require(len(weight.shape) in (1, 2), MISFIT)
    multiply_adds, elements = multiply_shapes(x.shape, weight.shape[::-1])
    moved = count_read_bytes((x, weight, *signature.tensors(weight_at + 1))) + size_of(elements, x.dtype)
    return build_matrix_cost(multiply_adds, x.dtype, moved)


costs(*_LINEAR, generic=False)(estimate_linear)
costs("mkl::_mkl_linear", generic=False, weight_at=2)(estimate_linear)  # prepacked (1): the original weight tells the sizes


@costs("aten::linear_backward", "aten::mkldnn_linear_backward", generic=False)
def linear_backward(signature: Signature) -> Cost:
    """Return the cost of the gradients that `output_mask` asks for: input and weight, one product each."""
    x, grad, weight = signature.need_all("self", "grad_output", "weight")
    wanted = sum(signature.flags(3, "output_mask")[:2])
    multiply_adds, _ = multiply_shapes(x.shape, weight.shape[::-1])
    moved = x.numel * x.item_bytes + grad.distinct_bytes + weight.distinct_bytes
    return build_matrix_cost(wanted * multiply_adds, grad.dtype, wanted * moved)


@costs("aten::mkldnn_linear_backward_input", generic=False)
def mkldnn_linear_backward_input(signature: Signature) -> Cost:
    """Return the cost of the input gradient of a oneDNN linear layer."""
    grad, weight = signature.need(1, "grad_output"), signature.need(2, "weight")
    return _estimate_product(grad, weight, (), grad.dtype)


@costs("aten::mkldnn_linear_backward_weights", generic=False)
def mkldnn_linear_backward_weights(signature: Signature) -> Cost:
    """Return the cost of the weight gradient of a oneDNN linear layer."""
    grad, x, weight = signature.need_all("grad_output", "input", "weight")
    multiply_adds, _ = multiply_shapes(x.shape, weight.shape[::-1])
    return build_matrix_cost(multiply_adds, grad.dtype, count_read_bytes((grad, x)) + size_of(weight.numel, weight.dtype))


@costs("aten::_scaled_mm", generic=False)
def scaled_mm(signature: Signature) -> Cost:
    """Return the cost of an fp8 (or fp4) product: at the operands' peak; scales, bias and result at their own widths.

    The result's dtype is an `out=` tensor's, or the ScalarType among the arguments (its place changed in torch 2.4), or the operand's.
    """
    a, b = signature.need_all("self", "mat2")
    others = signature.tensors(*range(2, len(signature.inputs)))
    _, elements = multiply_shapes(a.shape, b.shape)
    out = next((item for item in others if item.shape and item.numel == elements and len(item.shape) == 2 and elements > 1), None)
    if out is not None:
        others.remove(out)
        return _estimate_product(a, b, others, out.dtype)
    types = (signature.scalar_type(index, "") for index in range(2, len(signature.inputs)))
    return _estimate_product(a, b, others, next(filter(None, types), a.dtype))


def _estimate_packed_weight(signature: Signature, columns: int, others: tuple[int, ...]) -> Cost:
    x = signature.need(0, "self")
    require(bool(x.shape) and x.shape[-1] > 0 and columns >= 0, MISFIT)
    rows = x.numel // x.shape[-1]
    moved = count_read_bytes((x, *signature.tensors(*others))) + size_of(rows * columns, x.dtype)
    return build_matrix_cost(rows * x.shape[-1] * columns, x.dtype, moved)


@costs("aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu", "aten::_weight_int4pack_mm_with_scales_and_zeros", generic=False)
def weight_int4pack_mm(signature: Signature) -> Cost:
    """Return the cost of a weight-only int4 product: packed weight 1; scales (3) are [groups, outputs, ...]."""
    scales = signature.need(3, "scales")
    require(len(scales.shape) >= 2, MISFIT)
    return _estimate_packed_weight(signature, scales.shape[1], (1, 3, 4))


# rows that are quantised when they come; packed weight 1
costs("aten::_dyn_quant_matmul_4bit", generic=False)(
    lambda signature: _estimate_packed_weight(signature, signature.integer(4, "out_features"), (1,))
)


@costs("onednn::qlinear_pointwise", generic=False)
def qlinear_pointwise(signature: Signature) -> Cost:
    """Return the cost of a quantised linear layer: qx 0, prepacked qw 3 as [k, n], scales 4-5; result dtype is the ScalarType argument."""
    x, weight = signature.need(0, "qx"), signature.need(3, "qw")
    types = (signature.scalar_type(index, "") for index in (9, 10))
    return _estimate_product(x, weight, signature.tensors(4, 5, 6, 7), next(filter(None, types), x.dtype))


@costs("aten::_scaled_mm_v2", generic=False)
def scaled_mm_v2(signature: Signature) -> Cost:
    """Return the cost of an fp8 or fp4 product with lists of scales (2 and 5; fp32 assumed), bias 8, out_dtype 9."""
    a, b = signature.need_all("self", "mat2")
    return _estimate_product(a, b, signature.tensors(8), signature.scalar_type(9, a.dtype or ""), "derived")


@costs("aten::_scaled_addmm", "aten::_scaled_addmm_", generic=False)
def scaled_addmm(signature: Signature) -> Cost:
    """Return the cost of self (0) + an fp8 or fp4 product of 1 and 2 with lists of scales; the result has the dtype of self."""
    added, a, b = signature.need_all("self", "mat1", "mat2")
    return _estimate_product(a, b, [added], added.dtype, "derived")


def estimate_half_sparse(signature: Signature, sparse: int, dense: int, others: tuple[int, ...], transposed: bool) -> Cost:
    """Estimate the cost of a product with a 2:4 sparse operand, which keeps half of its values: half of the dense multiply-adds are done.

    They are judged against the dense peak (`derived`). `transposed`: the dense operand is the input of a linear layer.
    """
    weight, x = signature.need(sparse, "sparse operand"), signature.need(dense, "dense operand")
    require(len(weight.shape) == 2 and len(x.shape) >= 1, MISFIT)
    k = x.shape[-1] if transposed else x.shape[0]
    require(2 * weight.shape[1] == k and k > 0, MISFIT)
    elements = x.numel // k * weight.shape[0]
    moved = count_read_bytes((weight, x, *signature.tensors(*others))) + size_of(elements, x.dtype)
    return build_matrix_cost(elements * weight.shape[1], x.dtype, moved, "derived")


for _name, _sparse, _dense, _others in (
    ("linear", 1, 0, (2, 3)),  # input 0, weight 1, metadata 2, bias 3
    ("mm", 0, 2, (1,)),  # mat1 0, metadata 1, mat2 2
    ("addmm", 1, 3, (0, 2)),  # input 0, mat1 1, metadata 2, mat2 3
):
    costs(
        f"aten::_sparse_semi_structured_{_name}", generic=False, sparse=_sparse, dense=_dense, others=_others, transposed=_name == "linear"
    )(estimate_half_sparse)


def estimate_grouped(signature: Signature, offsets: int, out_dtype: int, default: str = "") -> Cost:
    """Estimate the cost of a grouped product (mixture of experts), as if every row belongs to a group and every group is touched.

    Arguments behind the operands: offs at `offsets`, the result's dtype at `out_dtype`, else `default` or that of the operands.
    """
    a, b = signature.need_all("self", "mat2")
    ends = signature.tensor(offsets)
    groups = ends.numel if ends is not None else 1
    # torch._grouped_mm: a 2-d operand holds its groups one after the other
    flat = len(a.shape) == 2, len(b.shape) == 2
    require(2 <= len(a.shape) <= 3 and 2 <= len(b.shape) <= 3 and a.shape[-1] == b.shape[-2], MISFIT)
    elements = (groups if all(flat) else 1 if any(flat) else a.shape[0]) * a.shape[-2] * b.shape[-1]
    # groups that split k share it: every k slice is used by one group only
    multiply_adds = a.shape[-2] * b.shape[-1] * a.shape[-1] * (1 if any(flat) else a.shape[0])
    moved = count_read_bytes((a, b, *signature.tensors(*range(2, len(signature.inputs)))))
    moved += size_of(elements, signature.scalar_type(out_dtype, default or a.dtype or ""))
    return build_matrix_cost(multiply_adds * count_packed_values(a), a.dtype, moved, "derived")


costs("aten::_grouped_mm", generic=False, offsets=2, out_dtype=4)(estimate_grouped)
costs("aten::_scaled_grouped_mm", generic=False, offsets=4, out_dtype=7, default="bf16")(estimate_grouped)
costs("aten::_scaled_grouped_mm_v2", generic=False, offsets=8, out_dtype=10, default="bf16")(estimate_grouped)  # lists of scales


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


# the call's own record does not tell the outputs
costs(*PACKED_LINEAR, *_PACKED_CONVOLUTIONS, generic=False, reason="the packed weight's sizes are not recorded")(reject)


def estimate_packed_linear(name: str, own: Signature, result: Signature) -> Cost:
    """Estimate the cost of a quantised linear layer by the aten::empty inside it, which makes its result: size 0, dtype 1 (`derived`).

    The input is read at its own width (quantised: a byte), the weight once; products are int8 (fp16 weights: widened to fp32).
    """
    x = own.inputs[0] if own.inputs else None
    size = result.integers(0, "size of the result (Concrete Inputs)")
    if x is None or not x.shape or not size or size[:-1] != x.shape[:-1]:
        raise NotModelledError("no result of the input's rows is made inside the call")
    weight, rows, k = PACKED_LINEAR[name], prod(size[:-1]), x.shape[-1]
    moved = x.numel * (x.item_bytes or 1) + weight * k * size[-1] + size_of(prod(size), result.scalar_type(1, "int8"))
    return build_matrix_cost(rows * k * size[-1], "int8" if weight == 1 else "fp32", moved, "derived")
