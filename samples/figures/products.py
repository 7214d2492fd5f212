"""Claims about matrix products: precision, alignment, rows, asynchronous launches, tuning."""

from __future__ import annotations

import time

from bench import Bench, Result, claim, milliseconds, ratio, teraflops


def _rate(bench: Bench, m: int, n: int, k: int, dtype: str) -> float:
    """Return FLOP/s of an m x k by k x n product."""
    a, b = bench.rand(m, k, dtype=dtype), bench.rand(k, n, dtype=dtype)
    return 2 * m * n * k / bench.seconds(lambda: a @ b, runs=3)


@claim("G-06", "matrix units beat vector units many times over")
def tensor_cores(bench: Bench) -> Result:
    """8192^3 in fp32, TF32 and bf16 against the peaks; a rate above a peak would be a wrong peak."""
    size, before = bench.size(8192, 2048), bench.torch.get_float32_matmul_precision()
    found: dict[str, float] = {}
    try:
        for name, dtype, precision in (("fp32", "float32", "highest"), ("tf32", "float32", "high"), ("bf16", "bfloat16", "highest")):
            if name != "tf32" or bench.on_gpu:
                bench.torch.set_float32_matmul_precision(precision)
                found[name] = _rate(bench, size, size, size, dtype)
    finally:
        bench.torch.set_float32_matmul_precision(before)
    peaks = {name: bench.need_peak(name) for name in found}
    holds = all(found[name] <= 1.05 * peaks[name] for name in found) and (not bench.on_gpu or found["bf16"] >= 0.5 * peaks["bf16"])
    expected = "at most " + ", ".join(f"{name} {teraflops(peak)}" for name, peak in peaks.items())
    return Result(expected, ", ".join(f"{name} {teraflops(rate)}" for name, rate in found.items()), holds)


@claim("G-07", "odd sizes cost matrix products dearly, multiples of 8 hardly")
def alignment(bench: Bench) -> Result:
    """n = 4097 against 4096, and multiples of 8 against multiples of 64."""
    bench.need_gpu("alignment is a matter of GPU matrix units")
    rates = {n: _rate(bench, 4096, n, 4096, "bfloat16") for n in (4096, 4097, 4100, 4104, 4160)}
    odd, eight = rates[4096] / rates[4097], rates[4160] / rates[4104]
    return Result("4097: x1.3 or more; 4104 within 15 %", f"4097: {ratio(odd)}; 4104: {ratio(eight)}", odd >= 1.3 and eight <= 1.15)


@claim("G-08", "more than about 128 rows leave the memory-bound regime")
def rows(bench: Bench) -> Result:
    """A 4096 x 4096 layer: the rows at which half of the best rate is reached lie near half of the ridge."""
    ridge = bench.need_peak("bf16") / bench.bandwidth
    rates = {m: _rate(bench, m, 4096, 4096, "bfloat16") for m in (1, 4, 16, 64, 128, 256, 512, 1024, 4096) if bench.on_gpu or m <= 512}
    best = max(rates.values())
    knee = next(m for m, rate in rates.items() if rate >= best / 2)
    return Result(f"between {ridge / 8:.0f} and {ridge * 2:.0f} (ridge {ridge:.0f})", f"{knee}", ridge / 8 <= knee <= ridge * 2)


@claim("G-09", "timing without synchronisation measures the launch alone")
def launch_only(bench: Bench) -> Result:
    """A product of 8192^3 takes over a millisecond; its launch returns at once."""
    bench.need_gpu("work on a CPU is synchronous")
    a = bench.rand(8192, 8192, dtype="bfloat16")
    whole = bench.seconds(lambda: a @ a)
    bench.synchronize()
    start = time.perf_counter()
    a @ a
    launch = time.perf_counter() - start
    least = 2 * 8192**3 / bench.need_peak("bf16")
    holds = launch < 0.3 * whole and whole >= 0.97 * least
    return Result(f"launch far below {milliseconds(least)}", f"{milliseconds(launch)} of {milliseconds(whole)}", holds)


@claim("G-22", "autotuned products leave head-room in the default choice")
def autotuning(bench: Bench) -> Result:
    """Told, not judged: how much max-autotune gains over a grid of shapes."""
    bench.need_gpu()
    gains = []
    for m, n, k in ((512, 4096, 4096), (4096, 4096, 1024), (8192, 1024, 8192)):
        a, b = bench.rand(m, k, dtype="bfloat16"), bench.rand(k, n, dtype="bfloat16")
        tuned = bench.compiled(bench.torch.matmul, mode="max-autotune-no-cudagraphs")
        gains.append(bench.seconds(lambda: a @ b) / bench.seconds(lambda: tuned(a, b)))  # noqa: B023 - run at once
    return Result("reported: papers claim up to x1.22", " ".join(ratio(gain) for gain in gains), None)
