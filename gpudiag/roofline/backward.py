"""Costs that a call's own record does not tell, from the other side of the autograd graph or from the calls inside it.

Each `derived`; what none of them tells keeps its reason:

* a forward convolution without arguments (torch before 1.12), from the gradient of its result that its node records, else from the op
  that takes its result;
* a convolution's weight gradient alone, from the forward's weight;
* kernels under an autograd node that no formula inside explains, from the forward's inputs (registry.BACKWARD_FORMULAS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import among, text, texts
from gpudiag.attribution.nesting import nearest
from gpudiag.attribution.pairing import Pairs, pair
from gpudiag.model.cost import Cost
from gpudiag.model.finding import Missing
from gpudiag.model.signature import Signature
from gpudiag.roofline.conv_gradients import single_gradient
from gpudiag.roofline.costs import convolution_relatives as relatives
from gpudiag.roofline.costs import told
from gpudiag.roofline.costs.arguments import is_sparse
from gpudiag.roofline.costs.convolution import LAYOUTS
from gpudiag.roofline.costs.convolution_backward import LAYOUTS as BACKWARD
from gpudiag.roofline.costs.gemm_quantised import PACKED_LINEAR, packed_linear
from gpudiag.roofline.costs.gradients import PRODUCTS
from gpudiag.roofline.costs.indexing import index_by_view
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS, NAMED_BACKWARD, NotModelledError, attempt
from gpudiag.roofline.delegation import OUTSIDE
from gpudiag.roofline.results import inside, result_takers

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Formula = Callable[[str, Signature, Signature], Cost]

_INDEXING = ["aten::index", "aten::_unsafe_index"]
_ALLOCATIONS = ["aten::empty", "aten::_empty_affine_quantized"]
_SINGLE_PRODUCTS = ["aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot", "aten::ger"]

ENGINE_CALL = "autograd::engine::evaluate_function"
"""The engine's call around a node: hooks and accumulation run in it too, so it carries no cost of a backward formula."""


class Costs:
    """The cost of each kernel's call while it is being completed: `owner` and `call` per kernel, `costs` and `names` per distinct call."""

    def __init__(self, owner: Rows, call: Rows, costs: tuple[Cost | Missing, ...], names: tuple[str, ...]) -> None:
        self.owner, self.call, self.costs, self.names = owner.copy(), call.copy(), list(costs), list(names)

    def open(self) -> Mask:
        """Return which kernels have no cost, or one from sizes alone; not those beside calls that carry the cost of their wrapper."""
        good = [cost is OUTSIDE or (isinstance(cost, Cost) and cost.provenance in ("exact", "derived")) for cost in self.costs]
        found: Mask = ~np.append(np.array(good, dtype=bool), False)[self.call]  # call -1 is the last entry
        return found

    def add(self, cost: Cost, name: str) -> int:
        """Return the number of a new distinct call."""
        self.costs.append(cost)
        self.names.append(name)
        return len(self.costs) - 1


def complete(ops: pl.DataFrame, kernels: pl.DataFrame, parsed: Mapping[int, Signature], found: Costs, start: Rows) -> None:
    """Give kernels of `found` that are open a cost from the other side of the autograd graph. `start`: op of each free kernel, else -1."""
    pairs = pair(ops, BACKWARD_FORMULAS)
    parent = ops["parent"].fill_null(-1).to_numpy()
    if (found.open() & (start >= 0)).any():
        _relate(ops, parsed, found, _gradients(ops, pairs, parent), _by_node)
        _relate(ops, parsed, found, _results(ops, pairs), told.forward_from_gradient)
        _relate(ops, parsed, found, _forwards(ops, pairs, parent), _weight_gradient)
        _relate(ops, parsed, found, inside(ops, parent, _INDEXING, ["aten::as_strided"], last=True), _by_view)
        _relate(ops, parsed, found, inside(ops, parent, list(PACKED_LINEAR), _ALLOCATIONS, last=False), packed_linear)
        _relate(ops, parsed, found, result_takers(ops, parent, parsed, list(LAYOUTS)), _by_taker)
        _nodes(ops, kernels, parent, parsed, found, pairs, start)
    _without_mask(kernels, found, ops.height)


