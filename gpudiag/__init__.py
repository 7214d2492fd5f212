"""gpudiag: why a PyTorch training step takes as long as it does, what to change, and how far the figures can be trusted.

Public names resolve on first use, so that `import gpudiag` costs nothing: profile, diagnose, calibrate,
estimate_memory, step, Report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpudiag.api import Report, calibrate, diagnose, estimate_memory, profile
    from gpudiag.capture.unmodified.marker import step

__all__ = ["Report", "calibrate", "diagnose", "estimate_memory", "profile", "step"]


def __getattr__(name: str) -> Any:
    """Return a public name from gpudiag.api, or gpudiag.step."""
    if name not in __all__:
        raise AttributeError(f"module 'gpudiag' has no attribute {name!r}; public names: {', '.join(__all__)}")
    if name == "step":  # called in each step of a script: it must not load the analysis
        from gpudiag.capture.unmodified.marker import step

        globals()["step"] = step
        return step
    from gpudiag import api

    return getattr(api, name)
