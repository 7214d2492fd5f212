"""`gpudiag doctor`: what is installed, what is missing, what that costs, and how to mend it."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from gpudiag.cli import terminal

_SHOWN = ("name", "status", "found", "costs", "fix")


class Need(str, Enum):
    """What has to work."""

    train = "train"
    gpu = "gpu"
    compile = "compile"
    telemetry = "telemetry"
    dashboard = "dashboard"
    cluster = "cluster"


def doctor(
    need: Annotated[
        list[Need] | None,
        typer.Option(help="Fail (exit code 1) where this does not work; may be given several times.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what is installed, what is missing, what that costs, and how to mend it; exit code 1 where what is installed does not work."""
    from gpudiag.api.doctor import examine

    with terminal.progress("looking"):
        found = examine([one.value for one in need or ()])
    if as_json:
        import msgspec

        terminal.out(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        from gpudiag.report.doctor import doctor_text

        checks = [{key: getattr(check, key) for key in _SHOWN} for check in found.checks]
        terminal.out(doctor_text(found.verdict, checks, terminal.columns()))
    if found.failed:
        raise typer.Exit(1)
