"""`gpudiag calibrate`: measured peak rates of this machine's device."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from gpudiag.cli import terminal
from gpudiag.units import format_bytes, format_ns, format_rate

if TYPE_CHECKING:
    from gpudiag.model.hardware import Device


class DeviceName(str, Enum):
    """A device that torch can compute on; auto: the GPU where there is one, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def calibrate(
    device: Annotated[DeviceName, typer.Option(help="Which device to measure (auto: the GPU where there is one).")] = DeviceName.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the peak rates and memory bandwidth of this device and keep them for later reports."""
    from gpudiag import api

    with terminal.progress("measuring the peaks"):
        measured = api.calibrate(device.value)
    terminal.out(_json(measured) if as_json else _text(measured))


def _json(device: Device) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(device), indent=2).decode() + "\n"


def _text(device: Device) -> str:
    """Return the figures, one a line; what is not known is said."""
    rows = [
        ("device", device.name),
        *((f"{engine} peak", format_rate(rate, "FLOP")) for engine, rate in device.peaks.items()),
        ("memory bandwidth", format_rate(device.bandwidth_byte_per_s, "B")),
        ("last-level cache", format_bytes(device.cache_bytes)),
        ("cache bandwidth", format_rate(device.cache_bandwidth_byte_per_s, "B")),
        ("launch floor", format_ns(device.launch_floor_ns)),
        ("source", f"{device.provenance}: {device.source}"),
        *(("note", note) for note in device.notes),
    ]
    width = max(len(title) for title, _ in rows)
    return "".join(f"{title:<{width}}  {value}\n" for title, value in rows)
