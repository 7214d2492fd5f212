"""The version of the NVIDIA driver. NVML starts in the thread that asks: not for the training thread."""

from __future__ import annotations

import re

_VERSION = re.compile(r"\d{1,5}(\.\d{1,5}){0,3}")


def driver_version() -> str | None:
    """Return the driver's version (nvmlSystemGetDriverVersion), such as '570.86.15'; None where NVML is not there or does not answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        found = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()  # NVML counts: whoever else has started it keeps it
    text = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
    return text if _VERSION.fullmatch(text) else None
