"""Checks of where things are written: recordings, measured peaks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from gpudiag.api.doctor.check import Check, idle, limited, missing, ok, unknown
from gpudiag.api.doctor.seen import Seen
from gpudiag.api.installed import version
from gpudiag.hardware.peaks_cache import cache_key, measured_at, peaks_folder
from gpudiag.model.bundle import Machine
from gpudiag.units import format_bytes

MIN_FREE_BYTES = 2 << 30
"""Recordings of a large model with stacks take some hundred MB each before they are compressed."""

NO_ROOM_BYTES = 128 << 20
"""Where less is free, no trace is written beside the training (capture.writer.RESERVE_BYTES)."""

OLD_DAYS = 180
_DAY_S = 86_400


def recordings(seen: Seen) -> Check:
    """Return whether recordings have room, in runs/ of this folder."""
    folder = next(path for path in (Path("runs"), Path()) if path.is_dir())
    found = seen.disk(folder)
    if not os.access(folder, os.W_OK):
        return missing(
            "place for recordings",
            f"{folder.resolve()} may not be written",
            "nothing can be recorded here",
            "cd to another folder, or give -o",
            "train",
        )
    if found is None:
        return unknown("place for recordings", f"{folder.resolve()}: the system does not tell how much is free")
    free = f"{format_bytes(found[1])} free in {folder.resolve()}"
    if found[1] < NO_ROOM_BYTES:
        return missing("place for recordings", free, "no trace is written", "make room, or give -o with another place", "train")
    if found[1] < MIN_FREE_BYTES:
        return limited("place for recordings", free, "recordings with stacks may end early", "make room, or give -o with another place")
    return ok("place for recordings", free)


def cache(_: Seen) -> Check:
    """Return whether measured peaks can be kept."""
    folder = peaks_folder()
    costs = "peaks are measured again with every recording, which takes seconds"
    if folder is None:
        return limited("cache", "there is no home folder", costs, "export XDG_CACHE_HOME to a folder that may be written")
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if there is None or not os.access(there, os.W_OK):
        return limited("cache", f"{folder} may not be written", costs, "export XDG_CACHE_HOME to a folder that may be written")
    return ok("cache", str(folder))


def calibration(seen: Seen) -> Check:
    """Return whether the peaks of this device were measured, and when."""
    if version("torch") is None:
        return idle("measured peaks", "torch is not installed")
    key = _key(seen)
    if key is None:
        return unknown("measured peaks", f"of which device they would be is not known: {seen.torch.why('machine')}")
    at = measured_at(key)
    if at is None:
        costs = "a CPU is measured after the first recording; rooflines of a GPU take the datasheet's peaks"
        return limited("measured peaks", "none of this device and torch", costs, "gpudiag calibrate (about a minute)")
    days = max(0, int((time.time() - at) // _DAY_S))
    ago = "today" if days == 0 else f"{days} day{'s' if days > 1 else ''} ago"
    told = f"of this device, measured {ago}"
    if days > OLD_DAYS:
        return limited("measured peaks", told, "driver and libraries may have changed since", "gpudiag calibrate")
    return ok("measured peaks", told)


def _key(seen: Seen) -> str | None:
    """Return under which key the peaks of the device in use are kept."""
    found = seen.torch.get("machine", "machine")
    if found is None:
        return None
    device = seen.torch.get("device", "device")
    gpu = None if device is None else device.get("key") or device.get("name")
    return cache_key(msgspec.convert(found, Machine), threads=seen.torch.get("versions", "threads"), gpu=gpu)
