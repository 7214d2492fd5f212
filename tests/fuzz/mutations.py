"""Ways to break a trace: in its structure, and in its bytes. Values are copied in: a document must stay a tree."""

from __future__ import annotations

import copy
import random
from typing import Any

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e-320, 1e300,
    float("nan"), float("inf"), "", "0", "7", "-1", "nan", "x" * 3000, "\x00\x1b[31m\u202e", "\ud800", "ProfilerStep#0", "aten::mm",
    "nccl", "1e999", [], {}, [[]], [None], [[0]], [[-1, 2]], [[2**62, 2**62]], [["a"]], [[[2, 3], [4, 5]]], {"a": {"b": []}}, ["float", 1],
)  # fmt: skip
NAMES: tuple[str, ...] = (
    "aten::mm", "aten::convolution", "aten::_scaled_dot_product_flash_attention", "aten::native_batch_norm", "aten::copy_", "aten::sum",
    "aten::_foreach_add_", "aten::embedding", "aten::index", "aten::cat", "aten::max_pool2d", "aten::layer_norm", "aten::_softmax",
    "aten::convolution_backward", "aten::nll_loss_forward", "aten::_fused_adamw_", "aten::bmm", "aten::addmm", "aten::linear", "aten::mean",
    "ProfilerStep#1", "ProfilerStep#2", "enumerate(DataLoader)#_X.__next__", "Optimizer.step#SGD.step", "record_param_comms",
    "cudaGraphLaunch",
    "cudaMalloc", "cudaStreamSynchronize", "hipMemcpyAsync", "Memcpy DtoH (Device -> Pinned)", "Memset (Device)", "(dynamo_timed)",
)  # fmt: skip
CATEGORIES = (
    "cpu_op",
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "cuda_runtime",
    "user_annotation",
    "python_function",
    "overhead",
    "cuda_sync",
    None,
)

Place = tuple[Any, Any]


def places(document: Any) -> list[Place]:
    """Return every (container, key) of `document`, found without recursion."""
    found: list[Place] = []
    pending = [document]
    while pending:
        container = pending.pop()
        keys = range(len(container)) if isinstance(container, list) else list(container)
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], list | dict):
                pending.append(container[key])
    return found


def break_structure(document: dict[str, Any], dice: random.Random, times: int) -> dict[str, Any]:
    """Change `document` at `times` places: another value, another type, gone, moved, repeated."""
    for _ in range(times):
        found = places(document)
        if not found:
            break
        _break_one(document, *dice.choice(found), dice)
    return document


def _break_one(document: dict[str, Any], container: Any, key: Any, dice: random.Random) -> None:
    events = document.get("traceEvents")
    kind = dice.randrange(6)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(events, list) and events:
        event = dice.choice(events)
        if isinstance(event, dict):
            field = dice.choice(("name", "cat", "ts", "dur", "tid"))
            event[field] = dice.choice(
                {"name": NAMES, "cat": CATEGORIES, "tid": (0, 1, 2, "7")}.get(field, (0, 10, 500.5, 1000, 3.9e15, -4))
            )
    elif kind == 2 and isinstance(events, list) and events:
        events.extend(copy.deepcopy(dice.choices(events, k=dice.randrange(1, 20))))
    elif kind == 3:
        other, place = dice.choice(places(document))
        container[key] = other[place] if not isinstance(other[place], list | dict) else copy.deepcopy(dice.choice(STRANGE))
    else:
        container[key] = copy.deepcopy(dice.choice(STRANGE))


def break_bytes(text: bytes, dice: random.Random, times: int) -> bytes:
    """Return `text` with `times` accidents: flipped, lost, doubled, foreign bytes, or the end missing."""
    data = bytearray(text)
    for _ in range(times):
        if not data:
            break
        start = dice.randrange(len(data))
        end = min(len(data), start + dice.choice((1, 1, 2, 10, 200)))
        kind = dice.randrange(5)
        if kind == 0:
            data[start] = dice.choice((*b'"{}[],:\\-.e0\x00\xff\n', dice.randrange(256)))
        elif kind == 1:
            del data[start:end]
        elif kind == 2:
            data[start:start] = data[start:end]
        elif kind == 3:
            data[start:end] = bytes(dice.randrange(256) for _ in range(end - start))
        elif dice.randrange(8) == 0:
            del data[start:]
    return bytes(data)
