"""`gpudiag compare`: what changed from one recording to another; `gpudiag check`: a gate for continuous integration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpudiag.cli import completion, config, options, terminal
from gpudiag.cli.report import render_report
from gpudiag.errors import UsageError
from gpudiag.report import files

FAILED = 1
_TOP_TEXT, _TOP_MARKDOWN = 15, 30
_PATH_HELP = "A bundle, a trace, a folder of traces, or a report (.json): {}."


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=_PATH_HELP.format("the baseline"), autocompletion=completion.complete_recording)],
    b: Annotated[str, typer.Argument(metavar="B", help=_PATH_HELP.format("the changed run"), autocompletion=completion.complete_recording)],
    fail_if_slower: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Exit with 1 where the median step is slower by more than SHARE (3%, or 0.03) and the variance within the two runs "
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
    modules: Annotated[bool, typer.Option("--modules", help="Separate ops by nn.Module where Python stacks were recorded.")] = False,
    rank: Annotated[int | None, options.RANK] = None,
    no_config: Annotated[bool, options.NO_CONFIG] = False,
) -> None:
    """Compare two recordings: what became faster, slower, new or gone from A to B, beside its variance from step to step."""
    targets = output or []
    options.check_named("A or B", [a, b], "give two bundles, traces or reports")
    for source in (a, b):
        options.check_targets(targets, source)
    most = options.parse_share("--fail-if-slower", fail_if_slower, "write 3%, or 0.03") if fail_if_slower else None
    from gpudiag.comparison.recordings import compare

    chosen = None if no_config else config.find_config()
    with terminal.show_progress("reading") as tell:
        found = compare(a, b, rank=rank, modules=modules, fail_if_slower=most, config=chosen, progress=tell)
        for target in targets:
            tell(f"writing {target}")
            files.write_file(target, render_report(found, target, _TOP_MARKDOWN if top is None else top))
    listed = _TOP_TEXT if top is None else top
    shown = (
        found.json().decode() if as_json else found.text(width=terminal.measure_table_columns(), top=listed, color=terminal.is_coloured())
    )
    terminal.write_result(shown)
    for target in targets:
        terminal.write_note(f"wrote {target}")
    if found.data.gate is not None and found.data.gate.fails:
        raise typer.Exit(FAILED)


def check(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A bundle, a trace, a folder of traces, or a report (.json).",
            autocompletion=completion.complete_recording,
        ),
    ],
    budget: Annotated[
        str, typer.Option(metavar="FILE", help="Limits in TOML: one table per metric, and [findings].", show_default=False)
    ] = "",
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="A run to compare with; several of one program: a limit is broken where it is against each. Without --budget: the median "
            "step and peak memory may be 5% worse, and there may be no new finding of severity warning or above.",
            show_default=False,
            autocompletion=completion.complete_recording,
        ),
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Print for GitHub Actions: the text, then an annotation for each gate that did not pass.")
    ] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write JUnit XML to FILE (.xml).", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the text.")] = False,
    rank: Annotated[int | None, options.RANK] = None,
    no_config: Annotated[bool, options.NO_CONFIG] = False,
) -> None:
    """Check a run against limits or a baseline; exit with 1 where it breaks one by more than it varies, or a figure is unavailable."""
    sources = [path, *(baseline or ())]
    options.check_named("PATH", [path], "give a bundle, a trace or a report")
    if github and as_json:
        raise UsageError("--github and --json both print to the standard output", "leave one of them out")
    if junit is not None:
        for source in sources:
            options.check_targets([junit], source, (".xml",))
    from gpudiag.comparison.recordings import check

    chosen = None if no_config else config.find_config()
    with terminal.show_progress("reading") as tell:
        found = check(path, budget=budget or None, baseline=baseline, rank=rank, config=chosen, progress=tell)
    if junit is not None:
        files.write_file(junit, found.junit())
    width = terminal.measure_columns()
    if as_json:
        terminal.write_result(found.json().decode())
    else:
        terminal.write_result(found.github(width) if github else found.text(width=width, color=terminal.is_coloured()))
    if junit is not None:
        terminal.write_note(f"wrote {junit}")
    if not found.passed:
        raise typer.Exit(FAILED)
