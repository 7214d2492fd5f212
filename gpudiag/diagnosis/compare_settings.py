"""Why two runs may not be comparable: what differs in machine, settings, batches and recording."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from gpudiag.attribution.steps import WHOLE_TRACE
from gpudiag.model.bundle import LoaderSettings, OptimizerSettings
from gpudiag.model.judged import MEASUREMENT_RULE
from gpudiag.model.measured import Measured
from gpudiag.model.report import Recorded, ReportData

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

FEW = 3
"""Analysed steps below which means of ops say little."""

UNALIKE = 0.02
"""Difference of the samples of a step from which its time is another matter: the last batch of an epoch may be smaller."""


def warnings(a: Measured, b: Measured, names: tuple[str, str] = ("A", "B")) -> tuple[str, ...]:
    """Return the warnings, the gravest first; `names`: what the two are called in them."""
    found = (_devices(a.report, b.report), _batches(a, b), _recordings((a, b), names), _settings(a.report, b.report, names))
    return (*rank_lines((a, b), names), *(said for part in found for said in part))


def rank_lines(sides: Sequence[Measured], names: Sequence[str]) -> list[str]:
    """Return which rank was measured where a recording holds several, in one line; none where each holds one."""
    told = [f"{name} is {_rank(side)}" for name, side in zip(names, sides, strict=True) if len(side.report.source.ranks) > 1]
    return [f"{' and '.join(told)}; gpudiag report compares the ranks of a run"] if told else []


def _rank(side: Measured) -> str:
    """Return 'rank 0 of 8'; of a report the rank that it shows."""
    shown = side.report.job.shown_rank if side.report.job else None
    rank = shown if side.rank is None else side.rank
    return f"{'one rank' if rank is None else f'rank {rank}'} of {len(side.report.source.ranks)}"


def _devices(a: ReportData, b: ReportData) -> Iterator[str]:
    first, second = (report.device.name if report.device else None for report in (a, b))
    if first != second:
        yield f"other devices: {first or 'not known'} and {second or 'not known'}: times tell the device too, not only the program"
    if len(a.source.ranks or (0,)) != len(b.source.ranks or (0,)):
        yield f"other numbers of ranks: {len(a.source.ranks or (0,))} and {len(b.source.ranks or (0,))}"


def _batches(a: Measured, b: Measured) -> Iterator[str]:
    first, second = samples_per_step(a), samples_per_step(b)
    if first and second and abs(second / first - 1) > UNALIKE:
        yield f"other batches: {first:g} and {second:g} samples a step: compare samples per second, not steps"


def samples_per_step(side: Measured) -> float | None:
    """Return the median number of samples of the unprofiled steps; None where batches were not seen."""
    seen = [samples for samples in side.plain_samples if samples]
    return float(statistics.median(seen)) if seen else None


def _recordings(sides: tuple[Measured, Measured], names: tuple[str, str]) -> Iterator[str]:
    named = list(zip(names, sides, strict=True))
    whole = [name for name, side in named if side.report.steps.source == WHOLE_TRACE]
    if whole:
        yield f"no steps were found in {' and '.join(whole)}: the whole recording counts as one step, which is as long as it was recorded"
    elif few := [f"{name} {side.report.steps.count}" for name, side in named if side.report.steps.count < FEW]:
        yield f"few profiled steps ({', '.join(few)}): ops and parts of the step are means of these"
    weak: dict[str, list[str]] = {}
    for name, side in named:
        for finding in side.report.findings:
            if finding.rule == MEASUREMENT_RULE:
                said = f"{'invalid' if finding.severity == 'critical' else 'weak'}: {finding.message}"
                weak.setdefault(said, []).append(name)
    yield from (f"the measurement of {' and '.join(of)} is {said}" for said, of in weak.items())


def _settings(a: ReportData, b: ReportData, names: tuple[str, str]) -> Iterator[str]:
    if a.recorded is None or b.recorded is None:
        missing = [name for name, report in zip(names, (a, b), strict=True) if report.recorded is None]
        said = "neither holds a record of them" if len(missing) > 1 else f"{missing[0]} holds no record of them"
        yield f"whether dtype, TF32, threads and versions differ is not known: {said} (a bundle does)"
    else:
        said = "; ".join([*_differences(a.recorded.machine, b.recorded.machine, _MACHINE), *_set_otherwise(a.recorded, b.recorded)])
        if said:
            yield f"set otherwise in {names[1]}: {said}"
    first, second = a.mfu.dtype if a.mfu else "", b.mfu.dtype if b.mfu else ""
    if first and second and first != second:
        yield f"most matrix work is {first} in {names[0]} and {second} in {names[1]}"


def _set_otherwise(a: Recorded, b: Recorded) -> list[str]:
    said = list(_differences(a.settings, b.settings, _SETTINGS))
    commits = [found.program.code.commit[:10] if found.program and found.program.code else "" for found in (a, b)]
    if commits[0] and commits[1] and commits[0] != commits[1]:
        said.append(f"commit {commits[0]} -> {commits[1]}")
    return said


def _differences(a: msgspec.Struct, b: msgspec.Struct, names: dict[str, str]) -> Iterator[str]:
    """Yield 'label old -> new' of each field in `names` that differs, what one side does not know left out."""
    for field, label in names.items():
        old, new = getattr(a, field), getattr(b, field)
        if isinstance(old, LoaderSettings) and isinstance(new, LoaderSettings):
            yield from (f"loader {said}" for said in _differences(old, new, _LOADER))
        elif old != new and old is not None and new is not None and old != "" and new != "":
            yield f"{label} {_text(old)} -> {_text(new)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return _listed(f"{key}={_text(item)}" for key, item in sorted(value.items()))
    if isinstance(value, tuple):
        return _listed(_optimizer(item) if isinstance(item, OptimizerSettings) else str(item) for item in value)
    return str(value)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"


def _optimizer(found: OptimizerSettings) -> str:
    return f"{found.name} ({found.implementation})" if found.implementation else found.name
