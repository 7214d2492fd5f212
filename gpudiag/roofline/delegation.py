"""Owning calls that only pass the work on: their own cost would count the work of the calls inside them twice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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


def on_device(calls: Calls, rows: Rows) -> Mask:
    """Return which owning calls `rows` are wrappers that also have modelled work with kernels of its own inside."""
    wrapper = np.isin(calls.grade[rows], (FORMULA_WRAPPER, WRAPPER))
    return wrapper & _with_work_inside(calls, rows)[rows]


def on_cpu(calls: Calls, rows: Rows, costs: Sequence[Cost | Missing]) -> Mask:
    """Return which owning calls `rows` (with their `costs`) have a self time that is dispatch alone.

    Views, wrappers and autograd nodes always (a wrapper with a formula only around modelled work); any other call where the calls inside
    it account for all of its FLOPs and bytes: aten::mean around aten::sum, aten::clone around aten::copy_, but not aten::addmm around
    the aten::copy_ of its bias. Never compiled code: its cost is that of its own kernels, without the calls of libraries inside.
    """
    grade = calls.grade[rows]
    plain = np.isin(grade, (VIEW, WRAPPER, FRAMEWORK))
    wrapper = (grade == FORMULA_WRAPPER) & _with_work_inside(calls, rows)[rows]
    result: Mask = plain | wrapper | (~np.isin(grade, (FORMULA_WRAPPER, COMPILED)) & _covered(calls, rows, costs, plain | wrapper))
    return result


def _with_work_inside(calls: Calls, rows: Rows) -> Mask:
    """Return for every op whether one of `rows` that is modelled work lies below it."""
    inside = np.zeros(len(calls.parent), dtype=bool)
    above = calls.parent[rows[np.isin(calls.grade[rows], (WORK, COMPILED))]]
    while len(above := np.unique(above[above >= 0])):
        above = above[~inside[above]]  # each row is entered once
        inside[above] = True
        above = calls.parent[above]
    return inside


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
