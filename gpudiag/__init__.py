"""gpudiag: why a PyTorch training step takes as long as it does, what to change, and how far the figures can be trusted.

Public names resolve on first use, so that `import gpudiag` costs nothing: profile, diagnose, calibrate, estimate_memory, step, Report;
for experiments ab, ab_script, Task, ExperimentResult, and register_fix, Applier, Fix, NotAppliedError for fixes of one's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpudiag.api import Report, calibrate, diagnose, estimate_memory
    from gpudiag.capture.run_script import step
    from gpudiag.experiment.ab import ab, ab_script
    from gpudiag.experiment.result import ExperimentResult
    from gpudiag.experiment.task import Task
    from gpudiag.fixes.fix import Applier, Fix, NotAppliedError
    from gpudiag.fixes.registry import register_fix
    from gpudiag.recorder import profile

__all__ = [
    "Applier", "ExperimentResult", "Fix", "NotAppliedError", "Report", "Task", "ab", "ab_script", "calibrate", "diagnose",
    "estimate_memory", "profile", "register_fix", "step",
]  # fmt: skip

_HOMES = {
    "Applier": "gpudiag.fixes.fix",
    "ExperimentResult": "gpudiag.experiment.result",
    "Fix": "gpudiag.fixes.fix",
    "NotAppliedError": "gpudiag.fixes.fix",
    "Task": "gpudiag.experiment.task",
    "ab": "gpudiag.experiment.ab",
    "ab_script": "gpudiag.experiment.ab",
    "profile": "gpudiag.recorder",
    "register_fix": "gpudiag.fixes.registry",
    "step": "gpudiag.capture.run_script",
}
"""Where a name is defined; gpudiag.api has the others. What a training calls or an arm imports must not load the analysis."""


def __getattr__(name: str) -> Any:
    """Return a public name from where it is defined."""
    if name not in __all__:
        raise AttributeError(f"module 'gpudiag' has no attribute {name!r}; public names: {', '.join(__all__)}")
    if name not in _HOMES:
        from gpudiag import api

        return getattr(api, name)
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found
