"""The figures that gates are set on, with how far each varies within the run."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from gpudiag.diagnosis import batches
from gpudiag.diagnosis.batches import Estimate, Statistic
from gpudiag.diagnosis.compare import step_estimate, throughput, walls_of
from gpudiag.model.compare import StepsKind
from gpudiag.model.finding import Missing
from gpudiag.model.measured import Measured

NS_PER_MS = 1e6
BYTES_PER_GB = 1e9


class Figure(msgspec.Struct, frozen=True):
    """A figure in the unit of its metric, and what it is of."""

    estimate: Estimate
    of: str


def figure(metric: str, side: Measured, kind: StepsKind) -> Figure | Missing:
    """Return a metric of model.gates.METRICS; `kind`: which steps tell the time of a step. Missing says why it is not known."""
    maker = _MAKERS.get(metric)
    return maker(side, kind) if maker else _part(side, metric.removesuffix("_share"))


def _step(side: Measured, kind: StepsKind, statistic: Statistic) -> Figure | Missing:
    found = step_estimate(side, kind, statistic)
    if found is None:
        return Missing("no complete step was recorded")
    count = len(walls_of(side, kind)) or side.report.steps.count
    return Figure(found.times(1 / NS_PER_MS), f"{count} {'profiled' if kind == 'report' else kind} step{'' if count == 1 else 's'}")


def _samples(side: Measured, kind: StepsKind) -> Figure | Missing:
    found = throughput(side)
    if found is None:
        return Missing("no batch was seen in unprofiled steps: record a bundle, with prof.steps(loader)")
    return Figure(found, f"{len(side.plain_ns)} unprofiled steps")


def _mfu(side: Measured, kind: StepsKind) -> Figure | Missing:
    """Return the utilisation; the work of a step is the same in all, so that it varies as their times do."""
    mfu = side.report.mfu
    if mfu is None:
        said = next((text for text in side.report.trust.warnings if text.startswith("no model FLOPs utilisation: ")), "")
        return Missing(said.partition(": ")[2] or "the report has none")
    walls = batches.estimate(side.analysed_ns, batches.mean)
    error = None if walls is None or walls.error is None else mfu.share * walls.error / walls.value
    return Figure(Estimate(mfu.share, error, walls.batches if walls else 0), _profiled(side))


def _profiled(side: Measured) -> str:
    return f"{side.report.steps.count} profiled step{'' if side.report.steps.count == 1 else 's'}"


def _idle(side: Measured, kind: StepsKind) -> Figure | Missing:
    wall = side.report.breakdown.wall_ns
    if wall <= 0:
        return Missing("no complete step was recorded")
    if not side.idle_ns or sum(side.analysed_ns) <= 0:
        return Figure(Estimate(side.report.breakdown.idle_ns / wall), _profiled(side))
    rows = np.column_stack((np.asarray(side.idle_ns, dtype=np.float64), np.asarray(side.analysed_ns, dtype=np.float64)))
    found = batches.estimate(rows, batches.quotient)
    return Figure(found or Estimate(side.report.breakdown.idle_ns / wall), _profiled(side))


def _memory(side: Measured, kind: StepsKind) -> Figure | Missing:
    memory = side.report.memory
    if memory is None:
        return Missing("no allocation was recorded: record with memory=True (gpudiag run --memory)")
    most = max(memory.peak_bytes, memory.run_peak_bytes or 0)
    return Figure(Estimate(most / BYTES_PER_GB), "the whole run" if memory.run_peak_bytes else "the recorded window")


def _energy(side: Measured, kind: StepsKind) -> Figure | Missing:
    energy = side.report.energy
    if energy is None or energy.joule_per_step is None:
        return Missing(energy.reason if energy and energy.reason else "no power was sampled: a bundle of a run on a GPU has it")
    return Figure(Estimate(energy.joule_per_step), f"{energy.steps} {energy.of or 'steps'}")


def _part(side: Measured, name: str) -> Figure | Missing:
    breakdown = side.report.breakdown
    if breakdown.wall_ns <= 0:
        return Missing("no complete step was recorded")
    return Figure(Estimate(getattr(breakdown.buckets_ns, name) / breakdown.wall_ns), _profiled(side))


_MAKERS: dict[str, Callable[[Measured, StepsKind], Figure | Missing]] = {
    "step_median_ms": lambda side, kind: _step(side, kind, batches.median),
    "step_p95_ms": lambda side, kind: _step(side, kind, batches.p95),
    "samples_per_s": _samples,
    "mfu_share": _mfu,
    "idle_share": _idle,
    "peak_memory_gb": _memory,
    "joule_per_step": _energy,
}
