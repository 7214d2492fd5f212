"""What memory was used for at its peak: the allocator's events of a trace, with owners and a snapshot where a bundle has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
    note_other_devices,
    sum_rows,
)
from gpudiag.trace.memory_snapshot import Snapshot

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
    if not on_cpu and events["total_allocated"].null_count() == events.height:
        notes.append(_NO_BASE)
    if not trace.frames.height:
        notes.append(_NO_STACKS)
    if (found.at.op < 0).mean() > 0.5:
        notes.append(_NO_PHASES)
    if on_cpu:
        notes.extend((_CPU_POOL, _CPU_BASE))
    if owners is not None and owners.device == name:
        notes.extend(owners.notes)
    made = msgspec.structs.replace(made, notes=tuple(notes), provenance="owners" if mine else "lifetimes")
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
    # As many of the held storages as fit into what was there: those of other allocators are not counted by this one
    before = left = peak.base - found.lives.before(peak.event)
    known = []
    for item in found.held:
        if item.bytes <= left:
            left -= item.bytes
            known.append(item)
    # Parameters and their like by the module that holds them, by the names of named_parameters(); state has the name of its parameter
    # and a key after it
    modules = []
    for owner in (item.owner for item in known):
        full = owner.name.rpartition(".")[0] if owner.kind == "optimizer_state" else owner.name
        modules.append(full.rpartition(".")[0] or full or None)
    sizes, owned = np.array([item.bytes for item in known], dtype=np.int64), np.array([item.owner.kind for item in known], dtype=str)
    held_rows = sum_rows({"name": pl.Series(modules, dtype=pl.String), "bytes": sizes, "category": owned})
    frames = trace.frames.height > 0
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
        by_site=_build_rows(find_own_sites(trace) if frames else None, rows, size, kinds),
        by_op=_build_rows(op_names, found.at.outermost[found.lives.born[alive]], size, kinds),
        blocks=int(alive.sum()),
        reserved_peak_bytes=None if name == "cpu" or not reserved.max() else int(reserved.max()),  # type: ignore[arg-type]
        fragmentation_share=(pool - used) / pool if pool and used is not None and pool >= used else None,
    )


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
