"""The dtype of tensor lists, which torch does not record: from the kernel's name, else from tensors of the same shape.

Kernel names hold it as a template argument: aten/src/ATen/native/cuda/Shape.cu (CatArrayBatchedCopy<T, ...>; torch >= 2.1 copies by width:
OpaqueType<bytes>; the vectorised copy has alignment and elements of a vector last) and ForeachFunctors, MultiTensorApply,
FusedAdamMathFunctor.cuh (multi_tensor_apply_kernel<..., XFunctor<T, ...>>). What no name tells (a CPU has none), `shape_types` does.
A call of unknown type keeps 4 bytes an element, as a generic cost.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
import polars as pl

from gpudiag.attribution.names import texts
from gpudiag.model.cost import Cost
from gpudiag.model.signature import DTYPES, ITEM_BYTES
from gpudiag.model.trace import Trace
from gpudiag.roofline.costs.optimizers import ASSUMED_BYTES
from gpudiag.roofline.owners import Owners
from gpudiag.roofline.shape_types import result_bytes, tensor_bytes

_TYPE = r"(?:[\w:() ]*OpaqueType<(?P<width>\d{1,2})u?>|(?P<type>(?:c10::|signed |unsigned |long |short )?\w+(?:<\w+>)?))[,>]"
_CAT = re.compile(r"\bCatArrayBatchedCopy(?!_vectorized)\w*<" + _TYPE)
_CAT_VECTORS = re.compile(r"\bCatArrayBatchedCopy_vectorized<[^<>]*(?:<[^<>]*>)?[^<>]*,\s*(?P<alignment>\d{1,3}),\s*(?P<elements>\d{1,3})>")
_FOREACH = re.compile(r"\bmulti_tensor_apply_kernel<.*?Functor<" + _TYPE)

_CASTS = re.compile(r"\((?:unsigned )?(?:int|long)\)(?=\d)|<unnamed>::")
"""How another demangler writes OpaqueType<2u>: at::native::<unnamed>::OpaqueType<(unsigned int)2>."""

_JOINS = ("aten::cat", "aten::_cat", "aten::stack", "aten::_stack", "aten::concat", "aten::concatenate", "aten::_chunk_cat")
_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
_MIXED = ("aten::_foreach_copy", "aten::_foreach_mm")
"""The lists of these may differ in dtype, or their cost does not scale with it."""


def item_bytes(kernel: str) -> int | None:
    """Return the bytes per element of the tensor list that a kernel of this name works on; None where the name does not tell."""
    kernel = _CASTS.sub("", kernel)
    vectors = _CAT_VECTORS.search(kernel)
    if vectors is not None:
        return int(vectors.group("alignment")) // max(int(vectors.group("elements")), 1) or None
    match = _CAT.search(kernel) or _FOREACH.search(kernel)
    if match is None:
        return None
    if match.group("width"):
        return int(match.group("width")) or None
    return ITEM_BYTES.get(DTYPES.get(match.group("type"), ""))


def with_list_types(trace: Trace, owners: Owners) -> Owners:
    """Return `owners` with the bytes of calls on tensor lists at the width of their elements instead of the assumed one."""
    chosen = [call for call, (name, cost) in enumerate(zip(owners.names, owners.costs, strict=True)) if _assumed(name, cost)]
    frame = pl.DataFrame({"call": owners.call, "owner": owners.owner}).with_columns(texts(trace.kernels["name"]))
    frame = frame.filter(pl.col("call").is_in(chosen))
    parsed = owners.parsed
    listed = {row for row, signature in parsed.items() if signature.inputs and signature.inputs[0].tensors}
    frame = frame.with_columns(trace.ops["signature"].gather(frame["owner"])).filter(pl.col("signature").is_in(list(listed)))
    if not frame.height:
        return owners
    widths = {name: item_bytes(name) for name in frame["name"].unique().to_list()}
    frame = frame.with_columns(width=pl.col("name").replace_strict(widths, default=None, return_dtype=pl.Int64))
    frame = frame.sort("width", nulls_last=True, maintain_order=True).unique("owner", keep="first", maintain_order=True)
    joins = [call for call in chosen if owners.names[call] in _JOINS]
    silent = frame.filter(pl.col("width").is_null())
    if silent.height:
        rows = silent["owner"].to_numpy()
        taken = np.where(silent["call"].is_in(joins), result_bytes(trace.ops, parsed, rows), tensor_bytes(trace.ops, parsed, rows))
        told = silent.select("owner", told=pl.Series(taken, dtype=pl.Int64).replace(0, None))
        frame = frame.join(told, on="owner", how="left", maintain_order="left").with_columns(pl.coalesce("width", "told").alias("width"))
    return _rescaled(owners, frame.filter(pl.col("width").ne_missing(ASSUMED_BYTES)))


def _assumed(name: str, cost: object) -> bool:
    lists = name.startswith(_LISTS) and not name.startswith(_MIXED)
    return (lists or name in _JOINS) and isinstance(cost, Cost) and cost.provenance == "derived"


def _rescaled(owners: Owners, frame: pl.DataFrame) -> Owners:
    """Return `owners` with a cost of its own for each (call, width) of `frame`, whose rows are the owning ops (width null: not known)."""
    costs, names = list(owners.costs), list(owners.names)
    of_owner = np.full(int(owners.owner.max(initial=-1)) + 2, -1, dtype=np.int64)  # row -1 is the last
    for (row, width), members in frame.group_by("call", "width", maintain_order=True):
        cost = costs[int(str(row))]
        if not isinstance(cost, Cost):
            continue
        if width is None:
            costs.append(msgspec.structs.replace(cost, provenance="generic"))
        else:
            costs.append(msgspec.structs.replace(cost, bytes=cost.bytes * int(str(width)) // ASSUMED_BYTES))
        names.append(names[int(str(row))])
        of_owner[members["owner"].to_numpy()] = len(costs) - 1
    call = np.where(of_owner[owners.owner] >= 0, of_owner[owners.owner], owners.call)
    return owners._replace(call=call, costs=tuple(costs), names=tuple(names))
