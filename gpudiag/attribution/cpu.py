"""The CPU as the device: one kernels row per op that worked, its time the time outside its children."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.intervals import Spans
from gpudiag.attribution.names import contains, matching, texts
from gpudiag.attribution.nesting import Nesting, self_ns, self_spans
from gpudiag.model import tables
from gpudiag.trace.kernel_names import COMPILE_MARK

# The calls of torch.distributed and their work on the CPU back ends (gloo, MPI, UCC, oneCCL), as the profiler names them.
_COLLECTIVE = r"^(gloo|mpi|ucc|nccl|ccl|xccl):|^c10d::|^_?c10d_functional::|^record_param_comms$"


# Work of a back end of its own, on the threads of the back end.
_BACKEND = r"^(gloo|mpi|ucc|ccl|xccl):"


def _working(ops: pl.DataFrame, nesting: Nesting) -> np.ndarray:
    """Return which ops are work of the device: those on threads that run aten ops, and the back ends' messages wherever they run.

    A thread that waits in an unknown call would make the device look busy; one that sends gradients is why the training thread waits.
    """
    name = texts(ops["name"])
    aten, sends = name.str.starts_with("aten::").to_numpy(), name.str.contains(_BACKEND).to_numpy()
    found: np.ndarray = np.isin(nesting.thread, np.unique(nesting.thread[aten])) | sends
    return found


def _compiling(ops: pl.DataFrame, marks: pl.DataFrame, nesting: Nesting) -> np.ndarray:
    """Return which ops are torch.compile at work or lie within it on their thread: tracing and autotuning run ops that train nothing.

    Some versions record it as ops, some as annotations.
    """
    found = np.zeros(ops.height, dtype=bool)
    columns = ("thread", "start_ns", "end_ns")
    ranges = pl.concat([frame.filter(pl.Series(matching(frame["name"], COMPILE_MARK))).select(columns) for frame in (ops, marks)])
    for (thread,), rows in ranges.drop_nulls("thread").group_by("thread"):
        first, last = np.searchsorted(nesting.thread, [thread, thread + 1])
        within = np.searchsorted(intervals.of(rows).reshape(-1), nesting.start_ns[first:last], side="right")
        found[first:last] = within % 2 == 1
    return found


def cpu_kernels(ops: pl.DataFrame, marks: pl.DataFrame, nesting: Nesting) -> pl.DataFrame:
    """Return the kernels table (stage 'link') of a CPU-only run; what is done to compile code is no work of the device."""
    busy = self_ns(nesting)
    chosen = np.flatnonzero((busy > 0) & _working(ops, nesting) & ~_compiling(ops, marks, nesting))
    rows = ops[chosen]
    order = np.argsort(rows["start_ns"].to_numpy(), kind="stable")
    rows, busy = rows[order], busy[chosen][order]
    known = {
        "name": rows["name"],
        "kind": pl.repeat("cpu", rows.height, eager=True),
        "start_ns": rows["start_ns"],
        "end_ns": rows["end_ns"],
        "busy_ns": pl.Series(busy),
        "op": rows["id"],
        "step": rows["step"],
        "collective": contains(rows["name"], _COLLECTIVE),
        "replay": pl.repeat(False, rows.height, eager=True, dtype=pl.Boolean),
        "mapped": pl.repeat(False, rows.height, eager=True, dtype=pl.Boolean),
        "id": pl.int_range(rows.height, eager=True),
    }
    return pl.DataFrame(
        [known[name].cast(dtype).alias(name) if name in known else pl.repeat(None, rows.height, eager=True, dtype=dtype).alias(name)
         for name, dtype in tables.schema("kernels", "link").items()]
    )  # fmt: skip


def cpu_spans(ops: pl.DataFrame, kernels: pl.DataFrame, nesting: Nesting) -> tuple[np.ndarray, Spans]:
    """Return (kernel rows, spans): the pieces of time in which each kernels row was the innermost op of its thread."""
    rows, spans = self_spans(nesting)
    kernel_of_op = np.full(ops.height, -1, dtype=np.int64)
    kernel_of_op[kernels["op"].to_numpy()] = kernels["id"].to_numpy()
    kernel = kernel_of_op[rows]
    return kernel[kernel >= 0], spans[kernel >= 0]
