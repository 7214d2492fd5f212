"""The report on memory from the allocator's events of a trace, with owners and a snapshot where a bundle has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from gpudiag.attribution.modules import find_modules
from gpudiag.attribution.names import texts
from gpudiag.attribution.nesting import nulled
from gpudiag.attribution.sites import own_sites
from gpudiag.attribution.steps import step_of
from gpudiag.model.memory import CATEGORIES, MemoryReport, MemoryRow, Owner, Owners
from gpudiag.model.trace import Trace
from gpudiag.timeline.memory.lives import Ints, Lives, lives
from gpudiag.timeline.memory.owned import Held, held, named, owners_of
from gpudiag.timeline.memory.pools import block_sizes, others_note, with_pools
from gpudiag.timeline.memory.rows import merged, ranked
from gpudiag.timeline.memory.uses import Moments, Texts, moments, uses
from gpudiag.trace.snapshot import Snapshot

LARGEST = 1 << 40
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


class Used(NamedTuple):
    """The blocks of a device and what they are for."""

    lives: Lives
    kinds: Texts
    names: Texts
    at: Moments
    held: tuple[Held, ...]


def memory(
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
    name, events = _events(trace, device)
    if not events.height:
        return None
    found = _used(trace, events, name, owners, snapshot)
    peak = _peak(events, found, on_cpu=name == "cpu")
    made = _report(trace, steps, found, peak, name, events)
    notes = _notes(trace, events, found, name)
    notes = [*_others(trace, name), *notes]
    if owners is not None and owners.device == name:
        notes = [*notes, *owners.notes]
    made = msgspec.structs.replace(made, notes=tuple(notes), provenance="owners" if owners_of(owners, name) else "lifetimes")
    return with_pools(made, owners if name != "cpu" else None, snapshot if name != "cpu" else None)


def _events(trace: Trace, device: int | None) -> tuple[str, pl.DataFrame]:
    """Return (name of the device, its events)."""
    events = trace.allocations.filter((pl.col("bytes") != 0) & pl.col("bytes").is_between(-LARGEST, LARGEST))
    gpu = events.filter(pl.col("device_kind") == "gpu")
    if not gpu.height:
        return "cpu", events.filter(pl.col("device_kind") == "cpu")
    sums = gpu.group_by("device").agg(pl.col("bytes").abs().sum()).sort("bytes", "device", descending=[True, False])
    index = device if device is not None and device in gpu["device"] else next(iter(sums["device"]), None)
    return f"cuda:{0 if index is None else index}", gpu.filter(pl.col("device").eq_missing(index))


def _others(trace: Trace, name: str) -> tuple[str, ...]:
    """Return a note on the GPUs that are left out beside `name`."""
    gpu = trace.allocations.filter((pl.col("device_kind") == "gpu") & (pl.col("bytes") != 0))
    return others_note(name, (index for index in gpu["device"].drop_nulls().unique().sort().to_list() if f"cuda:{index}" != name))


def _used(trace: Trace, events: pl.DataFrame, name: str, owners: Owners | None, snapshot: Snapshot | None) -> Used:
    address = None if events["address"].null_count() else events["address"].to_numpy()
    blocks, at = lives(events["bytes"].to_numpy(), address), moments(trace, events)
    mine = owners_of(owners, name)
    kinds, names = named(blocks, uses(trace, blocks, at), mine)
    return Used(blocks, kinds, names, at, held(blocks, mine, block_sizes(snapshot), on_cpu=name == "cpu"))


def _peak(events: pl.DataFrame, found: Used, *, on_cpu: bool) -> Peak:
    """Return the peak. The base is what the allocator counted less the first event; else what is known to have been there."""
    freed = found.lives.before(events.height)
    base = freed + sum(item.bytes for item in found.held)
    counted = events["total_allocated"].drop_nulls()
    if not on_cpu and len(counted):  # the CPU's count begins with the first profile, and is none of what was there before
        first = int(events["total_allocated"].is_not_null().arg_max() or 0)
        base = max(freed, int(counted[0]) - int(events["bytes"].head(first + 1).sum()))
    in_use = found.lives.in_use()
    event = int(in_use.argmax())
    return Peak(event, base + int(in_use[event]), base) if in_use[event] > 0 else Peak(-1, base, base)


def _report(trace: Trace, steps: pl.DataFrame, found: Used, peak: Peak, name: str, events: pl.DataFrame) -> MemoryReport:
    alive = found.lives.alive(peak.event)
    size, kinds = found.lives.size[alive], found.kinds[alive]
    rows = found.at.op[found.lives.born[alive]]
    before = peak.base - found.lives.before(peak.event)
    known = _limited(found.held, before)
    op, when = (found.at.outermost[peak.event], found.at.t_ns[peak.event]) if peak.event >= 0 else (-1, -1)
    reserved, allocated = (events[column] for column in ("total_reserved", "total_allocated"))
    held_now = reserved[peak.event] if peak.event >= 0 and name != "cpu" else None
    return MemoryReport(
        device=name,
        peak_bytes=peak.bytes,
        peak_step=trace_step(steps, int(when)),
        peak_phase=found.at.phase[peak.event] if peak.event >= 0 else None,
        peak_op=None if op < 0 else _op_names(trace)[int(op)],
        by_category=categories(size, kinds, known, before),
        by_module=merged(_rows(_modules(trace), rows, size, kinds), _held_rows(known)),
        by_site=_rows(_sites(trace), rows, size, kinds),
        by_op=_rows(_op_names(trace), found.at.outermost[found.lives.born[alive]], size, kinds),
        blocks=int(alive.sum()),
        reserved_peak_bytes=None if name == "cpu" or not reserved.max() else int(reserved.max()),  # type: ignore[arg-type]
        fragmentation_share=_fragmentation(held_now, allocated[peak.event] if peak.event >= 0 else None),
    )


def _fragmentation(reserved: int | None, allocated: int | None) -> float | None:
    return (reserved - allocated) / reserved if reserved and allocated is not None and reserved >= allocated else None


def trace_step(steps: pl.DataFrame, when_ns: int) -> str | None:
    """Return the name of the step at a moment, None outside every step."""
    row = step_of(steps, np.array([when_ns], dtype=np.int64))[0]
    return None if row is None else str(steps["name"][row])


def _limited(found: tuple[Held, ...], before: int) -> tuple[Held, ...]:
    """Return as many of the held storages as fit into what was there: those of other allocators are not counted by this one."""
    kept = []
    for item in found:
        if item.bytes <= before:
            before -= item.bytes
            kept.append(item)
    return tuple(kept)


def categories(size: Ints, kinds: Texts, known: Iterable[Held], before: int) -> dict[str, int]:
    """Return category -> bytes: of the blocks, and of the `before` bytes from before the recording, those of `known` by owner."""
    sums = dict.fromkeys(CATEGORIES, 0)
    for kind in set(kinds.tolist()):
        sums[kind] += int(size[kinds == kind].sum())
    for item in known:
        sums[item.owner.kind] += item.bytes
        before -= item.bytes
    sums["before_recording"] += before
    return {kind: value for kind, value in sums.items() if value}


def _op_names(trace: Trace) -> pl.Series:
    """Return the names of the ops, of autograd's nodes without what the engine writes before them."""
    names: pl.Series = texts(trace.ops["name"]).str.strip_prefix(_NODE)
    return names


