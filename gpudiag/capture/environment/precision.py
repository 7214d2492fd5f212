"""Which precision fp32 products and convolutions may have. Two generations of switches in torch; the older refuses to answer where a
program used both.

Since torch 2.9 (torch/backends/__init__.py) each backend and operation has its own `fp32_precision`, and the older getters warn once, or
raise, where the new switches were used. The new ones never do, and tell what the old setters did too. So they are asked first.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from gpudiag.capture.environment.reading import flag, read

_OPERATIONS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"))
"""Pairs for torch._C._get_fp32_precision_getter; operations 'conv' and 'rnn' of backend 'cuda' are cuDNN's (backends/cudnn)."""

_BLOCKED = "0"
"""NVIDIA_TF32_OVERRIDE=0: NVIDIA's libraries never use TF32, whatever the program says (cuBLAS documentation, "TF32")."""


def fp32_precision() -> dict[str, str]:
    """Return 'cuda.matmul', 'cudnn.conv', ... -> 'ieee' | 'tf32' | 'bf16' | 'none'; empty before torch 2.9."""
    import torch

    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is None:
        return {}
    found = {}
    for backend, operation in _OPERATIONS:
        value = read(partial(getter, backend, operation))
        if isinstance(value, str):
            found[f"{'cudnn' if backend == 'cuda' and operation != 'matmul' else backend}.{operation}"] = value
    return found


def precision_settings() -> dict[str, Any]:
    """Return the fields of model.bundle.Settings about fp32 precision.

    The two booleans say what NVIDIA's libraries do: False under NVIDIA_TF32_OVERRIDE=0.
    """
    found = fp32_precision()
    product, convolution, precision = _new(found) if found else _old()
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == _BLOCKED:
        product = convolution = False
    return {
        "float32_matmul_precision": precision,
        "cuda_matmul_allow_tf32": product,
        "cudnn_allow_tf32": convolution,
        "fp32_precision": found,
    }


def _new(found: dict[str, str]) -> tuple[bool | None, bool | None, str]:
    """Return (TF32 in products, TF32 in cuDNN, the older word for both).

    'medium' is bf16 in oneDNN and TF32 in cuBLAS, 'high' TF32 (torch.set_float32_matmul_precision).
    """
    product, host = found.get("cuda.matmul"), found.get("mkldnn.matmul")
    precision = "medium" if host == "bf16" else "high" if "tf32" in (product, host) else "highest"
    convolution = found.get("cudnn.conv")
    return None if product is None else product == "tf32", None if convolution is None else convolution == "tf32", precision


def _old() -> tuple[bool | None, bool | None, str | None]:
    import torch

    return (
        flag(read(lambda: torch._C._get_cublas_allow_tf32())),
        flag(read(lambda: torch._C._get_cudnn_allow_tf32())),
        read(torch.get_float32_matmul_precision),
    )
