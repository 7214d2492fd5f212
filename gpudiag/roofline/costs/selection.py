"""Element-wise ops of other forms: selection, dropout, gated units, distances, quantisation, random numbers (op_costs section 7)."""

from __future__ import annotations

from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs.arguments import given_output, present, scalar_type, tensor
from gpudiag.roofline.costs.flows import Flow, register_flows
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import broadcast, promoted, read_bytes, size_of


@costs("aten::where")
def where(signature: Signature) -> Cost:
    """Return the cost of a select: condition (1 byte) and both sides read, one operation an element."""
    condition = tensor(signature, 0, "condition")
    sides = present(signature, 1, 2)
    require(bool(sides), "condition alone: the result's size depends on the data")
    shape = broadcast(item.shape for item in (condition, *sides))
    require(shape is not None, "operand shapes do not broadcast")
    elements = prod(shape or ())
    out = given_output(signature, 3)
    return Cost(vector_flops=elements, bytes=read_bytes((condition, *sides)) + size_of(elements, out.dtype if out else promoted(sides)))


@costs("aten::masked_fill", "aten::masked_fill_")
def masked_fill(signature: Signature) -> Cost:
    """Return the cost of a masked fill: self and mask read, the result written in self's dtype."""
    source, mask = tensor(signature, 0, "self"), tensor(signature, 1, "mask")
    shape = broadcast((source.shape, mask.shape))
    require(shape is not None, "operand shapes do not broadcast")
    elements = prod(shape or ())
    return Cost(vector_flops=elements, bytes=read_bytes((source, mask)) + size_of(elements, source.dtype))


register_flows(
    {
        "aten::glu_backward": Flow(reads=(0, 1), writes=(1,), operations=4, per=1),
        "aten::_prelu_kernel_backward": Flow(reads=(0, 1, 2), writes=(1, 1), operations=3, per=1),
        "aten::_amp_update_scale_": Flow(reads=(0, 1, 2), writes=(0, 1)),
        "aten::_transform_bias_rescale_qkv": Flow(reads=(0, 1), writes=(0,), operations=2),
    }
)


@costs("aten::addr", "aten::addr_")
def addr(signature: Signature) -> Cost:
    """Return the cost of adding an outer product: self and both vectors read, a matrix written, 2 FLOP an element."""
    bias, rows, columns = (tensor(signature, index, name) for index, name in enumerate(("self", "vec1", "vec2")))
    elements = rows.numel * columns.numel
    return Cost(vector_flops=2 * elements, bytes=read_bytes((bias, rows, columns)) + size_of(elements, promoted([bias, rows, columns])))


@costs("aten::_cdist_forward")
def cdist(signature: Signature) -> Cost:
    """Return the cost of all distances of two sets of points: 3 FLOP a coordinate of each pair."""
    first, second = tensor(signature, 0, "x1"), tensor(signature, 1, "x2")
    require(len(first.shape) >= 2 and len(second.shape) >= 2, "x1 or x2 is no set of points")
    batch = broadcast((first.shape[:-2], second.shape[:-2]))
    require(batch is not None and first.shape[-1] == second.shape[-1], "x1 and x2 do not fit")
    pairs = prod(batch or ()) * first.shape[-2] * second.shape[-2]
    return Cost(vector_flops=3 * pairs * first.shape[-1], bytes=read_bytes((first, second)) + size_of(pairs, first.dtype))


@costs("aten::_cdist_backward")
def cdist_backward(signature: Signature) -> Cost:
    """Return the cost of its gradient for x1 (grad 0, x1 1, x2 2, distances 4): 5 FLOP a coordinate of each pair."""
    grad, first, second = (tensor(signature, index, name) for index, name in enumerate(("grad", "x1", "x2")))
    width = first.shape[-1] if first.shape else 0
    moved = read_bytes((grad, first, second, *present(signature, 4))) + size_of(first.numel, first.dtype)
    return Cost(vector_flops=5 * grad.numel * width, bytes=moved)


_FAKE_QUANTIZE = (
    "aten::fake_quantize_per_tensor_affine_cachemask",
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "aten::fake_quantize_per_channel_affine_cachemask",
    "aten::_fused_moving_avg_obs_fq_helper",
)


