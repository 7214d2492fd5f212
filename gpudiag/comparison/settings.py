"""What two runs were recorded with: what was set otherwise, and which parts of a difference of steps that can be the reason of."""

from __future__ import annotations

import difflib
import shlex
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from gpudiag.model.bundle import OptimizerSettings, Program
from gpudiag.model.comparison import Measured, OpCause, SettingChange
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import IDLE_BUCKETS
from gpudiag.units import format_share

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
    "tracers": "tracers of Python", "allocator": "allocator",
}  # fmt: skip
_LOADER = {
    "batch_size": "batch size", "num_workers": "workers", "pin_memory": "pinned memory", "prefetch_factor": "prefetch factor",
    "persistent_workers": "persistent workers", "drop_last": "drop last", "start_method": "start method",
}  # fmt: skip
_LONGEST = 80
"""Characters kept of what differs of two commands, of each."""


def list_setting_changes(a: Measured, b: Measured) -> tuple[SettingChange, ...]:
    """Return what was set otherwise in B, of what both recordings tell."""
    first, second = a.report.recorded, b.report.recorded
    found: list[SettingChange] = []
    if first is not None and second is not None:
        found += _list_differences("machine", first.machine, second.machine, _MACHINE)
        found += _list_differences("settings", first.settings, second.settings, _SETTINGS)
        found += _list_optimizer_changes(first.settings.optimizers, second.settings.optimizers)
        old, new = first.settings.loader, second.settings.loader
        if old is not None and new is not None:
            found += _list_differences("loader", old, new, _LOADER, "loader ")
        if first.program is not None and second.program is not None:
            found += _list_program_changes(first.program, second.program)
    if a.command and b.command and a.command != b.command:
        texts = _format_command_changes(a.command, b.command)
        found.append(SettingChange(name="command", label="command", a=texts[0], b=texts[1]))
    return tuple(found)


def _list_differences(group: str, a: msgspec.Struct, b: msgspec.Struct, names: dict[str, str], before: str = "") -> Iterator[SettingChange]:
    for field, label in names.items():
        old, new = getattr(a, field), getattr(b, field)
        if old != new and old is not None and new is not None and old != "" and new != "":
            texts = _format_values(old, new)
            yield SettingChange(name=f"{group}.{field}", label=f"{before}{label}", a=texts[0], b=texts[1])


def _list_optimizer_changes(a: tuple[OptimizerSettings, ...], b: tuple[OptimizerSettings, ...]) -> Iterator[SettingChange]:
    if not a or not b:
        return
    amounts = [sum(optimizer.parameters for optimizer in one) for one in (a, b)]
    if amounts[0] != amounts[1]:
        texts = [f"{amount:,}" for amount in amounts]
        yield SettingChange(name="parameters", label="parameters that the optimizers update", a=texts[0], b=texts[1])
    # the size of the model is told above
    first, second = (tuple(msgspec.structs.replace(optimizer, parameters=0, tensors=0) for optimizer in one) for one in (a, b))
    if first != second:
        texts = list(_format_values(first, second))
        yield SettingChange(name="settings.optimizers", label="optimizers", a=texts[0], b=texts[1])


def _list_program_changes(a: Program, b: Program) -> Iterator[SettingChange]:
    for name in sorted(a.packages.keys() & b.packages.keys() - {"torch"}):
        if a.packages[name] != b.packages[name]:
            yield SettingChange(name=f"packages.{name}", label=name, a=a.packages[name], b=b.packages[name])
    for name in sorted(a.variables.keys() | b.variables.keys()):
        old, new = ((side.variables[name] or "set") if name in side.variables else "not set" for side in (a, b))
        if old != new:
            yield SettingChange(name=f"variables.{name}", label=name, a=old, b=new)
    yield from _list_differences("program", a, b, {"activation_checkpointing": "activation checkpointing"})
    if a.wrappers is not None and b.wrappers is not None:
        names = {"ddp": "DistributedDataParallel", "fsdp": "fully sharded", "data_parallel_devices": "devices of DataParallel",
                 "deepspeed_zero_stage": "ZeRO stage", "grad_scaler": "GradScaler"}  # fmt: skip
        yield from _list_differences("wrappers", a.wrappers, b.wrappers, names)
    if a.compiled is not None and b.compiled is not None:
        yield from _list_differences("compile", a.compiled, b.compiled, {"graph_breaks": "graph breaks", "recompiles": "recompiles"})
    commits = [program.code.commit[:10] if program.code else "" for program in (a, b)]
    if all(commits) and commits[0] != commits[1]:
        yield SettingChange(name="program.commit", label="commit", a=commits[0], b=commits[1])


