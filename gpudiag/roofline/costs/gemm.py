"""Dense matrix products: 2 FLOP per multiply-add, each operand and the result moved once (op_costs section 1; NVIDIA Matrix
Multiplication Background guide). Bias FLOPs are not counted, as in torch.utils.flop_counter."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from gpudiag.model.cost import Cost, Provenance
from gpudiag.model.signature import Input, Shape, Signature
from gpudiag.roofline.costs.arguments import flags, present, scalar_type, tensor
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import broadcast, read_bytes, size_of

MISFIT = "operand shapes do not fit a matrix product"


def matrix_cost(multiply_adds: int, dtype: str | None, moved: int, provenance: Provenance = "exact") -> Cost:
    """Return the cost of `multiply_adds` on the matrix engine and `moved` bytes. A complex multiply-add is four real ones."""
    real = {"complex64": "fp32", "complex128": "fp64"}.get(dtype or "")
    flops = 2 * multiply_adds * (4 if real else 1)
    return Cost(matrix_flops=flops, bytes=moved, dtype=real or dtype or "", provenance=provenance)


def product(a: Shape, b: Shape) -> tuple[int, int]:
    """Return (multiply-adds, elements of the result) of torch.matmul on these shapes; raises NotModelledError where they do not fit."""
    require(bool(a) and bool(b), MISFIT)
    k, inner = a[-1], b[-2] if len(b) > 1 else b[-1]
    require(k == inner, MISFIT)
    rows, columns = (a[-2] if len(a) > 1 else 1), (b[-1] if len(b) > 1 else 1)
    batch = broadcast((a[:-2], b[:-2]))
    require(batch is not None, MISFIT)
    elements = prod(batch or ()) * rows * columns
    return elements * k, elements


def packed_values(a: Input) -> int:
    """Return the values per stored element of the reduction dimension (torch packs two fp4 values in a byte)."""
    return 2 if a.dtype == "fp4" else 1


def _product_cost(a: Input, b: Input, others: Sequence[Input], out_dtype: str | None) -> Cost:
    multiply_adds, elements = product(a.shape, b.shape)
    moved = read_bytes((a, b, *others)) + size_of(elements, out_dtype)
    return matrix_cost(multiply_adds * packed_values(a), a.dtype, moved)


def _out_dtype(signature: Signature, functional: int, position: int, default: str | None) -> str | None:
    """Return the result's dtype: of the `out=` tensor, of an `out_dtype` argument at `position` (one argument more), or `default`."""
    given = len(signature.inputs) - functional
    if given <= 0:
        return default
    out = signature.tensor(len(signature.inputs) - 1)
    return out.dtype if out is not None else scalar_type(signature, position, default or "")


@costs("aten::mm", "aten::bmm", "aten::matmul", "aten::mv", "aten::dot", "aten::vdot", "aten::inner", generic=False)
def mm(signature: Signature) -> Cost:
    """Return the cost of a product of two tensors: 2*b*m*n*k FLOP."""
    a, b = tensor(signature, 0, "self"), tensor(signature, 1, "mat2")
    return _product_cost(a, b, (), _out_dtype(signature, 2, 2, a.dtype))


@costs("inductor::_mm_plus_mm", generic=False)
def mm_plus_mm(signature: Signature) -> Cost:
    """Return the cost of a @ b + c @ d: two products, one result."""
    a, b, c, d = (tensor(signature, index, name) for index, name in enumerate(("a", "b", "c", "d")))
    (first, elements), (second, _) = product(a.shape, b.shape), product(c.shape, d.shape)
    return matrix_cost(first + second, a.dtype, read_bytes((a, b, c, d)) + size_of(elements, a.dtype))


@costs("aten::_int_mm", generic=False)
def int_mm(signature: Signature) -> Cost:
    """Return the cost of an int8 product that accumulates and returns int32."""
    return _product_cost(tensor(signature, 0, "self"), tensor(signature, 1, "mat2"), (), "int32")


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
    a, b = tensor(signature, 1, "mat1"), tensor(signature, 2, "mat2")
    typed = len(signature.inputs) > 3 and signature.tensor(3) is None and type(signature.value(5)) in (int, float)
    beta = signature.value(4 if typed else 3)
    others = [] if type(beta) in (int, float) and beta == 0 else present(signature, 0)
    default = a.dtype if not typed else scalar_type(signature, 3, a.dtype or "")
    last = signature.tensor(len(signature.inputs) - 1) if len(signature.inputs) > 5 else None
    return _product_cost(a, b, others, last.dtype if last is not None else default)


