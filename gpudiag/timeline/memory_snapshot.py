"""The report on memory from a snapshot alone: its history of allocations, else its blocks; what they are for by their Python frames."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.model.memory import MEMORY_CATEGORIES, MemoryReport
from gpudiag.timeline.memory_blocks import BEFORE_RECORDING, Lives, add_pools, build_lives, find_segments, note_other_devices, sum_rows
from gpudiag.trace.memory_snapshot import OOM_ACTION, Block, Entry, Snapshot, list_frames

NO_HISTORY = "no history of allocations was recorded, so what is shown is the moment of the snapshot, not a peak"
BY_FRAMES = (
    "a snapshot tells neither parameters from other memory of before its history, nor work without Python frames (the backward pass): "
    "gpudiag.profile(memory=True) records both"
)
REQUESTED = "bytes as requested; the allocator rounds them up"

_FREES_UNKNOWN = "the stacks of frees were not recorded (context='all'), so activations are not told from temporary memory"
_HOME = re.compile(r"^(?:[A-Za-z]:)?/+(?:(?:home|Users)/[^/]+|root)/+")
_LIBRARY = ("/torch/", "<frozen ", "/runpy.py", "/threading.py")


class Origin(NamedTuple):
    """What a stack says: the user's line, and the pass it belongs to."""

    site: str | None
    phase: str | None
    """forward | optimizer | backward; None: no Python frames, or none of a pass."""


def find_origin(frames: Any) -> Origin:
    """Return what a stack says, by torch's own files: torch/optim, torch/autograd, nn/modules/module.py.

    Of a path the last two parts are kept, none of which is the user's home: profilers name files from where Python found them.
    """
    site = phase = None
    for frame in list_frames(frames):
        path = frame.filename.replace("\\", "/")
        if site is None and frame.line > 0 and path.endswith(".py") and not any(part in path for part in _LIBRARY):
            site = f"{'/'.join(_HOME.sub('', path).split('/')[-2:])}({frame.line}): {frame.name}"
        if phase is not None:
            continue
        if "/torch/optim/" in path:
            phase = "optimizer"
        elif "/torch/autograd/" in path or path.endswith("/torch/_tensor.py"):
            phase = "backward" if "backward" in frame.name else None
        elif path.endswith("/torch/nn/modules/module.py") and "call_impl" in frame.name:
            phase = "forward"
    return Origin(site, phase)


class _State(NamedTuple):
    lives: Lives
    made: list[Origin]
    freed: list[Origin | None]


def build_snapshot_report(snapshot: Snapshot, device: int | None = None) -> MemoryReport | None:
    """Return the memory of one device of `snapshot` (default: the one with the most reserved) at its peak; None where it holds none."""
    reserved = sum_reserved(snapshot)
    index = max(reserved, key=lambda index: (reserved[index], -index), default=None) if device is None else device
    if index is None:
        return None
    name = f"cuda:{index}"
    entries = snapshot.device_traces[index] if index < len(snapshot.device_traces) else ()
    history = [entry for entry in entries if entry.addr is not None and entry.action in ("alloc", "free_requested") and entry.size > 0]
    blocks = [block for segment in find_segments(snapshot, name) for block in segment.blocks if block.state == "active_allocated"]
    state = _build_state(history, blocks)
    made = _build_report(name, state, bool(history), any(entry.frames for entry in history if entry.action != "alloc"))
    others = note_other_devices(name, (other for other in sorted(reserved) if other != index))
    # The reserved memory and the failures that the history holds. The state is known at its end: it is walked back
    now, used = sum(segment.total_size for segment in find_segments(snapshot, name)), sum(block.size for block in blocks)
    grown = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    changes = np.array([grown[entry.action] * entry.size if entry.action in grown else 0 for entry in entries], dtype=np.int64)
    back = now - np.append(0, np.cumsum(changes[::-1]))
    made = msgspec.structs.replace(
        made,
        notes=(*others, *made.notes),
        reserved_peak_bytes=int(back.max()) if now or len(entries) else None,
        fragmentation_share=(now - used) / now if now else None,
        ooms=sum(entry.action == OOM_ACTION for entry in entries) if entries else None,
    )
    return add_pools(made, None, snapshot)


