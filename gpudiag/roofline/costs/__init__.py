"""Cost models: one small file per op family. Public: cost_of, is_modelled, kind_of.

"op_costs" in the families' docstrings is the design's table of cost formulas; tests/roofline/costs recomputes its worked examples.
"""

from __future__ import annotations

from gpudiag.model.cost import Cost
from gpudiag.model.finding import Missing
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs import (  # noqa: F401  (each family registers its formulas when it is imported)
    attention,
    attention_libraries,
    batch_norm,
    convolution,
    convolution_backward,
    convolution_relatives,
    copies,
    elementwise,
    embedding,
    fbgemm,
    fft,
    gemm,
    gemm_quantised,
    gradients,
    indexing,
    interpolation,
    libraries,
    linalg,
    losses,
    norms,
    optimizers,
    pooling,
    reductions,
    rnn,
    selection,
    softmax,
    sorting,
    sparse,
    vector_gradients,
    vision,
)
from gpudiag.roofline.costs.arguments import is_sparse
from gpudiag.roofline.costs.generic import NO_SHAPES, generic_cost
from gpudiag.roofline.costs.kinds import Kind, known_kind
from gpudiag.roofline.costs.registry import FORMULAS, WITHOUT_GENERIC, NotModelledError, attempt
from gpudiag.roofline.costs.triton import is_generated, triton_cost

SPARSE = Missing("a sparse operand: how many values it holds is not recorded")


def kind_of(name: str) -> Kind | None:
    """Return what `name` is: 'work' (has a formula), 'view', 'wrapper' (children carry the cost), 'framework', 'communication' or None."""
    return known_kind(name) or ("work" if name in FORMULAS or is_generated(name) else None)


def is_modelled(name: str) -> bool:
    """Return whether a formula exists for `name` and the op owns its kernels: work, and views (whose cost is zero on purpose)."""
    return kind_of(name) in ("work", "view")


def cost_of(name: str, signature: Signature | None) -> Cost | Missing:
    """Return FLOPs by engine and compulsory bytes of one call of `name`, or Missing with the reason.

    `exact`: a formula on recorded shapes; `derived`: a formula with a documented assumption; `generic`: sizes alone. Never raises.
    """
    return attempt(_cost_of, name, signature)


def _cost_of(name: str, signature: Signature | None) -> Cost | Missing:
    kind = known_kind(name)
    if kind == "view":
        return Cost()
    if kind == "communication":
        return Missing("a collective: judged by its message size, not by operands")
    if kind == "framework":
        return Missing("a framework node: the ops below it carry the cost")
    if signature is None:
        return Missing(NO_SHAPES)
    if is_sparse(name, signature):
        return SPARSE
    if is_generated(name):
        return triton_cost(name, signature)
    formula = FORMULAS.get(name)
    if formula is None:
        return generic_cost(name, signature)
    try:
        return formula(signature)
    except NotModelledError as error:
        return Missing(f"{name}: {error.reason}") if name in WITHOUT_GENERIC else generic_cost(name, signature)
