"""Measured peaks of this machine's device, taken in a child process so that no training is disturbed and no state is shared."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import psutil

from gpudiag.errors import GpudiagError, MissingDependencyError, UsageError
from gpudiag.hardware import benchmarks as bench
from gpudiag.hardware.cpu import read_cpu_model, read_inner_cache_bytes, read_last_level_cache_bytes
from gpudiag.hardware.device_peaks import resolve_device
from gpudiag.model.hardware import Device, ObservedDevice, build_device_key
from gpudiag.model.ops import OVER_ROOF_ABOVE
from gpudiag.units import format_bytes, format_flop, format_rate, format_share

_DRAM_WORKING_SET = 1 << 30
_GEMM_RUNS = 4
"""Products timed as one, so that what an event costs does not count."""
_GEMM_SIZES = (4096, 8192, 16384)


class _Gemm(NamedTuple):
    key: str
    dtype: str
    precision: str = "highest"
    sizes: tuple[int, ...] = _GEMM_SIZES


def calibrate_cuda(torch: Any, budget_s: float) -> Device:
    """Measure the peaks of the current device; what was not measured is the table's, and the notes say so."""
    here = bench.Bench(torch, "cuda", bench.build_cuda_clock(torch))
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    base = resolve_device(observe_device(torch, properties)).device
    l2_bytes = getattr(properties, "L2_cache_size", None) or (base.cache_bytes if base else None)
    peaks = _measure_gemm_peaks(here, properties, budget_s)
    if base is not None and "fp64_tensor" in base.peaks and "fp64" in peaks:
        peaks["fp64_tensor"] = peaks.pop("fp64")  # cuBLAS takes the tensor cores where they have fp64
    torch.cuda.empty_cache()
    index, uuid = torch.cuda.current_device(), getattr(properties, "uuid", None)  # torch >= 2.4
    dram = bench.measure_stream_byte_per_s(here, _DRAM_WORKING_SET, 0.1 * budget_s)
    # Half of the cache, and launches back to back, so that their latency hides behind the kernels before them.
    cached = None if l2_bytes is None else bench.measure_stream_byte_per_s(here, l2_bytes // 2, 0.05 * budget_s, runs=50)
    host = bench.measure_host_copy_byte_per_s(here, 1 << 28, 0.1 * budget_s)
    floor_ns = bench.measure_cuda_launch_floor_ns(here)
    device = base or Device(id="unknown-gpu", name=properties.name, kind="gpu", provenance="measured", source="")
    table_only = {key: rate for key, rate in device.peaks.items() if key not in peaks}
    notes = [bench.format_stream_note("DRAM", _DRAM_WORKING_SET, dram)]
    if cached is not None and l2_bytes is not None:
        notes.append(bench.format_stream_note("L2 cache", l2_bytes // 2, cached))
    notes.append("Host copies: " + ", ".join(f"{name} {format_rate(rate, 'B')}" for name, rate in host.items()) + ".")
    if table_only:
        notes.append(f"Not measured, from the device table: {', '.join(sorted(table_only))}.")
    return msgspec.structs.replace(
        device,
        provenance="measured",
        source=f"measured with torch {torch.__version__}, best of repeated runs: {_CUDA_METHOD}",
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        bandwidth_byte_per_s=max(dram),
        cache_bytes=l2_bytes,
        cache_bandwidth_byte_per_s=None if cached is None else max(cached),
        peaks=table_only | peaks,
        pcie_byte_per_s=max(host.values()),
        host_copy_byte_per_s=host,
        launch_floor_ns=floor_ns,
        notes=(*notes, *list_above_table(base, peaks, max(dram)), *device.notes),
        key=build_device_key(properties.name, index, None if uuid is None else str(uuid), properties.multi_processor_count),
    )


def _measure_gemm_peaks(here: bench.Bench, properties: Any, budget_s: float) -> dict[str, float]:
    torch = here.torch
    rates: dict[str, float] = {}
    before = torch.get_float32_matmul_precision()
    try:
        for gemm in _list_gemms(torch, properties):
            torch.set_float32_matmul_precision(gemm.precision)
            both = [
                bench.measure_gemm_flop_per_s(here, gemm.dtype, gemm.sizes, 0.04 * budget_s, zeros=zeros, runs=_GEMM_RUNS)
                for zeros in (False, True)
            ]
            best = max((rate for rate in both if rate), default=None)
            if best is not None:
                rates[gemm.key] = max(best, rates.get(gemm.key, 0.0))
    finally:
        torch.set_float32_matmul_precision(before)
    return rates


def _list_gemms(torch: Any, properties: Any) -> Iterator[_Gemm]:
    """Yield the kinds of products to try. TF32 only on NVIDIA from Ampere on, where torch's 'high' precision means it."""
    hip = getattr(torch.version, "hip", None) is not None
    yield from (_Gemm("bf16", "bfloat16"), _Gemm("fp16", "float16"), _Gemm("fp32", "float32"))
    # For fp64, whose vector path is 32 to 64 times slower than fp16 on some boards
    yield _Gemm("fp64", "float64", sizes=(2048, 4096, 8192))
    yield _Gemm("int8", "int8")
    if not hip and properties.major >= 8:
        yield _Gemm("tf32", "float32", "high")
    if hip or (properties.major, properties.minor) >= (8, 9):
        # gfx942 multiplies the fnuz variant alone, gfx950 the OCP one (torch raises for the other).
        yield from (_Gemm("fp8", dtype) for dtype in ("float8_e4m3fn", *(("float8_e4m3fnuz",) if hip else ())))


_CUDA_METHOD = (
    f"peaks by {_GEMM_RUNS} square matrix products of up to {_GEMM_SIZES[-1]} rows in a row (torch.mm, torch._int_mm, torch._scaled_mm) of "
    "random numbers and of zeros, timed by CUDA events after a warm-up (fp32 with TF32 off, which is also taken as the vector rate), "
    "bandwidths by the fastest of copy_, sum and add_ beyond the L2 cache and over half of it, host link by the fastest copy, "
    "launch floor by "
    "the median duration of a one-element fill under torch.profiler; the link between devices is the table's"
)


def list_above_table(base: Device | None, peaks: dict[str, float], bandwidth: float) -> list[str]:
    """Write a line for each measured figure that is more than 3 % above the device table's: an entry that must be wrong."""
    if base is None:
        return []
    pairs = [(f"{key} peak", rate, base.peaks.get(key), "FLOP") for key, rate in peaks.items()]
    pairs.append(("memory bandwidth", bandwidth, base.bandwidth_byte_per_s, "B"))
    return [
        f"Measured {what} {format_rate(rate, unit)} is {format_share(rate / known - 1)} above the device table "
        f"({format_rate(known, unit)}): the table's entry for {base.name} is wrong."
        for what, rate, known, unit in pairs
        if known and rate > OVER_ROOF_ABOVE * known
    ]


def observe_device(torch: Any, properties: Any) -> ObservedDevice:
    """Return what torch says about the current device."""
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


CalibratedDevice = Literal["auto", "cpu", "cuda"]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64", "int8": "int8"}
_MAX_WORKING_SET = 1 << 30
_QUIET = 0.2  # CPUs that the rest of a quiet machine uses at most
_GRAIN = 32768  # elements below which ATen gives an element-wise op to one thread (at::internal::GRAIN_SIZE)


def calibrate(device: CalibratedDevice = "auto", seconds_budget: float = 10.0) -> Device:
    """Return the measured peaks of the CPU (with torch's threads as they are set) or of the current CUDA device.

    'auto' takes CUDA where torch has it. Takes about 0.7 of the budget on a CPU. Raises MissingDependencyError without torch and
    GpudiagError where the device cannot be measured.
    """
    torch = _import_torch()
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise UsageError("there is no CUDA device to measure", "torch.cuda.is_available() is False: use --device cpu")
        return calibrate_cuda(torch, seconds_budget)
    return calibrate_cpu(torch, seconds_budget)


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("peaks cannot be measured without torch", "pip install 'gpudiag[train]'") from error
    return torch


def calibrate_cpu(torch: Any, budget_s: float) -> Device:
    """Measure the peaks of the CPU with torch's threads as they are set."""
    here = bench.Bench(torch, "cpu", bench.time_on_cpu)
    threads = torch.get_num_threads()
    cache, inner = read_last_level_cache_bytes(), read_inner_cache_bytes(threads)
    sets = {"DRAM": _choose_dram_working_set(cache)}
    if cache is not None:
        sets["Last-level cache"] = min(cache // 2, 64 << 20)
    if inner is not None:
        sets["Inner caches"] = inner // 2
    began, busy_before = _read_cpu_seconds()
    floor_ns = bench.measure_cpu_launch_floor_ns(here)
    gemm, fma, special, streams = _measure_cpu(here, sets, budget_s)
    bytes_drawn = torch.empty(threads * _GRAIN, dtype=torch.uint8)
    draws_per_s = bytes_drawn.numel() / bench.measure_best_seconds(bytes_drawn.random_, bench.time_on_cpu, 0.01 * budget_s)
    half_gains = bench.measure_half_gains(here, sets["DRAM"], 0.15 * budget_s) if gemm["bf16"] else ()
    ended, busy_after = _read_cpu_seconds()
    others = max(0.0, busy_after - busy_before) / (ended - began)  # CPUs that other processes kept busy meanwhile
    peaks = {key: rate for key, rate in gemm.items() if rate}
    peaks["fp32"] = max(peaks.get("fp32", 0.0), fma)
    notes = [f"Element-wise multiply-add in the inner caches (torch.addcmul): {format_flop(fma)}/s, limited by loads and stores."]
    notes += [f"No {key} matrix multiplication on this CPU." for key, rate in gemm.items() if not rate]
    notes += [bench.format_stream_note(where, sets[where], rates) for where, rates in streams.items()]
    if cache is not None and sets["DRAM"] < 4 * cache:
        reach = f"{format_bytes(sets['DRAM'])} is {sets['DRAM'] / cache:.1f} x the last-level cache ({format_bytes(cache)})"
        notes.append(f"{reach}: the DRAM figure may hold some cache hits.")
    if others > _QUIET:
        busy = f"Other processes kept {others:.1f} CPUs busy meanwhile"
        notes.append(f"{busy}: the figures may be too low; measure again on a quiet machine.")
    best = {where: max(rates) for where, rates in streams.items()}
    return Device(
        id="cpu",
        name=read_cpu_model(),
        kind="cpu",
        provenance="measured",
        source=f"measured with torch {torch.__version__} on {threads} thread{'s'[: threads != 1]}, best of repeated runs: {_CPU_METHOD}",
        architecture=platform.machine(),
        memory_bytes=psutil.virtual_memory().total,
        bandwidth_byte_per_s=best["DRAM"],
        cache_bytes=cache,
        cache_bandwidth_byte_per_s=best.get("Last-level cache"),
        inner_cache_bytes=inner,
        inner_cache_byte_per_s=best.get("Inner caches"),
        peaks=peaks,
        special_per_s=special,
        draws_per_s=draws_per_s,
        half_gains=half_gains,
        launch_floor_ns=floor_ns,
        disturbed=others > _QUIET,
        notes=tuple(notes),
    )


_STREAM_SHARES = {"DRAM": 0.15, "Last-level cache": 0.06, "Inner caches": 0.03}
_GEMM_SHARES = {"fp32": 0.14, "bf16": 0.08, "fp16": 0.05, "fp64": 0.08, "int8": 0.04}


def _measure_cpu(
    here: bench.Bench, sets: dict[str, int], budget_s: float
) -> tuple[dict[str, float | None], float, float, dict[str, bench.Streams]]:
    """Measure FLOP/s of products by type and of multiply-adds, elementary functions per s, and streams by working set: the better of two.

    A burst of other work on the machine lowers a figure only where it strikes the same one twice.
    """
    gemm: dict[str, float | None] = dict.fromkeys(_GEMM_SHARES)
    fma, special, streams = 0.0, 0.0, dict.fromkeys(sets, bench.Streams(0.0, 0.0, 0.0))
    for _ in range(2):
        for key, part in _GEMM_SHARES.items():
            rate = bench.measure_gemm_flop_per_s(here, _DTYPES[key], (512, 1024, 2048, 4096), part * budget_s / 2)
            gemm[key] = max(rate or 0.0, gemm[key] or 0.0) or None
        fma = max(fma, bench.measure_fma_flop_per_s(here, here.torch.get_num_threads() * _GRAIN, 0.02 * budget_s / 2))
        special = max(special, bench.measure_special_per_s(here, 8 * here.torch.get_num_threads() * _GRAIN, 0.03 * budget_s / 2))
        for where, size in sets.items():
            rates = bench.measure_stream_byte_per_s(here, size, _STREAM_SHARES[where] * budget_s / 2)
            streams[where] = bench.Streams(*map(max, streams[where], rates))
    return gemm, fma, special, streams


def _read_cpu_seconds() -> tuple[float, float]:
    """Return the time of the clock, and what other processes used of this process's CPUs until then."""
    process = psutil.Process()
    every = psutil.cpu_times(percpu=True)
    usable = process.cpu_affinity() if hasattr(process, "cpu_affinity") else range(len(every))
    busy = sum(sum(every[cpu]) - every[cpu].idle - getattr(every[cpu], "iowait", 0.0) for cpu in usable if cpu < len(every))
    own = process.cpu_times()
    return time.perf_counter(), busy - (own.user + own.system)


_CPU_METHOD = (
    "peaks by torch.mm on square matrices (fp32 is also the vector rate: both run on the vector units), bandwidths by the fastest of copy_ "
    "(read + write), sum (read) and add_ (2 reads + write) over tensors beyond the last-level cache, within it and within the level "
    "before it, launch floor by the "
    "median self time of aten::empty under torch.profiler"
)


def _choose_dram_working_set(cache_bytes: int | None) -> int:
    """Return four times the last-level cache, within 1 GiB and a quarter of the free memory."""
    wanted = 4 * cache_bytes if cache_bytes else _MAX_WORKING_SET // 2
    return int(min(max(wanted, 1 << 28), _MAX_WORKING_SET, psutil.virtual_memory().available // 4))


def measure_in_child(device: CalibratedDevice = "auto", threads: int | None = None, timeout_s: float = 60.0) -> Device:
    """Return `calibrate(device)` of a fresh Python process with `threads` torch threads (None: torch's own choice).

    Raises GpudiagError with one line where the child fails, takes longer than `timeout_s` or answers nonsense.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"peaks cannot be measured on {threads} threads", "use 1 or more")
    command = [sys.executable, "-m", "gpudiag.hardware.calibration", "--json", "--device", device]
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
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        if done.returncode == UsageError.exit_code:  # what was asked for is not there: the child's line says it
            raise UsageError(lines[-1][:300])
        raise GpudiagError(f"measuring the peaks failed with exit code {done.returncode}: {lines[-1][:300]}")
    answer = (done.stdout.strip().splitlines() or [b""])[-1]  # libraries may print above it
    try:
        return msgspec.json.decode(answer, type=Device)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise GpudiagError("measuring the peaks gave no readable answer") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line asks and write the device to stdout; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gpudiag.hardware.calibration", description="Measure the peaks of this machine's device."
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of indented JSON")
    options = parser.parse_args(arguments)
    try:
        if options.threads is not None:
            _import_torch().set_num_threads(options.threads)
        device = calibrate(options.device, options.seconds)
    except GpudiagError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    text = msgspec.json.encode(device)
    sys.stdout.write((text if options.json else msgspec.json.format(text, indent=2)).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
