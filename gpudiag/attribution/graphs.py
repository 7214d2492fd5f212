"""Replayed graphs -> ops of their capture pass. A graph launch starts its kernels without any op; while the graph was captured, the same
launches were issued one by one under their ops, and no kernel ran. Their order is the order of the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.graph_match import ACCEPT_FROM, Captured, Fit, Judge, Replayed, fit
from gpudiag.attribution.graph_sizes import clear_winner, explained
from gpudiag.attribution.names import text
from gpudiag.model.signature import Shape, parse_signature
from gpudiag.model.trace import Trace
from gpudiag.trace import kernel_names
from gpudiag.units import format_share

Rows = npt.NDArray[np.int64]

MAX_ANCESTORS = 16
"""Ops around a captured launch that are kept; the owner of a cost lies a few levels up (aten::linear > aten::addmm)."""

MAX_COMPARISONS = 5_000_000
"""Pairs of nodes looked at in one file, about four seconds; only a hostile file or thousands of captured sizes reach it."""

MAX_COPIED_OPS = 5_000_000
"""Rows added to the ops; each replay has its own, so that every replay counts its work."""


class Graph(NamedTuple):
    """A captured graph: which launches (rows of its trace) in the order of issue, and the code of each distinct node."""

    source: Trace
    launches: Rows
    nodes: Rows


def map_replays(trace: Trace, recordings: tuple[Trace, ...] = ()) -> tuple[Trace, tuple[str, ...]]:
    """Return `trace` (stage 'link') with the replayed kernels mapped to copies of the ops of their capture pass, and warnings.

    The capture pass lies in the trace itself or in one of `recordings` (also at stage 'link'). A replay is mapped where the kernel names
    agree with the captured ops in at least 90 % of the nodes that names decide, and no other captured graph with other sizes fits as
    well. The copies have no step, thread or duration: they are no work of the host in the analysed steps.
    """
    if not trace.kernels["replay"].any():
        return trace, ()
    captured = _Codes()
    graphs = [graph for source in (trace, *recordings) for graph in _captured(source, captured)]
    if not graphs:
        return trace, ()
    replays = _Replays(trace.kernels)
    found, notes = _matches(replays, graphs, captured)
    return (_mapped(trace, replays, found), notes) if found else (trace, notes)


class _Codes(dict[Captured, int]):
    """Code of each distinct captured node."""

    def __missing__(self, node: Captured) -> int:
        self[node] = code = len(self)
        return code


def _captured(trace: Trace, codes: _Codes) -> Iterator[Graph]:
    """Yield the captured graphs of `trace`: what was issued between begin and end of a capture and has no device work of its own."""
    launches = trace.launches.with_columns(text("api").alias("call"))
    windows = _windows(launches)
    if not windows:
        return
    ran = trace.kernels["correlation"].unique().implode()
    issued = launches.with_columns(_kind().alias("kind")).filter(pl.col("kind").is_not_null() & ~pl.col("correlation").is_in(ran))
    issued = issued.unique("correlation", keep="first", maintain_order=True)  # a runtime call and the driver call inside it
    ops = trace.ops.select(pl.col("id").alias("op"), text("name").alias("op_name"))
    issued = issued.join(ops, on="op", how="left", maintain_order="left").with_columns(text("kernel"))
    rows, starts, threads = (issued[name].to_numpy() for name in ("id", "start_ns", "thread"))
    what = ["kind", "op_name", "kernel"]
    distinct = issued.select(what).unique(maintain_order=True)
    distinct = distinct.with_columns(pl.Series("node", [codes[Captured(*node)] for node in distinct.iter_rows()], dtype=pl.Int64))
    nodes = issued.join(distinct, on=what, how="left", maintain_order="left", nulls_equal=True)["node"].to_numpy()
    for begin, end, thread, alone in windows:
        first, last = np.searchsorted(starts, [begin, end])
        own = slice(first, last) if alone else first + np.flatnonzero(threads[first:last] == thread)
        if len(nodes[own]):
            yield Graph(trace, rows[own], nodes[own])


def _kind() -> pl.Expr:
    """Return what a runtime call adds to a graph that is being captured; null: nothing that runs on the device."""
    call = pl.col("call")
    return (
        pl.when(call.str.contains(kernel_names.KERNEL_LAUNCH))
        .then(pl.lit("kernel"))
        .when(call.str.contains(r"(?i)^(cuda|hip|cu)Memcpy.*Async"))
        .then(pl.lit("memcpy"))
        .when(call.str.contains(r"(?i)^(cuda|hip|cu)Memset.*Async"))
        .then(pl.lit("memset"))
        .otherwise(None)
    )


def _windows(launches: pl.DataFrame) -> list[tuple[int, int, int, bool]]:
    """Return (begin, end, thread, alone) of every capture; alone: no other thread captures meanwhile.

    Autograd issues the backward pass from threads of its own, into the same capture, so that all threads count where it is alone.
    """
    calls = launches.filter(pl.col("call").str.contains(kernel_names.CAPTURE_BEGIN) | pl.col("call").str.contains(kernel_names.CAPTURE_END))
    opened: dict[int, int] = {}
    found: list[tuple[int, int, int]] = []
    for thread, start, end, call in calls.select(pl.col("thread").fill_null(-1), "start_ns", "end_ns", "call").iter_rows():
        if "Begin" in call:
            opened[thread] = end
        elif thread in opened:
            found.append((opened.pop(thread), start, thread))
    found.sort()
    latest = np.maximum.accumulate(np.array([end for _, end, _ in found], dtype=np.int64))
    alone = [
        (place == 0 or latest[place - 1] <= begin) and (place + 1 == len(found) or found[place + 1][0] >= end)
        for place, (begin, end, _) in enumerate(found)
    ]
    return [(*window, apart) for window, apart in zip(found, alone, strict=True)]


class _Replays:
    """The graph launches of a trace: their kernels in the order of the nodes, and the launches that replay the same kernels."""

    def __init__(self, kernels: pl.DataFrame) -> None:
        frame = kernels.filter("replay").with_columns(text("name").alias("text"))
        node = pl.when(pl.col("graph_node").is_null().any().over("launch")).then(None).otherwise("graph_node")
        self.frame = frame.sort("launch", node, "start_ns", "stream", maintain_order=True)
        distinct = self.frame.select("kind", "text", "kernel_class").unique(maintain_order=True).with_row_index("code")
        self.nodes = [Replayed(*row) for row in distinct.select("kind", "text", "kernel_class").iter_rows()]
        codes = self.frame.join(distinct, on=["kind", "text", "kernel_class"], how="left", maintain_order="left", nulls_equal=True)
        self.codes = codes["code"].cast(pl.Int64).to_numpy()
        launches = self.frame["launch"].to_numpy()
        edges = np.flatnonzero(np.diff(launches, prepend=-1, append=-1)) if len(launches) else np.empty(0, dtype=np.int64)
        self.spans = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))

    def distinct(self) -> dict[bytes, list[tuple[int, int]]]:
        """Return the spans of `frame` by their sequence of kernels: replays of one graph share it."""
        found: dict[bytes, list[tuple[int, int]]] = {}
        for first, last in self.spans:
            found.setdefault(self.codes[first:last].tobytes(), []).append((first, last))
        return found


_Match = tuple[Graph, Fit, list[tuple[int, int]]]


def _matches(replays: _Replays, graphs: list[Graph], codes: _Codes) -> tuple[list[_Match], tuple[str, ...]]:
    """Return the captured graph and the fit of each distinct replay that has one, and warnings about those that have none."""
    graphs = _distinct(graphs)
    judge = Judge(replays.nodes, list(codes))
    left, found, unseen, nowhere, many = MAX_COMPARISONS, list[_Match](), 0, 0, 0
    for sequence, spans in replays.distinct().items():
        ran = np.frombuffer(sequence, dtype=np.int64)
        tried = [graph for graph in graphs if min(len(graph.nodes), len(ran)) >= ACCEPT_FROM * max(len(graph.nodes), len(ran)) / 2]
        left -= len(ran) * len(tried)
        if left < 0:
            unseen += len(spans)
            continue
        fits = [(graph, done) for graph in tried if (done := fit(judge, ran, graph.nodes))]
        best = max((done.score * done.agreeing for _, done in fits), default=0.0)
        chosen = [(graph, done) for graph, done in fits if done.score * done.agreeing == best]
        if len(chosen) > 1:
            chosen = _of_this_size(replays.frame.slice(spans[0][0], len(ran)), chosen)
        nowhere += len(spans) * (not chosen)
        many += len(spans) * (len(chosen) > 1)
        if len(chosen) == 1:
            found.append((*chosen[0], spans))
    return found, tuple(_notes(len(replays.spans), len(graphs), unseen, nowhere, many, found))


def _of_this_size(kernels: pl.DataFrame, chosen: list[tuple[Graph, Fit]]) -> list[tuple[Graph, Fit]]:
    """Return the one of `chosen` whose sizes the grids of the replayed `kernels` tell, else all of them."""
    counts = []
    for graph, done in chosen:
        ran = kernels[done.replayed]
        shapes = [_first_shape(text) for text in _sizes(graph, done.captured)]
        counts.append(explained(ran["text"].to_list(), ran["grid"].to_list(), shapes))
    place = clear_winner(counts)
    return chosen if place is None else [chosen[place]]


def _first_shape(text: str | None) -> Shape | None:
    inputs = parse_signature(text, None, None, None).inputs if text else ()
    return next((item.shape for item in inputs if item.shape), None)


def _distinct(graphs: list[Graph]) -> list[Graph]:
    """Return one of each kind: captured graphs with the same ops on the same sizes say the same."""
    found: dict[tuple[bytes, tuple[str | None, ...]], Graph] = {}
    for graph in graphs:
        found.setdefault((graph.nodes.tobytes(), _sizes(graph, np.arange(len(graph.launches)))), graph)
    return list(found.values())


def _sizes(graph: Graph, nodes: Rows) -> tuple[str | None, ...]:
    """Return the recorded shapes of the op of each of `nodes`, as text."""
    ops = graph.source.launches["op"].gather(graph.launches[nodes])
    signature = graph.source.ops["signature"].gather(ops)
    return tuple(graph.source.signatures["shapes"].gather(signature).to_list())


def _notes(replays: int, graphs: int, unseen: int, nowhere: int, many: int, found: list[_Match]) -> Iterator[str]:
    recorded = f"{graphs} captured graph{'s' if graphs > 1 else ''}"
    if unseen:
        yield f"{unseen} of {replays} graph launches were not compared with the {recorded}: there are too many of both"
    if nowhere:
        yield (
            f"{nowhere} of {replays} graph launches fit none of the {recorded} that were recorded (kernel names agree with the captured "
            f"ops in less than {format_share(ACCEPT_FROM)} of the nodes): their kernels are not modelled"
        )
    if many:
        yield (
            f"{many} of {replays} graph launches fit several of the {recorded} equally well, with the same kernels on other sizes: "
            "which of them was replayed was not recorded, so their kernels are not modelled"
        )
    worst = min((done.score for _, done, _ in found), default=1.0)
    if worst < 1:
        agree = format_share(worst, 1)
        yield f"replayed kernels were matched to captured ops by order; names agree in {agree} of the nodes of the least certain graph"


def _mapped(trace: Trace, replays: _Replays, found: list[_Match]) -> Trace:
    """Return `trace` with a copy of the captured ops for each replay, and its kernels pointing at them."""
    height, signatures, copies = trace.ops.height, trace.signatures, list[pl.DataFrame]()
    op, mapped = trace.kernels["op"].fill_null(-1).to_numpy().copy(), np.zeros(trace.kernels.height, dtype=bool)
    ids, times = replays.frame["id"].to_numpy(), trace.launches["start_ns"].to_numpy()[replays.frame["launch"].to_numpy()]
    for graph, done, spans in found:
        captured = graph.source.launches["op"].gather(graph.launches[done.captured]).fill_null(-1).to_numpy()
        chosen, local = _with_ancestors(graph.source.ops, captured)
        if not len(chosen):
            continue
        copied, signatures = (trace.ops[chosen], signatures) if graph.source is trace else _foreign(graph.source, chosen, signatures)
        firsts = np.array([first for first, _ in spans[: max(0, MAX_COPIED_OPS - height) // len(chosen)]], dtype=np.int64)
        rows = ids[firsts[:, None] + done.replayed[local >= 0]]
        op[rows] = height + np.arange(len(firsts))[:, None] * len(chosen) + local[local >= 0]
        mapped[rows] = True
        copies.append(_copies(copied, chosen, height, times[firsts]).select(trace.ops.columns))
        height += len(chosen) * len(firsts)
    kernels = trace.kernels.with_columns(pl.Series("op", op).replace(-1, None), pl.Series("mapped", mapped))
    return msgspec.structs.replace(trace, ops=pl.concat([trace.ops, *copies]), kernels=kernels, signatures=signatures)


def _with_ancestors(ops: pl.DataFrame, rows: Rows) -> tuple[Rows, Rows]:
    """Return `rows` (-1: none) with the ops around them, ascending, and the place of each of `rows` there (-1: none)."""
    parent = ops["parent"].fill_null(-1).to_numpy()
    level = np.unique(rows[rows >= 0])
    levels = [level]
    for _ in range(MAX_ANCESTORS):
        level = np.unique(parent[level])
        level = level[level >= 0]
        levels.append(level)
    chosen = np.unique(np.concatenate(levels))
    return chosen, np.where(rows >= 0, np.searchsorted(chosen, rows), -1)


def _foreign(source: Trace, chosen: Rows, signatures: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the ops `chosen` of another trace, and `signatures` with theirs; its sequence numbers mean nothing here."""
    copied = source.ops[chosen]
    wanted = copied["signature"].drop_nulls().unique().sort()
    places = pl.DataFrame({"signature": wanted}).with_row_index("place", offset=signatures.height)
    copied = copied.join(places, on="signature", how="left", maintain_order="left")
    copied = copied.with_columns(pl.col("place").cast(pl.Int64).alias("signature"), pl.lit(None, dtype=pl.Int64).alias("sequence"))
    added = source.signatures[wanted].with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("id") + signatures.height)
    return copied, pl.concat([signatures, added.select(signatures.columns)])


