"""What each recorded op is to the search for the owner of a kernel: one small number an op, and the tree to climb."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import texts
from gpudiag.attribution.nesting import nearest
from gpudiag.model.cost import Cost
from gpudiag.roofline.costs import kind_of
from gpudiag.roofline.costs.registry import FORMULAS

Rows = npt.NDArray[np.int64]

WORK, VIEW, FORMULA_WRAPPER, WRAPPER, OTHER, FRAMEWORK, COMMUNICATION, COMPILED = range(8)
"""FORMULA_WRAPPER: children carry the cost, but where they are not known its own formula says it. OTHER: no formula (custom ops).
COMPILED: the recording itself tells its cost, with or without shapes."""

_GRADES = {"work": WORK, "view": VIEW, "wrapper": WRAPPER, None: OTHER, "framework": FRAMEWORK, "communication": COMMUNICATION}


class Calls(NamedTuple):
    """The ops of a trace as columns: the row of the enclosing op (-1 at the top), whether shapes were recorded, the grade."""

    parent: Rows
    shaped: npt.NDArray[np.bool_]
    grade: npt.NDArray[np.int8]


class Known(NamedTuple):
    """Costs that the recording itself tells, before any formula: of kernels that a compiler wrote."""

    costs: tuple[Cost, ...]
    of_op: Rows
    """Row of `costs` per op, -1 where nothing is told."""


def grade_calls(ops: pl.DataFrame, known: Known | None = None) -> Calls:
    """Return the columns of `ops` (stage 'link'); each distinct name is looked up once. `known`: ops whose cost the recording tells."""
    codes = ops["name"].to_physical().to_numpy()
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    words = texts(ops["name"]).gather(first).to_list()
    grade = np.array([_grade(word) for word in words], dtype=np.int8)[inverse]
    if known is not None:
        grade[known.of_op >= 0] = COMPILED
    return Calls(ops["parent"].fill_null(-1).to_numpy(), ops["signature"].is_not_null().to_numpy() | (grade == COMPILED), grade)


def _grade(name: str) -> int:
    grade = _GRADES[kind_of(name)]
    return FORMULA_WRAPPER if grade == WRAPPER and name in FORMULAS else grade


def climb(start: Rows, parent: Rows, wanted: npt.NDArray[np.bool_]) -> Rows:
    """Return the first row at or above each start row that is `wanted`, -1 where there is none."""
    found: Rows = np.append(nearest(parent, wanted), -1)[start]
    return found
