"""The cost of an op without a formula: what its recorded tensors say, marked `generic`.

Bytes = distinct elements of every input + an inferred result (self for an in-place op, else the broadcast of the inputs, else the size of
the largest), one FLOP an element of the result.
"""

from __future__ import annotations

from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.finding import Missing
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs.shapes import broadcast, promoted, read_bytes, size_of

NO_SHAPES = "no tensor shapes were recorded for this call (record_shapes=True)"

# Ops that touch a part of their inputs that only the data decides: the sizes say nothing about the traffic.
_DATA_DEPENDENT = (
    "fbgemm::split_embedding",
    "fbgemm::dense_embedding",
    "vllm::unified_attention",
    "vllm::unified_kv_cache",
    "_C_cache_ops::",
)


def generic_cost(name: str, signature: Signature) -> Cost | Missing:
    """Return the generic cost of a call; Missing where no tensor was recorded or its sizes do not tell the traffic."""
    if name.startswith(_DATA_DEPENDENT):
        return Missing(f"{name} touches parts of its tensors that depend on the data")
    inputs = [item for item in signature.inputs if item.is_tensor]
    lists = sum(prod(shape) for item in signature.inputs for shape in item.tensors or ())
    if not inputs and not lists:
        return Missing(NO_SHAPES)
    read = read_bytes(inputs) + size_of(lists, "fp32")
    if not inputs:
        return Cost(vector_flops=lists, bytes=read + size_of(lists, "fp32"), provenance="generic")
    if name.endswith("_") and not name.endswith("__"):
        elements, dtype = inputs[0].numel, inputs[0].dtype
    else:
        shape = broadcast(item.shape for item in inputs)
        elements = prod(shape) if shape is not None else max(item.numel for item in inputs)
        dtype = promoted(inputs)
    return Cost(vector_flops=elements, bytes=read + size_of(elements, dtype), provenance="generic")
