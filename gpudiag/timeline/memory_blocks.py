"""Blocks of memory: their lives, owners and uses, and the segments of the caching allocator that hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Bools, Ints
from gpudiag.attribution.nesting import find_innermost, find_nearest, nest
from gpudiag.model.memory import MemoryReport, MemoryRow, Owner, Owners, PoolRow
from gpudiag.model.trace import Trace
from gpudiag.trace.memory_snapshot import Segment, Snapshot

BEFORE_RECORDING = -1
"""Birth of a block that was allocated before the recording."""


class Lives(NamedTuple):
    """Blocks of memory. A block is in use after event k where born <= k < died."""

    address: Ints
    size: Ints
    """Bytes."""
    born: Ints
    """Event that allocated it; BEFORE: not recorded."""
    died: Ints
    """Event that freed it; `events`: in use at the end."""
    events: int

    def alive(self, event: int) -> Bools:
        """Return which blocks, allocated in the recording, are in use after `event`."""
        found: Bools = (self.born >= 0) & (self.born <= event) & (self.died > event)
        return found

    def before(self, event: int) -> int:
        """Return the bytes of the blocks of before the recording that were freed up to `event`."""
        return int(self.size[(self.born == BEFORE_RECORDING) & (self.died <= event)].sum())

    def in_use(self) -> Ints:
        """Return the bytes in use after each event, less those at the start."""
        change = np.zeros(self.events + 1, dtype=np.int64)
        recorded = self.born >= 0
        np.add.at(change, self.born[recorded], self.size[recorded])
        np.subtract.at(change, self.died, self.size)
        total: Ints = np.cumsum(change[:-1])
        return total


def build_lives(sizes: Ints, addresses: Ints | None) -> Lives:
    """Return the blocks of events in their order: `sizes` is positive for an allocation, negative for a free.

    Without `addresses` (torch before 1.13) a free ends the youngest block of its size: of blocks of one size the sum is right at any
    moment, but not always which of them it was.
    """
    if addresses is None:
        open_of: dict[int, list[int]] = {}
        died, orphans = np.full(len(sizes), len(sizes), dtype=np.int64), []
        for row, size in enumerate(sizes.tolist()):
            if size > 0:
                open_of.setdefault(size, []).append(row)
            elif waiting := open_of.get(-size):
                died[waiting.pop()] = row
            else:
                orphans.append(row)
        rows, lost = np.flatnonzero(sizes > 0), np.array(orphans, dtype=np.int64)
        return Lives(
            np.full(len(rows) + len(lost), -1),
            np.concatenate((sizes[rows], -sizes[lost])),
            np.concatenate((rows, np.full(len(lost), BEFORE_RECORDING))),
            np.concatenate((died[rows], lost)),
            len(sizes),
        )
    order = np.lexsort((np.arange(len(sizes)), addresses))
    rows, size, address = order, sizes[order], addresses[order]
    same = np.append(address[1:] == address[:-1], False)
    following = np.where(same, np.append(rows[1:], 0), len(sizes))  # a second allocation there means that a free was not recorded
    begins = size > 0
    orphan = ~begins & ~np.append(False, same[:-1] & begins[:-1])
    return Lives(
        np.concatenate((address[begins], address[orphan])),
        np.concatenate((size[begins], -size[orphan])),
        np.concatenate((rows[begins], np.full(int(orphan.sum()), BEFORE_RECORDING))),
        np.concatenate((following[begins], rows[orphan])),
        len(sizes),
    )


Texts = npt.NDArray[np.object_]

_FAR = np.iinfo(np.int64).max


class EventMoments(NamedTuple):
    """The allocator's events of one device beside the ops of their trace."""

    t_ns: Ints
    op: Ints
    """Innermost op that was open, -1: none."""
    outermost: Ints
    """The op around it that stands in no other, -1: none."""
    over_ns: Ints
    """End of the outermost op around it; the moment itself where there is none."""
    phase: Texts
    """Phase of that op; None: not known."""


