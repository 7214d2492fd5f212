"""sync=0: calls that wait for the device do not; sync=train.py:42 or sync=aten::item: those at one place, or of one op or call.

A read of a scalar that waits is gone with what issuing it took: without a reader nothing is copied.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import among, texts
from gpudiag.model.graph import Graph, edge_kind
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.setting import Kind, Setting
from gpudiag.timeline.whatif.times import Bools, Times, of_kind, scaled

_ALL = ("0", "", "all")
_READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
"""Ops that do nothing but bring a number to the host (ATen: native/Scalar.cpp, TensorProperties.cpp)."""
_PLACE = re.compile(r"(?P<file>.*\.py)(?::(?P<line>\d+))?$")


def _apply(graph: Graph, times: Times, context: Context, setting: Setting) -> Times | None:
    return _unwaited(graph, times, context, None if setting.value in _ALL else _chosen(graph, context, setting.value))


def without_calls(graph: Graph, times: Times, context: Context, launches: npt.NDArray[np.int64]) -> Times | None:
    """Return `times` with the calls in these rows of `launches` not waiting; None where the graph holds none that does."""
    return _unwaited(graph, times, context, (graph.launch >= 0) & np.isin(graph.launch, launches))


def _unwaited(graph: Graph, times: Times, context: Context, chosen: Bools | None) -> Times | None:
    """Return `times` without the waits of the `chosen` nodes (None: of all); None where none of them waits."""
    waits = graph.edge_kind == edge_kind("sync")
    calls = np.zeros(graph.kind.size, dtype=np.bool_)
    calls[graph.dst[waits]] = True
    calls |= of_kind(graph, "sync")
    if chosen is not None:
        calls &= chosen
    edges = waits & calls[graph.dst]
    if not (edges.any() or times.duration_ns[calls & of_kind(graph, "sync")].any()):
        return None
    waiting = calls.copy()
    waiting[graph.dst[edges]] = True
    times = scaled(times, (calls & of_kind(graph, "sync")) | _reading(graph, context, waiting), 0.0)
    return msgspec.structs.replace(times, dropped=times.dropped | edges)


def _reading(graph: Graph, context: Context, waiting: Bools) -> Bools:
    """Return the host nodes of the reads that hold the calls `waiting`."""
    ops = context.trace.ops
    reads = context.once("reads", lambda: np.append(among(ops["name"], _READS).to_numpy(), False))
    parent = np.append(ops["parent"].fill_null(-1).to_numpy(), -1)
    inner = np.unique(graph.op[waiting])
    inner = inner[reads[inner]]
    gone = np.union1d(inner, parent[inner])  # item() and the op below it that copies
    found: Bools = of_kind(graph, "host", "launch") & (graph.kernel < 0) & reads[graph.op] & np.isin(graph.op, gone)
    return found


def _chosen(graph: Graph, context: Context, text: str) -> Bools:
    """Return the nodes of calls that `text` names: 'file.py:line', 'file.py', an op with or without 'aten::', or a runtime call."""
    none = np.zeros(graph.kind.size, dtype=np.bool_)
    if context.syncs is None or not context.syncs.height:
        return none
    found = context.syncs.filter(_at_place(text) | _of_name(text, context))
    return none if not found.height else (graph.launch >= 0) & np.isin(graph.launch, found["launch"].drop_nulls().to_numpy())


def _at_place(text: str) -> pl.Expr:
    """Return whether the site, 'path/file.py(line): function', is at `text`."""
    match = _PLACE.match(text)
    if match is None:
        return pl.lit(False)
    line = rf"\({match['line']}\)" if match["line"] else r"\(\d+\)"
    return pl.col("site").str.contains(rf"(^|[/\\]){re.escape(match['file'])}{line}").fill_null(False)


def _of_name(text: str, context: Context) -> pl.Expr:
    """Return whether the op or the call is `text`."""
    names = texts(context.trace.ops["name"])
    ops = [row for row, name in enumerate(names.unique(maintain_order=True).to_list()) if name in (text, f"aten::{text}")]
    chosen = names.is_in([text, f"aten::{text}"]).arg_true().cast(pl.Int64) if ops else pl.Series([], dtype=pl.Int64)
    return (pl.col("api") == text).fill_null(False) | pl.col("op").is_in(chosen.implode()).fill_null(False)


def _words(setting: Setting) -> str:
    if setting.value in _ALL:
        return "no call waits for the device, and nothing is read for the host: it issues work as far ahead as the queue lets it"
    return f"the calls at '{setting.value}' do not wait for the device, and read nothing"


KIND = Kind(
    "sync", "0 (all), file.py:line, an op such as aten::item, or a call such as cudaStreamSynchronize", "0", _apply, _words,
    "no such call waits for the device in the steps", names_places=True,
)  # fmt: skip
