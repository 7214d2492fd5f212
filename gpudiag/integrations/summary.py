"""The figures of a report for experiment trackers: a flat dict with stable keys, and what puts it into W&B, MLflow, TensorBoard.

Each function takes where to send, then the report. No tracker is imported here: a function calls the object that it is given, or a module
that the program has imported already. Nothing of it stops a training run: what fails is warned of once a tracker, and the function returns
False.

========================================  ====  ===================================================================================
key (after the prefix, `gpudiag/`)        unit  what it is
========================================  ====  ===================================================================================
step_mean_ms                              ms    mean wall time of the analysed steps
step_median_ms, step_p95_ms               ms    their median and 95th percentile
run_step_median_ms                        ms    median of the unprofiled steps of the whole run
<bucket>_share                            0..1  part of the step in each bucket of the breakdown (compute, memory, idle_data, ...)
idle_share                                0..1  part of the step in which the device did nothing, all causes
mfu_share, hfu_share                      0..1  utilisation of the peak rate by model FLOPs; with repeated forward work
modelled_share, linked_share              0..1  part of the kernel time with a cost model; linked to the op that launched it
profiler_slowdown_ratio                         profiled over unprofiled step
memory_peak_bytes                         B     device memory at its peak within the recording
memory_reserved_peak_bytes                B     most that the allocator held
energy_per_step_j, energy_per_sample_j    J     energy of the device
power_mean_w                              W     its mean power
findings_count                                  findings; findings_<severity>_count: of critical, warning, info
best_gain_share                           0..1  most that one change could save of a step: the largest ceiling that a finding has
========================================  ====  ===================================================================================

What is not known has no key: a tracker would draw 0 or a gap as if it had been measured. All 16 buckets are there wherever a step was
analysed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpudiag.errors import warn_user
from gpudiag.model.timeline import BUCKETS

if TYPE_CHECKING:
    from gpudiag.model.report import ReportData

PREFIX = "gpudiag/"

_MS, _SEVERITIES = 1e-6, ("critical", "warning", "info")
_warned: set[str] = set()


def flat(report: Any, prefix: str = PREFIX) -> dict[str, float]:
    """Return the figures of a gpudiag.Report (or its `data`) by the keys of this module's table, each with `prefix` in front."""
    data: ReportData = getattr(report, "data", report)
    steps, run, wall, trust = data.steps, data.history, data.breakdown.wall_ns, data.trust
    mfu, memory, energy, findings = data.mfu, data.memory, data.energy, data.findings
    found: dict[str, float | None] = {
        "step_mean_ms": wall / steps.count * _MS if steps.count and wall else None,
        "step_median_ms": None if steps.median_ns is None else steps.median_ns * _MS,
        "step_p95_ms": None if steps.p95_ns is None else steps.p95_ns * _MS,
        "run_step_median_ms": None if run is None or run.median_ns is None else run.median_ns * _MS,
        "profiler_slowdown_ratio": trust.profiler_slowdown,
        "idle_share": data.breakdown.idle_ns / wall if wall else None,
        "mfu_share": None if mfu is None else mfu.share,
        "hfu_share": None if mfu is None else mfu.hfu_share,
        "modelled_share": trust.modelled_share,
        "linked_share": trust.linked_share,
        "memory_peak_bytes": None if memory is None else memory.peak_bytes,
        "memory_reserved_peak_bytes": None if memory is None else memory.reserved_peak_bytes,
        "energy_per_step_j": None if energy is None else energy.joule_per_step,
        "energy_per_sample_j": None if energy is None else energy.joule_per_sample,
        "power_mean_w": None if energy is None else energy.mean_power_w,
    }
    if wall:  # a step was analysed
        found.update({f"{bucket}_share": getattr(data.breakdown.buckets_ns, bucket) / wall for bucket in BUCKETS})
    if data.rules:  # they were judged
        found.update({f"findings_{severity}_count": sum(item.severity == severity for item in findings) for severity in _SEVERITIES})
        ceilings = [item.ceiling.share for item in findings if item.ceiling is not None]
        found.update(findings_count=len(findings), best_gain_share=max(ceilings, default=None))
    return {f"{prefix}{key}": float(value) for key, value in found.items() if value is not None}


def log_wandb(run: Any, report: Any, *, step: int | None = None, prefix: str = PREFIX, page: bool = False) -> bool:
    """Return whether the figures are in the summary of a W&B run, or with `step` in its history; `page`: the HTML report too.

    `run`: what wandb.init() returned.
    """

    def send() -> None:
        values = flat(report, prefix)
        if step is None:
            run.summary.update(values)
        else:
            run.log(values, step=step)
        if page:
            html = _find_imported("wandb").Html(report.html())
            run.log({f"{prefix}report": html}, **({} if step is None else {"step": step}))

    return _try_send("W&B", send)


def log_mlflow(
    to: Any, report: Any = None, *, mlflow: Any = None, step: int | None = None, prefix: str = PREFIX, page: bool = False
) -> bool:
    """Return whether the figures are metrics of the active MLflow run, and the report its artifact gpudiag.md (`page`: .html too).

    `to`: the module mlflow, or an object with its functions. A run that MLflow began for this is ended again. `log_mlflow(report)` and
    `log_mlflow(report, mlflow=module)`, as in version 0.1, go on.
    """
    if report is None:
        to, report = mlflow, to

    def send() -> None:
        target = _find_imported("mlflow") if to is None else to
        idle = hasattr(target, "active_run") and target.active_run() is None
        try:
            target.log_metrics(flat(report, prefix), step=step)
            target.log_text(report.markdown(), "gpudiag.md")
            if page:
                target.log_text(report.html(), "gpudiag.html")
        finally:
            if idle and target.active_run() is not None:
                target.end_run()

    return _try_send("MLflow", send)


def log_tensorboard(writer: Any, report: Any, *, step: int = 0, prefix: str = PREFIX) -> bool:
    """Return whether the figures are scalars of a SummaryWriter at `step`, and the report its text."""

    def send() -> None:
        for key, value in flat(report, prefix).items():
            writer.add_scalar(key, value, step)
        writer.add_text(f"{prefix}report", report.markdown(), step)

    return _try_send("TensorBoard", send)


def _find_imported(name: str) -> Any:
    module = sys.modules.get(name)
    if module is None:
        raise RuntimeError(f"{name} was not imported by this program")
    return module


def _try_send(tracker: str, send: Callable[[], None]) -> bool:
    try:
        send()
    except Exception as error:  # noqa: BLE001 - the training run comes first
        if tracker not in _warned:
            _warned.add(tracker)
            text = f"gpudiag: the report was not sent to {tracker} ({type(error).__name__}: {error})"
            warn_user(text, 3)  # at the line that called log_...
        return False
    return True