def find_moments(trace: Trace, events: pl.DataFrame) -> EventMoments:
    """Return the moments of `events` (rows of allocations) among the ops of `trace` (stage 'link')."""
    nesting = nest(trace.ops)
    t_ns = events["t_ns"].to_numpy()
    op = find_innermost(nesting, events["thread"].fill_null(-2).to_numpy(), t_ns)
    outermost = np.append(find_nearest(nesting.parent, nesting.parent < 0), -1)[op]
    over = np.where(op >= 0, np.append(nesting.end_ns, 0)[outermost], t_ns)
    phase = np.array([*trace.ops["phase"].to_list(), None], dtype=object)[op]  # None for rows of -1
    return EventMoments(t_ns, op, outermost, over, phase)


def classify_uses(trace: Trace, lives: Lives, at: EventMoments) -> Texts:
    """Return the category of each block by its life; blocks of before the recording are `before_recording`.

    * freed before the outermost op that made it has returned: temporary;
    * made forward, freed when a backward pass had begun (or never): activations; freed earlier: temporary;
    * made forward where no backward pass was recorded, and not freed by its own op: forward_held;
    * made backward, in use when the next forward pass or optimizer began: gradients; freed earlier: temporary;
    * made by the optimizer, in use when it was through: optimizer_state; made while data was moved: inputs.

    As torch.profiler's own memory profile does (torch/profiler/_memory_profiler.py), but by time: it needs no shapes.
    """
    made = np.maximum(lives.born, 0)
    phase, born_ns = np.array([*at.phase.tolist(), None], dtype=object)[made], np.append(at.t_ns, 0)[made]
    freed_ns = np.append(at.t_ns, _FAR)[lives.died]
    roots = trace.ops.filter(pl.col("parent").is_null())
    found = np.full(len(made), "unknown", dtype=object)
    backward = _find_next(roots, ("backward",), born_ns)
    kept_forward = np.where(
        (freed_ns >= backward) | (backward == _FAR),
        "activations" if (roots["phase"].cast(pl.String) == "backward").any() else "forward_held",
        "temporary",
    )
    found[phase == "forward"] = kept_forward[phase == "forward"]
    for maker, others, kept in (
        ("backward", ("forward", "optimizer"), "gradients"),
        ("optimizer", ("forward", "backward", "data"), "optimizer_state"),
    ):
        lasting = freed_ns >= _find_next(roots, others, born_ns)
        found[phase == maker] = np.where(lasting, kept, "temporary")[phase == maker]
    found[phase == "data"] = "inputs"
    found[freed_ns <= np.append(at.over_ns, 0)[made]] = "temporary"
    found[lives.born < 0] = "before_recording"
    return found


def _find_next(roots: pl.DataFrame, phases: tuple[str, ...], after_ns: Ints) -> Ints:
    """Return when the next op of one of `phases` begins after each moment; the end of time where none does."""
    starts = np.append(np.sort(roots.filter(pl.col("phase").is_in(phases))["start_ns"].to_numpy()), _FAR)
    found: Ints = starts[np.searchsorted(starts[:-1], after_ns, side="right")]
    return found


ROUNDING = 512
"""Bytes to which the CUDA caching allocator rounds a block up (kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp)."""


class HeldStorage(NamedTuple):
    """A storage that was there before the recording, and still at its end."""

    owner: Owner
    bytes: int
    """Of the allocator's block."""


def find_owners(owners: Owners | None, device: str) -> dict[int, Owner]:
    """Return the owners on `device` by address; of several that share a storage the first."""
    found: dict[int, Owner] = {}
    for owner in owners.owners if owners else ():
        if owner.device == device and owner.address > 0 and owner.bytes > 0:
            found.setdefault(owner.address, owner)
    return found


def apply_owners(lives: Lives, kinds: Texts, owners: Mapping[int, Owner]) -> Texts:
    """Return the category of each block, of those in use at the end as `owners` tell; what no one owns is none of theirs."""
    found: Texts = kinds.copy()
    for row in np.flatnonzero((lives.died == lives.events) & (lives.born >= 0)).tolist():
        owner = owners.get(int(lives.address[row]))
        if owner is not None:
            found[row] = owner.kind
        elif owners and found[row] in ("gradients", "optimizer_state"):
            found[row] = "unknown"
    return found


