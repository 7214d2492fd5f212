"""Traces of a few events, written as Kineto writes them and read by the reader. Times in microseconds from the trace's zero."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from gpudiag.attribution.device import find_gaps
from gpudiag.attribution.intervals import build_spans
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.bundle import Settings
from gpudiag.model.hardware import Device
from gpudiag.model.trace import Trace
from gpudiag.roofline.attributed_ops import find_attributed_ops
from gpudiag.roofline.kernel_bounds import classify_kernels
from gpudiag.trace import read_trace

Event = dict[str, Any]

A100_PROPERTIES = {
    "id": 0,
    "name": "NVIDIA A100-SXM4-80GB",
    "totalGlobalMem": 85_000_000_000,
    "computeMajor": 8,
    "computeMinor": 0,
    "numSms": 108,
}


def _event(cat: str, name: str, start: float, end: float, tid: Any, args: dict[str, Any], pid: Any = 1) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": round(end - start, 3), "args": args}


def op(
    name: str,
    start: float,
    end: float,
    shapes: list[Any] | None = None,
    *,
    dtype: str = "float",
    tid: int = 1,
    seq: int | None = None,
    concrete: list[str] | None = None,
) -> Event:
    """Return an op; `shapes` None: none were recorded. `concrete`: its 'Concrete Inputs'."""
    args: dict[str, Any] = {} if seq is None else {"Sequence number": seq}
    if concrete is not None:
        args["Concrete Inputs"] = concrete
    if shapes is not None:
        args |= {"Input Dims": shapes, "Input type": [dtype if isinstance(shape, list) and shape else "" for shape in shapes]}
    return _event("cpu_op", name, start, end, tid, args)


def call(start: float, correlation: int | None, *, api: str = "cudaLaunchKernel", end: float | None = None, tid: int = 1) -> Event:
    """Return a runtime call of 1 us."""
    args = {} if correlation is None else {"correlation": correlation}
    return _event("cuda_runtime", api, start, start + 1 if end is None else end, tid, args)


def kernel(
    start: float, end: float, correlation: int | None, name: str = "gemm", *, stream: int = 7, device: int = 0, **args: Any
) -> Event:
    """Return a kernel; the name of a copy or memset gives its category."""
    cat = "gpu_memcpy" if "emcpy" in name or name.startswith("Copy") else "gpu_memset" if name.startswith("Memset") else "kernel"
    fields: dict[str, Any] = {"device": device, "stream": stream, "grid": [1000, 1, 1], "block": [128, 1, 1]} | args
    return _event(cat, name, start, end, stream, fields if correlation is None else fields | {"correlation": correlation}, pid=device)


def mark(name: str, start: float, end: float, *, tid: int = 1) -> Event:
    """Return an annotation."""
    return _event("user_annotation", name, start, end, tid, {})


def frame(name: str, start: float, end: float, *, tid: int = 1) -> Event:
    """Return a Python function, named 'file.py(line): function'."""
    return _event("python_function", name, start, end, tid, {})


def steps(*bounds: float, first: int = 1) -> list[Event]:
    """Return contiguous ProfilerSteps between `bounds`."""
    return [mark(f"ProfilerStep#{first + row}", bounds[row], bounds[row + 1]) for row in range(len(bounds) - 1)]


def write(path: Path, *events: Event, **header: Any) -> Path:
    """Write the events as a trace and return `path`; an annotation at 0 makes 0 the base."""
    path.write_text(json.dumps({**header, "traceEvents": [mark("zero", 0, 0, tid=99), *events]}))
    return path


def trace(*events: Event, **header: Any) -> Trace:
    """Return the tables of the events."""
    with tempfile.TemporaryDirectory() as folder:
        return read_trace(write(Path(folder) / "trace.json", *events, **header))


def linked(*events: Event, on_cpu: bool = False) -> Trace:
    """Return the tables at stage 'link'."""
    made = trace(*events)
    return link_kernels(made, find_steps(made).table, on_cpu=on_cpu)[0]


def costed(*events: Event, device: Device | None, on_cpu: bool = False, settings: Settings | None = None) -> Trace:
    """Return the tables at stage 'cost'."""
    made = trace(*events)
    found = find_steps(made).table
    made = link_kernels(made, found, on_cpu=on_cpu)[0]
    idle = find_gaps(made.kernels if not on_cpu else made.kernels.clear(), made.launches, build_spans(found))
    return classify_kernels(made, find_attributed_ops(made, on_cpu=on_cpu), idle, device, settings)


PRODUCTS = [
    *steps(0, 100, 200, 300),
    *(
        event
        for step, start in enumerate((0, 100, 200))
        for event in (
            op("aten::mm", start + 10, start + 30, [[64, 64], [64, 64]]),
            call(start + 15, step + 1),
            kernel(start + 25, start + 65, step + 1),
        )
    ),
]
"""Three steps of 100 us, in each a product that the host issues."""
