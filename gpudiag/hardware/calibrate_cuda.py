"""Measured peaks of the current CUDA or HIP device. torch is handed in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from gpudiag.hardware import benchmarks as bench
from gpudiag.hardware.resolve import resolve
from gpudiag.model.cost import OVER_ROOF_ABOVE
from gpudiag.model.hardware import Device, ObservedDevice, device_key
from gpudiag.units import format_rate, format_share

_DRAM_WORKING_SET = 1 << 30
_HOST_COPY = 1 << 28
_RUNS = 4
"""Products timed as one, so that what an event costs does not count."""
_SIZES = (4096, 8192, 16384)
_SMALL_SIZES = (2048, 4096, 8192)
"""For fp64, whose vector path is 32 to 64 times slower than fp16 on some boards."""


class _Gemm(NamedTuple):
    """One kind of matrix product: key of Device.peaks, torch type, float32 matmul precision, sizes."""

    key: str
    dtype: str
    precision: str = "highest"
    sizes: tuple[int, ...] = _SIZES


class _Rates(NamedTuple):
    """What was measured."""

    peaks: dict[str, float]
    dram: bench.Streams
    cached: bench.Streams | None
    host: dict[str, float]
    floor_ns: float | None


def calibrate_cuda(torch: Any, budget_s: float) -> Device:
    """Return the current device with measured peaks; what was not measured is the table's, and the notes say so."""
    here = bench.Bench(torch, "cuda", bench.cuda_clock(torch))
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    base = resolve(observe(torch, properties)).device
    l2_bytes = getattr(properties, "L2_cache_size", None) or (base.cache_bytes if base else None)
    return _device(torch, properties, base, l2_bytes, _measure(here, properties, base, l2_bytes, budget_s))


def _measure(here: bench.Bench, properties: Any, base: Device | None, l2_bytes: int | None, budget_s: float) -> _Rates:
    peaks = _peaks(here, properties, budget_s)
    if base is not None and "fp64_tensor" in base.peaks and "fp64" in peaks:
        peaks["fp64_tensor"] = peaks.pop("fp64")  # cuBLAS takes the tensor cores where they have fp64
    here.torch.cuda.empty_cache()
    return _Rates(
        peaks,
        bench.stream_byte_per_s(here, _DRAM_WORKING_SET, 0.1 * budget_s),
        # Half of the cache, and launches back to back, so that their latency hides behind the kernels before them.
        None if l2_bytes is None else bench.stream_byte_per_s(here, l2_bytes // 2, 0.05 * budget_s, runs=50),
        bench.host_copy_byte_per_s(here, _HOST_COPY, 0.1 * budget_s),
        bench.cuda_launch_floor_ns(here),
    )


def _peaks(here: bench.Bench, properties: Any, budget_s: float) -> dict[str, float]:
    """Return the GEMM rates by type, the better of random numbers and zeros (which draw less power)."""
    torch = here.torch
    rates: dict[str, float] = {}
    before = torch.get_float32_matmul_precision()
    try:
        for gemm in _gemms(torch, properties):
            torch.set_float32_matmul_precision(gemm.precision)
            both = [
                bench.gemm_flop_per_s(here, gemm.dtype, gemm.sizes, 0.04 * budget_s, zeros=zeros, runs=_RUNS) for zeros in (False, True)
            ]
            best = max((rate for rate in both if rate), default=None)
            if best is not None:
                rates[gemm.key] = max(best, rates.get(gemm.key, 0.0))
    finally:
        torch.set_float32_matmul_precision(before)
    return rates


def _gemms(torch: Any, properties: Any) -> Iterator[_Gemm]:
    """Yield the kinds of products to try. TF32 only on NVIDIA from Ampere on, where torch's 'high' precision means it."""
    hip = getattr(torch.version, "hip", None) is not None
    yield from (_Gemm("bf16", "bfloat16"), _Gemm("fp16", "float16"), _Gemm("fp32", "float32"))
    yield _Gemm("fp64", "float64", sizes=_SMALL_SIZES)
    yield _Gemm("int8", "int8")
    if not hip and properties.major >= 8:
        yield _Gemm("tf32", "float32", "high")
    if hip or (properties.major, properties.minor) >= (8, 9):
        # gfx942 multiplies the fnuz variant alone, gfx950 the OCP one (torch raises for the other).
        yield from (_Gemm("fp8", dtype) for dtype in ("float8_e4m3fn", *(("float8_e4m3fnuz",) if hip else ())))


def _device(torch: Any, properties: Any, base: Device | None, l2_bytes: int | None, rates: _Rates) -> Device:
    index = torch.cuda.current_device()
    device = base or Device(id="unknown-gpu", name=properties.name, kind="gpu", provenance="measured", source="")
    table_only = {key: rate for key, rate in device.peaks.items() if key not in rates.peaks}
    return msgspec.structs.replace(
        device,
        provenance="measured",
        source=f"measured with torch {torch.__version__}, best of repeated runs: {_METHOD}",
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        bandwidth_byte_per_s=rates.dram.best,
        cache_bytes=l2_bytes,
        cache_bandwidth_byte_per_s=None if rates.cached is None else rates.cached.best,
        peaks=table_only | rates.peaks,
        pcie_byte_per_s=max(rates.host.values()),
        host_copy_byte_per_s=rates.host,
        launch_floor_ns=rates.floor_ns,
        notes=(*_notes(rates, base, table_only, l2_bytes), *device.notes),
        key=device_key(properties.name, index, _uuid(properties), properties.multi_processor_count),
    )


def _uuid(properties: Any) -> str | None:
    found = getattr(properties, "uuid", None)  # torch >= 2.4
    return None if found is None else str(found)


_METHOD = (
    f"peaks by {_RUNS} square matrix products of up to {_SIZES[-1]} rows in a row (torch.mm, torch._int_mm, torch._scaled_mm) of random "
    "numbers and of zeros, timed by CUDA events after a warm-up (fp32 with TF32 off, which is also taken as the vector rate), bandwidths "
    "by the fastest of copy_, sum and add_ beyond the L2 cache and over half of it, host link by the fastest copy, launch floor by "
    "the median duration of a one-element fill under torch.profiler; the link between devices is the table's"
)


def _notes(rates: _Rates, base: Device | None, table_only: dict[str, float], l2_bytes: int | None) -> list[str]:
    notes = [bench.stream_note("DRAM", _DRAM_WORKING_SET, rates.dram)]
    if rates.cached is not None and l2_bytes is not None:
        notes.append(bench.stream_note("L2 cache", l2_bytes // 2, rates.cached))
    notes.append("Host copies: " + ", ".join(f"{name} {format_rate(rate, 'B')}" for name, rate in rates.host.items()) + ".")
    if table_only:
        notes.append(f"Not measured, from the device table: {', '.join(sorted(table_only))}.")
    return [*notes, *above_table(base, rates.peaks, rates.dram.best)]


def above_table(base: Device | None, peaks: dict[str, float], bandwidth: float) -> list[str]:
    """Return a line for each measured figure that is more than 3 % above the device table's: an entry that must be wrong."""
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


def observe(torch: Any, properties: Any) -> ObservedDevice:
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
