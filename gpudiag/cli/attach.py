"""`gpudiag attach`: record some steps of a training that runs already, then report on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpudiag.cli import options, run, terminal

if TYPE_CHECKING:
    from gpudiag.capture.run_script.plan import OptionValue


def attach(
    pid: Annotated[int, typer.Argument(min=1, metavar="PID", help="Number of the training process.", show_default=False)],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="BUNDLE", help="Folder for the recording (default: runs/<time>).", show_default=False)
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to profile; all times come from these.")] = 6,
    warm: Annotated[int, options.WARM] = 2,
    sites: Annotated[int, options.SITES] = 2,
    wait: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Give up after this time; what is recorded by then is kept.")] = 600,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Report on the recording.")] = True,
    rules: Annotated[list[str] | None, options.RULES] = None,
    no_config: Annotated[bool, options.NO_CONFIG] = False,
) -> None:
    """Record some steps of a training that runs and called gpudiag.listen(), and report where the time of a step goes.

    The training goes on as before, without a word: it computes the same.
    """
    from gpudiag import attach as attaching

    # Plain steps before and after: the report compares the profiled ones with them
    asked: dict[str, OptionValue] = {"skip": 10, "warm": warm, "record": steps, "sites": sites}
    with terminal.show_progress("attaching") as progress:
        ran = attaching.attach(pid, output, asked, wait_s=wait, tell=progress)
    if ran.bundle is None:
        terminal.write_note(f"gpudiag: {attaching.explain_nothing_recorded(ran, pid)}")
        raise typer.Exit(130 if ran.interrupted else 2)
    terminal.write_note(f"gpudiag: process {pid} goes on unrecorded")
    run.report_outcome(ran, report=report, rules=rules or [], no_config=no_config, ended="the steps are recorded", measure=False)
