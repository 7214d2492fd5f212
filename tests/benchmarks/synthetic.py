"""Writes a synthetic trace of a given size: a transformer training loop as Kineto lays it out, one step repeated."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYERS = 24
OPS: tuple[tuple[str, list[list[int]], str], ...] = (
    ("aten::native_layer_norm", [[16, 1024, 1024], [1024], [1024]], "vectorized_layer_norm_kernel<float>"),
    ("aten::addmm", [[4096], [16384, 1024], [1024, 4096]], "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"),
    ("aten::gelu", [[16, 1024, 4096]], "vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>"),
    ("aten::_scaled_dot_product_flash_attention", [[16, 16, 1024, 64]] * 3, "flash_fwd_kernel<Flash_fwd_kernel_traits<64>>"),
    ("aten::add", [[16, 1024, 1024], [16, 1024, 1024]], "vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::BFloat16>>"),
)
OP_US, KERNEL_US = 20.0, 15.0
DEVICE = {
    "id": 0,
    "name": "NVIDIA H100 80GB HBM3",
    "totalGlobalMem": 85_000_000_000,
    "computeMajor": 9,
    "computeMinor": 0,
    "warpSize": 32,
    "numSms": 132,
}


def _event(category: str, name: str, thread: int, start_us: float, duration_us: float, args: dict[str, Any]) -> dict[str, Any]:
    start, duration = round(start_us, 3), round(duration_us, 3)
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "ts": start, "dur": duration, "args": args}


def _call(number: int, start_us: float) -> Iterator[dict[str, Any]]:
    """Yield one op, its launch and its kernel; `number` is unique over the whole trace."""
    name, dims, kernel = OPS[number % len(OPS)]
    shapes = {"Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims), "Concrete Inputs": [""] * len(dims)}
    yield _event("cpu_op", name, 1, start_us, OP_US - 2, {"External id": number, "Record function id": 0, **shapes, "Ev Idx": number})
    yield _event("cuda_runtime", "cudaLaunchKernel", 1, start_us + 5, 4, {"External id": number, "cbid": 211, "correlation": number})
    grid = {
        "device": 0,
        "context": 1,
        "stream": 7,
        "correlation": number,
        "grid": [128, 2, 1],
        "block": [256, 1, 1],
        "registers per thread": 64,
    }
    yield _event("kernel", kernel, 7, start_us + 12, KERNEL_US, {"External id": number, **grid})


def steps(count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of each training step."""
    calls = LAYERS * len(OPS)
    length_us = calls * OP_US + 100
    for step in range(count):
        start_us = 1000.0 + step * length_us
        events = [_event("user_annotation", f"ProfilerStep#{step}", 1, start_us, length_us - 1, {"External id": 0})]
        for call in range(calls):
            events += _call(step * calls + call + 1, start_us + 50 + call * OP_US)
        yield events


def write(path: Path, size_mb: float) -> int:
    """Write a trace of about `size_mb` (10^6 bytes, uncompressed) to `path` (.json.gz) and return its number of events."""
    sample = ",\n  ".join(json.dumps(event, indent=4) for event in next(steps(1)))
    count = max(4, round(size_mb * 1e6 / len(sample)))
    written = 0
    with gzip.open(path, "wt", compresslevel=3, encoding="utf-8") as file:
        file.write('{\n  "schemaVersion": 1,\n  "deviceProperties": [' + json.dumps(DEVICE) + '],\n  "traceEvents": [\n  ')
        for events in steps(count):
            file.write((",\n  " if written else "") + ",\n  ".join(json.dumps(event, indent=4) for event in events))
            written += len(events)
        file.write('\n  ],\n  "traceName": "synthetic.json"\n}\n')
    return written


if __name__ == "__main__":
    write(Path(sys.argv[1]), float(sys.argv[2]))
