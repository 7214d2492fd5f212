"""Where a GPU keeps other tensors than a CPU: attention, dropout, autocast and the way of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FLASH_HEAD_DIM = 256
"""Largest head of the flash kernels (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_head_dim_size_flash)."""

_BOTH_ON_RANK = 4
"""Queries of attention kernels: batch, heads, length, head."""

AUTOCAST_FP32 = (
    "acos", "asin", "binary_cross_entropy_with_logits", "cosh", "cosine_embedding_loss", "cosine_similarity", "cumprod", "cumsum", "dist",
    "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10",
    "log1p", "log2", "log_softmax", "logsumexp", "margin_ranking_loss", "mse_loss", "native_layer_norm", "nll_loss", "nll_loss2d",
    "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax",
    "softplus", "tan", "triplet_margin_loss",
)  # fmt: skip
"""What autocast computes in fp32 on a GPU (aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE)."""


@contextmanager
def cuda_kernels(wanted: bool) -> Iterator[None]:
    """Let attention, dropout and autocast of CPU tensors keep what they would keep on a GPU, while it lasts; for this process."""
    if not wanted:
        yield
        return
    import torch

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        for name in AUTOCAST_FP32:
            _cast(library, name)
        yield
    finally:
        library._destroy()


def use_foreach(optimizer: Any) -> None:
    """Let an optimizer that was not told how work on lists of tensors, as it does by itself on a GPU (torch.optim, foreach=None)."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def _cast(library: Any, name: str) -> None:
    """Let all forms of the op `name` work in fp32 under autocast, but for those where autocast on a CPU has a rule of its own."""
    import torch

    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        full = name if overload == "default" else f"{name}.{overload}"
        of_tensors = str(op._schema.arguments[0].type) == "Tensor" and "out" not in overload  # others are TorchScript's own
        if of_tensors and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{full}", "AutocastCPU"):
            library.impl(full, _in_fp32(op), "AutocastCPU")


def _in_fp32(op: Any) -> Callable[..., Any]:
    import torch
    from torch.utils._pytree import tree_map

    def up(value: Any) -> Any:
        low = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if low else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return op(*tree_map(up, args), **tree_map(up, kwargs))

    return kernel


def _dropout(tensor: Any, p: float, train: bool) -> Any:
    """Return the dropout of the fused kernel, which keeps a mask of one byte an element (aten/src/ATen/native/Dropout.cpp)."""
    import torch

    if train and 0 < p < 1 and tensor.numel():
        return torch.ops.aten.native_dropout(tensor, p, True)[0]
    return torch.ops.aten.dropout.default.decompose(tensor, p, train)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *, scale: Any = None,
    enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Return attention by the kernel that a GPU since Ampere would take: flash, memory-efficient, or plain products.

    The order and the conditions of sdp_utils.cpp, but for its finer ones of alignment. cuDNN's kernel keeps what flash keeps.
    """
    import torch

    ops = torch.ops.aten
    options = {"is_causal": is_causal, "scale": scale}
    if query.dim() == _BOTH_ON_RANK and _flash(query, attn_mask):
        return ops._scaled_dot_product_flash_attention(query, key, value, dropout_p, **options)[0]
    if query.dim() == _BOTH_ON_RANK and not enable_gqa:
        bias = _bias(attn_mask, query, key)
        gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        return ops._scaled_dot_product_efficient_attention(query, key, value, bias, gradients, dropout_p, **options)[0]
    plain = ops.scaled_dot_product_attention.default
    return plain.decompose(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _flash(query: Any, attn_mask: Any) -> bool:
    import torch

    return attn_mask is None and query.dtype in (torch.float16, torch.bfloat16) and query.size(-1) <= FLASH_HEAD_DIM


def _bias(attn_mask: Any, query: Any, key: Any) -> Any:
    """Return the mask as the memory-efficient kernel takes it: numbers instead of truth values, for all heads."""
    import torch

    if attn_mask is None:
        return None
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    return attn_mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
