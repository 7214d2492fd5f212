"""Embedding look-ups and their gradients: torch's own, and FBGEMM's batched tables (TorchRec).

FBGEMM (github.com/pytorch/FBGEMM, fbgemm_gpu): what a look-up touches depends on the data. Known from sizes are the number of indices N,
tables T, bags B = (offsets - 1) / T and the storage of all tables. The mean row width is total_D / T where total_D was recorded (Concrete
Inputs), else all weights / all rows where the optimizer keeps one state a row (rowwise Adagrad). Every table is then taken to have that
width, every index to name another row (no more than there are), and the result to be fp32: `derived`. Rows in host memory (UVM) are
counted as if they were on the device. Schemas: fbgemm_gpu/codegen/embedding_backward_split_host_template.cpp,
fbgemm_gpu/src/sparse_ops/sparse_ops_gpu.cpp.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from gpudiag.model.ops import Cost, Input, NotModelledError, Signature
from gpudiag.roofline.costs.registry import Flow, backward_costs, costs, count_read_bytes, estimate_flow, register_flows, require, size_of


@costs("aten::embedding")
def embedding(signature: Signature) -> Cost:
    """Return the cost of a look-up: rows and indices read, rows written, no FLOPs."""
    weight, indices = signature.need_all("weight", "indices")
    require(len(weight.shape) >= 1, "weight is no table")
    rows = indices.numel * prod(weight.shape[1:])
    moved = size_of(min(rows, weight.numel) + rows, weight.dtype) + indices.distinct_bytes
    return Cost(bytes=moved)


@costs("aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::embedding_bag")
def embedding_bag(signature: Signature) -> Cost:
    """Return the cost of pooled look-ups: rows, indices, offsets and weights read, one row a bag written, one addition an element."""
    weight, indices, offsets = signature.need_all("weight", "indices", "offsets")
    require(len(weight.shape) >= 1, "weight is no table")
    width = prod(weight.shape[1:])
    with_last = signature.value(7) is True
    bags = indices.shape[0] if len(indices.shape) == 2 else max(offsets.numel - int(with_last), 0)
    rows = indices.numel * width
    moved = size_of(min(rows, weight.numel) + bags * width, weight.dtype) + count_read_bytes((indices, offsets, *signature.tensors(6)))
    return Cost(vector_flops=rows, bytes=moved)


@costs("aten::_embedding_bag_dense_backward")
def embedding_bag_dense_backward(signature: Signature) -> Cost:
    """Return the cost of the pooled gradient: dy, indices and bag sizes read, the table-sized gradient written."""
    grad, rows = signature.need(0, "grad"), signature.integer(5, "num_weights (Concrete Inputs)")
    indices = signature.need(1, "indices")
    require(len(grad.shape) == 2 and rows >= 0, "gradient is no [bags, width] tensor")
    moved = count_read_bytes((grad, *signature.tensors(1, 2, 3, 8))) + size_of(rows * grad.shape[1], grad.dtype)
    return Cost(vector_flops=indices.numel * grad.shape[1], bytes=moved)


def estimate_lookup_gradient(signature: Signature, pooled: bool) -> Cost:
    """Estimate the cost of a look-up's dense gradient: dy (as large as the result), indices and offsets read, the table written once."""
    weight, indices, *offsets = signature.need_all("weight", "indices", *(["offsets"] if pooled else []))
    width = prod(weight.shape[1:])
    results = indices.numel
    if offsets:  # a row a bag
        results = indices.shape[0] if len(indices.shape) == 2 else offsets[0].numel
    moved = size_of(results * width + weight.numel, weight.dtype) + count_read_bytes((indices, *offsets))
    return Cost(vector_flops=indices.numel * width, bytes=moved, provenance="derived")


backward_costs("aten::embedding", pooled=False)(estimate_lookup_gradient)
backward_costs("aten::_embedding_bag", "aten::embedding_bag", pooled=True)(estimate_lookup_gradient)


@costs("aten::_embedding_bag_per_sample_weights_backward")
def per_sample_weights_backward(signature: Signature) -> Cost:
    """Return the cost of the weights' gradient (grad 0, weight 1, indices 2): one dot product of a row and its bag's gradient an index."""
    grad, weight, indices = signature.need_all("grad", "weight", "indices")
    rows = indices.numel * prod(weight.shape[1:])
    moved = size_of(min(rows, weight.numel), weight.dtype) + count_read_bytes((grad, indices, *signature.tensors(3, 4)))
    return Cost(vector_flops=2 * rows, bytes=moved + size_of(indices.numel, grad.dtype))


