"""An estimate of a model's memory as text for a terminal."""

from __future__ import annotations

from gpudiag.model.estimate import ModelEstimate
from gpudiag.report.console import QUIET, cells, finished, heading, line, new_console, new_table
from gpudiag.report.escape import clean
from gpudiag.units import format_bytes, format_count, format_share

NAMES = {
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
SOURCE = "A recording tells what is really used: gpudiag.profile(memory=True), then gpudiag memory PATH."
_MODULES = 10


def render(found: ModelEstimate, *, width: int = 100, color: bool = False) -> str:
    """Return the peak, what it is made of, the passes, the modules that keep most, and what the figure is not."""
    console, sink = new_console(width, color)
    where = "a GPU" if found.device == "cuda" else "the CPU"
    line(console, f"Training takes about {format_bytes(found.peak_bytes)} on {where}; the peak is in the {_phase(found)}.")
    line(console, _given(found), QUIET)
    blocks = f", in blocks of {found.block_bytes} B" if found.block_bytes > 1 else ""
    heading(console, f"What is held at the peak{blocks}")
    _table(console, [(NAMES[name], size, size / found.peak_bytes) for name, size in found.at_peak.items()])
    heading(console, "Most in each pass")
    _table(console, [(_PASSES[part.phase], part.bytes, part.bytes / found.peak_bytes) for part in found.phases])
    if found.activations_bytes:
        heading(console, f"Activations at the end of the forward pass: {format_bytes(found.activations_bytes)}")
        rows = found.modules[:_MODULES]
        _table(console, [(_module(row.module, row.tensors), row.bytes, row.bytes / found.activations_bytes) for row in rows])
    line(console, "")
    for note in found.notes:
        line(console, f"! {note}", "yellow")
    line(console, CUDA_CAVEAT if found.device == "cuda" else CPU_CAVEAT)
    line(console, SOURCE, QUIET)
    return finished(sink)


_PASSES = {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer step"}


def _phase(found: ModelEstimate) -> str:
    return f"{_PASSES[found.peak_phase]} ({clean(found.peak_op, 80)})" if found.peak_op else _PASSES[found.peak_phase]


def _given(found: ModelEstimate) -> str:
    """Return the model and its states in one line."""
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


def _module(name: str, tensors: int) -> str:
    return f"{clean(name, 120) or 'outside the model: the loss'} ({tensors:,} tensor{'s' if tensors != 1 else ''})"


def _table(console: object, rows: list[tuple[str, int, float]]) -> None:
    table = new_table((("", "name"), ("", "right"), ("", "right")))
    for name, size, share in rows:
        table.add_row(*cells(name, format_bytes(size), format_share(share, 1)))
    console.print(table)  # type: ignore[attr-defined]
