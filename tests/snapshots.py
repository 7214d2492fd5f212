"""Hand-made snapshots of the CUDA caching allocator, in torch's format, and the stacks in them."""

from __future__ import annotations

from typing import Any

KIB = 1024
MIB = 1 << 20
BASE = 0x7F00_0000_0000


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


SCRIPT = frame("/home/me/train.py", 40, "<module>")
FORWARD = [
    frame("/x/torch/nn/modules/linear.py", 125, "forward"),
    frame("/x/torch/nn/modules/module.py", 1784, "_call_impl"),
    frame("/home/me/model.py", 12, "forward"),
    frame("/x/torch/nn/modules/module.py", 1784, "_call_impl"),
    SCRIPT,
]
OPTIMIZER = [frame("/x/torch/optim/adam.py", 194, "_init_group"), frame("/home/me/train.py", 44, "<module>")]
BACKWARD: list[Any] = []
"""The engine's thread has no Python frames."""


def entry(action: str, address: int, size: int, frames: list[Any] | None = None) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames or [], "time_us": 1}


def alloc(address: int, size: int, frames: list[Any] | None = None) -> dict[str, Any]:
    return entry("alloc", address, size, frames)


def free(address: int, size: int, frames: list[Any] | None = None) -> list[dict[str, Any]]:
    return [entry("free_requested", address, size, frames), entry("free_completed", address, size, frames)]


def block(address: int, size: int, requested: int | None = None, *, used: bool = True) -> dict[str, Any]:
    state = "active_allocated" if used else "inactive"
    return {"address": address, "size": size, "requested_size": size if requested is None else requested, "state": state, "frames": []}


def segment(address: int, *blocks: dict[str, Any], kind: str = "large", stream: int = 0, device: int = 0) -> dict[str, Any]:
    total = sum(item["size"] for item in blocks)
    used = sum(item["size"] for item in blocks if item["state"] != "inactive")
    return {
        "device": device, "address": address, "total_size": total, "allocated_size": used, "active_size": used, "requested_size": used,
        "stream": stream, "segment_type": kind, "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": list(blocks),
    }  # fmt: skip


def training() -> dict[str, Any]:
    """Return one step: 8 MiB of weights from before, 3 + 1 MiB forward of which 3 are kept, 2 MiB backward, 16 MiB of Adam's state.

    Activations are freed by the backward pass before the state is made, so the peak comes last: 8 + 2 + 16 = 26 MiB.
    Segments: 20 MiB with the weights (8), 12 free; 20 MiB with gradients (2) and state (16), 2 free.
    """
    first, second = BASE, BASE + 64 * MIB
    kept, scratch, gradient, state = first + 8 * MIB, first + 12 * MIB, second, second + 2 * MIB
    history = [
        alloc(kept, 3 * MIB, FORWARD),
        alloc(scratch, MIB, FORWARD),
        *free(scratch, MIB, FORWARD),
        entry("segment_alloc", second, 20 * MIB),
        alloc(gradient, 2 * MIB, BACKWARD),
        *free(kept, 3 * MIB, BACKWARD),
        alloc(state, 16 * MIB, OPTIMIZER),
    ]
    segments = [
        segment(first, block(first, 8 * MIB), block(first + 8 * MIB, 12 * MIB, used=False)),
        segment(second, block(gradient, 2 * MIB), block(state, 16 * MIB), block(second + 18 * MIB, 2 * MIB, used=False)),
    ]
    return {"segments": segments, "device_traces": [history], "allocator_settings": {"expandable_segments": False}}