@costs("aten::addbmm", "aten::addbmm_", generic=False)
def addbmm(signature: Signature) -> Cost:
    """Return the cost of self + the sum over the batch of products: 2*b*m*n*k FLOP, one result of m x n."""
    bias, a, b = tensor(signature, 0, "self"), tensor(signature, 1, "batch1"), tensor(signature, 2, "batch2")
    multiply_adds, _ = product(a.shape, b.shape)
    require(len(a.shape) == 3 and len(b.shape) == 3, MISFIT)
    moved = read_bytes((bias, a, b)) + size_of(a.shape[1] * b.shape[2], a.dtype)
    return matrix_cost(multiply_adds, a.dtype, moved)


def linear_product(signature: Signature, out_dtype: str | None = None) -> Cost:
    """Return the cost of input [*, k] times weight [n, k] transposed, plus an optional bias (third argument)."""
    x, weight = tensor(signature, 0, "input"), tensor(signature, 1, "weight")
    require(len(weight.shape) in (1, 2), MISFIT)
    multiply_adds, elements = product(x.shape, weight.shape[::-1])
    moved = read_bytes((x, weight, *present(signature, 2))) + size_of(elements, out_dtype or x.dtype)
    return matrix_cost(multiply_adds, x.dtype, moved)


# vllm::rocm_unquantized_gemm(x, weight, bias) is torch.nn.functional.linear (vllm/model_executor/layers/utils.py).
@costs("aten::linear", "aten::mkldnn_linear", "mkldnn::_linear_pointwise", "vllm::rocm_unquantized_gemm", generic=False)
def linear(signature: Signature) -> Cost:
    """Return the cost of a linear layer: leading dimensions of the input fold into m."""
    return linear_product(signature)


@costs("aten::linear_backward", "aten::mkldnn_linear_backward", generic=False)
def linear_backward(signature: Signature) -> Cost:
    """Return the cost of the gradients that `output_mask` asks for: input and weight, one product each."""
    x, grad, weight = (tensor(signature, index, name) for index, name in enumerate(("self", "grad_output", "weight")))
    wanted = sum(flags(signature, 3, "output_mask")[:2])
    multiply_adds, _ = product(x.shape, weight.shape[::-1])
    moved = x.numel * x.item_bytes + grad.distinct_bytes + weight.distinct_bytes
    return matrix_cost(wanted * multiply_adds, grad.dtype, wanted * moved)


@costs("aten::_scaled_mm", generic=False)
def scaled_mm(signature: Signature) -> Cost:
    """Return the cost of an fp8 (or fp4) product: at the operands' peak; scales, bias and result at their own widths.

    The result's dtype is an `out=` tensor's, or the ScalarType among the arguments (its place changed in torch 2.4), or the operand's.
    """
    a, b = tensor(signature, 0, "self"), tensor(signature, 1, "mat2")
    others = present(signature, *range(2, len(signature.inputs)))
    _, elements = product(a.shape, b.shape)
    out = next((item for item in others if item.shape and item.numel == elements and len(item.shape) == 2 and elements > 1), None)
    if out is not None:
        others.remove(out)
        return _product_cost(a, b, others, out.dtype)
    types = (scalar_type(signature, index, "") for index in range(2, len(signature.inputs)))
    return _product_cost(a, b, others, next(filter(None, types), a.dtype))


@costs("aten::mkldnn_linear_backward_input", generic=False)
def mkldnn_linear_backward_input(signature: Signature) -> Cost:
    """Return the cost of the input gradient of a oneDNN linear layer."""
    grad, weight = tensor(signature, 1, "grad_output"), tensor(signature, 2, "weight")
    multiply_adds, elements = product(grad.shape, weight.shape)
    return matrix_cost(multiply_adds, grad.dtype, read_bytes((grad, weight)) + size_of(elements, grad.dtype))


@costs("aten::mkldnn_linear_backward_weights", generic=False)
def mkldnn_linear_backward_weights(signature: Signature) -> Cost:
    """Return the cost of the weight gradient of a oneDNN linear layer."""
    grad, x, weight = (tensor(signature, index, name) for index, name in enumerate(("grad_output", "input", "weight")))
    multiply_adds, _ = product(x.shape, weight.shape[::-1])
    return matrix_cost(multiply_adds, grad.dtype, read_bytes((grad, x)) + size_of(weight.numel, weight.dtype))
