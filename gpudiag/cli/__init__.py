"""The command line, one file for each group of commands. Exit codes: 0 fine, 1 a gate failed, 2 bad input or usage, 3 internal error."""

from __future__ import annotations

import errno
import os
import traceback
from functools import partial
from typing import Annotated

import typer

from gpudiag.cli import ab, compare, dashboard, export, machine, memory, queries, report, run
from gpudiag.cli import rules as rule_commands
from gpudiag.cli.command import PlainCommand, PlainGroup
from gpudiag.cli.terminal import write_note
from gpudiag.errors import GpudiagError

DEBUG = "GPUDIAG_DEBUG"
"""Environment variable: 1 shows the traceback of an internal error."""

app = typer.Typer(
    name="gpudiag",
    cls=PlainGroup,
    help="Diagnose PyTorch training steps: where the time goes, what to change, what a change can gain, and how good the data is.",
    epilog="To start: gpudiag run train.py, gpudiag report trace.json.gz, or gpudiag demo. Options of a command: gpudiag COMMAND --help.",
    context_settings={"help_option_names": ["--help", "-h"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # `main` shows errors, in one line
    rich_markup_mode=None,  # plain help: importing rich's panels takes longer than the rest of --help
)
_command = partial(app.command, cls=PlainCommand)
_command("report")(report.report)
app.command("run", cls=run.ScriptCommand, context_settings=run.SCRIPT_SETTINGS)(run.run)
app.command("ab", cls=run.ScriptCommand, context_settings=run.SCRIPT_SETTINGS)(ab.ab)
_command("compare")(compare.compare)
_command("check")(compare.check)
_command("ops")(queries.ops)
_command("whatif")(queries.whatif)
_command("sql")(queries.sql)
_command("memory")(memory.memory)
_command("demo")(machine.demo)
_command("calibrate")(machine.calibrate)
_command("dashboard")(dashboard.dashboard)
_command("fixes")(ab.fixes)
_command("scrub")(export.scrub)
_command("doctor")(machine.doctor)
app.add_typer(rule_commands.rules_app, name="rules")
app.add_typer(export.schema_app, name="schema")
app.add_typer(export.export_app, name="export")


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
