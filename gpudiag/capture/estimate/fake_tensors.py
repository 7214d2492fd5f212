"""Fake tensors for a whole training, with shapes and storages and no data; and what a GPU keeps otherwise than a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@contextmanager
def use_fake_tensors() -> Iterator[None]:
    """Make every tensor that is made within a fake one on the CPU.

    All is run as on a CPU, so that it needs no GPU and says the same on every machine: torch can have no gradients of tensors on a GPU
    that is not there. Who asks for a GPU gets the same fake tensor.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    enabled = torch._C._get_mkldnn_enabled()
    with FakeTensorMode(allow_non_fake_inputs=True), _patch_module_apply(), _redirect_autocast():
        # recurrent layers run as plain ops: the fake kernel of oneDNN's layer keeps nothing for the backward pass
        torch._C._set_mkldnn_enabled(False)
        try:
            with _make_any_device_mode()():
                yield
        finally:
            torch._C._set_mkldnn_enabled(enabled)


def make_fake(value: Any) -> Any:
    """Return a copy of modules, tensors and whatever holds such, in which all tensors are fake; what is shared stays shared."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.overrides import TorchFunctionMode

    def like(tensor: Any) -> Any:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else made

    class FakeCopies(TorchFunctionMode):  # type: ignore[misc]
        """Copies no data."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch._C.TensorBase.clone:  # how a Parameter is copied
                return like(args[0])
            if func is torch.Tensor.__deepcopy__:
                return args[0] if isinstance(args[0], FakeTensor) else args[1].setdefault(id(args[0]), like(args[0]))
            return func(*args, **(kwargs or {}))

    with FakeCopies():
        return copy.deepcopy(value)


@cache
def _make_any_device_mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    def here(value: Any) -> Any:
        named = isinstance(value, str) and value.partition(":")[0] in ("cuda", "meta")
        return torch.device("cpu") if named or (isinstance(value, torch.device) and value.type != "cpu") else value

    class AnyDevice(TorchFunctionMode):  # type: ignore[misc]
        """Takes the place of a GPU."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.cuda:
                return args[0]
            kwargs = {name: here(value) for name, value in (kwargs or {}).items()}
            return func(*(here(value) for value in args) if func is torch.Tensor.to else args, **kwargs)

    return AnyDevice


@contextmanager
def _redirect_autocast() -> Iterator[None]:
    """Let torch.autocast("cuda") in the user's code be that of the device that there is, with its own default type."""
    import torch

    original = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = init
    try:
        yield
    finally:
        torch.autocast.__init__ = original


@contextmanager
def _patch_module_apply() -> Iterator[None]:
    """Let `module.to(...)` put new fake parameters in the place of the old ones: torch swaps their insides, which fake ones refuse."""
    import torch

    made: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
    """What became of which parameter, so that tied ones stay tied."""

    def replace(function: Any, parameter: Any) -> Any:
        key = (id(function), id(parameter))
        if key not in made:
            with torch.no_grad():
                value = function(parameter)
            new = parameter if value is parameter else torch.nn.Parameter(value, parameter.requires_grad)
            made[key] = (function, parameter, new)  # both are kept: an id is taken again when its owner is gone
        return made[key][2]

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = replace(fn, parameter)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    original = torch.nn.Module._apply
    torch.nn.Module._apply = apply
    try:
        yield
    finally:
        torch.nn.Module._apply = original


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
def use_cuda_kernels(wanted: bool) -> Iterator[None]:
    """Let attention, dropout and autocast of CPU tensors keep what they would keep on a GPU, while it lasts; for this process."""
    if not wanted:
        yield
        return
    import torch

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _run_attention, "AutogradCPU")
        library.impl("dropout", _run_dropout, "AutogradCPU")
        packets = {name: packet for name in AUTOCAST_FP32 if (packet := getattr(torch.ops.aten, name, None)) is not None}
        for name, overload in ((name, overload) for name, packet in packets.items() for overload in packet.overloads()):
            op = getattr(packets[name], overload)
            full = name if overload == "default" else f"{name}.{overload}"
            of_tensors = str(op._schema.arguments[0].type) == "Tensor" and "out" not in overload  # others are TorchScript's own
            # not where autocast on a CPU has a rule of its own
            if of_tensors and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{full}", "AutocastCPU"):
                library.impl(full, _make_fp32_kernel(op), "AutocastCPU")
        yield
    finally:
        library._destroy()


def _make_fp32_kernel(op: Any) -> Callable[..., Any]:
    import torch
    from torch.utils._pytree import tree_map

    def up(value: Any) -> Any:
        low = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if low else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return op(*tree_map(up, args), **tree_map(up, kwargs))

    return kernel


def _run_dropout(tensor: Any, p: float, train: bool) -> Any:
    """Return the dropout of the fused kernel, which keeps a mask of one byte an element (aten/src/ATen/native/Dropout.cpp)."""
    import torch

    if train and 0 < p < 1 and tensor.numel():
        return torch.ops.aten.native_dropout(tensor, p, True)[0]
    return torch.ops.aten.dropout.default.decompose(tensor, p, train)


def _run_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *, scale: Any = None,
    enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Return attention by the kernel that a GPU since Ampere would take: flash, memory-efficient, or plain products.

    The order and the conditions of sdp_utils.cpp, but for its finer ones of alignment. cuDNN's kernel keeps what flash keeps.
    """
    import torch

    ops = torch.ops.aten
    options = {"is_causal": is_causal, "scale": scale}
    of_heads, half = query.dim() == _BOTH_ON_RANK, query.dtype in (torch.float16, torch.bfloat16)
    if of_heads and attn_mask is None and half and query.size(-1) <= FLASH_HEAD_DIM:
        return ops._scaled_dot_product_flash_attention(query, key, value, dropout_p, **options)[0]
    if of_heads and not enable_gqa:
        bias = attn_mask  # as this kernel takes it: numbers instead of truth values, for all heads
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
            bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
        gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        return ops._scaled_dot_product_efficient_attention(query, key, value, bias, gradients, dropout_p, **options)[0]
    plain = ops.scaled_dot_product_attention.default
    return plain.decompose(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
