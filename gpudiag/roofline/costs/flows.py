"""Costs that follow from sizes of arguments alone: some are read, and the results are as large as some of them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpudiag.model.cost import Cost, Provenance
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs.arguments import present, tensor
from gpudiag.roofline.costs.registry import costs
from gpudiag.roofline.costs.shapes import read_bytes, size_of


class Flow(msgspec.Struct, frozen=True):
    """What a call reads and writes, by position in its schema. Optional tensors that were not given are skipped among the reads."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    """Arguments that have the shape and dtype of one result each (an in-place result too)."""
    operations: int = 1
    """FLOP per element of argument `per`."""
    per: int = 0
    provenance: Provenance = "exact"


def flow_cost(signature: Signature, flow: Flow) -> Cost:
    """Return the cost of a call by its `flow`; raises NotModelledError where a size that decides was not recorded."""
    written = [tensor(signature, index, f"argument {index}") for index in flow.writes]
    moved = read_bytes(present(signature, *flow.reads)) + sum(size_of(item.numel, item.dtype) for item in written)
    elements = tensor(signature, flow.per, f"argument {flow.per}").numel
    return Cost(vector_flops=flow.operations * elements, bytes=moved, provenance=flow.provenance)


def register_flows(table: Mapping[str, Flow]) -> None:
    """Register one formula for each full schema name of `table`."""
    for name, flow in table.items():

        def formula(signature: Signature, flow: Flow = flow) -> Cost:
            return flow_cost(signature, flow)

        costs(name)(formula)
