"""Keeps the lines that torch's profiler writes to stderr out of a script that knows nothing of a profiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from gpudiag.capture.patches import Patches

_LEVEL = "KINETO_LOG_LEVEL"
_QUIETEST = "6"  # above its last kind of message (5, USDT)


def keep_quiet(patches: Patches) -> None:
    """Have the first profiler write nothing, unless the user has chosen a level.

    libkineto reads its variable once, when the first profiler of a process begins. It stands for that moment only, and not in os.environ:
    what the script starts is not to have it.
    """
    from torch.autograd import profiler

    if _LEVEL not in os.environ:
        patches.wrap(profiler, "_prepare_profiler", _quiet)
        patches.wrap(profiler, "_enable_profiler", _quiet)


def _quiet(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        if _LEVEL in os.environ:
            return original(*args, **kwargs)
        os.putenv(_LEVEL, _QUIETEST)
        try:
            return original(*args, **kwargs)
        finally:
            os.unsetenv(_LEVEL)

    return start
