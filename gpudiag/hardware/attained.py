"""What devices reach of their published rates: a few constants with their origin (attained.yaml), and the device that a user names."""

from __future__ import annotations

import functools
import importlib.resources
from typing import Literal, NamedTuple

import msgspec

from gpudiag.document_cache import load_document
from gpudiag.errors import InputError, suggest_nearest
from gpudiag.hardware.device_peaks import VECTOR_PEAKS, build_device, choose_best, resolve_device
from gpudiag.hardware.device_table import Row, cut_text, load_table, parse_device_name
from gpudiag.model.hardware import Device, ObservedDevice


class Attained(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of attained.yaml."""

    version: Literal[1]
    floor_clocks: dict[str, float]
    """By maker."""
    knee_exponent: float
    dram_share: dict[str, float]
    gddr_server: tuple[str, ...]
    """Rows of the device table."""
    fp32_picojoule_per_flop: float
    fp32_picojoule_of: tuple[str, ...]
    """Compute capabilities."""
    matrix_share: dict[str, float]
    """By maker."""


@functools.cache
def load_attained() -> Attained:
    """Load the constants (read and checked once per process)."""
    text = importlib.resources.files("gpudiag.hardware").joinpath("attained.yaml").read_bytes()
    found: Attained = msgspec.convert(load_document("attained", [text], lambda: msgspec.yaml.decode(text)), type=Attained)
    return found


def estimate_dram_share(device: Device) -> float:
    """Return the share, 0..1, of the device's bandwidth that streaming kernels reach; 1 where the bandwidth was measured."""
    if device.provenance == "measured":
        return 1.0
    known = load_attained()
    return known.dram_share["gddr_server" if device.id in known.gddr_server else "hbm"]


def estimate_product_share(device: Device, engine: str) -> float:
    """Return the share, 0..1, of the peak of `engine` that the best lasting products reach; 1 where the peak was measured.

    fp32 on vector units: what the power of the board allows, 1 where the energy of a FLOP is not known. Matrix units: what the device
    table says of the row, else of devices of that maker.
    """
    known, row, peak = load_attained(), find_row(device), device.peaks.get(engine)
    if device.provenance == "measured" or not peak:
        return 1.0
    if engine in VECTOR_PEAKS:
        tdp_w = row.chip.tdp_w if row and row.chip.compute_capability in known.fp32_picojoule_of else None
        return min(1.0, tdp_w / (peak * known.fp32_picojoule_per_flop * 1e-12)) if tdp_w and engine == "fp32" else 1.0
    return min(1.0, device.attained.get(engine, known.matrix_share.get(device.vendor, 1.0) * peak) / peak)


def estimate_floor_ns(device: Device) -> float:
    """Return the shortest useful time of a kernel in ns."""
    clocks = load_attained().floor_clocks
    return clocks.get(device.vendor, clocks["nvidia"]) / (device.boost_clock_mhz or _USUAL_MHZ) * 1e3


_USUAL_MHZ = 1410.0


def find_row(device: Device) -> Row | None:
    """Return the row of the device table that `device` was made of; None where it is none."""
    return next((row for row in load_table().devices if row.id == device.id), None)


def list_device_names() -> list[tuple[str, str]]:
    """List what `find_named_device` takes for sure: the id and the name of each row of the device table."""
    return [(row.id, row.name) for row in load_table().devices]


class NamedDevice(NamedTuple):
    """The device that a name means, and the ids of other boards of its product line where the name does not tell them apart."""

    device: Device
    others: tuple[str, ...] = ()


def find_named_device(text: str) -> NamedDevice:
    """Return the device that a person means by `text`: the id of a row ('h200-sxm'), a name as torch prints it, or a product line ('A100').

    Of a product line the board that is known best, of those the one with the highest peak and bandwidth. Raises InputError for a name that
    is in no row.
    """
    table, wanted = load_table(), " ".join(text.lower().split())
    exact = [row for row in table.devices if wanted in (row.id, row.name.lower(), *(name.lower() for name in row.names))]
    line = [
        row for row in table.devices if row.family.lower() == wanted.removeprefix("nvidia ").removeprefix("amd ").removeprefix("instinct ")
    ]
    if exact and (len(line) < 2 or wanted == exact[0].id):
        return NamedDevice(build_device(exact[0], table))
    if line:
        best, others = choose_best(line)
        return NamedDevice(build_device(best, table), tuple(row.id for row in others))
    found = None if parse_device_name(text).anonymous else resolve_device(ObservedDevice(name=text)).device
    if found is None:
        known = {row.id: row.id for row in table.devices} | {row.family.lower(): row.family for row in table.devices}
        shown = cut_text(text)
        hint = "name a product line (H200), a name as torch prints it, or an id such as a100-pcie-80gb, which shells complete"
        raise InputError(f"{shown!r} is not in the device table{suggest_nearest(shown, known.values())}", hint)
    return NamedDevice(found)
