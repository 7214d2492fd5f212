"""`gpudiag check`: a gate for continuous integration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudiag.cli import config, options, outputs, terminal
from gpudiag.errors import UsageError
from gpudiag.report import files

if TYPE_CHECKING:
    from gpudiag.api.check import CheckResult

FAILED = 1


def check(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A bundle, a trace, a folder of traces, or a report (.json).")],
    budget: Annotated[
        str, typer.Option(metavar="FILE", help="Limits, in TOML: one table a metric, and [findings].", show_default=False)
    ] = "",
    baseline: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="A run to compare with. Without --budget: the median step and the peak of memory may be 5% worse, and nothing of "
            "severity warning or above may be found that was not found there.",
            show_default=False,
        ),
    ] = "",
    github: Annotated[
        bool, typer.Option("--github", help="Print for GitHub Actions: the text, then an annotation for each gate that did not pass.")
    ] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write JUnit XML to FILE (.xml).", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the text.")] = False,
    rank: Annotated[int | None, options.RANK] = None,
    no_config: Annotated[bool, options.NO_CONFIG] = False,
) -> None:
    """Exit with 1 where a run breaks a limit by more than it varies, or a required figure is not known."""
    sources = [path, *([baseline] if baseline else [])]
    outputs.check_named("PATH", [path], "give a bundle, a trace or a report")
    if github and as_json:
        raise UsageError("--github and --json both print to the standard output", "leave one of them out")
    if junit is not None:
        for source in sources:
            outputs.check_targets([junit], source, (".xml",))
    from gpudiag.api.check import check as checked

    chosen = None if no_config else config.find()
    with terminal.progress("reading") as tell:
        found = checked(path, budget=budget or None, baseline=baseline or None, rank=rank, config=chosen, progress=tell)
    if junit is not None:
        files.write(junit, found.junit())
    terminal.out(_shown(found, as_json=as_json, github=github))
    if junit is not None:
        terminal.say(f"wrote {junit}")
    if not found.passed:
        raise typer.Exit(FAILED)


def _shown(found: CheckResult, *, as_json: bool, github: bool) -> str:
    if as_json:
        return found.json().decode()
    width = terminal.columns()
    return found.github(width) if github else found.text(width=width, color=terminal.coloured())
