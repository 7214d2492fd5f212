"""Two runs set side by side: the ratio of their steps with its interval, aligned ops, and why they may not be comparable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from gpudiag.attribution.steps import WHOLE_TRACE
from gpudiag.comparison import batch_means
from gpudiag.comparison.batch_means import Estimate, Statistic
from gpudiag.comparison.causes import explain_difference
from gpudiag.comparison.ops import OP_LEVEL, list_op_changes, pair_ops
from gpudiag.comparison.regressions import compare_findings, compare_parts, judge_slower_gate, measure_disturbance
from gpudiag.comparison.settings import OTHER_BATCH, count_samples, list_setting_changes
from gpudiag.model.comparison import Measured, RunSide, StepComparison, StepRatio, StepsKind
from gpudiag.roofline.op_table import BEFORE_WINDOW

MIN_PLAIN = 6
"""Fewer unprofiled steps, as few as a window holds, tell less than profiled ones: those are compared."""


def compare_runs(a: Measured, b: Measured, *, fail_if_slower: float | None = None) -> StepComparison:
    """Return what changed from `a` to `b`; `fail_if_slower`: a share, such as 0.03, for a gate on the step."""
    kind = choose_steps_kind(a, b)
    pairs = pair_ops(a, b)
    changes = list_op_changes(pairs)
    # The share of the op time of each whose op was found on the other side; None: it has no op time
    aligned: list[float | None] = []
    for side in ("a_ns", "b_ns"):
        times = [(change.matched, getattr(change, side) or 0.0) for change in changes]
        whole = sum(ns for _, ns in times)
        aligned.append(sum(ns for matched, ns in times if matched != "alone") / whole if whole > 0 else None)
    if a.analysed_ns and b.analysed_ns:  # wall times in ns do not repeat by chance
        same = (a.analysed_ns, a.plain_ns) == (b.analysed_ns, b.plain_ns)
    else:
        same = a.report.steps == b.report.steps and a.report.breakdown == b.report.breakdown and a.report.steps.count > 0
    ratio, first, second = estimate_step_ratio(a, b, kind), estimate_step(a, kind), estimate_step(b, kind)
    verdict: Literal["faster", "slower", "no_difference", "not_known"] = "not_known"
    if ratio is not None and ratio.low is not None and ratio.high is not None:
        verdict = "slower" if ratio.low > 1 else "faster" if ratio.high < 1 else "no_difference"
    found = StepComparison(
        a=_build_side(a, kind),
        b=_build_side(b, kind),
        ratio=ratio,
        verdict=verdict,
        same_recording=same,
        aligned_a_share=aligned[0],
        aligned_b_share=aligned[1],
        op_level=OP_LEVEL,
        ops=tuple(changes),
        parts=compare_parts(a.report, b.report),
        findings=compare_findings(a.report, b.report),
        explanation=None if first is None or second is None else explain_difference(a, b, pairs, second.value - first.value),
        warnings=list_comparison_warnings(a, b),
    )
    if fail_if_slower is None:
        return found
    return msgspec.structs.replace(found, gate=judge_slower_gate(found, fail_if_slower, measure_disturbance(b, baseline=a)))


def choose_steps_kind(a: Measured, b: Measured | None = None) -> StepsKind:
    """Return which steps tell the pace of all of them: unprofiled ones if each has some, else profiled ones; never one of each."""
    sides = [side for side in (a, b) if side is not None]
    if all(len(side.plain_ns) >= MIN_PLAIN for side in sides):
        return "unprofiled"
    return "profiled" if all(side.analysed_ns for side in sides) else "report"


def list_walls(side: Measured, kind: StepsKind) -> tuple[int, ...]:
    """Return the wall times of those steps in ns; none where a report holds no more than their median."""
    return {"unprofiled": side.plain_ns, "profiled": side.analysed_ns, "report": ()}[kind]


def estimate_step(side: Measured, kind: StepsKind, statistic: Statistic = np.median) -> Estimate | None:
    """Return the median (or the 95th percentile) of those steps in ns; None where there is none."""
    if kind != "report":
        return batch_means.estimate_by_batches(list_walls(side, kind), statistic)
    known = side.report.steps.p95_ns if statistic is batch_means.compute_p95 else side.report.steps.median_ns
    return None if known is None else Estimate(float(known))


def estimate_step_ratio(a: Measured, b: Measured, kind: StepsKind) -> StepRatio | None:
    """Return the median step of `b` over that of `a`; None where one of them has none."""
    first, second = estimate_step(a, kind), estimate_step(b, kind)
    if first is None or second is None or first.value <= 0:
        return None
    span, reason = batch_means.estimate_ratio(first, second), ""
    if span is None and kind == "report":
        reason = "a report holds the median of its steps, not each of them: compare bundles or traces to know the variance"
    elif span is None:
        reason = "one step alone has no variance: record more of them"
    return StepRatio(
        value=second.value / first.value,
        low=span[0] if span else None,
        high=span[1] if span else None,
        steps=kind,
        batches=(first.batches, second.batches),
        reason=reason,
    )


def _build_side(side: Measured, kind: StepsKind) -> RunSide:
    report, walls = side.report, list_walls(side, kind)
    middle, late = estimate_step(side, kind), estimate_step(side, kind, batch_means.compute_p95)
    rate = estimate_throughput(side)
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
        op_ns=sum(row.kernel_ns for row in report.ops if row.phase != BEFORE_WINDOW) / max(report.steps.count, 1),
    )


def estimate_throughput(side: Measured) -> Estimate | None:
    """Return samples a second over the unprofiled steps; None where their batches were not seen."""
    known = [(samples, wall) for samples, wall in zip(side.plain_samples, side.plain_ns, strict=True) if samples]
    if len(known) < MIN_PLAIN:
        return None
    found = batch_means.estimate_by_batches(np.asarray(known), batch_means.compute_quotient)
    return None if found is None else found.times(1e9)


FEW_STEPS = 3
"""Analysed steps below which means of ops say little."""


def list_comparison_warnings(a: Measured, b: Measured, names: tuple[str, str] = ("A", "B"), *, reasons: bool = True) -> tuple[str, ...]:
    """Return the warnings, the gravest first; `names`: what the two are called in them; `reasons`: also why a measurement is weak."""
    found = describe_ranks((a, b), names)
    devices = [side.report.device.name if side.report.device else None for side in (a, b)]
    if devices[0] != devices[1]:
        named = " and ".join(name or "not known" for name in devices)
        found.append(f"other devices: {named}: times tell the device too, not only the program")
    ranks = [len(side.report.source.ranks or (0,)) for side in (a, b)]
    if ranks[0] != ranks[1]:
        found.append(f"other numbers of ranks: {ranks[0]} and {ranks[1]}")
    first, second = count_samples(a), count_samples(b)
    if first and second and abs(second / first - 1) > OTHER_BATCH:
        found.append(f"other batches: {first:g} and {second:g} samples a step: compare samples per second, not steps")
    sides = list(zip(names, (a, b), strict=True))
    whole = [name for name, side in sides if side.report.steps.source == WHOLE_TRACE]
    if whole:
        where = " and ".join(whole)
        found.append(f"no steps were found in {where}: the whole recording counts as one step, which is as long as it was recorded")
    elif few := [f"{name} {side.report.steps.count}" for name, side in sides if side.report.steps.count < FEW_STEPS]:
        found.append(f"few profiled steps ({', '.join(few)}): ops and parts of the step are means of these")
    weak: dict[str, list[str]] = {}
    for name, side in sides:
        for finding in side.report.findings:
            if finding.role == "measurement":
                invalid = finding.severity == "critical"
                said = f"{'invalid' if invalid else 'weak'}: {finding.message if invalid or reasons else 'gpudiag report says why'}"
                weak.setdefault(said, []).append(name)
    found += [f"the measurement of {' and '.join(of)} is {said}" for said, of in weak.items()]
    return (*found, *_compare_settings(a, b, names))


def describe_ranks(sides: Sequence[Measured], names: Sequence[str]) -> list[str]:
    """Return which rank was measured where a recording holds several, in one line ('A is rank 0 of 8'); none where each holds one."""
    told = []
    for name, side in zip(names, sides, strict=True):
        if len(side.report.source.ranks) > 1:
            shown = side.report.job.shown_rank if side.report.job else None  # of a report the rank that it shows
            rank = shown if side.rank is None else side.rank
            told.append(f"{name} is {'one rank' if rank is None else f'rank {rank}'} of {len(side.report.source.ranks)}")
    return [f"{' and '.join(told)}; gpudiag report compares the ranks of a run"] if told else []


def _compare_settings(a: Measured, b: Measured, names: tuple[str, str]) -> Iterator[str]:
    missing = [name for name, side in zip(names, (a, b), strict=True) if side.report.recorded is None]
    if missing:
        said = "neither holds a record of them" if len(missing) > 1 else f"{missing[0]} holds no record of them"
        yield f"whether dtype, TF32, threads and versions differ is not known: {said} (a bundle does)"
    if changed := [f"{change.label} {change.a} -> {change.b}" for change in list_setting_changes(a, b)]:
        yield f"set otherwise in {names[1]}: {'; '.join(changed)}"
    first, second = (side.report.mfu.dtype if side.report.mfu else "" for side in (a, b))
    if first and second and first != second:
        yield f"most matrix work is {first} in {names[0]} and {second} in {names[1]}"
