"""The numbers of a report that a change in costs would move: what the golden files hold and how two of them differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from gpudiag import api
from gpudiag.model.report import OpRow, ReportData

FOLDER = Path(__file__).parent

TRACES = (
    "h100_qwen1.5-0.5b_prefill",
    "mi300x_resnet18_ddp8_actckpt_train_rank0",
    "a100_dlrm_train_rank3of8",
    "v100_resnet50_train_2021_memory_callstack",
    "mi300x_torch_compile_triton_micro",
)
ROWS = 25
DIGITS = 6
"""Significant digits: sums of floats may differ in the last ones between machines."""

_KEY = ("name", "phase", "signature")
_FIELDS = (*_KEY, "count", "kernel_ns", "flops", "bytes", "t_roof_ns", "bound", "provenance", "engine")
_MFU = ("share", "hfu_share", "model_flops", "recompute_flops", "peak_flop_per_s", "dtype")


def numbers(trace: Path) -> dict[str, Any]:
    """Return the numbers of the report of `trace`, rounded."""
    return of_report(msgspec.json.decode(api.diagnose(str(trace)).json(), type=ReportData))


def of_report(report: ReportData) -> dict[str, Any]:
    """Return the numbers of a report, rounded."""
    trust = msgspec.to_builtins(report.trust)
    return rounded(
        {
            "trust": {key: value for key, value in trust.items() if key.endswith("_share") or key in ("events", "kernels")},
            "device": report.device and {"name": report.device.name, "peaks": report.device.peaks},
            "device_time": msgspec.to_builtins(report.device_time),
            "breakdown": {key: time for key, time in msgspec.to_builtins(report.breakdown.buckets_ns).items() if time},
            "mfu": report.mfu and {name: getattr(report.mfu, name) for name in _MFU},
            "ops": [_row(row) for row in report.ops[:ROWS]],
        }
    )


def _row(row: OpRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _FIELDS}


def rounded(value: Any) -> Any:
    """Return `value` with its floats at DIGITS significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def text(found: dict[str, Any]) -> str:
    """Return `found` as JSON that reads well in a review: one line a part, one line an op row."""
    parts = [f'  "{key}": {json.dumps(value)}' for key, value in found.items() if key != "ops"]
    rows = ",\n".join(f"    {json.dumps(row)}" for row in found["ops"])
    return "{\n" + ",\n".join(parts) + ',\n  "ops": [\n' + rows + "\n  ]\n}\n"


def differences(golden: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return a line for each number that differs, rows of ops matched by name, phase and signature."""
    lines = [
        f"{part}.{key}: {_get(golden[part], key)} -> {_get(found[part], key)}"
        for part in golden
        if part != "ops"
        for key in dict.fromkeys([*(golden[part] or {}), *(found[part] or {})])
        if _get(golden[part], key) != _get(found[part], key)
    ]
    before, after = _by_key(golden["ops"]), _by_key(found["ops"])
    for key in dict.fromkeys([*before, *after]):
        lines += _row_differences(key, before.get(key), after.get(key))
    return lines


def _get(part: dict[str, Any] | None, key: str) -> Any:
    return None if part is None else part.get(key)


def _by_key(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the rows by their key; rows of equal key (an op of several modules) by their place among them too."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in _KEY)
        found[(*key, sum(other[:3] == key for other in found))] = row
    return found


def _row_differences(key: tuple[Any, ...], before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    label = " ".join(str(part)[:80] for part in key[:3] if part is not None)
    if before is None or after is None:
        return [f"{label}: {'new' if before is None else 'gone'} among the {ROWS} longest"]
    changed = [f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after.get(name)]
    return [f"{label}: {', '.join(changed)}"] if changed else []
