"""Nsight Compute: where it is, what it measured of each op (CSV of `ncu --csv --page raw`), and why it could not.

https://docs.nvidia.com/nsight-compute/NsightComputeCli/ (options, columns), .../ProfilingGuide/ (metrics, cache control).
"""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from validation.ops import MARK

READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
SM, DRAM = "sm__throughput.avg.pct_of_peak_sustained_elapsed", "dram__throughput.avg.pct_of_peak_sustained_elapsed"
METRICS = (READ, WRITTEN, TIME, SM, DRAM)

PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu")

_NAME = re.compile(re.escape(MARK) + r"([\w -]+)")
"""In the column of ranges: `1 "<default domain>:NAME:none:none:..."`."""

_UNITS = {"": 1.0, "%": 1.0, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
_UNITS |= {"nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9}
"""Bytes, and times in ns: what --print-units auto may choose."""

_PERMISSION = "the driver keeps the counters from this user (ERR_NVGPUCTRPERM): an administrator has to allow them"


class Counted(msgspec.Struct, frozen=True):
    """What the counters say of one op: sums over its kernels, shares weighted by their time."""

    kernels: int
    dram_bytes: float
    time_ns: float
    sm_share: float
    """Of the peak rate of the SMs' busiest pipe or issue slots."""
    dram_share: float


def find() -> str | None:
    """Return the path of ncu; None where it is not installed."""
    found = shutil.which("ncu")
    if found:
        return found
    return next((str(path) for place in PLACES for path in sorted(Path("/").glob(place[1:]), reverse=True)), None)


def command(ncu: str, program: Iterable[str]) -> list[str]:
    """Return the command that counts the kernels between cudaProfilerStart and -Stop, caches emptied before each, clocks left alone."""
    options = ["--csv", "--page", "raw", "--print-units", "base", "--nvtx", "--profile-from-start", "off", "--clock-control", "none"]
    options += ["--print-nvtx-rename", "kernel"]  # the range stands in the name of the kernel too, whatever its own column is called
    return [ncu, *options, "--cache-control", "all", "--target-processes", "all", "--metrics", ",".join(METRICS), *program]


def why_not(output: str) -> str | None:
    """Return why nothing was counted, by ncu's own lines; None where it names no error."""
    if "ERR_NVGPUCTRPERM" in output:
        return _PERMISSION
    errors = [line.strip() for line in output.splitlines() if line.startswith("==ERROR==")]
    return errors[0].removeprefix("==ERROR==").strip()[:300] if errors else None


def counted(output: str) -> dict[str, Counted]:
    """Return what was counted, by the name of the op; kernels outside of a range of ours, or without all metrics, are left out."""
    kernels: dict[str, list[dict[str, float]]] = {}
    for name, values in _kernels(output):
        if all(metric in values for metric in METRICS):
            kernels.setdefault(name, []).append(values)
    return {name: _summed(rows) for name, rows in kernels.items()}


def _summed(rows: list[dict[str, float]]) -> Counted:
    time_ns = sum(row[TIME] for row in rows)
    shares = (sum(row[metric] * row[TIME] for row in rows) / time_ns / 100 if time_ns else 0.0 for metric in (SM, DRAM))
    return Counted(len(rows), sum(row[READ] + row[WRITTEN] for row in rows), time_ns, *shares)


def _kernels(output: str) -> Iterable[tuple[str, dict[str, float]]]:
    """Yield (op, metrics) of each kernel. The table has one row a kernel (page raw), with the units in the row below the headings."""
    lines = output.splitlines()
    start = next((row for row, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        return
    table = csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"'))))
    units: dict[str, str] = {}
    for row in table:
        if not row.get("ID"):
            units = {key: text or "" for key, text in row.items() if isinstance(key, str)}
            continue
        op = next((found[1].strip() for text in row.values() if isinstance(text, str) and (found := _NAME.search(text))), None)
        if op is not None:
            known = {metric: _number(row.get(metric), units.get(metric, "")) for metric in METRICS}
            yield op, {metric: value for metric, value in known.items() if value is not None}


def _number(text: str | None, unit: str) -> float | None:
    """Return a figure in bytes, ns or percent; None where it is none, or of a unit that is not known."""
    try:
        return float((text or "").replace(",", "")) * _UNITS[unit]
    except (ValueError, KeyError):
        return None
