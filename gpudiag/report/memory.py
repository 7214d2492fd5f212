"""What a report says of memory, in words and rows, for all formats and `gpudiag memory`; estimates of what a model would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpudiag.model.memory import MemoryReport, MemoryTimeline, ModelEstimate
from gpudiag.report import memory_chart
from gpudiag.report.blocks import (
    Amount,
    Block,
    Cell,
    Chart,
    Column,
    Document,
    Fold,
    Heading,
    Listing,
    Paragraph,
    Section,
    Table,
    build_row,
    build_section,
    say_all,
)
from gpudiag.report.labels import ROUNDS_TO_ZERO, capitalize, format_site, format_small_share, pluralize
from gpudiag.units import format_bytes, format_count, format_ns, format_share

if TYPE_CHECKING:
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

_SITES_NAMED, _SITES_LISTED, _PLACES_LISTED = 3, 10, 50
"""Call sites in a terminal, in Markdown, and places in each list of a page."""
PLACE_TITLES = ("Call site", "Module", "Op")


HOW_TO_RECORD = (
    "record with gpudiag.profile(memory=True), torch.profiler with profile_memory=True, or give a snapshot of the CUDA allocator"
)


def format_memory_headline(found: MemoryReport) -> str:
    """Return the peak in one sentence: how much, and when."""
    capacity = found.capacity_bytes
    share = f", {format_small_share(found.peak_bytes / capacity)} of its {format_bytes(capacity)}" if capacity else ""
    phase = f"{found.peak_phase} pass" if found.peak_phase in ("forward", "backward") else found.peak_phase
    step = (found.peak_step or "").replace("ProfilerStep#", "step ")
    when = ", ".join(text for text in (step, phase, found.peak_op) if text)
    least = "At least " if found.lower_bound else ""
    return f"{least}{format_bytes(found.peak_bytes)} on {found.device}{share}{f'; reached in {when}' if when else ''}."


def build_categories_table(found: MemoryReport) -> Table:
    """Return the categories, as the report orders them; they sum to the peak."""
    rows = []
    for kind, value in found.by_category.items():
        share = value / found.peak_bytes if found.peak_bytes else None
        name = Cell(CATEGORY_NAMES.get(kind, kind), css=memory_chart.name_swatch(kind))
        rows.append(build_row(name, _build_size_cell(value), _format_peak_share(value, found), Cell("", share)))
    columns = (Column("used for", "words"), Column("bytes", "number"), Column("share", "number"), Column("as a bar", "bar"))
    return Table(columns, tuple(rows), "Peak memory, by what it was used for")


def build_moment_blocks(found: MemoryTimeline, point: int) -> tuple[Block, ...]:
    """Return what was in use at one point of the timeline, and which place holds most of each category."""
    held = memory_chart.list_held_places(found, point)
    total = sum(value for value, _ in held.values())
    rows = [
        build_row(
            Cell(CATEGORY_NAMES.get(kind, kind), css=memory_chart.name_swatch(kind)),
            _build_size_cell(value),
            format_share(value / total if total else None, 1),
            format_site(place),
        )
        for kind, (value, place) in held.items()
        if value
    ]
    columns = (Column("used for", "words"), Column("bytes", "number"), Column("share", "number"), Column("most of it by", "name"))
    title = f"{format_bytes(total)} in use at {format_ns(found.t_ns[point])}"
    return (Heading(title, "the peak" if point == found.peak else ""), Table(columns, tuple(rows), f"Memory, {title}"))


def build_place_tables(found: MemoryReport, top: int) -> list[Table]:
    """Return the lists by call site, module and op that have rows, each with the `top` of them."""
    tables = []
    for title, places in zip(PLACE_TITLES, (found.by_site, found.by_module, found.by_op), strict=True):
        rows = []
        for row in places[:top]:
            used = CATEGORY_NAMES.get(row.category, row.category).partition(":")[0].partition(",")[0]
            name = format_site(row.name) if title == "Call site" else row.name
            rows.append(build_row(name, used, _build_size_cell(row.bytes), _format_peak_share(row.bytes, found)))
        columns = (
            Column(title.lower(), "name"),
            Column("used for", below="", least=60),
            Column("bytes", "number"),
            Column("share", "number"),
        )
        if rows:
            tables.append(Table(columns, tuple(rows), f"Peak memory, by {title.lower()}", label=title, count=len(places)))
    return tables


def _build_size_cell(value: int) -> Cell:
    return Cell(format_bytes(value), value)


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
    return f"{capitalize(text)}." if text else ""


def list_memory_lines(found: MemoryReport) -> list[str]:
    """Return the sentences below the categories: the allocator, and the peak of the whole run where the recorded steps did not hold it."""
    lines = [format_allocator(found)]
    if found.run_peak_bytes is not None and found.run_peak_bytes > found.peak_bytes * (1 + ROUNDS_TO_ZERO):
        lines.append(f"The run needs more outside the recorded steps: {format_bytes(found.run_peak_bytes)}.")
    return [text for text in lines if text]


def build_memory_section(found: MemoryReport | None, amount: Amount) -> Section | None:
    """Return the peak by use and by place; None where no memory was recorded."""
    if found is None:
        return None
    shown: list[Block] = [Paragraph(format_memory_headline(found))]
    if amount.page and found.timeline is not None:
        figure = memory_chart.draw_memory_timeline(found.timeline, CATEGORY_NAMES)
        key = tuple((memory_chart.name_swatch(kind), CATEGORY_NAMES[kind].partition(":")[0]) for kind in found.timeline.by_category)
        shown.append(Chart(memory_chart.CHART, figure, memory_chart.CHART_LABEL, key))
        shown.append(Paragraph(memory_chart.explain_timeline(found.timeline), "quiet"))
    shown += [build_categories_table(found), *say_all(list_memory_lines(found))]
    if amount.page:
        shown += [
            Fold(f"By {table.label.lower()}", (table,), note=f"the largest {len(table.rows)} of {table.count:,}")
            for table in build_place_tables(found, _PLACES_LISTED)
        ]
        shown += [Heading("Allocator segments"), build_pools_table(found)] if found.pools else []
    elif found.by_site and amount.document:
        shown.append(build_place_tables(found, _SITES_LISTED)[0])
    elif found.by_site:
        rows = [[cell.text for cell in row.cells] for row in build_place_tables(found, _SITES_NAMED)[0].rows]
        where = "; ".join(f"{name} ({kind}) {size}" for name, kind, size, _ in rows)
        shown.append(Paragraph(f"Largest call sites: {where}. More: gpudiag memory PATH", "quiet"))
    if found.notes and amount.document:
        shown.append(Listing(found.notes))
    return build_section("Peak memory", shown, "memory-title", nav="Memory")


def build_memory_document(found: MemoryReport, top: int = 10) -> Document:
    """Return all that is known, with the `top` rows of each list."""
    shown: list[Block] = [build_categories_table(found), *say_all(list_memory_lines(found))]
    for table in build_place_tables(found, top):
        shown += [Heading(f"By {table.label.lower()}", f"{len(table.rows)} of {table.count}"), table]
    if found.pools:
        shown += [Heading("Allocator segments"), build_pools_table(found)]
    foot = (Listing(found.notes, "warning"),) if found.notes else ()
    return Document("gpudiag memory", "", leads=(Paragraph(format_memory_headline(found), "strong"), *shown), foot=foot)


def build_pools_table(found: MemoryReport) -> Table:
    """Return the segments of the allocator by size class and stream."""
    titles = ("stream", "segments", "reserved", "in use", "largest free")
    rows = []
    for pool in found.pools:
        sizes = map(format_bytes, (pool.reserved_bytes, pool.allocated_bytes, pool.largest_free_bytes))
        rows.append(build_row(pool.size_class, str(pool.stream), f"{pool.segments:,}", *sizes))
    columns = (Column("allocations"), *(Column(title, "number") for title in titles))
    return Table(columns, tuple(rows), "Allocator segments by size class and stream")


TRANSFORMER_CAVEAT = (
    "An upper model, computed from the sizes alone: attention scores written out (no flash attention), dropout everywhere, as many key as "
    "query heads, no temporary buffers, no fragmentation."
)
TRANSFORMER_SOURCE = (
    "Formula: calculator of the Ultra-Scale Playbook (nanotron), after Korthikanti et al. 2022, arXiv 2205.05198. It prints TiB as TB. A "
    "recording tells what is really used: gpudiag memory PATH."
)


def build_transformer_estimate(preset: str, model: Transformer, memory: Estimate) -> Document:
    """Return the sizes, the parts of the memory and what the figure is not."""
    total = f"{_format_tebibytes(memory.total_bytes)} ({format_bytes(memory.total_bytes)})"
    headline = f"About {total} on each device: {_format_tebibytes(memory.activations_bytes)} of activations."
    precision = "mixed precision" if model.mixed_precision else "fp32"
    recompute = f"{model.recompute} recomputation" if model.recompute != "none" else "no recomputation"
    split = f", tensor parallel {model.tensor_parallel}" if model.tensor_parallel > 1 else ""
    split += f", data parallel {model.data_parallel}" if model.data_parallel > 1 else ""
    split += f", ZeRO {model.zero_stage}" if model.zero_stage else ""
    sizes = (
        f"Preset {preset}: {model.layers} layers of {model.hidden} with {model.heads} heads, feed-forward {model.feed_forward} "
        f"({model.activation}), {model.batch} sequences of {model.sequence} tokens, vocabulary {format_count(model.vocab)}, {precision}, "
        f"{recompute}, {model.optimizer_bytes} bytes of optimizer state a parameter{split}; {format_count(memory.parameters)} parameters."
    )
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
    table = _build_parts_table([(name, size) for name, size in parts if size], memory.total_bytes)
    leads = (Paragraph(headline), Paragraph(sizes, "quiet"), Heading("Parts"), table)
    return Document("gpudiag memory", "", leads=leads, foot=(Paragraph(TRANSFORMER_CAVEAT), Paragraph(TRANSFORMER_SOURCE, "quiet")))


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


def build_model_estimate(found: ModelEstimate) -> Document:
    """Return the peak, what it is made of, the passes, the modules that keep most, and what the figure is not."""
    where = "a GPU" if found.device == "cuda" else "the CPU"
    peak = f"{_PASSES[found.peak_phase]}{f' ({found.peak_op})' if found.peak_op else ''}"
    blocks = f", in blocks of {found.block_bytes} B" if found.block_bytes > 1 else ""
    shown: list[Block] = [
        Paragraph(f"Training takes about {format_bytes(found.peak_bytes)} on {where}; the peak is in the {peak}."),
        Paragraph(_describe_model(found), "quiet"),
        Heading(f"Held at the peak{blocks}"),
        _build_parts_table([(_ESTIMATE_NAMES[name], size) for name, size in found.at_peak.items()], found.peak_bytes),
        Heading("Peak of each pass"),
        _build_parts_table([(_PASSES[part.phase], part.bytes) for part in found.phases], found.peak_bytes),
    ]
    if found.activations_bytes:
        parts = [
            (f"{row.module or 'outside the model: the loss'} ({row.tensors:,} {pluralize(row.tensors, 'tensor')})", row.bytes)
            for row in found.modules[:_MODULES]
        ]
        shown.append(Heading(f"Activations at the end of the forward pass: {format_bytes(found.activations_bytes)}"))
        shown.append(_build_parts_table(parts, found.activations_bytes))
    foot = (
        Listing(found.notes, "warning"),
        Paragraph(CUDA_CAVEAT if found.device == "cuda" else CPU_CAVEAT),
        Paragraph("A recording shows what is really used: gpudiag.profile(memory=True), then gpudiag memory PATH.", "quiet"),
    )
    return Document("gpudiag memory", "", leads=tuple(shown), foot=foot)


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
    optimizer = f"optimizer {found.optimizer}" if found.optimizer != "none" else "no optimizer"
    return f"{format_count(found.parameter_count)} parameters, {cast}, {optimizer}. {', '.join(states)}."


def _build_parts_table(parts: Sequence[tuple[str, int]], whole: int) -> Table:
    rows = [build_row(name, _build_size_cell(size), format_share(size / whole, 1)) for name, size in parts]
    return Table((Column("what", "words"), Column("bytes", "number"), Column("share", "number")), tuple(rows))
