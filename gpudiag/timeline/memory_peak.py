"""What memory was used for at its peak: the allocator's events of a trace, with owners and a snapshot where a bundle has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from gpudiag.attribution.call_sites import find_modules, find_own_sites
from gpudiag.attribution.names import decode_names
from gpudiag.attribution.nesting import null_missing
from gpudiag.attribution.steps import assign_steps
from gpudiag.model.memory import MEMORY_CATEGORIES, MemoryReport, MemoryRow, Owner, Owners
from gpudiag.model.trace import Trace
from gpudiag.timeline.memory_blocks import (
    EventMoments,
    HeldStorage,
    Ints,
    Lives,
    Texts,
    add_pools,
    build_lives,
    classify_uses,
    find_held_storages,
    find_moments,
    find_owners,
    merge_rows,
    name_blocks,
    note_other_devices,
    read_block_sizes,
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
    names: Texts
    at: EventMoments
    held: tuple[HeldStorage, ...]


def measure_memory(
    trace: Trace,
    steps: pl.DataFrame,
    *,
    owners: Owners | None = None,
    snapshot: Snapshot | None = None,
    device: int | None = None,
) -> MemoryReport | None:
    """Return the memory of `trace` (stage 'link') at its peak; None where it has no allocator event.

    `device`: index of the device, default the one with the most allocated bytes; a trace without a device's events is of the CPU.
    """
    name, events = _select_events(trace, device)
    if not events.height:
        return None
    address = None if events["address"].null_count() else events["address"].to_numpy()
    blocks, at = build_lives(events["bytes"].to_numpy(), address), find_moments(trace, events)
    mine = find_owners(owners, name)
    kinds, names = name_blocks(blocks, classify_uses(trace, blocks, at), mine)
    found = UsedBlocks(blocks, kinds, names, at, find_held_storages(blocks, mine, read_block_sizes(snapshot), on_cpu=name == "cpu"))
    # The peak. The base is what the allocator counted less the first event; else what is known to have been there
    on_cpu = name == "cpu"
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
    notes = []
    if events["address"].null_count():
        notes.append(_BY_SIZE)
    if name != "cpu" and events["total_allocated"].null_count() == events.height:
        notes.append(_NO_BASE)
    if not trace.frames.height:
        notes.append(_NO_STACKS)
    if (found.at.op < 0).mean() > 0.5:
        notes.append(_NO_PHASES)
    if name == "cpu":
        notes.extend((_CPU_POOL, _CPU_BASE))
    notes = [*_note_others(trace, name), *notes]
    if owners is not None and owners.device == name:
        notes = [*notes, *owners.notes]
    made = msgspec.structs.replace(made, notes=tuple(notes), provenance="owners" if find_owners(owners, name) else "lifetimes")
    return add_pools(made, owners if name != "cpu" else None, snapshot if name != "cpu" else None)


def _select_events(trace: Trace, device: int | None) -> tuple[str, pl.DataFrame]:
    """Return (name of the device, its events)."""
    events = trace.allocations.filter((pl.col("bytes") != 0) & pl.col("bytes").is_between(-LARGEST_BYTES, LARGEST_BYTES))
    gpu = events.filter(pl.col("device_kind") == "gpu")
    if not gpu.height:
        return "cpu", events.filter(pl.col("device_kind") == "cpu")
    sums = gpu.group_by("device").agg(pl.col("bytes").abs().sum()).sort("bytes", "device", descending=[True, False])
    index = device if device is not None and device in gpu["device"] else next(iter(sums["device"]), None)
    return f"cuda:{0 if index is None else index}", gpu.filter(pl.col("device").eq_missing(index))


def _note_others(trace: Trace, name: str) -> tuple[str, ...]:
    """Return a note on the GPUs that are left out beside `name`."""
    gpu = trace.allocations.filter((pl.col("device_kind") == "gpu") & (pl.col("bytes") != 0))
    return note_other_devices(name, (index for index in gpu["device"].drop_nulls().unique().sort().to_list() if f"cuda:{index}" != name))


def _build_report(trace: Trace, steps: pl.DataFrame, found: UsedBlocks, peak: Peak, name: str, events: pl.DataFrame) -> MemoryReport:
    alive = found.lives.alive(peak.event)
    size, kinds = found.lives.size[alive], found.kinds[alive]
    rows = found.at.op[found.lives.born[alive]]
    before = peak.base - found.lives.before(peak.event)
    known = _limit_held(found.held, before)
    op, when = (found.at.outermost[peak.event], found.at.t_ns[peak.event]) if peak.event >= 0 else (-1, -1)
    reserved, allocated = (events[column] for column in ("total_reserved", "total_allocated"))
    held_now = reserved[peak.event] if peak.event >= 0 and name != "cpu" else None
    return MemoryReport(
        device=name,
        peak_bytes=peak.bytes,
        peak_step=find_step_name(steps, int(when)),
        peak_phase=found.at.phase[peak.event] if peak.event >= 0 else None,
        peak_op=None if op < 0 else _read_op_names(trace)[int(op)],
        by_category=sum_categories(size, kinds, known, before),
        by_module=merge_rows(_build_rows(_read_modules(trace), rows, size, kinds), _build_held_rows(known)),
        by_site=_build_rows(_read_sites(trace), rows, size, kinds),
        by_op=_build_rows(_read_op_names(trace), found.at.outermost[found.lives.born[alive]], size, kinds),
        blocks=int(alive.sum()),
        reserved_peak_bytes=None if name == "cpu" or not reserved.max() else int(reserved.max()),  # type: ignore[arg-type]
        fragmentation_share=_measure_fragmentation(held_now, allocated[peak.event] if peak.event >= 0 else None),
    )


def _measure_fragmentation(reserved: int | None, allocated: int | None) -> float | None:
    return (reserved - allocated) / reserved if reserved and allocated is not None and reserved >= allocated else None


def find_step_name(steps: pl.DataFrame, when_ns: int) -> str | None:
    """Return the name of the step at a moment, None outside every step."""
    row = assign_steps(steps, np.array([when_ns], dtype=np.int64))[0]
    return None if row is None else str(steps["name"][row])


def _limit_held(found: tuple[HeldStorage, ...], before: int) -> tuple[HeldStorage, ...]:
    """Return as many of the held storages as fit into what was there: those of other allocators are not counted by this one."""
    kept = []
    for item in found:
        if item.bytes <= before:
            before -= item.bytes
            kept.append(item)
    return tuple(kept)


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


def _read_op_names(trace: Trace) -> pl.Series:
    """Return the names of the ops, of autograd's nodes without what the engine writes before them."""
    names: pl.Series = decode_names(trace.ops["name"]).str.strip_prefix(_NODE)
    return names


