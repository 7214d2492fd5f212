"""Owning calls that only pass the work on: their own cost would count the work of the calls inside them twice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpudiag.attribution.nesting import with_parents
from gpudiag.model.cost import Cost
from gpudiag.model.finding import Missing
from gpudiag.roofline.grades import COMPILED, FORMULA_WRAPPER, FRAMEWORK, VIEW, WORK, WRAPPER, Calls, Rows, climb

Mask = npt.NDArray[np.bool_]

DISPATCH = Cost()
"""Self time on a CPU of a call whose children do the work: it neither computes nor moves anything."""

OUTSIDE = Missing("a kernel directly under a call whose other kernels carry its cost")
"""A device kernel is work, whoever launched it: beside the children of a wrapper nothing says how much."""

NOTHING = Missing("its recorded inputs say that nothing was done, but a kernel ran")
"""Such as aten::arange.out, whose result still has size 0 when its shape is recorded."""

MOVES, VECTOR, MATRIX, UNKNOWN = range(4)
"""The greatest kind of work in a cost; each holds those before it, and nobody knows what UNKNOWN holds."""


def on_device(calls: Calls, rows: Rows, costs: Sequence[Cost | Missing]) -> Mask:
    """Return which owning calls `rows` (with their `costs`) are wrappers that have their work, with kernels of its own, inside."""
    return np.isin(calls.grade[rows], (FORMULA_WRAPPER, WRAPPER)) & _holding_their_work(calls, rows, costs)


def on_cpu(calls: Calls, rows: Rows, costs: Sequence[Cost | Missing]) -> Mask:
    """Return which owning calls `rows` (with their `costs`) have a self time that is dispatch alone.

    Views, wrappers and autograd nodes always (a wrapper with a formula only around its work); any other call where the calls inside
    it account for all of its FLOPs and bytes: aten::mean around aten::sum, aten::clone around aten::copy_, but not aten::addmm around
    the aten::copy_ of its bias. Never compiled code: its cost is that of its own kernels, without the calls of libraries inside.
    """
    grade = calls.grade[rows]
    plain = np.isin(grade, (VIEW, WRAPPER, FRAMEWORK))
    wrapper = (grade == FORMULA_WRAPPER) & _holding_their_work(calls, rows, costs)
    result: Mask = plain | wrapper | (~np.isin(grade, (FORMULA_WRAPPER, COMPILED)) & _covered(calls, rows, costs, plain | wrapper))
    return result


def _holding_their_work(calls: Calls, rows: Rows, costs: Sequence[Cost | Missing]) -> Mask:
    """Return around which of `rows` lies modelled work of the kind that they cost: products where they cost products, else arithmetic.

    An aten::copy_ of a bias says nothing: a transposed convolution on a CPU computes within aten::_convolution itself. Work of unknown
    cost may be what the wrapper stands for. A wrapper with a formula carries its work for the wrappers around it.
    """
    working = np.isin(calls.grade[rows], (WORK, COMPILED, FORMULA_WRAPPER))
    own = np.array([_kind(cost) for cost in costs], dtype=np.int64)
    result = np.zeros(len(rows), dtype=bool)
    for kind in (MATRIX, VECTOR, MOVES):
        holding = _around(calls, rows[working & (own >= kind)])
        result |= (own == kind) & holding[rows]
    unknown = own == UNKNOWN
    result |= unknown & _around(calls, rows[working & (~unknown | (calls.grade[rows] != FORMULA_WRAPPER))])[rows]
    return result


def _kind(cost: Cost | Missing) -> int:
    if isinstance(cost, Missing) or cost.provenance == "generic":
        return UNKNOWN
    return MATRIX if cost.matrix_flops else VECTOR if cost.vector_flops else MOVES


def _around(calls: Calls, rows: Rows) -> Mask:
    """Return for every op whether one of `rows` lies below it."""
    return with_parents(calls.parent, calls.parent[rows])


def _covered(calls: Calls, rows: Rows, costs: Sequence[Cost | Missing], passing: Mask) -> Mask:
    """Return which of `rows` cost no more, in each kind of work, than the nearest costed calls inside them together."""
    own = np.array([(c.matrix_flops, c.vector_flops, c.bytes) if isinstance(c, Cost) else (0, 0, 0) for c in costs], dtype=np.float64)
    own = own.reshape(-1, 3)
    costed = own.any(axis=1) & ~passing
    wanted = np.zeros(len(calls.parent), dtype=bool)
    wanted[rows[costed]] = True
    holder = climb(calls.parent[rows[costed]], calls.parent, wanted)
    inner = np.zeros((len(calls.parent), 3))
    np.add.at(inner, holder[holder >= 0], own[costed][holder >= 0])
    result: Mask = costed & (inner[rows] >= own).all(axis=1)
    return result
