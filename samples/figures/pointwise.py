"""Claims about element-wise work: fusion, arithmetic intensity, dispatch."""

from __future__ import annotations

from typing import Any

from bench import Bench, Result, claim, milliseconds, ratio, teraflops


@claim("G-01", "x.cos().cos() fused takes half of the time")
def two_cosines(bench: Bench) -> Result:
    """16 bytes an element apart, 8 fused; on a CPU a cosine computes more than it moves, so that only the direction is expected."""
    x = bench.rand(bench.size(2**28, 2**24))

    def twice(value: Any) -> Any:
        return value.cos().cos()

    compiled = bench.compiled(twice)
    apart, fused = bench.seconds(lambda: twice(x)), bench.seconds(lambda: compiled(x))
    ideal = 16 * x.numel() / bench.bandwidth
    expected = f"x1.9 to x2.1, apart {milliseconds(ideal)} at best" if bench.on_gpu else "above x1.0"
    found = apart / fused
    return Result(expected, f"{ratio(found)}, apart {milliseconds(apart)}", 1.9 <= found <= 2.1 if bench.on_gpu else found > 1.0)


@claim("G-02", "repeated doubling climbs to half of the vector peak")
def repeated_doubling(bench: Bench) -> Result:
    """min(r BW / 8, P / 2) FLOP/s: once it is bound by bytes, 64 times by arithmetic where the crossover lies below."""
    bench.need_gpu()
    x, peak = bench.rand(2**26), bench.peaks.vector_peak or 0.0

    def rate(repeats: int) -> float:
        def doubled(value: Any, two: Any) -> Any:
            for _ in range(repeats):
                value = value * two  # by a tensor: a compiler would fold constants
            return value

        two, work = bench.rand(1), bench.compiled(doubled)
        return repeats * x.numel() / bench.seconds(lambda: work(x, two))

    rates = {repeats: rate(repeats) for repeats in (1, 64, 512)}
    crossover = (peak / 2) / (bench.bandwidth / 8)
    expected = f"{teraflops(bench.bandwidth / 8)} once, at most {teraflops(peak / 2)}, reached at {crossover:.0f}"
    holds = rates[1] <= bench.bandwidth / 8 * 1.03 and 0.5 * peak / 2 <= rates[512] <= peak / 2 * 1.03
    return Result(expected, ", ".join(f"{repeats}: {teraflops(found)}" for repeats, found in rates.items()), holds)


@claim("G-04", "most of a small a + b is overhead")
def small_addition(bench: Bench) -> Result:
    """A kernel of ten elements takes 1 to 2 us; issuing it 4 to 10."""
    a, b = bench.rand(10), bench.rand(10)
    whole = bench.seconds(lambda: a + b, runs=1000)
    if not bench.on_gpu:
        return Result("above 0.1 us for 10 additions", f"{whole * 1e6:.2f} us", whole > 1e-7)
    torch, graph = bench.torch, bench.torch.cuda.CUDAGraph()
    out = torch.empty_like(a)
    with torch.cuda.graph(graph):
        for _ in range(1000):
            torch.add(a, b, out=out)
    alone = bench.seconds(graph.replay) / 1000
    share = 1 - alone / whole
    return Result("80 % or more", f"{share:.0%}: {whole * 1e6:.1f} us issued, {alone * 1e6:.1f} us replayed", share >= 0.5)


@claim("G-05", "a fused gelu costs about as much as a relu")
def fused_gelu(bench: Bench) -> Result:
    """Both read and write each element once."""
    bench.need_gpu("on a CPU the arithmetic of gelu shows")
    x, functional = bench.rand(2**28, dtype="bfloat16"), bench.torch.nn.functional
    works = [bench.compiled(function) for function in (functional.gelu, functional.relu)]
    gelu, relu = (bench.seconds(lambda work=work: work(x)) for work in works)
    return Result("at most x1.10", ratio(gelu / relu), gelu / relu <= 1.10)
