"""The measurements behind measured peaks. torch is handed in, so that importing this costs nothing; each returns the best of many runs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from gpudiag.model.hardware import HalfGain
from gpudiag.units import format_bytes, format_rate

Work = Callable[[], object]
Clock = Callable[[Work, int], float]
"""Seconds of one run of the work, as the mean of so many runs back to back."""

_FLOOR_CALLS = 2000

_NO_KERNEL = (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError)
"""What torch raises where a type, a device or this version has no such product."""


class Bench(NamedTuple):
    """Where and how to measure."""

    torch: Any
    device: str
    clock: Clock


class Streams(NamedTuple):
    """Rates of streaming kernels in byte/s, read and written bytes counted once each; the highest is the roof that none of them passes."""

    copy: float
    """`y.copy_(x)`: one read, one write (a CPU that reads lines before it writes them moves half as much again)."""
    read: float
    """`x.sum()`: one read."""
    update: float
    """`y.add_(x)`: two reads, one write in place."""


def time_on_cpu(work: Work, runs: int) -> float:
    """Return the seconds of one run on the CPU."""
    start = time.perf_counter()
    for _ in range(runs):
        work()
    return (time.perf_counter() - start) / runs


def build_cuda_clock(torch: Any) -> Clock:
    """Build a clock that takes the time between two CUDA events on the current stream."""

    def clock(work: Work, runs: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / runs

    return clock


def measure_best_seconds(work: Work, clock: Clock, budget_s: float, runs: int = 1) -> float:
    """Measure the shortest time of one run within the budget: the first run warms up and counts only if it used the budget up."""
    return measure_in_turn(clock, [work], budget_s, runs)[0]


def measure_gemm_flop_per_s(
    bench: Bench, dtype: str, sizes: Sequence[int], budget_s: float, *, zeros: bool = False, runs: int = 1
) -> float | None:
    """Measure the best rate of a product of square matrices (2 n^3 FLOP); None where this torch or device has no such kernel.

    torch.mm, torch._int_mm for int8, torch._scaled_mm for fp8. Sizes rise; one that would not fit into what is left of the budget is
    not tried. `zeros`: matrices of zeros, which draw less power, so that a GPU holds a higher clock. `runs` back to back are timed as one.
    """
    deadline, best = time.perf_counter() + budget_s, 0.0
    for done, size in enumerate(sizes):
        left = deadline - time.perf_counter()
        flop = 2.0 * size**3
        if best and flop / best > left / 3:
            break
        try:
            seconds = measure_best_seconds(_build_matmul(bench, dtype, size, zeros=zeros), bench.clock, left / (len(sizes) - done), runs)
        except _NO_KERNEL:
            return best or None
        best = max(best, flop / seconds)
    return best


def _build_matmul(bench: Bench, dtype: str, size: int, *, zeros: bool) -> Work:
    torch = bench.torch
    kind = getattr(torch, dtype)
    matrices = (torch.empty(size, size, device=bench.device) for _ in range(2))  # one after the other: float32 takes the most memory
    left, right = ((matrix.zero_() if zeros else matrix.uniform_(-1, 1)).to(kind) for matrix in matrices)
    if dtype == "int8":
        return lambda: torch._int_mm(left, right.t())
    if dtype.startswith("float8"):
        scale = torch.ones((), device=bench.device)
        return lambda: torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    out = torch.empty(size, size, device=bench.device, dtype=kind)
    return lambda: torch.mm(left, right, out=out)


def measure_stream_byte_per_s(bench: Bench, working_set_bytes: int, budget_s: float, runs: int = 1) -> Streams:
    """Measure the rates of copy, reduction and in-place addition of fp32 over two tensors that make up the working set."""
    count = working_set_bytes // 8
    source = bench.torch.ones(count, device=bench.device)
    target = bench.torch.ones(count, device=bench.device)
    kernels: tuple[Work, ...] = (lambda: target.copy_(source), source.sum, lambda: target.add_(source))
    best = measure_in_turn(bench.clock, kernels, budget_s, runs)
    return Streams(*(size * count / seconds for size, seconds in zip((8, 4, 12), best, strict=True)))


def measure_in_turn(clock: Clock, works: Sequence[Work], budget_s: float, runs: int = 1) -> list[float]:
    """Measure the shortest seconds of each work, in turn, so that a slow moment of the machine does not fall on one of them alone."""
    deadline = time.perf_counter() + budget_s
    best, times = [clock(work, 1) for work in works], [math.inf] * len(works)  # the first warm up; they count where there are no others
    while time.perf_counter() < deadline:
        best = times = [min(before, clock(work, runs)) for before, work in zip(times, works, strict=True)]
    return best


def measure_fma_flop_per_s(bench: Bench, elements: int, budget_s: float) -> float:
    """Measure the rate of torch.addcmul (one fp32 multiply-add an element) on tensors that stay in the inner caches."""
    torch = bench.torch
    first, second, third = (torch.ones(elements, device=bench.device) for _ in range(3))
    out = torch.empty_like(first)
    return 2 * elements / measure_best_seconds(lambda: torch.addcmul(first, second, third, out=out), bench.clock, budget_s)


def measure_special_per_s(bench: Bench, elements: int, budget_s: float) -> float:
    """Measure the rate of torch.exp (one elementary function of fp32 an element) on tensors that stay in the caches."""
    numbers = bench.torch.ones(elements, device=bench.device)
    out = bench.torch.empty_like(numbers)
    return elements / measure_best_seconds(lambda: bench.torch.exp(numbers, out=out), bench.clock, budget_s)


_HALF_WORK: tuple[tuple[Literal["gemm", "conv", "attention", "add"], int, int], ...] = (
    ("gemm", 16, 256), ("gemm", 16, 1024), ("gemm", 64, 64), ("gemm", 64, 256), ("gemm", 64, 1024), ("gemm", 256, 256), ("gemm", 256, 1024),
    ("gemm", 1024, 1024), ("conv", 16, 16), ("conv", 64, 64), ("conv", 128, 128),
    ("attention", 32, 64), ("attention", 128, 64), ("attention", 512, 64), ("add", 1, 1),
)  # fmt: skip
"""What is measured in both types, as HalfGain describes it: small layers are slower in bf16, for their casts, and short attention for its blocks."""

_HALF_PASSES = 3


def measure_half_gains(bench: Bench, working_set_bytes: int, budget_s: float) -> tuple[HalfGain, ...]:
    """Measure what bf16 gives: layers, forward and backward, in autocast and in fp32 by turns; () where they cannot run.

    Convolutions in both memory formats. The median of all pairs of three passes: other work on the machine, and where the heap puts fresh
    memory, strike single pairs.
    """
    torch = bench.torch
    ratios: list[list[float]] = [[] for _ in _HALF_WORK]

    def train(apply: Callable[..., Any], layers: list[list[Any]], *, half: bool) -> None:
        for operands in layers:
            with torch.autocast(bench.device, dtype=torch.bfloat16, enabled=half):
                y = apply(*operands)
            torch.autograd.grad(y, operands, torch.ones_like(y))

    def build(kind: str, least: int, other: int) -> list[Work]:
        if kind == "add":
            numbers = [torch.ones(working_set_bytes // 8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
            return [partial(torch.add, each, each) for each in numbers]
        apply, shapes = {
            "gemm": (torch.nn.functional.linear, ([least, other], [other, other])),
            "conv": (torch.conv2d, ([8, least, 16, 16], [other, least, 3, 3])),
            "attention": (torch.nn.functional.scaled_dot_product_attention, ([2, 8, least, other],) * 3),
        }[kind]
        formats = [torch.contiguous_format, *([torch.channels_last] if kind == "conv" else [])]
        layers = [[torch.rand(shape).to(memory_format=each).requires_grad_() for shape in shapes] for each in formats]
        return [partial(train, apply, layers, half=half) for half in (False, True)]

    try:
        for found, work in [*zip(ratios, _HALF_WORK, strict=True)] * _HALF_PASSES:
            plain, half = build(*work)
            plain(), half()  # libraries set themselves up for each size
            deadline, first = time.perf_counter() + budget_s / (_HALF_PASSES * len(ratios)), len(found)
            while len(found) == first or time.perf_counter() < deadline:
                found.append(bench.clock(plain, 1) / bench.clock(half, 1))
    except _NO_KERNEL:
        return ()
    return tuple(HalfGain(kind, statistics.median(found), *sizes) for (kind, *sizes), found in zip(_HALF_WORK, ratios, strict=True))


def measure_cpu_launch_floor_ns(bench: Bench) -> float | None:
    """Measure the median self time of aten::empty for no elements, in ns, under torch.profiler with shapes; None if it records nothing."""
    torch = bench.torch
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for _ in range(_FLOOR_CALLS):
            torch.empty(0)
    times = [event.self_cpu_time_total * 1e3 for event in profile.events() if event.name == "aten::empty"]
    return statistics.median(times) if times else None


def measure_cuda_launch_floor_ns(bench: Bench) -> float | None:
    """Measure the median duration of a kernel that fills one element, in ns, under torch.profiler; None if it records none."""
    torch = bench.torch
    one = torch.empty(1, device=bench.device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_FLOOR_CALLS // 10):
            one.fill_(1.0)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    times = [event.time_range.elapsed_us() * 1e3 for event in kernels]
    return statistics.median(times) if times else None


def measure_host_copy_byte_per_s(bench: Bench, nbytes: int, budget_s: float) -> dict[str, float]:
    """Measure the rates of host-to-device (h2d) and device-to-host (d2h) copies from and to pinned and pageable memory."""
    torch = bench.torch
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    rates: dict[str, float] = {}
    for kind in ("pinned", "pageable"):
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=kind == "pinned")
        up = measure_best_seconds(lambda host=host: on_device.copy_(host, non_blocking=True), bench.clock, budget_s / 4)  # type: ignore[misc]
        down = measure_best_seconds(lambda host=host: host.copy_(on_device, non_blocking=True), bench.clock, budget_s / 4)  # type: ignore[misc]
        rates |= {f"h2d {kind}": nbytes / up, f"d2h {kind}": nbytes / down}
    return rates


def format_stream_note(where: str, working_set: int, rates: Streams) -> str:
    """Return the rates as a sentence."""
    each = ", ".join(f"{name} {format_rate(rate, 'B')}" for name, rate in zip(rates._fields, rates, strict=True))
    return f"{where}, {format_bytes(working_set)} working set: {each}."
