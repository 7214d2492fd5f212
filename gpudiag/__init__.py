"""gpudiag: why a PyTorch training step takes as long as it does, what to change, and how far the figures can be trusted.

    with gpudiag.profile("runs/first") as prof:       record a loop: for batch in prof.steps(loader): ...
    report = gpudiag.diagnose("runs/first")           a trace, a bundle or the ranks of a job; print(report), report.html()
    report.findings, report.ops.to_polars()           what to change, what was called; report.sql("select ...")
    gpudiag.whatif("runs/first", ["launch=0"])        the step with a cost gone
    gpudiag.compare("runs/a", "runs/b")               what changed; gpudiag.check(...) holds limits, gpudiag.memory(...) the peak
    gpudiag.ab(build, fixes=["bf16"])                 measure a change; ab_script for a script as it is

Public names resolve on first use, so that `import gpudiag` costs nothing. step marks a step where no loader does, listen lets `gpudiag
attach` record a training that runs already; calibrate and
estimate_memory measure; Report, ExperimentResult and Task are what these take and return; register_fix, Applier, Fix and NotAppliedError
are for fixes of one's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpudiag.api import Report, calibrate, diagnose, estimate_memory
    from gpudiag.capture.run_script import step
    from gpudiag.capture.run_script.listen import listen
    from gpudiag.comparison.recordings import check, compare
    from gpudiag.experiment.ab import ab, ab_script
    from gpudiag.experiment.result import ExperimentResult
    from gpudiag.experiment.task import Task
    from gpudiag.fixes.fix import Applier, Fix, NotAppliedError
    from gpudiag.fixes.registry import register_fix
    from gpudiag.memory_report import memory
    from gpudiag.queries import whatif
    from gpudiag.recorder import profile

__version__: str

__all__ = [
    "Applier", "ExperimentResult", "Fix", "NotAppliedError", "Report", "Task", "__version__", "ab", "ab_script", "calibrate", "check",
    "compare", "diagnose", "estimate_memory", "listen", "memory", "profile", "register_fix", "step", "whatif",
]  # fmt: skip

_HOMES = {
    "Applier": "gpudiag.fixes.fix",
    "ExperimentResult": "gpudiag.experiment.result",
    "Fix": "gpudiag.fixes.fix",
    "NotAppliedError": "gpudiag.fixes.fix",
    "Task": "gpudiag.experiment.task",
    "ab": "gpudiag.experiment.ab",
    "ab_script": "gpudiag.experiment.ab",
    "check": "gpudiag.comparison.recordings",
    "compare": "gpudiag.comparison.recordings",
    "listen": "gpudiag.capture.run_script.listen",
    "memory": "gpudiag.memory_report",
    "profile": "gpudiag.recorder",
    "register_fix": "gpudiag.fixes.registry",
    "step": "gpudiag.capture.run_script",
    "whatif": "gpudiag.queries",
}
"""Where a name is defined; gpudiag.api has the others. What a training calls or an arm imports must not load the analysis."""


def __getattr__(name: str) -> Any:
    """Return a public name from where it is defined."""
    if name not in __all__:
        raise AttributeError(f"module 'gpudiag' has no attribute {name!r}; public names: {', '.join(__all__)}")
    if name == "__version__":
        from importlib.metadata import version

        return version("gpudiag")
    if name not in _HOMES:
        from gpudiag import api

        return getattr(api, name)
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    """List the public names."""
    return list(__all__)
