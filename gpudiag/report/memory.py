"""What a report says of memory, in words and rows: shared by the terminal, Markdown and HTML, and by `gpudiag memory`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpudiag.model.memory import MemoryReport, MemoryRow
from gpudiag.report.console import QUIET, cells, finished, heading, item, line, new_console, new_table, print_table
from gpudiag.report.escape import clean, code, markdown
from gpudiag.report.labels import site_text
from gpudiag.report.words import ROUNDS_TO_ZERO, small_share
from gpudiag.units import format_bytes, format_share

if TYPE_CHECKING:
    from rich.console import Console

IN_WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "buffers": "buffers",
    "activations": "activations kept for backward",
    "forward_held": "made by the forward pass: still held, no backward pass recorded",
    "inputs": "inputs",
    "temporary": "temporary: freed by the op or pass that made it",
    "before_recording": "there before the recording, owner not known",
    "unknown": "unknown",
}

_TOP_IN_REPORT, _TOP_IN_PAGE = 3, 10
_ROUNDS_TO_ZERO = 0.0005
"""A share below half a thousandth, with one decimal."""
_THREE = ("what", "bytes", "share")
_ROOMY = 80
"""Columns from which what memory is used for needs no second line beside a name."""

Rows = list[tuple[str, str, str]]
"""What, how much, and its share of the peak."""


def headline(found: MemoryReport) -> str:
    """Return the peak in one sentence: how much, and when."""
    capacity = found.capacity_bytes
    share = f", {small_share(found.peak_bytes / capacity)} of its {format_bytes(capacity)}" if capacity else ""
    phase = f"{found.peak_phase} pass" if found.peak_phase in ("forward", "backward") else found.peak_phase
    step = (found.peak_step or "").replace("ProfilerStep#", "step ")
    when = ", ".join(text for text in (step, phase, found.peak_op) if text)
    return f"{format_bytes(found.peak_bytes)} on {clean(found.device, 40)}{share}{f'; reached in {clean(when, 200)}' if when else ''}."


def category_rows(found: MemoryReport) -> Rows:
    """Return the categories, as the report orders them; they sum to the peak."""
    return [(IN_WORDS.get(kind, kind), format_bytes(value), _share(value, found)) for kind, value in found.by_category.items()]


def rows_of(rows: Sequence[MemoryRow], found: MemoryReport, top: int) -> list[tuple[str, str, str, str]]:
    """Return the `top` rows: name, what they are used for, how much, share of the peak."""
    return [(row.name, _word(row.category), format_bytes(row.bytes), _share(row.bytes, found)) for row in rows[:top]]


def site_rows(found: MemoryReport, top: int) -> list[tuple[str, str, str, str]]:
    """Return the `top` call sites as rows_of does, with the end of each path."""
    return [(site_text(name), kind, size, share) for name, kind, size, share in rows_of(found.by_site, found, top)]


def _word(category: str) -> str:
    return clean(IN_WORDS.get(category, category), 80).partition(":")[0].partition(",")[0]


def _share(value: int, found: MemoryReport) -> str:
    share = value / found.peak_bytes if found.peak_bytes else None
    return f"<{format_share(0.001, 1)}" if share and 0 < share < _ROUNDS_TO_ZERO else format_share(share, 1)


def allocator_line(found: MemoryReport) -> str:
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


def whole_run_line(found: MemoryReport) -> str:
    """Return the peak of the whole run where the recorded steps did not hold it, else ''."""
    if found.run_peak_bytes is None or found.run_peak_bytes <= found.peak_bytes * (1 + ROUNDS_TO_ZERO):
        return ""
    return f"Before or outside the recorded steps the run needed more: {format_bytes(found.run_peak_bytes)}."


def lines(found: MemoryReport) -> list[str]:
    """Return the sentences below the categories."""
    return [text for text in (allocator_line(found), whole_run_line(found)) if text]


def section(console: Console, found: MemoryReport | None) -> None:
    """Print the few lines of a report in the terminal; nothing where no memory was recorded."""
    if found is None:
        return
    heading(console, "Memory at its peak")
    line(console, headline(found))
    _table(console, category_rows(found))
    for text in lines(found):
        line(console, text)
    if found.by_site:
        where = "; ".join(f"{name} ({kind}) {size}" for name, kind, size, _ in site_rows(found, _TOP_IN_REPORT))
        line(console, f"Most of it at {where}. More: gpudiag memory PATH", QUIET)


def _table(console: Console, rows: Sequence[tuple[str, ...]]) -> None:
    """Print three columns, or four where the first is a name that takes what is left."""
    kind = "left" if console.width >= _ROOMY else "wrapped"
    columns = (("", "wrapped"),) if rows and len(rows[0]) == len(_THREE) else (("", "name"), ("", kind))
    table = new_table((*columns, ("", "right"), ("", "right")))
    for row in rows:
        table.add_row(*cells(*(clean(text, 400) for text in row)))
    print_table(console, table)


def render(found: MemoryReport, *, width: int = 100, top: int = 10, color: bool = False) -> str:
    """Return all that is known as text for a terminal of `width` columns, with the `top` rows of each list."""
    console, sink = new_console(width, color)
    line(console, "Memory at its peak", "bold")
    line(console, headline(found))
    _table(console, category_rows(found))
    for text in lines(found):
        line(console, text)
    for title, rows in places(found):
        if rows:
            heading(console, f"{title} ({min(top, len(rows))} of {len(rows)})")
            _table(console, rows[:top])
    if found.pools:
        heading(console, "Segments of the allocator")
        table = new_table((("allocations", "left"), ("stream", "right"), ("segments", "right"), *_POOL_COLUMNS))
        for pool in found.pools:
            sizes = (format_bytes(size) for size in (pool.reserved_bytes, pool.allocated_bytes, pool.largest_free_bytes))
            table.add_row(*cells(clean(pool.size_class, 20), str(pool.stream), f"{pool.segments:,}", *sizes))
        print_table(console, table)
    for note in found.notes:
        item(console, "! ", note, "yellow")
    return finished(sink)


def places(found: MemoryReport) -> tuple[tuple[str, list[tuple[str, str, str, str]]], ...]:
    """Return the three lists with their titles, whole."""
    everything = len(found.by_site) + len(found.by_module) + len(found.by_op)
    modules, ops = (rows_of(rows, found, everything) for rows in (found.by_module, found.by_op))
    return ("By call site", site_rows(found, everything)), ("By module", modules), ("By op", ops)


_POOL_COLUMNS = (("reserved", "right"), ("in use", "right"), ("largest free", "right"))


def as_markdown(found: MemoryReport | None) -> str:
    """Return the section of a report as Markdown; '' where no memory was recorded."""
    if found is None:
        return ""
    table = ["| used for | bytes | share |", "| --- | ---: | ---: |"]
    table += [f"| {markdown(name)} | {size} | {share} |" for name, size, share in category_rows(found)]
    parts = [markdown(headline(found)), "\n".join(table), *(markdown(text) for text in lines(found))]
    if found.by_site:
        rows = site_rows(found, _TOP_IN_PAGE)
        sites = [f"| {code(name, 120, cell=True)} | {markdown(kind)} | {size} | {share} |" for name, kind, size, share in rows]
        parts.append("\n".join(["| allocated at | used for | bytes | share |", "| --- | --- | ---: | ---: |", *sites]))
    parts += [f"- {markdown(note)}" for note in found.notes]
    return "\n\n".join(["## Memory at its peak", *parts])