def _copies(ops: pl.DataFrame, chosen: Rows, first: int, times_ns: Rows) -> pl.DataFrame:
    """Return `ops` (rows `chosen` of their trace) once for each of `times_ns`, as rows from `first` on: no step, thread or duration.

    A forward op keeps no sequence number: the one of the capture pass stays the only one that a backward op finds.
    """
    parent = ops["parent"].fill_null(-1).to_numpy()
    place = np.minimum(np.searchsorted(chosen, parent), len(chosen) - 1)
    offsets = first + np.arange(len(times_ns)).repeat(len(chosen)) * len(chosen)
    known = np.tile(chosen[place] == parent, len(times_ns))
    repeated = ops[np.tile(np.arange(len(chosen)), len(times_ns))]
    nothing = pl.lit(None, dtype=pl.Int64)
    return repeated.with_columns(
        pl.int_range(first, first + pl.len(), dtype=pl.Int64).alias("id"),
        pl.Series("parent", np.where(known, offsets + np.tile(place, len(times_ns)), -1), dtype=pl.Int64).replace(-1, None),
        nothing.alias("thread"),
        nothing.alias("step"),
        pl.Series("start_ns", times_ns.repeat(len(chosen))),
        pl.Series("end_ns", times_ns.repeat(len(chosen))),
        pl.when(pl.col("fwd_thread").fill_null(0) > 0).then("sequence").otherwise(nothing).alias("sequence"),
    )
