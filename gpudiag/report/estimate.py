"""An estimate of memory as text for a terminal."""

from __future__ import annotations

from gpudiag.report.console import QUIET, cells, finished, heading, line, new_console, new_table
from gpudiag.roofline.transformer import Estimate, Transformer
from gpudiag.units import format_bytes, format_count, format_share

CAVEAT = (
    "An upper model, computed from the sizes alone: attention scores written out (no flash attention), dropout everywhere, as many key as "
    "query heads, no temporary buffers, no fragmentation."
)
SOURCE = (
    "Formula: calculator of the Ultra-Scale Playbook (nanotron), after Korthikanti et al. 2022, arXiv 2205.05198. It prints TiB as TB. A "
    "recording tells what is really used: gpudiag memory PATH."
)


def render(preset: str, model: Transformer, memory: Estimate, *, width: int = 100, color: bool = False) -> str:
    """Return the sizes, the parts of the memory and what the figure is not."""
    console, sink = new_console(width, color)
    total = f"{_tebi(memory.total_bytes)} ({format_bytes(memory.total_bytes)})"
    line(console, f"About {total} on each device: {_tebi(memory.activations_bytes)} of activations.")
    line(console, f"{_sizes(preset, model)}; {format_count(memory.parameters)} parameters.", QUIET)
    heading(console, "What it is made of")
    table = new_table([("what", "name"), ("bytes", "right"), ("share", "right")])
    for name, value in _parts(memory):
        table.add_row(*cells(name, format_bytes(value), format_share(value / memory.total_bytes, 1)))
    console.print(table)
    line(console, "")
    line(console, CAVEAT)
    line(console, SOURCE, QUIET)
    return finished(sink)


def _tebi(value: int) -> str:
    """Return bytes as memory is sold: in TiB from one up, else in GiB."""
    return f"{value / 2**40:.2f} TiB" if value >= 2**40 else f"{value / 2**30:.2f} GiB"


def _parts(memory: Estimate) -> list[tuple[str, int]]:
    found = [
        ("weights", memory.weights_bytes),
        ("gradients", memory.gradients_bytes),
        ("optimizer states", memory.optimizer_bytes),
        ("activations: attention", memory.attention_bytes),
        ("activations: feed-forward", memory.feed_forward_bytes),
        ("activations: norms", memory.norms_bytes),
        ("activations: inputs of the layers", memory.layer_inputs_bytes),
        ("activations: embedding, final norm, logits", memory.tail_bytes),
        ("sum", memory.total_bytes),
    ]
    return [(name, value) for name, value in found if value]


def _sizes(preset: str, model: Transformer) -> str:
    precision = "mixed precision" if model.mixed_precision else "fp32"
    recompute = f"{model.recompute} recomputation" if model.recompute != "none" else "no recomputation"
    split = [
        f"{name} {value}"
        for name, value in (("tensor parallel", model.tensor_parallel), ("data parallel", model.data_parallel), ("ZeRO", model.zero_stage))
        if value > 1 or (name == "ZeRO" and value)
    ]
    return (
        f"Preset {preset}: {model.layers} layers of {model.hidden} with {model.heads} heads, feed-forward {model.feed_forward} "
        f"({model.activation}), {model.batch} sequences of {model.sequence} tokens, vocabulary {format_count(model.vocab)}, {precision}, "
        f"{recompute}, {model.optimizer_bytes} bytes of optimizer state a parameter{''.join(', ' + part for part in split)}"
    )
