"""`gpudiag report`: why the steps of a trace or bundle take as long as they do."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudiag.cli import completion, config, options, terminal
from gpudiag.errors import UsageError
from gpudiag.report import files

if TYPE_CHECKING:
    from gpudiag import api
    from gpudiag.comparison.recordings import Comparison
    from gpudiag.diagnosis.config import Config

_TOP_TEXT, _TOP_MARKDOWN = 10, 20


def report(
    path: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="A torch.profiler trace (.json, .json.gz, .json.zst), an SQLite export of Nsight Systems, or a bundle; or the ranks of a "
            "job: a folder, several traces, a quoted pattern ('run/*.json.gz'), or URLs of such (s3://bucket/run/).",
            autocompletion=completion.complete_recording,
        ),
    ],
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", help="Also write the report to FILE (.html, .md or .json); may be repeated.", metavar="FILE"),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Ops to list in the terminal and in Markdown (default: 10 and 20).", show_default=False),
    ] = None,
    rank: Annotated[str | None, options.RANK_OR_ALL] = None,
    window: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Window of a bundle (default: the first complete timing window).", show_default=False),
    ] = None,
    rules: Annotated[list[str] | None, options.RULES] = None,
    no_config: Annotated[bool, options.NO_CONFIG] = False,
    no_cache: Annotated[bool, options.NO_CACHE] = False,
    graph_capture: Annotated[str | None, options.GRAPH_CAPTURE] = None,
    gpu_hour_price: Annotated[float | None, options.GPU_HOUR_PRICE] = None,
    planned_steps: Annotated[int | None, options.PLANNED_STEPS] = None,
    all_findings: Annotated[
        bool, typer.Option("--all-findings", help="Show every finding in full, with its symptoms (default: the first three).")
    ] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Print one page, for people and for prompts: the first of everything, and what is not known.")
    ] = False,
    scheduler: Annotated[str | None, options.SCHEDULER] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow a bundle while it records: its pace, and a report after each window.")
    ] = False,
) -> None:
    """Report on a recording: where the time of a step goes, findings, what-ifs, data quality."""
    targets = output or []
    captures = [] if graph_capture is None else [graph_capture]
    number = options.parse_rank(rank)
    if brief and all_findings:
        raise UsageError("--brief is one page, and --all-findings is all", "leave one of them out")
    _check_request(path, targets, captures, rules or [], scheduler)
    chosen = _choose_config(no_config, no_cache)
    if watch:
        options.check_watch(path, rank, scheduler)

    def tell_all(number: int | None = number) -> None:
        with terminal.show_progress("reading") as tell, return_free_memory():
            from gpudiag import api  # polars is loaded here
            from gpudiag.recordings.recorded_command import read_recorded_script

            found = api.diagnose(
                path[0] if len(path) == 1 else path, rank=number, window=window, rules_dirs=rules or [], config=chosen,
                graph_capture=graph_capture, progress=tell, gpu_hour_price=gpu_hour_price, planned_steps=planned_steps, scheduler=scheduler,
            )  # fmt: skip
            for target in targets:
                tell(f"writing {target}")
                files.write_file(target, render_report(found, target, _TOP_MARKDOWN if top is None else top))
        most = _TOP_TEXT if top is None else top
        width, coloured, script = terminal.measure_table_columns(), terminal.is_coloured(), read_recorded_script(path)
        if brief:
            terminal.write_result(found.brief(width=width, color=coloured, script=script))
        else:
            terminal.write_result(found.text(width=width, top=most, color=coloured, everything=all_findings, script=script))
        for target in targets:
            terminal.write_note(f"wrote {target}")

    if watch:
        from gpudiag.cli.watch import watch_run
        from gpudiag.recordings.live import Watch

        watched = Watch(path[0], number)  # one rank: to read the others would slow the training down
        watch_run(watched.look, lambda: tell_all(watched.rank))
    else:
        tell_all()


def _check_request(path: list[str], targets: list[Path], captures: list[str], rules: list[str], scheduler: str | None) -> None:
    """Raise UsageError for names that are empty, and for a target that is one of the recordings."""
    options.check_named("PATH", path, "give a trace, a bundle, or a folder of ranks")
    options.check_named("--scheduler", [] if scheduler is None else [scheduler], "give tcp://host:port, or a scheduler file")
    options.check_named("--rules", rules, "give a folder of rule files")
    options.check_captures(captures)
    matched = [found for one in path if glob.has_magic(one) and "://" not in one for found in glob.glob(one, recursive=True)]
    for source in (*path, *matched, *captures):
        options.check_targets(targets, source)


def _choose_config(no_config: bool, no_cache: bool) -> Config | None:
    chosen = None if no_config else config.find_config()
    if not no_cache:
        return chosen
    import msgspec

    from gpudiag.diagnosis.config import Config

    return msgspec.structs.replace(chosen or Config(), cache=False)


def render_report(found: api.Report | Comparison, target: Path, top: int) -> bytes:
    """Render a report or a comparison in the format that the suffix of `target` names."""
    suffix = target.suffix.lower()
    if suffix == ".html":
        return found.html().encode()
    return found.markdown(top=top).encode() if suffix == ".md" else found.json()


POLARS_ALLOCATOR = "_RJEM_MALLOC_CONF"
"""Where the allocator in polars (jemalloc) looks for options, once, when polars is loaded."""

RETURN_AT_ONCE = "dirty_decay_ms:0,muzzy_decay_ms:0"
"""Free pages go back now and not within ten seconds, in which the next stages have taken pages of their own."""


@contextmanager
def return_free_memory() -> Iterator[None]:
    """Have polars give free memory back at once where it is loaded inside, in this process or in one that is started there.

    What the user has set for its allocator stays. Not around what trains: a training that uses polars has other needs.
    """
    if "polars" in sys.modules or POLARS_ALLOCATOR in os.environ:
        yield
        return
    os.environ[POLARS_ALLOCATOR] = RETURN_AT_ONCE
    try:
        yield
    finally:
        os.environ.pop(POLARS_ALLOCATOR, None)
