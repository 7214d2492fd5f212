"""Softmax and log-softmax, forward and backward (op_costs section 5): one pass while a row fits on chip."""

from __future__ import annotations

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs.arguments import flag, present, scalar_type, tensor
from gpudiag.roofline.costs.flows import Flow, register_flows
from gpudiag.roofline.costs.registry import costs
from gpudiag.roofline.costs.shapes import read_bytes, size_of


@costs("aten::_softmax", "aten::_log_softmax")
def softmax(signature: Signature) -> Cost:
    """Return 5 FLOP an element (maximum, subtract, exponential, sum, divide), x read and y written; fp32 y with half_to_float."""
    x = tensor(signature, 0, "self")
    widened = x.dtype in ("fp16", "bf16") and flag(signature, 2, "half_to_float (Concrete Inputs)")
    return Cost(vector_flops=5 * x.numel, bytes=x.distinct_bytes + size_of(x.numel, "fp32" if widened else x.dtype))


@costs("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def softmax_backward(signature: Signature) -> Cost:
    """Return 4 FLOP an element, gradient and output read, the input's gradient written in the input's dtype (argument 3)."""
    grad, output = tensor(signature, 0, "grad_output"), tensor(signature, 1, "output")
    before = signature.tensor(3)  # torch before 1.11 passed the input itself
    dtype = before.dtype if before is not None else scalar_type(signature, 3, grad.dtype or "")
    return Cost(vector_flops=4 * output.numel, bytes=read_bytes((grad, output)) + size_of(output.numel, dtype))


@costs("aten::_masked_softmax")
def masked_softmax(signature: Signature) -> Cost:
    """Return the cost of a softmax that also reads a mask."""
    x = tensor(signature, 0, "self")
    return Cost(vector_flops=5 * x.numel, bytes=read_bytes((x, *present(signature, 1))) + size_of(x.numel, x.dtype))


register_flows({"aten::_masked_softmax_backward": Flow(reads=(0, 1, 2), writes=(1,), operations=4, per=1)})