@costs("aten::embedding_renorm_")
def embedding_renorm(signature: Signature) -> Cost:
    """Return the cost of scaling looked-up rows to a norm: rows read and written (`derived`: each index another row, all too long)."""
    weight, indices = signature.need_all("self", "indices")
    rows = min(indices.numel * prod(weight.shape[1:]), weight.numel)
    return Cost(vector_flops=3 * rows, bytes=2 * size_of(rows, weight.dtype) + indices.distinct_bytes, provenance="derived")


# optimizer name in the op -> state elements per weight element, and per row
_OPTIMIZERS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("sgd", "approx_sgd", "none"), (0, 0)),
    "adagrad": (1, 0),
    **dict.fromkeys(("rowwise_adagrad", "approx_rowwise_adagrad", "rowwise_weighted_adagrad"), (0, 1)),
    **dict.fromkeys(("rowwise_adagrad_with_weight_decay", "approx_rowwise_adagrad_with_weight_decay"), (0, 1)),
    **dict.fromkeys(("rowwise_adagrad_with_counter", "approx_rowwise_adagrad_with_counter"), (0, 3)),
    "adam": (2, 0),
    "partial_rowwise_adam": (1, 1),
    "lamb": (2, 0),
    "partial_rowwise_lamb": (1, 1),
    "lars_sgd": (1, 0),
}
_FLOP_PER_WEIGHT = 6
"""Of an optimizer's update of one element (convention: square, add, root, divide, scale, subtract)."""


class Lookup(NamedTuple):
    """Sizes of one batched look-up."""

    indices: Input
    others: list[Input]
    """Offsets and per-sample weights, which are read too."""
    bags: int
    """Batch x tables: rows of the pooled result."""
    width: float
    stored: int
    """Weight elements of all tables."""
    item_bytes: int

    looked_up: int
    """Elements of all rows that the indices name."""
    touched: int
    """Elements of the distinct rows, at most what is stored."""


def _read_lookup(signature: Signature, weights: tuple[int, ...], d_offsets: int, indices: int, states: tuple[int, ...] = ()) -> Lookup:
    """Read the sizes; arguments follow each other: D_offsets, total_D; indices, offsets, pooling_mode, indice_weights."""
    table_ends, index = signature.need(d_offsets, "D_offsets"), signature.need(indices, "indices")
    offsets = signature.need(indices + 1, "offsets")
    tables, bags = table_ends.numel - 1, offsets.numel - 1
    require(tables > 0 and bags >= 0, "D_offsets or offsets are empty")
    storage = [item for item in signature.tensors(*weights) if item.numel]
    stored = sum(item.numel for item in storage)
    rows, total_d = sum(item.numel for item in signature.tensors(*states)), signature.value(d_offsets + 1)
    if type(total_d) is int and total_d > 0:
        width = total_d / tables
    elif rows and stored:
        width = stored / rows
    else:
        raise NotModelledError("the row width (total_D) was not recorded (Concrete Inputs)")
    others = [offsets, *signature.tensors(indices + 3)]
    looked_up = round(index.numel * width)
    return Lookup(index, others, bags, width, stored, storage[0].item_bytes if storage else 4, looked_up, min(looked_up, stored))


def estimate_pooled(lookup: Lookup) -> Cost:
    """Estimate the cost of a pooled look-up: distinct rows, indices, offsets and weights read, one row a bag written, an add an element."""
    moved = lookup.touched * lookup.item_bytes + count_read_bytes((lookup.indices, *lookup.others))
    moved += size_of(round(lookup.bags * lookup.width), "fp32")
    return Cost(vector_flops=lookup.looked_up, bytes=moved, provenance="derived")


def estimate_pooled_backward(lookup: Lookup, per_weight: int, per_row: int, *, dense: bool = False) -> Cost:
    """Estimate the cost of the gradient and, unless `dense`, the optimizer fused with it.

    Read: the bags' gradients, indices, offsets, touched rows and their states; written: rows and states. Dense: the table-sized gradient is
    written instead.
    """
    moved = size_of(round(lookup.bags * lookup.width), "fp32") + count_read_bytes((lookup.indices, *lookup.others))
    if dense:
        return Cost(vector_flops=lookup.looked_up, bytes=moved + lookup.stored * lookup.item_bytes, provenance="derived")
    rows = round(lookup.touched / lookup.width) if lookup.width else 0
    updated = lookup.touched * lookup.item_bytes + size_of(per_weight * lookup.touched + per_row * rows, "fp32")
    return Cost(vector_flops=lookup.looked_up + _FLOP_PER_WEIGHT * lookup.touched, bytes=moved + 2 * updated, provenance="derived")


