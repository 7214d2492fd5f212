"""Two runs set side by side: the ratio of their steps with its interval, aligned ops, and why they may not be comparable."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from gpudiag.attribution.steps import WHOLE_TRACE
from gpudiag.comparison import batch_means
from gpudiag.comparison.batch_means import Estimate, Statistic
from gpudiag.comparison.regressions import compare_findings, compare_parts, judge_slower_gate
from gpudiag.model.bundle import LoaderSettings, OptimizerSettings
from gpudiag.model.comparison import Change, Matched, Measured, OpChange, OpKey, RunSide, StepComparison, StepRatio, StepsKind
from gpudiag.model.report import ReportData
from gpudiag.roofline.op_table import BEFORE_WINDOW

MIN_PLAIN = 6
"""Fewer unprofiled steps, as few as a window holds, tell less than profiled ones: those are compared."""


def compare_runs(a: Measured, b: Measured, *, fail_if_slower: float | None = None) -> StepComparison:
    """Return what changed from `a` to `b`; `fail_if_slower`: a share, such as 0.03, for a gate on the step."""
    kind = choose_steps_kind(a, b)
    changes = align_ops(a, b)
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
    ratio = estimate_step_ratio(a, b, kind)
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
        warnings=list_comparison_warnings(a, b),
    )
    return found if fail_if_slower is None else msgspec.structs.replace(found, gate=judge_slower_gate(found, fail_if_slower))


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


OP_LEVEL = 0.99
"""Of the interval of one op: with hundreds of ops, at 95 % dozens would be called changed by chance."""

LEAST_CHANGE = 0.01
"""A change of an op below this share of its time is none: no one acts on it."""

_OWN_NAMES = re.compile(r"^(triton_.*?)_\d+$|^(## Call CompiledFxGraph) \w+.*", re.DOTALL)
"""Inductor numbers the kernels of a compilation and names a graph by a hash: both change where anything else in the code does."""


class AlignedOp(msgspec.Struct, frozen=True):
    """Rows of an op table that stand together for one op; times in ns a step."""

    keys: tuple[OpKey, ...]
    ns: float
    calls: float
    by_step: tuple[int, ...] | None
    """Kernel time in each step; None: not known."""

    @property
    def estimate(self) -> Estimate:
        """Return the time a step with its error."""
        found = batch_means.estimate_by_batches(self.by_step, np.mean) if self.by_step else None
        return found or Estimate(self.ns)

    @property
    def spread_ns(self) -> float | None:
        """Return the standard deviation from step to step; None: not known."""
        return float(np.std(self.by_step, ddof=1)) if self.by_step is not None and len(self.by_step) > 1 else None


def collect_ops(side: Measured) -> dict[OpKey, AlignedOp]:
    """Return the ops launched in the analysed steps of a run; rows with one key (other strides, say) are one."""
    steps = max(side.report.steps.count, 1)
    found: dict[OpKey, AlignedOp] = {}
    for row in side.report.ops:
        if row.phase == BEFORE_WINDOW:
            continue
        key = OpKey(row.name, row.phase, row.module, row.signature)
        made = AlignedOp((key,), row.kernel_ns / steps, row.count / steps, side.ops.get(key))
        if key in found:
            made = AlignedOp((key,), found[key].ns + made.ns, found[key].calls + made.calls, made.by_step)
        found[key] = made
    return found


def join_ops(ops: Sequence[AlignedOp]) -> AlignedOp:
    """Return several ops as one: times are added, step by step where that is known of all."""
    if len(ops) == 1:
        return ops[0]
    known = [op.by_step for op in ops if op.by_step is not None]
    sums = tuple(map(sum, zip(*known, strict=True))) if len(known) == len(ops) else None
    keys = tuple(dict.fromkeys(key for op in ops for key in op.keys))
    return AlignedOp(keys, sum(op.ns for op in ops), sum(op.calls for op in ops), sums)


def align_ops(a: Measured, b: Measured) -> list[OpChange]:
    """Return every op of both runs once, the largest difference first.

    Ops with the same name, phase, module and signature are one; of what is left those with other shapes, then those of the same name.
    What only one of the two recordings tells (modules, phases, shapes) tells no ops apart.
    """
    of_a, of_b = collect_ops(a), collect_ops(b)
    for field in ("phase", "module", "signature"):
        known = [any(getattr(key, field) is not None for key in ops) for ops in (of_a, of_b)]
        if known[0] != known[1]:
            of_a, of_b = _drop_field(of_a, field), _drop_field(of_b, field)
    left, right = list(of_a.values()), list(of_b.values())
    ways: tuple[tuple[Matched, Callable[[OpKey], Hashable]], ...] = (
        ("exact", lambda key: key),
        ("shapes", lambda key: key[:3]),
        ("name", lambda key: _OWN_NAMES.sub(r"\1\2", key.name)),
    )
    found = []
    for matched, of in ways:  # of what is left on both sides; several of one side count together
        groups: tuple[defaultdict[Hashable, list[AlignedOp]], ...] = (defaultdict(list), defaultdict(list))
        for ops, group in zip((left, right), groups, strict=True):
            for op in ops:
                group[of(op.keys[0])].append(op)
        both = groups[0].keys() & groups[1].keys()
        found += [_build_change(join_ops(ops), join_ops(groups[1][key]), matched) for key, ops in groups[0].items() if key in both]
        left, right = ([op for key, ops in group.items() if key not in both for op in ops] for group in groups)
    found += [_build_change(op, None, "alone") for op in left]
    found += [_build_change(None, op, "alone") for op in right]
    return sorted(found, key=lambda change: (-abs(change.delta_ns), change.name, str(change.phase)))


def _drop_field(ops: dict[OpKey, AlignedOp], field: str) -> dict[OpKey, AlignedOp]:
    groups: defaultdict[OpKey, list[AlignedOp]] = defaultdict(list)
    for key, op in ops.items():
        left: dict[str, Any] = {field: None}
        groups[key._replace(**left)].append(op)
    return {key: msgspec.structs.replace(join_ops(group), keys=(key,)) for key, group in groups.items()}


def _build_change(a: AlignedOp | None, b: AlignedOp | None, matched: Matched) -> OpChange:
    first, second = a.estimate if a else Estimate(0.0), b.estimate if b else Estimate(0.0)
    span = batch_means.estimate_difference(first, second, OP_LEVEL) if a and b else None
    keys = [*(a.keys if a else ()), *(b.keys if b else ())]
    change: Change = "unchanged"
    if a is None or b is None:
        change = "new" if b else "gone"
    elif abs(second.value - first.value) >= LEAST_CHANGE * max(first.value, second.value):
        if span is None:
            change = "not_known" if first.value != second.value else "unchanged"
        elif not span[0] <= 0 <= span[1]:
            change = "slower" if span[0] > 0 else "faster"
    return OpChange(
        name=keys[0].name,
        phase=_find_common_word(key.phase for key in keys),
        module=_find_common_word(key.module for key in keys),
        signature_a=_find_common_word(key.signature for key in a.keys) if a else None,
        signature_b=_find_common_word(key.signature for key in b.keys) if b else None,
        matched=matched,
        change=change,
        a_ns=first.value if a else None,
        b_ns=second.value if b else None,
        a_spread_ns=a.spread_ns if a else None,
        b_spread_ns=b.spread_ns if b else None,
        delta_ns=second.value - first.value,
        low_ns=span[0] if span else None,
        high_ns=span[1] if span else None,
        a_calls=a.calls if a else None,
        b_calls=b.calls if b else None,
    )


def _find_common_word(words: Iterable[str | None]) -> str | None:
    different = set(words)
    return different.pop() if len(different) == 1 else None


_MACHINE = {
    "torch": "torch", "cuda": "CUDA", "driver": "driver", "python": "Python", "system": "system", "cpu": "CPU", "cpu_cores": "CPU cores",
    "cpu_quota": "CPU quota", "isa": "vector instructions",
}  # fmt: skip
_SETTINGS = {
    "threads": "threads", "interop_threads": "inter-op threads", "float32_matmul_precision": "float32 matmul precision",
    "cuda_matmul_allow_tf32": "TF32 in matmul", "cudnn_allow_tf32": "TF32 in cuDNN", "fp32_precision": "fp32 precision",
    "reduced_precision_reduction": "reduced-precision reduction", "autocast": "autocast", "compiled": "compiled",
    "cudnn_benchmark": "cuDNN benchmark", "cudnn_enabled": "cuDNN", "cudnn_deterministic": "cuDNN deterministic",
    "deterministic": "deterministic", "sdp_backends": "attention kernels", "anomaly_detection": "anomaly detection",
    "allocator": "allocator", "optimizers": "optimizers", "loader": "loader",
}  # fmt: skip
_LOADER = {
    "batch_size": "batch size", "num_workers": "workers", "pin_memory": "pinned memory", "prefetch_factor": "prefetch factor",
    "persistent_workers": "persistent workers", "drop_last": "drop last", "start_method": "start method",
}  # fmt: skip

FEW_STEPS = 3
"""Analysed steps below which means of ops say little."""


def list_comparison_warnings(a: Measured, b: Measured, names: tuple[str, str] = ("A", "B")) -> tuple[str, ...]:
    """Return the warnings, the gravest first; `names`: what the two are called in them."""
    found = describe_ranks((a, b), names)
    devices = [side.report.device.name if side.report.device else None for side in (a, b)]
    if devices[0] != devices[1]:
        named = " and ".join(name or "not known" for name in devices)
        found.append(f"other devices: {named}: times tell the device too, not only the program")
    ranks = [len(side.report.source.ranks or (0,)) for side in (a, b)]
    if ranks[0] != ranks[1]:
        found.append(f"other numbers of ranks: {ranks[0]} and {ranks[1]}")
    # Of the unprofiled steps; 0 where batches were not seen
    first, second = (float(statistics.median([samples for samples in side.plain_samples if samples] or [0])) for side in (a, b))
    # Difference of the samples of a step from which its time is another matter: the last batch of an epoch may be smaller
    if first and second and abs(second / first - 1) > 0.02:
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
                said = f"{'invalid' if finding.severity == 'critical' else 'weak'}: {finding.message}"
                weak.setdefault(said, []).append(name)
    found += [f"the measurement of {' and '.join(of)} is {said}" for said, of in weak.items()]
    return (*found, *_compare_settings(a.report, b.report, names))


def describe_ranks(sides: Sequence[Measured], names: Sequence[str]) -> list[str]:
    """Return which rank was measured where a recording holds several, in one line ('A is rank 0 of 8'); none where each holds one."""
    told = []
    for name, side in zip(names, sides, strict=True):
        if len(side.report.source.ranks) > 1:
            shown = side.report.job.shown_rank if side.report.job else None  # of a report the rank that it shows
            rank = shown if side.rank is None else side.rank
            told.append(f"{name} is {'one rank' if rank is None else f'rank {rank}'} of {len(side.report.source.ranks)}")
    return [f"{' and '.join(told)}; gpudiag report compares the ranks of a run"] if told else []


def _compare_settings(a: ReportData, b: ReportData, names: tuple[str, str]) -> Iterator[str]:
    if a.recorded is None or b.recorded is None:
        missing = [name for name, report in zip(names, (a, b), strict=True) if report.recorded is None]
        said = "neither holds a record of them" if len(missing) > 1 else f"{missing[0]} holds no record of them"
        yield f"whether dtype, TF32, threads and versions differ is not known: {said} (a bundle does)"
    else:
        machine = _list_differences(a.recorded.machine, b.recorded.machine, _MACHINE)
        changed = [*machine, *_list_differences(a.recorded.settings, b.recorded.settings, _SETTINGS)]
        programs = (a.recorded.program, b.recorded.program)
        commits = [program.code.commit[:10] if program and program.code else "" for program in programs]
        if commits[0] and commits[1] and commits[0] != commits[1]:
            changed.append(f"commit {commits[0]} -> {commits[1]}")
        if changed:
            yield f"set otherwise in {names[1]}: {'; '.join(changed)}"
    first, second = a.mfu.dtype if a.mfu else "", b.mfu.dtype if b.mfu else ""
    if first and second and first != second:
        yield f"most matrix work is {first} in {names[0]} and {second} in {names[1]}"


def _list_differences(a: msgspec.Struct, b: msgspec.Struct, names: dict[str, str]) -> Iterator[str]:
    for field, label in names.items():
        old, new = getattr(a, field), getattr(b, field)
        if isinstance(old, LoaderSettings) and isinstance(new, LoaderSettings):
            yield from (f"loader {said}" for said in _list_differences(old, new, _LOADER))
        elif old != new and old is not None and new is not None and old != "" and new != "":
            yield f"{label} {_format_value(old)} -> {_format_value(new)}"


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_format_value(item)}" for key, item in sorted(value.items())) or "none"
    if isinstance(value, tuple):
        return ", ".join(map(_format_value, value)) or "none"
    if isinstance(value, OptimizerSettings):
        return f"{value.name} ({value.implementation})" if value.implementation else value.name
    return str(value)
