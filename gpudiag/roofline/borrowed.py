"""Inputs that a call did not record but that the call which it repeats did: a repeated forward on a thread without shapes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import among
from gpudiag.attribution.pairing import pair
from gpudiag.attribution.repeated import forward_of_repeated
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS, FORMULAS, words

Mask = npt.NDArray[np.bool_]

_COPIES = frozenset(f"aten::{name}" for name in words("copy_ clone _to_copy fill_ zero_"))
"""Not compared: checkpointing itself copies the state of random numbers, and ends before or behind a copy that keeps a tensor."""


def with_borrowed(ops: pl.DataFrame) -> tuple[pl.DataFrame, Mask]:
    """Return `ops` (stage 'link') with the signatures of the forward calls that calls without one repeat, and which calls those are."""
    bare = ops["recompute"] & ops["signature"].is_null()
    compared = among(ops["name"], FORMULAS.keys() - _COPIES) if bare.any() else bare
    if not (bare & compared).any() or ops["signature"].null_count() == ops.height:
        return ops, np.zeros(ops.height, dtype=bool)
    forward = forward_of_repeated(ops, pair(ops, BACKWARD_FORMULAS), compared.to_numpy())
    recorded = ops["signature"].gather(np.maximum(forward, 0))
    borrowed = bare & pl.Series(forward >= 0) & recorded.is_not_null()
    return ops.with_columns(signature=pl.when(borrowed).then(recorded).otherwise("signature")), borrowed.to_numpy()
