"""Recurrent layers and their fused cells (op_costs section 11; NVIDIA Recurrent Layers guide).

Every weight matrix multiplies every time step's rows once: F = 2 * rows * elements of all weight matrices, which is 2*T*B*g*H*(I+H) for
each layer and direction (g gates: LSTM 4, GRU 3, plain 1). Backward: the same once for the data and once for the weights. Bytes are the
least: weights once (a kernel that does not keep the recurrent ones on chip streams them T times), states, inputs and outputs once.
"""

from __future__ import annotations

from math import prod

import msgspec

from gpudiag.model.ops import Cost, Input, Shape, Signature
from gpudiag.roofline.costs.gemm import build_matrix_cost
from gpudiag.roofline.costs.registry import Flow, backward_costs, costs, count_read_bytes, register_flows, require, size_of


class RnnLayout(msgspec.Struct, frozen=True):
    """Positions of a recurrent op's arguments. The weights are a tensor list, whose dtype is the input's."""

    weights: int
    states: tuple[int, ...]
    """Initial hidden and cell state; the final ones are as large."""
    bidirectional: int
    backward_reads: tuple[int, ...] = ()
    mask: int | None = None
    """Position of output_mask (input, hidden, cell, weights) of a backward."""


RNN_LAYOUTS: dict[str, RnnLayout] = {
    "aten::_cudnn_rnn": RnnLayout(weights=1, states=(4, 5), bidirectional=13),
    "aten::miopen_rnn": RnnLayout(weights=1, states=(3, 4), bidirectional=11),
}
RNN_BACKWARD_LAYOUTS: dict[str, RnnLayout] = {
    "aten::_cudnn_rnn_backward": RnnLayout(1, (4, 5), 16, backward_reads=(6, 7, 8, 9, 19, 20), mask=21),
    "aten::miopen_rnn_backward": RnnLayout(1, (4, 5), 15, backward_reads=(6, 7, 8, 9, 17, 18), mask=19),
}


def _read_weights(signature: Signature, index: int) -> tuple[Shape, ...]:
    listed = signature.inputs[index].tensors if 0 <= index < len(signature.inputs) else None
    require(bool(listed), "sizes of the weights were not recorded")
    return listed or ()


def _count_rows(x: Input) -> int:
    """Count time steps x batch; a packed sequence is [rows, features], so its own lengths count."""
    require(len(x.shape) >= 2 and x.shape[-1] > 0, "input has no feature dimension")
    return x.numel // x.shape[-1]


def _count_outputs(x: Input, weights: tuple[Shape, ...], both: bool) -> int:
    """Count the elements of the last layer's output: the recurrent weight (second matrix) is [gates * hidden, output features]."""
    matrices = [shape for shape in weights if len(shape) == 2]
    require(len(matrices) >= 2, "the weights hold no input and recurrent matrix")
    # a projection is a third matrix [output features, hidden] for each layer and direction
    return _count_rows(x) * matrices[1][1] * (2 if both else 1)


def estimate_layers(x: Input, weights: tuple[Shape, ...], states: list[Input], both: bool) -> Cost:
    """Estimate the cost of a forward over all layers, in `both` directions or one: rows x weight matrices."""
    elements = sum(prod(shape) for shape in weights) + _count_outputs(x, weights, both) + sum(item.numel for item in states)
    matrices = sum(prod(shape) for shape in weights if len(shape) == 2)
    return build_matrix_cost(_count_rows(x) * matrices, x.dtype, count_read_bytes((x, *states)) + size_of(elements, x.dtype))


def estimate_layers_backward(x: Input, weights: tuple[Shape, ...], others: list[Input], states: list[Input], wants_weights: bool) -> Cost:
    """Estimate the cost of a backward: data gradients, and weight gradients where they were asked for."""
    elements = sum(prod(shape) for shape in weights)
    matrices = sum(prod(shape) for shape in weights if len(shape) == 2)
    written = x.numel + sum(item.numel for item in states) + (elements if wants_weights else 0)
    moved = count_read_bytes((x, *others, *states)) + size_of(elements + written, x.dtype)
    return build_matrix_cost((1 + int(wants_weights)) * _count_rows(x) * matrices, x.dtype, moved)