def _read_modules(trace: Trace) -> pl.Series:
    return find_modules(trace, None) if trace.frames.height else trace.ops["module"]


def _read_sites(trace: Trace) -> pl.Series | None:
    return find_own_sites(trace) if trace.frames.height else None


def _build_rows(names: pl.Series | None, rows: Ints, size: Ints, kinds: Texts) -> tuple[MemoryRow, ...]:
    """Return the blocks summed by the name of their op and by category, largest first; those without a name are left out."""
    if names is None:
        return ()
    return sum_rows({"name": names.gather(null_missing(rows)), "bytes": size, "category": kinds.astype(str)})


def _build_held_rows(known: tuple[HeldStorage, ...]) -> tuple[MemoryRow, ...]:
    """Return parameters and their like by the module that holds them, by the names of named_parameters()."""
    modules = [_find_module(item.owner) for item in known]
    names = pl.Series([name or None for name in modules], dtype=pl.String)
    sizes = np.array([item.bytes for item in known], dtype=np.int64)
    return sum_rows({"name": names, "bytes": sizes, "category": np.array([item.owner.kind for item in known], dtype=str)})


def _find_module(owner: Owner) -> str:
    """Return the module of a parameter or buffer by its name; state has the name of its parameter and a key after it."""
    name = owner.name.rpartition(".")[0] if owner.kind == "optimizer_state" else owner.name
    return name.rpartition(".")[0] or name
