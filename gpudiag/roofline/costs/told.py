"""What the gradient that an autograd node received tells about its forward call, where the call itself records too little.

The first gradient of a node has the shape and dtype of the forward's first result (torch/csrc/autograd). With it a join of tensors whose
sizes were not recorded, a reduction without its dimensions or an indexing whose index shapes torch never records costs what the same call
with an `out=` tensor of that size costs; and a pooled look-up in embedding tables knows the width of its rows.
"""

from __future__ import annotations

import msgspec

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Signature
from gpudiag.roofline.costs.fbgemm import TOTAL_D as TOTAL_D
from gpudiag.roofline.costs.registry import FORMULAS, NotModelledError, words

AS_OUT = frozenset(
    f"aten::{name}" for name in words("cat _cat stack _stack index _unsafe_index index_select sum mean nansum prod amax amin var std norm")
)
"""Ops that have an `out=` overload with the result behind their other arguments."""

TELLING = (*sorted(AS_OUT), *sorted(TOTAL_D))


def told(name: str, own: Signature, node: Signature) -> Signature:
    """Return the inputs of a call with what the node's own inputs tell; raises NotModelledError where they tell nothing about it."""
    gradient = node.tensor(0)
    if gradient is None or (not gradient.shape and name in TOTAL_D):
        raise NotModelledError("the autograd node recorded no gradient")
    if name in TOTAL_D:
        at = TOTAL_D[name]
        if at >= len(own.inputs) or own.value(at) is not None:
            return own
        return Signature((*own.inputs[:at], Input(value=gradient.shape[-1]), *own.inputs[at + 1 :]))
    if name in AS_OUT:
        return Signature((*own.inputs, gradient))
    raise NotModelledError(f"{name} is not told by a gradient")


def forward_from_gradient(name: str, own: Signature, node: Signature) -> Cost:
    """Return the cost of a forward call, given the inputs of its autograd node (`derived`)."""
    cost = FORMULAS[name](told(name, own, node))
    return msgspec.structs.replace(cost, provenance="derived")


def backward_inputs(name: str, own: Signature, node: Signature | None) -> Signature:
    """Return the forward's inputs for a backward formula, with what its node tells where that helps."""
    if node is None or name not in TOTAL_D:
        return own
    try:
        return told(name, own, node)
    except NotModelledError:
        return own
