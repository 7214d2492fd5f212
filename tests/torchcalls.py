"""Real calls of torch on a CPU, as torch.profiler records them, and the bytes of the tensors that they read and return."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpudiag.model.ops import Cost, Signature, parse_signature
from gpudiag.roofline.costs import estimate_cost

KEYS = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")


def record_all(call: Callable[[], Any], folder: Path) -> list[tuple[str, Signature]]:
    """Return (name, signature) of every op that `call` runs, in order of start."""
    return _recorded(call, folder)[0]


def record(call: Callable[[], Any], folder: Path) -> tuple[str, Signature, Any]:
    """Return (name, signature, result) of the outermost op of `call`."""
    calls, result = _recorded(call, folder)
    return *calls[0], result


def _recorded(call: Callable[[], Any], folder: Path) -> tuple[list[tuple[str, Signature]], Any]:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        result = call()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]
    events = [event for event in events if "Input Dims" in event["args"]]
    return [(event["name"], parse_signature(*(json.dumps(event["args"].get(key)) for key in KEYS))) for event in events], result


def tensors(value: Any) -> list[Any]:
    """Return the tensors among arguments or results, those in lists too."""
    import torch

    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for entry in items for item in (entry if isinstance(entry, (list, tuple)) else [entry]) if isinstance(item, torch.Tensor)]


def distinct(tensor: Any) -> int:
    """Return the bytes of the distinct elements of a tensor: dimensions of stride 0 count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return int(count * tensor.element_size())


def assert_bytes_are_the_tensors(function: Callable[..., Any], arguments: list[Any], folder: Path) -> None:
    """Assert that the cost of `function(*arguments)` is exact, with the bytes of the tensors that torch reads and returns."""
    op, signature, result = record(lambda: function(*arguments), folder)
    found = estimate_cost(op, signature)
    assert isinstance(found, Cost), found
    assert found.provenance == "exact"
    assert found.bytes == sum(map(distinct, tensors(arguments))) + sum(item.nbytes for item in tensors(result))
