"""Two runs set side by side: the ratio of their steps with its interval, their ops, parts and findings."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from gpudiag.diagnosis import batches
from gpudiag.diagnosis.batches import Estimate, Statistic
from gpudiag.diagnosis.compare_findings import finding_changes, part_changes
from gpudiag.diagnosis.compare_gate import slower_gate
from gpudiag.diagnosis.compare_ops import LEVEL, aligned, aligned_shares, launched
from gpudiag.diagnosis.compare_settings import warnings
from gpudiag.model.compare import RunSide, StepComparison, StepRatio, StepsKind
from gpudiag.model.measured import Measured

MIN_PLAIN = 6
"""Fewer unprofiled steps, as few as a window holds, tell less than profiled ones: those are compared."""


def compared(a: Measured, b: Measured, *, fail_if_slower: float | None = None) -> StepComparison:
    """Return what changed from `a` to `b`; `fail_if_slower`: a share, such as 0.03, for a gate on the step."""
    kind = steps_kind(a, b)
    changes = aligned(a, b)
    shares = aligned_shares(changes)
    same = _same(a, b)
    ratio = step_ratio(a, b, kind)
    found = StepComparison(
        a=_side(a, kind),
        b=_side(b, kind),
        ratio=ratio,
        verdict=_verdict(ratio),
        same_recording=same,
        aligned_a_share=shares[0],
        aligned_b_share=shares[1],
        op_level=LEVEL,
        ops=tuple(changes),
        parts=part_changes(a.report, b.report),
        findings=finding_changes(a.report, b.report),
        warnings=warnings(a, b),
    )
    return found if fail_if_slower is None else msgspec.structs.replace(found, gate=slower_gate(found, fail_if_slower))


def steps_kind(a: Measured, b: Measured | None = None) -> StepsKind:
    """Return which steps tell the pace of all of them: unprofiled ones if each has some, else profiled ones; never one of each."""
    sides = [side for side in (a, b) if side is not None]
    if all(len(side.plain_ns) >= MIN_PLAIN for side in sides):
        return "unprofiled"
    return "profiled" if all(side.analysed_ns for side in sides) else "report"


def walls_of(side: Measured, kind: StepsKind) -> tuple[int, ...]:
    """Return the wall times of those steps in ns; none where a report holds no more than their median."""
    return {"unprofiled": side.plain_ns, "profiled": side.analysed_ns, "report": ()}[kind]


def step_estimate(side: Measured, kind: StepsKind, statistic: Statistic = batches.median) -> Estimate | None:
    """Return the median (or the 95th percentile) of those steps in ns; None where there is none."""
    if kind != "report":
        return batches.estimate(walls_of(side, kind), statistic)
    known = side.report.steps.p95_ns if statistic is batches.p95 else side.report.steps.median_ns
    return None if known is None else Estimate(float(known))


def step_ratio(a: Measured, b: Measured, kind: StepsKind) -> StepRatio | None:
    """Return the median step of `b` over that of `a`; None where one of them has none."""
    first, second = step_estimate(a, kind), step_estimate(b, kind)
    if first is None or second is None or first.value <= 0:
        return None
    span = batches.ratio(first, second)
    return StepRatio(
        value=second.value / first.value,
        low=span[0] if span else None,
        high=span[1] if span else None,
        steps=kind,
        batches=(first.batches, second.batches),
        reason="" if span else _no_interval(kind),
    )


def _no_interval(kind: StepsKind) -> str:
    if kind == "report":
        return "a report holds the median of its steps, not each of them: compare bundles or traces to know the variance"
    return "one step alone has no variance: record more of them"


def _verdict(ratio: StepRatio | None) -> Literal["faster", "slower", "no_difference", "not_known"]:
    if ratio is None or ratio.low is None or ratio.high is None:
        return "not_known"
    return "slower" if ratio.low > 1 else "faster" if ratio.high < 1 else "no_difference"


def _same(a: Measured, b: Measured) -> bool:
    """Return whether both are one recording: wall times in ns do not repeat by chance."""
    if a.analysed_ns and b.analysed_ns:
        return (a.analysed_ns, a.plain_ns) == (b.analysed_ns, b.plain_ns)
    return a.report.steps == b.report.steps and a.report.breakdown == b.report.breakdown and a.report.steps.count > 0


def _side(side: Measured, kind: StepsKind) -> RunSide:
    report, walls = side.report, walls_of(side, kind)
    middle, late = step_estimate(side, kind), step_estimate(side, kind, batches.p95)
    rate = throughput(side)
    return RunSide(
        path=report.source.path,
        kind=report.source.kind,
        device=report.device.name if report.device else "",
        device_kind=report.device.kind if report.device else None,
        steps=len(walls) or report.steps.count,
        median_ns=round(middle.value) if middle else None,
        p95_ns=round(late.value) if late else None,
        samples_per_s=rate.value if rate else None,
        analysed_steps=report.steps.count,
        op_ns=sum(row.kernel_ns for row in launched(report)) / max(report.steps.count, 1),
    )


def throughput(side: Measured) -> Estimate | None:
    """Return samples a second over the unprofiled steps; None where their batches were not seen."""
    known = [(samples, wall) for samples, wall in zip(side.plain_samples, side.plain_ns, strict=True) if samples]
    if len(known) < MIN_PLAIN:
        return None
    found = batches.estimate(np.asarray(known), batches.quotient)
    return None if found is None else found.times(1e9)
