"""The version of the NVIDIA driver. NVML starts in the thread that asks: not for the training thread."""

from __future__ import annotations

import os
import re
import sys
import threading
from typing import Any

_prepared = False

_VERSION = re.compile(r"\d{1,5}(\.\d{1,5}){0,3}")


def driver_version() -> str | None:
    """Return the driver's version (nvmlSystemGetDriverVersion), such as '570.86.15'; None where NVML is not there or does not answer."""
    pynvml: Any = sys.modules.get("pynvml")  # torch.cuda imports it; an import in a thread holds a lock that a forked child needs
    if pynvml is None:
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


def let_children_ask() -> None:
    """Return None; from now on forked children of this process may use pynvml. Call before a thread of ours does.

    pynvml holds a lock while it looks a function up for the first time: a child that is forked in that moment would wait for it for ever.
    """
    global _prepared
    if not _prepared and hasattr(os, "register_at_fork"):
        _prepared = True
        os.register_at_fork(after_in_child=_renew_lock)


def _renew_lock() -> None:
    pynvml: Any = sys.modules.get("pynvml")
    if hasattr(pynvml, "libLoadLock"):
        pynvml.libLoadLock = threading.Lock()