def list_seen_changes(a: Measured, b: Measured) -> Iterator[SettingChange]:
    """Yield what nobody may have set, but what both recordings saw otherwise: device, batches, padding, clocks, other programs."""
    devices = [side.report.device.name if side.report.device else "" for side in (a, b)]
    if all(devices) and devices[0] != devices[1]:
        yield SettingChange(name="device", label="device", a=devices[0], b=devices[1])
    samples = [count_samples(side) for side in (a, b)]
    if all(samples) and abs(samples[1] / samples[0] - 1) > OTHER_BATCH:
        yield SettingChange(name="samples", label="samples a step", a=f"{samples[0]:g}", b=f"{samples[1]:g}")
    for name, label, least, of in _SEEN:
        old, new = of(a.report), of(b.report)
        if old is not None and new is not None and abs(new - old) >= least:
            kind = (lambda value: f"{value:,.0f} MHz") if least >= 1 else format_share
            yield SettingChange(name=name, label=label, a=kind(old), b=kind(new))


OTHER_BATCH = 0.02
"""Difference of the samples of a step from which its time is another matter: the last batch of an epoch may be smaller."""


def count_samples(side: Measured) -> float:
    """Return the samples of the median unprofiled step; 0 where batches were not seen."""
    return float(statistics.median([samples for samples in side.plain_samples if samples] or [0]))


def _get_clock(report: ReportData) -> float | None:
    column = report.telemetry.columns.get("sm_clock_mhz") if report.telemetry else None
    return column.median if column else None


class _Seen(NamedTuple):
    name: str
    label: str
    least: float
    """Difference from which it is told: 50 MHz are a few steps of a clock, less is noise of the samples."""
    of: Any


_SEEN = (
    _Seen(
        "padded_share",
        "padding among the positions of the batches",
        0.05,
        lambda report: report.history.padded_share if report.history else None,
    ),
    _Seen("sm_clock", "SM clock", 50.0, _get_clock),
    _Seen("others_cpu", "CPU time of other programs", 0.1, lambda report: report.telemetry.others_cpu_share if report.telemetry else None),
)


def _format_command_changes(a: Sequence[str], b: Sequence[str]) -> tuple[str, str]:
    """Return the words that only one of two commands has, with the option before a value that differs."""
    words: tuple[list[str], list[str]] = ([], [])
    for tag, *bounds in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        for kept, command, (first, last) in zip(words, (a, b), (bounds[:2], bounds[2:]), strict=True):
            named = first > 0 and command[first - 1].startswith("-") and not "".join(command[first : first + 1]).startswith("-")
            kept.append(shlex.join(command[first - named : last]))
    texts = [" ".join(filter(None, kept)) or "nothing in its place" for kept in words]
    old, new = (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for text in texts)
    return old, new


def _format_values(a: Any, b: Any) -> tuple[str, str]:
    """Return two values that differ; of optimizers and dictionaries what differs."""
    if isinstance(a, dict) and isinstance(b, dict):
        same = {key for key in a.keys() & b.keys() if a[key] == b[key]}
        a, b = ({key: value for key, value in one.items() if key not in same} for one in (a, b))
    first, second = _format_value(a), _format_value(b)
    if first == second:  # names alone do not tell them apart
        fields = [_list_fields(value) for value in (a, b)]
        first, second = (", ".join(text for text in one if text not in other) or "another" for one, other in (fields, fields[::-1]))
    return first, second


def _list_fields(value: Any) -> list[str]:
    if isinstance(value, tuple):
        return [text for item in value for text in _list_fields(item)]
    if isinstance(value, msgspec.Struct):
        return [f"{field}={_format_value(item)}" for field, item in msgspec.structs.asdict(value).items() if item is not None]
    return [str(value)]


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_format_value(item)}" for key, item in sorted(value.items())) or "none"
    if isinstance(value, tuple):
        return ", ".join(map(_format_value, value)) or "none"
    if isinstance(value, OptimizerSettings):
        return f"{value.name} ({value.implementation})" if value.implementation else value.name
    if isinstance(value, msgspec.Struct):
        return type(value).__name__
    return str(value)


# -- which parts of a difference a setting can be the reason of --------------------------------------------------------------

_OPS = frozenset(get_args(OpCause))
_RATES = frozenset({"slower", "faster", "other_kernels", "unknown_work"})
_FORMS = frozenset({*_RATES, "replaced", "new", "gone", "more_calls", "fewer_calls", "other_type", "other_shapes"})
_AMOUNTS = frozenset({"more_work", "less_work", "other_shapes", "unknown_work", "exposed_copy", "idle_data", "data_work"})
_HOST = frozenset({"idle_launch", "idle_unexplained"})
_WAITS = frozenset({"idle_data", "data_work", "idle_io"})
_LINKS = frozenset({"exposed_communication", "idle_dependency"})
_PROGRAM = frozenset({"new", "gone", "more_calls", "fewer_calls", "more_work", "less_work", "other_shapes", "recompute", "data_work"})
"""What a device does not change: what the program asks for."""
_ALL = frozenset({*_OPS, *IDLE_BUCKETS, "exposed_communication", "exposed_copy"})