@costs(*_FAKE_QUANTIZE)
def fake_quantize(signature: Signature) -> Cost:
    """Return the cost of rounding to a grid in training: x read, y and a 1-byte mask written."""
    x = tensor(signature, 0, "self")
    return Cost(vector_flops=5 * x.numel, bytes=x.distinct_bytes + size_of(x.numel, x.dtype) + x.numel)


@costs("aten::quantize_per_tensor", "aten::quantize_per_channel", "aten::quantize_per_tensor_dynamic")
def quantize(signature: Signature) -> Cost:
    """Return the cost of storing x in a byte an element (qint32, ScalarType 14: four)."""
    x = tensor(signature, 0, "self")
    types = [item.value for item in signature.inputs[1:] if type(item.value) is int]
    return Cost(vector_flops=3 * x.numel, bytes=x.distinct_bytes + x.numel * (4 if types and types[-1] == 14 else 1))


@costs("aten::native_dropout", "aten::_fused_dropout")
def native_dropout(signature: Signature) -> Cost:
    """Return the cost of dropout in training: x read, y and a 1-byte mask written."""
    x = tensor(signature, 0, "input")
    return Cost(vector_flops=2 * x.numel, bytes=x.distinct_bytes + size_of(x.numel, x.dtype) + x.numel)


@costs("aten::glu")
def glu(signature: Signature) -> Cost:
    """Return the cost of a gated linear unit: half as many results as inputs."""
    x = tensor(signature, 0, "self")
    return Cost(vector_flops=6 * (x.numel // 2), bytes=x.distinct_bytes + size_of(x.numel // 2, x.dtype))


@costs("aten::polar", "aten::complex")
def complex_from_parts(signature: Signature) -> Cost:
    """Return the cost of building complex numbers: two real tensors read, one complex one written."""
    first, second = tensor(signature, 0, "first"), tensor(signature, 1, "second")
    shape = broadcast((first.shape, second.shape))
    require(shape is not None, "operand shapes do not broadcast")
    elements = prod(shape or ())
    return Cost(vector_flops=elements, bytes=read_bytes((first, second)) + 2 * size_of(elements, first.dtype))


@costs("aten::normal", "aten::poisson", "aten::binomial", "aten::_standard_gamma", "aten::_standard_gamma_grad", "aten::_sample_dirichlet")
def random_from(signature: Signature) -> Cost:
    """Return the cost of drawing from a distribution an element: parameters read, as many numbers written."""
    given = present(signature, 0, 1)
    require(bool(given), "the result's size was not recorded")
    largest = max(given, key=lambda item: item.numel)
    return Cost(vector_flops=5 * largest.numel, bytes=read_bytes(given) + size_of(largest.numel, largest.dtype))


@costs("aten::bernoulli")
def bernoulli(signature: Signature) -> Cost:
    """Return the cost of drawing one number an element with the probabilities of self, which are read."""
    x = tensor(signature, 0, "self")
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes + size_of(x.numel, x.dtype))


def random_like(signature: Signature, dtype_at: int) -> Cost:
    """Return the cost of drawing one number for each element of self, which is not read: written in the dtype asked for, or in self's."""
    x = tensor(signature, 0, "self")
    return Cost(vector_flops=x.numel, bytes=size_of(x.numel, scalar_type(signature, dtype_at, x.dtype or "")))


@costs("aten::rand_like", "aten::randn_like")
def rand_like(signature: Signature) -> Cost:
    """Return the cost of random_like (self, dtype 1)."""
    return random_like(signature, 1)


@costs("aten::randint_like")
def randint_like(signature: Signature) -> Cost:
    """Return the cost of random_like: (self, high, dtype, four more) or (self, low, high, dtype, four more)."""
    return random_like(signature, 3 if len(signature.inputs) > 7 else 2)


@costs(
    "aten::normal_",
    "aten::uniform_",
    "aten::random_",
    "aten::exponential_",
    "aten::log_normal_",
    "aten::cauchy_",
    "aten::geometric_",
    "aten::bernoulli_",
    "aten::_philox_normal_",
    "aten::_philox_uniform_",
)
def random_fill(signature: Signature) -> Cost:
    """Return the cost of filling self with random numbers: self written, a tensor of probabilities read."""
    x = tensor(signature, 0, "self")
    return Cost(vector_flops=x.numel, bytes=size_of(x.numel, x.dtype) + read_bytes(present(signature, 1)))
