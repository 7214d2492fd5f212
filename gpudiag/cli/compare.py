"""`gpudiag compare`: what changed from one recording to another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudiag.cli import config, options, outputs, terminal
from gpudiag.errors import UsageError
from gpudiag.report import files

if TYPE_CHECKING:
    from gpudiag.api.compare import Comparison

FAILED = 1
_TOP_TEXT, _TOP_MARKDOWN = 15, 30
_SHARE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)")
_WHAT = "A bundle, a trace, a folder of traces, or a report (.json): {}."


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=_WHAT.format("what was before"))],
    b: Annotated[str, typer.Argument(metavar="B", help=_WHAT.format("what came after"))],
    fail_if_slower: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Exit with 1 where the median step became slower by more than SHARE (3%, or 0.03) and the variance within the two runs "
            "does not explain it: the whole interval is beyond. Without an interval the medians decide.",
            show_default=False,
        ),
    ] = "",
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", help="Also write the comparison to FILE (.html, .md or .json); may be repeated.", metavar="FILE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the text.")] = False,
    top: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Ops to list in the terminal and in Markdown (default: 15 and 30).", show_default=False),
    ] = None,
    modules: Annotated[bool, typer.Option("--modules", help="Tell ops apart by nn.Module where Python stacks were recorded.")] = False,
    rank: Annotated[int | None, options.RANK] = None,
    no_config: Annotated[bool, options.NO_CONFIG] = False,
) -> None:
    """Say what became faster, slower, new and gone from A to B, next to how much each varies from step to step."""
    targets = output or []
    outputs.check_named("A or B", [a, b], "give two bundles, traces or reports")
    for source in (a, b):
        outputs.check_targets(targets, source)
    most = share("--fail-if-slower", fail_if_slower) if fail_if_slower else None
    from gpudiag.api.compare import compare as compared

    chosen = None if no_config else config.find()
    with terminal.progress("reading") as tell:
        found = compared(a, b, rank=rank, modules=modules, fail_if_slower=most, config=chosen, progress=tell)
        for target in targets:
            tell(f"writing {target}")
            files.write(target, _rendered(found, target, _TOP_MARKDOWN if top is None else top))
    listed = _TOP_TEXT if top is None else top
    shown = found.json().decode() if as_json else found.text(width=terminal.table_columns(), top=listed, color=terminal.coloured())
    terminal.out(shown)
    for target in targets:
        terminal.say(f"wrote {target}")
    if found.data.gate is not None and found.data.gate.fails:
        raise typer.Exit(FAILED)


def share(option: str, text: str) -> float:
    """Return 0.03 for '3%' or '0.03'. Raises UsageError for anything that is not between 0 and 1."""
    found = _SHARE.fullmatch(text.strip())
    value = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= value < 1:
        raise UsageError(f"{option} {text}: no share", "write 3%, or 0.03")
    return value


def _rendered(found: Comparison, target: Path, top: int) -> bytes:
    """Return the comparison in the format that the suffix of `target` names."""
    suffix = target.suffix.lower()
    if suffix == ".html":
        return found.html().encode()
    return found.markdown(top=top).encode() if suffix == ".md" else found.json()
