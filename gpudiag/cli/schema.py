"""`gpudiag schema`: the shape of what gpudiag writes, for scripts that read it."""

from __future__ import annotations

from functools import partial

import typer

from gpudiag.cli import terminal
from gpudiag.cli.command import PlainCommand, PlainGroup

schema_app = typer.Typer(cls=PlainGroup, help="Print the JSON Schema of what gpudiag writes.", no_args_is_help=True)
_command = partial(schema_app.command, cls=PlainCommand)


@_command("report")
def report_schema() -> None:
    """Print the schema of what `gpudiag report PATH -o report.json` writes."""
    from gpudiag import api

    terminal.write_result(terminal.format_json(api.report_schema()))


@_command("whatif")
def whatif_schema() -> None:
    """Print the schema of what `gpudiag whatif PATH --json out.json` writes."""
    from gpudiag.api.queries import build_whatif_schema

    terminal.write_result(terminal.format_json(build_whatif_schema()))


@_command("memory")
def memory_schema() -> None:
    """Print the schema of what `gpudiag memory PATH --json out.json` writes."""
    from gpudiag.api.memory import build_memory_schema

    terminal.write_result(terminal.format_json(build_memory_schema()))


@_command("experiments")
def experiments_schema() -> None:
    """Print the schema of what `gpudiag ab --json out.json` writes."""
    import msgspec

    from gpudiag.model.experiment import ExperimentData

    terminal.write_result(terminal.format_json(msgspec.json.schema(ExperimentData)))


@_command("compare")
def compare_schema() -> None:
    """Print the schema of what `gpudiag compare A B --json` prints."""
    import msgspec

    from gpudiag.model.comparison import StepComparison

    terminal.write_result(terminal.format_json(msgspec.json.schema(StepComparison)))


@_command("check")
def check_schema() -> None:
    """Print the schema of what `gpudiag check PATH --json` prints."""
    import msgspec

    from gpudiag.model.comparison import CheckData

    terminal.write_result(terminal.format_json(msgspec.json.schema(CheckData)))


@schema_app.callback()
def _schema() -> None:
    """Print the JSON Schema of what gpudiag writes."""