def estimate_split(signature: Signature, per_weight: int, per_row: int, backwards: bool) -> Cost:
    """Estimate the cost of a look-up in tables whose optimizer is fused with the gradient (`backwards`).

    Arguments: 0 placeholder or host weights, 1 device, 2 UVM, 6 D_offsets, 11 indices, 20-21 momentum1 on device and in UVM (19 on the
    host), which has one value a row in rowwise optimizers.
    """
    rowwise = per_row > 0 and per_weight == 0
    lookup = _read_lookup(signature, (0, 1, 2), 6, 11, states=(19, 20, 21) if rowwise else ())
    return estimate_pooled_backward(lookup, per_weight, per_row) if backwards else estimate_pooled(lookup)


for _name, (_per_weight, _per_row) in _OPTIMIZERS.items():
    _name = f"fbgemm::split_embedding_codegen_lookup_{_name}_function"
    costs(_name, generic=False, per_weight=_per_weight, per_row=_per_row, backwards=False)(estimate_split)
    backward_costs(_name, per_weight=_per_weight, per_row=_per_row, backwards=True)(estimate_split)


TOTAL_D = {
    **{f"fbgemm::split_embedding_codegen_lookup_{name}_function": 7 for name in _OPTIMIZERS},
    "fbgemm::dense_embedding_codegen_lookup_function": 3,
}
"""Look-ups -> position of total_D, the width of their result."""


def estimate_dense_lookup(signature: Signature, backwards: bool) -> Cost:
    """Estimate the cost of a look-up whose gradient (`backwards`) is as large as the tables (D_offsets 2, indices 7)."""
    lookup = _read_lookup(signature, (0,), 2, 7)
    return estimate_pooled_backward(lookup, 0, 0, dense=True) if backwards else estimate_pooled(lookup)


costs("fbgemm::dense_embedding_codegen_lookup_function", generic=False, backwards=False)(estimate_dense_lookup)
backward_costs("fbgemm::dense_embedding_codegen_lookup_function", backwards=True)(estimate_dense_lookup)


# columns of pooled embeddings reordered: read once, written once, with offsets and order read
_PERMUTES = ("fbgemm::permute_pooled_embs_auto_grad", "fbgemm::permute_pooled_embs")
_PERMUTE = Flow(reads=(0, 1, 2), writes=(0,), operations=0)
backward_costs(*_PERMUTES, flow=_PERMUTE)(estimate_flow)

register_flows(
    {
        # dy and indices read, one addition an element; the zero fill below (aten::zeros) writes the table-sized gradient and carries that
        "aten::embedding_dense_backward": Flow(reads=(0, 1), writes=(), required=(1,)),
        " ".join((*_PERMUTES, "fbgemm::recat_embedding_grad_output_mixed_D_batch")): _PERMUTE,
        "fbgemm::recat_embedding_grad_output_mixed_D fbgemm::recat_embedding_grad_output": Flow(reads=(0,), writes=(0,), operations=0),
        "fbgemm::asynchronous_complete_cumsum fbgemm::asynchronous_inclusive_cumsum": Flow(reads=(0,), writes=(0,)),
        "fbgemm::asynchronous_exclusive_cumsum": Flow(reads=(0,), writes=(0,)),
        # indices and offsets are compared with the rows of each table; only a bad one is written
        "fbgemm::bounds_check_indices": Flow(reads=(0, 1, 2), writes=(), per=1, provenance="derived"),
        "fbgemm::offsets_range": Flow(reads=(0,), writes=(0,), provenance="derived"),
    }
)


@costs("fbgemm::permute_2D_sparse_data", "fbgemm::permute_1D_sparse_data", "fbgemm::permute_sparse_features")
def permute_sparse(signature: Signature) -> Cost:
    """Return the bytes of reordering features (permute 0, lengths 1, indices 2, weights 3): all read, as many rows as in `permute` written.

    The kept indices depend on the data: every feature is taken to have as many (`derived`; exact when nothing is dropped or repeated).
    """
    order, lengths = signature.need(0, "permute"), signature.need(1, "lengths")
    features = lengths.shape[0] if lengths.shape else 0
    require(features > 0, "lengths hold no feature")
    values = signature.tensors(2, 3)
    read = count_read_bytes((order, lengths, *values))
    written = (lengths.distinct_bytes + count_read_bytes(values)) * order.numel // features
    return Cost(bytes=read + written, provenance="derived")


