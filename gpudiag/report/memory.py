"""What a report says of memory, in words and rows, for all formats and `gpudiag memory`; estimates of what a model would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpudiag.model.memory import MemoryReport, MemoryRow, ModelEstimate
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
from gpudiag.units import format_bytes, format_count, format_share

if TYPE_CHECKING:
    from rich.console import Console

    from gpudiag.roofline.transformer import Estimate, Transformer


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
_ROOMY = 80
"""Columns from which what memory is used for needs no second line beside a name."""


def format_memory_headline(found: MemoryReport) -> str:
    """Return the peak in one sentence: how much, and when."""
    capacity = found.capacity_bytes
    share = f", {format_small_share(found.peak_bytes / capacity)} of its {format_bytes(capacity)}" if capacity else ""
    phase = f"{found.peak_phase} pass" if found.peak_phase in ("forward", "backward") else found.peak_phase
    step = (found.peak_step or "").replace("ProfilerStep#", "step ")
    when = ", ".join(text for text in (step, phase, found.peak_op) if text)
    return f"{format_bytes(found.peak_bytes)} on {clean(found.device, 40)}{share}{f'; reached in {clean(when, 200)}' if when else ''}."


def build_category_rows(found: MemoryReport) -> list[tuple[str, str, str]]:
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
    # half a thousandth rounds to nothing
    return f"<{format_share(0.001, 1)}" if share and 0 < share < 0.0005 else format_share(share, 1)


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


TRANSFORMER_CAVEAT = (
    "An upper model, computed from the sizes alone: attention scores written out (no flash attention), dropout everywhere, as many key as "
    "query heads, no temporary buffers, no fragmentation."
)
TRANSFORMER_SOURCE = (
    "Formula: calculator of the Ultra-Scale Playbook (nanotron), after Korthikanti et al. 2022, arXiv 2205.05198. It prints TiB as TB. A "
    "recording tells what is really used: gpudiag memory PATH."
)


def render_transformer_estimate(preset: str, model: Transformer, memory: Estimate, *, width: int = 100, color: bool = False) -> str:
    """Return the sizes, the parts of the memory and what the figure is not."""
    console, sink = create_console(width, color)
    total = f"{_format_tebibytes(memory.total_bytes)} ({format_bytes(memory.total_bytes)})"
    print_line(console, f"About {total} on each device: {_format_tebibytes(memory.activations_bytes)} of activations.")
    precision = "mixed precision" if model.mixed_precision else "fp32"
    recompute = f"{model.recompute} recomputation" if model.recompute != "none" else "no recomputation"
    split = f", tensor parallel {model.tensor_parallel}" if model.tensor_parallel > 1 else ""
    split += f", data parallel {model.data_parallel}" if model.data_parallel > 1 else ""
    split += f", ZeRO {model.zero_stage}" if model.zero_stage else ""
    sizes = (
        f"Preset {preset}: {model.layers} layers of {model.hidden} with {model.heads} heads, feed-forward {model.feed_forward} "
        f"({model.activation}), {model.batch} sequences of {model.sequence} tokens, vocabulary {format_count(model.vocab)}, {precision}, "
        f"{recompute}, {model.optimizer_bytes} bytes of optimizer state a parameter{split}"
    )
    print_line(console, f"{sizes}; {format_count(memory.parameters)} parameters.", QUIET)
    print_heading(console, "Parts")
    parts = (
        ("weights", memory.weights_bytes),
        ("gradients", memory.gradients_bytes),
        ("optimizer states", memory.optimizer_bytes),
        ("activations: attention", memory.attention_bytes),
        ("activations: feed-forward", memory.feed_forward_bytes),
        ("activations: norms", memory.norms_bytes),
        ("activations: inputs of the layers", memory.layer_inputs_bytes),
        ("activations: embedding, final norm, logits", memory.tail_bytes),
        ("sum", memory.total_bytes),
    )
    _print_parts(console, [(name, size, size / memory.total_bytes) for name, size in parts if size], ("what", "bytes", "share"))
    print_line(console, "")
    print_line(console, TRANSFORMER_CAVEAT)
    print_line(console, TRANSFORMER_SOURCE, QUIET)
    return collect_text(sink)


def _format_tebibytes(value: int) -> str:
    return f"{value / 2**40:.2f} TiB" if value >= 2**40 else f"{value / 2**30:.2f} GiB"


_ESTIMATE_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "buffers": "buffers",
    "activations": "activations and output of the forward pass",
    "weight_casts": "parameters cast by autocast",
    "inputs": "inputs",
    "temporary": "temporary: freed by the pass that made it",
}
CUDA_CAVEAT = (
    "Two steps without data, with the kernels of a recent NVIDIA GPU in mind. On top come the CUDA context (some 500 MB), workspaces of "
    "cuBLAS and cuDNN, and what the allocator cannot use (fragmentation): leave 10 % free."
)
CPU_CAVEAT = "Two steps without data, as on a CPU: without buffers inside libraries and without the rest of the process."
_MODULES = 10


def render_model_estimate(found: ModelEstimate, *, width: int = 100, color: bool = False) -> str:
    """Return the peak, what it is made of, the passes, the modules that keep most, and what the figure is not."""
    console, sink = create_console(width, color)
    where = "a GPU" if found.device == "cuda" else "the CPU"
    peak = f"{_PASSES[found.peak_phase]}{f' ({clean(found.peak_op, 80)})' if found.peak_op else ''}"
    print_line(console, f"Training takes about {format_bytes(found.peak_bytes)} on {where}; the peak is in the {peak}.")
    print_line(console, _describe_model(found), QUIET)
    blocks = f", in blocks of {found.block_bytes} B" if found.block_bytes > 1 else ""
    print_heading(console, f"Held at the peak{blocks}")
    _print_parts(console, [(_ESTIMATE_NAMES[name], size, size / found.peak_bytes) for name, size in found.at_peak.items()])
    print_heading(console, "Peak of each pass")
    _print_parts(console, [(_PASSES[part.phase], part.bytes, part.bytes / found.peak_bytes) for part in found.phases])
    if found.activations_bytes:
        print_heading(console, f"Activations at the end of the forward pass: {format_bytes(found.activations_bytes)}")
        rows = found.modules[:_MODULES]
        _print_parts(
            console,
            [
                (
                    f"{clean(row.module, 120) or 'outside the model: the loss'} ({row.tensors:,} tensor{'s' if row.tensors != 1 else ''})",
                    row.bytes,
                    row.bytes / found.activations_bytes,
                )
                for row in rows
            ],
        )
    print_line(console, "")
    for note in found.notes:
        print_line(console, f"! {note}", "yellow")
    print_line(console, CUDA_CAVEAT if found.device == "cuda" else CPU_CAVEAT)
    print_line(console, "A recording shows what is really used: gpudiag.profile(memory=True), then gpudiag memory PATH.", QUIET)
    return collect_text(sink)


_PASSES = {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer step"}


def _describe_model(found: ModelEstimate) -> str:
    cast = "no autocast" if found.autocast == "none" else f"autocast to {found.autocast}"
    states = [
        f"{name} {format_bytes(size)}"
        for name, size in (
            ("parameters", found.parameters_bytes),
            ("gradients", found.gradients_bytes),
            ("optimizer state", found.optimizer_bytes),
            ("buffers", found.buffers_bytes),
            ("inputs", found.inputs_bytes),
        )
        if size
    ]
    optimizer = f"optimizer {clean(found.optimizer, 60)}" if found.optimizer != "none" else "no optimizer"
    return f"{format_count(found.parameter_count)} parameters, {cast}, {optimizer}. {', '.join(states)}."


def _print_parts(console: Console, rows: list[tuple[str, int, float]], titles: tuple[str, str, str] = ("", "", "")) -> None:
    table = create_table(tuple(zip(titles, ("name", "right", "right"), strict=True)))
    for name, size, share in rows:
        table.add_row(*format_cells(name, format_bytes(size), format_share(share, 1)))
    console.print(table)
