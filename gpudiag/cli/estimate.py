"""`gpudiag memory --estimate`: memory without a recording, from hyper-parameters or from a model without data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpudiag.cli import outputs, terminal
from gpudiag.report import files


def estimate(target: str | None, settings: Sequence[str], json: Path | None) -> None:
    """Print the estimate for `target`, a preset or FILE.py:FUNCTION, with `settings`, and write it to `json`.

    Raises UsageError for what does not exist.
    """
    if json is not None:
        outputs.check_targets([json], (target or "").partition(":")[0], (".json",))
    found, text = _of_file(target, settings) if target and ".py" in target else _of_preset(target, settings)
    terminal.out(text)
    if json is not None:
        import msgspec

        files.write(json, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        terminal.say(f"wrote {json}")


def _of_preset(preset: str | None, settings: Sequence[str]) -> tuple[Any, str]:
    from gpudiag.api.estimate import DEFAULT_PRESET, estimate_transformer
    from gpudiag.report.estimate import render

    found = estimate_transformer(preset or DEFAULT_PRESET, settings)
    return found, render(found.preset, found.model, found.memory, width=terminal.columns(), color=terminal.coloured())


def _of_file(target: str, settings: Sequence[str]) -> tuple[Any, str]:
    from gpudiag.api.model_memory import estimate_file
    from gpudiag.report.model_memory import render

    with terminal.progress("running two steps without data"):
        found = estimate_file(target, settings)
    return found, render(found, width=terminal.columns(), color=terminal.coloured())
