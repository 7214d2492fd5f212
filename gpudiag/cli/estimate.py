"""`gpudiag memory --estimate`: memory from hyper-parameters, without a recording."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpudiag.cli import outputs, terminal
from gpudiag.report import files


def estimate(preset: str | None, settings: Sequence[str], json: Path | None) -> None:
    """Print the estimate for `preset` with `settings`, and write it to `json`. Raises UsageError for what does not exist."""
    if json is not None:
        outputs.check_targets([json], "", (".json",))
    from gpudiag.api.estimate import DEFAULT_PRESET, estimate_transformer
    from gpudiag.report.estimate import render

    found = estimate_transformer(preset or DEFAULT_PRESET, settings)
    terminal.out(render(found.preset, found.model, found.memory, width=terminal.columns(), color=terminal.coloured()))
    if json is not None:
        import msgspec

        files.write(json, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        terminal.say(f"wrote {json}")