@costs("fbgemm::block_bucketize_sparse_features")
def bucketize_features(signature: Signature) -> Cost:
    """Return the cost of dealing indices to ranks (lengths 0, indices 1, block_sizes 4, my_size 5, weights 6).

    Lengths, indices and weights read; as many indices and weights and `my_size` times the lengths written (once where it was not recorded).
    """
    lengths, indices = signature.need(0, "lengths"), signature.need(1, "indices")
    ranks = signature.value(5)
    values = signature.tensors(1, 6)
    written = lengths.distinct_bytes * (ranks if type(ranks) is int and ranks > 0 else 1) + count_read_bytes(values)
    return Cost(
        vector_flops=indices.numel, bytes=count_read_bytes((lengths, *values, *signature.tensors(4))) + written, provenance="derived"
    )


# Compressed communication (fbgemm_gpu/src/quantize_ops): name -> (bytes an element compressed, bytes a row beside them, compresses).
_QUANTISED = {
    "FloatToBfloat16Quantized": (2.0, 0, True),
    "Bfloat16QuantizedToFloat": (2.0, 0, False),
    "FloatToHFP8Quantized": (1.0, 0, True),
    "HFP8QuantizedToFloat": (1.0, 0, False),
    "FloatToFused8BitRowwiseQuantized": (1.0, 8, True),
    "Fused8BitRowwiseQuantizedToFloat": (1.0, 8, False),
    "FloatToFP8RowwiseQuantized": (1.0, 8, True),
    "FP8RowwiseQuantizedToFloat": (1.0, 8, False),
}


def estimate_quantisation(signature: Signature, item: float, per_row: int, compresses: bool) -> Cost:
    """Estimate the cost of compressing fp32 rows for communication, or of expanding them again."""
    x = signature.need(0, "input")
    rows = x.numel // x.shape[-1] if x.shape and x.shape[-1] else 0
    if compresses:
        return Cost(vector_flops=2 * x.numel, bytes=x.distinct_bytes + round(x.numel * item) + per_row * rows, provenance="derived")
    elements = max(round((x.distinct_bytes - per_row * rows) / item), 0)
    return Cost(vector_flops=2 * elements, bytes=x.distinct_bytes + size_of(elements, "fp32"), provenance="derived")


for _name, (_item, _per_row, _compresses) in _QUANTISED.items():
    costs(f"fbgemm::{_name}", item=_item, per_row=_per_row, compresses=_compresses)(estimate_quantisation)


@costs("fbgemm::jagged_to_padded_dense", "fbgemm::jagged_to_padded_dense_forward", "aten::_jagged_to_padded_dense_forward")
def jagged_to_padded(signature: Signature) -> Cost:
    """Return the bytes of padding jagged rows (values 0, offsets 1, max_lengths 2): values read, [batch, max_lengths, width] written."""
    values, lengths = signature.need(0, "values"), signature.value(2)
    offsets = signature.inputs[1].tensors if len(signature.inputs) > 1 else None
    require(bool(offsets) and isinstance(lengths, tuple), "offsets or max_lengths were not recorded")
    batch = max(offsets[0][0] - 1, 0) if offsets and offsets[0] else 0
    size = batch * values.numel // values.shape[0] if values.shape and values.shape[0] else 0
    for length in lengths if isinstance(lengths, tuple) else ():
        require(type(length) is int and length >= 0, "max_lengths were not recorded")
        size *= length if type(length) is int else 1
    return Cost(bytes=values.distinct_bytes + size_of(size, values.dtype), provenance="derived")


@costs("fbgemm::dense_to_jagged", "fbgemm::dense_to_jagged_forward", "aten::_padded_dense_to_jagged_forward")
def dense_to_jagged(signature: Signature) -> Cost:
    """Return the bytes of dropping padding (dense 0, offsets 1, total_L 2): what is kept is read and written."""
    dense, total = signature.need(0, "dense"), signature.value(2)
    width = dense.shape[-1] if dense.shape else 1
    kept = total * width if type(total) is int and total >= 0 else dense.numel
    return Cost(bytes=2 * size_of(min(kept, dense.numel), dense.dtype), provenance="derived")
