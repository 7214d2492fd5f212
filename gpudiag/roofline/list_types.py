"""The dtype of tensor lists, which torch does not record: the kernel's name holds it as a template argument.

aten/src/ATen/native/cuda/Shape.cu (CatArrayBatchedCopy<T, ...>; torch >= 2.1 copies by width: OpaqueType<bytes>) and
aten/src/ATen/native/cuda/{ForeachFunctors,MultiTensorApply,FusedAdamMathFunctor}.cuh (multi_tensor_apply_kernel<..., XFunctor<T, ...>>).
"""

from __future__ import annotations

import re

import msgspec
import polars as pl

from gpudiag.model.cost import Cost
from gpudiag.model.signature import DTYPES, ITEM_BYTES
from gpudiag.model.trace import Trace
from gpudiag.roofline.costs.optimizers import ASSUMED_BYTES
from gpudiag.roofline.owners import Owners, signatures

_TYPE = r"(?:[\w:() ]*OpaqueType<(?P<width>\d{1,2})u?>|(?P<type>(?:c10::|signed |unsigned |long |short )?\w+(?:<\w+>)?))[,>]"
_CAT = re.compile(r"\bCatArrayBatchedCopy(?!_vectorized)\w*<" + _TYPE)
_FOREACH = re.compile(r"\bmulti_tensor_apply_kernel<.*?Functor<" + _TYPE)

_JOINS = ("aten::cat", "aten::_cat", "aten::stack", "aten::_stack", "aten::concat", "aten::concatenate", "aten::_chunk_cat")
_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
_MIXED = ("aten::_foreach_copy", "aten::_foreach_mm")
"""The lists of these may differ in dtype, or their cost does not scale with it."""


def item_bytes(kernel: str) -> int | None:
    """Return the bytes per element of the tensor list that a kernel of this name works on; None where the name does not tell."""
    match = _CAT.search(kernel) or _FOREACH.search(kernel)
    if match is None:
        return None
    if match.group("width"):
        return int(match.group("width")) or None
    return ITEM_BYTES.get(DTYPES.get(match.group("type"), ""))


def with_list_types(trace: Trace, owners: Owners) -> Owners:
    """Return `owners` with the bytes of calls on tensor lists at the width that their kernels' names tell instead of the assumed one."""
    chosen = [call for call, (name, cost) in enumerate(zip(owners.names, owners.costs, strict=True)) if _assumed(name, cost)]
    frame = pl.DataFrame({"call": owners.call, "owner": owners.owner}).with_columns(trace.kernels["name"].cast(pl.String))
    frame = frame.filter(pl.col("call").is_in(chosen))
    listed = {row for row, signature in signatures(trace).items() if signature.inputs and signature.inputs[0].tensors}
    frame = frame.with_columns(trace.ops["signature"].gather(frame["owner"])).filter(pl.col("signature").is_in(list(listed)))
    widths = {name: item_bytes(name) for name in frame["name"].unique().to_list()}
    frame = frame.with_columns(width=pl.col("name").replace_strict(widths, default=None, return_dtype=pl.Int64)).drop_nulls("width")
    frame = frame.filter(pl.col("width") != ASSUMED_BYTES).unique("owner", keep="first", maintain_order=True)
    return _rescaled(owners, frame) if frame.height else owners


def _assumed(name: str, cost: object) -> bool:
    lists = name.startswith(_LISTS) and not name.startswith(_MIXED)
    return (lists or name in _JOINS) and isinstance(cost, Cost) and cost.provenance == "derived"


def _rescaled(owners: Owners, frame: pl.DataFrame) -> Owners:
    """Return `owners` with a cost of its own for each (call, width) of `frame`, whose rows are the owning ops."""
    costs, names = list(owners.costs), list(owners.names)
    call = owners.call.copy()
    for (row, width), members in frame.group_by("call", "width", maintain_order=True):
        cost = costs[int(str(row))]
        if not isinstance(cost, Cost):
            continue
        costs.append(msgspec.structs.replace(cost, bytes=cost.bytes * int(str(width)) // ASSUMED_BYTES))
        names.append(names[int(str(row))])
        call[pl.Series(owners.owner).is_in(members["owner"].implode()).to_numpy()] = len(costs) - 1
    return owners._replace(call=call, costs=tuple(costs), names=tuple(names))
