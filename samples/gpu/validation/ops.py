"""The ops that the roofline is checked on: each is made once, and called without arguments. Their data is many times the L2 cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

Call = Callable[[], Any]

MARK = "gpudiag-op."
"""Before the name of an op in record_function and NVTX ranges; ncu separates its fields by colons, which no name holds."""


class Sizes(NamedTuple):
    """Where the ops run, whether in sizes for a GPU, and how many times as long every dimension that may grow is."""

    device: str
    large: bool
    grown: int = 1

    def of(self, on_gpu: int, on_cpu: int) -> int:
        """Return a dimension that grows."""
        return (on_gpu if self.large else on_cpu) * self.grown

    def rand(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return random numbers; zeros draw less power and show no unwritten output."""
        return torch.randn(*shape, device=self.device, dtype=dtype)


def _product(size: Sizes, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    left, right = size.rand(m, k, dtype=dtype), size.rand(k, n, dtype=dtype)
    return lambda: left @ right


def _square(on_gpu: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[Sizes], Call]:
    return lambda size: _product(size, *(3 * (size.of(on_gpu, 256 - on_gpu % 2),)), dtype)


def _tf32(size: Sizes) -> Call:
    product = _product(size, *(3 * (size.of(8192, 256),)), torch.float32)

    def call() -> Any:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return product()
        finally:
            torch.set_float32_matmul_precision(before)

    return call


def _skinny(rows: int) -> Callable[[Sizes], Call]:
    return lambda size: _product(size, rows, size.of(16384, 512), size.of(16384, 512))


def _batched(size: Sizes) -> Call:
    left, right = (size.rand(size.of(64, 4), 2048 if size.large else 64, 2048 if size.large else 64) for _ in range(2))
    return lambda: torch.bmm(left, right)


def _linear(size: Sizes) -> Call:
    layer = torch.nn.Linear(4096 if size.large else 128, 4096 if size.large else 128, device=size.device, dtype=torch.bfloat16)
    rows = size.rand(size.of(32768, 256), layer.in_features)
    return lambda: layer(rows)


def _convolution(kernel: int, outputs: int, layout: torch.memory_format, *, depthwise: bool = False) -> Callable[[Sizes], Call]:
    def make(size: Sizes) -> Call:
        channels, side = (256, 128) if size.large else (16, 16)
        wide = channels if depthwise else max(1, outputs * channels // 256)
        layer = torch.nn.Conv2d(
            channels, wide, kernel, padding=kernel // 2, bias=False, groups=channels if depthwise else 1,
            device=size.device, dtype=torch.bfloat16,
        ).to(memory_format=layout)  # fmt: skip
        images = size.rand(size.of(32, 2), channels, side, side).to(memory_format=layout)
        return lambda: layer(images)

    return make


def _attention(backend: str, batch: int, length: int) -> Callable[[Sizes], Call]:
    def make(size: Sizes) -> Call:
        shape = (batch, 16, size.of(length, 64), 128) if size.large else (1, 2, size.of(length, 64), 16)
        query, key, value = (size.rand(*shape) for _ in range(3))
        kind = getattr(torch.nn.attention.SDPBackend, backend)

        def call() -> Any:
            with torch.nn.attention.sdpa_kernel(kind):
                return functional.scaled_dot_product_attention(query, key, value)

        return call

    return make


def _rows(function: Callable[[torch.Tensor], Any], width: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Callable[[Sizes], Call]:
    def make(size: Sizes) -> Call:
        x = size.rand(size.of(2**29 // width // dtype.itemsize, 64), width if size.large else 256, dtype=dtype)
        return lambda: function(x)

    return make


def _layer_norm(x: torch.Tensor) -> Any:
    return functional.layer_norm(x, x.shape[-1:])


def _batch_norm(size: Sizes) -> Call:
    x = size.rand(size.of(64, 2), 256 if size.large else 8, 112 if size.large else 8, 112 if size.large else 8)
    layer = torch.nn.BatchNorm2d(x.shape[1], device=size.device)
    return lambda: layer(x)


def _group_norm(size: Sizes) -> Call:
    x = size.rand(size.of(64, 2), 256 if size.large else 8, 112 if size.large else 8, 112 if size.large else 8)
    return lambda: functional.group_norm(x, 8)


def _add(size: Sizes) -> Call:
    left, right = (size.rand(size.of(2**28, 2**16), dtype=torch.float32) for _ in range(2))
    return lambda: left + right


def _embedding(size: Sizes) -> Call:
    table = size.rand(2**20 if size.large else 1024, 512 if size.large else 64)
    ids = torch.randint(len(table), (size.of(2**20, 4096),), device=size.device)
    return lambda: functional.embedding(ids, table)


def _gather(size: Sizes) -> Call:
    rows = size.rand(size.of(2**19, 1024), 512 if size.large else 64)
    order = torch.randperm(len(rows), device=size.device)
    return lambda: rows.index_select(0, order)


def _transpose(size: Sizes) -> Call:
    x = size.rand(size.of(16384, 256), 16384 if size.large else 256)
    return lambda: x.t().contiguous()


def _concatenate(size: Sizes) -> Call:
    parts = [size.rand(size.of(2**14, 64), 4096 if size.large else 64) for _ in range(4)]
    return lambda: torch.cat(parts, dim=1)


def _adamw(**options: bool) -> Callable[[Sizes], Call]:
    def make(size: Sizes) -> Call:
        parameters = [torch.nn.Parameter(size.rand(size.of(2**26, 2**14), dtype=torch.float32)) for _ in range(4)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        return torch.optim.AdamW(parameters, **options).step

    return make


NCHW, NHWC = torch.contiguous_format, torch.channels_last

OPS: dict[str, Callable[[Sizes], Call]] = {
    "gemm bf16 8192": _square(8192),
    "gemm fp16 8192": _square(8192, torch.float16),
    "gemm tf32 8192": _tf32,
    "gemm fp32 4096": _square(4096, torch.float32),
    "gemm bf16 odd 8191": _square(8191),
    "gemm bf16 rows of 1": _skinny(1),
    "gemm bf16 rows of 16": _skinny(16),
    "bmm bf16": _batched,
    "linear with bias bf16": _linear,
    "conv 3x3 NCHW": _convolution(3, 256, NCHW),
    "conv 3x3 NHWC": _convolution(3, 256, NHWC),
    "conv 1x1 NHWC": _convolution(1, 64, NHWC),
    "conv depthwise NCHW": _convolution(3, 256, NCHW, depthwise=True),
    "sdpa flash": _attention("FLASH_ATTENTION", 8, 4096),
    "sdpa math": _attention("MATH", 4, 2048),
    "layer_norm bf16": _rows(_layer_norm),
    "batch_norm bf16": _batch_norm,
    "group_norm bf16": _group_norm,
    "softmax bf16": _rows(lambda x: torch.softmax(x, -1)),
    "log_softmax fp32 32000": _rows(lambda x: torch.log_softmax(x, -1), 32000, torch.float32),
    "gelu bf16": _rows(functional.gelu),
    "cos fp32": _rows(torch.cos, dtype=torch.float32),
    "add fp32": _add,
    "cast fp32 to bf16": _rows(lambda x: x.to(torch.bfloat16), dtype=torch.float32),
    "sum of all fp32": _rows(torch.sum, dtype=torch.float32),
    "sum over rows bf16": _rows(lambda x: x.sum(0)),
    "embedding bf16": _embedding,
    "index_select bf16": _gather,
    "transposed copy bf16": _transpose,
    "cat bf16": _concatenate,
    "adamw fused": _adamw(fused=True),
    "adamw foreach": _adamw(foreach=True),
    "adamw for-loop": _adamw(foreach=False),
}
"""Name -> a function that makes the op."""