def find_held_storages(lives: Lives, owners: Mapping[int, Owner], snapshot: Snapshot | None, *, on_cpu: bool) -> tuple[HeldStorage, ...]:
    """Return the owned storages that no recorded allocation made, as large as their blocks are in the snapshot where that tells."""
    made = set(lives.address[(lives.died == lives.events) & (lives.born >= 0)].tolist())
    blocks = [block for segment in (snapshot.segments if snapshot else ()) for block in segment.blocks]
    sizes = {block.address: block.size for block in blocks if block.address is not None and block.state != INACTIVE_STATE}
    rounding = 1 if on_cpu else ROUNDING
    return tuple(
        HeldStorage(owner, sizes.get(owner.address, -(-owner.bytes // rounding) * rounding))
        for address, owner in owners.items()
        if address not in made
    )


MOST_ROWS = 100
"""Rows of each list: the largest."""


def sum_rows(columns: Mapping[str, Any]) -> tuple[MemoryRow, ...]:
    """Return blocks (columns name, bytes, category) summed by name and category, largest first; those without a name are left out."""
    frame = pl.DataFrame(columns, schema_overrides={"category": pl.String}).drop_nulls("name")
    sums = frame.group_by("name", "category").agg(pl.col("bytes").sum(), pl.len().alias("blocks"))
    sums = sums.sort("bytes", "name", "category", descending=[True, False, False]).head(MOST_ROWS)
    return tuple(MemoryRow(**row) for row in sums.iter_rows(named=True))


INACTIVE_STATE = "inactive"

_MOST_LISTED = 8


def find_segments(snapshot: Snapshot, device: str) -> tuple[Segment, ...]:
    """Return the segments of `device` ('cuda:0')."""
    return tuple(segment for segment in snapshot.segments if f"cuda:{segment.device}" == device)


def note_other_devices(device: str, others: Iterable[int]) -> tuple[str, ...]:
    """Return, as notes, which GPUs are left out beside `device`."""
    names = [f"cuda:{other}" for other in others]
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return (
        (f"{device} only; not analysed: {', '.join(names[:_MOST_LISTED])}{more} (choose with gpudiag memory --device N)",) if names else ()
    )


def sum_pools(segments: tuple[Segment, ...]) -> tuple[PoolRow, ...]:
    """Return the segments summed by size class and stream, largest first."""
    groups = defaultdict(list)
    for segment in segments:
        groups[segment.segment_type or "", segment.stream].append(segment)
    rows = [
        PoolRow(
            size_class=kind,
            stream=stream,
            segments=len(found),
            reserved_bytes=sum(segment.total_size for segment in found),
            allocated_bytes=sum(block.size for segment in found for block in segment.blocks if block.state == "active_allocated"),
            largest_free_bytes=find_largest_free(found),
        )
        for (kind, stream), found in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.reserved_bytes, row.size_class, row.stream)))


def find_largest_free(segments: list[Segment] | tuple[Segment, ...]) -> int:
    """Return the bytes of the largest free block; 0 where all is in use."""
    return max((block.size for segment in segments for block in segment.blocks if block.state == INACTIVE_STATE), default=0)


def add_pools(report: MemoryReport, owners: Owners | None, snapshot: Snapshot | None) -> MemoryReport:
    """Return `report` with what a snapshot and the allocator's counters add."""
    segments = find_segments(snapshot, report.device) if snapshot else ()
    if segments:
        reserved = sum(segment.total_size for segment in segments)
        # the free bytes of segments that are partly in use: they cannot go back to the driver (inactive_split_bytes of torch)
        used = [segment for segment in segments if any(block.state != INACTIVE_STATE for block in segment.blocks)]
        split = sum(block.size for segment in used for block in segment.blocks if block.state == INACTIVE_STATE)
        report = msgspec.structs.replace(
            report,
            pools=sum_pools(segments),
            largest_free_bytes=find_largest_free(segments),
            inactive_split_share=split / reserved if reserved else None,
        )
    stats = owners.stats if owners and owners.device == report.device else None
    if stats is None:
        return report
    return msgspec.structs.replace(report, retries=stats.alloc_retries, ooms=stats.ooms, run_peak_bytes=stats.allocated_peak_bytes)
