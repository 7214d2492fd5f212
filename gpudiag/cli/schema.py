"""`gpudiag schema`: the shape of what gpudiag writes, for scripts that read it."""

from __future__ import annotations

from functools import partial
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


def _print_schema(place: str) -> None:
    import msgspec

    module, _, name = place.partition(":")
    terminal.write_result(terminal.format_json(msgspec.json.schema(getattr(import_module(module), name))))


for _name, (_what, _place) in _WRITTEN.items():
    schema_app.command(_name, cls=PlainCommand, help=f"Print the schema of what {_what}.")(partial(_print_schema, _place))
