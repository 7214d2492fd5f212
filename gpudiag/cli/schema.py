"""`gpudiag schema`: the shape of what gpudiag writes, for scripts that read it."""

from __future__ import annotations

from importlib import import_module

import typer

from gpudiag.cli import terminal
from gpudiag.cli.command import PlainCommand, PlainGroup

schema_app = typer.Typer(cls=PlainGroup, help="Print the JSON Schema of what gpudiag writes.", no_args_is_help=True)

_WRITTEN = {
    "report": ("`gpudiag report PATH -o report.json` writes", "gpudiag.model.report:ReportData"),
    "whatif": ("`gpudiag whatif PATH --json out.json` writes", "gpudiag.api.queries:WhatIfs"),
    "memory": ("`gpudiag memory PATH --json out.json` writes", "gpudiag.api.memory:MemoryFound"),
    "experiments": ("`gpudiag ab --json out.json` writes", "gpudiag.model.experiment:ExperimentData"),
    "compare": ("`gpudiag compare A B --json` prints", "gpudiag.model.comparison:StepComparison"),
    "check": ("`gpudiag check PATH --json` prints", "gpudiag.model.comparison:CheckData"),
}
"""What is written, and its struct, which is loaded for its own command alone."""


def _add_command(name: str, what: str, place: str) -> None:
    def print_schema() -> None:
        import msgspec

        module, _, struct = place.partition(":")
        terminal.write_result(terminal.format_json(msgspec.json.schema(getattr(import_module(module), struct))))

    schema_app.command(name, cls=PlainCommand, help=f"Print the schema of what {what}.")(print_schema)


for _name, (_what, _place) in _WRITTEN.items():
    _add_command(_name, _what, _place)
