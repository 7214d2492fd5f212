"""Small traces of the shapes that torch.profiler writes, as Python documents to break on purpose."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

Document = dict[str, Any]
Events = list[dict[str, Any]]

H100 = {
    "id": 0,
    "name": "NVIDIA H100 80GB HBM3",
    "totalGlobalMem": 85_000_000_000,
    "computeMajor": 9,
    "computeMinor": 0,
    "warpSize": 32,
    "numSms": 132,
}
MATRIX = {"Input Dims": [[512, 512], [512, 512]], "Input type": ["float", "float"], "Input Strides": [[512, 1], [512, 1]]}


def complete(name: str, category: str, start_us: float, length_us: float, thread: Any = 1, **args: Any) -> dict[str, Any]:
    """Return a complete event; its arguments are copies, for what breaks one document must not reach the next."""
    fields = {"cat": category, "name": name, "pid": 1, "tid": thread, "ts": start_us, "dur": length_us}
    return {"ph": "X", **fields, "args": deepcopy(args)}


def step_mark(number: int, start_us: float) -> dict[str, Any]:
    """Return the annotation of a step of 1 ms."""
    return complete(f"ProfilerStep#{number}", "user_annotation", start_us, 1000)


def work(name: str, kernel: str, start_us: float, identity: int, **fields: Any) -> Events:
    """Return an op, its launch, and the kernel that it launches."""
    device = {"device": 0, "stream": 7, "correlation": identity, "grid": [64, 1, 1], "block": [256, 1, 1], **fields}
    return [
        complete(name, "cpu_op", start_us, 40, **MATRIX, **{"External id": identity, "Sequence number": identity}),
        complete("cudaLaunchKernel", "cuda_runtime", start_us + 10, 8, correlation=identity),
        {**complete(kernel, "kernel", start_us + 30, 90, device["stream"], **device), "pid": 0},
    ]


def gpu_training(steps: int = 4) -> Document:
    """Return a training run on one GPU: products, a copy, a wait, an annotation, memory events."""
    events: Events = [{"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "python"}}]
    for step in range(steps):
        start, identity = 1000.0 * step, 10 * step
        events += [step_mark(step, start), *work("aten::mm", "sm90_gemm", start + 50, identity + 1)]
        events += work("aten::add", "elementwise_kernel", start + 200, identity + 2)
        events += [
            complete("cudaStreamSynchronize", "cuda_runtime", start + 400, 100, correlation=identity + 3),
            complete("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", start + 350, 30, 7, device=0, stream=7, bytes=4096),
            complete("Optimizer.step#AdamW.step", "user_annotation", start + 600, 200),
            {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": start + 5, "args": {"Bytes": 512, "Device Type": 1, "Device Id": 0}},
        ]
    return {"schemaVersion": 1, "deviceProperties": [dict(H100)], "record_shapes": 1, "traceEvents": events}


def distributed() -> Document:
    """Return a rank of a distributed run: collectives with their fields, on a second stream."""
    document = gpu_training(3)
    collective = {"Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 100, "Group size": 8, "dtype": "Float"}
    for step in range(3):
        kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        document["traceEvents"] += work("record_param_comms", kernel, 1000.0 * step + 250, 500 + step, stream=9, **collective)
    return document | {"distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8}}


def cpu_training() -> Document:
    """Return a run without accelerator, on two threads, with nested ops."""
    events: Events = []
    for step in range(3):
        start = 1000.0 * step
        events += [
            step_mark(step, start),
            complete("aten::linear", "cpu_op", start + 10, 500, **MATRIX),
            complete("aten::addmm", "cpu_op", start + 20, 400, **MATRIX),
            complete("autograd::engine::evaluate_function: MmBackward0", "cpu_op", start + 520, 300, 2, **{"Sequence number": step}),
            complete("aten::mm", "cpu_op", start + 530, 250, 2, **MATRIX),
        ]
    return {"schemaVersion": 1, "traceEvents": events}


def with_stacks() -> Document:
    """Return a run with Python frames."""
    document = gpu_training(2)
    for step in range(2):
        start = 1000.0 * step
        document["traceEvents"] += [
            complete("train.py(10): main", "python_function", start + 1, 900, **{"Python id": 1 + 2 * step, "Python parent id": None}),
            complete("nn.Module: Linear_0", "python_function", start + 40, 90, **{"Python id": 2 + 2 * step, "Python parent id": 1}),
        ]
    return document | {"with_stack": 1}


def of_2021() -> Document:
    """Return the schema of 2021: other categories, whole microseconds since 1970, text where numbers are today."""
    base = 1_620_000_000_000_000
    events = [
        complete("ProfilerStep#1", "Operator", base, 1000),
        complete("aten::mm", "Operator", base + 10, 40, "1", **{"Input dims": [[4, 4], [4, 4]], "Input type": ["float", "float"]}),
        complete("cudaLaunchKernel", "Runtime", base + 20, 9, "1", correlation="7"),
        complete("volta_sgemm", "Kernel", base + 30, 90, "stream 7", device="0", stream="7", correlation="7"),
    ]
    return {"schemaVersion": 1, "traceEvents": events}


SHAPES: dict[str, Callable[[], Document]] = {
    "gpu_training": gpu_training,
    "distributed": distributed,
    "cpu_training": cpu_training,
    "with_stacks": with_stacks,
    "of_2021": of_2021,
}
