"""What the grid of a kernel tells: the waves that fill the device, and sizes of results that torch does not record.

ATen's element-wise kernels give each thread a fixed number of elements and launch just enough blocks, so that a grid of g blocks of w
elements says (g - 1) w < N <= g w. Sources (PyTorch 2.13; unchanged since 1.9 where named so):
aten/src/ATen/native/cuda/IndexKernel.cu (index_elementwise_kernel<nt, vt>: w = nt * vt), IndexKernelUtils.cu
(vectorized_gather_kernel<16, index_t>: blocks = indices x ceil(slice bytes / (256 * 16))), RangeFactories.cu
(elementwise_kernel_with_index: one element a thread). Reductions and kernels with a grid of fixed size tell nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import ceil

import numpy as np
import polars as pl

from gpudiag.attribution.names import decode_column
from gpudiag.model.finding import Missing
from gpudiag.model.hardware import Device
from gpudiag.model.ops import Cost, Signature
from gpudiag.model.trace import Trace
from gpudiag.roofline.costs.registry import attempt, size_of
from gpudiag.roofline.op_roles import AttributedOps

_THREADS_PER_SM = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}
"""Maximum resident threads of an SM where they are not 2048 (CUDA C++ Programming Guide, technical specifications)."""

_ROUNDING = 0.005
"""The occupancy is recorded in whole percents."""


def count_waves(device: Device | None) -> pl.Expr:
    """Return grid / (SMs x resident blocks an SM) of each kernel; null where grid, block or occupancy were not recorded.

    The recorded 'est. achieved occupancy' is resident blocks an SM x block / maximum threads, where the resident blocks are at most those
    that the grid gives each SM (libkineto; in real traces they are whole numbers wherever the grid is larger). So 1 means at most one
    wave; below 1 some SMs get no block.
    """
    if device is None or not device.sm_count or device.vendor != "nvidia":
        return pl.lit(None, dtype=pl.Float64)
    threads = _THREADS_PER_SM.get(device.compute_capability or "", 2048)
    given = pl.col("grid") / device.sm_count
    resident = pl.col("occupancy") * threads / pl.col("block")
    by_grid = (resident - given).abs() <= _ROUNDING * threads / pl.col("block")
    resident = pl.max_horizontal(pl.when(by_grid).then(given).otherwise(resident.round()), pl.lit(1.0))
    known = (pl.col("occupancy") > 0) & (pl.col("block") > 0) & (pl.col("grid") > 0)
    return pl.when(known).then(given / resident)


_INDEX = re.compile(r"\bindex_elementwise_kernel<(\d{1,5}), ?(\d{1,5}),")
_GATHER = re.compile(r"\bvectorized_gather_kernel<(\d{1,3}),")
_RANGE = re.compile(r"\belementwise_kernel_with_index<")

_GATHER_THREADS = 256
"""Most threads that vectorized_gather_kernel gives to one slice (IndexKernelUtils.cu)."""

_INDEX_BYTES = 8
"""Indices are int64 (a boolean mask is turned into them by aten::nonzero)."""

Geometry = tuple[str, int, int]
"""Kernel name, blocks, threads a block."""


def estimate_costs_by_grid(trace: Trace, owners: AttributedOps) -> None:
    """Give calls of `owners` that have no cost a `derived` one where their kernel's grid tells the size of the result.

    At most one block of elements is unknown; where whole slices of the input fit that range only once, the size is exact.
    """
    open_calls = [call for call, cost in enumerate(owners.costs) if isinstance(cost, Missing) and owners.names[call] in _FORMULAS]
    chosen = pl.Series("call", owners.call).is_in(open_calls) & trace.kernels["grid"].is_not_null() & trace.kernels["block"].is_not_null()
    if not chosen.any():
        return
    rows = np.flatnonzero(chosen.to_numpy())
    signature = trace.ops["signature"].gather(owners.owner[rows])
    frame = trace.kernels.select(decode_column("name"), "grid", "block")[rows].with_columns(
        pl.Series("row", rows), pl.Series("call", owners.call[rows]), signature.alias("signature"), pl.Series("owner", owners.owner[rows])
    )
    distinct = frame.select("call", "signature", "name", "grid", "block").unique(maintain_order=True).drop_nulls("signature")
    found = list[tuple[object, ...]]()
    for call, number, name, grid, block in distinct.iter_rows():
        cost = attempt(_FORMULAS[owners.names[call]], owners.parsed[number], (name, grid, block))
        if isinstance(cost, Cost):
            found.append((call, number, name, grid, block, owners.add(cost, owners.names[call])))
    # all kernels of a call (helpers too) take the cost that one of them tells
    keys = ["call", "signature", "name", "grid", "block"]
    table = pl.DataFrame(found, schema={name: frame.schema[name] for name in keys} | {"told": pl.Int64}, orient="row")
    told = frame.join(table, on=keys, how="inner").unique("owner", keep="any").select("owner", "told").sort("owner")
    if told.height:
        place = np.minimum(np.searchsorted(told["owner"].to_numpy(), owners.owner), told.height - 1)
        hit = (told["owner"].to_numpy()[place] == owners.owner) & (owners.owner >= 0)
        owners.call = np.where(hit, told["told"].to_numpy()[place], owners.call)


_NOT_TOLD = Missing("the grid of its kernel does not tell")


def _estimate_index(signature: Signature, geometry: Geometry) -> Cost | Missing:
    """Estimate the cost of advanced indexing of self (0): elements read (no more than there are) and written, and the indices.

    torch does not record the index tensors: one index a slice of the first dimension is the least there can be.
    """
    source = signature.tensor(0)
    if source is None or not source.shape or not source.numel:
        return _NOT_TOLD
    slice_numel = source.numel // source.shape[0]
    name, grid, block = geometry
    elements, match = None, _GATHER.search(name)
    if match is not None and match.group(1) != "0":  # a gather of whole slices along the first dimension
        blocks = ceil(slice_numel * source.item_bytes / (_GATHER_THREADS * int(match.group(1))))
        elements = grid // blocks * slice_numel if blocks and grid % blocks == 0 else None
    if not elements:  # an index_elementwise_kernel: whole slices where that fits in one way, else the middle of the range
        match = _INDEX.search(name)
        work = int(match.group(1)) * int(match.group(2)) if match else 0
        if match is None or grid < 1 or block != int(match.group(1)):
            return _NOT_TOLD
        low, high = (grid - 1) * work, grid * work
        slices = high // slice_numel
        once = slices * slice_numel > low and (slices - 1) * slice_numel <= low
        if not once and not work:
            return _NOT_TOLD
        elements = slices * slice_numel if once else max(1, (low + high) // 2)
    read = size_of(min(elements, source.numel), source.dtype)
    return Cost(bytes=read + size_of(elements, source.dtype) + _INDEX_BYTES * ceil(elements / slice_numel), provenance="derived")


def _estimate_arange(signature: Signature, geometry: Geometry) -> Cost | Missing:
    """Estimate the cost of writing a range: one element a thread; its dtype is that of the result, which is recorded while still empty."""
    name, grid, block = geometry
    results = [item for item in signature.inputs if item.dtype is not None and item.shape]
    if not _RANGE.search(name) or not results or grid < 1:
        return _NOT_TOLD
    return Cost(bytes=size_of(max(1, grid * block - block // 2), results[-1].dtype), provenance="derived")


_FORMULAS: dict[str, Callable[[Signature, Geometry], Cost | Missing]] = {
    "aten::index": _estimate_index,
    "aten::_unsafe_index": _estimate_index,
    "aten::arange": _estimate_arange,
}
"""Ops whose result only the data (or an argument that was not recorded) decides."""
