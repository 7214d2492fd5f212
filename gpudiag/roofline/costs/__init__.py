"""Cost models: one file per op family.

"op_costs" in the families' docstrings is the design's table of cost formulas; tests/roofline/costs recomputes its worked examples."""

from __future__ import annotations

from math import prod

from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, NotModelledError, Signature
from gpudiag.roofline.costs import (  # noqa: F401  (each family registers its formulas when it is imported)
    attention,
    convolution,
    copies,
    elementwise,
    embedding,
    gemm,
    gradients,
    libraries,
    linalg_fft,
    norms,
    optimizers,
    reductions,
    rnn,
    vision,
)
from gpudiag.roofline.costs.inductor import estimate_triton_cost, is_generated
from gpudiag.roofline.costs.registry import (
    FORMULAS,
    WITHOUT_GENERIC,
    OpKind,
    attempt,
    broadcast_shapes,
    count_read_bytes,
    is_sparse,
    match_known_kind,
    promote_dtypes,
    size_of,
)

SPARSE_OPERAND = Missing("a sparse operand: how many values it holds is not recorded")


def find_kind(name: str) -> OpKind | None:
    """Find what `name` is: 'work' (has a formula), 'view', 'wrapper' (children carry the cost), 'framework', 'communication' or None."""
    return match_known_kind(name) or ("work" if name in FORMULAS or is_generated(name) else None)


def estimate_cost(name: str, signature: Signature | None) -> Cost | Missing:
    """Return FLOPs by engine and compulsory bytes of one call of `name`, or Missing with the reason.

    `exact`: a formula on recorded shapes; `derived`: a formula with a documented assumption; `generic`: sizes alone. Never raises.
    """
    return attempt(_estimate_cost, name, signature)


def _estimate_cost(name: str, signature: Signature | None) -> Cost | Missing:
    kind = match_known_kind(name)
    if kind == "view":
        return Cost()
    if kind == "communication":
        return Missing("a collective: judged by its message size, not by operands")
    if kind == "framework":
        return Missing("a framework node: the ops below it carry the cost")
    if signature is None:
        return Missing(NO_SHAPES)
    if is_sparse(name, signature):
        return SPARSE_OPERAND
    if is_generated(name):
        return estimate_triton_cost(name, signature)
    formula = FORMULAS.get(name)
    if formula is None:
        return estimate_generic_cost(name, signature)
    try:
        return formula(signature)
    except NotModelledError as error:
        return Missing(f"{name}: {error.reason}") if name in WITHOUT_GENERIC else estimate_generic_cost(name, signature)


NO_SHAPES = "no tensor shapes were recorded for this call (record_shapes=True)"

# Ops that touch a part of their inputs that only the data decides: the sizes say nothing about the traffic.
_DATA_DEPENDENT = (
    "fbgemm::split_embedding",
    "fbgemm::dense_embedding",
    "vllm::unified_kv_cache",
    "_C_cache_ops::",
)


def estimate_generic_cost(name: str, signature: Signature) -> Cost | Missing:
    """Estimate the generic cost of a call; Missing where no tensor was recorded or its sizes do not tell the traffic."""
    if name.startswith(_DATA_DEPENDENT):
        return Missing(f"{name} touches parts of its tensors that depend on the data")
    inputs = [item for item in signature.inputs if item.is_tensor]
    lists = sum(prod(shape) for item in signature.inputs for shape in item.tensors or ())
    if not inputs and not lists:
        return Missing(NO_SHAPES)
    read = count_read_bytes(inputs) + size_of(lists, "fp32")
    if not inputs:
        return Cost(vector_flops=lists, bytes=read + size_of(lists, "fp32"), provenance="generic")
    if name.endswith("_") and not name.endswith("__"):
        elements, dtype = inputs[0].numel, inputs[0].dtype
    else:
        shape = broadcast_shapes(item.shape for item in inputs)
        elements = prod(shape) if shape is not None else max(item.numel for item in inputs)
        dtype = promote_dtypes(inputs)
    return Cost(vector_flops=elements, bytes=read + size_of(elements, dtype), provenance="generic")
