"""Keeps the lines that torch's profiler writes at each start and stop ("USDT: ...") off the stderr of a training."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from gpudiag.capture.patches import Patches

_LEVEL = "KINETO_LOG_LEVEL"
_QUIETEST = "6"
"""Above the last kind of message (5, USDT); errors are 3 (libkineto/include/ILoggerObserver.h), so they are kept off as well."""


def keep_quiet(patches: Patches, *, errors_too: bool) -> None:
    """Have the first profiler write nothing, unless the user has chosen a level.

    `errors_too`: also where a GPU is used, whose profiling library (CUPTI, roctracer) may have errors to tell; on a CPU there is none.
    libkineto reads its variable once, when the first profiler of a process begins. It stands for that moment only, and not in os.environ:
    what the script starts is not to have it.
    """
    from torch.autograd import profiler

    if _LEVEL not in os.environ:
        for name in ("_prepare_profiler", "_enable_profiler"):
            patches.wrap(profiler, name, lambda original: _quiet(original, errors_too))


def _quiet(original: Callable[..., Any], errors_too: bool) -> Callable[..., Any]:
    import torch

    def start(*args: Any, **kwargs: Any) -> Any:
        if _LEVEL in os.environ or (torch.cuda.is_initialized() and not errors_too):
            return original(*args, **kwargs)
        os.putenv(_LEVEL, _QUIETEST)
        try:
            return original(*args, **kwargs)
        finally:
            os.unsetenv(_LEVEL)

    return start
