"""`gpudiag memory`: what memory was used for when most of it was in use; with --estimate: before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gpudiag.cli import completion, options, terminal
from gpudiag.errors import UsageError
from gpudiag.report import files


def memory(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH",
            help="A bundle or trace with memory recorded, or a snapshot of the CUDA allocator (_dump_snapshot, .pickle). With --estimate: "
            "a preset (playbook, llama3-8b), or FILE.py:FUNCTION. FILE.py is executed; FUNCTION() returns (model, batch), or a dict "
            "of model, batch, loss, optimizer, autocast, and is run on tensors without data.",
            show_default=False,
            autocompletion=completion.complete_recording,
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="Call sites, modules and ops to list.")] = 10,
    rank: Annotated[int | None, options.RANK] = None,
    device: Annotated[
        int | None,
        typer.Option("--device", min=0, metavar="N", help="GPU to show (default: the one with most memory in use).", show_default=False),
    ] = None,
    estimated: Annotated[
        bool, typer.Option("--estimate", help="Estimate without a recording: a transformer from its sizes, or any model.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="With --estimate: a size, such as batch=8, hidden=4096, layers=32, mixed_precision=true, recompute=full; of a FILE.py "
            "optimizer=SGD, autocast=bf16, device=cpu, accumulate=true; may be repeated.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[Path | None, options.JSON_FILE] = None,
) -> None:
    """Show peak memory by use and call site; or estimate it before anything runs."""
    if estimated:
        if rank is not None or device is not None:
            raise UsageError("--rank and --device choose from a recording, --estimate has none", "leave them out")
        print_estimate(path, settings or [], json)
        return
    if path is None or settings:
        raise UsageError("--set goes with --estimate" if settings else "no PATH", "give a bundle, a trace or a snapshot, or --estimate")
    options.check_named("PATH", [path], "give a bundle, a trace or a snapshot")
    if json is not None:
        options.check_targets([json], path, (".json",))
    from gpudiag.memory_report import memory
    from gpudiag.report.memory import build_memory_document

    with terminal.show_progress("reading") as tell:
        found = memory(path, rank=rank, device=device, progress=tell)
    terminal.write_document(build_memory_document(found.memory, top))
    if json is not None:
        files.write_file(json, terminal.format_json(found).encode())
        terminal.write_note(f"wrote {json}")


def print_estimate(target: str | None, settings: Sequence[str], json: Path | None) -> None:
    """Print the estimate for `target`, a preset or FILE.py:FUNCTION, with `settings`, and write it to `json`.

    Raises UsageError for what does not exist.
    """
    if json is not None:
        options.check_targets([json], (target or "").partition(":")[0], (".json",))
    estimate: Any
    if target and ".py" in target:
        from gpudiag.memory_estimate import estimate_file
        from gpudiag.report.memory import build_model_estimate

        with terminal.show_progress("running two steps without data"):
            estimate = estimate_file(target, settings)
        document = build_model_estimate(estimate)
    else:
        from gpudiag.memory_estimate import DEFAULT_PRESET, estimate_transformer
        from gpudiag.report.memory import build_transformer_estimate

        estimate = estimate_transformer(target or DEFAULT_PRESET, settings)
        document = build_transformer_estimate(estimate.preset, estimate.model, estimate.memory)
    terminal.write_document(document)
    if json is not None:
        files.write_file(json, terminal.format_json(estimate).encode())
        terminal.write_note(f"wrote {json}")