def _modules(trace: Trace) -> pl.Series:
    return find_modules(trace, None) if trace.frames.height else trace.ops["module"]


def _sites(trace: Trace) -> pl.Series | None:
    return own_sites(trace) if trace.frames.height else None


def _rows(names: pl.Series | None, rows: Ints, size: Ints, kinds: Texts) -> tuple[MemoryRow, ...]:
    """Return the blocks summed by the name of their op and by category, largest first; those without a name are left out."""
    if names is None:
        return ()
    return ranked({"name": names.gather(nulled(rows)), "bytes": size, "category": kinds.astype(str)})


def _held_rows(known: tuple[Held, ...]) -> tuple[MemoryRow, ...]:
    """Return parameters and their like by the module that holds them, by the names of named_parameters()."""
    modules = [_module_of(item.owner) for item in known]
    names = pl.Series([name or None for name in modules], dtype=pl.String)
    sizes = np.array([item.bytes for item in known], dtype=np.int64)
    return ranked({"name": names, "bytes": sizes, "category": np.array([item.owner.kind for item in known], dtype=str)})


def _module_of(owner: Owner) -> str:
    """Return the module of a parameter or buffer by its name; state has the name of its parameter and a key after it."""
    name = owner.name.rpartition(".")[0] if owner.kind == "optimizer_state" else owner.name
    return name.rpartition(".")[0] or name


def _notes(trace: Trace, events: pl.DataFrame, found: Used, name: str) -> list[str]:
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
    return notes
