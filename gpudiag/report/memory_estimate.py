"""Estimates of a model's memory for a terminal: from sizes alone, and from two steps without data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudiag.model.memory import ModelEstimate
from gpudiag.report.console import QUIET, clean, collect_text, create_console, create_table, format_cells, print_heading, print_line
from gpudiag.roofline.transformer import Estimate, Transformer
from gpudiag.units import format_bytes, format_count, format_share

if TYPE_CHECKING:
    from rich.console import Console

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


CATEGORY_NAMES = {
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
RECORDING_HINT = "A recording shows what is really used: gpudiag.profile(memory=True), then gpudiag memory PATH."
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
    _print_parts(console, [(CATEGORY_NAMES[name], size, size / found.peak_bytes) for name, size in found.at_peak.items()])
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
    print_line(console, RECORDING_HINT, QUIET)
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