class Reach(NamedTuple):
    """What a setting can change: `kinds` of causes, of ops those that `work` names alone."""

    kinds: frozenset[str]
    work: str = ""
    """'matrix', 'convolution', 'attention', 'optimizer', or 'cpu': ops that run on the host; '': all ops."""


_REACHES: tuple[tuple[str, tuple[Reach, ...]], ...] = (
    ("loader.batch_size", (Reach(_AMOUNTS),)),
    ("loader.pin_memory", (Reach(frozenset({"exposed_copy", "idle_sync", "idle_data"})),)),
    ("loader.", (Reach(_WAITS),)),
    ("samples", (Reach(_AMOUNTS),)),
    ("padded_share", (Reach(_AMOUNTS),)),
    ("program.activation_checkpointing", (Reach(frozenset({"recompute", "new", "gone", "more_calls", "fewer_calls"}) | _HOST),)),
    # a loop over tensors launches each by itself, which is the host's time
    ("settings.optimizers", (Reach(_FORMS | {"more_work", "less_work"}, "optimizer"), Reach(_FORMS, "convolution"), Reach(_HOST))),
    ("parameters", (Reach(_OPS | {"exposed_communication"}),)),
    ("settings.sdp_backends", (Reach(_FORMS, "attention"),)),
    ("settings.compiled", (Reach(_FORMS | _HOST | {"idle_compile", "idle_dependency", "more_work", "less_work"}),)),
    ("compile.", (Reach(_FORMS | _HOST | {"idle_compile"}),)),
    ("settings.autocast", (Reach(_FORMS | _HOST),)),
    ("settings.cudnn", (Reach(_FORMS, "convolution"),)),
    ("settings.cuda_matmul_allow_tf32", (Reach(_RATES, "matrix"),)),
    ("settings.float32_matmul_precision", (Reach(_RATES, "matrix"),)),
    ("settings.fp32_precision", (Reach(_RATES, "matrix"),)),
    ("settings.reduced_precision_reduction", (Reach(_RATES, "matrix"),)),
    ("settings.deterministic", (Reach(_FORMS),)),
    # each op of the forward pass keeps its stack, which takes the host's time
    ("settings.anomaly_detection", (Reach(_HOST | {"idle_sync", "new", "gone", "more_calls", "fewer_calls"}), Reach(_RATES, "cpu"))),
    ("settings.tracers", (Reach(_HOST),)),
    ("settings.allocator", (Reach(frozenset({"idle_allocation"})),)),
    ("settings.threads", (Reach(_RATES | {"recompute"}),)),
    ("settings.interop_threads", (Reach(_RATES | {"idle_sync"}),)),
    ("variables.OMP_", (Reach(_RATES),)),
    ("variables.MKL_", (Reach(_RATES),)),
    ("variables.CUDA_LAUNCH_BLOCKING", (Reach(_HOST | {"idle_sync", "idle_dependency"}),)),
    ("variables.NCCL_", (Reach(_LINKS),)),
    ("variables.PYTORCH_", (Reach(_FORMS | {"idle_allocation"}),)),
    ("variables.", (Reach(_ALL),)),
    ("wrappers.", (Reach(_LINKS | _HOST | {"new", "gone", "more_calls", "fewer_calls"}),)),
    ("device", (Reach(_ALL - _PROGRAM),)),
    ("sm_clock", (Reach(_RATES),)),
    ("machine.cpu", (Reach(_RATES | _HOST | _WAITS),)),
    ("machine.isa", (Reach(_RATES),)),
    ("machine.python", (Reach(_HOST | _WAITS),)),
    ("machine.", (Reach(_FORMS | _HOST | _LINKS),)),
    ("packages.", (Reach(_FORMS | _HOST),)),
    ("others_cpu", (Reach(_RATES | _HOST | _WAITS),)),
    ("command", (Reach(_ALL),)),
    ("program.commit", (Reach(_ALL),)),
)
"""By the beginning of the name of a setting, the first that fits: what it can be the reason of. The more specific ones stand first."""


def find_consistent(kind: str, works: frozenset[str], settings: Sequence[SettingChange]) -> tuple[str, ...]:
    """Return the names of the settings that a cause of this kind is consistent with, the most specific first.

    `works`: the kinds of work (Reach.work) that most of its ops are. A setting that is consistent with a cause is not proved to be it.
    """
    ranked = []
    for setting in settings:
        place, reaches = next(((k, reaches) for k, (begin, reaches) in enumerate(_REACHES) if setting.name.startswith(begin)), (0, ()))
        if any(kind in reach.kinds and (not reach.work or kind not in _OPS or reach.work in works) for reach in reaches):
            ranked.append((place, setting.name))
    return tuple(name for _, name in sorted(ranked))
