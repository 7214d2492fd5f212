"""What memory was used for at its peak: by the allocator's events of a trace, with owners and a snapshot where a bundle has them; or by a
snapshot alone, its history of allocations, else its blocks, and their Python frames."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution.call_sites import find_modules, find_own_sites
from gpudiag.attribution.names import decode_names
from gpudiag.attribution.nesting import null_missing
from gpudiag.attribution.steps import assign_steps
from gpudiag.model.memory import MEMORY_CATEGORIES, MemoryReport, MemoryRow, Owners
from gpudiag.model.trace import Trace
from gpudiag.timeline.memory_blocks import (
    BEFORE_RECORDING,
    MOST_ROWS,
    EventMoments,
    HeldStorage,
    Lives,
    Texts,
    add_pools,
    apply_owners,
    build_lives,
    classify_uses,
    find_held_storages,
    find_moments,
    find_owners,
    find_segments,
    note_other_devices,
    sum_rows,
)
from gpudiag.timeline.memory_timeline import build_timeline
from gpudiag.trace.memory_snapshot import OOM_ACTION, Block, Entry, Snapshot, list_frames

LARGEST_BYTES = 1 << 40
"""Bytes of an allocation above which an event is damaged."""

_NODE = "autograd::engine::evaluate_function: "

_NO_STACKS = "no Python stacks were recorded beside the memory, so call sites and modules are not known: record with with_stack=True"
_BY_SIZE = "the allocator's events have no addresses (torch before 1.13): a free is taken to end the youngest block of its size"
_NO_BASE = "what was in use before the recording is known only as far as it was freed in it: the peak is a lower bound"
_NO_PHASES = "no op was recorded around the allocations, so nothing tells what most of them were for"
_CPU_BASE = (
    "of what was allocated on the CPU before the recording only parameters, their optimizer state and buffers are counted, where recorded"
)
_CPU_POOL = "the CPU has no caching allocator: reserved memory and fragmentation do not exist there"


class Peak(NamedTuple):
    """The moment at which most memory was in use."""

    event: int
    """Row of the events, -1: the start of the recording."""
    bytes: int
    base: int
    """Bytes in use at the start of the recording."""


class UsedBlocks(NamedTuple):
    """The blocks of a device and what they are for."""

    lives: Lives
    kinds: Texts
    at: EventMoments
    held: tuple[HeldStorage, ...]


def measure_memory(
    trace: Trace, steps: pl.DataFrame, *, owners: Owners | None = None, snapshot: Snapshot | None = None, device: int | None = None
) -> MemoryReport | None:
    """Return the memory of `trace` (stage 'link') at its peak; None where it has no allocator event.

    `device`: index of the device, default the one with the most allocated bytes; a trace without a device's events is of the CPU.
    """
    name, events = _select_events(trace, device)
    if not events.height:
        return None
    on_cpu = name == "cpu"
    address = None if events["address"].null_count() else events["address"].to_numpy()
    blocks, at = build_lives(events["bytes"].to_numpy(), address), find_moments(trace, events)
    mine = find_owners(owners, name)
    kinds = apply_owners(blocks, classify_uses(trace, blocks, at), mine)
    found = UsedBlocks(blocks, kinds, at, find_held_storages(blocks, mine, snapshot, on_cpu=on_cpu))
    # The peak. The base is what the allocator counted less the first event; else what is known to have been there
    freed = found.lives.before(events.height)
    base = freed + sum(item.bytes for item in found.held)
    counted = events["total_allocated"].drop_nulls()
    if not on_cpu and len(counted):  # the CPU's count begins with the first profile, and is none of what was there before
        first = int(events["total_allocated"].is_not_null().arg_max() or 0)
        base = max(freed, int(counted[0]) - int(events["bytes"].head(first + 1).sum()))
    in_use = found.lives.in_use()
    event = int(in_use.argmax())
    peak = Peak(event, base + int(in_use[event]), base) if in_use[event] > 0 else Peak(-1, base, base)
    made = _build_report(trace, steps, found, peak, name, events)
    gpu = trace.allocations.filter((pl.col("device_kind") == "gpu") & (pl.col("bytes") != 0))
    others = [index for index in gpu["device"].drop_nulls().unique().sort().to_list() if f"cuda:{index}" != name]
    notes = [*note_other_devices(name, others)]
    if events["address"].null_count():
        notes.append(_BY_SIZE)
    uncounted = not on_cpu and events["total_allocated"].null_count() == events.height
    if uncounted:
        notes.append(_NO_BASE)
    if not trace.frames.height:
        notes.append(_NO_STACKS)
    if (found.at.op < 0).mean() > 0.5:
        notes.append(_NO_PHASES)
    if on_cpu:
        notes.extend((_CPU_POOL, _CPU_BASE))
    if owners is not None and owners.device == name:
        notes.extend(owners.notes)
    missing = uncounted or (on_cpu and not mine)
    made = msgspec.structs.replace(made, notes=tuple(notes), lower_bound=missing, provenance="owners" if mine else "lifetimes")
    return add_pools(made, None if on_cpu else owners, None if on_cpu else snapshot)


def _select_events(trace: Trace, device: int | None) -> tuple[str, pl.DataFrame]:
    events = trace.allocations.filter((pl.col("bytes") != 0) & pl.col("bytes").is_between(-LARGEST_BYTES, LARGEST_BYTES))
    gpu = events.filter(pl.col("device_kind") == "gpu")
    if not gpu.height:
        return "cpu", events.filter(pl.col("device_kind") == "cpu")
    sums = gpu.group_by("device").agg(pl.col("bytes").abs().sum()).sort("bytes", "device", descending=[True, False])
    index = device if device is not None and device in gpu["device"] else next(iter(sums["device"]), None)
    return f"cuda:{0 if index is None else index}", gpu.filter(pl.col("device").eq_missing(index))


def _build_report(trace: Trace, steps: pl.DataFrame, found: UsedBlocks, peak: Peak, name: str, events: pl.DataFrame) -> MemoryReport:
    alive = found.lives.alive(peak.event)
    size, kinds = found.lives.size[alive], found.kinds[alive]
    rows = found.at.op[found.lives.born[alive]]
    op_names = decode_names(trace.ops["name"]).str.strip_prefix(_NODE)
    before = peak.base - found.lives.before(peak.event)
    known = _fit_held(found.held, before)
    # Parameters and their like by the module that holds them, by the names of named_parameters(); state has the name of its parameter
    # and a key after it
    modules = []
    for owner in (item.owner for item in known):
        full = owner.name.rpartition(".")[0] if owner.kind == "optimizer_state" else owner.name
        modules.append(full.rpartition(".")[0] or full or None)
    sizes, owned = np.array([item.bytes for item in known], dtype=np.int64), np.array([item.owner.kind for item in known], dtype=str)
    held_rows = sum_rows({"name": pl.Series(modules, dtype=pl.String), "bytes": sizes, "category": owned})
    frames = trace.frames.height > 0
    sites = find_own_sites(trace) if frames else None
    of_modules = (*_build_rows(find_modules(trace, None) if frames else trace.ops["module"], rows, size, kinds), *held_rows)
    op, when = (found.at.outermost[peak.event], found.at.t_ns[peak.event]) if peak.event >= 0 else (-1, -1)
    step = assign_steps(steps, np.array([when], dtype=np.int64))[0]
    reserved, allocated = (events[column] for column in ("total_reserved", "total_allocated"))
    pool = reserved[peak.event] if peak.event >= 0 and name != "cpu" else None
    used = allocated[peak.event] if peak.event >= 0 else None
    return MemoryReport(
        device=name,
        peak_bytes=peak.bytes,
        peak_step=None if step is None else str(steps["name"][step]),
        peak_phase=found.at.phase[peak.event] if peak.event >= 0 else None,
        peak_op=None if op < 0 else op_names[int(op)],
        by_category=sum_categories(size, kinds, known, before),
        by_module=tuple(sorted(of_modules, key=lambda row: (-row.bytes, row.name, row.category))[:MOST_ROWS]),
        by_site=_build_rows(sites, rows, size, kinds),
        by_op=_build_rows(op_names, found.at.outermost[found.lives.born[alive]], size, kinds),
        blocks=int(alive.sum()),
        reserved_peak_bytes=None if name == "cpu" or not reserved.max() else int(reserved.max()),  # type: ignore[arg-type]
        fragmentation_share=(pool - used) / pool if pool and used is not None and pool >= used else None,
        timeline=build_timeline(
            found.lives, found.kinds, _name_places(found, sites, op_names), found.at.t_ns, peak.base, known,
            reserved=None if name == "cpu" else reserved, starts_ns=steps["start_ns"].to_numpy(),
        ),
    )  # fmt: skip


def _fit_held(held: Iterable[HeldStorage], left: int) -> list[HeldStorage]:
    """Return as many of the held storages as fit into what was there: those of other allocators are not counted by this one."""
    known = []
    for item in held:
        if item.bytes <= left:
            left -= item.bytes
            known.append(item)
    return known


def _name_places(found: UsedBlocks, sites: pl.Series | None, op_names: pl.Series) -> pl.Series:
    """Return the call site of each block, else the outermost op that made it; null for those of before the recording."""
    made = np.where(found.lives.born >= 0, found.lives.born, 0)
    names = op_names.gather(null_missing(np.where(found.lives.born >= 0, found.at.outermost[made], -1)))
    if sites is None:
        return names
    own = sites.gather(null_missing(np.where(found.lives.born >= 0, found.at.op[made], -1)))
    return pl.DataFrame({"own": own, "op": names}).select(pl.coalesce("own", "op")).to_series()


def sum_categories(size: Ints, kinds: Texts, known: Iterable[HeldStorage], before: int) -> dict[str, int]:
    """Return category -> bytes: of the blocks, and of the `before` bytes from before the recording, those of `known` by owner."""
    sums = dict.fromkeys(MEMORY_CATEGORIES, 0)
    for kind in set(kinds.tolist()):
        sums[kind] += int(size[kinds == kind].sum())
    for item in known:
        sums[item.owner.kind] += item.bytes
        before -= item.bytes
    sums["before_recording"] += before
    return {kind: value for kind, value in sums.items() if value}


def _build_rows(names: pl.Series | None, rows: Ints, size: Ints, kinds: Texts) -> tuple[MemoryRow, ...]:
    """Return the blocks summed by the name of their op and by category, largest first; those without a name are left out."""
    if names is None:
        return ()
    return sum_rows({"name": names.gather(null_missing(rows)), "bytes": size, "category": kinds.astype(str)})


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
    segments = find_segments(snapshot, name)
    blocks = [block for segment in segments for block in segment.blocks if block.state == "active_allocated"]
    state = _build_state(history, blocks)
    made = _build_from_state(name, state, bool(history), any(entry.frames for entry in history if entry.action != "alloc"))
    others = note_other_devices(name, (other for other in sorted(reserved) if other != index))
    # The reserved memory and the failures that the history holds. The state is known at its end: it is walked back
    now, used = sum(segment.total_size for segment in segments), sum(block.size for block in blocks)
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


def _build_from_state(name: str, state: _State, recorded: bool, frees_told: bool) -> MemoryReport:
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
    sites = pl.Series([state.made[row].site for row in np.flatnonzero(alive).tolist()], dtype=pl.String)
    return MemoryReport(
        device=name,
        peak_bytes=peak,
        by_category=sum_categories(size, kinds, (), 0),
        by_site=sum_rows({"name": sites, "bytes": size, "category": kinds.astype(str)}),
        blocks=int(alive.sum()),
        provenance="snapshot",
        notes=(*notes, BY_FRAMES, REQUESTED),
    )