def _node_cost(name: str, forward: Signature, node: Signature | None, products: int | None) -> Cost:
    """Return the cost of the backward of `name`; `products`: gradients that ran inside, of its two (None: both)."""
    if is_sparse(name, forward):
        raise NotModelledError("a sparse operand")
    cost = BACKWARD_FORMULAS[name](told.backward_inputs(name, forward, node))
    return _half(cost) if products == 1 else cost


def _half(cost: Cost) -> Cost:
    """Return the cost of one of two gradients: each has the FLOPs of the forward and moves the same three tensors."""
    return msgspec.structs.replace(cost, matrix_flops=cost.matrix_flops // 2, bytes=cost.bytes // 2)


def _without_mask(kernels: pl.DataFrame, found: Costs, height: int) -> None:
    """Halve the cost of convolution gradients whose mask was not recorded (both are taken then) where the kernels name one alone."""
    taken = [
        name in BACKWARD and isinstance(cost, Cost) and cost.provenance == "derived"
        for name, cost in zip(found.names, found.costs, strict=True)
    ]
    node = np.where(np.append(np.array(taken, dtype=bool), False)[found.call], found.owner, -1)
    one = (node >= 0) & single_gradient(kernels, node, height)[node]
    for call in np.unique(found.call[one]).tolist():
        cost = found.costs[call]
        if isinstance(cost, Cost):
            found.call[one & (found.call == call)] = found.add(_half(cost), found.names[call])


def _by_node(name: str, own: Signature, node: Signature) -> Cost:
    return relatives.forward_from_node(name, own, node)


def _by_taker(name: str, own: Signature, taker: Signature) -> Cost:
    return relatives.forward_from_taker(name, own, taker)


def _by_view(_: str, own: Signature, view: Signature) -> Cost:
    return index_by_view(own, view)


def _weight_gradient(_: str, own: Signature, forward: Signature) -> Cost:
    return relatives.weight_gradient(own, forward)


def _named(ops: pl.DataFrame, names: list[str]) -> Mask:
    found: Mask = among(ops["name"], names).to_numpy()
    return found


def _gradients(ops: pl.DataFrame, pairs: Pairs, parent: Rows) -> Rows:
    """Return for each forward convolution the signature of its autograd node (-1: none), also for the calls inside the paired one."""
    convolution = _named(ops, list(LAYOUTS))
    recorded = ops["signature"].fill_null(-1).to_numpy()
    nodes = np.flatnonzero(pairs.named & (recorded >= 0))
    of_forward = np.full(ops.height, -1, dtype=np.int64)
    of_forward[pairs.forward[nodes]] = recorded[nodes]
    around = nearest(parent, of_forward >= 0)
    usable = convolution & (around >= 0) & convolution[around]
    return np.where(usable, of_forward[around], -1)


def _results(ops: pl.DataFrame, pairs: Pairs) -> Rows:
    """Return for each call whose result a gradient tells the signature of its autograd node, -1 where there is none."""
    telling, look_up = _named(ops, list(told.TELLING)), _named(ops, list(told.TOTAL_D))
    recorded = ops["signature"].fill_null(-1).to_numpy()
    sure = pairs.named | np.append(look_up, False)[pairs.forward]  # extensions name their nodes otherwise
    nodes = np.flatnonzero(sure & (pairs.forward >= 0) & (recorded >= 0))
    found = np.full(ops.height, -1, dtype=np.int64)
    found[pairs.forward[nodes]] = recorded[nodes]
    return np.where(telling, found, -1)


def _forwards(ops: pl.DataFrame, pairs: Pairs, parent: Rows) -> Rows:
    """Return for each weight gradient the signature of the forward call of the node around it, -1 where it is not known."""
    around = nearest(parent, pairs.forward >= 0)
    forward = np.where(around >= 0, pairs.forward[around], -1)
    signature = np.append(ops["signature"].fill_null(-1).to_numpy(), -1)[forward]
    return np.where(_named(ops, list(relatives.WEIGHT_GRADIENTS)), signature, -1)


def _products_inside(ops: pl.DataFrame, around: Rows) -> Rows:
    """Return for each op the number of products whose node (`around`, row for each op, -1: none) it is."""
    node = around[_named(ops, _SINGLE_PRODUCTS)]
    return np.bincount(node[node >= 0], minlength=ops.height)


def _relate(ops: pl.DataFrame, parsed: Mapping[int, Signature], found: Costs, relative: Rows, formula: Formula) -> None:
    """Cost the open owners that have a `relative` (row of signatures, -1: none) by `formula`: once per distinct pair of signatures."""
    rows = np.unique(found.owner[found.open() & (found.owner >= 0)])
    rows = rows[relative[rows] >= 0]
    frame = ops[rows].select("id", text("name"), "signature").with_columns(relative=relative[rows]).drop_nulls()
    call = np.full(ops.height + 1, -1, dtype=np.int64)
    for (name, own, other), members in frame.group_by("name", "signature", "relative", maintain_order=True):
        cost = attempt(formula, str(name), parsed[own], parsed[other])
        if isinstance(cost, Cost):
            call[members["id"].to_numpy()] = found.add(cost, str(name))
    found.call = np.where(call[found.owner] >= 0, call[found.owner], found.call)


def _nodes(
    ops: pl.DataFrame, kernels: pl.DataFrame, parent: Rows, parsed: Mapping[int, Signature], found: Costs, pairs: Pairs, start: Rows
) -> None:
    """Give the open kernels under an autograd node the cost of its backward.

    Only where they are most of the node's kernel time: beside calls with costs of their own the node's cost would count them twice. Not
    for recomputed forward work, and not on a CPU for the node's own self time, which is dispatch.
    """
    name = texts(ops["name"])
    forward = np.where((pairs.forward >= 0) & ~name.str.starts_with(ENGINE_CALL).to_numpy(), pairs.forward, -1)
    costed = np.append(name.is_in(list(BACKWARD_FORMULAS)) & ops["signature"].is_not_null(), False)
    needs_name = np.append(name.is_in(list(NAMED_BACKWARD)), False)
    around = nearest(parent, costed[forward] & (pairs.named | ~needs_name[forward]))
    node = np.append(around, -1)[start]
    node = np.where(np.append(ops["recompute"].to_numpy(), False)[start], -1, node)
    wanted = (node >= 0) & found.open()
    time = kernels["busy_ns"].to_numpy()
    unexplained, whole = (np.bincount(node[chosen], time[chosen], minlength=ops.height) for chosen in (wanted, node >= 0))
    wanted &= np.append(2 * unexplained > whole, False)[node]
    rows = np.unique(node[wanted])
    call = np.full(ops.height + 1, -1, dtype=np.int64)
    frame = ops[forward[rows]].select(text("name"), "signature")
    convolution = np.append(_named(ops, list(LAYOUTS)), False)[forward]
    one = single_gradient(kernels, np.where(np.append(convolution, False)[node], node, -1), ops.height)[rows]
    frame = frame.with_columns(ops["signature"][rows].alias("at"), node=rows, products=_products_inside(ops, around)[rows], one=one)
    frame = frame.with_columns(
        at=pl.when(pl.col("name").is_in(list(told.TOTAL_D))).then("at"),
        products=pl.when(pl.col("name").is_in(list(PRODUCTS))).then("products").when("one").then(1),
    )
    for (key, signature, at, products), members in frame.group_by("name", "signature", "at", "products", maintain_order=True):
        cost = attempt(_node_cost, str(key), parsed[signature], parsed.get(at), products)
        if isinstance(cost, Cost):
            call[members["node"].to_numpy()] = found.add(cost, f"{key} backward")
    wanted &= call[node] >= 0
    found.owner, found.call = np.where(wanted, node, found.owner), np.where(wanted, call[node], found.call)