def estimate_rnn(signature: Signature, layout: RnnLayout, backwards: bool) -> Cost:
    """Estimate the cost of a recurrent op whose arguments stand where `layout` says, or of its backward by the forward's inputs."""
    x, weights = signature.need(0, "input"), _read_weights(signature, layout.weights)
    both, states = signature.flag(layout.bidirectional, "bidirectional (Concrete Inputs)"), signature.tensors(*layout.states)
    if not backwards:
        return estimate_layers(x, weights, states, both)
    # gradient and output have the output's size; the reserve is not known
    result = Input(dtype=x.dtype, shape=(_count_outputs(x, weights, both),))
    cost = estimate_layers_backward(x, weights, [result, result], states, wants_weights=True)
    return msgspec.structs.replace(cost, provenance="derived")


def estimate_rnn_backward(signature: Signature, layout: RnnLayout) -> Cost:
    """Estimate the cost of a backward op whose arguments stand where `layout` says."""
    x, weights = signature.need(0, "input"), _read_weights(signature, layout.weights)
    mask = signature.value(layout.mask) if layout.mask is not None else None
    wants_weights = not (isinstance(mask, tuple) and len(mask) == 4 and mask[3] is False)
    others = signature.tensors(*layout.backward_reads)
    return estimate_layers_backward(x, weights, others, signature.tensors(*layout.states), wants_weights)


for _name, _layout in RNN_LAYOUTS.items():
    costs(_name, generic=False, layout=_layout, backwards=False)(estimate_rnn)
    backward_costs(_name, layout=_layout, backwards=True)(estimate_rnn)
for _name, _layout in RNN_BACKWARD_LAYOUTS.items():
    costs(_name, generic=False, layout=_layout)(estimate_rnn_backward)


@costs("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu", generic=False)
def composite(signature: Signature) -> Cost:
    """Return the cost of the whole layer stack, for where the ops inside are not recorded.

    (input, states, weights, has_biases, layers, dropout, train, bidirectional, ...), or packed with batch sizes behind the input: the
    weights are the last tensor list, the states stand before it.
    """
    x = signature.need(0, "input")
    lists = [index for index, item in enumerate(signature.inputs) if item.tensors and len(item.tensors[0]) == 2]
    require(bool(lists), "sizes of the weights were not recorded")
    at = lists[-1]
    weights = _read_weights(signature, at)
    states = [Input(dtype=x.dtype, shape=shape) for shape in signature.inputs[at - 1].tensors or ()] or signature.tensors(at - 1)
    both = signature.flag(at + 5, "bidirectional (Concrete Inputs)")
    return estimate_layers(x, weights, states, both)


@costs("aten::mkldnn_rnn_layer", generic=False)
def mkldnn_layer(signature: Signature) -> Cost:
    """Return the cost of one layer in one direction (weights and biases 1-4, states 5-6)."""
    x, weights = signature.need(0, "input"), tuple(item.shape for item in signature.tensors(1, 2, 3, 4))
    return estimate_layers(x, weights, signature.tensors(5, 6), both=False)


@costs("aten::mkldnn_rnn_layer_backward", generic=False)
def mkldnn_layer_backward(signature: Signature) -> Cost:
    """Return the cost of its backward (output 7, final states 8-9, gradients 10-12, workspace 22)."""
    x, weights = signature.need(0, "input"), tuple(item.shape for item in signature.tensors(1, 2, 3, 4))
    _count_outputs(x, weights, both=False)  # the weights have to fit a layer
    return estimate_layers_backward(x, weights, signature.tensors(7, 8, 9, 10, 11, 12, 22), signature.tensors(5, 6), wants_weights=True)


# Gates are [batch, g * hidden]. Results: LSTM hy, cy and the activated gates; GRU hy and a workspace of 5 * hidden, backward two gate
# gradients of 3 * hidden and the state's. aten/src/ATen/native/cuda/RNN.cu; about 5 FLOP for each activation and 3 for combining.
register_flows(
    {
        "aten::_thnn_fused_lstm_cell": Flow(reads=(0, 1, 2, 3, 4), writes=(2, 2, 0), operations=8),
        "aten::_thnn_fused_lstm_cell_backward_impl": Flow(reads=(0, 1, 2, 3, 4), writes=(4, 2), operations=8, per=4),
        "aten::_thnn_fused_gru_cell": Flow(reads=(0, 1, 2, 3, 4), writes=(2,) * 6, operations=8),
        "aten::_thnn_fused_gru_cell_backward": Flow(reads=(0, 1), writes=(0,) * 7, operations=8, per=1),
    }
)
