"""Claims about input, attention, inference, offloading and hardware counters."""

from __future__ import annotations

import time
from typing import Any

from bench import Bench, NotHereError, Result, claim, ratio
from models import step, transformer


@claim("G-17", "workers and pinned memory hide the input")
def input_pipeline(bench: Bench) -> Result:
    """A data set that takes 2 ms an item, without and with workers; copies from pageable and pinned memory."""
    data = bench.torch.utils.data

    class Slow(data.Dataset):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return 512

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.002)
            return bench.torch.zeros(64)

    def seconds(workers: int) -> float:
        start = time.perf_counter()
        for _ in data.DataLoader(Slow(), batch_size=16, num_workers=workers):
            pass
        return time.perf_counter() - start

    faster = seconds(0) / seconds(4)
    if not bench.on_gpu:
        return Result("x2 or more with 4 workers", ratio(faster), faster >= 2)
    host, device = bench.torch.zeros(2**26), bench.rand(2**26)
    pinned = host.pin_memory()
    copies = bench.seconds(lambda: device.copy_(host)) / bench.seconds(lambda: device.copy_(pinned, non_blocking=True))
    return Result("workers x2 or more; pinned x1.5 or more", f"{ratio(faster)}; pinned {ratio(copies)}", faster >= 2 and copies >= 1.5)


def _attention(bench: Bench, backend: Any, length: int) -> float:
    torch = bench.torch
    q, k, v = (bench.rand(1, 16, length, 64, dtype="bfloat16") for _ in range(3))
    with torch.nn.attention.sdpa_kernel(backend):
        return bench.seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@claim("G-19", "flash attention: the longer, the larger its lead")
def flash_attention(bench: Bench) -> Result:
    """The plain form writes scores of S x S; the fused one never does."""
    backends = bench.torch.nn.attention.SDPBackend
    lengths = (1024, 4096, 16384) if bench.on_gpu else (256, 1024, 2048)
    found = [_attention(bench, backends.MATH, length) / _attention(bench, backends.FLASH_ATTENTION, length) for length in lengths]
    return Result("above x1 and rising", " ".join(ratio(value) for value in found), found[-1] > 1 and found[-1] > found[0])


@claim("G-20", "reading a prompt is far faster a token than writing one")
def prefill(bench: Bench) -> Result:
    """Tokens a second of a linear stack with 1 and 256 rows: with one the weights are read for every token."""
    weights = [bench.rand(4096, 4096, dtype="bfloat16") for _ in range(bench.size(8, 2))]

    def rate(rows: int) -> float:
        x = bench.rand(rows, 4096, dtype="bfloat16")

        def stack() -> None:
            out = x
            for weight in weights:
                out = out @ weight

        return rows / bench.seconds(stack)

    found = rate(256) / rate(1)
    most = bench.bandwidth / (2 * 4096 * 4096 * len(weights))
    return Result(f"x10 or more; one row at most {most:,.0f} tokens/s", ratio(found), found >= 10)


@claim("G-21", "4-bit weights speed up decoding")
def quantised(bench: Bench) -> Result:
    """At most 4 times against 16 bit, by the bytes of the weights; measured where torchao is installed."""
    bench.need_gpu()
    try:
        from torchao.quantization import int4_weight_only, quantize_
    except ImportError:
        raise NotHereError("torchao is not installed: at most x4 by the bytes of the weights") from None
    layers = [bench.torch.nn.Linear(8192, 8192, bias=False, device=bench.device, dtype=bench.torch.bfloat16) for _ in range(2)]
    quantize_(layers[1], int4_weight_only())
    x = bench.rand(1, 8192, dtype="bfloat16")
    with bench.torch.no_grad():
        plain, small = (bench.seconds(lambda layer=layer: layer(x), runs=10) for layer in layers)
    return Result("at most x4", ratio(plain / small), plain / small <= 4)


@claim("G-24", "linear attention overtakes flash attention beyond some thousand tokens")
def linear_attention(bench: Bench) -> Result:
    """A chunked form without decay: within a chunk as attention, across chunks by a running sum of k^T v."""
    bench.need_gpu()
    torch = bench.torch

    def linear(q: Any, k: Any, v: Any) -> Any:
        chunks = [tensor.unflatten(2, (-1, 128)) for tensor in (q, k, v)]
        states = (chunks[1].transpose(-1, -2) @ chunks[2]).cumsum(2)
        before = torch.nn.functional.pad(states[:, :, :-1], (0, 0, 0, 0, 1, 0))
        return chunks[0] @ before + torch.tril(chunks[0] @ chunks[1].transpose(-1, -2)) @ chunks[2]

    work, found = bench.compiled(linear), {}
    for length in (1024, 2048, 4096, 8192, 16384):
        q, k, v = (bench.rand(1, 16, length, 64, dtype="bfloat16") for _ in range(3))
        found[length] = _attention(bench, torch.nn.attention.SDPBackend.FLASH_ATTENTION, length) / bench.seconds(lambda: work(q, k, v))  # noqa: B023
    crossover = next((length for length, lead in found.items() if lead > 1), None)
    return Result("between 2,048 and 8,192 tokens", f"{crossover}", crossover is not None and 1024 < crossover <= 8192)


@claim("G-25", "activations in host memory halve what the GPU holds")
def offloaded(bench: Bench) -> Result:
    """torch.autograd.graph.save_on_cpu with pinned memory; its cost is the copies over the host link."""
    bench.need_gpu()
    torch, model, batch = bench.torch, transformer(bench, 1024, 6), bench.rand(16, 512, 1024)
    plain = step(bench, model, batch)

    def kept_on_the_host() -> None:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            plain()

    memory = bench.peak_bytes(kept_on_the_host) / bench.peak_bytes(plain)
    slower = bench.seconds(kept_on_the_host) / bench.seconds(plain)
    return Result("memory x0.4 to x0.7; slower without overlap", f"memory {ratio(memory)}, time {ratio(slower)}", memory < 0.8)


@claim("G-26", "reading host rows from the GPU beats gathering them on the CPU")
def zero_copy(bench: Bench) -> Result:
    """A gather on the CPU and a copy, against a kernel that reads pinned host memory itself."""
    raise NotHereError("needs a kernel over unified addressing; PyTorch has no public way to index pinned host memory from the GPU")


@claim("G-28", "hardware counters agree with the roofline classes")
def counters(bench: Bench) -> Result:
    """GPM counters of Hopper: matrix units busy in products, DRAM busy in element-wise work."""
    raise NotHereError("needs GPM counters over time; compare `gpudiag report` with Nsight Compute")
