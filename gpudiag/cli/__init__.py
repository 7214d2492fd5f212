"""The command line, one file for each group of commands. Exit codes: 0 fine, 1 a gate failed, 2 bad input or usage, 3 internal error."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from gpudiag.cli import ab, agents, apply, attach, compare, dashboard, export, machine, memory, queries, report, run
from gpudiag.cli import rules as rule_commands
from gpudiag.cli.command import PlainCommand, StartGroup
from gpudiag.cli.terminal import write_note
from gpudiag.errors import GpudiagError

DEBUG = "GPUDIAG_DEBUG"
"""Environment variable: 1 shows the traceback of an internal error."""

app = typer.Typer(
    name="gpudiag",
    cls=StartGroup,
    help="Diagnose PyTorch training steps: where the time goes, what to change, what a change can gain, and how good the data is.",
    epilog="To start: gpudiag run train.py, gpudiag report trace.json.gz, or gpudiag demo. Options of a command: gpudiag COMMAND --help.",
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,  # `main` shows errors, in one line
    rich_markup_mode=None,  # plain help: importing rich's panels takes longer than the rest of --help
)
LOOK, RECORD, PROVE, GATE, MANAGE = "Look at recordings", "Record", "Prove a change", "Hold a limit", "Manage"
AGENTS = "For coding agents"


def _add(name: str, action: Callable[..., Any], group: str, said: str, **settings: Any) -> None:
    app.command(name, rich_help_panel=group, short_help=said, **{"cls": PlainCommand, **settings})(action)


_SCRIPT: dict[str, Any] = {"cls": run.ScriptCommand, "context_settings": run.SCRIPT_SETTINGS}
_add("report", report.report, LOOK, "Say where the time of a step goes and what to change")
_add("ops", queries.ops, LOOK, "List ops by time, with their work and % of roofline")
_add("whatif", queries.whatif, LOOK, "Estimate the step time with a cost changed or gone")
_add("memory", memory.memory, LOOK, "Show what memory is used for, or estimate it beforehand")
_add("compare", compare.compare, LOOK, "Show what changed between two recordings")
_add("sql", queries.sql, LOOK, "Query the tables of a recording")
_add("dashboard", dashboard.dashboard, LOOK, "Serve recordings to a browser")
_add("run", run.run, RECORD, "Run a training script unchanged, record it and report", **_SCRIPT)
_add("attach", attach.attach, RECORD, "Record some steps of a training that runs already")
_add("demo", machine.demo, RECORD, "Train a small transformer for a few seconds and report on it")
_add("calibrate", machine.calibrate, RECORD, "Measure the peak rates of this device for later reports")
_add("ab", ab.ab, PROVE, "Measure which fixes make a script faster and train the same", **_SCRIPT)
_add("apply", apply.apply, PROVE, "Make a proved change in the source of a script")
_add("fixes", ab.fixes, PROVE, "List the fixes that can be tried, or show one")
_add("check", compare.check, GATE, "Check a run against limits or a baseline")
_add("mcp", agents.mcp, AGENTS, "Serve recordings to a coding agent (Model Context Protocol)")
_add("skill", agents.skill, AGENTS, "Print how an agent asks gpudiag and reads its answers")
_add("doctor", machine.doctor, MANAGE, "Check the installation: what is missing and how to fix it")
_add("scrub", export.scrub, MANAGE, "Write a copy of a recording that is safe to share")
app.add_typer(rule_commands.rules_app, name="rules", rich_help_panel=MANAGE, short_help="List, show, check and test the rules")
app.add_typer(export.export_app, name="export", rich_help_panel=MANAGE, short_help="Export a recording and its analysis for other tools")
app.add_typer(export.schema_app, name="schema", rich_help_panel=MANAGE, short_help="Print the JSON Schema of what gpudiag writes")


def main() -> int:
    """Run the command of sys.argv and return its exit code. Every failure is one line on stderr."""
    try:
        app(prog_name="gpudiag")
    except SystemExit as stop:  # typer handles usage errors (2) and Ctrl-C (130) itself
        return stop.code if isinstance(stop.code, int) else 0
    except GpudiagError as error:
        write_note(f"gpudiag: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT
    except Exception as error:  # noqa: BLE001 the last resort: a person at a terminal gets a line, not a stack
        # Say what happened and return the exit code: 2 for a full disk behind a standard stream or a folder that is gone, else 3
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            write_note(f"gpudiag: cannot write: {error.strerror} (write to another place)")
            return 2
        if isinstance(error, FileNotFoundError):
            try:
                os.getcwd()
            except FileNotFoundError:
                write_note("gpudiag: the current folder does not exist any more (change to another one: cd)")
                return 2
        if os.environ.get(DEBUG):
            traceback.print_exc()
        else:
            line = f"gpudiag: internal error: {type(error).__name__}: {error}"
            write_note(f"{line} (this is a bug; run again with {DEBUG}=1 to see where, and report it with that text)")
        return 3
    return 0


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"gpudiag {version('gpudiag')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Diagnose PyTorch training steps: where the time goes, what to change, what a change can gain, and how good the data is."""
