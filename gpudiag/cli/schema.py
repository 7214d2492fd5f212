"""`gpudiag schema`: the shape of what gpudiag writes, for scripts that read it."""

from __future__ import annotations

import typer

from gpudiag.cli import terminal

app = typer.Typer(help="Print the JSON Schema of what gpudiag writes.", no_args_is_help=True)


@app.command("report")
def report_schema() -> None:
    """Print the schema of what `gpudiag report PATH -o report.json` writes."""
    import msgspec

    from gpudiag import api

    terminal.out(msgspec.json.format(msgspec.json.encode(api.report_schema()), indent=2).decode() + "\n")


@app.callback()
def _schema() -> None:
    """Print the JSON Schema of what gpudiag writes."""
