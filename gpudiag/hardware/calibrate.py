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
from gpudiag.hardware.calibrate_cuda import calibrate_cuda
from gpudiag.hardware.cpu import cpu_model_name, inner_cache_bytes, last_level_cache_bytes
from gpudiag.hardware.peaks_cache import cache_key, load_cached, store_cached
from gpudiag.model.hardware import Device
from gpudiag.units import format_bytes, format_flop

__all__ = ["cache_key", "calibrate", "load_cached", "measure_in_child", "store_cached"]

CalibratedDevice = Literal["auto", "cpu", "cuda"]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64", "int8": "int8"}
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
            raise UsageError("there is no CUDA device to measure", "torch.cuda.is_available() is False: use --device cpu")
        return calibrate_cuda(torch, seconds_budget)
    return _calibrate_cpu(torch, seconds_budget)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("peaks cannot be measured without torch", "pip install 'gpudiag[train]'") from error
    return torch


class _CpuRates(NamedTuple):
    """What one pass over the CPU measured."""

    gemm: dict[str, float | None]
    fma: float
    dram: bench.Streams
    cached: bench.Streams | None
    inner: bench.Streams | None


class _Sets(NamedTuple):
    """Working sets of the streams in bytes: beyond the last-level cache, within it, within the level before it."""

    dram: int
    cached: int | None
    inner: int | None


def _calibrate_cpu(torch: Any, budget_s: float) -> Device:
    here = bench.Bench(torch, "cpu", bench.cpu_clock)
    cache = last_level_cache_bytes()
    threads = torch.get_num_threads()
    inner = inner_cache_bytes(threads)
    sets = _Sets(_dram_working_set(cache), cache and min(cache // 2, _CACHE_WORKING_SET), inner and inner // 2)
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
        source=f"measured with torch {torch.__version__} on {threads} thread{'s'[: threads != 1]}, best of repeated runs: {_CPU_METHOD}",
        architecture=platform.machine(),
        memory_bytes=psutil.virtual_memory().total,
        bandwidth_byte_per_s=rates.dram.best,
        cache_bytes=cache,
        cache_bandwidth_byte_per_s=None if rates.cached is None else rates.cached.best,
        inner_cache_bytes=inner,
        inner_cache_byte_per_s=None if rates.inner is None else rates.inner.best,
        peaks=peaks,
        launch_floor_ns=floor_ns,
        notes=_cpu_notes(rates, sets, cache, others),
    )


def _measure_cpu(here: bench.Bench, sets: _Sets, budget_s: float) -> _CpuRates:
    share = {"fp32": 0.14, "bf16": 0.08, "fp16": 0.05, "fp64": 0.08, "int8": 0.04}

    def streams(working_set: int | None, part: float) -> bench.Streams | None:
        return None if working_set is None else bench.stream_byte_per_s(here, working_set, part * budget_s)

    return _CpuRates(
        {key: bench.gemm_flop_per_s(here, _DTYPES[key], (512, 1024, 2048, 4096), part * budget_s) for key, part in share.items()},
        bench.fma_flop_per_s(here, here.torch.get_num_threads() * _GRAIN, 0.03 * budget_s),
        bench.stream_byte_per_s(here, sets.dram, 0.15 * budget_s),
        streams(sets.cached, 0.06),
        streams(sets.inner, 0.03),
    )


def _better(one: _CpuRates, two: _CpuRates) -> _CpuRates:
    return _CpuRates(
        {key: max(rate, two.gemm[key] or 0.0) if rate else two.gemm[key] for key, rate in one.gemm.items()},
        max(one.fma, two.fma),
        bench.Streams(*map(max, one.dram, two.dram)),
        *(bench.Streams(*map(max, a, b)) if a and b else None for a, b in ((one.cached, two.cached), (one.inner, two.inner))),
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
    "(read + write), sum (read) and add_ (2 reads + write) over tensors beyond the last-level cache, within it and within the level "
    "before it, launch floor by the "
    "median self time of aten::empty under torch.profiler"
)


def _dram_working_set(cache_bytes: int | None) -> int:
    """Return four times the last-level cache, within 1 GiB and a quarter of the free memory."""
    wanted = 4 * cache_bytes if cache_bytes else _MAX_WORKING_SET // 2
    return int(min(max(wanted, 1 << 28), _MAX_WORKING_SET, psutil.virtual_memory().available // 4))


def _cpu_notes(rates: _CpuRates, sets: _Sets, cache: int | None, others: float) -> tuple[str, ...]:
    notes = [f"Element-wise multiply-add in the inner caches (torch.addcmul): {format_flop(rates.fma)}/s, limited by loads and stores."]
    notes += [f"No {key} matrix multiplication on this CPU." for key, rate in rates.gemm.items() if not rate]
    every = (("DRAM", sets.dram, rates.dram), ("Last-level cache", sets.cached, rates.cached), ("Inner caches", sets.inner, rates.inner))
    notes += [bench.stream_note(where, size, streams) for where, size, streams in every if size is not None and streams is not None]
    if cache is not None and sets.dram < 4 * cache:
        reach = f"{format_bytes(sets.dram)} is {sets.dram / cache:.1f} x the last-level cache ({format_bytes(cache)})"
        notes.append(f"{reach}: the DRAM figure may hold some cache hits.")
    if others > _QUIET:
        notes.append(
            f"Other processes kept {others:.1f} CPUs busy meanwhile: the figures may be too low; measure again on a quiet machine."
        )
    return tuple(notes)


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
