"""How the caching allocator has filled its segments, from a snapshot, and its counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from gpudiag.model.memory import MemoryReport, Owners, PoolRow
from gpudiag.trace.snapshot import Segment, Snapshot

INACTIVE = "inactive"

_LISTED = 8


def segments_of(snapshot: Snapshot, device: str) -> tuple[Segment, ...]:
    """Return the segments of `device` ('cuda:0')."""
    return tuple(segment for segment in snapshot.segments if f"cuda:{segment.device}" == device)


def others_note(device: str, others: Iterable[int]) -> tuple[str, ...]:
    """Return, as notes, which GPUs are left out beside `device`."""
    names = [f"cuda:{other}" for other in others]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (f"{device} only; not analysed: {', '.join(names[:_LISTED])}{more} (choose with gpudiag memory --device N)",) if names else ()


def block_sizes(snapshot: Snapshot | None) -> dict[int, int]:
    """Return the size of each block in use by its address; none where torch gave no addresses (before 2.1)."""
    blocks = (block for segment in (snapshot.segments if snapshot else ()) for block in segment.blocks)
    return {block.address: block.size for block in blocks if block.address is not None and block.state != INACTIVE}


def pool_rows(segments: tuple[Segment, ...]) -> tuple[PoolRow, ...]:
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
            allocated_bytes=sum(_used(segment) for segment in found),
            largest_free_bytes=largest_free(found),
        )
        for (kind, stream), found in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.reserved_bytes, row.size_class, row.stream)))


def _used(segment: Segment) -> int:
    return sum(block.size for block in segment.blocks if block.state == "active_allocated")


def largest_free(segments: list[Segment] | tuple[Segment, ...]) -> int:
    """Return the bytes of the largest free block; 0 where all is in use."""
    return max((block.size for segment in segments for block in segment.blocks if block.state == INACTIVE), default=0)


def inactive_split(segments: tuple[Segment, ...]) -> int:
    """Return the free bytes of segments that are partly in use: they cannot go back to the driver (inactive_split_bytes of torch)."""
    split = [segment for segment in segments if any(block.state != INACTIVE for block in segment.blocks)]
    return sum(block.size for segment in split for block in segment.blocks if block.state == INACTIVE)


def with_pools(report: MemoryReport, owners: Owners | None, snapshot: Snapshot | None) -> MemoryReport:
    """Return `report` with what a snapshot and the allocator's counters add."""
    segments = segments_of(snapshot, report.device) if snapshot else ()
    if segments:
        reserved = sum(segment.total_size for segment in segments)
        report = msgspec.structs.replace(
            report,
            pools=pool_rows(segments),
            largest_free_bytes=largest_free(segments),
            inactive_split_share=inactive_split(segments) / reserved if reserved else None,
        )
    stats = owners.stats if owners and owners.device == report.device else None
    if stats is None:
        return report
    return msgspec.structs.replace(report, retries=stats.alloc_retries, ooms=stats.ooms, run_peak_bytes=stats.allocated_peak_bytes)
