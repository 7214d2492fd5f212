"""Claims about training steps: batch size, precision, checkpointing, compilation, accumulation, optimizers, CUDA graphs."""

from __future__ import annotations

import time

from bench import Bench, NotHereError, Result, claim, milliseconds, ratio
from models import convolutional, mlp, step, transformer


@claim("G-03", "twice the batch for 10 % more time: bound by overhead")
def doubling(bench: Bench) -> Result:
    """A tiny MLP hardly notices a batch of 16 for 8; a convolutional network takes nearly twice as long for 256 images as for 128."""
    tiny = mlp(bench, 256, 20)
    small, twice = (bench.seconds(step(bench, tiny, bench.rand(size, 256))) for size in (8, 16))
    images, net = bench.size(128, 16), convolutional(bench)
    some, double = (bench.seconds(step(bench, net, bench.rand(size, 3, 128, 128))) for size in (images, 2 * images))
    found = twice / small, double / some
    return Result(
        "tiny at most x1.1, large x1.8 or more", f"tiny {ratio(found[0])}, large {ratio(found[1])}", found[0] <= 1.2 and found[1] >= 1.6
    )


@claim("G-10", "empty_cache in every step slows training")
def empty_cache(bench: Bench) -> Result:
    """Each call waits for the device and gives memory back that the next step asks for again."""
    bench.need_gpu()
    run = step(bench, transformer(bench, 512, 4), bench.rand(16, 256, 512))

    def emptied() -> None:
        run()
        bench.torch.cuda.empty_cache()

    found = bench.seconds(emptied) / bench.seconds(run)
    return Result("above x1.0; documentation says about x1.1, a lecture up to x2", ratio(found), found > 1.0)


@claim("G-11", "mixed precision is faster and takes no more memory")
def mixed_precision(bench: Bench) -> Result:
    """bf16 autocast against IEEE fp32."""
    model, batch = transformer(bench, bench.size(1024, 256), 6), bench.rand(bench.size(32, 8), 256, bench.size(1024, 256))
    full, mixed = step(bench, model, batch), step(bench, model, batch, autocast="bfloat16")
    faster = bench.seconds(full) / bench.seconds(mixed)
    if not bench.on_gpu:
        return Result("reported: depends on the CPU", ratio(faster), None)
    memory = bench.peak_bytes(mixed) / bench.peak_bytes(full)
    return Result(
        "x1.5 or more; memory x0.60 to x1.05", f"{ratio(faster)}; memory {ratio(memory)}", faster >= 1.5 and 0.5 <= memory <= 1.05
    )


@claim("G-12", "checkpointing saves memory and costs up to a third more time")
def checkpointing(bench: Bench) -> Result:
    """The forward pass runs twice: 4/3 of the arithmetic."""
    batch = bench.rand(bench.size(16, 4), bench.size(512, 128), bench.size(1024, 256))
    runs = [step(bench, transformer(bench, bench.size(1024, 256), 6, checkpointed=again), batch) for again in (False, True)]
    slower = bench.seconds(runs[1]) / bench.seconds(runs[0])
    if not bench.on_gpu:
        return Result("x1.10 to x1.40", ratio(slower), 1.05 <= slower <= 1.45)
    memory = bench.peak_bytes(runs[1]) / bench.peak_bytes(runs[0])
    return Result("x1.15 to x1.35, memory below x1", f"{ratio(slower)}, memory {ratio(memory)}", 1.05 <= slower <= 1.40 and memory < 1)


@claim("G-13", "torch.compile: faster steps, a slow first one, again for a new shape")
def compilation(bench: Bench) -> Result:
    """Speed-up of the step, seconds of the first call, and of the first call with another sequence length."""
    width = bench.size(768, 256)
    model, batch = transformer(bench, width, 4), bench.rand(bench.size(32, 4), 256, width)
    eager = bench.seconds(step(bench, model, batch))
    compiled = bench.compiled(model)
    firsts = []
    for length in (256, 192):
        start = time.perf_counter()
        step(bench, compiled, batch[:, :length].contiguous())()
        bench.synchronize()
        firsts.append(time.perf_counter() - start)
    faster = eager / bench.seconds(step(bench, compiled, batch))
    holds = min(firsts) > 5 * eager and (not bench.on_gpu or faster >= 1.02)
    return Result(
        "x1.1 or more; seconds for each new shape", f"{ratio(faster)}; first {firsts[0]:.1f} s, new shape {firsts[1]:.1f} s", holds
    )


