"""What each recorded op is to the search for a kernel's attributed op: work, view, wrapper; and which calls only pass the work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Bools, Ints
from gpudiag.attribution.names import decode_names
from gpudiag.attribution.nesting import find_nearest, mark_ancestors
from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs import find_kind
from gpudiag.roofline.costs.registry import FORMULAS

WORK, VIEW, FORMULA_WRAPPER, WRAPPER, OTHER, FRAMEWORK, COMMUNICATION, COMPILED = range(8)
"""FORMULA_WRAPPER: children carry the cost, but where they are not known its own formula says it. OTHER: no formula (custom ops).
COMPILED: the recording itself tells its cost, with or without shapes."""

_ROLES = {"work": WORK, "view": VIEW, "wrapper": WRAPPER, None: OTHER, "framework": FRAMEWORK, "communication": COMMUNICATION}


class OpTree(NamedTuple):
    """The ops of a trace as columns: the row of the enclosing op (-1 at the top), whether shapes were recorded, the grade."""

    parent: Ints
    shaped: Bools
    grade: npt.NDArray[np.int8]


class RecordedCosts(NamedTuple):
    """Costs that the recording itself tells, before any formula: of kernels that a compiler wrote."""

    costs: tuple[Cost, ...]
    of_op: Ints
    """Row of `costs` per op, -1 where nothing is told."""


class AttributedOps:
    """The owner of each kernel and the cost of each distinct owning call; later sources of costs complete it in place."""

    def __init__(self, owner: Ints, call: Ints, costs: Sequence[Cost | Missing], names: Sequence[str]) -> None:
        self.owner = owner
        """Row of ops per kernel, -1 where no op with shapes is around the launch."""
        self.call = call
        """Row of `costs` per kernel, -1 where there is no owner."""
        self.costs = list(costs)
        """One for each distinct (name, signature, delegates) that owns a kernel."""
        self.names = list(names)
        """Op name of each row of `costs`."""
        self.parsed: Mapping[int, Signature] = {}
        """The signatures of the trace by id; empty where no op was recorded."""

    def open(self) -> Bools:
        """Return which kernels have no cost, or one from sizes alone; not those beside calls that carry the cost of their wrapper."""
        good = [cost is OUTSIDE_WRAPPED_WORK or (isinstance(cost, Cost) and cost.provenance in ("exact", "derived")) for cost in self.costs]
        found: Bools = ~np.append(np.array(good, dtype=bool), False)[self.call]  # call -1 is the last entry
        return found

    def add(self, cost: Cost | Missing, name: str) -> int:
        """Return the number of a new distinct call."""
        self.costs.append(cost)
        self.names.append(name)
        return len(self.costs) - 1


def build_op_tree(ops: pl.DataFrame, known: RecordedCosts | None = None) -> OpTree:
    """Build the columns of `ops` (stage 'link'); each distinct name is looked up once. `known`: ops whose cost the recording tells."""
    codes = ops["name"].to_physical().to_numpy()
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    words = decode_names(ops["name"]).gather(first).to_list()
    roles = [_ROLES[find_kind(word)] for word in words]
    roles = [FORMULA_WRAPPER if role == WRAPPER and word in FORMULAS else role for role, word in zip(roles, words, strict=True)]
    grade = np.array(roles, dtype=np.int8)[inverse]
    if known is not None:
        grade[known.of_op >= 0] = COMPILED
    return OpTree(ops["parent"].fill_null(-1).to_numpy(), ops["signature"].is_not_null().to_numpy() | (grade == COMPILED), grade)


def climb(start: Ints, parent: Ints, wanted: Bools) -> Ints:
    """Return the first row at or above each start row that is `wanted`, -1 where there is none."""
    found: Ints = np.append(find_nearest(parent, wanted), -1)[start]
    return found


DISPATCH_COST = Cost()
"""Self time on a CPU of a call whose children do the work: it neither computes nor moves anything."""

OUTSIDE_WRAPPED_WORK = Missing("a kernel directly under a call whose other kernels carry its cost")
"""A device kernel is work, whoever launched it: beside the children of a wrapper nothing says how much."""

NOTHING_RECORDED = Missing("its recorded inputs say that nothing was done, but a kernel ran")
"""Such as aten::arange.out, whose result still has size 0 when its shape is recorded."""

MOVES_WORK, VECTOR_WORK, MATRIX_WORK, UNKNOWN_WORK = range(4)
"""The greatest kind of work in a cost; each holds those before it, and nobody knows what UNKNOWN holds."""


def find_delegating(calls: OpTree, rows: Ints, costs: Sequence[Cost | Missing], *, on_cpu: bool) -> Bools:
    """Find which owning calls `rows` (with their `costs`) only pass the work on.

    On a device: wrappers that have their work, with kernels of its own, inside.

    On a CPU those whose self time is dispatch alone: views, wrappers and autograd nodes always (a wrapper with a formula only around its
    work); any other call where the calls inside it account for all of its FLOPs and bytes: aten::mean around aten::sum, aten::clone around
    aten::copy_, but not aten::addmm around the aten::copy_ of its bias. Never compiled code: its cost is that of its own kernels, without
    the calls of libraries inside.
    """
    grade, holding = calls.grade[rows], _find_holding_work(calls, rows, costs)
    if not on_cpu:
        return np.isin(grade, (FORMULA_WRAPPER, WRAPPER)) & holding
    passing = np.isin(grade, (VIEW, WRAPPER, FRAMEWORK)) | ((grade == FORMULA_WRAPPER) & holding)
    # in each kind of work no more than the nearest costed calls inside together
    own = np.array([(c.matrix_flops, c.vector_flops, c.bytes) if isinstance(c, Cost) else (0, 0, 0) for c in costs], dtype=np.float64)
    own = own.reshape(-1, 3)
    costed = own.any(axis=1) & ~passing
    wanted = np.zeros(len(calls.parent), dtype=bool)
    wanted[rows[costed]] = True
    holder = climb(calls.parent[rows[costed]], calls.parent, wanted)
    inner = np.zeros((len(calls.parent), 3))
    np.add.at(inner, holder[holder >= 0], own[costed][holder >= 0])
    covered = costed & (inner[rows] >= own).all(axis=1)
    result: Bools = passing | (~np.isin(grade, (FORMULA_WRAPPER, COMPILED)) & covered)
    return result


def _find_holding_work(calls: OpTree, rows: Ints, costs: Sequence[Cost | Missing]) -> Bools:
    """Return around which of `rows` lies modelled work of the kind that they cost: products where they cost products, else arithmetic.

    An aten::copy_ of a bias says nothing: a transposed convolution on a CPU computes within aten::_convolution itself. Work of unknown
    cost may be what the wrapper stands for. A wrapper with a formula carries its work for the wrappers around it.
    """
    working = np.isin(calls.grade[rows], (WORK, COMPILED, FORMULA_WRAPPER))
    kinds = []
    for cost in costs:
        if isinstance(cost, Missing) or cost.provenance == "generic":
            kinds.append(UNKNOWN_WORK)
        else:
            kinds.append(MATRIX_WORK if cost.matrix_flops else VECTOR_WORK if cost.vector_flops else MOVES_WORK)
    own = np.array(kinds, dtype=np.int64)
    result = np.zeros(len(rows), dtype=bool)
    for kind in (MATRIX_WORK, VECTOR_WORK, MOVES_WORK):
        holding = mark_ancestors(calls.parent, calls.parent[rows[working & (own >= kind)]])
        result |= (own == kind) & holding[rows]
    unknown = own == UNKNOWN_WORK
    inside = rows[working & (~unknown | (calls.grade[rows] != FORMULA_WRAPPER))]
    result |= unknown & mark_ancestors(calls.parent, calls.parent[inside])[rows]
    return result
