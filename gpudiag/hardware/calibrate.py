"""Measured peaks of this machine's device, taken in a child process so that no training is disturbed and no state is shared."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import psutil

from gpudiag.errors import GpudiagError, MissingDependencyError, UsageError
from gpudiag.hardware import benchmarks as bench
from gpudiag.hardware.cpu import cpu_model_name, last_level_cache_bytes
from gpudiag.hardware.peaks_cache import cache_key, load_cached, store_cached
from gpudiag.hardware.resolve import resolve
from gpudiag.model.hardware import Device
from gpudiag.model.trace import ObservedDevice
from gpudiag.units import format_bytes, format_flop, format_rate

__all__ = ["cache_key", "calibrate", "load_cached", "measure_in_child", "store_cached"]

CalibratedDevice = Literal["auto", "cpu", "cuda"]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
_MAX_WORKING_SET = 1 << 30
_CACHE_WORKING_SET = 64 << 20
_QUIET = 0.2  # CPUs that the rest of a quiet machine uses at most
_GRAIN = 32768  # elements below which ATen gives an element-wise op to one thread (at::internal::GRAIN_SIZE)


def calibrate(device: CalibratedDevice = "auto", seconds_budget: float = 10.0) -> Device:
    """Return the measured peaks of the CPU (with torch's threads as they are set) or of the current CUDA device.

    'auto' takes CUDA where torch has it. Takes about 0.6 of the budget on a CPU. Raises MissingDependencyError without torch and
    GpudiagError where the device cannot be measured.
    """
    torch = _torch()
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise GpudiagError("there is no CUDA device to measure", "torch.cuda.is_available() is False: use --device cpu")
        return _calibrate_cuda(torch, seconds_budget)
    return _calibrate_cpu(torch, seconds_budget)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("peaks cannot be measured without torch", "pip install gpudiag[train]") from error
    return torch


class _CpuRates(NamedTuple):
    """What one pass over the CPU measured."""

    gemm: dict[str, float | None]
    fma: float
    dram: bench.Streams
    cached: bench.Streams | None


def _calibrate_cpu(torch: Any, budget_s: float) -> Device:
    here = bench.Bench(torch, "cpu", bench.cpu_clock)
    cache = last_level_cache_bytes()
    sets = _dram_working_set(cache), None if cache is None else min(cache // 2, _CACHE_WORKING_SET)
    before = _cpu_seconds()
    floor_ns = bench.cpu_launch_floor_ns(here)
    # Two passes: a burst of other work on the machine then lowers a figure only where it strikes the same one twice.
    rates = _better(*(_measure_cpu(here, sets, budget_s / 2) for _ in range(2)))
    others = _cpus_of_others(before, _cpu_seconds())
    peaks = {key: rate for key, rate in rates.gemm.items() if rate}
    peaks["fp32"] = max(peaks.get("fp32", 0.0), rates.fma)
    return Device(
        id="cpu",
        name=cpu_model_name(),
        kind="cpu",
        provenance="measured",
        source=f"measured with torch {torch.__version__} on {torch.get_num_threads()} thread(s), best of repeated runs: {_CPU_METHOD}",
        architecture=platform.machine(),
        memory_bytes=psutil.virtual_memory().total,
        bandwidth_byte_per_s=rates.dram.best,
        cache_bytes=cache,
        cache_bandwidth_byte_per_s=None if rates.cached is None else rates.cached.best,
        peaks=peaks,
        launch_floor_ns=floor_ns,
        notes=_cpu_notes(rates, sets, cache, others),
    )


def _measure_cpu(here: bench.Bench, sets: tuple[int, int | None], budget_s: float) -> _CpuRates:
    share = {"fp32": 0.14, "bf16": 0.08, "fp16": 0.05, "fp64": 0.08}
    return _CpuRates(
        {key: bench.gemm_flop_per_s(here, _DTYPES[key], (512, 1024, 2048, 4096), part * budget_s) for key, part in share.items()},
        bench.fma_flop_per_s(here, here.torch.get_num_threads() * _GRAIN, 0.03 * budget_s),
        bench.stream_byte_per_s(here, sets[0], 0.15 * budget_s),
        None if sets[1] is None else bench.stream_byte_per_s(here, sets[1], 0.06 * budget_s),
    )


def _better(one: _CpuRates, two: _CpuRates) -> _CpuRates:
    return _CpuRates(
        {key: max(rate, two.gemm[key] or 0.0) if rate else two.gemm[key] for key, rate in one.gemm.items()},
        max(one.fma, two.fma),
        bench.Streams(*map(max, one.dram, two.dram)),
        bench.Streams(*map(max, one.cached, two.cached)) if one.cached and two.cached else None,
    )


class _CpuSeconds(NamedTuple):
    """Time at one moment: the clock, what all processes used of this process's CPUs, what this process used."""

    wall: float
    busy: float
    own: float


def _cpu_seconds() -> _CpuSeconds:
    process = psutil.Process()
    every = psutil.cpu_times(percpu=True)
    usable = process.cpu_affinity() if hasattr(process, "cpu_affinity") else range(len(every))
    busy = sum(sum(every[cpu]) - every[cpu].idle - getattr(every[cpu], "iowait", 0.0) for cpu in usable if cpu < len(every))
    own = process.cpu_times()
    return _CpuSeconds(time.perf_counter(), busy, own.user + own.system)


def _cpus_of_others(start: _CpuSeconds, end: _CpuSeconds) -> float:
    """Return how many CPUs other processes kept busy between two moments, on average."""
    return max(0.0, (end.busy - start.busy) - (end.own - start.own)) / (end.wall - start.wall)


_CPU_METHOD = (
    "peaks by torch.mm on square matrices (fp32 is also the vector rate: both run on the vector units), bandwidths by the fastest of copy_ "
    "(read + write), sum (read) and add_ (2 reads + write) over tensors beyond the last-level cache and within it, launch floor by the "
    "median self time of aten::empty under torch.profiler"
)


def _dram_working_set(cache_bytes: int | None) -> int:
    """Return four times the last-level cache, within 1 GiB and a quarter of the free memory."""
    wanted = 4 * cache_bytes if cache_bytes else _MAX_WORKING_SET // 2
    return int(min(max(wanted, 1 << 28), _MAX_WORKING_SET, psutil.virtual_memory().available // 4))


def _cpu_notes(rates: _CpuRates, sets: tuple[int, int | None], cache: int | None, others: float) -> tuple[str, ...]:
    notes = [f"Element-wise multiply-add in the inner caches (torch.addcmul): {format_flop(rates.fma)}/s, limited by loads and stores."]
    notes += [f"No {key} matrix multiplication on this CPU." for key, rate in rates.gemm.items() if not rate]
    notes.append(_stream_note("DRAM", sets[0], rates.dram))
    if sets[1] is not None and rates.cached is not None:
        notes.append(_stream_note("Last-level cache", sets[1], rates.cached))
    if cache is not None and sets[0] < 4 * cache:
        reach = f"{format_bytes(sets[0])} is {sets[0] / cache:.1f} x the last-level cache ({format_bytes(cache)})"
        notes.append(f"{reach}: the DRAM figure may hold some cache hits.")
    if others > _QUIET:
        notes.append(
            f"Other processes kept {others:.1f} CPUs busy meanwhile: the figures may be too low; measure again on a quiet machine."
        )
    return tuple(notes)


def _stream_note(where: str, working_set: int, rates: bench.Streams) -> str:
    each = ", ".join(f"{name} {format_rate(rate, 'B')}" for name, rate in zip(rates._fields, rates, strict=True))
    return f"{where}, {format_bytes(working_set)} working set: {each}."


def _calibrate_cuda(torch: Any, budget_s: float) -> Device:
    here = bench.Bench(torch, "cuda", bench.cuda_clock(torch))
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    base = resolve(_observed(torch, properties)).device
    peaks = _cuda_peaks(torch, here, properties, budget_s)
    if base is not None and "fp64_tensor" in base.peaks and "fp64" in peaks:
        peaks["fp64_tensor"] = peaks.pop("fp64")  # cuBLAS takes the tensor cores where they have fp64
    torch.cuda.empty_cache()
    dram = bench.stream_byte_per_s(here, _MAX_WORKING_SET, 0.1 * budget_s)
    l2_bytes = getattr(properties, "L2_cache_size", None) or (base.cache_bytes if base else None)
    # Half of the cache, and launches back to back, so that their latency hides behind the kernels before them.
    cached = None if l2_bytes is None else bench.stream_byte_per_s(here, l2_bytes // 2, 0.05 * budget_s, runs=50)
    host = bench.host_copy_byte_per_s(here, 1 << 28, 0.1 * budget_s)
    table_only = {} if base is None else {key: rate for key, rate in base.peaks.items() if key not in peaks}
    notes = [
        _stream_note("DRAM", _MAX_WORKING_SET, dram),
        "Host copies: " + ", ".join(f"{name} {format_rate(rate, 'B')}" for name, rate in host.items()) + ".",
    ]
    if table_only:
        notes.append(f"Not measured, from the device table: {', '.join(sorted(table_only))}.")
    device = base or Device(id="unknown-gpu", name=properties.name, kind="gpu", provenance="measured", source="")
    return msgspec.structs.replace(
        device,
        provenance="measured",
        source=f"measured with torch {torch.__version__}, best of repeated runs: {_CUDA_METHOD}",
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        bandwidth_byte_per_s=dram.best,
        cache_bytes=l2_bytes,
        cache_bandwidth_byte_per_s=None if cached is None else cached.best,
        peaks=table_only | peaks,
        launch_floor_ns=bench.cuda_launch_floor_ns(here),
        notes=(*notes, *device.notes),
    )


_CUDA_METHOD = (
    "peaks by torch.mm on square matrices (fp32 with TF32 off, which is also taken as the vector rate), bandwidths by the fastest of "
    "copy_, sum and add_, launch floor by the median duration of a one-element fill under torch.profiler; links are the table's"
)


def _observed(torch: Any, properties: Any) -> ObservedDevice:
    hip = getattr(torch.version, "hip", None) is not None
    capability = getattr(properties, "gcnArchName", None) if hip else None
    return ObservedDevice(
        index=torch.cuda.current_device(),
        name=properties.name,
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        compute_capability=capability or f"{properties.major}.{properties.minor}",
        warp_size=getattr(properties, "warp_size", None),
    )


def _cuda_peaks(torch: Any, here: bench.Bench, properties: Any, budget_s: float) -> dict[str, float]:
    """Return the GEMM rates by type; TF32 only on NVIDIA from Ampere on, where torch's 'high' precision means it."""
    tf32 = getattr(torch.version, "hip", None) is None and properties.major >= 8
    runs = [("bf16", "highest"), ("fp16", "highest"), ("fp32", "highest"), ("fp64", "highest"), *([("tf32", "high")] if tf32 else [])]
    rates: dict[str, float | None] = {}
    before = torch.get_float32_matmul_precision()
    try:
        for key, precision in runs:
            torch.set_float32_matmul_precision(precision)
            sizes = (2048, 4096) if key == "fp64" else (4096, 8192)
            rates[key] = bench.gemm_flop_per_s(here, _DTYPES.get(key, "float32"), sizes, 0.08 * budget_s)
    finally:
        torch.set_float32_matmul_precision(before)
    return {key: rate for key, rate in rates.items() if rate}


def measure_in_child(device: CalibratedDevice = "auto", threads: int | None = None, timeout_s: float = 60.0) -> Device:
    """Return `calibrate(device)` of a fresh Python process with `threads` torch threads (None: torch's own choice).

    Raises GpudiagError with one line where the child fails, takes longer than `timeout_s` or answers nonsense.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"peaks cannot be measured on {threads} threads", "use 1 or more")
    command = [sys.executable, "-m", "gpudiag.hardware.calibrate", "--json", "--device", device]
    environment = dict(os.environ)
    if threads is not None:
        command += ["--threads", str(threads)]
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    root = Path(__file__).resolve().parents[2]  # not the user's folder, whose files could shadow modules
    try:
        done = subprocess.run(  # noqa: S603 - own interpreter, argument list, no shell
            command, capture_output=True, timeout=timeout_s, cwd=root, env=environment, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise GpudiagError(f"measuring the peaks took longer than {timeout_s:g} s", "close other programs or allow more time") from error
    except OSError as error:
        raise GpudiagError(f"the process that measures the peaks could not start: {error.strerror or error}") from error
    return _decode(done)


def _decode(done: subprocess.CompletedProcess[bytes]) -> Device:
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise GpudiagError(f"measuring the peaks failed with exit code {done.returncode}: {lines[-1][:300]}")
    answer = (done.stdout.strip().splitlines() or [b""])[-1]  # libraries may print above it
    try:
        return msgspec.json.decode(answer, type=Device)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise GpudiagError("measuring the peaks gave no readable answer") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line asks and write the device to stdout; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gpudiag.hardware.calibrate", description="Measure the peaks of this machine's device.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of indented JSON")
    options = parser.parse_args(arguments)
    try:
        if options.threads is not None:
            _torch().set_num_threads(options.threads)
        device = calibrate(options.device, options.seconds)
    except GpudiagError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    text = msgspec.json.encode(device)
    sys.stdout.write((text if options.json else msgspec.json.format(text, indent=2)).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