@claim("G-14", "larger batches bring more samples a second, up to saturation")
def throughput(bench: Bench) -> Result:
    """Samples a second over the batch; b_half is where half of the step is useful (fit T = a + c b)."""
    model, times = mlp(bench, 1024, 8), {}
    for size in (1, 8, 64, 512):
        times[size] = bench.seconds(step(bench, model, bench.rand(size, 1024)))
    per_sample = (times[512] - times[8]) / (512 - 8)
    half = (times[8] - 8 * per_sample) / per_sample if per_sample > 0 else float("inf")
    rates = [size / seconds for size, seconds in times.items()]
    return Result("rising", f"{' '.join(f'{rate:,.0f}' for rate in rates)} samples/s, b_half {half:.0f}", rates == sorted(rates))


@claim("G-15", "accumulation does not make training faster")
def accumulation(bench: Bench) -> Result:
    """64 samples as 64 micro-batches of 1, 16 of 4, and one of 64."""
    torch, model = bench.torch, mlp(bench, 1024, 8)
    optimizer, data = torch.optim.AdamW(model.parameters(), fused=True), bench.rand(64, 1024)

    def run(micro: int) -> float:
        def whole() -> None:
            optimizer.zero_grad()
            for part in data.split(micro):
                (model(part).square().mean() * (micro / 64)).backward()
            optimizer.step()

        return bench.seconds(whole)

    one, four, all_at_once = run(1), run(4), run(64)
    measured = f"{milliseconds(one)}, {milliseconds(four)}, {milliseconds(all_at_once)}"
    return Result("1 x 64 slowest, 64 x 1 fastest", measured, one > four >= all_at_once * 0.97)


@claim("G-16", "one fused pass beats separate passes of the optimizer")
def optimizers(bench: Bench) -> Result:
    """AdamW in fp32 moves 28 bytes a parameter when fused, 80 in separate passes."""
    torch, times = bench.torch, {}
    count, tensors = bench.size(10**9, 2 * 10**7), 64
    for name, options in (("for-loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
        parameters = [torch.nn.Parameter(bench.rand(count // tensors)) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        times[name] = bench.seconds(torch.optim.AdamW(parameters, **options).step)
        del parameters
    least = 28 * count / bench.bandwidth
    found = times["foreach"] / times["fused"]
    holds = times["fused"] >= 0.9 * least and (2.0 <= found <= 3.5 if bench.on_gpu else found > 1)
    measured = f"foreach/fused {ratio(found)}; {', '.join(f'{name} {milliseconds(value)}' for name, value in times.items())}"
    return Result(f"foreach/fused x2.5 to x3; fused {milliseconds(least)} at best", measured, holds)


@claim("G-18", "CUDA graphs remove the cost of launches")
def cuda_graphs(bench: Bench) -> Result:
    """A model of many small kernels, eager and under mode='reduce-overhead'."""
    bench.need_gpu()
    model, batch = mlp(bench, 128, 100), bench.rand(8, 128)
    with bench.torch.no_grad():
        eager = bench.seconds(lambda: model(batch))
        graphed = bench.compiled(model, mode="reduce-overhead")
        found = eager / bench.seconds(lambda: graphed(batch))
    return Result("x2 or more", ratio(found), found >= 2)


@claim("G-23", "constant group sizes use less energy than fixed numbers of groups")
def group_size(bench: Bench) -> Result:
    """Told by time alone, images a second at equal FLOP: the paper measured energy on a P100."""
    bench.need_gpu()
    images, found = bench.rand(64, 256, 56, 56), []
    for groups in (256, 16):  # one channel a group, and sixteen
        layer = bench.torch.nn.Conv2d(256, 256, 3, padding=1, groups=groups).to(bench.device)
        found.append(2 * 64 * 256 * 56 * 56 * 9 * (256 // groups) / bench.seconds(lambda: layer(images)))  # noqa: B023 - run at once
    return Result("more FLOP/s with larger groups", f"{ratio(found[1] / found[0])} FLOP/s", found[1] > found[0])


@claim("G-27", "variable clip shapes train video models several times faster")
def multigrid(bench: Bench) -> Result:
    """Multigrid schedule: a fraction of the FLOP of full clips; the claim of 4.5 also counts larger batches."""
    raise NotHereError("a schedule over a whole training, not a step: its arithmetic alone says nothing of the device")
