"""What a report says of memory, in words and rows: shared by the terminal, Markdown and HTML, and by `gpudiag memory`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpudiag.model.memory import MemoryReport, MemoryRow
from gpudiag.report.console import (
    QUIET,
    clean,
    collect_text,
    create_console,
    create_table,
    escape_markdown,
    format_cells,
    format_code_span,
    format_table,
    print_heading,
    print_item,
    print_line,
    print_table,
)
from gpudiag.report.labels import ROUNDS_TO_ZERO, format_site, format_small_share
from gpudiag.units import format_bytes, format_share

if TYPE_CHECKING:
    from rich.console import Console

CATEGORY_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "buffers": "buffers",
    "activations": "activations saved for backward",
    "forward_held": "forward-pass tensors: still held, no backward pass recorded",
    "inputs": "inputs",
    "temporary": "temporary: freed by the op or pass that made it",
    "before_recording": "allocated before the recording, use unknown",
    "unknown": "unknown",
}

_TOP_IN_REPORT, _TOP_IN_PAGE = 3, 10
_ROUNDS_TO_ZERO = 0.0005
"""A share below half a thousandth, with one decimal."""
_ROOMY = 80
"""Columns from which what memory is used for needs no second line beside a name."""

MemoryTextRows = list[tuple[str, str, str]]
"""What, how much, and its share of the peak."""


def format_memory_headline(found: MemoryReport) -> str:
    """Return the peak in one sentence: how much, and when."""
    capacity = found.capacity_bytes
    share = f", {format_small_share(found.peak_bytes / capacity)} of its {format_bytes(capacity)}" if capacity else ""
    phase = f"{found.peak_phase} pass" if found.peak_phase in ("forward", "backward") else found.peak_phase
    step = (found.peak_step or "").replace("ProfilerStep#", "step ")
    when = ", ".join(text for text in (step, phase, found.peak_op) if text)
    return f"{format_bytes(found.peak_bytes)} on {clean(found.device, 40)}{share}{f'; reached in {clean(when, 200)}' if when else ''}."


def build_category_rows(found: MemoryReport) -> MemoryTextRows:
    """Return the categories, as the report orders them; they sum to the peak."""
    return [
        (CATEGORY_NAMES.get(kind, kind), format_bytes(value), _format_peak_share(value, found)) for kind, value in found.by_category.items()
    ]


def build_memory_rows(rows: Sequence[MemoryRow], found: MemoryReport, top: int) -> list[tuple[str, str, str, str]]:
    """Return the `top` rows: name, what they are used for, how much, share of the peak."""
    return [
        (
            row.name,
            clean(CATEGORY_NAMES.get(row.category, row.category), 80).partition(":")[0].partition(",")[0],
            format_bytes(row.bytes),
            _format_peak_share(row.bytes, found),
        )
        for row in rows[:top]
    ]


def build_site_rows(found: MemoryReport, top: int) -> list[tuple[str, str, str, str]]:
    """Return the `top` call sites as rows_of does, with the end of each path."""
    return [(format_site(name), kind, size, share) for name, kind, size, share in build_memory_rows(found.by_site, found, top)]


def _format_peak_share(value: int, found: MemoryReport) -> str:
    share = value / found.peak_bytes if found.peak_bytes else None
    return f"<{format_share(0.001, 1)}" if share and 0 < share < _ROUNDS_TO_ZERO else format_share(share, 1)


def format_allocator(found: MemoryReport) -> str:
    """Return what the allocator holds beyond that, and whether it ran short; '' where nothing is known."""
    parts = []
    if found.reserved_peak_bytes is not None:
        parts.append(f"reserved by the allocator at most {format_bytes(found.reserved_peak_bytes)}")
    if found.fragmentation_share is not None:
        parts.append(f"{format_share(found.fragmentation_share)} of what was reserved was not in use")
    if found.largest_free_bytes is not None:
        parts.append(f"largest free block {format_bytes(found.largest_free_bytes)}")
    if found.inactive_split_share is not None and found.inactive_split_share >= ROUNDS_TO_ZERO:
        parts.append(f"{format_share(found.inactive_split_share)} in free parts of segments that are partly in use")
    for count, what in ((found.retries, "allocation retries"), (found.ooms, "out-of-memory errors")):
        if count is not None:
            parts.append(f"{count:,} {what}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def list_memory_lines(found: MemoryReport) -> list[str]:
    """Return the sentences below the categories: the allocator, and the peak of the whole run where the recorded steps did not hold it."""
    lines = [format_allocator(found)]
    if found.run_peak_bytes is not None and found.run_peak_bytes > found.peak_bytes * (1 + ROUNDS_TO_ZERO):
        lines.append(f"The run needs more outside the recorded steps: {format_bytes(found.run_peak_bytes)}.")
    return [text for text in lines if text]


def print_memory(console: Console, found: MemoryReport | None) -> None:
    """Print the few lines of a report in the terminal; nothing where no memory was recorded."""
    if found is None:
        return
    print_heading(console, "Peak memory")
    print_line(console, format_memory_headline(found))
    _print_memory_table(console, build_category_rows(found))
    for text in list_memory_lines(found):
        print_line(console, text)
    if found.by_site:
        where = "; ".join(f"{name} ({kind}) {size}" for name, kind, size, _ in build_site_rows(found, _TOP_IN_REPORT))
        print_line(console, f"Largest call sites: {where}. More: gpudiag memory PATH", QUIET)


def _print_memory_table(console: Console, rows: Sequence[tuple[str, ...]]) -> None:
    kind = "left" if console.width >= _ROOMY else "wrapped"
    columns = (("", "wrapped"),) if rows and len(rows[0]) == 3 else (("", "name"), ("", kind))
    table = create_table((*columns, ("", "right"), ("", "right")))
    for row in rows:
        table.add_row(*format_cells(*(clean(text, 400) for text in row)))
    print_table(console, table)


def render_memory_text(found: MemoryReport, *, width: int = 100, top: int = 10, color: bool = False) -> str:
    """Return all that is known as text for a terminal of `width` columns, with the `top` rows of each list."""
    console, sink = create_console(width, color)
    print_line(console, "Peak memory", "bold")
    print_line(console, format_memory_headline(found))
    _print_memory_table(console, build_category_rows(found))
    for text in list_memory_lines(found):
        print_line(console, text)
    for title, rows in list_memory_places(found):
        if rows:
            print_heading(console, f"{title} ({min(top, len(rows))} of {len(rows)})")
            _print_memory_table(console, rows[:top])
    if found.pools:
        print_heading(console, "Allocator segments")
        table = create_table((("allocations", "left"), ("stream", "right"), ("segments", "right"), *_POOL_COLUMNS))
        for pool in found.pools:
            sizes = (format_bytes(size) for size in (pool.reserved_bytes, pool.allocated_bytes, pool.largest_free_bytes))
            table.add_row(*format_cells(clean(pool.size_class, 20), str(pool.stream), f"{pool.segments:,}", *sizes))
        print_table(console, table)
    for note in found.notes:
        print_item(console, "! ", note, "yellow")
    return collect_text(sink)


def list_memory_places(found: MemoryReport) -> tuple[tuple[str, list[tuple[str, str, str, str]]], ...]:
    """Return the three lists with their titles, whole."""
    everything = len(found.by_site) + len(found.by_module) + len(found.by_op)
    modules, ops = (build_memory_rows(rows, found, everything) for rows in (found.by_module, found.by_op))
    return ("By call site", build_site_rows(found, everything)), ("By module", modules), ("By op", ops)


_POOL_COLUMNS = (("reserved", "right"), ("in use", "right"), ("largest free", "right"))


def format_memory_markdown(found: MemoryReport | None) -> str:
    """Return the section of a report as Markdown; '' where no memory was recorded."""
    if found is None:
        return ""
    table = format_table(
        ("used for", "bytes", "share"), "lrr", [(escape_markdown(name), size, share) for name, size, share in build_category_rows(found)]
    )
    parts = [escape_markdown(format_memory_headline(found)), table, *(escape_markdown(text) for text in list_memory_lines(found))]
    if found.by_site:
        rows = build_site_rows(found, _TOP_IN_PAGE)
        sites = [(format_code_span(name, 120, cell=True), escape_markdown(kind), size, share) for name, kind, size, share in rows]
        parts.append(format_table(("call site", "used for", "bytes", "share"), "llrr", sites))
    parts += [f"- {escape_markdown(note)}" for note in found.notes]
    return "\n\n".join(["## Peak memory", *parts])
