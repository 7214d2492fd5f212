"""Measured peaks kept between runs: one small JSON file per device, machine and torch version. Never fails: a cache is a convenience."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from gpudiag.document_cache import find_cache_folder
from gpudiag.files import replace_file
from gpudiag.model.bundle import UNREADABLE, Machine, Manifest
from gpudiag.model.hardware import Device

_MAX_BYTES = 1 << 20  # a real entry has about 2 kB


class _Entry(msgspec.Struct, frozen=True):
    version: Literal[5]
    """Raised when more is measured, so that old entries are measured anew."""
    key: str
    device: Device


def build_peaks_key(machine: Machine, *, threads: int | None = None, gpu: str | None = None, driver: str | None = None) -> str:
    """Build the key of measured peaks: CPU model, threads, torch version and ISA; for a GPU its key or name, driver, torch version."""
    parts = ("gpu", gpu, driver, machine.torch) if gpu is not None else ("cpu", machine.cpu, threads, machine.torch, machine.isa)
    return " | ".join("" if part is None else str(part) for part in parts)


def build_recording_peaks_key(manifest: Manifest) -> str:
    """Build the key under which measured peaks of the machine that recorded a bundle are kept."""
    gpu = (manifest.device.key or manifest.device.name) if manifest.device_kind == "gpu" and manifest.device else None
    return build_peaks_key(manifest.machine, threads=manifest.settings.threads, gpu=gpu)


def load_recording_peaks(manifest: Manifest) -> Device | None:
    """Return peaks measured before for such a machine; None where there are none. Measures nothing."""
    return load_peaks(build_recording_peaks_key(manifest))


def load_peaks(key: str) -> Device | None:
    """Load the device stored under `key`; None where there is none or it cannot be read."""
    path = _find_path(key)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            entry = msgspec.json.decode(file.read(_MAX_BYTES), type=_Entry)
    except (OSError, *UNREADABLE):
        return None
    return entry.device if entry.key == key and entry.device.provenance == "measured" else None


def find_measurement_time(key: str) -> float | None:
    """Return when (Unix time in s) the peaks under `key` were stored; None where there are none."""
    path = _find_path(key)
    if path is None or load_peaks(key) is None:
        return None
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return None


def store_peaks(device: Device, key: str) -> str | None:
    """Store the device under `key`, atomically; return a warning where that is not possible, else None."""
    path = _find_path(key)
    if path is None:
        return "measured peaks are not kept: there is no home folder (set XDG_CACHE_HOME)"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(_Entry(5, key, device)))
    except OSError as error:
        return f"measured peaks are not kept: {path.parent}: {error.strerror or error}"
    return None


def find_peaks_folder() -> Path | None:
    """Return where measured peaks are kept (see document_cache.find_cache_folder); None where there is no home folder."""
    folder = find_cache_folder()
    return None if folder is None else folder / "peaks"


def _find_path(key: str) -> Path | None:
    folder = find_peaks_folder()
    return None if folder is None else folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
