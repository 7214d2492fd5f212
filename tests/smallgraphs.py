"""Dependency graphs of a few nodes made by hand, and tables of the rows that they point to. Times in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from gpudiag.model.graph import Graph, encode_edge_kind, encode_node_kind
from gpudiag.model.trace import Thread, Trace, TraceMeta, build_table_schema

DEVICE = -1
"""Lane of the first stream."""


def node(kind: str, start: float, end: float, *, lane: int = 0, kernel: int = -1, launch: int = -1, op: int = -1) -> dict[str, Any]:
    """Return a node; device work stands on the first stream unless told."""
    lane = DEVICE if kind in ("kernel", "copy", "communication") and lane == 0 else lane
    times = {"start": round(start * 1000), "duration": round((end - start) * 1000)}
    return {"kind": kind, "lane": lane, "kernel": kernel, "launch": launch, "op": op, **times}


def edge(src: int, dst: int, kind: str = "thread", lag: float = 0, free: float = 0) -> dict[str, Any]:
    """Return an edge."""
    return {"src": src, "dst": dst, "kind": kind, "lag": round(lag * 1000), "free": round(free * 1000)}


def graph(nodes: Sequence[dict[str, Any]], edges: Sequence[dict[str, Any]], *, end: float, last_host: int = -1, step: int = 0) -> Graph:
    """Return the graph of a step from 0 to `end`; node 0, its begin, is put in front of `nodes` (which count from 1)."""
    nodes = [node("host", 0, 0), *nodes]

    def ints(rows: Sequence[dict[str, Any]], key: str) -> Any:
        return np.array([row[key] for row in rows], dtype=np.int64)

    return Graph(
        step=step,
        kind=np.array([encode_node_kind(row["kind"]) for row in nodes], dtype=np.int8),
        lane=ints(nodes, "lane"),
        streams=(7, 20),
        start_ns=ints(nodes, "start"),
        duration_ns=ints(nodes, "duration"),
        kernel=ints(nodes, "kernel"),
        launch=ints(nodes, "launch"),
        op=ints(nodes, "op"),
        src=ints(edges, "src"),
        dst=ints(edges, "dst"),
        edge_kind=np.array([encode_edge_kind(row["kind"]) for row in edges], dtype=np.int8),
        lag_ns=ints(edges, "lag"),
        free_ns=ints(edges, "free"),
        origin_ns=0,
        end_ns=round(end * 1000),
        last_host=last_host,
    )


def table(name: str, rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """Return the table `name` at stage 'cost' with what `rows` give, ids added and the rest null."""
    schema = build_table_schema(name, "cost")
    full = [{"id": number, **row} for number, row in enumerate(rows)]
    return pl.DataFrame([{key: row.get(key) for key in schema} for row in full], schema=schema, orient="row")


def trace(**rows: Sequence[dict[str, Any]]) -> Trace:
    """Return a trace whose tables hold `rows`."""
    names = ("ops", "signatures", "launches", "kernels", "frames", "marks", "allocations", "collectives")
    meta = TraceMeta("handmade", 0, 0, threads=(Thread("1", "1"),))
    return Trace(meta, **{name: table(name, rows.get(name, ())) for name in names})


def launch_bound() -> Graph:
    """Return a step of 330 us: a loader wait of 100, then two kernels of 40 whose launches lie 110 apart, then a wait for the second.

    Nodes: 1 data, 2 host, 3 launch, 4 host, 5 launch, 6 kernel 0, 7 kernel 1, 8 sync. Ops 0 and 1 (forward) launch the kernels.
    """
    nodes = [
        node("data", 0, 100),
        node("host", 100, 150),
        node("launch", 150, 160, launch=0, op=0),
        node("host", 160, 260, op=1),
        node("launch", 260, 270, launch=1, op=1),
        node("kernel", 165, 205, kernel=0, op=0),
        node("kernel", 275, 315, kernel=1, op=1),
        node("sync", 325, 330, launch=2),
    ]
    edges = [
        *(edge(row, row + 1) for row in range(5)),
        edge(3, 6, "launch", 5),
        edge(5, 7, "launch", 5),
        edge(6, 7, "stream", 2),
        edge(5, 8),
        edge(7, 8, "sync", 10),
    ]
    return graph(nodes, edges, end=330, last_host=8)


def launch_bound_trace() -> Trace:
    """Return the tables that `launch_bound` points to: two element-wise ops of 1,000 floats, roofs of 10 and 80 us."""
    return trace(
        ops=[
            {"name": "aten::add", "phase": "forward", "signature": 0, "thread": 0},
            {"name": "aten::mul", "phase": "forward", "signature": 0, "thread": 0},
        ],
        signatures=[{"shapes": "[[10, 100], [10, 100]]", "dtypes": '["float", "float"]'}],
        kernels=[
            {"name": "k0", "kind": "kernel", "stream": 7, "op": 0, "owner": 0, "step": 0, "bound": "memory", "t_roof_ns": 10_000.0,
             "bytes_moved": 12_000.0, "start_ns": 165_000, "end_ns": 205_000, "busy_ns": 40_000},
            {"name": "k1", "kind": "kernel", "stream": 7, "op": 1, "owner": 1, "step": 0, "bound": "overhead", "t_roof_ns": 80_000.0,
             "bytes_moved": 12_000.0, "start_ns": 275_000, "end_ns": 315_000, "busy_ns": 40_000},
        ],
        launches=[{"api": "cudaLaunchKernel"}, {"api": "cudaLaunchKernel"}, {"api": "cudaStreamSynchronize"}],
    )  # fmt: skip


def launch_bound_syncs() -> pl.DataFrame:
    """Return the table `syncs` of `launch_bound`: the wait is that of a line of train.py."""
    return table("syncs", [{"launch": 2, "api": "cudaStreamSynchronize", "op": 0, "site": "/src/train.py(42): main"}])