def sum_reserved(snapshot: Snapshot) -> dict[int, int]:
    """Return the bytes reserved on each device of which `snapshot` holds anything."""
    sums: dict[int, int] = {index: 0 for index, trace in enumerate(snapshot.device_traces) if trace}
    for segment in snapshot.segments:
        sums[segment.device] = sums.get(segment.device, 0) + segment.total_size
    return sums


def _build_state(history: Sequence[Entry], blocks: Sequence[Block]) -> _State:
    """Return the lives of the history, and those blocks in use at the end that it does not hold."""
    sizes = np.array([entry.size if entry.action == "alloc" else -entry.size for entry in history], dtype=np.int64)
    found = build_lives(sizes, _read_addresses(entry.addr for entry in history))
    at_end = set(found.address[(found.died == found.events) & (found.born >= 0)].tolist())
    at_blocks = _read_addresses(block.address for block in blocks).tolist()
    older = [block for block, at in zip(blocks, at_blocks, strict=True) if block.address is None or at not in at_end]
    requested = np.array([block.size if block.requested_size is None else block.requested_size for block in older], dtype=np.int64)
    whole = Lives(
        np.concatenate((found.address, _read_addresses(block.address for block in older))),
        np.concatenate((found.size, requested)),
        np.concatenate((found.born, np.full(len(older), BEFORE_RECORDING))),
        np.concatenate((found.died, np.full(len(older), found.events))),
        found.events,
    )
    # A list of frames that entries share is looked at once: the snapshot holds it, so its identity is its own
    stacks = {id(frames): frames for frames in (*(entry.frames for entry in history), *(block.frames for block in older))}
    origins = {key: find_origin(frames) for key, frames in stacks.items()}
    of_entries = [origins[id(entry.frames)] for entry in history]
    made = [of_entries[row] if row >= 0 else Origin(None, None) for row in found.born.tolist()]
    freed = [of_entries[row] if row < found.events else None for row in found.died.tolist()]
    return _State(whole, [*made, *(origins[id(block.frames)] for block in older)], [*freed, *([None] * len(older))])


def _read_addresses(found: Iterable[int | None]) -> Ints:
    """Return addresses of up to 64 bits as the signed numbers of the same bits, 0 for None."""
    return np.array([address or 0 for address in found], dtype=np.uint64).view(np.int64)


def _build_report(name: str, state: _State, recorded: bool, frees_told: bool) -> MemoryReport:
    base = int(state.lives.size[state.lives.born == BEFORE_RECORDING].sum())
    in_use = state.lives.in_use()
    event = int(in_use.argmax()) if recorded else -1
    peak = base + max(int(in_use[event]) if recorded else 0, 0)
    event = event if peak > base else -1
    alive = (state.lives.born <= event) & (state.lives.died > event)
    born = state.lives.born.tolist()
    # Whether a backward pass may have run in the history: one is seen, or an optimizer, or work without frames (its thread)
    seen = [origin for origin, at in zip(state.made, born, strict=True) if at >= 0]
    seen += [origin for origin in state.freed if origin is not None and frees_told]
    held = "activations" if any(origin.phase in ("backward", "optimizer") or origin == (None, None) for origin in seen) else "forward_held"
    # What each block is for: as classify_uses, with Python frames in place of ops
    found = np.full(len(state.made), "unknown", dtype=object)
    for row, (made, freed, at) in enumerate(zip(state.made, state.freed, born, strict=True)):
        if made.phase == "optimizer":
            found[row] = "optimizer_state" if freed is None else "temporary"
        elif at < 0:
            found[row] = "before_recording"
        elif made.phase == "forward" and (freed is None or frees_told):
            found[row] = "temporary" if freed is not None and freed.phase == "forward" else held
    kinds, size = found[alive], state.lives.size[alive]
    notes = [] if recorded else [NO_HISTORY]
    if recorded and not frees_told:
        notes.append(_FREES_UNKNOWN)
    sums = {kind: int(size[kinds == kind].sum()) for kind in MEMORY_CATEGORIES}
    sites = pl.Series([state.made[row].site for row in np.flatnonzero(alive).tolist()], dtype=pl.String)
    return MemoryReport(
        device=name,
        peak_bytes=peak,
        by_category={kind: value for kind, value in sums.items() if value},
        by_site=sum_rows({"name": sites, "bytes": size, "category": kinds.astype(str)}),
        blocks=int(alive.sum()),
        provenance="snapshot",
        notes=(*notes, BY_FRAMES, REQUESTED),
    )
