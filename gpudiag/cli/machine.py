"""Commands about this machine: `gpudiag doctor`, `gpudiag calibrate`, `gpudiag demo`."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpudiag.cli import config, options, terminal
from gpudiag.units import format_bytes, format_ns, format_rate


class Need(str, Enum):
    """What has to work."""

    train = "train"
    gpu = "gpu"
    compile = "compile"
    telemetry = "telemetry"
    dashboard = "dashboard"
    mcp = "mcp"
    cluster = "cluster"


def doctor(
    need: Annotated[
        list[Need] | None,
        typer.Option(help="Exit with 1 where this does not work; may be repeated.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the installation: what works, what is missing, what that costs, how to fix it; exit with 1 where something does not work."""
    from gpudiag.doctor.checks import examine

    with terminal.show_progress("looking"):
        found = examine([one.value for one in need or ()])
    if as_json:
        terminal.write_result(terminal.format_json(found))
    else:
        from gpudiag.report.checks import format_doctor

        checks = [{key: getattr(check, key) for key in ("name", "status", "found", "costs", "fix")} for check in found.checks]
        terminal.write_result(format_doctor(found.verdict, checks, terminal.measure_columns()))
    if found.failed:
        raise typer.Exit(1)


def calibrate(
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device to measure (auto: the GPU if there is one).")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the peak rates and memory bandwidth of this device and cache them for later reports."""
    from gpudiag import api

    with terminal.show_progress("measuring the peaks"):
        measured = api.calibrate(device)
    if as_json:
        terminal.write_result(terminal.format_json(measured))
        return
    rows = [
        ("device", measured.name),
        *((f"{engine} peak", format_rate(rate, "FLOP")) for engine, rate in measured.peaks.items()),
        ("memory bandwidth", format_rate(measured.bandwidth_byte_per_s, "B")),
        ("last-level cache", format_bytes(measured.cache_bytes)),
        ("cache bandwidth", format_rate(measured.cache_bandwidth_byte_per_s, "B")),
        ("launch floor", format_ns(measured.launch_floor_ns)),
        ("source", f"{measured.provenance}: {measured.source}"),
        *(("note", note) for note in measured.notes),
    ]
    width = max(len(title) for title, _ in rows)
    terminal.write_result("".join(f"{title:<{width}}  {value}\n" for title, value in rows))


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the recording and its HTML report.", metavar="DIR")] = Path(
        "runs/demo"
    ),
    rules: Annotated[list[str] | None, options.RULES] = None,
    no_config: Annotated[bool, options.NO_CONFIG] = False,
) -> None:
    """Train a small transformer for a few seconds, record it, and report on it."""
    # KINETO_LOG_LEVEL above its last kind of message (5, USDT): nothing of the profiler's own log reaches the terminal
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read once, when torch is imported
    from gpudiag import api

    chosen = None if no_config else config.find_config()
    with terminal.show_progress("training") as tell:
        made = api.demo(str(output), tell, rules_dirs=rules or [], config=chosen)
    terminal.write_result(made.report.text(width=terminal.measure_columns(), top=10, color=terminal.is_coloured()))
    terminal.write_note(f"The recording is {made.bundle}; the report as a page is {made.html}")
