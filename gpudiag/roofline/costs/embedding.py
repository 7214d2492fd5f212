"""Embedding look-ups and their dense gradients (op_costs section 6). Rows read: as many as looked up, at most the table."""

from __future__ import annotations

from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs.arguments import flag, integer, present, tensor
from gpudiag.roofline.costs.registry import backward_costs, costs, require
from gpudiag.roofline.costs.shapes import read_bytes, size_of


@costs("aten::embedding")
def embedding(signature: Signature) -> Cost:
    """Return the cost of a look-up: rows and indices read, rows written, no FLOPs."""
    weight, indices = tensor(signature, 0, "weight"), tensor(signature, 1, "indices")
    require(len(weight.shape) >= 1, "weight is no table")
    rows = indices.numel * prod(weight.shape[1:])
    moved = size_of(min(rows, weight.numel) + rows, weight.dtype) + indices.distinct_bytes
    return Cost(bytes=moved)


@costs("aten::embedding_dense_backward")
def embedding_dense_backward(signature: Signature) -> Cost:
    """Return the cost of the dense gradient's own kernels: dy and indices read, one addition an element.

    The table-sized gradient is written by the zero fill (aten::zeros below this op), which carries those bytes: one write of the
    output, counted once.
    """
    grad, indices = tensor(signature, 0, "grad_output"), tensor(signature, 1, "indices")
    return Cost(vector_flops=grad.numel, bytes=read_bytes((grad, indices)))


@costs("aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::embedding_bag")
def embedding_bag(signature: Signature) -> Cost:
    """Return the cost of pooled look-ups: rows, indices, offsets and weights read, one row a bag written, one addition an element."""
    weight, indices, offsets = (tensor(signature, index, name) for index, name in enumerate(("weight", "indices", "offsets")))
    require(len(weight.shape) >= 1, "weight is no table")
    width = prod(weight.shape[1:])
    with_last = isinstance(signature.value(7), bool) and flag(signature, 7, "include_last_offset")
    bags = indices.shape[0] if len(indices.shape) == 2 else max(offsets.numel - int(with_last), 0)
    rows = indices.numel * width
    moved = size_of(min(rows, weight.numel) + bags * width, weight.dtype) + read_bytes((indices, offsets, *present(signature, 6)))
    return Cost(vector_flops=rows, bytes=moved)


@costs("aten::_embedding_bag_dense_backward")
def embedding_bag_dense_backward(signature: Signature) -> Cost:
    """Return the cost of the pooled gradient: dy, indices and bag sizes read, the table-sized gradient written."""
    grad, rows = tensor(signature, 0, "grad"), integer(signature, 5, "num_weights (Concrete Inputs)")
    indices = tensor(signature, 1, "indices")
    require(len(grad.shape) == 2 and rows >= 0, "gradient is no [bags, width] tensor")
    moved = read_bytes((grad, *present(signature, 1, 2, 3, 8))) + size_of(rows * grad.shape[1], grad.dtype)
    return Cost(vector_flops=indices.numel * grad.shape[1], bytes=moved)


@backward_costs("aten::embedding")
def embedding_backward(signature: Signature) -> Cost:
    """Return the cost of the dense gradient from the look-up: dy (as large as the result) and indices read, the table written once."""
    weight, indices = tensor(signature, 0, "weight"), tensor(signature, 1, "indices")
    rows = indices.numel * prod(weight.shape[1:])
    return Cost(vector_flops=rows, bytes=size_of(rows + weight.numel, weight.dtype) + indices.distinct_bytes, provenance="derived")


@backward_costs("aten::_embedding_bag", "aten::embedding_bag")
def embedding_bag_backward(signature: Signature) -> Cost:
    """Return the cost of the pooled look-up's dense gradient: a row a bag and the indices read, the table written once."""
    weight, indices, offsets = (tensor(signature, index, name) for index, name in enumerate(("weight", "indices", "offsets")))
    width = prod(weight.shape[1:])
    bags = indices.shape[0] if len(indices.shape) == 2 else offsets.numel
    moved = size_of(bags * width + weight.numel, weight.dtype) + read_bytes((indices, offsets))
    return Cost(vector_flops=indices.numel * width, bytes=moved, provenance="derived")


@costs("aten::_embedding_bag_per_sample_weights_backward")
def per_sample_weights_backward(signature: Signature) -> Cost:
    """Return the cost of the weights' gradient (grad 0, weight 1, indices 2): one dot product of a row and its bag's gradient an index."""
    grad, weight, indices = (tensor(signature, index, name) for index, name in enumerate(("grad", "weight", "indices")))
    rows = indices.numel * prod(weight.shape[1:])
    moved = size_of(min(rows, weight.numel), weight.dtype) + read_bytes((grad, indices, *present(signature, 3, 4)))
    return Cost(vector_flops=2 * rows, bytes=moved + size_of(indices.numel, grad.dtype))


@costs("aten::embedding_renorm_")
def embedding_renorm(signature: Signature) -> Cost:
    """Return the cost of scaling looked-up rows to a norm: rows read and written (`derived`: each index another row, all too long)."""
    weight, indices = tensor(signature, 0, "self"), tensor(signature, 1, "indices")
    rows = min(indices.numel * prod(weight.shape[1:]), weight.numel)
    return Cost(vector_flops=3 * rows, bytes=2 * size_of(rows, weight.dtype) + indices.distinct_bytes, provenance="derived")
