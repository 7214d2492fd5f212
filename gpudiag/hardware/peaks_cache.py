"""Measured peaks kept between runs: one small JSON file per device, machine and torch version. Never fails: a cache is a convenience."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from gpudiag.files import replace_file
from gpudiag.model.bundle import Machine, Manifest
from gpudiag.model.decoding import UNREADABLE
from gpudiag.model.hardware import Device
from gpudiag.parsed import cache_folder

_MAX_BYTES = 1 << 20  # a real entry has about 2 kB


class _Entry(msgspec.Struct, frozen=True):
    version: Literal[2]
    """Raised when more is measured, so that old entries are measured anew."""
    key: str
    device: Device


def cache_key(machine: Machine, *, threads: int | None = None, gpu: str | None = None, driver: str | None = None) -> str:
    """Return the key of measured peaks: CPU model, threads, torch version and ISA; for a GPU its key or name, driver, torch version."""
    parts = ("gpu", gpu, driver, machine.torch) if gpu is not None else ("cpu", machine.cpu, threads, machine.torch, machine.isa)
    return " | ".join("" if part is None else str(part) for part in parts)


def peaks_key(manifest: Manifest) -> str:
    """Return the key under which measured peaks of the machine that recorded a bundle are kept."""
    gpu = (manifest.device.key or manifest.device.name) if manifest.device_kind == "gpu" and manifest.device else None
    return cache_key(manifest.machine, threads=manifest.settings.threads, gpu=gpu)


def cached_peaks(manifest: Manifest) -> Device | None:
    """Return peaks measured before for such a machine; None where there are none. Measures nothing."""
    return load_cached(peaks_key(manifest))


def load_cached(key: str) -> Device | None:
    """Return the device stored under `key`; None where there is none or it cannot be read."""
    path = _path(key)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            entry = msgspec.json.decode(file.read(_MAX_BYTES), type=_Entry)
    except (OSError, *UNREADABLE):
        return None
    return entry.device if entry.key == key and entry.device.provenance == "measured" else None


def measured_at(key: str) -> float | None:
    """Return when (Unix time in s) the peaks under `key` were stored; None where there are none."""
    path = _path(key)
    if path is None or load_cached(key) is None:
        return None
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return None


def store_cached(device: Device, key: str) -> str | None:
    """Store the device under `key`, atomically; return a warning where that is not possible, else None."""
    path = _path(key)
    if path is None:
        return "measured peaks are not kept: there is no home folder (set XDG_CACHE_HOME)"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(_Entry(2, key, device)))
    except OSError as error:
        return f"measured peaks are not kept: {path.parent}: {error.strerror or error}"
    return None


def peaks_folder() -> Path | None:
    """Return where measured peaks are kept (see parsed.cache_folder); None where there is no home folder."""
    folder = cache_folder()
    return None if folder is None else folder / "peaks"


def _path(key: str) -> Path | None:
    """Return the file of `key`; None where there is no home folder."""
    folder = peaks_folder()
    return None if folder is None else folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
